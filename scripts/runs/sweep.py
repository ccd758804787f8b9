"""How many chunks? Time against peak memory over chunk counts and strategies, and the flags to use.

    python -m megatron_fused_ce sweep
    python -m megatron_fused_ce sweep --tokens 8192 --hidden 4096 --vocab 128256
    torchrun --nproc-per-node 4 scripts/sweep_chunks.py --sequence-parallel
    python -m megatron_fused_ce sweep --through-megatron MEGATRON_LM --nproc 8 -- --num-layers 32 ...

The head alone, a training step of forward and backward, runs on this machine's GPUs or CPU, measured as
`scripts.bench` does: checked against fp64 and, at the timed size, against a blockwise fp32 reference before
anything is timed, then in interleaved blocks. With --through-megatron each cell is a short launch of the
real pretraining script with the arguments after --, and so are Megatron's unfused and native losses; it
reads milliseconds an iteration and the most memory allocated from the log, and compares the losses with
unfused's (bound: twice native's difference, or 5e-4, fp32 1e-6). Launches that an earlier call with the
same arguments and sources left in --out are kept.

Times are the slowest rank's, peaks the largest of any rank: of the head above its inputs, grad_hidden and
the wgrad accumulator, by the allocator on a GPU, by live storages on a CPU; of a launch the whole
model's. Out of memory is a row. Recommended is the smallest peak among those within --tolerance of the
fastest.

Writes sweep.json, .md and .png to --out. Exit code 1: a wrong result or a launch that
failed; 2: arguments that do not fit.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import (
    Parser,
    UsageError,
    command,
    num_gpus,
    number,
    seconds,
    whole,
    writable_folder,
)
from megatron_fused_ce.config import STRATEGY_CHOICES
from megatron_fused_ce.scripts.bench.cases import Cell as Shape
from megatron_fused_ce.scripts.bench.cases import world_size
from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.lib.launches import split_command
from megatron_fused_ce.scripts.runs import sweep_launches, sweep_report
from megatron_fused_ce.scripts.runs.sweep_launches import Launches
from megatron_fused_ce.scripts.runs.sweep_report import SweepResult
from megatron_fused_ce.scripts.runs.sweep_rows import OK, OUT_OF_MEMORY, STOCK, Cell, cells_of, rows_of

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STRATEGIES = [name for name in STRATEGY_CHOICES if name != "auto"]
#: Launches take a minute or so each: fewer of them.
CHUNKS, LAUNCHED_CHUNKS = [1, 2, 4, 8, 16, 32], [1, 4, 16]
LESS = "use fewer tokens, more --chunks or more ranks"


def _parser() -> Parser:
    parser = Parser("python -m megatron_fused_ce sweep", __doc__ or "")
    add = parser.add_argument
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--chunks", type=whole(), nargs="+", metavar="N", help="[1 2 4 8 16 32; of launches 1 4 16]")
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="[all]")
    add(
        "--tolerance",
        type=number(),
        default=1.0,
        metavar="PERCENT",
        help="recommend the smallest peak among those that take so much longer than the fastest [1]",
    )
    add("--out", type=Path, default=Path("build/sweep"))
    head = parser.add_argument_group("the head alone, on one process or under torchrun")
    add = head.add_argument
    add("--tokens", type=whole(), help="T [2048 on a CPU, 8192 on a GPU]")
    add("--hidden", type=whole(), help="H [96, 4096]")
    add("--vocab", type=whole(), help="vocabulary over all ranks [16384, 128256]")
    add("--dtype", choices=list(SHORT_DTYPES), help="[fp32, bf16]")
    add("--sequence-parallel", action="store_true", help="each rank holds its part of the tokens")
    add("--blocks", type=whole(), default=3, metavar="N", help="turns of each cell [3]")
    add("--sample-ms", type=number(), default=100.0, metavar="MS", help="a turn's least length [100]")
    launches = parser.add_argument_group("launches of Megatron-LM, arguments after --")
    add = launches.add_argument
    add("--through-megatron", metavar="CHECKOUT", help="a Megatron-LM checkout")
    add("--script", default="pretrain_gpt.py", help="[pretrain_gpt.py]")
    add("--nproc", type=whole(most=4096), metavar="N", help="processes of a launch [every GPU; 1 on a CPU]")
    add("--iterations", type=whole(), default=10, metavar="N", help="of a launch [10]")
    add("--warmup", type=whole(0), default=3, metavar="N", help="of them not timed [3]")
    add("--timeout", type=seconds, default=900.0, metavar="S", help="of a launch [900]")
    add("--fresh", action="store_true", help="launch again what an earlier call left")
    return parser


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The result has ``launches`` with ``--through-megatron``, else None.

    Raises UsageError where the checkout or its arguments do not fit, SystemExit for the rest.
    """
    parser = _parser()
    own, after = split_command(words)
    given = parser.parse_args(own)
    through = given.through_megatron is not None
    given.chunks = sorted(set(given.chunks or (LAUNCHED_CHUNKS if through else CHUNKS)))
    given.strategies = list(dict.fromkeys(given.strategies))
    here = num_gpus()
    needed = given.nproc or 1 if through else world_size()
    if given.device == "auto":
        given.device = "cuda" if here >= needed else "cpu"
    if given.device == "cuda" and here < needed:
        parser.error(f"expected {needed} GPUs, found {here}: use --device cpu or fewer ranks")
    given.launches = None
    if through:
        _check_launches(parser, given, after)
    else:
        _check_head(parser, given, after)
    return given


def _check_launches(parser: Parser, given: argparse.Namespace, after: Sequence[str]) -> None:
    if world_size() > 1:
        parser.error("--through-megatron starts its ranks itself: give --nproc, without torchrun")
    if given.warmup >= given.iterations:
        parser.error(f"expected fewer --warmup than --iterations, got {given.warmup}")
    given.launches = Launches.of(
        given.through_megatron,
        after,
        script=given.script,
        nproc=given.nproc or (num_gpus() if given.device == "cuda" else 1),
        device=given.device,
        iterations=given.iterations,
        warmup=given.warmup,
        timeout_s=given.timeout,
    )


def _check_head(parser: Parser, given: argparse.Namespace, after: Sequence[str]) -> None:
    if after:
        parser.error("arguments after -- are those of --through-megatron CHECKOUT")
    on_gpu, size = given.device == "cuda", world_size()
    defaults = {"tokens": (2048, 8192), "hidden": (96, 4096), "vocab": (16384, 128256)}
    for name, (on_cpu, default_on_gpu) in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, default_on_gpu if on_gpu else on_cpu)
    given.dtype = SHORT_DTYPES[given.dtype or ("bf16" if on_gpu else "fp32")]
    if given.vocab % size:
        parser.error(f"expected --vocab to divide by {size} ranks, got {given.vocab}")
    parts = size if given.sequence_parallel else 1
    if given.tokens % parts:
        parser.error(f"expected --tokens to divide by {parts} ranks, got {given.tokens}")
    most = given.tokens // parts
    if given.chunks[-1] > most:
        parser.error(f"expected --chunks from 1 to {most}, got {given.chunks[-1]}")


# --- the sweep -----------------------------------------------------------------------------------


class Failed(Exception):
    """A result is wrong: exit status 1."""


def _say(text: str) -> None:
    print(f"sweep: {text}", file=sys.stderr, flush=True)


def sweep_head_alone(given: argparse.Namespace, source: dict[str, Any]) -> SweepResult:
    import torch

    from megatron_fused_ce import FusedCEConfig
    from megatron_fused_ce.scripts.bench import loss, measure
    from megatron_fused_ce.scripts.bench.problem import World

    world = World(given.sequence_parallel, use_gpu=given.device == "cuda")
    cells = cells_of(given.strategies, given.chunks)
    shape = Shape("head", given.tokens, given.hidden, given.vocab, world.sequence_parallel)
    op = replace(loss.OP, bases=())
    device = f"{source['device']}, {torch.get_num_threads()} threads"
    facts = source | {
        "what": "head",
        "dtype": given.dtype,
        "tp": world.size,
        "blocks": given.blocks,
        "sample_ms": given.sample_ms,
        "device": torch.cuda.get_device_name() if world.on_gpu else device,
    }
    cases = [
        loss.of_config(world, cell.name, FusedCEConfig(strategy=cell.strategy, num_chunks=cell.num_chunks))
        for cell in cells
    ]
    try:
        measured = measure.measure(op, shape, cases, given, world, facts)
    except measure.WrongResult as error:
        raise Failed(str(error)) from None
    except RuntimeError as error:
        if not measure.is_out_of_memory(error):
            raise
        raise UsageError(f"the operands alone do not fit {given.device}'s memory: {LESS}") from None
    finally:
        world.close()
    facts |= {name: measured[0][name] for name in ("T", "H", "V", "sp")}
    records = {}
    for cell, row in zip(cells, measured, strict=True):
        ran = row["time_ms"] is not None
        plan = ""
        if size := row.get("chunk_tokens"):
            num_chunks = math.ceil(given.tokens / size)
            plan = f"{row['plan']}, {num_chunks} chunk{'s' * (num_chunks > 1)} of {size} tokens"
        records[cell] = {
            **{name: row[name] for name in ("time_ms", "spread", "peak_mib")},
            "plan": plan,
            "status": OK if ran else str(row["error"]),
            "error": row["error"] if ran else None,
        }
    return _result(given, records, facts)


def sweep_through(given: argparse.Namespace, source: dict[str, Any]) -> SweepResult:
    launches: sweep_launches.Launches = given.launches
    auto, *counted = cells_of(given.strategies, given.chunks)
    cells = [auto, *map(Cell, STOCK), *counted]
    folder = given.out.resolve() / "launches"
    records = sweep_launches.measure(launches, cells, folder, given.fresh, partial(print, flush=True))
    facts = source | launches.facts() | {"loss_bound": records[auto]["loss_bound"]}
    return _result(given, records, facts)


def _result(
    given: argparse.Namespace, records: dict[Cell, dict[str, Any]], facts: dict[str, Any]
) -> SweepResult:
    rows, reference = rows_of(records)
    if reference is None:
        raise UsageError(f"nothing of this package ran to its end: {LESS}")
    return SweepResult.of(rows, facts, reference, given.tolerance / 100)


@command("sweep")
def main(words: list[str]) -> int:
    rank = int(os.environ.get("RANK", "0"))
    given = parse_arguments(words)
    if rank == 0:
        writable_folder(given.out)
    device = results.device_name() if given.launches and given.device == "cuda" else ""
    source = results.made_by(device, ["sweep", *words])
    try:
        result = (sweep_head_alone if given.launches is None else sweep_through)(given, source)
    except Failed as error:
        if rank == 0:
            _say(str(error))
        return 1
    if rank == 0:
        written = sweep_report.write(result, given.out)
        print(sweep_report.markdown(result))
        print(f"written to {given.out}: {', '.join(written)}")
    failed = [row for row in result.rows if row.status not in (OK, OUT_OF_MEMORY)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
