"""What several files of tools' tests share."""

from __future__ import annotations

import pytest

from tests.support import forked_launches
from tests.support.checkouts import FAKE_PRETRAIN, stand_in
from tests.support.commands import launches_without_torch


@pytest.fixture(scope="session")
def forks():
    """Starts ranks that find torch and the kernels imported."""
    with forked_launches.server(None) as server:
        yield server


@pytest.fixture
def fake_checkout(tmp_path, monkeypatch):
    """Where a Megatron-LM would be: a script that logs as Megatron does, and its words to launches.txt."""
    monkeypatch.setenv("LAUNCHES", str(tmp_path / "launches.txt"))
    with launches_without_torch():
        yield stand_in(tmp_path / "megatron-lm", FAKE_PRETRAIN)
