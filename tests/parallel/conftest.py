"""Under torchrun the pytest of rank 0 runs the tests; the other ranks do what it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import torchrun
from tests.support.rank_process import PLAIN, Ranks

if torchrun.IS_RANK:

    def pytest_configure() -> None:
        if torchrun.RANK:
            torchrun.this_rank().serve()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(items: list[Any]) -> None:
        """The plain environment's tests first: what Megatron's changes in a process stays changed."""
        params = {item: item.callspec.params if hasattr(item, "callspec") else {} for item in items}
        items.sort(key=lambda item: params[item].get("ranks", Ranks(1)).environment != PLAIN)

    def pytest_unconfigure() -> None:
        torchrun.this_rank().end()
