"""The process of one rank, and the server that forks such processes: the far end of tests/support/ranks.py.

    python -m tests.support.rank_process FD [GPUS]

``FD`` is a socket to the process of the tests. Over it a request is one call on all ranks of a world, and its
reply the :class:`Outcome` of every rank. The server's children are the ranks: it forks them, waits for them,
asks one that hangs for its stack, and reads with which status one died.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

#: Of a collective. Longer than any test's, shorter than what a test may take.
GROUP_TIMEOUT_S = 60
#: Of a first call on GPUs, in addition: the ranks import torch and Megatron, and join.
START_TIMEOUT_S = 300.0
#: Of a failing rank's output, what is shown.
OUTPUT_CHARACTERS = 4000


@dataclass(frozen=True)
class Environment:
    """What a rank's process has before its first test. Ranks of two environments share no server."""

    name: str = "plain"
    #: First on ``PYTHONPATH``: another megatron-core.
    path: tuple[str, ...] = ()
    #: ``module:function``, called with the device before anything else is imported.
    prepare: str = ""
    #: Modules that every rank finds imported.
    preload: tuple[str, ...] = (
        "pytest",
        "torch",
        "megatron_fused_ce.kernels.scaled_exp_rows",
        "tests.support.interpreter",
    )

    def load(self, on_gpus: bool) -> None:
        import torch

        if self.prepare:
            module, name = self.prepare.split(":")
            device = torch.device("cuda" if on_gpus else "cpu")
            getattr(importlib.import_module(module), name)(device)
        for module in self.preload:
            with contextlib.suppress(ImportError):  # the tests that need it say so
                importlib.import_module(module)
        # torch.empty gives NaN. torch.use_deterministic_algorithms would import the compiler, for seconds.
        torch.set_deterministic_debug_mode("error")


PLAIN = Environment()


@dataclass(frozen=True)
class Ranks:
    """How many ranks a test runs on, and in which environment."""

    size: int
    environment: Environment = PLAIN
    #: Where ranks live on, those of another name are others.
    own: str = ""
    #: What gloo cannot do with CUDA tensors: why two ranks cannot share a GPU.
    needs_nccl: str = field(default="", compare=False)
    #: They are the tests' default group; a launch makes its own.
    join: bool = True

    def __str__(self) -> str:
        kind = "" if self.environment == PLAIN else f"-{self.environment.name}"
        return f"{self.size}rank{'s' if self.size > 1 else ''}{kind}"


@dataclass(frozen=True)
class Rank:
    """What a test's function gets first: ``group`` is all ranks, as one tensor-parallel group."""

    group: Any  # dist.ProcessGroup
    rank: int
    size: int
    device: Any  # torch.device


@dataclass(frozen=True)
class Outcome:
    """What one rank did with a call.

    ``kind``: ``returned``, ``skipped``, ``raised``, ``died``, ``hung``, or ``stopped`` where another rank had
    failed and this one did not end within the grace. ``words``: reason, traceback, or stack, and output.
    """

    kind: str
    words: str = ""
    pickled: bytes = b""  # what it returned
    status: int = 0  # with which it died; below 0 that signal

    @property
    def failed(self) -> bool:
        return self.kind not in ("returned", "skipped")


# --- on a rank -------------------------------------------------------------------------------


def run(call: bytes, this_rank: Callable[[], Rank]) -> Outcome:
    """A call as :func:`.ranks.outcomes` pickles it: its function comes from this process's import."""
    from pytest import skip

    try:
        rank = this_rank()
        function, arguments, options = pickle.loads(call)  # noqa: S301  of the tests
        as_in_a_new_process()
        function = getattr(function, "on_a_rank", function)
        return Outcome("returned", pickled=pickle.dumps(function(rank, *arguments, **options)))
    except skip.Exception as skipped:
        return Outcome("skipped", str(skipped))
    except BaseException:
        return Outcome("raised", traceback.format_exc())


def forget() -> None:
    """No kind of call was seen: a test may change what a spec was made from."""
    if agreement := sys.modules.get("megatron_fused_ce.ranks.agreement"):
        agreement.forget()
    if promise := sys.modules.get("megatron_fused_ce.head.promise"):
        promise.counts = promise.Counts()  # the benchmark takes one that was broken before for its own


def as_in_a_new_process() -> None:
    """Global state; groups that the last call left are destroyed, in one order on all ranks."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    forget()
    megatron: Any = sys.modules.get("tests.support.megatron")
    kept = {dist.group.WORLD, *(megatron.groups if megatron else ())}
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in kept]:
        dist.destroy_process_group(group)


def join(rank: int, size: int, on_gpus: bool, store: Any) -> Rank:
    """Make this process a rank: NCCL where each has a GPU, else gloo with one worker thread a group.

    Ranks on GPUs that are fewer than they share the first.
    """
    import torch
    import torch.distributed as dist

    from megatron_fused_ce.scripts.lib import gloo

    gloo.use_one_thread()
    own_gpu = on_gpus and torch.cuda.device_count() >= size
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", rank if own_gpu else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    return Rank(dist.group.WORLD, rank, size, device)


# --- in the server ---------------------------------------------------------------------------


class World:
    """Ranks forked from this process, until one of them fails: the others may sit in a collective."""

    def __init__(self, ranks: Ranks, on_gpus: bool) -> None:
        self._ranks, self._on_gpus = ranks, on_gpus
        self._start_s = START_TIMEOUT_S * on_gpus
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._connections: list[Connection] = []
        self._processes: list[int] = []
        for number in range(ranks.size):
            mine, theirs = Pipe()
            self._connections.append(mine)
            self._output(number).touch()
            self._processes.append(os.fork())
            if self._processes[-1] == 0:
                self._live(number, theirs)
            theirs.close()

    def _live(self, number: int, connection: Connection) -> NoReturn:
        """One rank, until its connection closes or a call raises, which tells the other ranks."""
        for other in self._connections:
            other.close()
        output = os.open(self._output(number), os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1)

        @functools.cache
        def this_rank() -> Rank:
            ranks = self._ranks
            if self._on_gpus:
                ranks.environment.load(on_gpus=True)
            if not ranks.join:
                return Rank(None, number, ranks.size, None)
            import torch.distributed as dist

            store = dist.FileStore(f"{self._folder}/store", ranks.size)
            return join(number, ranks.size, self._on_gpus, store)

        kind = ""
        with contextlib.suppress(EOFError, BrokenPipeError):
            while kind != "raised":
                outcome = run(connection.recv_bytes(), this_rank)
                kind = outcome.kind
                sys.stdout.flush()
                connection.send(outcome)
        os._exit(0)  # no worker thread meets an interpreter that ends

    def run(self, call: bytes, timeout_s: float, grace_s: float, requests: Connection) -> list[Outcome]:
        """The call on every rank. After a first failure the others have ``grace_s`` for their own error."""
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # it has died: that is its outcome
                connection.send_bytes(call)
        made: dict[int, Outcome] = {}
        late, until = "hung", time.monotonic() + timeout_s + self._start_s
        self._start_s = 0.0
        while waiting := {c: rank for rank, c in enumerate(self._connections) if rank not in made}:
            ready = wait([requests, *waiting], max(0.0, until - time.monotonic()))
            if requests in ready:
                leave()
            if not ready:
                made |= {rank: Outcome(late, self._stack(rank)) for rank in waiting.values()}
            for connection in ready:
                rank = waiting[connection]
                made[rank] = self._answer(rank, connection)
                if made[rank].failed and late == "hung":
                    late, until = "stopped", min(until, time.monotonic() + grace_s)
        return [made[rank] for rank in range(self._ranks.size)]

    def _answer(self, rank: int, connection: Connection) -> Outcome:
        try:
            outcome = connection.recv()
        except (EOFError, ConnectionResetError):
            end: Any = os.waitid(os.P_PID, self._processes[rank], os.WEXITED | os.WNOWAIT)
            status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            how = f"of {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            return Outcome("died", f"ended {how}\n{self._words(rank)}", status=status)
        if outcome.kind == "raised":
            return Outcome("raised", f"{outcome.words}\n{self._words(rank)}".rstrip())
        return outcome

    def _stack(self, rank: int) -> str:
        """Where a rank's threads are: faulthandler writes it, whatever Python is doing."""
        os.kill(self._processes[rank], signal.SIGUSR1)
        time.sleep(0.5)
        return self._words(rank)

    def _words(self, rank: int) -> str:
        return self._output(rank).read_text(errors="replace")[-OUTPUT_CHARACTERS:]

    def _output(self, rank: int) -> Path:
        """What the rank prints, and where its threads were when it died or was stopped."""
        return self._folder / f"rank{rank}.txt"

    def close(self, kill: bool) -> None:
        """End all ranks; those that wait for a call leave by themselves."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if kill:
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(requests: Connection, on_gpus: bool) -> NoReturn:
    """Answer calls, one at a time. Ends, with its ranks, when the tests' process does.

    On GPUs the ranks load their environment themselves: what has started CUDA cannot be forked. They live on
    from call to call, as contexts and communicators cost seconds; else each call has ranks of its own.
    """
    os.setsid()
    worlds: dict[Ranks, World] = {}
    prepared: set[str] = set()
    while True:
        try:
            ranks, module, call, lives_on, *limits = requests.recv()
        except EOFError:
            leave()
        if not on_gpus and module not in prepared:
            prepare(ranks.environment, module, first=not prepared)
            prepared.add(module)
        threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        if len(threads) > 1:
            requests.send(f"cannot fork: {module} or an earlier module has started threads: {threads}")
            continue
        world = worlds.pop(ranks, None) or World(ranks, on_gpus)
        made = world.run(call, *limits, requests)
        failed = any(outcome.failed for outcome in made)
        if lives_on and not failed:
            worlds[ranks] = world
        else:
            world.close(kill=failed)
        requests.send(made)


def leave() -> NoReturn:
    os.killpg(0, signal.SIGKILL)
    raise SystemExit


def prepare(environment: Environment, module: str, first: bool) -> None:
    """Import once what all ranks of a file need. What fails here fails again in the rank, with its words."""
    if first:
        environment.load(on_gpus=False)
    with contextlib.suppress(Exception):
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # no Triton
        import torch
        from triton.runtime.interpreter import InterpretedFunction

        from megatron_fused_ce.kernels import gemm_variants

        # What each rank would do anew: try out the GEMM, and read the kernels' and Megatron's source.
        gemm_variants.gemm_for(torch.device("cpu"))
        for known in gc.get_objects():
            if type(known) is InterpretedFunction:
                known.rewrite()
    if forms := sys.modules.get("megatron_fused_ce.adapter.forms"):
        # The files of Megatron's in which a model that is built looks at functions.
        for of in ("", "native"):
            forms.Held(of, frozenset())
    gc.collect()
    gc.freeze()  # or each rank's first collection copies what all of them share


if __name__ == "__main__":
    # Under its own name: what is sent over the connections is then of one module.
    itself = importlib.import_module("tests.support.rank_process")
    itself.serve(Connection(int(sys.argv[1])), len(sys.argv) > 2)
