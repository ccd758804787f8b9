"""One rank is killed or raises in the middle of a chunk: the others end with an error in time, none hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.ranks import lost
from tests.ranks.head_cases import STRATEGIES
from tests.ranks.lost import PHASES, TIMEOUT_S, Case
from tests.ranks.runner import ENVIRONMENT, ROOT

#: What gloo says of a connection that the other end has closed, and of one that it has waited on.
GONE = ("closed by peer", "reset by peer", "Broken pipe")
LATE = ("Timed out", "timeout")
#: For processes that share two cores with others.
MARGIN_S = 20.0


@pytest.fixture(scope="module")
def processes():
    """Forked from one that has imported torch, and has used nothing of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.lost"])
    return context


class Lost:
    """The ranks of one case, started."""

    def __init__(self, processes, case, folder):
        self.case = case
        self.answers = processes.Queue()
        given = (str(folder / "store"), self.answers)
        self.ranks = [
            processes.Process(target=lost.child, args=(case, rank, *given), daemon=True)
            for rank in range(lost.SIZE)
        ]
        for process in self.ranks:
            process.start()

    def told(self):
        """What the survivor saw, after it and, where it was to go, the other one have ended."""
        answer = self.answers.get(timeout=TIMEOUT_S + 5 * MARGIN_S)
        survivor, gone = self.ranks
        survivor.join(MARGIN_S)
        assert survivor.exitcode == 0, "it does not end after its error"
        if self.case.how == "raised and stays":
            assert gone.is_alive()
            gone.kill()
        gone.join(MARGIN_S)
        expected = {"killed": -signal.SIGKILL, "raised and gone": 1}
        assert gone.exitcode == expected.get(self.case.how, -signal.SIGKILL)
        return answer


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["killed", "raised and gone"])
def test_a_rank_that_is_gone(processes, tmp_path, how, strategy, sp, phase):
    """Its connections are closed: nobody waits for the time-out. At two points of the phase."""
    for part in (0.3, 0.7):
        folder = tmp_path / str(part)
        folder.mkdir()
        told = Lost(processes, Case(how, phase, strategy, sp, part), folder).told()
        assert told["seconds"] < TIMEOUT_S + MARGIN_S
        assert any(words in told["error"] for words in GONE), told["error"]
        assert told["left"] in ("untouched", "refused")


def test_a_rank_that_stays(processes, tmp_path):
    """It has raised, and its process goes on without the group: the others end by the time-out."""
    cases = [
        Case("raised and stays", phase, strategy, sp)
        for strategy in STRATEGIES
        for phase, sp in zip(PHASES, (True, False), strict=True)
    ]
    started = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        started.append(Lost(processes, case, folder))
    for one in started:
        told = one.told()
        assert TIMEOUT_S / 2 < told["seconds"] < TIMEOUT_S + MARGIN_S, one.case
        assert any(words in told["error"] for words in LATE), (one.case, told["error"])
        assert told["left"] in ("untouched", "refused")


@pytest.mark.parametrize(
    ("how", "words"), [("killed", "Signal 9 (SIGKILL)"), ("raised and gone", "Defect")]
)
def test_a_launch_ends(how, words):
    """Under torchrun: status 1, and the rank that was lost is named."""
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(lost.SIZE), "-m", "tests.ranks.lost"),
            *(how, "backward", "store", "True"),
        ],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S + 6 * MARGIN_S,
    )
    assert done.returncode == 1 and words in done.stderr, done.stderr[-3000:]
    assert "AssertionError" not in done.stderr
    assert time.monotonic() - began < TIMEOUT_S + 5 * MARGIN_S
