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
from typing import NoReturn

import pytest

from tests.support.rank_process import PLAIN, Environment, Outcome, Rank, join, run

#: Set by torchrun: this process is a rank.
IS_RANK = "TORCHELASTIC_RUN_ID" in os.environ
RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
#: How long the others wait for rank 0's next call; torchrun ends them where it has died.
NEXT_CALL = datetime.timedelta(days=1)


class TorchrunRank:
    """This process as one of torchrun's ranks."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.store, _, _ = next(dist.rendezvous("env://"))
        self.environment: Environment | None = None
        self.num_calls = self.num_groups = 0
        self.failed = False  # any rank, in the last call
        self._rank: Rank | None = None

    def run(self, groups: int, environment: Environment, on_gpus: bool, call: bytes) -> None:
        """The call on this rank; the store gets its outcome. ``groups``: how often they were made anew."""
        if groups != self.num_groups:
            self._leave()
        self.num_groups = groups
        outcome = run(call, lambda: self._join(environment, on_gpus))
        if outcome.failed:
            self._leave()  # the others' collectives end with an error
        self.store.set(f"call {self.num_calls} on {RANK}", pickle.dumps(outcome))
        self.num_calls += 1

    def _join(self, environment: Environment, on_gpus: bool) -> Rank:
        import torch.distributed as dist

        if self.environment != environment:
            sys.path[:0] = environment.path
            environment.load(on_gpus)
            self.environment = environment
        if self._rank is None:
            store = dist.PrefixStore(f"groups {self.num_groups}", self.store)
            self._rank = join(RANK, SIZE, on_gpus, store)
        return self._rank

    def _leave(self) -> None:
        import torch.distributed as dist

        if self._rank is not None:
            self._rank = None
            with contextlib.suppress(Exception):  # of a communicator that has given up
                dist.destroy_process_group()
            gc.collect()


this_rank = functools.cache(TorchrunRank)


def outcomes(environment: Environment, call: bytes, on_gpus: bool, timeout_s: float) -> list[Outcome]:
    """What every rank did with a call. Ends the session where one says nothing.

    The plain environment's tests are the first (tests/parallel/conftest.py): what Megatron's changes in a
    process stays changed. Of several such environments the first is kept.
    """
    me = this_rank()
    if me.environment not in (None, PLAIN, environment):
        pytest.skip(f"this launch has the {me.environment.name} ranks")
    number, groups = me.num_calls, me.num_groups + me.failed
    request = groups, environment, on_gpus, call
    me.store.set(f"call {number}", pickle.dumps(request))
    me.run(*request)
    keys = [f"call {number} on {rank}" for rank in range(SIZE)]
    try:
        me.store.wait(keys, datetime.timedelta(seconds=timeout_s))
    except Exception as error:
        pytest.exit(f"a rank has not ended its test after {timeout_s} s: {error}", returncode=1)
    made = [pickle.loads(me.store.get(key)) for key in keys]  # noqa: S301
    me.failed = any(outcome.failed for outcome in made)
    return made


def serve() -> NoReturn:
    """Any rank but 0, until that has reported."""
    me = this_rank()
    while True:
        key = f"call {me.num_calls}"
        me.store.wait([key], NEXT_CALL)
        request = pickle.loads(me.store.get(key))  # noqa: S301
        if request is None:
            os._exit(0)
        me.run(*request)


def end() -> None:
    """Let the other ranks go."""
    me = this_rank()
    me.store.set(f"call {me.num_calls}", pickle.dumps(None))
