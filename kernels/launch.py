"""Calls of compiled Triton kernels, past Triton's binder.

``kernel[grid](...)`` binds and specialises every argument on every call, which takes the host longer than
the launch itself, and the more the more arguments there are.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import or_
from threading import Lock
from typing import Any

import torch
import triton
from torch import Tensor

#: First and last Triton seen whose compiled kernels take all arguments of their source, constants too.
CALLED_DIRECTLY = (3, 6), (3, 9)


class Launch:
    """A kernel whose arguments are, in this order, descriptors, tensors, numbers and constants."""

    def __init__(self, kernel: Any, **options: int) -> None:
        """``options``: num_warps and its like.

        A multiply and an add are fused into one instruction, on which the epilogues count: up to triton 3.9
        by default, after it only where asked for.
        """
        self.kernel = kernel
        self.options = {"enable_fp_fusion": True, **options}
        self._bound: dict[tuple[Any, ...], Bound] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        descriptors: tuple[Any, ...] = (),
        **constants: Any,
    ) -> None:
        """Launch it on the current stream; ``constants`` in the order of the kernel's arguments."""
        key = grid, numbers, tuple(constants.values())
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= MAX_REMEMBERED:
                self._bound.clear()
            bound = self._bound[key] = self.bind(grid, numbers, **constants)
        bound(tensors, descriptors)

    def bind(self, grid: tuple[int, ...], numbers: tuple[int | float, ...], **constants: Any) -> Bound:
        """All but the tensors, for callers that remember it."""
        return Bound(self, grid, numbers, constants)


class Bound:
    """A launch that lacks its tensors.

    Its compiled forms are found again by the device and the dtypes. They serve tensors that begin at
    multiples of 16 bytes; any others go through Triton.
    """

    def __init__(
        self,
        launch: Launch,
        grid: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
    ) -> None:
        self._launch = launch
        self._grid = grid
        self._xyz = (*grid, 1, 1)[:3]
        self._numbers = numbers
        self._constants = constants
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, tensors: tuple[Tensor, ...], descriptors: tuple[Any, ...] = ()) -> None:
        """Launch it on the current stream. All tensors are on one device."""
        index = tensors[0].get_device()
        key = index, *[tensor.dtype for tensor in tensors], *[made.base.dtype for made in descriptors]
        compiled = self._compiled.get(key)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if compiled is None or _unaligned(addresses) or _watched():
            self._through_triton(tensors, descriptors, key, addresses)
            return
        run, before, after = compiled
        # Addresses as numbers: of a tensor Triton would ask the driver each time whether a GPU can read it.
        run(*self._xyz, _raw_stream(index), *before, *descriptors, *addresses, *after)

    def _through_triton(
        self,
        tensors: tuple[Tensor, ...],
        descriptors: tuple[Any, ...],
        key: tuple[Any, ...],
        addresses: list[int],
    ) -> None:
        """Launch it as Triton does, and remember the compiled kernel where it can be called directly."""
        kernel, constants = self._launch.kernel, self._constants
        options = self._launch.options
        with _one_thread:
            made = kernel[self._grid](*descriptors, *tensors, *self._numbers, **constants, **options)
        if _unaligned(addresses) or made is None or not _called_directly():
            return
        assert tuple(kernel.arg_names[-len(constants) :]) == tuple(constants)
        before = made.function, made.packed_metadata, None, None, None
        self._compiled[key] = made.run, before, (*self._numbers, *constants.values())


#: Triton loads a kernel at its first launch, and lets a second thread launch what is half loaded (3.9).
_one_thread = Lock()
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _unaligned(addresses: list[int]) -> int:
    return reduce(or_, addresses) & 15


#: Kinds of launch, and descriptors, that are remembered: as many lengths of dynamic batches.
MAX_REMEMBERED = 4096
_runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)


def _watched() -> bool:
    """Whether somebody wants to hear of launches, such as triton's profiler."""
    hooks = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return any([getattr(hook, "calls", hook) for hook in hooks])


def ceil_div(a: int, b: int) -> int:
    """As ``triton.cdiv``, which takes 5 us on the host: it serves kernels too."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """``n`` where it is one; as ``triton.next_power_of_2``."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=1)
def _called_directly() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return CALLED_DIRECTLY[0] <= version <= CALLED_DIRECTLY[1]


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
