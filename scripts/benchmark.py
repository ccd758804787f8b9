"""Time and memory of the head against its matrix products, Megatron's paths and the peers, in one run.

    python scripts/benchmark.py --shapes llama-3-8b --tokens 8192 32768
    python scripts/benchmark.py --preset reach --peers --name reach --results-dir docs/benchmarks/results
    python scripts/benchmark.py --shape 4096 128256 --strategies store grad_in_forward:8192
    recompute/gemm_rows python scripts/benchmark.py --tp 4 --sequence-parallel --shapes llama-3-8b --tokens
    32768 --lean python scripts/benchmark.py --tp 4 --preset tp-reach --peers --name tp4 python
    scripts/benchmark.py --render RESULT.json

Before anything is timed every variant is checked against fp64 on some of the tokens, and against a
blockwise fp32 reference at the timed size: a strategy of this package that is wrong ends the run with
exit code 1 and no figures. Then all variants run in turn, block after block, in an order that is
shuffled anew in each block (fixed seed), so that a drifting clock favours none.

--tp R runs on R ranks, which form one tensor-parallel group: under a torchrun of R, or by starting one.
Every rank holds V / R vocabulary rows. Times are the slowest rank's, peaks and errors the largest; the
roofs are the shard's, all ranks at once.

    roof      the three matrix products alone, by cuBLAS, on the true grad_logits of these operands
    roof-4    the same with the logits computed twice: the floor of recompute
    roof-raw  the last two products on raw logits: they cost more, the chip being limited by power
    store, grad_in_forward, recompute, auto
              this package; NAME[:C][/PASS][/MERGE] sets the tokens of a chunk, the logits backend
              (scaled_exp, rows) and how statistics are merged over the ranks (packed, all_reduce)
    megatron-*
              Megatron's output layer with its cross entropies and Transformer Engine's
    the rest  scripts/peers.py, with --peers: over several ranks those that know vocabulary shards

Every variant ends in the same place: an fp32 main_grad (--wgrad-accumulator returned: a gradient in the
weight's dtype). Out of memory, and a peer that fails, are rows. Exit code 1: a strategy of this package is
wrong, or failed a further check; 2: arguments; 3: a foreign kernel broke the device, rows so far are
written.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import benchmark_report as report
import torch
from benchmark_measure import (
    CHECKED_WELL,
    LONGEST_WARM_STEP_MS,
    Cell,
    DeviceLost,
    Settings,
    WrongVariant,
    measure_cell,
    say,
)
from benchmark_problem import DTYPES, SHAPES, World, shape_name, start_ranks, world_size
from benchmark_roof import ROOFS
from benchmark_variants import MERGES, Strategy, Variant, megatron, ours, parse_strategy, peers

from megatron_fused_ce.config import LOGITS_BACKEND_CHOICES, STRATEGY_CHOICES
from megatron_fused_ce.testing.provenance import commit

TP_CELLS = [("llama-3-8b", 8192), ("llama-3-8b", 32768), ("llama-3-70b", 32768)]
#: name -> cells, and options where the command line names none.
PRESETS: dict[str, tuple[list[tuple[str, int]], dict[str, Any]]] = {
    # The cells that issue 3's targets name. Cheap ones first: a time limit cuts the end.
    "reach": (
        [
            ("llama-3-8b", 8192),
            ("llama-3-8b", 32768),
            ("qwen3-1.7b", 32768),
            ("gemma-2-2b", 32768),
            ("llama-3-70b", 8192),
            ("llama-3-70b", 32768),
            ("llama-3-8b", 131072),
            ("qwen3-1.7b", 131072),
        ],
        {},
    ),
    "reach-small": (
        [("qwen3-1.7b", 8192), ("gemma-2-2b", 8192), ("llama-3-8b", 8192), ("llama-3-70b", 8192)],
        {},
    ),
    "short": (
        [(shape, T) for shape in ("llama-3-8b", "qwen3-1.7b") for T in (1024, 2048)],
        {"strategies": ["store", "auto"]},
    ),
    # What pins a device's tokens per chunk.
    "chunks": (
        [("llama-3-8b", 32768), ("qwen3-1.7b", 32768)],
        {
            "chunk_tokens": [2048, 4096, 8192, 16384, 32768],
            "megatron": False,
        },
    ),
    # One GPU, less than 1 GiB above inputs and gradients; the roof runs in slices.
    "million": (
        [("llama-3-8b", 1048576)],
        {
            "strategies": ["recompute:2048"],
            "blocks": 1,
            "roofs": ("roof", "roof-4"),
            "megatron": False,
        },
    ),
    # The cells that issue 4's targets name, in little time (about a minute a cell on four H200s) ...
    "tp": (TP_CELLS, {"sequence_parallel": "both", "lean": True}),
    # ... and with the other chunks, and blocks enough to publish.
    "tp-reach": (
        TP_CELLS,
        {"sequence_parallel": "both", "chunk_tokens": [None, 4096, 16384]},
    ),
}
#: Options of --lean. The roof on raw logits has no target over ranks; Megatron's jitted cross entropies
#: compile for seconds at every new T, so they see one T only.
LEAN: dict[str, Any] = {
    "blocks": 3,
    "sample_ms": 80.0,
    "check_tokens": 1024,
    "roofs": ("roof", "roof-4"),
}
#: --sequence-parallel's word -> whether each cell runs with it.
SEQUENCE_PARALLEL = {"on": (True,), "off": (False,), "both": (True, False)}
FURTHER_CHECKS = ("check_confident", "check_sync", "check_graph", "check_determinism")
ROOT = Path(__file__).resolve().parent.parent


def chunk_size(word: str) -> int | None:
    return None if word == "plan" else int(word)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="cells and options of one set of figures")
    add("--shapes", nargs="+", type=shape_name, metavar="NAME", help=", ".join(SHAPES))
    add("--shape", nargs=2, type=int, action="append", metavar=("H", "V"), help="a shape by size")
    add("--tokens", nargs="+", type=int, help="T of each cell (default 8192)")
    add(
        "--strategies",
        nargs="+",
        metavar="NAME[:C][/PASS][/MERGE]",
        help=f"of {', '.join(STRATEGY_CHOICES)}; C tokens a chunk, logits backend scaled_exp or gemm_rows, "
        f"merge of statistics {' or '.join(MERGES) or '(none here)'} (default: all but auto)",
    )
    add(
        "--logits-backend",
        nargs="+",
        choices=LOGITS_BACKEND_CHOICES,
        help="each strategy that names no pass, with each of these",
    )
    add("--merge", nargs="+", metavar="MERGE", help="each strategy that names none, with each")
    add(
        "--chunk-tokens",
        nargs="+",
        type=chunk_size,
        metavar="C",
        help="each strategy that names no C, with each; 'plan': the planner's",
    )
    add("--memory-mb", type=int, help="budget of strategy auto")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--upstream", choices=("weights", "random"), default="weights")
    add("--wgrad-accumulator", choices=("main_grad", "returned"), default="main_grad")
    add("--no-megatron", dest="megatron", action="store_const", const=False)
    add("--peers", nargs="*", metavar="NAME", help="every peer, or those named")
    add("--skip", nargs="+", default=[], metavar="VARIANT", help="leave these variants out")
    add("--blocks", type=int, help="interleaved blocks (default 5)")
    add("--sample-ms", type=float, help="a variant's turn runs at least so long (default 100)")
    add("--roofs", nargs="*", choices=tuple(ROOFS), help="(default: those that a variant needs)")
    add("--seed", type=int, default=0, help="of the order within blocks")
    add("--check-tokens", type=int, help="T of the check against fp64 (default 2048)")
    add(
        "--lean",
        action="store_const",
        const=True,
        help="quicker: 3 blocks of 80 ms, no roof-raw, 1024 tokens against fp64, and the others checked "
        "at the timed size alone",
    )
    add("--check-confident", action="store_true", help="also tokens of 1 - p = 3e-7")
    add("--check-sync", action="store_true", help="a host synchronisation is an error")
    add("--check-graph", action="store_true", help="a CUDA graph's replays, bit for bit")
    add("--check-determinism", action="store_true", help="two runs, bit for bit")
    add("--check-all", action="store_true", help="all four")
    add("--time-limit", type=float, metavar="SECONDS", help="start no cell or block after this")
    add("--tp", type=int, metavar="R", help="ranks: torchrun's, or started here")
    add(
        "--sequence-parallel",
        nargs="?",
        const="on",
        choices=SEQUENCE_PARALLEL,
        help="the hidden states in R parts; 'both': each cell with and without",
    )
    add("--name", help="write DATE-DEVICE-NAME.json and .md to --results-dir")
    add("--results-dir", type=Path, default=ROOT / "docs" / "benchmarks" / "results")
    add("--out", type=Path, help="or write this JSON file and the .md beside it")
    add("--render", type=Path, metavar="FILE.json", help="render the .md of a result again")
    given = parser.parse_args(words)
    preset, options = PRESETS.get(given.preset, ([], {}))
    for name, value in options.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.megatron = given.megatron is not False
    standard = {"blocks": 5, "sample_ms": 100.0, "check_tokens": 2048}
    for name, value in (LEAN if given.lean else standard).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    for name in ("tp", "blocks", "check_tokens", "chunk_tokens"):
        value = getattr(given, name)
        numbers = value if isinstance(value, list) else [value]
        if min((number for number in numbers if number is not None), default=1) < 1:
            parser.error(f"expected --{name.replace('_', '-')} of at least 1, got {value}")
    for name in FURTHER_CHECKS:
        setattr(given, name, getattr(given, name) or given.check_all)
    try:
        given.cells = cells_of(given, preset)
        given.strategies = strategies_of(given)
    except ValueError as error:
        parser.error(str(error))
    return given


def cells_of(given: argparse.Namespace, preset: list[tuple[str, int]]) -> list[Cell]:
    """``--preset``'s cells (those of ``--shapes`` and ``--tokens`` alone), or their product.

    Over several ranks each with sequence parallelism, without, or both.
    """
    size = given.tp or world_size()
    named = given.shapes or []
    if preset:
        if given.shape:
            raise ValueError("--shape and --preset exclude each other; use --shapes to narrow it")
        cells = [
            Cell.of(shape, T)
            for shape, T in preset
            if (not named or shape in named) and (not given.tokens or T in given.tokens)
        ]
    else:
        if not named and not given.shape:
            named = ["llama-3-8b"]
        tokens = given.tokens or [8192]
        cells = [Cell.of(shape, T) for shape in named for T in tokens]
        cells += [Cell(f"{H}x{V}", T, H, V) for H, V in given.shape or [] for T in tokens]
    if not cells:
        raise ValueError("the preset has no cell of these shapes and tokens")
    for cell in cells:
        if min(cell.num_tokens, cell.hidden_size, cell.vocab) < 1:
            raise ValueError(f"expected sizes of at least 1, got {cell}")
        if cell.num_tokens % size or cell.vocab % size:
            raise ValueError(f"{cell} does not divide over {size} ranks")
    modes = SEQUENCE_PARALLEL[given.sequence_parallel or "off"] if size > 1 else (False,)
    return [replace(cell, sequence_parallel=mode) for cell in cells for mode in modes]


def strategies_of(given: argparse.Namespace) -> list[str]:
    """Each strategy with each number of chunk tokens, logits backend and merge.

    ``grad_in_forward`` only where the upstream gradient lets it; ``auto`` chooses its chunks itself.
    """
    names = given.strategies
    if names is None:
        names = ["store", "grad_in_forward", "recompute"]
        if given.upstream == "random":
            names.remove("grad_in_forward")
    chosen: list[str] = []
    for name in names:
        own = parse_strategy(name)
        if own.name == "grad_in_forward" and given.upstream == "random":
            raise ValueError("grad_in_forward needs --upstream weights")
        fixed = own.chunk_tokens or own.name == "auto"
        sizes = [own.chunk_tokens] if fixed else given.chunk_tokens or [None]
        passes = [own.logits_backend] if own.logits_backend else given.logits_backend or [None]
        merges = [own.merge] if own.merge else given.merge or [None]
        for logits_backend, merge, size in product(passes, merges, sizes):
            chosen.append(str(Strategy(own.name, size, logits_backend, merge)))
            parse_strategy(chosen[-1])
    return list(dict.fromkeys(chosen))


def variants_of(given: argparse.Namespace, world: World) -> list[Variant]:
    found = [ours(world, text, given.memory_mb) for text in given.strategies]
    if given.megatron:
        found += megatron(world)
    if given.peers is not None:
        largest = (
            max(max(cell.num_tokens, given.check_tokens) for cell in given.cells),
            max(cell.hidden_size for cell in given.cells),
            max(cell.vocab for cell in given.cells) // world.size,
        )
        found += peers(world, given.peers or None, largest)
    found = [v for v in found if not {v.name, v.key, v.name.split("/")[0]} & set(given.skip)]
    keys = [variant.key for variant in found]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key} is there twice")
    return found


def roofs_of(given: argparse.Namespace, variants: list[Variant]) -> tuple[str, ...]:
    if given.roofs is not None:
        return tuple(name for name in ROOFS if name in given.roofs)
    four = any(variant.products == 4 and not variant.why_not for variant in variants)
    return tuple(name for name in ROOFS if four or name != "roof-4")


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def expected_seconds(
    cell: Cell, variants: list[Variant], given: argparse.Namespace, num_ranks: int
) -> float:
    """A cell's time on GPUs of 600 TFLOP/s, within a factor of two; 4 s for a peer to compile."""
    one = 2.0 * cell.num_tokens * cell.hidden_size * cell.vocab / num_ranks / 6e14  # product

    def turns(step: float, warm: bool, times: int) -> float:
        steps: int = warm + max(1, math.ceil(given.sample_ms / 1e3 / step))
        blocks: int = given.blocks
        return step * steps * times * blocks

    roofs = one * sum(ROOFS[name] for name in roofs_of(given, variants))
    seconds = 15.0 + turns(max(roofs, 1e-6), True, 2)
    for variant in variants:
        if not variant.why_not:
            peer = variant.family == "peer"
            step = one * variant.products * (1.5 if peer else 1)
            seconds += 3 * step + turns(step, 1e3 * step < LONGEST_WARM_STEP_MS, 1) + 4 * peer
    return seconds


def main(words: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    given = parse_arguments(words)
    own = sys.argv[1:] if words is None else words
    try:
        if given.render is not None:
            print(f"written: {report.render(given.render)}")
            return 0
        start_ranks(given.tp, str(Path(__file__).resolve()), own)
    except ValueError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    world = World()
    try:
        return run(given, world, started)
    finally:
        world.close()


def run(given: argparse.Namespace, world: World, started: float) -> int:
    try:
        variants = variants_of(given, world)
    except ValueError as error:
        say(world, str(error))
        return 2
    limit = given.time_limit or math.inf
    settings = Settings(
        dtype=DTYPES[given.dtype],
        upstream=given.upstream,
        wgrad_accumulator=given.wgrad_accumulator,
        check_tokens=given.check_tokens,
        blocks=given.blocks,
        sample_ms=given.sample_ms,
        seed=given.seed,
        roofs=roofs_of(given, variants),
        check_foreign=not given.lean,
        **{name: getattr(given, name) for name in FURTHER_CHECKS},
        deadline=started + limit,
    )
    facts = {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if world.on_gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton_version(),
        "dtype": given.dtype,
        "tp": world.size,
        "sp": False,  # the cell's
    }
    path = given.out
    if given.name:
        path = report.result_path(given.results_dir, str(facts["device"]), given.name)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    known: dict[Any, Any] = {}
    exit_code = 0
    for cell in given.cells:
        elapsed = time.monotonic() - started
        need = expected_seconds(cell, variants, given, world.size) if world.on_gpu else 0.0
        if world.slowest([elapsed + need])[0] > limit:
            say(world, f"{cell}: not started, {elapsed:.0f} of {limit:.0f} s are gone")
            skipped.append(str(cell))
            continue
        try:
            found = measure_cell(cell, variants, settings, world, facts, known)
        except WrongVariant as wrong:
            say(world, f"{cell}: {wrong}: nothing of this cell is printed")
            return 1
        except DeviceLost as lost:
            say(world, f"{cell}: the device is lost: {lost}; leave the variant out with --skip")
            exit_code = 3
            break
        rows += found
        if world.rank == 0:
            print(f"## {report.title(found[0])}\n\n{report.table(found)}", flush=True)
            if path is not None:  # a run that is cut short keeps its cells
                report.write(path, rows, skipped)
        for row in found:
            for check in CHECKED_WELL:
                if row["family"] == "ours" and row.get(check, "ok") != "ok":
                    say(world, f"{cell}: {row['variant']}: {check}: {row[check]}")
                    exit_code = 1
    if world.rank == 0 and path is not None and rows:
        report.write(path, rows, skipped)
        print(report.summary(rows))
        print(f"written: {path} and {path.with_suffix('.md').name}")
    if exit_code != 3:
        world.slowest([0.0])  # nobody leaves before rank 0 has written
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
