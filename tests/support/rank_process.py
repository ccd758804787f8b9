"""The process of one rank, and the server that forks such processes: the far end of tests/support/ranks.py.

    python -m tests.support.rank_process FD

``FD`` is a socket to the process of the tests. A rank joins the default group, runs the functions that come
over its connection, and answers each with ``(kind, value)``: ``returned``, ``skipped`` or ``raised``. After
it has raised it ends, which tells the other ranks: their connections close.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Of a collective. Longer than any test's, shorter than what a test may take.
GROUP_TIMEOUT_S = 60


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
class Place:
    """Which rank of how many, and the folder that the ranks of this world share."""

    rank: int
    size: int
    folder: str
    #: The process then runs more than one test.
    on_gpus: bool = False
    #: It is a rank of the tests' group; a launch makes its own.
    joins: bool = True

    @property
    def output(self) -> Path:
        """What the rank prints, and where its threads were when it died or was stopped."""
        return Path(self.folder) / f"rank{self.rank}.txt"


@dataclass(frozen=True)
class Rank:
    """What a test's function gets first: ``group`` is all ranks, as one tensor-parallel group."""

    group: Any  # dist.ProcessGroup
    rank: int
    size: int
    device: Any  # torch.device


@dataclass(frozen=True)
class RemoteCall:
    """A function by its name, so that a rank takes it from its own import of the module."""

    module: str
    qualname: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, rank: Rank) -> tuple[str, Any]:
        """``(kind, value)``; the value of ``raised`` is the traceback, of ``skipped`` the reason."""
        from pytest import skip

        try:
            function: Any = importlib.import_module(self.module)
            for name in self.qualname.split("."):
                function = getattr(function, name)
            function = getattr(function, "on_a_rank", function)
            return "returned", function(rank, *self.arguments, **self.options)
        except skip.Exception as skipped:
            return "skipped", str(skipped)
        except BaseException as error:
            trace: Any = error.__traceback__
            return "raised", "".join(traceback.format_exception(type(error), error, trace.tb_next))

    def run_cleanly(self, rank: Rank) -> tuple[str, Any]:
        """In a process that lives on: global state is as in a new one; groups that it made are destroyed."""
        import torch
        import torch.distributed as dist

        importlib.import_module(self.module)
        torch.manual_seed(0)
        agreement: Any = sys.modules.get("megatron_fused_ce.ranks.agreement")
        if agreement is not None:
            agreement.forget()  # on all ranks: their next calls are compared
        groups = set(dist.distributed_c10d._world.pg_map)
        kind, value = self.run(rank)
        if kind != "raised":
            megatron: Any = sys.modules.get("tests.support.megatron")
            groups |= megatron.groups if megatron else set()
            for group in [group for group in dist.distributed_c10d._world.pg_map if group not in groups]:
                dist.destroy_process_group(group)  # in one order on all ranks
        return kind, value


def join(place: Place, store: Any, *, prefix: str = "") -> Rank:
    """Make this process a rank: NCCL where each has a GPU, else gloo with one worker thread a group.

    Ranks on GPUs that are fewer than they share the first.
    """
    import torch
    import torch.distributed as dist

    from megatron_fused_ce.scripts.lib import gloo
    from tests.support.collectives import Collectives

    gloo.use_one_thread()
    own_gpu = place.on_gpus and torch.cuda.device_count() >= place.size
    device = torch.device("cpu")
    if place.on_gpus:
        device = torch.device("cuda", place.rank if own_gpu else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        store=dist.PrefixStore(prefix, store),
        rank=place.rank,
        world_size=place.size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    Collectives({}).__enter__()  # gloo refuses what NCCL does
    return Rank(dist.group.WORLD, place.rank, place.size, device)


def live(connection: Connection, environment: Environment, place: Place) -> None:
    """One rank, until its connection closes or a call raises. Does not return."""
    output = os.open(place.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            if place.on_gpus:
                environment.load(on_gpus=True)
            rank = Rank(None, place.rank, place.size, None)
            if place.joins:
                import torch.distributed as dist

                rank = join(place, dist.FileStore(f"{place.folder}/store", place.size))
        except BaseException:
            connection.send(("raised", traceback.format_exc()))
            os._exit(1)
        connection.send(("returned", None))
        kind = ""
        while kind != "raised":
            call = connection.recv()
            kind, value = call.run_cleanly(rank) if place.on_gpus else call.run(rank)
            sys.stdout.flush()
            try:
                connection.send((kind, value))
            except (pickle.PicklingError, AttributeError, TypeError):
                kind = "raised"
                connection.send((kind, f"cannot be sent: {traceback.format_exc()}"))
    os._exit(0)  # no worker thread meets an interpreter that ends


def serve(requests: Connection) -> None:
    """Fork a rank for a place and a module, answer a process id with how it ended: one at a time.

    On GPUs the ranks load their environment themselves: what has started CUDA cannot be forked. Ends, with
    its ranks, when the tests' process does.
    """
    os.setsid()
    environment, on_gpus = requests.recv()
    if not on_gpus:
        environment.load(on_gpus=False)
    requests.send("ready")
    while True:
        try:
            request = requests.recv()
        except EOFError:
            os.killpg(0, signal.SIGKILL)
        if isinstance(request, int):
            requests.send(os.waitpid(request, 0)[1])
        else:
            requests.send(_fork(requests, environment, *request))


def _read_once() -> None:
    """What each rank would do anew: read the kernels' and Megatron's source, and try out the GEMM."""
    with contextlib.suppress(ImportError):  # no Triton
        import torch
        from triton.runtime.interpreter import InterpretedFunction

        from megatron_fused_ce.kernels import gemm_variants

        gemm_variants.gemm_for(torch.device("cpu"))
        for known in gc.get_objects():
            if type(known) is InterpretedFunction:
                known.rewrite()
    if forms := sys.modules.get("megatron_fused_ce.adapter.forms"):
        # The files of Megatron's in which a model that is built looks at functions.
        for of in ("", "native"):
            forms.Held(of, frozenset())


def _fork(requests: Connection, environment: Environment, place: Place, module: str) -> int | str:
    """The new rank's process id, or why there is none."""
    descriptor = reduction.recv_handle(requests)
    if module not in sys.modules and not place.on_gpus:
        # Once for all tests of a file. What fails here fails again in the rank, with its words.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        _read_once()
        gc.collect()
        gc.freeze()  # or each rank's first collection copies what all of them share
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        return f"cannot fork: {module} or an earlier module has started threads: {threads}"
    child = os.fork()
    if child == 0:
        requests.close()
        live(Connection(descriptor), environment, place)
    os.close(descriptor)
    return child


if __name__ == "__main__":
    # Under its own name: what is sent over the connections is then of one module.
    importlib.import_module("tests.support.rank_process").serve(Connection(int(sys.argv[1])))
