"""Command lines without a process: a tool's own part is what its test checks."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
from collections.abc import Callable


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
