"""Where ``grad_weight`` ends: accumulated over the chunks in fp32, whatever the weight's dtype.

A *wgrad accumulator* is opened per backward, takes one product per chunk and is closed once. Adding in bf16
instead loses precision with the number of chunks (1.7e-3 with 1, 9.4e-3 with 64; docs/math.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fused_ce import grad_guard


class GradWeight(Protocol):
    """A wgrad accumulator."""

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add ``grad_logits.T @ hidden`` of one chunk: ``[C, V]`` and ``[C, H]``, one dtype."""

    def add_total(self, total: Tensor, scale: Tensor) -> None:
        """Add ``scale * total``: fp32 ``[V, H]``, which is used up, and fp32 ``[]``."""

    def close(self, inv_scale: Tensor | None) -> Tensor | None:
        """What autograd gets for the weight. ``inv_scale`` undoes a scale on all that was added."""

    def abandon(self) -> None:
        """The backward has failed and autograd gets nothing: no part of a sum may pass for the whole."""


#: Opens a wgrad accumulator for a weight and a number of chunks, with or without a scale to undo.
OpenGradWeight = Callable[[Tensor, int, bool], GradWeight]


class OpenedAccumulators:
    """An :data:`OpenGradWeight` that remembers what it opened, to abandon it all."""

    def __init__(self, open_grad_weight: OpenGradWeight) -> None:
        self._open = open_grad_weight
        self._opened: list[GradWeight] = []

    def __call__(self, weight: Tensor, num_chunks: int, scaled: bool) -> GradWeight:
        self._opened.append(self._open(weight, num_chunks, scaled))
        return self._opened[-1]

    def abandon(self) -> None:
        for accumulator in self._opened:
            accumulator.abandon()


def kind_of(open_grad_weight: OpenGradWeight) -> str:
    """Which of ``planner.WGRAD_ACCUMULATORS`` this opens, for plans of memory: its attribute ``kind``."""
    return str(getattr(open_grad_weight, "kind", "returned"))


class HeldGradWeight:
    """Sums the chunks in an fp32 buffer ``[V, H]``, made by the first.

    What ``grad_in_forward`` holds until a wgrad accumulator is opened, and what the wgrad accumulators
    below sum in where they cannot take a chunk in place.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.sum: Tensor | None = None

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add one chunk, as :meth:`GradWeight.add`."""
        first = self.sum is None
        if self.sum is None:
            self.sum = torch.empty(self._weight.shape, dtype=torch.float32, device=self._weight.device)
        accumulate_(self.sum, grad_logits, hidden, overwrite=first)

    def total(self, inv_scale: Tensor | None) -> Tensor:
        """The sum, zeros without a chunk, with a scale on all of it undone."""
        if self.sum is None:
            return torch.zeros(self._weight.shape, dtype=torch.float32, device=self._weight.device)
        return self.sum if inv_scale is None else self.sum.mul_(inv_scale)


class ReturnedGradWeight:
    """Returns ``grad_weight`` to autograd in the weight's dtype.

    Accumulates in an fp32 buffer of ``4 * V * H`` bytes; a single unscaled chunk needs none.
    """

    def __init__(self, weight: Tensor, num_chunks: int, scaled: bool) -> None:
        self._dtype = weight.dtype
        self._direct = num_chunks == 1 and not scaled
        self._product: Tensor | None = None
        self._held = HeldGradWeight(weight)

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self._direct:
            self._product = torch.mm(grad_logits.t(), hidden)
        else:
            self._held.add(grad_logits, hidden)

    def add_total(self, total: Tensor, scale: Tensor) -> None:
        if total.is_cuda and self._dtype != torch.float32:
            from megatron_fused_ce.kernels import exp_rows

            self._product = exp_rows.scaled_copy(total, scale, self._dtype)
        else:
            self._product = total.mul_(scale)

    def close(self, inv_scale: Tensor | None) -> Tensor | None:
        product = self._product
        return (self._held.total(inv_scale) if product is None else product).to(self._dtype)

    def abandon(self) -> None:
        """Nobody has seen the sum."""


class InPlaceGradWeight:
    """Adds into a gradient buffer that exists already, such as Megatron's ``main_grad``.

    An fp32 buffer takes every chunk in place. Into any other dtype, or with a scale to undo, the
    chunks are summed in fp32 first (``4 * V * H`` bytes) and added once. Nothing is added before all
    of a backward's products have been issued, or, in place, chunk by chunk.

    A backward that fails leaves the buffer as it was or, where something was added already, full of NaN,
    which stops the next optimizer step unless it is zeroed before (:func:`.grad_guard.poison`).
    """

    def __init__(
        self,
        buffer: Tensor,  # [V, H]
        num_chunks: int,
        scaled: bool,
        returned: Callable[[], Tensor | None],
    ) -> None:
        self._buffer = buffer
        self._returned = returned
        self._held = HeldGradWeight(buffer)
        self._in_place = buffer.dtype == torch.float32 and not scaled
        self._touched = False

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self._in_place:
            self._touched = True
            accumulate_(self._buffer, grad_logits, hidden)
        else:
            self._held.add(grad_logits, hidden)

    def add_total(self, total: Tensor, scale: Tensor) -> None:
        self._touched = True
        if self._buffer.dtype == torch.float32:
            add_scaled_(self._buffer, total, scale)
        else:
            self._buffer.add_(total.mul_(scale))

    def close(self, inv_scale: Tensor | None) -> Tensor | None:
        if self._held.sum is not None:
            self._touched = True
            self._buffer.add_(self._held.total(inv_scale))
        return self._returned()

    def abandon(self) -> None:
        if self._touched:
            grad_guard.poison(self._buffer)


def add_scaled_(total: Tensor, addend: Tensor, scale: Tensor) -> None:
    """``total += scale * addend``, fp32, in one pass over both."""
    if total.is_cuda and total.is_contiguous() and addend.is_contiguous():
        from megatron_fused_ce.kernels import exp_rows

        exp_rows.add_scaled_(total, addend, scale)
    else:
        total.addcmul_(addend, scale)


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
    product = mixed_product() if total.is_cuda else _upcast_product
    product(total, grad_logits, hidden, overwrite)


@lru_cache(maxsize=1)
def mixed_product() -> Callable[[Tensor, Tensor, Tensor, bool], None]:
    """The first there is of: torch's own fp32-output product, apex's kernel, TE's, an upcast.

    All accumulate low-precision operands into an fp32 sum; they differ in speed only, and the last
    one also in memory (fp32 copies of both operands, slice by slice).
    """
    if hasattr(torch.ops.aten.addmm, "dtype_out"):
        return _torch_product
    if _apex() is not None:
        return _apex_product
    if _te_gemm() is not None:
        return _te_product
    return _upcast_product


def _torch_product(total: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    torch.addmm(  # type: ignore[call-overload]
        total,
        grad_logits.t(),
        hidden,
        out_dtype=torch.float32,
        beta=0 if overwrite else 1,
        out=total,
    )


def _apex() -> Any:
    try:
        import fused_weight_gradient_mlp_cuda
    except ImportError:
        return None
    return fused_weight_gradient_mlp_cuda


def _apex_product(total: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    if overwrite:
        total.zero_()
    _apex().wgrad_gemm_accum_fp32(hidden.contiguous(), grad_logits.contiguous(), total)


def _te_gemm() -> Any:
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except Exception:  # a broken install raises more than ImportError; it only means "not this one"
        return None
    return general_gemm


def _te_product(total: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    _te_gemm()(
        hidden,
        grad_logits,
        out_dtype=torch.float32,
        layout="NT",
        out=total,
        accumulate=not overwrite,
        grad=True,
    )


#: Rows of `total` per upcast product.
UPCAST_ROWS = 8192


def _upcast_product(total: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    wide = hidden.float()
    for start in range(0, total.shape[0], UPCAST_ROWS):
        rows = slice(start, start + UPCAST_ROWS)
        total[rows].addmm_(grad_logits[:, rows].t().float(), wide, beta=0 if overwrite else 1)
