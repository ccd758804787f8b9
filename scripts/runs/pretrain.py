"""Launch Megatron-LM's pretrain_gpt.py with the flag off and on: tokens/s, peak memory, losses.

On GPUs with Transformer Engine, one model at sequence lengths, until a variant runs out of memory, which is a
result there:

    python -m scripts.runs.pretrain --megatron ~/Megatron-LM --device cuda --nproc 1 --lengths 16384 131072
    python -m scripts.runs.pretrain --megatron ~/Megatron-LM --device cuda --nproc 2 --lengths 32768 \\
        --model llama-3-8b:2 --variants auto,native,unfused,te-lifted

On a CPU (gloo, fp32, a tiny model; `megatron_fused_ce.scripts.lib.megatron_cpu` stands in for CUDA), every
version of Megatron beside the others. There the flag's losses and gradient norms may differ from unfused ones
by twice what Megatron's native loss differs by, or by what its log can tell apart:

    python -m scripts.runs.pretrain --megatron ~/Megatron-LM-0.18 --megatron ~/Megatron-LM-0.19

Each variant is one launch of the unmodified script, with more arguments after ``--``. Writes results.json to
--out, where every launch's logs stay; a launch whose inputs have not changed since is not repeated. Exit
status: 0 all within bounds, 1 a bound broken or a launch failed, 2 a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.cli import command_line
from megatron_fused_ce.cli.command_line import Parser, UsageError, command, seconds, whole
from megatron_fused_ce.plan.command import setting_of as planned_setting
from megatron_fused_ce.scripts.lib import launches, losses, results, tables
from megatron_fused_ce.scripts.lib.launches import REFERENCE, STOCK, YARDSTICK, Case, Checkout, Run
from megatron_fused_ce.scripts.lib.logs import Figures

STRATEGIES = ("store", "grad_in_forward", "recompute")
#: In order: time may run out.
VARIANTS = {
    REFERENCE: STOCK[REFERENCE],
    YARDSTICK: STOCK[YARDSTICK],
    "auto": FLAG,
    **{name: f"{FLAG} --fused-ce-strategy {name}" for name in STRATEGIES},
}
#: By name alone: Megatron refuses Transformer Engine's loss from 0.18 on, and the second lifts the refusal.
MORE_VARIANTS = dict.fromkeys(("te", "te-lifted"), STOCK["te"])
TINY = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 127"
# Without the last one each sample builds a [T, T] fp32 mask on the host, which the causal attention
# never reads: 64 GiB at T = 131072.
COMMON_ARGS = """
    --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --lr-decay-style constant --mock-data
    --tokenizer-type NullTokenizer --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --eval-interval 1000 --log-interval 1 --num-workers 0
    --attention-dropout 0 --hidden-dropout 0 --no-create-attention-mask-in-dataloader
"""
GPU_ARGS = """
    --split 100,0,0 --eval-iters 0 --bf16 --transformer-impl transformer_engine
    --log-memory-interval 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""
#: What runs without apex and Transformer Engine.
CPU_ONLY_ARGS = """
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --attention-backend unfused --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""
CPU_ARGS = f"--split 90,10,0 --eval-iters 1 {launches.NO_FUSED_WGRAD} {CPU_ONLY_ARGS}"
#: Begins the status of a longer sequence than one that a variant did not train.
NOT_TRIED = "not tried"


# --- what is launched ------------------------------------------------------------------------


def model_args(name: str) -> str:
    """Megatron's flags; the tokenizer adds its end of document to ``--vocab-size``."""
    if name == "tiny":
        return TINY
    name, _, layers = name.partition(":")
    found = planned_setting(["--model", name, "--seq-length", "1024"]).model
    return (
        f"--num-layers {layers or found.num_layers} --hidden-size {found.hidden_size}"
        f" --ffn-hidden-size {found.ffn_hidden_size} --num-attention-heads {found.num_attention_heads}"
        f" --group-query-attention --num-query-groups {found.num_query_groups}"
        f" --vocab-size {found.vocab_size - 1} --norm-epsilon 1e-5 --rotary-base 500000"
        f" --use-rope-scaling --rope-scaling-factor 32 {'' if found.tied else launches.UNTIED}"
    )


def iterations_of(num_tokens: int, device: str) -> tuple[int, int]:
    """(iterations, of them warm-up): half a second each at 16384 tokens on a GPU, 15 s at 131072.

    The first iteration of a launch took 4 s longer on an H200, the second 2 s; where only one warms
    up, the median of the three after it shrugs off the second, and beyond 131072 tokens 2 s are little.
    """
    if device == "cpu":
        return 5, 1
    for longest, iterations, warmup in ((16384, 20, 5), (32768, 10, 3), (65536, 6, 2)):
        if num_tokens <= longest:
            return iterations, warmup
    return (4, 1) if num_tokens <= 131072 else (2, 1)


def case_of(options: argparse.Namespace, num_tokens: int, more: Sequence[str]) -> Case:
    """One length, one tensor-parallel group; sequence parallelism, which local norms on GPUs refuse."""
    ranks, (iterations, warmup) = options.nproc, iterations_of(num_tokens, options.device)
    words = shlex.split(f"{model_args(options.model)} {COMMON_ARGS}")
    words += shlex.split(GPU_ARGS if options.device == "cuda" else CPU_ARGS)
    words += ["--seq-length", str(num_tokens), "--max-position-embeddings", str(num_tokens)]
    words += ["--train-iters", str(iterations), "--tensor-model-parallel-size", str(ranks)]
    # Megatron pads the vocabulary to a multiple of this times the TP size: 128 as with one GPU.
    words += ["--make-vocab-size-divisible-by", str(max(1, 128 // ranks))]
    words += [*["--sequence-parallel"] * (ranks > 1 and "local" not in more), *more]
    return Case(str(num_tokens), "pretrain_gpt.py", ranks, words, num_tokens=num_tokens, warmup=warmup)


def plan(options: argparse.Namespace, more: Sequence[str]) -> list[list[Run]]:
    """The launches, one list per checkout and length."""
    checkouts = [Checkout.at(path) for path in options.megatron]
    if len({checkout.label for checkout in checkouts}) < len(checkouts):
        raise UsageError("checkouts need folders of different names: their names label the table")
    if options.device == "cuda" and any(checkout.version < (0, 16) for checkout in checkouts):
        raise UsageError("Megatron-LM 0.15 has no --log-memory-interval: give a checkout of 0.16 or newer")
    known = {**VARIANTS, **MORE_VARIANTS}
    if options.device == "cpu":  # of few tokens the plan would make one
        known |= {name: f"{known[name]} --fused-ce-num-chunks 3" for name in STRATEGIES}
    variants = {name: known.get(name, "") for name in filter(None, options.variants.split(","))}
    if unknown := variants.keys() - known:
        raise UsageError(f"--variants: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    how = options.device, options.timeout
    cases = [case_of(options, num_tokens, more) for num_tokens in options.lengths]
    args = {name: tuple(shlex.split(words)) for name, words in variants.items()}
    return [
        [Run(checkout, options.model, case, name, args[name], *how) for name in args]
        for checkout, case in product(checkouts, cases)
    ]


def reason_to_skip(run: Run, rows: Sequence[dict[str, Any]]) -> str:
    """Why a longer sequence would tell nothing new, '' where it would."""
    for row in rows:
        same = (row["version"], row["variant"]) == (run.checkout.label, run.variant)
        longer = row["T"] <= (run.case.num_tokens or 0)
        if same and longer and not row["status"].startswith(("ok", NOT_TRIED)):
            return f"{NOT_TRIED}: {row['status']} at {row['T']} tokens"
    return ""


# --- what came of it -------------------------------------------------------------------------


def row_of(run: Run, of: dict[str, Figures]) -> dict[str, Any]:
    """One variant's row; ``of``: figures of this length's variants by their names."""
    figures, stock, native = of[run.variant], of.get(REFERENCE), of.get(YARDSTICK)
    time_ms, spread = figures.time_ms(run.case.warmup)
    problems = list[str]()
    row: dict[str, Any] = {"shape": run.model, "variant": run.variant, "version": run.checkout.label}
    row |= {"T": run.case.num_tokens, "status": figures.status, "time_ms": time_ms, "spread": spread}
    row["tokens_per_s"] = round(1e3 * row["T"] / time_ms, 1) if time_ms else None
    row |= {"peak_mib": figures.max_allocated_mb, "loss_difference": None, "problems": problems}
    row |= {**figures.gpu, "command": run.command, "figures": asdict(figures)}
    if figures.status != "ok":
        if not figures.status.startswith(("out of memory", NOT_TRIED)):
            problems.append(f"{figures.status} {figures.error}".strip())
        return row
    words = run.case.args
    wanted, made = int(words[len(words) - words[::-1].index("--train-iters")]), figures.iteration_times_ms
    if len(made) != wanted:
        problems.append(f"ended after {len(made)} of {wanted} iterations")
    if not all(map(math.isfinite, figures.losses.get("lm loss", []))):
        problems.append("a loss is not finite")
    if run.uses_plugin and not figures.is_fused:
        problems.append(f"heads fused: {figures.heads_fused}, materialised: {figures.logits_materialised}")
    if not stock or stock.status != "ok" or run.variant == REFERENCE:
        return row
    ours, its = differences(figures, stock), differences(native or stock, stock)
    row["loss_difference"] = ours[0]
    # In bf16, over few iterations, losses are shown and not judged.
    least_of = losses.LOSS_RESOLUTION, losses.GRAD_NORM_RESOLUTION
    judged = zip(("loss", "grad norm"), ours, its, least_of, strict=True)
    for what, our, native_one, least in judged if run.uses_plugin and run.device == "cpu" else ():
        bound = max(losses.YARDSTICK_FACTOR * native_one if math.isfinite(native_one) else 0.0, least)
        if not our <= bound:
            problems.append(f"{what} differs by {our:.1e}, bound {bound:.1e}")
    return row


def differences(one: Figures, other: Figures) -> tuple[float, float]:
    """The largest relative ones of two launches' losses and gradient norms."""
    norms = losses.largest_relative_difference(one.grad_norms, other.grad_norms)
    return losses.loss_difference(one, other), norms


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["version", "tokens", "variant", "tokens/s", "max allocated MiB", "last lm loss"]
    head += ["loss difference", "MHz", "W"]
    lines = []
    for row in rows:
        last = row["figures"]["losses"].get("lm loss", [None])[-1]
        cells = [tables.cell(row["tokens_per_s"], ".0f"), tables.cell(row["peak_mib"], ".0f")]
        cells += [tables.cell(last, ".6f"), tables.cell(row["loss_difference"], ".1e")]
        cells += [tables.cell(row.get(name), ".0f") for name in ("sm_mhz", "watts")]
        verdict = "; ".join(row["problems"]) or (row["status"] if row["status"] != "ok" else "yes")
        lines.append([row["version"], row["T"], row["variant"], *cells, verdict])
    return tables.markdown([*head, "within bounds"], lines, left=len(head) + 1)


# --- command line ----------------------------------------------------------------------------


@command("pretrain")
def main(words: list[str]) -> int:
    own, more = launches.split_command(words)
    parser = Parser("python -m scripts.runs.pretrain", __doc__ or "")
    add = parser.add_argument
    checkout = "a Megatron-LM checkout; repeatable"
    add("--megatron", action="append", required=True, metavar="PATH", help=checkout)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--model", type=str.lower, metavar="NAME[:LAYERS]", help="of `plan`, or tiny")
    add("--lengths", type=whole(), nargs="+", metavar="T", help="[cpu: 64, cuda: 16384]")
    add("--nproc", type=whole(most=4096), default=2, help="the TP size [2]")
    add("--variants", default=",".join(VARIANTS), help=f"[%(default)s], and {', '.join(MORE_VARIANTS)}")
    add("--timeout", type=seconds, default=900.0, metavar="S", help="of one launch [900]")
    add("--out", type=Path, default=Path("build/pretrain"), help="folder of results and logs")
    options = parser.parse_args(own)
    options.model = options.model or ("tiny" if options.device == "cpu" else "llama-3.2-1b")
    options.lengths = options.lengths or ([64] if options.device == "cpu" else [16384])
    groups = plan(options, more)
    output = command_line.writable_folder(options.out.resolve())
    source = results.made_by(results.device_name(), ["scripts.runs.pretrain", *words])
    rows: list[dict[str, Any]] = []
    for group in groups:
        figures: dict[str, Figures] = {}
        before = list(rows)
        for run in group:
            made, kept = Figures(reason_to_skip(run, rows)), False
            if not made.status:
                made, kept = run.execute(output)
            figures[run.variant] = made
            came = "kept" if kept else f"{made.wall_s:.0f} s"
            print(f"{run.title}: {made.status} ({came}) {made.error}".rstrip(), flush=True)
            rows = before + [row_of(run, figures) for run in group if run.variant in figures]
            results.write(output / "results.json", rows, source)
    print(f"\n{table(rows)}\n\nLogs and results: {options.out}")
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
