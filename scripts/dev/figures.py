"""`make figures`: every table and picture in README.md and docs that is made from results or the plan.

    python -m scripts.dev.figures            # writes them
    python -m scripts.dev.figures --check    # writes nothing; exit status 1 where a page is out of date

It also holds the plan against what was measured: exit status 1 where a peak is outside its bound. 2: a result
file, a row of it or a pair of comments that is missing. Needs no device.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from megatron_fused_ce.cli.command_line import Parser, UsageError, command
from megatron_fused_ce.planner.choose import plan
from megatron_fused_ce.planner.memory import PlanInputs
from megatron_fused_ce.scripts.dev import figures_plan
from megatron_fused_ce.scripts.lib import pages, results, tables
from megatron_fused_ce.scripts.lib.results import REPOSITORY, Row

DOCS, RESULTS = REPOSITORY / "docs", REPOSITORY / results.RESULTS
IMAGES = DOCS / "images"


def rows_of(name: str, **wanted: Any) -> list[Row]:
    """The rows of a result file; at most one with these values."""
    rows = [row for row in results.rows(RESULTS / f"{name}.json") if wanted.items() <= row.items()]
    if wanted and len(rows) > 1:
        raise UsageError(f"{name}.json has {len(rows)} rows with {wanted}, expected one")
    return rows


def row_of(name: str, **wanted: Any) -> Row:
    """The one row with these values."""
    if rows := rows_of(name, **wanted):
        return rows[0]
    raise UsageError(f"{name}.json has 0 rows with {wanted}, expected one")


# --- tables ----------------------------------------------------------------------------------

#: Whole steps of one launch: label and variant of each row.
STEPS, LENGTHS = "2026-11-21-h200-longest-sequence", (16384, 65536, 131072)
STEP_ROWS = (
    ("**`--fused-chunked-ce`**", "auto"),
    ("Transformer Engine's loss", "te-lifted"),
    ("Megatron native fusion", "native"),
    ("Megatron unfused", "unfused"),
)


def whole_steps() -> str:
    """Tokens a second and peak of a process."""
    lines = [[label] for label, _ in STEP_ROWS]
    for line, (_, variant) in zip(lines, STEP_ROWS, strict=True):
        for tokens in LENGTHS:
            row = row_of(STEPS, variant=variant, T=tokens)
            cells = ["out of memory", ""]
            if row["time_ms"]:
                cells = [f"{1e3 * tokens / row['time_ms']:,.0f}", f"{row['peak_mib'] / 1024:.1f}"]
            line += cells
    head = [word for tokens in LENGTHS for word in (f"{tokens}: tokens/s", "GiB")]
    return tables.markdown(["sequence length", *head], lines) + "\n"


#: The head alone: operands of a head that trained on text and random ones on one H100, and four H200s.
TRAINED, ON_FOUR = "2026-11-26-h100-80gb-hbm3-trained-t39", "2026-11-21-h200-tp4-reach"
FOUR = {"T": 32768, "tp": 4, "sp": True}
#: Label and variant of each row.
ROWS = {
    "Megatron unfused": "megatron-unfused",
    "Megatron native fusion": "megatron-native",
    "Megatron's layer + Transformer Engine's loss": "megatron-te",
    "torch.compile": "torch-compile",
    "Liger, its default": "liger",
    "Liger, chunks of 4096 tokens": "liger-large-chunks",
    "Cut Cross Entropy, its default filter": "cce",
    "Cut Cross Entropy, `cce_exact`": "cce-exact",
    "verl's linear cross entropy": "verl-tp",
    "**this, `--fused-chunked-ce`**": "auto",
    "this, `--fused-ce-strategy store`": "store",
}


def speed_and_memory() -> str:
    """Ratios to a hundredth and peaks to a tenth of a GiB: the rows' spread is 2 to 11 %."""
    of_four = row_of(ON_FOUR, variant="megatron-unfused", **FOUR)
    sizes = {"num_parts": of_four["tp"], "tp_size": of_four["tp"], "device": of_four["device"]}
    # What a launch with the flag alone asks the planner for.
    asked = PlanInputs(of_four["T"], of_four["H"], of_four["V"], token_weights_known=True, **sizes)
    chosen = plan(asked)
    head = ["", "trained: time / GEMMs", "GiB", "error of `grad_hidden`", "random: time / GEMMs"]
    head += ["four H200s, ms", "GiB"]
    lines = []
    for label, variant in ROWS.items():
        cells = ["–"] * 6
        for row in rows_of(TRAINED, variant=variant, operands="trained"):
            error = f"{row['errors']['grad_hidden']:.1e}"
            cells[:3] = _over_gemms(row), f"{row['peak_mib'] / 1024:.1f}", error
            cells[3] = _over_gemms(row_of(TRAINED, variant=variant, operands="random, as wide"))
        wanted = {"variant": variant, **FOUR}
        if variant in ("auto", "store"):
            strategy = chosen.strategy if variant == "auto" else variant
            wanted |= {"variant": strategy, "chunk_tokens": chosen.capacity}
        for row in rows_of(ON_FOUR, **wanted):
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
#: File, columns beside those, and label, shape and tokens of each row.
MOE: tuple[Any, ...] = (
    "2026-11-28-h200-moe",
    dict[str, str](),
    ("Qwen3-30B-A3B", "qwen3-30b-a3b", 16384),
    ("gpt-oss-20b", "gpt-oss-20b", 16384),
    ("DeepSeek-V3", "deepseek-v3", 16384),
)
TP2: tuple[Any, ...] = (
    "2026-11-28-h200-tp2-t39",
    {"`grad_in_forward`": "grad_in_forward"},
    ("H = 2048", "2048x128256", 4096),
    ("H = 4096", "llama-3-8b", 8192),
    ("the same", "llama-3-8b", 32768),
)


def heads(name: str, beside: dict[str, str], *of: tuple[str, str, int]) -> str:
    """Time over three GEMMs, and GiB above inputs and outputs."""
    columns, lines = HEAD_COLUMNS | beside, []
    for label, shape, tokens in of:
        rows = [row_of(name, shape=shape, variant=variant, T=tokens) for variant in columns.values()]
        cells = [f"{_over_gemms(row)}, {row['peak_mib'] / 1024:.1f}" for row in rows]
        lines.append([label, f"{tokens:,}", *cells])
    return tables.markdown(["head", "tokens", *columns], lines) + "\n"


#: Training seed by seed: label and name of each run, and the unit of each figure.
PAIRED, PAIRED_TP2 = "2026-11-26-h100-80gb-hbm3-paired", "2026-11-28-h200-paired-tp2"
WINDOWS = ("loss, last 100", "loss, first 10", "grad norm, first 10")
PAIRED_RUNS = {"flag": "flag", "native fusion": "native", "Transformer Engine's loss": "te"}
PAIRED_UNITS = {"loss, last 100": "nats, mean", "loss, first 10": "nats, root mean square"}


def same_training(name: str) -> str:
    """What each run, over the seeds, differs from unfused by."""
    rows: dict[str, dict[str, Row]] = {what: {} for what in WINDOWS}
    for row in rows_of(name):
        what = row["shape"].partition(", paired")[0].removeprefix("lm ")
        rows.get(what, {})[row["variant"]] = row
    head = [f"{what} ({PAIRED_UNITS.get(what, 'root mean square')})" for what in rows]
    lines = [
        [label, *(f"{of[run]['over_seeds']:.1e}" for of in rows.values())]
        for label, run in PAIRED_RUNS.items()
        if run in rows[WINDOWS[0]]
    ]
    bounds = [f"{of['flag']['bound']:.1e}" for of in rows.values()]
    return tables.markdown(["minus unfused", *head], [*lines, ["bound", *bounds]]) + "\n"


def _over_gemms(row: Row) -> str:
    """Time over that of three GEMMs."""
    return f"{row['ratio'] if row['base'] == 'roof' else row['over_roof']:.2f}"


# --- pictures --------------------------------------------------------------------------------

#: Variant -> its name in README's picture, in the order of the bars.
LOSSES = {
    "unfused": "unfused",
    "native": "native",
    "te-lifted": "Transformer Engine's loss",
    "auto": "--fused-chunked-ce",
}
#: Bars stand on BASE, under them a row of tokens/s and the lengths.
WIDTH, HEIGHT, BASE, TOP = 580, 364, 286, 60
BAR, PITCH, GROUP, LEFT = 34, 41, 166, 74
START = 'style="text-anchor:start"'
#: Colours on a light page and on a dark one, by class.
LIGHT = {"page": "#ffffff", "ink": "#1f2328", "b": "#1f2328", "faint": "#59636e"}
DARK = {"page": "#0d1117", "ink": "#f0f6fc", "b": "#f0f6fc", "faint": "#9198a1"}
LIGHT |= {"unfused": "#8c959f", "native": "#b4690e", "te-lifted": "#7d5bbe", "auto": "#1a7f37"}
DARK |= {"unfused": "#6e7681", "native": "#d29922", "te-lifted": "#a371f7", "auto": "#3fb950"}


def text(x: float, y: float, words: str, kind: str = "ink", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" {more}>{words}</text>'


def bar(x: float, variant: str, row: Row, capacity: float) -> list[str]:
    """A bar with its GiB, its tokens/s under it; hatched up to the GPU's memory where the launch ran out."""
    trained = row["status"] == "ok"
    gib = row["peak_mib"] / 1024 if trained else capacity
    height = (BASE - TOP) * gib / capacity
    y, middle = BASE - height, x + BAR / 2
    shape = f'x="{x:g}" y="{y:.1f}" width="{BAR}" height="{height:.1f}"'
    if not trained:
        half = (BASE + TOP) / 2
        turned = f'transform="rotate(-90 {middle:g} {half:g})" dy="4"'
        return [
            f'<rect {shape} class="{variant}" opacity="0.25"/>',
            f'<rect {shape} fill="url(#hatch)"/>',
            f'<rect x="{middle - 10:g}" y="{half - 54:g}" width="20" height="108" class="page"/>',
            text(middle, half, "out of memory", "ink", turned),
            text(middle, BASE + 18, "–", "ink s"),
        ]
    label = "b" if variant == "auto" else "ink"
    return [
        f'<rect {shape} class="{variant}"/>',
        text(middle, y - 5, f"{gib:.1f}", label),
        text(middle, BASE + 18, f"{row['T'] / row['time_ms']:.1f}k", f"{label} s"),
    ]


def gain() -> str:
    """README's picture: peak memory and speed of whole steps, as an SVG for light and dark pages."""
    rows = {(row["T"], row["variant"]): row for row in rows_of(STEPS)}
    errors = " ".join(row["error"] or "" for row in rows.values())
    capacity = float(re.findall(r"total capacity of ([\d.]+) GiB", errors)[0])
    colours = [" ".join(f".{kind}{{fill:{colour}}}" for kind, colour in of.items()) for of in (LIGHT, DARK)]
    style = f"{colours[0]} @media (prefers-color-scheme: dark) {{ {colours[1]} }}"
    style += " text{font:14px system-ui,sans-serif;text-anchor:middle} .faint,.s{font-size:12.5px}"
    style += " .b{font-weight:700}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Peak GiB and tokens/s of whole steps, by sequence length and loss</title>",
        f"<style>{style}</style>",
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2" height="7" class="faint"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="page"/>',
        text(16, 22, "Peak memory of a step, GiB", more=START),
        f'<rect x="16" y="{TOP}" width="{WIDTH - 32}" height="1" class="faint"/>',
        text(WIDTH - 16, TOP - 6, f"the GPU's {capacity:g} GiB", "faint", 'style="text-anchor:end"'),
    ]
    for group, tokens in enumerate(LENGTHS):
        left = LEFT + group * GROUP
        for place, variant in enumerate(LOSSES):
            parts += bar(left + place * PITCH, variant, rows[tokens, variant], capacity)
        parts.append(text(left + (PITCH * 4 - PITCH + BAR) / 2, BASE + 40, f"{tokens} tokens", "ink"))
    parts.append(text(16, BASE + 18, "tokens/s", "ink s", START))
    parts.append(f'<rect x="16" y="{BASE}" width="{WIDTH - 32}" height="1" class="faint"/>')
    x = 16.0
    for variant, name in LOSSES.items():
        parts += [
            f'<rect x="{x:g}" y="{HEIGHT - 23}" width="11" height="11" class="{variant}"/>',
            text(x + 16, HEIGHT - 13, name, more=START),
        ]
        x += 32 + 7.4 * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_results() -> None:
    """The pictures of docs/images that committed results hold the figures of."""
    from megatron_fused_ce.scripts.runs import compare, memory

    launch = memory.read(RESULTS / "2026-11-26-h100-80gb-hbm3-memory-launch.json")
    memory.draw(launch, IMAGES / "memory-profile-1b.png")
    compare.draw_series(results.read(RESULTS / f"{PAIRED}.json"), IMAGES / "same-training.png")


# --- the command -----------------------------------------------------------------------------

#: Page -> its parts, by the name in their comments, and what makes each.
PAGES = figures_plan.PAGES | {
    DOCS / "performance.md": {
        "moe heads": lambda: heads(*MOE),
        "TP 2": lambda: heads(*TP2),
        "whole steps": whole_steps,
    },
    DOCS / "comparison.md": {"speed and memory": speed_and_memory},
    DOCS / "numerics.md": {
        "same training": lambda: same_training(PAIRED),
        "same training, TP 2": lambda: same_training(PAIRED_TP2),
    },
}


@command("figures")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.dev.figures", __doc__ or "")
    parser.add_argument("--check", action="store_true", help="write nothing, say what is out of date")
    writes = not parser.parse_args(words).check
    stale = list[str]()
    for page, makers in PAGES.items():
        parts = {name: make() for name, make in makers.items()}
        stale += [f"{page}: {name}" for name in pages.rewrite(page, parts, writes)]
    picture, svg = IMAGES / "gain.svg", gain()
    if writes:
        draw_results()
        picture.write_text(svg)
    else:
        stale += [str(picture)] * (picture.read_text() != svg)
        for name in stale:
            print(f"{name}: out of date; run make figures")
    outside = [
        *figures_plan.outside(figures_plan.steps(), figures_plan.STEP_BOUND),
        *figures_plan.outside(figures_plan.alone(), figures_plan.HEAD_BOUND),
    ]
    for line in outside:
        print(f"figures: out of its bound: {line}", file=sys.stderr)
    return int(bool(outside or (stale and not writes)))


if __name__ == "__main__":
    sys.exit(main())
