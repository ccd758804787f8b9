"""K labels per token, and distillation from a teacher's K likeliest classes, which are such labels."""

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
from megatron_fused_ce.head.validation import check_one_device
from megatron_fused_ce.logits import LogitsBackend
from megatron_fused_ce.logits.gemm_rows import GemmThenRows
from megatron_fused_ce.logits.label_set import LabelSet, LabelSetRows
from megatron_fused_ce.losses.label import CROSS_ENTROPY, SoftTargets
from megatron_fused_ce.losses.statistics import EMPTY, NO_COLUMN
from megatron_fused_ce.losses.terms import Term
from megatron_fused_ce.ops.arguments import sequence_first, temperature_of
from megatron_fused_ce.ranks.collectives import VocabParallel, raise_if_any

#: Largest K: indices among a token's labels are stored as int16.
MOST_LABELS = 2**15


@dataclass(frozen=True, eq=False)
class SeveralLabels(OtherTargets):
    """K labels per token, or a teacher's K likeliest classes: tensors ``[b, s, K]`` or ``[T, K]``."""

    ids: Tensor  # int64 or int32, global ids; -1 for an empty entry
    #: float, log-probabilities of a teacher; None for labels
    log_probs: Tensor | None = None
    #: whether the entropy of the teacher is subtracted from the loss
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
            if config.ignored_label is not None:
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
        check_one_device(weight=call.weight, teacher_ids=ids, teacher_log_probs=log_probs)
        if config.label_smoothing or config.ignored_label is not None:
            raise ValueError(
                "label_smoothing and ignore_index belong to labels; with a teacher smooth its probabilities, "
                "and give ignored tokens the id -1 throughout"
            )

    def backend(self, call: Call, base: LogitsBackend) -> LogitsBackend:
        assert isinstance(base, GemmThenRows)
        return LabelSetRows(**vars(base))

    def in_order(
        self, call: Call, comm: VocabParallel, logits: LogitsBackend, vocab_start: int, remakes: bool
    ) -> LabelSet:
        """The labels as columns of this shard, in the order of the hidden states.

        Collectives: for a teacher with ``config.debug_checks`` those of :func:`.raise_if_any`.
        """
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
    """Whether ``labels`` have a dimension for K labels per token."""
    return isinstance(hidden, Tensor) and isinstance(labels, Tensor) and labels.dim() == hidden.dim()


def with_several_labels(call: Call) -> Call:
    """A call whose labels are ``[b, s, K]`` or ``[T, K]``, in the form that the head takes.

    Its logits are fp32, unless the user chose their precision.
    """
    ids, config = call.labels, call.config
    if isinstance(config, FusedCEConfig) and config.logit_precision == "auto":
        config = changed(config, logit_precision="fp32")
    no_labels = ids.new_full(ids.shape[:-1], EMPTY)
    return call._replace(labels=no_labels, other_targets=SeveralLabels(ids), config=config)


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
    batch_first: bool = False,
    token_weights: Tensor | None = None,
    vocab_start: int | None = None,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """Per-token cross-entropy ``-sum q log p`` against a teacher's ``k`` likeliest classes, or their KL.

    ``q = exp(teacher_log_probs)`` as given; ``p`` are the student's probabilities over the whole vocabulary,
    at ``temperature``. Entries with one id add up. Mass missing from ``q`` (``1 - sum q``, and entries with
    ids outside the vocabulary) is ignored: the loss is ``(sum q) * lse - sum q s``, and 0 for a token without
    entries. For the mean over the teacher's own top k give log-probabilities whose exponentials sum to 1.

    Args:
        teacher_ids: ``[b, s, k]`` (for ``hidden`` of three dimensions) or ``[T, k]``, int64 or int32, global
            ids, the same on every rank. ``-1`` marks an empty entry.
        teacher_log_probs: the same shape, float; no gradient flows into it.
        loss: ``cross_entropy``, or ``kl``: ``sum q (log q - log p)`` entry by entry, which has the same
            gradient. If ``sum q`` is below 1 it is no divergence, and can be negative (verl clamps it at 0).
        temperature: the student's, as for :func:`.rl.token_log_probs`; the teacher's log-probabilities are
            taken as they are. There is no factor ``temperature**2``.
        config: as for :func:`fused_linear_cross_entropy`; refuses label smoothing and ``ignore_index``.

    The other arguments, errors and collectives are those of :func:`fused_linear_cross_entropy`; the merge has
    two floats a token more.

    Returns:
        fp32 loss ``[b, s]`` or ``[T]``; differentiable in ``hidden`` and ``weight``.

    Source: d loss / d s_j = (sum q) p_j - q_j; docs/math.md.
    """
    wrong: Exception | None = None
    labels = teacher_ids  # replaced below, unless an error is raised
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
    call = Call(
        sequence_first(hidden, batch_first), weight, labels, tp_group, sequence_parallel, token_weights,
        vocab_start, DEFAULT_CONFIG if config is None else config, temperature=temperature,
        other_targets=SeveralLabels(teacher_ids, teacher_log_probs, kl=loss == "kl"), caller_error=wrong,
    )  # fmt: skip
    return linear_cross_entropy(call).loss
