"""A rank is killed in the middle of a chunk, or raises and stays without ever meeting the others again: they
end with an error of their own in time, none hangs. Two ranks over gloo."""

from __future__ import annotations

import datetime
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.op import STRATEGIES
from tests.support.pairs import cases
from tests.support.ranks import Rank, RankProcesses
from tests.support.steps import AtOperator, Step, what_is_left

PHASES = ("forward", "backward")
#: Of the group, from the loss on: the others wait as long as this for a rank that stays.
TIMEOUT_S = 4.0
#: The same for a rank that is killed: its closed connections end the others' waits, long before this.
NEVER_S = 120.0
#: For processes that share two cores with others.
MARGIN_S = 20.0
#: What gloo says of a connection that the other end has closed, and of one that it has waited on.
WORDS = {
    "killed": ("closed by peer", "reset by peer", "Broken pipe"),
    "stays": ("Timed out", "timeout"),
}


class Defect(Exception):
    """What a rank raises in the middle of a step."""


def lose(rank: Rank, ended: str, how, phase, strategy, sp):
    """A whole step, and steps until an error: what the first rank, which survives, has seen.

    The last one is lost before an operator of its next step; if it stays, until the other makes ``ended``.
    """
    step = Step(strategy, "fp32", rank=rank, sp=sp)

    def act() -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Defect

    def run(at: int | None = None) -> int:
        counted = {name: AtOperator(at if name == phase else None, act) for name in PHASES}
        with counted["forward"]:
            loss = step.forward()
        with counted["backward"]:
            loss.backward(step.grad_loss)
        return counted[phase].count

    step.run()
    first = step.gradients()
    count = run()
    second = step.gradients()
    step.restore(first)
    dist.barrier()
    limit_s = TIMEOUT_S if how == "stays" else NEVER_S
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=limit_s), rank.group)
    if rank.rank:
        with pytest.raises(Defect):
            run(count // 2)
        while not Path(ended).exists():
            time.sleep(0.05)
        return None
    # A step that ran its collectives before the loss ends well, the next does not.
    began, earlier, right = time.monotonic(), first, second
    with pytest.raises(RuntimeError) as raised:
        for _ in range(3):
            step.run()
            earlier, right = step.gradients(), [torch.full((), torch.inf)] * 2
    seconds = time.monotonic() - began
    Path(ended).touch()
    return str(raised.value), seconds, what_is_left(step, earlier, right)


#: Rows in which all pairs meet; those of `make test` come first.
ROWS = cases({"how": tuple(WORDS), "phase": PHASES, "strategy": STRATEGIES, "sp": (False, True)})
CASES = [("killed", "backward", strategy, True) for strategy in STRATEGIES]
CASES += [pytest.param(*row.values(), marks=pytest.mark.rest) for row in ROWS.values()]


@pytest.mark.parametrize(("how", "phase", "strategy", "sp"), CASES)
def test_a_rank_that_is_lost(tmp_path, how, phase, strategy, sp):
    with RankProcesses(2) as world:
        given = str(tmp_path / "ended"), how, phase, strategy, sp
        survivor, lost = world.outcomes(lose, *given, grace_s=TIMEOUT_S + MARGIN_S)
    assert survivor.kind == "returned", survivor.value
    assert lost.kind == ("died" if how == "killed" else "returned"), lost.value
    error, seconds, left = survivor.value
    assert any(words in error for words in WORDS[how]), error
    assert left in ("untouched", "nan")
    assert (how == "stays") * TIMEOUT_S / 2 < seconds + 1e-9 < TIMEOUT_S + MARGIN_S
