"""What the benchmark is asked for: shapes, strategies, presets, the command line. Imports no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_fused_ce.command_line import NO_LIMIT, Parser, UsageError, number, require_gpus, seconds, whole
from megatron_fused_ce.config import LOGITS_BACKEND_CHOICES, MERGE_CHOICES, STRATEGY_CHOICES
from megatron_fused_ce.estimate.named_models import MODELS, head_sizes, known_name
from megatron_fused_ce.scripts.lib.results import RESULTS

#: name -> (H, vocabulary) of a head: the named models, and some of which only these two sizes are known.
SHAPES = {name: head_sizes(name) for name in MODELS} | {
    "gemma-2-9b-like": (3584, 256000),
    "gpt-oss-like": (2880, 201088),
    "tiny": (64, 512),
}
DTYPES = ("bfloat16", "float16", "float32")
#: name -> matrix products of a step
ROOFS = {"roof": 3, "roof-4": 4}

# --- shapes and ranks ------------------------------------------------------------------------


def shape_name(text: str) -> str:
    """A name of :data:`SHAPES` on a command line."""
    try:
        return known_name(text, SHAPES)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_ranks(tp: int | None, words: Sequence[str]) -> None:
    """Have ``tp`` ranks (None: as many as there are).

    Returns at once where there are so many; without torchrun this process becomes
    ``torchrun --standalone --nproc-per-node tp -m megatron_fused_ce.scripts.bench words`` and never
    returns. Raises UsageError where torchrun started another number.
    """
    if tp is None or tp == 1 == world_size():
        return
    if "WORLD_SIZE" in os.environ:
        if world_size() != tp:
            raise UsageError(f"--tp {tp} asks for {tp} ranks, torchrun started {world_size()}")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too, with a warning
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    sys.stdout.flush()
    module = ["-m", "megatron_fused_ce.scripts.bench"]
    os.execv(sys.executable, [sys.executable, *launch, *module, *words])


@dataclass(frozen=True)
class Cell:
    """One problem of the run."""

    shape: str  # name in SHAPES, or "H x V"
    num_tokens: int
    hidden_size: int
    vocab: int  # over all ranks
    sequence_parallel: bool = False

    @staticmethod
    def of(shape: str, num_tokens: int) -> Cell:
        hidden_size, vocab = SHAPES[shape]
        return Cell(shape, num_tokens, hidden_size, vocab)

    @staticmethod
    def by_size(num_tokens: int, hidden_size: int, vocab: int) -> Cell:
        return Cell(f"{hidden_size}x{vocab}", num_tokens, hidden_size, vocab)

    def __str__(self) -> str:
        sizes = f"{self.shape} T={self.num_tokens} H={self.hidden_size} V={self.vocab}"
        return sizes + (" SP" if self.sequence_parallel else "")


# --- strategies ------------------------------------------------------------------------------


def parse_strategy(text: str) -> dict[str, Any]:
    """What ``NAME[:C][/PASS][/MERGE]`` asks for, as fields of `FusedCEConfig`.

    Raises UsageError where it does not fit, saying what there is.
    """
    rest, *ways = text.split("/")
    name, colon, tokens = rest.partition(":")
    if name not in STRATEGY_CHOICES:
        raise UsageError(f"no strategy {name!r}; there are {', '.join(STRATEGY_CHOICES)}")
    if colon and (not tokens.isdigit() or int(tokens) < 1):
        raise UsageError(f"chunk tokens of {text!r} must be a whole number of 1 or more")
    asked: dict[str, Any] = {"strategy": name, "chunk_tokens": int(tokens) if tokens else None}
    for way in ways:
        if way in LOGITS_BACKEND_CHOICES and not asked.keys() & {"logits_backend", "merge"}:
            asked["logits_backend"] = way
        elif way in MERGE_CHOICES and "merge" not in asked:
            asked["merge"] = way
        else:
            known = f"logits backends are {', '.join(LOGITS_BACKEND_CHOICES)}, merges "
            known += ", ".join(MERGE_CHOICES)
            raise UsageError(f"{text!r} does not fit NAME[:C][/PASS][/MERGE]: {known}")
    return asked


# --- presets ---------------------------------------------------------------------------------

#: What runs where no strategy is named.
STRATEGIES = ["store", "grad_in_forward", "recompute"]
BOTH, TP_HEADS = ("llama-3-8b", "qwen3-1.7b"), [("llama-3-8b", 8192), ("llama-3-8b", 32768)]


def in_chunks(*sizes: int) -> list[str]:
    """Each strategy in chunks of so many tokens."""
    return [f"{name}:{size}" for name in STRATEGIES for size in sizes]


#: name -> cells, as (shape, T) or (T, H, V of a rank), and options where the command line names none.
PRESETS: dict[str, dict[str, Any]] = {
    # Cheap ones first: a time limit cuts the end.
    "reach": {
        "cells": [
            *product(("llama-3-8b",), (8192, 32768)),
            *product(("qwen3-1.7b", "gemma-2-2b"), (32768,)),
            *product(("llama-3-70b",), (8192, 32768)),
            *product(BOTH, (131072,)),
        ],
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
    # What pins a device's tokens per chunk.
    "chunks": {
        "cells": list(product(BOTH, (32768,))),
        "strategies": in_chunks(2048, 4096, 8192, 16384, 32768),
        "megatron": False,
    },
    # One GPU, less than 1 GiB above inputs and gradients; the roof runs in slices.
    "million": {
        "cells": [("llama-3-8b", 1048576)],
        "strategies": ["recompute:2048"],
        "blocks": 1,
        "megatron": False,
    },
    # What an option of the loss costs, and where a step's time goes.
    "options": {"strategies": ["store"]},
    "profile": {"strategies": ["roof", "store", "grad_in_forward", "recompute", "megatron-te"]},
    # Log-probabilities and entropy beside verl's kernel, and over the ids that sampling kept.
    "rl": {"cells": [("qwen2.5-7b", 32768)], "strategies": ["store", "recompute"]},
    # Divergences from a teacher over four bare GEMMs, beside ModelOpt's formula, TRL and Liger.
    "distill": {
        "cells": [("llama-3-8b", 8192), ("llama-3-8b", 32768), ("llama-3.2-1b", 8192)],
        "strategies": ["store", "grad_in_forward", "grad_in_forward:4096", "recompute", "store/gemm_rows"],
    },
    # Over ranks, in little time (about a minute a cell on four H200s) ...
    "tp": {"cells": [*TP_HEADS, ("llama-3-70b", 32768)], "sequence_parallel": "both", "lean": True},
    # ... and with the other chunks, and blocks enough to publish.
    "tp-reach": {
        "cells": [*TP_HEADS, ("llama-3-70b", 32768)],
        "sequence_parallel": "both",
        "strategies": [*STRATEGIES, *in_chunks(4096, 16384)],
    },
}
DEFAULTS: dict[str, Any] = {"cells": [], "blocks": 5, "sample_ms": 100.0, "skip": []}
DEFAULTS |= {"megatron": True, "sequence_parallel": "off", "strategies": STRATEGIES}
LEAN: dict[str, Any] = {"blocks": 3, "sample_ms": 80.0}
#: --sequence-parallel's word -> whether each cell runs with it.
SEQUENCE_PARALLEL = {"on": (True,), "off": (False,), "both": (True, False)}


def parse_arguments(text: str, words: Sequence[str]) -> argparse.Namespace:
    """The options, with those of the preset and the defaults where the command line names none."""
    parser = Parser("python -m scripts.bench", text)
    add = parser.add_argument
    size, count = whole(), whole(most=10**6)
    add("--preset", choices=PRESETS, help="cells and options of one set of figures")
    add("--shapes", nargs="+", type=shape_name, metavar="NAME", help=", ".join(SHAPES))
    add("--shape", nargs=2, type=size, action="append", metavar=("H", "V"), help="a shape by size")
    add("--tokens", nargs="+", type=size, help="T of each cell (default 8192)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, not to measure")
    add(
        "--strategies",
        nargs="+",
        metavar="NAME[:C][/PASS][/MERGE]",
        help=f"of {', '.join(STRATEGY_CHOICES)}; C tokens a chunk, logits backend scaled_exp or gemm_rows, "
        f"merge of statistics {' or '.join(MERGE_CHOICES)} (default: all but auto)",
    )
    add("--memory-mb", type=size, help="budget of strategy auto")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--wgrad-accumulator", choices=("main_grad", "returned"), default="main_grad")
    add("--no-megatron", dest="megatron", action="store_const", const=False)
    add("--peers", nargs="*", metavar="NAME", help="every peer, or those named")
    add("--skip", nargs="+", metavar="ROW", help="leave these rows out")
    add("--options", nargs="+", metavar="ROW", help="these rows alone, as they are called or up to a comma")
    add("--blocks", type=count, help="interleaved blocks (default 5)")
    add("--sample-ms", type=number(), help="a turn runs at least so long (default 100)")
    add("--lean", action="store_const", const=True, help="quicker: 3 blocks of 80 ms")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="SECONDS", help="start no cell after this")
    add("--tp", type=whole(most=4096), metavar="R", help="ranks: torchrun's, or started here")
    add("--ghost", metavar="MODULE:BACKEND", help="this process is rank 0 of --tp, over such a communicator")
    add(
        "--sequence-parallel",
        nargs="?",
        const="on",
        choices=SEQUENCE_PARALLEL,
        help="the hidden states in R parts; 'both': each cell with and without",
    )
    add("--steps", type=count, default=3, help="of a profile (3)")
    add("--name", help="write DATE-DEVICE-NAME.json and .md to --results-dir")
    add("--results-dir", type=Path, default=RESULTS, help="[%(default)s]")
    add("--out", type=Path, help="or write this JSON file and the .md beside it")
    add("--render", type=Path, metavar="FILE.json", help="render the page of a result again")
    given = parser.parse_args(words)
    preset = PRESETS.get(given.preset, {})
    lean = LEAN if given.lean or preset.get("lean") else {}
    for name, value in (DEFAULTS | lean | preset).items():
        if getattr(given, name, None) is None:
            setattr(given, name, value)
    try:
        given.cells = cells_of(given, given.cells)
        given.strategies = list(dict.fromkeys(given.strategies))
        for name in given.strategies:
            if given.preset != "profile":  # which has roofs and Megatron's paths among them
                parse_strategy(name)
    except ValueError as error:
        parser.error(str(error))
    return given


def require_device(given: argparse.Namespace) -> None:
    """Raises UsageError where --device cuda finds too few GPUs; before torch is imported."""
    if given.device == "cuda":
        needed = 1 if given.ghost else max(given.tp or 1, world_size())
        require_gpus(needed, "--device cpu tries it without, slowly")


def cells_of(given: argparse.Namespace, preset: Sequence[tuple[Any, ...]]) -> list[Cell]:
    """``--preset``'s cells (those of ``--shapes`` and ``--tokens`` alone), or their product.

    ``--shape`` names other cells than the preset's, and ``--shapes`` where the preset's have no names. Over
    several ranks each with sequence parallelism, without, or both.
    """
    size = given.tp or world_size()
    named, tokens = given.shapes or [], given.tokens or [8192]
    if preset and not given.shape and not (named and len(preset[0]) == 3):
        own = [Cell.of(*a) if len(a) == 2 else Cell.by_size(a[0], a[1], a[2] * size) for a in preset]
        own = [cell for cell in own if not named or cell.shape in named]
        cells = [cell for cell in own if not given.tokens or cell.num_tokens in given.tokens]
    else:
        named = named if named or given.shape else ["llama-3-8b"]
        cells = [Cell.of(shape, T) for shape in named for T in tokens]
        cells += [Cell.by_size(T, H, V) for H, V in given.shape or [] for T in tokens]
    if not cells:
        raise ValueError("the preset has no cell of these shapes and tokens")
    for cell in cells:
        if cell.num_tokens % size or cell.vocab % size:
            raise ValueError(f"{cell} does not divide over {size} ranks")
    modes = SEQUENCE_PARALLEL[given.sequence_parallel] if size > 1 else (False,)
    return [replace(cell, sequence_parallel=mode) for cell in cells for mode in modes]
