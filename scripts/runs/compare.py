"""Is it the same training? Runs of Megatron-LM over each other, and a verdict.

    python -m megatron_fused_ce compare off.log on.log
    python -m megatron_fused_ce compare runs/off/tensorboard on.log --against-noise native.log
    python -m megatron_fused_ce compare --launch --noise -- torchrun --nproc-per-node 8 pretrain_gpt.py ...
    python -m megatron_fused_ce compare --launch --seeds 1 2 3 -- torchrun ... pretrain_gpt.py ...
    python -m megatron_fused_ce compare --paired RUNS unfused flag --against-noise native te

The first run is the reference. Each is a log, a folder of logs or a TensorBoard folder; with --launch the
command after -- is run as it is and with --fused-chunked-ce, logs kept in --out. Compared are means over the
same iterations; a difference below the printed digits is none.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, pairwise
from os.path import commonpath, relpath
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_fused_ce.cli import command_line as cli
from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import losses, pictures, results, tables
from megatron_fused_ce.scripts.lib.launches import Command, launch, split_command
from megatron_fused_ce.scripts.lib.logs import GRAD_NORM, Record, read_run
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


class Pair(NamedTuple):
    """Means of both runs over the same iterations: ``first`` (None: not known) to ``iteration``."""

    first: int | None
    iteration: int
    reference: float
    other: float
    tolerance: float  # a difference up to this is none

    def difference(self) -> float:
        """Relative; inf where one alone is finite, or 0."""
        found = losses.relative_difference(self.other, self.reference, self.tolerance)
        return math.inf if found and not (self.other and self.reference) else found

    def apart(self, is_norm: bool = False) -> float:
        """Other less reference, of norms the log ratio; inf where the difference is."""
        found = self.difference()
        if is_norm and 0 < found < math.inf:
            return math.log(self.other / self.reference)
        return found if is_norm or found == math.inf else self.other - self.reference

    def drift(self) -> float:
        """Relative, with its sign."""
        return self.apart() / (abs(self.reference) or 1.0)


#: By name and seed (one pair's is 0): the runs, a curve of theirs, a number of theirs.
Runs = dict[str, dict[int, Record]]
Pairs = dict[str, dict[int, list[Pair]]]
Values = dict[str, dict[int, float]]


def pairs_of(reference: Record, other: Record, curve: str) -> list[Pair]:
    """Means over the same iterations, in order: of the fewest points of both that cover them without a gap.

    Points whose first iteration is not known average alike in runs of one version.
    """
    alike = (reference.kind, reference.fine_stamps) == (other.kind, other.fine_stamps)
    runs = [[p for p in run.curves.get(curve, []) if p.first or alike] for run in (reference, other)]
    edges = [{edge for p in run for edge in (p.span.start - 1, p.span.stop - 1)} for run in runs]
    points = [{at: p for p in run for at in p.span} for run in runs]
    pairs = []
    for before, last in pairwise(sorted(edges[0] & edges[1])):
        span = range(before + 1, last + 1)
        if all(at in of for of in points for at in span):
            of_ours, of_other = (sum(of[at].value for at in span) / len(span) for of in points)
            # 1.1 - 1.0 is a little more than 0.1.
            tolerance = max(of[at].unit for of in points for at in span) * (1 + 1e-6)
            pairs.append(Pair(span.start if last > 0 else None, abs(last), of_ours, of_other, tolerance))
    return sorted(pairs, key=lambda pair: pair.iteration)


def start_of(pairs: Sequence[Pair]) -> int:
    """The first iteration; where its line does not tell, as many are in it as lie before the next line."""
    interval = pairs[1].iteration - pairs[0].iteration if len(pairs) > 1 else 1
    return pairs[0].first or max(1, pairs[0].iteration - interval + 1)


def root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))


def of_each(
    pairs: Pairs, size: Callable[[Pair], float], fold: Callable[[Iterable[float]], float],
    first: int = 0, last: int = cli.BILLION, reach: float = math.inf,
) -> Values:  # fmt: skip
    """Each run's sizes over these iterations, folded, of the runs that have some.

    ``reach``: leaves out runs without a line that ends in so many last of these iterations.
    """
    found = Values()
    for name, seed, run in ((name, seed, run) for name, of in pairs.items() for seed, run in of.items()):
        those = [pair for pair in run if first <= pair.iteration <= last]
        sizes = [x for pair in those if not math.isnan(x := size(pair))]
        if sizes and those[-1].iteration > min(last, run[-1].iteration) - reach:
            found.setdefault(name, {})[seed] = fold(sizes)
    return found


def blocks(start: int, end: int, shortest: int = 10) -> list[tuple[int, int]]:
    """First and last iteration of each."""
    ends = [0, *(at for at in ENDS if at >= shortest)]
    return [(start + a, min(start + b - 1, end)) for a, b in pairwise(ends) if start + a <= end]


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

    def bound(self, times: float, least: float, *values: Values, otherwise: float = math.nan) -> float:
        """So many times the largest noise of these, at the least ``least``; ``otherwise`` without noise."""
        each = [[x for name in self.noise for x in of.get(name, {}).values()] for of in values]
        known = [finite for of in each if (finite := [*filter(math.isfinite, of)])]
        return max([least, *(times * root_mean_square(of) for of in known)]) if known else otherwise

    def figures(self, curve: str, pairs: Pairs, start: int, is_fp32: bool) -> Iterator[Figure]:
        """Of one pair relative differences, of seeds differences; gradient norms have no last iterations.

        One pair's noise only widens a gradient norm's fixed bound: three digits behind the point, as logged,
        are few, and its noise jumps more than the losses'.
        """
        is_norm, mine = curve == GRAD_NORM, [*chain(*pairs[self.judged].values())]
        begin, end = (pick(pair.iteration for pair in mine) for pick in (min, max))
        early, twice = (begin, start + self.first - 1, self.first / 2), losses.YARDSTICK_FACTOR
        worst, every = max(mine, key=Pair.difference), of_each(pairs, Pair.difference, max)
        at = f"all (largest at iteration {worst.iteration})" if worst.difference() else "all"
        is_all = self.by_seed and " loss " in curve  # a validation
        bound = self.bound(twice, DRIFT, every, otherwise=DRIFT) if is_all else math.inf
        yield Figure(curve, at, every, max, bound)
        if is_all:
            return
        runs = [run for name in (self.judged, *self.noise) for run in pairs.get(name, {}).values()]
        known = [(abs(pair.reference), pair.tolerance) for pair in chain(*runs) if pair.reference]
        # What printed digits can tell: of losses seven, of norms, as a ratio, those behind the point.
        digits = losses.LOSS_RESOLUTION * max((size for size, _ in known if size < math.inf), default=0.0)
        if is_norm:
            ratios = [tolerance / size for size, tolerance in known]
            digits = max(losses.GRAD_NORM_RESOLUTION, median_low(ratios or [0.0]))
        else:
            # Means of few seeds can be near 0 by chance; those of the iterations before seldom are, too.
            size = Pair.apart if self.by_seed else Pair.drift
            last, before = (of_each(pairs, size, fmean, at - LAST + 1, at) for at in (end, end - LAST))
            least, otherwise = (digits, math.nan) if self.by_seed else (DRIFT, DRIFT)
            bound = self.bound(twice, least, last, before, otherwise=otherwise)
            yield Figure(curve, f"last {LAST}", last, fmean, bound)
        part = f"first {self.first}"
        if not self.by_seed:
            first = of_each(pairs, Pair.difference, max, *early)
            usual, given = FIXED[is_norm][is_fp32], (self.first_bound, self.first_grad_norm_bound)[is_norm]
            bound = self.bound(twice, usual if is_norm else losses.LOSS_RESOLUTION, first, otherwise=usual)
            yield Figure(curve, part, first, max, bound if given is None else given)
            return
        # A mean over more iterations is nearer to another than they are.
        steps = {median_low([b.iteration - a.iteration for a, b in pairwise(run)] or [0]) for run in runs}
        parts, apart = blocks(start, end), partial(Pair.apart, is_norm=is_norm)
        windows = [of_each(pairs, apart, root_mean_square, *block) for block in parts]
        figures = [(part, of_each(pairs, apart, root_mean_square, *early))]
        figures += [(f"iterations {a} to {b}", of) for (a, b), of in zip(parts, windows, strict=True)]
        for so_many, (part, of) in enumerate(figures, 1):
            # Of a block by the largest noise of this one, an earlier one or the next.
            times, near = (IN_BLOCK, windows[:so_many]) if so_many > 1 else (twice, [of])
            bound = self.bound(times, digits, *near) if len(steps) == 1 else math.nan
            yield Figure(curve, part, of, root_mean_square, bound)


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
    def main(self) -> Pairs:
        return next(iter(self.pairs.values()), {})

    def on_the_way(self, curve: str, name: str) -> list[tuple[int, float]]:
        """Last iteration of each block, from the first on, and the distance in it."""
        of = {name: self.pairs[curve][name]}
        end = max(run[-1].iteration for run in of[name].values())
        found = [(b, of_each(of, Pair.apart, root_mean_square, a, b)) for a, b in blocks(self.start, end, 1)]
        return [(end, root_mean_square(sizes[name].values())) for end, sizes in found if sizes]

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
        if judged not in figure.values:
            self.notes.append(f"{figure.what}: no line has these alone; --log-interval 1 would tell more")
        elif math.isnan(bound) or (self.judge.noise and not has_noise and bound < math.inf):
            how = "not judged" if math.isnan(bound) else "a fixed bound"
            self.notes.append(f"{figure.what}: {how}, since no run of --against-noise has such lines")


def compare(runs: Runs, judge: Judge, notes: Iterable[str] = ()) -> Comparison:
    """Raises UsageError where a name has no run with the iterations of the reference's of its seed."""
    found, skipped = Comparison(judge, runs, [*notes]), Values()
    for name, seed, run in [(name, seed, run) for name, of in runs.items() for seed, run in of.items()]:
        if run.restarts:
            again = ", ".join(map(str, run.restarts[:5]))
            found.notes.append(f"{run.name} was restarted at iteration {again}: the last start counts")
        beside = runs[judge.reference].get(seed)
        if name == judge.reference or beside is None:
            continue
        curves = {curve: pairs_of(beside, run, curve) for curve in beside.curves if curve in run.curves}
        main = next((loss for loss in beside.training_losses if curves.get(loss)), "")
        if not main:
            ranges = ["{} {} to {}".format(each.name, *each.iterations()) for each in (beside, run)]
            advice = "; beside a log TensorBoard needs --tensorboard-log-interval 1"
            why = f"no loss over the same iterations ({', '.join(ranges)})"
            found.notes.append(why + advice * (run.kind != beside.kind))
        for curve, pairs in curves.items() if main else ():
            is_of_heads = curve in (main, GRAD_NORM) or re.match("mtp|.* loss ", curve)
            if judge.by_seed and not is_of_heads:
                continue
            if those := [p for p in pairs if name not in judge.noise or math.isfinite(p.difference())]:
                found.pairs.setdefault(curve, {}).setdefault(name, {})[seed] = those
        if run.kind != beside.kind:  # TensorBoard has names of its own
            continue
        if run.kind == "log":  # TensorBoard tells of no skipped step
            skipped.setdefault(name, {})[seed] = _skips(beside, run)
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
    if judge.judged in skipped:
        bound = judge.bound(losses.YARDSTICK_FACTOR, 0.0, skipped, otherwise=0.0)
        found.add(Figure("skipped steps", "lines", skipped, root_mean_square, bound))
    return found


def _skips(*runs: Record) -> int:
    """In how many lines of both the two skipped different numbers of steps."""
    (a, b), (c, d) = (run.iterations() for run in runs)
    lines = {line for run in runs for line in run.skipped if max(a, c) <= line <= min(b, d)}
    return sum(len({run.skipped.get(line, 0) for run in runs}) > 1 for line in lines)


def series_of(folder: Path, judge: Judge) -> Comparison:
    """Of the runs FOLDER/NAME-SEED that reach the last iteration.

    Raises UsageError where one of the names has none that can be paired.
    """
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


# --- what is written ---------------------------------------------------------------------------


def report(found: Comparison, out: Path, source: Row, console: Console, caption: str = "") -> int:
    """Prints the table and the verdict, writes picture and figures; the exit status."""
    judge, rows = found.judge, list[Row]()
    names = dict.fromkeys([judge.judged, *judge.noise, *sorted(found.runs)])
    how = ", paired by seed with" if judge.by_seed else " against"
    head = ["", "over the seeds", "of each seed"] if judge.by_seed else ["", "difference"]
    table = tables.terminal(f"minus {judge.reference}; red: outside the bound", head)
    for figure in found.figures:
        is_shown = not figure.is_block or not figure.is_within(judge.judged)
        if is_shown:
            bound = f"bound {figure.bound:.1e}" if math.isfinite(figure.bound) else ""
            table.add_row(figure.what, bound, style="bold")
        for name in (name for name in names if name in figure.values):
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
    judge, plt, loss = found.judge, pictures.pyplot(), next(iter(found.pairs))
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 7.2), layout="constrained")
    grey = {"color": "#737373", "ls": ":", "label": f"{loss} of the noise run"}
    drawn = [(found.main[name][0], grey) for name in judge.noise if name in found.main]
    curves = [curve for curve in found.pairs if curve != GRAD_NORM]
    for curve, colour in zip(curves, cycle(plt.get_cmap("tab10").colors), strict=False):
        drawn.append((pairs := found.pairs[curve][judge.judged][0], {"color": colour, "label": curve}))
        if " loss" in curve or len(curves) == 1:
            at, few = [pair.iteration for pair in pairs], "o" if len(pairs) < 12 else ""
            wide = {"color": colour, "marker": few, "lw": 5, "ms": 9, "alpha": 0.35}
            above.plot(at, [pair.reference for pair in pairs], **wide)
            above.plot(at, [pair.other for pair in pairs], color=colour, marker=few, lw=1.3, ms=3)
    for pairs, style in drawn:  # A log axis has no zero: where there is no difference, there is a gap.
        sizes = [size if 0 < (size := p.difference()) < math.inf else math.nan for p in pairs]
        below.plot([pair.iteration for pair in pairs], sizes, lw=1, marker=".", ms=4, **style)
    below.set(yscale="log", xlabel="iteration", ylabel="relative difference")
    above.set_ylabel("loss")
    _plain(above, below)
    names = f"{judge.judged} (thin) against {judge.reference} (wide)"
    figure.suptitle(f"{names}: {found.verdict}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    pictures.save(figure, path)


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
        bound = float(next(iter(rows.values()))["bound"])
        for at, (row, colour) in enumerate((rows.get(name), colour) for name, colour in colours.items()):
            if row is None:
                continue
            each = [max(abs(float(value)) / bound, 1e-2) for value in row["differences"]]
            axes.plot(each, [at] * len(each), "o", color=colour, ms=4, alpha=0.5)
            axes.plot([abs(float(row["over_seeds"])) / bound], [at], "|", color=colour, ms=14, mew=2)
        axes.axvline(1, color="black", ls="--", lw=1)
        axes.set(xscale="log", ylim=(len(last) - 0.5, -0.5))
        axes.set_title(f"{what}\nbound {bound:.1e}", fontsize=8)
        axes.set_xlabel("times the bound", fontsize=8)
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


def _launch_all(given: argparse.Namespace, words: Sequence[str]) -> None:
    """Run the launches; then their folders are given, as if the user had."""
    if given.runs or given.against_noise:
        raise UsageError("--launch makes the runs itself: give the command after --, and no run")
    command = Command.of(words)
    lines = {"off": command.off(), "on": command.on()}
    if given.noise or given.seeds:
        lines["noise"] = command.other_stock()
    seeds = [(f"-{seed}", ["--seed", str(seed)]) for seed in given.seeds or ()]
    for end, seeded in seeds or [("", [])]:
        for name, line in lines.items():
            launch([*line, *seeded], given.out / f"{name}{end}", given.timeout, f"{name}{end}")
    given.paired = given.out if seeds else None
    off, on, *given.against_noise = lines if seeds else [given.out / name for name in lines]
    given.runs = [off, on]


@cli.command("compare")
def main(words: list[str]) -> int:
    own, launched = split_command(words)
    parser = cli.Parser("python -m megatron_fused_ce compare", __doc__ or "")
    add, bound = parser.add_argument, cli.number()
    add("runs", nargs="*", metavar="RUN", help="the reference, and the other run")
    add("--out", type=Path, default=Path("build/compare_loss"))
    same = "others that are the same as the reference"
    add("--against-noise", nargs="+", default=[], metavar="RUN", help=same)
    add("--first", type=cli.whole(), default=10, metavar="N", help="how many iterations are the first [10]")
    add("--first-bound", type=bound, metavar="X", help="losses, relative [5e-4; fp32 1e-6]")
    add("--first-grad-norm-bound", type=bound, metavar="X", help="ratio - 1 [2e-2; fp32 1e-5]")
    add("--paired", type=Path, metavar="RUNS", help="pair RUNS/NAME-SEED by seed; runs are given as names")
    add("--launch", action="store_true", help="run the command after --, flag off and on")
    add("--noise", action="store_true", help="and once more with Megatron's native loss, as noise")
    each = "three runs, with noise, of each seed; pair them"
    add("--seeds", type=cli.whole(), nargs="+", metavar="N", help=each)
    add("--timeout", type=cli.seconds, default=cli.NO_LIMIT, metavar="S", help="of one launch")
    given = parser.parse_args(own)
    from rich.console import Console

    console = Console(highlight=False)
    cli.writable_folder(given.out)
    if given.launch:
        _launch_all(given, launched)
    source = results.made_by(results.device_name() if given.launch else "", ["compare", *words])
    every = [*given.runs, *given.against_noise]
    if len(given.runs) != 2 or (len(every) < 3 if given.paired else len(every) > 3):
        pairs = "with --paired two names, and others by --against-noise; or --launch -- COMMAND"
        raise UsageError(f"give two runs, and at most one by --against-noise; {pairs}")
    paths = [Path(run).resolve() for run in every]
    if len({*paths}) < len(every):
        raise UsageError("a run is given twice: it is no noise of itself, and no other run")
    # One pair's by their names below what they share.
    shared = commonpath([path.parent for path in paths])
    names = every if given.paired else [relpath(path, shared) for path in paths]
    bounds = given.first, given.first_bound, given.first_grad_norm_bound
    judge = Judge(names[0], names[1], names[2:], given.paired is not None, *bounds)
    if given.paired:
        found = series_of(given.paired, judge)
    else:
        runs = zip(names, paths, strict=True)
        found = compare({name: {0: read_run(path, name)} for name, path in runs}, judge)
    return report(found, given.out, source, console)


if __name__ == "__main__":
    sys.exit(main())
