"""Launches of training scripts whose ranks find torch and Megatron imported: forked, as torchrun starts them.

What a launch does before it imports Megatron is not in it: tests/megatron/test_training_loop.py and
tests/project/test_packaging.py launch by torchrun and Python.
"""

from __future__ import annotations

import atexit
import os
import re
import runpy
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.rank_process import Environment, Rank
from tests.support.ranks import RankProcesses


class Server:
    """Launches with the megatron-core in ``folder``; without one they have the head alone."""

    def __init__(self, folder: Path | None) -> None:
        load = "load_head" if folder is None else "load_megatron"
        path = () if folder is None else (str(folder),)
        self._environment = Environment(f"launches {load}", path, f"{__name__}:{load}", preload=())

    def launch(
        self, words: Sequence[str], folder: Path, *, ranks: Sequence[int], **environment: str
    ) -> tuple[int, str]:
        """Status and output of ``torchrun words...`` for these ranks; ``environment`` has WORLD_SIZE."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        with (
            tempfile.NamedTemporaryFile() as output,
            RankProcesses(len(ranks), self._environment, joins=False) as world,
        ):
            given = list(map(str, words)), str(folder), output.name, list(ranks), environment
            outcomes = world.outcomes(run, *given, timeout_s=300.0)  # longer than any on a busy machine
            ends = [str(outcome.value) for outcome in outcomes if outcome.failed]
            numbers = [int(found[1]) for end in ends if (found := re.match(r"ended with status (\d+)", end))]
            return (numbers or [int(bool(ends))])[0], Path(output.name).read_text()


def run(
    rank: Rank, words: list[str], folder: str, output: str, ranks: list[int], more: dict[str, str]
) -> None:
    """``python words...``, a script or ``-m MODULE``: a forked process's whole life, which ends here where
    its status is not 0."""
    import torch

    from megatron_fused_ce.scripts.lib import megatron_cpu

    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    number = str(ranks[rank.rank])
    os.environ |= {**more, "RANK": number, "LOCAL_RANK": number}
    os.chdir(folder)
    torch.set_deterministic_debug_mode("default")  # a test's ranks have others
    warnings.resetwarnings()
    status: Any = 1
    try:
        if words[:2] == ["-m", megatron_cpu.__name__]:  # the stand-ins' own module is there already
            megatron_cpu.run(words[2], words[3:])
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as left:
        status = left.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)


def load_head(device: Any) -> None:
    import megatron_fused_ce.kernels.scaled_exp_rows
    import megatron_fused_ce.scripts.bench.problem  # noqa: F401

    # With the op, whose import takes dynamo's four seconds.
    import tests.support.problems  # noqa: F401
    from megatron_fused_ce.scripts.lib import gloo

    gloo.use_one_thread()


def load_megatron(device: Any) -> None:
    from megatron_fused_ce.scripts.lib import megatron_cpu

    megatron_cpu.install()
    from megatron_fused_ce.adapter import import_hook

    import_hook.install()
    import megatron.training
    import megatron.training.arguments
    import megatron.training.checkpointing  # noqa: F401
