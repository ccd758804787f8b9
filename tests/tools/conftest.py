"""What several files of tools' tests share."""

from __future__ import annotations

import pytest

from tests.support import forked_launches


@pytest.fixture(scope="session")
def forks():
    """Starts ranks that find torch and the kernels imported."""
    with forked_launches.server(None) as server:
        yield server
