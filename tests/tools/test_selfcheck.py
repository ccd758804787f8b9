"""``selfcheck``: what is right passes, what is wrong is told and ends with status 1."""

from __future__ import annotations

import json
import sys

import torch

from megatron_fused_ce.losses.label import CrossEntropy
from megatron_fused_ce.losses.terms import Pull
from megatron_fused_ce.scripts.runs import selfcheck


def selfchecked(tmp_path, capsys):
    status = selfcheck.main(["--device", "cpu", "--calls", "12", "--out", str(tmp_path / "found.json")])
    return status, capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())


def fails(*_):
    raise RuntimeError("no kernel image is available")


def test_right_and_wrong(tmp_path, capsys, monkeypatch):
    status, out, found = selfchecked(tmp_path, capsys)
    assert status == 0 and "12 calls against fp64, 0 wrong" in out and "not timed: no GPU" in out
    assert found["calls"] == 12 and not found["wrong"] and found["torch"]
    # grad_hidden and grad_weight too large by two percent, where the loss is a sum of terms; then an error.
    stock = CrossEntropy.pull
    monkeypatch.setattr(CrossEntropy, "pull", lambda *of: Pull(*(x and 1.02 * x for x in stock(*of))))
    status, out, found = selfchecked(tmp_path, capsys)
    assert status == 1 and found["wrong"] and "grad_hidden is off by" in out
    monkeypatch.setattr(CrossEntropy, "value", fails)
    status, out, _ = selfchecked(tmp_path, capsys)
    assert status == 1 and "RuntimeError: no kernel image is available" in out


def test_without_triton(tmp_path, capsys, monkeypatch):
    """On a GPU it is said once, not of a hundred calls; tests/project/test_packaging.py: a CPU needs none."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert selfcheck.main(["--out", str(tmp_path / "none.json")]) == 2
    assert "pip install triton" in capsys.readouterr().err and not (tmp_path / "none.json").exists()
