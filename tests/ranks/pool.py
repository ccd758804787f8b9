"""Ranks that wait for work: one process each, for tests that decide what to run as they go.

    with RankPool(4) as pool:
        results = pool.run(function, argument, size=2)  # function(rank, group, argument) on ranks 0 and 1

Groups over the first ``size`` ranks (gloo, on a CPU) are made once. What a rank raises is raised here, after
all ranks have ended the call; one that hangs is a time-out.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fused_ce.testing import gloo

TIMEOUT_S = 60

_groups: dict[int, dist.ProcessGroup] = {}
_rank = 0


def join_gloo(rank: int, size: int, store: str, timeout_s: float) -> None:
    """Make this process a rank on a CPU; ``store`` is a file that the ranks share."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    gloo.use_one_thread()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _join(rank: int, size: int, store: str) -> None:
    """What each process does first."""
    global _rank
    _rank = rank
    join_gloo(rank, size, store, TIMEOUT_S)
    for members in range(1, size + 1):
        group = dist.new_group(list(range(members)))
        if rank < members:
            _groups[members] = group


def _call(function: Callable[..., Any], argument: Any, size: int) -> Any:
    return function(_rank, _groups[size], argument)


class RankPool:
    """Context manager: ``size`` processes of one rank each."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        store = str(Path(self._folder.name) / "store")
        self._ranks = [
            ProcessPoolExecutor(1, context, initializer=_join, initargs=(rank, size, store))
            for rank in range(size)
        ]
        for rank in self._ranks:
            rank.submit(int)  # it starts, and joins: that takes all of them

    def run(self, function: Callable[..., Any], argument: Any, size: int) -> list[Any]:
        """``function(rank, group, argument)`` on the first ``size`` ranks; their results in order."""
        calls = [rank.submit(_call, function, argument, size) for rank in self._ranks[:size]]
        _, late = wait(calls, timeout=2 * TIMEOUT_S)
        assert not late, "a rank hangs"
        return [call.result() for call in calls]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self._ranks:
            rank.shutdown(wait=False, cancel_futures=True)
        for rank in self._ranks:
            rank.shutdown()
        self._folder.cleanup()
