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
    *(("forward", "forward_ms", ".3f"), ("backward", "backward_ms", ".3f"), ("both, ms", "time_ms", ".3f")),
    *(("spread", "spread", ".1%"), ("over its base", "ratio", ".3f"), ("95 %", "ratio_interval", ".3f")),
    *(("base", "base", ""), ("over", "over", ".3f"), ("host, ms", "host_ms", ".2f")),
    *(("TFLOP/s", "tflops", ".0f"), ("peak, MiB", "peak_mib", ".1f"), ("error", "error", ".1e")),
    *((f"of {name}", name, ".1e") for name in ERRORS),
    *(("MHz", "sm_mhz", ".0f"), ("W", "watts", ".0f"), ("°C", "celsius", ".0f")),
)
ABOUT = (
    "Medians over interleaved blocks; spread is (slowest - fastest block) / median; ratios are medians of "
    "the blocks' own, with a 95 % interval. Times are the slowest rank's, peaks (above inputs and outputs) "
    "and errors the largest of any. More: docs/benchmarks, *How it is measured*."
)


def _value(row: Row, key: str, form: str) -> str:
    value = row["errors"].get(key) if key in ERRORS else row.get(key)
    if value is None or (key == "base" and row["ratio"] is None):
        return ""
    if key == "over":
        return "; ".join(
            f"{_value(row, name, form)} ({_value(row, f'{name}_interval', form)}), host "
            f"{_value(row, f'host_{name}', form)} ({_value(row, f'host_{name}_interval', form)}) of {other}"
            for name, other in value.items()
            if row[name] is not None
        ).replace(" ()", "")
    if isinstance(value, list | tuple):
        return " to ".join(format(end, form) for end in value)
    return format(value, form) if isinstance(value, float | int) else str(value)


def cell(rows: Sequence[Row]) -> str:
    """Its heading, what its rows share, their table."""
    row = rows[0]
    words = [f"{key} = {row[key]}" for key in ("T", "H", "V")]
    words += [f"TP {row['tp']}{' with sequence parallelism' if row['sp'] else ''}"] if row["tp"] > 1 else []
    words += [row["dtype"], *([f"{row['operands']} operands"] if row.get("operands") else [])]
    note = f"{max(row['blocks'] for row in rows)} blocks; `grad_weight` ends in {row['wgrad_accumulator']}."
    if alone := [row["variant"] for row in rows if row["upstream"] == "one scalar"]:
        note += f" One upstream gradient for all tokens: {', '.join(alone)}."
    for key, of in (("eager_errors", "Plain PyTorch's errors"), ("operands_made", "The trained operands")):
        if told := row.get(key):
            note += f" {of}: {', '.join(f'{name} {value:.6g}' for name, value in told.items())}."
    columns = [[head, *(_value(row, key, form) for row in rows)] for head, key, form in COLUMNS]
    columns = [["", *(row["variant"] for row in rows)], *(of for of in columns if any(of[1:]))]
    head, *lines = zip(*columns, strict=True)
    return "\n\n".join([f"## {row['shape']}: {', '.join(words)}", note, tables.markdown(head, lines)]) + "\n"


def write(path: Path, cells: Sequence[Sequence[Row]], source: Row) -> None:
    """The result file, and the page beside it."""
    rows = [{k: v for k, v in row.items() if source.get(k) != v} for rows in cells for row in rows]
    results.write(path, rows, source)
    words = "{device}, torch {torch}, triton {triton}, commit {commit}.".format(**source)
    results.write_whole(path.with_suffix(".md"), "\n\n".join([words, ABOUT, *map(cell, cells)]))
