"""Where the time of one step of the head goes, kernel by kernel, beside its matrix products alone.

`python -m scripts.bench --preset profile`. Per variant (NAME[:C][/PASS][/MERGE], roof, megatron-te ...),
milliseconds a step: every kernel, by kind; *compute*, the time in which some kernel that is no collective
runs; *collectives*, the time in which one of those runs, and *exposed*, the part of it without compute;
*idle*, the rest between the first kernel and the last. *Contention* is what kernels lose beside a
collective: the time of those that run beside one for at least half of their time, less as many times the
same kernel's (of the same grid) that runs alone. The roof's kernels stand beside, so that a
product of ours can be held against the one it replaces.

With --tp R every rank is profiled: the rows are rank 0's, and the slowest rank's where that is another.
--name writes the tables, the figures, and a picture of rank 0's last step for each cell: compute above,
collectives below. The profiler itself costs a little, and steps begin with a barrier here: compare
kernels with kernels, and steps in the other presets.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fused_ce.scripts.bench.cases import ROOFS, Cell
from megatron_fused_ce.scripts.bench.measure import nothing
from megatron_fused_ce.scripts.bench.problem import DTYPES, Problem, World
from megatron_fused_ce.scripts.bench.roof import Roof
from megatron_fused_ce.scripts.bench.variants import megatron, ours
from megatron_fused_ce.scripts.lib import pictures, results, tables
from megatron_fused_ce.scripts.lib.results import Row

#: First match counts; collectives are told apart by `kind_of`.
KINDS = (
    ("our product", re.compile(r"_product_kernel")),
    ("product", re.compile(r"nvjet|gemm|cutlass|xmma|splitKreduce|aten::(add)?mm", re.I)),
    ("our rows", re.compile(r"_(row|rows|tiles|terms|loss|scaled|statistics|gradients)\w*_kernel")),
    ("copy or fill", re.compile(r"memcpy|memset|aten::(copy_|fill_|zero_)", re.I)),
)
_COLLECTIVE = re.compile(r"nccl|gloo", re.I)
#: Collectives by what they carry here, in the order of a step.
COLLECTIVES = ("all-gather", "statistics", "reduce-scatter", "all-reduce", "other collective")
#: Kind -> colour of the picture: products dark, the passes between them light, collectives warm.
COLOURS = {
    "our product": "#1f4e9c",
    "product": "#4c8fd6",
    "our rows": "#59a14f",
    "elementwise": "#9fd39a",
    "copy or fill": "#c7c7c7",
    "all-gather": "#f2a03d",
    "statistics": "#b07aa1",
    "reduce-scatter": "#d1495b",
    "all-reduce": "#8c2d3a",
    "other collective": "#7f7f7f",
}
#: A kernel's time beside a collective: at least BESIDE of it, or at most ALONE.
BESIDE, ALONE = 0.5, 0.02
#: Most characters of a result file with its timelines.
MOST_CHARS = 200_000
#: What the trace calls the profiled steps.
STEP = "a step of the head"


@dataclass(frozen=True)
class Span:
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float
    stream: int = 0  # a thread on a CPU
    grid: str = ""
    dtype: str = ""  # of a collective, where the trace tells

    @property
    def kind(self) -> str:
        return kind_of(self.name, self.dtype)


@dataclass
class Profile:
    """One variant's step on one rank: milliseconds, averaged over the profiled steps."""

    variant: str
    rank: int = 0
    step_ms: float = 0.0
    compute_ms: float = 0.0
    collectives_ms: float = 0.0
    exposed_ms: float = 0.0
    idle_ms: float = 0.0
    contention_ms: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)
    exposed_by_kind: dict[str, float] = field(default_factory=dict)
    #: kind, name, runs a step, ms a step
    kernels: list[tuple[str, str, float, float]] = field(default_factory=list)
    #: name, runs alone, ms of one, runs beside a collective, ms of one
    contention: list[tuple[str, int, float, int, float]] = field(default_factory=list)
    #: of the last step: kind, stream, microseconds from its first kernel, and of this one
    timeline: list[tuple[str, int, float, float]] = field(default_factory=list)


#: What a page takes from a row.
ROW_KEYS = (
    *("commit", "device", "torch", "tp", "sp", "shape", "T"),
    *(each.name for each in fields(Profile) if each.name != "timeline"),
)


def kind_of(name: str, dtype: str = "") -> str:
    """The kind of a kernel, of a collective by what it carries: statistics travel in fp32."""
    if not _COLLECTIVE.search(name):
        return next((kind for kind, pattern in KINDS if pattern.search(name)), "elementwise")
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    in_fp32 = dtype == "Float" or "f32" in word
    if "reducescatter" in word:
        return "reduce-scatter"
    if "allgather" in word:
        return "statistics" if in_fp32 else "all-gather"
    if "allreduce" in word:
        return "statistics" if in_fp32 or "max" in word else "all-reduce"
    return "other collective"


# --- intervals ---------------------------------------------------------------------------------------


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


def shared(start: float, end: float, times: Sequence[tuple[float, float]]) -> float:
    """Microseconds of ``start .. end`` that lie within ``times``."""
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in times)


# --- a step's figures --------------------------------------------------------------------------------


def summarise(variant: str, steps: Sequence[Sequence[Span]], rank: int = 0) -> Profile:
    """Means over the steps; spans of other streams may overlap."""
    profile = Profile(variant, rank)
    spans = [span for step in steps for span in step]
    if not spans:
        return profile
    per_step = 1e-3 / len(steps)
    sums: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    for span in spans:
        # NCCL has one kernel for all dtypes of a gather.
        key = f"{span.name} {span.dtype}".strip()
        kinds[key] = span.kind
        entry = sums.setdefault(key, [0.0, 0.0])
        entry[0] += 1 / len(steps)
        entry[1] += (span.end - span.start) * per_step
    profile.kernels = [(kinds[name], name, count, ms) for name, (count, ms) in sums.items()]
    profile.kernels.sort(key=lambda kernel: -kernel[3])
    by_kind: dict[str, float] = {}
    for kind, _, _, ms in profile.kernels:
        by_kind[kind] = by_kind.get(kind, 0.0) + ms
    profile.by_kind = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
    for step in steps:
        if not step:
            continue
        whole = max(span.end for span in step) - min(span.start for span in step)
        computing = union(span for span in step if span.kind not in COLLECTIVES)
        compute = sum(end - start for start, end in computing)
        busy = covered(step)
        collectives = [span for span in step if span.kind in COLLECTIVES]
        profile.step_ms += whole * per_step
        profile.compute_ms += compute * per_step
        profile.collectives_ms += covered(collectives) * per_step
        profile.exposed_ms += (busy - compute) * per_step
        profile.idle_ms += (whole - busy) * per_step
        for kind in COLLECTIVES:
            open_us = sum(
                end - start - shared(start, end, computing)
                for start, end in union(span for span in collectives if span.kind == kind)
            )
            if kind in by_kind:
                known = profile.exposed_by_kind.get(kind, 0.0)
                profile.exposed_by_kind[kind] = known + open_us * per_step
    profile.contention, lost = contention(steps)
    profile.contention_ms = lost * per_step
    first = min((span.start for span in steps[-1]), default=0.0)
    profile.timeline = [
        (span.kind, span.stream, round(span.start - first, 1), round(span.end - span.start, 1))
        for span in sorted(steps[-1], key=lambda span: span.start)
    ]
    return profile


def contention(steps: Sequence[Sequence[Span]]) -> tuple[list[tuple[str, int, float, int, float]], float]:
    """Kernels that ran both alone and beside a collective, and the microseconds lost in all steps."""
    alone: dict[tuple[str, str], list[float]] = {}
    beside: dict[tuple[str, str], list[float]] = {}
    for step in steps:
        collectives = union(span for span in step if span.kind in COLLECTIVES)
        for span in step:
            time = span.end - span.start
            if span.kind in COLLECTIVES or time <= 0:
                continue
            part = shared(span.start, span.end, collectives) / time
            if part >= BESIDE:
                beside.setdefault((span.name, span.grid), []).append(time)
            elif part <= ALONE:
                alone.setdefault((span.name, span.grid), []).append(time)
    rows, lost = [], 0.0
    for key in beside.keys() & alone.keys():
        one, other = (sum(times[key]) / len(times[key]) for times in (alone, beside))
        lost += (other - one) * len(beside[key])
        rows.append((key[0], len(alone[key]), 1e-3 * one, len(beside[key]), 1e-3 * other))
    rows.sort(key=lambda row: -row[3] * (row[4] - row[2]))
    return rows, lost


# --- recording ---------------------------------------------------------------------------------------


def recorded(action: Callable[[], Any], steps: int, world: World) -> list[list[Span]]:
    """The kernels of each of ``steps`` runs of ``action`` (operators on a CPU), after two that warm up.

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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return steps_of_trace(events, world.on_gpu)


def steps_of_trace(events: Iterable[Row], on_gpu: bool) -> list[list[Span]]:
    """The spans that begin within each step, of a trace in Chrome's format (microseconds)."""
    events = [event for event in events if event.get("ph") == "X"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [e for e in events if e.get("cat") in wanted] if on_gpu else _operators(events)
    spans = []
    for event in found:
        told = event.get("args", {})
        start = float(event["ts"])
        spans.append(
            Span(
                event["name"],
                start,
                start + float(event["dur"]),
                int(told.get("stream", event["tid"])),
                str(told.get("grid", "")),
                str(told.get("dtype", "")),
            )
        )
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


# --- what is written ---------------------------------------------------------------------------------


def cell_of(row: Row) -> str:
    parallel = f", TP {row['tp']}" + (" with sequence parallelism" if row.get("sp") else "")
    return f"{row['shape']}: T = {row['T']}{parallel}"


def cells(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(cell_of(row), []).append(row)
    return groups


def markdown(rows: Sequence[Row], most: int, pictures: dict[str, str]) -> str:
    """One cell after the other; ``pictures``: cell -> file name."""
    facts = ("commit", "device", "torch", "tp")
    heading = ", ".join(f"{key} {rows[0][key]}" for key in facts if rows)
    lines = ["# Profile of the head", "", f"By `scripts/bench/profile.py`: {heading}.", ""]
    for cell, group in cells(rows).items():
        lines += [f"## {cell}", ""]
        if cell in pictures:
            lines += [f"![Rank 0's last step]({pictures[cell]})", ""]
        lines += ["Milliseconds a step:", "", _table(group), ""]
        if any(row["exposed_by_kind"] for row in group):
            lines += ["Collectives, and what of them no compute hides:", "", _hidden(group), ""]
        for row in group:
            lines += _kernels(row, most)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _name(row: Row) -> str:
    return f"{row['variant']}, rank {row['rank']}" if row["tp"] > 1 else str(row["variant"])


def _table(rows: Sequence[Row]) -> str:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["by_kind"]))
    columns = ("step", "compute", "collectives", "exposed", "idle", "contention")
    lines = []
    for row in rows:
        values = [row[f"{column}_ms"] for column in columns]
        values += [row["by_kind"].get(kind, 0.0) for kind in kinds]
        lines.append([_name(row), *(f"{ms:.3f}" for ms in values)])
    return tables.markdown(["", *columns, *kinds], lines)


def _hidden(rows: Sequence[Row]) -> str:
    kinds = [kind for kind in COLLECTIVES if any(kind in row["by_kind"] for row in rows)]
    head = [word for kind in kinds for word in (kind, "exposed")]
    lines = []
    for row in (row for row in rows if row["exposed_by_kind"]):
        values = [(row["by_kind"].get(k, 0.0), row["exposed_by_kind"].get(k, 0.0)) for k in kinds]
        lines.append([_name(row), *(f"{ms:.3f}" for pair in values for ms in pair)])
    return tables.markdown(["", *head], lines)


def _kernels(row: Row, most: int) -> list[str]:
    def short(name: str) -> str:
        return f"`{name[:80]}`"

    if most == 0:
        return []
    of_kernels = [
        [short(name), kind, f"{count:g}", f"{ms:.3f}"] for kind, name, count, ms in row["kernels"][:most]
    ]
    text = [f"{_name(row)}:", ""]
    text.append(tables.markdown(["kernel", "kind", "a step", "ms"], of_kernels, left=2))
    if row["contention"]:
        head = ["kernel", "alone", "ms of one", "beside a collective", "ms of one", "ratio"]
        lines = [
            [short(name), alone, f"{one:.3f}", beside, f"{other:.3f}", f"{other / one:.3f}"]
            for name, alone, one, beside, other in row["contention"][:most]
        ]
        text += ["", tables.markdown(head, lines)]
    return [*text, ""]


def draw(cell: str, rows: Sequence[Row], path: Path) -> bool:
    """A picture of rank 0's timelines; False where there are none, or matplotlib is not there."""
    rows = [row for row in rows if row["rank"] == 0 and row.get("timeline")]
    if not rows:
        return False
    plt = pictures.pyplot()
    if plt is None:
        print("bench: no matplotlib, no picture; --render draws it", file=sys.stderr)
        return False
    from matplotlib.patches import Patch

    height = 0.9 + 0.62 * len(rows)
    figure, axes = plt.subplots(len(rows), 1, figsize=(11, height), sharex=True, squeeze=False)
    used = set()
    for axis, row in zip(axes[:, 0], rows, strict=True):
        bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for kind, _, start, time in row["timeline"]:
            bars.setdefault((int(kind in COLLECTIVES), kind), []).append((1e-3 * start, 1e-3 * time))
        for (lane, kind), spans in bars.items():
            used.add(kind)
            colour = COLOURS[kind]  # the edge parts a kernel from the next
            axis.broken_barh(spans, (-lane, 0.86), fc=colour, ec="white", linewidth=0.2)
        axis.set_yticks([0.43, -0.57], ["compute", "collectives"], fontsize=6)
        axis.set_ylim(-1.05, 0.95)
        axis.tick_params(axis="x", labelsize=7)
        label = f"{row['variant']}\n{row['step_ms']:.2f} ms"
        label += f"\nexposed {row['exposed_ms']:.2f}" if row["collectives_ms"] else ""
        axis.set_ylabel(label, rotation=0, ha="right", va="center", labelpad=48, fontsize=7)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    # Set once all bars are there: a panel's set_xlim would freeze the axis that they share.
    axes[-1, 0].set_xlim(0, 1.01 * last_ms(rows))
    axes[-1, 0].set_xlabel("ms", fontsize=7)
    figure.suptitle(f"{cell} ({rows[0]['device']})", fontsize=9)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
    figure.legend(handles=patches, loc="lower center", ncol=len(patches), fontsize=7, frameon=False)
    figure.subplots_adjust(left=0.2, right=0.99, top=1 - 0.35 / height, bottom=0.62 / height)
    pictures.save(figure, path, dpi=110)
    return True


def last_ms(rows: Sequence[Row]) -> float:
    """Where the last bar of a picture ends."""
    return max(1e-3 * float(start + time) for row in rows for _, _, start, time in row["timeline"])


def pictures_of(rows: Sequence[Row], path: Path) -> dict[str, str]:
    """Draws each cell beside ``path``; cell -> file name."""
    found = {}
    for cell, group in cells(rows).items():
        target = path.with_name(f"{path.stem}-{group[0]['shape']}-{group[0]['T']}.png")
        if draw(cell, group, target):
            found[cell] = target.name
    return found


def without_long_timelines(rows: Sequence[Row]) -> list[Row]:
    """Rank 0's timelines alone are drawn; they go, the last rows' first, where the file would be too long."""
    rows = [row | ({"timeline": []} if row["rank"] else {}) for row in rows]
    # A roof's says the least: product after product.
    for row in sorted(reversed(rows), key=lambda row: row["variant"] not in ROOFS):
        if sum(len(json.dumps(row["timeline"])) for row in rows) <= MOST_CHARS:
            break
        row["timeline"] = []
    return rows


def write_page(rows: Sequence[Row], path: Path, most: int) -> None:
    """The pictures and the page beside a result."""
    page = markdown(rows, most, pictures_of(rows, path))
    results.write_whole(path.with_suffix(".md"), page)


# --- the run -----------------------------------------------------------------------------------------


def profiles_of(given: argparse.Namespace, world: World, cell: Cell) -> list[Profile]:
    """Rank 0's profiles, each followed by the slowest rank's where that is another (on every rank)."""
    problem = Problem.of(cell, world, dtype=DTYPES[given.dtype])
    found = {variant.key: variant for variant in megatron(world)}
    profiles: list[Profile] = []
    for name in given.strategies:
        if name in ROOFS:
            roof = Roof(problem, world)
            roof.resident = True
            roof.turn(name, 1, 0)  # builds the operands outside the trace
            step: Callable[[], Any] = partial(roof.turn, name, 0, 1)
            steps = recorded(step, given.steps, world)
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
            steps = recorded(step, given.steps, world)
        profiles += shown(summarise(name, steps, world.rank), world)
        problem.reset()
    return profiles


def after_collectives(step: Sequence[Span]) -> list[Span]:
    ready = max((span.end for span in step if span.kind in COLLECTIVES), default=float("-inf"))
    return [span for span in step if span.start >= ready]


def shown(mine: Profile, world: World) -> list[Profile]:
    """Rank 0's and the slowest's. Collectives: one all-gather of objects (R > 1)."""
    if world.size == 1:
        return [mine]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.group)
    slowest = max(range(world.size), key=lambda rank: everyone[rank].step_ms)
    return [everyone[rank] for rank in sorted({0, slowest})]


def run(given: argparse.Namespace, world: World, source: Row) -> int:
    """`--preset profile`: what the command line asks for."""
    rows = []
    for cell in given.cells:
        world.sequence_parallel = cell.sequence_parallel
        facts = {"tp": world.size, "sp": cell.sequence_parallel, "shape": cell.shape, "T": cell.num_tokens}
        for profile in profiles_of(given, world, cell):
            own = asdict(profile)
            rows.append({**facts, **own, "time_ms": round(own["step_ms"], 3)})
    if world.rank == 0:
        shown = [{**source, **row} for row in rows]
        print(markdown(shown, given.most, {}), flush=True)
        if given.path:
            results.write(given.path, without_long_timelines(rows), source)
            write_page(shown, given.path, given.most)
            print(f"written: {given.path}")
    world.slowest([0.0])  # nobody leaves before rank 0 has written
    return 0
