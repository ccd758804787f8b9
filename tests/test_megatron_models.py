"""Megatron's models, flag off and on, with the megatron-core in the environment and with 0.19.2."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.ranks.model_cases import NEEDS_0_19
from tests.ranks.runner import case_names, run_cases

MODULE = "tests.ranks.model_cases"

#: Where scripts/setup_env.sh puts megatron-core 0.19.2, whose metadata asks for Python 3.12.
CORE_0_19 = Path(sys.prefix) / "mcore-0.19.2"

CORES = {"installed": (), "0.19.2": (str(CORE_0_19),)}


@pytest.mark.parametrize("name", case_names(MODULE))
@pytest.mark.parametrize(
    ("core", "num_ranks"),
    [("installed", 2), ("0.19.2", 2), ("0.19.2", 1), ("installed", 4)],
)
def test_model(core, num_ranks, name):
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    if core == "0.19.2" and not CORE_0_19.is_dir():
        pytest.skip(f"no {CORE_0_19.name} in the environment: run scripts/setup_env.sh")
    if core == "installed" and name in NEEDS_0_19 and installed_is_older_than(0, 19):
        pytest.skip("not in the installed megatron-core")
    if num_ranks == 1 and " sp" in name:
        pytest.skip("one rank has no sequence parallelism")
    run_cases(MODULE, num_ranks, CORES[core]).check(name)


def installed_is_older_than(major: int, minor: int) -> bool:
    from megatron.core.package_info import MAJOR, MINOR

    return bool((major, minor) > (MAJOR, MINOR))
