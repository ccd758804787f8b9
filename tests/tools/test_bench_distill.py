"""Runs of `python -m scripts.bench --preset distill` on a CPU: every row and its check, and a wrong row."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import promise
from megatron_fused_ce.scripts.bench import __main__ as bench
from megatron_fused_ce.scripts.bench import distill
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.problem import Problem, World
from megatron_fused_ce.scripts.lib import results

WORDS = ["--preset=distill", "--device=cpu", "--shape", "32", "640", "--tokens=64", "--dtype=float32"]
WORDS += ["--blocks=2", "--sample-ms=1", "--check-tokens=40"]


@pytest.mark.parametrize("teacher_hidden", [32, 48, 16])
def test_every_row_is_checked_and_timed(tmp_path, monkeypatch, teacher_hidden):
    monkeypatch.setitem(distill.TEACHER_HIDDEN, "32x640", teacher_hidden)
    path = tmp_path / "distill.json"
    assert bench.main([*WORDS, f"--out={path}"]) == 0
    rows = {row["variant"]: row for row in results.rows(path)}
    ours = [
        f"{kind}, {name}"
        for kind in distill.DIVERGENCES
        for name in ("store", "grad_in_forward", "recompute")
    ]
    formula = [f"{kind}, ModelOpt's formula eager" for kind in ("forward_kl", "reverse_kl")]
    assert {distill.GEMMS, *ours, *formula} < set(rows)
    for name in (*ours, *formula):
        assert set(rows[name]["errors"]) == {"loss", "grad_hidden", "grad_weight"}
        assert max(rows[name]["errors"].values()) < 1e-5 and rows[name]["ratio"] > 0
    assert all(set(rows[name]["full_errors"]) == {"loss", "grad_hidden"} for name in ours)
    assert rows["forward_kl, ModelOpt's formula compiled"]["error"] == "needs a CUDA device"
    assert rows[distill.GEMMS]["ratio"] == 1.0


@pytest.mark.parametrize("wrong_tokens", [64, 40])
def test_a_wrong_result_ends_without_figures(tmp_path, monkeypatch, capsys, wrong_tokens):
    right = distill.fused_linear_distillation

    def wrong(hidden, *args, **kwargs):
        made = right(hidden, *args, **kwargs)
        return made._replace(loss=made.loss * (1.001 if len(hidden) == wrong_tokens else 1.0))

    monkeypatch.setattr(distill, "fused_linear_distillation", wrong)
    path = tmp_path / "distill.json"
    assert bench.main([*WORDS, f"--out={path}", "--options", "jsd, store"]) == 1
    assert "jsd, store: (error, bound) {'loss'" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.filterwarnings("ignore:the upstream gradient")
def test_an_upstream_gradient_that_was_not_promised_is_no_figure(tmp_path, monkeypatch, capsys):
    class Inputs(distill.Inputs):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.upstream = self.upstream.roll(1)

    monkeypatch.setattr(distill, "Inputs", Inputs)
    monkeypatch.setattr(promise, "counts", promise.Counts())  # no later test sees this one's
    assert bench.main([*WORDS, "--options", "forward_kl, grad_in_forward"]) == 1
    assert "timed would be a recomputation" in capsys.readouterr().err


def test_the_gemms_run_on_the_true_gradient():
    world = World(use_gpu=False)
    try:
        cell = Cell.by_size(64, 32, 640)
        problem = Problem.of(cell, world, dtype=torch.float32, wgrad_accumulator="returned")
        inputs = distill.inputs_of(problem, cell)
        with torch.no_grad():
            distill._gemms(problem, inputs, lambda: None)
        made = distill.plain(distill.Kind("forward_kl"), problem.hidden, problem.weight, problem, inputs, ...)
        made["loss"].backward(inputs.upstream)
        _, _, grad_hidden, grad_weight = inputs.for_gemms(problem)
        torch.testing.assert_close(grad_hidden, problem.hidden.grad)
        torch.testing.assert_close(grad_weight, problem.weight.grad)
        assert 0.05 < made["loss"].mean().item() < 0.5
    finally:
        world.close()
