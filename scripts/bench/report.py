"""A result's page, from the result file alone: a table of each cell's rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.results import Row

#: What the tables of one file may differ in; each gets its own heading.
CELL_KEYS = ("shape", "T", "H", "V", "dtype", "tp", "sp", "operands")
ERRORS = ("loss", "grad_hidden", "grad_weight")
PROFILE = ("step", "gemm", "compute", "exposed", "idle")
#: Heading, key and format of each column; those of which no row has a value are left out.
COLUMNS = (
    *(("chosen", "plan", ""), ("backend", "logits_backend", ""), ("C", "chunk_tokens", "")),
    *(("rank", "rank", ""), ("forward", "forward_ms", ".3f")),
    *(("backward", "backward_ms", ".3f"), ("both, ms", "time_ms", ".3f"), ("spread", "spread", ".1%")),
    *(("over its base", "ratio", ".3f"), ("95 %", "ratio_interval", ".3f"), ("base", "base", "")),
    *(("over", "over", ""), ("host, ms", "host_ms", ".2f")),
    *(("TFLOP/s", "tflops", ".0f"), ("peak, MiB", "peak_mib", ".1f"), ("error", "error", ".1e")),
    *((f"of {name}", name, ".1e") for name in ERRORS),
    *(("MHz", "sm_mhz", ".0f"), ("W", "watts", ".0f"), ("°C", "celsius", ".0f")),
    *((name, f"{name}_ms", ".3f") for name in PROFILE),
    ("collectives, ms and exposed", "collectives", ""),
)
EXPLANATION = (
    "Milliseconds of device time, launch gaps included: medians over interleaved blocks; spread is (slowest "
    "- fastest block) / median. A ratio is the median of the blocks' own ratios to the base that is named: "
    "*roof* is the three matrix products alone, by cuBLAS, on the true gradient of the logits of the same "
    "operands in their dtype, *roof-4* with the logits computed twice. Peak: MiB above inputs, `grad_hidden` "
    "and the wgrad accumulator, cuBLAS's workspace counted. Error: the larger of both gradients' (of the "
    "outputs' where there are none), norm-relative to fp64. 95 %: order statistics of the blocks' ratios "
    "that hold their median. MHz of the SMs, W (the driver's mean over a second), °C: NVML, medians in the "
    "row's turns."
)
PARALLEL_EXPLANATION = (
    "Times are the slowest rank's, peaks and errors the largest of any rank. The roof is the shard's, on all "
    "ranks at once, on hidden states that are there as a whole: no collective is in it."
)
ENDS = {"main_grad": "an fp32 `main_grad`", "returned": "a `.grad` in the weight's dtype"}


def cells(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each cell, in the order of their first row."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in CELL_KEYS), []).append(row)
    return list(groups.values())


def title(row: Row) -> str:
    sizes = [f"{key} = {row[key]}" for key in ("T", "H", "V") if row.get(key)]
    if (row.get("tp") or 1) > 1:
        sizes.append(f"TP {row['tp']}{' with sequence parallelism' if row['sp'] else ''}")
    operands = row.get("operands") and f"{row['operands']} operands"
    return f"{row['shape']}: {', '.join([*sizes, *filter(None, [row.get('dtype'), operands])])}"


def _value(row: Row, key: str, form: str) -> str:
    value = row.get(key)
    if key == "over":
        named = {name: other for name, other in (value or {}).items() if row.get(name) is not None}
        return "; ".join(f"{row[name]:.3f} of {other}" for name, other in named.items())
    if key in ERRORS:
        value = (row.get("errors") or {}).get(key)
    if isinstance(value, list | tuple):
        return " to ".join(format(end, form) for end in value)
    if key == "base" and row.get("ratio") is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{kind} {own['ms']:.3f} {own['exposed_ms']:.3f}" for kind, own in value.items())
    return tables.cell(value, form if isinstance(value, float | int) else "", "")


def table(rows: Sequence[Row]) -> str:
    """One cell's rows as a Markdown table, and the profiler's own tables."""
    columns = [[_value(row, key, form) for row in rows] for _, key, form in COLUMNS]
    shown = [at for at, column in enumerate(columns) if any(column)]
    lines = [[row["variant"], *(columns[at][number] for at in shown)] for number, row in enumerate(rows)]
    profiles = [f"\n{row['variant']}:\n\n```text\n{row['table']}\n```\n" for row in rows if row.get("table")]
    return tables.markdown(["", *(COLUMNS[at][0] for at in shown)], lines) + "\n" + "".join(profiles)


def page(rows: Sequence[Row]) -> str:
    """Everything, one table a cell."""
    if not rows:
        return "No rows.\n"
    first = rows[0]
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    line = f"{first['device']}, torch {first['torch']}, triton {first['triton']}, commit {commits}."
    if end := ENDS.get(first.get("wgrad_accumulator", "")):
        alone = dict.fromkeys(row["variant"] for row in rows if row.get("upstream") == "one scalar")
        words = f"; one upstream gradient for all tokens: {', '.join(alone)}" if alone else ""
        line += f" `grad_weight` ends in {end}{words}."
    lines = [line, EXPLANATION] + [PARALLEL_EXPLANATION] * any((row.get("tp") or 1) > 1 for row in rows)
    for group in cells(rows):
        row = group[0]
        note = f"{row['blocks']} blocks. " if row.get("blocks") else ""
        if row.get("roof_slices"):
            note += f"The roof ran in {row['roof_slices']} slices of the tokens. "
        if eager := row.get("eager_errors"):
            note += f"Plain PyTorch's errors: {', '.join(f'{name} {e:.1e}' for name, e in eager.items())}. "
        if made := row.get("operands_made"):
            note += f"The trained operands: {', '.join(f'{name} {v:.6g}' for name, v in made.items())}. "
        lines += [f"## {title(row)}", note.strip(), table(group)]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(lines)).rstrip() + "\n"


def write(path: Path, rows: Sequence[Row], source: Row) -> None:
    """The result file, and the page beside it."""
    own = [{k: v for k, v in row.items() if k not in source or source[k] != v} for row in rows]
    results.write(path, own, source)
    results.write_whole(path.with_suffix(".md"), page([{**source, **row} for row in rows]))
