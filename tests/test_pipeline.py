"""Pipeline parallelism with both megatron-cores: see tests/ranks/pipeline_cases.py."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks.runner import case_names, run_cases
from tests.test_megatron_models import CORE_0_19, CORES

MODULE = "tests.ranks.pipeline_cases"


@pytest.mark.parametrize("name", case_names(MODULE))
@pytest.mark.parametrize("core", CORES)
def test_pipeline(core, name):
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    if core == "0.19.2" and not CORE_0_19.is_dir():
        pytest.skip(f"no {CORE_0_19.name} in the environment: run scripts/setup_env.sh")
    run_cases(MODULE, 4, CORES[core]).check(name)
