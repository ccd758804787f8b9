"""How far two runs' losses are apart, and how far two runs that are the same may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_fused_ce.scripts.lib.logs import Figures

LOSS_RESOLUTION = 1e-6  # relative; Megatron logs seven digits
GRAD_NORM_RESOLUTION = 1e-5  # relative, where every digit is known: on a CPU
#: The flag may differ from unfused by so many times what Megatron's native loss does.
YARDSTICK_FACTOR = 2.0


@dataclass(frozen=True)
class Bounds:
    """The largest difference of a run that is the same: over the first iterations, and over all."""

    first: float
    all: float


#: Launches on H200s in bf16 (docs/tools.md): in the first 10 iterations native and the flag differ from
#: unfused by at most 3.0e-4 in any loss and 4.8e-3 in the gradient norm; over 200 by 6.0e-2 and 1.8e-1,
#: because rounding alone drives two runs apart. So the bound over all only tells runs that went
#: elsewhere; `compare --against-noise` tells more.
LOSS_BOUNDS = Bounds(5e-4, 0.1)
GRAD_NORM_BOUNDS = Bounds(2e-2, 0.5)
#: In fp32 the demo and the CPU harness hold the first iterations to what can be told apart.
FP32_LOSS_BOUNDS = Bounds(LOSS_RESOLUTION, 0.1)
FP32_GRAD_NORM_BOUNDS = Bounds(GRAD_NORM_RESOLUTION, 0.5)


def relative_difference(ours: float, reference: float, tolerance: float = 0.0) -> float:
    """0 where both are nan or at most ``tolerance`` apart, inf where one alone is finite."""
    if ours == reference or (math.isnan(ours) and math.isnan(reference)):
        return 0.0
    difference = abs(ours - reference)
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference <= tolerance else difference / max(abs(reference), 1e-30)


def largest_relative_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Over the iterations; inf where one of them ended early, nan equals nan."""
    if len(ours) != len(reference) or not reference:
        return math.inf
    return max(relative_difference(a, b) for a, b in zip(ours, reference, strict=True))


def loss_difference(ours: Figures, reference: Figures) -> float:
    """The largest over every loss that Megatron logs: lm, MTP depths, validation."""
    if ours.losses.keys() != reference.losses.keys():
        return math.inf
    return max(
        largest_relative_difference(ours.losses[name], values) for name, values in reference.losses.items()
    )


# --- drift -----------------------------------------------------------------------------------

#: The mean relative difference of a loss over a window that `compare` must see.
DRIFT = 0.01
#: Iterations of a window, at least, where the runs have so many.
WINDOW = 100
#: Of a window, into which the line of its differences and the noise around it are told apart.
MOST_BLOCKS, FEWEST_BLOCKS = 10, 5
#: Student's t at 0.995, by degrees of freedom.
STUDENT = {3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355}


@dataclass(frozen=True)
class Window:
    """Mean signed relative difference over iterations ``first`` to ``last``, half of its 99 % interval."""

    first: int
    last: int
    mean: float
    half: float

    def verdict(self, allowed: float = 0.0) -> str:
        """``SAME``: the mean is surely below DRIFT. ``DIFFERENT``: surely above half of it. ``allowed``: what
        two runs that are the same were seen to differ by, where that is more."""
        size = abs(self.mean)
        if size - self.half > max(DRIFT / 2, allowed):
            return "DIFFERENT"
        return "SAME" if size + self.half < max(DRIFT, allowed) else "INCONCLUSIVE"


def windows(differences: Sequence[tuple[int, float]]) -> list[Window]:
    """Windows without a gap, from the last iteration backwards, of (iteration, signed relative difference).

    Rounding drives two runs apart, to either side; a fault drives them to one. Single differences hang
    together over a few iterations, so the noise is that of blocks of them, around a line. What is too short
    for a window of its own, at the start, is none; nothing below five differences.
    """
    found, end = [], len(differences)
    for begin in range(len(differences) - FEWEST_BLOCKS, -1, -1):
        covered = differences[end - 1][0] - (differences[begin - 1][0] if begin else 0)
        long_enough = covered >= WINDOW or (begin == 0 and end == len(differences))
        if end - begin >= FEWEST_BLOCKS and long_enough:
            found.append(_window(differences[begin:end]))
            end = begin
    return found[::-1]


def _window(differences: Sequence[tuple[int, float]]) -> Window:
    count = min(MOST_BLOCKS, len(differences))
    ends = [round(i * len(differences) / count) for i in range(count + 1)]
    blocks = [statistics.fmean(x for _, x in differences[a:b]) for a, b in pairwise(ends)]
    slope, start = statistics.linear_regression(range(count), blocks)
    residual = math.sqrt(sum((x - start - slope * i) ** 2 for i, x in enumerate(blocks)) / (count - 2))
    half = STUDENT[count - 2] * residual / math.sqrt(count)
    return Window(differences[0][0], differences[-1][0], statistics.fmean(blocks), half)
