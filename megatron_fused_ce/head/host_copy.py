"""Sends a few numbers from the device to the host, which waits for these alone."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Starts to copy a small integer tensor to the host, behind the work that is on the current stream now.

    On a GPU the copy goes to pinned memory, and an event marks its end. :meth:`read` waits for that event,
    not for work launched later.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[int]:
        """Wait until the device has made the numbers, and return them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers
