"""What :func:`.planner.peak_memory` counts against what is alive, buffer by buffer, at TP 1 and 2."""

from __future__ import annotations

import pytest

from tests.ranks.runner import case_names, run_cases

MODULE = "tests.ranks.memory_cases"


@pytest.mark.parametrize("name", case_names(MODULE))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_buffers(num_ranks, name):
    run_cases(MODULE, num_ranks).check(name)
