"""Plans against the peaks that NVIDIA's CI measured on H100s (scripts/dev/megatron_records.py)."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

import pytest

from megatron_fused_ce.plan.command import plan_of
from megatron_fused_ce.plan.peaks import estimate
from megatron_fused_ce.scripts.dev import megatron_records
from tests.support.checkouts import on_checkouts

MIB = 2**20


@cache
def compared(version: str) -> list[tuple[str, float, str]]:
    """Of each record of a version: its name, (planned - measured) / measured, and the decision."""
    found = []
    for versions, case in megatron_records.records(megatron_records.LIST.read_text()):
        if version in versions.split():
            result = plan_of(["--from-launch", case.launch])
            last = estimate(result.setting, result.now.head, last_stage=True)
            (measured,) = case.peaks.values()
            found.append((case.path, last.peak / MIB / measured - 1, result.decision))
    return found


@pytest.mark.parametrize(("version", "least"), [("0.16", 39), ("0.19", 41)])
def test_where_there_is_a_verdict_the_last_rank_holds_what_was_measured(version, least):
    found = [(name, off) for name, off, decision in compared(version) if decision != "no verdict"]
    assert len(found) >= least
    assert {name: off for name, off in found if abs(off) > 0.05} == {}


def test_what_is_far_off_has_no_verdict():
    """Schedules, CUDA graphs, offloading and FSDP are not counted, and it shows."""
    both = [*compared("0.16"), *compared("0.19")]
    assert sum(abs(off) > 0.05 for _, off, decision in both if decision == "no verdict") >= 10


@on_checkouts
def test_most_of_megatrons_own_pretraining_tests_get_a_verdict(checkout):
    decisions = []
    for case in filter(lambda case: case.pretrains, megatron_records.cases(Path(checkout))):
        with contextlib.suppress(ValueError, SystemExit):  # no sizes, or a batch that its GPUs do not divide
            result = plan_of(["--from-launch", case.launch])
            if "--load" not in result.judged.uncounted:  # of a resumed run with experts none is given
                decisions.append(result.decision)
    assert len(decisions) - decisions.count("no verdict") >= 0.68 * len(decisions)
