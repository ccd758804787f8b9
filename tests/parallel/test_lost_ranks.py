"""One rank is killed or raises in the middle of a chunk: the others end with an error in time, none hangs."""

from __future__ import annotations

import pytest

from tests.support import lost
from tests.support.lost import PHASES, TIMEOUT_S, Case
from tests.support.op import STRATEGIES
from tests.support.pairs import generate
from tests.support.ranks import RankProcesses

#: What gloo says of a connection that the other end has closed, and of one that it has waited on.
GONE = ("closed by peer", "reset by peer", "Broken pipe")
LATE = ("Timed out", "timeout")
#: For processes that share two cores with others.
MARGIN_S = 20.0


def survivors(case, function, *arguments):
    """What the survivor saw, and what became of the other rank."""
    with RankProcesses(lost.SIZE) as world:
        survivor, gone = world.outcomes(function, case, *arguments, grace_s=TIMEOUT_S + MARGIN_S)
    assert survivor.kind == "returned", survivor.value
    assert survivor.value["left"] in ("untouched", "nan")
    return survivor.value, gone


def is_gone(case):
    """Its connections are closed: nobody waits for the time-out."""
    seen, gone = survivors(case, lost.lose)
    assert gone.kind == ("died" if case.how == "killed" else "raised")
    assert ("SIGKILL" if case.how == "killed" else "Defect") in gone.value
    assert seen["seconds"] < TIMEOUT_S + MARGIN_S
    assert any(words in seen["error"] for words in GONE), seen["error"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_is_killed(strategy):
    is_gone(Case("killed", "backward", strategy, True))


#: Rows in which all pairs meet.
GONE_IN = generate(
    {
        **{"how": ("killed", "raised and gone"), "phase": PHASES, "strategy": STRATEGIES},
        **{"sequence_parallel": (False, True), "part": (0.3, 0.7)},
    }
)


@pytest.mark.rest
@pytest.mark.parametrize("case", GONE_IN, ids=lambda case: "-".join(map(str, case.values())))
def test_a_rank_that_is_gone(case):
    is_gone(Case(**case))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("strategy", "phase", "sp"),
    [("store", "forward", True), ("grad_in_forward", "forward", False), ("recompute", "backward", True)],
)
def test_a_rank_that_stays(tmp_path, strategy, phase, sp):
    """It has raised, and its process goes on without the group: the others end by the time-out."""
    case = Case("raised and stays", phase, strategy, sp)
    seen, stayed = survivors(case, lost.lose_and_stay, str(tmp_path / "ended"))
    assert stayed.kind == "returned", stayed.value
    assert TIMEOUT_S / 2 < seen["seconds"] < TIMEOUT_S + MARGIN_S
    assert any(words in seen["error"] for words in LATE), seen["error"]
