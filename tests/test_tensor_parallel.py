"""The op at TP 1, 2 and 4 under torchrun: gloo on a CPU, NCCL where there are GPUs enough."""

from __future__ import annotations

import pytest

from tests.ranks.runner import case_names, run_cases

MODULE = "tests.ranks.head_cases"


@pytest.mark.parametrize("name", case_names(MODULE))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_head(num_ranks, name):
    run_cases(MODULE, num_ranks).check(name)
