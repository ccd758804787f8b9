"""A step of a Megatron model with something in its way, flag off and flag on: rows, and what runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from tests.support import megatron
from tests.support.megatron import GRADIENT_BOUND, Model
from tests.support.ranks import Rank

GPT = ("gpt",)
UNKNOWN, LATER = "this package does not know it as Megatron's own", "edited after the model was built"


@dataclass
class Step:
    """A model and a micro-batch, which a row makes a loss of."""

    rank: Rank
    model: Any
    ids: Tensor
    labels: Tensor
    mask: Tensor

    def __call__(self, model: Any = None, **given: Any) -> Any:
        """The model's output for the micro-batch: losses, or of ``labels=None`` logits."""
        batch = megatron.Batch(self.ids, self.labels, self.mask)
        return megatron.losses_of(model or self.model, batch, self.rank, **given)

    def masked(self, losses: Tensor) -> Tensor:
        return (losses.float() * self.mask).sum() / self.mask.sum()

    def of_logits(self, logits: Tensor) -> Tensor:
        """Megatron's own cross entropy, an autograd function, of ``[s, b, V]``; and another term in torch."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        losses = vocab_parallel_cross_entropy(logits.float().clone(), self.labels.t().contiguous())
        # Of this rank's columns: its gradient survives where the other's is lost.
        return self.masked(losses.t()) + 1e-3 * logits.float().logsumexp(-1).square().mean()


#: Of a model; what reaches beyond it ends with the stack.
Change = Callable[[Any, contextlib.ExitStack], Any]


@dataclass(frozen=True)
class Row:
    words: tuple[str, ...] = ()  # of the log, where a head stays
    change: Change = lambda model, stack: None  # of a model that was built
    use: Callable[[Step], Tensor] = lambda step: step.masked(step())  # makes the loss
    fused: int = 1  # heads of one forward that are, and that stay with Megatron; none is materialised
    stock: int = 0
    before: Callable[[contextlib.ExitStack], Any] = lambda stack: None  # there when the model is built
    raises: str = ""  # of the error that the flag raises before anything is trained
    model: dict[str, Any] = field(default_factory=dict)  # changes :class:`.Model`'s fields
    options: dict[str, Any] = field(default_factory=dict)  # of the flag's config
    families: tuple[str, ...] = ("gpt", "hybrid")
    since: tuple[int, int] = (0, 16)
    adopted: bool = True  # every model that is built
    trust: Callable[[], Any] = tuple  # digests of functions that the user vouches for
    bound: float = GRADIENT_BOUND  # norm-relative, of losses and gradients


def stays(words: str, change: Change = Row.change, **others: Any) -> Row:
    return Row((words,), change, **{"fused": 0, "stock": 1, **others})


def step_of(row: Row, rank: Rank, on: bool, family: str = "gpt") -> tuple[dict[str, Tensor], Any]:
    """The loss and every gradient that the row leaves, and what was seen with the flag ``on``."""
    options = {"strategy": "store", "num_chunks": 3, **row.options}
    made: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        row.before(stack)
        error = pytest.raises((ValueError, RuntimeError), match=row.raises)
        raises = error if row.raises else contextlib.nullcontext()
        with megatron.flag(on, trust=row.trust(), **options) as seen, raises:
            model = megatron.build(Model(family=family, **row.model), rank)
            row.change(model, stack)
            loss = row.use(Step(rank, model, *megatron.draw(rank, kept=0.7)))
            loss.backward()
            made = {"loss": loss.detach(), **megatron.gradients_of(model)}
    return made, seen


def off_against_on(row: Row, rank: Rank) -> tuple[dict[str, Tensor], str]:
    """What the row leaves of the last family, and what was said."""
    megatron.needs_core(*row.since)
    megatron.have_groups(rank.size)
    for family in row.families:
        off = {} if row.raises else step_of(row, rank, False, family)[0]
        on, seen = step_of(row, rank, True, family)
        assert seen.counts == (row.fused, 0, row.stock), (family, seen.said)
        if not rank.rank:
            assert row.adopted == ("stays on Megatron's own path" not in seen.said), seen.said
        if row.raises:
            continue
        if not rank.rank:
            told = seen.lines("takes Megatron's own path")
            assert bool(told) == bool(row.stock) and len(told) <= row.stock, told
            assert all(word in line for word in row.words for line in told or [seen.said]), seen.said
        assert len(on) > 5
        megatron.assert_same(on, off, row.bound, may_be_zero="")
    return on, seen.said
