"""scripts/dev/sanitize.py with a compute-sanitizer that says what it is given: no report is overlooked."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.scripts.dev import sanitize
from tests.support.commands import run_here

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::fill<float>(float *)+0x90
=========     by thread (100,0,0) in block (0,0,0)
=========     Address 0x7f2b7f400190 is out of bounds
=========
========= Invalid __global__ read of size 4 bytes
=========     at 0x1d0 in _wrong_bounds_kernel
=========     by thread (100,0,0) in block (0,0,0)
========= Error: process didn't terminate successfully
========= ERROR SUMMARY: 2 errors
"""
RACE = """\
========= Error: Race reported between Write access at {0}+0x90 in sanitize_kernels.py:9
=========     and Read access at {0}+0x100 in sanitize_kernels.py:9 [508 hazards]
=========
"""
BOUNDS = MEMCHECK.partition("=========\n")[2]


def test_findings_by_kernel():
    assert sanitize.findings(MEMCHECK) == {"void at::native::fill": 1, "_wrong_bounds_kernel": 1}
    races = RACE.format("_wrong_race_kernel") + 2 * RACE.format("_gemm_kernel")
    assert sanitize.findings(races) == {"_wrong_race_kernel": 1, "_gemm_kernel": 2}


def test_the_kernels_are_those_that_triton_compiled():
    from megatron_fused_ce.kernels import row_kernels, scaled_exp_rows

    compiled = {n for module in (row_kernels, scaled_exp_rows) for n in vars(module) if n.endswith("_kernel")}
    assert compiled < sanitize.kernels() and {"_gemm_kernel", "_pause_kernel"} < sanitize.kernels()


CONTROLS = {
    "memcheck": BOUNDS,
    "racecheck": RACE.format("_wrong_race_kernel") + RACE.format("_right_handover_kernel"),
}
TESTS = f"{sanitize.LAUNCHED} {' '.join(sanitize.kernels())}\n7 passed, 2 skipped in 1 s\n"


@pytest.mark.parametrize(
    ("control", "tests", "status", "words"),
    [
        ({}, {}, 0, "racecheck: clean"),
        ({}, {"racecheck": TESTS + RACE.format("_gemm_kernel")}, 0, "1 in _gemm_kernel do not count"),
        ({}, {"memcheck": TESTS + BOUNDS.replace("_wrong_bounds", "_gemm")}, 1, "1 findings in _gemm_kernel"),
        ({}, {"racecheck": TESTS + RACE.format("_fit_scalar_kernel")}, 1, "findings in _fit_scalar_kernel"),
        ({}, {"racecheck": TESTS + RACE.format("nvjet_sm90_tst_64x24")}, 0, "racecheck: clean"),
        (
            {"racecheck": RACE.format("_wrong_race_kernel")},
            {"racecheck": TESTS + RACE.format("_gemm_kernel")},
            1,
            "racecheck: 1 findings in _gemm_kernel",
        ),
        ({"memcheck": "========= ERROR SUMMARY: 0 errors\n"}, {}, 1, "_wrong_bounds_kernel was not reported"),
        ({"memcheck": "Traceback ...\n"}, {}, 1, "_wrong_bounds_kernel was not reported"),
        (
            {"memcheck": "========= Internal Sanitizer Error: no right to trace\n"},
            {},
            0,
            "SKIPPED memcheck: refused here: ========= Internal Sanitizer Error: no right to trace",
        ),
        ({}, {"memcheck": TESTS.replace("_pause_kernel", "")}, 1, "_pause_kernel was never launched"),
        ({}, {"memcheck": TESTS + "FAILED tests/op/test_op.py::test_a\n"}, 1, "FAILED tests/op/test_op.py"),
        ({}, {"memcheck": TESTS.replace("7 passed", "no tests ran")}, 1, "the tests ended with 0"),
        ({}, {"racecheck": TESTS + "========= Internal Sanitizer Error: x\n"}, 1, "Internal Sanitizer"),
    ],
)
def test_verdicts(control, tests, status, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, log in {**CONTROLS, **control}.items():
        (tmp_path / f"{name}-sanitize_kernels").write_text(log)
    for name, log in {**dict.fromkeys(CONTROLS, TESTS), **tests}.items():
        (tmp_path / f"{name}-pytest").write_text(log)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *pytest*) x=pytest;; *) x=sanitize_kernels;; esac\ncat "$2-$x"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize, "require_gpus", lambda: None)
    done = run_here(sanitize.main)
    assert done.returncode == status and words in done.stdout, done.stdout + done.stderr


def test_without_a_gpu_or_the_tool(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    if not torch.cuda.is_available():
        assert sanitize.main([]) == 2 and "needs a GPU" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "require_gpus", lambda: None)
    assert sanitize.main([]) == 0 and "SKIPPED compute-sanitizer" in capsys.readouterr().out
