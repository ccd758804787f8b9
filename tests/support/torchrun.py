"""torchrun's processes as the ranks of the tests: rank 0 is the pytest, the others do what it asks for.

    torchrun --nproc-per-node 2 -m pytest tests/parallel

A test for another number of ranks is skipped. Calls and outcomes go through torchrun's store, over no group,
so that a test which fails on one rank fails with that rank's words. After a failure the groups are made anew.
On GPUs the others may first wait for the failed rank in NCCL's collective until its time-out.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import pickle
import sys
from functools import partial
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from tests.support.rank_process import PLAIN, Environment, Outcome, Rank, join, run

#: Set by torchrun: this process is a rank.
IS_RANK = "TORCHELASTIC_RUN_ID" in os.environ
RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
#: How long the others wait for rank 0's next call; torchrun ends them where it has died.
NEXT_CALL = datetime.timedelta(days=1)


class TorchrunRank:
    """This process as one of torchrun's ranks."""

    def __init__(self) -> None:
        self._store, _, _ = next(dist.rendezvous("env://"))
        self._environment: Environment | None = None
        self._rank: Rank | None = None
        self._num_calls = 0

    def ask(self, *request: Any) -> list[Outcome]:
        """On rank 0: what every rank did with a call. Ends the session where one says nothing.

        The plain environment's tests are the first (tests/parallel/conftest.py): what Megatron's changes in a
        process stays changed. Of several such environments the first is kept.
        """
        if self._environment not in (None, PLAIN, request[0]):
            pytest.skip(f"this launch has the {self._environment.name} ranks")
        self._store.set(f"call {self._num_calls}", pickle.dumps(request))
        try:
            return self._run(*request)
        except dist.DistStoreError as error:
            pytest.exit(f"a rank has not ended its test in time: {error}", returncode=1)

    def serve(self) -> NoReturn:
        """On the others, until rank 0 has reported."""
        while True:
            key = f"call {self._num_calls}"
            self._store.wait([key], NEXT_CALL)
            request = pickle.loads(self._store.get(key))  # noqa: S301
            if not request:
                os._exit(0)
            self._run(*request)

    def end(self) -> None:
        """On rank 0: let the others go."""
        self._store.set(f"call {self._num_calls}", pickle.dumps(()))

    def _run(self, environment: Environment, call: bytes, on_gpus: bool, timeout_s: float) -> list[Outcome]:
        outcome = run(call, partial(self._join, environment, on_gpus))
        if outcome.failed:
            self._leave()  # the others' collectives end with an error
        keys = [f"call {self._num_calls} on {rank}" for rank in range(SIZE)]
        self._store.set(keys[RANK], pickle.dumps(outcome))
        # Rank 0 is the first to give up, and says so.
        self._store.wait(keys, datetime.timedelta(seconds=timeout_s * (1 + RANK)))
        self._num_calls += 1
        made = [pickle.loads(self._store.get(key)) for key in keys]  # noqa: S301
        if any(outcome.failed for outcome in made):
            self._leave()
        return made

    def _join(self, environment: Environment, on_gpus: bool) -> Rank:
        if self._environment != environment:
            sys.path[:0] = environment.path
            environment.load(on_gpus)
            self._environment = environment
        if self._rank is None:
            store = dist.PrefixStore(f"groups of {self._num_calls}", self._store)
            self._rank = join(RANK, SIZE, on_gpus, store)
        return self._rank

    def _leave(self) -> None:
        self._rank = None
        with contextlib.suppress(Exception):  # of a communicator that has given up
            dist.destroy_process_group()
        gc.collect()


this_rank = functools.cache(TorchrunRank)
