"""Several labels a token, or a teacher's likeliest classes: the labels' logits and gradients alone differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig, changed
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import DEFAULT_CONFIG, Call, OtherTargets, takes_config
from megatron_fused_ce.head.results import labels_first
from megatron_fused_ce.head.targets import columns_of
from megatron_fused_ce.logits import LogitsBackend
from megatron_fused_ce.logits.gemm_rows import GemmThenRows
from megatron_fused_ce.logits.label_set import LabelSet, LabelSetRows
from megatron_fused_ce.losses.label import CROSS_ENTROPY, SoftTargets
from megatron_fused_ce.losses.statistics import EMPTY, NO_COLUMN
from megatron_fused_ce.losses.terms import Term
from megatron_fused_ce.ops.arguments import temperature_of
from megatron_fused_ce.ranks.collectives import VocabParallel, raise_if_any

#: Labels of a token, at most: their places are written as int16.
MOST_LABELS = 2**15


@dataclass(frozen=True, eq=False)
class SeveralLabels(OtherTargets):
    """K classes of each token: ``[b, s, K]`` or ``[T, K]``."""

    ids: Tensor  # int64 or int32, global ids; -1 for an empty entry
    #: float, of a teacher, whose likeliest classes they are; None for labels
    log_probs: Tensor | None = None
    #: whether a teacher's entropy is subtracted from the loss
    kl: bool = False

    beyond_scaled_exp = "several labels a token"

    @property
    def loss(self) -> Term:  # type: ignore[override]
        return CROSS_ENTROPY if self.log_probs is None else SoftTargets(self.kl)

    @property
    def num_labels(self) -> int:  # type: ignore[override]
        return self.ids.shape[-1]

    @property
    def arguments(self) -> dict[str, Any]:
        if self.log_probs is None:
            return {"labels": self.ids}
        return {"teacher_ids": self.ids, "teacher_log_probs": self.log_probs, "loss is kl": self.kl}

    @property
    def per_token(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("labels",) if self.log_probs is None else ("teacher_ids", "teacher_log_probs")

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.ids, self.log_probs, self.kl

    def in_plan(self) -> dict[str, int]:
        return {"labels_per_token": self.num_labels}

    def check(self, call: Call, num_ranks: int) -> None:
        ids, log_probs, config = self.ids, self.log_probs, call.config
        if not 1 <= ids.shape[-1] <= MOST_LABELS:
            raise ValueError(f"labels are {tuple(ids.shape)}; expected [.., K] with K of 1 to {MOST_LABELS}")
        if config.skip_masked and call.token_weights is None:
            raise ValueError(
                "skip_masked leaves out tokens by labels; several labels a token have no such label"
            )
        if log_probs is None:
            if config.ignore_index is not None:
                raise ValueError(
                    "ignore_index is for one label a token; here -1 is an empty entry: leave it out"
                )
            return
        if ids.dtype not in (torch.int64, torch.int32) or not log_probs.is_floating_point():
            raise TypeError(
                f"teacher_ids have dtype {ids.dtype} and teacher_log_probs {log_probs.dtype}; expected int64 "
                "(or int32) token ids and floats"
            )
        if ids.shape != log_probs.shape or ids.dim() != call.labels.dim() + 1:
            raise ValueError(
                f"teacher_ids are {tuple(ids.shape)} and teacher_log_probs {tuple(log_probs.shape)}; "
                "expected both [b, s, k] for hidden [s, b, H], or [T, k], with k of 1 or more"
            )
        if not ids.device == log_probs.device == call.weight.device:
            raise ValueError(
                f"weight on {call.weight.device}, teacher_ids on {ids.device}, teacher_log_probs on "
                f"{log_probs.device}; expected all on one device"
            )
        if config.label_smoothing or config.ignore_index is not None:
            raise ValueError(
                "label_smoothing and ignore_index belong to labels; with a teacher smooth its probabilities, "
                "and give ignored tokens the id -1 throughout"
            )

    def backend(self, call: Call, base: LogitsBackend) -> LogitsBackend:
        assert isinstance(base, GemmThenRows)
        return LabelSetRows(**vars(base))

    def in_order(self, call: Call, comm: VocabParallel, vocab_start: int, remakes: bool) -> LabelSet:
        """Collectives: those of :func:`.raise_if_any`, of a teacher with ``config.debug_checks``."""
        ids, log_probs, config = self.ids, self.log_probs, call.config
        if config.debug_checks and log_probs is not None:
            wrong = ((ids >= 0) & (log_probs > 0)).any()
            words = "teacher_log_probs are above 0: expected logarithms of probabilities"
            raise_if_any(wrong, words, comm.group)
        ids = labels_first(ids.to(torch.int64), comm.num_parts)
        columns = columns_of(ids, comm, vocab_start, config)
        here = (columns >= 0) & (columns < call.weight.shape[0])
        columns = torch.where(here, columns, NO_COLUMN).masked_fill_(ids == EMPTY, EMPTY).to(torch.int32)
        if log_probs is None:
            return LabelSet(columns, None)
        shares = labels_first(log_probs.detach().float().exp(), comm.num_parts)
        return LabelSet(columns, shares.masked_fill(ids == EMPTY, 0.0))


def has_several_labels(hidden: object, labels: object) -> bool:
    return isinstance(hidden, Tensor) and isinstance(labels, Tensor) and labels.dim() == hidden.dim()


def with_several_labels(call: Call) -> Call:
    """``call``, whose labels are ``[b, s, K]`` or ``[T, K]``; logits in fp32 unless the user wants them
    rounded."""
    ids = call.labels
    return call._replace(
        labels=ids.new_full(ids.shape[:-1], EMPTY),
        other_targets=SeveralLabels(ids),
        config=_in_fp32(call.config),
    )


def _in_fp32(config: FusedCEConfig) -> FusedCEConfig:
    is_named = not isinstance(config, FusedCEConfig) or config.logit_precision != "auto"
    return config if is_named else changed(config, logit_precision="fp32")


@takes_config
def fused_linear_topk_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    loss: str = "cross_entropy",
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """Per-token cross entropy ``-sum q log p`` against a teacher's ``k`` likeliest classes, or their KL.

    ``q = exp(teacher_log_probs)`` as given, ``p`` the student's probabilities over the whole vocabulary, at
    ``temperature``.
    Entries with one id add up. The mass missing from ``q`` (``1 - sum q``, and entries of ids outside the
    vocabulary) is ignored: the loss is ``(sum q) * lse - sum q s``, 0 for a token without any entry. For the
    mean over the teacher's own top k hand in log-probabilities that sum up to 1.

    Args:
        teacher_ids: ``[b, s, k]`` (for ``hidden`` of three dimensions) or ``[T, k]``, int64 or int32, global
            ids, the same on every rank. ``-1`` marks an empty entry.
        teacher_log_probs: the same shape, float; no gradient flows into it.
        loss: ``cross_entropy``, or ``kl``: ``sum q (log q - log p)`` entry by entry, which has the same
            gradient. It is no divergence where ``sum q`` is below 1, and can be negative (verl clamps it at
            0).
        temperature: the student's; ``teacher_log_probs`` are those of the teacher's own. As for
            :func:`.rl.token_log_probs`; no factor ``temperature**2``.
        config: as for :func:`fused_linear_cross_entropy`; label smoothing and ``ignore_index`` do not apply
            and are refused.

    The other arguments, errors and collectives: as there; the merge has two floats a token more.

    Returns:
        fp32 loss ``[b, s]`` or ``[T]``; differentiable in ``hidden`` and ``weight``.

    Source: d loss / d s_j = (sum q) p_j - q_j; docs/math.md.
    """
    wrong: Exception | None = None
    labels = teacher_ids  # for the error alone
    if isinstance(teacher_ids, Tensor) and isinstance(teacher_log_probs, Tensor):
        if isinstance(hidden, Tensor) and teacher_ids.dim() != hidden.dim():
            wrong = ValueError(
                f"teacher_ids are {tuple(teacher_ids.shape)} for hidden {tuple(hidden.shape)}; expected "
                "[b, s, k] for hidden [s, b, H], or [T, k] for [T, H]"
            )
        labels = teacher_ids.new_full(teacher_ids.shape[:-1], -1, dtype=torch.int64)  # none
        temperature = temperature_of(temperature, labels.shape)
    else:
        kinds = type(teacher_ids).__name__, type(teacher_log_probs).__name__
        wrong = TypeError(f"teacher_ids and teacher_log_probs must be tensors, got {' and '.join(kinds)}")
    if loss not in ("cross_entropy", "kl"):
        wrong = ValueError(f"loss is {loss!r}; choose cross_entropy or kl")
    head = linear_cross_entropy(
        Call(
            hidden,
            weight,
            labels,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            token_weights=token_weights,
            vocab_start=vocab_start,
            config=DEFAULT_CONFIG if config is None else config,
            temperature=temperature,
            other_targets=SeveralLabels(teacher_ids, teacher_log_probs, kl=loss == "kl"),
            caller_error=wrong,
        )
    )
    return head.outputs["loss"]
