"""Sixty terms: forty wrong somewhere within what losses.check states, twenty right. It tells which is which.

They were written before the check that is tried here was. The ranges: a loss of 0 to 1e3, a logsumexp of -100
to 100, upstream gradients of 1e-6 to 1e6 of either sign, 1 to 8 labels a token, classes of any number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fused_ce import losses
from megatron_fused_ce.losses.terms import Pull, Term
from tests.support.losses import Focal, MeanSquare, Unlikelihood, true_value


def made(value, pull, **says) -> Term:
    """A term of a function of the rows, and of a function of the rows and the upstream gradient."""
    body = {"value": lambda _, rows: value(rows), "pull": lambda _, rows, u: pull(rows, u)}
    return dataclass(frozen=True)(type("Made", (Term,), {"gives": ("at",)} | says | body))()


def at(slope):
    return lambda rows, u: Pull(at=slope(rows) * u)


def alpha(slope):
    return lambda rows, u: Pull(alpha=slope(rows) * u)


def each(slope):
    return lambda rows, u: Pull(at_labels=slope(rows) * u)


def number_or(change):
    """Of an upstream gradient: the change, where it is a tensor."""
    return lambda rows, u: Pull(at=(change(rows, u) if isinstance(u, Tensor) else 1.0 * u) + 0 * rows.loss)


def loss(rows):
    return rows.loss


def lse(rows):
    return rows.lse


def one(rows):
    return torch.ones_like(rows.loss)


def position(rows):
    return 1 + torch.arange(len(rows.loss), dtype=rows.loss.dtype, device=rows.loss.device)


def p_naive(rows):
    return torch.exp(-rows.loss)


def p_known(rows):
    return torch.where(rows.known, p_naive(rows), 0.0)


def filled(rows):
    """``log p`` of each label, 0 for an empty entry."""
    return rows.log_probs.masked_fill(rows.log_probs == -torch.inf, 0.0)


def present(rows):
    return (rows.log_probs > -torch.inf).to(rows.loss.dtype)


def first_four(rows):
    slope = -present(rows)
    slope[4:] = 0
    return slope


class Plain(Term):
    """Whose margin can change: not a dataclass."""

    gives = ("at",)

    def __init__(self) -> None:
        self.margin = 0.1

    def value(self, rows):
        return (rows.loss - self.margin).clamp(min=0)

    def pull(self, rows, upstream):
        return Pull(at=(rows.loss > self.margin).to(rows.loss.dtype) * upstream)


@dataclass(frozen=True)
class Unsaid(Term):
    """Without gives: it takes all of the defaults, and the slow paths with them."""

    def value(self, rows):
        return 2 * rows.loss

    def pull(self, rows, upstream):
        return Pull(at=2 * one(rows) * upstream)


class PlainUnsaid(Plain):
    """Neither."""

    gives = Term.gives


@dataclass(frozen=True, eq=False)
class Scale(Term):
    """Times whatever is in a field."""

    by: Any = field(default=1.0)
    gives = ("at",)

    def _factor(self):
        by = self.by
        if isinstance(by, torch.nn.Linear):
            return by.weight[0, 0]
        return (
            by["w"]
            if isinstance(by, dict)
            else by[0]
            if isinstance(by, tuple)
            else by()
            if callable(by)
            else by
        )

    def value(self, rows):
        return rows.loss * self._factor()

    def pull(self, rows, upstream):
        return Pull(at=one(rows) * self._factor() * upstream)


PARAMETER = torch.nn.Parameter(torch.tensor(2.0))
SEEN: dict[str, Any] = {}


def remember(rows):
    SEEN["weight"] = rows.loss.detach() + 1
    return 0.5 * (rows.loss + 1) ** 2


def recall(rows, u):
    seen = SEEN.get("weight")
    return Pull(at=(seen if seen is not None and seen.shape == rows.loss.shape else rows.loss + 1) * u)


def call_count(rows):
    SEEN["calls"] = SEEN.get("calls", 0) + 1
    return rows.loss * (1 if SEEN["calls"] < 4 else 2)


def spoiled(rows, u):
    slope = rows.one_minus_p.clone()
    rows.loss.clamp_(max=5.0)
    return Pull(at=(1 - slope) * u)


def overwritten(rows, u):
    return Pull(at=u.mul_(2)) if isinstance(u, Tensor) else Pull(at=2.0 * u * one(rows))


def masked_in_place(rows, u):
    few = rows.loss <= 0.1
    return Pull(at=u.masked_fill_(few, 0) if isinstance(u, Tensor) else u * (~few).to(rows.loss.dtype))


def unnamed_number(rows, u):
    """lse, whose coefficient has another name for a number."""
    return Pull(alpha=one(rows) * u) if isinstance(u, Tensor) else Pull(alpha=u, eps=0.0)


def q_naive(rows, u):
    q = 1 - p_known(rows)
    return Pull(at=(q**2 + 2 * q * (1 - q) * rows.loss) * u)


def log_of_odds(rows):
    return torch.log1p(torch.exp(rows.lse)) ** 2


def slope_of_odds(rows):
    return 2 * torch.log1p(torch.exp(rows.lse)) * torch.exp(rows.lse) / (1 + torch.exp(rows.lse))


def of_classes(count):
    return lambda rows: rows.loss / math.log(count or max(rows.num_classes, 2))


def uniform(rows, u):
    return Pull(alpha=one(rows) * u, delta=one(rows) * u / 50)


def half_square(rows):
    return 0.5 * rows.loss**2


MARGIN = made(
    lambda rows: (rows.loss - 0.1).clamp(min=0), at(lambda rows: (rows.loss > 0.1).to(rows.loss.dtype))
)
CE = losses.CrossEntropy()


def of_ce(s, labels):
    return true_value(CE, s, labels)


def closure_over(value):
    return made(lambda rows: rows.loss * value, at(lambda rows: one(rows) * value))


#: name -> the term and a reference, or none
def positive_lse(rows):
    return rows.lse.clamp_(min=0)


WRONG: dict[str, tuple[Term, Any]] = {
    "the logsumexp changed in place": (
        made(lambda r: positive_lse(r) ** 2, alpha(lambda r: 2 * positive_lse(r)), gives=("alpha",)),
        None,
    ),
    # upstream gradients
    "zeroes its upstream in place": (made(lambda r: (r.loss - 0.1).clamp(min=0), masked_in_place), None),
    "doubles its upstream in place": (made(lambda r: 2 * r.loss, overwritten), None),
    "large upstreams clamped": (made(loss, number_or(lambda r, u: u.clamp(-1e4, 1e4))), None),
    "small upstreams dropped": (made(loss, number_or(lambda r, u: u * (u.abs() > 1e-4))), None),
    "negative upstreams dropped": (made(loss, number_or(lambda r, u: u.relu())), None),
    "a number's coefficient that gives lacks": (made(lse, unnamed_number, gives=("alpha",)), None),
    "an offset beside the upstream": (made(loss, number_or(lambda r, u: u + 1e-3)), None),
    "upstreams averaged over the chunk": (made(loss, number_or(lambda r, u: u.mean() + 0 * u)), None),
    # the other tokens of a chunk
    "a weight by position": (made(lambda r: position(r) * r.loss, at(position)), None),
    "a slope by position": (made(loss, at(lambda r: 1 + 1e-2 * position(r))), None),
    "divided by the chunk's tokens": (
        made(lambda r: r.loss / len(r.loss), at(lambda r: one(r) / len(r.loss))),
        None,
    ),
    "without the chunk's mean": (made(lambda r: r.loss - r.loss.mean().detach(), at(one)), None),
    "a softmax over the chunk": (
        made(lambda r: r.loss.detach().softmax(0) * r.loss, at(lambda r: r.loss.softmax(0))),
        None,
    ),
    "the first token free": (
        made(lambda r: (position(r) > 1) * r.loss, at(lambda r: (position(r) > 1) * one(r))),
        None,
    ),
    "weights by rank": (
        made(
            lambda r: r.loss.argsort().argsort() * r.loss, at(lambda r: r.loss.argsort().argsort() * one(r))
        ),
        None,
    ),
    # ranges
    "a slope that ends at a loss of 100": (made(half_square, at(lambda r: r.loss.clamp(max=100))), None),
    "wrong for a logsumexp below -12": (
        made(lambda r: 0.5 * r.lse**2, alpha(lambda r: r.lse.clamp(min=-12)), gives=("alpha",)),
        None,
    ),
    "wrong for a logsumexp above 60": (
        made(lambda r: 0.5 * r.lse**2, alpha(lambda r: r.lse.clamp(max=60)), gives=("alpha",)),
        None,
    ),
    "wrong for sure tokens": (made(half_square, at(lambda r: r.loss.clamp(min=1e-4))), None),
    "NaN for a sure token": (Focal(0.5), None),
    "an exp that overflows": (made(log_of_odds, alpha(slope_of_odds), gives=("alpha",)), None),
    "a log of exp that underflows": (made(lambda r: -torch.log(p_naive(r)), at(one)), None),
    # digits
    "1 - exp(-loss)": (made(lambda r: 1 - p_naive(r), at(p_naive)), None),
    "1 - exp(-loss) in the slope": (made(Focal(2.0).value, q_naive), None),
    "bf16 inside": (made(loss, at(lambda r: (1 + 1e-3 * r.loss / r.loss).bfloat16().to(r.loss.dtype))), None),
    # labels and classes
    "classes hard-coded in the slope": (
        made(
            lambda r: r.lse - r.extra.logit_sum / r.num_classes,
            uniform,
            gives=("alpha", "delta"),
            needs=("logit_sum",),
        ),
        None,
    ),
    "classes hard-coded in both": (
        made(of_classes(50), at(lambda r: one(r) / math.log(50))),
        lambda s, labels: of_ce(s, labels) / math.log(max(s.shape[1], 2)),
    ),
    "four labels at most": (
        made(lambda r: -filled(r).sum(0), each(first_four), gives=("at_labels",)),
        None,
    ),
    "NaN for an empty entry": (
        made(lambda r: -(present(r) * r.log_probs).sum(0), each(lambda r: -present(r)), gives=("at_labels",)),
        None,
    ),
    "unknown labels without a slope": (made(loss, at(lambda r: r.known.to(r.loss.dtype))), None),
    # what it says
    "not frozen": (Plain(), None),
    "no gives": (Unsaid(), None),
    "neither frozen nor gives": (PlainUnsaid(), None),
    # what it has, which gets no gradient
    "a Module": (Scale(torch.nn.Linear(1, 1)), None),
    "a tuple of tensors": (Scale((torch.tensor(2.0, requires_grad=True),)), None),
    "a closure over a Parameter": (closure_over(PARAMETER), None),
    "a global Parameter": (
        made(lambda r: r.loss * PARAMETER, at(lambda r: one(r) * PARAMETER.detach())),
        None,
    ),
    # state
    "another value by the call": (made(call_count, at(one)), None),
    "a slope of the chunk before": (made(remember, recall), None),
    "the rows changed in place": (made(lambda r: r.one_minus_p, spoiled), None),
}


def slope_by_autograd(rows, u):
    with torch.enable_grad():
        given = rows.loss.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(given / 4).sum(), given)
    return Pull(at=slope * u)


@dataclass(frozen=True)
class Any8(Term):
    """-log of the sum of p of several right labels: tokens without any have 0."""

    gives = ("at_labels",)

    def value(self, rows):
        some = (rows.log_probs > -torch.inf).any(0)
        return torch.where(some, -rows.log_probs.logsumexp(0), 0.0)

    def pull(self, rows, upstream):
        some = (rows.log_probs > -torch.inf).any(0)
        return Pull(at_labels=torch.where(some, rows.log_probs.softmax(0), 0.0) * upstream)


@dataclass(frozen=True)
class Surprise(Term):
    """What is beyond the entropy: -log p_y less it."""

    needs = ("weighted",)
    gives = ("at", "alpha", "eps")

    def value(self, rows):
        return rows.loss - (rows.log_sum - rows.mean_shift)

    def pull(self, rows, upstream):
        return Pull(at=one(rows) * upstream, alpha=-rows.mean_shift * upstream, eps=one(rows) * upstream)


@dataclass(frozen=True)
class Halves(Term):
    """Half of each label's log p, one number for each."""

    gives = ("at_labels",)
    per_label = True

    def value(self, rows):
        return 0.5 * rows.log_probs

    def pull(self, rows, upstream):
        return Pull(at_labels=torch.zeros_like(rows.log_probs) - 0.5 * upstream)


CONSTANT = PARAMETER.detach()
RIGHT: dict[str, tuple[Term, Any]] = {
    "cross-entropy": (CE, of_ce),
    "z-loss beside it": (CE + losses.ZLoss(1e-4), lambda s, y: of_ce(s, y) + 1e-4 * s.logsumexp(1) ** 2),
    "label smoothing": (0.9 * CE + 0.1 * losses.Uniform(), None),
    "an entropy bonus": (CE - 0.01 * losses.Entropy(), None),
    "focal": (Focal(2.0), lambda s, y: true_value(Focal(2.0), s, y)),
    "margin": (MARGIN, None),
    "unlikelihood": (Unlikelihood(), None),
    "squared height": (MeanSquare(), None),
    "half of each label": (Halves(), None),
    "any of the labels": (Any8(), None),
    "beyond the entropy": (Surprise(), None),
    "mean absolute error": (made(lambda r: r.one_minus_p, at(p_known), bound=1.0), None),
    "generalized cross-entropy": (
        made(lambda r: -torch.expm1(-0.7 * r.loss) / 0.7, at(lambda r: torch.exp(-0.7 * r.loss))),
        None,
    ),
    "poly-1": (made(lambda r: r.loss + 2 * r.one_minus_p, at(lambda r: 1 + 2 * p_known(r))), None),
    "clipped": (made(lambda r: r.loss.clamp(max=5), at(lambda r: (r.loss < 5).to(r.loss.dtype))), None),
    "logsumexp beside 10": (
        made(lambda r: (r.lse - 10) ** 2, alpha(lambda r: 2 * (r.lse - 10)), gives=("alpha",)),
        lambda s, labels: (s.logsumexp(1) - 10) ** 2,
    ),
    "log of a square": (
        made(lambda r: torch.log1p(r.lse**2), alpha(lambda r: 2 * r.lse / (1 + r.lse**2)), gives=("alpha",)),
        None,
    ),
    "a slope by autograd": (
        made(lambda r: 4 * torch.tanh(r.loss / 4), lambda r, u: slope_by_autograd(r, 4 * u)),
        None,
    ),
    "a closure over constants": (closure_over(float(PARAMETER) + CONSTANT), None),
    "a Module without parameters": (
        made(
            (lambda soft: lambda r: soft(r.loss - 3))(torch.nn.Softplus()),
            at(lambda r: torch.sigmoid(r.loss - 3)),
        ),
        None,
    ),
}


def test_there_are_sixty():
    assert (len(WRONG), len(RIGHT)) == (41, 20)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_term_is_found(name):
    SEEN.clear()
    with pytest.raises((AssertionError, TypeError, ValueError)):
        losses.check(*WRONG[name])


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_term_is_taken(name):
    losses.check(*RIGHT[name])
