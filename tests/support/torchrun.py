"""torchrun's processes as the ranks of the tests, each a pytest of its own over the same tests in one order.

    torchrun --nproc-per-node 2 -m pytest tests/parallel

A test for another number of ranks is skipped. After each test the ranks exchange how it went, through
torchrun's store and over no group, so that a test which fails on one rank fails on all of them. After a
failure the groups are made anew. On GPUs the others may first wait for the failed rank in NCCL's
collective until its time-out.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import sys
from typing import Any

import pytest

from tests.support.rank_process import Environment, Place, Rank, RemoteCall, join

#: Set by torchrun: this process is a rank.
IS_RANK = "TORCHELASTIC_RUN_ID" in os.environ
RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class TorchrunRank:
    """This process as one of torchrun's ranks."""

    def __init__(self) -> None:
        self._store: Any = None
        self._rank: Rank | None = None
        self._environment: Environment | None = None
        self._num_calls = 0

    def run(self, environment: Environment, call: RemoteCall, on_gpus: bool, timeout_s: float) -> None:
        """The call on this rank; raises what any rank raised."""
        __tracebackhide__ = True
        kind, value = call.run_cleanly(self._join(environment, on_gpus))
        if kind == "raised":
            self._leave()  # the others' collectives end with an error
        words = "" if kind == "returned" else f"--- rank {RANK} {kind}\n{value}"
        told = self._exchange([kind, words], timeout_s)
        words = "\n".join(words for _, words in told if words)
        if any(kind == "raised" for kind, _ in told):
            self._leave()
            raise AssertionError(words)
        if words:
            pytest.skip(words)

    def end(self) -> None:
        """Wait until rank 0 has printed its report: torchrun kills the others when one rank fails."""
        if self._store is not None and RANK == 0:
            sys.stdout.flush()
            self._store.set("reported", "")
        elif self._store is not None:
            with contextlib.suppress(Exception):  # rank 0 was killed
                self._store.wait(["reported"], datetime.timedelta(seconds=60))

    def _join(self, environment: Environment, on_gpus: bool) -> Rank:
        import torch.distributed as dist

        if self._store is None:
            self._store, _, _ = next(dist.rendezvous("env://"))
        if self._environment != environment:
            # Megatron's environment comes after the plain one, and stays: see tests/parallel/conftest.py.
            sys.path[:0] = environment.path
            environment.load(on_gpus)
            self._environment = environment
        if self._rank is None:
            place = Place(RANK, SIZE, "", on_gpus)
            self._rank = join(place, self._store, prefix=f"groups of {self._num_calls}")
        return self._rank

    def _leave(self) -> None:
        import torch.distributed as dist

        if self._rank is not None:
            self._rank = None
            with contextlib.suppress(Exception):  # of a communicator that has given up
                dist.destroy_process_group()
            gc.collect()

    def _exchange(self, mine: list[str], timeout_s: float) -> list[list[str]]:
        """What each rank says of this call; ends the session where one says nothing."""
        self._num_calls += 1
        keys = [f"call {self._num_calls} on {rank}" for rank in range(SIZE)]
        self._store.set(keys[RANK], json.dumps(mine))
        try:
            self._store.wait(keys, datetime.timedelta(seconds=timeout_s))
        except Exception as error:
            pytest.exit(f"a rank has not ended its test after {timeout_s} s: {error}", returncode=1)
        return [json.loads(self._store.get(key)) for key in keys]


THIS_RANK = TorchrunRank()
