"""Longest sequence that GPUs train on by the unmodified pretrain_gpt.py, and how fast, flag off and on.

    python -m scripts.runs.longest --megatron ~/Megatron-LM --dry-run
    python -m scripts.runs.longest --megatron ~/Megatron-LM --time-limit 560
    python -m scripts.runs.longest --megatron ~/Megatron-LM --only auto:131072 native:65536
    python -m scripts.runs.longest --megatron ~/Megatron-LM --variants unfused auto \\
        --fused-ce-memory-mb 4096 -- --no-gradient-accumulation-fusion
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
              ``--fused-chunked-ce`` with that strategy; every ``--fused-ce-...`` flag given to this
              script goes to them
    NAME=FLAGS by ``--variant``

Running out of memory is a row. A variant that did not train is not tried with more tokens, one that
Megatron refuses is not tried again. Launches run one after another, in the order of ``--lengths``;
with ``--repeat`` the variants of a length alternate, forwards and backwards. Rows are written after
each launch, and launches whose rows are there already are skipped: for a variant with the flag only
rows of this commit, for the others of any.

Output: ``docs/benchmarks/results/<date>-<device>-<name>.json`` and ``.md``, logs under ``--logs``.
Exit status: 0 all launches gave a row, 1 one failed otherwise than by memory or refusal, or hung,
2 a mistake in the arguments, 3 the time limit left launches out.

``--device cpu --model tiny`` runs the same on a CPU, to try the script and not to measure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter.arguments import FLAG, add_arguments
from megatron_fused_ce.command_line import (
    NO_LIMIT,
    Parser,
    UsageError,
    command,
    seconds,
    whole,
    writable_file,
    writable_folder,
)
from megatron_fused_ce.estimate.command import setting_of as planned_setting
from megatron_fused_ce.scripts.lib import launches, results, tables
from megatron_fused_ce.scripts.lib.launches import STOCK, Checkout, Launcher
from megatron_fused_ce.scripts.lib.logs import Figures, is_error, log_texts
from megatron_fused_ce.scripts.lib.losses import largest_relative_difference
from megatron_fused_ce.scripts.lib.results import REPOSITORY, RESULTS
from megatron_fused_ce.scripts.runs.pretrain import CPU_ONLY_ARGS

DEFAULT_LENGTHS = (16384, 131072, 32768, 65536)  # speed and reach first: time may run out
DEFAULT_VARIANTS = ("auto", "native", "unfused", "store", "grad_in_forward", "recompute", "te")

KEYS = (
    *("commit", "device", "torch", "triton", "megatron", "transformer_engine", "shape", "T", "H"),
    *("V", "dtype", "tp", "sp", "gpus", "activation_recompute", "variant", "repeat", "status"),
    *("tokens_per_s", "time_ms", "times_ms", "peak_mib", "loss", "error", "where", "plan"),
    *("heads_fused", "logits_materialised", "iterations", "warmup", "wall_s", "alloc_conf"),
    "command",
)
OK, OUT_OF_MEMORY, REFUSED = "ok", "out of memory", "refused"
CUT = "cut by the time limit"
FINAL = (OK, OUT_OF_MEMORY, REFUSED)  # a launch that ended otherwise is tried again

Row = dict[str, Any]


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

    def flop(self, num_tokens: int, recompute: bool) -> float:
        """Of one iteration over a sequence of ``num_tokens``, causal attention counted by half."""
        H, kv = self.hidden_size, self.hidden_size // self.num_heads * self.num_query_groups
        weights = self.num_layers * H * (2 * H + 2 * kv + 3 * self.ffn_hidden_size)
        linear = 2 * num_tokens * weights * (4 if recompute else 3)
        # Its backward computes the scores again: 2.5 times its forward.
        attention = self.num_layers * 2 * num_tokens**2 * H * (4.5 if recompute else 3.5)
        return linear + attention + 6 * num_tokens * H * self.vocab


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

    shape: Model
    num_tokens: int
    repeat: int
    iterations: int
    warmup: int
    num_gpus: int
    tp: int
    sequence_parallel: bool
    recompute: bool

    @property
    def sequences(self) -> int:
        """Of one iteration: one for each data-parallel rank."""
        return self.num_gpus // self.tp

    @property
    def title(self) -> str:
        return f"{self.variant}, {self.num_tokens} tokens, repeat {self.repeat}"

    def estimate_s(self) -> float:
        """Before anything was measured; 30 s of start-up, 350 TFLOP/s (H200) on each GPU."""
        flop = self.shape.flop(self.num_tokens, self.recompute) / self.tp
        return 30.0 + self.iterations * flop / 350e12


def script_args(
    shape: Model,
    num_tokens: int,
    *,
    iterations: int,
    gpus: int,
    tp: int,
    sequence_parallel: bool,
    recompute: bool,
    device: str,
) -> list[str]:
    """The command line of pretrain_gpt.py but for the variant's flags."""
    words = [*shape.args(), *shlex.split(COMMON_ARGS)]
    words += shlex.split(GPU_ARGS if device == "cuda" else CPU_ARGS)
    words += ["--seq-length", str(num_tokens), "--max-position-embeddings", str(num_tokens)]
    words += ["--train-iters", str(iterations), "--global-batch-size", str(gpus // tp)]
    words += ["--tensor-model-parallel-size", str(tp)]
    # Megatron pads the vocabulary to a multiple of this times the TP size: 128 as with one GPU.
    words += ["--make-vocab-size-divisible-by", str(max(1, 128 // tp))]
    words += ["--sequence-parallel"] if sequence_parallel else []
    return words + (shlex.split(FULL_RECOMPUTE) if recompute else [])


def in_order(variants: Sequence[str], lengths: Iterable[int], repeats: int) -> list[tuple[str, int, int]]:
    """(variant, length, repeat): length by length, each second repeat backwards."""
    return [
        (variant, length, repeat)
        for length in lengths
        for repeat in range(repeats)
        for variant in (variants if repeat % 2 == 0 else reversed(variants))
    ]


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


def _is_fused(figures: Figures) -> bool:
    return bool(figures.heads_fused) and not figures.logits_materialised


def row_of(run: LongRun, figures: Figures, texts: Sequence[str], facts: dict[str, Any]) -> Row:
    """The row of one launch, from what `logs` read from its logs and the logs."""
    where = next(filter(None, map(raised_at, texts)), "") if figures.status != OK else ""
    status = figures.status
    losses = figures.losses.get("lm loss", [])
    times = figures.iteration_times_ms
    if status == OK and len(times) != run.iterations:
        status = f"ended after {len(times)} of {run.iterations} iterations"
    elif status == OK and not all(map(math.isfinite, losses)):
        status = "a loss is not finite"
    elif status == OK and run.uses_plugin and not _is_fused(figures):
        status = "the head was not fused"
    elif status == "failed" and not times and where.endswith(" validate_args"):
        status = REFUSED
    measured = times[run.warmup :]
    time_ms = statistics.median(measured) if measured else None
    return dict.fromkeys(KEYS) | {
        **facts,
        **setting_of(run, facts),
        "T": run.num_tokens,
        "H": run.shape.hidden_size,
        "V": run.shape.vocab,
        "dtype": "bfloat16" if run.device == "cuda" else "float32",
        "variant": run.variant,
        "repeat": run.repeat,
        "status": status,
        "tokens_per_s": time_ms and round(1e3 * run.num_tokens * run.sequences / time_ms, 1),
        "time_ms": time_ms and round(time_ms, 1),
        "times_ms": times,
        "peak_mib": figures.max_allocated_mb,
        "loss": losses,
        "error": _without_paths(figures.error, run),
        "where": where,
        "plan": next((match[1] for text in texts if (match := _PLAN.search(text))), None),
        "heads_fused": figures.heads_fused,
        "logits_materialised": figures.logits_materialised,
        "iterations": run.iterations,
        "warmup": run.warmup,
        "wall_s": figures.wall_s,
        "command": run.command,
    }


def _without_paths(text: str, run: LongRun) -> str:
    return text.replace(str(run.checkout.path), "MEGATRON_LM").replace(f"{REPOSITORY}/", "")


# --- one after another -----------------------------------------------------------------------

_SOFTWARE = ("torch", "triton", "megatron", "transformer_engine", "alloc_conf")


def setting_of(run: LongRun, facts: Row) -> Row:
    """What all rows of one file have in common."""
    return {
        "device": facts["device"],
        "shape": run.shape.name,
        "gpus": run.num_gpus,
        "tp": run.tp,
        "sp": run.sequence_parallel,
        "activation_recompute": "full" if run.recompute else "none",
    }


def speaks_for(row: Row, run: LongRun, facts: Row) -> bool:
    """Whether ``row`` is of the variant that ``run`` would launch, with the same software."""
    return (
        row["variant"] == run.variant
        and str(row["command"]).endswith(shlex.join(run.variant_args))
        and all(row[key] == facts[key] for key in _SOFTWARE)
        and (row["commit"] == facts["commit"] or not run.uses_plugin)
    )


def reason_to_skip(run: LongRun, rows: Sequence[Row]) -> str:
    """Why a launch would tell nothing new, '' where it would; ``rows`` are of its variant."""
    for row in rows:
        if row["command"] == run.command and row["repeat"] == run.repeat:
            return f"there already: {row['status']}"
        if row["status"] == REFUSED:
            return "not tried: Megatron refuses it"
        if row["status"] != OK and row["T"] <= run.num_tokens:
            return f"not tried: {row['status']} at {row['T']} tokens"
    return ""


def seconds_needed(run: LongRun, rows: Sequence[Row]) -> float:
    """What the slowest launch of this length took, or the estimate."""
    seen = [row["wall_s"] for row in rows if row["T"] == run.num_tokens and row["status"] == OK]
    return float(max(seen)) if seen else run.estimate_s()


def run_all(
    runs: Sequence[LongRun],
    rows: list[Row],
    facts: dict[str, Any],
    *,
    time_limit_s: float,
    execute: Callable[[LongRun], tuple[Figures, list[str]]],
    write: Callable[[list[Row]], None],
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Launch what has no row yet, adding to ``rows`` and writing them after each launch.

    ``execute`` gives a launch's figures and logs. Returns how many launches the time limit left out.
    """
    started, left_out = now(), 0
    here: list[Row] = []
    for run in runs:
        # A launch that ended in no final way speaks for this call only; the next one tries again.
        known = [row for row in rows if row["status"] in FINAL and row not in here] + here
        known = [row for row in known if row["status"] != CUT and speaks_for(row, run, facts)]
        if reason := reason_to_skip(run, known):
            print(f"{run.title}: {reason}", flush=True)
            continue
        left = time_limit_s - (now() - started)
        if left < seconds_needed(run, rows):
            left_out += 1
            print(f"{run.title}: left out, {left:.0f} s are left", flush=True)
            continue
        figures, texts = execute(dataclasses.replace(run, timeout_s=min(left, run.timeout_s)))
        row = row_of(run, figures, texts, facts)
        if left < run.timeout_s and row["status"].startswith("timed out"):
            row["status"] = CUT
            left_out += 1
        rows[:] = [old for old in rows if _place(old) != _place(row)] + [row]
        here.append(row)
        write(rows)
        rate = f", {row['tokens_per_s']:.0f} tokens/s" if row["tokens_per_s"] else ""
        peak = f", {row['peak_mib']:.0f} MiB" if row["peak_mib"] else ""
        said = f"{run.title}: {row['status']}{rate}{peak}, {row['wall_s']:.0f} s"
        print(f"{said} {row['error'] or ''}".rstrip(), flush=True)
    return left_out


def _place(row: Row) -> tuple[Any, ...]:
    return row["T"], row["variant"], row["repeat"]


# --- tables ----------------------------------------------------------------------------------


def kind(row: Row) -> str:
    if FLAG in row["command"]:
        return "flag"
    return "lifted" if row["variant"] == "te-lifted" else "stock"


def _rates(rows: Sequence[Row], num_tokens: int) -> dict[str, float]:
    """variant -> median tokens/s over its repeats of that length that trained."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row["T"] == num_tokens and row["status"] == OK and row["tokens_per_s"]:
            rates.setdefault(row["variant"], []).append(row["tokens_per_s"])
    return {variant: statistics.median(values) for variant, values in rates.items()}


def verdict(rows: Sequence[Row]) -> str:
    """One line: the longest that each variant trains, and tokens/s over the best stock variant.

    Of the variants with the flag the fastest, and ``auto`` where that is another.
    """
    lengths = sorted({row["T"] for row in rows})
    kinds = {row["variant"]: kind(row) for row in rows}
    longest = []
    for variant in kinds:
        mine = [row for row in rows if row["variant"] == variant]
        trained = max((row["T"] for row in mine if row["status"] == OK), default=None)
        ended = [row for row in mine if row["status"] not in (OK, CUT)]
        ended = [row for row in ended if trained is None or row["T"] > trained]
        words = [f"{variant} {trained or 'none'}"]
        if ended:
            first = min(ended, key=lambda row: row["T"])
            words.append(f"({first['status']} at {first['T']})")
        longest.append(" ".join(words))
    ratios = []
    for length in lengths:
        rates = _rates(rows, length)
        ours, stock, lifted = (
            max((name for name in rates if kinds[name] == k), key=rates.__getitem__, default=None)
            for k in ("flag", "stock", "lifted")
        )
        if ours and not stock:
            ratios.append(f"{length} no stock variant trained, {ours} did")
        for flag in dict.fromkeys(name for name in (ours, "auto") if name in rates):
            for other in filter(None, (stock, lifted)):
                ratios.append(f"{length} {rates[flag] / rates[other]:.3f} ({flag} / {other})")
    return (
        f"Longest that trains, of {', '.join(map(str, lengths))} tokens: {', '.join(longest)}. "
        f"Tokens/s with the flag over the fastest without: {'; '.join(ratios) or '–'}."
    )


def markdown(rows: Sequence[Row]) -> str:
    """One line for each (length, variant); where there are repeats, medians and the spread."""
    cell = tables.cell
    head = ["T", "variant", "tokens/s", "over the best stock", "ms per iteration", "peak MiB"]
    head += ["last lm loss", "largest loss difference to unfused", "heads fused"]
    head += ["logits materialised", "", "launches"]
    lines = []
    names = list(dict.fromkeys(row["variant"] for row in rows))
    for length in sorted({row["T"] for row in rows}):
        here = [row for row in rows if row["T"] == length]
        rates = _rates(here, length)
        stock = {row["variant"] for row in here if kind(row) == "stock"}
        best = max((rate for name, rate in rates.items() if name in stock), default=None)
        unfused = next((r for r in here if r["variant"] == "unfused" and r["status"] == OK), None)
        for name in names:
            mine = [row for row in here if row["variant"] == name]
            if not mine:
                continue
            good = [row for row in mine if row["status"] == OK]
            rate = rates.get(name)
            shown = (good or mine)[-1]
            difference = None
            if good and unfused and name != "unfused":
                # Launches of one length may be given different numbers of iterations.
                shared = min(len(shown["loss"]), len(unfused["loss"]))
                difference = largest_relative_difference(shown["loss"][:shared], unfused["loss"][:shared])
            states = list(dict.fromkeys(row["status"] for row in mine))
            lines.append(
                [
                    length,
                    name,
                    _with_spread([row["tokens_per_s"] for row in good]),
                    cell(rate / best if rate and best else None, ".3f"),
                    cell(statistics.median(r["time_ms"] for r in good) if good else None, ".1f"),
                    cell(shown["peak_mib"], ".0f"),
                    cell(shown["loss"][-1] if shown["loss"] else None, ".6f"),
                    cell(difference, ".1e"),
                    cell(shown["heads_fused"]),
                    cell(shown["logits_materialised"]),
                    "trains" if states == [OK] else "; ".join(states),
                    len(mine),
                ]
            )
    return tables.markdown(head, lines, left=2) + "\n"


def _with_spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    middle = f"{statistics.median(values):.0f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.0f}–{max(values):.0f})"


def report(rows: Sequence[Row]) -> str:
    rows = sorted(rows, key=lambda row: row["T"])
    first = rows[0]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    where = f"{first['gpus']} × {first['device']}"
    versions = ", ".join(
        f"{name} {first[key]}"
        for name, key in (
            ("torch", "torch"),
            ("triton", "triton"),
            ("Megatron-LM", "megatron"),
            ("Transformer Engine", "transformer_engine"),
        )
        if first[key]
    )
    plans = [
        f"- {row['T']}, {row['variant']}: {row['plan']}\n"
        for row in rows
        if row["plan"] and row["repeat"] == 0
    ]
    ends = [
        f"- {row['T']}, {row['variant']}: {row['error'] or row['status']}"
        + (f" (raised in `{row['where']}`)\n" if row["where"] else "\n")
        for row in rows
        if row["status"] != OK
    ]
    return (
        f"# Longest sequence that trains: {first['shape']}\n\n"
        f"By `scripts/runs/longest.py` on {where} (TP {first['tp']}), {versions}, package at "
        f"{commits}. Unmodified `pretrain_gpt.py`, {first['dtype']}, micro-batch 1, activation "
        f"recompute: {first['activation_recompute']}. Iteration times are medians after the warm-up; "
        "peak is Megatron's `max allocated`, of everything on the GPU. The JSON file beside this one "
        "has each launch's command line and figures.\n\n"
        f"{verdict(rows)}\n\n{markdown(rows)}"
        + (f"\nWhat the flag chose:\n\n{''.join(plans)}" if plans else "")
        + (f"\nHow the others ended:\n\n{''.join(ends)}" if ends else "")
    )


# --- command line ----------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser("python -m scripts.runs.longest", __doc__ or "")
    parser.usage = "%(prog)s --megatron PATH [options] [--fused-ce-... VALUE] [-- MEGATRON FLAGS]"
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
    add("--repeat", type=whole(most=1000), default=1, metavar="N", help="launches of each")
    add("--recompute", choices=("full", "none"), default="full")
    add("--iterations", type=whole(), help="[20 at 16384 tokens ... 4 at 131072]")
    add("--warmup", type=whole(0), help="of them left out of the time [about a quarter]")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="S", help="start no launch too many")
    add("--launch-timeout", type=seconds, default=300.0, metavar="S", help="[300]")
    add(
        "--preload",
        type=whole(0, 64),
        default=0,
        metavar="N",
        help="let the next N launches load their modules while one trains [0]",
    )
    add("--name", default="longest-sequence", help="in the names of the results")
    add("--out", type=Path, help="the JSON file, read first where it exists")
    add("--logs", type=Path, default=Path("build/longest_sequence"), help="folder of the logs")
    add("--dry-run", action="store_true", help="print the launches and their cost")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; ``fused_ce`` and ``megatron_args`` hold the flags that are passed on."""
    own = list(argv)
    end = own.index("--") if "--" in own else len(own)
    options, fused_ce = _parser().parse_known_args(own[:end])
    options.fused_ce, options.megatron_args = fused_ce, own[end + 1 :]
    plugin_options(fused_ce)
    if {FLAG, "--fused-ce-strategy"} & {word.partition("=")[0] for word in fused_ce}:
        raise UsageError("the flag and its strategy are chosen by --variants")
    options.tp = options.tp or options.gpus
    if options.gpus % options.tp:
        raise UsageError(f"--tp {options.tp} does not divide --gpus {options.gpus}")
    return options


def plugin_options(flags: Sequence[str]) -> None:
    """Refuse flags that the package's own parser would refuse in the launch."""
    parser = Parser("longest", add_help=False)
    _, unknown = add_arguments(parser).parse_known_args(list(flags))
    if unknown:
        raise UsageError(f"unknown arguments: {shlex.join(unknown)}")


def plan(options: argparse.Namespace, checkout: Checkout) -> list[LongRun]:
    """Every launch, in order."""
    if checkout.version < (0, 16):
        raise UsageError("Megatron-LM 0.15 has no --log-memory-interval: give a checkout of 0.16 or newer")
    own = launches.named_flags(options.variant)
    known, chosen = VARIANTS | own, [*options.variants, *own]
    wanted = in_order(chosen, options.lengths, options.repeat)
    if options.only:
        wanted = []
        for text in options.only:
            name, _, length = text.rpartition(":")
            if not name or not length.isdigit():
                raise UsageError(f"--only takes VARIANT:T, got {text!r}")
            wanted += [(name, int(length), repeat) for repeat in range(options.repeat)]
        wanted.sort(key=lambda launch: launch[2])  # stable: repeats alternate
    runs = []
    for name, length, repeat in wanted:
        if name not in known:
            raise UsageError(f"no variant {name!r}; there are {', '.join(known)}")
        runs.append(_run(options, checkout, name, shlex.split(known[name]), length, repeat))
    return runs


def _run(
    options: argparse.Namespace,
    checkout: Checkout,
    name: str,
    flags: list[str],
    length: int,
    repeat: int,
) -> LongRun:
    iterations, warmup = default_iterations(length)
    if options.iterations is not None:
        iterations = options.iterations
        warmup = max(1, iterations // 4) if iterations > 1 else 0
    if options.warmup is not None:
        warmup = options.warmup
    if not 0 <= warmup < iterations:
        raise UsageError(f"--warmup {warmup} leaves none of {iterations} iterations to measure")
    if FLAG in flags:
        flags = [*flags, *options.fused_ce]
        plugin_options(flags)
    sequence_parallel = options.tp > 1 and not options.no_sequence_parallel
    args = script_args(
        MODELS[options.model],
        length,
        iterations=iterations,
        gpus=options.gpus,
        tp=options.tp,
        sequence_parallel=sequence_parallel,
        recompute=options.recompute == "full",
        device=options.device,
    )
    case = launches.Case(
        f"{length}-{repeat}", "pretrain_gpt.py", options.gpus, [*args, *options.megatron_args]
    )
    return LongRun(
        checkout,
        MODELS[options.model].name,
        case,
        name,
        tuple(flags),
        options.device,
        options.launch_timeout,
        shape=MODELS[options.model],
        num_tokens=length,
        repeat=repeat,
        iterations=iterations,
        warmup=warmup,
        num_gpus=options.gpus,
        tp=options.tp,
        sequence_parallel=sequence_parallel,
        recompute=options.recompute == "full",
    )


def facts_of(checkout: Checkout, words: Sequence[str]) -> dict[str, Any]:
    """Where the figures come from: device, versions, commit."""
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    facts = results.made_by(results.device_name(), ["scripts.runs.longest", *words])
    facts["megatron"] = launches.full_version(checkout.path)
    return {**facts, "alloc_conf": allocator}


def write_results(rows: list[Row], out: Path, facts: Row) -> None:
    """Both files, each complete at any time."""
    results.write(out, rows, {key: facts[key] for key in results.MADE_BY})
    results.write_whole(out.with_suffix(".md"), report(rows))


def read_rows(out: Path, setting: Row) -> list[Row]:
    """The rows of an earlier call, none where there is no file.

    Raises:
        UsageError: where they are of another setting (`setting_of`), or no rows of this program.
    """
    if not out.is_file():
        return []
    try:
        rows = [dict.fromkeys(KEYS) | row for row in results.rows(out, ("T", "variant", "loss"))]
        for row in rows:
            row["loss"] = [float(loss) for loss in row["loss"] or ()]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{out} holds no results of this program: {error}") from error
    for row in rows:
        for key, value in setting.items():
            if row[key] != value:
                raise UsageError(
                    f"{out} holds rows of {key} {row[key]!r}, this call is {value!r}: "
                    "give another --name or --out"
                )
    return rows


@command("longest")
def main(words: list[str]) -> int:
    began = time.monotonic()
    options = parse(words)
    checkout = Checkout.at(options.megatron)
    runs = plan(options, checkout)
    if options.dry_run:
        for run in runs:
            print(f"# {run.title}: about {run.estimate_s():.0f} s\n{run.command}")
        total = sum(run.estimate_s() for run in runs)
        print(f"# {len(runs)} launches, about {total:.0f} s if all of them train")
        return 0
    folder = writable_folder(options.logs.resolve())
    facts = facts_of(checkout, words)
    out = options.out or results.default_path(RESULTS, facts["device"], options.name)
    rows = read_rows(writable_file(out), setting_of(runs[0], facts))
    launcher = Launcher(runs, folder, options.preload)

    def execute(run: LongRun) -> tuple[Figures, list[str]]:
        figures, _ = launcher.execute(run)
        return figures, log_texts(folder / run.folder_name)

    with contextlib.closing(launcher):
        left_out = run_all(
            runs,
            rows,
            facts,
            time_limit_s=options.time_limit - (time.monotonic() - began),
            execute=execute,
            write=lambda rows: write_results(rows, out, facts),
        )
    if rows:
        print(f"\n{markdown(rows)}\n{verdict(rows)}")
    failed = [row for row in rows if row["status"] not in (*FINAL, CUT)]
    for row in failed:
        name = f"{row['variant']}, {row['T']} tokens"
        print(f"longest: {name}: {row['status']} {row['error']}", file=sys.stderr)
    return 1 if failed else 3 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
