"""Times and bytes of the phases of the head's forward and backward (``--fused-ce-report``).

The loops over chunks enter a phase by ``Context.phases``. :data:`UNTIMED` is a no-op recorder.
:class:`PhaseTimes` records an event on the current stream before and after each phase and reads them later.
The host waits for the device only when times are read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

#: A forward without gradients is an evaluation.
PASSES = ("forward", "backward", "evaluation")

#: Phase -> its description. Timed on the current stream: of a collective only the wait for it counts.
PHASES = {
    "gather": "wait for the other ranks' hidden states (sequence parallelism)",
    "logits": "the logits or scaled-exp GEMM",
    "statistics": "row statistics; finalizing saved E",
    "merge": "wait for the other ranks' statistics; the losses",
    "grad-logits": "gradients of the logits; with recompute their GEMM too",
    "grad-hidden": "GEMM with the weight; row scales",
    "reduce": "wait for the sum of grad_hidden over the ranks",
    "grad-weight": "GEMM with the hidden states, summed over the chunks",
}


class Phases(Protocol):
    """Interface of a recorder."""

    def of_pass(self, name: str, device: torch.device) -> AbstractContextManager[None]:
        """Context of one whole pass, one of :data:`PASSES`."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Context of one of :data:`PHASES`, inside a pass. Phases do not nest."""

    def moved(self, name: str, num_bytes: int) -> None:
        """Count the bytes of started collectives, as :meth:`.VocabParallel.ring_bytes` gives them."""

    def saved(self, *tensors: Tensor | None) -> None:
        """Count tensors saved for the backward."""


class _Untimed:
    _nothing = nullcontext()

    def of_pass(self, name: str, device: torch.device) -> AbstractContextManager[None]:
        return self._nothing

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._nothing

    def moved(self, name: str, num_bytes: int) -> None:
        pass

    def saved(self, *tensors: Tensor | None) -> None:
        pass


UNTIMED: Phases = _Untimed()


@dataclass
class Tally:
    """Time and bytes of a pass or a phase since the last reset."""

    seconds: float = 0.0
    #: to other ranks
    moved_bytes: int = 0
    #: most bytes allocated at its end beyond those at the start of the pass; 0 on a CPU
    held_bytes: int = 0
    #: most bytes saved for one backward; forward only
    saved_bytes: int = 0


class _Clock(Protocol):
    """Two events on a device."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def ended(self) -> bool: ...

    def seconds(self) -> float:
        """Seconds between the events; waits for the second."""


class _HostClock:
    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._stop = time.perf_counter()

    def ended(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._stop - self._start


class _DeviceClock:
    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._start.record()

    def stop(self) -> None:
        self._stop.record()

    def ended(self) -> bool:
        return bool(self._stop.query())

    def seconds(self) -> float:
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3


class _Timed(NamedTuple):
    name: str
    clock: _Clock


class PhaseTimes:
    """Sums of time and bytes over all heads that share this recorder.

    ``<pass>`` and ``<pass>-<phase>`` name a :class:`Tally`. Time of a pass outside its phases counts for the
    pass alone. Passes inside a CUDA graph's capture are counted (:attr:`captured`), not timed: their replays
    run without the host.
    """

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self.captured = 0
        self._under_way: deque[_Timed] = deque()
        self._idle: list[_DeviceClock] = []
        self._pass = ""
        self._device = torch.device("cpu")
        self._allocated_before = 0

    @contextmanager
    def of_pass(self, name: str, device: torch.device) -> Iterator[None]:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured += 1
            yield
            return
        self._fold()
        self._pass, self._device = name, device
        self._allocated_before = self._allocated()
        try:
            with self._timed(name):
                yield
        finally:
            self._pass = ""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._timed(f"{self._pass}-{name}") if self._pass else nullcontext()

    def moved(self, name: str, num_bytes: int) -> None:
        if self._pass and num_bytes:
            self._tally(f"{self._pass}-{name}").moved_bytes += num_bytes
            self._tally(self._pass).moved_bytes += num_bytes

    def saved(self, *tensors: Tensor | None) -> None:
        if self._pass:
            tally = self._tally(self._pass)
            waiting = sum(tensor.nbytes for tensor in tensors if tensor is not None)
            tally.saved_bytes = max(tally.saved_bytes, waiting)

    def read(self) -> dict[str, Tally]:
        """All tallies, live objects. Waits for phases that still run."""
        self._fold(wait=True)
        return self._tallies

    def reset(self, name: str) -> None:
        """Reset this tally; phases that still run are read first."""
        self._fold(wait=True)
        self._tallies.pop(name, None)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        # After an exception there is no second event, and nothing is counted.
        clock: _Clock = _HostClock()
        if self._device.type == "cuda":
            clock = self._idle.pop() if self._idle else _DeviceClock()
        clock.start()
        yield
        clock.stop()
        self._under_way.append(_Timed(name, clock))
        held = self._allocated() - self._allocated_before
        for tally in {name, self._pass}:
            self._tally(tally).held_bytes = max(self._tally(tally).held_bytes, held)

    def _fold(self, wait: bool = False) -> None:
        while self._under_way and (wait or self._under_way[0].clock.ended()):
            name, clock = self._under_way.popleft()
            self._tally(name).seconds += clock.seconds()
            if isinstance(clock, _DeviceClock):
                self._idle.append(clock)

    def _tally(self, name: str) -> Tally:
        return self._tallies.setdefault(name, Tally())

    def _allocated(self) -> int:
        """Bytes allocated, read from the allocator on the host without a wait."""
        if self._device.type != "cuda":
            return 0
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"]["current"])
