"""``selfcheck``: what is right passes, what is wrong is told and ends with status 1."""

from __future__ import annotations

import json
import sys

import torch

from megatron_fused_ce.losses.label import CrossEntropy
from megatron_fused_ce.losses.terms import Pull
from megatron_fused_ce.scripts.runs import selfcheck


def test_right_and_wrong(tmp_path, capsys, monkeypatch):
    """In turn: nothing is broken; gradients are two percent too large; calls fail."""
    path, stock = tmp_path / "found.json", CrossEntropy.pull
    for name, method, status, words in (
        ("pull", stock, 0, "12 calls against fp64, 0 wrong"),
        ("pull", lambda *of: Pull(*(x and 1.02 * x for x in stock(*of))), 1, "grad_hidden is off by"),
        ("value", None, 1, "TypeError: 'NoneType' object is not callable"),
    ):
        monkeypatch.setattr(CrossEntropy, name, method)
        assert selfcheck.main(["--device", "cpu", "--calls", "12", "--out", str(path)]) == status
        printed, found = capsys.readouterr().out, json.loads(path.read_text())
        assert words in printed and "not timed: no GPU" in printed
        assert (found["calls"], bool(found["wrong"])) == (12, bool(status)) and found["torch"]


def test_without_triton(tmp_path, capsys, monkeypatch):
    """On a GPU it is said once, not of a hundred calls; tests/project/test_packaging.py: a CPU needs none."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert selfcheck.main(["--out", str(tmp_path / "none.json")]) == 2
    assert "pip install triton" in capsys.readouterr().err and not (tmp_path / "none.json").exists()
