"""What a plan says: the list of its sentences, and which of them hold.

Every line that ``plan`` prints outside its tables is one of :data:`SENTENCES`;
``tests/tools/test_plan_sentences.py`` makes each of them true and, in a neighbour case, false.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.estimate.advice import (
    LENGTH_STEP,
    LONGEST,
    TIGHT,
    WORTH,
    Advice,
    Way,
    recommended_way,
    stock_way,
)
from megatron_fused_ce.estimate.heads import StockPath
from megatron_fused_ce.estimate.launch_script import TrainingLaunch
from megatron_fused_ce.estimate.peaks import MOMENTS
from megatron_fused_ce.estimate.search import MOST_GPUS, Found, Search
from megatron_fused_ce.estimate.setting import Setting
from megatron_fused_ce.estimate.static import parameters
from megatron_fused_ce.planner import MIB

GIB = 2**30
#: By name. GiB are of one GPU; "the flag" is the one that the first sentence names.
SENTENCES = {
    # The answer: one of these, first.
    "use": "Use it: peak {after} GiB a GPU with {flags}, {before} without ({saved} saved); {usable} usable.",
    "needed": "Use it: {after} GiB a GPU with {flags} fit, {before} without do not; {usable} usable.",
    "leave out": "Leave it out: peak {before} GiB a GPU without {flags}, {after} with it; {usable} usable.",
    "does not fit": "Not enough memory: {before} GiB a GPU without {flags}, {after} with; {usable} usable.",
    # Why.
    "tight": "{sum} GiB may still run out: {left} are left beside a largest tensor of {largest}, less than "
    "{part:.0%} of it; a run on an H200 with 21% ran out of memory, one with 37% trained.",
    "place": "Memory is highest {place}, with and without the flag.",
    "places": "Memory is highest {before} without the flag, {after} with it.",
    "place of no loss": "Memory is highest {place}, with and without the flag: no loss can lower it.",
    "little": "The flag saves less than {part:.0%} of the GPU's memory.",
    "more": "The flag takes {more} GiB more: an fp32 sum of the output layer's weight gradient.",
    "speed": "For speed alone: on an H200 the flag took {ratio} of the time of {loss} (output layer and "
    "loss, {tokens} tokens, H {hidden}, V {vocab}: {source}).",
    "how": "The flag would run as {words}.",
    "budget": "No plan takes {budget} MiB or less (--fused-ce-memory-mb): the launch takes the smallest, "
    "{least} MiB.",
    "longest": "Longest sequence that fits, all else as asked: {before} without the flag, {after} with it.",
    "lever": "Still short of memory? {flags}: peak {peak} GiB, {saved} less; output layer and loss are "
    "then predicted to take {slower} times as long.",
    # What fits instead.
    "none here": "Nothing that was tried fits on {gpus} {who} the flag.",
    "none": "Nothing that was tried fits on {most} GPUs or fewer {who} the flag.",
    "fits both": "It fits on {gpus}{adding}: peak {before} GiB without the flag, {after} with it.",
    "fits with": "With {flags} it fits on {gpus}{adding}: peak {peak} GiB.",
    "fits without": "Without the flag it fits on {gpus}{adding}: peak {peak} GiB.",
    "tried": "Tried, cheapest first: distributed optimizer, sequence, expert, tensor (up to {node}), context "
    "and pipeline parallelism, selective and full recomputation.",
    "ask node": "How many GPUs has a node? With --gpus-per-node N the plan looks for what fits.",
    # What it is about.
    "measured": "Megatron measured a peak of {measured} GiB (its max allocated, the largest rank's); planned "
    "for that run: {planned}.",
    "measured before": "The run in the log, without these changes, peaked at {measured} GiB (Megatron's max "
    "allocated, the largest rank's).",
    "died": "The run in the log ended out of memory.",
    "setting": "{model}: {billions} billion parameters on {gpus} x {gpu}: {over}.",
    "batch": "{sequence} tokens a sequence, {micro} in a micro-batch, {dtype}; one rank's head: {tokens} "
    "tokens × {rows} of {vocab} vocabulary rows.",
    "memory": "Of a GPU's {capacity} GiB {overhead} are set aside for driver and NCCL (--overhead).",
    "not measured": "Measured in no run or in one, derived from Megatron's code: {kinds}.",
}
#: Megatron's own losses, for people.
LOSSES = {
    "unfused": "Megatron, unfused",
    "native": "Megatron, native fusion",
    "te": "Transformer Engine",
}
#: ms of the output layer and its loss on an H200 at (T, H, V), forward and backward, and of the flag's in the
#: last place: 2026-11-21-h200-reach-llama3-8b.json.
MEASURED_AT = (8192, 4096, 128256)
MEASURED_MS = {"unfused": 54.2, "native": 48.1, "te": 40.7, "flag": 38.3}
MEASURED_IN = "docs/benchmarks/2026-11-21.md"
#: Part of the measured T*H*V from which the ratio is told.
COMPARABLE = 1 / 4


@dataclass(frozen=True)
class Said:
    """One sentence, by its name in :data:`SENTENCES`."""

    name: str
    text: str


def say(name: str, **values: object) -> Said:
    return Said(name, SENTENCES[name].format(**values))


@dataclass(frozen=True)
class Result:
    """A plan's inputs and results."""

    #: of the model or the launch's script, for a title
    name: str
    setting: Setting
    advice: Advice
    #: whole sentences about the launch's arguments
    notes: list[str]
    #: None where a log does not say how many GPUs a node has
    search: Search | None
    others: tuple[StockPath, ...] = ()
    launch: TrainingLaunch | None = None
    #: whether the launch has the flag already
    has_flag: bool = False

    @property
    def now(self) -> Way:
        """How the launch computes its loss as it is."""
        advice = self.advice
        return advice.way(self.setting.training.fused_ce.strategy) if self.has_flag else advice.baseline

    @cached_property
    def fits_without(self) -> Found | None:
        """The cheapest change with which the launch's own loss fits, where it does not as asked."""
        if self.search is None or self.advice.baseline.verdict == "fits":
            return None
        name = self.advice.baseline.head.name
        return self._find(partial(stock_way, gpu=self.advice.gpu, name=name, others=self.others))

    @cached_property
    def fits_with(self) -> Found | None:
        """The same with the flag, where neither fits as asked."""
        if self.search is None or self.advice.decision != "does not fit":
            return None
        return self._find(partial(recommended_way, gpu=self.advice.gpu))

    def _find(self, way: partial[Way]) -> Found | None:
        assert self.search is not None
        here = self.search.cheapest(way, self.setting.parallel.gpus)
        return here or self.search.fewest_gpus(way)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def tokens(longest: int) -> str:
    """Of the search's end: there may be more."""
    if longest > LONGEST - 2 * LENGTH_STEP:
        return f"{longest} or more"
    return str(longest or "none")


def sentences(result: Result) -> list[Said]:
    """All that hold, the answer first."""
    parts = (_answer, _why, _instead, _about)
    return [said for part in parts for said in part(result)]


def _answer(result: Result) -> Iterator[Said]:
    advice = result.advice
    before, after = advice.baseline, advice.recommended
    values = {"before": gib(before.peak), "after": gib(after.peak), "usable": gib(advice.gpu.usable)}
    flags = after.head.flags if advice.decision in ("use", "needed") else FLAG
    yield say(advice.decision, **values, flags=flags, saved=gib(advice.saved))


def _why(result: Result) -> Iterator[Said]:
    advice = result.advice
    before, after, decision = advice.baseline, advice.recommended, advice.decision
    for way in (before, after):
        if way.verdict == "tight":
            sizes = {"sum": way.peak, "left": advice.gpu.usable - way.peak, "largest": way.head.largest}
            yield say("tight", part=TIGHT, **{name: gib(size) for name, size in sizes.items()})
    places = [way.estimate.bound.name for way in (before, after)]
    if places[0] == places[1]:
        yield say("place" if places[0] == "head" else "place of no loss", place=MOMENTS[places[0]])
    else:
        yield say("places", before=MOMENTS[places[0]], after=MOMENTS[places[1]])
    if decision == "leave out":
        if advice.saved < -WORTH * advice.gpu.usable:
            yield say("more", more=gib(-advice.saved))
        else:
            yield say("little", part=WORTH)
            if after.verdict == "fits":
                yield from _speed(result)
    elif decision != "does not fit":
        yield say("how", words=after.head.words)
    if after.head.missed_budget:
        least = -(-after.head.predicted // MIB)
        yield say("budget", budget=after.head.missed_budget, least=least)
    if before.longest or after.longest:
        yield say("longest", before=tokens(before.longest), after=tokens(after.longest))
    if advice.smaller and decision in ("use", "needed"):
        yield _lever(advice, advice.smaller)


def _speed(result: Result) -> Iterator[Said]:
    setting, baseline = result.setting, result.advice.baseline.head.name
    size = setting.num_tokens * setting.model.hidden_size * setting.vocab_rows
    measured = result.advice.gpu.exp_serves and setting.training.dtype == "bfloat16"
    if measured and baseline in MEASURED_MS and size >= COMPARABLE * math.prod(MEASURED_AT):
        ratio = f"{MEASURED_MS['flag'] / MEASURED_MS[baseline]:.2f}"
        at = dict(zip(("tokens", "hidden", "vocab"), MEASURED_AT, strict=True))
        yield say("speed", ratio=ratio, loss=LOSSES[baseline], source=MEASURED_IN, **at)


def _lever(advice: Advice, smaller: Way) -> Said:
    now = advice.recommended
    assert smaller.head.relative_time and now.head.relative_time
    slower = f"{smaller.head.relative_time / now.head.relative_time:.2f}"
    saved = gib(now.peak - smaller.peak)
    return say("lever", flags=smaller.head.flags, peak=gib(smaller.peak), saved=saved, slower=slower)


def _instead(result: Result) -> Iterator[Said]:
    """What fits where the run as asked does not."""
    decision = result.advice.decision
    if result.advice.baseline.verdict == "fits":
        return
    if result.search is None:
        yield say("ask node")
        return
    stock, ours = result.fits_without, result.fits_with
    if stock and ours and stock.layout == ours.layout:
        yield from _found_elsewhere(result, stock, "with or without")
        values = {"before": gib(stock.way.peak), "after": gib(ours.way.peak)}
        yield say("fits both", **_where(stock), **values)
    elif decision == "does not fit" and not stock and not ours:
        yield say("none", most=MOST_GPUS, who="with or without")
    else:
        if ours:
            yield from _found_elsewhere(result, ours, "with")
            yield say("fits with", flags=ours.way.head.flags, **_where(ours), peak=gib(ours.way.peak))
        elif decision == "does not fit":
            yield say("none", most=MOST_GPUS, who="with")
        if stock:
            yield from _found_elsewhere(result, stock, "without")
            yield say("fits without", **_where(stock), peak=gib(stock.way.peak))
        else:
            yield say("none", most=MOST_GPUS, who="without")
    yield say("tried", node=result.search.node)


def _found_elsewhere(result: Result, found: Found, who: str) -> Iterator[Said]:
    here = result.setting.parallel.gpus
    if found.gpus > here:
        yield say("none here", gpus=_gpus(here), who=who)


def _where(found: Found) -> dict[str, str]:
    flags = found.layout.flags
    return {"gpus": _gpus(found.gpus), "adding": f" by adding {flags}" if flags else ""}


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _about(result: Result) -> Iterator[Said]:
    setting, gpu, launch = result.setting, result.advice.gpu, result.launch
    if launch and launch.measured_bytes:
        if launch.as_logged:
            yield say("measured", measured=gib(launch.measured_bytes), planned=gib(result.now.peak))
        else:
            yield say("measured before", measured=gib(launch.measured_bytes))
    if launch and launch.out_of_memory:
        yield say("died")
    parallel, training = setting.parallel, setting.training
    sizes = [("TP", parallel.tensor), ("PP", parallel.pipeline), ("CP", parallel.context)]
    sizes += [("EP", parallel.expert), ("DP", parallel.data)]
    over = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"
    if parallel.sequence:
        over += ", sequence parallelism"
    billions = f"{parameters(setting) / 1e9:.2f}"
    yield say("setting", model=result.name, billions=billions, gpus=parallel.gpus, gpu=gpu.name, over=over)
    yield say(
        "batch", sequence=training.sequence, micro=training.micro_batch, dtype=training.dtype,
        tokens=setting.num_tokens, rows=setting.vocab_rows, vocab=setting.padded_vocab_size,
    )  # fmt: skip
    yield say("memory", capacity=gib(gpu.capacity), overhead=gib(gpu.overhead))
    if kinds := setting.not_measured:
        yield say("not measured", kinds=", ".join(kinds))
