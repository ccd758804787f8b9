"""Steps of a head, on one rank or on a group's, that go wrong, and what is left of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import ReturnedGradWeight
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.op import open_main_grad, shard_of

SIZES = {"s": 8, "b": 2, "hidden_size": 12, "vocab": 40}


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("forced")


class AtOperator(TorchDispatchMode):
    """Counts operators, forward or backward, and calls ``act`` before the ``at``-th; never for None.

    Any operator may allocate, an in-place product its workspace: all of them are taken.
    """

    def __init__(self, at: int | None = None, act: Callable[[], None] = out_of_memory) -> None:
        super().__init__()
        self.at, self.act, self.count = at, act, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            self.act()
        return func(*args, **(kwargs or {}))


class Step:
    """A micro-batch of a head whose ``grad_weight`` ends as asked, and what it leaves."""

    def __init__(
        self, strategy, end="returned", dtype=torch.float32, *, rank=None, sp=False, kind="odd-labels",
        seed=0, weight=None, **options,
    ):  # fmt: skip
        """``rank``: a :class:`.rank_process.Rank`, whose shard and part this is; None for the whole.
        ``options``: of the config."""
        device = "cpu" if rank is None else rank.device
        self.inputs = make_inputs(kind, **SIZES, dtype=dtype, seed=seed, device=device)
        self.hidden, rows, group = shard_of(rank, self.inputs, sp, "equal")
        self.weight, self.grad_loss = rows if weight is None else weight, self.inputs.grad_loss
        config = FusedCEConfig(strategy, **{"num_chunks": 2, **options})
        self.options = {**group, "token_weights": self.grad_loss * 2, "config": config}
        self.main_grad, self.open = None, ReturnedGradWeight
        if end != "returned":
            self.main_grad = torch.zeros_like(self.weight, dtype=torch.float32 if end == "fp32" else dtype)
            self.open = partial(open_main_grad, self.main_grad)

    def run(self) -> None:
        """A forward and a backward; gradients are added to those that are there."""
        self.forward().backward(self.grad_loss)

    def forward(self, hidden=None) -> torch.Tensor:
        given = {**self.options, "open_grad_weight": self.open}
        hidden = self.hidden if hidden is None else hidden
        return linear_cross_entropy(Call(hidden, self.weight, self.inputs.labels, **given)).loss

    def backward(self, loss):
        """Gradients of hidden states and weight, of this micro-batch by itself: returned."""
        return torch.autograd.grad(loss, (self.hidden, self.weight), self.grad_loss)

    def sums(self):
        """Where gradients are added up: of hidden states and weight."""
        return self.hidden.grad, self.weight.grad if self.main_grad is None else self.main_grad

    def gradients(self):
        return [grad.clone() for grad in self.sums()]

    def restore(self, gradients) -> None:
        """What :meth:`gradients` gave: an earlier micro-batch's."""
        for grad, earlier in zip(self.sums(), gradients, strict=True):
            grad.copy_(earlier)


def out_of_memory_at(step: Step, at: int, earlier, right) -> str:
    """Let the operator ``at`` of a step fail, with ``earlier`` gradients there, and take the step again.

    What the failure left: ``untouched``, ``nan``, or ``whole`` where only what follows the op's own backward
    has failed. Anything else raises, and so does a next step that is not bitwise ``right``.
    """
    step.restore(earlier)
    with pytest.raises(torch.OutOfMemoryError), AtOperator(at):
        step.run()
    assert any(torch.equal(step.gradients()[0], whole[0]) for whole in (earlier, right))
    left = what_is_left(step, earlier, right)
    step.restore(earlier)
    step.run()
    assert all(map(torch.equal, step.gradients(), right)), "the next step is not right"
    return left


def what_is_left(step: Step, earlier, right) -> str:
    """In the weight's gradient, after a step that failed; raises for a part of a sum."""
    of_weight = step.gradients()[1]
    if of_weight.isnan().all():
        return "nan"
    if torch.equal(of_weight, right[1]):
        return "whole"
    assert torch.equal(of_weight, earlier[1]), "a part of a sum is left"
    return "untouched"


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
