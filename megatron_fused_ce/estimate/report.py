"""The result of a plan for people (rich's tables) and for programs (a dictionary of bytes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.estimate.advice import LENGTH_STEP, LONGEST, Advice, Way
from megatron_fused_ce.estimate.peaks import MOMENTS, Moment
from megatron_fused_ce.estimate.setting import Setting
from megatron_fused_ce.estimate.static import parameters, stages, static

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GIB = 2**30
#: Meaning of each bound, in words.
BOUNDS = {
    "head": "the loss bounds the run",
    "layers": "the layers bound the run, and a smaller head saves nothing",
    "step": "the optimizer bounds the run, and neither head nor activations do",
}


@dataclass(frozen=True)
class Result:
    """A plan's inputs and results."""

    #: of the model, for a title
    name: str
    setting: Setting
    advice: Advice
    #: of arguments that are not counted
    notes: list[str]
    _find_fits_from: Callable[[], dict[str, str]] = field(repr=False, compare=False)

    @cached_property
    def fits_from(self) -> dict[str, str]:
        """If the run does not fit: flags with the fewest GPUs on which it does; else empty.

        For the "flag" and for the "baseline"; an empty string if no number of GPUs that was tried suffices.
        """
        return self._find_fits_from()


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def as_dictionary(result: Result) -> dict[str, Any]:
    """Everything that the tables show, in bytes and tokens."""
    setting, advice = result.setting, result.advice
    return {
        "parameters": parameters(setting),
        "tokens_of_a_micro_batch": setting.num_tokens,
        "padded_vocab_size": setting.padded_vocab_size,
        "vocab_rows_of_a_rank": setting.vocab_rows,
        "gpus": setting.parallel.gpus,
        "gpu": advice.gpu.name,
        "capacity": advice.gpu.capacity,
        "overhead": advice.gpu.overhead,
        "stages": [
            {
                "parameters": held.dense + held.experts,
                "weights": held.weights,
                "gradients": held.gradients,
                "optimizer": held.optimizer,
                "step": held.step,
            }
            for held in (static(setting, stage) for stage in stages(setting))
        ],
        "ways": {way.head.name: _way(way) for way in advice.ways},
        "baseline": advice.baseline.head.name,
        "recommended": _way(advice.recommended),
        "smaller": _way(advice.smaller) if advice.smaller else None,
        "saved": advice.saved,
        "saved_of_peak": advice.saved / advice.baseline.peak,
        "fits_from": result.fits_from,
        "notes": result.notes,
        "not_measured": setting.model.not_measured,
    }


def _way(way: Way) -> dict[str, Any]:
    return {
        "flags": way.head.flags,
        "plan": way.head.words,
        "relative_time_of_the_head": way.head.relative_time,
        "head": way.head.peak,
        "peak": way.peak,
        "bound": way.estimate.bound.name,
        "verdict": way.verdict,
        "longest_sequence": way.longest,
        "moments": {
            moment.name: {"stage": moment.stage, "total": moment.total, **moment.parts}
            for moment in way.estimate.moments
        },
    }


def show(console: Console, result: Result) -> None:
    """Print the tables and the conclusions."""
    setting, advice = result.setting, result.advice
    for line in _heading(setting, advice):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_static_table(setting))
    console.print(_moments_table(advice, setting))
    console.print(_ways_table(advice, setting))
    for line in [*conclusions(advice), *_fits_from(result), *result.notes]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(setting: Setting, advice: Advice) -> list[str]:
    parallel, training, gpu = setting.parallel, setting.training, advice.gpu
    sizes = [("TP", parallel.tensor), ("PP", parallel.pipeline), ("CP", parallel.context)]
    sizes += [("EP", parallel.expert), ("DP", parallel.data)]
    over = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"
    if parallel.sequence:
        over += ", sequence parallelism"
    return [
        f"{parameters(setting) / 1e9:.2f} billion parameters on {parallel.gpus} x {gpu.name} "
        f"({gib(gpu.capacity)} GiB, of which {gib(gpu.overhead)} for driver and NCCL): {over}",
        f"{training.sequence} tokens a sequence, micro-batch {training.micro_batch}, {training.dtype}; "
        f"{setting.num_tokens} tokens and {setting.vocab_rows} of {setting.padded_vocab_size} "
        "vocabulary rows at a head",
    ]


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _static_table(setting: Setting) -> Table:
    """Table of each stage's weights, gradients and optimizer, with bytes a parameter."""
    optimizer, parallel = setting.training.optimizer, setting.parallel
    shards = parallel.shards if optimizer.sharding != "none" else 1
    whole = shards if optimizer.sharding == "full" else 1
    over = _over(shards)
    if setting.model.mixture and optimizer.sharding != "none":
        over += f", experts{_over(parallel.expert_shards) or ' whole'}"
    table = _table(
        "Held all the time, GiB a GPU",
        "stage",
        "parameters",
        f"weights ({setting.itemsize} B{_over(whole)})",
        f"gradients ({optimizer.gradient_bytes} B{_over(whole)})",
        f"optimizer ({optimizer.state_bytes:g} B{over})",
        "sum",
    )
    all_stages = [static(setting, stage) for stage in stages(setting)]
    for held, group in groupby(enumerate(all_stages), key=lambda pair: pair[1]):
        indices = [index for index, _ in group]
        name = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        cells = (held.weights, held.gradients, held.optimizer, held.total)
        count = f"{(held.dense + held.experts) / 1e9:.3f} billion"
        table.add_row(name, count, *map(gib, cells))
    return table


def _over(ranks: int) -> str:
    return f" / {ranks}" if ranks > 1 else ""


def _not_measured(setting: Setting) -> str:
    """Stands in the title of a table whose sums hold such layers."""
    kinds = setting.model.not_measured
    return f"; {' and '.join(kinds)}: not measured" if kinds else ""


def _moments_table(advice: Advice, setting: Setting) -> Table:
    """The sums: every part of every moment, without and with the flag."""
    moments = [
        (label, way.estimate.moment(name))
        for label, way in (("stock", advice.baseline), ("flag", advice.recommended))
        for name in MOMENTS
    ]
    title = f"What is held at which moment, GiB (stock: {advice.baseline.head.name})"
    title += _not_measured(setting)
    table = _table(title, "", *(f"{label}: {moment.name}" for label, moment in moments))
    if any(moment.stage for _, moment in moments):
        table.add_row("stage", *(str(moment.stage) for _, moment in moments))
    for part in dict.fromkeys(part for _, moment in moments for part in moment.parts):
        if any(moment.parts.get(part) for _, moment in moments):
            table.add_row(part, *(_cell(moment, part) for _, moment in moments))
    table.add_section()
    table.add_row("sum", *(gib(moment.total) for _, moment in moments))
    return table


def _cell(moment: Moment, part: str) -> str:
    return gib(moment.parts[part]) if moment.parts.get(part) else ""


def _ways_table(advice: Advice, setting: Setting) -> Table:
    columns = ("head", "peak", "at", "", "flag saves", "of the peak", "longest, tokens")
    title = "Each way of computing the loss, GiB" + _not_measured(setting)
    table = _table(title, "", *columns)
    flag = advice.recommended.peak
    for way in advice.ways:
        saves = [gib(way.peak - flag), f"{1 - flag / way.peak:.1%}"] if way.head.stock else ["", ""]
        table.add_row(
            way.head.name if way.head.stock else f"flag: {way.head.name}",
            gib(way.head.peak),
            gib(way.peak),
            way.estimate.bound.name,
            way.verdict,
            *saves,
            _tokens(way.longest),
        )
    return table


def _tokens(longest: int) -> str:
    """Of the search's end: there may be more."""
    if longest > LONGEST - 2 * LENGTH_STEP:
        return f"{longest} or more"
    return str(longest or "none")


def _bound(way: Way) -> str:
    name = way.estimate.bound.name
    return f"{gib(way.peak)} GiB at {MOMENTS[name]}: {BOUNDS[name]}"


def _fits_from(result: Result) -> list[str]:
    """The smallest run of this training that fits, where this one does not."""
    if not result.fits_from:
        return []
    gpus = result.setting.parallel.gpus
    here = f"It does not fit on {gpus} GPU{'s' if gpus > 1 else ''}"
    flag, baseline = result.fits_from["flag"], result.fits_from["baseline"]
    if not flag:
        return [
            f"{here}, and it fits with no --gpus at --tp 8 or less: give --recompute-granularity full, "
            "--pp, or --ep for experts."
        ]
    if flag == baseline:
        return [f"{here}. With and without the flag it fits from {flag} on."]
    without = f"from {baseline} on" if baseline else "with no --gpus at --tp 8 or less"
    return [f"{here}. With the flag it fits from {flag} on, without it {without}."]


def conclusions(advice: Advice) -> list[str]:
    """What bounds the run, what the flag saves, and the flags to use; one line each."""
    before, after = advice.baseline, advice.recommended
    lines = [
        f"Without the flag ({before.head.name}): {_bound(before)}.",
        f"With it: {_bound(after)}.",
        f"The flag saves {gib(advice.saved)} GiB, {advice.saved / before.peak:.1%} of the peak; "
        f"longest sequence that fits, in tokens: {_tokens(before.longest)} without it, "
        f"{_tokens(after.longest)} with it.",
        f"Flags: {after.head.flags} ({after.head.words}; {after.verdict}).",
    ]
    if advice.smaller:
        smaller = advice.smaller
        lines.append(
            f"A smaller head: {smaller.head.flags}: {gib(smaller.peak)} GiB, the head takes "
            f"{smaller.head.relative_time:.2f} of its three products' time instead of "
            f"{after.head.relative_time:.2f}."
        )
    return lines
