"""scripts/dev/sanitize.py and its workload: no kernel is left out, and no report is overlooked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_fused_ce.scripts.dev import sanitize
from megatron_fused_ce.scripts.dev import sanitize_workload as workload

ROOT = Path(__file__).resolve().parents[2]


def test_every_kernel_belongs_to_one_group():
    """By what triton compiled, not by what the script finds in the source."""
    in_groups = [module for modules in workload.MODULES.values() for module in modules]
    assert sorted(in_groups) == sorted(workload.entry_kernels())
    for file in sorted((ROOT / "kernels").glob("*.py")):
        module = workload.kernels_module(file.stem)
        compiled = {
            name
            for name, value in vars(module).items()
            if name.endswith("_kernel") and callable(getattr(value, "run", None))
        }
        assert compiled == set(workload.entry_kernels().get(file.stem, ())), file.name


@pytest.mark.parametrize("group", ["rows", "portable"])
def test_the_workload_is_right_and_launches_every_kernel(group, device, monkeypatch):
    if device.type != "cuda":
        # The interpreter takes its time: all kernels, a few of the checks.
        few = (
            "shards",
            "outputs",
            "distillation",
            "divergence",
            "rescaling",
            "upstream",
            "outlier",
            "recompute, all options",
        )
        for name in ("checks_of_rows", "checks_of_exp"):
            whole = getattr(workload, name)
            chosen = lambda *args, whole=whole: {  # noqa: E731
                name: check for name, check in whole(*args).items() if name in few
            }
            monkeypatch.setattr(workload, name, chosen)
    results = workload.run(group, device)
    assert results["failed"] == {}
    launched = {name for name, count in results["launches"].items() if count}
    assert launched >= set(results["launches"]) - {"_pause_kernel"}


def test_a_wrong_result_and_a_kernel_that_never_ran_are_told(device, monkeypatch):
    def wrong(device):
        raise AssertionError("loss: error 1 above 0")

    monkeypatch.setattr(workload, "checks_of_exp", lambda device: {"wrong": wrong})
    failed = workload.run("portable", device)["failed"]
    assert failed["wrong"] == "AssertionError: loss: error 1 above 0"
    assert failed["_finalize_rows_kernel"] == "was never launched"


MEMCHECK = """\
========= COMPUTE-SANITIZER
portable: 10 checks, failed: {}
========= Invalid __global__ read of size 4 bytes
=========     at _finalize_rows_kernel+0x1d0 in scaled_exp_rows.py:301
=========     by thread (100,0,0) in block (0,0,0)
=========     Address 0x7f2b7f400190 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2b7f400000 of size 400 bytes
=========
========= Invalid __global__ write of size 16 bytes
=========     at void at::native::fill<float>(float *)+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Invalid __global__ read of size 4 bytes
=========     at 0x1d0 in _control_out_of_bounds_kernel
=========     by thread (100,0,0) in block (0,0,0)
========= Error: process didn't terminate successfully
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """\
========= Error: Race reported between Write access at _control_race_kernel+0x90 in sanitize_workload.py:9
=========     and Read access at _control_race_kernel+0x100 in sanitize_workload.py:9 [508 hazards]
=========
========= Warning: Race reported between Read access at _product_kernel+0x90
=========     and Write access at _product_kernel+0x100 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
INITCHECK = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _control_uninitialised_kernel+0x70
=========     by thread (31,0,0) in block (1,0,0)
========= ERROR SUMMARY: 1 error
"""


def child(folder, tool, log, group="portable", failed=None):
    made = sanitize.Child(tool, group, folder, "compute-sanitizer", ended="status 0")
    made.stem.with_suffix(".log").write_text(log)
    if failed is not None:
        launches = {"_finalize_rows_kernel": 12, "_scaled_exp_kernel": 17}
        results = {"group": group, "checks": 9, "failed": failed, "launches": launches}
        results["asynchronous"] = {"_scaled_exp_kernel": ["TMA", "wgmma"]}
        made.stem.with_suffix(".json").write_text(json.dumps(results))
    return made


def test_findings_are_told_from_controls(tmp_path):
    made = child(tmp_path, "memcheck", MEMCHECK, failed={})
    assert [one.kernel for one in made.found] == ["_finalize_rows_kernel", "void at::native::fill"]
    assert made.control_seen
    assert made.problems() == ["1 findings in _finalize_rows_kernel", "1 findings in void at::native::fill"]
    raced = child(tmp_path, "racecheck", RACECHECK, failed={})
    assert raced.control_seen and raced.problems() == ["1 findings in _product_kernel"]
    clean = child(tmp_path, "initcheck", INITCHECK, failed={})
    assert clean.problems() == []
    table = sanitize.markdown([made, raced, clean], {"commit": "abc"})
    assert "| `scaled_exp_rows._finalize_rows_kernel` | 12 / 1 | 12 / 0 | 12 / 0 |  |" in table
    assert "| `scaled_exp._scaled_exp_kernel` | 17 / 0 | 17 / 0 | 17 / 0 | TMA, wgmma |" in table


@pytest.mark.parametrize(
    ("tool", "log", "failed", "words"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", {}, "was not reported"),
        ("initcheck", INITCHECK, None, "no results (status 0)"),
        ("initcheck", INITCHECK, {"store": "AssertionError: loss"}, "store: AssertionError: loss"),
        ("racecheck", "========= Internal Sanitizer Error: untracked\n" + RACECHECK, {}, "Internal"),
    ],
)
def test_a_run_that_proves_nothing_is_not_clean(tool, log, failed, words, tmp_path):
    assert any(words in said for said in child(tmp_path, tool, log, failed=failed).problems())


def test_what_is_poisoned():
    """Where TMA writes, which initcheck does not see, and nowhere else."""
    poisoned = {
        (tool, group)
        for tool in (sanitize.ALONE, *sanitize.TOOLS)
        for group in workload.GROUPS
        if "--poison" in sanitize.Child(tool, group, Path("x"), "tool").command(1)
    }
    assert poisoned == {("initcheck", "portable"), ("initcheck", "hopper")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_without_a_gpu(capsys):
    status = sanitize.main([])
    assert status == 2 and "needs a GPU" in capsys.readouterr().err
