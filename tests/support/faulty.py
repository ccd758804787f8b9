"""Steps that go wrong, on one rank or on several, and what is left of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import InPlaceGradWeight, ReturnedGradWeight
from megatron_fused_ce.scripts.lib.reference import make_inputs

SIZES = {"s": 8, "b": 2, "hidden_size": 12, "vocab": 40}


class AtOperator(TorchDispatchMode):
    """Counts operators, forward or backward, and calls ``act`` before the ``at``-th; never for None."""

    def __init__(self, act: Callable[[], None], at: int | None = None) -> None:
        super().__init__()
        self.act = act
        self.at = at
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            self.act()
        return func(*args, **(kwargs or {}))


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("forced")


#: Any operator may allocate, an in-place product its workspace: all of them are taken.
OutOfMemoryAt = functools.partial(AtOperator, _out_of_memory)


class Filled(TorchDispatchMode):
    """Every ``torch.empty`` and its like come full of one number; ``count``: how many did."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.count += 1
            value: float = self.value
            if not made.is_floating_point() and made.dtype != torch.bool:
                value = torch.iinfo(made.dtype).max if value else 0
            made.fill_(value)
        return made


class Step:
    """A micro-batch of a head whose ``grad_weight`` ends as asked, and what it leaves."""

    def __init__(
        self, dtype, strategy, end="returned", options=None, rank=None, sequence_parallel=False, *,
        kind="odd-labels", seed=0, weight=None,
    ):  # fmt: skip
        """``rank``: a :class:`.rank_process.Rank`, whose shard and part this is; None for the whole."""
        device = "cpu" if rank is None else rank.device
        self.inputs = make_inputs(kind, **SIZES, dtype=dtype, seed=seed, device=device)
        at, size = (0, 1) if rank is None else (rank.rank, rank.size)
        parts = self.inputs.hidden.chunk(size) if sequence_parallel else [self.inputs.hidden] * size
        self.hidden = parts[at].clone().requires_grad_()
        self.weight = (
            self.inputs.weight.chunk(size)[at].clone().requires_grad_() if weight is None else weight
        )
        self.grad_loss = self.inputs.grad_loss
        self.options = {
            "tp_group": None if rank is None else rank.group,
            "sequence_parallel": sequence_parallel,
            "token_weights": self.grad_loss * 2,
            "config": FusedCEConfig(strategy, **{"num_chunks": 2, **(options or {})}),
        }
        self.main_grad = None
        if end != "returned":
            self.main_grad = torch.zeros_like(self.weight, dtype=torch.float32 if end == "fp32" else dtype)

    def run(self) -> None:
        """A forward and a backward; gradients are added to those that are there."""
        self.forward().backward(self.grad_loss)

    def forward(self, hidden=None) -> torch.Tensor:
        open_grad_weight = ReturnedGradWeight if self.main_grad is None else self.open
        given = {**self.options, "open_grad_weight": open_grad_weight}
        hidden = self.hidden if hidden is None else hidden
        return linear_cross_entropy(Call(hidden, self.weight, self.inputs.labels, **given)).loss

    def open(self, weight, num_gemms, scaled):
        return InPlaceGradWeight(self.main_grad, scaled, lambda: None)

    def gradients(self):
        of_weight = self.weight.grad if self.main_grad is None else self.main_grad
        return [None if grad is None else grad.clone() for grad in (self.hidden.grad, of_weight)]

    def restore(self, gradients) -> None:
        """What :meth:`gradients` gave: an earlier micro-batch's."""
        of_hidden, of_weight = gradients
        self.hidden.grad = of_hidden.clone()
        if self.main_grad is None:
            self.weight.grad = of_weight.clone()
        else:
            self.main_grad.copy_(of_weight)


def out_of_memory_at(step: Step, at: int, earlier, right) -> str:
    """Let the operator ``at`` of a step fail, with ``earlier`` gradients there, and take the step again.

    What the failure left: ``untouched``, ``nan``, or ``whole`` where only what follows the op's own backward
    has failed. Anything else raises, and so does a next step that is not bitwise ``right``.
    """
    step.restore(earlier)
    with pytest.raises(torch.OutOfMemoryError), OutOfMemoryAt(at):
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
