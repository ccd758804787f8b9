"""tests/soak.py: a few steps over ranks, and each kind of failure that it must see."""

from __future__ import annotations

import pytest

from megatron_fused_ce.scripts.lib import results
from tests import soak


def run_forked(forks, ranks, folder, *words):
    """Status and output, of ranks that find torch imported."""
    environment = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    return forks.launch([*words, "--seed", "3"], folder, ranks=range(ranks), **environment)


def test_a_short_soak(forks, tmp_path):
    """Over TP 2 and 4; then one that the time limit ends."""
    path = tmp_path / "soak.json"
    words = ("-m", "tests.soak", "--steps", "24", "--pool", "4", "--json", str(path))
    status, said = run_forked(forks, 4, tmp_path, *words)
    assert status == 0 and "soak: no drift, hang or leak" in said, said[-3000:]
    (row,) = results.rows(path)
    assert (row["failure"], row["steps"], row["shape"]) == (None, 24, "4 ranks")
    assert 0 < row["worst_error_over_bound"] <= 1 and row["problems"] > 4 and row["collectives"] > 24 * 4
    limit = ("--steps", "100000", "--time-limit", "1", "--pool", "2")
    status, said = run_forked(forks, 2, tmp_path, "-m", "tests.soak", *limit)
    assert status == 0 and "no drift, hang or leak" in said, said[-2000:]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("drift", "rank 1: drift: other bits than the first time"),
        ("wrong", "drift: loss: error"),
        ("hang", "hang: no progress for 8 s in step"),
        ("leak", "leak: tensors after each visit"),
    ],
)
def test_what_is_wrong_ends_it_with_status_1(forks, tmp_path, fault, words):
    # Two busy cores can keep a rank waiting for longer than one that hangs has to.
    patience = "8" if fault == "hang" else "120"
    steps = ("--steps", "80", "--pool", "2", "--hang-timeout", patience)
    status, said = run_forked(forks, 2, tmp_path, "-m", "tests.tools.broken_soak", fault, *steps)
    assert status == 1 and words in said and "no drift, hang or leak" not in said, said[-3000:]
    assert fault != "hang" or "broken_soak.py" in said


@pytest.mark.parametrize(
    ("history", "grows"),
    [
        ([50, 90, *[5.0] * 20], False),  # the first two do not count
        ([0, 0, *[5.0] * 8, *[8.0] * 12], False),  # a workspace, within the slack
        ([0, 0, *[5.0] * 12, 30.0, *[5.0] * 9], False),  # a spike
        ([float(i) for i in range(24)], True),
        ([0, 0, *[5.0] * 10, *[12.0] * 12], True),
        ([float(i) for i in range(8)], False),  # too few to tell
    ],
)
def test_leaks_are_told_from_late_workspaces(history, grows):
    assert soak.leak_in(history, 4.0) == grows


def test_one_rank_is_told_how_to_start(monkeypatch, capsys):
    monkeypatch.setattr(soak, "WORLD", 1)
    assert soak.main([]) == 2 and "torchrun" in capsys.readouterr().err
