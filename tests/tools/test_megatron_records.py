"""Plans against the peaks that NVIDIA's CI measured on H100s (scripts/dev/megatron_records.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from megatron_fused_ce.estimate.command import plan_of
from megatron_fused_ce.estimate.peaks import estimate
from megatron_fused_ce.scripts.dev import megatron_records

MIB = 2**20


@dataclass(frozen=True)
class Compared:
    """A record and its plan."""

    name: str
    measured: float
    planned: float

    @property
    def off(self) -> float:
        return self.planned / self.measured - 1


@cache
def compared(version: str) -> list[Compared]:
    """The records of a version that can be planned."""
    found = []
    for versions, case in megatron_records.records(megatron_records.LIST.read_text()):
        if version in versions.split():
            try:
                result = plan_of(["--from-launch", case.launch])
            except ValueError:
                continue
            last = estimate(result.setting, result.now.head, last_stage=True)
            (measured,) = case.peaks.values()
            found.append(Compared(case.path, measured, last.peak / MIB))
    return found


@pytest.mark.parametrize(("version", "least"), [("0.16", 31), ("0.19", 33)])
def test_the_last_rank_holds_what_was_measured(version, least):
    assert sum(abs(one.off) <= 0.05 for one in compared(version)) >= least
