"""Wgrad accumulators: they sum ``grad_weight`` over the chunks in fp32, whatever the weight's dtype.

A *wgrad accumulator* is opened once per backward, gets one GEMM per chunk and is closed once. A sum in bf16
would lose digits with every chunk (docs/math.md).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.head.promise import Verdict


class GradWeight:
    """The fp32 sum ``[V, H]`` of ``grad_weight`` over the chunks, allocated at the first.

    ``grad_in_forward`` fills it in the forward, and hands it to the :class:`Accumulator` of its backward.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.sum: Tensor | None = None

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add ``grad_logits.T @ hidden`` of one chunk; ``[C, V]`` and ``[C, H]`` of one dtype."""
        first = self.sum is None
        if self.sum is None:
            self.sum = torch.empty(self._weight.shape, dtype=torch.float32, device=self._weight.device)
        accumulate_(self.sum, grad_logits, hidden, overwrite=first)

    def total(self, inv_scale: Tensor | None) -> Tensor:
        """Return the sum times ``inv_scale``; zeros if no chunk was added."""
        if self.sum is None:
            return torch.zeros(self._weight.shape, dtype=torch.float32, device=self._weight.device)
        return self.sum if inv_scale is None else self.sum.mul_(inv_scale)


class Accumulator(GradWeight):
    """Base class of the wgrad accumulator of a backward, whose result autograd gets."""

    def add_total(self, total: Tensor, scale: Tensor, verdict: Verdict) -> bool:
        """Add ``scale * total``, fp32 ``[]`` times fp32 ``[V, H]``, if the promise was kept; return whether.

        The host waits for the verdict. If the kernel that adds can read the verdict on the device, it is
        launched first. ``total`` may be overwritten, whatever the verdict.
        """
        raise NotImplementedError

    def close(self, inv_scale: Tensor | None) -> Tensor | None:
        """Return the gradient that autograd gets; ``inv_scale`` undoes a scale of all that was added."""
        raise NotImplementedError

    def spoil(self) -> None:
        """Make the gradient NaN, whatever is added before or after."""
        raise NotImplementedError

    def abandon(self) -> None:
        """After a failed backward: leave no partial sum that could be taken for the whole."""


#: Opens an accumulator: (weight, number of GEMMs, whether ``close`` will get a scale). For the plan of memory
#: it may have an attribute ``kind``, a name of :data:`.WGRAD_ACCUMULATORS`; without it that is "returned".
OpenGradWeight = Callable[[Tensor, int, bool], Accumulator]


class ReturnedGradWeight(Accumulator):
    """Returns ``grad_weight`` to autograd in the weight's dtype.

    A single GEMM without a scale writes that dtype itself, without the fp32 sum of ``4 * V * H`` bytes.
    """

    def __init__(self, weight: Tensor, num_gemms: int, scaled: bool) -> None:
        super().__init__(weight)
        self._direct = num_gemms == 1 and not scaled
        self._grad: Tensor | None = None
        self._spoilt = False

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self._direct:
            self._grad = torch.mm(grad_logits.t(), hidden)
        else:
            super().add(grad_logits, hidden)

    def add_total(self, total: Tensor, scale: Tensor, verdict: Verdict) -> bool:
        dtype = self._weight.dtype
        if total.is_cuda and dtype != torch.float32:
            from megatron_fused_ce.kernels import scaled_exp_rows

            grad = scaled_exp_rows.scaled_copy(total, scale, dtype)
        else:
            grad = total.mul_(scale)
        if verdict.kept:
            self._grad = grad
        return verdict.kept

    def close(self, inv_scale: Tensor | None) -> Tensor | None:
        grad = self.total(inv_scale) if self._grad is None else self._grad
        grad = grad.to(self._weight.dtype)
        return grad.fill_(torch.nan) if self._spoilt else grad

    def spoil(self) -> None:
        self._spoilt = True


class InPlaceGradWeight(Accumulator):
    """Adds ``grad_weight`` into an existing buffer, such as Megatron's ``main_grad``.

    Each chunk is added to an fp32 buffer in place. For another dtype, or with a scale to undo, chunks are
    summed in fp32 first (``4 * V * H`` bytes), and the sum is added once at the end.

    A backward that fails leaves the buffer as it was. If some chunk was added already, it leaves NaN, which
    nobody takes for a gradient.
    """

    def __init__(
        self,
        buffer: Tensor,  # [V, H]
        scaled: bool,
        returned: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(buffer)
        self._buffer, self._returned = buffer, returned
        self._in_place = buffer.dtype == torch.float32 and not scaled
        self._touched = False

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self._in_place:
            self._touched = True
            accumulate_(self._buffer, grad_logits, hidden)
        else:
            super().add(grad_logits, hidden)

    def add_total(self, total: Tensor, scale: Tensor, verdict: Verdict) -> bool:
        buffer = self._buffer
        if total.is_cuda and buffer.dtype == torch.float32 and buffer.is_contiguous():
            from megatron_fused_ce.kernels import scaled_exp_rows

            self._touched = True  # until the verdict is known
            scaled_exp_rows.add_scaled_(buffer, total, scale, verdict.flag)
            self._touched = verdict.kept
            return self._touched
        if not verdict.kept:
            return False
        self._touched = True
        if buffer.dtype == torch.float32:
            buffer.addcmul_(total, scale)
        else:
            buffer.add_(total.mul_(scale))
        return True

    def close(self, inv_scale: Tensor | None) -> Tensor | None:
        if self.sum is not None:
            self._touched = True
            self._buffer.add_(self.total(inv_scale))
        return self._returned()

    def spoil(self) -> None:
        self._touched = True
        self._buffer.fill_(torch.nan)

    def abandon(self) -> None:
        if self._touched:
            self.spoil()


def accumulate_(
    total: Tensor,  # [V, H] fp32
    grad_logits: Tensor,  # [C, V]
    hidden: Tensor,  # [C, H]
    overwrite: bool = False,
) -> None:
    """``total += grad_logits.T @ hidden`` in fp32, in place (``=`` with ``overwrite``)."""
    if grad_logits.dtype == torch.float32:
        total.addmm_(grad_logits.t(), hidden, beta=0 if overwrite else 1)
        return
    gemm = mixed_gemm() if total.is_cuda else _upcast_gemm
    gemm(total, grad_logits, hidden, overwrite)


@lru_cache(maxsize=1)
def mixed_gemm() -> Callable[[Tensor, Tensor, Tensor, bool], None]:
    """Choose the GEMM that adds low-precision operands into an fp32 sum: the first that is installed.

    They are torch's GEMM with fp32 output (from 2.8 on), apex's kernel, and a GEMM of upcast operands, which
    needs memory for fp32 copies, slice by slice.
    """
    if hasattr(torch.ops.aten.addmm, "dtype_out"):
        return _torch_gemm
    with suppress(ImportError):
        from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32

        return partial(_apex_gemm, wgrad_gemm_accum_fp32)
    return _upcast_gemm


def _torch_gemm(total: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    beta, fp32 = 0 if overwrite else 1, torch.float32
    torch.addmm(total, grad_logits.t(), hidden, out_dtype=fp32, beta=beta, out=total)  # type: ignore[call-overload]


def _apex_gemm(gemm: Any, total: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    if overwrite:
        total.zero_()
    gemm(hidden.contiguous(), grad_logits.contiguous(), total)


#: Rows of ``total`` per GEMM of upcast operands.
UPCAST_ROWS = 8192


def _upcast_gemm(total: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    wide = hidden.float()
    for start in range(0, total.shape[0], UPCAST_ROWS):
        rows = slice(start, start + UPCAST_ROWS)
        total[rows].addmm_(grad_logits[:, rows].t().float(), wide, beta=0 if overwrite else 1)
