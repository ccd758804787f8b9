"""The sweep's rows on disk: JSON, Markdown, and the picture with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import pictures, results, tables
from megatron_fused_ce.scripts.lib.results import write_whole
from megatron_fused_ce.scripts.runs.sweep_rows import (
    AUTO,
    OK,
    STOCK,
    Recommendation,
    Row,
    cells_on_front,
    recommend,
    with_peaks,
)

TITLES = {"head": "Training step: forward and backward", "pretrain": "Training iteration of the launch"}
COLOURS = {
    "store": "#08306b",
    "grad_in_forward": "#31a354",
    "recompute": "#e6550d",
    "auto": "#cb181d",
    "unfused": "#252525",
    "native": "#8c6d31",
}


ON_A_CPU = (
    "Not so on a GPU: `auto` weighs strategies and chunks by the times of GPUs, where other kernels run, and "
    "GEMMs are far faster beside memory than here. Sweep there."
)
#: Peaks within this factor have a linear axis.
MOST_LINEAR = 4.0
#: Left, bottom, right, top.
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class SweepResult:
    rows: list[Row]
    facts: dict[str, Any]
    reference: str
    tolerance: float
    recommendation: Recommendation | None

    @staticmethod
    def of(rows: list[Row], facts: dict[str, Any], reference: str, tolerance: float) -> SweepResult:
        """Marks the Pareto front and the recommended row."""
        best = recommend(rows, tolerance)
        front = cells_on_front(rows)
        marked = [
            replace(
                row, on_front=row.cell in front, recommended=best is not None and row.cell == best.row.cell
            )
            for row in rows
        ]
        return SweepResult(marked, facts, reference, tolerance, best)

    @property
    def on_cpu(self) -> bool:
        return "CPU" in self.facts["device"]


# --- text ----------------------------------------------------------------------------------------


def about(result: SweepResult) -> str:
    facts = result.facts
    if facts["what"] == "head":
        sizes = f"T = {facts['T']}, H = {facts['H']}, V = {facts['V']} rows a rank, {facts['dtype']}"
        parallel = f"TP {facts['tp']}{', sequence parallel' if facts['sp'] else ''}"
        return f"{sizes}, {parallel}"
    return f"{facts['script']} of {facts['megatron']}, {facts['nproc']} ranks"


def markdown(result: SweepResult) -> str:
    facts = result.facts
    versions = f"torch {facts['torch']}, triton {facts['triton']}"
    lines = [f"{about(result)}; {facts['device']}, {versions}, commit {facts['commit']}.", ""]
    if facts["what"] == "pretrain":
        lines += [f"    {facts['args']} {facts['plugin_args']}".rstrip(), ""]
    lines += [_legend(result), ""]
    lines += [f"## {TITLES[facts['what']]}", "", _table(result), ""]
    lines += [said(result)]
    return "\n".join(lines) + "\n"


def said(result: SweepResult) -> str:
    """The recommended flags, and why."""
    best = result.recommendation
    if best is None:
        return "No flags to recommend: nothing ran to its end."
    if result.on_cpu:
        return f"Recommended on this CPU:\n\n    {best.flags}\n\n{best.why}\n\n{ON_A_CPU}"
    return f"Recommended:\n\n    {best.flags}\n\n{best.why}"


def _legend(result: SweepResult) -> str:
    reference, is_head = result.reference, result.facts["what"] == "head"
    words = [f"Over {reference}: the time over that of `{reference}`."]
    if is_head:
        by = "live storages" if result.on_cpu else "the allocator"
        words += [
            f"Peaks are above inputs, `grad_hidden` and the wgrad accumulator, by {by}.",
            "Errors: the larger gradient's, norm-relative to fp64.",
        ]
    else:
        bound = result.facts["loss_bound"]
        words += [
            "Peaks are Megatron's max allocated; on a CPU it has none.",
            f"Errors: of any loss, relative to stock; bound {bound:.1e}.",
        ]
    return " ".join([*words, "Front: nothing else is as good in both time and peak."])


def _table(result: SweepResult) -> str:
    launched = result.facts["what"] == "pretrain"
    head = ["strategy", "chunks", "what ran", "ms", f"over {result.reference}", "spread"]
    head += ["peak, MiB", "error", "front"]
    if launched:
        head.remove("what ran")
    lines = []
    for row in result.rows:
        ok = row.status == OK
        unknown = "unknown" if ok else ""
        lines.append(
            [
                row.strategy,
                row.num_chunks,
                *([] if launched else [row.plan]),
                tables.cell(row.time_ms, ".2f", "") if ok else row.status,
                tables.cell(row.ratio, ".3f", ""),
                tables.cell(row.spread, ".3f", ""),
                tables.cell(row.peak_mib, ".2f", unknown),
                tables.cell(row.error, ".1e", ""),
                ", ".join(["yes"] * row.on_front + ["recommended"] * row.recommended),
            ]
        )
    return tables.markdown(head, lines)


def write(result: SweepResult, out: Path) -> list[str]:
    """Names of what was written, and why there is no picture: no matplotlib, or no peaks."""
    best = result.recommendation
    source = result.facts | {"reference": result.reference, "tolerance": result.tolerance}
    source["recommended"] = best and {"flags": best.flags, "why": best.why}
    shape = about(result)
    rows = [{"shape": shape, "variant": row.cell.name, **asdict(row)} for row in result.rows]
    results.write(out / "sweep.json", rows, source)
    write_whole(out / "sweep.md", markdown(result))
    picture = "no picture (no peak is known)"
    if with_peaks(result.rows):
        drawn = draw(result, out / "sweep.png")
        picture = "sweep.png" if drawn else "no picture (matplotlib is not installed)"
    return ["sweep.json", "sweep.md", picture]


def read(path: Path) -> SweepResult:
    """A sweep's JSON file again. Raises UsageError."""
    content = results.read(path)
    try:
        source = content["made_by"]
        names = [field.name for field in fields(Row)]
        rows = [Row(**{name: row[name] for name in names}) for row in content["rows"]]
        return SweepResult.of(rows, source, source["reference"], source["tolerance"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is no result of a sweep: {error}") from None


# --- picture -------------------------------------------------------------------------------------


def draw(result: SweepResult, path: Path) -> bool:
    """Peak over time of the rows that have both. False without matplotlib."""
    plt = pictures.pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(7, 4.8), layout="constrained")
    known = with_peaks(result.rows)
    _draw_front(axes, known)
    axes.set_title(TITLES[result.facts["what"]], fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{about(result)}; {result.facts['device']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=8, frameon=False, fontsize=8, markerscale=0.6)
    figure.draw_without_rendering()  # where the points are, is known only then
    _label_points(axes, known)
    pictures.save(figure, path)
    return True


def _draw_front(axes: Any, rows: Sequence[Row]) -> None:
    """Numbers beside the points are chunk counts."""
    for strategy in dict.fromkeys(row.strategy for row in rows):
        points = [row for row in rows if row.strategy == strategy]
        marker = {AUTO: "*", **dict.fromkeys(STOCK, "s")}.get(strategy, "o")
        size = 18 if strategy == AUTO else 6
        axes.plot(
            [row.time_ms for row in points], [row.peak_mib for row in points], marker, ms=size,
            color=COLOURS[strategy], label=strategy,
            zorder=2 if strategy == AUTO else 3,  # the row that it chose stands inside the star
        )  # fmt: skip
    front = sorted((row for row in rows if row.on_front), key=lambda row: row.time_ms or 0.0)
    axes.step(
        [row.time_ms for row in front], [row.peak_mib for row in front], where="post",
        color="#969696", lw=1.5, zorder=1, label="Pareto front",
    )  # fmt: skip
    for row in rows:
        if row.recommended:
            axes.plot(
                [row.time_ms], [row.peak_mib], "o", ms=20, mfc="none", color="black", mew=1.2,
                label="recommended", zorder=2,
            )  # fmt: skip
    axes.set_xlabel("ms (numbers: chunks)")
    axes.set_ylabel("peak, MiB a rank")
    peaks = [row.peak_mib or 0.0 for row in rows]
    if max(peaks) > MOST_LINEAR * min(peaks):  # else powers of 2 are one tick or none
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")


def _label_points(axes: Any, rows: Sequence[Row]) -> None:
    """Chunk counts beside their points, each where it covers neither a point nor another label."""
    scale = axes.figure.dpi / 72
    at = [axes.transData.transform((row.time_ms, row.peak_mib)) / scale for row in rows]
    radii = [10 if row.recommended or row.strategy == AUTO else 4 for row in rows]
    taken = [(x - r, y - r, x + r, y + r) for r, (x, y) in zip(radii, at, strict=True)]
    for row, (x, y) in zip(rows, at, strict=True):
        if row.num_chunks is None:
            continue
        text = str(row.num_chunks)
        width, height = 4.5 * len(text) + 1, 7.0
        places = [
            (dx if dx > 0 else dx - width, dy if dy > 0 else dy - height)
            for reach in (5, 11, 18, 26, 35)
            for dx, dy in ((reach, 4), (reach, -4), (-reach, 4), (-reach, -4), (2, reach), (2, -reach))
        ]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in places]
        free = (i for i, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken))
        chosen = next(free, 0)
        place = places[chosen]
        taken.append(boxes[chosen])
        axes.annotate(
            text, (row.time_ms, row.peak_mib), xytext=place, textcoords="offset points", fontsize=7,
            color=COLOURS[row.strategy],
        )  # fmt: skip


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
