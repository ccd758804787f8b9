"""The teacher of a call: a second, frozen head, with whose logits the student's are compared."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.config import FP32_LIMIT, FusedCEConfig
from megatron_fused_ce.distillation.rows import Divergence, Teacher, divergence_rows
from megatron_fused_ce.head.call import Call, OtherTargets, in_autocast_dtype
from megatron_fused_ce.head.targets import in_token_order
from megatron_fused_ce.head.validation import DTYPES, check_one_device, check_plain
from megatron_fused_ce.kernels.records import DIVERGENCES
from megatron_fused_ce.logits import LogitsBackend, choose
from megatron_fused_ce.losses.outputs import MADE_ELSEWHERE
from megatron_fused_ce.ranks.collectives import VocabParallel, collective_device, raise_if_any


@dataclass(frozen=True, eq=False)
class Distillation(OtherTargets):
    """The arguments of :func:`.fused_linear_distillation` beside those of every call."""

    hidden: Tensor  # [s, b, H_t] or [T, H_t], without a gradient; this rank's part with sequence_parallel
    weight: Tensor  # [V_t, H_t]
    label_weights: float | Tensor | None  # a tensor is in the labels' shape
    divergence: str
    beta: float
    logit_scale: float
    logit_softcap: float | None
    sequence_parallel: bool
    with_labels: bool

    loss = MADE_ELSEWHERE
    outputs = ("divergence", "teacher_log_prob")
    saves_logits_for = "a divergence"
    per_token = ("label_weights",)

    @property
    def equal_to_loss(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("divergence",) if self.label_weights is None else ()

    @property
    def beyond_scaled_exp(self) -> str:  # type: ignore[override]
        plain = self.logit_scale > 0 and self.logit_softcap is None
        fits = plain and (not self.hidden.is_cuda or self.hidden.dtype == torch.bfloat16)
        return "" if fits else "the teacher's logits"

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "teacher_hidden": self.hidden,
            "teacher_weight": self.weight[:0],
            "label_weights": self.label_weights,
            "divergence": self.divergence,
            "beta": self.beta,
            "teacher_logit_scale": self.logit_scale,
            "teacher_logit_softcap": self.logit_softcap,
            "teacher_sequence_parallel": self.sequence_parallel,
            "labels given": self.with_labels,
        }

    @property
    def kind(self) -> tuple[Any, ...]:
        given = vars(self)
        if isinstance(self.label_weights, float):  # its value may change from step to step
            given = given | {"label_weights": float}
        return (*given.values(), self.weight.data_ptr() % 16)

    def in_plan(self) -> dict[str, int]:
        return {
            "second_hidden_size": self.weight.shape[1],
            "second_itemsize": self.weight.element_size(),
        }

    def in_autocast(self) -> Distillation:
        if not (isinstance(self.hidden, Tensor) and isinstance(self.weight, Tensor)):
            return self
        hidden, weight = in_autocast_dtype(self.hidden, self.weight)
        return replace(self, hidden=hidden, weight=weight)

    def of_head(self) -> Hashable:
        """The teacher's cut of the vocabulary; its tokens may differ from call to call."""
        weight = self.weight
        return (weight.shape, weight.dtype) if isinstance(weight, Tensor) else type(weight)

    def why_not_here(self, config: FusedCEConfig) -> str:
        return choose.why_not_here(config, self.hidden, self.weight)

    def check_shards(self, call: Call, vocab_start: int, comm: VocabParallel, compares: bool) -> None:
        """Check that both shards hold the same classes.

        Every shard but the one with the last real token must have as many rows as the student's, so that the
        next shard begins at the same id.

        Collectives: those of :func:`.raise_if_any`, if the ranks compare.
        """
        num_rows, teacher_rows, most = len(call.weight), len(self.weight), call.config.true_vocab_size
        words, fits = "", teacher_rows == num_rows
        if most is not None and vocab_start + num_rows >= most:
            fits = fits or teacher_rows >= most - vocab_start
        if not fits:
            of_rank = "" if comm.size == 1 else f" of this rank, from id {vocab_start} on,"
            words = (
                f"teacher_weight has {teacher_rows} rows and weight {num_rows}{of_rank} and true_vocab_size "
                f"is {most}; expected one cut of the vocabulary, padded alike but for the last shard, with "
                "true_vocab_size where the padding differs (in Megatron: --make-vocab-size-divisible-by for "
                "both)"
            )
        if compares:
            assert comm.group is not None
            wrong = torch.tensor(bool(words), device=collective_device(comm.group))
            raise_if_any(wrong, words or "the teacher's shard does not fit", comm.group)
        elif words:
            raise ValueError(words)

    def backend(self, call: Call, base: LogitsBackend) -> Divergence:
        t, cap = call.temperature, self.logit_softcap
        assert not isinstance(t, Tensor)
        rows, statistics = divergence_rows(call.hidden.device)
        student = replace(base, outputs=replace(base.outputs, with_rest=True), comm=None)
        of_teacher = replace(student.outputs, softcap=None if cap is None else cap / t)
        return Divergence(
            outputs=base.outputs,
            logit_scale=base.logit_scale,
            comm=base.comm,
            token_ops=base.token_ops,
            saves_logits=base.saves_logits,
            saves_e=call.hidden.dtype != torch.float16,  # its range needs a factor for each row
            student=student,
            teacher=replace(student, outputs=of_teacher, logit_scale=self.logit_scale / t),
            statistics=statistics,
            rows=rows,
            kind=self.divergence,
            beta=self.beta,
            temperature=t,
            with_labels=self.with_labels,
        )

    def in_order(
        self, call: Call, comm: VocabParallel, logits: LogitsBackend, vocab_start: int, remakes: bool
    ) -> Teacher:
        """The teacher in the order of the student's hidden states.

        Collectives: one all-gather of ``[T, H_t]``, if the teacher's tokens are split over the ranks and the
        student's are not.
        """
        labels, weights = call.labels, self.label_weights
        if isinstance(weights, Tensor):
            given, weights = weights, in_token_order(weights.detach().float(), labels, comm.num_parts)
            if remakes and weights.data_ptr() == given.data_ptr():
                weights = weights.clone()  # the caller may refill this buffer before the backward
        elif weights is not None:
            shape = comm.num_parts, labels.numel() // comm.num_parts
            weights = labels.new_full(shape, weights, dtype=torch.float32)
        flat = self.hidden.detach().reshape(-1, self.hidden.shape[-1])
        weight = self.weight.detach()[: call.weight.shape[0]]
        flat, weight = choose.copied(choose.must_copy(logits, flat, weight), flat, weight)
        if self.sequence_parallel and not comm.sequence_parallel and comm.size > 1:
            flat, gathering = comm.gathered(flat)
            gathering.wait()
        elif comm.sequence_parallel and not self.sequence_parallel:
            flat = flat.view(comm.num_parts, -1, flat.shape[-1])
        return Teacher(flat, weight, weights)

    def check(self, call: Call, num_ranks: int) -> None:
        self._check_tensors(call, num_ranks)
        self._check_label_weights(call.labels)
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence is {self.divergence!r}; choose one of {', '.join(DIVERGENCES)}")
        scale, cap = self.logit_scale, self.logit_softcap
        for name, number in (
            ("beta", self.beta),
            ("teacher_logit_scale", scale),
            ("teacher_logit_softcap", 1.0 if cap is None else cap),
        ):
            if not isinstance(number, (int, float)):
                raise TypeError(f"{name} is {number!r:.60}; expected a number")
        if self.divergence == "jsd" and not 0 < self.beta < 1:
            raise ValueError(
                f"beta is {self.beta}; expected between 0 and 1: take forward_kl or reverse_kl for the ends"
            )
        if not 0 < abs(scale) < FP32_LIMIT or (cap is not None and not 0 < cap < FP32_LIMIT):
            raise ValueError(
                f"teacher_logit_scale is {scale} and teacher_logit_softcap {cap}; expected a finite number "
                "that is not 0, and None or a finite number above 0"
            )
        if call.config.loss_terms:
            raise ValueError(
                f"{call.config.loss_terms} of config do not go with a divergence; add them by a call of "
                "fused_linear_cross_entropy"
            )
        if isinstance(call.temperature, Tensor):
            raise ValueError("a teacher takes one temperature for all tokens, a number")

    def _check_tensors(self, call: Call, num_ranks: int) -> None:
        """Check hidden states and weight of the teacher."""
        hidden, weight, grad_mode = self.hidden, self.weight, torch.is_grad_enabled()
        check_plain("teacher_hidden", hidden)
        check_plain("teacher_weight", weight)
        if hidden.dtype not in DTYPES or hidden.dtype != weight.dtype:
            raise TypeError(
                f"teacher_hidden has dtype {hidden.dtype} and teacher_weight {weight.dtype}; expected one of "
                "float32, bfloat16 and float16 for both, which may differ from the student's (a teacher's k "
                "likeliest ids go to fused_linear_topk_distillation)"
            )
        for name, tensor in (("teacher_hidden", hidden), ("teacher_weight", weight)):
            if grad_mode and tensor.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, and the teacher gets none: run it under torch.no_grad(), "
                    f"or pass {name}.detach()"
                )
            if grad_mode and tensor.is_inference():
                raise ValueError(
                    f"{name} was made under torch.inference_mode(), and no backward can save it: run the "
                    "teacher under torch.no_grad()"
                )
        tokens, parts = call.labels.shape[::-1], num_ranks if self.sequence_parallel else 1
        expected = (tokens[0] // parts, *tokens[1:], *weight.shape[-1:])
        if weight.dim() != 2 or not len(weight) or tuple(hidden.shape) != expected or tokens[0] % parts:
            raise ValueError(
                f"teacher_hidden is {tuple(hidden.shape)} and teacher_weight {tuple(weight.shape)}; expected "
                f"{'[s, b, H_t]' if len(tokens) == 2 else '[T, H_t]'} and [V, H_t] of the student's tokens "
                f"{tuple(tokens)}"
                + (f", this rank's part of {parts}" if parts > 1 else "")
                + " (teacher_sequence_parallel says whether the ranks hold their own parts of them)"
            )
        check_one_device(teacher_hidden=hidden, teacher_weight=weight, hidden=call.hidden)

    def _check_label_weights(self, labels: Tensor) -> None:
        """Check the weights of the cross-entropy that is added to the divergence."""
        weights = self.label_weights
        if weights is not None and not self.with_labels:
            raise ValueError("label_weights are given without labels; give both, or neither")
        if not isinstance(weights, Tensor):
            return
        alike = weights.shape == labels.shape and weights.device == labels.device
        if not alike or not weights.is_floating_point():
            raise ValueError(
                f"label_weights are {weights.dtype} {tuple(weights.shape)} on {weights.device}; expected "
                f"a number, or floats in the labels' shape {tuple(labels.shape)} on {labels.device}"
            )
        if weights.requires_grad and torch.is_grad_enabled():
            raise ValueError("label_weights require a gradient, and get none: pass label_weights.detach()")
