"""pretrain --lengths: command lines, what counts as training, order, tables; launches that hang or run out.

    MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/tools/test_lengths.py

also launches pretrain_gpt.py of that checkout on a CPU. The others need none.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from megatron_fused_ce.scripts.lib import launches, logs, results, runner
from megatron_fused_ce.scripts.runs import lengths, pretrain
from tests.support.checkouts import FAKE_PRETRAIN, on_checkouts, stand_in
from tests.support.commands import launches_without_torch, run_here

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path):
    return stand_in(tmp_path / "megatron-lm")


def planned(checkout, *words):
    """The runs, in order."""
    given = pretrain._parser().parse_args([f"--megatron={checkout}", "--device=cuda", "--nproc=1", *words])
    return [run for group in pretrain.plan(given) for run in group]


def one_run(checkout, variant="native", length=16384, *words):
    (run,) = planned(checkout, f"--lengths={length}", f"--variants={variant}", *words)
    return run


def after(words, flag):
    """The last value of a flag."""
    return words[len(words) - 1 - words[::-1].index(flag) + 1]


def row_of(run, status="ok", times=(5000.0, *[400.0] * 19), losses=(9.0,), **more):
    figures = logs.Figures(status, iteration_times_ms=list(times), losses={"lm loss": list(losses)}, **more)
    return pretrain.compare(run, {run.variant: figures}, run.case.warmup, [])


# --- command lines ---------------------------------------------------------------------------


def test_lengths_in_their_order_with_the_variants_of_each(checkout):
    runs = planned(checkout, "--lengths", "131072", "16384")
    variants = lengths.DEFAULT_VARIANTS.split(",")
    assert [(run.case.num_tokens, run.variant) for run in runs] == [
        (length, variant) for length in (131072, 16384) for variant in variants
    ]
    assert {run.variant for run in runs if run.uses_plugin} == {*variants} - {"native", "unfused"}


@pytest.mark.parametrize(("length", "iterations", "warmup"), [(16384, "20", 5), (131072, "4", 1)])
def test_length_in_the_command(checkout, length, iterations, warmup):
    run = one_run(checkout, "native", length)
    words = run.words("M", ["torchrun"])
    assert words[:4] == ["torchrun", "--nproc-per-node", "1", "M/pretrain_gpt.py"]
    for flag in ("--seq-length", "--max-position-embeddings"):
        assert after(words, flag) == str(length)
    assert (after(words, "--train-iters"), run.case.warmup) == (iterations, warmup)
    assert {"--bf16", "--no-create-attention-mask-in-dataloader"} <= set(words)
    assert after(words, "--recompute-granularity") == "full"
    assert words[-3:] == ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]


def test_no_recompute_and_flags_for_all_variants(checkout):
    words = ("--recompute=none", "--", "--no-gradient-accumulation-fusion")
    for variant in ("native", "auto"):
        found = one_run(checkout, variant, 16384, *words).words("M", [])
        assert "--recompute-granularity" not in found and words[-1] in found


def test_parallel_sizes(checkout):
    words = one_run(checkout, "unfused", 16384, "--nproc=4").words("M", ["torchrun"])
    assert after(words, "--nproc-per-node") == after(words, "--tensor-model-parallel-size") == "4"
    # 128256 is not a multiple of 128 * 4, which Megatron would pad to.
    assert after(words, "--make-vocab-size-divisible-by") == "32"
    assert "--sequence-parallel" in words
    assert "--sequence-parallel" not in one_run(checkout).words("M", [])


def test_llama_3_8b_and_its_first_layers(checkout):
    """Untied; the models of fewer layers have the same head."""
    model = lengths.MODELS["llama-3-8b"]
    assert model.untied and "--untie-embeddings-and-output-weights" in model.args()
    two = lengths.MODELS["llama-3-8b-2-layers"]
    assert dataclasses.replace(two, name=model.name, num_layers=32) == model
    run = one_run(checkout, "auto", 32768, "--model=llama-3-8b-2-layers")
    assert after(run.words("M", ["torchrun"]), "--num-layers") == "2"
    assert "--untie-embeddings-and-output-weights" not in lengths.MODELS["llama-3.2-1b"].args()


def test_lifted_refusals_run_the_script_through_the_runner(checkout):
    run = one_run(checkout, "te-lifted")
    assert "1 scripts/lib/runner.py --te-loss MEGATRON_LM/pretrain_gpt.py " in run.command
    assert str(REPOSITORY) not in run.command
    run = one_run(checkout, "many-connections", 16384, "--nproc=4")
    assert "4 scripts/lib/runner.py --many-connections MEGATRON_LM/pretrain_gpt.py " in run.command
    assert run.uses_plugin


def test_old_megatron_is_refused_and_a_dry_run_prints_launches(checkout, capsys):
    words = [f"--megatron={checkout}", "--device=cuda", "--nproc=1", "--dry-run", "--variants=native"]
    assert pretrain.main([*words, "--lengths=64"]) == 0
    first, command = capsys.readouterr().out.splitlines()
    assert first == "# megatron-lm llama-3.2-1b 64 native"
    assert command.startswith("torchrun --nproc-per-node 1 MEGATRON_LM/pretrain_gpt.py")
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\n")
    assert pretrain.main([*words, "--lengths=64"]) == 2
    assert "give a checkout of 0.16 or newer" in capsys.readouterr().err


# --- rows ------------------------------------------------------------------------------------


def test_row_of_a_launch_that_trains(checkout):
    row = row_of(one_run(checkout, "auto"), heads_fused=4, logits_materialised=0)
    assert (row.T, row.time_ms, row.tokens_per_s) == (16384, 400.0, 40960.0)  # the first five warm up
    assert row.problems == []


def test_out_of_memory_is_a_result(checkout):
    row = row_of(one_run(checkout, "unfused"), "out of memory", times=())
    assert (row.status, row.tokens_per_s, row.problems) == ("out of memory", None, [])


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ({"times": [400.0] * 19}, "ended after 19 of 20 iterations"),
        ({"losses": [9.0, math.nan, 7.0]}, "a loss is not finite"),
        ({"logits_materialised": 1}, "1 logits were materialised"),
        ({"heads_fused": 0}, "no head was evaluated fused"),
        ({"status": "failed", "error": "AssertionError"}, "failed AssertionError"),
        ({"status": "timed out after 200 s"}, "timed out after 200 s"),
    ],
)
def test_what_does_not_count_as_training(checkout, made, problem):
    counts = {"heads_fused": 4, "logits_materialised": 0}
    assert row_of(one_run(checkout, "auto"), **{**counts, **made}).problems == [problem]


def test_losses_are_shown_and_not_judged(checkout):
    run = one_run(checkout, "auto")
    times = [400.0] * 20
    stock = logs.Figures(losses={"lm loss": [9.0]}, iteration_times_ms=times)
    ours = logs.Figures(
        losses={"lm loss": [9.9]}, iteration_times_ms=times, heads_fused=1, logits_materialised=0
    )
    row = pretrain.compare(run, {"unfused": stock, "native": stock, "auto": ours}, 5, [])
    assert row.loss_difference == pytest.approx(0.1) and row.problems == []


# --- order and skipping ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "length", "reason"),
    [
        ("out of memory", 65536, "not tried: out of memory at 32768 tokens"),
        ("out of memory", 32768, "not tried: out of memory at 32768 tokens"),
        ("out of memory", 16384, ""),
        ("ok", 65536, ""),
        (pretrain.NOT_RUN, 65536, ""),
        ("not tried: out of memory at 16384 tokens", 65536, ""),
    ],
)
def test_no_longer_length_after_a_failure(checkout, status, length, reason):
    row = row_of(one_run(checkout, "native", 32768), status)
    assert pretrain.reason_to_skip(one_run(checkout, "native", length), [row]) == reason
    assert pretrain.reason_to_skip(one_run(checkout, "auto", length), [row]) == ""


def test_the_longest_of_each_variant_is_one_line(checkout):
    counts = {"heads_fused": 4, "logits_materialised": 0}
    rows = [
        row_of(one_run(checkout, "unfused", 16384)),
        row_of(one_run(checkout, "auto", 16384), **counts),
        row_of(one_run(checkout, "unfused", 131072), "out of memory", times=()),
        row_of(one_run(checkout, "auto", 131072), times=[8000.0] * 4, **counts),
        row_of(one_run(checkout, "te", 16384), "failed", times=()),
    ]
    assert pretrain.longest(rows) == (
        "Longest that trains, in tokens: unfused 16384 (out of memory at 131072), auto 131072, "
        "te none (failed at 16384).\n\n"
    )
    assert "| tokens/s |" in pretrain.markdown(rows, "cuda")
    assert pretrain.longest([]) == "" and "tokens/s" not in pretrain.markdown([], "cuda")


# --- logs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
        "RuntimeError: Triton Error [CUDA]: out of memory",
    ],
)
def test_ways_of_running_out_of_memory(line):
    assert logs.parse_logs([f"[rank0]: {line}"]).status == "out of memory"


def test_other_words_are_not_out_of_memory():
    for line in ("> theoretical memory footprints: weight and optimizer=20000 MB", "AssertionError"):
        assert logs.parse_logs([line]).status == "ok"


# --- processes -------------------------------------------------------------------------------

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


def test_from_command_line_to_files(checkout, tmp_path):
    """A second call launches nothing but what failed."""
    (checkout / "pretrain_gpt.py").write_text(FAKE_PRETRAIN)
    words = (f"--megatron={checkout}", "--device=cuda", "--nproc=1", f"--out={tmp_path / 'out'}")
    words += ("--warmup=0", "--lengths", "128", "64", "256", "--variants=unfused")
    words += ("--", "--most-tokens", "100", "--train-iters", "2")
    with launches_without_torch():
        done = run_here(pretrain.main, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = results.rows(tmp_path / "out" / "results.json")
        assert [(row["T"], row["status"]) for row in rows] == [
            (128, "out of memory"),
            (64, "ok"),
            (256, "not tried: out of memory at 128 tokens"),
        ]
        assert (rows[1]["time_ms"], rows[1]["spread"], rows[1]["shape"]) == (77.5, 0.5806, "llama-3.2-1b")
        assert "unfused 64 (out of memory at 128)" in done.stdout
        page = (tmp_path / "out" / "results.md").read_text()
        assert pretrain.longest([]) == "" and "unfused 64 (out of memory at 128)" in page
        assert str(tmp_path) not in page
        (checkout / "pretrain_gpt.py").write_text("raise SystemExit('launched again')")
        again = run_here(pretrain.main, *words)
    assert again.returncode == 0, again.stdout + again.stderr
    kept = results.rows(tmp_path / "out" / "results.json")
    assert [row["figures"]["wall_s"] for row in kept] == [row["figures"]["wall_s"] for row in rows]


# --- on a real checkout ----------------------------------------------------------------------


@on_checkouts
def test_real_pretrain_on_a_cpu(checkout, tmp_path):
    done = run_here(
        pretrain.main,
        *(f"--megatron={checkout}", "--nproc=1", "--model=tiny", f"--out={tmp_path}", "--lengths=64"),
        *("--variants=unfused", "--variant=mine=--fused-chunked-ce --fused-ce-chunk-tokens 16"),
        *("--", "--train-iters", "3"),
    )
    if " 0.16 or newer" in done.stderr:
        pytest.skip("lengths need Megatron-LM 0.16 or newer")
    assert done.returncode == 0, done.stdout + done.stderr
    unfused, mine = results.rows(tmp_path / "results.json")
    assert (unfused["status"], mine["status"]) == ("ok", "ok")
    assert mine["loss_difference"] < 1e-6 and mine["heads_fused"] == 3


def test_lifted_refusal_leaves_the_rest_of_the_check():
    seen = []

    def validate_args(args, defaults):
        assert args.cross_entropy_fusion_impl != "te", "refused"
        seen.append((args.cross_entropy_fusion_impl, defaults))
        args.checked = True
        return args

    arguments = types.SimpleNamespace(validate_args=validate_args)
    runner.lift_te_refusal(arguments)
    args = types.SimpleNamespace(cross_entropy_fusion_impl="te")
    assert arguments.validate_args(args, {"a": 1}) is args
    assert seen == [("native", {"a": 1})]
    assert (args.cross_entropy_fusion_impl, args.checked) == ("te", True)
