"""A rank that is lost in the middle of a step, and what the others see: their own error, in time.

Two ranks over gloo. After a whole step the last one, before some operator of its next one, is killed, or
raises and ends, or raises and stays without ever meeting the others again.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.faulty import AtOperator, Step, what_is_left
from tests.support.ranks import Rank

#: Of the group, from the loss on: the others wait as long as this for a rank that stays.
TIMEOUT_S = 4.0
#: The same for a rank that goes: its closed connections end the others' waits, long before this.
NEVER_S = 120.0
SIZE = 2
PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """``part``: how much of the phase's operators has run."""

    how: str  # killed, raised and gone, or raised and stays
    phase: str
    strategy: str
    sequence_parallel: bool
    part: float = 0.5


class Defect(Exception):
    """What a rank raises in the middle of a step."""


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raised() -> None:
    raise Defect


def _run(step: Step, forward: AtOperator, backward: AtOperator) -> None:
    with forward:
        loss = step.forward()
    with backward:
        loss.backward(step.grad_loss)


def lose_and_stay(rank: Rank, case: Case, ended: str) -> dict[str, Any] | None:
    """:func:`lose`; the last rank stays, without the group, until the survivor makes the file ``ended``."""
    if rank.rank != SIZE - 1:
        seen = lose(rank, case)
        Path(ended).touch()
        return seen
    try:
        lose(rank, case)
    except Defect:
        while not Path(ended).exists():
            time.sleep(0.05)
    return None


def lose(rank: Rank, case: Case) -> dict[str, Any]:
    """Both ranks: a whole step, then steps until an error. What the survivor has seen."""
    step = Step(torch.float32, case.strategy, "fp32", rank=rank, sequence_parallel=case.sequence_parallel)
    step.run()
    first = step.gradients()
    counted = {phase: AtOperator(_raised) for phase in PHASES}
    _run(step, **counted)
    second = step.gradients()
    step.restore(first)
    dist.barrier()
    limit_s = TIMEOUT_S if case.how == "raised and stays" else NEVER_S
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=limit_s), rank.group)
    if rank.rank == SIZE - 1:
        act = _killed if case.how == "killed" else _raised
        at = max(1, round(case.part * counted[case.phase].count))
        ends = {name: AtOperator(act, at if name == case.phase else None) for name in PHASES}
        _run(step, **ends)
        raise AssertionError("the step was not left")
    return _survive(step, first, second)


def _survive(step: Step, first: Any, second: Any) -> dict[str, Any]:
    """Steps until one fails: one that ran its collectives before the loss ends well, the next does not."""
    began = time.monotonic()
    earlier, right = first, second
    try:
        for _ in range(3):
            step.run()
            earlier, right = step.gradients(), [torch.full((), torch.inf)] * 2
    except RuntimeError as error:
        waited = time.monotonic() - began
        left = what_is_left(step, earlier, right)
        return {"error": str(error), "seconds": waited, "left": left}
    raise AssertionError("no error after three steps without the other rank")
