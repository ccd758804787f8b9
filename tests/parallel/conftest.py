"""Under torchrun each pytest is one rank: the same order of tests on all of them, lines from rank 0 only."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import torchrun
from tests.support.ranks import Ranks


def _environment_of(item: Any) -> Any:
    ranks = item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
    return ranks.environment if isinstance(ranks, Ranks) else None


if torchrun.IS_RANK:

    @pytest.hookimpl(trylast=True)
    def pytest_configure(config: Any) -> None:
        if torchrun.RANK:
            reporter = config.pluginmanager.get_plugin("terminalreporter")
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  until the process ends

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(items: list[Any]) -> None:
        items[:] = torchrun.in_order(items, _environment_of)

    def pytest_unconfigure() -> None:
        torchrun.THIS_RANK.end()
