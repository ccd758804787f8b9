"""A few numbers on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copies a small integer tensor to the host behind the work that the current stream holds now.

    On a GPU by a copy into pinned memory and an event: whoever reads it waits for that event, not for work
    launched later.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[int]:
        """The numbers. The host waits until the device has made them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers
