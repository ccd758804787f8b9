"""What the benchmark is asked for: shapes, strategies, presets, the command line. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import NO_LIMIT, Parser, UsageError, number, seconds, whole
from megatron_fused_ce.config import LOGITS_BACKEND_CHOICES, STRATEGY_CHOICES, FusedCEConfig
from megatron_fused_ce.plan.named_models import MODELS, head_sizes, known_name
from megatron_fused_ce.scripts.lib.results import RESULTS

#: Name -> (H, vocabulary) of a head.
SHAPES = {name: head_sizes(name) for name in MODELS} | {"tiny": (64, 512)}
PACKAGE = "megatron_fused_ce"
TRAINED, ALIKE = "trained", "random, as wide"
PEERS, OVER_RANKS = ("torch-compile", "liger", "liger-large-chunks", "cce", "cce-exact"), ("verl-tp",)
#: What a preset is short for; words behind it override these. Cheap cells first: a time limit cuts the end.
PRESETS = {
    "reach": "--shapes llama-3-8b:8192,32768 qwen3-1.7b:32768 gemma-2-2b:32768 llama-3-70b:8192,32768"
    " llama-3-8b:131072 qwen3-1.7b:131072",
    "small": f"--shapes {' '.join(f'{H}x{V}/rank' for H in (1024, 2048) for V in (16032, 32064, 64128))}"
    " --tokens 1024 2048 4096 --strategies auto store grad_in_forward"
    " --sequence-parallel on --blocks 45 --sample-ms 15",
    "moe": "--shapes qwen3-30b-a3b gpt-oss-20b deepseek-v3 --tokens 4096 16384"
    " --strategies auto store grad_in_forward --peers torch-compile --blocks 9",
    "tp": "--shapes llama-3-8b:8192,32768 llama-3-70b:32768 --sequence-parallel both --sample-ms 40",
    "trained": "--shapes 1024x131072:16384 --strategies auto store grad_in_forward recompute --blocks 12",
    "options": "--strategies store",
    "rl": "--shapes qwen2.5-7b:32768 --strategies store recompute --peers verl-tp",
    "distill": "--shapes llama-3-8b:8192,32768 llama-3.2-1b:8192 --peers torch-compile liger"
    " --strategies store grad_in_forward grad_in_forward:4096 recompute store/gemm_rows",
    "commits": "--shapes 1024x32064/rank:4096 4096x128256/rank:32768 --strategies store grad_in_forward"
    " --blocks 15",
}
ON_ONE_RANK = ("options", "rl", "distill")


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
    operands: Path | None = None  # file of scripts.bench.trained; None: random ones
    origin: str = ""  # `TRAINED`, or `ALIKE`: of that file the labels and standard deviations alone

    @staticmethod
    def of(shape: str, num_tokens: int, **more: Any) -> Cell:
        name, _, of_a_rank = shape.partition("/")
        hidden_size, vocab = SHAPES.get(name) or map(int, name.split("x"))
        vocab *= world_size() if of_a_rank else 1
        return Cell(f"{hidden_size}x{vocab}" if of_a_rank else name, num_tokens, hidden_size, vocab, **more)

    def __str__(self) -> str:
        sizes = f"{self.shape} T={self.num_tokens} H={self.hidden_size} V={self.vocab}"
        return sizes + " SP" * self.sequence_parallel + f", {self.origin}" * bool(self.origin)


def shape_name(text: str) -> str:
    """A word of ``--shapes``: a name of :data:`SHAPES`, HxV or HxV/rank; behind a colon its own tokens."""
    name, colon, tokens = text.partition(":")
    size = r"[1-9]\d{0,8}"
    if colon and not re.fullmatch(rf"{size}(,{size})*", tokens):
        raise argparse.ArgumentTypeError(f"expected numbers of tokens behind the colon, got {text[:40]!r}")
    if re.fullmatch(rf"{size}x{size}(/rank)?", name):
        return text
    try:
        return known_name(name, SHAPES) + colon + tokens
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_strategy(text: str) -> dict[str, Any]:
    """What ``NAME[:C][/BACKEND][/MERGE]`` asks for, as fields of `FusedCEConfig`. Raises UsageError."""
    rest, *ways = text.split("/")
    name, colon, tokens = rest.partition(":")
    asked: dict[str, Any] = {"strategy": name}
    asked |= {"logits_backend" if way in LOGITS_BACKEND_CHOICES else "merge": way for way in ways}
    try:
        if len(asked) <= len(ways):
            raise ValueError("two backends, or two merges")
        if colon:
            asked["chunk_tokens"] = int(tokens) if tokens.isdigit() else tokens
        FusedCEConfig(**asked)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from None
    return asked


def parse_arguments(text: str, words: Sequence[str]) -> argparse.Namespace:
    """The options, and their ``cells``."""
    parser = Parser("python -m scripts.bench", text)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="what one set of figures needs")
    add("--shapes", nargs="+", type=shape_name, metavar="NAME[:T,T]", default=["llama-3-8b"],
        help=f"HxV, HxV/rank, {', '.join(SHAPES)}; behind a colon its own tokens")  # fmt: skip
    add("--tokens", nargs="+", type=whole(), default=[8192], help="T of shapes without their own [8192]")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, not to measure")
    add("--strategies", nargs="+", default=["store", "grad_in_forward", "recompute"],
        metavar="NAME[:C][/BACKEND][/MERGE]", help=f"of {', '.join(STRATEGY_CHOICES)}")  # fmt: skip
    add("--operands", type=Path, metavar="FILE", help="of scripts.bench.trained; then random ones beside")
    add("--old", type=Path, metavar="CHECKOUT", help="what preset commits compares with")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--peers", nargs="*", choices=(*PEERS, *OVER_RANKS), metavar="NAME", default=(),
        help=f"all that know so many ranks, or of {', '.join(PEERS + OVER_RANKS)}")  # fmt: skip
    add("--skip", nargs="+", metavar="WORD", default=[], help="leave out rows that begin so")
    add("--blocks", type=whole(most=10**6), default=7, help="interleaved blocks; an interval needs 6 [7]")
    add("--sample-ms", type=number(), default=70.0, help="a turn runs at least so long [70]")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="SECONDS", help="start no cell after this")
    add("--sequence-parallel", nargs="?", const="on", default="off", choices=("on", "off", "both"),
        help="the hidden states in R parts; 'both': each cell with and without")  # fmt: skip
    add("--name", help=f"write DATE-DEVICE-NAME.json and .md to {RESULTS}")
    add("--out", type=Path, help="or write this JSON file and the .md beside it")
    given = parser.parse_args(words)  # the preset's name
    given = parser.parse_args([*PRESETS.get(given.preset, "").split(), *words])
    if given.peers == []:
        given.peers = PEERS if world_size() == 1 else OVER_RANKS
    try:
        given.cells = cells_of(given)
        for name in given.strategies:
            parse_strategy(name)
    except ValueError as error:
        parser.error(str(error))
    return given


def cells_of(given: argparse.Namespace) -> list[Cell]:
    """Of each shape its own tokens or those of ``--tokens``; over several ranks with sequence parallelism,
    without, or both; with operands of a file those, and random ones."""
    for preset, option, file in (("trained", "operands", ""), ("commits", "old", f"{PACKAGE}/__init__.py")):
        if (path := getattr(given, option)) is None and given.preset == preset:
            raise ValueError(f"--preset {preset} needs --{option}")
        if path is not None and not (path / file).is_file():
            raise ValueError(f"--{option}: {path / file} is no file")
    size, found = world_size(), list[Cell]()
    if size > 1 and given.preset in ON_ONE_RANK:
        raise ValueError(f"--preset {given.preset} knows no tensor parallelism: start it without torchrun")
    modes = {"on": (True,), "both": (True, False)}.get(given.sequence_parallel * (size > 1), (False,))
    for word in given.shapes:
        shape, _, own = word.partition(":")
        tokens = map(int, own.split(",")) if own else given.tokens
        for T, mode, origin in product(tokens, modes, (TRAINED, ALIKE) if given.operands else ("",)):
            found.append(Cell.of(shape, T, sequence_parallel=mode, operands=given.operands, origin=origin))
            if T % size or found[-1].vocab % size:
                raise ValueError(f"{found[-1]} does not divide over {size} ranks")
    return found
