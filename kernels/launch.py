"""Calls of compiled Triton kernels, past Triton's binder.

``kernel[grid](...)`` binds and specialises every argument on every call. On the host of an H200 (triton
3.6) that is 21 us for seven arguments; a GEMM with three descriptors and twenty arguments costs over 100.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

#: Triton whose compiled kernels take all arguments of their source, constants too; last seen in 3.9.
CALLED_DIRECTLY_SINCE = (3, 6)


class Launch:
    """A kernel whose arguments are, in this order, descriptors, tensors, numbers and constants.

    Its compiled forms are found again by all that Triton specialises on: dtypes, constants, and which whole
    numbers are 1 or multiples of 16. They serve tensors that begin at multiples of 16 bytes; any others go
    through Triton.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        """``options``: num_warps and its like."""
        self._kernel = kernel
        self._options = options
        #: by the numbers themselves, which is quicker to look up
        self._by_numbers: dict[tuple[Any, ...], Any] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        descriptors: tuple[Any, ...] = (),
        **constants: Any,
    ) -> None:
        """Launch it on the current stream; ``constants`` in the order of the kernel's arguments."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        device = tensors[0].device
        key = (
            device,
            numbers,
            tuple([tensor.dtype for tensor in tensors]),
            tuple([(made.base.dtype, *made.block_shape) for made in descriptors]),
            tuple(constants.values()),
        )
        compiled = self._by_numbers.get(key)
        if compiled is None or addresses % 16 or _watched():
            self._through_triton(grid, tensors, numbers, descriptors, constants, key, addresses)
            return
        x, y, z = (*grid, 1, 1)[:3]
        compiled.run(
            *(x, y, z, torch._C._cuda_getCurrentRawStream(device.index)),
            *(compiled.function, compiled.packed_metadata, None, None, None),
            *(*descriptors, *tensors, *numbers, *constants.values()),
        )

    def _through_triton(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        descriptors: tuple[Any, ...],
        constants: dict[str, Any],
        key: tuple[Any, ...],
        addresses: int,
    ) -> None:
        """Launch it as Triton does, and remember the compiled kernel where it can be called directly."""
        made = self._kernel[grid](*descriptors, *tensors, *numbers, **constants, **self._options)
        if addresses % 16 or made is None or not _called_directly():
            return
        assert tuple(self._kernel.arg_names[-len(constants) :]) == tuple(constants)
        device, _, *others = key
        kind = (device, tuple(map(_specialised, numbers)), *others)
        if len(self._by_numbers) >= MAX_REMEMBERED:
            self._by_numbers.clear()
        self._by_numbers[key] = self._compiled.setdefault(kind, made)


#: Kinds of launch, and descriptors, that are remembered: as many lengths of dynamic batches.
MAX_REMEMBERED = 4096
_runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)


def _watched() -> bool:
    """Whether somebody wants to hear of launches, such as triton's profiler."""
    hooks = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return any([getattr(hook, "calls", hook) for hook in hooks])


def _specialised(number: int | float) -> int:
    """What Triton makes of a number's value: of a float's nothing."""
    if isinstance(number, float):
        return -1
    if number == 1:
        return 1
    return (16 if number % 16 == 0 else 0) + (32 if number >= 2**31 else 0)


def ceil_div(a: int, b: int) -> int:
    """As ``triton.cdiv``, which takes 5 us on the host: it serves kernels too."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """``n`` where it is one; as ``triton.next_power_of_2``."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=1)
def _called_directly() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= CALLED_DIRECTLY_SINCE


class DescriptorTemplates:
    """Tensor descriptors, checked once for each shape; the tensor is bound on every call."""

    def __init__(self, make: Any) -> None:
        """``make(tensor, block)`` gives a new one."""
        self._make = make
        self._templates: dict[tuple[Any, ...], Any] = {}

    def __call__(self, tensor: Tensor, block: tuple[int, int]) -> Any:
        """For tensors at multiples of 16 bytes."""
        key = tensor.shape, tensor.stride(), tensor.dtype, block
        template = self._templates.get(key)
        if template is None:
            made = self._make(tensor, list(block))
            if len(self._templates) >= MAX_REMEMBERED:
                self._templates.clear()
            self._templates[key] = type(made), {**vars(made), "base": None}
            return made
        kind, fields = template
        bound = object.__new__(kind)
        vars(bound).update(fields, base=tensor)
        return bound


@lru_cache(maxsize=16)
def num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
