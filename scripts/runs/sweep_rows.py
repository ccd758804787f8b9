"""What the sweep measures and recommends: cells, rows, the Pareto front."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.scripts.lib.launches import REFERENCE, YARDSTICK

OK, OUT_OF_MEMORY = "ok", "out of memory"
AUTO = "auto"
STOCK = (REFERENCE, YARDSTICK)
#: Two peaks that are this close are the same to a user.
SAME_PEAK = 1.01


class Cell(NamedTuple):
    """One thing to measure."""

    strategy: str  # of this package, or one of STOCK
    num_chunks: int | None = None  # None: the planner's, or none

    @property
    def name(self) -> str:
        return self.strategy if self.num_chunks is None else f"{self.strategy} x {self.num_chunks}"

    @property
    def flags(self) -> str:
        """Of a launch."""
        if self.strategy in STOCK:
            return ""
        words = [FLAG]
        if self.strategy != AUTO:
            words += ["--fused-ce-strategy", self.strategy]
        if self.num_chunks is not None:
            words += ["--fused-ce-num-chunks", str(self.num_chunks)]
        return " ".join(words)


def cells_of(strategies: Sequence[str], chunks: Sequence[int]) -> list[Cell]:
    """``auto`` first: what the defaults do."""
    return [Cell(AUTO), *(Cell(name, num) for name in strategies for num in chunks)]


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    strategy: str
    num_chunks: int | None
    plan: str  # what served, where it is known: "store, 2 chunks of 4096 tokens"
    status: str  # OK, OUT_OF_MEMORY, or what went wrong in one line
    time_ms: float | None
    ratio: float | None  # over the reference's time
    spread: float | None  # of the time, largest less smallest over the median
    peak_mib: float | None  # None: not known
    error: float | None  # relative: a head's larger one to fp64, or of losses to the stock launch's
    flags: str
    on_front: bool = False
    recommended: bool = False

    @property
    def cell(self) -> Cell:
        return Cell(self.strategy, self.num_chunks)


def rows_of(records: dict[Cell, dict[str, Any]]) -> tuple[list[Row], str | None]:
    """Rows of what was measured, and the reference's name: `auto`, or where it does not fit the last.

    None where nothing of ours ran.
    """
    ran = [c for c, r in records.items() if c.strategy not in STOCK and r["status"] == OK]
    if not ran:
        return [], None
    reference = ran[0] if ran[0].strategy == AUTO else ran[-1]
    below = records[reference]["time_ms"]
    rows = []
    for cell, record in records.items():
        time_ms = record.get("time_ms")
        rows.append(
            Row(
                *cell,
                plan=record.get("plan", ""),
                status=record["status"],
                time_ms=time_ms,
                ratio=None if time_ms is None else time_ms / below,
                spread=record.get("spread"),
                peak_mib=record.get("peak_mib"),
                error=record.get("error"),
                flags=cell.flags,
            )
        )
    return rows, reference.name


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices, in order, of the points that no other is as good as in both numbers and better in one."""
    front = []
    lowest = float("inf")
    last: tuple[float, float] | None = None
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < lowest or points[i] == last:
            front.append(i)
            lowest, last = points[i][1], points[i]
    return sorted(front)


def timed(rows: Sequence[Row]) -> list[Row]:
    """Those that ran and were right."""
    return [row for row in rows if row.status == OK and row.ratio is not None]


def with_peaks(rows: Sequence[Row]) -> list[Row]:
    """Of those the ones whose peak is known: Megatron on a CPU has none."""
    return [row for row in timed(rows) if row.peak_mib is not None]


def cells_on_front(rows: Sequence[Row]) -> set[Cell]:
    """None where no peak is known."""
    known = with_peaks(rows)
    points = [(row.ratio or 0.0, row.peak_mib or 0.0) for row in known]
    return {known[i].cell for i in pareto_front(points)}


@dataclass(frozen=True)
class Recommendation:
    row: Row
    why: str  # one or two sentences

    @property
    def flags(self) -> str:
        return self.row.flags


def recommend(rows: Sequence[Row], tolerance: float) -> Recommendation | None:
    """The row with the smallest peak among those within ``tolerance`` of the fastest.

    ``auto`` comes first among peaks within `SAME_PEAK`, then the fastest. Without
    peaks ``auto`` where it is within ``tolerance``, else the fastest. None where nothing of ours ran.
    """
    ours = [row for row in timed(rows) if row.strategy not in STOCK]
    if not ours:
        return None
    fastest = min(ours, key=_ratio)
    near = [row for row in ours if _ratio(row) <= _ratio(fastest) * (1 + tolerance)]
    peaks = [row.peak_mib for row in near if row.peak_mib is not None]
    if peaks:
        most = min(peaks) * SAME_PEAK
        near = [row for row in near if row.peak_mib is not None and row.peak_mib <= most]
    autos = [row for row in near if row.strategy == AUTO]
    best = autos[0] if autos else min(near, key=_ratio)
    within = f"within {100 * tolerance:g} % of the fastest"
    if peaks:
        least = "the smallest peak" if best.peak_mib == min(peaks) else "to 1 % the smallest peak"
        why = f"It has {least}, {best.peak_mib:.1f} MiB, of those {within}"
    else:
        within = within if best is not fastest else "the fastest"
        why = f"Peaks are unknown here; it is {within}"
    if best is not fastest:
        why += f" ({fastest.cell.name}) and takes {_ratio(best) / _ratio(fastest) - 1:.1%} more time"
    return Recommendation(best, f"{why}. {_beside_auto(best, rows)}{_scatter(ours, tolerance)}")


def _scatter(rows: Sequence[Row], tolerance: float) -> str:
    """A warning where the rows' own spread is more than the choice allows."""
    spreads = [row.spread for row in rows if row.spread is not None]
    spread = statistics.median(spreads) if spreads else 0.0
    if spread <= tolerance:
        return ""
    return (
        f" Times of one row differ by {spread:.1%} among themselves (the median row), which is more than "
        f"{100 * tolerance:g} %: measure longer, or with nothing else running."
    )


def _ratio(row: Row) -> float:
    return row.ratio if row.ratio is not None else float("inf")


def _beside_auto(best: Row, rows: Sequence[Row]) -> str:
    """What the defaults would cost."""
    if best.strategy == AUTO:
        return f"It is what {FLAG} does by itself: leave the defaults alone."
    auto = next((row for row in rows if row.strategy == AUTO), None)
    if auto is None:
        return ""
    if auto.status != OK or auto.ratio is None:
        return f"The defaults: {auto.status}."
    more = _ratio(auto) / _ratio(best) - 1
    plan = f" ({auto.plan})" if auto.plan else ""
    said = f"The defaults{plan} take {abs(more):.1%} {'more' if more >= 0 else 'less'} time"
    if auto.peak_mib is not None and best.peak_mib is not None:
        mib = auto.peak_mib - best.peak_mib
        said += f" and {abs(mib):.1f} MiB {'more' if mib >= 0 else 'less'}"
    return f"{said}."
