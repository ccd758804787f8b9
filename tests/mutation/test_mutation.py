"""The list of faults fits today's sources, and the program that tries them tells outcomes apart."""

from __future__ import annotations

import ast
import shlex

import pytest

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
    for fault in FAULTS:
        assert fault.tests
        for line in fault.tests:
            assert (ROOT / shlex.split(line)[0].partition("::")[0]).is_file(), line


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
