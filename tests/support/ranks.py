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
its processes are the ranks: see tests/parallel/conftest.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import rank_process, torchrun
from tests.support.rank_process import PLAIN, Environment, Place, RemoteCall
from tests.support.rank_process import Rank as Rank

ROOT = Path(__file__).resolve().parents[2]
#: Counted before stand-ins for CUDA can be in this process.
NUM_GPUS = torch.cuda.device_count()
#: Ranks that one GPU takes.
SHARING = 2
#: Of one test, from the moment its ranks have been asked. A collective gives up before.
TIMEOUT_S = 2.0 * rank_process.GROUP_TIMEOUT_S
#: Until all ranks have joined: those on GPUs import torch and Megatron first.
START_TIMEOUT_S = 300.0
#: How long the other ranks may take for their own error after the first one's.
GRACE_S = 5.0
#: Of a failing rank's output, what is shown.
OUTPUT_CHARACTERS = 4000

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


@dataclass(frozen=True)
class RankOutcome:
    """What one rank did with a call.

    ``kind``: ``returned``, ``skipped``, ``raised``, ``died``, ``hung``, or ``stopped`` where another rank had
    failed and this one did not end within :data:`GRACE_S`.
    """

    kind: str
    value: Any = None

    @property
    def failed(self) -> bool:
        return self.kind not in ("returned", "skipped")


# --- processes -------------------------------------------------------------------------------


class Server:
    """The process of :func:`.rank_process.serve`, which forks ranks.

    Raises ``RuntimeError`` where it has ended, or cannot fork because a test's module started a thread.
    """

    def __init__(self, environment: Environment, on_gpus: bool) -> None:
        folders = (*environment.path, str(ROOT), os.environ.get("PYTHONPATH"))
        variables = {**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", rank_process.__name__, str(theirs.fileno())],
                cwd=ROOT,
                env=variables if on_gpus else variables | WITHOUT_GPUS,
                pass_fds=[theirs.fileno()],
            )
        self._requests = Connection(mine.detach())
        self._ask((environment, on_gpus))
        atexit.register(self.close)

    def fork(self, place: Place, descriptor: int, module: str) -> int:
        reply = self._ask((place, module), descriptor)
        if isinstance(reply, str):
            self.close()
            raise RuntimeError(reply)
        return reply

    def status(self, process: int) -> int:
        """How a rank ended, as ``os.waitpid`` says it. Waits for its end; 0 where the server has ended."""
        return self._ask(process) if self.is_alive else 0

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _ask(self, request: Any, descriptor: int | None = None) -> Any:
        self._requests.send(request)
        if descriptor is not None:
            reduction.send_handle(self._requests, descriptor, self._process.pid)
        try:
            return self._requests.recv()
        except EOFError:
            raise RuntimeError(f"the server of ranks ended with {self._process.wait()}") from None

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


_servers: dict[tuple[Environment, bool], Server] = {}


class RankProcesses:
    """Context manager: ``size`` ranks in processes of their own, for as many calls as succeed.

    After a call in which a rank failed all of them are gone: the others may sit in a collective.
    """

    def __init__(
        self, size: int, environment: Environment = PLAIN, *, on_gpus: bool = False, joins: bool = True
    ) -> None:
        """``joins``: see :class:`.rank_process.Place`."""
        if torchrun.IS_RANK:
            pytest.skip("the test starts ranks of its own")
        self.size, self.environment, self.on_gpus, self.joins = size, environment, on_gpus, joins
        self._folder = ""
        self._connections: list[Connection] = []
        self._processes: list[int] = []

    def _open(self, module: str) -> None:
        key = self.environment, self.on_gpus
        if key not in _servers or not _servers[key].is_alive:
            _servers[key] = Server(*key)
        self._server = _servers[key]
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.size):
            mine, theirs = socket.socketpair()
            self._connections.append(Connection(mine.detach()))
            with theirs:
                self._processes.append(self._server.fork(self._place(rank), theirs.fileno(), module))
        results(self._collect(START_TIMEOUT_S, GRACE_S))

    def _place(self, rank: int) -> Place:
        return Place(rank, self.size, self._folder, self.on_gpus, self.joins)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """``function(rank, *arguments, **options)`` on every rank; their results in order.

        Raises :class:`RankFailure`, or pytest's skip where a rank skipped.
        """
        __tracebackhide__ = True
        return results(self.outcomes(function, *arguments, **options))

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = TIMEOUT_S,
        grace_s: float = GRACE_S,
        **options: Any,
    ) -> list[RankOutcome]:
        """What every rank did with the call, in order of rank."""
        call = RemoteCall(function.__module__, function.__qualname__, arguments, options)
        try:
            if not self._connections:
                self._open(call.module)
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):  # it has died: that is its outcome
                    connection.send(call)
            made = self._collect(timeout_s, grace_s)
        except BaseException:
            self.close()
            raise
        if any(outcome.failed for outcome in made):
            self.close()
        return made

    def _collect(self, timeout_s: float, grace_s: float) -> list[RankOutcome]:
        made: dict[int, RankOutcome] = {}
        late, until = "hung", time.monotonic() + timeout_s
        while len(made) < self.size:
            waiting = {c: i for i, c in enumerate(self._connections) if i not in made}
            ready = connections.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    made[rank] = RankOutcome(late, self._stack(rank))
            for connection in ready:
                rank = waiting[connection]
                try:
                    kind, value = connection.recv()
                    if kind == "raised":
                        value = f"{value}\n{self._output(rank)}".rstrip()
                except (EOFError, ConnectionResetError):
                    kind, value = "died", self._end(rank)
                made[rank] = RankOutcome(kind, value)
                if made[rank].failed and late == "hung":
                    late, until = "stopped", min(until, time.monotonic() + grace_s)
        return [made[rank] for rank in range(self.size)]

    def _stack(self, rank: int) -> str:
        """Where a rank's threads are: faulthandler writes it, whatever Python is doing."""
        os.kill(self._processes[rank], signal.SIGUSR1)
        time.sleep(0.5)
        return self._output(rank)

    def _end(self, rank: int) -> str:
        """How a rank's process ended, and its last words."""
        process, self._processes[rank] = self._processes[rank], 0
        status = os.waitstatus_to_exitcode(self._server.status(process))
        how = f"of {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return f"ended {how}\n{self._output(rank)}"

    def _output(self, rank: int) -> str:
        output = self._place(rank).output
        return output.read_text(errors="replace")[-OUTPUT_CHARACTERS:] if output.exists() else ""

    def close(self, *, kill: bool = True) -> None:
        """End all ranks, whatever they are doing; those that wait for a call leave by themselves."""
        for connection in self._connections:
            connection.close()
        for process in filter(None, self._processes):
            if kill:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._server.status(process)
        self._connections, self._processes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(kill=False)


def results(outcomes: list[RankOutcome]) -> list[Any]:
    """What the ranks returned; raises for a failed rank, and skips where one did."""
    __tracebackhide__ = True
    if any(outcome.failed for outcome in outcomes):
        words = [
            f"--- rank {rank} {outcome.kind}\n{outcome.value}"
            for rank, outcome in enumerate(outcomes)
            if outcome.kind != "returned"
        ]
        raise RankFailure("\n".join(words))
    for outcome in outcomes:
        if outcome.kind == "skipped":
            pytest.skip(outcome.value)
    return [outcome.value for outcome in outcomes]


# --- tests -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """How many ranks a test runs on, and in which environment."""

    size: int
    environment: Environment = PLAIN
    #: Where ranks live on, those of another name are others.
    own: str = ""
    #: What gloo cannot do with CUDA tensors: why two ranks cannot share a GPU.
    needs_nccl: str = field(default="", compare=False)

    def __str__(self) -> str:
        kind = "" if self.environment == PLAIN else f"-{self.environment.name}"
        return f"{self.size}rank{'s' if self.size > 1 else ''}{kind}"


#: Rank processes that live on: those on GPUs.
_worlds: dict[Ranks, RankProcesses] = {}


def run_on_ranks(ranks: Ranks, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """One call on ranks of its own, or, on GPUs, on those of the last one. See :meth:`RankProcesses.run`."""
    __tracebackhide__ = True
    if not NUM_GPUS:
        with RankProcesses(ranks.size, ranks.environment) as world:
            return world.run(function, *arguments, **options)
    if ranks.size > NUM_GPUS:
        if ranks.size > SHARING:
            pytest.skip(f"{ranks.size} ranks: there are {NUM_GPUS} GPUs")
        if ranks.needs_nccl:
            pytest.skip(f"needs NCCL, and ranks on one GPU have gloo: {ranks.needs_nccl}")
    if ranks not in _worlds:
        _worlds[ranks] = RankProcesses(ranks.size, ranks.environment, on_gpus=True)
    return _worlds[ranks].run(function, *arguments, **options)


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
                run_on_ranks(ranks, function, timeout_s=timeout_s, **options)
            elif ranks.size == torchrun.SIZE:
                call = RemoteCall(function.__module__, function.__qualname__, (), options)
                torchrun.THIS_RANK.run(ranks.environment, call, NUM_GPUS > 0, timeout_s)
            else:
                pytest.skip(f"{ranks.size} ranks: torchrun has started {torchrun.SIZE}")

        first, *others = inspect.signature(function).parameters.values()
        assert first.name == "rank", f"{function.__qualname__}: the first parameter is the rank"
        made: Any = test
        made.__signature__ = inspect.Signature([first.replace(name="ranks"), *others])
        made.on_a_rank = function
        return pytest.mark.parametrize("ranks", list(map(as_param, worlds)))(made)

    return make
