"""tests/soak.py: a few steps over ranks, and each kind of failure that it must see.

``-m tests.tools.test_soak FAULT OPTIONS...`` is the soak with one thing broken, under torchrun.
"""

from __future__ import annotations

import sys
import time

import pytest
import torch

from megatron_fused_ce.scripts.lib import gloo, results
from tests import soak

#: What is done to a call's results after a step, and what is said of it.
FAULTS = {
    "drift": (  # one bit of one rank's loss, of a call that was there before
        lambda made, step: made["loss"].view(torch.int32)[0, 0].bitwise_xor_(soak.RANK == 1 and step > 7),
        "rank 1: drift: other bits than the first time",
    ),
    "hang": (
        lambda made, step: time.sleep(3600 * (soak.RANK == 1 and step == 7)),
        "hang: no progress for 8 s in step",
    ),
}


def test_a_short_soak(forks, tmp_path):
    """Over TP 2 and 4; then one that the time limit ends."""
    path = tmp_path / "soak.json"
    words = f"-m tests.soak --seed 3 --steps 24 --pool 4 --json {path}"
    status, said = forks(4, tmp_path, *words.split())
    assert status == 0 and "soak: no drift, hang or leak" in said, said[-3000:]
    (row,) = results.rows(path)
    assert (row["failure"], row["steps"], row["shape"]) == (None, 24, "4 ranks")
    assert 0 < row["worst_error_over_bound"] <= 1 and row["problems"] > 4 and row["collectives"] > 24 * 4
    words = "-m tests.soak --seed 3 --steps 100000 --time-limit 1 --pool 2"
    status, said = forks(2, tmp_path, *words.split())
    assert status == 0 and "no drift, hang or leak" in said, said[-2000:]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_ends_it_with_status_1(forks, tmp_path, fault):
    # Two busy cores can keep a rank waiting for longer than one that hangs has to.
    words = f"-m {__name__} {fault} --seed 3 --steps 80 --pool 2"
    status, said = forks(2, tmp_path, *words.split(), f"--hang-timeout={8 if fault == 'hang' else 120}")
    assert status == 1 and FAULTS[fault][1] in said and "no drift, hang or leak" not in said, said[-3000:]
    assert fault != "hang" or "test_soak.py" in said  # its stack


def test_leaks_are_told_from_late_workspaces():
    """Of the first two, a workspace within the slack, a spike; too few tell nothing."""
    calm = [50, 90, *[5.0] * 20], [0, 0, *[5.0] * 8, *[8.0] * 12], [0, 0, *[5.0] * 12, 30.0, *[5.0] * 9]
    growing = [float(i) for i in range(24)]
    assert not any(soak.leak_in(history, 4.0) for history in (*calm, growing[:8]))
    assert soak.leak_in(growing, 4.0) and soak.leak_in([0, 0, *[5.0] * 10, *[12.0] * 12], 4.0)


if __name__ == "__main__":
    (fault, _), right, steps = FAULTS[sys.argv.pop(1)], soak.run, []

    def run(*args, **options):
        steps.append(1)
        made = right(*args, **options)
        fault(made, len(steps))
        return made

    soak.run = run
    gloo.leave(soak.main())
