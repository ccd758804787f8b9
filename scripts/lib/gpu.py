"""The GPU's clock, power and temperature while it is timed: part of every result."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence

#: A reading's numbers. Watts are the driver's mean over about a second; the others are of the moment.
NAMES = ("sm_mhz", "watts", "celsius")
Reading = tuple[float, float, float]
#: All of this process, in order.
readings: list[Reading] = []
#: Per cent of the time since NVML's last look, below which a GPU that others use tells of its idle clock.
BUSY = 50


def look() -> None:
    """Add a reading of this process's GPU (NVML), where there is one that tells.

    For a moment at which steps are queued and not yet waited for: an idle GPU's clock says nothing.
    """
    import torch

    if torch.cuda.is_initialized():
        _read(None)


def look_at_others_work() -> None:
    """Add a reading of each GPU that is busy: with launches, while this process waits for them."""
    import torch

    with contextlib.suppress(Exception):
        for device in range(torch.cuda.device_count()):
            if torch.cuda.utilization(device) >= BUSY:
                _read(device)


def _read(device: int | None) -> None:
    """``device`` None: the current one."""
    import torch

    with contextlib.suppress(Exception):  # NVML's own, no pynvml: a figure without is still a figure
        watts = torch.cuda.power_draw(device) / 1000
        readings.append((torch.cuda.clock_rate(device), watts, torch.cuda.temperature(device)))


def medians(of: Sequence[Reading]) -> dict[str, float]:
    """Of each number; {} of no readings."""
    return {
        name: statistics.median(column) for name, column in zip(NAMES, zip(*of, strict=True), strict=False)
    }


def span() -> dict[str, tuple[float, float, float]]:
    """Least, median and largest of this process's readings; {} without any."""
    columns = zip(NAMES, zip(*readings, strict=True), strict=False)
    return {name: (min(own), statistics.median(own), max(own)) for name, own in columns}
