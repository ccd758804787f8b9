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


#: Heads alone: label of each column, and its variant.
HEAD_COLUMNS = {
    "flag, `auto`": "auto",
    "Transformer Engine": "megatron-te",
    "native": "megatron-native",
    "unfused": "megatron-unfused",
}
MOE_HEADS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "gpt-oss-20b": "gpt-oss-20b", "DeepSeek-V3": "deepseek-v3"}
TP2_HEADS = {
    "H = 2048": ("2048x128256", 4096),
    "H = 4096": ("llama-3-8b", 8192),
    "the same": ("llama-3-8b", 32768),
}


def _heads(name: str, heads: dict[str, tuple[str, int]], columns: dict[str, str]) -> str:
    """Time over three GEMMs, and GiB above inputs and outputs."""
    file, lines = Results(name), []
    for label, (shape, tokens) in heads.items():
        rows = [file.row(shape=shape, variant=variant, T=tokens) for variant in columns.values()]
        cells = [f"{_over_gemms(row)}, {row['peak_mib'] / 1024:.1f}" for row in rows]
        lines.append([label, f"{tokens:,}", *cells])
    return tables.markdown(["head", "tokens", *columns], lines) + "\n"


def moe_heads() -> str:
    heads = {label: (shape, 16384) for label, shape in MOE_HEADS.items()}
    return _heads("2026-11-28-h200-moe", heads, HEAD_COLUMNS)


def tp2_heads() -> str:
    columns = {"flag, `auto`": "auto", "`grad_in_forward`": "grad_in_forward", **HEAD_COLUMNS}
    return _heads("2026-11-28-h200-tp2-t39", TP2_HEADS, columns)


#: Training seed by seed: label and name of each run, and the unit of each figure.
PAIRED, PAIRED_TP2 = "2026-11-26-h100-80gb-hbm3-paired", "2026-11-28-h200-paired-tp2"
PAIRED_WINDOWS = ("loss, last 100", "loss, first 10", "grad norm, first 10")
PAIRED_RUNS = {"flag": "flag", "native fusion": "native", "Transformer Engine's loss": "te"}
PAIRED_UNITS = {"loss, last 100": "nats, mean", "loss, first 10": "nats, root mean square"}


def same_training(name: str = PAIRED) -> str:
    """What each run, over the seeds, differs from unfused by."""
    rows: dict[str, dict[str, Row]] = {what: {} for what in PAIRED_WINDOWS}
    for row in Results(name).rows:
        what = row["shape"].partition(", paired")[0].removeprefix("lm ")
        rows.get(what, {})[row["variant"]] = row
    head = [f"{what} ({PAIRED_UNITS.get(what, 'root mean square')})" for what in rows]
    lines = [
        [label, *(f"{of[run]['over_seeds']:.1e}" for of in rows.values())]
        for label, run in PAIRED_RUNS.items()
        if run in rows[PAIRED_WINDOWS[0]]
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
    DOCS / "performance.md": {"moe heads": moe_heads, "TP 2": tp2_heads, "whole steps": whole_steps},
    DOCS / "comparison.md": {"speed and memory": speed_and_memory},
    DOCS / "numerics.md": {
        "same training": same_training,
        "same training, TP 2": lambda: same_training(PAIRED_TP2),
    },
}
