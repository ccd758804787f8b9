"""What all tests of a plan share."""

from __future__ import annotations

import functools

import pytest

from megatron_fused_ce.plan import command


@pytest.fixture(autouse=True, scope="session")
def parsers_made_once():
    """A plan makes four parsers of a hundred options: most of its time where little is planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_parser", functools.cache(command._parser))
        yield
