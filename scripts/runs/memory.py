"""Where did the memory go? One training step's memory over time, flag off and on, the head coloured.

    python -m megatron_fused_ce memory -- torchrun --nproc-per-node 8 pretrain_gpt.py ... --train-iters 5
    python -m megatron_fused_ce memory --shape llama-3-8b --tokens 8192
    python -m megatron_fused_ce memory --draw build/memory_profile/memory_profile.json

With a command after ``--`` it is launched twice, without the flag and with it; each launch ends after
step --step, whose allocations one rank records by torch's memory snapshots. With --shape the head alone
runs, in this process. Allocations are told apart by their Python stacks (snapshots.py). Bytes
are those that were asked for; the allocator's own peak, which rounds them up, stands beside.

Kernels are waited for one by one (CUDA_LAUNCH_BLOCKING=1), so that the picture's time is the device's, in
per cent of the step: it does not tell how long a step takes in training. --host-time leaves that out. It
needs a GPU, --draw does not.

Writes memory_profile.json, memory_profile.png and, for torch's own viewer (https://pytorch.org/memory_viz),
a snapshot file of each run to --out. Snapshot files are pickles: open only your own. Exit status: 0
done, 2 bad input or no GPU.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.cli.command_line import (
    NO_LIMIT,
    Parser,
    UsageError,
    command,
    require_gpus,
    seconds,
    whole,
    writable_folder,
)
from megatron_fused_ce.plan.named_models import known_name
from megatron_fused_ce.scripts.bench.cases import SHAPES, Cell
from megatron_fused_ce.scripts.lib import pictures, tables
from megatron_fused_ce.scripts.lib.launches import Command, launch, split_command
from megatron_fused_ce.scripts.lib.results import write_whole
from megatron_fused_ce.scripts.lib.runner import SNAPSHOT, TIMELINE
from megatron_fused_ce.scripts.runs.snapshots import (
    BUFFERS,
    CATEGORIES,
    EMBEDDING,
    HEAD,
    INPUTS,
    LAYERS,
    MIB,
    NATIVE,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Recording,
    Timeline,
    read,
    write,
)

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_fused_ce.scripts.bench.problem import Case, World

#: Of the highest peak: less than that is hard to find in the picture, and not in its legend.
VISIBLE = 1 / 60
#: The head stands out; what lives as long as the training is grey.
COLOURS = {
    WEIGHTS: "#969696",
    INPUTS: "#b5b5b5",
    BUFFERS: "#c6c6c6",
    OPTIMIZER: "#dfdfdf",
    OTHER: "#e5d8bd",
    NATIVE: "#ccebc5",
    EMBEDDING: "#a6bddb",
    LAYERS: "#74a9cf",
    HEAD: "#d7301f",
}
MOST_MARKS = 12  # phases that are drawn
NUM_COLUMNS = 1200  # of the picture, about a pixel each


# --- what is printed and drawn -------------------------------------------------------------------


def table(timelines: Sequence[Timeline]) -> Table:
    """MiB at each run's peak, by category, and the head's own peak."""
    peaks = [timeline.peak() for timeline in timelines]
    rows = [("at the peak", [size for size, _, _ in peaks])]
    for category in reversed(CATEGORIES):
        sizes = [at_peak[category] for _, _, at_peak in peaks]
        if any(sizes):
            rows.append((f"  {category}", sizes))
    rows.append(("head at most", [timeline.peak(HEAD)[0] for timeline in timelines]))
    rows.append(("max_memory_allocated", [timeline.allocator_peak_bytes for timeline in timelines]))
    result = tables.terminal("", ["MiB", *(timeline.name for timeline in timelines)])
    for name, sizes in rows:
        result.add_row(name, *(f"{size / MIB:.1f}" for size in sizes))
    return result


def notes(timelines: Sequence[Timeline]) -> Iterator[str]:
    """What a reader of the table must know."""
    if len(timelines) == 2:
        off, on = (timeline.peak()[0] for timeline in timelines)
        yield f"the second's peak is {(off - on) / MIB:.1f} MiB lower, {(off - on) / off:.0%} of it"
    for timeline in timelines:
        if timeline.unaccounted_bytes:
            yield (
                f"{timeline.name}: events of {timeline.unaccounted_bytes} bytes are missing; what "
                "is drawn is off by that much at the step's end"
            )


def draw(timelines: Sequence[Timeline], path: Path) -> bool:
    """One panel a run, on the same axes; False without matplotlib."""
    plt = pictures.pyplot()
    if plt is None:
        return False
    from matplotlib.patches import Patch

    figure, panels = plt.subplots(
        len(timelines), 1, sharex=True, sharey=True, squeeze=False, layout="constrained",
        figsize=(9, 1.2 + 2.6 * len(timelines)),
    )  # fmt: skip
    highest = max(timeline.peak()[0] for timeline in timelines)
    unit, scale = ("GiB", MIB * 1024) if highest > 4096 * MIB else ("MiB", MIB)
    used: set[str] = set()
    for axes, timeline in zip(panels[:, 0], timelines, strict=True):
        used |= _draw_one(axes, timeline, unit, scale, VISIBLE * highest)
        axes.set_ylim(0, 1.22 * highest / scale)
        axes.set_ylabel(unit)
    facts = timelines[0].facts
    clock = "device time; each kernel is waited for" if facts.get("waits_for_kernels") else "host time"
    panels[-1, 0].set_xlabel(f"% of the step ({clock})")
    panels[-1, 0].set_xlim(0, 100)
    about = [facts[name] for name in ("what", "device") if facts.get(name)]
    figure.suptitle(": ".join(["Memory of one step", ", ".join(about)]), fontsize=10)
    patches = [Patch(color=COLOURS[name], label=name) for name in reversed(CATEGORIES) if name in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    pictures.save(figure, path)
    return True


def _draw_one(axes: Any, timeline: Timeline, unit: str, scale: int, visible: float) -> set[str]:
    """The categories stacked over time; returns those of ``visible`` bytes or more."""
    width, columns = timeline.columns(NUM_COLUMNS)
    # In no unit of time: a step whose kernels are waited for is slower than one in training.
    per_cent = 100 / (width * len(columns))
    times = [width * per_cent * i for i in range(len(columns) + 1)]
    used = [name for name in CATEGORIES if any(column[name] for column in columns)]
    below = [0.0] * len(times)
    for name in used:
        row = [column[name] / scale for column in (*columns, columns[-1])]
        above = [low + high for low, high in zip(below, row, strict=True)]
        axes.fill_between(
            times, below, above, step="post", color=COLOURS[name], linewidth=0, antialiased=False
        )
        below = above
    size, at, at_peak = timeline.peak()
    axes.plot([0, times[-1]], [size / scale] * 2, color="black", lw=0.8, ls=":")
    text = f"{timeline.name}: peak {size / scale:.2f} {unit}, of it head {at_peak[HEAD] / scale:.2f}"
    axes.text(0.005, 0.985, text, transform=axes.transAxes, ha="left", va="top", fontsize=9)
    axes.plot([at * per_cent], [size / scale], "v", color="black", ms=4)
    if len(timeline.marks) <= MOST_MARKS:
        for when, what in timeline.marks:
            axes.axvline(when * per_cent, ymax=0.9, color="black", lw=0.5, alpha=0.5)
            axes.annotate(
                what, (when * per_cent, 0.885), xycoords=("data", "axes fraction"), fontsize=7,
                xytext=(2, 0), textcoords="offset points", va="top",
            )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    return {name for name in used if any(column[name] >= visible for column in columns)}


def report(timelines: Sequence[Timeline], out: Path) -> None:
    from rich.console import Console

    Console().print(table(timelines))
    for note in notes(timelines):
        print(note)
    drawn = draw(timelines, out / "memory_profile.png")
    print(f"{out}: " + ("memory_profile.png" if drawn else "no picture: matplotlib is not installed"))


# --- runs ----------------------------------------------------------------------------------------


def of_launches(given: argparse.Namespace, words: Sequence[str]) -> list[Timeline]:
    """The same launch with the flag off and on."""
    asked = Command.of(words)
    timelines = []
    for name, flag in (("flag off", False), ("flag on", True)):
        folder = given.out.resolve() / name.replace(" ", "-")
        line = asked.through("--memory", str(folder), str(given.step), str(given.rank), flag=flag)
        print(f"launch, {name}: logs in {folder}", flush=True)
        launch(line, folder, given.timeout, lambda now: print(now, flush=True))
        if not (folder / TIMELINE).is_file():
            raise UsageError(f"the launch ended before step {given.step}: raise --train-iters")
        (timeline,) = read(folder / TIMELINE)
        timeline.name = name
        timeline.facts["what"] = f"{Path(asked.script[0]).name}, step {given.step}"
        timelines.append(timeline)
        print(f"for torch's viewer: {folder / SNAPSHOT}")
    return timelines


def of_head(given: argparse.Namespace) -> list[Timeline]:
    """The head alone, one step of each variant, on this process's GPU."""
    from megatron_fused_ce.scripts.bench.loss import megatron, ours
    from megatron_fused_ce.scripts.bench.problem import World

    try:
        given.shape = known_name(given.shape, SHAPES)
    except ValueError as error:
        raise UsageError(str(error)) from None
    world = World()
    timelines = []
    try:
        known = {case.name: case for case in megatron(world)}
        for name in given.variants:
            case = known.get(name) or ours(world, name)
            if case.why_not is not None:
                raise UsageError(f"{name}: {case.why_not}; choose others with --variants")
            timeline, snapshot = _step_of_head(case, world, given)
            path = given.out / f"{re.sub('[:/]', '-', name)}.pickle"
            write_whole(path, pickle.dumps(snapshot))
            print(f"for torch's viewer: {path}")
            timelines.append(timeline)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        world.close()
    return timelines


def _step_of_head(case: Case, world: World, given: argparse.Namespace) -> tuple[Timeline, dict[str, Any]]:
    from megatron_fused_ce.scripts.bench.loss import Loss

    cell = Cell.of(given.shape, given.tokens)
    recording = Recording()
    problem = Loss(cell, world)
    for _ in range(2):  # kernels compile, workspaces come to stay
        case.step(problem)
    problem.reset()
    phases = iter(("forward", "backward", "end"))
    recording.begin()
    case.step(problem, lambda: recording.mark(next(phases)))
    timeline, snapshot = recording.end(case.name, given.tokens * cell.vocab)
    timeline.facts["what"] = f"head of {given.shape}, T = {given.tokens}"
    timeline.facts["waits_for_kernels"] = not given.host_time
    return timeline, snapshot


def collect(given: argparse.Namespace, words: Sequence[str]) -> list[Timeline]:
    if words and given.shape:
        raise UsageError("give a launch after --, or --shape, not both")
    if not words and not given.shape:
        raise UsageError("give a launch after --, or --shape NAME, or --draw FILE")
    require_gpus(otherwise="--draw FILE draws a profile that was made elsewhere")
    timelines = of_launches(given, words) if words else of_head(given)
    write(timelines, given.out / "memory_profile.json", ["memory", *given.words])
    return timelines


# --- command line --------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser("python -m megatron_fused_ce memory", __doc__ or "")
    add = parser.add_argument
    add("--out", type=Path, help="[build/memory_profile; with --draw the file's folder]")
    add("--draw", type=Path, metavar="FILE", help="the table and the picture of a result again")
    add("--host-time", action="store_true", help="do not wait for each kernel")
    launches = parser.add_argument_group("a launch, after --")
    add = launches.add_argument
    add("--step", type=whole(), default=3, metavar="N", help="the step to record [3]")
    ranks = whole(-(10**6), 10**6)
    add("--rank", type=ranks, default=-1, metavar="R", help="the rank that records [-1: the last]")
    add("--timeout", type=seconds, default=NO_LIMIT, metavar="S", help="of one launch")
    head = parser.add_argument_group("the head alone")
    add = head.add_argument
    add("--shape", metavar="NAME", help="a model that the benchmark knows, such as llama-3-8b")
    add("--tokens", type=whole(), default=8192)
    add(
        "--variants",
        nargs="+",
        default=["megatron-unfused", "auto"],
        metavar="NAME",
        help="megatron-unfused, -native, -te, or a strategy [megatron-unfused auto]",
    )
    return parser


@command("memory")
def main(words: list[str]) -> int:
    own, launched = split_command(words)
    given = _parser().parse_args(own)
    given.words = words
    import rich  # noqa: F401 - before a launch of minutes, whose table needs it

    if given.draw is not None:
        timelines = read(given.draw)
        out = writable_folder(given.out or given.draw.parent)
    else:
        out = given.out = writable_folder(given.out or Path("build/memory_profile"))
        if not given.host_time:
            os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when CUDA starts
        timelines = collect(given, launched)
    report(timelines, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
