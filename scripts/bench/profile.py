"""Where the time of one step goes: torch's profiler, and what of the collectives no kernel hides.

`python -m scripts.bench --preset profile`. Per variant (NAME[:C][/PASS][/MERGE], roof, megatron-te ...) and
rank, milliseconds a step: *GEMMs*; *compute*, the time in which some kernel that is no collective runs;
*exposed*, the time of collectives without compute, in all and of each kind; *idle*, the rest between the
first kernel and the last. Rank 0's kernels are torch's table. Traces go to build/profile, for Perfetto.

The profiler itself costs a little, and steps begin with a barrier here: compare kernels with kernels, and
steps in the other presets.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_fused_ce.scripts.bench.cases import ROOFS, Cell
from megatron_fused_ce.scripts.bench.measure import nothing
from megatron_fused_ce.scripts.bench.problem import DTYPES, Problem, World
from megatron_fused_ce.scripts.bench.roof import Roof
from megatron_fused_ce.scripts.bench.variants import megatron, ours
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.results import Row

TRACES = Path("build/profile")
#: What the trace calls the profiled steps.
STEP = "a step of the head"
#: Collectives by what they carry here, in the order of a step.
COLLECTIVES = ("all-gather", "statistics", "reduce-scatter", "all-reduce", "other collective")
GEMM, OTHER = "GEMM", "other compute"
_COLLECTIVE = re.compile(r"nccl|gloo", re.I)
_GEMM = re.compile(
    r"scaled_exp_kernel|grad_logits_kernel|nvjet|gemm|cutlass|xmma|splitKreduce|aten::(add)?mm", re.I
)


@dataclass(frozen=True)
class Span:
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


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times in which at least one of them runs, in order."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.start, span.end))
    return found


def covered(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of them runs."""
    return sum(end - start for start, end in union(spans))


def summarise(steps: Sequence[Sequence[Span]]) -> Row:
    """Milliseconds, means over the steps; spans of other streams may overlap.

    ``exposed_ms`` of a kind of collective is the time in which one runs and no compute does.
    """
    row: Row = dict.fromkeys(("step_ms", "gemm_ms", "compute_ms", "exposed_ms", "idle_ms"), 0.0)
    row["collectives"] = {}
    for step in filter(None, steps):
        compute = [span for span in step if span.kind not in COLLECTIVES]
        whole = max(span.end for span in step) - min(span.start for span in step)
        busy, computing = covered(step), covered(compute)
        times = {
            "step_ms": whole,
            "gemm_ms": covered(span for span in compute if span.kind == GEMM),
            "compute_ms": computing,
            "exposed_ms": busy - computing,
            "idle_ms": whole - busy,
        }
        for name, microseconds in times.items():
            row[name] += 1e-3 * microseconds / len(steps)
        for kind in COLLECTIVES:
            own = [span for span in step if span.kind == kind]
            if own:
                known = row["collectives"].setdefault(kind, {"count": 0.0, "ms": 0.0, "exposed_ms": 0.0})
                known["count"] += len(own) / len(steps)
                known["ms"] += 1e-3 * covered(own) / len(steps)
                known["exposed_ms"] += 1e-3 * (covered([*compute, *own]) - computing) / len(steps)
    return row


# --- recording ---------------------------------------------------------------------------------------


def recorded(action: Callable[[], Any], steps: int, world: World, path: Path, most: int) -> tuple[Any, str]:
    """The kernels (on a CPU: operators) of each of ``steps`` runs after two that warm up, and torch's table.

    Collectives (R > 1), beside ``action``'s: one MAX all-reduce before each step.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    def synchronise() -> None:
        if world.on_gpu:
            torch.cuda.synchronize()

    for _ in range(2):
        action()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * world.on_gpu
    with profile(activities=activities) as trace:
        for _ in range(steps):
            world.slowest([0.0])  # nobody begins long before the others
            synchronise()
            with record_function(STEP):
                action()
                synchronise()
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    order = f"self_{'device' if world.on_gpu else 'cpu'}_time_total"
    table = (
        trace.key_averages().table(sort_by=order, row_limit=most, max_name_column_width=80) if most else ""
    )
    return steps_of_trace(json.loads(path.read_text())["traceEvents"], world.on_gpu), table


def steps_of_trace(events: Iterable[Row], on_gpu: bool) -> list[list[Span]]:
    """The spans that begin within each step, of a trace in Chrome's format (microseconds)."""
    events = [event for event in events if event.get("ph") == "X"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [e for e in events if e.get("cat") in wanted] if on_gpu else _operators(events)
    spans = []
    for event in found:
        start, dtype = float(event["ts"]), event.get("args", {}).get("dtype", "")
        spans.append(Span(event["name"], start, start + float(event["dur"]), str(dtype)))
    marks = (e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    times = sorted((float(mark["ts"]), float(mark["ts"]) + float(mark["dur"])) for mark in marks)
    return [[span for span in spans if first <= span.start < last] for first, last in times]


def _operators(events: Sequence[Row]) -> list[Row]:
    """torch's operators and gloo's collectives; what runs within another would count twice."""
    found, ends = [], dict[int, float]()
    named = (e for e in events if e["name"].startswith(("aten::", "gloo:", "c10d::")))
    for event in sorted(named, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], float("-inf")):
            ends[event["tid"]] = event["ts"] + event["dur"]
            if not event["name"].startswith("c10d::"):  # the call; gloo's threads do the work
                found.append(event)
    return found


# --- the run -----------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    """Milliseconds a step; of a collective in all and exposed."""
    kinds = [kind for kind in COLLECTIVES if any(kind in row["collectives"] for row in rows)]
    head = ["shape", "T", "variant", "rank", "step", "GEMMs", "compute", "exposed", "idle"]
    lines = []
    for row in rows:
        line = [row["shape"], str(row["T"]), row["variant"], str(row["rank"])]
        line += [f"{row[f'{name}_ms']:.3f}" for name in ("step", "gemm", "compute", "exposed", "idle")]
        for kind in kinds:
            own = row["collectives"].get(kind)
            line.append(f"{own['ms']:.3f}, {own['exposed_ms']:.3f}" if own else "")
        lines.append(line)
    return tables.markdown([*head, *(f"{kind}, exposed" for kind in kinds)], lines, left=3)


def measure(given: argparse.Namespace, world: World, cell: Cell) -> tuple[list[Row], str]:
    """A row of every variant and rank, and torch's tables of rank 0. Collectives: an all-gather of rows."""
    problem = Problem.of(cell, world, dtype=DTYPES[given.dtype])
    found = {variant.key: variant for variant in megatron(world)}
    facts = {"tp": world.size, "sp": cell.sequence_parallel, "shape": cell.shape, "T": cell.num_tokens}
    rows: list[Row] = []
    text = ""
    for name in given.strategies:
        words = (cell.shape, cell.num_tokens, "sp" * cell.sequence_parallel, name, f"rank{world.rank}")
        path = TRACES / (re.sub(r"[^\w.-]+", "-", "-".join(map(str, filter(None, words)))) + ".json")
        if name in ROOFS:
            roof = Roof(problem, world)
            roof.resident = True
            roof.turn(name, 1, 0)  # builds the operands outside the trace
            step: Callable[[], Any] = partial(roof.turn, name, 0, 1)
            steps, table = recorded(step, given.steps, world, path, given.most)
            # Under sequence parallelism the roof is given hidden states that are gathered first.
            steps = [after_collectives(one) for one in steps]
            roof.release(for_good=True)
        else:
            variant = found[name] if name in found else ours(world, name)
            if variant.run is None:
                if world.rank == 0:
                    print(f"bench: {name}: {variant.why_not}", file=sys.stderr)
                continue
            step = partial(variant.run, problem, nothing)
            steps, table = recorded(step, given.steps, world, path, given.most)
        own = summarise(steps)
        own = {**facts, "variant": name, "rank": world.rank, "time_ms": round(own["step_ms"], 3), **own}
        rows += world.everyone(own)
        text += f"\n{cell}, {name}, rank 0:\n\n```text\n{table}\n```\n" if table else ""
        problem.reset()
    return rows, text


def after_collectives(step: Sequence[Span]) -> list[Span]:
    ready = max((span.end for span in step if span.kind in COLLECTIVES), default=float("-inf"))
    return [span for span in step if span.start >= ready]


def run(given: argparse.Namespace, world: World, source: Row) -> int:
    """`--preset profile`: what the command line asks for."""
    rows: list[Row] = []
    text = ""
    for cell in given.cells:
        world.sequence_parallel = cell.sequence_parallel
        found, more = measure(given, world, cell)
        rows, text = rows + found, text + more
    if world.rank == 0:
        facts = ", ".join(f"{key} {source[key]}" for key in ("commit", "device", "torch"))
        page = f"# Profile of the head\n\n{facts}. Milliseconds a step:\n\n{markdown(rows)}\n{text}"
        print(page, flush=True)
        if given.path:
            results.write(given.path, rows, source)
            results.write_whole(given.path.with_suffix(".md"), page)
            print(f"written: {given.path}")
    world.slowest([0.0])  # nobody leaves before rank 0 has written
    return 0
