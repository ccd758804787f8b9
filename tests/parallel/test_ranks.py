"""The ranks of tests/support/ranks.py: what goes wrong on one fails that call alone, with its words."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
import torch.distributed as dist

from tests.support.ranks import Rank, RankFailure, Ranks, outcomes, results


def its_process(rank: Rank) -> int:
    dist.barrier()
    return os.getpid()


def goes_wrong(rank: Rank, how: str):
    """On the last one."""
    print(f"output of rank {rank.rank}")
    if rank.rank == rank.size - 1:
        if how == "raises":
            raise ValueError(f"words of rank {rank.rank}")
        if how in ("SIGKILL", "SIGSEGV"):
            os.kill(os.getpid(), getattr(signal, how))
        while how == "hangs":
            time.sleep(1)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["rank 1 raised", "ValueError: words of rank 1", "output of rank 1"]),
        ("SIGKILL", ["rank 1 died", "SIGKILL"]),
        ("SIGSEGV", ["rank 1 died", "SIGSEGV", "Fatal Python error", "in goes_wrong"]),
        ("hangs", ["rank 1 hung", "in goes_wrong"]),
    ],
)
def test_a_failing_rank(how, words):
    """It fails its test with its words, in time; the next test has ranks of its own."""
    began = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        results(outcomes(Ranks(2), goes_wrong, how, timeout_s=3.0))
    for word in words:
        assert word in str(raised.value)
    assert time.monotonic() - began < 30
    assert len(set(results(outcomes(Ranks(2), its_process)))) == 2


def test_ranks_live_on_and_heal():
    """Ranks that are kept are the same processes, until one fails."""
    ask = partial(outcomes, Ranks(2, own="kept"), lives_on=True)
    first = results(ask(its_process))
    assert results(ask(its_process)) == first
    with pytest.raises(RankFailure, match="words of rank 1"):
        results(ask(goes_wrong, "raises"))
    assert not set(results(ask(its_process))) & set(first)
    for process in first:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
