"""What several files of tools' tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_fused_ce.scripts.lib import pictures, results
from tests.support.commands import run_here
from tests.support.forked_launches import Server


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    """But where a test is about one: they take long."""
    if "picture" in request.node.name:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setattr(pictures, "pyplot", lambda: None)


@pytest.fixture(scope="session")
def forks():
    """Status and output of ``torchrun words...`` over so many ranks, which find torch imported."""
    launch = Server(None).launch
    return lambda num, folder, *words: launch(words, folder, ranks=range(num), WORLD_SIZE=str(num))


@pytest.fixture
def fake_checkout(tmp_path, monkeypatch):
    """Where a Megatron-LM would be: a script that logs as Megatron does, and its words to launches.txt."""
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", str(support / "no_torch"), prepend=os.pathsep)  # its torchrun is quick
    monkeypatch.setenv("LAUNCHES", str(tmp_path / "launches.txt"))
    (core := tmp_path / "megatron-lm" / "megatron" / "core").mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    return shutil.copy(support / "fake_pretrain.py", tmp_path / "megatron-lm" / "pretrain_gpt.py").parent


@pytest.fixture
def ran(tmp_path):
    """Runs a tool into the folder out: what came of it, its result's made_by, rows by variant (and tokens),
    and the words of each launch."""

    def run(main, *words):
        (log := tmp_path / "launches.txt").write_text("")
        done, made_by, rows = run_here(main, "--out", tmp_path / "out", *words), {}, []
        for file in (tmp_path / "out").glob("*.json"):
            made_by, rows = (results.read(file)[name] for name in ("made_by", "rows"))
        named = {(row["variant"], row["T"]) if "T" in row else row["variant"]: row for row in rows}
        return done, made_by, named, log.read_text().splitlines()

    return run
