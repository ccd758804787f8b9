"""A copy of the tree on disk, to put a fault into, and a run of its tests.

Every run of pytest is a process of its own: Triton reads kernels from their source files, and the ranks of a
test are forked from servers that imported the package before the test began. A change made in memory would
reach neither.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Of `make test` alone: what only `make test-rest` sees, a change to the head may leave for hours.
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not rest")


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    #: passed, failed, nothing (no test ran), or late (past the time limit)
    outcome: str
    seconds: float
    #: the test that failed, or what pytest said last
    words: str


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore, as they are on disk."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def write(tree: Path, file: str, text: str) -> None:
    """Write a source file. Python tells an old .pyc by size and time in whole seconds: delete it."""
    path = tree / file
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(tree: Path, tests: str, limit_s: float) -> Run:
    """Run pytest in ``tree`` until its first failure, and end it after ``limit_s`` seconds."""
    command = [*PYTEST, *shlex.split(tests)]
    # Behind the tree: where torch's image has no megatron-core, it is on the path.
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return Run("late", time.monotonic() - begin, f"not done after {limit_s:.0f} s")
    seconds = time.monotonic() - begin
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", output, re.MULTILINE)
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if process.returncode == 0 and re.search(r"\d+ passed", last):
        return Run("passed", seconds, last)
    if process.returncode in (0, 5):
        return Run("nothing", seconds, last)
    return Run("failed", seconds, (failed.group(1) if failed else last)[:200])


def _end(process: subprocess.Popen[str]) -> None:
    """pytest's own way first, so that it ends the ranks that it started; they are of its session."""
    for sign, patience_s in ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.communicate(timeout=patience_s)
            return
        except subprocess.TimeoutExpired:
            continue
