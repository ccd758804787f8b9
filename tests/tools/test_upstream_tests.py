"""scripts/dev/upstream_tests.py on a checkout of a few files: every way a test can end, off and on."""

from __future__ import annotations

import json

import pytest

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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    files = {
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 0\n",
        "megatron/core/__init__.py": "",
        "megatron/core/utils.py": "",
        "tests/__init__.py": "",
        "tests/unit_tests/__init__.py": "",
        "tests/unit_tests/test_ends.py": TESTS_OF_IT,
        "tests/unit_tests/test_imports.py": "import a_module_that_nobody_has\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(*words):
    with launches_without_torch():
        return run_here(upstream_tests.main, *words)


def test_every_way_to_end(checkout, tmp_path):
    """And a second call, which finds everything done."""
    files = ("test_ends.py", "test_imports.py")
    words = ("--megatron", checkout, "--ranks", 1, "--out", tmp_path / "out", "--jobs", 4)
    words += ("--test-timeout", 4, "--files", *files)
    done = run(*words)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    told = results.rows(tmp_path / "out" / "upstream_tests.json")
    rows = {(row["file"], row["test"]): row for row in told}
    verdicts = {test: row["verdict"] for (file, test), row in rows.items() if file == files[0]}
    assert verdicts == {
        "test_passes": "passed",
        "test_fails": "failed in both",
        "test_breaks": "failed in both",
        "test_only_without": "differs",
        "test_only_with": "differs",
        "test_evaluates": "passed",
        "test_dies": "differs",
        "test_between": "passed",
        "test_hangs": "differs",
        "test_skipped": "skipped",
        "test_last": "passed",
    }
    of_file = {test: row for (file, test), row in rows.items() if file == files[0]}
    assert of_file["test_evaluates"]["on"]["fused"] == 3
    assert of_file["test_evaluates"]["off"]["fused"] == 0
    assert "the flag is on" in of_file["test_only_without"]["on"]["message"]
    assert "teardown: ValueError: at the end" in of_file["test_breaks"]["off"]["message"]
    assert of_file["test_hangs"]["on"]["outcome"] == "hung"
    assert of_file["test_dies"]["on"]["outcome"] == "died"
    lost = rows[files[1], "(the file)"]
    assert lost["verdict"] == "not importable in both"
    assert "a_module_that_nobody_has" in lost["off"]["message"]
    assert told[0]["incomplete"] == [] and told[0]["megatron"] == "0.19.0"
    page = (tmp_path / "out" / "upstream_tests.md").read_text()
    assert page in done.stdout and upstream_tests.page_of([tmp_path / "out" / "upstream_tests.json"]) == page
    counts = next(line for line in page.splitlines() if line.startswith("| test_ends.py |"))
    assert counts.endswith("| 1 | 3 |  |"), "one test reached the head, three times"
    again = run(*words)
    assert again.returncode == 1
    assert results.rows(tmp_path / "out" / "upstream_tests.json") == told


def test_what_time_did_not_allow_is_not_counted(checkout, tmp_path):
    words = ("--megatron", checkout, "--ranks", 1, "--out", tmp_path, "--time-limit", 0.001)
    # By torchrun itself, which is not done before the first look at it.
    done = run_here(upstream_tests.main, *words, "--files", "test_ends.py")
    assert done.returncode == 0 and "Not done within the time limit: test_ends.py" in done.stdout


def written(path, incomplete=(), **tests):
    """A file of results of before the schema: by test, its outcomes without and with the flag."""
    outcomes = {
        name: [vars(upstream_tests.Outcome(one, f"call: {name}" * (one == "failed"))) for one in pair]
        for name, pair in tests.items()
    }
    rows = [
        {"file": "a.py", "test": name, "ranks": 2, "off": off, "on": on, "verdict": ""}
        for name, (off, on) in outcomes.items()
    ]
    told = dict.fromkeys(upstream_tests.SHOWN, "x") | {"commit": path.stem}
    path.write_text(json.dumps(told | {"incomplete": list(incomplete), "tests": rows}))
    return path


def test_a_page_joins_results(tmp_path):
    """The last run of a test counts; failures without the flag are told by their words."""
    first = written(tmp_path / "1.json", x=("passed", "failed"), y=("failed", "failed"))
    second = written(tmp_path / "2.json", ["b.py"], x=("passed", "passed"), z=("skipped", "skipped"))
    page = upstream_tests.page_of([first, second])
    assert page.startswith("commit 1 and 2, Megatron-LM x, device x,")
    assert "| a.py | 2 | 3 | 1 | 1 | 1 |  |  |  |" in page
    assert "Different with the flag: 0" in page
    assert "Fail without the flag too: 1" in page and "| 1 | y |" in page
    assert "Not done within the time limit: b.py." in page


def test_ranks_that_disagree():
    """The worse outcome counts, with its message; heads are summed."""
    passed = upstream_tests.Outcome("passed", fused=2)
    failed = upstream_tests.Outcome("failed", "call: no", fused=1)
    for pair in ((passed, failed), (failed, passed)):
        both = upstream_tests._over_ranks(*pair)
        assert (both.outcome, both.message, both.fused) == ("failed", "call: no", 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--megatron", "nowhere"), "is no checkout of Megatron-LM"),
        (("--files", "test_none.py"), "no tests/unit_tests/test_none.py in"),
        (("--ranks", "0"), "expected a whole number from 1"),
    ],
)
def test_mistakes(words, told, checkout, capsys):
    status = upstream_tests.main(["--megatron", str(checkout), "--files", "test_ends.py", *words])
    assert status == 2 and told in capsys.readouterr().err
