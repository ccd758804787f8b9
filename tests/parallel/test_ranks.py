"""The ranks of tests/support/ranks.py: what goes wrong on one fails that call alone, with its words."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.support.ranks import Rank, RankFailure, RankProcesses, Ranks, run_on_ranks


def its_process(rank: Rank) -> int:
    dist.barrier()
    return os.getpid()


def goes_wrong(rank: Rank, how: str):
    """On the last one."""
    print(f"output of rank {rank.rank}")
    if rank.rank == rank.size - 1:
        if how == "raises":
            raise ValueError(f"words of rank {rank.rank}")
        if how == "SIGSEGV":
            os.kill(os.getpid(), signal.SIGSEGV)
        while how == "hangs":
            time.sleep(1)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["rank 1 raised", "ValueError: words of rank 1", "output of rank 1"]),
        ("SIGSEGV", ["rank 1 died", "SIGSEGV", "Fatal Python error", "in goes_wrong"]),
        ("hangs", ["rank 1 hung", "in goes_wrong"]),
    ],
)
def test_a_failing_rank(how, words):
    """It fails its test with its words, in time; the next test has ranks of its own."""
    began = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        run_on_ranks(Ranks(2), goes_wrong, how, timeout_s=3.0)
    for word in words:
        assert word in str(raised.value)
    assert time.monotonic() - began < 30
    assert len(set(run_on_ranks(Ranks(2), its_process))) == 2


def test_a_world_lives_on_and_heals():
    """Ranks that are kept are the same processes, until one fails."""
    with RankProcesses(2) as world:
        first = world.run(its_process)
        assert world.run(its_process) == first
        with pytest.raises(RankFailure, match="words of rank 1"):
            world.run(goes_wrong, "raises")
        assert not set(world.run(its_process)) & set(first)
    for process in first:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
