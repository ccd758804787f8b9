"""Terms of the loss of a label, or of a teacher's likeliest classes in its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fused_ce.losses import Coefficient, Pull, Rows, Term, times


@dataclass(frozen=True)
class CrossEntropy(Term):
    """``-log p_y``; of a label outside the vocabulary ``lse - m``, as Megatron's unfused loss gives."""

    gives = ("at",)

    def value(self, rows: Rows) -> Tensor:
        return rows.loss

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at=upstream)


@dataclass(frozen=True)
class ZLoss(Term):
    """``weight * lse**2``."""

    weight: float
    gives = ("alpha",)

    def value(self, rows: Rows) -> Tensor:
        return self.weight * rows.lse * rows.lse

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=times(2 * self.weight * rows.lse, upstream))


@dataclass(frozen=True)
class Uniform(Term):
    """``lse - mean s``: cross-entropy with all classes alike, of label smoothing."""

    needs = ("logit_sum",)
    keeps = ()
    gives = ("alpha", "delta")

    def value(self, rows: Rows) -> Tensor:
        assert rows.extra.logit_sum is not None
        return rows.lse - rows.extra.logit_sum / rows.num_classes

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=upstream, delta=upstream / rows.num_classes)


@dataclass(frozen=True)
class SoftTargets(Term):
    """``-sum q_k log p_k`` over a teacher's labels, of those in the vocabulary; with ``kl`` ``sum q_k (log
    q_k - log p_k)``."""

    kl: bool = False
    gives = ("at_labels",)

    def value(self, rows: Rows) -> Tensor:
        shares = _known_shares(rows)
        relative = shares.log() - rows.log_probs if self.kl else -rows.log_probs
        return torch.where(shares == 0, 0.0, shares * relative).sum(0)

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at_labels=times(_known_shares(rows), upstream))


def _known_shares(rows: Rows) -> Tensor:
    assert rows.shares is not None
    return rows.shares.masked_fill(~rows.known_labels, 0.0)
