"""``torchrun -m pytest``: torchrun's processes are the ranks, and a test that fails on one fails on all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import torchrun
from tests.support.ranks import ROOT, VARIABLES

TESTS = """
import torch.distributed as dist
from tests.support.ranks import on_ranks

@on_ranks(2)
def test_before(rank):
    dist.barrier()

@on_ranks(2)
def test_that_fails_on_one(rank):
    assert rank.rank == 0, "words of one rank"
    dist.barrier()

@on_ranks(2)
def test_after(rank):
    dist.barrier()

@on_ranks(4)
def test_of_four(rank):
    raise AssertionError
"""


@pytest.mark.skipif(torchrun.IS_RANK, reason="starts torchrun itself")
def test_a_launch_with_a_failing_test(tmp_path):
    """It fails with that rank's words and waits for no time-out; the next test has new groups."""
    (tmp_path / "test_of_a_launch.py").write_text(TESTS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "tests.parallel.conftest", "-rs", str(tmp_path)),
        ],
        cwd=ROOT,
        env={**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("test session") <= 1 and done.stdout.count(" failed, ") == 1
    assert "rank 1 raised" in done.stdout and "words of one rank" in done.stdout
    assert "4 ranks: torchrun has started 2" in done.stdout
    assert "Timed out" not in done.stdout
