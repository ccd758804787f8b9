"""The benchmark's rows on disk: JSON, and Markdown rendered from it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.results import Row

#: What every row has, in this order; more keys may follow.
KEYS = (
    *("commit", "device", "torch", "triton", "shape", "T", "H", "V", "dtype", "tp", "sp"),
    *("variant", "chunk_tokens", "forward_ms", "backward_ms", "time_ms", "roof_ms", "ratio"),
    *("peak_mib", "error"),
)
#: What tables of one result file may differ in; each gets its own heading.
CELL_KEYS = ("shape", "T", "H", "V", "dtype", "tp", "sp")
#: What a user without this package would take: Megatron's layer, Transformer Engine's loss.
STANDARD = "megatron-te"
#: Of several runs the median is a row's.
MEDIANS = (
    *("forward_ms", "backward_ms", "time_ms", "roof_ms", "ratio", "ratio_raw", "host_ms"),
    *("spread", "tflops", "over_te", "host_over_te"),
)
EXPLANATION = (
    "Milliseconds of device time, launch gaps included: medians over interleaved blocks; spread is "
    "(slowest - fastest block) / median. *roof*: the matrix products alone, by cuBLAS, on the true "
    "`grad_logits` of the same operands; *over* says which: 3 products, or 4 where the variant "
    "computes the logits twice. *raw*: the ratio to three products of which the last two read raw "
    "logits. Peak: MiB above inputs, `grad_hidden` and the wgrad accumulator, cuBLAS's "
    "workspace counted. Error: the "
    "larger of both gradients', norm-relative to fp64."
)
PARALLEL_EXPLANATION = (
    "Times are the slowest rank's, peaks and errors the largest of any rank. The roof is the shard's, "
    "on all ranks at once, on hidden states that are there as a whole: no collective is in it."
)


def cell(value: Any, digits: int) -> str:
    return tables.cell(value, f".{digits}f", "")


def small(value: Any) -> str:
    """A relative error, or the words in its place."""
    return tables.cell(value, ".1e" if isinstance(value, float | int) else "", "")


def cell_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in CELL_KEYS)


def cells(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each cell, in the order of their first row."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(cell_of(row), []).append(row)
    return list(groups.values())


def title(row: Row) -> str:
    parallel = f", TP {row['tp']}{' with sequence parallelism' if row['sp'] else ''}"
    return (
        f"{row['shape']}: T = {row['T']}, H = {row['H']}, V = {row['V']}, {row['dtype']}"
        f"{parallel if row['tp'] > 1 else ''}"
    )


def name_of(row: Row) -> str:
    """The variant, with the logits backend that served and what ``auto`` chose."""
    name, plan, served = row["variant"], row.get("plan"), row.get("logits_backend")
    if served and not name.endswith(f"/{served}"):
        name += f" {served}"
    return f"{name} ({plan})" if name.startswith("auto") and plan else name


def table(rows: list[Row]) -> str:
    """One cell's rows as a Markdown table."""
    head = ["variant", "C", "forward", "backward", "both, ms", "spread", "over", "ratio", "raw"]
    head += ["TFLOP/s", "peak, MiB", "error"]
    lines = []
    for row in rows:
        spread = row.get("spread")
        words = [
            name_of(row),
            row["chunk_tokens"],
            cell(row["forward_ms"], 2),
            cell(row["backward_ms"], 2),
            cell(row["time_ms"], 2),
            "" if spread is None else f"{100 * spread:.1f} %",
            str(row.get("roof_products", 3)) if row["ratio"] is not None else "",
            cell(row["ratio"], 3),
            cell(row.get("ratio_raw"), 3),
            cell(row.get("tflops"), 0),
            cell(row["peak_mib"], 1),
            small(row["error"]),
        ]
        lines.append(words)
    return tables.markdown(head, lines) + "\n"


def markdown(rows: list[Row], skipped: Iterable[str] = ()) -> str:
    """Everything, one table a cell."""
    if not rows:
        return "No rows.\n"
    first = rows[0]
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    lines = [f"{first['device']}, torch {first['torch']}, triton {first['triton']}, commit {commits}."]
    if "wgrad_accumulator" in first:
        end = {"main_grad": "an fp32 `main_grad`", "returned": "a `.grad` in the weight's dtype"}
        upstream = {"weights": "a scalar times random token weights", "random": "random per token"}
        lines[0] += (
            f" `grad_weight` ends in {end[first['wgrad_accumulator']]}; the upstream gradient is "
            f"{upstream[next(r['upstream'] for r in rows if r['upstream'] in upstream)]}"
        )
        lonely = [row["variant"] for row in rows if row["upstream"] not in upstream]
        if lonely:
            names = ", ".join(dict.fromkeys(lonely))
            lines[0] += f" (one scalar for all tokens: {names})"
        lines[0] += "."
    lines += ["", EXPLANATION, ""]
    if any(row["tp"] > 1 for row in rows):
        lines += [PARALLEL_EXPLANATION, ""]
    if any(row.get("family") == "ours" and row["time_ms"] is not None for row in rows):
        lines += [summaries(rows), ""]
    for group in cells(rows):
        slices = group[0].get("roof_slices")
        note = f" The roof ran in {slices} slices of the tokens." if slices else ""
        vocab = group[0].get("check_vocab")
        if vocab and vocab < group[0]["V"] * group[0]["tp"]:
            note += f" Checked against fp64 on {vocab} vocabulary rows."
        blocks = f"{group[0]['blocks']} blocks." if "blocks" in group[0] else ""
        if group[0].get("plain_error") is not None:
            note += (
                f" Plain PyTorch's errors: gradients {small(group[0]['plain_error'])}, loss "
                f"{small(group[0]['plain_loss_error'])}."
            )
        if group[0].get("check_foreign") is False:
            note += " The others' errors are to fp32 at the timed size."
        lines += [f"## {title(group[0])}", "", (blocks + note).strip(), "", table(group)]
    lines += [f"Not run (time limit): {name}." for name in skipped]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def summary(rows: list[Row]) -> str:
    """One line a cell: the best of ours and of the others, and the figures that have a target."""
    head = ["cell", "best of ours", "ms", "over 3", "raw", "best of the others", "ms", "ours / it"]
    head += ["recompute over 4", "C"]

    def fastest(candidates: Iterable[Row]) -> Row | None:
        timed = [row for row in candidates if row["time_ms"] is not None]
        return min(timed, key=lambda row: row["time_ms"]) if timed else None

    lines = []
    for group in cells(rows):
        mine = [row for row in group if row.get("family") == "ours"]
        best = fastest(row for row in mine if row["roof_products"] == 3)
        other = fastest(row for row in group if row.get("family") in ("megatron", "peer"))
        lean = fastest(row for row in mine if row["roof_products"] == 4)
        words = [f"{group[0]['shape']} T={group[0]['T']}", *["–"] * 9]
        if group[0]["tp"] > 1:
            words[0] += f" TP {group[0]['tp']}{' SP' if group[0]['sp'] else ''}"
        if best is not None:
            ratios = (cell(best["ratio"], 3), cell(best["ratio_raw"], 3))
            words[1:5] = [name_of(best), cell(best["time_ms"], 2), *ratios]
        if other is not None:
            words[5:7] = [other["variant"], cell(other["time_ms"], 2)]
            if best is not None:
                words[7] = cell(best["time_ms"] / other["time_ms"], 3)
        if lean is not None:
            words[8:] = [cell(lean["ratio"], 3), str(lean["chunk_tokens"] or "")]
        lines.append(words)
    return tables.markdown(head, lines) + "\n"


def over_runs(runs: list[list[Row]]) -> list[Row]:
    """One cell's rows: of each variant the medians over the runs, the time of each run beside them.

    Ratios to `STANDARD` are those within a run. A variant that failed in a run keeps that run's row.
    """
    for rows in runs:
        standard = next((row for row in rows if row["variant"] == STANDARD), {})
        for row in rows:
            for key, name in (("time_ms", "over_te"), ("host_ms", "host_over_te")):
                if row.get("family") == "ours":
                    own, other = row[key], standard.get(key)
                    row[name] = round(own / other, 4) if own and other else None
    merged = []
    for same in zip(*runs, strict=True):
        row = dict(next((row for row in same if row["time_ms"] is None), same[0]))
        if len(runs) > 1 and row["time_ms"] is not None:
            for key in MEDIANS:
                if all(one.get(key) is not None for one in same):
                    row[key] = round(statistics.median(one[key] for one in same), 4)
            row["peak_mib"] = max((one["peak_mib"] for one in same if one["peak_mib"]), default=None)
            row["runs_ms"] = [one["time_ms"] for one in same]
        merged.append(row)
    return merged


def beside_standard(rows: list[Row]) -> str:
    """One line a cell: every variant's ms, and `auto`'s time and host time over `STANDARD`'s."""
    names = list(dict.fromkeys(row["variant"] for row in rows))
    head = ["cell", *names, "auto / TE", "auto / roof", "host: auto", "TE", "auto / TE"]
    head += ["store / TE", "grad_in_forward / TE"]
    lines: list[list[str]] = []
    why_not: dict[str, Any] = {}
    for group in cells(rows):
        first, of = group[0], {row["variant"]: row for row in group}
        place = f"T={first['T']} H={first['H']} V={first['V']}"
        if first["tp"] > 1:
            place += f" TP {first['tp']}{' SP' if first['sp'] else ''}"
        why_not |= {name: row["error"] for name, row in of.items() if row["time_ms"] is None}

        def value(name: str, key: str, digits: int, of: dict[str, Row] = of) -> str:
            row = of.get(name) or next((of[n] for n in of if n.split("/")[0] == name), {})
            return tables.cell(row.get(key), f".{digits}f")

        times = [value(name, "time_ms", 3) for name in names]
        ratios = [value("auto", "over_te", 3), value("auto", "ratio", 3)]
        hosts = [value("auto", "host_ms", 2), value(STANDARD, "host_ms", 2)]
        hosts += [value(name, "host_over_te", 2) for name in ("auto", "store", "grad_in_forward")]
        lines.append([place, *times, *ratios, *hosts])
    notes = [f"{name}: not measured: {reason}." for name, reason in why_not.items()]
    runs = max(len(row.get("runs_ms", [0])) for row in rows)
    notes.append(f"Milliseconds; medians over {runs} run{'s' if runs > 1 else ''}.")
    return "\n\n".join([tables.markdown(head, lines), *notes]) + "\n"


def summaries(rows: list[Row]) -> str:
    """`summary`; where `auto` was measured `beside_standard` too."""
    auto = any(row["variant"].split("/")[0] == "auto" for row in rows)
    return summary(rows) + ("\n" + beside_standard(rows) if auto else "")


def write(path: Path, rows: list[Row], source: Row, skipped: Iterable[str] = ()) -> None:
    """The result file, and the page beside it."""
    own = [{k: v for k, v in row.items() if k not in source or source[k] != v} for row in rows]
    results.write(path, own, source)
    write_page(path, rows, skipped)


def write_page(path: Path, rows: list[Row], skipped: Iterable[str] = ()) -> None:
    results.write_whole(path.with_suffix(".md"), markdown(rows, skipped))
