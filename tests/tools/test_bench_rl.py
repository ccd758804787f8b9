"""Runs of `python -m scripts.bench --preset rl` on a CPU: every row, its check, and a row that is wrong."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.loss import TokenLogProbs
from megatron_fused_ce.scripts.bench import __main__ as bench
from megatron_fused_ce.scripts.bench import rl
from megatron_fused_ce.scripts.lib import results

WORDS = ["--preset=rl", "--device=cpu", "--shape", "32", "640", "--tokens=64", "--dtype=float32"]
WORDS += ["--blocks=2", "--sample-ms=1"]


def test_every_row_is_checked_and_timed(tmp_path, capsys):
    path = tmp_path / "rl.json"
    assert bench.main([*WORDS, f"--out={path}"]) == 0
    rows = {row["variant"]: row for row in results.rows(path)}
    masks = [f"{count} kept ids" for count in rl.KEPT]
    assert {"entropy, store", "entropy with gradient, recompute", "temperature per token, store"} < set(rows)
    assert list(rows)[-len(masks) :] == masks
    for name, row in rows.items():
        if name.startswith(rl.VERL):
            assert row["error"] == "needs a CUDA device" and row["time_ms"] is None
            continue
        assert row["time_ms"] == pytest.approx(row["forward_ms"] + row["backward_ms"], rel=0.5)
        if name != rl.PRODUCT:
            assert max(row["errors"].values()) < 2e-6 and row["ratio"] > 0
            assert ("grad_weight" in row["errors"]) == (rl.FORWARD not in name)
    page = path.with_suffix(".md").read_text()
    assert page.count("\n| 32x640 | 64 |") == len(rows) and page[page.index("|") :] in capsys.readouterr().out


def test_a_wrong_result_ends_without_figures(tmp_path, monkeypatch, capsys):
    right = rl.token_log_probs

    def wrong(*args, **kwargs) -> TokenLogProbs:
        made = right(*args, **kwargs)
        return made._replace(log_prob=made.log_prob * torch.tensor(1.001))

    monkeypatch.setattr(rl, "token_log_probs", wrong)
    path = tmp_path / "rl.json"
    assert bench.main([*WORDS, f"--out={path}", "--options", "log-probability, store"]) == 1
    assert "log-probability, store: (error, bound) {'log_prob'" in capsys.readouterr().err
    assert not path.exists()
    rest = ["--options", "log-probability, store", "entropy, store", "--skip", "log-probability, store"]
    assert bench.main([*WORDS, f"--out={path}", *rest]) == 1  # the other row is as wrong
    assert "entropy, store: (error, bound)" in capsys.readouterr().err


def test_unknown_rows_are_named(capsys):
    assert bench.main([*WORDS, "--options", "nothing"]) == 2
    assert "no row nothing; there are product, verl" in capsys.readouterr().err


def test_kept_ids_are_different_for_a_token():
    problem = type("Problem", (), {"num_tokens": 9, "labels": torch.zeros(9, dtype=torch.int64)})
    kept = rl.Inputs(problem, 20).kept(16)
    assert kept.shape == (9, 16) and all(len(set(row)) == 16 for row in kept.tolist())
