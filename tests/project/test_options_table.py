"""docs/reliability.md's table of option and strategy: every cell has its cases, and no cases are missing."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
STRATEGIES = ("store", "grad_in_forward", "recompute")
IN_THE_PRODUCT = "scaled-exp GEMM with "


def test_every_cell_has_its_calls():
    """Against fp64 over ranks, with and without sequence parallelism; no option without a row."""
    from tests.support import pairs

    text = PAGE.read_text().split("<!-- cells -->")[1].split("<!-- end of cells -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()]
    calls = [set(row.items()) for axes in ("2 ranks", "other results") for row in pairs.rows_of(axes)]

    def meet(*values: tuple[str, object]) -> bool:
        return any(set(values) <= call for call in calls)

    asked = {("asked", name) for name in pairs.AXES["other results"]["asked"]}
    skips, found = ("skip_masked", True), set()
    for _, case, *cells in rows[2:]:
        name = case.strip("`").removeprefix(IN_THE_PRODUCT)
        value = skips if name == "masked tokens skipped" else ("option", name)
        value = ("asked", name) if ("asked", name) in asked else value
        found.add(value)
        assert cells == ["Y"] * len(STRATEGIES), case
        assert all(meet(value, ("strategy", strategy)) for strategy in STRATEGIES), case
        assert all(meet(value, ("sequence_parallel", sp)) for sp in (False, True)), case
        assert not case.strip("`").startswith(IN_THE_PRODUCT) or meet(value, ("backend", "scaled_exp")), case
    options = {("option", name) for name in pairs.OPTIONS if name != "plain"}
    assert found == options | asked | {skips}
