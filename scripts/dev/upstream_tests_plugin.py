"""The pytest plugin of scripts/dev/upstream_tests.py: puts ours in place, writes down what each test did.

    torchrun ... -m pytest -p upstream_tests_plugin --fused-ce-results DIR --fused-ce-hook on \\
        --fused-ce-project megatron tests/...

Each rank appends to ``DIR/rank<R>.jsonl``: ``{"began": ID}`` when a test begins, and when it has ended its
record. A file that ends with a beginning belongs to a process that hung or died in that test.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from dataclasses import astuple
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from unittest import mock

import pytest

from megatron_fused_ce.scripts.dev.upstream_tests import PROJECTS

#: What is said of a failure: one line of it.
MESSAGE_CHARACTERS = 240


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fused-ce")
    group.addoption("--fused-ce-results", type=Path, required=True)
    group.addoption("--fused-ce-hook", choices=("off", "on"), required=True)
    group.addoption("--fused-ce-project", choices=tuple(PROJECTS), required=True)
    group.addoption("--fused-ce-cpu", action="store_true", help="CUDA's stand-ins, and gloo for NCCL")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of the checkout is imported."""
    options = early_config.known_args_namespace
    for name in PROJECTS[options.fused_ce_project].without:
        folder = early_config.rootpath / name.replace(".", "/")
        try:
            if folder.is_dir():
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__path__ = [str(folder)]
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()
    # Megatron's conftest would download data, which these tests do not read.
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = mock.MagicMock()
    if options.fused_ce_cpu:
        import torch.distributed as dist

        from megatron_fused_ce.scripts.lib import megatron_cpu

        megatron_cpu.install()
        stock = dist.init_process_group
        dist.init_process_group = lambda backend="", **named: stock("gloo", **named)
    if options.fused_ce_hook == "on" and options.fused_ce_project == "megatron":
        import megatron_fused_ce

        megatron_fused_ce.enable()


def pytest_configure(config: pytest.Config) -> None:
    folder: Path = config.getoption("--fused-ce-results")
    folder.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(Recorder((folder / f"rank{os.environ.get('RANK', '0')}.jsonl").open("a")))


def pytest_collection(session: pytest.Session) -> None:
    """What some files of the tag need to run at all, flag on or off.

    Tests that flash-attn would be needed for are skipped where it is missing, as where it is old: their
    conditions ask for its version while a file is imported, and the whole file would be lost. Tests that set
    ``padded_vocab_size`` and build a model of ``vocab_size`` find the one in the other.
    """
    if session.config.getoption("--fused-ce-project") != "megatron":
        return
    if importlib.util.find_spec("flash_attn") is None:
        from megatron.core import utils  # type: ignore[import-not-found]
        from packaging.version import Version

        utils._fa_version = Version("0")
    try:
        from megatron.training import global_vars  # type: ignore[import-not-found]
    except ImportError:  # tests of the core alone
        return
    stock = global_vars.set_global_variables

    @wraps(stock)
    def set_global_variables(args: Any, *more: Any, **named: Any) -> Any:
        if getattr(args, "vocab_size", None) is None:
            args.vocab_size = getattr(args, "padded_vocab_size", None)
        return stock(args, *more, **named)

    global_vars.set_global_variables = set_global_variables


class Recorder:
    """One line a test."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._record: dict[str, Any] = {}
        self._counted = (0, 0, 0)
        self._write({"pid": os.getpid()})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            words = str(report.longrepr).strip().splitlines()
            errors = [line.removeprefix("E").strip() for line in words if line.startswith("E ")]
            self._begin(report.nodeid)
            self._end("not importable", (errors or words)[-1])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record["seconds"] += report.duration
        if report.failed and self._record["outcome"] != "failed":
            self._record |= {"outcome": "failed", "message": _message(report)}
        elif report.skipped and self._record["outcome"] != "failed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self._record |= {"outcome": "skipped", "message": reason}
        if report.when == "teardown":
            self._end(self._record["outcome"], self._record["message"])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """torchrun ends all ranks with the first that fails: the records tell what failed."""
        session.exitstatus = pytest.ExitCode.OK

    def _begin(self, nodeid: str) -> None:
        self._counted = _counters()
        self._record = {"test": nodeid, "outcome": "passed", "message": "", "seconds": 0.0}
        self._write({"began": nodeid})

    def _end(self, outcome: str, message: str) -> None:
        heads = (now - before for now, before in zip(_counters(), self._counted, strict=True))
        counted = dict(zip(("fused", "materialised", "stock"), heads, strict=True))
        words = " ".join(message.split())[:MESSAGE_CHARACTERS]
        self._write({**self._record, **counted, "outcome": outcome, "message": words})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _counters() -> tuple[int, int, int]:
    from megatron_fused_ce.adapter.switch import counters

    fused, materialised, stock = astuple(counters())
    return fused, materialised, stock


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    words = str(report.longrepr).strip() if crash is None else crash.message
    lines = words.splitlines() or [""]
    worst = [line for line in lines if line.startswith("Greatest absolute difference")]
    return f"{report.when}: {(worst or lines)[0]}"
