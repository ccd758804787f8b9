"""Writes the tables of README.md, each between two comments: committed results, and plans.

    python scripts/readme_figures.py            # make figures
    python scripts/readme_figures.py --check    # writes nothing; exit code 1 where README.md is out of date

Exit code 2: a result file, a row of it or a pair of comments that is missing. Needs no torch and no device.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import committed_results
import marked_document

from megatron_fused_ce.estimate.command import plan_of
from megatron_fused_ce.estimate.report import GIB
from megatron_fused_ce.planner import PlanInputs, plan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks" / "results"
NAME = "scripts/readme_figures.py"
Row = dict[str, Any]


class Results:
    """The rows of one file."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.json"
        try:
            self.rows: list[Row] = committed_results.load(self.path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path.name} cannot be read: {error}") from None

    def found(self, **wanted: Any) -> Row | None:
        """The one row with these values, or None."""
        rows = [row for row in self.rows if wanted.items() <= row.items()]
        if len(rows) > 1:
            raise ValueError(f"{self.path.name} has {len(rows)} rows with {wanted}, expected one")
        return rows[0] if rows else None

    def row(self, **wanted: Any) -> Row:
        """The one row with these values."""
        row = self.found(**wanted)
        if row is None:
            raise ValueError(f"{self.path.name} has 0 rows with {wanted}, expected one")
        return row


#: The head alone on one H200, and on four with sequence parallelism.
HEADS = (
    ("2026-11-21-h200-reach-llama3-8b", {"T": 32768, "tp": 1, "sp": False}),
    ("2026-11-21-h200-tp4-reach", {"T": 32768, "tp": 4, "sp": True}),
)
#: On four GPUs neither native fusion was run, nor what has no tensor parallelism; verl's was run there alone.
ONE_GPU, FOUR_GPUS = (name for name, _ in HEADS)
NOT_MEASURED = {(FOUR_GPUS, name) for name in ("megatron-native", "liger", "cce")} | {
    (ONE_GPU, "verl-tp")
}
#: Label and variant of each row, and what it can do, in the columns' order (docs/features.md has sources).
ROWS = (
    ("Megatron unfused", "megatron-unfused", "yes | yes | yes | yes"),
    ("Megatron native fusion", "megatron-native", "yes | yes | yes | yes"),
    ("Megatron's layer + Transformer Engine's loss", "megatron-te", "yes | yes | yes | yes"),
    ("Liger, its default", "liger", "no | no | yes, a fourth GEMM | no"),
    ("Cut Cross Entropy", "cce", "yes | no | yes | no"),
    ("verl's linear cross entropy", "verl-tp", "yes | partly | yes | no"),
    ("**this, `--fused-chunked-ce`**", "auto", "yes | yes | yes | yes"),
)


def speed_and_memory() -> str:
    """Time to the millisecond and peak to a tenth of a GiB: the rows' spread is 2 to 7 %."""
    measured = [(Results(name), cell) for name, cell in HEADS]
    text = (
        "| | one H200, ms | GiB | four H200s, ms | GiB | tensor parallel | sequence parallel "
        "| per-token loss, any upstream gradient | fused into `main_grad` |\n"
        "|---|---:|---:|---:|---:|---|---|---|---|\n"
    )
    for label, variant, can in ROWS:
        cells = [_time_and_peak(results, cell, variant) for results, cell in measured]
        text += f"| {label} | {' | '.join(cells)} | {can} |\n"
    return text


def _time_and_peak(results: Results, cell: Row, variant: str) -> str:
    if (results.path.stem, variant) in NOT_MEASURED:
        return "– | –"
    wanted: Row = {"variant": variant}
    if variant == "auto":
        chosen = plan(_inputs(results.row(variant="megatron-unfused", **cell)))
        wanted = {"variant": chosen.strategy, "chunk_tokens": chosen.capacity}
    row = results.row(**cell, **wanted)
    return f"{row['time_ms']:.0f} | {row['peak_mib'] / 1024:.1f}"


def _inputs(row: Row) -> PlanInputs:
    """What a launch with the flag alone asks the planner for."""
    return PlanInputs(
        num_tokens=row["T"],
        hidden_size=row["H"],
        num_rows=row["V"],
        num_parts=row["tp"] if row["sp"] else 1,
        tp_size=row["tp"],
        token_weights_known=True,
        device=row["device"],
    )


EXAMPLES = "scripts/examples"
PLANS = (
    (
        "Llama-3.2-1B, 131072 tokens, one H200, full recomputation",
        "--model llama-3.2-1b --gpu h200-141gb --seq-length 131072 --recompute-granularity full",
    ),
    (
        "Llama-3-8B, 32768 tokens, 8 H100s, TP 4 with sequence parallelism",
        "--model llama-3-8b --gpus 8 --tp 4 --sequence-parallel --seq-length 32768",
    ),
    (
        f"[Llama-3-8B, 8192 tokens, 8 H100s]({EXAMPLES}/llama3_8b.sh)",
        f"--from-launch {ROOT / EXAMPLES / 'llama3_8b.sh'}",
    ),
    (
        f"[Llama-3-70B, 8192 tokens, 64 H100s]({EXAMPLES}/llama3_70b.sh)",
        f"--from-launch {ROOT / EXAMPLES / 'llama3_70b.sh'}",
    ),
)


def plans() -> str:
    """Peak of a GPU by ``python -m megatron_fused_ce plan``."""
    text = (
        "| training | predicted peak without the flag, GiB per GPU | with it | saved |\n"
        "|---|---:|---:|---:|\n"
    )
    for label, words in PLANS:
        advice = plan_of(shlex.split(words)).advice
        before, after = advice.baseline.peak / GIB, advice.recommended.peak / GIB
        text += f"| {label} | {before:.1f} | {after:.1f} | {1 - after / before:.0%} |\n"
    return text


PARTS: dict[str, Callable[[], str]] = {"speed and memory": speed_and_memory, "plans": plans}


def parts() -> dict[str, str]:
    """Text of every part, by the name in its comments."""
    return {f"{NAME}, {name}": make() for name, make in PARTS.items()}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, say what is out of date"
    )
    given = parser.parse_args(words)
    try:
        made = parts()
        if not given.check:
            marked_document.rewrite(given.readme, made)
            return 0
        text = given.readme.read_text()
        stale = [
            name
            for name, part in made.items()
            if marked_document.with_part(text, name, part) != text
        ]
    except (OSError, ValueError) as error:
        parser.exit(2, f"readme_figures: {error}\n")
    for name in stale:
        print(f"{given.readme}: {name.partition(', ')[2]}: out of date; run make figures")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
