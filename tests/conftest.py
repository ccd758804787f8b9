"""The same tests on a CPU (plain PyTorch rows, Triton's interpreter, gloo) and on GPUs (NCCL)."""

from __future__ import annotations

import contextlib
import os
import sys
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

# Of tests/op/test_properties.py, over all of its properties; other tests name their own number.
for name, number in (("short", 300), ("long", 12_000)):
    slow = [hypothesis.HealthCheck.too_slow] if name == "long" else []
    always = {"database": None, "deadline": None, "suppress_health_check": slow}
    hypothesis.settings.register_profile(name, max_examples=number, derandomize=name == "short", **always)
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
    sizes, on_gpus = Counter(item.path for item in items), torch.cuda.is_available()

    def place(item: pytest.Item) -> tuple[object, ...]:
        is_last, is_long = on_gpus and item.nodeid.startswith(LAST), item.nodeid.startswith(LONG)
        return is_last, not is_long, -sizes[item.path], item.path

    if hasattr(config, "workerinput"):  # of xdist
        items.sort(key=place)


@pytest.fixture(autouse=True)
def as_at_the_start():
    """No kind of call was seen: a test may change what a spec was made from. torch.empty gives NaN: a result
    that reads what nobody wrote cannot pass."""
    if agreement := sys.modules.get("megatron_fused_ce.ranks.agreement"):
        agreement.forget()
    if promise := sys.modules.get("megatron_fused_ce.head.promise"):
        promise.counts = promise.Counts()  # the benchmark takes one that was broken before for its own
    # torch.use_deterministic_algorithms does the same, and imports the compiler: two seconds.
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
