"""The op's arguments under ``torch.autocast``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to autocast's dtype, which is on for the device of ``hidden``.

    The weight is cast as in ``F.linear``: one copy for all calls inside the outermost context.
    """
    dtype = torch.get_autocast_dtype(hidden.device.type)
    cached = _cached(weight, dtype)
    return hidden.to(dtype), weight.to(dtype) if cached is None else cached


def off(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off: the call's tensors are cast already, and its sums are fp32."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _cached(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The weight's copy in autocast's own cache, created if needed; None if autocast does not cache it.

    Only autograd gives access to it: a GEMM of no rows saves it for its backward. A cache of this package
    would have to know when the context ends, and would miss writes through ``.data``.
    """
    if (
        not torch.is_autocast_cache_enabled()
        or type(weight) not in (Tensor, torch.nn.Parameter)
        or weight.dtype != torch.float32
        or weight.dim() != 2
        or not (weight.requires_grad and weight.is_leaf)
        or weight.is_inference()
    ):
        return None
    with torch.inference_mode(False), torch.enable_grad():
        no_rows = weight.new_empty(0, weight.shape[1], dtype=dtype).requires_grad_()
        transposed = getattr(F.linear(no_rows, weight).grad_fn, "_saved_mat2", None)
        if transposed is None or not transposed.requires_grad:  # cached under no_grad
            return None
        copy: Tensor = transposed.t()
        return copy if copy.dtype == dtype and copy.shape == weight.shape else None
