"""Several labels a token, or a teacher's likeliest classes: the labels' logits and gradients alone differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head.call import Call, OtherTargets
from megatron_fused_ce.head.results import labels_first
from megatron_fused_ce.head.spec import Spec
from megatron_fused_ce.head.targets import columns_of
from megatron_fused_ce.logits import LogitsBackend
from megatron_fused_ce.logits.gemm_rows import GemmThenRows
from megatron_fused_ce.logits.label_set import LabelSet, LabelSetRows
from megatron_fused_ce.losses.label import CROSS_ENTROPY, SoftTargets
from megatron_fused_ce.losses.statistics import EMPTY, NO_COLUMN
from megatron_fused_ce.losses.terms import Term
from megatron_fused_ce.ranks.collectives import raise_if_any

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

    def in_order(self, labels: Tensor, num_rows: int, config: FusedCEConfig, spec: Spec) -> LabelSet:
        """Collectives: those of :func:`.parallel.raise_if_any`, of a teacher with ``config.debug_checks``."""
        ids, log_probs, comm = self.ids, self.log_probs, spec.comm
        if config.debug_checks and log_probs is not None:
            wrong = ((ids >= 0) & (log_probs > 0)).any()
            words = "teacher_log_probs are above 0: expected logarithms of probabilities"
            raise_if_any(wrong, words, comm.group)
        ids = labels_first(ids.to(torch.int64), comm.num_parts)
        columns = columns_of(ids, spec, config)
        here = (columns >= 0) & (columns < num_rows)
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


@lru_cache(maxsize=64)
def _in_fp32(config: FusedCEConfig) -> FusedCEConfig:
    is_named = not isinstance(config, FusedCEConfig) or config.logit_precision != "auto"
    return config if is_named else replace(config, logit_precision="fp32")
