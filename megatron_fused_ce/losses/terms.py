"""What a loss is: a sum of terms, each a value and a row gradient from a token's merged statistics.

``s`` are the logits of the loss, ``p = softmax(s)``, ``m`` the row's maximum, ``y`` the label. All terms have
one row gradient, whose coefficients add::

    d / d s_j = at * (p_j - [j = y]) + p_j * (alpha + eps * (s_j - m)) - delta
                + sum over labels k of at_labels_k * (p_j - [j = y_k])              of several labels a token

Cross-entropy is ``at = 1``, z-loss ``alpha = 2 z lse``; label smoothing has a ``delta``, the entropy an
``eps``. The label's own entry is ``at * (p_y - 1)``, from the statistic ``1 - p_y``, which has all its digits
where a token is confident.

:mod:`.label` has the terms of a loss, :mod:`.outputs` what may be asked for beside it and all terms of one
call; :mod:`.check` compares a term with autograd. Derivations: docs/math.md. Terms of your own:
docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, reduce
from operator import add
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from megatron_fused_ce.kernels.records import (
    NOT_HERE,
    ExtraStatistics,
    GradCoefficients,
    Merged,
    RowStatistics,
)
from megatron_fused_ce.losses.statistics import TokenStats
from megatron_fused_ce.losses.words import in_words, parts_of

#: Statistics that a term may ask for: fields of :class:`.ExtraStatistics`.
NEEDS = ("logit_sum", "weighted", "best")
#: Where the module names of the package's own terms begin.
OF_PACKAGE = "megatron_fused_ce."

#: A coefficient: fp32 [C], or a number for all tokens.
Coefficient = Tensor | float


class Rows:
    """Tokens' statistics over the whole vocabulary, fp32 ``[C]``; of a forward, or of a backward."""

    def __init__(
        self,
        merged: Merged | None = None,
        saved: TokenStats | None = None,
        num_classes: int = 0,
        shares: Tensor | None = None,
        shard: RowStatistics | None = None,
    ) -> None:
        """One of ``merged``, of a forward, and ``saved``, of a backward."""
        self._merged, self._saved = merged, saved
        #: of this rank's vocabulary rows, in a forward
        self.shard = shard
        #: classes of the whole vocabulary, without masked padding
        self.num_classes = num_classes
        #: a teacher's probabilities of its labels, fp32 [K, C]
        self.shares = shares

    @cached_property
    def stats(self) -> TokenStats:
        if self._saved is not None:
            return self._saved
        assert self._merged is not None
        return TokenStats.of(self._merged.stats)

    @cached_property
    def loss(self) -> Tensor:
        """``-log p_y``, with all its digits; ``lse - m`` of a label outside the vocabulary. Of several labels
        the first one's, as all that is of one label."""
        return self._loss_of_left_out if self._shifts is None else -self.log_probs[0]

    @property
    def _loss_of_left_out(self) -> Tensor:
        if self._merged is not None:
            return self._merged.loss
        of_label = torch.where(self.left_out != NOT_HERE, self.left_out, 0.0)
        near = -torch.log1p(-self.stats.one_minus_p_label)
        return torch.where(self.stats.one_minus_p_label < 0.5, near, self._log_of_sum - of_label)

    @cached_property
    def _log_of_sum(self) -> Tensor:
        return -self.stats.inv_sum.log()

    @property
    def extra(self) -> ExtraStatistics:
        """Those that a term ``needs``; in a backward, those that it ``keeps``."""
        return self.stats.extra if self._merged is None else self._merged.extra

    @property
    def one_minus_p(self) -> Tensor:
        """``1 - p_y``, with all its digits; 1 for a label outside the vocabulary."""
        if self._shifts is not None:
            return torch.where(self.known, -torch.expm1(self.log_probs[0]), 1.0)
        return self.stats.one_minus_p_label

    @property
    def label_shift(self) -> Tensor:
        """``s_y - m``, NOT_HERE for a label outside the vocabulary."""
        return self.left_out if self._shifts is None else self._shifts[0]

    @cached_property
    def known(self) -> Tensor:
        """bool: the label is in the vocabulary."""
        return self.label_shift != NOT_HERE

    @cached_property
    def left_out(self) -> Tensor:
        """``s - m`` of the label that ``sum_exp_nonlabel`` excludes, the largest of several; NOT_HERE for
        none."""
        return self.stats.label_shift

    @cached_property
    def _shifts(self) -> Tensor | None:
        """Of several labels: ``s - m``, fp32 ``[K, C]``; NOT_HERE for one outside the vocabulary, -inf for an
        empty entry."""
        return self.stats.label_shifts if self._merged is None else self._merged.label_shifts

    @cached_property
    def known_labels(self) -> Tensor:
        """bool ``[K, C]``: which of a token's labels are in the vocabulary, or empty."""
        return self.known.unsqueeze(0) if self._shifts is None else self._shifts != NOT_HERE

    @cached_property
    def log_probs(self) -> Tensor:
        """``log p`` of each of a token's K labels, ``[K, C]``, K = 1 for one; ``m - lse`` of a label outside
        the vocabulary, -inf of an empty entry."""
        if self._shifts is None:
            return -self.loss.unsqueeze(0)
        # Neither is above 0: nothing cancels.
        return torch.where(self.known_labels, self._shifts, 0.0) - self.log_sum

    @cached_property
    def log_sum(self) -> Tensor:
        """``lse - m``. For a confident token it is computed from the loss, which has more digits there; for a
        large loss from the sum, which then has more. In a backward from the sum, but of several labels."""
        if self._merged is None and self._shifts is None:
            return self._log_of_sum
        shift = self.left_out
        from_loss = self._loss_of_left_out + torch.where(shift != NOT_HERE, shift, 0.0)
        return torch.where(shift > -1, from_loss, self._log_of_sum)

    @cached_property
    def lse(self) -> Tensor:
        """``log sum exp s``."""
        return self.stats.row_max + self.log_sum

    @cached_property
    def p_left_out(self) -> Tensor:
        """``p`` of :attr:`left_out`. Undefined for none, whose entry nobody writes."""
        return self.left_out.exp() * self.stats.inv_sum

    @cached_property
    def weighted_left_out(self) -> Tensor:
        """``p * (s - m)`` of it, 0 where ``p`` is: the limit for a logit of -inf."""
        return torch.where(self.p_left_out > 0, self.p_left_out * self.left_out, 0.0)

    @cached_property
    def mean_shift(self) -> Tensor:
        """``sum p_j (s_j - m)``, which is ``log_sum`` less the entropy; needs ``weighted``."""
        if self.extra.weighted is None:
            raise TypeError('rows.mean_shift is there for a term with needs = ("weighted",), which keeps it')
        of_label = torch.where(self.left_out != NOT_HERE, self.weighted_left_out, 0.0)
        return torch.addcmul(of_label, self.extra.weighted, self.stats.inv_sum)


class Pull(NamedTuple):
    """Coefficients of a row gradient; None for 0."""

    at: Coefficient | None = None
    alpha: Coefficient | None = None
    eps: Coefficient | None = None
    delta: Coefficient | None = None
    at_labels: Tensor | None = None  # [K, C]: as at, of each of several labels

    def __add__(self, other: Pull) -> Pull:  # type: ignore[override]
        return Pull(*map(_sum, self, other))  # type: ignore[arg-type]

    def coefficients(self, rows: Rows, factor: Tensor) -> GradCoefficients:
        """The kernels' coefficients, for one label; ``factor`` fp32 ``[C]`` multiplies the gradient."""
        one = self._replace(at=_sum(self.at, None if self.at_labels is None else self.at_labels[0]))
        at_label = times(rows.stats.one_minus_p_label, one.at)
        if self.alpha is not None:
            at_label = at_label - rows.p_left_out * self.alpha
        if self.eps is not None:
            at_label = at_label - rows.weighted_left_out * self.eps
        if self.delta is not None:
            at_label = at_label + self.delta
        return one.elsewhere(rows, factor)._replace(neg_label_grad=at_label)

    def elsewhere(self, rows: Rows, factor: Tensor) -> GradCoefficients:
        """Of columns without a label: ``at``, ``alpha``, ``eps`` and ``delta`` alone."""
        inv_sum, eps, delta = rows.stats.inv_sum, self.eps, self.delta
        return GradCoefficients(
            rows.stats.row_max,
            times(inv_sum, _sum(self.at, self.alpha)),
            factor,  # neg_label_grad, which is not read
            factor,
            None if eps is None else inv_sum * eps,
            None if delta is None else torch.zeros_like(factor) + delta,  # of each row, whatever a term gave
        )

    def of_labels(self, rows: Rows) -> Tensor:
        """``at`` of each label, fp32 ``[K, C]``; that of one label is the first one's."""
        if self.at is None and self.at_labels is not None:
            return self.at_labels
        at = torch.zeros_like(rows.log_probs) if self.at_labels is None else self.at_labels.clone()
        if self.at is not None:
            at[0] += self.at
        return at

    @property
    def bound(self) -> Coefficient:
        """No entry of the row gradient is larger: ``p`` and ``p |s - m|`` are 1 at most."""
        of_labels = None if self.at_labels is None else self.at_labels.abs().sum(0)
        largest: Coefficient = 0.0
        for given in (*self[:4], of_labels):
            if given is not None:
                largest = largest + (given.abs() if isinstance(given, Tensor) else abs(given))
        return largest


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object has of its own, in slots too."""
    slots = (vars(kind).get("__slots__", ()) for kind in reversed(type(value).__mro__))
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    there = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return there | getattr(value, "__dict__", {})


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors in a value, also in tuples, lists and dicts; of a Module, of the parts of a function or a
    dataclass and of the attributes of any other object those that require a gradient."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Module):
        yield from (each for each in value.parameters() if each.requires_grad)
    elif isinstance(value, (tuple, list, dict)):
        for part in parts_of(value) or ():
            yield from tensors_of(part, seen)
    elif not isinstance(value, (str, float, type, ModuleType)) and id(value) not in seen:
        seen.add(id(value))
        parts = parts_of(value)
        inside = attributes_of(value) if parts is None else parts
        yield from (each for each in tensors_of(inside, seen) if each.requires_grad)


def _sum(one: Coefficient | None, other: Coefficient | None) -> Coefficient | None:
    return other if one is None else one if other is None else one + other


def times(one: Tensor, other: Coefficient | None) -> Tensor:
    """Their product, without an operator for 1; None is 0."""
    if isinstance(other, float) and other == 1.0:
        return one
    return one * (0.0 if other is None else other)


class Term:
    """One summand of a loss, or an output beside it. Terms add up and can be multiplied by numbers.

    A subclass has ``value`` and ``pull``, and says what is not the default of the attributes. Terms of one
    kind must be equal if, and only if, they compute the same (a frozen dataclass), and never change: a head
    keeps what it has found out about them.
    """

    #: Statistics beyond the maximum, the sum and the label's logit, among :data:`NEEDS`.
    needs: tuple[str, ...] = ()
    #: Those of them that ``pull`` reads, at 4 bytes a token each; None: all.
    keeps: tuple[str, ...] | None = None
    #: Coefficients that ``pull`` can give, fields of :class:`Pull`; none: an output without a gradient.
    #: Those beyond ``at`` and ``alpha`` of the loss itself, and any of an output beside it, cost a pass over
    #: the logits.
    gives: tuple[str, ...] = ("at", "alpha", "eps", "delta")
    #: No entry of its row gradient is larger than so many times the upstream gradient; None: not known before
    #: the logits are, so that ``grad_in_forward`` does not serve in fp16.
    bound: float | None = None
    #: Whether it is 0, without a gradient, for a token labelled ``config.ignore_index``.
    of_label: bool = True
    #: Whether its value is ``[K, C]``, one for each of several labels; then not the first output.
    per_label: bool = False
    dtype = torch.float32

    def value(self, rows: Rows) -> Tensor:
        """``[C]``, fp32 where it can have a gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no value(self, rows)")

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        """Its row gradient, linear in ``upstream``: fp32 ``[C]``, or a number for all tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no pull(self, rows, upstream)")

    def pull_own(self, rows: Rows, upstream: Coefficient) -> Pull:
        """:meth:`pull`; a user's gets a copy of ``upstream``, which others read."""
        if isinstance(upstream, Tensor) and not type(self).__module__.startswith(OF_PACKAGE):
            upstream = upstream.clone()
        return self.pull(rows, upstream)

    @property
    def kept(self) -> tuple[str, ...]:
        return self.needs if self.keeps is None else self.keeps

    def why_wrong(self) -> str:
        """What a head cannot do for it, in words; or empty."""
        if self.parts[0] is not self:
            return next(filter(None, (term.why_wrong() for term in self.parts)), "")
        advice = "write it as a @dataclass(frozen=True) whose fields are numbers and text"
        try:
            hash(self)
        except TypeError:
            return f"cannot be hashed: {advice}"
        if type(self).__module__.startswith(OF_PACKAGE):
            return ""
        if any(True for _ in tensors_of((*attributes_of(self).values(), type(self).value, type(self).pull))):
            return f"has a tensor, which would get no gradient; multiply the output by it, or {advice}"
        if is_dataclass(self) and type(self).__eq__ is not object.__eq__:
            unseen = set(attributes_of(self)).difference(each.name for each in fields(self) if each.compare)
            if unseen:
                return f"is equal to terms with another {' and '.join(sorted(unseen))}: {advice}"
        for name, known in (("needs", NEEDS), ("keeps", self.needs), ("gives", Pull._fields)):
            given = getattr(self, name)
            if name == "keeps" and given is None:
                continue
            if not isinstance(given, tuple) or not set(given) <= set(known):
                return f"has {name} = {given!r}; expected a tuple of {', '.join(known) or 'nothing'}"
        return ""

    @property
    def parts(self) -> tuple[Term, ...]:
        """Itself, or the terms of a sum or a product."""
        return (self,)

    def in_words(self) -> str:
        """The same on every rank that has the same term, and on no other.

        Raises:
            TypeError: an attribute cannot be compared (:func:`.in_words`).
        """
        if self.parts[0] is self:
            inside = [f"{name}={in_words(value)}" for name, value in attributes_of(self).items()]
        else:
            inside = [str(getattr(self, "factor", "")), *(term.in_words() for term in self.parts)]
        return f"{type(self).__qualname__}({', '.join(inside)})"

    def __add__(self, other: Term) -> Term:
        if not isinstance(other, Term):
            return NotImplemented
        return Sum((*_summands(self), *_summands(other)))

    def __sub__(self, other: Term) -> Term:
        return self + -1.0 * other

    def __mul__(self, factor: float) -> Term:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(
                f"a term is multiplied by {type(factor).__name__}; expected a number: multiply the output by "
                "the tensor"
            )
        return Scaled(float(factor), self)

    __rmul__ = __mul__

    def __neg__(self) -> Term:
        return -1.0 * self


@dataclass(frozen=True)
class Scaled(Term):
    factor: float
    term: Term

    def __post_init__(self) -> None:
        _take_over(self, self.parts)

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.term,)

    def value(self, rows: Rows) -> Tensor:
        return self.term.value(rows) * self.factor

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return self.term.pull(rows, self.factor * upstream)


@dataclass(frozen=True)
class Sum(Term):
    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        _take_over(self, self.parts)

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.terms

    def value(self, rows: Rows) -> Tensor:
        return reduce(add, [term.value(rows) for term in self.terms])

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return reduce(add, [term.pull_own(rows, upstream) for term in self.terms if term.gives])


def _take_over(made: Term, terms: tuple[Term, ...]) -> None:
    """Set the attributes of a sum or product of ``terms``.

    Raises:
        TypeError: a term has no gradient, so that the sum's would lack its part.
    """
    for term in terms:
        if not term.gives:
            raise TypeError(f"{term} has no gradient and cannot be part of a sum: ask for it as an output")
    for name in ("needs", "kept", "gives"):
        of_all = dict.fromkeys(each for term in terms for each in getattr(term, name))
        object.__setattr__(made, "keeps" if name == "kept" else name, tuple(of_all))
    if len({term.per_label for term in terms}) > 1:
        raise TypeError("a sum of a number for each token and one for each label: sum the labels' in a term")
    bounds = [term.bound for term in terms]
    factor = abs(made.factor) if isinstance(made, Scaled) else 1.0
    known = [factor * bound for bound in bounds if bound is not None]
    object.__setattr__(made, "bound", sum(known) if len(known) == len(bounds) else None)
    object.__setattr__(made, "per_label", terms[0].per_label)
    object.__setattr__(made, "of_label", any(term.of_label for term in terms))


def _summands(term: Term) -> tuple[Term, ...]:
    return term.terms if isinstance(term, Sum) else (term,)
