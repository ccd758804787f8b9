"""docs/reliability.md's table of option and strategy: every cell has its cases, and no cases are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import pairs

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
STRATEGIES = ("store", "grad_in_forward", "recompute")


def table() -> dict[str, dict[str, str]]:
    """By case: what each strategy's cell says."""
    text = PAGE.read_text().split("<!-- cells -->")[1].split("<!-- end of cells -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()]
    return {row[1].strip("`"): dict(zip(STRATEGIES, row[2:], strict=True)) for row in rows[2:]}


#: What a row is called in the lists of calls.
NAMES = {
    "masked tokens skipped": ("skip_masked", True),
}
IN_THE_PRODUCT = "scaled-exp GEMM with "


def meet(*values: tuple[str, object]) -> bool:
    """Whether a call over ranks has all of these."""
    rows = [*pairs.rows_of("2 ranks"), *pairs.rows_of("other results")]
    return any(set(values) <= set(row.items()) for row in rows)


def value_of(case: str) -> tuple[str, object]:
    name = case.removeprefix(IN_THE_PRODUCT)
    asked = name in pairs.AXES["other results"]["asked"]
    return NAMES.get(name, ("asked" if asked else "option", name))


@pytest.mark.parametrize("case", table())
def test_every_cell_has_its_calls(case):
    """Against fp64, with and without sequence parallelism."""
    value = value_of(case)
    for strategy, cell in table()[case].items():
        assert cell == "Y" and meet(value, ("strategy", strategy)), strategy
        if case.startswith(IN_THE_PRODUCT):
            assert meet(("backend", "scaled_exp"), ("strategy", strategy))
    assert all(meet(value, ("sequence_parallel", sp)) for sp in (False, True))
    if case.startswith(IN_THE_PRODUCT):
        assert meet(value, ("backend", "scaled_exp"))


def test_no_option_is_missing():
    options = {("option", name) for name in pairs.OPTIONS if name != "plain"}
    asked = {("asked", name) for name in pairs.AXES["other results"]["asked"]}
    assert {value_of(case) for case in table()} == options | asked | set(NAMES.values())
