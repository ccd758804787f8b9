"""Longest sequence that GPUs train on by the unmodified pretrain_gpt.py, and how fast, flag off and on.

    python -m scripts.runs.longest --megatron ~/Megatron-LM --dry-run
    python -m scripts.runs.longest --megatron ~/Megatron-LM --time-limit 560
    python -m scripts.runs.longest --megatron ~/Megatron-LM --only auto:131072 native:65536
    python -m scripts.runs.longest --megatron ~/Megatron-LM --variants unfused auto \\
        --variant 'mine=--fused-chunked-ce --fused-ce-memory-mb 4096' -- --no-gradient-accumulation-fusion
    python -m scripts.runs.longest --megatron ~/Megatron-LM --gpus 4 --model llama-3-8b-2-layers \\
        --recompute none --lengths 32768 16384 --variants auto native unfused te-lifted

A model of MODELS below (a Llama-3.2-1B-like one) on mock data, micro-batch 1, bf16, Transformer Engine's
layers, every layer recomputed in the backward (``--recompute full``); over several GPUs with tensor and
sequence parallelism. Each (variant, length) is one launch of a few
iterations: the median time of an iteration after the warm-up, tokens/s, Megatron's own figure of the
most memory allocated, the losses. Variants:

    unfused, native, te
              Megatron's three cross entropies; ``te`` where its arguments allow it
    te-lifted
              ``te`` with Megatron's refusal lifted by `scripts/lib/runner.py`: for comparison only
    many-connections
              ``auto`` without CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron refuses as well
    auto, grad_in_forward, store, recompute
              ``--fused-chunked-ce`` with that strategy
    NAME=FLAGS by ``--variant``

Running out of memory is a row. A variant that did not train is not tried with more tokens, one that
Megatron refuses is not tried again. Launches run one after another, in the order of ``--lengths``. A launch
whose command line and sources have not changed is kept from an earlier call: its record is in ``--out``.

Writes longest.json and longest.md, anew after each launch, and the launches' logs to ``--out``.
Exit status: 0 all launches gave a row, 1 one failed otherwise than by memory or refusal, or hung,
2 a mistake in the arguments, 3 the time limit left launches out.

``--device cpu --model tiny`` runs the same on a CPU, to try the script and not to measure.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.command_line import (
    NO_LIMIT,
    Parser,
    UsageError,
    command,
    seconds,
    whole,
    writable_folder,
)
from megatron_fused_ce.estimate.command import setting_of as planned_setting
from megatron_fused_ce.scripts.lib import launches, results, tables
from megatron_fused_ce.scripts.lib.launches import STOCK, Checkout
from megatron_fused_ce.scripts.lib.logs import Figures, is_error, log_texts
from megatron_fused_ce.scripts.lib.losses import largest_relative_difference
from megatron_fused_ce.scripts.lib.results import REPOSITORY, Row
from megatron_fused_ce.scripts.runs.pretrain import CPU_ONLY_ARGS

DEFAULT_LENGTHS = (16384, 131072, 32768, 65536)  # speed and reach first: time may run out
DEFAULT_VARIANTS = ("auto", "native", "unfused", "store", "grad_in_forward", "recompute", "te")

OK, OUT_OF_MEMORY, REFUSED = "ok", "out of memory", "refused"
CUT = "cut by the time limit"


# --- what is launched ------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    vocab: int
    untied: bool = False

    def args(self) -> list[str]:
        """Megatron's flags; the tokenizer adds its end of document to ``--vocab-size``."""
        return shlex.split(
            f"--num-layers {self.num_layers} --hidden-size {self.hidden_size}"
            f" --ffn-hidden-size {self.ffn_hidden_size} --num-attention-heads {self.num_heads}"
            f" --group-query-attention --num-query-groups {self.num_query_groups}"
            f" --vocab-size {self.vocab - 1} --tokenizer-type NullTokenizer"
            " --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear"
            " --position-embedding-type rope --rotary-base 500000"
            " --use-rope-scaling --rope-scaling-factor 32" + (f" {launches.UNTIED}" if self.untied else "")
        )


def _named(name: str, layers: int | None = None) -> Model:
    """A model of the plan's own table, or the first ``layers`` of it."""
    found = planned_setting(["--model", name, "--seq-length", "1024"]).model
    if layers:
        name += f"-{layers}-layer{'s' if layers > 1 else ''}"
    return Model(
        name,
        layers or found.num_layers,
        found.hidden_size,
        found.ffn_hidden_size,
        found.num_attention_heads,
        found.num_query_groups,
        found.vocab_size,
        untied=not found.tied,
    )


MODELS = {
    model.name: model
    for model in (
        _named("llama-3.2-1b"),
        _named("llama-3.2-1b", layers=1),  # the head is what limits the length
        _named("llama-3-8b"),
        _named("llama-3-8b", layers=2),  # the head is a large part of the step
        Model("tiny", 2, 64, 128, 4, 2, 128),
    )
}

COMMON_ARGS = """
    --micro-batch-size 1 --lr 1e-4 --lr-decay-style constant --mock-data --split 100,0,0
    --eval-iters 0 --eval-interval 100 --log-interval 1 --log-memory-interval 1 --num-workers 0
    --attention-dropout 0 --hidden-dropout 0
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --no-create-attention-mask-in-dataloader
"""
# Without the last one each sample builds a [T, T] fp32 mask on the host, which the causal attention
# never reads: 64 GiB at T = 131072.
GPU_ARGS = "--bf16 --transformer-impl transformer_engine"
CPU_ARGS = f"{CPU_ONLY_ARGS} {launches.NO_FUSED_WGRAD}"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def _strategy(name: str) -> str:
    return f"{FLAG} --fused-ce-strategy {name}"


VARIANTS = {
    "unfused": "",
    "native": STOCK["native"],
    "te": STOCK["te"],
    "te-lifted": STOCK["te"],
    "auto": _strategy("auto"),
    "grad_in_forward": _strategy("grad_in_forward"),
    "store": _strategy("store"),
    "recompute": _strategy("recompute"),
    "many-connections": _strategy("auto"),
}


def default_iterations(num_tokens: int) -> tuple[int, int]:
    """(iterations, of them warm-up): half a second each at 16384 tokens, 15 s at 131072.

    The first iteration of a launch took 4 s longer on an H200, the second 2 s; where only one warms
    up, the median of the three after it shrugs off the second, and beyond 131072 tokens 2 s are little.
    """
    for longest, iterations, warmup in ((16384, 20, 5), (32768, 10, 3), (65536, 6, 2)):
        if num_tokens <= longest:
            return iterations, warmup
    return (4, 1) if num_tokens <= 131072 else (2, 1)


@dataclass(frozen=True)
class LongRun(launches.Run):
    """One launch: a variant at a length."""

    num_tokens: int
    sequences: int  # of one iteration: one for each data-parallel rank
    iterations: int
    warmup: int

    @property
    def title(self) -> str:
        return f"{self.variant}, {self.num_tokens} tokens"


def script_args(options: argparse.Namespace, num_tokens: int, iterations: int) -> list[str]:
    """The command line of pretrain_gpt.py but for the variant's flags."""
    tp = options.tp
    words = [*MODELS[options.model].args(), *shlex.split(COMMON_ARGS)]
    words += shlex.split(GPU_ARGS if options.device == "cuda" else CPU_ARGS)
    words += ["--seq-length", str(num_tokens), "--max-position-embeddings", str(num_tokens)]
    words += ["--train-iters", str(iterations), "--global-batch-size", str(options.gpus // tp)]
    words += ["--tensor-model-parallel-size", str(tp)]
    # Megatron pads the vocabulary to a multiple of this times the TP size: 128 as with one GPU.
    words += ["--make-vocab-size-divisible-by", str(max(1, 128 // tp))]
    words += ["--sequence-parallel"] if options.sequence_parallel else []
    words += shlex.split(FULL_RECOMPUTE) if options.recompute == "full" else []
    return [*words, *options.megatron_args]


# --- what a launch's logs say ----------------------------------------------------------------

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_PACKAGES = re.compile(r".*/((?:megatron|megatron_fused_ce|transformer_engine|torch)/.*)")
_PLAN = re.compile(r"\[fused-ce\] on: (.*)")


def raised_at(text: str) -> str:
    """``file:line function`` of the frame that raised the first error of a rank's log, or ''."""
    frame = ""
    for line in text.splitlines():
        if match := _FRAME.search(line):
            inside = _PACKAGES.fullmatch(match[1])
            file = inside[1] if inside else Path(match[1]).name
            frame = f"{file}:{match[2]} {match[3]}"
        elif frame and is_error(line):
            return frame
    return ""


def row_of(run: LongRun, figures: Figures, texts: Sequence[str]) -> Row:
    """The row of one launch, from what `logs` read from its logs and the logs."""
    where = next(filter(None, map(raised_at, texts)), "") if figures.status != OK else ""
    status = figures.status
    losses = figures.losses.get("lm loss", [])
    times = figures.iteration_times_ms
    if status == OK and len(times) != run.iterations:
        status = f"ended after {len(times)} of {run.iterations} iterations"
    elif status == OK and not all(map(math.isfinite, losses)):
        status = "a loss is not finite"
    elif status == OK and run.uses_plugin and not figures.is_fused:
        status = "the head was not fused"
    elif status == "failed" and not times and where.endswith(" validate_args"):
        status = REFUSED
    time_ms, spread = figures.time_ms(run.warmup)
    error = figures.error.replace(str(run.checkout.path), "MEGATRON_LM").replace(f"{REPOSITORY}/", "")
    return {
        "shape": run.model,
        "T": run.num_tokens,
        "variant": run.variant,
        "status": status,
        "tokens_per_s": time_ms and round(1e3 * run.num_tokens * run.sequences / time_ms, 1),
        "time_ms": time_ms,
        "spread": spread,
        "times_ms": times,
        "peak_mib": figures.max_allocated_mb,
        "loss": losses,
        "error": error,
        "where": where,
        "plan": next((match[1] for text in texts if (match := _PLAN.search(text))), None),
        "heads_fused": figures.heads_fused,
        "logits_materialised": figures.logits_materialised,
        "iterations": run.iterations,
        "warmup": run.warmup,
        "wall_s": figures.wall_s,
        "command": run.command,
    }


# --- one after another -----------------------------------------------------------------------


def reason_to_skip(run: LongRun, rows: Sequence[Row]) -> str:
    """Why a launch would tell nothing new, '' where it would."""
    for row in rows:
        if row["variant"] != run.variant or row["status"] == CUT:
            continue
        if row["status"] == REFUSED:
            return "not tried: Megatron refuses it"
        if row["status"] != OK and row["T"] <= run.num_tokens:
            return f"not tried: {row['status']} at {row['T']} tokens"
    return ""


def run_all(
    runs: Sequence[LongRun],
    *,
    time_limit_s: float,
    execute: Callable[[LongRun], tuple[Figures, Sequence[str]]],
    write: Callable[[list[Row]], None],
    now: Callable[[], float] = time.monotonic,
) -> tuple[list[Row], int]:
    """The rows of what was launched, and how many launches the time limit cut or left out.

    ``execute`` gives a launch's figures and logs; ``write`` is given all rows after each launch.
    """
    started, left_out = now(), 0
    rows: list[Row] = []
    for run in runs:
        if reason := reason_to_skip(run, rows):
            print(f"{run.title}: {reason}", flush=True)
            continue
        left = time_limit_s - (now() - started)
        if left <= 0:
            left_out += 1
            print(f"{run.title}: left out by the time limit", flush=True)
            continue
        row = row_of(run, *execute(replace(run, timeout_s=min(left, run.timeout_s))))
        if left < run.timeout_s and row["status"].startswith("timed out"):
            row["status"] = CUT
            left_out += 1
        rows.append(row)
        write(rows)
        rate = f", {row['tokens_per_s']:.0f} tokens/s" if row["tokens_per_s"] else ""
        peak = f", {row['peak_mib']:.0f} MiB" if row["peak_mib"] else ""
        said = f"{run.title}: {row['status']}{rate}{peak}, {row['wall_s']:.0f} s"
        print(f"{said} {row['error'] or ''}".rstrip(), flush=True)
    return rows, left_out


# --- tables ----------------------------------------------------------------------------------


def kind(row: Row) -> str:
    if FLAG in row["command"]:
        return "flag"
    return "lifted" if row["variant"] == "te-lifted" else "stock"


def fastest(rows: Iterable[Row], of_kind: str) -> Row | None:
    """Of those that trained."""
    trained = [row for row in rows if row["status"] == OK and kind(row) == of_kind]
    return max(trained, key=lambda row: row["tokens_per_s"], default=None)


def verdict(rows: Sequence[Row]) -> str:
    """One line: the longest that each variant trains, and tokens/s over the best stock variant.

    Of the variants with the flag the fastest, and ``auto`` where that is another.
    """
    lengths = sorted({row["T"] for row in rows})
    longest = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        trained = max((row["T"] for row in mine if row["status"] == OK), default=0)
        ended = [row for row in mine if row["status"] not in (OK, CUT) and row["T"] > trained]
        words = f"{variant} {trained or 'none'}"
        if ended:
            first = min(ended, key=lambda row: row["T"])
            words += f" ({first['status']} at {first['T']})"
        longest.append(words)
    ratios = []
    for length in lengths:
        here = [row for row in rows if row["T"] == length]
        ours, stock, lifted = (fastest(here, name) for name in ("flag", "stock", "lifted"))
        if ours and not stock:
            ratios.append(f"{length} no stock variant trained, {ours['variant']} did")
        autos = [row for row in here if row["variant"] == "auto" and row["status"] == OK]
        for flagged in filter(None, [ours, *(row for row in autos if row is not ours)]):
            for other in filter(None, (stock, lifted)):
                ratio = flagged["tokens_per_s"] / other["tokens_per_s"]
                ratios.append(f"{length} {ratio:.3f} ({flagged['variant']} / {other['variant']})")
    return (
        f"Longest that trains, of {', '.join(map(str, lengths))} tokens: {', '.join(longest)}. "
        f"Tokens/s with the flag over the fastest without: {'; '.join(ratios) or '–'}."
    )


def markdown(rows: Sequence[Row]) -> str:
    """One line for each launch."""
    cell = tables.cell
    head = ["T", "variant", "tokens/s", "over the best stock", "ms per iteration", "peak MiB"]
    head += ["last lm loss", "largest loss difference to unfused", "heads fused"]
    head += ["logits materialised", ""]
    lines = []
    for row in sorted(rows, key=lambda row: row["T"]):
        here = [other for other in rows if other["T"] == row["T"]]
        trains = row["status"] == OK
        stock = fastest(here, "stock")
        unfused = next((r for r in here if r["variant"] == "unfused" and r["status"] == OK), None)
        difference = None
        if trains and unfused and row is not unfused:
            difference = largest_relative_difference(row["loss"], unfused["loss"])
        ratio = row["tokens_per_s"] / stock["tokens_per_s"] if trains and stock else None
        lines.append(
            [
                row["T"],
                row["variant"],
                cell(row["tokens_per_s"] if trains else None, ".0f"),
                cell(ratio, ".3f"),
                cell(row["time_ms"] if trains else None, ".1f"),
                cell(row["peak_mib"], ".0f"),
                cell(row["loss"][-1] if row["loss"] else None, ".6f"),
                cell(difference, ".1e"),
                cell(row["heads_fused"]),
                cell(row["logits_materialised"]),
                "trains" if trains else row["status"],
            ]
        )
    return tables.markdown(head, lines, left=2) + "\n"


def report(rows: Sequence[Row], source: Row) -> str:
    rows = sorted(rows, key=lambda row: row["T"])
    versions = ", ".join(
        f"{name} {source[key]}"
        for name, key in (
            ("torch", "torch"),
            ("triton", "triton"),
            ("Megatron-LM", "megatron"),
            ("Transformer Engine", "transformer_engine"),
        )
        if source[key]
    )
    plans = [f"- {row['T']}, {row['variant']}: {row['plan']}\n" for row in rows if row["plan"]]
    ends = [
        f"- {row['T']}, {row['variant']}: {row['error'] or row['status']}"
        + (f" (raised in `{row['where']}`)\n" if row["where"] else "\n")
        for row in rows
        if row["status"] != OK
    ]
    return (
        f"# Longest sequence that trains: {rows[0]['shape']}\n\n"
        f"By `scripts/runs/longest.py` on {source['gpus']} × {source['device']} (TP {source['tp']}), "
        f"{versions}, package at {source['commit']}. Unmodified `pretrain_gpt.py`, {source['dtype']}, "
        f"micro-batch 1, activation recompute: {source['activation_recompute']}. Iteration times are "
        "medians after the warm-up; peak is Megatron's `max allocated`, of everything on the GPU. The JSON "
        "file beside this one has each launch's command line and figures.\n\n"
        f"{verdict(rows)}\n\n{markdown(rows)}"
        + (f"\nWhat the flag chose:\n\n{''.join(plans)}" if plans else "")
        + (f"\nHow the others ended:\n\n{''.join(ends)}" if ends else "")
    )


# --- command line ----------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser("python -m scripts.runs.longest", __doc__ or "")
    add = parser.add_argument
    add("--megatron", required=True, metavar="PATH", help="a Megatron-LM checkout")
    add("--model", type=str.lower, choices=MODELS, default="llama-3.2-1b")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--gpus", type=whole(most=4096), default=1, help="processes of a launch [1]")
    add("--tp", type=whole(most=4096), help="tensor-parallel size [--gpus]")
    add("--no-sequence-parallel", action="store_true", help="it is on where TP is more than 1")
    lengths = list(DEFAULT_LENGTHS)
    add("--lengths", type=whole(), nargs="+", default=lengths, metavar="T", help="in order")
    add(
        "--variants",
        nargs="+",
        default=list(DEFAULT_VARIANTS),
        metavar="NAME",
        help=f"in order, of {', '.join(VARIANTS)} and those of --variant",
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more variant, after those of --variants (write --variant='NAME=FLAGS'); repeatable",
    )
    add("--only", nargs="+", metavar="VARIANT:T", help="these launches alone, in this order")
    add("--recompute", choices=("full", "none"), default="full")
    add("--iterations", type=whole(), help="[20 at 16384 tokens ... 4 at 131072]")
    add("--warmup", type=whole(0), help="of them left out of the time [about a quarter]")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="S", help="of all; cuts the last launch")
    add("--timeout", type=seconds, default=300.0, metavar="S", help="of one launch [300]")
    add("--out", type=Path, default=Path("build/longest"), help="folder of results and logs")
    add("--dry-run", action="store_true", help="print the launches")
    add("megatron_args", nargs="*", metavar="-- FLAGS", help="flags of Megatron's for every launch")
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    options = _parser().parse_args(words)
    options.tp = options.tp or options.gpus
    if options.gpus % options.tp:
        raise UsageError(f"--tp {options.tp} does not divide --gpus {options.gpus}")
    options.sequence_parallel = options.tp > 1 and not options.no_sequence_parallel
    return options


def plan(options: argparse.Namespace, checkout: Checkout) -> list[LongRun]:
    """Every launch, in order."""
    if checkout.version < (0, 16):
        raise UsageError("Megatron-LM 0.15 has no --log-memory-interval: give a checkout of 0.16 or newer")
    own = launches.named_flags(options.variant)
    known, chosen = VARIANTS | own, [*options.variants, *own]
    wanted = [(name, length) for length in options.lengths for name in chosen]
    if options.only:
        wanted = []
        for text in options.only:
            name, _, length = text.rpartition(":")
            if not name or not length.isdigit():
                raise UsageError(f"--only takes VARIANT:T, got {text!r}")
            wanted.append((name, int(length)))
    runs = []
    for name, length in wanted:
        if name not in known:
            raise UsageError(f"no variant {name!r}; there are {', '.join(known)}")
        runs.append(_run(options, checkout, name, shlex.split(known[name]), length))
    return runs


def _run(
    options: argparse.Namespace, checkout: Checkout, name: str, flags: list[str], length: int
) -> LongRun:
    iterations, warmup = default_iterations(length)
    if options.iterations is not None:
        iterations = options.iterations
        warmup = max(1, iterations // 4) if iterations > 1 else 0
    if options.warmup is not None:
        warmup = options.warmup
    if warmup >= iterations:
        raise UsageError(f"--warmup {warmup} leaves none of {iterations} iterations to measure")
    case = launches.Case(
        str(length), "pretrain_gpt.py", options.gpus, script_args(options, length, iterations)
    )
    return LongRun(
        checkout,
        options.model,
        case,
        name,
        tuple(flags),
        options.device,
        options.timeout,
        num_tokens=length,
        sequences=options.gpus // options.tp,
        iterations=iterations,
        warmup=warmup,
    )


def source_of(options: argparse.Namespace, checkout: Checkout, words: Sequence[str]) -> Row:
    """Where the figures come from, and what all launches have in common."""
    source = results.made_by(results.device_name(), ["scripts.runs.longest", *words])
    model = MODELS[options.model]
    return source | {
        "megatron": launches.full_version(checkout.path),
        "alloc_conf": launches.allocator_settings(),
        "H": model.hidden_size,
        "V": model.vocab,
        "dtype": "bfloat16" if options.device == "cuda" else "float32",
        "gpus": options.gpus,
        "tp": options.tp,
        "sp": options.sequence_parallel,
        "activation_recompute": options.recompute,
    }


@command("longest")
def main(words: list[str]) -> int:
    began = time.monotonic()
    options = parse(words)
    checkout = Checkout.at(options.megatron)
    runs = plan(options, checkout)
    if options.dry_run:
        for run in runs:
            print(f"# {run.title}\n{run.command}")
        return 0
    out = writable_folder(options.out.resolve())
    source = source_of(options, checkout, words)

    def execute(run: LongRun) -> tuple[Figures, list[str]]:
        figures, _ = run.execute(out)
        return figures, log_texts(out / run.folder_name)

    def write(rows: list[Row]) -> None:
        results.write(out / "longest.json", rows, source)
        results.write_whole(out / "longest.md", report(rows, source))

    left = options.time_limit - (time.monotonic() - began)
    rows, left_out = run_all(runs, time_limit_s=left, execute=execute, write=write)
    if rows:
        print(f"\n{markdown(rows)}\n{verdict(rows)}")
    failed = [row for row in rows if row["status"] not in (OK, OUT_OF_MEMORY, REFUSED, CUT)]
    for row in failed:
        name = f"{row['variant']}, {row['T']} tokens"
        print(f"longest: {name}: {row['status']} {row['error']}", file=sys.stderr)
    return 1 if failed else 3 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
