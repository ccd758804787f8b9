"""torch FSDP2 and Megatron-FSDP: see tests/ranks/fsdp_cases.py."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks.fsdp_cases import NEEDS_0_19
from tests.ranks.runner import case_names, run_cases
from tests.test_megatron_models import CORE_0_19, CORES, installed_is_older_than

MODULE = "tests.ranks.fsdp_cases"


@pytest.mark.parametrize("name", case_names(MODULE))
@pytest.mark.parametrize("core", CORES)
def test_fsdp(core, name):
    for package in ("megatron.core", "einops"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if core == "0.19.2" and not CORE_0_19.is_dir():
        pytest.skip(f"no {CORE_0_19.name} in the environment: run scripts/setup_env.sh")
    if core == "installed" and name in NEEDS_0_19 and installed_is_older_than(0, 19):
        pytest.skip("the installed megatron-core cannot run it")
    run_cases(MODULE, 2, CORES[core]).check(name)
