"""Distributed tests as ordinary tests: a function and the numbers of ranks that it runs on.

    @on_ranks(2, 4)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_head(rank: Rank, strategy): ...

collects ``test_head[store-2ranks]`` and so on. The body runs on every rank; the test fails if one rank
raises, dies or does not end in time, with that rank's traceback, last output or stack. The ranks import the
test's module and call the function by its name; its arguments are pickled.

All ranks are forked from a server without threads, which on a CPU has torch loaded. There each test has ranks
of its own; on GPUs, where contexts and communicators cost seconds, they live on from test to test until one
fails. Two ranks on a single GPU share it, over gloo, but where a test says that it needs NCCL. Under torchrun
its processes are the ranks: see tests/support/torchrun.py.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import rank_process, torchrun
from tests.support.rank_process import Environment, Outcome
from tests.support.rank_process import Rank as Rank
from tests.support.rank_process import Ranks as Ranks

ROOT = Path(__file__).resolve().parents[2]
#: Counted before stand-ins for CUDA can be in this process.
NUM_GPUS = torch.cuda.device_count()
#: Ranks that one GPU takes.
SHARING = 2
#: Of one test, from the moment its ranks have been asked. A collective gives up before.
TIMEOUT_S = 2.0 * rank_process.GROUP_TIMEOUT_S
#: How long the other ranks may take for their own error after the first one's.
GRACE_S = 5.0

#: One thread a rank; Megatron's jitted functions run as they are written.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONFAULTHANDLER": "1",
    # grad_in_forward's promise, which a test must not break unawares.
    "PYTHONWARNINGS": "error:the upstream gradient of the per-token loss:UserWarning",
}
#: Whoever asks whether there is a GPU finds none, and asks without starting CUDA: that spoils forks.
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TRITON_INTERPRET": "1"}


class RankFailure(AssertionError):
    """At least one rank raised, died or did not end in time; the message has every rank's words."""


class Server:
    """The process of :func:`.rank_process.serve`."""

    def __init__(self, environment: Environment, on_gpus: bool) -> None:
        folders = (*environment.path, str(ROOT), os.environ.get("PYTHONPATH"))
        variables = {**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        self._requests, theirs = Pipe()
        with theirs:
            words = [sys.executable, "-m", rank_process.__name__, str(theirs.fileno()), *["GPUS"] * on_gpus]
            variables |= {} if on_gpus else WITHOUT_GPUS
            self._process = subprocess.Popen(words, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()])

    def ask(self, *request: Any) -> list[Outcome]:
        """Raises ``RuntimeError`` where it has ended, or cannot fork because a module started a thread."""
        try:
            self._requests.send(request)
            reply = self._requests.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            reply = f"the server of ranks ended with {self._process.wait()}"
        if isinstance(reply, str):
            raise RuntimeError(reply)
        return reply


_servers: dict[tuple[Environment, bool], Server] = {}


def outcomes(
    ranks: Ranks,
    function: Callable[..., Any],
    *arguments: Any,
    on_gpus: bool = False,
    lives_on: bool = False,
    timeout_s: float = TIMEOUT_S,
    grace_s: float = GRACE_S,
    **options: Any,
) -> list[Outcome]:
    """What every rank did with ``function(rank, *arguments, **options)``, in order of rank.

    ``lives_on``: the next call on ranks that are equal to these has the same processes, but where one failed.
    """
    if torchrun.IS_RANK:
        pytest.skip("the test starts ranks of its own")
    key = ranks.environment, on_gpus
    server = _servers.pop(key, None) or Server(*key)
    call = pickle.dumps((function, arguments, options))
    made = server.ask(ranks, function.__module__, call, lives_on, timeout_s, grace_s)
    _servers[key] = server  # only now: what has failed leaves no reply for the next call
    return made


def results(made: list[Outcome]) -> list[Any]:
    """What the ranks returned; raises :class:`RankFailure` for a failed rank, and skips where one did."""
    __tracebackhide__ = True
    told = {f"rank {rank} {one.kind}\n{one.words}": one for rank, one in enumerate(made) if one.words}
    if any(one.failed for one in made):
        raise RankFailure("\n".join(f"--- {words}" for words in told))
    for one in told.values():
        pytest.skip(one.words)
    return [pickle.loads(one.pickled) for one in made]  # noqa: S301  of its rank


def run_on_ranks(ranks: Ranks, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """What ranks on GPUs return, where there are any, else forked ones. See :func:`outcomes`."""
    __tracebackhide__ = True
    if 0 < NUM_GPUS < ranks.size:
        if ranks.size > SHARING:
            pytest.skip(f"{ranks.size} ranks: there are {NUM_GPUS} GPUs")
        if ranks.needs_nccl:
            pytest.skip(f"needs NCCL, and ranks on one GPU have gloo: {ranks.needs_nccl}")
    gpus = NUM_GPUS > 0
    return results(outcomes(ranks, function, *arguments, on_gpus=gpus, lives_on=gpus, **options))


def on_ranks(*worlds: Any, timeout_s: float = TIMEOUT_S) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of a function whose first parameter is ``rank``; the others are pytest's.

    ``worlds``: numbers of ranks, :class:`Ranks`, or ``pytest.param`` of one.
    """

    def as_param(world: Any) -> Any:
        marks = ()
        if isinstance(world, type(pytest.param())):
            (world,), marks = world.values, world.marks
        world = Ranks(world) if isinstance(world, int) else world
        return pytest.param(world, id=str(world), marks=marks)

    def make(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def test(ranks: Ranks, **options: Any) -> None:
            __tracebackhide__ = True
            if not torchrun.IS_RANK:
                run_on_ranks(ranks, made, timeout_s=timeout_s, **options)
            elif ranks.size == torchrun.SIZE:
                call = pickle.dumps((made, (), options))
                results(torchrun.this_rank().ask(ranks.environment, call, NUM_GPUS > 0, timeout_s))
            else:
                pytest.skip(f"{ranks.size} ranks: torchrun has started {torchrun.SIZE}")

        first, *others = inspect.signature(function).parameters.values()
        assert first.name == "rank", f"{function.__qualname__}: the first parameter is the rank"
        made: Any = test
        made.__signature__ = inspect.Signature([first.replace(name="ranks"), *others])
        made.on_a_rank = function
        return pytest.mark.parametrize("ranks", list(map(as_param, worlds)))(made)

    return make
