"""Under torchrun each pytest is one rank: the same order of tests on all of them, lines from rank 0 only."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import torchrun
from tests.support.rank_process import PLAIN
from tests.support.ranks import Ranks


def environment_of(item: Any) -> Any:
    ranks = item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
    return ranks.environment if isinstance(ranks, Ranks) else PLAIN


if torchrun.IS_RANK:

    @pytest.hookimpl(trylast=True)
    def pytest_configure(config: Any) -> None:
        if torchrun.RANK:
            reporter = config.pluginmanager.get_plugin("terminalreporter")
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  until the process ends

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(items: list[Any]) -> None:
        """The plain environment's tests first: what Megatron's changes in a process stays changed.

        Of several such environments the first is kept; the others' tests are skipped.
        """
        items.sort(key=lambda item: environment_of(item) != PLAIN)
        kept = next((each for item in items if (each := environment_of(item)) != PLAIN), PLAIN)
        for item in items:
            if environment_of(item) not in (PLAIN, kept):
                item.add_marker(pytest.mark.skip(reason=f"this launch has the {kept.name} ranks"))

    def pytest_unconfigure() -> None:
        torchrun.THIS_RANK.end()
