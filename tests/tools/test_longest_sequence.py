"""scripts/runs/longest.py: its command lines, what it reads from logs, its order, its tables.

    MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/tools/test_longest_sequence.py

also launches pretrain_gpt.py of that checkout on a CPU. The others need none.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from megatron_fused_ce.scripts.lib import results, runner
from megatron_fused_ce.scripts.runs import longest as script
from tests.support.checkouts import FAKE_PRETRAIN, on_checkouts, stand_in
from tests.support.commands import launches_without_torch, run_here

REPOSITORY = Path(__file__).resolve().parents[2]
# Logs in Megatron's format, with a tab of every ingredient that is read.
ITERATION = (
    " [2026-01-01 00:00:00.0] iteration {i:8d}/{n:8d} | consumed samples: {i} | "
    "elapsed time per iteration (ms): {ms} | learning rate: 1.0E-04 | lm loss: {loss} | "
    "loss scale: 1.0 | grad norm: 2.5 | number of nan iterations:   0 |\n"
    "[Rank 0] (after {i} iterations) memory (MB) | allocated: 21000.00 | "
    "max allocated: {peak} | reserved: 41000.00 | max reserved: 42000.00\n"
)
PLAN = "[fused-ce] on: strategy grad_in_forward (chosen by auto), 4 chunks of 4096 tokens\n"
COUNTS = "[fused-ce] heads evaluated fused: 4, logits materialised: {n}, heads on the stock path: 0\n"
OUT_OF_MEMORY_LOG = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/anywhere/pretrain_gpt.py", line 530, in <module>
[rank0]:   File "/anywhere/megatron/core/tensor_parallel/cross_entropy.py", line 35, in forward
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 62.62 GiB. GPU 0 has ...
"""
REFUSED_LOG = """\
Traceback (most recent call last):
  File "/anywhere/megatron/training/arguments.py", line 1643, in validate_args
AssertionError: Transformer Engine cross entropy loss fusion is disabled due to stability issues.
"""


def training_log(times, losses=None, peak=40000.0, plan=PLAN, materialised=0):
    losses = losses or [9.0 - 0.5 * i for i in range(len(times))]
    steps = zip(times, losses, strict=True)
    lines = [
        ITERATION.format(i=i, n=len(times), ms=ms, loss=loss, peak=peak - 1 / i)
        for i, (ms, loss) in enumerate(steps, 1)
    ]
    return plan + "".join(lines) + COUNTS.format(n=materialised)


@pytest.fixture
def checkout(tmp_path):
    return stand_in(tmp_path / "megatron-lm")


SOURCE = dict.fromkeys(results.MADE_BY, "") | {
    **{"commit": "abc", "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "megatron": "0.19.1"},
    **{"gpus": 1, "tp": 1, "dtype": "bfloat16", "activation_recompute": "full"},
}


def planned(checkout, *words):
    options = script.parse([f"--megatron={checkout}", *words])
    return script.plan(options, script.Checkout.at(str(checkout)))


def one_run(checkout, variant="native", length=16384, *words):
    (run,) = planned(checkout, "--only", f"{variant}:{length}", "--iterations=4", *words)
    return run


def row_of(run, log, status="ok"):
    figures = script.launches.parse_logs([log])
    if figures.status == "ok":
        figures.status = status
    return script.row_of(run, figures, [log])


def after(words, flag):
    """The last value of a flag."""
    return words[len(words) - 1 - words[::-1].index(flag) + 1]


# --- command lines ---------------------------------------------------------------------------


def test_default_launches_are_the_most_telling_first(checkout):
    runs = planned(checkout, "--variants", "auto", "native")
    assert [(run.num_tokens, run.variant) for run in runs] == [
        (length, variant) for length in (16384, 131072, 32768, 65536) for variant in ("auto", "native")
    ]


def test_package_accepts_every_variant(checkout):
    flagged = [run for run in planned(checkout) if run.uses_plugin]
    assert {run.variant for run in flagged} == {"auto", "grad_in_forward", "store", "recompute"}


@pytest.mark.parametrize("length", [16384, 131072])
def test_length_in_the_command(checkout, length):
    words = one_run(checkout, length=length).words("M", ["torchrun"])
    assert words[:4] == ["torchrun", "--nproc-per-node", "1", "M/pretrain_gpt.py"]
    for flag in ("--seq-length", "--max-position-embeddings"):
        assert after(words, flag) == str(length)
    assert after(words, "--train-iters") == "4"
    assert {"--bf16", "--no-create-attention-mask-in-dataloader"} <= set(words)
    assert after(words, "--recompute-granularity") == "full"
    assert words[-3:] == ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]


def test_no_recompute(checkout):
    run = one_run(checkout, "native", 16384, "--recompute", "none")
    assert "--recompute-granularity" not in run.words("M", [])


def test_parallel_sizes(checkout):
    run = one_run(checkout, "unfused", 16384, "--gpus=8", "--tp=4")
    words = run.words("M", ["torchrun"])
    assert after(words, "--nproc-per-node") == "8"
    assert after(words, "--tensor-model-parallel-size") == "4"
    assert after(words, "--global-batch-size") == "2"
    # 128256 is not a multiple of 128 * 4, which Megatron would pad to.
    assert after(words, "--make-vocab-size-divisible-by") == "32"
    assert "--sequence-parallel" in words
    without = one_run(checkout, "unfused", 16384, "--gpus=2", "--no-sequence-parallel")
    assert "--sequence-parallel" not in without.words("M", [])


def test_flags_of_a_variant_are_its_own_and_megatrons_go_to_all(checkout):
    mine = "--variant=mine=--fused-chunked-ce --fused-ce-chunk-tokens 8192"
    words = (mine, "--", "--no-gradient-accumulation-fusion")
    flagged = one_run(checkout, "mine", 16384, *words).words("M", ["torchrun"])
    stock = one_run(checkout, "unfused", 16384, *words).words("M", ["torchrun"])
    assert flagged[3:6] == ["-m", "megatron_fused_ce.launch", "M/pretrain_gpt.py"]
    assert flagged[-3:] == ["--fused-chunked-ce", "--fused-ce-chunk-tokens", "8192"]
    assert "--no-gradient-accumulation-fusion" in flagged
    assert "--no-gradient-accumulation-fusion" in stock
    assert not any("fused-ce" in word or "fused_ce" in word for word in stock)


def test_lifted_refusal_runs_the_script_through_its_launcher(checkout):
    run = one_run(checkout, "te-lifted")
    assert "1 scripts/lib/runner.py --te-loss MEGATRON_LM/pretrain_gpt.py " in run.command
    assert str(REPOSITORY) not in run.command
    assert "launch_te_loss" not in one_run(checkout, "te").command


def test_llama_3_8b_and_its_first_layers(checkout):
    """Untied; the models of fewer layers have the same head."""
    model = script.MODELS["llama-3-8b"]
    assert model.untied and "--untie-embeddings-and-output-weights" in model.args()
    two = script.MODELS["llama-3-8b-2-layers"]
    assert dataclasses.replace(two, name=model.name, num_layers=32) == model
    run = one_run(checkout, "auto", 32768, "--gpus=4", "--model=llama-3-8b-2-layers")
    words = run.words("M", ["torchrun"])
    assert after(words, "--num-layers") == "2" and "--sequence-parallel" in words
    assert "--untie-embeddings-and-output-weights" not in script.MODELS["llama-3.2-1b"].args()


def test_many_connections_go_through_their_launcher(checkout):
    run = one_run(checkout, "many-connections", 16384, "--gpus=4")
    assert "4 scripts/lib/runner.py --many-connections MEGATRON_LM/pretrain_gpt.py " in run.command
    assert run.uses_plugin and run.command.endswith("--fused-ce-strategy auto")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "auto"], "VARIANT:T"),
        (["--only", "autumn:16384"], "no variant 'autumn'"),
        (["--variants", "autumn"], "no variant 'autumn'"),
        (["--variant=mine"], "NAME=FLAGS"),
        (["--gpus=2", "--tp=4"], "does not divide"),
        (["--only", "native:64", "--iterations=2", "--warmup=2"], "leaves none"),
    ],
)
def test_mistakes_are_one_line_and_status_2(checkout, capsys, words, message):
    assert script.main([f"--megatron={checkout}", "--dry-run", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_old_megatron_is_refused(checkout, capsys):
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\n")
    assert script.main([f"--megatron={checkout}", "--dry-run", "--only", "native:64"]) == 2
    assert "give a checkout of 0.16 or newer" in capsys.readouterr().err


def test_dry_run_prints_launches(checkout, capsys):
    assert script.main([f"--megatron={checkout}", "--dry-run", "--only", "native:16384"]) == 0
    first, command = capsys.readouterr().out.splitlines()
    assert first == "# native, 16384 tokens"
    assert command.startswith("torchrun --nproc-per-node 1 MEGATRON_LM/pretrain_gpt.py")


# --- logs ------------------------------------------------------------------------------------


def test_row_of_a_launch_that_trains(checkout):
    run = one_run(checkout, "auto")
    row = row_of(run, training_log([5000.0, 410.0, 400.0, 390.0]))
    assert row["status"] == "ok"
    assert row["time_ms"] == 400.0  # the first of the four warms up
    assert row["tokens_per_s"] == pytest.approx(16384 / 0.4)
    assert row["peak_mib"] == 39999.75  # the largest of the four lines
    assert row["loss"] == [9.0, 8.5, 8.0, 7.5]
    assert row["plan"] == "strategy grad_in_forward (chosen by auto), 4 chunks of 4096 tokens"
    assert (row["heads_fused"], row["logits_materialised"]) == (4, 0)
    assert (row["T"], row["shape"], row["spread"]) == (16384, "llama-3.2-1b", 0.05)


def test_tokens_of_every_data_parallel_rank_count(checkout):
    run = one_run(checkout, "unfused", 16384, "--gpus=4", "--tp=2")
    row = row_of(run, training_log([400.0] * 4))
    assert row["tokens_per_s"] == pytest.approx(2 * 16384 / 0.4)


def test_out_of_memory_is_a_result(checkout):
    run = one_run(checkout, "unfused")
    row = row_of(run, OUT_OF_MEMORY_LOG, status="failed")
    assert row["status"] == "out of memory"
    assert "Tried to allocate 62.62 GiB" in row["error"]
    assert row["where"] == "megatron/core/tensor_parallel/cross_entropy.py:35 forward"
    assert (row["tokens_per_s"], row["peak_mib"], row["loss"]) == (None, None, [])


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
    assert script.launches.parse_logs([f"[rank0]: {line}"]).status == "out of memory"


def test_other_words_are_not_out_of_memory():
    for line in ("> theoretical memory footprints: weight and optimizer=20000 MB", "AssertionError"):
        assert script.launches.parse_logs([line]).status == "ok"


def test_refusal_is_told_from_failure(checkout):
    run = one_run(checkout, "te")
    assert row_of(run, REFUSED_LOG, status="failed")["status"] == "refused"
    later = training_log([1.0] * 4) + REFUSED_LOG
    assert row_of(run, later, status="failed")["status"] == "failed"
    elsewhere = REFUSED_LOG.replace("validate_args", "train_step")
    assert row_of(run, elsewhere, status="failed")["status"] == "failed"


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (training_log([400.0] * 3), "ended after 3 of 4 iterations"),
        (training_log([400.0] * 4, losses=[9.0, 8.0, math.nan, 7.0]), "a loss is not finite"),
        (training_log([400.0] * 4, materialised=1), "the head was not fused"),
        (training_log([400.0] * 4).replace("fused: 4", "fused: 0"), "the head was not fused"),
    ],
)
def test_what_does_not_count_as_training(checkout, log, status):
    assert row_of(one_run(checkout, "auto"), log)["status"] == status


# --- order and skipping ----------------------------------------------------------------------


class World:
    """Stands in for the GPU: a longest length per variant, seconds per launch, a clock."""

    def __init__(self, longest, seconds=40.0):
        self.longest, self.seconds = longest, seconds
        self.launched, self.clock = [], 0.0

    def execute(self, run):
        self.launched.append(f"{run.variant}:{run.num_tokens}")
        longest = self.longest.get(run.variant, 10**9)
        log, status = training_log([400.0] * run.iterations), "ok"
        if longest == "refused":
            log, status = REFUSED_LOG, "failed"
        elif run.num_tokens > longest:
            log, status = OUT_OF_MEMORY_LOG, "out of memory"
        figures = script.launches.parse_logs([log])
        figures.status = status if figures.status == "ok" else figures.status
        figures.wall_s = min(self.seconds, run.timeout_s)
        if self.seconds > run.timeout_s:
            figures.status = f"timed out after {run.timeout_s:.0f} s"
        self.clock += figures.wall_s
        return figures, [log]

    def run(self, runs, time_limit_s=math.inf):
        self.written = []
        rows, self.left_out = script.run_all(
            runs,
            time_limit_s=time_limit_s,
            execute=self.execute,
            write=lambda rows: self.written.append(len(rows)),
            now=lambda: self.clock,
        )
        assert self.written == list(range(1, len(rows) + 1))
        return rows


def test_no_longer_length_after_a_failure(checkout):
    words = ("--variants", "auto", "unfused", "--lengths", "16384", "131072", "32768", "65536")
    world = World({"unfused": 20000})
    world.run(planned(checkout, *words))
    assert world.launched == [
        *("auto:16384", "unfused:16384", "auto:131072", "unfused:131072"),
        *("auto:32768", "unfused:32768", "auto:65536"),  # 65536 is more than 32768, which failed
    ]


def test_refused_is_asked_once(checkout):
    world = World({"te": "refused", "unfused": 20000})
    world.run(planned(checkout, "--variants", "te", "unfused", "--lengths", "131072", "16384"))
    assert world.launched == ["te:131072", "unfused:131072", "unfused:16384"]


def test_the_time_limit_cuts_one_launch_and_leaves_out_the_rest(checkout):
    runs = planned(checkout, "--variants", "auto", "native", "unfused", "--lengths", "16384")
    world = World({}, seconds=60.0)
    rows = world.run(runs, time_limit_s=100.0)
    assert [row["status"] for row in rows] == ["ok", "cut by the time limit"]
    assert world.left_out == 2


def test_a_launch_that_was_cut_says_nothing_about_its_length(checkout):
    (short,) = planned(checkout, "--only", "auto:16384")
    row = row_of(short, "", status="failed") | {"status": script.CUT}
    assert script.reason_to_skip(one_run(checkout, "auto", 32768), [row]) == ""


def test_hung_launch_is_a_failure_at_its_length(checkout):
    runs = planned(checkout, "--only", "auto:16384", "auto:32768", "--timeout=200")
    world = World({}, seconds=1000.0)
    rows = world.run(runs)
    assert world.launched == ["auto:16384"]
    assert rows[0]["status"] == "timed out after 200 s"


# --- tables ----------------------------------------------------------------------------------


@pytest.fixture
def table_rows(checkout):
    def row(variant, length, ms=None, log=None, losses=None):
        log = log or training_log([9000.0, ms, ms, ms], losses=losses)
        return row_of(one_run(checkout, variant, length), log, status="ok" if ms else "failed")

    return [
        row("unfused", 16384, 500.0, losses=[9.0, 8.0, 7.0, 6.0]),
        row("native", 16384, 400.0, losses=[9.0, 8.0, 7.0, 6.06]),
        row("te", 16384, log=REFUSED_LOG),
        row("te-lifted", 16384, 320.0),
        row("auto", 16384, 300.0),
        row("store", 16384, 250.0),
        row("unfused", 131072, log=OUT_OF_MEMORY_LOG),
        row("native", 131072, log=OUT_OF_MEMORY_LOG),
        row("auto", 131072, 8000.0),
    ]


def test_verdict_is_one_line(table_rows):
    said = script.verdict(table_rows)
    assert len(said.splitlines()) == 1
    assert "unfused 16384 (out of memory at 131072)" in said
    assert "te none (refused at 16384)" in said
    assert "auto 131072," in said
    assert "16384 1.600 (store / native); 16384 1.280 (store / te-lifted); " in said
    assert "16384 1.333 (auto / native); 16384 1.067 (auto / te-lifted); " in said
    assert said.endswith("131072 no stock variant trained, auto did.")


def test_table(table_rows):
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in script.markdown(table_rows).splitlines()
    ]
    head, rule, *body = lines
    assert len(rule) == len(head) and all(len(line) == len(head) for line in body)
    by_name = {(line[0], line[1]): dict(zip(head, line, strict=True)) for line in body}
    assert len(by_name) == 9
    auto = by_name["16384", "auto"]
    assert (auto["tokens/s"], auto["over the best stock"], auto[""]) == ("54613", "1.333", "trains")
    native = by_name["16384", "native"]
    assert native["largest loss difference to unfused"] == "1.0e-02"
    assert by_name["131072", "native"][""] == "out of memory"
    assert by_name["131072", "auto"]["over the best stock"] == "–"


def test_report_has_the_reasons_and_no_path_of_a_machine(table_rows):
    text = script.report(table_rows, SOURCE)
    assert script.verdict(table_rows) in text
    assert "Tried to allocate 62.62 GiB" in text
    assert "cross_entropy.py:35 forward" in text
    assert "/anywhere" not in text
    assert "strategy grad_in_forward (chosen by auto), 4 chunks" in text


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
    script.launches.end_launch(launcher, grace_s=0.5)
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
    words = (f"--megatron={checkout}", f"--out={tmp_path}", "--iterations=2", "--warmup=0")
    words += ("--lengths", "128", "64", "256", "--variants", "unfused", "--", "--most-tokens", "100")
    with launches_without_torch():
        done = run_here(script.main, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = results.rows(tmp_path / "longest.json")
        assert [(row["T"], row["status"]) for row in rows] == [(128, "out of memory"), (64, "ok")]
        assert (rows[1]["time_ms"], rows[1]["spread"]) == (77.5, 0.5806)
        assert (rows[1]["V"], rows[1]["megatron"]) == (128256, "0.19.1")
        assert "unfused 64 (out of memory at 128)" in done.stdout
        assert "unfused, 256 tokens: not tried: out of memory at 128 tokens" in done.stdout
        page = (tmp_path / "longest.md").read_text()
        assert script.verdict(rows) in page and str(tmp_path) not in page
        (checkout / "pretrain_gpt.py").write_text("raise SystemExit('launched again')")
        again = run_here(script.main, *words)
    assert again.returncode == 0, again.stdout + again.stderr
    kept = results.rows(tmp_path / "longest.json")
    assert [row["wall_s"] for row in kept] == [row["wall_s"] for row in rows]


def test_results_have_no_nan(checkout, tmp_path):
    """It is no JSON."""
    log = training_log([400.0] * 4, losses=[9.0, math.nan, math.inf, 7.0])
    results.write(tmp_path / "rows.json", [row_of(one_run(checkout), log)], SOURCE)
    json.loads((tmp_path / "rows.json").read_text(), parse_constant=pytest.fail)


# --- on a real checkout ----------------------------------------------------------------------


@on_checkouts
def test_real_pretrain_on_a_cpu(checkout, tmp_path):
    done = run_here(
        script.main,
        *(f"--megatron={checkout}", "--device=cpu", "--model=tiny", f"--out={tmp_path}", "--iterations=3"),
        *("--lengths", "64", "--variants", "unfused"),
        "--variant=mine=--fused-chunked-ce --fused-ce-strategy recompute --fused-ce-chunk-tokens 16",
    )
    if " 0.16 or newer" in done.stderr:
        pytest.skip("the script needs Megatron-LM 0.16 or newer")
    assert done.returncode == 0, done.stdout + done.stderr
    unfused, mine = results.rows(tmp_path / "longest.json")
    assert (unfused["status"], mine["status"]) == ("ok", "ok")
    assert mine["loss"] == pytest.approx(unfused["loss"], rel=1e-6)
    assert mine["heads_fused"] == 3


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
