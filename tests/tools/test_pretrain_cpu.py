"""The harness on a real Megatron-LM: unmodified pretrain_gpt.py on a CPU, flag off and on.

    MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/tools/test_pretrain_cpu.py

Several checkouts: separate them with ``:``. Its own parts (log parsing, bounds, bad input) are
tested without one.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_fused_ce.scripts.lib import launches, losses, megatron_cpu, runner
from megatron_fused_ce.scripts.lib import logs as megatron_logs
from megatron_fused_ce.scripts.runs import pretrain as harness
from tests.support.checkouts import FAKE_PRETRAIN, on_checkouts, stand_in
from tests.support.commands import launches_without_torch, run_here

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_HEADS = {"plain": 1, "mtp": 2, "pp2-mtp": 2, "vpp": 1}
NUM_FORWARDS = 5 * 4 + 3 * 4  # iterations and evaluations, of 4 micro-batches each


def run_harness(*options: str) -> subprocess.CompletedProcess[str]:
    return run_here(harness.main, *options)


GRAD_IN_FORWARD = "--fused-chunked-ce --fused-ce-num-chunks 3 --fused-ce-strategy grad_in_forward"


@on_checkouts
def test_pretrain_gpt_flag_off_and_on(checkout, tmp_path):
    run = run_harness(
        f"--megatron={checkout}",
        "--models=gpt",
        f"--cases={','.join(NUM_HEADS)}",
        "--variants=unfused,native,fused-ce,fused-ce-store",
        f"--variant=fused-ce-grad-in-forward={GRAD_IN_FORWARD}",
        f"--out={tmp_path}",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    flag_rows = [row for row in rows if row["variant"].startswith("fused-ce")]
    assert [row["case"] for row in flag_rows] == [case for case in NUM_HEADS for _ in range(3)]
    for row in flag_rows:
        assert row["heads_fused"] == NUM_HEADS[row["case"]] * NUM_FORWARDS
        assert row["logits_materialised"] == 0
        assert row["loss_difference"] <= max(1e-6, 2 * row["native_loss_difference"])


@on_checkouts
def test_pretrain_gpt_under_fsdp(checkout, tmp_path):
    """torch FSDP2 and Megatron-FSDP, which shard the head's weight, against DDP without the flag."""
    run = run_harness(
        f"--megatron={checkout}",
        *("--models=gpt", "--cases=fsdp", f"--out={tmp_path}"),
        "--variants=unfused,fsdp2-fused-ce,megatron-fsdp-fused-ce",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    _, *rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["fsdp2-fused-ce", "megatron-fsdp-fused-ce"]
    for row in rows:
        assert row["heads_fused"] == NUM_FORWARDS / 2, "each rank has half of the micro-batches"
        assert row["loss_difference"] <= 1e-6 and row["grad_norm_difference"] <= 1e-5


#: What no other flag may hide: the first iteration, fp16's skipped steps (the scale overflows at once),
#: the re-run machine on (Megatron's default) and off, each optimizer.
UNDER = {
    "fp32": "",
    "re-run machine off": "--rerun-mode disabled",
    "fp16, steps skipped": "--fp16 --initial-loss-scale 1e15 --min-loss-scale 1e14",
    "bf16, distributed optimizer": "--bf16 --use-distributed-optimizer",
    "multi-token prediction": "--mtp-num-layers 1",
}


def launch(checkout, tmp_path, script, *flags, case="plain", num_ranks=None):
    """Two iterations of a case (plain: TP 2) by ``script``, unless ``flags`` say otherwise."""
    case = harness.cpu_case(launches.Checkout.at(checkout), "gpt", case)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks or case.num_processes)),
        *("-m", "megatron_fused_ce.scripts.lib.megatron_cpu"),
        *(["--fused-wgrad"] if case.fused_wgrad else []),
        str(script),
        *case.args,
        *("--train-iters", "2", "--eval-iters", "0"),
        *flags,
    ]
    folders = (checkout, str(REPOSITORY), os.environ.get("PYTHONPATH"))
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # What --deterministic-mode asks of the environment.
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True
    )


@on_checkouts
@pytest.mark.parametrize("under", UNDER)
def test_pretrain_gpt_grad_in_forward_with_another_loss(tmp_path, checkout, under):
    """One token of pretrain_gpt.py's loss counts twice: it trains as ``recompute``, and says so once."""
    source = (Path(checkout) / "pretrain_gpt.py").read_text()
    sum_of_losses = "torch.sum(losses * loss_mask)"
    assert source.count(sum_of_losses) == 1
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(source.replace(sum_of_losses, f"{sum_of_losses} + losses[3]"))
    losses_of = {}
    for strategy in ("recompute", "grad_in_forward"):
        flags = GRAD_IN_FORWARD.replace("grad_in_forward", strategy).split()
        run = launch(checkout, tmp_path, script, *UNDER[under].split(), *flags)
        output = run.stdout + run.stderr
        assert run.returncode == 0, output[-3000:]
        losses_of[strategy] = [line["lm loss"] for line in exact(output)]
        assert output.count("is not a scalar times the token weights") == (strategy == "grad_in_forward")
    assert len(losses_of["recompute"]) == 2
    rel = 1e-6 if "16" not in under else 1e-3
    assert losses_of["grad_in_forward"] == pytest.approx(losses_of["recompute"], rel=rel)


def exact(output):
    """What Megatron logged of each iteration, every digit."""
    found = [line for line in output.splitlines() if line.startswith("[megatron_cpu] exact")]
    return [json.loads(line.split("exact", 1)[1]) for line in found]


def exact_losses(checkout, tmp_path, *flags, **options):
    """Losses of two iterations of the plain case, and what the launch printed."""
    run = launch(checkout, tmp_path, f"{checkout}/pretrain_gpt.py", *flags, **options)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-3000:]
    return [line["lm loss"] for line in exact(output)], output


@on_checkouts
def test_pretrain_gpt_with_options_of_the_loss(tmp_path, checkout):
    """127 words padded to 256 at TP 2: the second rank has no column of them."""
    stock, _ = exact_losses(checkout, tmp_path)
    flag, _ = exact_losses(checkout, tmp_path, "--fused-chunked-ce")
    assert flag == pytest.approx(stock, rel=1e-6) and len(stock) == 2
    mode = "--deterministic-mode"
    assert exact_losses(checkout, tmp_path, "--fused-chunked-ce", mode)[0] == flag
    for strategy in ("store", "grad_in_forward", "recompute"):
        masked, output = exact_losses(
            checkout, tmp_path, "--fused-chunked-ce", "--fused-ce-mask-padded-vocab",
            "--fused-ce-strategy", strategy,
        )  # fmt: skip
        assert "loss with true_vocab_size" in output
        # Logits of an untrained model are nearly equal.
        assert stock[0] - masked[0] == pytest.approx(math.log(256 / 127), abs=0.03)
        assert masked[1] < masked[0]
    all_of_them = (
        "--fused-ce-label-smoothing 0.1 --fused-ce-z-loss 1e-2 --fused-ce-logit-softcap 5 "
        "--fused-ce-log-accuracy"
    )
    changed, output = exact_losses(checkout, tmp_path, "--fused-chunked-ce", *all_of_them.split())
    assert "loss with label_smoothing, z_loss, logit_softcap" in output
    assert output.count('"lm accuracy": ') == 2
    assert changed[0] - stock[0] == pytest.approx(1e-2 * math.log(256) ** 2, abs=0.1)


#: Vocabularies of one padded size at TP 1 and 2. Without dropout, whose random states are of one TP degree.
RESUMED = """
    --train-iters 8 --save-interval 2 --ckpt-format torch_dist --make-vocab-size-divisible-by 64
    --hidden-dropout 0 --attention-dropout 0
"""
#: Flag and TP degree of each launch after the first, which is TP 2 without the flag.
LEGS = (("--fused-chunked-ce", 1), ("--fused-chunked-ce", 2), ("", 2))


@on_checkouts
def test_pretrain_gpt_goes_on_from_a_checkpoint(tmp_path, checkout):
    """Flag turned on, kept on at another TP degree, turned off: losses as those of one run without it."""
    whole, _ = exact_losses(checkout, tmp_path, *RESUMED.split(), "--save", str(tmp_path / "after 2"))
    assert len(whole) == 8
    (tmp_path / "after 2" / "latest_checkpointed_iteration.txt").write_text("2")
    for number, (flag, tp) in enumerate(LEGS, start=1):
        start, end = 2 * number, 2 * number + 2
        losses, output = exact_losses(
            *(checkout, tmp_path, *RESUMED.split(), *flag.split()),
            *("--tensor-model-parallel-size", str(tp), "--exit-interval", str(end)),
            *("--load", str(tmp_path / f"after {start}")),
            *("--save", str(tmp_path / f"after {end}")),
            num_ranks=tp,
        )
        assert losses == pytest.approx(whole[start:end], rel=2e-6), f"after {start} iterations"
        assert ("heads evaluated fused: 8, logits materialised: 0" in output) == bool(flag)
    # Loaded where this package is not installed, too.
    saved = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".distcp" for file in saved)
    assert not any(b"megatron_fused_ce" in file.read_bytes() for file in saved)


@on_checkouts
def test_pretrain_gpt_in_fp16_skips_the_same_steps(tmp_path, checkout):
    """From a loss scale that overflows, until it does not."""
    fp16 = ["--fp16", "--initial-loss-scale", "8388608", "--hysteresis", "1", "--train-iters", "10"]
    off, *on = (
        megatron_logs.parse_logs(
            [launch(checkout, tmp_path, f"{checkout}/pretrain_gpt.py", *fp16, *flags).stdout]
        )
        for flags in ([], ["--fused-chunked-ce"], GRAD_IN_FORWARD.split())
    )
    assert off.skipped and len(off.losses["lm loss"]) >= 3, "nothing was skipped, or all was"
    for figures in on:
        assert figures.heads_fused and figures.skipped == off.skipped
        assert figures.losses["lm loss"] == pytest.approx(off.losses["lm loss"], rel=1e-4)


#: Before ``__main__`` of pretrain_gpt.py: the accuracy by the stock logits of the same launch.
COUNT_BY_LOGITS = """
from functools import wraps

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

corrects, plain_head, plain_loss_func = [], LanguageModule.compute_language_model_loss, loss_func

@wraps(plain_head)  # else it is a loss of the model's own, which the flag leaves to Megatron
def compute_language_model_loss(self, labels, logits):
    with torch.no_grad():
        everywhere = gather_from_tensor_model_parallel_region(logits.materialise()).transpose(0, 1)
    last = everywhere.shape[-1] - 1
    own = everywhere.gather(-1, labels.clamp(max=last).unsqueeze(-1)).squeeze(-1)
    # The main head comes last.
    corrects[:] = [(own == everywhere.amax(-1)) & (labels <= last)]
    return plain_head(self, labels, logits)

def loss_func(loss_mask, output_tensor, model=None):
    *others, report = plain_loss_func(loss_mask, output_tensor, model=model)
    pair = torch.stack([(corrects.pop() * loss_mask).sum(), loss_mask.sum()])
    return (*others, {**report, "by logits": pair})

LanguageModule.compute_language_model_loss = compute_language_model_loss

"""
#: A forward runs beside another micro-batch's backward, by a schedule of its own.
COMBINED_1F1B = """
    --overlap-moe-expert-parallel-comm --num-experts 4 --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --disable-bias-linear --bf16
"""


def curves(output, events, key):
    """By iteration, of a launch: exact lines, its log, its evaluations, TensorBoard's two curves."""
    exact = [line for line in output.splitlines() if line.startswith("[megatron_cpu] exact")]
    exact = [json.loads(line.split("exact", 1)[1]) for line in exact]
    logged = re.findall(rf"iteration +(\d+)/.* {key}: (\S+) ", output)
    evaluated = re.findall(rf"validation loss at iteration (\d+) .*{key} value: (\S+) ", output)
    return {
        "exact": {line["iteration"]: line[key] for line in exact},
        # Not every version logs zeros.
        "log": {int(at): float(value) for at, value in logged if float(value)},
        "evaluations": {int(at): float(value) for at, value in evaluated},
        "TensorBoard": {one.step: one.value for one in events.Scalars(key)},
        "its evaluations": {one.step: one.value for one in events.Scalars(f"{key} validation")},
    }


@on_checkouts
@pytest.mark.parametrize(
    ("case", "more"),
    [("distopt", ""), ("pp2-mtp", ""), ("vpp", ""), ("distopt", COMBINED_1F1B), ("vpp", COMBINED_1F1B)],
    ids=["distopt", "pp2-mtp", "vpp", "combined 1F1B", "vpp, combined 1F1B"],
)
def test_pretrain_gpt_logs_the_accuracy(tmp_path, checkout, case, more):
    """Over tensor, data and pipeline ranks, micro-batches and evaluations, against the stock logits."""
    source = (Path(checkout) / "pretrain_gpt.py").read_text()
    main = 'if __name__ == "__main__":'
    assert source.count(main) == 1
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(source.replace(main, COUNT_BY_LOGITS + main))
    run = launch(
        checkout, tmp_path, script, "--train-iters", "6", "--lr", "1e-2",
        "--eval-iters", "2", "--eval-interval", "3", "--eod-mask-loss",
        *("--tensorboard-dir", str(tmp_path / "events")), *more.split(),
        *("--fused-chunked-ce", "--fused-ce-num-chunks=3", "--fused-ce-log-accuracy"), case=case,
    )  # fmt: skip
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-3000:]
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    found = curves(output, events, "lm accuracy")
    steps = [1, 2, 3, 4, 5, 6]
    assert list(found["exact"]) == list(found["TensorBoard"]) == steps
    assert list(found["log"]) == [step for step in steps if found["exact"][step] > 0]
    assert list(found["evaluations"]) == list(found["its evaluations"]) == [3, 6]
    assert found == curves(output, events, "by logits")
    # The mock data of 0.15 counts beyond the vocabulary; of the others it has learnt something.
    assert found["exact"][6] > 0.05 or launches.Checkout.at(checkout).version < (0, 16)


@pytest.mark.parametrize(
    ("version", "model", "case", "words"),
    [
        ((0, 19), "gpt", "vpp", "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
        ((0, 19), "stack", "vpp", "--hybrid-layer-pattern *|-|*|-"),
        ((0, 17), "stack", "pp2", "--hybrid-layer-pattern *-|*-"),
        ((0, 19), "stack", "pp2-mtp", "--hybrid-layer-pattern *-|*-/*-"),
        ((0, 16), "gpt", "pp2-mtp", "--num-layers 2 --mtp-num-layers 1"),
        ((0, 17), "stack", "pp2-mtp", None),
        ((0, 16), "stack", "vpp", None),
    ],
)
def test_pipelines_as_each_version_spells_them(tmp_path, version, model, case, words):
    checkout = launches.Checkout(tmp_path, "a-version", version)
    found = harness.cpu_case(checkout, model, case)
    assert found.num_processes == 4
    if words is None:
        assert found.args is None
    else:
        assert words in " ".join(found.args)


LOG = """\
 [2026-01-01 00:00:00.0] iteration        1/       5 | consumed samples:            8 | \
elapsed time per iteration (ms): 341.1 | learning rate: 1.000000E-03 | global batch size:     8 | \
lm loss: 5.537932E+00 | mtp_1 loss: 5.123535E+00 | loss scale: 1.0 | grad norm: 2.586 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 6408.50 | max allocated: 10624.25 | \
reserved: 11000.00 | max reserved: 12000.00
 validation loss at iteration 1 on validation set | lm loss value: 5.400000E+00 | lm loss PPL: 2E+02 |
[fused-ce] heads evaluated fused: 12, logits materialised: 0, heads on the stock path: 3
"""


def test_log_as_megatron_writes_it():
    figures = megatron_logs.parse_logs([LOG])
    assert figures.losses == {"lm loss": [5.537932], "mtp_1 loss": [5.123535], "validation loss": [5.4]}
    assert (figures.grad_norms, figures.iteration_times_ms) == ([2.586], [341.1])
    assert figures.max_allocated_mb == 10624.25
    counts = (figures.heads_fused, figures.logits_materialised, figures.heads_stock)
    assert counts == (12, 0, 3)


def test_skipped_iterations_are_told():
    line = " iteration {} | loss scale: 2.0 |{} number of skipped iterations: {} |"
    seen = [line.format("1/ 3", "", "  1"), line.format("2/ 3", "", "  2")]
    seen.append(line.format("3/ 3", " lm loss: 5.0E+00 |", "  0"))
    figures = megatron_logs.parse_logs(["\n".join(seen)])
    assert (figures.skipped, figures.losses) == ([1, 2], {"lm loss": [5.0]})


def test_exact_figures_replace_rounded_ones():
    exact = '[megatron_cpu] exact {"iteration": 1, "grad norm": 2.58612345, "lm loss": 5.53793219}'
    figures = megatron_logs.parse_logs([f"{exact}\n{LOG}"])
    assert figures.grad_norms == [2.58612345]
    assert figures.losses["lm loss"] == [5.53793219]


def test_out_of_memory_is_told_from_other_failures():
    line = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 31.31 GiB."
    assert megatron_logs.parse_logs([LOG, line]).status == "out of memory"


@pytest.mark.parametrize(
    ("ours", "reference", "difference"),
    [
        ([5.0, 4.0], [5.0, 4.0], 0.0),
        ([5.0, 4.004], [5.0, 4.0], 1e-3),
        ([5.0], [5.0, 4.0], math.inf),  # ended early
        ([5.0, math.nan], [5.0, 4.0], math.inf),
        ([math.nan], [math.nan], 0.0),
        ([], [], math.inf),  # nothing was compared
    ],
)
def test_largest_relative_difference(ours, reference, difference):
    assert losses.largest_relative_difference(ours, reference) == pytest.approx(difference)


@pytest.mark.parametrize(
    ("variant", "figures", "problem"),
    [
        ("options-store-again", {"losses": {"lm loss": [5.0]}, "grad_norms": [1.0]}, None),
        ("options-store-again", {"losses": {"lm loss": [5.0000001]}, "grad_norms": [1.0]}, "loss"),
        ("options-store-again", {"losses": {"lm loss": [5.0]}, "grad_norms": [1.0000001]}, "grad norm"),
        ("options-store-graph", {"losses": {"lm loss": [5.0000001]}, "grad_norms": [2.0]}, None),
        ("options-store-graph", {"losses": {"lm loss": [5.001]}, "grad_norms": [1.0]}, "loss differs"),
        ("auto", {"losses": {"lm loss": [4.0]}, "grad_norms": [1.0]}, None),
        ("auto", {"losses": {"lm loss": [5.0]}, "grad_norms": [1.0]}, "loss differs"),
        (
            "auto",
            {"losses": {"lm loss": [4.0]}, "grad_norms": [1.0], "skipped": [1]},
            "iterations [1] skipped, by unfused []",
        ),
    ],
    ids=str,
)
def test_what_a_variant_is_compared_with(tmp_path, variant, figures, problem):
    """A repeat to the last digit, a graph within the yardstick's bound, both to their own kind."""
    stock = {"losses": {"lm loss": [4.0]}, "grad_norms": [3.0]}
    all_figures = {
        "unfused": megatron_logs.Figures(**stock),
        "native": megatron_logs.Figures(losses={"lm loss": [4.00001]}, grad_norms=[3.0]),
        "options-store": megatron_logs.Figures(losses={"lm loss": [5.0]}, grad_norms=[1.0]),
        variant: megatron_logs.Figures(**figures, heads_fused=1, logits_materialised=0),
    }
    checkout = launches.Checkout(tmp_path, "a-version", (0, 19))
    case = harness.gpu_case("options")
    run = launches.Run(checkout, "gpt", case, variant, ("--fused-chunked-ce",), "cuda", 60.0)
    row = harness.compare(run, all_figures, warmup=0, may_run_out=[])
    assert row.against == ("options-store" if "options" in variant else "unfused")
    assert (problem in " ".join(row.problems)) if problem else row.problems == []


@pytest.mark.parametrize(
    ("our_loss", "heads_fused", "logits_materialised", "problem"),
    [
        (5.0, 32, 0, None),
        (5.00005, 32, 0, None),  # 1e-5: within twice the yardstick's 8e-6
        (5.00010, 32, 0, "loss differs"),
        (5.0, 0, 0, "no head was evaluated fused"),
        (5.0, 32, 1, "1 logits were materialised"),
        (5.0, None, None, "printed no count"),
    ],
)
def test_bounds(tmp_path, our_loss, heads_fused, logits_materialised, problem):
    def figures(loss, **counts):
        losses = {"lm loss": [loss]}
        return megatron_logs.Figures(losses=losses, grad_norms=[1.0], **counts)

    case = launches.Case("plain", "pretrain_gpt.py", 2, [])
    checkout = launches.Checkout(tmp_path, "a-version", (0, 19))
    run = launches.Run(checkout, "gpt", case, "fused-ce", ("--fused-chunked-ce",), "cpu", 60.0)
    counts = {"heads_fused": heads_fused, "logits_materialised": logits_materialised}
    all_figures = {
        "unfused": figures(5.0),
        "native": figures(5.00004),
        "fused-ce": figures(our_loss, **counts),
    }
    row = harness.compare(run, all_figures, warmup=0, may_run_out=[])
    assert (problem in " ".join(row.problems)) if problem else row.problems == []


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "--megatron PATH"), (["--megatron=/nowhere"], "no Megatron-LM checkout at /nowhere")],
)
def test_bad_input_is_one_line_and_status_2(options, message):
    run = run_harness(*options)
    assert run.returncode == 2
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_unknown_cases_and_variants(tmp_path):
    stand_in(tmp_path)
    for options, message in (
        (["--cases=plain,tp9"], "no 'tp9'; there are plain"),
        (["--variants=other"], "no 'other'"),
        (["--device=cuda", "--cases=plain"], "no 'plain'; there are losses"),
    ):
        run = run_harness(f"--megatron={tmp_path}", f"--out={tmp_path / 'out'}", *options)
        assert run.returncode == 2, run.stderr
        assert message in run.stderr
        assert len(run.stderr.splitlines()) == 1


@pytest.fixture
def fake_checkout(tmp_path):
    """Where a Megatron-LM would be: a script that logs as Megatron does; its launches are not by torchrun."""
    with launches_without_torch():
        yield stand_in(tmp_path / "fake-megatron", FAKE_PRETRAIN)


def test_own_arguments_variants_and_resume(fake_checkout, tmp_path):
    options = (
        f"--megatron={fake_checkout}",
        "--device=cuda",
        "--nproc=1",
        f"--out={tmp_path / 'out'}",
        "--variants=unfused,native",
        "--variant=too-large=--fused-chunked-ce --fused-ce-num-chunks 4 --full",
        "--may-run-out-of-memory=too-large",
        *("--", "--bf16", "--train-iters", "2"),
    )
    run = run_harness(*options)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "out of memory"]
    assert [row["time_ms"] for row in rows] == [55.0, 55.0, None]
    assert rows[1]["loss_difference"] == pytest.approx(1e-6 / 4.8, rel=0.05)
    assert rows[1]["command"].endswith("--cross-entropy-fusion-impl native")
    assert str(tmp_path) not in rows[1]["command"]

    assert run_harness(*options).stdout.count("(kept)") == 3
    (tmp_path / "out" / "fake-megatron-gpt-own_arguments-native" / "run.json").unlink()
    assert run_harness(*options).stdout.count("(kept)") == 2


def test_the_time_limit_leaves_runs_out(fake_checkout, tmp_path):
    run = run_harness(
        f"--megatron={fake_checkout}",
        *("--device=cuda", "--nproc=1", "--time-limit=0.001", f"--out={tmp_path / 'out'}"),
        *("--variants=unfused,native", "--", "--bf16"),
    )
    assert run.returncode == 1
    assert "native: not run" in run.stdout


def test_gpu_cases_name_their_cut(tmp_path):
    assert set(harness.DEFAULT_GPU_CASES) <= harness.GPU_CASES.keys()
    for name in harness.GPU_CASES:
        case = harness.gpu_case(name)
        assert case.num_processes == 4 and case.script == "pretrain_gpt.py"
        assert ("--sequence-parallel" in case.args) == (name != "no-sp")
    for name in harness.PAIR_CASES:
        assert harness.gpu_case(name).num_processes == 2
    checkout = launches.Checkout(tmp_path, "a-version", (0, 19))
    vpp, lifted = (
        launches.Run(checkout, "gpt", harness.gpu_case("vpp"), name, tuple(flags.split()), "cuda", 9.0)
        for name, flags in harness.VARIANTS.items()
        if name in ("auto", "many-connections")
    )
    assert "-m megatron_fused_ce.launch MEGATRON_LM/pretrain_gpt.py" in vpp.command
    assert "4 scripts/lib/runner.py --many-connections MEGATRON_LM/pretrain_gpt.py" in lifted.command
    assert lifted.command.endswith("--fused-chunked-ce")


def test_the_runner_asks_for_every_digit(tmp_path, monkeypatch):
    (script := tmp_path / "script.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["runner.py", "--every-digit", str(script)])
    asked = []
    monkeypatch.setattr(megatron_cpu, "log_every_digit", lambda: asked.append(True))
    runner.main()
    assert asked == [True]


def test_cases_on_two_gpus(fake_checkout, tmp_path):
    """Launched so that every digit is known; with the connections that either FSDP insists on."""
    options = (f"--megatron={fake_checkout}", "--device=cuda", "--cases=fsdp")
    variants = "--variants=unfused,fsdp2,megatron-fsdp-fused-ce"
    (runs,) = harness.plan(harness._parser().parse_args([*options, variants]))
    launcher = "torchrun --nproc-per-node 2 scripts/lib/runner.py --every-digit MEGATRON_LM/pretrain_gpt.py "
    for run, connections in zip(runs, ("", *["CUDA_DEVICE_MAX_CONNECTIONS=8 "] * 2), strict=True):
        assert run.command.startswith(f"{connections}{launcher}")
    run = run_harness(*options, f"--out={tmp_path / 'out'}", "--variants=megatron-fsdp-fused-ce")
    assert run.returncode == 0, run.stderr
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert (row["status"], row["command"]) == ("ok", runs[2].command)
    losses = row["figures"]["losses"]["lm loss"]
    assert sorted(losses) == pytest.approx(sorted(2 * [5 - i / 10 for i in range(1, 11)]))  # of two ranks
    text = (tmp_path / "out" / "results.md").read_text()
    assert "- `fsdp`: DP 2" in text and "on four GPUs" not in text


def test_many_connections_are_refused_only_where_megatron_asks(monkeypatch):
    """Its check of the arguments sees the variable, nothing else does."""
    seen = []
    arguments = types.SimpleNamespace(
        validate_args=lambda args: seen.append(os.environ.get(runner.CONNECTIONS)) or args
    )
    monkeypatch.delenv(runner.CONNECTIONS, raising=False)
    runner.lift_connections_refusal(arguments)
    assert arguments.validate_args("parsed") == "parsed"
    assert seen == ["1"] and runner.CONNECTIONS not in os.environ


def test_broken_bound_is_status_1(fake_checkout, tmp_path):
    run = run_harness(
        f"--megatron={fake_checkout}",
        "--device=cuda",
        "--nproc=1",
        f"--out={tmp_path / 'out'}",
        "--variants=unfused",
        "--variant=flag=--fused-chunked-ce --fused-ce-num-chunks 4 --wrong --idle",
        *("--", "--train-iters", "2"),
    )
    assert run.returncode == 1
    assert "loss differs by 2.1e-02" in run.stderr
    assert "printed no count of fused heads" in run.stderr


def test_half_precision_needs_the_yardstick(tmp_path):
    case = launches.Case("own", "pretrain_gpt.py", 2, ["--bf16"])
    checkout = launches.Checkout(tmp_path, "a-version", (0, 19))
    run = launches.Run(checkout, "gpt", case, "flag", ("--fused-chunked-ce",), "cuda", 60.0)
    figures = megatron_logs.Figures(losses={"lm loss": [5.0]}, heads_fused=1, logits_materialised=0)
    row = harness.compare(run, {"unfused": figures, "flag": figures}, warmup=0, may_run_out=[])
    assert row.problems == ["no native run to hold the loss against"]
