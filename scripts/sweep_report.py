"""The sweep's rows on disk: JSON, CSV, Markdown, and the picture with the Pareto front."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from atomic import write_whole
from compare_pretrain import finite
from sweep_rows import (
    AUTO,
    EVALUATION,
    OK,
    PRETRAIN,
    STOCK,
    TRAINING,
    Recommendation,
    Row,
    cells_on_front,
    recommend,
    timed,
)

TITLES = {
    TRAINING: "Training step: forward and backward",
    EVALUATION: "Evaluation: forward alone",
    PRETRAIN: "Training iteration of the launch",
}
COLOURS = {
    "store": "#08306b",
    "grad_in_forward": "#31a354",
    "recompute": "#e6550d",
    "any": "#756bb1",
    "auto": "#cb181d",
    "unfused": "#252525",
    "native": "#8c6d31",
}


@dataclass(frozen=True)
class Result:
    rows: list[Row]
    facts: dict[str, Any]
    reference: str
    tolerance: float
    recommendation: Recommendation | None

    @staticmethod
    def of(rows: list[Row], facts: dict[str, Any], reference: str, tolerance: float) -> Result:
        """Marks each kind's Pareto front and the recommended row: of training, not of evaluation."""
        kinds = _kinds(rows)
        best = recommend([row for row in rows if row.kind != EVALUATION], tolerance)
        front = set().union(*(cells_on_front(_of_kind(rows, kind)) for kind in kinds))
        marked = [
            replace(
                row,
                on_front=row.cell in front,
                recommended=best is not None and row.cell == best.row.cell,
            )
            for row in rows
        ]
        shown = {name: value for name, value in facts.items() if name != "checkout"}
        return Result(marked, shown, reference, tolerance, best)

    @property
    def on_cpu(self) -> bool:
        return "CPU" in self.facts["device"]


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.kind for row in rows))


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.kind == kind]


# --- text ----------------------------------------------------------------------------------------


def about(result: Result) -> str:
    facts = result.facts
    if facts["what"] == "head":
        sizes = (
            f"T = {facts['T']}, H = {facts['H']}, V = {facts['V']} rows a rank, {facts['dtype']}"
        )
        parallel = f"TP {facts['tp']}{', sequence parallel' if facts['sp'] else ''}"
        return f"{sizes}, {parallel}"
    return f"{facts['script']} of {facts['megatron']}, {facts['nproc']} ranks"


def markdown(result: Result) -> str:
    facts = result.facts
    versions = f"torch {facts['torch']}"
    if "triton" in facts:
        versions += f", triton {facts['triton']}"
    lines = [f"{about(result)}; {facts['device']}, {versions}, commit {facts['commit']}.", ""]
    if facts["what"] == "pretrain":
        lines += [f"    {facts['args']} {facts['plugin_args']}".rstrip(), ""]
    lines += [_legend(result), ""]
    for kind in _kinds(result.rows):
        lines += [f"## {TITLES[kind]}", "", *_table(result, kind), ""]
    lines += [said(result)]
    return "\n".join(lines) + "\n"


def said(result: Result) -> str:
    """The recommended flags, and why."""
    best = result.recommendation
    if best is None:
        return "No flags to recommend: nothing ran to its end."
    return f"Recommended:\n\n    {best.flags}\n\n{best.why}"


def _legend(result: Result) -> str:
    reference, is_head = result.reference, result.facts["what"] == "head"
    beside = "measured beside it" if is_head else "launched in the same call"
    words = [f"Over {reference}: the time over that of `{reference}`, {beside}."]
    if is_head:
        by = "live storages" if result.on_cpu else "the allocator"
        words += [
            f"Peaks are above inputs, `grad_hidden` and the wgrad accumulator, by {by}.",
            "Errors: the larger gradient's, norm-relative to fp64; in evaluation the loss's to fp32.",
            "In evaluation all strategies run the same code.",
        ]
    else:
        bound = result.facts["loss_bound"]
        words += [
            "Peaks are Megatron's max allocated; on a CPU it has none.",
            f"Errors: of any loss, relative to stock; bound {bound:.1e}.",
        ]
    return " ".join([*words, "Front: nothing else is as good in both time and peak."])


def _table(result: Result, kind: str) -> list[str]:
    head = ["strategy", "chunks", "what ran", "ms", f"over {result.reference}", "spread"]
    head += ["peak, MiB", "error", "front"]
    if kind == PRETRAIN:
        head.remove("what ran")
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in _of_kind(result.rows, kind):
        ok = row.status == OK
        words = [
            row.strategy,
            "" if row.num_chunks is None else str(row.num_chunks),
            *([row.plan] if kind != PRETRAIN else []),
            _number(row.time_ms, ".2f") if ok else row.status,
            _number(row.ratio, ".3f"),
            _number(row.spread, ".3f"),
            _number(row.peak_mib, ".2f") if row.peak_mib is not None or not ok else "unknown",
            _number(row.error, ".1e"),
            ", ".join(["yes"] * row.on_front + ["recommended"] * row.recommended),
        ]
        lines.append("| " + " | ".join(word.replace("|", "/") for word in words) + " |")
    return lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def to_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def to_json(result: Result) -> str:
    best = result.recommendation
    content = {
        "facts": result.facts,
        "reference": result.reference,
        "tolerance": result.tolerance,
        "recommended": best and {"flags": best.flags, "why": best.why},
        "rows": [asdict(row) for row in result.rows],
    }
    return json.dumps(finite(content), indent=1) + "\n"


def write(result: Result, out: Path) -> list[str]:
    """Names of what was written; no picture without matplotlib, or where nothing was timed."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "sweep.json": to_json(result),
        "sweep.csv": to_csv(result.rows),
        "sweep.md": markdown(result),
    }
    for name, text in texts.items():
        write_whole(out / name, text.encode())
    drawn = bool(timed(result.rows)) and draw(result, out / "sweep.png")
    return [*texts, *(["sweep.png"] if drawn else [])]


# --- picture -------------------------------------------------------------------------------------


def draw(result: Result, path: Path) -> bool:
    """A panel a kind: peak over time, or time over chunks without peaks. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = [kind for kind in _kinds(result.rows) if timed(_of_kind(result.rows, kind))]
    figure, panels = plt.subplots(
        1, len(kinds), squeeze=False, figsize=(5 * len(kinds) + 0.6, 4.8), layout="constrained"
    )
    for axes, kind in zip(panels[0], kinds, strict=True):
        rows = timed(_of_kind(result.rows, kind))
        if any(row.peak_mib is not None for row in rows):
            _draw_front(axes, [row for row in rows if row.peak_mib is not None])
            axes.set_ylabel("peak, MiB a rank")
        else:
            _draw_times(axes, rows)
            axes.set_ylabel("ms an iteration")
        axes.set_title(TITLES[kind], fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    device = result.facts["device"]
    figure.suptitle(f"{about(result)}; {device}", fontsize=10)
    shown: dict[str, Any] = {}
    for axes in panels[0]:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=min(8, len(shown)),
        frameon=False, fontsize=8, markerscale=0.6,
    )  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    write_whole(path, picture.getvalue())
    return True


def _draw_front(axes: Any, rows: Sequence[Row]) -> None:
    """Numbers beside the points are chunk counts."""
    for strategy in dict.fromkeys(row.strategy for row in rows):
        points = [row for row in rows if row.strategy == strategy]
        marker = {AUTO: "*", **dict.fromkeys(STOCK, "s")}.get(strategy, "o")
        size = 13 if strategy == AUTO else 6
        axes.plot(
            [row.time_ms for row in points], [row.peak_mib for row in points], marker, ms=size,
            color=COLOURS[strategy], label="any strategy" if strategy == "any" else strategy,
            zorder=4 if strategy == AUTO else 3,
        )  # fmt: skip
        for row in points:
            if row.num_chunks is not None:
                axes.annotate(
                    row.num_chunks, (row.time_ms, row.peak_mib), xytext=(6, 5), fontsize=7,
                    textcoords="offset points", color=COLOURS[strategy],
                )  # fmt: skip
    front = sorted((row for row in rows if row.on_front), key=lambda row: row.time_ms or 0.0)
    axes.step(
        [row.time_ms for row in front], [row.peak_mib for row in front], where="post",
        color="#969696", lw=1.5, zorder=1, label="Pareto front",
    )  # fmt: skip
    for row in rows:
        if row.recommended:
            axes.plot(
                [row.time_ms], [row.peak_mib], "o", ms=15, mfc="none", color="black", mew=1.2,
                label="recommended", zorder=2,
            )  # fmt: skip
    axes.set_xlabel("ms (numbers: chunks)")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_times(axes: Any, rows: Sequence[Row]) -> None:
    counted = [row for row in rows if row.num_chunks is not None]
    for strategy in dict.fromkeys(row.strategy for row in counted):
        points = [row for row in counted if row.strategy == strategy]
        axes.plot(
            [row.num_chunks for row in points], [row.time_ms for row in points], "o-",
            color=COLOURS[strategy], label=strategy,
        )  # fmt: skip
    for row in rows:
        if row.num_chunks is None:
            axes.axhline(
                row.time_ms, color=COLOURS[row.strategy], ls="--", lw=1, label=row.strategy
            )
    counts = sorted({row.num_chunks for row in counted if row.num_chunks is not None})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("chunks")
    axes.set_ylim(0, 1.2 * max(row.time_ms or 0.0 for row in rows))
