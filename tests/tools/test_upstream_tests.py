"""scripts/dev/upstream_tests.py on a checkout of a few files: every way a test can end, off and on."""

from __future__ import annotations

from megatron_fused_ce.scripts.dev import upstream_tests
from megatron_fused_ce.scripts.lib import results
from tests.support.commands import launches_without_torch, run_here

TESTS_OF_IT = """
import os, time
import pytest
from megatron_fused_ce.adapter import switch

@pytest.fixture
def breaks_afterwards():
    yield
    raise ValueError("at the end")

def test_passes(): pass
def test_fails(): assert 1 == 2, "as ever"
def test_breaks(breaks_afterwards): pass
def test_only_without(): assert switch.active_config() is None, "the flag is on"
def test_only_with(): assert switch.active_config() is not None, "the flag is off"
def test_evaluates(): switch.counters().fused += 3 * (switch.active_config() is not None)
def test_dies(): switch.active_config() is None or os._exit(3)
def test_between(): pass
def test_hangs(): time.sleep(1000 if switch.active_config() is not None else 0)
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_last(): pass
"""
FILES = {
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 0\n",
    "megatron/core/__init__.py": "",
    "tests/__init__.py": "",
    "tests/unit_tests/__init__.py": "",
    "tests/unit_tests/test_ends.py": TESTS_OF_IT,
    "tests/unit_tests/test_imports.py": "import a_module_that_nobody_has\n",
}


def test_every_way_to_end(tmp_path, monkeypatch):
    """As with a GPU: without torch there are no stand-ins."""
    monkeypatch.setattr(upstream_tests, "num_gpus", lambda: 1)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = (tmp_path, "--ranks", 1, "--out", tmp_path / "out", "--test-timeout", 5)
    with launches_without_torch():
        done = run_here(upstream_tests.main, *words, "--files", "test_ends.py", "test_imports.py")
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    told = results.rows(tmp_path / "out" / "upstream_tests.json")
    assert told[0]["megatron"] == "0.19.0"
    rows = {row["test"]: row for row in told}
    assert {test: (row["off"]["outcome"], row["on"]["outcome"]) for test, row in rows.items()} == {
        "test_passes": ("passed", "passed"),
        "test_fails": ("failed", "failed"),
        "test_breaks": ("failed", "failed"),
        "test_only_without": ("passed", "failed"),
        "test_only_with": ("failed", "passed"),
        "test_evaluates": ("passed", "passed"),
        "test_dies": ("passed", "lost"),
        "test_between": ("passed", "passed"),
        "test_hangs": ("passed", "lost"),
        "test_skipped": ("skipped", "skipped"),
        "test_last": ("passed", "passed"),
        "(the file)": ("failed", "failed"),
    }
    assert [rows["test_evaluates"][hook]["fused"] for hook in ("off", "on")] == [0, 3]
    assert "the flag is on" in rows["test_only_without"]["on"]["message"]
    assert "ValueError: at the end" in rows["test_breaks"]["off"]["message"]
    assert rows["test_skipped"]["on"]["message"] == "Skipped: not here"
    assert "a_module_that_nobody_has" in rows["(the file)"]["off"]["message"]
    assert "4 differs" in done.stdout and "3 heads fused" in done.stdout
    assert "  test_hangs: passed, with the flag lost" in done.stdout


def test_ranks_that_disagree(tmp_path):
    """The worse outcome counts, with its message; heads are summed."""
    end = '", "materialised": 0, "stock": 0, "test": "a"}\n'
    passed = '{"outcome": "passed", "fused": 2, "message": "' + end
    failed = '{"outcome": "failed", "fused": 1, "message": "no' + end
    for pair in ((passed, failed), (failed, passed)):
        for rank, line in enumerate(pair):
            (tmp_path / f"rank{rank}.jsonl").write_text(line.replace("failed", "lost") + line)
        both = upstream_tests.outcomes(tmp_path)["a"]
        assert both == {"outcome": "failed", "message": "no", "fused": 3, "materialised": 0, "stock": 0}
