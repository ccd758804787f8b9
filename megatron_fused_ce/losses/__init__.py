"""What a loss is: a sum of terms, each a value and a row gradient from a token's merged statistics.

``s`` are the logits of the loss, ``p = softmax(s)``, ``m`` the row's maximum, ``y`` the label. All terms have
one row gradient, whose coefficients add::

    d / d s_j = at * (p_j - [j = y]) + p_j * (alpha + eps * (s_j - m)) - delta

Cross-entropy is ``at = 1``, z-loss ``alpha = 2 z lse``; label smoothing has a ``delta``, the entropy an
``eps``. The label's own entry is ``at * (p_y - 1)``, from the statistic ``1 - p_y``, which has all its digits
where a token is confident.

:mod:`.label` has the terms of a loss, :mod:`.outputs` what may be asked for beside it; :mod:`.form` puts
those of one call together. Derivations: docs/math.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import NOT_HERE, ExtraStatistics, GradCoefficients, Merged
from megatron_fused_ce.loss import TokenTerms

#: A coefficient: fp32 [C], [] for all tokens, or a number.
Coefficient = Tensor | float


class Rows:
    """Tokens' statistics over the whole vocabulary, fp32 ``[C]``: all of them, or what a backward has."""

    def __init__(self, merged: Merged | None = None, saved: TokenTerms | None = None) -> None:
        """``saved``: of a backward, without ``merged``."""
        self._merged, self._saved = merged, saved

    @cached_property
    def terms(self) -> TokenTerms:
        if self._saved is not None:
            return self._saved
        assert self._merged is not None
        return TokenTerms.of(self._merged.terms)

    @property
    def loss(self) -> Tensor:
        """``-log p_y``, with all its digits."""
        assert self._merged is not None
        return self._merged.loss

    @property
    def extra(self) -> ExtraStatistics:
        assert self._merged is not None
        return self._merged.extra

    @cached_property
    def label_shift(self) -> Tensor:
        """``s_y - m``, NOT_HERE for a label outside the vocabulary."""
        assert self.terms.label_shift is not None
        return self.terms.label_shift

    @cached_property
    def known(self) -> Tensor:
        """bool: the label is in the vocabulary."""
        return self.label_shift != NOT_HERE

    @cached_property
    def log_sum(self) -> Tensor:
        """``lse - m``. For a confident token it is computed from the loss, which has more digits there; for a
        large loss from the sum, which then has more."""
        if self._merged is None:
            return -self.terms.inv_sum.log()
        from_loss = self.loss + torch.where(self.known, self.label_shift, 0.0)
        return torch.where(self.label_shift > -1, from_loss, -self.terms.inv_sum.log())

    @cached_property
    def lse(self) -> Tensor:
        return self.terms.row_max + self.log_sum

    @cached_property
    def p_label(self) -> Tensor:
        """Undefined for a label outside the vocabulary, whose entry nobody writes."""
        return self.label_shift.exp() * self.terms.inv_sum

    @cached_property
    def weighted_label(self) -> Tensor:
        """``p_y * (s_y - m)``, 0 where ``p_y`` is: the limit for a logit of -inf."""
        return torch.where(self.p_label > 0, self.p_label * self.label_shift, 0.0)


class Pull(NamedTuple):
    """Coefficients of a row gradient; None for 0."""

    at: Coefficient | None = None
    alpha: Coefficient | None = None
    eps: Coefficient | None = None
    delta: Tensor | None = None

    def __add__(self, other: Pull) -> Pull:  # type: ignore[override]
        return Pull(*map(_sum, self, other))  # type: ignore[arg-type]  # of tensors a tensor

    def coefficients(self, rows: Rows, factor: Tensor) -> GradCoefficients:
        """For the kernels. ``factor``: fp32 ``[C]``, of all of it."""
        terms = rows.terms
        at, alpha, eps, delta = self
        at_label = times(terms.one_minus_p_label, at)
        if alpha is not None:
            at_label = at_label - rows.p_label * alpha
        entropy_scale = None
        if eps is not None:
            entropy_scale = terms.inv_sum * eps
            at_label = at_label - rows.weighted_label * eps
        if delta is not None:
            at_label = at_label + delta
        scale = times(terms.inv_sum, _sum(at, alpha))
        return GradCoefficients(terms.row_max, scale, at_label, factor, entropy_scale, delta)


def _sum(one: Coefficient | None, other: Coefficient | None) -> Coefficient | None:
    return other if one is None else one if other is None else one + other


def times(one: Tensor, other: Coefficient | None) -> Tensor:
    """Their product, without an operator for 1; None is 0."""
    if isinstance(other, float) and other == 1.0:
        return one
    return one * (0.0 if other is None else other)


class Term:
    """One summand of a loss, or an output beside it."""

    #: Statistics beyond the maximum, the sum and the label's logit: fields of :class:`.ExtraStatistics`.
    needs: tuple[str, ...] = ()

    def value(self, rows: Rows) -> Tensor:
        """``[C]``, fp32 where it can have a gradient."""
        raise NotImplementedError

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        """Its row gradient, linear in ``upstream``; of ``rows`` only what a backward has."""
        raise NotImplementedError

    def bound(self, rows: Rows) -> Tensor | None:
        """By how much its gradient may exceed its upstream one, as a factor ``[C]``; None: by nothing."""
        return None

    def __add__(self, other: Term) -> Term:
        return Sum((*_summands(self), *_summands(other)))

    def __rmul__(self, factor: Tensor) -> Term:
        return Scaled(factor, self)


@dataclass(frozen=True)
class Scaled(Term):
    factor: Tensor  # fp32 [C], or [] for all tokens
    term: Term

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.term.needs

    def value(self, rows: Rows) -> Tensor:
        return self.term.value(rows) * self.factor

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return self.term.pull(rows, times(self.factor, upstream))

    def bound(self, rows: Rows) -> Tensor | None:
        of_term = self.term.bound(rows)
        return None if of_term is None else (of_term * self.factor).abs()


@dataclass(frozen=True)
class Sum(Term):
    terms: tuple[Term, ...]

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for term in self.terms for name in term.needs)

    def value(self, rows: Rows) -> Tensor:
        return reduce(add, [term.value(rows) for term in self.terms])

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return reduce(add, [term.pull(rows, upstream) for term in self.terms])

    def bound(self, rows: Rows) -> Tensor | None:
        given = [bound for term in self.terms if (bound := term.bound(rows)) is not None]
        return reduce(add, given) if given else None


def _summands(term: Term) -> tuple[Term, ...]:
    return term.terms if isinstance(term, Sum) else (term,)
