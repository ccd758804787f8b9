"""Triton row kernels: the two passes over a chunk of logits ``[C, V]`` between the matrix products.

Bytes moved per chunk (the floor; 4.3 TB/s of copy bandwidth measured on an H200):

=================  =======================================  ==========================
kernel             bytes                                    C=4096 V=128256 bf16, H200
=================  =======================================  ==========================
row_statistics     ``itemsize * C * V`` read                1.05 GB, 0.24 ms predicted
row_gradients      the same read, the same written          2.10 GB, 0.49 ms predicted
=================  =======================================  ==========================

The three matrix products of such a chunk take about 19 ms there. What was measured stands in
docs/design.md. One exponential per element in each kernel keeps both below the special-function rate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.loss_form import PLAIN, LossForm
from megatron_fused_ce.row_ops import NOT_HERE, RowStatistics, TokenTerms

#: Columns that one program of a kernel holds in registers at a time, and its warps.
STATISTICS_BLOCK = 4096
STATISTICS_WARPS = 8
GRADIENT_BLOCK = 4096
GRADIENT_WARPS = 8
_NOT_HERE = tl.constexpr(NOT_HERE)


@triton.jit
def _tanh(x):
    """``tanh(x)`` and its slope, which would lose its digits as ``1 - tanh(x)**2``."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _row_statistics_kernel(
    logits_ptr,  # [C, V]
    label_ptr,  # [C] int64
    shard_ptr,  # [4, C] fp32, out: row_ops.RowStatistics.shard
    argmax_ptr,  # [C] int64
    sum_ptr,  # [C] fp32, out: sum of the logits
    inside_ptr,  # [1] int64: columns that take part
    row_stride,
    num_rows,
    num_columns,
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    WITH_SUM: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One program per row: online maximum and sum, the label's column left out of the sum."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    label = tl.load(label_ptr + row)
    running_max = tl.full((), float("-inf"), tl.float32)
    running_sum = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int64)
    logit_sum = tl.full((), 0.0, tl.float32)
    if MASKED:
        num_columns = tl.load(inside_ptr)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32) * logit_scale
        if SOFTCAP:
            bent, _ = _tanh(z / softcap)
            z = softcap * bent
        if WITH_SUM:
            logit_sum += tl.sum(z, axis=0)
        z = tl.where(inside, z, float("-inf"))
        if WITH_ARGMAX:
            block_max, block_best = tl.max(z, axis=0, return_indices=True)
            best = tl.where(block_max > running_max, start + block_best, best)
        else:
            block_max = tl.max(z, axis=0)
        new_max = tl.maximum(running_max, block_max)
        # A row that has only seen -inf keeps the reference 0, so that nothing becomes NaN.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        e = tl.where(inside & (columns != label), tl.exp(z - reference), 0.0)
        running_sum = running_sum * tl.exp(running_max - reference) + tl.sum(e, axis=0)
        running_max = new_max
    here = (label >= 0) & (label < num_columns)
    label_logit = tl.load(row_ptr + label, mask=here, other=0.0).to(tl.float32) * logit_scale
    if SOFTCAP:
        bent_label, _ = _tanh(label_logit / softcap)
        label_logit = softcap * bent_label
    if WITH_SUM:
        tl.store(sum_ptr + row, logit_sum)
    tl.store(shard_ptr + row, running_max)
    tl.store(shard_ptr + num_rows + row, running_max)
    tl.store(shard_ptr + 2 * num_rows + row, running_sum)
    tl.store(shard_ptr + 3 * num_rows + row, tl.where(here, label_logit, _NOT_HERE))
    if WITH_ARGMAX:
        tl.store(argmax_ptr + row, best)


@triton.jit
def _row_gradients_kernel(
    logits_ptr,  # [C, V]
    out_ptr,  # [C, V], may be logits_ptr
    label_ptr,  # [C] int64
    max_ptr,  # [C] fp32
    scale_ptr,  # [C] fp32: loss_form.GradientTerms, and deficit_ptr
    deficit_ptr,  # [C] fp32
    factor_ptr,  # [C] fp32
    share_ptr,  # [] fp32: sigma / K
    inside_ptr,  # [1] int64: columns that take part
    row_stride,
    out_row_stride,
    num_columns,
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
    WITH_SHARE: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One program per row and block of columns; each element is read once, then written."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    label = tl.load(label_ptr + row)
    row_max = tl.load(max_ptr + row)
    scale = tl.load(scale_ptr + row)
    deficit = tl.load(deficit_ptr + row)
    factor = tl.load(factor_ptr + row)
    z = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    z = z * logit_scale
    if SOFTCAP:
        bent, slope = _tanh(z / softcap)
        z = softcap * bent
    gradient = tl.exp(z - row_max) * scale
    if WITH_SHARE:
        gradient -= tl.load(share_ptr)
    gradient = factor * tl.where(columns == label, -deficit, gradient)
    if SOFTCAP:
        gradient *= slope
    if MASKED:
        gradient = tl.where(columns < tl.load(inside_ptr), gradient, 0.0)
    tl.store(
        out_ptr + row * out_row_stride + columns,
        gradient.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def row_statistics(
    logits: Tensor,  # [C, V], unit column stride
    local_labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    logit_scale: float,
    with_argmax: bool = False,
    form: LossForm = PLAIN,
) -> RowStatistics:
    """Row maximum, sum of exponentials without the label's column, and the label's logit (fp32)."""
    num_rows, num_columns = logits.shape
    shard = torch.empty((4, num_rows), dtype=torch.float32, device=logits.device)
    argmax = torch.empty_like(local_labels) if with_argmax else None
    logit_sum = None if form.sigma is None else torch.empty_like(shard[0])
    _row_statistics_kernel[(num_rows,)](
        logits_ptr=logits,
        label_ptr=local_labels,
        shard_ptr=shard,
        argmax_ptr=local_labels if argmax is None else argmax,
        sum_ptr=shard if logit_sum is None else logit_sum,
        inside_ptr=local_labels if form.num_columns is None else form.num_columns,
        row_stride=logits.stride(0),
        num_rows=num_rows,
        num_columns=num_columns,
        logit_scale=logit_scale,
        softcap=form.softcap or 1.0,
        BLOCK=min(STATISTICS_BLOCK, triton.next_power_of_2(num_columns)),
        WITH_ARGMAX=with_argmax,
        WITH_SUM=logit_sum is not None,
        MASKED=form.num_columns is not None,
        SOFTCAP=form.softcap is not None,
        num_warps=STATISTICS_WARPS,
    )
    return RowStatistics(shard, argmax, logit_sum)


def row_gradients(
    logits: Tensor,  # [C, V], unit column stride
    local_labels: Tensor,  # [C] int64
    terms: TokenTerms,
    row_factor: Tensor,  # [C] fp32: upstream gradient times logit_scale
    logit_scale: float,
    out: Tensor,  # [C, V] in the logits' dtype; may be `logits` itself
    form: LossForm = PLAIN,
) -> Tensor:
    """``out = row_factor * d loss / d z``, cast to the logits' dtype."""
    num_rows, num_columns = logits.shape
    row_max, scale, deficit = form.gradient_terms(terms)
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(num_columns))
    _row_gradients_kernel[(num_rows, triton.cdiv(num_columns, block))](
        logits_ptr=logits,
        out_ptr=out,
        label_ptr=local_labels,
        max_ptr=row_max,
        scale_ptr=scale,
        deficit_ptr=deficit,
        factor_ptr=row_factor,
        share_ptr=row_factor if form.share is None else form.share,
        inside_ptr=local_labels if form.num_columns is None else form.num_columns,
        row_stride=logits.stride(0),
        out_row_stride=out.stride(0),
        num_columns=num_columns,
        logit_scale=logit_scale,
        softcap=form.softcap or 1.0,
        BLOCK=block,
        WITH_SHARE=form.share is not None,
        MASKED=form.num_columns is not None,
        SOFTCAP=form.softcap is not None,
        num_warps=GRADIENT_WARPS,
    )
    return out
