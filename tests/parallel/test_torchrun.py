"""``torchrun -m pytest``: torchrun's processes are the ranks, and a test that fails on one fails on all."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support import torchrun
from tests.support.ranks import NUM_GPUS, ROOT, VARIABLES

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


pytestmark = pytest.mark.skipif(torchrun.IS_RANK, reason="starts torchrun itself")


def launch(*arguments, path=""):
    """``torchrun -m pytest`` with these arguments; without pytest's cache, which is the tests' own."""
    torchrun_words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *torchrun_words, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join([str(ROOT), path])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(NUM_GPUS == 1, reason="2 ranks: there is 1 GPU")
def test_the_head_under_torchrun():
    """Calls of test_head.py with torchrun's ranks in the place of forked ones."""
    some = "pairs and (store or recompute) and (main_grad or frozen) and not scaled_exp"
    status, out, err = launch("tests/parallel/test_head.py", "-k", some)
    assert status == 0, out + err
    passed = re.search(r"^(\d+) passed", out, re.MULTILINE)
    assert passed and int(passed[1]) >= 5, out
    assert out.count(" passed") == 1, "only rank 0 reports"


@pytest.mark.rest
@pytest.mark.skipif(
    NUM_GPUS > 0, reason="a rank in NCCL's collective waits for one that has failed until the time-out"
)
def test_a_launch_with_a_failing_test(tmp_path):
    """It fails with that rank's words and waits for no time-out; the next test has new groups."""
    (tmp_path / "test_of_a_launch.py").write_text(TESTS)
    plugin = ("-p", "tests.parallel.conftest")
    status, out, err = launch(*plugin, "-rs", str(tmp_path), path=str(tmp_path))
    assert status == 1, err
    for words in (
        *("1 failed, 2 passed, 1 skipped", "rank 1 raised", "words of one rank"),
        "4 ranks: torchrun has started 2",
    ):
        assert words in out, out + err
    assert out.count(" failed, ") == 1 and "Timed out" not in out
