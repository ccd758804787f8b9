"""How far two runs' losses are apart, and how far two runs that are the same may be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_fused_ce.scripts.lib.logs import Figures

LOSS_RESOLUTION = 1e-6  # relative; Megatron logs seven digits
GRAD_NORM_RESOLUTION = 1e-5  # relative, where every digit is known: on a CPU
#: The flag may differ from unfused by so many times what Megatron's native loss does.
YARDSTICK_FACTOR = 2.0
#: Of losses, of gradient norms: over a run's first iterations, as far as runs that are the same stand apart
#: in bf16, in fp32. In bf16: launches on H200s (docs/tools.md), where native and the flag differ from unfused
#: by at most 3.0e-4 in any loss and 4.8e-3 in the gradient norm within 10 iterations. In fp32 by what can be
#: told apart.
FIRST_BOUNDS = (5e-4, LOSS_RESOLUTION), (2e-2, GRAD_NORM_RESOLUTION)


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
