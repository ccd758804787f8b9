"""Megatron-LM's own unit tests around output layer and loss, flag off and on: rows of :mod:`.stacks`.

The checkout (with its tests) is not changed. A test counts against the flag only where its outcome differs.
Without a GPU, gloo stands in for NCCL.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections import Counter
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_fused_ce
from megatron_fused_ce.scripts.dev.stacks import in_forks
from megatron_fused_ce.scripts.lib import megatron_cpu

TESTS = Path("tests", "unit_tests")
FILES = (
    *("models/test_gpt_model.py", "models/test_hybrid_model.py", "tensor_parallel/test_cross_entropy.py"),
    *("tensor_parallel/test_layers.py", "transformer/test_mup.py"),
)
KINDS = ("fused", "materialised", "stock")


class Seen:
    """A plugin of pytest: outcomes of tests, by their names, and heads by file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.heads: Counter[tuple[str, str]] = Counter()

    def pytest_collection(self) -> None:
        """What some files need to run at all.

        Tests that flash-attn would be needed for are skipped where it is missing, as where it is old: their
        conditions ask for its version while a file is imported, and the whole file would be lost. Tests that
        set ``padded_vocab_size`` and build a model of ``vocab_size`` find the one in the other.
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

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # a file that cannot be imported
            why = re.search(r"^E +(.*)", str(report.longrepr), re.MULTILINE)
            self.outcomes[report.nodeid] = f"error ({why[1] if why else ''})"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            failed = "failed" if report.when == "call" else f"failed in {report.when}"
            self.outcomes[report.nodeid] = failed if report.failed else report.outcome
        counters, file = megatron_fused_ce.counters(), report.nodeid.partition("::")[0]
        self.heads.update({(file, kind): getattr(counters, kind) for kind in KINDS})
        counters.reset()


def run(files: list[str], flag: bool, rank: int) -> tuple[dict[str, str], dict[tuple[str, str], int]]:
    """Outcomes and heads on one rank, which this process is."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    # Megatron's conftest would download data, which these tests do not read.
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = mock.MagicMock()
    if not torch.cuda.is_available():
        megatron_cpu.install()
        stock = dist.init_process_group
        dist.init_process_group = lambda backend="", **named: stock("gloo", **named)
    if flag:
        megatron_fused_ce.enable()
    import pytest

    seen = Seen()
    words = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"]
    pytest.main([*words, *files], plugins=[seen])
    return seen.outcomes, dict(seen.heads)


def rows(checkout: Path) -> list[dict[str, Any]]:
    """A row a file."""
    os.chdir(checkout)
    files = [str(TESTS / file) for file in FILES if (TESTS / file).is_file()]
    ((off, _),), ((on, of_all),) = (in_forks(1, partial(run, files, flag)) for flag in (False, True))
    made = []
    for file in files:
        without, found = ({k: v for k, v in side.items() if k.startswith(file)} for side in (off, on))
        differ = [test for test in {**without, **found} if without.get(test) != found.get(test)]
        counts = ", ".join(f"{n} {kind}" for kind, n in Counter(found.values()).items())
        case = f"unit tests, {Path(file).relative_to(TESTS)}: {counts}"
        case += "".join(f"; differs: {test}" for test in differ)
        heads = tuple(of_all.get((file, kind), 0) for kind in KINDS)
        made.append({"case": case, "heads": [heads], "equal": bool(found) and not differ})
    return made
