"""A stand-in for Megatron's batch-invariant mode on a CPU: replaced in the same way, not the same numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, so that no sum depends on other rows; with roundings of its own, which tell it apart."""
    made = a.new_zeros((len(a), b.shape[1]), dtype=torch.float32)
    for k in range(a.shape[1]):
        made = (made + a[:, k, None].float() * b[k].float()).to(torch.float16).float()
    return made.to(a.dtype)


def _log_softmax(z: Tensor, dim: int, half_to_float: bool) -> Tensor:
    assert dim in (-1, z.dim() - 1)
    z = z.contiguous()
    shifted = (z - z.amax(-1, keepdim=True)).float()
    sums, size = shifted.exp(), 1 << (z.shape[-1] - 1).bit_length()
    sums = torch.nn.functional.pad(sums, (0, size - z.shape[-1]))
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return (shifted - sums.log()).to(z.dtype)


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Functional ``aten::mm`` and ``aten::_log_softmax`` alone, as Megatron's mode has it."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it overrides
        library.impl("mm", _mm, "CPU")
        library.impl("_log_softmax", _log_softmax, "CPU")
    try:
        yield
    finally:
        library._destroy()
