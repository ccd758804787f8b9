"""README's picture: peak memory and speed of whole steps, as an SVG that reads on light and dark pages."""

from __future__ import annotations

import re

from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.lib.results import REPOSITORY, Row

PICTURE = REPOSITORY / "docs" / "images" / "gain.svg"
STEPS = REPOSITORY / results.RESULTS / "2026-11-21-h200-longest-sequence.json"
LENGTHS = (16384, 65536, 131072)
#: Variant -> its name in the picture, in the order of the bars.
LOSSES = {
    "unfused": "unfused",
    "native": "native",
    "te-lifted": "Transformer Engine's loss",
    "auto": "--fused-chunked-ce",
}
#: Bars stand on BASE, under them a row of tokens/s and the lengths.
WIDTH, HEIGHT, BASE, TOP = 580, 364, 286, 60
BAR, PITCH, GROUP, LEFT = 34, 41, 166, 74
#: Colours on a light page and on a dark one, by class.
LIGHT = {"page": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "line": "#d1d9e0"}
DARK = {"page": "#0d1117", "ink": "#f0f6fc", "faint": "#9198a1", "line": "#3d444d"}
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
    speed = f"{row['T'] / row['time_ms']:.1f}k"
    return [
        f'<rect {shape} class="{variant}"/>',
        text(middle, y - 5, f"{gib:.1f}", label),
        text(middle, BASE + 18, speed, f"{label} s"),
    ]


def drawn() -> str:
    """The picture, from the launches' rows."""
    rows = {(row["T"], row["variant"]): row for row in results.rows(STEPS)}
    capacity = next(
        float(found.group(1))
        for row in rows.values()
        if (found := re.search(r"total capacity of ([\d.]+) GiB", row["error"] or ""))
    )
    colours = [" ".join(f".{kind}{{fill:{colour}}}" for kind, colour in of.items()) for of in (LIGHT, DARK)]
    style = f"{colours[0]} @media (prefers-color-scheme: dark) {{ {colours[1]} }}"
    style += " text{font:14px system-ui,sans-serif;text-anchor:middle} .faint,.s{font-size:12.5px}"
    style += " .b{font-weight:700}" + "".join(
        f" {at}.b{{fill:{of['ink']}}}{end}"
        for at, of, end in (("", LIGHT, ""), ("@media (prefers-color-scheme: dark) {", DARK, "}"))
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Peak GiB and tokens/s of whole steps, by sequence length and loss</title>",
        f"<style>{style}</style>",
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2" height="7" class="faint"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="page"/>',
        text(16, 22, "Peak memory of a step, GiB", "ink", 'style="text-anchor:start"'),
        f'<rect x="16" y="{TOP}" width="{WIDTH - 32}" height="1" class="faint"/>',
        text(WIDTH - 16, TOP - 6, f"the GPU's {capacity:g} GiB", "faint", 'style="text-anchor:end"'),
    ]
    for group, tokens in enumerate(LENGTHS):
        left = LEFT + group * GROUP
        for place, variant in enumerate(LOSSES):
            parts += bar(left + place * PITCH, variant, rows[tokens, variant], capacity)
        parts.append(text(left + (PITCH * 4 - PITCH + BAR) / 2, BASE + 40, f"{tokens} tokens", "ink"))
    parts.append(text(16, BASE + 18, "tokens/s", "ink s", 'style="text-anchor:start"'))
    parts.append(f'<rect x="16" y="{BASE}" width="{WIDTH - 32}" height="1" class="faint"/>')
    x = 16.0
    for variant, name in LOSSES.items():
        parts += [
            f'<rect x="{x:g}" y="{HEIGHT - 23}" width="11" height="11" class="{variant}"/>',
            text(x + 16, HEIGHT - 13, name, "ink", 'style="text-anchor:start"'),
        ]
        x += 32 + 7.4 * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"
