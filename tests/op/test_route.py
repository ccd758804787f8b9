"""How far a reader walks: what of the package one warm plain call runs, forward and backward."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy

PACKAGE = Path(megatron_fused_ce.__file__).resolve().parent
OURS = (f"{PACKAGE}/", f"{PACKAGE.parent}/kernels/")


class Route(NamedTuple):
    """What a call has met."""

    files: int
    functions: int
    lines: int
    across: int  # calls from one file to another
    classes: int  # of which objects were built


#: At most, on Python 3.11; others count lines and comprehensions in other ways.
LIMITS = {
    "store": Route(files=20, functions=104, lines=530, across=211, classes=20),
    "grad_in_forward": Route(files=23, functions=122, lines=588, across=214, classes=25),
}


class Tracer:
    """Context manager: traces this thread, and those that start meanwhile."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, int]] = Counter()  # file, function, its line
        self.lines: set[tuple[str, int]] = set()
        self.classes: set[type] = set()
        self.across = 0

    def __enter__(self) -> Tracer:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    @property
    def route(self) -> Route:
        files = {file for file, *_ in self.calls}
        return Route(len(files), len(self.calls), len(self.lines), self.across, len(self.classes))

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_name in ("__init__", "<lambda>"):  # the latter: a NamedTuple's __new__
            own = "self" if code.co_name == "__init__" else "_cls"
            self._built(frame.f_locals.get(own))
        if not code.co_filename.startswith(OURS):
            return None
        self.calls[code.co_filename, getattr(code, "co_qualname", code.co_name), code.co_firstlineno] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(OURS):
            caller = caller.f_back
        self.across += caller is not None and caller.f_code.co_filename != code.co_filename
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def _built(self, made: Any) -> None:
        kind = made if isinstance(made, type) else type(made)
        if kind.__module__.startswith("megatron_fused_ce"):
            self.classes.add(kind)


def call_of(config: FusedCEConfig) -> Callable[[], None]:
    """A forward and its backward, of 128 tokens."""
    hidden = torch.randn(64, 2, 32, requires_grad=True)
    weight = torch.randn(500, 32, requires_grad=True)
    labels, upstream = torch.randint(500, (2, 64)), torch.ones(2, 64)
    weights = upstream if config.strategy == "grad_in_forward" else None

    def call() -> None:
        loss = fused_linear_cross_entropy(hidden, weight, labels, config=config, token_weights=weights)
        (loss * upstream).sum().backward()

    return call


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are those of Python 3.11")
@pytest.mark.parametrize("strategy", LIMITS)
def test_the_route_of_a_warm_call(strategy):
    """Four chunks, one rank, fp32 on a CPU; the second of two equal calls."""
    call = call_of(FusedCEConfig(strategy, chunk_tokens=32))
    call()
    with Tracer() as tracer:
        call()
    for (file, name, line), count in sorted(tracer.calls.items()):
        print(f"{count:4d}  {Path(file).relative_to(PACKAGE.parent)}:{line} {name}")
    print(tracer.route, *sorted(kind.__name__ for kind in tracer.classes))
    met = {Path(file).relative_to(PACKAGE.parent).as_posix() for file, *_ in tracer.calls}
    assert {f"megatron_fused_ce/{name}.py" for name in ("ops/cross_entropy", "head/loop")} < met
    for name, found, limit in zip(Route._fields, tracer.route, LIMITS[strategy], strict=True):
        assert found <= limit, f"{found} {name}"
