"""A result's page, from the rows of its file: a table of each cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.results import Row

ERRORS = ("loss", "grad_hidden", "grad_weight")
#: Heading, key and format of each column; those of which no row has a value are left out.
COLUMNS = (
    *(("chosen", "plan", ""), ("backend", "logits_backend", ""), ("C", "chunk_tokens", "")),
    *(("rank", "rank", ""), ("forward", "forward_ms", ".3f")),
    *(("backward", "backward_ms", ".3f"), ("both, ms", "time_ms", ".3f"), ("spread", "spread", ".1%")),
    *(("over its base", "ratio", ".3f"), ("95 %", "ratio_interval", ".3f"), ("base", "base", "")),
    *(("over", "over", ".3f"), ("host, ms", "host_ms", ".2f")),
    *(("TFLOP/s", "tflops", ".0f"), ("peak, MiB", "peak_mib", ".1f"), ("error", "error", ".1e")),
    *((f"of {name}", name, ".1e") for name in ERRORS),
    *(("MHz", "sm_mhz", ".0f"), ("W", "watts", ".0f"), ("°C", "celsius", ".0f")),
    *((name, f"{name}_ms", ".3f") for name in ("step", "gemm", "compute", "exposed", "idle")),
    ("collectives, ms and exposed", "collectives", ""),
)
ABOUT = (
    "Medians over interleaved blocks; spread is (slowest - fastest block) / median; ratios are medians of the "
    "blocks' own, with a 95 % interval. Times are the slowest rank's, peaks and errors the largest of any. "
    "More: docs/benchmarks, *How it is measured*."
)


def title(row: Row) -> str:
    sizes = [f"{key} = {row[key]}" for key in ("T", "H", "V") if row.get(key)]
    if row["tp"] > 1:
        sizes.append(f"TP {row['tp']}{' with sequence parallelism' if row['sp'] else ''}")
    operands = row.get("operands") and f"{row['operands']} operands"
    return f"{row['shape']}: {', '.join([*sizes, *filter(None, [row['dtype'], operands])])}"


def _value(row: Row, key: str, form: str) -> str:
    value = row.get("errors", {}).get(key) if key in ERRORS else row.get(key)
    if value is None or (key == "base" and row.get("ratio") is None):
        return ""
    if key == "over":
        return "; ".join(
            f"{_value(row, name, form)} ({_value(row, f'{name}_interval', form)}), host "
            f"{_value(row, f'host_{name}', form)} ({_value(row, f'host_{name}_interval', form)}) of {other}"
            for name, other in value.items()
            if row.get(name) is not None
        ).replace(" ()", "")
    if isinstance(value, list | tuple):
        return " to ".join(format(end, form) for end in value)
    if isinstance(value, dict):
        return ", ".join(f"{kind} {own['ms']:.3f} {own['exposed_ms']:.3f}" for kind, own in value.items())
    return format(value, form) if isinstance(value, float | int) else str(value)


def table(rows: Sequence[Row]) -> str:
    """One cell's rows as a Markdown table, and the profiler's own tables."""
    columns = [[_value(row, key, form) for row in rows] for _, key, form in COLUMNS]
    shown = [at for at, column in enumerate(columns) if any(column)]
    lines = [[row["variant"], *(columns[at][number] for at in shown)] for number, row in enumerate(rows)]
    profiles = [f"\n{row['variant']}:\n\n```text\n{row['table']}\n```\n" for row in rows if row.get("table")]
    return tables.markdown(["", *(COLUMNS[at][0] for at in shown)], lines) + "\n" + "".join(profiles)


def cell(rows: Sequence[Row]) -> str:
    """Its heading, what its rows share, their table."""
    row, notes = rows[0], []
    if row.get("blocks"):
        notes.append(f"{row['blocks']} blocks; `grad_weight` ends in {row['wgrad_accumulator']}.")
    for key, words in (("eager_errors", "Plain PyTorch's errors"), ("operands_made", "The trained operands")):
        if told := row.get(key):
            notes.append(f"{words}: {', '.join(f'{name} {value:.6g}' for name, value in told.items())}.")
    return "\n\n".join([f"## {title(row)}", *([" ".join(notes)] if notes else []), table(rows)])


def write(path: Path, cells: Sequence[Sequence[Row]], source: Row) -> None:
    """The result file, and the page beside it."""
    rows = [{k: v for k, v in row.items() if source.get(k) != v} for rows in cells for row in rows]
    results.write(path, rows, source)
    words = "{device}, torch {torch}, triton {triton}, commit {commit}.".format(**source)
    results.write_whole(path.with_suffix(".md"), "\n\n".join([words, ABOUT, *map(cell, cells)]))
