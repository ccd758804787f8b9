"""How far a reader walks: what of the package one warm plain call runs, forward and backward."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy

ROOT = Path(megatron_fused_ce.__file__).resolve().parents[1]
OURS = (f"{ROOT}/megatron_fused_ce/", f"{ROOT}/kernels/")
#: Files, functions and lines that a call meets, at most, on Python 3.11; others count in other ways.
LIMITS = {"store": (20, 104, 530), "grad_in_forward": (23, 122, 588)}


class Tracer:
    """Context manager: traces this thread, and those that start meanwhile."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, int]] = Counter()  # file, function, its line
        self.lines: set[tuple[str, int]] = set()

    def __enter__(self) -> Tracer:
        self.before = sys.gettrace()  # of a measurement of coverage
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self.before)
        threading.settrace(self.before)  # type: ignore[arg-type]

    def _trace(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        if event == "call":
            self.calls[code.co_filename, getattr(code, "co_qualname", code.co_name), code.co_firstlineno] += 1
        elif event == "line":
            self.lines.add((code.co_filename, frame.f_lineno))
        return self._trace


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are those of Python 3.11")
@pytest.mark.parametrize("strategy", LIMITS)
def test_the_route_of_a_warm_call(strategy):
    """128 tokens, four chunks, one rank, fp32 on a CPU; the second of two equal calls."""
    hidden, weight = torch.randn(64, 2, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True)
    labels, upstream = torch.randint(500, (2, 64)), torch.ones(2, 64)
    more = {"token_weights": upstream if strategy == "grad_in_forward" else None}
    more["config"] = FusedCEConfig(strategy, chunk_tokens=32)
    for _ in range(2):
        with Tracer() as tracer:
            loss = fused_linear_cross_entropy(hidden, weight, labels, **more)
            (loss * upstream).sum().backward()
    for (file, name, line), count in sorted(tracer.calls.items()):
        print(f"{count:4d}  {Path(file).relative_to(ROOT)}:{line} {name}")
    met = {Path(file).relative_to(ROOT).as_posix() for file, *_ in tracer.calls}
    assert {f"megatron_fused_ce/{name}.py" for name in ("ops/cross_entropy", "head/loop")} < met
    found = len(met), len(tracer.calls), len(tracer.lines)
    assert all(one <= limit for one, limit in zip(found, LIMITS[strategy], strict=True)), found
