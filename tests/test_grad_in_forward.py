"""``grad_in_forward`` under Megatron's models and optimizers: see tests/ranks/grad_in_forward_cases.py."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks.runner import case_names, run_cases
from tests.test_megatron_models import CORE_0_19, CORES, installed_is_older_than

MODULE = "tests.ranks.grad_in_forward_cases"


@pytest.mark.parametrize("name", case_names(MODULE))
@pytest.mark.parametrize(("core", "num_ranks"), [("installed", 1), ("0.19.2", 2)])
def test_grad_in_forward(core, num_ranks, name):
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    if core == "0.19.2" and not CORE_0_19.is_dir():
        pytest.skip(f"no {CORE_0_19.name} in the environment: run scripts/setup_env.sh")
    if core == "installed" and name == "wrong loss: hybrid" and installed_is_older_than(0, 17):
        pytest.skip("MambaModel takes no loss_mask before 0.17")
    run_cases(MODULE, num_ranks, CORES[core]).check(name)
