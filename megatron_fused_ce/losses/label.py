"""Terms of the loss of a label, or of a teacher's likeliest classes in its place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_fused_ce.losses import Coefficient, Pull, Rows, Term, times


@dataclass(frozen=True)
class CrossEntropy(Term):
    """``-log p_y``; of a label outside the vocabulary ``lse - m``, as Megatron's unfused loss gives."""

    def value(self, rows: Rows) -> Tensor:
        return rows.loss

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at=upstream)


@dataclass(frozen=True)
class ZLoss(Term):
    """``weight * lse**2``."""

    weight: float

    def value(self, rows: Rows) -> Tensor:
        return self.weight * rows.lse * rows.lse

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=times(2 * self.weight * rows.lse, upstream))

    def bound(self, rows: Rows) -> Tensor:
        return (2 * self.weight * rows.lse).abs()


@dataclass(frozen=True)
class Uniform(Term):
    """``weight * (lse - mean s)``: cross-entropy with all classes alike, of label smoothing. fp32 [] each."""

    weight: Tensor
    num_classes: Tensor
    weight_per_class: Tensor
    needs = ("logit_sum",)

    @staticmethod
    def of(weight: Tensor, num_classes: Tensor) -> Uniform:
        return Uniform(weight, num_classes, weight / num_classes)

    def value(self, rows: Rows) -> Tensor:
        assert rows.extra.logit_sum is not None
        return self.weight * (rows.lse - rows.extra.logit_sum / self.num_classes)

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=times(self.weight, upstream), delta=times(self.weight_per_class, upstream))


@dataclass(frozen=True)
class SoftTargets(Term):
    """``sum q_i (lse - s_i)`` over given classes; the row kernels take ``q`` out of the gradient."""

    def value(self, rows: Rows) -> Tensor:
        mass, target_sum = rows.extra.target_mass, rows.extra.target_sum
        assert mass is not None and target_sum is not None
        return mass * rows.log_sum - target_sum

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        assert rows.terms.mass is not None
        return Pull(at=times(rows.terms.mass, upstream))
