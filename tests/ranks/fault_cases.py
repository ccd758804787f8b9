"""All ranks run out of memory in the same operator: the next step is right on each."""

from __future__ import annotations

import functools

import torch

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
    assert {"untouched", "refused"} <= outcomes, outcomes


CASES = {
    f"out of memory, {strategy} sp={sp}": functools.partial(
        out_of_memory, strategy=strategy, sequence_parallel=sp
    )
    for strategy in STRATEGIES
    for sp in (False, True)
}
