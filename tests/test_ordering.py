"""The order of collectives over all communicators: see tests/ranks/ordering_cases.py."""

from __future__ import annotations

import pytest

from tests.ranks.runner import case_names, run_cases

MODULE = "tests.ranks.ordering_cases"


@pytest.mark.parametrize("name", case_names(MODULE))
def test_ordering(name):
    run_cases(MODULE, 4).check(name)
