"""Where did the memory go? One training step's memory over time, flag off and on, the head coloured.

    python -m megatron_fused_ce memory -- torchrun --nproc-per-node 8 pretrain_gpt.py ... --train-iters 5
    python -m megatron_fused_ce memory --draw build/memory_profile/memory_profile.json

The command after -- is launched twice, without the flag and with it; each launch ends after step --step,
whose allocations one rank records by torch's memory snapshots. They are told apart by their Python stacks.
Bytes are those that were asked for: the allocator's own peak, which rounds them up, stands beside. Kernels
are waited for one by one (CUDA_LAUNCH_BLOCKING=1, unless the environment has it), so that the picture's time
is the device's, in per cent of the step: it does not tell how long a step takes in training.

Writes memory_profile.json, memory_profile.png and, for torch's own viewer (https://pytorch.org/memory_viz),
a snapshot of each launch to --out: a pickle, open only your own. Exit status: 0 done, 2 bad input or no GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli import command_line as cli
from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import pictures, results, tables
from megatron_fused_ce.scripts.lib.launches import Command, launch, split_command
from megatron_fused_ce.scripts.lib.runner import TIMELINE

MIB = 1024 * 1024
WEIGHTS, INPUTS, BUFFERS, OPTIMIZER = "weights", "inputs", "parameter and gradient buffers", "optimizer"
OTHER, NATIVE, EMBEDDING, LAYERS, HEAD = "other", "backward without Python", "embedding", "layers", "head"
#: From the bottom of the picture to its top. What lives as long as the training is grey, the head stands out.
COLOURS = {
    WEIGHTS: "#969696", INPUTS: "#b5b5b5", BUFFERS: "#c6c6c6", OPTIMIZER: "#dfdfdf", OTHER: "#e5d8bd",
    NATIVE: "#ccebc5", EMBEDDING: "#a6bddb", LAYERS: "#74a9cf", HEAD: "#d7301f",
}  # fmt: skip
#: Of the highest peak: less than that is hard to find in the picture, and not in its legend.
VISIBLE = 1 / 60
NUM_COLUMNS = 1200  # of the picture, about a pixel each
#: Most events of one step: far above a step of 64 micro-batches of 80 layers.
MOST_EVENTS = 2_000_000
Frame = dict[str, Any]  # filename, name, line
#: category, pattern of the file, pattern of the function. The innermost frame that fits decides.
_RULES = (
    # The adapter and the launcher stand in the stacks of whole models.
    (HEAD, r"megatron_fused_ce/(?!adapter/|scripts/|launch|autoload)", ".*"),
    (HEAD, r"transformer_engine/.*cross_entropy", ".*"),
    (HEAD, r"megatron/core/(tensor_parallel/cross_entropy|fusions/fused_cross_entropy)\.py", ".*"),
    (HEAD, r"megatron/core/models/common/language_module/", r"compute_\w*loss"),
    (EMBEDDING, r"megatron/core/models/(gpt|mamba|hybrid)/\w+_model\.py", r"_preprocess"),
    (HEAD, r"megatron/core/models/(gpt|mamba|hybrid)/\w+_model\.py", r"_postprocess|forward"),
    (HEAD, r"megatron/core/transformer/multi_token_prediction\.py", r"\w*loss\w*"),
    (EMBEDDING, r"megatron/core/models/common/embeddings/", ".*"),
    (BUFFERS, r"megatron/core/distributed/", ".*"),
    (OPTIMIZER, r"megatron/core/optimizer/|(torch/optim|apex/optimizers|pytorch/optimizers)/", ".*"),
    # The file random.py: activations that are recomputed in the backward.
    (LAYERS, r"megatron/core/(tensor_parallel/random\.py|(transformer|ssm|fusions|extensions)/)", ".*"),
    (LAYERS, r"transformer_engine/", ".*"),
)
_BUILDS_MODEL = re.compile(r"get_model|build_model|model_provider|\w+_builder")
_EITHER = "output layer's or a local layer's"
#: Calls autograd's engine. On GPUs its own thread runs the backward, with no Python frame below.
_ENGINE = re.compile(r"_engine_run_backward|custom_backward")


@lru_cache(maxsize=65536)
def _category_of_frame(file: str, function: str) -> str | None:
    fits = (name for name, of_file, of in _RULES if re.search(of_file, file) and re.fullmatch(of, function))
    return next(fits, None)


def category_of(frames: Sequence[Frame]) -> str:
    """Of an allocation with this Python stack, innermost frame first.

    `_EITHER` where only the backward of Megatron's own linear layer is in it.
    """
    found: str | None = None
    for frame in frames:
        found = found or _category_of_frame(frame["filename"], frame["name"])
        if _BUILDS_MODEL.fullmatch(frame["name"]):
            return found if found in (BUFFERS, OPTIMIZER) else WEIGHTS
    if found is None and _has_linear(frames, "backward"):
        return _EITHER
    in_engine = not frames or any(_ENGINE.fullmatch(frame["name"]) for frame in frames)
    return found or (NATIVE if in_engine else OTHER)


def _has_linear(frames: Sequence[Frame], function: str) -> bool:
    """Of Megatron's own linear layer: the output layer's, and every layer's without Transformer Engine."""
    file = "megatron/core/tensor_parallel/layers.py"
    return any(frame["name"] == function and file in frame["filename"] for frame in frames)


# --- bytes over time -----------------------------------------------------------------------------


@dataclass
class Timeline:
    """One step's memory: what was there before it, and each allocation and free in it."""

    name: str
    base: dict[str, int] = field(default_factory=dict)  # bytes by category, before the step
    #: microseconds since the step began, bytes (a free's are negative), category
    events: list[tuple[int, int, str]] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)  # microseconds, what begins there
    #: Bytes that the events leave over at the step's end, or miss: not 0 where events were lost.
    unaccounted_bytes: int = 0
    allocator_peak_bytes: int = 0  # torch.cuda.max_memory_allocated of the step
    facts: dict[str, Any] = field(default_factory=dict)  # device, versions, commit, command, ...

    def states(self) -> Iterable[tuple[int, dict[str, int]]]:
        """(microseconds, bytes by category) before the first event and after each."""
        now = dict.fromkeys(COLOURS, 0) | self.base
        yield 0, now
        for at, num_bytes, category in self.events:
            now = now | {category: now[category] + num_bytes}
            yield at, now

    def peak(self, category: str | None = None) -> tuple[int, int, dict[str, int]]:
        """(bytes, microseconds, bytes by category there) where the sum, or one category, is largest."""
        sizes = ((now[category] if category else sum(now.values()), at, now) for at, now in self.states())
        return max(sizes, key=lambda state: state[0])

    @property
    def length_us(self) -> int:
        return max(1, *(at for at, _, _ in self.events), 1)

    def columns(self) -> list[dict[str, int]]:
        """The largest state in each column of a picture."""
        found, held, per_us = list[dict[str, int]](), dict.fromkeys(COLOURS, 0), NUM_COLUMNS / self.length_us
        for at, now in self.states():
            column = min(max(int(at * per_us), 0), NUM_COLUMNS - 1)
            found += [held] * (column + 1 - len(found))
            held, found[column] = now, max(found[column], now, key=lambda state: sum(state.values()))
        return found + [held] * (NUM_COLUMNS + 1 - len(found))


def _live_blocks(snapshot: dict[str, Any], device: int) -> list[dict[str, Any]]:
    """Of what tensors hold."""
    here = [segment["blocks"] for segment in snapshot["segments"] if segment.get("device", 0) == device]
    return [block for blocks in here for block in blocks if block["state"] == "active_allocated"]


def timeline_of(
    name: str, before: dict[str, Any], after: dict[str, Any], *, device: int = 0, begin_us: int = 0,
    num_logits: int = 0,
) -> Timeline:  # fmt: skip
    """From torch's snapshots at a step's begin and end; ``after`` has the step's trace.

    What autograd's own operators allocate has no stack; while the head holds logits, ``num_logits`` on this
    rank, their gradient's cast or copy is known by its bytes, those of so many bf16 or fp32 numbers. A tensor
    is freed at ``free_requested``, as in the allocator's own figures; its block may wait for other streams.
    """
    trace, timeline = after["device_traces"][device], Timeline(name)
    stacks = [entry.get("frames", ()) for entry in trace if entry["action"] == "alloc"]
    # Whether Megatron's linear layer serves in the model's layers too, and not as their head alone.
    local = any(category_of(frames) == LAYERS and _has_linear(frames, "forward") for frames in stacks)
    live: dict[int, tuple[int, str]] = {}

    def hold(address: int, size: int, frames: Sequence[Frame]) -> str:
        found = category_of(frames)
        if found == _EITHER:
            found = LAYERS if local else HEAD
        elif found == NATIVE and size in (2 * num_logits, 4 * num_logits):
            of_head = sum(num_bytes for num_bytes, category in live.values() if category == HEAD)
            found = HEAD if of_head >= 2 * num_logits else NATIVE
        live[address] = size, found
        return found

    for block in _live_blocks(before, device):
        category = hold(block["address"], size := block["requested_size"], block.get("frames", ()))
        timeline.base[category] = timeline.base.get(category, 0) + size
    for entry in trace:
        address, action = entry.get("addr"), entry["action"]  # an "oom" has no address
        if action == "alloc":
            size, category = entry["size"], hold(address, entry["size"], entry.get("frames", ()))
        elif action == "free_requested" and address in live:
            size, category = live.pop(address)
            size = -size
        else:
            continue
        timeline.events.append((entry["time_us"] - begin_us, size, category))
    end = sum(block["requested_size"] for block in _live_blocks(after, device))
    timeline.unaccounted_bytes = sum(size for size, _ in live.values()) - end
    return timeline


class Recording:
    """Memory history of the current GPU: from construction on of who holds what, of a step by event."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        torch.cuda.init()
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")

    def begin(self) -> None:
        """The step begins. Waits for the device."""
        self._cuda.synchronize()
        self._before = self._cuda.memory._snapshot()
        self._cuda.reset_peak_memory_stats()
        self.marks: list[tuple[int, str]] = []
        self._begin_us = time.time_ns() // 1000  # on the clock of the allocator's trace
        self._cuda.memory._record_memory_history("all", "alloc", "python", MOST_EVENTS, clear_history=True)

    def mark(self, what: str) -> None:
        """``what`` begins now."""
        self.marks.append((time.time_ns() // 1000 - self._begin_us, what))

    def end(self, name: str, num_logits: int) -> tuple[Timeline, dict[str, Any]]:
        """The step is over: its timeline, and torch's snapshot, a pickle that nothing here reads."""
        self._cuda.synchronize()
        peak, snapshot = self._cuda.max_memory_allocated(), self._cuda.memory._snapshot()
        self._cuda.memory._record_memory_history(None)
        where: dict[str, Any] = {"device": self._cuda.current_device(), "begin_us": self._begin_us}
        timeline = timeline_of(name, self._before, snapshot, num_logits=num_logits, **where)
        timeline.marks, timeline.allocator_peak_bytes = self.marks, peak
        timeline.facts = {"device": self._cuda.get_device_name()}  # versions: the result file's
        return timeline, snapshot


def write(timelines: Sequence[Timeline], path: Path, command: Sequence[str]) -> None:
    """A result file, a row a timeline; categories as numbers of its ``categories``."""
    number, rows = {category: i for i, category in enumerate(COLOURS)}, []
    for timeline in timelines:
        events = [[at, size, number[name]] for at, size, name in timeline.events]
        own = {"variant": timeline.name or "step", "peak_mib": timeline.peak()[0] / MIB, "events": events}
        rows.append({"shape": timeline.facts.get("what", "step"), **asdict(timeline), **own})
    device = timelines[0].facts.get("device", "")
    results.write(path, rows, results.made_by(device, command, categories=list(COLOURS)))


def read(path: Path) -> list[Timeline]:
    """Of a file of `write`. Raises UsageError."""
    content, known = results.read(path), Timeline.__dataclass_fields__
    try:
        names = content["made_by"]["categories"]
        rows = [Timeline(**{key: row[key] for key in row if key in known}) for row in content["rows"]]
        for row in rows:
            row.events = [(int(at), int(size), names[i]) for at, size, i in row.events]
            row.marks = [(int(at), str(what)) for at, what in row.marks]
        if not rows or not {*names}.union(*(row.base for row in rows)) <= set(COLOURS):
            raise ValueError("no timeline in it, or a category is not known")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise UsageError(f"{path} is no result of this command: {type(error).__name__}: {error}") from None
    return rows


# --- what is printed and drawn -------------------------------------------------------------------


def report(timelines: Sequence[Timeline], out: Path) -> None:
    """MiB at each run's peak, by category, and the head's own peak; the picture."""
    from rich.console import Console

    table = tables.terminal("", ["MiB", *(timeline.name for timeline in timelines)])
    peaks = [timeline.peak() for timeline in timelines]
    rows = {"at the peak": [size for size, _, _ in peaks]}
    rows |= {f"  {name}": [at_peak[name] for _, _, at_peak in peaks] for name in reversed(COLOURS)}
    rows["head at most"] = [timeline.peak(HEAD)[0] for timeline in timelines]
    rows["max_memory_allocated"] = [timeline.allocator_peak_bytes for timeline in timelines]
    for name, sizes in rows.items():
        if any(sizes):
            table.add_row(name, *(f"{size / MIB:.1f}" for size in sizes))
    Console().print(table)
    if len(peaks) == 2:
        off, on = rows["at the peak"]
        print(f"the second's peak is {(off - on) / MIB:.1f} MiB lower, {(off - on) / off:.0%} of it")
    for one in (timeline for timeline in timelines if timeline.unaccounted_bytes):
        print(f"{one.name}: events of {one.unaccounted_bytes} bytes are missing in what is drawn")
    drawn = draw(timelines, out / "memory_profile.png")
    print(f"{out}: " + ("memory_profile.png" if drawn else "no picture: matplotlib is not installed"))


def draw(timelines: Sequence[Timeline], path: Path) -> bool:
    """One panel a run, on the same axes, the categories stacked over time; False without matplotlib."""
    if (plt := pictures.pyplot()) is None:
        return False
    num, facts, peaks = len(timelines), timelines[0].facts, [timeline.peak() for timeline in timelines]
    shared: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, panels = plt.subplots(num, 1, figsize=(9, 1.2 + 2.6 * num), **shared)
    highest, columns = max(size for size, _, _ in peaks), [timeline.columns() for timeline in timelines]
    unit, scale = ("GiB", MIB * 1024) if highest > 4096 * MIB else ("MiB", MIB)
    # In no unit of time: a step whose kernels are waited for is slower than one in training.
    times = [100 * i / NUM_COLUMNS for i in range(NUM_COLUMNS + 1)]
    plain: dict[str, Any] = {"step": "post", "linewidth": 0, "antialiased": False}
    for axes, timeline, of, (size, at, at_peak) in zip(panels[:, 0], timelines, columns, peaks, strict=True):
        stack = {name: [c[name] / scale for c in of] for name in COLOURS if any(c[name] for c in of)}
        for fill in axes.stackplot(times, [*stack.values()], colors=[COLOURS[n] for n in stack], **plain):
            fill.set_edgecolor("face")
        axes.axhline(size / scale, color="black", lw=0.8, ls=":")
        text = f"{timeline.name}: peak {size / scale:.2f} {unit}, of it head {at_peak[HEAD] / scale:.2f}"
        axes.text(0.005, 0.985, text, transform=axes.transAxes, ha="left", va="top", fontsize=9)
        axes.plot([at * 100 / timeline.length_us], [size / scale], "v", color="black", ms=4)
        beside = {"xycoords": ("data", "axes fraction"), "xytext": (2, 0), "textcoords": "offset points"}
        for when, what in timeline.marks if len(timeline.marks) <= 12 else ():
            when_is = when * 100 / timeline.length_us
            axes.axvline(when_is, ymax=0.9, color="black", lw=0.5, alpha=0.5)
            axes.annotate(what, (when_is, 0.885), fontsize=7, va="top", **beside)
        axes.set(xlim=(0, 100), ylim=(0, 1.22 * highest / scale), ylabel=unit)
    clock = "device time; each kernel is waited for" if facts.get("waits_for_kernels") else "host time"
    panels[-1, 0].set_xlabel(f"% of the step ({clock})")
    about = [facts[name] for name in ("what", "device") if facts.get(name)]
    figure.suptitle(": ".join(["Memory of one step", ", ".join(about)]), fontsize=10)
    largest = {name: max(column[name] for of in columns for column in of) for name in COLOURS}
    shown = [name for name in reversed(COLOURS) if largest[name] >= max(VISIBLE * highest, 1)]
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name], label=name) for name in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    pictures.save(figure, path)
    return True


@cli.command("memory")
def main(words: list[str]) -> int:
    own, launched = split_command(words)
    parser = cli.Parser("python -m megatron_fused_ce memory", __doc__ or "")
    add, ranks = parser.add_argument, cli.whole(-(10**6), 10**6)
    add("--out", type=Path, help="[build/memory_profile; with --draw the file's folder]")
    add("--draw", type=Path, metavar="FILE", help="the table and the picture of a result again")
    add("--step", type=cli.whole(), default=3, metavar="N", help="the step to record [3]")
    add("--rank", type=ranks, default=-1, metavar="R", help="the rank that records [-1: the last]")
    add("--timeout", type=cli.seconds, default=cli.NO_LIMIT, metavar="S", help="of one launch")
    given = parser.parse_args(own)
    default = given.draw.parent if given.draw else Path("build/memory_profile")
    given.out = cli.writable_folder(given.out or default)
    if given.draw:
        timelines = read(given.draw)
    elif not launched:
        raise UsageError("give a launch after --, or --draw FILE")
    else:
        cli.require_gpus("--draw FILE draws a profile that was made elsewhere")
        os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")
        asked, timelines = Command.of(launched), []
        for name, flag in (("flag off", False), ("flag on", True)):
            folder = given.out.resolve() / name.replace(" ", "-")
            line = asked.through("--memory", str(folder), str(given.step), str(given.rank), flag=flag)
            launch(line, folder, given.timeout, name)
            if not (folder / TIMELINE).is_file():
                raise UsageError(f"the launch ended before step {given.step}: raise --train-iters")
            timelines += read(folder / TIMELINE)
            timelines[-1].name = name
            timelines[-1].facts["what"] = f"{Path(asked.script[0]).name}, step {given.step}"
        write(timelines, given.out / "memory_profile.json", ["memory", *words])
    report(timelines, given.out)
    return 0
