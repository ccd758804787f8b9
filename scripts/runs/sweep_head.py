"""The head alone, cell by cell: checked, then its peak, then its time between two turns of the reference."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.scripts.bench import measure as bench
from megatron_fused_ce.scripts.bench.cases import LONGEST_WARM_STEP_MS
from megatron_fused_ce.scripts.bench.cases import Cell as Shape
from megatron_fused_ce.scripts.bench.measure import (
    MOST_STEPS,
    Outcome,
    Settings,
    WrongVariant,
)
from megatron_fused_ce.scripts.bench.problem import MIB, FullReference, Problem, World
from megatron_fused_ce.scripts.bench.variants import Variant, chosen, loss_of, of_config
from megatron_fused_ce.scripts.lib.results import version
from megatron_fused_ce.scripts.runs.sweep_rows import (
    ANY,
    AUTO,
    EVALUATION,
    OK,
    OUT_OF_MEMORY,
    TRAINING,
    Cell,
    State,
    source_digest,
)
from megatron_fused_ce.testing.live_storages import LiveStorages
from megatron_fused_ce.testing.provenance import commit
from megatron_fused_ce.testing.reference import relative_error


@dataclass(frozen=True)
class HeadSettings:
    """What fixes the figures of a head, but for the ranks and the machine."""

    num_tokens: int
    hidden_size: int
    vocab: int  # over all ranks
    dtype: torch.dtype
    wgrad_accumulator: str  # "main_grad" or "returned"
    blocks: int
    sample_ms: float

    def facts(self, world: World) -> dict[str, Any]:
        device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        return {
            "what": "head",
            "T": self.num_tokens,
            "H": self.hidden_size,
            "V": self.vocab // world.size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tp": world.size,
            "sp": world.sequence_parallel,
            "wgrad_accumulator": self.wgrad_accumulator,
            "blocks": self.blocks,
            "sample_ms": self.sample_ms,
            "device": torch.cuda.get_device_name() if world.on_gpu else device,
            "torch": torch.__version__,
            "triton": version("triton", "pytorch-triton"),
            "commit": commit(),
            "sources": source_digest(),
        }


def cells_of(strategies: list[str], chunks: list[int]) -> list[Cell]:
    """``auto``, which is the reference, first."""
    counted = [Cell(TRAINING, name, num) for name in strategies for num in chunks]
    forward = [Cell(EVALUATION, ANY, num) for num in chunks]
    return [Cell(TRAINING, AUTO), *counted, Cell(EVALUATION, AUTO), *forward]


def variant_of(cell: Cell, world: World) -> Variant:
    strategy = "recompute" if cell.strategy == ANY else cell.strategy
    config = FusedCEConfig(strategy=strategy, num_chunks=cell.num_chunks)
    if cell.kind == TRAINING:
        return of_config(world, cell.name, config)

    def run(problem: Problem, mark: Callable[[], None]) -> Tensor:
        problem.reset()
        with torch.no_grad():
            mark()
            loss = loss_of(problem, world, config)
            mark()
        return loss

    return Variant(cell.name, "ours", run=run, config=config)


def measure(
    settings: HeadSettings,
    cells: list[Cell],
    world: World,
    state: State,
    done: Callable[[Cell], None],
) -> None:
    """Measure the cells that ``state`` lacks; every rank calls it with the same ``state``.

    Raises UsageError where the operands do not fit the device, or nothing runs on it, and
    WrongVariant where a result is wrong: before anything was timed.
    """
    todo = [cell for cell in cells if not state.has(cell.key)]
    if not todo:
        return
    head = _Head(settings, world)
    references = _references(cells, state)
    head.check(list(dict.fromkeys([*references.values(), *todo])))
    usable = [name for name, of in references.items() if head.status[of] == OK]
    if not usable:
        raise UsageError(
            f"not even {list(references)[-1]} runs in {head.device_memory}: use fewer --tokens, "
            "more --chunks or more ranks"
        )
    reference = usable[0]
    state.reference.setdefault("name", reference)
    training = references[reference]
    beside = {TRAINING: training, EVALUATION: _forward_of(training)}
    times: dict[str, list[float]] = {}
    for cell in todo:
        record = head.record(cell, beside[cell.kind], times.setdefault(cell.kind, []))
        if times[cell.kind]:
            state.reference[cell.kind] = statistics.median(times[cell.kind])
        state.add(cell.key, record)
        done(cell)


def _references(cells: list[Cell], state: State) -> dict[str, Cell]:
    """Name -> cell of training: ``auto``, else what needs least; the one that earlier cells stand beside."""
    most = max(cell.num_chunks or 1 for cell in cells)
    known = [Cell(TRAINING, AUTO), Cell(TRAINING, "recompute", most)]
    if "name" in state.reference:
        known = [_cell_named(state.reference["name"])]
    return {cell.name: cell for cell in known}


def _forward_of(cell: Cell) -> Cell:
    return Cell(EVALUATION, AUTO if cell.strategy == AUTO else ANY, cell.num_chunks)


def _cell_named(name: str) -> Cell:
    strategy, _, num_chunks = name.partition(" x ")
    return Cell(TRAINING, strategy, int(num_chunks) if num_chunks else None)


class _Head:
    """One problem on all ranks, and what is known of each cell."""

    def __init__(self, settings: HeadSettings, world: World) -> None:
        self._settings, self._world = settings, world
        self._variants: dict[Cell, Variant] = {}
        self._errors: dict[Cell, float | None] = {}
        self._watches: dict[Cell, Callable[[], float]] = {}
        self.status: dict[Cell, str] = {}
        self._problem: Problem

    @property
    def device_memory(self) -> str:
        if not self._world.on_gpu:
            return "this machine's memory"
        return f"this GPU's {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"

    def check(self, cells: list[Cell]) -> None:
        """Make the problem; hold every cell's results against fp64 and, at this size, a blockwise fp32."""
        self._variants = {cell: variant_of(cell, self._world) for cell in cells}
        _, reason = bench.attempt(partial(self._check, cells), self._world)
        if reason == OUT_OF_MEMORY:
            raise UsageError(
                f"the operands alone do not fit {self.device_memory}: use fewer --tokens, a smaller "
                "--vocab or more ranks"
            )
        if reason is not None:
            raise WrongVariant(f"the checks failed: {reason}")
        bench.give_back(self._world)

    def _check(self, cells: list[Cell]) -> None:
        s, world = self._settings, self._world
        settings = Settings(dtype=s.dtype, wgrad_accumulator=s.wgrad_accumulator)
        shape = Shape("head", s.num_tokens, s.hidden_size, s.vocab, world.sequence_parallel)
        training = {cell: Outcome(self._variants[cell]) for cell in cells if cell.kind == TRAINING}
        outcomes = list(training.values())
        plain_loss, plain, _ = bench.check_small(outcomes, shape, settings, world, {})
        self._problem = Problem.of(
            shape, world, dtype=s.dtype, wgrad_accumulator=s.wgrad_accumulator
        )
        reference = bench.check_full(outcomes, self._problem, world, plain_loss, plain)
        for cell, outcome in training.items():
            self.status[cell] = outcome.reason or OK
            self._errors[cell] = outcome.error
        for cell in cells:
            if cell.kind == EVALUATION:
                self._check_forward(cell, reference, max(2 * plain_loss, 1e-5))

    def _check_forward(self, cell: Cell, reference: FullReference, bound: float) -> None:
        def error() -> float:
            loss = self._variants[cell].run(self._problem, bench.nothing)  # type: ignore[misc]
            return relative_error(loss, reference.loss)

        found, reason = bench.attempt(error, self._world)
        self.status[cell], self._errors[cell] = reason or OK, None
        if reason is None:
            (self._errors[cell],) = self._world.slowest([found])
            if not (self._errors[cell] or 0.0) <= bound:
                raise WrongVariant(
                    f"{cell.key} is wrong: loss off by {self._errors[cell]:.2e} (bound {bound:.2e})"
                )

    def record(self, cell: Cell, beside: Cell, reference_times: list[float]) -> dict[str, Any]:
        """What the state keeps of a cell; its turns' neighbours are added to ``reference_times`` (ms)."""
        record: dict[str, Any] = {"status": self.status[cell], "error": self._errors[cell]}
        plan = chosen(self._variants[cell], self._problem, self._world)
        num_chunks = math.ceil(self._settings.num_tokens / plan.chunk_tokens)
        strategy = f"{plan.strategy}, " if cell.kind == TRAINING else ""
        record["plan"] = (
            f"{strategy}{num_chunks} chunk{'s' * (num_chunks > 1)} of {plan.chunk_tokens} tokens"
        )
        if record["status"] != OK:
            return record
        peak, reason = bench.attempt(partial(self._peak_bytes, cell), self._world)
        if reason is None:
            record["peak_mib"] = self._world.slowest([peak])[0] / MIB
            ratios, reason = bench.attempt(
                partial(self._ratios, cell, beside, reference_times), self._world
            )
        if reason is not None:
            return record | {"status": reason, "peak_mib": None}
        spread = max(ratios) - min(ratios)
        return record | {"ratio": statistics.median(ratios), "spread": round(spread, 4)}

    def _peak_bytes(self, cell: Cell) -> float:
        """Above inputs, ``grad_hidden`` and the wgrad accumulator."""
        run, problem = self._variants[cell].run, self._problem
        assert run is not None
        step = partial(run, problem, bench.nothing)
        problem.reset()
        kept = problem.output_bytes() if cell.kind == TRAINING else 0
        if self._world.on_gpu:
            before, whole = bench.peak_bytes(step, self._world)
            above = whole - before
        else:
            with LiveStorages() as live:
                step()
            above = live.peak_bytes
        problem.reset()
        return float(above - kept)

    def _ratios(self, cell: Cell, beside: Cell, reference_times: list[float]) -> list[float]:
        """Of each block: a turn over the mean of the two turns of the reference around it."""
        other = self._stopwatch(beside)
        own = other if cell == beside else self._stopwatch(cell)
        ratios, others = bench.ratios_beside(own, other, self._settings.blocks)
        reference_times += others
        return ratios

    def _stopwatch(self, cell: Cell) -> Callable[[], float]:
        """Times a turn of some steps: the slowest rank's median ms of a step."""
        if cell not in self._watches:
            variant, world = variant_of(cell, self._world), self._world

            def step_ms(warm: int, steps: int) -> float:
                spans = bench.turn(variant, self._problem, world, warm, steps)
                return world.slowest([statistics.median(sum(step) for step in spans)])[0]

            several = int(world.size > 1)  # ranks would not agree on what to run again
            first = step_ms(several, 1)
            steps = math.ceil(self._settings.sample_ms / max(first, 1e-3))
            warm = several or int(first < LONGEST_WARM_STEP_MS)
            self._watches[cell] = partial(step_ms, warm, max(1, min(MOST_STEPS, steps)))
        return self._watches[cell]
