"""Is it the same training? Runs of Megatron-LM over each other, and a verdict.

    python -m megatron_fused_ce compare off.log on.log
    python -m megatron_fused_ce compare runs/off/tensorboard on.log --against-noise native.log
    python -m megatron_fused_ce compare --launch --noise -- torchrun --nproc-per-node 8 pretrain_gpt.py ...
    python -m megatron_fused_ce compare --launch --seeds 1 2 3 -- torchrun ... pretrain_gpt.py ...
    python -m megatron_fused_ce compare --paired RUNS unfused flag --against-noise native te

The first run is the reference. Each is a log, a folder of logs or a TensorBoard folder, in any mix. With
``--launch`` the command after ``--`` is run as it is and with ``--fused-chunked-ce``, logs kept in --out.

A line of a log is a mean over the iterations since the last one, TensorBoard has every iteration: what
is compared are means over the same iterations. Losses are judged by their largest relative difference,
gradient norms by their ratio, over the first --first iterations, against

    --against-noise RUN   twice what RUN, another run of the reference with other rounding (such as
                          Megatron's native fused loss), differs from the reference by; or
    fixed bounds          as far as runs that are the same stood apart in this project's own launches,
                          in bf16 or in fp32, with some room (docs/tools.md).

A loss that is off by 1 % on average over the last 100 (twice the noise, if that is more) is one too. One
pair can raise an alarm and no more: rounding drives two runs apart, too. Whether they train the same,
runs of several seeds tell (--seeds, or folders RUNS/NAME-SEED with --paired). Each is held against the
reference's of its seed, by

    the last 100     the mean difference of the loss, and over the seeds the mean of these
    the first        the root mean square of the loss's differences over the --first iterations, where an
                     error shows before rounding has driven the runs apart; so for the gradient norm

and losses of multi-token prediction by both. Over the seeds it is at most twice the root mean square of what
the runs of --against-noise differ by, and no run of one seed more than ten times. Below three seeds, or three
of those, or where logs have no lines of the first iterations, the verdict is INCONCLUSIVE. Other names in
RUNS are shown beside.

A difference that the printed digits cannot tell is none. nan in one run alone, a step skipped by one alone,
or a training loss that one alone logs, is a difference.

Writes compare_loss.png and compare_loss.json to --out. Exit status: 0 the same, 1 different, 2 bad input,
3 inconclusive.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.cli.command_line import (
    NO_LIMIT,
    Parser,
    UsageError,
    command,
    number,
    seconds,
    whole,
    writable_folder,
)
from megatron_fused_ce.scripts.lib import pictures, results, tables
from megatron_fused_ce.scripts.lib.launches import LOSS_FUSION, Command, launch, split_command
from megatron_fused_ce.scripts.lib.logs import GRAD_NORM, Point, Record, read_run
from megatron_fused_ce.scripts.lib.losses import (
    FP32_GRAD_NORM_BOUND,
    FP32_LOSS_BOUND,
    GRAD_NORM_BOUND,
    GRAD_NORM_RESOLUTION,
    LOSS_BOUND,
    LOSS_RESOLUTION,
    YARDSTICK_FACTOR,
    relative_difference,
)
from megatron_fused_ce.scripts.lib.results import Row

if TYPE_CHECKING:  # --help does without rich
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

#: Iterations, at the end of runs, over which a difference is averaged.
LAST = 100
#: Mean relative difference over these that raises an alarm in one pair.
DRIFT = 0.01
FEWEST_SEEDS = 3
#: So many times what the mean over the seeds may differ by, the runs of one seed may.
ONE_SEED = 5
STATUS = {"SAME": 0, "DIFFERENT": 1, "INCONCLUSIVE": 3}


# --- points that can be compared ---------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Means of both runs over the same iterations: ``first`` (None: not known) to ``iteration``."""

    first: int | None
    iteration: int
    reference: float
    other: float
    tolerance: float  # a difference up to this is none

    @property
    def difference(self) -> float:
        """Relative; inf where one alone is finite."""
        return relative_difference(self.other, self.reference, self.tolerance)

    @property
    def gap(self) -> float:
        """Other less reference; 0 where neither is finite."""
        neither = not (math.isfinite(self.other) or math.isfinite(self.reference))
        return 0.0 if neither else self.other - self.reference


def paired(reference: Sequence[Point], other: Sequence[Point], *, alike: bool) -> list[Pair]:
    """In order. ``alike``: points whose first iteration is not known average alike in both."""
    pairs = [_mean_pair(a, b) for a, b in _same_iterations(reference, other)]
    if alike:
        unknown = {point.last: point for point in other if point.first is None}
        for point in reference:
            if point.first is None and point.last in unknown:
                pairs.append(_mean_pair([point], [unknown[point.last]]))
    return sorted(pairs, key=lambda pair: pair.iteration)


def _same_iterations(
    reference: Sequence[Point], other: Sequence[Point]
) -> Iterator[tuple[list[Point], list[Point]]]:
    """The shortest rows of points, of both, that cover the same iterations without a gap."""
    queues = [[p for p in points if p.first is not None][::-1] for points in (reference, other)]
    while all(queues):
        groups = [[queues[0].pop()], [queues[1].pop()]]
        while groups[0][0].first != groups[1][0].first or groups[0][-1].last != groups[1][-1].last:
            starts = [group[0].first or 0 for group in groups]
            ends = [group[-1].last for group in groups]
            behind = starts.index(min(starts)) if starts[0] != starts[1] else ends.index(min(ends))
            if not queues[behind]:
                return
            following = queues[behind].pop()
            joins = starts[0] == starts[1] and following.first == ends[behind] + 1
            groups[behind] = [*groups[behind], following] if joins else [following]
        yield groups[0], groups[1]


def _mean_pair(reference: Sequence[Point], other: Sequence[Point]) -> Pair:
    # 5.1 - 5.0 is a little more than 0.1.
    tolerance = max(point.unit for point in (*reference, *other)) * (1 + 1e-6)
    return Pair(reference[0].first, reference[-1].last, _mean(reference), _mean(other), tolerance)


def _mean(points: Sequence[Point]) -> float:
    weights = [1 if p.first is None else p.last - p.first + 1 for p in points]
    total = sum(p.value * weight for p, weight in zip(points, weights, strict=True))
    return points[0].value if len(points) == 1 else total / sum(weights)


# --- what is judged ----------------------------------------------------------------------------


@dataclass
class Curve:
    """One figure of both runs, compared."""

    name: str
    pairs: list[Pair]
    last_first: int  # the last iteration that is one of the first
    noise: list[Pair] = field(default_factory=list)  # the reference's and another run's of the same
    bound: float = LOSS_BOUND

    def first_of(self, pairs: Sequence[Pair]) -> list[Pair]:
        return [pair for pair in pairs if pair.iteration <= self.last_first]

    @property
    def first_difference(self) -> float | None:
        return largest(self.first_of(self.pairs))

    @property
    def worst(self) -> Pair:
        """Of the largest difference."""
        return max(self.pairs, key=lambda pair: pair.difference)

    @property
    def mean_difference(self) -> float:
        """Of the last iterations; relative, with its sign."""
        return mean_of_last(self.pairs, relative=True)

    def problems(self) -> list[str]:
        found, mean = [], self.mean_difference
        allowed = max(DRIFT, YARDSTICK_FACTOR * abs(mean_of_last(self.noise, relative=True)))
        if self.name != GRAD_NORM and abs(mean) > allowed:
            found.append(f"{self.name} differs over the last {LAST} iterations: {mean:+.1%} on average")
        if math.isinf(self.worst.difference):
            at = f"at iteration {self.worst.iteration}: in one run alone it is not finite"
            found.append(f"{self.name} differs {at}")
        elif (first := self.first_difference) is not None and not first <= self.bound:
            by = f"by iteration {self.last_first}: {first:.1e}, bound {self.bound:.1e}"
            found.append(f"{self.name} differs {by}")
        return found


def mean_of_last(pairs: Sequence[Pair], *, relative: bool = False) -> float:
    """Mean difference, with its sign, over the pairs of the last LAST iterations; nan where none is finite.

    ``relative``: to the reference, and only of pairs that are finite.
    """
    last = [pair for pair in pairs if pair.iteration > pairs[-1].iteration - LAST]
    if not relative:
        return statistics.fmean(pair.other - pair.reference for pair in last) if last else math.nan
    parts = [(p.other - p.reference) / abs(p.reference) for p in last if p.reference]
    parts = [part for part in parts if math.isfinite(part)]
    return statistics.fmean(parts) if parts else math.nan


def largest(pairs: Sequence[Pair]) -> float | None:
    return max((pair.difference for pair in pairs), default=None)


@dataclass
class Comparison:
    reference: Record
    other: Record
    noise: Record | None
    curves: list[Curve]
    problems: list[str]
    notes: list[str]

    @property
    def verdict(self) -> str:
        return "DIFFERENT" if self.problems else "SAME"


@dataclass(frozen=True)
class Judge:
    """What the command line says about bounds; None: the fixed one that fits."""

    first: int = 10
    first_bound: float | None = None
    first_grad_norm_bound: float | None = None

    def bound(self, name: str, precisions: set[str], noise: float | None) -> float:
        """Of a curve's first iterations; ``noise``: the largest difference of two runs that are the same.

        A gradient norm's noise only widens its fixed bound: three digits behind the point, as logged, are
        few, and its noise jumps more than the losses'.
        """
        is_loss, is_fp32 = name != GRAD_NORM, precisions == {"float32"}
        given = self.first_bound if is_loss else self.first_grad_norm_bound
        if given is not None:
            return given
        usual, exact = (LOSS_BOUND, FP32_LOSS_BOUND) if is_loss else (GRAD_NORM_BOUND, FP32_GRAD_NORM_BOUND)
        usual = exact if is_fp32 else usual
        least = LOSS_RESOLUTION if is_loss else usual
        return usual if noise is None else max(YARDSTICK_FACTOR * noise, least)


def compare(reference: Record, other: Record, noise: Record | None, judge: Judge = Judge()) -> Comparison:
    """Raises UsageError where the runs have no loss of the same iterations."""
    names = [name for name in reference.curves if name in other.curves]
    pairs = {name: pairs_of(reference, other, name) for name in names}
    pairs = {name: found for name, found in pairs.items() if found}
    losses = [name for name in pairs if name in reference.training_losses]
    if not losses:
        raise UsageError(_nothing_shared(reference, other))
    if not any(math.isfinite(one) for name in losses for p in pairs[name] for one in (p.reference, p.other)):
        raise UsageError("nothing to compare: no loss is finite in either run")
    start = min(_first_iteration(reference.curves[name], pairs[name][0]) for name in losses)
    last_first = start + judge.first - 1
    found = Comparison(reference, other, noise, [], [], [])
    for name, of_name in pairs.items():
        curve = Curve(name, of_name, last_first)
        if noise is not None:
            found.notes += _add_noise(curve, reference, noise)
        precisions = {reference.precision, other.precision}
        curve.bound = judge.bound(name, precisions, largest(curve.first_of(curve.noise)))
        found.curves.append(curve)
        found.problems += curve.problems()
    found.problems += _structure_problems(reference, other)
    found.problems += _skip_problems(found, noise)
    found.notes = _notes(found) + found.notes
    return found


def pairs_of(reference: Record, other: Record, name: str) -> list[Pair]:
    alike = reference.kind == other.kind and reference.fine_stamps == other.fine_stamps
    return paired(reference.curves[name], other.curves[name], alike=alike)


def _first_iteration(curve: Sequence[Point], pair: Pair) -> int:
    """That ``pair`` covers; where its line does not tell, as many as lie before the next line."""
    if pair.first is not None:
        return pair.first
    at = next(i for i, point in enumerate(curve) if point.last == pair.iteration)
    interval = curve[at + 1].last - pair.iteration if at + 1 < len(curve) else 1
    return max(1, pair.iteration - interval + 1)


def _nothing_shared(reference: Record, other: Record) -> str:
    ranges = [f"{run.name} {run.iterations()[0]} to {run.iterations()[1]}" for run in (reference, other)]
    text = f"nothing to compare: the runs have no loss over the same iterations ({', '.join(ranges)})"
    if reference.kind != other.kind:
        text += "; beside a log, TensorBoard needs every iteration: --tensorboard-log-interval 1"
    return text


def _add_noise(curve: Curve, reference: Record, noise: Record) -> list[str]:
    """What the noise differs from the reference by where it covers the curve; notes about the rest."""
    shared = pairs_of(reference, noise, curve.name) if curve.name in noise.curves else []
    begin, end = curve.pairs[0].iteration, curve.pairs[-1].iteration
    shared = [pair for pair in shared if begin <= pair.iteration <= end]
    curve.noise = [pair for pair in shared if math.isfinite(pair.difference)]
    missing = f"{noise.name} has no {curve.name} of these iterations: fixed bounds hold for it"
    return [] if curve.noise else [missing]


def _structure_problems(reference: Record, other: Record) -> list[str]:
    """Losses that one run alone logs. A log and TensorBoard may name them differently."""
    if reference.kind != other.kind:
        return []
    only = [(reference, other), (other, reference)]
    return [
        f"only {one.name} logs {name}"
        for one, another in only
        for name in one.training_losses
        if name not in another.curves
    ]


def _skips(reference: Record, other: Record, until: int) -> list[int]:
    """Lines in whose iterations the two skipped different numbers of steps."""
    begin = max(reference.iterations()[0], other.iterations()[0])
    return [
        last
        for last in sorted({*reference.skipped, *other.skipped})
        if begin <= last <= until and reference.skipped.get(last, 0) != other.skipped.get(last, 0)
    ]


def _skip_problems(found: Comparison, noise: Record | None) -> list[str]:
    """TensorBoard does not tell which steps were skipped."""
    until = max(pair.iteration for curve in found.curves for pair in curve.pairs)
    if "TensorBoard" in (found.reference.kind, found.other.kind):
        return []
    lines = _skips(found.reference, found.other, until)
    allowed = 0.0
    if noise is not None and noise.kind == "log":
        allowed = YARDSTICK_FACTOR * len(_skips(found.reference, noise, until))
    if len(lines) <= allowed:
        return []
    return [f"skipped steps differ at iteration {', '.join(map(str, lines[:5]))}"]


def _notes(found: Comparison) -> list[str]:
    """What a reader of the verdict must know."""
    notes = []
    for run in filter(None, (found.reference, found.other, found.noise)):
        if run.restarts:
            again = ", ".join(map(str, run.restarts[:5]))
            notes.append(f"{run.name} was restarted at iteration {again}: the last start counts")
        if run.num_repeated:
            notes.append(f"{run.name} has {run.num_repeated} lines twice: the last of each counts")
    ranges = [run.iterations() for run in (found.reference, found.other)]
    judged = sorted({pair.iteration for curve in found.curves for pair in curve.pairs})
    if ranges[0] != ranges[1]:
        each = ", ".join(
            f"{run.name} has {first} to {last}"
            for run, (first, last) in zip((found.reference, found.other), ranges, strict=True)
        )
        notes.append(f"compared are iterations {judged[0]} to {judged[-1]}: {each}")
    losses = [curve for curve in found.curves if curve.name != GRAD_NORM]
    if all(curve.first_difference is None for curve in losses):
        notes.append(
            f"no line covers the first iterations alone (until {losses[0].last_first}): judged is "
            "the mean of the last alone; --log-interval 1 would tell more"
        )
    for curve in found.curves:
        both = [p.iteration for p in curve.pairs if math.isnan(p.reference) and math.isnan(p.other)]
        if both:
            notes.append(f"{curve.name} is nan in both runs on {len(both)} lines, from {both[0]} on")
    return notes


# --- runs of several seeds ---------------------------------------------------------------------


@dataclass
class Judged:
    """One figure of each run that is paired, by name and seed, and how large it may be.

    ``first``: the root mean square of the differences over the first iterations, otherwise their mean over
    the last; over the seeds by the same rule.
    """

    what: str
    first: bool
    values: dict[str, dict[int, float]]
    noise: Sequence[str]  # names of runs that are the same as the reference
    least: float  # what the printed digits tell apart

    def of(self, name: str) -> list[float]:
        return [value for _, value in sorted(self.values.get(name, {}).items())]

    def over_seeds(self, name: str) -> float:
        return root_mean_square(self.of(name)) if self.first else statistics.fmean(self.of(name))

    @property
    def spread(self) -> float:
        """Root mean square of what runs that are the same differ by, where that is a number."""
        those = [value for name in self.noise for value in self.of(name)]
        return root_mean_square([value for value in those if math.isfinite(value)])

    @property
    def bound(self) -> float:
        return max(self.least, YARDSTICK_FACTOR * self.spread)  # of nan: the least

    def is_within(self, name: str) -> bool:
        each = all(abs(value) <= ONE_SEED * self.bound for value in self.of(name))
        return each and abs(self.over_seeds(name)) <= self.bound


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(x * x for x in values)) if values else math.nan


#: Pairs by curve, name and seed.
Paired = dict[str, dict[str, dict[int, list[Pair]]]]


@dataclass
class Series:
    """What is judged of the runs of several seeds; first of all the loss over the last iterations."""

    reference: str
    judged: str
    noise: tuple[str, ...]
    figures: list[Judged] = field(default_factory=list)
    pairs: dict[str, dict[int, list[Pair]]] = field(default_factory=dict)  # of the loss, by name and seed
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The judged run's, the noise's, and others, the nearest to the bounds first."""
        first = [self.judged, *self.noise]
        return [*first, *sorted(self.pairs.keys() - set(first), key=lambda name: (self.largest(name), name))]

    def largest(self, name: str) -> float:
        """Over the figures, times the bound."""
        those = [figure for figure in self.figures if name in figure.values]
        return max((abs(figure.over_seeds(name)) / figure.bound for figure in those), default=0.0)

    def outside(self, name: str) -> list[Judged]:
        return [figure for figure in self.figures if name in figure.values and not figure.is_within(name)]

    @property
    def verdict(self) -> str:
        last = self.figures[0]
        if (
            len(last.of(self.judged)) < FEWEST_SEEDS
            or sum(len(last.of(n)) for n in self.noise) < FEWEST_SEEDS
        ):
            return "INCONCLUSIVE"
        if self.problems:
            return "DIFFERENT"
        # The last iterations alone miss most errors.
        return (
            "SAME"
            if any(figure.what.startswith("loss, first") for figure in self.figures)
            else "INCONCLUSIVE"
        )


def series_of(
    folder: Path, reference: str, judged: str, noise: Sequence[str], first: int = Judge.first
) -> Series:
    """Of the runs FOLDER/NAME-SEED. Raises UsageError where one of the names has none that can be paired, or
    is given twice."""
    if len({reference, judged, *noise}) != 2 + len(noise):
        raise UsageError("a run is no noise of itself: give --against-noise other names, each once")
    found = Series(reference, judged, tuple(noise))
    runs = _runs_in(folder, found.notes)
    pairs: Paired = {}
    ends: dict[str, int] = {}  # of a curve's first iterations
    for (name, seed), record in runs.items():
        beside = runs.get((reference, seed))
        if name == reference or beside is None:
            continue
        main = next((loss for loss in beside.training_losses if loss in record.curves), "")
        if not main or not pairs_of(beside, record, main):
            found.notes.append(f"left out: {_nothing_shared(beside, record)}")
            continue
        for curve in beside.curves.keys() & record.curves.keys():
            shown = "loss" if curve == main else curve
            if (curve in (main, GRAD_NORM) or curve.startswith("mtp")) and (
                of_curve := pairs_of(beside, record, curve)
            ):
                pairs.setdefault(shown, {}).setdefault(name, {})[seed] = of_curve
                ends[shown] = _first_iteration(beside.curves[curve], of_curve[0]) + first - 1
        if name == judged:
            found.problems += _structure_problems(beside, record)
    found.pairs = pairs.get("loss", {})
    if missing := [name for name in (judged, *noise) if name not in found.pairs]:
        names = ", ".join(missing)
        why = "".join(f"; {note}" for note in found.notes[:3])
        raise UsageError(
            f"{folder} has no runs NAME-SEED of {names} beside {reference} of the same seed{why}"
        )
    for curve in sorted(pairs, key=lambda curve: (curve != "loss", curve == GRAD_NORM, curve)):
        for figure in _figures_of(curve, pairs[curve], (first, ends[curve]), found):
            _judge(figure, found)
    return found


def _runs_in(folder: Path, notes: list[str]) -> dict[tuple[str, int], Record]:
    """By name and seed, those that reach the last iteration; notes about the rest."""
    runs: dict[tuple[str, int], Record] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := re.fullmatch(r"(.+)-(\d+)(?:\.log)?", path.name):
            try:
                runs[match[1], int(match[2])] = read_run(path, path.name)
            except UsageError as error:
                notes.append(f"left out: {error}")
    ends = {key: record.iterations()[1] for key, record in runs.items()}
    for key, end in ends.items():
        if end < max(ends.values()):
            notes.append(f"left out: {runs.pop(key).name} ends at iteration {end}")
    return runs


def _figures_of(
    curve: str, pairs: dict[str, dict[int, list[Pair]]], window: tuple[int, int], found: Series
) -> Iterator[Judged]:
    """Of the last iterations, but for gradient norms, and of the first, where lines of the logs tell them."""
    every = [pair for of_seed in pairs.values() for of_run in of_seed.values() for pair in of_run]
    every = [pair for pair in every if math.isfinite(pair.reference) and math.isfinite(pair.other)]
    size = max((abs(pair.reference) for pair in every), default=0.0)
    resolution = GRAD_NORM_RESOLUTION if curve == GRAD_NORM else LOSS_RESOLUTION
    least = max([resolution * size, *(pair.tolerance for pair in every)])
    num_first, last_first = window
    for first in (True,) if curve == GRAD_NORM else (False, True):
        values: dict[str, dict[int, float]] = {}
        lengths = set()
        for name, of_seed in pairs.items():
            for seed, of_run in of_seed.items():
                if not first:
                    values.setdefault(name, {})[seed] = mean_of_last(of_run)
                    continue
                those = [pair for pair in of_run if pair.iteration <= last_first]
                end = min(last_first, of_run[-1].iteration)
                if those and those[-1].iteration > end - num_first / 2:
                    values.setdefault(name, {})[seed] = root_mean_square([pair.gap for pair in those])
                    lengths.add(len(those))
        what = f"{curve}, first {num_first}" if first else f"{curve}, last {LAST}"
        if len(lengths) > 1:  # a mean over iterations is nearer to another than they are
            found.notes.append(f"{what}: not judged, since not all runs log every one of them")
        else:
            yield Judged(what, first, values, found.noise, least)


def _judge(figure: Judged, found: Series) -> None:
    if found.judged not in figure.values:
        found.notes.append(f"{figure.what}: no line covers these alone; --log-interval 1 would tell more")
    elif not any(name in figure.values for name in found.noise):
        found.notes.append(f"{figure.what}: not judged, since no run of --against-noise has it")
    else:
        found.figures.append(figure)
        if not figure.is_within(found.judged):
            by = f"{figure.over_seeds(found.judged):+.1e}, bound {figure.bound:.1e}"
            found.problems.append(f"{figure.what} differs: {by}")


def rows_of_series(found: Series) -> list[Row]:
    """One a figure and name; the first figure's with `on_the_way`."""
    rows, points = list[Row](), on_the_way(found)
    for figure in found.figures:
        for name in (name for name in found.names if name in figure.values):
            row: Row = {"shape": f"{figure.what}, paired by seed with {found.reference}", "variant": name}
            row |= {"seeds": sorted(figure.values[name]), "differences": figure.of(name)}
            row |= {"over_seeds": figure.over_seeds(name), "bound": figure.bound}
            row |= {"on_the_way": points[name]} if figure is found.figures[0] else {}
            rows.append(row | {"within": figure.is_within(name)})
    return rows


def on_the_way(found: Series) -> dict[str, list[tuple[int, float]]]:
    """By name (last iteration, root mean square of the loss's differences over seeds and iterations)."""
    last = max(pair.iteration for of_seed in found.pairs.values() for run in of_seed.values() for pair in run)
    ends = [digit * 10**power for power in range(len(str(last))) for digit in (1, 2, 3, 5)]
    found_at: dict[str, list[tuple[int, float]]] = {}
    for name in found.names:
        gaps: dict[int, list[float]] = {}
        for pair in (pair for run in found.pairs[name].values() for pair in run):
            end = next((end for end in ends if pair.iteration <= end), last)
            gaps.setdefault(min(end, last), []).append(pair.gap)
        found_at[name] = [(end, root_mean_square(those)) for end, those in sorted(gaps.items())]
    return found_at


def draw_series(content: dict[str, Any], path: Path) -> None:
    """Of a result that `report_series` wrote: the differences on the way, and each figure over its bound."""
    if (plt := pictures.pyplot()) is None:
        return
    of_figures: dict[str, dict[str, Row]] = {}
    for row in content["rows"]:
        what, _, reference = row["shape"].partition(", paired by seed with ")
        of_figures.setdefault(what, {})[row["variant"]] = row
    last, facts = next(iter(of_figures.values())), content["made_by"]
    shown = {what: rows for what, rows in of_figures.items() if not what.startswith("mtp")}
    figure, (left, *panels) = plt.subplots(
        1, 1 + len(shown), figsize=(5 + 2.2 * len(shown), 2.4 + 0.26 * len(last)), layout="constrained",
        width_ratios=[1.7] + [1] * len(shown),
    )  # fmt: skip
    colours = {name: plt.get_cmap("tab10")(at % 10) for at, name in enumerate(last)}
    for name, row in last.items():
        # A log axis has no zero, a result file no nan but its word.
        points = [(end, float(size) or math.nan) for end, size in row["on_the_way"]]
        style = "-" if name in (facts["judged"], *facts["noise"]) else ":"
        left.loglog(*zip(*points, strict=True), color=colours[name], lw=1.2, ls=style, marker=".", ms=3)
    left.set_xlabel("iteration", fontsize=8)
    left.set_title(f"loss minus {reference}'s with the same seed,\nroot mean square, nats", fontsize=8)
    for axes, (what, rows) in zip(panels, shown.items(), strict=True):
        for at, name in enumerate(name for name in last if name in rows):
            row, colour = rows[name], colours[name]
            bound = float(row["bound"])
            each = [max(abs(float(value)) / bound, 1e-2) for value in row["differences"]]
            axes.plot(each, [at] * len(each), "o", color=colour, ms=4, alpha=0.5)
            axes.plot([abs(float(row["over_seeds"])) / bound], [at], "|", color=colour, ms=14, mew=2)
        axes.axvline(1, color="black", ls="--", lw=1)
        axes.set_xscale("log")
        axes.set_title(f"{what}\nbound {bound:.1e}", fontsize=8)
        axes.set_xlabel("times the bound", fontsize=8)
        axes.set_ylim(len(last) - 0.5, -0.5)
        axes.set_yticks(range(len(last)), list(last) if axes is panels[0] else [""] * len(last))
    for label, colour in zip(panels[0].get_yticklabels(), colours.values(), strict=True):
        label.set_color(colour)
    for axes in (left, *panels):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
    figure.suptitle(f"{facts['judged']} against {reference}, by seed: {facts['verdict']}", fontsize=10)
    how = (
        "Left: colours as the names' at the right; zeros are not drawn. Right: a dot a seed, without sign; a"
    )
    below = textwrap.fill(f"{how} bar over the seeds. {facts['caption']}", 150)
    figure.supxlabel(below, fontsize=7, color="#525252")
    pictures.save(figure, path)


def report_series(found: Series, out: Path, source: Row, console: Console, caption: str = "") -> None:
    """Prints the table and the verdict, writes the picture and the figures."""
    title = f"minus {found.reference} with the same seed; red: outside the bound"
    shown = tables.terminal(title, ["", "over the seeds", "of each seed"])
    for figure in found.figures:
        shown.add_row(f"{figure.what}: bound", f"{figure.bound:.1e}", style="bold")
        for name in (name for name in found.names if name in figure.values):
            each = " ".join(f"{value:+.1e}" for value in figure.of(name))
            style = "red" if figure in found.outside(name) else ""
            shown.add_row(f"  {name}", f"{figure.over_seeds(name):+.1e}", each, style=style)
    console.print(shown)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for problem in found.problems:
        console.print(f"[red]{problem}[/red]", soft_wrap=True)
    facts: Row = {name: getattr(found, name) for name in ("verdict", "problems", "judged", "noise", "notes")}
    results.write(out / "compare_loss.json", rows_of_series(found), source | facts | {"caption": caption})
    draw_series(results.read(out / "compare_loss.json"), out / "compare_loss.png")
    console.print(found.verdict)


# --- what is written ---------------------------------------------------------------------------


def table(found: Comparison, first: int) -> Table:
    """Relative differences, each beside its bound; "mean" has its sign."""
    title = f"{found.other.name} against {found.reference.name}"
    result = tables.terminal(title, ["", f"first {first}", "bound", "all", "at", "mean"])
    for curve in found.curves:
        result.add_row(
            curve.name,
            _small(curve.first_difference),
            "–" if curve.first_difference is None else _small(curve.bound),
            _small(curve.worst.difference),
            str(curve.worst.iteration) if curve.worst.difference else "–",
            f"{curve.mean_difference:+.1e}",
            style="red" if curve.problems() else "",
        )
    return result


def _small(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}"


def rows_of(found: Comparison) -> list[Row]:
    """One a curve, with both runs' figures."""
    return [
        {
            "shape": f"{found.other.name} against {found.reference.name}",
            "variant": curve.name,
            "bound": curve.bound,
            "first_difference": curve.first_difference,
            "difference": curve.worst.difference,
            "at_iteration": curve.worst.iteration,
            "mean_difference": curve.mean_difference,
            "iterations": [pair.iteration for pair in curve.pairs],
            "reference": [pair.reference for pair in curve.pairs],
            "other": [pair.other for pair in curve.pairs],
        }
        for curve in found.curves
    ]


def facts_of(found: Comparison, judge: Judge) -> Row:
    """The verdict, and what it rests on."""

    def run(record: Record) -> Row:
        own = asdict(record)
        del own["curves"]
        own["first_iteration"], own["last_iteration"] = record.iterations()
        return own

    said: Row = {name: getattr(found, name) for name in ("verdict", "problems", "notes")}
    runs = {name: run(getattr(found, name)) for name in ("reference", "other")}
    return said | {"judge": asdict(judge), **runs, "noise": found.noise and run(found.noise)}


#: Of a curve in the other run, and in the reference below it.
COLOURS = (
    ("#08306b", "#9ecae1"), ("#a63603", "#fdbe85"), ("#00682a", "#a1d99b"), ("#54278f", "#dadaeb"),
    ("#ae017e", "#fcc5c0"), ("#7f6000", "#e7cb94"), ("#252525", "#d9d9d9"),
)  # fmt: skip
BOUND: dict[str, Any] = {"color": "#cb181d", "ls": "--", "lw": 1.2}
NOT_FINITE: dict[str, Any] = {"color": "#cb181d", "marker": "x", "ms": 6, "ls": "", "clip_on": False}
NOISE: dict[str, Any] = {"color": "#737373", "ls": ":", "lw": 1.4}


def draw(found: Comparison, path: Path) -> bool:
    """The losses over each other, and their differences; False without matplotlib."""
    plt = pictures.pyplot()
    if plt is None:
        return False
    from matplotlib.ticker import MaxNLocator

    losses = [curve for curve in found.curves if curve.name != GRAD_NORM]
    figure, panels = plt.subplots(2, 1, sharex=True, figsize=(8, 7.2), layout="constrained")
    _draw_losses(panels[0], losses)
    _draw_differences(panels[1], losses)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[-1].set_xlabel("iteration")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    names = f"{found.other.name} (thin) against {found.reference.name} (wide)"
    figure.suptitle(f"{names}: {found.verdict}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    pictures.save(figure, path)
    return True


def _draw_losses(axes: Any, curves: Sequence[Curve]) -> None:
    """The heads' losses: those of routers have another scale."""
    for curve, (dark, light) in zip(curves, cycle(COLOURS), strict=False):
        if " loss" not in curve.name and len(curves) > 1:
            continue
        steps = [pair.iteration for pair in curve.pairs]
        few = len(steps) < 12
        marker = "o" if few else ""
        wide: dict[str, Any] = {"color": light, "lw": 5, "marker": marker, "ms": 9, "zorder": 2}
        thin: dict[str, Any] = {"color": dark, "lw": 1.3, "marker": marker, "ms": 3, "zorder": 3}
        axes.plot(steps, [pair.reference for pair in curve.pairs], **wide)
        axes.plot(steps, [pair.other for pair in curve.pairs], **thin)
        _mark_not_finite(axes, curve)
    axes.set_ylabel("loss")


def _mark_not_finite(axes: Any, curve: Curve) -> None:
    """A cross at the bottom where a run's loss is nan or inf, which no line shows."""
    for name in ("reference", "other"):
        at = [pair.iteration for pair in curve.pairs if not math.isfinite(getattr(pair, name))]
        if at:
            height = 0.02 if name == "reference" else 0.06
            again = any(line.get_marker() == NOT_FINITE["marker"] for line in axes.lines)
            label = None if again else "nan or inf (below: reference)"
            of_height = {"transform": axes.get_xaxis_transform(), "label": label}
            axes.plot(at, [height] * len(at), **of_height, **NOT_FINITE)


def _draw_differences(axes: Any, curves: Sequence[Curve]) -> None:
    for curve, (dark, _) in zip(curves, cycle(COLOURS), strict=False):
        _plot_positive(axes, curve.pairs, {"color": dark, "lw": 1, "label": curve.name})
    main = curves[0]
    if main.noise:
        _plot_positive(axes, main.noise, {**NOISE, "label": f"{main.name} of the noise run"})
    begin, end = main.pairs[0].iteration, main.pairs[-1].iteration
    if main.first_difference is not None:
        label = f"bound of {main.name}'s first iterations"
        axes.plot([begin, min(main.last_first, end)], [main.bound] * 2, label=label, **BOUND)
    axes.set_yscale("log")
    axes.set_ylabel("relative difference")


def _plot_positive(axes: Any, pairs: Sequence[Pair], style: dict[str, Any]) -> None:
    """A log axis has no zero: where there is no difference, there is a gap."""
    values = [
        pair.difference if pair.difference and math.isfinite(pair.difference) else math.nan for pair in pairs
    ]
    axes.plot([pair.iteration for pair in pairs], values, marker=".", ms=4, **style)


# --- command line ------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser("python -m megatron_fused_ce compare", __doc__ or "")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the reference, and the other run")
    parser.add_argument("--out", type=Path, default=Path("build/compare_loss"))
    bounds = parser.add_argument_group("bounds")
    add = bounds.add_argument
    add(
        "--against-noise",
        nargs="+",
        default=[],
        metavar="RUN",
        help="others that are the same as the reference",
    )
    add("--first", type=whole(), default=10, metavar="N", help="how many iterations are the first [10]")
    bound = number()
    add("--first-bound", type=bound, metavar="X", help="losses, relative [5e-4; fp32 1e-6]")
    add("--first-grad-norm-bound", type=bound, metavar="X", help="ratio - 1 [2e-2; fp32 1e-5]")
    add("--paired", type=Path, metavar="RUNS", help="pair RUNS/NAME-SEED by seed; runs are given as names")
    launches = parser.add_argument_group("launches")
    add = launches.add_argument
    add("--launch", action="store_true", help="run the command after --, flag off and on")
    add("--noise", action="store_true", help="and once more with Megatron's native loss, as noise")
    add(
        "--seeds",
        type=whole(),
        nargs="+",
        metavar="N",
        help="three runs, with noise, of each seed; pair them",
    )
    add("--timeout", type=seconds, default=NO_LIMIT, metavar="S", help="of one launch")
    return parser


def _names_of(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [f"{letter}: {path.name}" for letter, path in zip("ABC", paths, strict=False)]


def _given_runs(given: argparse.Namespace) -> list[Record]:
    """The reference, the other and, where there is one, the noise."""
    if len(given.runs) != 2:
        raise UsageError("give two runs: compare REFERENCE OTHER, or --launch -- COMMAND")
    if len(given.against_noise) > 1:
        raise UsageError(
            "two runs are held against one of --against-noise; several seeds, with --paired, against more"
        )
    paths = [Path(path) for path in (*given.runs, *given.against_noise)]
    if {path.resolve() for path in paths[:2]} & {path.resolve() for path in paths[2:]}:
        raise UsageError("a run is no noise of itself: give --against-noise another")
    return [read_run(path, name) for path, name in zip(paths, _names_of(paths), strict=True)]


def _launched_runs(given: argparse.Namespace, words: Sequence[str], console: Console) -> list[Record]:
    if given.runs or given.against_noise:
        raise UsageError("--launch makes the runs itself: give the command after --, and no run")
    command = Command.of(words)
    launches = {"off": command.off(), "on": command.on()}
    if given.noise or given.seeds:
        launches["noise"] = command.other_stock()
    records = []
    names = {"off": "flag off", "on": "flag on"}
    names["noise"] = f"{names['off']}, {'unfused' if LOSS_FUSION in launches['off'] else 'native'} loss"
    if given.seeds:
        launches = {
            f"{name}-{seed}": [*line, "--seed", str(seed)]
            for seed in given.seeds
            for name, line in launches.items()
        }
    for name, line in launches.items():
        folder = given.out / name
        with console.status(f"launch {name}") as status:
            launch(line, folder, given.timeout, partial(_show, status, name))
        console.print(f"launch {name}: done, logs in {folder}", soft_wrap=True)
        records.append(read_run(folder, names.get(name, name)))
    return records


def _show(status: Status, name: str, iteration: str) -> None:
    status.update(f"launch {name}: {iteration}")


def report(found: Comparison, judge: Judge, out: Path, source: Row, console: Console) -> None:
    """Prints the table and the verdict, writes the picture and the figures."""
    console.print(table(found, judge.first))
    if found.noise is not None:
        words = f"the bounds are from the noise run, {found.noise.name}, against {found.reference.name}"
        console.print(words, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for problem in found.problems:
        console.print(f"[red]{problem}[/red]", soft_wrap=True)
    results.write(out / "compare_loss.json", rows_of(found), source | facts_of(found, judge))
    drawn = draw(found, out / "compare_loss.png")
    picture = "compare_loss.png and " if drawn else "no picture (matplotlib is not installed), "
    console.print(f"{out}: {picture}compare_loss.json", soft_wrap=True)
    colour = "green" if found.verdict == "SAME" else "red"
    console.print(f"[{colour}]{found.verdict}[/{colour}]")


@command("compare")
def main(words: list[str]) -> int:
    own, launched = split_command(words)
    given = _parser().parse_args(own)
    from rich.console import Console

    console = Console(highlight=False)
    judge = Judge(**{name: getattr(given, name) for name in Judge.__dataclass_fields__})
    writable_folder(given.out)
    records = _launched_runs(given, launched, console) if given.launch else []
    device = results.device_name() if given.launch else ""
    source = results.made_by(device, ["compare", *words])
    if given.paired or (records and given.seeds):
        names = given.runs if given.paired else ["off", "on"]
        if len(names) != 2 or (given.paired and not given.against_noise):
            raise UsageError("with --paired give two names of runs in RUNS, and others with --against-noise")
        noise = given.against_noise or ["noise"]
        series = series_of(given.paired or given.out, names[0], names[1], noise, judge.first)
        report_series(series, given.out, source, console)
        return STATUS[series.verdict]
    first, other, *noises = records or _given_runs(given)
    found = compare(first, other, noises[0] if noises else None, judge)
    if not given.launch and Path(given.runs[0]).samefile(given.runs[1]):
        found.notes.insert(0, f"{given.runs[1]} is given twice: a run is compared with itself")
    report(found, judge, given.out, source, console)
    return STATUS[found.verdict]


if __name__ == "__main__":
    sys.exit(main())
