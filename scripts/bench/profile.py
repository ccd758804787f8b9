"""Where the time of one step goes: torch's profiler, and what of the collectives no kernel hides.

`python -m scripts.bench --preset profile`. Per row and rank, milliseconds a step: *gemm*; *compute*, the time
in which some kernel that is no collective runs; *exposed*, the time of collectives without compute, in all
and of each kind; *idle*, the rest between the first kernel and the last. Rank 0's kernels are torch's table.
Traces go to build/profile, for Perfetto.

The profiler itself costs a little, and steps begin with a barrier here: compare kernels with kernels, and
steps in the other presets.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiled

from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.op import Case, Op, nothing
from megatron_fused_ce.scripts.bench.problem import World
from megatron_fused_ce.scripts.lib import gpu
from megatron_fused_ce.scripts.lib.results import Row

TRACES = Path("build/profile")
#: What the trace calls the profiled steps.
STEP = "a step of the head"
#: Lines of torch's table of each row.
MOST_LINES = 12
#: Collectives by what they carry here, in the order of a step.
COLLECTIVES = ("all-gather", "statistics", "reduce-scatter", "all-reduce", "other collective")
GEMM, OTHER = "GEMM", "other compute"
_COLLECTIVE = re.compile(r"nccl|gloo", re.I)
_GEMM = re.compile(
    r"scaled_exp_kernel|grad_logits_kernel|nvjet|gemm|cutlass|xmma|splitKreduce|aten::(add)?mm", re.I
)


class Span(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float
    dtype: str = ""  # of a collective, where the trace tells

    @property
    def kind(self) -> str:
        """Of a collective by what it carries: statistics travel in fp32."""
        if not _COLLECTIVE.search(self.name):
            return GEMM if _GEMM.search(self.name) else OTHER
        word = re.sub(r"[^a-z0-9]", "", self.name.lower())
        in_fp32 = self.dtype == "Float" or "f32" in word
        if "reducescatter" in word:
            return "reduce-scatter"
        if "allgather" in word:
            return "statistics" if in_fp32 else "all-gather"
        if "allreduce" in word:
            return "statistics" if in_fp32 or "max" in word else "all-reduce"
        return "other collective"


# --- a step's figures --------------------------------------------------------------------------------


def covered(spans: Iterable[Span]) -> float:
    """Milliseconds in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return 1e-3 * total


def summarise(steps: Sequence[Sequence[Span]]) -> Row:
    """Milliseconds, means over the steps; spans of other streams may overlap.

    ``exposed_ms`` of a kind of collective is the time in which one runs and no compute does.
    """
    row: Row = dict.fromkeys(("step_ms", "gemm_ms", "compute_ms", "exposed_ms", "idle_ms"), 0.0)
    row["collectives"] = {}
    for step in filter(None, steps):
        compute = [span for span in step if span.kind not in COLLECTIVES]
        whole = 1e-3 * (max(span.end for span in step) - min(span.start for span in step))
        busy, computing = covered(step), covered(compute)
        gemm = covered(span for span in compute if span.kind == GEMM)
        times = {"step": whole, "gemm": gemm, "compute": computing, "exposed": busy - computing}
        for name, ms in {**times, "idle": whole - busy}.items():
            row[f"{name}_ms"] += ms / len(steps)
        for kind in COLLECTIVES:
            if own := [span for span in step if span.kind == kind]:
                known = row["collectives"].setdefault(kind, {"count": 0.0, "ms": 0.0, "exposed_ms": 0.0})
                exposed = covered([*compute, *own]) - computing
                for name, value in {"count": len(own), "ms": covered(own), "exposed_ms": exposed}.items():
                    known[name] += value / len(steps)
    return row


# --- recording ---------------------------------------------------------------------------------------


def recorded(action: Callable[[], Any], steps: int, world: World, path: Path) -> tuple[list[list[Span]], str]:
    """The kernels (on a CPU: operators) of each of ``steps`` runs after two that warm up, and torch's table.

    Collectives (R > 1), beside ``action``'s: `World.slowest`'s before each step.
    """
    for _ in range(2):
        action()
    gpu.look()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * world.on_gpu
    with profiled(activities=activities) as trace:
        for _ in range(steps):
            world.slowest([0.0])  # nobody begins long before the others
            world.synchronise()
            with record_function(STEP):
                action()
                world.synchronise()
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    order = f"self_{'device' if world.on_gpu else 'cpu'}_time_total"
    table = trace.key_averages().table(sort_by=order, row_limit=MOST_LINES, max_name_column_width=80)
    return steps_of_trace(json.loads(path.read_text())["traceEvents"], world.on_gpu), table


def steps_of_trace(events: Iterable[Row], on_gpu: bool) -> list[list[Span]]:
    """The spans that begin within each step, of a trace in Chrome's format (microseconds).

    On a GPU its kernels and copies, on a CPU torch's operators and gloo's collectives (``c10d::`` is the
    call, gloo's threads do the work); an operator within another covers no more time.
    """
    events = [event for event in events if event.get("ph") == "X"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    spans, steps = [], []
    for event in events:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        name, category = event["name"], event.get("cat")
        if name == STEP and category == "user_annotation":
            steps.append((start, end))
        elif category in wanted if on_gpu else name.startswith(("aten::", "gloo:")):
            spans.append(Span(name, start, end, str(event.get("args", {}).get("dtype", ""))))
    return [[span for span in spans if first <= span.start < last] for first, last in sorted(steps)]


# --- a cell ------------------------------------------------------------------------------------------


def measure(
    op: Op, cell: Cell, cases: Sequence[Case], given: argparse.Namespace, world: World, facts: Row
) -> list[Row]:
    """A row of each base, case and rank; rank 0's with torch's table. Collectives: an all-gather of rows."""
    world.sequence_parallel = cell.sequence_parallel
    problem = op.problem(cell, world, dtype=getattr(torch, given.dtype))
    del problem.all_weight
    facts = {**facts, "sp": cell.sequence_parallel, "shape": cell.shape, "T": cell.num_tokens}
    rows: list[Row] = []
    for case in op.rows(cases):
        if case.why_not is not None:
            if world.rank == 0:
                print(f"bench: {case.name}: {case.why_not}", file=sys.stderr)
            continue
        words = (cell.shape, cell.num_tokens, "sp" * cell.sequence_parallel, case.name, f"rank{world.rank}")
        path = TRACES / (re.sub(r"[^\w.-]+", "-", "-".join(map(str, filter(None, words)))) + ".json")
        with case.ready(problem) as step:  # what it reads is made outside of the trace
            steps, table = recorded(partial(step, nothing), given.steps, world, path)
        own = {**facts, "variant": case.name, "rank": world.rank, **summarise(steps)}
        own |= {"table": table} if world.rank == 0 else {}
        rows += world.everyone({**own, "time_ms": round(own["step_ms"], 3)})
        problem.reset()
    return rows
