"""One step's allocations: recorded by torch's caching allocator, sorted by who asked for them.

`Recording` runs where the GPU is. It turns the snapshot into a `Timeline` in the same process: torch's
snapshot files are pickles, which nothing here ever reads; they are written for torch's own viewer.
The rest needs neither torch nor a GPU.

Bytes are those asked for. The allocator's own figures (``max_memory_allocated``) round each up: to 512
bytes, and by up to 1 MiB where a large block is not worth splitting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import results

MIB = 1024 * 1024
HEAD, LAYERS, EMBEDDING, OPTIMIZER = "head", "layers", "embedding", "optimizer"
BUFFERS, WEIGHTS, INPUTS = "parameter and gradient buffers", "weights", "inputs"
NATIVE, OTHER = "backward without Python", "other"
#: From the bottom of the picture to its top.
CATEGORIES = (WEIGHTS, INPUTS, BUFFERS, OPTIMIZER, OTHER, NATIVE, EMBEDDING, LAYERS, HEAD)

#: Most events of one step: far above a step of 64 micro-batches of 80 layers.
MOST_EVENTS = 2_000_000

Frame = dict[str, Any]  # filename, name, line


# --- who asked for it ----------------------------------------------------------------------------

#: category, pattern of the file, pattern of the function. The innermost frame that fits decides.
_RULES = tuple(
    (category, re.compile(file), re.compile(function or ".*"))
    for category, file, function in (
        # The adapter and the launcher stand in the stacks of whole models.
        (HEAD, r"megatron_fused_ce/(?!adapter/|scripts/|launch|autoload)", ""),
        (HEAD, r"megatron/core/(tensor_parallel/cross_entropy|fusions/fused_cross_entropy)\.py", ""),
        (HEAD, r"transformer_engine/.*cross_entropy", ""),
        (HEAD, r"megatron/core/models/common/language_module/", r"compute_\w*loss"),
        (EMBEDDING, r"megatron/core/models/(gpt|mamba|hybrid)/\w+_model\.py", r"_preprocess"),
        (HEAD, r"megatron/core/models/(gpt|mamba|hybrid)/\w+_model\.py", r"_postprocess|forward"),
        (HEAD, r"megatron/core/transformer/multi_token_prediction\.py", r"\w*loss\w*"),
        (EMBEDDING, r"megatron/core/models/common/embeddings/", ""),
        (BUFFERS, r"megatron/core/distributed/", ""),
        (
            OPTIMIZER,
            r"megatron/core/optimizer/|torch/optim/|apex/optimizers/|"
            r"transformer_engine/pytorch/optimizers/",
            "",
        ),
        # Activations that are recomputed in the backward.
        (LAYERS, r"megatron/core/tensor_parallel/random\.py", ""),
        (LAYERS, r"megatron/core/(transformer|ssm|fusions|extensions)/|transformer_engine/", ""),
        (INPUTS, r"scripts/bench/(problem|loss)\.py", "__init__"),
        # The head alone: its layer's forward, which in a model `_postprocess` stands around.
        (HEAD, r"scripts/bench/loss\.py", ""),
    )
)
_BUILDS_MODEL = re.compile(r"get_model|build_model|model_provider|\w+_builder")
#: Megatron's own linear layer: the output layer's, and every layer's where Transformer Engine has none.
_LINEAR = re.compile(r"megatron/core/tensor_parallel/layers\.py")
_EITHER = "output layer's or a local layer's"
#: Calls autograd's engine. On GPUs its own thread runs the backward, with no Python frame below.
_ENGINE = re.compile(r"_engine_run_backward|custom_backward")


@lru_cache(maxsize=65536)
def _category_of_frame(file: str, function: str) -> str | None:
    for category, file_pattern, function_pattern in _RULES:
        if file_pattern.search(file) and function_pattern.fullmatch(function):
            return category
    return None


def category_of(frames: Sequence[Frame]) -> str:
    """Of an allocation with this Python stack, innermost frame first.

    `_EITHER` where only Megatron's own linear layer's backward is in it: see `settle`.
    """
    found: str | None = None
    for frame in frames:
        found = found or _category_of_frame(frame["filename"], frame["name"])
        if _BUILDS_MODEL.fullmatch(frame["name"]):
            return found if found in (BUFFERS, OPTIMIZER) else WEIGHTS
    if found is not None:
        return found
    if any(_is_linear(frame, "backward") for frame in frames):
        return _EITHER
    in_engine = any(_ENGINE.fullmatch(frame["name"]) for frame in frames)
    return NATIVE if in_engine or not frames else OTHER


def _is_linear(frame: Frame, function: str) -> bool:
    return frame["name"] == function and bool(_LINEAR.search(frame["filename"]))


def has_local_layers(stacks: Iterable[Sequence[Frame]]) -> bool:
    """Whether Megatron's linear layer serves in the model's layers too, and not as their head alone."""
    return any(
        category_of(frames) == LAYERS and any(_is_linear(frame, "forward") for frame in frames)
        for frames in stacks
    )


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
        """(microseconds, bytes by category) before the first event and after each. One dict, changed."""
        now = dict.fromkeys(CATEGORIES, 0) | self.base
        yield 0, now
        for at, num_bytes, category in self.events:
            now[category] += num_bytes
            yield at, now

    def peak(self, category: str | None = None) -> tuple[int, int, dict[str, int]]:
        """(bytes, microseconds, bytes by category there) where the sum, or one category, is largest."""
        best = (-1, 0, dict[str, int]())
        for at, now in self.states():
            size = sum(now.values()) if category is None else now[category]
            if size > best[0]:
                best = (size, at, dict(now))
        return best

    def columns(self, num: int) -> tuple[float, list[dict[str, int]]]:
        """(microseconds of a column, bytes by category in each) for a picture ``num`` columns wide.

        Of the states that fall into a column its largest: a spike narrower than that is still seen.
        """
        end = max((at for at, _, _ in self.events), default=0)
        width = max(end, 1) / num
        found: list[dict[str, int]] = []
        held = dict.fromkeys(CATEGORIES, 0)
        for at, now in self.states():
            column = min(max(int(at / width), 0), num - 1)
            found += [held] * (column + 1 - len(found))
            held = dict(now)
            if sum(held.values()) > sum(found[column].values()):
                found[column] = held
        return width, found + [held] * (num - len(found))


def live_blocks(snapshot: dict[str, Any], device: int) -> dict[int, dict[str, Any]]:
    """Address -> block, of what tensors hold."""
    return {
        block["address"]: block
        for segment in snapshot["segments"]
        if segment.get("device", 0) == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def timeline_of(
    name: str,
    before: dict[str, Any],
    after: dict[str, Any],
    *,
    device: int = 0,
    begin_us: int = 0,
    num_logits: int = 0,
) -> Timeline:
    """From torch's snapshots at a step's begin and end; ``after`` has the step's trace.

    ``num_logits``: elements of the whole logits on this rank. What autograd's own operators allocate has no
    stack; while the head holds logits, their gradient's cast or copy is known by its bytes, which are
    those of so many bf16 or fp32 numbers.

    A tensor's bytes go where it is freed (``free_requested``), as in the allocator's own
    ``allocated_bytes``; the block may wait longer for other streams.
    """
    held = live_blocks(before, device)
    trace = after["device_traces"][device]
    stacks = [entry.get("frames", ()) for entry in trace if entry["action"] == "alloc"]
    either = LAYERS if has_local_layers(stacks) else HEAD

    live: dict[int, tuple[int, str]] = {}
    head_bytes = 0

    def hold(address: int, size: int, frames: Sequence[Frame]) -> str:
        nonlocal head_bytes
        found = category_of(frames)
        if found == _EITHER:
            found = either
        elif found == NATIVE and head_bytes >= 2 * num_logits > 0:
            found = HEAD if size in (2 * num_logits, 4 * num_logits) else NATIVE
        head_bytes += size if found == HEAD else 0
        live[address] = size, found
        return found

    timeline = Timeline(name)
    for address, block in held.items():
        size = block["requested_size"]
        of_block = hold(address, size, block.get("frames", ()))
        timeline.base[of_block] = timeline.base.get(of_block, 0) + size
    for number, entry in enumerate(trace):
        at = entry.get("time_us", begin_us + number) - begin_us
        address = entry.get("addr", 0)  # an "oom" has none
        if entry["action"] == "alloc":
            of_block = hold(address, entry["size"], entry.get("frames", ()))
            timeline.events.append((at, entry["size"], of_block))
        elif entry["action"] == "free_requested" and address in live:
            size, of_block = live.pop(address)
            head_bytes -= size if of_block == HEAD else 0
            timeline.events.append((at, -size, of_block))
    end = sum(block["requested_size"] for block in live_blocks(after, device).values())
    timeline.unaccounted_bytes = sum(size for size, _ in live.values()) - end
    return timeline


# --- recording, on a GPU -------------------------------------------------------------------------


class Recording:
    """Memory history of the current GPU: from construction on of who holds what, of a step by event."""

    def __init__(self) -> None:
        import torch

        self._memory = torch.cuda.memory
        self._torch = torch
        torch.cuda.init()
        self._memory._record_memory_history("state", context="state", stacks="python")

    def begin(self) -> None:
        """The step begins. Waits for the device."""
        self._torch.cuda.synchronize()
        self._before = self._memory._snapshot()
        self._torch.cuda.reset_peak_memory_stats()
        self.marks: list[tuple[int, str]] = []
        self._begin_us = now_us()
        self._memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MOST_EVENTS, clear_history=True
        )

    def mark(self, what: str) -> None:
        """``what`` begins now."""
        self.marks.append((now_us() - self._begin_us, what))

    def end(self, name: str, num_logits: int) -> tuple[Timeline, dict[str, Any]]:
        """The step is over: its timeline (`timeline_of`), and torch's snapshot. Waits for the device."""
        self._torch.cuda.synchronize()
        peak = self._torch.cuda.max_memory_allocated()
        snapshot = self._memory._snapshot()
        self._memory._record_memory_history(None)
        device = self._torch.cuda.current_device()
        timeline = timeline_of(
            name, self._before, snapshot, device=device, begin_us=self._begin_us, num_logits=num_logits
        )
        timeline.marks = self.marks
        timeline.allocator_peak_bytes = peak
        timeline.facts = {"device": self._torch.cuda.get_device_name(), "torch": self._torch.__version__}
        return timeline, snapshot


def now_us() -> int:
    """On the clock of the allocator's trace."""
    return time.time_ns() // 1000


# --- the file ------------------------------------------------------------------------------------


def write(timelines: Sequence[Timeline], path: Path, command: Sequence[str]) -> None:
    """A result file, a row a timeline; categories as numbers of its ``categories``."""
    number = {category: i for i, category in enumerate(CATEGORIES)}
    rows = []
    for timeline in timelines:
        row = asdict(timeline)
        row["events"] = [[at, size, number[name]] for at, size, name in timeline.events]
        row |= {"variant": timeline.name or "step", "peak_mib": timeline.peak()[0] / MIB}
        rows.append({"shape": timeline.facts.get("what", "step"), **row})
    device = timelines[0].facts.get("device", "")
    results.write(path, rows, results.made_by(device, command, categories=list(CATEGORIES)))


def read(path: Path) -> list[Timeline]:
    """Of a file of `write`. Raises UsageError."""
    content = results.read(path)
    try:
        names = content["made_by"]["categories"]
        fields = Timeline.__dataclass_fields__
        timelines = []
        for item in content["rows"]:
            timeline = Timeline(**{name: item[name] for name in fields if name in item})
            timeline.events = [(int(at), int(size), names[i]) for at, size, i in timeline.events]
            timeline.marks = [(int(at), str(what)) for at, what in timeline.marks]
            if not {*timeline.base, *names} <= set(CATEGORIES):
                raise ValueError("a category is not known")
            timelines.append(timeline)
        if not timelines:
            raise ValueError("no timeline in it")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is no result of this command: {what}") from None
    return timelines
