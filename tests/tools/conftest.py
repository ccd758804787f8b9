"""What several files of tools' tests share."""

from __future__ import annotations

import functools

import pytest

from megatron_fused_ce.estimate import command
from tests.support import forked_launches


@pytest.fixture(autouse=True, scope="session")
def parsers_made_once():
    """A plan makes four parsers of a hundred options: most of its time where little is planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_parser", functools.cache(command._parser))
        yield


@pytest.fixture(scope="session")
def forks():
    """Starts ranks that find torch and the kernels imported."""
    with forked_launches.server(None) as server:
        yield server
