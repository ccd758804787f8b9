"""Where the time of one step goes: torch's profiler, and what of the collectives no kernel hides.

Per row and rank, milliseconds a step: *gemm*; *compute*, the time in which some kernel that is no collective
runs; *exposed*, the time of collectives without compute, in all and of each kind; *idle*, the rest between
the first kernel and the last. Rank 0's kernels are torch's table. Traces go to build/profile, for Perfetto.
The profiler costs a little and steps begin with a barrier: compare kernels here, and steps elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiled

from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.loss import OP  # noqa: F401 - what this preset profiles
from megatron_fused_ce.scripts.bench.measure import Outcome, attempt, say
from megatron_fused_ce.scripts.bench.problem import Case, Op, World, nothing
from megatron_fused_ce.scripts.lib import gpu
from megatron_fused_ce.scripts.lib.results import Row

TRACES = Path("build/profile")
STEP, STEPS = "a step of the head", 3  # what the trace calls the profiled steps; how many there are
COLLECTIVES = ("all-gather", "statistics", "reduce-scatter", "all-reduce", "other collective")
GEMM = "GEMM"
#: Kind of a kernel by its name and its collective's dtype; the first that fits. Statistics travel in fp32.
KINDS = {
    r"(nccl|gloo).*reduce_?scatter": "reduce-scatter",
    r"(nccl|gloo).*(all_?(gather|reduce).*(f32| Float$)|all_?reduce.*max)": "statistics",
    r"(nccl|gloo).*all_?gather": "all-gather",
    r"(nccl|gloo).*all_?reduce": "all-reduce",
    r"nccl|gloo": "other collective",
    r"scaled_exp_kernel|grad_logits_kernel|nvjet|gemm|cutlass|xmma|splitKreduce|aten::(add)?mm": GEMM,
    "": "other compute",
}


class Span(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str  # with the dtype, of a collective whose trace tells it
    start: float
    end: float

    @property
    def kind(self) -> str:
        return next(kind for pattern, kind in KINDS.items() if re.search(pattern, self.name, re.I))


def covered(spans: Iterable[Span]) -> float:
    """Milliseconds in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return 1e-3 * total


def summarise(step: Sequence[Span]) -> Row:
    """Milliseconds of a step; spans of other streams may overlap.

    ``exposed_ms`` of a kind of collective is the time in which one runs and no compute does.
    """
    of = {kind: [span for span in step if span.kind == kind] for kind in (*COLLECTIVES, GEMM)}
    compute = [span for span in step if span.kind not in COLLECTIVES]
    whole = 1e-3 * (max(span.end for span in step) - min(span.start for span in step))
    busy, computing = covered(step), covered(compute)
    row: Row = {"step_ms": whole, "gemm_ms": covered(of[GEMM]), "compute_ms": computing}
    row |= {"exposed_ms": busy - computing, "idle_ms": whole - busy, "collectives": {}}
    for kind in filter(of.get, COLLECTIVES):
        exposed = covered([*compute, *of[kind]]) - computing
        row["collectives"][kind] = {"ms": covered(of[kind]), "exposed_ms": exposed}
    return row


def recorded(action: Callable[[], Any], world: World, path: Path) -> Row:
    """A row's figures: of `STEPS` runs, after two that warm up, the one whose time is in the middle.

    Collectives (R > 1), beside ``action``'s: `World.slowest`'s before each step.
    """
    for _ in range(2):
        action()
    gpu.look()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * world.on_gpu
    with profiled(activities=activities) as trace:
        for _ in range(STEPS):
            world.slowest([0.0])  # nobody begins long before the others
            world.synchronise()
            with record_function(STEP):
                action()
                world.synchronise()
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    steps = steps_of_trace(json.loads(path.read_text())["traceEvents"], world.on_gpu)
    row = sorted(map(summarise, steps), key=lambda row: float(row["step_ms"]))[STEPS // 2]
    if world.rank == 0:
        order = f"self_{'device' if world.on_gpu else 'cpu'}_time_total"
        row["table"] = trace.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=80)
    return row | {"time_ms": round(row["step_ms"], 3)}


def steps_of_trace(events: Iterable[Row], on_gpu: bool) -> list[list[Span]]:
    """The spans that begin within each step, of a trace in Chrome's format (microseconds).

    On a GPU its kernels and copies, on a CPU torch's operators and gloo's collectives (``c10d::`` is the
    call, gloo's threads do the work); an operator within another covers no more time.
    """
    spans, steps = [], []
    for event in (event for event in events if event.get("ph") == "X"):
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        name, category = event["name"], event.get("cat")
        on_device = category in ("kernel", "gpu_memcpy", "gpu_memset")
        if name == STEP and category == "user_annotation":
            steps.append((start, end))
        elif on_device if on_gpu else name.startswith(("aten::", "gloo:")):
            spans.append(Span(f"{name} {event.get('args', {}).get('dtype', '')}".strip(), start, end))
    return [[span for span in spans if first <= span.start < last] for first, last in sorted(steps)]


def measure(
    op: Op, cell: Cell, cases: Sequence[Case], given: argparse.Namespace, world: World, facts: Row
) -> list[Row]:
    """A row of each base, case and rank. Collectives: an all-gather of rows."""
    world.sequence_parallel = cell.sequence_parallel
    problem = op.problem(cell, world, getattr(torch, given.dtype))
    del problem.all_weight
    facts = {**facts, "sp": cell.sequence_parallel, "shape": cell.shape, "T": cell.num_tokens}
    rows: list[Row] = []
    for case in op.rows(cases):
        outcome, own = Outcome(case, case.why_not), None
        words = f"{cell.shape}-{cell.num_tokens}{'-sp' * cell.sequence_parallel}-{case.name}-rank{world.rank}"
        path = TRACES / (re.sub(r"[^\w.-]+", "-", words) + ".json")
        if outcome.reason is None:
            with case.ready(problem) as step:  # what it reads is made outside of the trace
                own = attempt(partial(recorded, partial(step, nothing), world, path), outcome, world)
        problem.reset()
        if own is None:
            say(world, f"{case.name}: {outcome.reason}")
        else:
            rows += world.everyone({**facts, "variant": case.name, "rank": world.rank, **own})
    return rows
