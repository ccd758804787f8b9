"""scripts/dev/soak.py: a few steps over ranks, and each kind of failure that it must see."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import planner
from megatron_fused_ce.scripts.dev import soak
from megatron_fused_ce.scripts.lib import results

SETTINGS = ("--device", "cpu", "--seed", "3")


def run_forked(forks, ranks, folder, *words):
    """Status and output, of ranks that find torch imported."""
    environment = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    return forks.launch([*words, *SETTINGS], folder, ranks=range(ranks), **environment)


def test_a_short_soak(forks, tmp_path):
    path = tmp_path / "soak.json"
    status, said = run_forked(
        *(forks, 4, tmp_path),
        *("-m", "scripts.dev.soak", "--steps", "32", "--check-every", "8", "--pool", "8"),
        *("--delay-share", "0.1", "--delay-ms", "2", "--json", str(path)),
    )
    assert status == 0, said[-3000:]
    assert "soak: 32 steps" in said and "no drift, hang or leak" in said
    (record,) = results.rows(path)
    assert record["failure"] is None and record["ranks"] == 4
    assert record["tp"] == [2, 4]
    assert record["steps"] == 32 and record["problems"] >= 6
    assert 0 < record["worst_error_over_bound"] <= 1
    assert record["collectives"] > 32 * 5
    assert {"store", "grad_in_forward", "recompute"} <= record["plans"].keys()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("drift", "other bits than the problem's first"),
        ("wrong", "drift: grad_weight is"),
        ("hang", "hang: no progress for"),
        ("order", "order: up to step 8"),
        ("leak", "more than in earlier windows"),
    ],
)
def test_what_is_wrong_ends_it_with_status_1(forks, tmp_path, fault, words):
    # Two busy cores can keep a rank waiting for longer than one that hangs has to.
    patience = "8" if fault == "hang" else "120"
    steps = ["--steps", "400", "--check-every", "4", "--pool", "3", "--hang-timeout", patience]
    module = ("-m", "tests.tools.broken_soak")
    status, said = run_forked(forks, 2, tmp_path, *module, fault, *steps, "--delay-share", "0")
    assert status == 1 and words in said, said[-3000:]
    assert "no drift, hang or leak" not in said
    if fault == "hang":
        assert "rank 0: hang" in said or "rank 1: hang" in said
        assert "its last collective, number" in said and "broken_soak.py" in said


def test_the_time_limit_ends_it_well(forks, tmp_path):
    limit = ("--steps", "100000", "--time-limit", "1", "--pool", "2")
    status, said = run_forked(forks, 2, tmp_path, "-m", "scripts.dev.soak", *limit)
    assert status == 0 and "no drift, hang or leak" in said, said[-2000:]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tp", "3"], "--tp 3 does not divide 2 ranks"),
        (["--steps", "0"], "argument --steps: expected a whole number from 1"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, words, told):
    monkeypatch.setattr(soak, "WORLD", 2)
    with pytest.raises(SystemExit) as ended:
        soak.parse(words)
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_one_rank_is_told_how_to_start(monkeypatch, capsys):
    monkeypatch.setattr(soak, "WORLD", 1)
    with pytest.raises(SystemExit):
        soak.parse([])
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("history", "grows"),
    [
        ([0, 0, *[5.0] * 20], False),
        ([50, 90, *[5.0] * 20], False),  # the first two windows do not count
        ([0, 0, *[5.0] * 8, *[8.0] * 12], False),  # a workspace, within the slack
        ([0, 0, *[5.0] * 12, 30.0, *[5.0] * 9], False),  # a spike
        ([float(i) for i in range(24)], True),
        ([0, 0, *[5.0] * 10, *[12.0] * 12], True),
        ([float(i) for i in range(8)], False),  # too few to tell
    ],
)
def test_leaks_are_told_from_late_workspaces(history, grows):
    assert bool(soak.leak_in(history, 4.0)) == grows


def test_problems_fit_the_head_and_cover_its_options():
    drawn = [soak.Problem.draw(seed, "cpu", (2, 4)) for seed in range(400)]
    assert drawn == [soak.Problem.draw(seed, "cpu", (2, 4)) for seed in range(400)]
    for problem in drawn:
        assert problem.tokens % problem.tp == 0 and len(problem.shard_rows) == problem.tp
        assert problem.config.strategy != "grad_in_forward" or problem.knows_weights
        inputs = problem.inputs(1, torch.device("cpu"))
        assert inputs.weight.shape[0] == sum(problem.shard_rows)
        assert torch.equal(inputs.weight, problem.inputs(0, torch.device("cpu")).weight)
    for name in ("tp", "dtype", "kind", "strategy", "merge", "sequence_parallel", "in_flight"):
        assert len({getattr(problem, name) for problem in drawn}) >= 2
    assert any(len(set(problem.shard_rows)) > 1 for problem in drawn)
    assert {problem.tp for problem in drawn} == {2, 4}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_problem_asks_for_a_plan_that_does_not_exist(device):
    """A strategy by name whose budget nothing meets is refused, which would end a soak."""
    budgets = 0
    for seed in range(3000):
        problem = soak.Problem.draw(seed, device, (2, 4))
        budgets += problem.memory_mb is not None
        inputs = planner.PlanInputs.of(
            problem.config,
            num_tokens=problem.tokens * problem.batch,
            hidden_size=problem.hidden_size,
            num_rows=max(problem.shard_rows),
            dtype=str(problem.dtype).removeprefix("torch."),
            num_parts=problem.tp if problem.sequence_parallel else 1,
            tp_size=problem.tp,
            wgrad_accumulator="main_grad" if problem.in_place else "returned",
            token_weights_known=problem.knows_weights,
            logits_backend="scaled_exp"
            if device == "cuda" and problem.logits_backend == "auto"
            else "gemm_rows",
            device="NVIDIA H200" if device == "cuda" else "cpu",
        )
        assert planner.plan(inputs).count > 0, problem
    assert budgets > 500
