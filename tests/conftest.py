"""The same tests on a CPU (plain PyTorch rows, Triton's interpreter, gloo) and on GPUs (NCCL)."""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import torch

# Of torchrun's ranks, which need a GPU each.
if torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", 1)):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Before triton is imported anywhere.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):  # no Triton: the tests that need it say so
        import tests.support.interpreter  # noqa: F401
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest

from tests.support import rank_process

# Of tests/op/test_properties.py, over all of its properties; other tests name their own number.
hypothesis.settings.register_profile(
    "short", max_examples=300, derandomize=True, database=None, deadline=None
)
hypothesis.settings.register_profile(
    "long",
    max_examples=12_000,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


#: Folders of `make test-rest`; elsewhere a test says by its own marker that it belongs there.
REST = ("tests/tools/", "tests/plan/", "tests/project/")
#: Files of few tests that take long. Two processes begin with them, and end with the files of fewest tests:
#: none waits for the other's last file.
LONG = (
    *("tests/megatron/test_training_loop.py", "tests/parallel/test_modelopt.py"),
    *("tests/parallel/test_torchrun.py", "tests/project/test_packaging.py", "tests/test_house.py"),
)
#: Takes the GPU for itself, once other processes' tests have ended.
LAST = "tests/kernels/test_large_offsets.py"


def pytest_configure(config: pytest.Config) -> None:
    """Newer versions of xdist keep the order made below only so."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before -m takes its pick
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(REST):
            item.add_marker("rest")
    if hasattr(config, "workerinput"):  # of xdist
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (_place(item), -sizes[item.path], item.path))


def _place(item: pytest.Item) -> int:
    if item.nodeid.startswith(LAST) and torch.cuda.is_available():
        return 2
    return int(not item.nodeid.startswith(LONG))


@pytest.fixture(autouse=True)
def no_call_before() -> None:
    """No kind of call was seen: a test may change what a spec was made from."""
    rank_process.forget()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """With -v: how long each test took, as it ends; a run that is cut short has told it, too."""
    if report.when == "call" and report.outcome == "passed" and not hasattr(report, "wasxfail"):
        return "passed", ".", f"PASSED {report.duration:.2f} s"
    return None


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN: a result that reads what nobody wrote cannot pass."""
    # torch.use_deterministic_algorithms does the same, and imports the compiler: two seconds.
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")
