"""The sweep's command line. What does not fit is one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from benchmark_problem import DTYPES, world_size
from compare_pretrain import REPOSITORY
from sweep_megatron import Launches

from megatron_fused_ce.config import STRATEGY_CHOICES

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STRATEGIES = [name for name in STRATEGY_CHOICES if name != "auto"]
#: Launches take a minute or so each: fewer of them.
CHUNKS, LAUNCHED_CHUNKS = [1, 2, 4, 8, 16, 32], [1, 4, 16]


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, on the first rank, and ends with exit code 2."""

    rank = 0

    def error(self, message: str) -> NoReturn:
        if self.rank == 0:
            print(f"sweep_chunks: {message}", file=sys.stderr)
        raise SystemExit(2)


def _parser(text: str) -> OneLineParser:
    summary, _, rest = text.partition("\n\n")
    parser = OneLineParser(
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--chunks", type=int, nargs="+", metavar="N", help="[1 2 4 8 16 32; of launches 1 4 16]")
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="[all]")
    add(
        "--tolerance",
        type=float,
        default=1.0,
        metavar="PERCENT",
        help="recommend the smallest peak among those that take so much longer than the fastest [1]",
    )
    add("--fresh", action="store_true", help="measure again what an earlier sweep left")
    add("--out", type=Path, default=REPOSITORY / "build" / "sweep")
    head = parser.add_argument_group("the head alone, on one process or under torchrun")
    add = head.add_argument
    add("--tokens", type=int, help="T [2048 on a CPU, 8192 on a GPU]")
    add("--hidden", type=int, help="H [96, 4096]")
    add("--vocab", type=int, help="vocabulary over all ranks [16384, 128256]")
    add("--dtype", choices=list(SHORT_DTYPES), help="[fp32, bf16]")
    add("--sequence-parallel", action="store_true", help="each rank holds its part of the tokens")
    add(
        "--wgrad-accumulator",
        choices=["main_grad", "returned"],
        default="main_grad",
        help="grad_weight is added into an fp32 main_grad, as under Megatron, or returned",
    )
    add("--blocks", type=int, default=3, metavar="N", help="turns of each cell [3]")
    add("--sample-ms", type=float, default=100.0, metavar="MS", help="a turn's least length [100]")
    launches = parser.add_argument_group("launches of Megatron-LM, arguments after --")
    add = launches.add_argument
    add("--through-megatron", metavar="CHECKOUT", help="a Megatron-LM checkout")
    add("--script", default="pretrain_gpt.py", help="[pretrain_gpt.py]")
    add("--nproc", type=int, metavar="N", help="processes of a launch [every GPU; 1 on a CPU]")
    add("--iterations", type=int, default=10, metavar="N", help="of a launch [10]")
    add("--warmup", type=int, default=3, metavar="N", help="of them not timed [3]")
    add("--timeout", type=float, default=900.0, metavar="S", help="of a launch [900]")
    return parser


def parse_arguments(text: str, words: Sequence[str], rank: int) -> argparse.Namespace:
    """``text``: the script's docstring. The result has ``launches`` with ``--through-megatron``, else None.

    Raises UsageError where the checkout or its arguments do not fit, SystemExit for the rest.
    """
    parser = _parser(text)
    parser.rank = rank
    cut = list(words).index("--") if "--" in words else len(words)
    given, after = parser.parse_args(words[:cut]), list(words[cut + 1 :])
    through = given.through_megatron is not None
    given.chunks = sorted(set(given.chunks or (LAUNCHED_CHUNKS if through else CHUNKS)))
    given.strategies = list(dict.fromkeys(given.strategies))
    for name in ("blocks", "iterations", "nproc"):
        value = getattr(given, name)
        if value is not None and value < 1:
            parser.error(f"expected --{name} of at least 1, got {value}")
    for name in ("tolerance", "sample_ms", "timeout", "warmup"):
        if not getattr(given, name) >= 0:
            parser.error(f"expected --{name.replace('_', '-')} of at least 0")
    if given.chunks[0] < 1:
        parser.error(f"expected --chunks of at least 1, got {given.chunks[0]}")
    num_gpus = torch.cuda.device_count()
    needed = given.nproc or 1 if through else world_size()
    if given.device == "auto":
        given.device = "cuda" if num_gpus >= needed else "cpu"
    if given.device == "cuda" and num_gpus < needed:
        parser.error(f"expected {needed} GPUs, found {num_gpus}: use --device cpu or fewer ranks")
    given.launches = None
    if through:
        _check_launches(parser, given, after)
    else:
        _check_head(parser, given, after)
    return given


def _check_launches(parser: OneLineParser, given: argparse.Namespace, after: Sequence[str]) -> None:
    if world_size() > 1:
        parser.error("--through-megatron starts its ranks itself: give --nproc, without torchrun")
    if given.warmup >= given.iterations:
        parser.error(f"expected fewer --warmup than --iterations, got {given.warmup}")
    given.launches = Launches.of(
        given.through_megatron,
        after,
        script=given.script,
        nproc=given.nproc or (torch.cuda.device_count() if given.device == "cuda" else 1),
        device=given.device,
        iterations=given.iterations,
        warmup=given.warmup,
        timeout_s=given.timeout,
    )


def _check_head(parser: OneLineParser, given: argparse.Namespace, after: Sequence[str]) -> None:
    if after:
        parser.error("arguments after -- are those of --through-megatron CHECKOUT")
    on_gpu, size = given.device == "cuda", world_size()
    defaults = {"tokens": (2048, 8192), "hidden": (96, 4096), "vocab": (16384, 128256)}
    for name, (on_cpu, default_on_gpu) in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, default_on_gpu if on_gpu else on_cpu)
        if getattr(given, name) < 1:
            parser.error(f"expected --{name} of at least 1, got {getattr(given, name)}")
    given.dtype = DTYPES[SHORT_DTYPES[given.dtype or ("bf16" if on_gpu else "fp32")]]
    if given.vocab % size:
        parser.error(f"expected --vocab to divide by {size} ranks, got {given.vocab}")
    parts = size if given.sequence_parallel else 1
    if given.tokens % parts:
        parser.error(f"expected --tokens to divide by {parts} ranks, got {given.tokens}")
    most = given.tokens // parts
    if given.chunks[-1] > most:
        parser.error(f"expected --chunks from 1 to {most}, got {given.chunks[-1]}")
