"""`make figures`: every table and picture in README.md and docs that is made from results or the plan.

    python -m scripts.dev.figures            # writes them
    python -m scripts.dev.figures --check    # writes nothing; exit status 1 where a page is out of date

It also holds the plan against what was measured: exit status 1 where a peak is outside its bound. 2: a result
file, a row of it or a pair of comments that is missing. Needs no device.
"""

from __future__ import annotations

import sys

from megatron_fused_ce.cli.command_line import Parser, command
from megatron_fused_ce.scripts.dev import figures_gain, figures_plan, figures_results
from megatron_fused_ce.scripts.lib import pages, results
from megatron_fused_ce.scripts.lib.results import REPOSITORY, RESULTS

#: Page -> its parts, by name, and what makes each.
PAGES = figures_plan.PAGES | figures_results.PAGES
#: Picture -> its figures.
MEMORY = {
    "memory-profile-1b.png": "2026-11-26-h100-80gb-hbm3-memory-launch.json",
}


def draw_results() -> None:
    """The pictures of docs/images that committed results hold the figures of."""
    from megatron_fused_ce.scripts.runs import compare, memory

    folder, images = REPOSITORY / RESULTS, REPOSITORY / "docs" / "images"
    for name, result in MEMORY.items():
        memory.draw(memory.read(folder / result), images / name)
    paired = results.read(folder / "2026-11-26-h100-80gb-hbm3-paired.json")
    compare.draw_series(paired, images / "same-training.png")


@command("figures")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.dev.figures", __doc__ or "")
    parser.add_argument("--check", action="store_true", help="write nothing, say what is out of date")
    given = parser.parse_args(words)
    status = 0
    for page, makers in PAGES.items():
        parts = {name: make() for name, make in makers.items()}
        if given.check:
            for name in pages.stale(page, parts):
                print(f"{page}: {name}: out of date; run make figures")
                status = 1
        else:
            pages.rewrite(page, parts)
    picture = figures_gain.PICTURE
    if not given.check:
        draw_results()
        picture.write_text(figures_gain.drawn())
    elif picture.read_text() != figures_gain.drawn():
        print(f"{picture}: out of date; run make figures")
        status = 1
    for found, bound in (
        (figures_plan.steps(), figures_plan.STEP_BOUND),
        (figures_plan.alone(), figures_plan.HEAD_BOUND),
    ):
        for line in figures_plan.outside(found, bound):
            print(f"figures: out of its bound: {line}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
