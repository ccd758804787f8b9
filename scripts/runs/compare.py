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
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, product
from os.path import commonpath, relpath
from pathlib import Path
from statistics import fmean, median_low
from typing import Any, NamedTuple

from megatron_fused_ce.cli import command_line as cli
from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import losses, pictures, results, tables
from megatron_fused_ce.scripts.lib.launches import Command, launch, split_command
from megatron_fused_ce.scripts.lib.logs import GRAD_NORM, Record, read_run
from megatron_fused_ce.scripts.lib.results import Row

#: Iterations, at the end of runs, over which a difference is averaged.
LAST = 100
#: Relative difference over these, or of a validation, that is allowed without noise.
DRIFT = 0.01
FEWEST_SEEDS = 3
#: So many times what the seeds together may differ by, one of them may.
ONE_SEED = 5
#: So many times what the noise does in a block, a run may differ by.
IN_BLOCK = 3
STATUS = {"SAME": 0, "DIFFERENT": 1, "INCONCLUSIVE": 3}


class Pair(NamedTuple):
    """Means of both runs over the same iterations: ``first`` (None: not known) to ``iteration``."""

    first: int | None
    iteration: int
    reference: float
    other: float
    tolerance: float  # a difference up to this is none

    def relative(self) -> float:
        """Other less reference, over its size; inf where one alone is finite, or 0."""
        found = losses.relative_difference(self.other, self.reference, self.tolerance)
        if found == math.inf or (found and not (self.other and self.reference)):
            return math.inf
        return math.copysign(found, self.other - self.reference)

    def apart(self, is_norm: bool = False) -> float:
        """Other less reference, of norms the log ratio; inf as `relative` is; nan where both are, or inf."""
        if (found := self.relative()) == math.inf or (is_norm and not found):
            return found
        return math.log(self.other / self.reference) if is_norm else self.other - self.reference


Fold = Callable[[Iterable[float]], float]  # of several numbers one
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


def root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))


def largest(values: Iterable[float]) -> float:
    return max(map(abs, values))


def of_each(
    pairs: Pairs, size: Callable[[Pair], float], fold: Fold,
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
    """First and last iteration of each; they end at 1, 2, 3, 5, 10, 20, ..., from the ``shortest`` on."""
    ends = [at for power in range(10) for digit in (1, 2, 3, 5) if (at := digit * 10**power) >= shortest]
    return [(start + a, min(start + b - 1, end)) for a, b in pairwise([0, *ends]) if start + a <= end]


# --- what is judged ----------------------------------------------------------------------------


@dataclass
class Comparison:
    """Whom to judge by whom, by their names; `of` then says what came of it."""

    reference: str
    judged: str
    noise: Sequence[str] = ()
    by_seed: bool = False
    first: int = 10
    first_bounds: Sequence[float | None] = (None, None)  # of losses, of norms; None: what fits
    runs: Runs = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    pairs: dict[str, Pairs] = field(default_factory=dict)  # by curve; the first is the training's loss
    loss: str = ""  # the training's, and its pairs
    main: Pairs = field(default_factory=dict)
    start: int = 1  # the first iteration that is compared
    problems: list[str] = field(default_factory=list)
    #: By curve and part of it: a row of the result for each name, of the judged first.
    rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict)

    def of_folder(self, folder: Path) -> Comparison:
        """Of the runs FOLDER/NAME-SEED that reach the last iteration.

        Raises UsageError where one of the names has none that can be paired.
        """
        found, runs = list[tuple[str, int, Record]](), Runs({self.reference: {}})
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if match := re.fullmatch(r"(.+)-(\d+)(?:\.log)?", path.name):
                try:
                    found.append((match[1], int(match[2]), read_run(path, path.name)))
                except UsageError as error:
                    self.notes.append(f"left out: {error}")
        last = max((run.iterations()[1] for _, _, run in found), default=0)
        for name, seed, run in found:
            if (end := run.iterations()[1]) < last:
                self.notes.append(f"left out: {run.name} ends at iteration {end}")
            elif seed in runs.setdefault(name, {}):
                self.notes.append(f"left out: {run.name}, one more of its name and seed")
            else:
                runs[name][seed] = run
        return self.of(runs)

    def of(self, runs: Runs) -> Comparison:
        """Raises UsageError where a name has no run with the iterations of the reference's of its seed."""
        self.runs, skipped = runs, Values()
        for name, seed, run in [(name, seed, run) for name, of in runs.items() for seed, run in of.items()]:
            if run.restarts:
                again = ", ".join(map(str, run.restarts[:5]))
                self.notes.append(f"{run.name} was restarted at iteration {again}: the last start counts")
            beside = runs[self.reference].get(seed)
            if name == self.reference or beside is None:
                continue
            self._pair(name, seed, run, beside)
            if run.kind == beside.kind == "log":  # TensorBoard tells of no skipped step
                (a, b), (c, d) = beside.iterations(), run.iterations()
                lines = {line for line, _ in beside.skipped.items() ^ run.skipped.items()}
                skipped.setdefault(name, {})[seed] = sum(max(a, c) <= line <= min(b, d) for line in lines)
        order = sorted(self.pairs, key=lambda curve: (" loss " in curve, curve == GRAD_NORM))
        self.pairs = {curve: self.pairs[curve] for curve in order if self.judged in self.pairs[curve]}
        self.loss, self.main = next(iter(self.pairs.items()), ("", {}))
        without = [name for name in (self.judged, *self.noise) if name not in self.main]
        if without and (self.by_seed or self.judged in without):
            why = f"no run NAME-SEED of {', '.join(without)} is beside {self.reference} of the same seed"
            raise UsageError("; ".join(["nothing to compare", *[why] * self.by_seed, *self.notes[:3]]))
        if not any(math.isfinite(x) for p in chain(*self.main[self.judged].values()) for x in p[2:4]):
            raise UsageError("nothing to compare: no loss is finite in either run")
        # Where a first line does not tell, as many iterations are in it as lie before the next line.
        two = [(run[0], run[:2][-1].iteration) for run in self.main[self.judged].values()]
        self.start = min(a.first or max(1, a.iteration - max(1, at - a.iteration) + 1) for a, at in two)
        of_pair = [run for name in (self.reference, self.judged) for run in runs[name].values()]
        for curve in self.pairs:
            self._judge(curve, is_fp32={run.precision for run in of_pair} == {"float32"})
        if self.judged in skipped:
            bound = self.bound(losses.YARDSTICK_FACTOR, 0.0, 0.0, skipped)
            self.add("skipped steps", "lines", skipped, root_mean_square, bound)
        return self

    def _pair(self, name: str, seed: int, run: Record, beside: Record) -> None:
        """Put each curve of a run beside the reference's; of seeds those of the heads alone."""
        curves = {curve: pairs_of(beside, run, curve) for curve in beside.curves if curve in run.curves}
        main = next((loss for loss in beside.training_losses if curves.get(loss)), "")
        if not main:
            ranges = ["{} {} to {}".format(each.name, *each.iterations()) for each in (beside, run)]
            advice = "; beside a log TensorBoard needs --tensorboard-log-interval 1"
            why = f"no loss over the same iterations ({', '.join(ranges)})"
            self.notes.append(why + advice * (run.kind != beside.kind))
        elif alone := [curve for curve, pairs in curves.items() if not pairs]:
            self.notes.append(f"{run.name}: not compared, no iteration in common: {', '.join(alone)}")
        for curve, pairs in curves.items() if main else ():
            pairs = [pair for pair in pairs if name not in self.noise or pair.relative() < math.inf]
            if pairs and (not self.by_seed or curve in (main, GRAD_NORM) or re.match("mtp|.* loss ", curve)):
                self.pairs.setdefault(curve, {}).setdefault(name, {})[seed] = pairs
        is_judged = name == self.judged and run.kind == beside.kind  # TensorBoard has names of its own
        for one, other in ((beside, run), (run, beside)) if is_judged else ():
            alone = [c for c in one.curves if c not in other.curves and (self.by_seed or " loss " not in c)]
            self.problems += [f"only {one.name} logs {curve}" for curve in alone]

    def bound(self, times: float, least: float, otherwise: float, *values: Values) -> float:
        """So many times the largest noise of these, at the least ``least``; ``otherwise`` without noise."""
        each = [[x for n in self.noise for x in of.get(n, {}).values() if x < math.inf] for of in values]
        known = [times * root_mean_square(of) for of in each if of]
        return max(least, *known) if known else otherwise

    def _judge(self, curve: str, is_fp32: bool) -> None:
        """Of one pair relative differences, of seeds differences; gradient norms have no last iterations.

        One pair's noise only widens a gradient norm's fixed bound: three digits behind the point, as logged,
        are few, and its noise jumps more than the losses'.
        """
        pairs, is_norm, twice = self.pairs[curve], curve == GRAD_NORM, losses.YARDSTICK_FACTOR
        mine = [*chain(*pairs[self.judged].values())]
        if lost := [pair.iteration for pair in mine if math.isnan(pair.apart())]:
            self.notes.append(f"{curve} is nan in both runs on {len(lost)} lines, from {min(lost)} on")
        worst = max(mine, key=lambda pair: abs(pair.relative()))
        at = f"all (largest at iteration {worst.iteration})" if worst.relative() else "all"
        every, is_validation = of_each(pairs, Pair.relative, largest), self.by_seed and " loss " in curve
        self.add(curve, at, every, max, self.bound(twice, DRIFT, DRIFT, every) if is_validation else math.inf)
        if is_validation:
            return
        begin, end = (pick(pair.iteration for pair in mine) for pick in (min, max))
        size: Callable[[Pair], float] = Pair.relative
        fold, fixed, parts = largest, self.first_bounds[is_norm], list[tuple[int, int]]()
        usual = losses.FIRST_BOUNDS[is_norm][is_fp32]
        # Bounds at the least, and without noise.
        of_last, of_first = (DRIFT, DRIFT), (usual if is_norm else losses.LOSS_RESOLUTION, usual)
        if self.by_seed:
            size, fold = partial(Pair.apart, is_norm=is_norm), root_mean_square
            parts = blocks(self.start, end)
            runs = [run for name in (self.judged, *self.noise) for run in pairs.get(name, {}).values()]
            known = [pair for pair in chain(*runs) if 0 < abs(pair.reference) < math.inf]
            # What printed digits can tell: of losses seven, of norms, as a ratio, those behind the point.
            digits = losses.LOSS_RESOLUTION * max((abs(pair.reference) for pair in known), default=0.0)
            if is_norm:
                ratios = [pair.tolerance / abs(pair.reference) for pair in known]
                digits = max(losses.GRAD_NORM_RESOLUTION, median_low(ratios or [0.0]))
            of_last = of_first = digits, math.nan
            # A mean over more iterations is nearer to another than they are.
            steps = {median_low([b.iteration - a.iteration for a, b in pairwise(run)] or [0]) for run in runs}
            fixed = None if len(steps) == 1 else math.nan
        if not is_norm:
            # Means of few seeds can be near 0 by chance; those of the iterations before seldom are, too.
            last, before = (of_each(pairs, size, fmean, at - LAST + 1, at) for at in (end, end - LAST))
            self.add(curve, f"last {LAST}", last, fmean, self.bound(twice, *of_last, last, before))
        found = [of_each(pairs, size, fold, begin, self.start + self.first - 1, self.first / 2)]
        found += [of_each(pairs, size, fold, *part) for part in parts]
        names = f"first {self.first}", *(f"iterations {a} to {b}" for a, b in parts)
        for so_many, (name, of) in enumerate(zip(names, found, strict=True)):
            # Of a block by the largest noise of this one, an earlier one or the next.
            times, near = (IN_BLOCK, found[1 : so_many + 2]) if so_many else (twice, [of])
            bound = self.bound(times, *of_first, *near) if fixed is None else fixed
            self.add(curve, name, of, fold, bound)

    def add(self, curve: str, part: str, values: Values, over_seeds: Fold, bound: float) -> None:
        """Of a number of each run one over the seeds of each name; ``bound`` nan: not known without noise."""
        what, how = f"{curve}, {part}", ", paired by seed with" if self.by_seed else " against"
        is_there, names = self.judged in values, dict.fromkeys([self.judged, *self.noise, *sorted(self.runs)])
        for name in [name for name in names if is_there and name in values]:
            seeds, differences = zip(*sorted(values[name].items()), strict=True)
            over = over_seeds(differences)
            sizes = [abs(over), *(abs(difference) / ONE_SEED for difference in differences)]
            # Without a bound, which is nan, it is finite.
            is_within = all(math.isfinite(size) and not size > bound for size in sizes)
            row: Row = {"shape": f"{what}{how} {self.reference}", "variant": name, "seeds": seeds}
            row |= {"differences": differences, "over_seeds": over, "bound": bound, "within": is_within}
            if self.by_seed and part.startswith(("last ", "first ")):
                run = {name: self.pairs[curve][name]}
                ends = blocks(self.start, max(pairs[-1].iteration for pairs in run[name].values()), 1)
                by = {b: of_each(run, Pair.apart, root_mean_square, a, b) for a, b in ends}
                row["on_the_way"] = [(b, root_mean_square(of[name].values())) for b, of in by.items() if of]
            self.rows.setdefault((curve, part), []).append(row)
            if name == self.judged and not is_within:
                self.problems.append(f"{what} differs: {over:+.1e}, bound {bound:.1e}")
        is_fixed = self.noise and bound < math.inf and values.keys().isdisjoint(self.noise)
        if not part.startswith("iterations ") and (is_fixed or math.isnan(bound) or not is_there):
            how = "a fixed bound" if is_there and bound < math.inf else "not judged"
            why = "since not all runs have such lines; --log-interval 1 would tell more"
            self.notes.append(f"{what}: {how}, {why}")

    @property
    def verdict(self) -> str:
        seeds, *others = (len(self.main.get(name, {})) for name in (self.judged, *self.noise))
        # The last iterations alone miss most errors.
        told = any(row["bound"] >= 0 for row in self.rows.get((self.loss, f"first {self.first}"), ()))
        if self.by_seed and min(seeds, sum(others)) < FEWEST_SEEDS:
            return "INCONCLUSIVE"
        return "DIFFERENT" if self.problems else "SAME" if told or not self.by_seed else "INCONCLUSIVE"

    @property
    def looked_at(self) -> str:
        of = self.main[self.judged]
        curves = dict.fromkeys(curve for (curve, _), (row, *_) in self.rows.items() if row["bound"] >= 0)
        end, seeds = max(run[-1].iteration for run in of.values()), ", ".join(map(str, of))
        lines = f"on {min(map(len, of.values()))} lines or more" + f"; seeds {seeds}" * self.by_seed
        return f"looked at: {', '.join(curves)}; iterations {self.start} to {end}, {lines}"


# --- what is written ---------------------------------------------------------------------------


def report(found: Comparison, out: Path, source: Row, tell: Callable[..., None], caption: str = "") -> int:
    """Prints the table and the verdict, writes picture and figures; the exit status."""
    head = ["", "over the seeds", "of each seed"] if found.by_seed else ["", "difference"]
    table = tables.terminal(f"minus {found.reference}; red: outside the bound", head)
    for (curve, part), rows in found.rows.items():
        if part.startswith("iterations ") and rows[0]["within"]:
            continue
        bound = f"bound {rows[0]['bound']:.1e}" if math.isfinite(rows[0]["bound"]) else ""
        table.add_row(f"{curve}, {part}", bound, style="bold")
        for row in rows:
            each = " ".join(f"{difference:+.1e}" for difference in row["differences"])
            cells = f"  {row['variant']}", f"{row['over_seeds']:+.1e}", each
            table.add_row(*cells[: len(head)], style="" if row["within"] else "red")
    tell(table)
    facts: Row = {"verdict": found.verdict, "problems": found.problems, "notes": found.notes}
    facts |= {"judged": found.judged, "noise": found.noise, "caption": caption, "looked_at": found.looked_at}
    facts["runs"] = {run.name: run.facts for of in found.runs.values() for run in of.values()}
    results.write(out / "compare_loss.json", [*chain(*found.rows.values())], source | facts)
    lines = [*(f"note: {note}" for note in found.notes), *(f"[red]{p}[/red]" for p in found.problems)]
    if pictures.pyplot() is None:
        lines.append("no picture: matplotlib is not installed")
    elif found.by_seed:
        draw_series(results.read(out / "compare_loss.json"), out / "compare_loss.png")
    else:
        draw_pair(found, out / "compare_loss.png")
    colour = "green" if found.verdict == "SAME" else "red"
    lines += [f"{out}: compare_loss.json", found.looked_at, f"[{colour}]{found.verdict}[/{colour}]"]
    tell("\n".join(lines), soft_wrap=True)
    return STATUS[found.verdict]


def draw_pair(found: Comparison, path: Path) -> None:
    """The heads' losses over each other (those of routers have another scale), and all differences."""
    plt = pictures.pyplot()
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 7.2), layout="constrained")
    grey = {"color": "#737373", "ls": ":", "label": f"{found.loss} of the noise run"}
    drawn = [(name, found.loss, grey) for name in found.noise if name in found.main]
    curves = [curve for curve in found.pairs if curve != GRAD_NORM]
    drawn += [(found.judged, curve, {"color": f"C{at}", "label": curve}) for at, curve in enumerate(curves)]
    for name, curve, style in drawn:
        pairs, colour = found.pairs[curve][name][0], style["color"]
        at, few = [pair.iteration for pair in pairs], "o" if len(pairs) < 12 else ""
        if name == found.judged and (" loss" in curve or len(curves) == 1):
            wide = {"color": colour, "marker": few, "lw": 5, "ms": 9, "alpha": 0.35}
            above.plot(at, [pair.reference for pair in pairs], **wide)
            above.plot(at, [pair.other for pair in pairs], color=colour, marker=few, lw=1.3, ms=3)
        # A log axis has no zero: where there is no difference, there is a gap.
        below.plot(at, [abs(pair.relative()) or math.nan for pair in pairs], lw=1, marker=".", ms=4, **style)
    below.set(yscale="log", xlabel="iteration", ylabel="relative difference")
    above.set_ylabel("loss")
    figure.suptitle(f"{found.judged} (thin) against {found.reference} (wide): {found.verdict}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    _save_plain(figure, path)


def draw_series(content: dict[str, Any], path: Path) -> None:
    """Of a result that `report` wrote: the differences on the way, and each figure over its bound."""
    shown: dict[str, dict[str, Row]] = {}
    for row in content["rows"]:
        what, _, reference = row["shape"].partition(", paired by seed with ")
        if re.match("(?!mtp).*, (last|first) ", what):
            shown.setdefault(what, {})[row["variant"]] = row
    if (plt := pictures.pyplot()) is None or not shown:
        return
    last, facts = next(iter(shown.values())), content["made_by"]
    size, widths = (5 + 2.2 * len(shown), 2.4 + 0.26 * len(last)), [1.7] + [1] * len(shown)
    how = {"figsize": size, "layout": "constrained", "width_ratios": widths}
    figure, (left, *panels) = plt.subplots(1, len(widths), **how)
    colours = {name: f"C{at}" for at, name in enumerate(last)}
    for name, row in last.items():
        # A log axis has no zero, a result file no nan but its word.
        points = [(end, float(size) or math.nan) for end, size in row["on_the_way"]]
        style = "-" if name in (facts["judged"], *facts["noise"]) else ":"
        left.loglog(*zip(*points, strict=True), color=colours[name], lw=1.2, ls=style, marker=".", ms=3)
    left.set_xlabel("iteration", fontsize=8)
    left.set_title(f"loss minus {reference}'s with the same seed,\nroot mean square, nats", fontsize=8)
    for axes, (what, rows) in zip(panels, shown.items(), strict=True):
        bound = float(next(iter(rows.values()))["bound"])
        for at, name in ((at, name) for at, name in enumerate(last) if name in rows):
            each = [max(abs(float(value)) / bound, 1e-2) for value in rows[name]["differences"]]
            axes.plot(each, [at] * len(each), "o", ms=4, alpha=0.5, color=colours[name])
            over = abs(float(rows[name]["over_seeds"])) / bound
            axes.plot([over], [at], "|", ms=14, mew=2, color=colours[name])
        axes.axvline(1, color="black", ls="--", lw=1)
        axes.set(xscale="log", ylim=(len(last) - 0.5, -0.5))
        axes.set_title(f"{what}\nbound {bound:.1e}", fontsize=8)
        axes.set_xlabel("times the bound", fontsize=8)
        axes.set_yticks(range(len(last)), list(last) if axes is panels[0] else [""] * len(last))
    for label, colour in zip(panels[0].get_yticklabels(), colours.values(), strict=True):
        label.set_color(colour)
    figure.suptitle(f"{facts['judged']} against {reference}, by seed: {facts['verdict']}", fontsize=10)
    left_is = "Left: colours as the names' at the right; zeros are not drawn."
    below = f"{left_is} Right: a dot a seed, without sign; a bar over the seeds. {facts['caption']}"
    figure.supxlabel(textwrap.fill(below, 150), fontsize=7, color="#525252")
    _save_plain(figure, path)


def _save_plain(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
    pictures.save(figure, path)


# --- command line ------------------------------------------------------------------------------


def _launch_all(given: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Run the launches; the runs, as if the user had given them."""
    command = Command.of(words)
    lines = {"off": command.off(), "on": command.on()}
    if given.noise or given.seeds:
        lines["noise"] = command.other_stock()
    for seed, (name, line) in product(given.seeds or [None], lines.items()):
        run, seeded = (f"{name}-{seed}", ["--seed", str(seed)]) if seed else (name, [])
        launch([*line, *seeded], given.out / run, given.timeout, run)
    given.paired = given.out if given.seeds else None
    return [name if given.seeds else str(given.out / name) for name in lines]


@cli.command("compare")
def main(words: list[str]) -> int:
    own, launched = split_command(words)
    parser = cli.Parser("python -m megatron_fused_ce compare", __doc__ or "")
    add, bound = parser.add_argument, cli.number()
    add("runs", nargs="*", metavar="RUN", help="the reference, and the other run")
    add("--out", type=Path, default=Path("build/compare_loss"))
    add("--against-noise", nargs="+", default=[], metavar="RUN", help="the reference in other rounding")
    add("--first", type=cli.whole(), default=10, metavar="N", help="how many iterations are the first [10]")
    add("--first-bound", type=bound, metavar="X", help="losses, relative [5e-4; fp32 1e-6]")
    add("--first-grad-norm-bound", type=bound, metavar="X", help="ratio - 1 [2e-2; fp32 1e-5]")
    add("--paired", type=Path, metavar="RUNS", help="pair RUNS/NAME-SEED by seed; runs are given as names")
    add("--launch", action="store_true", help="run the command after --, flag off and on")
    add("--noise", action="store_true", help="and once more with Megatron's native loss, as noise")
    add("--seeds", type=cli.whole(), nargs="+", metavar="N", help="three runs of each, with noise, paired")
    add("--timeout", type=cli.seconds, default=cli.NO_LIMIT, metavar="S", help="of one launch")
    given = parser.parse_args(own)
    from rich.console import Console

    cli.writable_folder(given.out)
    every = [*given.runs, *given.against_noise]
    if given.launch:
        if every:
            raise UsageError("--launch makes the runs itself: give the command after --, and no run")
        every = _launch_all(given, launched)
    elif len(given.runs) != 2 or (len(every) < 3 if given.paired else len(every) > 3):
        pairs = "with --paired two names, and others by --against-noise; or --launch -- COMMAND"
        raise UsageError(f"give two runs, and at most one by --against-noise; {pairs}")
    paths = [Path(run).resolve() for run in every]
    if len({*paths}) < len(every):
        raise UsageError("a run is given twice: it is no noise of itself, and no other run")
    # One pair's by their names below what they share.
    shared = commonpath([path.parent for path in paths])
    names = every if given.paired else [relpath(path, shared) for path in paths]
    bounds = given.first_bound, given.first_grad_norm_bound
    found = Comparison(names[0], names[1], names[2:], bool(given.paired), given.first, bounds)
    if given.paired:
        found.of_folder(given.paired)
    else:
        found.of({name: {0: read_run(path, name)} for name, path in zip(names, paths, strict=True)})
    source = results.made_by(results.device_name() if given.launch else "", ["compare", *words])
    return report(found, given.out, source, Console(highlight=False).print)
