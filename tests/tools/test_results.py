"""scripts/lib: the one schema of results, its reader, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.scripts.lib import results, tables

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / results.RESULTS).glob("*.json"))
ROW = {"shape": "llama-3-8b", "variant": "store", "time_ms": 1.5, "T": 64}


def content(**change) -> dict:
    """A right file's content, changed."""
    source = results.made_by("NVIDIA H200", ["bench", "--out", "/somewhere/else/x.json"])
    row = {**dict.fromkeys(results.ROW), **ROW}
    return {"schema": results.SCHEMA, "made_by": source, "rows": [row]} | change


def test_what_is_written_is_read_with_its_source(tmp_path):
    path = tmp_path / "new" / "x.json"
    source = results.made_by("", ["bench", "--tp", "2"])
    results.write(path, [ROW, ROW | {"loss": [math.nan]}], source)
    first, second = results.rows(path, ("T",))
    assert first == {**source, **dict.fromkeys(results.ROW), **ROW}
    assert first["commit"] and first["device"].endswith("CPU") and first["command"] == "bench --tp 2"
    assert second["loss"] == ["nan"]
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]


def test_infinite_figures_are_no_figures(tmp_path):
    with pytest.raises(ValueError, match="row 0: time_ms is no number: 'inf'"):
        results.write(tmp_path / "x.json", [ROW | {"time_ms": math.inf}], content()["made_by"])
    assert not list(tmp_path.iterdir())


def test_no_path_of_a_machine_is_kept():
    assert content()["made_by"]["command"] == "bench --out x.json"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"schema": 2}, "its schema is not 1"),
        ({"made_by": []}, "no made_by"),
        ({"made_by": {"commit": "a", "device": "b"}}, "made_by lacks command, megatron, python"),
        ({"rows": {}}, "rows is no list"),
        ({"rows": [{}]}, "row 0 lacks host_ms, peak_mib, ratio, shape, spread, time_ms, variant"),
        ({"rows": [{**dict.fromkeys(results.ROW), **ROW, "variant": ""}]}, "variant is no name"),
        ({"rows": [{**dict.fromkeys(results.ROW), **ROW, "time_ms": "1"}]}, "time_ms is no number"),
        ({"rows": [{**dict.fromkeys(results.ROW), **ROW, "time_ms": True}]}, "time_ms is no number"),
        ({"rows": [{**dict.fromkeys(results.ROW), **ROW, "peak_mib": -1}]}, "peak_mib is below 0"),
    ],
)
def test_each_defect_of_a_file_is_said(tmp_path, wrong, words):
    with pytest.raises(ValueError, match=words):
        results.check(content(**wrong))
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content(**wrong)))
    with pytest.raises(UsageError, match=f"x.json cannot be read as a result: .*{words}"):
        results.rows(path)


def test_a_source_that_names_no_commit():
    with pytest.raises(ValueError, match="no commit or no device"):
        results.check(content(made_by=content()["made_by"] | {"commit": ""}))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_files_follow_the_schema(path):
    results.read(path)


def test_names_of_files():
    path = results.default_path(Path("folder"), "NVIDIA H200", "reach")
    assert path.match("folder/20??-??-??-h200-reach.json")
    assert results.default_path(Path(), "x86_64 CPU", "a").name.endswith("-x86-64-cpu-a.json")


def test_tables():
    text = tables.markdown(["", "ms", "b"], [["a|b", 1, None], ["c", "2", 3]])
    assert text == "|  | ms | b |\n|---|---:|---:|\n| a/b | 1 |  |\n| c | 2 | 3 |"
    assert tables.markdown(["a", "b"], [], left=2) == "| a | b |\n|---|---|"
    assert (tables.cell(None), tables.cell(1.25, ".1f"), tables.cell(None, missing="")) == ("–", "1.2", "")
