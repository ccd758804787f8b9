"""Megatron-LM's unit tests around output layer and loss, without the flag and with it.

    python -m scripts.dev.upstream_tests ~/Megatron-LM --ranks 1 2

The checkout (with its tests) is not changed: this file, as a plugin of pytest, turns the flag on. Each test
file runs twice for each number of ranks; a test counts against the flag only where its outcome differs. Heads
are counted test by test, so that a test that never came near one is not taken for one that passed with it.
Without a GPU, gloo stands in for NCCL.

A test that takes more than --test-timeout seconds, or kills its process, is lost; the other tests of its file
run in a new process. Writes upstream_tests.json to --out, and the processes' output beside it. Exit status:
0 no difference, 1 a test that differs, 2 a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import astuple
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron_fused_ce.command_line import Parser, UsageError, command, num_gpus, whole, writable_folder
from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.lib.launches import full_version
from megatron_fused_ce.scripts.lib.results import REPOSITORY

if TYPE_CHECKING:
    import pytest

#: This file, as pytest's plugin.
PLUGIN = "megatron_fused_ce.scripts.dev.upstream_tests"
TESTS = "tests/unit_tests"
#: What touches the output layer or the loss, in the order in which time is spent on it.
FILES = (
    *("models/test_gpt_model.py", "transformer/test_multi_token_prediction.py"),
    *("tensor_parallel/test_cross_entropy.py", "transformer/test_mup.py"),
    *("extension/test_te_lmhead_column_parallel_linear.py", "pipeline_parallel/test_mtp_loss_scale.py"),
    *("models/test_hybrid_model.py", "tensor_parallel/test_layers.py"),
    *("a2a_overlap/test_schedule_chunk_1f1b.py", "test_training.py", "test_fp8_param.py"),
    "distributed/test_torch_fully_sharded_parallel.py",
    "distributed/mfsdp_v1/test_mcore_fully_sharded_data_parallel.py",
    "distributed/mfsdp_v1/test_mcore_tensor_parallelism_detect.py",
    *("distributed/test_distributed_data_parallel.py", "distributed/test_finalize_model_grads.py"),
    "dist_checkpointing/models/test_gpt_model.py",
    *("dist_checkpointing/models/test_gpt_hybrid_interop.py", "pipeline_parallel/test_schedules.py"),
    *("transformer/test_cuda_graphs.py", "a2a_overlap/test_cuda_graphed_schedule_chunk_1f1b.py"),
    *("test_fp4_param.py", "post_training/test_freeze_base_for_mtp.py"),
)
#: Environment of the plugin: folder of its lines, hook, seconds of a test, whether CUDA is stood in for.
GIVEN = "FUSED_CE_UPSTREAM_TESTS"
#: Test timeouts that a process has before its first test: Megatron's import.
STARTING = 4
#: A test that ranks disagree about counts as the first of these.
OUTCOMES = ("lost", "failed", "passed", "skipped", "not run")
HEADS = ("fused", "materialised", "stock")  # summed over the ranks
NOT_RUN = {"outcome": "not run", "message": "", **dict.fromkeys(HEADS, 0)}


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Of every test that was begun, over the ranks; of a test that a rank wrote twice its last line."""
    made: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        lines = map(json.loads, file.read_text().splitlines())
        for test, new in {line.pop("test"): line for line in lines}.items():
            pair = sorted((made.get(test, NOT_RUN), new), key=lambda one: OUTCOMES.index(one["outcome"]))
            made[test] = pair[0] | {head: pair[0][head] + pair[1][head] for head in HEADS}
    return made


def run(options: argparse.Namespace, file: str, ranks: int, hook: str) -> dict[str, dict[str, Any]]:
    """Outcomes of a file's tests, with the hook on or off."""
    path = f"{TESTS}/{file}"
    folder = options.out / f"{file.removesuffix('.py').replace('/', '.')}-{ranks}-{hook}"
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("rank*.jsonl"):
        earlier.unlink()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words += ["-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    words += ["-o", "addopts=", "--rootdir", str(options.checkout)]
    search = [str(options.checkout), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    environment |= {"NCCL_NVLS_ENABLE": "0", "PYTEST_DEBUG_TEMPROOT": str(folder)}
    environment[GIVEN] = json.dumps([str(folder), hook, options.test_timeout, not num_gpus()])
    done: dict[str, dict[str, Any]] = {}
    with (folder / "log").open("wb") as log:
        while True:
            left_out = [word for test in done for word in ("--deselect", test)]
            command = [*words, *left_out, path]
            ended = subprocess.run(command, cwd=options.checkout, env=environment, stdout=log, stderr=log)
            before, done = done, outcomes(folder)
            if ended.returncode == 0:
                return done
            if done.keys() == before.keys():  # before its first test, or after its last
                return done | {path: NOT_RUN | {"outcome": "lost", "message": f"see {folder.name}/log"}}


def rows_of(file: str, ranks: int, off: dict[str, Any], on: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a test, in the order in which they ran."""
    rows = []
    for test in dict.fromkeys([*off, *on]):
        one, other = off.get(test, NOT_RUN), on.get(test, NOT_RUN)
        same = one["outcome"] == other["outcome"]
        verdict = one["outcome"] if same else "differs"
        name = test.removeprefix(f"{TESTS}/{file}").removeprefix("::") or "(the file)"
        row = {"shape": f"{ranks} ranks", "variant": f"{file}::{name}", "file": file, "test": name}
        rows.append({**row, "ranks": ranks, "off": one, "on": other, "verdict": verdict})
    return rows


def told(rows: list[dict[str, Any]]) -> str:
    """One file on so many ranks in a line, and a line for each test that differs."""
    counts = Counter(row["verdict"] for row in rows)
    counts.update({f"heads {head}": sum(row["on"][head] for row in rows) for head in HEADS})
    lines = [
        f"{rows[0]['file']}, {rows[0]['shape']}: {', '.join(f'{n} {name}' for name, n in counts.items())}"
    ]
    for row in (row for row in rows if row["verdict"] == "differs"):
        off, on = row["off"], row["on"]
        lines.append(f"  {row['test']}: {off['outcome']}, with the flag {on['outcome']}: {on['message']}")
    return "\n".join(lines)


@command("upstream_tests")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.dev.upstream_tests", __doc__ or "")
    add = parser.add_argument
    add("checkout", type=Path, metavar="CHECKOUT", help="of Megatron-LM")
    add("--ranks", type=whole(most=4096), nargs="+", default=[1, 2], metavar="R", help="[1 2]")
    add("--files", nargs="+", default=FILES, metavar="F", help=f"below {TESTS} [those known]")
    add("--out", type=Path, default=Path("build/upstream_tests"), metavar="DIR")
    add("--test-timeout", type=whole(), default=120, metavar="S", help="[120]")
    options = parser.parse_args(words)
    options.checkout = options.checkout.resolve()
    files = [file for file in options.files if (options.checkout / TESTS / file).is_file()]
    if not files:
        raise UsageError(f"{options.checkout} has none of these files in {TESTS}")
    options.out = writable_folder(options.out.resolve())
    device = f"{num_gpus()} x {results.device_name()}" if num_gpus() else ""
    source = results.made_by(device, ["scripts.dev.upstream_tests", *words])
    source["megatron"] = full_version(options.checkout)
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        for file in files:
            of_file = rows_of(file, ranks, *(run(options, file, ranks, hook) for hook in ("off", "on")))
            if of_file:
                print(told(of_file), flush=True)
            rows += of_file
            results.write(options.out / "upstream_tests.json", rows, source)
    return 1 if any(row["verdict"] == "differs" for row in rows) else 0


# --- in the processes of the tests -------------------------------------------------------------------


def pytest_load_initial_conftests() -> None:
    """Before anything of the checkout is imported."""
    _, hook, timeout_s, on_cpu = json.loads(os.environ[GIVEN])
    faulthandler.dump_traceback_later(STARTING * timeout_s, exit=True)
    # Megatron's conftest would download data, which these tests do not read.
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = mock.MagicMock()
    if on_cpu:
        import torch.distributed as dist

        from megatron_fused_ce.scripts.lib import megatron_cpu

        megatron_cpu.install()
        stock = dist.init_process_group
        dist.init_process_group = lambda backend="", **named: stock("gloo", **named)
    if hook == "on":
        import megatron_fused_ce

        megatron_fused_ce.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())


def pytest_collection() -> None:
    """What some files of the tests need to run at all, flag on or off.

    Tests that flash-attn would be needed for are skipped where it is missing, as where it is old: their
    conditions ask for its version while a file is imported, and the whole file would be lost. Tests that set
    ``padded_vocab_size`` and build a model of ``vocab_size`` find the one in the other.
    """
    try:
        from megatron.core import utils  # type: ignore[import-not-found]
        from megatron.training import global_vars  # type: ignore[import-not-found]
        from packaging.version import Version
    except ImportError:  # tests of the core alone
        return
    if importlib.util.find_spec("flash_attn") is None:
        utils._fa_version = Version("0")
    stock = global_vars.set_global_variables

    @wraps(stock)
    def set_global_variables(args: Any, *more: Any, **named: Any) -> Any:
        if getattr(args, "vocab_size", None) is None:
            args.vocab_size = getattr(args, "padded_vocab_size", None)
        return stock(args, *more, **named)

    global_vars.set_global_variables = set_global_variables


class Recorder:
    """Writes a line as a test begins, which says that it is lost, and as it ends another, which counts."""

    def __init__(self) -> None:
        folder, _, self._timeout_s, _ = json.loads(os.environ[GIVEN])
        self._path = Path(folder, f"rank{os.environ.get('RANK', '0')}.jsonl")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pytest_runtest_logstart(report.nodeid)
            self._write("failed", reason_of(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        faulthandler.dump_traceback_later(self._timeout_s, exit=True)
        self._test, self._before = nodeid, heads()
        self._outcome = "passed", ""
        self._write("lost")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._outcome[0] != "failed" and not report.passed:
            self._outcome = report.outcome, reason_of(report)
        if report.when == "teardown":
            self._write(*self._outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """torchrun ends all ranks with the first that fails: the records tell what failed."""
        session.exitstatus = 0

    def _write(self, outcome: str, message: str = "") -> None:
        met = {name: count - self._before[name] for name, count in heads().items()}
        line = {"test": self._test, "outcome": outcome, "message": message, **met}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def heads() -> dict[str, int]:
    """Evaluated in this process."""
    from megatron_fused_ce.adapter.switch import counters

    return dict(zip(HEADS, astuple(counters()), strict=True))


def reason_of(report: Any) -> str:
    """Why a test failed or was skipped, in one line."""
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[2])
    lines: list[str] = report.longreprtext.splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines[-1:] or [""])[0][:240]


if __name__ == "__main__":
    sys.exit(main())
