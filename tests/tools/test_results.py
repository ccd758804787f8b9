"""scripts/lib/results: the one schema of results; every committed file follows it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import results

ROOT = Path(__file__).resolve().parents[2]
ROW = {**dict.fromkeys(results.ROW), "shape": "llama-3-8b", "variant": "store", "time_ms": 1.5, "T": 64}


def test_what_is_written_is_read_with_its_source(tmp_path):
    path = tmp_path / "new" / "x.json"
    source = results.made_by("", ["bench", "--tp", "2", "--out", "/somewhere/else/x.json"])
    results.write(path, [ROW, ROW | {"loss": [math.nan]}], source)
    first, second = results.rows(path)
    assert first == {**source, **ROW} and second["loss"] == ["nan"]
    assert first["commit"] and first["device"].endswith("CPU")
    assert first["command"] == "bench --tp 2 --out x.json", "no path of a machine is kept"
    with pytest.raises(ValueError, match="row 0: time_ms is no number: 'inf'"):
        results.write(path, [ROW | {"time_ms": math.inf}], source)
    assert [file.name for file in path.parent.iterdir()] == ["x.json"] and len(results.rows(path)) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"schema": 2}, "its schema is not 1"),
        ({"made_by": {"commit": "a", "device": "b"}}, "made_by lacks command, megatron, python"),
        ({"rows": {}}, "rows is no list"),
        ({"rows": [{}]}, "row 0 lacks host_ms, peak_mib, ratio, shape, spread, time_ms, variant"),
        ({"rows": [ROW | {"variant": ""}]}, "variant is no name"),
        ({"rows": [ROW | {"time_ms": "1"}]}, "time_ms is no number"),
        ({"rows": [ROW | {"peak_mib": -1}]}, "peak_mib is below 0"),
    ],
)
def test_each_defect_of_a_file_is_said(tmp_path, wrong, words):
    path = tmp_path / "x.json"
    right = {"schema": results.SCHEMA, "made_by": results.made_by("NVIDIA H200", ["bench"]), "rows": [ROW]}
    path.write_text(json.dumps(right | wrong))
    with pytest.raises(UsageError, match=f"x.json cannot be read as a result: .*{words}"):
        results.rows(path)


def test_committed_files_follow_the_schema():
    for path in (ROOT / results.RESULTS).glob("*.json"):
        results.read(path)
