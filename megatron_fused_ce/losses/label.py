"""Terms of the loss of a label, or of a teacher's likeliest classes in its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.losses.terms import Coefficient, Pull, Rows, Term, times


@dataclass(frozen=True)
class CrossEntropy(Term):
    """``-log p_y``; of a label outside the vocabulary ``lse - m``, as Megatron's unfused loss gives."""

    gives = ("at",)
    bound = 1.0

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
    bound = 1.0

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
    bound = 1.0  # times the sum of q: LabelSetRows.bound_ahead

    def value(self, rows: Rows) -> Tensor:
        shares = _known_shares(rows)
        relative = shares.log() - rows.log_probs if self.kl else -rows.log_probs
        return torch.where(shares == 0, 0.0, shares * relative).sum(0)

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at_labels=times(_known_shares(rows), upstream))


def _known_shares(rows: Rows) -> Tensor:
    assert rows.shares is not None
    return rows.shares.masked_fill(~rows.known_labels, 0.0)


CROSS_ENTROPY, UNIFORM = CrossEntropy(), Uniform()


@dataclass(frozen=True)
class LabelSmoothing(Term):
    """Cross-entropy with a share of all classes alike; ``of_others``: of those that are not the label, as
    Megatron has it."""

    share: float
    of_others: bool
    needs = ("logit_sum",)
    keeps = ()
    gives = ("at", "alpha", "delta")
    bound = 1.0

    def value(self, rows: Rows) -> Tensor:
        share = self._of_all(rows.num_classes)
        return (1 - share) * rows.loss + share * UNIFORM.value(rows)

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        share = self._of_all(rows.num_classes)
        return Pull(at=(1 - share) * upstream) + UNIFORM.pull(rows, share * upstream)

    def _of_all(self, num_classes: int) -> float:
        """The share of all classes, the label's own with them; of a single class the loss is 0."""
        return self.share * (num_classes / max(num_classes - 1, 1) if self.of_others else 1)


def loss_of(config: FusedCEConfig, loss: Term = CROSS_ENTROPY) -> Term:
    """The loss that ``config`` describes, with ``loss`` in the place of cross-entropy."""
    if config.label_smoothing:
        loss = LabelSmoothing(config.label_smoothing, config.label_smoothing_form == "megatron")
    return loss + ZLoss(config.z_loss) if config.z_loss else loss
