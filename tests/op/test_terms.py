"""losses.check: which terms it takes, and in which words it tells what is wrong with the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fused_ce import losses
from megatron_fused_ce.losses.terms import Pull, Term
from tests.support.losses import TABLE, Focal, Unlikelihood, true_value


def made(value: Any, pull: Any, **says: Any) -> Term:
    """A term of a function of the rows, and of one of the rows and the upstream gradient."""
    body = {"value": lambda _, rows: value(rows), "pull": lambda _, rows, u: pull(rows, u)}
    return dataclass(frozen=True)(type("Made", (Term,), {"gives": ("at",)} | says | body))()


def at(value: Any, slope: Any, **says: Any) -> Term:
    """Of the label's own loss."""
    return made(value, lambda rows, u: Pull(at=slope(rows) * u), **says)


def alpha(value: Any, slope: Any) -> Term:
    """Of the logsumexp."""
    return made(value, lambda rows, u: Pull(alpha=slope(rows) * u), gives=("alpha",))


def each(value: Any, slope: Any) -> Term:
    """Of several labels."""
    return made(value, lambda rows, u: Pull(at_labels=slope(rows) * u), gives=("at_labels",))


def upstream(change: Any) -> Term:
    """The loss, whose upstream gradient is changed: a tensor by ``change``, a number not at all."""
    return made(loss, lambda rows, u: Pull(at=one(rows) * (change(u) if isinstance(u, Tensor) else u)))


def loss(rows):
    return rows.loss


def one(rows):
    return torch.ones_like(rows.loss)


def half_square(rows):
    return 0.5 * rows.loss**2


def behind_the_first(rows):
    return torch.arange(len(rows.loss)) > 0


def log_of_odds(rows):
    return torch.log1p(torch.exp(rows.lse)) ** 2


def slope_of_odds(rows):
    return 2 * torch.log1p(torch.exp(rows.lse)) * torch.sigmoid(rows.lse)


def q_naive(rows):
    q = 1 - torch.where(rows.known, torch.exp(-rows.loss), 0.0)
    return q**2 + 2 * q * (1 - q) * rows.loss


def present(rows):
    return (rows.log_probs > -torch.inf).to(rows.loss.dtype)


def first_four(rows):
    return -present(rows) * (torch.arange(len(rows.log_probs)) < 4).unsqueeze(1)


def twice_in_a_forward(rows):
    return one(rows) if rows._merged is None else 2 * one(rows)


PARAMETER = torch.nn.Parameter(torch.tensor(2.0))
SEEN: dict[str, Any] = {}


def call_count(rows):
    SEEN["calls"] = SEEN.get("calls", 0) + 1
    return rows.loss * (1 if SEEN["calls"] < 4 else 2)


def remember(rows):
    SEEN["weight"] = rows.loss.detach() + 1
    return 0.5 * (rows.loss + 1) ** 2


def recall(rows):
    seen = SEEN.get("weight")
    return seen if seen is not None and seen.shape == rows.loss.shape else rows.loss + 1


class NotFrozen(Term):
    """Whose factor can change: not a dataclass."""

    gives = ("at",)

    def __init__(self) -> None:
        self.factor = 2.0

    def value(self, rows):
        return self.factor * rows.loss

    def pull(self, rows, upstream):
        return Pull(at=self.factor * one(rows) * upstream)


@dataclass(frozen=True)
class Unsaid(Term):
    """Without gives: it takes all of the defaults, and the slow paths with them."""

    def value(self, rows):
        return 2 * rows.loss

    def pull(self, rows, upstream):
        return Pull(at=2 * one(rows) * upstream)


@dataclass(frozen=True)
class OfThree(Unlikelihood):
    """Which takes three labels alone."""

    fault: bool = False

    def value(self, rows):
        assert len(rows.known_labels) == 3
        return super().value(rows)

    def pull(self, rows, upstream):
        pull = super().pull(rows, upstream)
        return pull._replace(at_labels=pull.at_labels.roll(1, 0)) if self.fault else pull


IN_LABELS, IN_OTHERS = "not the gradient of its value in labels' columns", "of its value in other columns"
NOT_LINEAR, OTHER_TOKENS = "not linear in the upstream gradient", "depends on the other tokens"
VALUE_IN_FP32, PULL_IN_FP32 = "in fp32 its value has lost its digits", "in fp32 its pull has lost its digits"
IN_PLACE = "changes the statistics in place"

#: A term, what is told of it, and more arguments.
WRONG: dict[str, tuple[Any, ...]] = {
    # upstream gradients
    "doubled in place": (upstream(lambda u: u.mul_(2)), "changes its upstream in place"),
    "large ones clamped": (upstream(lambda u: u.clamp(-1e4, 1e4)), NOT_LINEAR),
    "small ones dropped": (upstream(lambda u: u * (u.abs() > 1e-4)), NOT_LINEAR),
    "masked in place": (upstream(lambda u: u.masked_fill_(u > 1, 0)), "changes its upstream in place"),
    "negative ones dropped": (upstream(lambda u: u.relu()), NOT_LINEAR),
    "an offset beside them": (upstream(lambda u: u + 1e-4), NOT_LINEAR),
    "a number taken for another": (upstream(lambda u: 2 * u), "takes the number 0.5"),
    "another coefficient": (
        made(loss, lambda r, u: Pull(alpha=one(r) * u)),
        "has alpha, not among its gives",
    ),
    # the other tokens of a chunk, and the calls before
    "averaged over the chunk": (upstream(lambda u: u.mean() + 0 * u), OTHER_TOKENS),
    "divided by their number": (upstream(lambda u: u / len(u)), OTHER_TOKENS),
    "a slope by position": (upstream(lambda u: u * (1 + torch.arange(len(u)))), OTHER_TOKENS),
    "a softmax over the chunk": (at(loss, lambda r: 1 + r.loss.softmax(0)), OTHER_TOKENS),
    "without the chunk's mean": (at(lambda r: r.loss - r.loss.mean().detach(), one), OTHER_TOKENS),
    "the first token free": (
        at(lambda r: behind_the_first(r) * r.loss, lambda r: behind_the_first(r) * one(r)),
        OTHER_TOKENS,
    ),
    "a slope of the chunk before": (at(remember, recall), OTHER_TOKENS),
    "another value by the call": (at(call_count, one), "another in another call"),
    "a forward's slope": (at(loss, twice_in_a_forward), "other statistics in a forward than in a backward"),
    "the loss in place": (at(lambda r: r.loss.clamp_(max=5.0), one), IN_PLACE),
    "the logsumexp in place": (alpha(lambda r: r.lse.clamp_(min=0), one), IN_PLACE),
    # ranges
    "another sign": (at(loss, lambda r: -one(r)), IN_LABELS),
    "a loss above 100": (at(half_square, lambda r: r.loss.clamp(max=100)), IN_LABELS),
    "a logsumexp below -12": (alpha(lambda r: 0.5 * r.lse**2, lambda r: r.lse.clamp(min=-12)), IN_OTHERS),
    "a logsumexp above 60": (alpha(lambda r: 0.5 * r.lse**2, lambda r: r.lse.clamp(max=60)), IN_OTHERS),
    "sure tokens": (at(half_square, lambda r: r.loss.clamp(min=1e-4)), IN_LABELS),
    "NaN for a sure token": (Focal(0.5), IN_LABELS),
    "its bound": (at(loss, one, bound=0.5), "larger than its bound, 0.5"),
    # digits
    "an exp that overflows": (alpha(log_of_odds, slope_of_odds), VALUE_IN_FP32),
    "a log of exp that underflows": (at(lambda r: -torch.log(torch.exp(-r.loss)), one), VALUE_IN_FP32),
    "1 - exp(-loss)": (at(lambda r: 1 - torch.exp(-r.loss), lambda r: torch.exp(-r.loss)), VALUE_IN_FP32),
    "1 - exp(-loss) in the slope": (at(Focal(2.0).value, q_naive), PULL_IN_FP32),
    "fp64 inside": (at(lambda r: r.loss.double(), one), "makes torch.float64 of fp32"),
    # labels and classes
    "classes hard-coded": (
        at(lambda r: r.loss / math.log(50), lambda r: one(r) / math.log(50)),
        "not the reference's",
        lambda s, labels: true_value(losses.CrossEntropy(), s, labels) / math.log(s.shape[1]),
    ),
    "four labels at most": (
        each(lambda r: -r.log_probs.masked_fill(r.log_probs == -torch.inf, 0.0).sum(0), first_four),
        IN_LABELS,
    ),
    "an empty entry": (each(lambda r: -(present(r) * r.log_probs).sum(0), lambda r: -present(r)), "is NaN"),
    "unknown labels without a slope": (at(loss, lambda r: r.known.to(r.loss.dtype)), IN_OTHERS),
    "three labels": (OfThree(True), rf"{IN_LABELS}.* \(on a token .* label \[\d+, ", None, 3),
    # what it says and has
    "not frozen": (NotFrozen(), "is not frozen"),
    "no gives": (Unsaid(), r"does not say its gives: expected \('at',\)"),
    "one value for all tokens": (at(lambda r: r.loss.sum(), one), "expected one for each token"),
    "a tensor for a Pull": (made(loss, lambda r, u: one(r) * u), "returns Tensor; expected a losses.Pull"),
    "a global Parameter": (
        at(lambda r: r.loss * PARAMETER, lambda r: one(r) * PARAMETER.detach()),
        "it requires a gradient",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_term_is_found(name):
    SEEN.clear()
    term, words, *more = WRONG[name]
    with pytest.raises(AssertionError, match=words):
        losses.check(term, *more)


@pytest.mark.parametrize("term", [losses.Predicted(), at(lambda r: r.loss, one, needs=("entropy",))])
def test_what_no_head_takes_is_a_type_error(term):
    with pytest.raises(TypeError, match=r"has no gradient|has needs"):
        losses.check(term)


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


def slope_by_autograd(rows):
    with torch.enable_grad():
        given = rows.loss.detach().requires_grad_()
        (slope,) = torch.autograd.grad(4 * torch.tanh(given / 4).sum(), given)
    return slope


CONSTANT = PARAMETER.detach().clone()
#: Beside those of tests/support/losses.py, which have references.
RIGHT: dict[str, tuple[Any, ...]] = {
    "any of the labels": (Any8(),),
    "three labels": (OfThree(), lambda s, labels: true_value(Unlikelihood(), s, labels), 3),
    "a margin": (at(lambda r: (r.loss - 0.1).clamp(min=0), lambda r: (r.loss > 0.1).to(r.loss.dtype)),),
    "a slope by autograd": (at(lambda r: 4 * torch.tanh(r.loss / 4), slope_by_autograd),),
    "a closure over a constant": (at(lambda r: r.loss * CONSTANT, lambda r: one(r) * CONSTANT),),
    **{
        f"{name}: {output}": (term, lambda s, labels, term=term: true_value(term, s, labels))
        for name, loss in TABLE.items()
        for output, term in (loss.terms or {}).items()
        if term.gives
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_term_is_taken(name):
    losses.check(*RIGHT[name])
