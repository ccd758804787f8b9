"""Is it the same training? Runs of Megatron-LM over each other, and a verdict.

    python -m megatron_fused_ce compare off.log on.log
    python -m megatron_fused_ce compare runs/off/tensorboard on.log --against-noise native.log
    python -m megatron_fused_ce compare --launch --noise -- torchrun --nproc-per-node 8 pretrain_gpt.py ...
    python -m megatron_fused_ce compare --launch --seeds 1 2 3 -- torchrun ... pretrain_gpt.py ...
    python -m megatron_fused_ce compare --paired RUNS unfused flag --against-noise native te

The first run is the reference. Each is a log, a folder of logs or a TensorBoard folder, in any mix. With
--launch the command after -- is run as it is and with --fused-chunked-ce, logs kept in --out. Compared are
means over the same iterations; a difference below the printed digits is none.

One pair raises alarms and no more, since rounding drives two runs apart, too: by the largest relative
difference of the first iterations (--first), and the mean one of the last 100. Several seeds (--seeds, or
RUNS/NAME-SEED with --paired) tell whether runs train the same: each run is held against the reference's of
its seed, by the same windows and by blocks that end at iteration 10, 20, 30, 50, 100, 200, ... Bounds are
what the runs of --against-noise, the same training in other rounding, differ by: twice, of blocks three
times (docs/tools.md). Always a difference: nan, inf, 0 or a curve in one run alone.

Writes compare_loss.png and compare_loss.json to --out. Exit status: 0 the same, 1 different, 2 bad input,
3 inconclusive: below three seeds, or three runs of noise, or no line has the first iterations.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, pairwise
from operator import itemgetter
from os.path import commonpath, relpath
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_fused_ce.cli import command_line as cli
from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import losses, pictures, results, tables
from megatron_fused_ce.scripts.lib.launches import LOSS_FUSION, Command, launch, split_command
from megatron_fused_ce.scripts.lib.logs import GRAD_NORM, Point, Record, read_run
from megatron_fused_ce.scripts.lib.results import Row

if TYPE_CHECKING:  # --help does without rich
    from rich.console import Console

#: Iterations, at the end of runs, over which a difference is averaged.
LAST = 100
#: Relative difference over these, or of a validation, that is allowed without noise.
DRIFT = 0.01
FEWEST_SEEDS = 3
#: So many times what the seeds together may differ by, one of them may.
ONE_SEED = 5
#: So many times what the noise does in a block, a run may differ by.
IN_BLOCK = 3
#: Last iterations of what is drawn; of blocks from 10 on.
ENDS = [digit * 10**power for power in range(10) for digit in (1, 2, 3, 5)]
#: Of one pair's first iterations, in bf16 and in fp32; first of losses, then of gradient norms.
FIXED = (
    (losses.LOSS_BOUND, losses.FP32_LOSS_BOUND),
    (losses.GRAD_NORM_BOUND, losses.FP32_GRAD_NORM_BOUND),
)
STATUS = {"SAME": 0, "DIFFERENT": 1, "INCONCLUSIVE": 3}
_NAME_SEED = re.compile(r"(.+)-(\d+)(?:\.log)?")


# --- points that can be compared ---------------------------------------------------------------


class Pair(NamedTuple):
    """Means of both runs over the same iterations: ``first`` (None: not known) to ``iteration``."""

    first: int | None
    iteration: int
    reference: float
    other: float
    tolerance: float  # a difference up to this is none

    @property
    def difference(self) -> float:
        """Relative; inf where one alone is finite, or 0."""
        found = losses.relative_difference(self.other, self.reference, self.tolerance)
        return math.inf if found and not (self.other and self.reference) else found

    def apart(self, is_norm: bool = False) -> float:
        """Other less reference, of norms the log ratio; inf where the difference is."""
        found = self.difference
        if is_norm and 0 < found < math.inf:
            return math.log(self.other / self.reference)
        return found if is_norm or found == math.inf else self.other - self.reference


#: Of a curve, by name and seed; and a number of each run.
Pairs = dict[str, dict[int, list[Pair]]]
Values = dict[str, dict[int, float]]


def pairs_of(reference: Record, other: Record, curve: str) -> list[Pair]:
    """Means over the same iterations, in order: of the fewest points of both that cover them without a gap.

    Points whose first iteration is not known average alike in runs of one version.
    """
    runs = [run.curves.get(curve, []) for run in (reference, other)]
    edges = [{end for p in run if p.first is not None for end in (p.first - 1, p.last)} for run in runs]
    cuts = sorted(edges[0] & edges[1])
    groups: list[dict[int, list[Point]]] = [
        {},
        {},
    ]  # by the cut that a point ends at or before, or -iteration
    for run, group in zip(runs, groups, strict=True):
        for point in run:
            at = -point.last if point.first is None else bisect_left(cuts, point.last)
            group.setdefault(at, []).append(point)
    are_alike = (reference.kind, reference.fine_stamps) == (other.kind, other.fine_stamps)
    pairs = []
    for at in groups[0].keys() & groups[1].keys():
        both = [group[at] for group in groups]
        lengths = [sum(point.length for point in points) for points in both]
        if are_alike if at < 0 else 0 < at < len(cuts) and {*lengths} == {cuts[at] - cuts[at - 1]}:
            sums = [sum(point.value * point.length for point in points) for points in both]
            # 5.1 - 5.0 is a little more than 0.1.
            tolerance = max(point.unit for point in chain(*both)) * (1 + 1e-6)
            first, last, means = both[0][0].first, both[0][-1].last, map(float.__truediv__, sums, lengths)
            pairs.append(Pair(first, last, *means, tolerance))
    return sorted(pairs, key=lambda pair: pair.iteration)


def within(pairs: list[Pair], first: int, last: int) -> list[Pair]:
    at = itemgetter(1)
    return pairs[bisect_left(pairs, first, key=at) : bisect_right(pairs, last, key=at)]


def start_of(pairs: Sequence[Pair]) -> int:
    """The first iteration; where its line does not tell, as many are in it as lie before the next line."""
    interval = pairs[1].iteration - pairs[0].iteration if len(pairs) > 1 else 1
    return pairs[0].first or max(1, pairs[0].iteration - interval + 1)


def largest(pairs: Sequence[Pair]) -> float:
    return max((pair.difference for pair in pairs), default=math.nan)


def mean(values: Iterable[float]) -> float:
    """Of those that are no nan; nan of none."""
    numbers = [value for value in values if not math.isnan(value)]
    return fmean(numbers) if numbers else math.nan


def root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(mean(value * value for value in values))


def distance(pairs: list[Pair], first: int, last: int, is_norm: bool = False) -> float:
    return root_mean_square(pair.apart(is_norm) for pair in within(pairs, first, last))


def blocks(start: int, end: int, shortest: int = 10) -> list[tuple[int, int]]:
    """First and last iteration of each."""
    ends = [0, *(at for at in ENDS if at >= shortest)]
    return [(start + a, min(start + b - 1, end)) for a, b in pairwise(ends) if start + a <= end]


def of_each(pairs: Pairs, number: Callable[[list[Pair]], float]) -> Values:
    """Of each run that has it: where it is no nan."""
    numbers = {name: {seed: number(run) for seed, run in of.items()} for name, of in pairs.items()}
    known = {n: {seed: x for seed, x in of.items() if not math.isnan(x)} for n, of in numbers.items()}
    return {name: of for name, of in known.items() if of}


# --- what is judged ----------------------------------------------------------------------------


@dataclass
class Figure:
    """A number of each run, over the seeds one of each name, and its bound."""

    curve: str
    part: str
    values: Values
    over_seeds: Callable[[Iterable[float]], float]
    bound: float  # nan: not known, for there is no noise

    @property
    def what(self) -> str:
        return f"{self.curve}, {self.part}"

    @property
    def is_block(self) -> bool:
        return self.part.startswith("iterations ")

    def over(self, name: str) -> float:
        return self.over_seeds(self.values[name].values())

    def is_within(self, name: str) -> bool:
        """Without a bound: whether it is finite."""
        sizes = [abs(self.over(name)), *(abs(value) / ONE_SEED for value in self.values[name].values())]
        return all(math.isfinite(size) and not size > self.bound for size in sizes)


@dataclass(frozen=True)
class Judge:
    """Whom to judge by whom, by their names, and the bounds that are given (None: those that fit)."""

    reference: str
    judged: str
    noise: Sequence[str] = ()
    by_seed: bool = False
    first: int = 10
    first_bound: float | None = None
    first_grad_norm_bound: float | None = None

    def of_noise(self, values: Values) -> float:
        every = (size for name in self.noise for size in values.get(name, {}).values())
        return root_mean_square(filter(math.isfinite, every))

    def twice(self, least: float, *values: Values, otherwise: float = math.nan) -> float:
        """The largest noise of these, or ``least`` if that is more; ``otherwise`` where there is none."""
        sizes = [losses.YARDSTICK_FACTOR * self.of_noise(of) for of in values]
        known = [size for size in sizes if not math.isnan(size)]
        return max(least, *known) if known else otherwise

    def of_blocks(self, sizes: Sequence[Values], digits: float) -> list[float]:
        """Each block's bound: by the largest noise of this block, an earlier one or the next."""
        noise = [self.of_noise(of) for of in sizes]
        known = [[IN_BLOCK * size for size in noise[: at + 2] if size >= 0] for at in range(len(noise))]
        return [max(digits, *near) if near else math.nan for near in known]

    def figures(self, curve: str, pairs: Pairs, start: int, is_fp32: bool) -> Iterator[Figure]:
        """Of one pair relative differences, of seeds differences; gradient norms have no last iterations.

        One pair's noise only widens a gradient norm's fixed bound: three digits behind the point, as logged,
        are few, and its noise jumps more than the losses'.
        """
        is_norm, mine = curve == GRAD_NORM, [*chain(*pairs[self.judged].values())]
        end, until = max(pair.iteration for pair in mine), start + self.first - 1
        worst, every = max(mine, key=lambda pair: pair.difference), of_each(pairs, largest)
        at = f"all (largest at iteration {worst.iteration})" if worst.difference else "all"
        is_all = self.by_seed and " loss " in curve  # a validation
        bound = self.twice(DRIFT, every, otherwise=DRIFT) if is_all else math.inf
        yield Figure(curve, at, every, max, bound)
        if is_all:
            return
        runs = [run for name in (self.judged, *self.noise) for run in pairs.get(name, {}).values()]
        sizes = [(abs(pair.reference), pair.tolerance) for pair in chain(*runs) if pair.reference]
        # What printed digits can tell: of losses seven, of norms, as a ratio, those behind the point.
        digits = losses.LOSS_RESOLUTION * max((size for size, _ in sizes if size < math.inf), default=0.0)
        if is_norm:
            ratios = [tolerance / size for size, tolerance in sizes]
            digits = max(losses.GRAD_NORM_RESOLUTION, median_low(ratios or [0.0]))
        else:
            # Means of few seeds can be near 0 by chance; those of the iterations before seldom are, too.
            last, before = (of_each(pairs, partial(self.late, end=at)) for at in (end, end - LAST))
            least, otherwise = (digits, math.nan) if self.by_seed else (DRIFT, DRIFT)
            yield Figure(
                curve, f"last {LAST}", last, mean, self.twice(least, last, before, otherwise=otherwise)
            )
        # A mean over more iterations is nearer to another than they are.
        steps = [median_low([b.iteration - a.iteration for a, b in pairwise(run)] or [0]) for run in runs]
        alike = len({*steps}) == 1
        first = of_each(pairs, partial(self.early, start=start, until=until, is_norm=is_norm))
        bound = self.twice(digits, first) if alike else math.nan
        if not self.by_seed:
            usual, given = FIXED[is_norm][is_fp32], (self.first_bound, self.first_grad_norm_bound)[is_norm]
            bound = self.twice(usual if is_norm else losses.LOSS_RESOLUTION, first, otherwise=usual)
            bound = bound if given is None else given
        yield Figure(curve, f"first {self.first}", first, root_mean_square, bound)
        parts = blocks(start, end) if self.by_seed else []
        of = [of_each(pairs, partial(distance, first=a, last=b, is_norm=is_norm)) for a, b in parts]
        for (a, b), values, bound in zip(parts, of, self.of_blocks(of, digits), strict=True):
            at = f"iterations {a} to {b}"
            yield Figure(curve, at, values, root_mean_square, bound if alike else math.nan)

    def late(self, run: list[Pair], end: int) -> float:
        those = within(run, end - LAST + 1, end)
        return mean(p.apart() / (1.0 if self.by_seed else abs(p.reference) or 1.0) for p in those)

    def early(self, run: list[Pair], start: int, until: int, is_norm: bool) -> float:
        """nan where too few lines have these iterations."""
        those = within(run, start, until)
        if not those or those[-1].iteration <= min(until, run[-1].iteration) - self.first / 2:
            return math.nan
        return distance(those, start, until, is_norm) if self.by_seed else largest(those)


# --- a comparison --------------------------------------------------------------------------------

#: By name and seed; one pair's seed is 0.
Runs = dict[str, dict[int, Record]]


@dataclass
class Comparison:
    judge: Judge
    runs: Runs
    notes: list[str]
    pairs: dict[str, Pairs] = field(default_factory=dict)  # by curve; the first is the training's loss
    start: int = 1  # the first iteration that is compared
    problems: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The judged run's, the noise's, and others'."""
        others = sorted({name for pairs in self.pairs.values() for name in pairs})
        return list(dict.fromkeys([self.judge.judged, *self.judge.noise, *others]))

    @property
    def main(self) -> Pairs:
        return next(iter(self.pairs.values()), {})

    def on_the_way(self, curve: str, name: str) -> list[tuple[int, float]]:
        """Last iteration of each block, from the first on, and the distance in it."""
        runs = [*self.pairs[curve][name].values()]
        of = blocks(self.start, max(run[-1].iteration for run in runs), 1)
        sizes = [root_mean_square(distance(run, *block) for run in runs) for block in of]
        return [(end, size) for (_, end), size in zip(of, sizes, strict=True) if not math.isnan(size)]

    @property
    def verdict(self) -> str:
        seeds, *others = (len(self.main.get(name, {})) for name in (self.judge.judged, *self.judge.noise))
        # The last iterations alone miss most errors.
        first = f"{next(iter(self.pairs))}, first"
        told = any(figure.what.startswith(first) and figure.bound >= 0 for figure in self.figures)
        if self.judge.by_seed and min(seeds, sum(others)) < FEWEST_SEEDS:
            return "INCONCLUSIVE"
        return "DIFFERENT" if self.problems else "SAME" if told or not self.judge.by_seed else "INCONCLUSIVE"

    @property
    def looked_at(self) -> str:
        of = self.main[self.judge.judged]
        curves = dict.fromkeys(figure.curve for figure in self.figures if not math.isnan(figure.bound))
        end, seeds = max(run[-1].iteration for run in of.values()), ", ".join(map(str, of))
        by_seed = f"; seeds {seeds}" if self.judge.by_seed else ""
        lines = f"on {min(map(len, of.values()))} lines or more{by_seed}"
        return f"looked at: {', '.join(curves)}; iterations {self.start} to {end}, {lines}"

    def add(self, figure: Figure) -> None:
        judged, bound = self.judge.judged, figure.bound
        if judged in figure.values:
            self.figures.append(figure)
            if not figure.is_within(judged):
                self.problems.append(f"{figure.what} differs: {figure.over(judged):+.1e}, bound {bound:.1e}")
        if figure.is_block:
            return
        has_noise = any(name in figure.values for name in self.judge.noise)
        why = "runs log other iterations" if has_noise else "no run of --against-noise has it"
        if judged not in figure.values:
            self.notes.append(f"{figure.what}: no line has these alone; --log-interval 1 would tell more")
        elif math.isnan(bound):
            self.notes.append(f"{figure.what}: not judged, since {why}")
        elif self.judge.noise and not has_noise and bound < math.inf:
            self.notes.append(f"{figure.what}: a fixed bound, since {why}")


def compare(runs: Runs, judge: Judge, notes: Iterable[str] = ()) -> Comparison:
    """Raises UsageError where a name has no run with the iterations of the reference's of its seed."""
    found, skipped = Comparison(judge, runs, [*notes]), Values()
    for name, seed, run in [(name, seed, run) for name, of in runs.items() for seed, run in of.items()]:
        found.notes += run.notes
        beside = runs[judge.reference].get(seed)
        if name == judge.reference or beside is None:
            continue
        curves = {curve: pairs_of(beside, run, curve) for curve in beside.curves if curve in run.curves}
        main = next((loss for loss in beside.training_losses if curves.get(loss)), "")
        if not main:
            ranges = ["{} {} to {}".format(each.name, *each.iterations()) for each in (beside, run)]
            found.notes.append(f"the runs have no loss over the same iterations ({', '.join(ranges)})")
            if run.kind != beside.kind:
                found.notes.append(
                    "beside a log, TensorBoard needs every iteration: --tensorboard-log-interval 1"
                )
        for curve, pairs in curves.items() if main else ():
            if judge.by_seed and curve not in (main, GRAD_NORM) and not re.match("mtp|.* loss ", curve):
                continue
            if those := [p for p in pairs if name not in judge.noise or math.isfinite(p.difference)]:
                found.pairs.setdefault(curve, {}).setdefault(name, {})[seed] = those
        if run.kind != beside.kind:  # TensorBoard has names of its own
            continue
        if run.kind == "log":  # TensorBoard tells of no skipped step
            at = _skips(beside, run)
            skipped.setdefault(name, {})[seed] = len(at)
            steps = ", ".join(map(str, at[:5]))
            found.notes += [f"{run.name} skipped other steps: {steps}"] * (name == judge.judged and bool(at))
        for curve in beside.curves.keys() ^ run.curves.keys() if name == judge.judged else ():
            if judge.by_seed or " loss " not in curve:
                one = beside if curve in beside.curves else run
                found.problems.append(f"only {one.name} logs {curve}")
    order = sorted(found.pairs, key=lambda curve: (" loss " in curve, curve == GRAD_NORM))
    found.pairs = {curve: found.pairs[curve] for curve in order if judge.judged in found.pairs[curve]}
    without = [name for name in (judge.judged, *judge.noise) if name not in found.main]
    if without and (judge.by_seed or judge.judged in without):
        why = f"no run NAME-SEED of {', '.join(without)} is beside {judge.reference} of the same seed"
        raise UsageError("; ".join(["nothing to compare", *[why] * judge.by_seed, *found.notes[:3]]))
    of_judged = [*found.main[judge.judged].values()]
    if not any(math.isfinite(pair.reference) or math.isfinite(pair.other) for pair in chain(*of_judged)):
        raise UsageError("nothing to compare: no loss is finite in either run")
    found.start = min(map(start_of, of_judged))
    of_pair = [run for name in (judge.reference, judge.judged) for run in runs[name].values()]
    is_fp32 = {run.precision for run in of_pair} == {"float32"}
    for curve, of_curve in found.pairs.items():
        for figure in judge.figures(curve, of_curve, found.start, is_fp32):
            found.add(figure)
        missing = [p.iteration for p in chain(*of_curve[judge.judged].values()) if math.isnan(p.apart())]
        for first in missing[:1]:
            found.notes.append(f"{curve} is nan in both runs on {len(missing)} lines, from {first} on")
    if not judge.by_seed and len({run.iterations() for run in of_pair}) > 1:
        each = ", ".join("{} has {} to {}".format(run.name, *run.iterations()) for run in of_pair)
        found.notes.append(f"compared are iterations {found.start} to {of_judged[0][-1].iteration}: {each}")
    if judge.judged in skipped:
        bound = judge.twice(0.0, skipped, otherwise=0.0)
        found.add(Figure("skipped steps", "lines", skipped, root_mean_square, bound))
    return found


def _skips(*runs: Record) -> list[int]:
    """Lines in whose iterations the two skipped different numbers of steps."""
    (a, b), (c, d) = (run.iterations() for run in runs)
    lines = sorted({line for run in runs for line in run.skipped if max(a, c) <= line <= min(b, d)})
    return [line for line in lines if len({run.skipped.get(line, 0) for run in runs}) > 1]


def series_of(folder: Path, judge: Judge) -> Comparison:
    """Of the runs FOLDER/NAME-SEED that reach the last iteration.

    Raises UsageError where one of the names has none that can be paired, or is given twice.
    """
    _refuse_twice([judge.reference, judge.judged, *judge.noise])
    found, runs, notes = list[tuple[str, int, Record]](), Runs({judge.reference: {}}), list[str]()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := _NAME_SEED.fullmatch(path.name):
            try:
                found.append((match[1], int(match[2]), read_run(path, path.name)))
            except UsageError as error:
                notes.append(f"left out: {error}")
    last = max((run.iterations()[1] for _, _, run in found), default=0)
    for name, seed, run in found:
        if (end := run.iterations()[1]) < last:
            notes.append(f"left out: {run.name} ends at iteration {end}")
        else:
            runs.setdefault(name, {})[seed] = run
    return compare(runs, judge, notes)


def _refuse_twice(runs: Sequence[object]) -> None:
    if len({*runs}) < len(runs):
        raise UsageError("a run is given twice: it is neither another nor a noise of itself")


# --- what is written ---------------------------------------------------------------------------


def report(found: Comparison, out: Path, source: Row, console: Console, caption: str = "") -> int:
    """Prints the table and the verdict, writes picture and figures; the exit status."""
    judge, rows = found.judge, list[Row]()
    how = ", paired by seed with" if judge.by_seed else " against"
    head = ["", "over the seeds", "of each seed"] if judge.by_seed else ["", "difference"]
    table = tables.terminal(f"minus {judge.reference}; red: outside the bound", head)
    for figure in found.figures:
        is_shown = not figure.is_block or not figure.is_within(judge.judged)
        if is_shown:
            bound = f"bound {figure.bound:.1e}" if math.isfinite(figure.bound) else ""
            table.add_row(figure.what, bound, style="bold")
        for name in (name for name in found.names if name in figure.values):
            seeds, differences = zip(*sorted(figure.values[name].items()), strict=True)
            row: Row = {"shape": f"{figure.what}{how} {judge.reference}", "variant": name, "seeds": seeds}
            row |= {"differences": differences, "over_seeds": figure.over(name), "bound": figure.bound}
            row |= {"within": figure.is_within(name)}
            if judge.by_seed and re.match("last |first ", figure.part):
                row["on_the_way"] = found.on_the_way(figure.curve, name)
            elif figure.part.startswith("all"):
                row["curve"] = [p[1:4] for run in found.pairs[figure.curve][name].values() for p in run]
            rows.append(row)
            if is_shown:
                cells = f"  {name}", f"{figure.over(name):+.1e}", " ".join(f"{x:+.1e}" for x in differences)
                table.add_row(*cells[: len(head)], style="" if row["within"] else "red")
    console.print(table)
    facts: Row = {"verdict": found.verdict, "problems": found.problems, "notes": found.notes}
    facts |= {"judged": judge.judged, "noise": judge.noise, "caption": caption, "looked_at": found.looked_at}
    facts["runs"] = {run.name: run.facts for of in found.runs.values() for run in of.values()}
    results.write(out / "compare_loss.json", rows, source | facts)
    lines = [*(f"note: {note}" for note in found.notes), *(f"[red]{p}[/red]" for p in found.problems)]
    if pictures.pyplot() is None:
        lines.append("no picture: matplotlib is not installed")
    elif judge.by_seed:
        draw_series(results.read(out / "compare_loss.json"), out / "compare_loss.png")
    else:
        draw_pair(found, out / "compare_loss.png")
    colour = "green" if found.verdict == "SAME" else "red"
    lines += [f"{out}: compare_loss.json", found.looked_at, f"[{colour}]{found.verdict}[/{colour}]"]
    console.print("\n".join(lines), soft_wrap=True)
    return STATUS[found.verdict]


def draw_pair(found: Comparison, path: Path) -> None:
    """The heads' losses over each other (those of routers have another scale), and all differences."""
    judge, curves = found.judge, [curve for curve in found.pairs if curve != GRAD_NORM]
    plt, label = pictures.pyplot(), "nan or inf"
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 7.2), layout="constrained")
    for curve, colour in zip(curves, cycle(plt.get_cmap("tab10").colors), strict=False):
        pairs = found.pairs[curve][judge.judged][0]
        _differences(below, pairs, color=colour, label=curve)
        if " loss" in curve or len(curves) == 1:
            iterations, few = [pair.iteration for pair in pairs], "o" if len(pairs) < 12 else ""
            wide = {"lw": 5, "ms": 9, "alpha": 0.35}
            above.plot(iterations, [pair.reference for pair in pairs], color=colour, marker=few, **wide)
            above.plot(iterations, [pair.other for pair in pairs], color=colour, marker=few, lw=1.3, ms=3)
            if missing := [p.iteration for p in pairs if not math.isfinite(p.other + p.reference)]:
                cross = {"color": "#cb181d", "transform": above.get_xaxis_transform(), "label": label}
                above.plot(missing, [0.03] * len(missing), "x", **cross)
                label = ""
    loss, of_loss = next(iter(found.pairs.items()))
    for name in (name for name in judge.noise if name in of_loss):
        _differences(below, of_loss[name][0], color="#737373", ls=":", label=f"{loss} of the noise run")
    below.set(yscale="log", xlabel="iteration", ylabel="relative difference")
    above.set_ylabel("loss")
    _plain(above, below)
    names = f"{judge.judged} (thin) against {judge.reference} (wide)"
    figure.suptitle(f"{names}: {found.verdict}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    pictures.save(figure, path)


def _differences(axes: Any, pairs: Sequence[Pair], **style: Any) -> None:
    """A log axis has no zero: where there is no difference, there is a gap."""
    sizes = [p.difference if 0 < p.difference < math.inf else math.nan for p in pairs]
    axes.plot([pair.iteration for pair in pairs], sizes, lw=1, marker=".", ms=4, **style)


def _plain(*panels: Any) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)


def draw_series(content: dict[str, Any], path: Path) -> None:
    """Of a result that `report` wrote: the differences on the way, and each figure over its bound."""
    of_figures: dict[str, dict[str, Row]] = {}
    for row in content["rows"]:
        what, _, reference = row["shape"].partition(", paired by seed with ")
        of_figures.setdefault(what, {})[row["variant"]] = row
    shown = {what: rows for what, rows in of_figures.items() if re.match("(?!mtp).*, (last|first) ", what)}
    if (plt := pictures.pyplot()) is None or not shown:
        return
    last, facts = next(iter(shown.values())), content["made_by"]
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
    _plain(left, *panels)
    figure.suptitle(f"{facts['judged']} against {reference}, by seed: {facts['verdict']}", fontsize=10)
    left_is = "Left: colours as the names' at the right; zeros are not drawn."
    right_is = "Right: a dot a seed, without sign; a bar over the seeds."
    below = textwrap.fill(f"{left_is} {right_is} {facts['caption']}", 150)
    figure.supxlabel(below, fontsize=7, color="#525252")
    pictures.save(figure, path)


# --- command line ------------------------------------------------------------------------------


def _parser() -> cli.Parser:
    parser = cli.Parser("python -m megatron_fused_ce compare", __doc__ or "")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the reference, and the other run")
    parser.add_argument("--out", type=Path, default=Path("build/compare_loss"))
    add, bound = parser.add_argument_group("bounds").add_argument, cli.number()
    same = "others that are the same as the reference"
    add("--against-noise", nargs="+", default=[], metavar="RUN", help=same)
    add("--first", type=cli.whole(), default=10, metavar="N", help="how many iterations are the first [10]")
    add("--first-bound", type=bound, metavar="X", help="losses, relative [5e-4; fp32 1e-6]")
    add("--first-grad-norm-bound", type=bound, metavar="X", help="ratio - 1 [2e-2; fp32 1e-5]")
    add("--paired", type=Path, metavar="RUNS", help="pair RUNS/NAME-SEED by seed; runs are given as names")
    add = parser.add_argument_group("launches").add_argument
    add("--launch", action="store_true", help="run the command after --, flag off and on")
    add("--noise", action="store_true", help="and once more with Megatron's native loss, as noise")
    each = "three runs, with noise, of each seed; pair them"
    add("--seeds", type=cli.whole(), nargs="+", metavar="N", help=each)
    add("--timeout", type=cli.seconds, default=cli.NO_LIMIT, metavar="S", help="of one launch")
    return parser


def _given_runs(given: argparse.Namespace) -> dict[str, Path]:
    """The reference, the other and, where there is one, the noise: by their names below what they share."""
    if len(given.runs) != 2:
        raise UsageError("give two runs: compare REFERENCE OTHER, or --launch -- COMMAND")
    if len(given.against_noise) > 1:
        raise UsageError("one pair is held against one run of --against-noise; several seeds against more")
    paths = [Path(path).resolve() for path in (*given.runs, *given.against_noise)]
    _refuse_twice(paths)
    shared = commonpath(path.parent for path in paths)
    return {relpath(path, shared): path for path in paths}


def _launch(line: list[str], folder: Path, timeout_s: float, console: Console) -> None:
    began, what = time.monotonic(), f"launch {folder.name}"
    with console.status(what) as status:
        launch(line, folder, timeout_s, lambda now: status.update(f"{what}: {now}"))
    console.print(f"{what}: {time.monotonic() - began:.0f} s, logs in {folder}", soft_wrap=True)


def _launched_runs(given: argparse.Namespace, words: Sequence[str], console: Console) -> dict[str, Path]:
    if given.runs or given.against_noise:
        raise UsageError("--launch makes the runs itself: give the command after --, and no run")
    command, runs = Command.of(words), dict[str, Path]()
    launches = {"off": command.off(), "on": command.on()}
    if given.noise or given.seeds:
        launches["noise"] = command.other_stock()
    for seed in given.seeds or [None]:
        for name, line in launches.items():
            folder = given.out / (name if seed is None else f"{name}-{seed}")
            seeded = [] if seed is None else ["--seed", str(seed)]
            _launch([*line, *seeded], folder, given.timeout, console)
            runs[name] = folder
    other = "unfused" if LOSS_FUSION in launches["off"] else "native"
    names = {"off": "flag off", "on": "flag on", "noise": f"flag off, {other} loss"}
    return {names[name]: folder for name, folder in runs.items()}


@cli.command("compare")
def main(words: list[str]) -> int:
    own, launched = split_command(words)
    given = _parser().parse_args(own)
    from rich.console import Console

    console = Console(highlight=False)
    bounds = {"first_bound": given.first_bound, "first_grad_norm_bound": given.first_grad_norm_bound}
    cli.writable_folder(given.out)
    if given.paired and (len(given.runs) != 2 or not given.against_noise):
        raise UsageError("with --paired give two names of runs in RUNS, and others with --against-noise")
    runs = _launched_runs(given, launched, console) if given.launch else {}
    source = results.made_by(results.device_name() if given.launch else "", ["compare", *words])
    if given.paired or (runs and given.seeds):
        names, noise = (given.runs, given.against_noise) if given.paired else (("off", "on"), ["noise"])
        judge = Judge(names[0], names[1], noise, by_seed=True, first=given.first)
        found = series_of(given.paired or given.out, judge)
        return report(found, given.out, source, console)
    records = {name: {0: read_run(path, name)} for name, path in (runs or _given_runs(given)).items()}
    reference, other, *noise = records
    found = compare(records, Judge(reference, other, noise, first=given.first, **bounds))
    return report(found, given.out, source, console)


if __name__ == "__main__":
    sys.exit(main())
