"""Failures on all ranks at once, and steps in other orders, over a tensor-parallel group."""

from __future__ import annotations

import itertools
import time
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks
from tests.support.steps import AtOperator, Step, out_of_memory_at, tensors_alive

MicroBatch = partial(Step, kind="plain", num_chunks=3)
SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


@pytest.mark.rest
@on_ranks(2, timeout_s=300)
@pytest.mark.parametrize(
    ("strategy", "sp"), [("store", True), ("grad_in_forward", True), ("recompute", False)]
)
def test_out_of_memory(rank: Rank, strategy, sp):
    """With collectives under way: what was started is not waited for, and nothing of it is left."""
    step = Step(strategy, "fp32", rank=rank, sp=sp)
    step.run()
    earlier = step.gradients()
    with AtOperator() as counted:
        step.run()
    right = step.gradients()
    operators = range(1, counted.count + 1)
    outcomes = {out_of_memory_at(step, at, earlier, right) for at in operators}
    # Triton's kernels are no operators, and on a GPU one of them is all that grad_in_forward adds.
    in_one_kernel = strategy == "grad_in_forward" and rank.device.type == "cuda"
    assert {"untouched", "whole" if in_one_kernel else "nan"} <= outcomes, outcomes


def equal(ones, others) -> bool:
    return all(map(torch.equal, ones, others))


@on_ranks(2)
@SP
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forwards_without_backward(rank: Rank, strategy, sp):
    """They leave nothing: the same losses, the same gradients, no tensor alive."""
    head = MicroBatch(strategy, rank=rank, sp=sp)
    expected = head.backward(head.forward())
    first = head.forward().detach()
    time.sleep(0.05)  # what the collectives of the first held
    alive = tensors_alive()
    for _ in range(5):
        assert torch.equal(head.forward(), first)
    until = time.monotonic() + 20
    while tensors_alive() > alive and time.monotonic() < until:
        time.sleep(0.01)  # gloo's thread gives its own back when it gets to it
    assert tensors_alive() <= alive
    assert equal(head.backward(head.forward()), expected)


@on_ranks(2)
@SP
@pytest.mark.parametrize("strategies", [*((one,) * 3 for one in STRATEGIES), STRATEGIES])
def test_backwards_in_any_order(rank: Rank, strategies, sp):
    """Micro-batches of one weight under way at once, as in a pipeline, and models of other strategies: each
    backward is of its own forward. Their sum in one main_grad: test_head.py."""
    heads = [MicroBatch(strategies[0], rank=rank, sp=sp)]
    for seed, strategy in enumerate(strategies[1:], start=1):
        weight = heads[0].weight if strategy == strategies[0] else None
        heads.append(MicroBatch(strategy, seed=seed, weight=weight, rank=rank, sp=sp))
    expected = [head.backward(head.forward()) for head in heads]
    for order in itertools.permutations(range(3)):
        losses = [head.forward() for head in heads]
        for index in order:
            assert equal(heads[index].backward(losses[index]), expected[index]), order


@on_ranks(2)
@SP
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nested_checkpoints(rank: Rank, strategy, sp):
    """The forward runs again, twice for a nested one; without gradients in reentrant ones at first."""

    def stack(head, hidden):
        return head.forward(hidden * 0.5)

    for outer, inner in itertools.product((True, False), repeat=2):
        head = MicroBatch(strategy, rank=rank, sp=sp)
        plain = stack(head, head.hidden)
        expected = head.backward(plain)
        again = partial(checkpoint, stack, head, use_reentrant=inner)
        loss = checkpoint(again, head.hidden, use_reentrant=outer)
        assert torch.equal(loss, plain)
        loss.backward(head.grad_loss)
        assert equal((head.hidden.grad, head.weight.grad), expected)
