"""Powers of two that keep gradients within the range of their dtype, and the inverses that undo them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: fp16 gradients of logits are scaled so that the largest upstream gradient becomes
#: ``2**FP16_HEADROOM_BITS``: 2.3e-10 is then the smallest probability that does not underflow.
FP16_HEADROOM_BITS = 8
#: The scale is smaller if entries of the weight reach ``2**FP16_WEIGHT_BITS``. Absolute values in a row of
#: gradients sum to twice its upstream gradient, or eight times with three outputs beside the loss, and
#: ``8 * 2**(8 + 4)`` is half of fp16's largest number. Of more outputs a fourth of the sum counts.
FP16_WEIGHT_BITS = 4
#: ``grad_in_forward`` saves fp16's ``grad_hidden`` for upstream gradients of up to ``2**FP16_WAITING_BITS``:
#: as far above fp16's smallest number (2**-24) as weights of up to 2**8 allow.
FP16_WAITING_BITS = 4


def scale_for_fp16(
    gradients: Sequence[Tensor], weight: Tensor, bound: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """Find the power of two that brings the largest upstream gradient near 2**8, and its inverse; fp32 [].

    It is smaller for a large ``weight`` ``[V, H]``, so that the GEMM with it stays finite. It is 1 if no
    upstream gradient is finite and above 0. The host does not wait.

    Args:
        bound: of a token's row of gradients for an upstream gradient of 1; a number, or one a token.
    """
    largest = gradients[0].new_zeros(())
    of_all = [torch.stack([each.abs() for each in gradients]).sum(0) / 4] if len(gradients) > 4 else []
    for gradient in (*gradients, *of_all):
        if gradient.numel():
            reached = gradient.abs() if bound is None else gradient.abs() * bound
            largest = torch.maximum(largest, reached.amax())
    _, of_weight = torch.frexp(torch.stack(weight.detach().aminmax()).float().abs().amax())
    headroom = FP16_HEADROOM_BITS - (of_weight - FP16_WEIGHT_BITS).clamp(0, 16)
    shift = _shift_to(headroom, largest)
    return _power_of_two(shift), _power_of_two(-shift)


def scale_(rows: Tensor, scale: Tensor) -> None:
    """``rows *= scale`` in place, multiplied in fp32: ``[n, H]``, unit column stride, times fp32 ``[]``.

    On a GPU ``mul_`` would round a factor without dimensions to the rows' dtype first.
    """
    if rows.is_cuda:
        from megatron_fused_ce.kernels import scaled_exp_rows

        scaled_exp_rows.scale_rows(rows, scale, rows)
    else:
        rows.mul_(scale.view(1, 1))


def scale_token_weights(
    token_weights: Tensor, logit_scale: float, dtype: torch.dtype, bound: Tensor | float | None = None
) -> Tensor:
    """Multiply token weights by a power of two that brings the largest (times ``logit_scale``) near 1.

    ``grad_in_forward`` makes gradients for these weights, and multiplies them by a scalar in the backward:
    values out of the range of ``dtype`` in between would be lost. The power is the same on every rank. In
    fp16 it is smaller where ``bound`` (see :func:`scale_for_fp16`) is above 1.
    """
    if not token_weights.numel():
        return token_weights
    bits = FP16_WAITING_BITS if dtype == torch.float16 else 0
    if token_weights.is_cuda:
        from megatron_fused_ce.kernels import upstream_kernels

        scaled = upstream_kernels.scaled_weights(token_weights.contiguous(), bits, logit_scale)
    else:
        shift = _shift_to(bits, token_weights.abs().amax() * abs(logit_scale))
        scaled = token_weights * _power_of_two(shift)
    if bound is None or dtype != torch.float16:
        return scaled
    largest = (scaled * bound).abs().amax() * abs(logit_scale)
    return scaled * _power_of_two(_shift_to(bits, largest).clamp(max=0))


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` in fp32, for -126 to 127. torch.ldexp would use torch's default dtype."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _shift_to(bits: int | Tensor, largest: Tensor) -> Tensor:
    """The ``n`` with ``2**(bits - 1) <= largest * 2**n < 2**bits``; 0 if ``largest`` is 0, inf or NaN."""
    _, exponent = torch.frexp(largest)
    shift = (bits - exponent).clamp(-100, 100)
    return torch.where(torch.isfinite(largest) & (largest > 0), shift, 0)
