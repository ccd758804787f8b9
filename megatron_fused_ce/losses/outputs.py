"""What may be asked for of each token beside its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fused_ce.losses.terms import Coefficient, Pull, Rows, Term


@dataclass(frozen=True)
class LogProb(Term):
    """``log p_y``; of a label outside the vocabulary ``m - lse``, or 0 with the same gradient."""

    zero_unknown: bool = False
    gives = ("at",)

    def value(self, rows: Rows) -> Tensor:
        log_prob = -rows.loss
        return torch.where(rows.known, log_prob, 0.0) if self.zero_unknown else log_prob

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at=-upstream)


@dataclass(frozen=True)
class LogProbs(Term):
    """``log p`` of each of several labels, as :class:`LogProb` of one; -inf of an empty entry."""

    zero_unknown: bool = False
    gives = ("at_labels",)
    per_label = True

    def value(self, rows: Rows) -> Tensor:
        return torch.where(rows.known_labels, rows.log_probs, 0.0) if self.zero_unknown else rows.log_probs

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at_labels=torch.zeros_like(rows.log_probs) - upstream)


@dataclass(frozen=True)
class Lse(Term):
    """``log sum exp s``."""

    gives = ("alpha",)
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        return rows.lse

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=upstream)


@dataclass(frozen=True)
class Entropy(Term):
    """``-sum p log p``."""

    needs = ("weighted",)
    gives = ("alpha", "eps")
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        return rows.log_sum - rows.mean_shift

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=rows.mean_shift * upstream, eps=-upstream)


@dataclass(frozen=True)
class Predicted(Term):
    """The class with the largest logit, the lowest on a tie; -1 with NaN. int64, without a gradient."""

    needs = ("best",)
    gives = ()
    dtype = torch.int64
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        best = rows.extra.best
        assert best is not None
        # On a GPU a row's maximum drops a NaN; its loss keeps it.
        found = torch.isfinite(best) & (rows.loss == rows.loss)
        return torch.where(found, best, -1.0).long()


@dataclass(frozen=True)
class Correct(Term):
    """bool: no logit is larger than the label's. Without a gradient."""

    gives = ()
    dtype = torch.bool
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        return (rows.label_shift == 0) & (rows.loss == rows.loss)


OUTPUTS: dict[str, Term] = {
    "log_prob": LogProb(),
    "lse": Lse(),
    "entropy": Entropy(),
    "predicted": Predicted(),
    "correct": Correct(),
}


def differentiable_of(outputs: Sequence[str]) -> tuple[str, ...]:
    """The names among ``outputs`` that can carry a gradient."""
    return tuple(name for name in outputs if name in OUTPUTS and OUTPUTS[name].gives)
