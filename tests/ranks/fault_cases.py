"""What goes wrong on all ranks at once, and steps in other orders, over a tensor-parallel group."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from tests.ranks import orders
from tests.ranks.faulty import OutOfMemoryAt, Step, out_of_memory_at
from tests.ranks.head_cases import STRATEGIES
from tests.ranks.runner import Rank


def out_of_memory(rank: Rank, *, strategy: str, sequence_parallel: bool) -> None:
    """With collectives under way: what was started is not waited for, and nothing of it is left."""
    step = Step(torch.float32, strategy, "fp32", rank=rank, sequence_parallel=sequence_parallel)
    step.run()
    earlier = step.gradients()
    with OutOfMemoryAt() as counted:
        step.run()
    right = step.gradients()
    operators = range(1, counted.count + 1)
    outcomes = {out_of_memory_at(step, at, earlier, right) for at in operators}
    # Triton's kernels are no operators, and on a GPU one of them is all that grad_in_forward adds.
    in_one_kernel = strategy == "grad_in_forward" and rank.device.type == "cuda"
    assert {"untouched", "whole" if in_one_kernel else "refused"} <= outcomes, outcomes


def in_other_orders(rank: Rank, *, strategy: str, sp: bool) -> None:
    for check in (
        orders.forwards_without_backward,
        orders.backwards_in_any_order,
        orders.forwards_between_backwards,
        orders.accumulation_is_the_sum,
    ):
        check(strategy, rank=rank, sp=sp)
    for outer, inner in itertools.product((True, False), repeat=2):
        orders.nested_checkpoints(strategy, outer, inner, rank=rank, sp=sp)


def two_models(rank: Rank) -> None:
    for sp in (False, True):
        orders.two_models(rank=rank, sp=sp)


def fresh_memory(rank: Rank, *, asked: str, strategy: str) -> None:
    if asked == "scaled-exp GEMM" and rank.device.type == "cuda":
        return  # it takes bf16 there: tests/kernels/test_scaled_exp.py
    for sp in (False, True):
        orders.nothing_is_read_before_it_is_written(asked, strategy, rank=rank, sp=sp)


CASES: dict[str, Any] = {"two models in one process": two_models}
for _strategy in STRATEGIES:
    for _sp in (False, True):
        CASES[f"out of memory, {_strategy} sp={_sp}"] = functools.partial(
            out_of_memory, strategy=_strategy, sequence_parallel=_sp
        )
        CASES[f"steps in other orders, {_strategy} sp={_sp}"] = functools.partial(
            in_other_orders, strategy=_strategy, sp=_sp
        )
    for _asked in orders.ASKED:
        CASES[f"fresh memory, {_strategy}, {_asked}"] = functools.partial(
            fresh_memory, asked=_asked, strategy=_strategy
        )
