"""What the sweep measures, keeps and recommends: cells, rows, the Pareto front, the state on disk."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.scripts.lib.launches import REFERENCE, YARDSTICK, package_sources
from megatron_fused_ce.scripts.lib.results import write_whole

TRAINING, EVALUATION, PRETRAIN = "training", "evaluation", "pretrain"
OK, OUT_OF_MEMORY = "ok", "out of memory"
AUTO = "auto"
#: In evaluation the strategies run the same code: the number of chunks alone matters.
ANY = "any"
STOCK = (REFERENCE, YARDSTICK)
#: Two peaks that are this close are the same to a user.
SAME_PEAK = 1.01


class Cell(NamedTuple):
    """One thing to measure."""

    kind: str  # TRAINING, EVALUATION or PRETRAIN
    strategy: str  # of this package, ANY, or one of STOCK
    num_chunks: int | None = None  # None: the planner's, or none

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def name(self) -> str:
        return self.strategy if self.num_chunks is None else f"{self.strategy} x {self.num_chunks}"

    @property
    def flags(self) -> str:
        """Of a launch."""
        if self.strategy in STOCK:
            return ""
        words = [FLAG]
        if self.strategy not in (AUTO, ANY):
            words += ["--fused-ce-strategy", self.strategy]
        if self.num_chunks is not None:
            words += ["--fused-ce-num-chunks", str(self.num_chunks)]
        return " ".join(words)


@dataclass(frozen=True)
class Row:
    """One line of the result. ``ratio`` is what was measured; ``time_ms`` is it times the reference's."""

    kind: str
    strategy: str
    num_chunks: int | None
    plan: str  # what served, where it is known: "store, 2 chunks of 4096 tokens"
    status: str  # OK, OUT_OF_MEMORY, or what went wrong in one line
    time_ms: float | None
    ratio: float | None  # over the reference's time in the same run
    spread: float | None  # of the ratio, largest less smallest
    peak_mib: float | None  # None: not known
    error: (
        float | None
    )  # relative: to fp64 (a head's larger one), or of losses to the stock launch's
    flags: str
    on_front: bool = False
    recommended: bool = False

    @property
    def cell(self) -> Cell:
        return Cell(self.kind, self.strategy, self.num_chunks)


def row_of(cell: Cell, record: dict[str, Any], reference_ms: float | None) -> Row:
    """A row from what the state keeps of a cell."""
    ratio = record.get("ratio")
    return Row(
        *cell,
        plan=record.get("plan", ""),
        status=record["status"],
        time_ms=None if ratio is None or reference_ms is None else ratio * reference_ms,
        ratio=ratio,
        spread=record.get("spread"),
        peak_mib=record.get("peak_mib"),
        error=record.get("error"),
        flags=cell.flags,
    )


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


def cells_on_front(rows: Sequence[Row]) -> set[Cell]:
    """Of one kind; none where no peak is known."""
    known = [row for row in timed(rows) if row.peak_mib is not None]
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

    ``rows`` are of one kind. ``auto`` comes first among peaks within `SAME_PEAK`, then the fastest. Without
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
        why += (
            f" ({fastest.cell.name}) and takes {_ratio(best) / _ratio(fastest) - 1:.1%} more time"
        )
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


# --- the state on disk ---------------------------------------------------------------------------


def source_digest() -> str:
    """Of the package and its kernels as they are, committed or not."""
    digest = hashlib.sha256()
    for file in package_sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class State:
    """The records of one setting's cells, in a file of its own: another setting has another file.

    ``facts`` fix every figure (sizes, device, versions, sources); ``cells`` is key -> record, ``reference``
    what the ratios in them are over: the name of its cell, and kind -> its time in the last run. With
    ``writes`` False (other ranks than the first) the file is read only.
    """

    def __init__(
        self, out: Path, facts: dict[str, Any], *, fresh: bool = False, writes: bool = True
    ) -> None:
        text = json.dumps(facts, sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.path = out / f"state-{self.digest}.json"
        self.facts = facts
        self.cells: dict[str, dict[str, Any]] = {}
        self.reference: dict[str, Any] = {}
        self._out = out
        self._writes = writes
        if not fresh and self.path.is_file():
            content = _read(self.path)
            self.cells, self.reference = content["cells"], content["reference"]

    def has(self, key: str) -> bool:
        """Whether a cell needs no further run: one that failed may do better."""
        return self.cells.get(key, {}).get("status") in (OK, OUT_OF_MEMORY)

    def add(self, key: str, record: dict[str, Any]) -> None:
        """On disk when it returns."""
        self.cells[key] = record
        if not self._writes:
            return
        content = {"facts": self.facts, "reference": self.reference, "cells": self.cells}
        self._out.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, indent=1) + "\n")

    def said(self, keys: list[str]) -> str:
        """One line about what is there of ``keys``, and of what other settings; '' for nothing."""
        there = sum(map(self.has, keys))
        if there:
            return f"{self.path.name}: {there} of {len(keys)} cells are there; --fresh starts over"
        others = [path for path in sorted(self._out.glob("state-*.json")) if path != self.path]
        if not others:
            return ""
        newest = max(others, key=lambda path: path.stat().st_mtime)
        facts = _read(newest)["facts"]
        names = [name for name in self.facts if self.facts[name] != facts.get(name)]
        differ = ", ".join(names) or "nothing here"
        return (
            f"{newest.name} is of other settings ({differ}) and is not used; this sweep starts anew"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not {"facts", "reference", "cells"} <= content.keys():
            raise ValueError("parts of it are missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no state of a sweep ({error}): remove it") from None
    return dict(content)
