"""Where a figure comes from: the commit that was measured."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def commit() -> str:
    """The checkout's commit, with ``-dirty`` where the package or its kernels differ from it.

    Where the code travelled without its repository, or with a stale one: the environment's
    ``FUSED_CE_COMMIT``, which comes first; ``unknown`` without either.
    """
    named = os.environ.get("FUSED_CE_COMMIT")
    if named:
        return named

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "megatron_fused_ce", "kernels")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
