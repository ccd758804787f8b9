"""``grad_in_forward``'s token weights, scaled, and its scalar fitted to the upstream gradient: one launch
each.

Both read [T] floats twice, in one program: first the largest weight or two sums, then the results that depend
on them. In PyTorch they are 12 and 17 launches of some 10 us on the host. Predicted at T = 8192: 2 us each
(two walks over 32 KiB in 2 rounds); at T = 131072, 30 us of a step of 600 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.kernels.launch import Launch

BLOCK = 4096


@triton.jit
def _scaled_weights_kernel(
    weights_ptr,  # [T], any float
    out_ptr,  # [T] fp32
    num_tokens,
    bits,  # the largest is brought below 2**bits
    factor,  # by which they will be multiplied
    BLOCK: tl.constexpr,
):
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.abs(tl.load(weights_ptr + at, mask=at < num_tokens, other=0.0).to(tl.float32))
        largest = tl.where((w > largest) | (w != w), w, largest)
    # tl.max drops a NaN; the sum of zeros times it does not.
    total = tl.max(largest, axis=0) * tl.abs(factor) + tl.sum(largest * 0.0, axis=0)
    # total = m * 2**exponent with m in [0.5, 1); the clamp below covers subnormal totals.
    exponent = ((total.to(tl.int32, bitcast=True) >> 23) & 255) - 126
    finite = (total - total == 0.0) & (total > 0.0)
    shift = tl.where(finite, tl.minimum(tl.maximum(bits - exponent, -100), 100), 0)
    power = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    for start in range(0, num_tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(weights_ptr + at, mask=at < num_tokens, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, w * power, mask=at < num_tokens)


@triton.jit
def _fit_scalar_kernel(
    grad_ptr,  # [T] fp32
    weights_ptr,  # [T] fp32
    scale_ptr,  # [1] fp32, out
    found_ptr,  # [1] int64, out: promise.KEPT, NOT_FINITE or BROKEN
    num_tokens,
    rtol,
    atol,
    BLOCK: tl.constexpr,
):
    """promise.fit_scalar, in fp64 like it."""
    products = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + at, mask=at < num_tokens, other=0.0).to(tl.float64)
        w = tl.load(weights_ptr + at, mask=at < num_tokens, other=0.0).to(tl.float64)
        products += g * w
        squares += w * w
    norm = tl.sum(squares, axis=0)
    positive = norm > 0.0
    c = tl.where(positive, tl.sum(products, axis=0) / tl.where(positive, norm, 1.0), 0.0)
    wrong = tl.zeros((BLOCK,), tl.int32)
    infinite = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + at, mask=at < num_tokens, other=0.0).to(tl.float64)
        w = tl.load(weights_ptr + at, mask=at < num_tokens, other=0.0).to(tl.float64)
        expected = c * w
        # `<=`: a NaN among the weights must not pass.
        fits = tl.abs(g - expected) <= rtol * tl.abs(expected) + atol
        wrong = tl.where(fits, wrong, 1)
        infinite = tl.where(g - g == 0.0, infinite, 1)
    scale = c.to(tl.float32)
    finite = (tl.max(infinite, axis=0) == 0) & (scale - scale == 0.0)
    found = tl.where(finite, 2 * tl.max(wrong, axis=0), 1)
    tl.store(scale_ptr, tl.where(finite, scale, float("nan")))
    tl.store(found_ptr, tl.where(norm - norm == 0.0, found, 2).to(tl.int64))


_scaled_weights = Launch(_scaled_weights_kernel, num_warps=16)
_fit_scalar = Launch(_fit_scalar_kernel, num_warps=16)


def scaled_weights(weights: Tensor, bits: int, factor: float) -> Tensor:
    """:func:`.fp16.scale_token_weights` of contiguous ``weights``, any shape: fp32."""
    out = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    _scaled_weights((1,), (weights, out), (weights.numel(), bits, float(factor)), BLOCK=BLOCK)
    return out


def fit_scalar(grad_loss: Tensor, token_weights: Tensor, rtol: float, atol: float) -> tuple[Tensor, Tensor]:
    """:func:`.promise.fit_scalar` of contiguous fp32 tensors: the scalar [], and what was found, int64 []."""
    scale = torch.empty((), dtype=torch.float32, device=grad_loss.device)
    found = torch.empty((), dtype=torch.int64, device=grad_loss.device)
    _fit_scalar(
        (1,),
        (grad_loss, token_weights, scale, found),
        (grad_loss.numel(), rtol, atol),
        BLOCK=BLOCK,
    )
    return scale, found
