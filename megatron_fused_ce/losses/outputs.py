"""What may be asked for of each token beside its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fused_ce.losses import Coefficient, Pull, Rows, Term, times


@dataclass(frozen=True)
class LogProb(Term):
    """``log p_y``; of a label outside the vocabulary ``m - lse``, or 0 with the same gradient."""

    zero_unknown: bool = False

    def value(self, rows: Rows) -> Tensor:
        log_prob = -rows.loss
        return torch.where(rows.known, log_prob, 0.0) if self.zero_unknown else log_prob

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at=-upstream)


@dataclass(frozen=True)
class Lse(Term):
    """``log sum exp s``."""

    def value(self, rows: Rows) -> Tensor:
        return rows.lse

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=upstream)


@dataclass(frozen=True)
class Entropy(Term):
    """``-sum p log p``."""

    needs = ("weighted",)

    def value(self, rows: Rows) -> Tensor:
        assert rows.extra.weighted is not None
        own = rows.label_shift.exp() * rows.label_shift
        own = torch.where(rows.known & (own < 0), own, 0.0)  # the limit of exp(t) * t for t -> -inf is 0
        return rows.log_sum - (rows.extra.weighted + own) * rows.terms.inv_sum

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        assert rows.terms.entropy is not None
        log_p_max = rows.terms.inv_sum.log()
        return Pull(alpha=-times(log_p_max + rows.terms.entropy, upstream), eps=-upstream)


@dataclass(frozen=True)
class Predicted(Term):
    """The class with the largest logit, the lowest on a tie; -1 with NaN. int64, without a gradient."""

    needs = ("best",)

    def value(self, rows: Rows) -> Tensor:
        best = rows.extra.best
        assert best is not None
        # On a GPU a row's maximum drops a NaN; its loss keeps it.
        found = torch.isfinite(best) & (rows.loss == rows.loss)
        return torch.where(found, best, -1.0).long()


@dataclass(frozen=True)
class Correct(Term):
    """bool: no logit is larger than the label's. Without a gradient."""

    def value(self, rows: Rows) -> Tensor:
        return (rows.label_shift == 0) & (rows.loss == rows.loss)


@dataclass(frozen=True)
class SumSquares(Term):
    """``sum p**2``, without a gradient: it is not of the form that :mod:`.losses` has."""

    needs = ("squares",)

    def value(self, rows: Rows) -> Tensor:
        assert rows.extra.squares is not None
        own = torch.where(rows.known, rows.label_shift.exp(), 0.0)
        return (rows.extra.squares + own.square()) * rows.terms.inv_sum.square()


#: Outputs that may carry a gradient.
DIFFERENTIABLE = ("log_prob", "lse", "entropy")
OUTPUTS: dict[str, Term] = {
    "log_prob": LogProb(),
    "lse": Lse(),
    "entropy": Entropy(),
    "predicted": Predicted(),
    "correct": Correct(),
    "sum_p_squared": SumSquares(),
}


def differentiable_of(outputs: Sequence[str]) -> tuple[str, ...]:
    """The names among ``outputs`` that can carry a gradient."""
    return tuple(name for name in outputs if name in DIFFERENTIABLE)
