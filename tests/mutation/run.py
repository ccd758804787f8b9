"""Puts the faults of tests/mutation/faults.py in one by one and reports which of them the tests see.

    python -m tests.mutation.run --jobs 2
    python -m tests.mutation.run --only 'mask' --again

Each is tried in a copy of the tree under the system's temporary folder, never in this one, and each run of
pytest is a new process. Results go to build/mutation/faults.json after each trial; what has a result there
for the same file and tests is not tried again: an interrupted run goes on where it was. Before its first use
a string of tests has to pass on an unchanged copy: a test that fails or does not exist kills nothing.

killed    a mapped test failed
survived  all mapped tests passed
late      none failed and the time was up: either the fault makes the code hang, or the machine is slow
error     the mapped tests do not pass without the fault
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutation.faults import FAULTS, Fault
from tests.mutation.trial import ROOT, copy_tree, run_tests, write

RESULTS = ROOT / "build" / "mutation" / "faults.json"

#: Time limits in seconds: for all mapped tests of one fault, and of an unchanged tree.
LIMIT_S = 180.0
UNCHANGED_LIMIT_S = 600.0


class Trials:
    """Tries faults in copies of the tree, one for each job, and keeps the results in a file."""

    def __init__(self, folder: Path, jobs: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._commit = _commit()
        self._lock = threading.Lock()
        self._trees: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            copy_tree(folder / str(job))
            self._trees.put(folder / str(job))
        self.results: dict[str, dict[str, Any]] = {}
        self._unchanged: dict[str, str] = {}
        if RESULTS.exists():
            self.results = json.loads(RESULTS.read_text())

    def try_(self, fault: Fault) -> None:
        """Run the mapped tests with ``fault``, and write down what came of it."""
        tree = self._trees.get()
        try:
            result = self._outcome(tree, fault)
        finally:
            self._trees.put(tree)
        with self._lock:
            self.results[fault.name] = {
                "file": fault.file,
                "commit": self._commit,
                "digest": _digest(fault),
                **result,
            }
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(self.results, indent=1, ensure_ascii=False) + "\n")
            print(f"{result['outcome']:9} {result['seconds']:6.1f} s  {fault.name}", flush=True)

    def has_result(self, fault: Fault) -> bool:
        """Whether this fault of this file has been tried with these tests; an error is no result."""
        result = self.results.get(fault.name, {"outcome": "error"})
        return result["outcome"] != "error" and result.get("digest") == _digest(fault)

    def _outcome(self, tree: Path, fault: Fault) -> dict[str, Any]:
        seconds = 0.0
        for tests in fault.tests:
            words = self._fails_unchanged(tree, tests)
            if words:
                return {"outcome": "error", "seconds": seconds, "tests": tests, "said": words}
        unchanged = (tree / fault.file).read_text()
        write(tree, fault.file, unchanged.replace(fault.old, fault.new))
        try:
            for tests in fault.tests:
                run = run_tests(tree, tests, max(1.0, self._limit_s - seconds))
                seconds += run.seconds
                if run.outcome != "passed":
                    outcome = {"failed": "killed", "late": "late"}.get(run.outcome, "error")
                    return {
                        "outcome": outcome,
                        "seconds": round(seconds, 1),
                        "tests": tests,
                        "said": run.words,
                    }
        finally:
            write(tree, fault.file, unchanged)
        return {
            "outcome": "survived",
            "seconds": round(seconds, 1),
            "tests": " ; ".join(fault.tests),
        }

    def _fails_unchanged(self, tree: Path, tests: str) -> str:
        """Why these tests cannot kill anything; empty where they pass. Run once."""
        with self._lock:
            known = self._unchanged.get(tests)
        if known is None:
            run = run_tests(tree, tests, UNCHANGED_LIMIT_S)
            known = "" if run.outcome == "passed" else f"without the fault: {run.outcome}, {run.words}"
            print(f"unchanged {run.seconds:6.1f} s  {tests}: {run.words}", flush=True)
            with self._lock:
                self._unchanged[tests] = known
        return known


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _digest(fault: Fault) -> str:
    faulty = (ROOT / fault.file).read_text().replace(fault.old, fault.new)
    return hashlib.sha256("\0".join((faulty, *fault.tests)).encode()).hexdigest()[:16]


def table(results: dict[str, dict[str, Any]]) -> str:
    """What survived or went wrong, then the number of each outcome."""
    lines = []
    for name, result in results.items():
        if result["outcome"] != "killed":
            lines.append(f"{result['outcome']:9} {name}")
            lines.append(f"          {result['tests']}: {result.get('said', 'passed')}")
    outcomes = [result["outcome"] for result in results.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    lines.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="part of a name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="try what has a result already")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="time limit of one fault")
    parser.add_argument("--list", action="store_true", help="print the faults and try none")
    given = parser.parse_args(argv)
    chosen = [fault for fault in FAULTS if not given.only or any(word in fault.name for word in given.only)]
    if given.list:
        print("\n".join(fault.name for fault in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        trials = Trials(Path(folder), given.jobs, given.seconds)
        pending = [fault for fault in chosen if given.again or not trials.has_result(fault)]
        with ThreadPoolExecutor(given.jobs) as pool:
            for done in [pool.submit(trials.try_, fault) for fault in pending]:
                done.result()
    results = {fault.name: trials.results[fault.name] for fault in chosen}
    print(table(results))
    return int(any(result["outcome"] != "killed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
