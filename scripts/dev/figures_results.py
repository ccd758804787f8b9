"""The tables of docs that committed results hold the figures of, by page."""

from __future__ import annotations

from typing import Any

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.planner.choose import plan
from megatron_fused_ce.planner.memory import PlanInputs
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.results import REPOSITORY, Row

DOCS = REPOSITORY / "docs"
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


#: The head alone: operands of a head that trained on text and random ones on one H100, and four H200s.
TRAINED, ON_FOUR = "2026-11-26-h100-80gb-hbm3-trained-t39", "2026-11-21-h200-tp4-reach"
FOUR = {"T": 32768, "tp": 4, "sp": True}
#: Label and variant of each row.
ROWS = (
    ("Megatron unfused", "megatron-unfused"),
    ("Megatron native fusion", "megatron-native"),
    ("Megatron's layer + Transformer Engine's loss", "megatron-te"),
    ("torch.compile", "torch-compile"),
    ("Liger, its default", "liger"),
    ("Liger, chunks of 4096 tokens", "liger-large-chunks"),
    ("Cut Cross Entropy, its default filter", "cce"),
    ("Cut Cross Entropy, `cce_exact`", "cce-exact"),
    ("verl's linear cross entropy", "verl-tp"),
    ("**this, `--fused-chunked-ce`**", "auto"),
    ("this, `--fused-ce-strategy store`", "store"),
)


def speed_and_memory() -> str:
    """Ratios to a hundredth and peaks to a tenth of a GiB: the rows' spread is 2 to 11 %."""
    trained, four = Results(TRAINED), Results(ON_FOUR)
    chosen = plan(_inputs(four.row(variant="megatron-unfused", **FOUR)))
    head = ["", "trained: time / GEMMs", "GiB", "error of `grad_hidden`", "random: time / GEMMs"]
    head += ["four H200s, ms", "GiB"]
    lines = []
    for label, variant in ROWS:
        cells = ["–"] * 6
        if row := trained.found(variant=variant, operands="trained"):
            cells[:3] = (
                _over_gemms(row),
                f"{row['peak_mib'] / 1024:.1f}",
                f"{row['errors']['grad_hidden']:.1e}",
            )
            cells[3] = _over_gemms(trained.row(variant=variant, operands="random, as wide"))
        wanted = {"variant": variant, **FOUR}
        if variant in ("auto", "store"):
            strategy = chosen.strategy if variant == "auto" else variant
            wanted |= {"variant": strategy, "chunk_tokens": chosen.capacity}
        if row := four.found(**wanted):
            cells[4:] = f"{row['time_ms']:.0f}", f"{row['peak_mib'] / 1024:.1f}"
        lines.append([label, *cells])
    return tables.markdown(head, lines) + "\n"


#: Training seed by seed: label and name of each run, and the unit of each figure.
PAIRED = "2026-11-26-h100-80gb-hbm3-paired"
PAIRED_RUNS = {"flag": "flag", "native fusion": "native", "Transformer Engine's loss": "te"}
PAIRED_UNITS = {"loss, last 100": "nats, mean", "loss, first 10": "nats, root mean square"}


def same_training() -> str:
    """What each run, over the seeds, differs from unfused by."""
    rows: dict[str, dict[str, Row]] = {}
    for row in Results(PAIRED).rows:
        rows.setdefault(row["shape"].partition(", paired")[0], {})[row["variant"]] = row
    head = [f"{what} ({PAIRED_UNITS.get(what, 'root mean square')})" for what in rows]
    lines = [
        [label, *(f"{of[name]['over_seeds']:.1e}" for of in rows.values())]
        for label, name in PAIRED_RUNS.items()
    ]
    bounds = [f"{of['flag']['bound']:.1e}" for of in rows.values()]
    return tables.markdown(["minus unfused", *head], [*lines, ["bound", *bounds]]) + "\n"


def _over_gemms(row: Row) -> str:
    """Time over that of three GEMMs."""
    return f"{row['ratio'] if row['base'] == 'roof' else row['over_roof']:.2f}"


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


#: Page -> its parts, by the name in their comments, and what makes each.
PAGES = {
    DOCS / "performance.md": {"whole steps": whole_steps},
    DOCS / "comparison.md": {"speed and memory": speed_and_memory},
    DOCS / "numerics.md": {"same training": same_training},
}
