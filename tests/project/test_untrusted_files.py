"""Files that others wrote: a pickle that would run something is refused in one line, and runs nothing.

tests/test_house.py keeps every call that could run it out of the source; here the readers get one.
tests/tools/test_plan_command.py does the same with launch scripts.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fused_ce.scripts.bench import __main__ as bench
from megatron_fused_ce.scripts.bench import report as benchmark_report
from megatron_fused_ce.scripts.lib import results

ROOT = Path(__file__).resolve().parents[2]


class MakesAFolder:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self):
        return os.mkdir, (str(self.trap),)


@pytest.fixture
def trap(tmp_path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def snapshot(tmp_path, trap) -> Path:
    """As torch's allocator writes one, if it were evil; it does run where it is unpickled."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [MakesAFolder(trap)], "device_traces": [[]]}))
    subprocess.run([sys.executable, "-m", "pickle", str(path)], check=True, capture_output=True, cwd=tmp_path)
    assert trap.is_dir()
    trap.rmdir()
    return path


READERS = {
    "memory": "-m megatron_fused_ce memory --draw {0}",
    "compare": "-m megatron_fused_ce compare {0} {0} --out {1}",
    "compare, TensorBoard folders": "-m megatron_fused_ce compare {2} {2} --out {1}",
    "plan of a log": "-m megatron_fused_ce plan --gpu h100-80gb --from-log {0}",
    "plan of a launch script": "-m megatron_fused_ce plan --from-launch {0}",
    "benchmark": "-m scripts.bench --render {0}",
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pickle_is_refused_and_never_run(snapshot, trap, tmp_path, reader):
    events = tmp_path / "runs"
    events.mkdir()
    shutil.copy(snapshot, events / "events.out.tfevents.1.x")
    words = READERS[reader].format(snapshot, tmp_path / "out", events).split()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert not trap.exists()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"variant": "store"}]'])
def test_json_of_something_else_is_refused(tmp_path, content):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{file} cannot be read as a result"):
        results.rows(file, benchmark_report.KEYS)
    assert bench.main(["--render", str(file)]) == 2
    assert not file.with_suffix(".md").exists()
