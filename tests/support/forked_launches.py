"""Launches of training scripts whose ranks find torch and Megatron imported: forked, as torchrun starts them.

    python -m tests.support.forked_launches megatron | head

stands in for CUDA, installs the hook, imports Megatron's training package (``head``: does none of it, imports
torch and the kernels), and then answers lines of JSON:
each a launch's words behind torchrun, its ranks, folder, output file and additions to its environment.
The answer is the first failing rank's status, or 0. What a launch does before it imports Megatron is not in
it: tests/megatron/test_training_loop.py and tests/project/test_packaging.py launch by torchrun and Python.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Of one launch: longer than any takes on a busy machine.
TIMEOUT_S = 300


class Server:
    """The process that forks, with the megatron-core in ``folder``; without one it has the head alone."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folders = [str(folder or ""), str(ROOT), os.environ.get("PYTHONPATH")]
        path = os.pathsep.join(filter(None, folders))
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.forked_launches"),
                "head" if folder is None else "megatron",
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def launch(
        self, words: Sequence[str], folder: Path, *, ranks: Sequence[int], **environment: str
    ) -> tuple[int, str]:
        """Status and output of ``torchrun words...`` for these ranks; ``environment`` has WORLD_SIZE."""
        output = Path(self._folder.name, "output.txt")
        request = [list(map(str, words)), str(folder), str(output), list(ranks), environment]
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the server ended with {self._process.wait()}"
        return json.loads(answer), output.read_text()

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


@contextlib.contextmanager
def server(folder: Path | None) -> Iterator[Server]:
    made = Server(folder)
    try:
        yield made
    finally:
        made.close()


def _run(words: list[str]) -> None:
    """As ``python words...`` does: a script, or ``-m MODULE``; the stand-ins' own module is there already."""
    from megatron_fused_ce.scripts.lib import megatron_cpu

    if words[:2] == ["-m", megatron_cpu.__name__]:
        megatron_cpu.run(words[2], words[3:])
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _rank(words: list[str], folder: str, output: str, environment: dict[str, str]) -> int:
    """A forked process's whole life: its exit status."""
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.environ |= environment
    os.chdir(folder)
    status: Any = 0
    try:
        _run(words)
    except SystemExit as left:
        status = left.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _kill(sessions: list[int]) -> None:
    for session in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


def _load_head() -> None:
    import megatron_fused_ce.kernels.scaled_exp_rows
    import megatron_fused_ce.scripts.bench.problem  # noqa: F401

    # With the op, whose import takes dynamo's four seconds.
    import tests.support.problems  # noqa: F401
    from megatron_fused_ce.scripts.lib import gloo

    gloo.use_one_thread()


def _load_megatron() -> None:
    from megatron_fused_ce.scripts.lib import megatron_cpu

    megatron_cpu.install()
    from megatron_fused_ce.adapter import import_hook

    import_hook.install()
    import megatron.training
    import megatron.training.arguments
    import megatron.training.checkpointing  # noqa: F401


def main() -> None:
    {"head": _load_head, "megatron": _load_megatron}[sys.argv[1]]()
    from tests.support.rank_process import threads

    assert len(threads()) == 1, threads()
    for line in sys.stdin:
        words, folder, output, ranks, environment = json.loads(line)
        Path(output).unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children = []
        for rank in ranks:
            child = os.fork()
            if child == 0:
                os.setsid()  # what a rank starts ends with it
                signal.alarm(TIMEOUT_S)
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os._exit(_rank(words, folder, output, {**environment, **place}))
            children.append(child)
        status = 0
        for _ in ranks:
            child, ended = os.wait()
            if not status and (status := abs(os.waitstatus_to_exitcode(ended))):
                _kill(children)  # the others may sit in a collective
        _kill(children)
        print(json.dumps(status), flush=True)


if __name__ == "__main__":
    main()
