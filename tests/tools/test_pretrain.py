"""scripts/runs/pretrain.py: what it launches and judges, what ends a launch; the logs that it reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from megatron_fused_ce.scripts.lib import gpu, launches, results, runner
from megatron_fused_ce.scripts.lib import logs as megatron_logs
from megatron_fused_ce.scripts.runs import pretrain
from tests.support.checkouts import on_checkouts
from tests.support.commands import run_here

LOG = """\
 [2026-01-01 00:00:00.0] iteration 1/ 5 | elapsed time per iteration (ms): 341.1 | lm loss: 5.537932E+00 | \
mtp_1 loss: 5.123535E+00 | grad norm: 2.586 | number of skipped iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 6408.50 | max allocated: 10624.25 |
[fused-ce] heads: 12 fused, 3 on the stock path; logits materialised: 0
"""


def test_log_as_megatron_writes_it():
    """Exact figures of a stand-in for CUDA replace the rounded ones; a skipped iteration has no loss."""
    exact = '[megatron_cpu] exact {"iteration": 1, "grad norm": 2.58612345, "lm loss": 5.53793219}\n'
    for text, norm, loss in ((LOG, 2.586, 5.537932), (exact + LOG, 2.58612345, 5.53793219)):
        found = megatron_logs.parse_logs([text])
        assert found.losses == {"lm loss": [loss], "mtp_1 loss": [5.123535]}
        assert (found.grad_norms, found.iteration_times_ms) == ([norm], [341.1])
        assert (found.max_allocated_mb, found.heads_fused, found.heads_stock) == (10624.25, 12, 3)
    line = " iteration {} | loss scale: 2.0 |{} number of skipped iterations: {} |"
    seen = [("1/ 3", "", "  1"), ("2/ 3", "", "  2"), ("3/ 3", " lm loss: 5.0E+00 |", "  0")]
    found = megatron_logs.parse_logs(["\n".join(line.format(*words) for words in seen)])
    assert (found.skipped, found.losses) == ([1, 2], {"lm loss": [5.0]})


# --- the tool --------------------------------------------------------------------------------


def planned(checkout, *words):
    """The runs, in order."""
    given = pretrain._parser().parse_args([f"--megatron={checkout}", "--device=cuda", "--model=tiny", *words])
    return [run for group in pretrain.plan(given, ["--last"]) for run in group]


def after(words, flag):
    """The last value of a flag."""
    return words[len(words) - words[::-1].index(flag)]


def test_launches_in_their_order(fake_checkout):
    words = ("--lengths", "131072", "16384", "--model=llama-3-8b:2", "--nproc=4", "--variants=auto,te-lifted")
    runs = planned(fake_checkout, *words)
    names = [(run.case.num_tokens, run.variant) for run in runs]
    assert names == [(length, name) for length in (131072, 16384) for name in ("auto", "te-lifted")]
    long, lifted, short, _ = (run.words("M", ["torchrun"]) for run in runs)
    assert long[:5] == ["torchrun", "--nproc-per-node", "4", "-m", "megatron_fused_ce.launch"]
    # 128256 is not a multiple of 128 * 4, which Megatron would pad to.
    given = {"seq-length": "131072", "max-position-embeddings": "131072", "train-iters": "4"}
    given |= {"num-layers": "2", "tensor-model-parallel-size": "4", "make-vocab-size-divisible-by": "32"}
    assert {name: after(long, f"--{name}") for name in given} == given
    assert after(short, "--train-iters") == "20"
    assert {"--bf16", "--sequence-parallel", launches.UNTIED, "--last"} <= set(long)
    assert "4 scripts/lib/runner.py --te-loss MEGATRON_LM/pretrain_gpt.py " in runs[1].command
    assert lifted[-3:] == ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]
    (one,) = planned(fake_checkout, "--nproc=1", "--model=llama-3.2-1b", "--lengths=64", "--variants=auto")
    assert not {"--sequence-parallel", launches.UNTIED} & set(one.words("M", []))


def test_from_command_line_to_files(fake_checkout, tmp_path, monkeypatch):
    """Out of memory is a result, and ends a variant's lengths. A second call launches nothing. An idle GPU's
    clock is not read."""
    monkeypatch.setattr(launches, "POLL_S", 0.01)
    monkeypatch.setattr(gpu, "readings", [])
    readings = {"utilization": (3, 90), "clock_rate": (345, 1500), "power_draw": 2 * (500_000,)}
    for name, values in {**readings, "temperature": (60, 60)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, values=values: values[device])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = (f"--megatron={fake_checkout}", "--device=cuda", "--nproc=1", f"--out={tmp_path / 'out'}")
    words += ("--model=tiny", "--lengths", "128", "64", "256", "--variants=unfused,auto")
    words += ("--", "--most-tokens", "100", "--train-iters", "8")
    done = run_here(pretrain.main, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results.rows(tmp_path / "out" / "results.json")
    lost = ["out of memory", "ok", "not tried: out of memory at 128 tokens"]
    assert [row["status"] for row in rows if row["variant"] == "unfused"] == lost
    _, _, off, on, *_ = rows
    assert (off["T"], off["peak_mib"], on["peak_mib"], on["problems"]) == (64, 900.0, 500.0, [])
    assert on["tokens_per_s"] == pytest.approx(64e3 / on["time_ms"], abs=0.1) and on["loss_difference"] == 0
    assert (off["sm_mhz"], off["watts"], off["gpu"]["celsius"]) == (1500, 500, [60, 60, 60])
    assert "unfused 64 (out of memory at 128), auto 64 (out of memory at 128)." in done.stdout
    assert str(tmp_path) not in off["command"]
    (fake_checkout / "pretrain_gpt.py").write_text("raise SystemExit('launched again')")
    again = run_here(pretrain.main, *words)
    assert again.returncode == 0 and again.stdout.count("(kept)") == 4, again.stdout + again.stderr


#: What goes wrong -> what is said of it.
PROBLEMS = {
    "right": None,
    "wrong": "loss differs by 2.2e-02, bound 1.0e-06",
    "norm": "grad norm differs by 1.0e-03, bound 1.0e-05",
    "nan": "a loss is not finite",
    "short": "ended after 4 of 5 iterations",
    "idle": "heads fused: None, materialised: None",
    "break": "failed RuntimeError: no kernel for this GPU",
}


@pytest.mark.parametrize("native", ["", "--native-nan", "--native-wrong"])
def test_what_does_not_count_as_training(fake_checkout, tmp_path, monkeypatch, native):
    """Twice native's difference is the bound; a native run that broke is none."""
    for name in PROBLEMS:
        words = f"--fused-chunked-ce --fused-ce-num-chunks 4 --{name}"
        monkeypatch.setitem(pretrain.MORE_VARIANTS, name, words)
    monkeypatch.setitem(pretrain.VARIANTS, "native", f"{launches.STOCK['native']} {native}")
    words = (f"--megatron={fake_checkout}", "--nproc=1", f"--out={tmp_path / 'out'}")
    done = run_here(pretrain.main, *words, f"--variants=unfused,native,{','.join(PROBLEMS)}")
    rows = {row["variant"]: row["problems"] for row in results.rows(tmp_path / "out" / "results.json")}
    assert done.returncode == 1 and "norm none (ok at 64)" in done.stdout
    for name, problem in (PROBLEMS | ({"wrong": None} if native == "--native-wrong" else {})).items():
        assert rows[name][:1] == ([problem] if problem else []), name
        assert not problem or problem in done.stdout


@on_checkouts
def test_the_tool_on_a_checkout(checkout, tmp_path):
    words = (f"--megatron={checkout}", f"--out={tmp_path}", "--variants=unfused,store")
    done = run_here(pretrain.main, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    unfused, store = results.rows(tmp_path / "results.json")
    assert (unfused["status"], store["problems"]) == ("ok", []) and store["loss_difference"] < 1e-6


# --- what launches are made of ---------------------------------------------------------------


def test_ways_of_running_out_of_memory():
    for line in (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
    ):
        assert megatron_logs.parse_logs([f"[rank0]: {line}"]).status == "out of memory"
    other = "> theoretical memory footprints: weight and optimizer=20000 MB"
    assert megatron_logs.parse_logs([other]).status == "ok"


RANK_AND_LAUNCHER = """
import subprocess, sys, time
rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
rank += "print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_hung_ranks_are_ended_with_their_launcher():
    """torchrun gives each rank a session of its own: killing the launcher's group spares them."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", RANK_AND_LAUNCHER], stdout=subprocess.PIPE, start_new_session=True
    )
    rank = int(launcher.stdout.readline())
    launches.end_launch(launcher, grace_s=0.5)
    assert launcher.poll() is not None
    for _ in range(50):
        if not Path(f"/proc/{rank}").exists() or " Z " in Path(f"/proc/{rank}/stat").read_text():
            return
        time.sleep(0.1)
    os.kill(rank, signal.SIGKILL)
    pytest.fail("the rank outlived end_launch")


def test_lifted_refusal_leaves_the_rest_of_the_check():
    def validate_args(args, defaults):
        assert args.cross_entropy_fusion_impl == "native", "refused"
        args.checked = defaults
        return args

    arguments = types.SimpleNamespace(validate_args=validate_args)
    runner.lift_te_refusal(arguments)
    args = arguments.validate_args(types.SimpleNamespace(cross_entropy_fusion_impl="te"), {"a": 1})
    assert (args.cross_entropy_fusion_impl, args.checked) == ("te", {"a": 1})
