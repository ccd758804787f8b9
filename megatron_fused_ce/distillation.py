"""A call's teacher: a second, frozen head whose logits the student's are compared with, chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.config import FP32_LIMIT, FusedCEConfig
from megatron_fused_ce.kernels.records import DIVERGENCES
from megatron_fused_ce.masked_tokens import Kept
from megatron_fused_ce.parallel import VocabParallel
from megatron_fused_ce.validation import DTYPES


class Distillation(NamedTuple):
    """The arguments of :func:`.op.fused_linear_distillation` beside those of every call."""

    hidden: Tensor  # [s, b, H_t] or [T, H_t], without a gradient; this rank's part with sequence_parallel
    weight: Tensor  # [V_t, H_t]
    label_weights: float | Tensor | None  # a tensor is in the labels' shape
    divergence: str
    beta: float
    logit_scale: float
    logit_softcap: float | None
    sequence_parallel: bool
    with_labels: bool


class Teacher(NamedTuple):
    """The teacher in the order of the student's tokens."""

    #: [n, H_t]: of this rank's part, gathered chunk by chunk; or [parts, n, H_t]: of all tokens
    hidden: Tensor
    weight: Tensor  # [V', H_t]
    label_weights: Tensor | None  # [parts, n] fp32
    sample: Tensor | None = None  # [S, H_t]: see LogitsBackend.sample_rows

    @staticmethod
    def of(given: Distillation, num_rows: int, label_weights: Tensor | None, comm: VocabParallel) -> Teacher:
        """A call's, with ``label_weights`` ``[parts, n]``. ``num_rows``: of the student's weight.

        Collectives: one all-gather of ``[T, H_t]``, where the teacher's tokens are split over the ranks and
        the student's are not.
        """
        flat = given.hidden.detach().reshape(-1, given.hidden.shape[-1])
        if flat.is_cuda and (flat.stride(-1) != 1 or flat.stride(0) % 8 or flat.data_ptr() % 16):
            flat = flat.clone(memory_format=torch.contiguous_format)  # which TMA can load
        if given.sequence_parallel and not comm.sequence_parallel and comm.size > 1:
            flat, gathering = comm.gathered(flat)
            gathering.wait()
        elif comm.sequence_parallel and not given.sequence_parallel:
            flat = flat.view(comm.num_parts, -1, flat.shape[-1])
        return Teacher(flat, given.weight.detach()[:num_rows], label_weights)

    def kept(self, kept: Kept, part: int) -> Teacher:
        """That of the tokens to work on."""
        hidden, weights = self.hidden, self.label_weights
        if hidden.dim() == 2:
            hidden = kept.take(hidden, part)
        else:
            hidden = torch.stack([kept.take(of_part, at) for at, of_part in enumerate(hidden)])
        return self._replace(
            hidden=hidden, label_weights=None if weights is None else kept.of_tokens(weights)
        )


def check(
    given: Distillation,
    hidden: Tensor,
    labels: Tensor,
    config: FusedCEConfig,
    num_ranks: int,
) -> None:
    """Check the teacher beside a student's call that is checked.

    Raises:
        TypeError: an argument is not a tensor, or a dtype does not fit.
        ValueError: a shape, a device, a number or an option does not fit.
    """
    for name, tensor in (("teacher_hidden", given.hidden), ("teacher_weight", given.weight)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or hasattr(tensor, "placements"):
            kind = f"{tensor.dtype} tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"{name} is a {kind}; expected this rank's plain tensor of float32, bfloat16 or float16 (a "
                "teacher's k likeliest ids go to fused_linear_topk_distillation)"
            )
    if given.hidden.dtype != given.weight.dtype:
        raise TypeError(
            f"teacher_hidden has dtype {given.hidden.dtype} and teacher_weight {given.weight.dtype}; "
            "expected one dtype, which may differ from the student's"
        )
    if given.weight.dim() != 2 or given.hidden.dim() != hidden.dim() or not given.weight.shape[0]:
        raise ValueError(
            f"teacher_hidden is {tuple(given.hidden.shape)} and teacher_weight {tuple(given.weight.shape)}; "
            f"expected {'[s, b, H_t]' if hidden.dim() == 3 else '[T, H_t]'} and [V, H_t]"
        )
    tokens = (*reversed(labels.shape),)
    parts = num_ranks if given.sequence_parallel else 1
    expected = (tokens[0] // parts, *tokens[1:], given.weight.shape[1])
    if tuple(given.hidden.shape) != expected or tokens[0] % parts:
        raise ValueError(
            f"teacher_hidden is {tuple(given.hidden.shape)}; expected {expected}, the student's tokens"
            + (f", this rank's part of {parts}" if parts > 1 else "")
            + " (teacher_sequence_parallel says whether the ranks hold their own parts of them)"
        )
    if not given.hidden.device == given.weight.device == hidden.device:
        raise ValueError(
            f"teacher_hidden on {given.hidden.device}, teacher_weight on {given.weight.device}, hidden on "
            f"{hidden.device}; expected all on one device"
        )
    for name, of_teacher in (("teacher_hidden", given.hidden), ("teacher_weight", given.weight)):
        if torch.is_grad_enabled() and of_teacher.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and the teacher gets none: run it under torch.no_grad(), or "
                f"pass {name}.detach()"
            )
    if torch.is_grad_enabled() and (given.hidden.is_inference() or given.weight.is_inference()):
        raise ValueError(
            "the teacher's tensors were made under torch.inference_mode(), and no backward can save them: "
            "run it under torch.no_grad()"
        )
    if given.divergence not in DIVERGENCES:
        raise ValueError(f"divergence is {given.divergence!r}; choose one of {', '.join(DIVERGENCES)}")
    for name, number in (
        ("beta", given.beta),
        ("teacher_logit_scale", given.logit_scale),
        ("teacher_logit_softcap", 1.0 if given.logit_softcap is None else given.logit_softcap),
    ):
        if not isinstance(number, (int, float)):
            raise TypeError(f"{name} is {number!r:.60}; expected a number")
    if given.divergence == "jsd" and not 0 < given.beta < 1:
        raise ValueError(
            f"beta is {given.beta}; expected between 0 and 1: take forward_kl or reverse_kl for the ends"
        )
    cap = given.logit_softcap
    if not 0 < abs(given.logit_scale) < FP32_LIMIT or (cap is not None and not 0 < cap < FP32_LIMIT):
        raise ValueError(
            f"teacher_logit_scale is {given.logit_scale} and teacher_logit_softcap {cap}; expected a finite "
            "number that is not 0, and None or a finite number above 0"
        )
    weights = given.label_weights
    if weights is not None and not given.with_labels:
        raise ValueError("label_weights are given without labels; give both, or neither")
    if isinstance(weights, Tensor):
        alike = weights.shape == labels.shape and weights.device == labels.device
        if not alike or not weights.is_floating_point():
            raise ValueError(
                f"label_weights are {weights.dtype} {tuple(weights.shape)} on {weights.device}; expected a "
                f"number, or floats in the labels' shape {tuple(labels.shape)} on {labels.device}"
            )
        if weights.requires_grad and torch.is_grad_enabled():
            raise ValueError("label_weights require a gradient, and get none: pass label_weights.detach()")
    if config.label_smoothing or config.z_loss:
        raise ValueError(
            "label_smoothing and z_loss do not go with a divergence; add them by a call of "
            "fused_linear_cross_entropy"
        )


def why_not_one_cut(
    num_rows: int, teacher_rows: int, start: int, true_vocab_size: int | None, num_ranks: int
) -> str:
    """Why these shards of student and teacher do not hold the same classes, or an empty string.

    Before the shard with the last real token all must have as many rows: the next one begins alike then.
    """
    last = true_vocab_size is not None and start + num_rows >= true_vocab_size
    real = num_rows if true_vocab_size is None else min(max(true_vocab_size - start, 0), num_rows)
    if teacher_rows == num_rows or (last and teacher_rows >= real):
        return ""
    of_rank = "" if num_ranks == 1 else f" of this rank, from id {start} on,"
    return (
        f"teacher_weight has {teacher_rows} rows and weight {num_rows}{of_rank} and true_vocab_size is "
        f"{true_vocab_size}; expected one cut of the vocabulary, padded alike but for the last shard, with "
        "true_vocab_size where the padding differs (in Megatron: --make-vocab-size-divisible-by for both)"
    )
