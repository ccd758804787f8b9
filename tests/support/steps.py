"""Steps of a head that go wrong, or go in other orders than one forward, one backward, and what is left of
them: on one rank or on a group's."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import ReturnedGradWeight
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.losses import LOSS_OPTIONS, Loss
from tests.support.op import open_main_grad, rows_by

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
        self, strategy, end="returned", dtype=torch.float32, *, rank=None, sp=False, kind="odd-labels",
        seed=0, weight=None, **options,
    ):  # fmt: skip
        """``rank``: a :class:`.rank_process.Rank`, whose shard and part this is; None for the whole.
        ``options``: of the config."""
        device = "cpu" if rank is None else rank.device
        self.inputs = make_inputs(kind, **SIZES, dtype=dtype, seed=seed, device=device)
        at, size = (0, 1) if rank is None else (rank.rank, rank.size)
        self.hidden = self.inputs.hidden.chunk(size if sp else 1)[at if sp else 0].clone().requires_grad_()
        self.weight = weight
        if weight is None:
            self.weight = self.inputs.weight.chunk(size)[at].clone().requires_grad_()
        self.grad_loss = self.inputs.grad_loss
        self.options = {
            "tp_group": None if rank is None else rank.group,
            "sequence_parallel": sp,
            "token_weights": self.grad_loss * 2,
            "config": FusedCEConfig(strategy, **{"num_chunks": 2, **options}),
        }
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
        """Gradients of hidden states and weight, returned."""
        return torch.autograd.grad(loss, (self.hidden, self.weight), self.grad_loss)

    def alone(self):
        """Both gradients of this micro-batch by itself."""
        return self.backward(self.forward())

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


# --- other orders, other memory ----------------------------------------------------------------

MicroBatch = partial(Step, kind="plain", num_chunks=3)


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def equal(ones, others) -> bool:
    return all(map(torch.equal, ones, others))


def forwards_without_backward(strategy, **where) -> None:
    """They leave nothing: the same losses, the same gradients, no tensor alive."""
    head = MicroBatch(strategy, **where)
    expected = head.alone()
    first = head.forward().detach()
    time.sleep(0.05)  # what the collectives of the first held
    alive = tensors_alive()
    for _ in range(5):
        assert torch.equal(head.forward(), first)
    until = time.monotonic() + 20
    while tensors_alive() > alive and time.monotonic() < until:
        time.sleep(0.01)  # gloo's thread gives its own back when it gets to it
    assert tensors_alive() <= alive
    assert equal(head.alone(), expected)


def backwards_in_any_order(strategy, **where) -> None:
    """Three micro-batches under way at once, as in a pipeline: each backward is of its own forward."""
    heads = [MicroBatch(strategy, **where)]
    heads += [MicroBatch(strategy, seed=seed, weight=heads[0].weight, **where) for seed in (1, 2)]
    expected = [head.alone() for head in heads]
    for order in itertools.permutations(range(3)):
        losses = [head.forward() for head in heads]
        for index in order:
            assert equal(heads[index].backward(losses[index]), expected[index]), order


def two_models(**where) -> None:
    """Other strategies, other shapes, their steps between each other's."""
    one, other = MicroBatch("grad_in_forward", **where), MicroBatch("store", seed=1, **where)
    alone = one.alone(), other.alone()
    losses = one.forward(), other.forward()
    for head, loss, expected in zip((one, other), losses, alone, strict=True):
        assert equal(head.backward(loss), expected)


def nested_checkpoints(strategy, outer: bool, inner: bool, **where) -> None:
    """The forward runs again, twice for a nested one; without gradients in reentrant ones at first."""
    head = MicroBatch(strategy, **where)

    def stack(hidden):
        return head.forward(hidden * 0.5)

    plain = stack(head.hidden)
    expected = head.backward(plain)
    again = partial(checkpoint, stack, use_reentrant=inner)
    loss = checkpoint(again, head.hidden, use_reentrant=outer)
    assert torch.equal(loss, plain)
    loss.backward(head.grad_loss)
    assert equal((head.hidden.grad, head.weight.grad), expected)


#: What a head may be asked for, and every option of that.
ASKED = {
    **{name: Loss(options) for name, options in LOSS_OPTIONS.items()},
    **dict.fromkeys(("plain", "row kernels"), Loss()),
    "scaled": Loss({"logit_scale": 0.25}),
    "rounded": Loss({"logit_precision": "activations"}),
    "skipped": Loss({"skip_masked": True}),
    "all-reduced": Loss({"merge": "all_reduce"}),
    "scaled-exp GEMM": Loss({"logits_backend": "scaled_exp"}),
    "outputs": Loss(beside=tuple(OUTPUTS)),
    "distillation": Loss(entries=4),
    "masked padding": Loss({"true_vocab_size": 33}),  # within these 40
    "all": Loss({**LOSS_OPTIONS["all"], "true_vocab_size": 37}),
}


def filled(asked: str, strategy: str, value: float) -> list[torch.Tensor]:
    """Results and gradients of a step in which all fresh memory holds ``value``."""
    loss = replace(ASKED[asked], differentiable=strategy != "grad_in_forward")
    head = MicroBatch(strategy, **loss.options)
    if asked == "skipped":
        head.grad_loss[:, 2:5] = 0.0
        head.options["token_weights"] = head.grad_loss * 2
    rows = rows_by("triton" if asked == "row kernels" else "auto")
    with Filled(value) as empties, patch.object(tokens, "ROUND_TO", 2), rows:
        results = list(loss.ask(head.hidden, head.weight, head.inputs, **head.options).values())
        asked_for = [result for result in results if result.requires_grad]
        torch.autograd.backward(asked_for, [head.grad_loss] * len(asked_for))
    assert empties.count > 5
    return [result.detach() for result in results] + [head.hidden.grad, head.weight.grad]


def nothing_is_read_before_it_is_written(asked: str, strategy: str) -> None:
    """Fresh memory of NaN, of zeros, of large numbers: the same bits."""
    expected = filled(asked, strategy, 0.0)
    for value in (torch.nan, -3e38):
        assert equal(filled(asked, strategy, value), expected), value
    assert all(torch.isfinite(result).all() for result in expected)
