"""Launch scripts and logs that ``plan`` reads: the arguments that it must find in each."""

from __future__ import annotations

from pathlib import Path

from tests.support import megatron_scripts
from tests.support.checkouts import on_checkouts


@on_checkouts
def test_megatrons_own_scripts_that_plan(checkout):
    version = megatron_scripts.version(Path(checkout))
    listed = [row for row in megatron_scripts.rows() if version in row[0]]
    assert listed, f"tests/tools/megatron_scripts.txt has no Megatron {version}"
    for _, path, added, sizes in listed:
        assert megatron_scripts.found(Path(checkout) / path, added) == sizes, (path, added)
