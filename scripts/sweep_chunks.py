"""How many chunks? Time against peak memory over chunk counts and strategies, and the flags to use.

    python scripts/sweep_chunks.py
    python scripts/sweep_chunks.py --tokens 8192 --hidden 4096 --vocab 128256
    torchrun --nproc-per-node 4 scripts/sweep_chunks.py --sequence-parallel
    python scripts/sweep_chunks.py --through-megatron MEGATRON_LM --nproc 8 -- --num-layers 32 ...

The head alone runs on this machine's GPUs or CPU: a training step (forward and backward) and the forward
alone, as in evaluation. Before anything is timed, every result is held against fp64 and, at the timed size,
against a blockwise fp32 reference. With --through-megatron each cell is a short launch of the real
pretraining script with the arguments after --, and so are Megatron's unfused and native losses; it reads
milliseconds an iteration and the most memory allocated from the log, and compares the losses with unfused's
(bound: twice native's difference, or 5e-4, fp32 1e-6).

Every time is kept as its ratio to one reference, `auto` without further flags: a cell's turn stands between
two of the reference, and each call that launches Megatron launches the reference too. So cells of an
interrupted sweep, which goes on where it stopped, compare with those measured later; milliseconds in
the table are the ratio times the reference's in the last call. Where `auto` does not fit, the reference is
`recompute` with the most chunks. Settings, sources or a device that differ make another sweep.

Times are the slowest rank's, peaks the largest of any rank: of the head above its inputs, grad_hidden and
the wgrad accumulator, by the allocator on a GPU, by live storages on a CPU; of a launch the whole
model's. Out of memory is a row. Recommended is the smallest peak among those within --tolerance of the
fastest.

Writes sweep.json, .csv, .md and .png and the state to --out. Exit code 1: a wrong result or a launch that
failed; 2: arguments that do not fit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import sweep_measure
import sweep_megatron
import sweep_report
from benchmark_measure import DeviceLost, WrongVariant
from benchmark_problem import World
from megatron_logs import UsageError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sweep_arguments import parse_arguments
from sweep_rows import OK, OUT_OF_MEMORY, Cell, row_of
from sweep_state import State


def _say(text: str) -> None:
    print(f"sweep_chunks: {text}", file=sys.stderr, flush=True)


class _Bar:
    """A bar of cells on a terminal; a line for each where there is none."""

    def __init__(self, console: Console, cells: Sequence[Cell], state: State, shown: bool) -> None:
        self._on_terminal, self._shown = console.is_terminal, shown
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not (shown and self._on_terminal),
        )
        there = sum(state.has(cell.key) for cell in cells)
        self._task = self._progress.add_task("checks", total=len(cells), completed=there)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, cell: Cell) -> None:
        self._progress.update(self._task, description=cell.name)

    def done(self, cell: Cell) -> None:
        self._progress.update(self._task, description=cell.key, advance=1)
        if self._shown and not self._on_terminal:
            print(f"{cell.key}: done", flush=True)


def sweep_head(given: argparse.Namespace, console: Console) -> sweep_report.Result:
    world = World(given.sequence_parallel, use_gpu=given.device == "cuda")
    try:
        settings = sweep_measure.HeadSettings(
            num_tokens=given.tokens,
            hidden_size=given.hidden,
            vocab=given.vocab,
            dtype=given.dtype,
            wgrad_accumulator=given.wgrad_accumulator,
            blocks=given.blocks,
            sample_ms=given.sample_ms,
        )
        cells = sweep_measure.cells_of(given.strategies, given.chunks)
        first = world.rank == 0
        state = _state(given, settings.facts(world), cells, writes=first)
        world.slowest([0.0])  # every rank has read the state before the first one writes
        with _Bar(console, cells, state, shown=first) as bar:
            sweep_measure.measure(settings, cells, world, state, bar.done)
        return _result(given, state, {cell: state.cells[cell.key] for cell in cells})
    finally:
        world.close()


def sweep_launches(given: argparse.Namespace, console: Console) -> sweep_report.Result:
    launches: sweep_megatron.Launches = given.launches
    cells = sweep_megatron.cells_of(given.strategies, given.chunks)
    state = _state(given, launches.facts(), cells)
    folder = given.out.resolve() / f"launches-{state.digest}"
    with _Bar(console, cells, state, shown=True) as bar:
        sweep_megatron.measure(launches, cells, state, folder, bar.begin, bar.done)
    records, bound = sweep_megatron.judged(launches, cells, state)
    return _result(given, state, records, loss_bound=bound)


def _state(
    given: argparse.Namespace, facts: dict[str, Any], cells: Sequence[Cell], writes: bool = True
) -> State:
    state = State(given.out, facts, fresh=given.fresh, writes=writes)
    said = state.said([cell.key for cell in cells])
    if said and writes and not given.fresh:
        _say(said)
    return state


def _result(
    given: argparse.Namespace, state: State, records: dict[Cell, dict[str, Any]], **more: float
) -> sweep_report.Result:
    rows = [
        row_of(cell, record, state.reference.get(cell.kind)) for cell, record in records.items()
    ]
    return sweep_report.Result.of(
        rows, state.facts | more, state.reference["name"], given.tolerance / 100
    )


def main(words: Sequence[str] | None = None) -> int:
    rank = int(os.environ.get("RANK", "0"))
    console = Console(highlight=False)
    try:
        given = parse_arguments(__doc__ or "", sys.argv[1:] if words is None else words, rank)
        sweep = sweep_head if given.launches is None else sweep_launches
        result = sweep(given, console)
    except (UsageError, WrongVariant, DeviceLost) as error:
        if rank == 0:
            _say(str(error))
        return 2 if isinstance(error, UsageError) else 1
    if rank == 0:
        written = sweep_report.write(result, given.out)
        print(sweep_report.markdown(result))
        print(f"written to {given.out}: {', '.join(written)}")
    failed = [row for row in result.rows if row.status not in (OK, OUT_OF_MEMORY)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
