"""Is it the same training? Runs of Megatron-LM over each other, and a verdict.

    python -m megatron_fused_ce compare off.log on.log
    python -m megatron_fused_ce compare runs/off/tensorboard on.log --against-noise native.log
    python -m megatron_fused_ce compare --launch --noise -- torchrun --nproc-per-node 8 pretrain_gpt.py ...
    python -m megatron_fused_ce compare --launch --seeds 1 2 3 -- torchrun ... pretrain_gpt.py ...
    python -m megatron_fused_ce compare --paired RUNS unfused flag --against-noise native te

The first run is the reference. Each is a log, a folder of logs or a TensorBoard folder, in any mix. With
--launch the command after -- is run as it is and with --fused-chunked-ce, logs kept in --out.

A log's line is a mean over the iterations since the last one, TensorBoard has every iteration: compared are
means over the same iterations. A difference below the printed digits is none.

One pair raises alarms and no more, since rounding drives two runs apart, too: by the largest relative
difference of the first iterations (--first), and the mean one of the last 100. Bounds are fixed, or twice what
the run of --against-noise, the same training in other rounding, differs from the reference by.

Several seeds (--seeds, or RUNS/NAME-SEED with --paired) tell whether runs train the same. Each run is held
against the reference's of its seed, the seeds together against what the runs of --against-noise differ by:

    last 100, first    mean, root mean square of the differences: at most twice the noise's
    blocks             root mean square over iterations up to 10, 20, 30, 50, 100, 200, ...: at most 3 times
                       the noise's largest of this block, an earlier one or the next
    validation         at most 1 %, or twice the noise's
    skipped steps      at most twice as many

Below three seeds, or three runs of noise, or where no line has the first iterations, it is INCONCLUSIVE. Other
names in RUNS are shown beside. Always a difference: nan, inf, a norm of 0 or a curve in one run alone.

Writes compare_loss.png and compare_loss.json to --out. Exit status: 0 the same, 1 different, 2 bad input,
3 inconclusive.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

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
        """Relative; inf where one alone is finite."""
        return losses.relative_difference(self.other, self.reference, self.tolerance)

    @property
    def gap(self) -> float:
        """Other less reference; inf where one alone is finite, nan where neither is."""
        how_many = math.isfinite(self.other) + math.isfinite(self.reference)
        return (math.nan, math.inf, self.other - self.reference)[how_many]

    @property
    def log_ratio(self) -> float:
        """Of norms, as the gap; inf where one alone is 0, too."""
        if not math.isfinite(self.gap) or abs(self.gap) <= self.tolerance:
            return self.gap if not math.isfinite(self.gap) else 0.0
        return math.log(self.other / self.reference) if min(self.reference, self.other) > 0 else math.inf


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
    known: list[dict[int, list[Point]]] = [{}, {}]
    unknown: list[dict[int, Point]] = [{}, {}]
    for run, groups, single in zip(runs, known, unknown, strict=True):
        for point in run:
            if point.first is None:
                single[point.last] = point
            else:
                groups.setdefault(bisect_left(cuts, point.last), []).append(point)
    pairs = []
    for at in range(1, len(cuts)):
        both = [groups.get(at, []) for groups in known]
        if all(sum(point.length for point in group) == cuts[at] - cuts[at - 1] for group in both):
            pairs.append(_mean_pair(*both))
    if (reference.kind, reference.fine_stamps) == (other.kind, other.fine_stamps):
        pairs += [_mean_pair([p], [unknown[1][last]]) for last, p in unknown[0].items() if last in unknown[1]]
    return sorted(pairs, key=lambda pair: pair.iteration)


def _mean_pair(*runs: list[Point]) -> Pair:
    # 5.1 - 5.0 is a little more than 0.1.
    tolerance = max(point.unit for point in chain(*runs)) * (1 + 1e-6)
    reference, other = (
        run[0].value if len(run) == 1 else sum(p.value * p.length for p in run) / sum(p.length for p in run)
        for run in runs
    )
    return Pair(runs[0][0].first, runs[0][-1].last, reference, other, tolerance)


def start_of(pairs: Sequence[Pair]) -> int:
    """The first iteration; where its line does not tell, as many are in it as lie before the next line."""
    first, *more = pairs
    interval = more[0].iteration - first.iteration if more else 1
    return first.first or max(1, first.iteration - interval + 1)


def within(pairs: Sequence[Pair], first: int, last: int) -> list[Pair]:
    return [pair for pair in pairs if first <= pair.iteration <= last]


def largest(pairs: Sequence[Pair]) -> float:
    return max((pair.difference for pair in pairs), default=math.nan)


def mean(values: Iterable[float]) -> float:
    """Of those that are no nan; nan of none."""
    numbers = [value for value in values if not math.isnan(value)]
    return fmean(numbers) if numbers else math.nan


def root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(mean(value * value for value in values))


def of_each(pairs: Pairs, number: Callable[[list[Pair]], float]) -> Values:
    """Of each run that has it: where it is no nan."""
    found: Values = {}
    for name, seed, run in ((name, seed, run) for name, runs in pairs.items() for seed, run in runs.items()):
        if not math.isnan(value := number(run)):
            found.setdefault(name, {})[seed] = value
    return found


# --- what is judged ----------------------------------------------------------------------------


@dataclass
class Figure:
    """A number of each run, over the seeds one of each name, and its bound."""

    curve: str
    part: str
    values: Values
    over_seeds: Callable[[Iterable[float]], float]
    bound: float  # nan: not known, for there is no noise
    is_block: bool = False

    @property
    def what(self) -> str:
        return f"{self.curve}, {self.part}"

    def over(self, name: str) -> float:
        return self.over_seeds(self.values[name].values())

    def times(self, name: str) -> float:
        """Its size over the bound."""
        size = abs(self.over(name))
        return size / self.bound if self.bound else math.inf if size else 0.0

    def is_within(self, name: str) -> bool:
        each = all(abs(value) <= ONE_SEED * self.bound for value in self.values[name].values())
        return each and math.isfinite(self.over(name)) and abs(self.over(name)) <= self.bound


@dataclass(frozen=True)
class Judge:
    """Whom to judge by whom, by their names, and the bounds that are given (None: those that fit)."""

    reference: str
    judged: str
    noise: Sequence[str]
    first: int = 10
    first_bound: float | None = None
    first_grad_norm_bound: float | None = None

    def of_noise(self, values: Values) -> float:
        return root_mean_square(x for name in self.noise for x in values.get(name, {}).values())

    def twice(self, least: float, *noise: float, otherwise: float = math.nan) -> float:
        """The largest noise, or ``least`` if that is more; ``otherwise`` where there is none."""
        known = [losses.YARDSTICK_FACTOR * size for size in noise if not math.isnan(size)]
        return max(least, *known) if known else otherwise

    def one_pair(self, curve: str, pairs: Pairs, start: int, is_fp32: bool) -> Iterator[Figure]:
        """Relative differences; bounds are fixed, or twice the noise's.

        A gradient norm's noise only widens its fixed bound: three digits behind the point, as logged, are
        few, and its noise jumps more than the losses'.
        """
        (mine,) = pairs[self.judged].values()
        end, is_norm = mine[-1].iteration, curve == GRAD_NORM
        worst = max(mine, key=lambda pair: pair.difference)
        at = f"all (largest at iteration {worst.iteration})" if worst.difference else "all"
        yield Figure(curve, at, of_each(pairs, largest), max, math.inf)
        if not is_norm:
            last = of_each(pairs, lambda run: mean(pair.drift for pair in within(run, end - LAST + 1, end)))
            bound = self.twice(DRIFT, self.of_noise(last), otherwise=DRIFT)
            yield Figure(curve, f"last {LAST}", last, mean, bound)
        until = start + self.first - 1
        first = of_each(pairs, lambda run: largest(within(run, mine[0].iteration, until)))
        usual = FIXED[is_norm][is_fp32]
        least, given = losses.LOSS_RESOLUTION, self.first_bound
        if is_norm:
            least, given = usual, self.first_grad_norm_bound
        bound = self.twice(least, self.of_noise(first), otherwise=usual)
        yield Figure(curve, f"first {self.first}", first, max, bound if given is None else given)

    def seeds(self, curve: str, pairs: Pairs, start: int) -> Iterator[Figure]:
        """The last iterations (not of gradient norms), the first ones, and blocks; of a validation all."""
        if " loss " in curve:
            every = of_each(pairs, largest)
            bound = self.twice(DRIFT, self.of_noise(every), otherwise=DRIFT)
            yield Figure(curve, "relative", every, max, bound)
            return
        is_norm = curve == GRAD_NORM
        resolution = losses.GRAD_NORM_RESOLUTION if is_norm else losses.LOSS_RESOLUTION
        known = [p for runs in pairs.values() for run in runs.values() for p in run if math.isfinite(p.reference)]
        least = max(resolution * max(abs(p.reference) for p in known), *(p.tolerance for p in known))
        if not is_norm:
            # Means of three seeds can be near 0 by chance; those of the 100 before seldom are, too.
            means = [of_each(pairs, lambda run, at=at: mean(p.gap for p in of_last(run, at))) for at in (0, 1)]
            yield Figure(curve, f"last {LAST}", means[0], mean, self.twice(least, *map(self.of_noise, means)))
        until, last = start + self.first - 1, max(pair.iteration for pair in known)

        def early(run: list[Pair]) -> float:
            those = within(run, start, until)
            told = those and those[-1].iteration > min(until, run[-1].iteration) - self.first / 2
            return root_mean_square(pair.gap for pair in those) if told else math.nan

        first = of_each(pairs, early)
        bound = self.twice(least, self.of_noise(first)) if self._alike(pairs, start, until) else math.nan
        yield Figure(curve, f"first {self.first}", first, root_mean_square, bound)
        ends = [start - 1, *(start - 1 + end for end in ENDS if end >= 10)]
        blocks = [(begin + 1, end) for begin, end in pairwise(ends) if begin < last]
        sizes = [of_each(pairs, lambda run, of=of: root_mean_square(p.log_ratio if is_norm else p.gap for p in within(run, *of))) for of in blocks]
        ...
