"""Command lines without a process, and launches without torch: a tool's own part is what its test checks."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

#: First on PYTHONPATH: launches whose script needs no torch start in a twentieth of a second.
NO_TORCH = Path(__file__).with_name("no_torch")


def run_here(main: Callable[[list[str]], int], *words: object) -> subprocess.CompletedProcess[str]:
    """What ``python -m MODULE words...`` returns and prints, by the module's ``main`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    command = [str(word) for word in words]
    ends = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(command)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        signal.signal(signal.SIGTERM, ends)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def launches_without_torch() -> Iterator[None]:
    """torchrun is tests/support/no_torch's."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NO_TORCH), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
