"""What the benchmark is asked for: shapes, strategies, presets, the command line. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import NO_LIMIT, Parser, UsageError, number, seconds, whole
from megatron_fused_ce.config import LOGITS_BACKEND_CHOICES, MERGE_CHOICES, STRATEGY_CHOICES, FusedCEConfig
from megatron_fused_ce.plan.named_models import MODELS, head_sizes, known_name
from megatron_fused_ce.scripts.lib.results import RESULTS

#: name -> (H, vocabulary) of a head: the named models, and some of which only these two sizes are known.
SHAPES = {name: head_sizes(name) for name in MODELS} | {
    "gemma-2-9b-like": (3584, 256000),
    "gpt-oss-like": (2880, 201088),
    "tiny": (64, 512),
}
DTYPES = ("bfloat16", "float16", "float32")

# --- shapes and ranks ------------------------------------------------------------------------


def shape_name(text: str) -> str:
    """A name of :data:`SHAPES`, or HxV, on a command line."""
    try:
        return text if re.fullmatch(r"[1-9]\d{0,8}x[1-9]\d{0,8}", text) else known_name(text, SHAPES)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Cell:
    """One problem of the run."""

    shape: str  # name in SHAPES, or HxV
    num_tokens: int
    hidden_size: int
    vocab: int  # over all ranks
    sequence_parallel: bool = False
    operands: Path | None = None  # scripts.bench.trained's file; None: random ones
    alike: bool = False  # only their standard deviations and labels from there

    @staticmethod
    def of(shape: str, num_tokens: int) -> Cell:
        hidden_size, vocab = SHAPES.get(shape) or map(int, shape.split("x"))
        return Cell(shape, num_tokens, hidden_size, vocab)

    def __str__(self) -> str:
        sizes = f"{self.shape} T={self.num_tokens} H={self.hidden_size} V={self.vocab}"
        return (
            sizes + (" SP" if self.sequence_parallel else "") + (f", {self.origin}" if self.operands else "")
        )

    @property
    def origin(self) -> str | None:
        """Which operands these are, of those that a file says more about."""
        return None if self.operands is None else "random, as wide" if self.alike else "trained"


# --- strategies ------------------------------------------------------------------------------


#: The op is given no token weights, which `auto` and `grad_in_forward` otherwise are.
UNWEIGHTED = "/unweighted"


def parse_strategy(text: str) -> dict[str, Any]:
    """What ``NAME[:C][/PASS][/MERGE]`` asks for, as fields of `FusedCEConfig`. Raises UsageError."""
    rest, *ways = text.removesuffix(UNWEIGHTED).split("/")
    name, colon, tokens = rest.partition(":")
    asked: dict[str, Any] = {"strategy": name}
    if colon:
        asked["chunk_tokens"] = int(tokens) if tokens.isdigit() else tokens
    for way in ways:
        field = "logits_backend" if way in LOGITS_BACKEND_CHOICES else "merge"
        if field in asked:
            raise UsageError(f"{text}: two of {field}")
        asked[field] = way
    try:
        FusedCEConfig(**asked)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from None
    return asked


# --- presets ---------------------------------------------------------------------------------

#: What runs where no strategy is named.
STRATEGIES = ["store", "grad_in_forward", "recompute"]
BOTH = ("llama-3-8b", "qwen3-1.7b")

#: name -> cells, as (shape, T) or (T, H, V of a rank), and options where the command line names none.
PRESETS: dict[str, dict[str, Any]] = {
    # Cheap ones first: a time limit cuts the end.
    "reach": {
        "cells": [
            *product(("llama-3-8b",), (8192, 32768)),
            *product(("qwen3-1.7b", "gemma-2-2b"), (32768,)),
            *product(("llama-3-70b",), (8192, 32768)),
            *product(BOTH, (131072,)),
        ]
    },
    # Where launches and the host count.
    "small": {
        "cells": list(product((1024, 2048, 4096), (1024, 2048), (16032, 32064, 64128))),
        "strategies": ["auto", "store", "grad_in_forward"],
        "skip": ["megatron-te-overwrite"],
        "sequence_parallel": "on",
        "blocks": 45,
        "sample_ms": 15.0,
    },
    # What an option of the loss costs, and where a step's time goes.
    "options": {"strategies": ["store"]},
    "profile": {"skip": ["megatron-unfused", "megatron-native", "megatron-te-overwrite"]},
    # Log-probabilities and entropy beside verl's kernel, and over the ids that sampling kept.
    "rl": {"cells": [("qwen2.5-7b", 32768)], "strategies": ["store", "recompute"]},
    # Divergences from a teacher over four bare GEMMs, beside ModelOpt's formula, TRL and Liger.
    "distill": {
        "cells": [("llama-3-8b", 8192), ("llama-3-8b", 32768), ("llama-3.2-1b", 8192)],
        "strategies": ["store", "grad_in_forward", "grad_in_forward:4096", "recompute", "store/gemm_rows"],
    },
    # Operands of a model that learned real text, with --operands, and random ones of their deviation.
    "trained": {
        "cells": [("1024x131072", 16384)],
        "strategies": ["auto", f"auto{UNWEIGHTED}", *STRATEGIES],
        "blocks": 12,
        "sample_ms": 60.0,
    },
    # Over ranks, in little time: about a minute a cell on four H200s.
    "tp": {
        "cells": [*product(BOTH[:1], (8192, 32768)), ("llama-3-70b", 32768)],
        "sequence_parallel": "both",
        "blocks": 3,
        "sample_ms": 80.0,
    },
}
DEFAULTS: dict[str, Any] = {"cells": [], "blocks": 5, "sample_ms": 100.0, "skip": []}
DEFAULTS |= {"megatron": True, "sequence_parallel": "off", "strategies": STRATEGIES}
#: --sequence-parallel's word -> whether each cell runs with it.
SEQUENCE_PARALLEL = {"on": (True,), "off": (False,), "both": (True, False)}


def parse_arguments(text: str, words: Sequence[str]) -> argparse.Namespace:
    """The options, with those of the preset and the defaults where the command line names none."""
    parser = Parser("python -m scripts.bench", text)
    add = parser.add_argument
    size, count = whole(), whole(most=10**6)
    add("--preset", choices=PRESETS, help="cells and options of one set of figures")
    add("--shapes", nargs="+", type=shape_name, metavar="NAME", help=f"HxV, {', '.join(SHAPES)}")
    add("--tokens", nargs="+", type=size, help="T of each cell (default 8192)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, not to measure")
    add(
        "--strategies",
        nargs="+",
        metavar="NAME[:C][/PASS][/MERGE]",
        help=f"of {', '.join(STRATEGY_CHOICES)}; C tokens a chunk, logits backend scaled_exp or gemm_rows, "
        f"merge of statistics {' or '.join(MERGE_CHOICES)}, {UNWEIGHTED} (default: all but auto)",
    )
    add("--operands", type=Path, metavar="FILE", help="of scripts.bench.trained; then random ones beside")
    add("--memory-mb", type=size, help="budget of strategy auto")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--no-megatron", dest="megatron", action="store_const", const=False)
    add("--peers", nargs="*", metavar="NAME", help="every peer, or those named")
    add("--skip", nargs="+", metavar="ROW", help="leave these rows out")
    add("--options", nargs="+", metavar="ROW", help="these rows alone, as they are called or up to a comma")
    add("--blocks", type=count, help="interleaved blocks (default 5)")
    add("--sample-ms", type=number(), help="a turn runs at least so long (default 100)")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="SECONDS", help="start no cell after this")
    add(
        "--sequence-parallel",
        nargs="?",
        const="on",
        choices=SEQUENCE_PARALLEL,
        help="the hidden states in R parts; 'both': each cell with and without",
    )
    add("--steps", type=count, default=3, help="of a profile (3)")
    add("--name", help=f"write DATE-DEVICE-NAME.json and .md to {RESULTS}")
    add("--out", type=Path, help="or write this JSON file and the .md beside it")
    given = parser.parse_args(words)
    preset = PRESETS.get(given.preset, {})
    for name, value in (DEFAULTS | preset).items():
        if getattr(given, name, None) is None:
            setattr(given, name, value)
    try:
        given.cells = cells_of(given, given.cells)
        given.strategies = list(dict.fromkeys(given.strategies))
        for name in given.strategies:
            parse_strategy(name)
    except ValueError as error:
        parser.error(str(error))
    return given


def cells_of(given: argparse.Namespace, preset: Sequence[tuple[Any, ...]]) -> list[Cell]:
    """``--preset``'s cells, those of ``--shapes`` and ``--tokens`` alone; where it has none, their product.

    Over several ranks each with sequence parallelism, without, or both.
    """
    size = world_size()
    if given.preset == "trained" and given.operands is None:
        raise ValueError("--preset trained needs --operands, a file of python -m scripts.bench.trained")
    if given.operands is not None and not given.operands.is_file():
        raise ValueError(f"--operands {given.operands} is no file")
    named, tokens = given.shapes or ["llama-3-8b"], given.tokens or [8192]
    cells = [Cell.of(a[0], a[1]) if len(a) == 2 else Cell.of(f"{a[1]}x{a[2] * size}", a[0]) for a in preset]
    cells = [cell for cell in cells if not given.shapes or cell.shape in named]
    cells = [cell for cell in cells if not given.tokens or cell.num_tokens in tokens]
    cells = cells or [Cell.of(shape, T) for shape in named for T in tokens]
    for cell in cells:
        if cell.num_tokens % size or cell.vocab % size:
            raise ValueError(f"{cell} does not divide over {size} ranks")
    modes = SEQUENCE_PARALLEL[given.sequence_parallel] if size > 1 else (False,)
    cells = [replace(cell, sequence_parallel=mode) for cell in cells for mode in modes]
    alike = (False, True) if given.operands else (False,)
    return [replace(cell, operands=given.operands, alike=kind) for cell in cells for kind in alike]
