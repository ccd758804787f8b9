"""The figures of README.md, from committed results and the plan."""

from __future__ import annotations

from typing import Any

from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.head_bytes import PlanInputs
from megatron_fused_ce.planner import plan
from megatron_fused_ce.scripts.dev import figures_plan
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.results import REPOSITORY, Row

PAGE = REPOSITORY / "README.md"
RESULTS = REPOSITORY / results.RESULTS


class Results:
    """The rows of one file."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.json"
        self.rows = results.rows(self.path)

    def found(self, **wanted: Any) -> Row | None:
        """The one row with these values, or None."""
        rows = [row for row in self.rows if wanted.items() <= row.items()]
        if len(rows) > 1:
            raise UsageError(f"{self.path.name} has {len(rows)} rows with {wanted}, expected one")
        return rows[0] if rows else None

    def row(self, **wanted: Any) -> Row:
        """The one row with these values."""
        row = self.found(**wanted)
        if row is None:
            raise UsageError(f"{self.path.name} has 0 rows with {wanted}, expected one")
        return row


#: Whole steps of one launch: label and variant of each row.
STEPS, STEP_TOKENS = "2026-11-21-h200-longest-sequence", (16384, 65536, 131072)
STEP_ROWS = (
    ("**`--fused-chunked-ce`**", "auto"),
    ("Transformer Engine's loss", "te-lifted"),
    ("Megatron native fusion", "native"),
    ("Megatron unfused", "unfused"),
)


def whole_steps() -> str:
    """Tokens a second and peak of a process."""
    file, lines = Results(STEPS), []
    for label, variant in STEP_ROWS:
        cells = []
        for tokens in STEP_TOKENS:
            row = file.row(variant=variant, T=tokens)
            speed = f"{1e3 * tokens / row['time_ms']:,.0f}" if row["time_ms"] else "out of memory"
            cells += [speed, f"{row['peak_mib'] / 1024:.1f}" if row["time_ms"] else ""]
        lines.append([label, *cells])
    head = [word for tokens in STEP_TOKENS for word in (f"{tokens}: tokens/s", "GiB")]
    return tables.markdown(["sequence length", *head], lines) + "\n"


#: The head alone on one H200, and on four with sequence parallelism.
HEADS = (
    ("2026-11-21-h200-reach-llama3-8b", {"T": 32768, "tp": 1, "sp": False}),
    ("2026-11-21-h200-tp4-reach", {"T": 32768, "tp": 4, "sp": True}),
)
#: On four GPUs neither native fusion was run, nor what has no tensor parallelism; verl's was run there alone.
ONE_GPU, FOUR_GPUS = (name for name, _ in HEADS)
NOT_MEASURED = {(FOUR_GPUS, name) for name in ("megatron-native", "liger", "cce")} | {(ONE_GPU, "verl-tp")}
#: Label and variant of each row, and what it can do, in the columns' order (docs/features.md has sources).
ROWS = (
    ("Megatron unfused", "megatron-unfused", "yes", "yes", "yes", "yes"),
    ("Megatron native fusion", "megatron-native", "yes", "yes", "yes", "yes"),
    ("Megatron's layer + Transformer Engine's loss", "megatron-te", "yes", "yes", "yes", "yes"),
    ("Liger, its default", "liger", "no", "no", "yes, a fourth GEMM", "no"),
    ("Cut Cross Entropy", "cce", "yes", "no", "yes", "no"),
    ("verl's linear cross entropy", "verl-tp", "yes", "partly", "yes", "no"),
    ("**this, `--fused-chunked-ce`**", "auto", "yes", "yes", "yes", "yes"),
)


def speed_and_memory() -> str:
    """Time to the millisecond and peak to a tenth of a GiB: the rows' spread is 2 to 7 %."""
    measured = [(Results(name), cell) for name, cell in HEADS]
    head = ["", "one H200, ms", "GiB", "four H200s, ms", "GiB", "tensor parallel", "sequence parallel"]
    head += ["per-token loss, any upstream gradient", "fused into `main_grad`"]
    lines = [
        [label, *(w for file, cell in measured for w in _time_and_peak(file, cell, variant)), *can]
        for label, variant, *can in ROWS
    ]
    text = tables.markdown(head, lines)
    # The last four columns are words.
    return text.replace("---:|" * 8, "---:|" * 4 + "---|" * 4) + "\n"


def _time_and_peak(file: Results, cell: Row, variant: str) -> tuple[str, str]:
    if (file.path.stem, variant) in NOT_MEASURED:
        return "–", "–"
    wanted: Row = {"variant": variant}
    if variant == "auto":
        chosen = plan(_inputs(file.row(variant="megatron-unfused", **cell)))
        wanted = {"variant": chosen.strategy, "chunk_tokens": chosen.capacity}
    row = file.row(**cell, **wanted)
    return f"{row['time_ms']:.0f}", f"{row['peak_mib'] / 1024:.1f}"


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


def parts() -> dict[str, str]:
    """Text of every part, by the name in its comments."""
    return {
        "whole steps": whole_steps(),
        "speed and memory": speed_and_memory(),
        "plans": figures_plan.help_table(),
    }
