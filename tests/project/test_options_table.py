"""docs/options.md's table of option and strategy: every cell has its cases, and no cases are missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_token_outputs
from tests.ranks.runner import case_names

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
STRATEGIES = ("store", "grad_in_forward", "recompute")


def table() -> dict[str, dict[str, str]]:
    """By case: what each strategy's cell says."""
    text = PAGE.read_text().split("<!-- cells -->")[1].split("<!-- end of cells -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()]
    return {row[1].strip("`"): dict(zip(STRATEGIES, row[2:], strict=True)) for row in rows[2:]}


def cases() -> dict[str, set[tuple[str, str]]]:
    """Of test_tensor_parallel, which runs each at TP 1, 2 and 4: strategies and sequence parallelism."""
    found: dict[str, set[tuple[str, str]]] = {}
    for name in case_names("tests.ranks.head_cases"):
        match = re.fullmatch(
            r"(.+), (store|grad_in_forward|recompute) sp=(True|False)( packed)?", name
        )
        if match:
            found.setdefault(match[1], set()).add((match[2], match[3]))
    return found


@pytest.mark.parametrize("case", table())
def test_every_cell_has_its_cases(case):
    expected = {
        (strategy, sp)
        for strategy, cell in table()[case].items()
        if cell == "Y"
        for sp in ("True", "False")
    }
    assert cases()[case] == expected


def test_no_option_is_missing():
    others = {"an outlier in one shard"}
    options = {
        name
        for name in cases()
        if name not in others and not re.fullmatch(r"scaled-exp GEMM, \S+", name)
    }
    assert options == set(table())


def test_the_cell_that_is_refused():
    assert [
        (case, strategy)
        for case, row in table().items()
        for strategy, cell in row.items()
        if cell != "Y"
    ] == [("outputs", "grad_in_forward")]
    x = torch.zeros(4, 8, requires_grad=True)
    with pytest.raises(ValueError, match="use 'store', 'recompute' or 'auto'"):
        fused_linear_token_outputs(
            x,
            x,
            torch.zeros(4, dtype=torch.int64),
            ("lse",),
            token_weights=torch.ones(4),
            config=FusedCEConfig(strategy="grad_in_forward"),
        )
