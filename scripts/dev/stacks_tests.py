"""Megatron-LM's own unit tests around output layer and loss, flag off and on: rows of :mod:`.stacks`.

The checkout (with its tests) is not changed: this file, as a plugin of pytest, turns the flag on. A test
counts against the flag only where its outcome differs. Without a GPU, gloo stands in for NCCL.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

from megatron_fused_ce.scripts.lib.results import REPOSITORY

#: This file, as pytest's plugin, and what tells it whether to turn the flag on.
PLUGIN, GIVEN = "megatron_fused_ce.scripts.dev.stacks_tests", "FUSED_CE_STACKS_TESTS"
TESTS = "tests/unit_tests"
FILES = (
    *("models/test_gpt_model.py", "models/test_hybrid_model.py", "tensor_parallel/test_cross_entropy.py"),
    *("tensor_parallel/test_layers.py", "transformer/test_mup.py"),
)


def outcomes(checkout: Path, file: str, flag: str) -> tuple[dict[str, str], tuple[int, ...]]:
    """Of every test of a file on one rank; heads fused, materialised and left to Megatron."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.xml")
        words = [
            "pytest",
            "-q",
            "-p",
            PLUGIN,
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            f"--junitxml={made}",
        ]
        search = [str(checkout), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
        environment |= {GIVEN: flag, "PYTEST_DEBUG_TEMPROOT": folder}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "-m",
            *words,
            f"{TESTS}/{file}",
        ]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        cases = ElementTree.parse(made).iter("testcase") if made.exists() else ()
        of_all = {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}
    counted = re.findall(
        r"fused: (\d+), logits materialised: (\d+), heads on the stock path: (\d+)", done.stdout
    )
    return of_all, tuple(map(int, counted[-1])) if counted else (0, 0, 0)


def outcome(case: ElementTree.Element) -> str:
    """Passed, skipped, failure, or why a file could not be imported."""
    made = next((kind for kind in case if kind.tag in ("failure", "error", "skipped")), None)
    if made is None:
        return "passed"
    why = re.search(r"^E +(.*)", made.text or "", re.MULTILINE) if made.tag == "error" else None
    return f"error ({why[1]})" if why else made.tag


def rows(checkout: Path) -> list[dict[str, Any]]:
    """A row a file."""
    made = []
    for file in (file for file in FILES if (checkout / TESTS / file).is_file()):
        (off, _), (on, heads) = (outcomes(checkout, file, flag) for flag in ("off", "on"))
        differ = [test for test in dict.fromkeys([*off, *on]) if off.get(test) != on.get(test)]
        counts = ", ".join(f"{n} {kind}" for kind, n in Counter(on.values()).items())
        case = f"unit tests, {file}: {counts}" + "".join(f"; differs: {test}" for test in differ)
        made.append({"case": case, "heads": [heads], "equal": bool(on) and not differ})
    return made


# --- in the processes of the tests -------------------------------------------------------------------


def pytest_load_initial_conftests() -> None:
    """Before anything of the checkout is imported."""
    import torch

    # Megatron's conftest would download data, which these tests do not read.
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = mock.MagicMock()
    if not torch.cuda.is_available():
        import torch.distributed as dist

        from megatron_fused_ce.scripts.lib import megatron_cpu

        megatron_cpu.install()
        stock = dist.init_process_group
        dist.init_process_group = lambda backend="", **named: stock("gloo", **named)
    if os.environ[GIVEN] == "on":
        import megatron_fused_ce

        megatron_fused_ce.enable()


def pytest_collection() -> None:
    """What some files of the tests need to run at all, flag on or off.

    Tests that flash-attn would be needed for are skipped where it is missing, as where it is old: their
    conditions ask for its version while a file is imported, and the whole file would be lost. Tests that set
    ``padded_vocab_size`` and build a model of ``vocab_size`` find the one in the other.
    """
    from megatron.core import utils  # type: ignore[import-not-found]
    from megatron.training import global_vars  # type: ignore[import-not-found]
    from packaging.version import Version

    if importlib.util.find_spec("flash_attn") is None:
        utils._fa_version = Version("0")
    stock = global_vars.set_global_variables

    @wraps(stock)
    def set_global_variables(args: Any, *more: Any, **named: Any) -> Any:
        if getattr(args, "vocab_size", None) is None:
            args.vocab_size = getattr(args, "padded_vocab_size", None)
        return stock(args, *more, **named)

    global_vars.set_global_variables = set_global_variables
