"""Names the phases of a forward and a backward, for profilers and for a recorder of times.

``with phase("logits"):`` is the range ``fused-ce logits`` while torch's profiler runs, or ``emit_nvtx`` under
Nsight Systems. Without them it does nothing: a range would take 5.6 us of the host even if nobody records it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

#: Name of a phase on the model's stream -> description. The phase of a collective is the wait for it.
PHASES = {
    "gather": "wait for the other ranks' hidden states (sequence parallelism)",
    "logits": "the GEMM that makes a chunk's logits, or E",
    "statistics": "row statistics; finalizing saved E",
    "merge": "wait for the other ranks' statistics; the losses",
    "grad-logits": "gradients of the logits; with recompute their GEMM too",
    "grad-hidden": "GEMM with the weight; row scales",
    "reduce": "wait for the sum of grad_hidden over the ranks",
    "grad-weight": "GEMM with the hidden states, summed over the chunks",
}

_NOTHING = nullcontext()
_recorder: Recorder | None = None


def phase(name: str) -> AbstractContextManager[object]:
    """Context for one of :data:`PHASES`. Where one opens inside another, the time counts for both."""
    if _recorder is not None:
        return _recorder.timed(name)
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(f"fused-ce {name}")
    return _NOTHING


class Recorder:
    """Context that records the time of every phase, in any thread; for tests and benchmarks.

    It uses events on the current stream, for which the host does not wait, and on a CPU the clock. It cannot
    be used while a CUDA graph is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> Recorder:
        global _recorder
        _recorder = self
        return self

    def __exit__(self, *exception: object) -> None:
        global _recorder
        _recorder = None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record one phase."""
        start = self._mark()
        yield
        self._ended.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self) -> list[tuple[str, float]]:
        """Name and time of each phase, in the order in which they ended. The host waits for the device."""
        if self._device.type != "cuda":
            return [(name, stop - start) for name, start, stop in self._ended]
        torch.cuda.synchronize(self._device)
        return [(name, start.elapsed_time(stop) / 1e3) for name, start, stop in self._ended]
