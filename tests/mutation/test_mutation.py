"""The list of faults fits today's sources, and the program that tries them tells outcomes apart."""

from __future__ import annotations

import ast
import shlex

import pytest

from tests.mutation import areas, mutants
from tests.mutation.faults import FAULTS, Fault
from tests.mutation.trial import ROOT, run_tests, write


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file(fault: Fault):
    """Where it does not any more, write the same fault for the new code."""
    source = (ROOT / fault.file).read_text()
    assert source.count(fault.old) == 1, f"{fault.old!r} occurs {source.count(fault.old)} times"
    faulty = source.replace(fault.old, fault.new)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(source))


def test_faults_have_names_of_their_own_and_there_are_sixty():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_mapped_tests_are_there():
    of_mutants = [tests for area in areas.AREAS for tests in area.files.values()]
    for tests in (*of_mutants, *(fault.tests for fault in FAULTS)):
        assert tests
        for line in tests:
            assert (ROOT / shlex.split(line)[0].partition("::")[0]).is_file(), line


def test_there_are_150_mutants():
    assert len({(change.file, change.text) for change in mutants.draw(areas.AREAS)}) == 150


SOURCE = '''
"""Not this: 1 < 2."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import not_this


@decorator(maxsize=1)
def function(a: int = 3, *b: "1 < 2"):
    assert a < 1
    if a <= 1 and not b:
        call(a, b)
    a += 2
    raise ValueError(f"not this: {a + 1}")
'''

EDITED = {
    "def function(a: int = 4, *b:",
    "def function(a: int = 2, *b:",
    "if (not (a <= 1 and not b)):",
    "if a < 1 and not b:",
    "if a <= 2 and not b:",
    "if a <= 0 and not b:",
    "if a <= 1 or not b:",
    "call(b, a)",
    "pass  # call",
    "pass  # a += 2",
    "a += 3",
    "a += 1",
    "pass  # raise",
}


def test_what_is_edited():
    lines = set(SOURCE.splitlines())
    edited = []
    for edit in mutants.edits(SOURCE):
        text = SOURCE[: edit.start] + edit.new + SOURCE[edit.stop :]
        (line,) = set(text.splitlines()) - lines
        left_out = SOURCE[edit.start : edit.stop].split("(")[0].split(" Value")[0]
        edited.append(f"pass  # {left_out}" if line.strip() == "pass" else line.strip())
    assert {line if line[0] != "d" else line.split(' "')[0] for line in edited} == EDITED
    assert len(edited) == len(EDITED)


TEST = """
import time, pytest, module

def test_it():
    assert module.VALUE == 1

def test_skipped():
    pytest.skip()

def test_that_hangs():
    time.sleep(600)
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST)
    write(tmp_path, "module.py", "VALUE = 1")
    return tmp_path


@pytest.mark.rest
def test_passed_and_failed(tree):
    """Of the same size in the same second: Python tells an old .pyc by these two."""
    assert run_tests(tree, "test_it.py::test_it", limit_s=300).outcome == "passed"
    write(tree, "module.py", "VALUE = 2")
    run = run_tests(tree, "test_it.py::test_it", limit_s=300)
    assert run.outcome == "failed" and "test_it.py::test_it" in run.words


def test_a_test_that_is_skipped_proves_nothing(tree):
    assert run_tests(tree, "test_it.py -k 'skipped and not hangs'", limit_s=300).outcome == "nothing"


@pytest.mark.rest
def test_a_test_that_hangs_is_ended(tree):
    assert run_tests(tree, "test_it.py -k hangs", limit_s=3).outcome == "late"
