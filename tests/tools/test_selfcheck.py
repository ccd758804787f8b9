"""``selfcheck``: what is right passes, what is wrong is told and ends with status 1."""

from __future__ import annotations

import json

from megatron_fused_ce.losses import Pull
from megatron_fused_ce.losses.label import CrossEntropy
from megatron_fused_ce.scripts.runs import selfcheck


def run(tmp_path, capsys):
    status = selfcheck.main(["--device", "cpu", "--calls", "12", "--out", str(tmp_path / "found.json")])
    return status, capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())


def test_right_and_wrong(tmp_path, capsys, monkeypatch):
    status, out, found = run(tmp_path, capsys)
    assert status == 0 and "12 calls against fp64, 0 wrong" in out and "not timed: no GPU" in out
    assert found["calls"] == 12 and not found["wrong"] and found["torch"]
    # grad_hidden and grad_weight too large by two percent, where the loss is a sum of terms.
    stock = CrossEntropy.pull
    monkeypatch.setattr(CrossEntropy, "pull", lambda *of: Pull(*(x and 1.02 * x for x in stock(*of))))
    status, out, found = run(tmp_path, capsys)
    assert status == 1 and found["wrong"] and "grad_hidden is off by" in out


def test_a_call_that_fails_is_wrong(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(CrossEntropy, "value", fail)
    status, out, _ = run(tmp_path, capsys)
    assert status == 1 and "RuntimeError: no kernel image is available" in out
