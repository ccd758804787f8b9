"""What several files of tools' tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.checkouts import FAKE_PRETRAIN, stand_in
from tests.support.forked_launches import Server


@pytest.fixture(scope="session")
def forks():
    """Starts ranks that find torch and the kernels imported."""
    return Server(None)


@pytest.fixture
def fake_checkout(tmp_path, monkeypatch):
    """Where a Megatron-LM would be: a script that logs as Megatron does, and its words to launches.txt."""
    no_torch = Path(__file__).parents[1] / "support" / "no_torch"  # whose torchrun starts at once
    monkeypatch.setenv("PYTHONPATH", str(no_torch), prepend=os.pathsep)
    monkeypatch.setenv("LAUNCHES", str(tmp_path / "launches.txt"))
    return stand_in(tmp_path / "megatron-lm", FAKE_PRETRAIN)
