"""Failures on all ranks at once, and steps in other orders, over a tensor-parallel group."""

from __future__ import annotations

import itertools

import pytest

from tests.support import steps
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks
from tests.support.steps import AtOperator, Step, out_of_memory_at

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


@on_ranks(2)
@SP
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_in_other_orders(rank: Rank, strategy, sp):
    """Their sum in one main_grad: test_head.py."""
    steps.forwards_without_backward(strategy, rank=rank, sp=sp)
    steps.backwards_in_any_order(strategy, rank=rank, sp=sp)
    for outer, inner in itertools.product((True, False), repeat=2):
        steps.nested_checkpoints(strategy, outer, inner, rank=rank, sp=sp)


@on_ranks(2)
@SP
def test_two_models_in_one_process(rank: Rank, sp):
    steps.two_models(rank=rank, sp=sp)
