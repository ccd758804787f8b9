"""Triton row kernels: the two passes over a chunk of logits ``[C, V]`` between the matrix products.

Bytes moved per chunk, at least, and the time that takes at an H200's 4.3 TB/s of copy bandwidth:

=================  =======================================  ==========================
kernel             bytes                                    C=8192, V=128256, bf16
=================  =======================================  ==========================
row_statistics     ``itemsize * C * V`` read                2.10 GB, 0.49 ms predicted
row_gradients      the same read, the same written          4.20 GB, 0.98 ms predicted
=================  =======================================  ==========================

The three GEMMs of such a chunk take about 37 ms there. One exponential per element in each kernel keeps both
below the special-function rate. A first form that reduced maximum and sum over the program in each block, and
compared every column with the label in 64 bits, was about twice as slow: sums are kept slot by slot and
reduced once, and only the label's own block compares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.kernels.launch import Launch, ceil_div, next_power_of_2
from megatron_fused_ce.kernels.records import (
    LN_2,
    NO_OPTIONS,
    NOT_HERE,
    ExtraStatistics,
    GradCoefficients,
    RowOptions,
    RowStatistics,
)
from megatron_fused_ce.kernels.softcap import tanh_and_grad

#: Columns that one program of a kernel holds in registers at a time, and its warps. For statistics 2048 and 4
#: were the fastest on an H200 of all pairs of 2048 to 8192 and 4 to 16 (C = 8192, V = 128256; plain, with a
#: sum, entropy, softcap), except for entropy, where 8 warps were slightly faster.
STATISTICS_BLOCK = 2048
STATISTICS_WARPS = 4
GRADIENT_BLOCK = 4096
GRADIENT_WARPS = 8
_LN_2 = tl.constexpr(LN_2)
_NOT_HERE = tl.constexpr(NOT_HERE)


@triton.jit
def _exp(t, EXACT: tl.constexpr):
    """``exp(t)``; to 2 ulp for fp32 logits, to ``abs(t) * 2**-24`` for others, whose own rounding is more.

    The hardware's exponential is of powers of two: its argument's rounding is made good to first order.
    """
    if EXACT:
        LOG2E: tl.constexpr = 1.44269502162933349609375  # of 24 bits, and what is left of it
        LOG2E_REST: tl.constexpr = 1.925963033500e-8
        high = t * LOG2E
        rest = tl.fma(t, LOG2E, -high) + t * LOG2E_REST
        e = tl.exp2(high) * (1.0 + rest * _LN_2)
        e = tl.where(t == float("-inf"), 0.0, e)  # inf - inf in the rest
    else:
        e = tl.exp(t)
    return e


@triton.jit
def exact_exp(t):
    """``exp(t)`` of fp32 up to 88, to 1 ulp and with subnormal results; some 20 instructions.

    The hardware's has errors of 2 ulp, which do not cancel in sums that are subtracted from each other, and
    makes subnormal results 0.
    """
    LOG2E: tl.constexpr = 1.44269504088896340736
    LN_2_HIGH: tl.constexpr = 0.693145751953125  # of 16 bits: times n it is exact
    LN_2_REST: tl.constexpr = 1.42860677e-6
    bounded = tl.where(t < -120.0, -120.0, t)  # NaN stays
    n = tl.floor(tl.fma(bounded, LOG2E, 0.5))
    x = tl.fma(n, -LN_2_REST, tl.fma(n, -LN_2_HIGH, bounded))  # within ln(2) / 2
    series = tl.fma(x, 1.9841269841e-4, 1.3888888889e-3)
    series = tl.fma(series, x, 8.3333333333e-3)
    series = tl.fma(series, x, 4.1666666667e-2)
    series = tl.fma(series, x, 1.6666666667e-1)
    series = tl.fma(series, x, 0.5)
    e = 1.0 + tl.fma(series * x, x, x)
    power = tl.where(n == n, n, 0.0).to(tl.int32)
    half = power >> 1  # 2**n alone may be no normal number
    for_half = ((half + 127) << 23).to(tl.float32, bitcast=True)
    for_rest = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(t < -120.0, 0.0, e * for_half * for_rest)


@triton.jit
def relative(z, top, scale, EXACT: tl.constexpr):
    """``scale * (z - top)``, exactly 0 at ``top``; EXACT: and what its two roundings lost, else 0."""
    difference = z - top
    # A product would be fused with what is subtracted from it next: what it lost would count twice.
    t = tl.fma(difference, scale, 0.0)
    lost = 0.0
    if EXACT:
        back = difference - z
        lost = (z - (difference - back)) - (top + back)
        lost = tl.fma(difference, scale, -t) + lost * scale
        lost = tl.where(tl.abs(difference) < float("inf"), lost, 0.0)
    return t, lost


@triton.jit
def _relative_exp(z, top, scale, EXACT: tl.constexpr):
    """``exp(scale * (z - top))``, and its exponent."""
    t, lost = relative(z, top, scale, EXACT)
    if EXACT:
        e = exact_exp(t)
        e += e * lost
    else:
        e = _exp(t, False)
    return e, t


@triton.jit
def _add_block(
    row_ptr,
    start,
    num_columns,
    label,  # int32, -1 where not here
    logit_scale,
    softcap,
    inv_temperature,
    running_max,
    sums,  # [BLOCK], of exponentials relative to running_max (0 while that is -inf)
    weighted,  # [BLOCK] or scalar
    logit_sums,  # [BLOCK] or scalar
    best,
    held,  # [BLOCK] or scalar: exponentials of the block with the largest logit, which are not in sums then
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    REST: tl.constexpr,
):
    """One block of columns into what is kept of a row, slot by slot: one reduction a block, the maximum.

    REST, without a softcap: the maximum is of the logits before the scale, of -1 times them below 0.
    """
    RAW: tl.constexpr = REST and not SOFTCAP
    EXACT: tl.constexpr = row_ptr.dtype.element_ty == tl.float32
    columns = start + tl.arange(0, BLOCK)
    if RAGGED:
        inside = columns < num_columns
        z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        z = tl.load(row_ptr + columns).to(tl.float32)
    if not RAW:
        z *= logit_scale
    elif logit_scale < 0.0:
        z = -z
    if SOFTCAP:
        tanh, _ = tanh_and_grad(z / softcap)
        z = softcap * tanh
    if TEMPERATURE:
        z = z * inv_temperature
    if WITH_SUM:
        logit_sums += z  # 0 outside
    if RAGGED:
        z = tl.where(inside, z, float("-inf"))
    if WITH_ARGMAX:
        block_max, block_best = tl.max(z, axis=0, return_indices=True)
        best = tl.where(block_max > running_max, start + block_best, best)
    else:
        block_max = tl.max(z, axis=0)
    new_max = tl.maximum(running_max, block_max)
    # A row that has only seen -inf keeps the row shift 0, so that nothing becomes NaN.
    row_shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    if RAW:
        e, t = _relative_exp(z, row_shift, tl.abs(logit_scale), EXACT)
        shift = (running_max - row_shift) * tl.abs(logit_scale)
    else:
        t = z - row_shift
        e = _exp(t, EXACT)
        shift = running_max - row_shift
    if (label >= start) & (label < start + BLOCK):
        e = tl.where(columns == label, 0.0, e)
    moved = tl.exp(shift)
    if REST:  # noqa: SIM102 - the first is known when it is compiled
        if new_max > running_max:
            sums += held
    if WEIGHTED:
        # -inf times 0 on the first block and where a logit is -inf.
        empty = sums == 0.0
        if REST:
            empty &= held == 0.0
        weighted = tl.where(empty, 0.0, weighted + sums * shift) * moved
        weighted += tl.where(e == 0.0, 0.0, e * t)
    sums *= moved
    if REST:
        if new_max > running_max:
            held = e
            best = start
        else:
            sums += e
    else:
        sums += e
    return new_max, sums, weighted, logit_sums, best, held


@triton.jit
def _row_statistics_kernel(
    logits_ptr,  # [C, V]
    label_ptr,  # [C] int64
    shard_ptr,  # [4, C] fp32, out: records.RowStatistics.shard
    argmax_ptr,  # [C] int64
    sum_ptr,  # [C] fp32, out: sum of the logits
    weighted_ptr,  # [C] fp32, out: sum of the exponentials times their logits, as of records.ExtraStatistics
    valid_columns_ptr,  # [1] int64: how many columns are valid
    inv_temperature_ptr,  # [C] fp32
    rest_ptr,  # [C] fp64, out: records.ExtraStatistics.rest
    row_stride,
    num_rows,
    num_columns,
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    REST: tl.constexpr,
):
    """One program per row: online maximum and sums, the label's column left out of those."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    if MASKED:
        num_columns = tl.load(valid_columns_ptr).to(tl.int32)
    label = tl.load(label_ptr + row)
    here = (label >= 0) & (label < num_columns)
    label = tl.where(here, label, -1).to(tl.int32)
    inv_temperature = tl.load(inv_temperature_ptr + row) if TEMPERATURE else 1.0
    running_max = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32) if WEIGHTED else tl.full((), 0.0, tl.float32)
    logit_sums = tl.zeros((BLOCK,), tl.float32) if WITH_SUM else tl.full((), 0.0, tl.float32)
    held = tl.zeros((BLOCK,), tl.float32) if REST else tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int32)
    whole = num_columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        running_max, sums, weighted, logit_sums, best, held = _add_block(
            row_ptr, start, num_columns, label, logit_scale, softcap, inv_temperature,
            running_max, sums, weighted, logit_sums, best, held,
            BLOCK, False, WITH_ARGMAX, WITH_SUM, WEIGHTED, SOFTCAP, TEMPERATURE, REST,
        )  # fmt: skip
    if whole < num_columns:
        running_max, sums, weighted, logit_sums, best, held = _add_block(
            row_ptr, whole, num_columns, label, logit_scale, softcap, inv_temperature,
            running_max, sums, weighted, logit_sums, best, held,
            BLOCK, True, WITH_ARGMAX, WITH_SUM, WEIGHTED, SOFTCAP, TEMPERATURE, REST,
        )  # fmt: skip
    label_logit = tl.load(row_ptr + label, mask=here, other=0.0).to(tl.float32) * logit_scale
    if SOFTCAP:
        tanh_label, _ = tanh_and_grad(label_logit / softcap)
        label_logit = softcap * tanh_label
    if TEMPERATURE:
        label_logit = label_logit * inv_temperature
    if REST:
        of_label = tl.load(row_ptr + label, mask=here, other=0.0).to(tl.float32)
        if SOFTCAP:
            of_label = tl.exp(label_logit - running_max)
        else:
            sign = tl.where(logit_scale < 0.0, -1.0, 1.0)
            EXACT: tl.constexpr = row_ptr.dtype.element_ty == tl.float32
            of_label, _ = _relative_exp(of_label * sign, running_max, tl.abs(logit_scale), EXACT)
            running_max *= tl.abs(logit_scale)
        # The label is in neither sum; where it is the largest, the others are the rest.
        own = here & (label_logit >= running_max)
        at = tl.argmax(held, axis=0, tie_break_left=True)
        others = tl.where((tl.arange(0, BLOCK) == at) & (own == 0), 0.0, held).to(tl.float64)
        rest = tl.sum(sums.to(tl.float64) + others, axis=0)
        beside = tl.where(here & (own == 0), of_label, 0.0)
        tl.store(rest_ptr + row, rest + beside.to(tl.float64))
        best = tl.where(own, label, best + at)
        sums += held
    if WITH_SUM:
        tl.store(sum_ptr + row, tl.sum(logit_sums, axis=0))
    if WEIGHTED:
        tl.store(weighted_ptr + row, tl.sum(weighted, axis=0))
    tl.store(shard_ptr + row, running_max)
    tl.store(shard_ptr + num_rows + row, running_max)
    tl.store(shard_ptr + 2 * num_rows + row, tl.sum(sums, axis=0))
    tl.store(shard_ptr + 3 * num_rows + row, tl.where(here, label_logit, _NOT_HERE))
    if WITH_ARGMAX or REST:
        tl.store(argmax_ptr + row, best.to(tl.int64))


@triton.jit
def _row_gradients_kernel(
    logits_ptr,  # [C, V]
    out_ptr,  # [C, V], may be logits_ptr
    label_ptr,  # [C] int64
    max_ptr,  # [C] fp32: records.GradCoefficients, and the next four
    scale_ptr,
    neg_label_grad_ptr,
    factor_ptr,
    entropy_scale_ptr,
    smoothing_ptr,  # [C] fp32
    valid_columns_ptr,  # [1] int64: how many columns are valid
    inv_temperature_ptr,  # [C] fp32
    row_stride,
    out_row_stride,
    num_columns,
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTHING: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    """One program per row and block of columns; each element is read once, then written."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    row_ptr = logits_ptr + row * row_stride
    out_row_ptr = out_ptr + row * out_row_stride
    label = tl.load(label_ptr + row)
    row_max = tl.load(max_ptr + row)
    scale = tl.load(scale_ptr + row)
    neg_label_grad = tl.load(neg_label_grad_ptr + row)
    factor = tl.load(factor_ptr + row)
    z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    z = z * logit_scale
    if SOFTCAP:
        tanh, softcap_grad = tanh_and_grad(z / softcap)
        z = softcap * tanh
    if TEMPERATURE:
        z = z * tl.load(inv_temperature_ptr + row)
    e = _exp(z - row_max, logits_ptr.dtype.element_ty == tl.float32)
    if WITH_ENTROPY:
        entropy_scale = tl.load(entropy_scale_ptr + row)
        gradient = tl.where(e == 0.0, 0.0, e * (scale + entropy_scale * (z - row_max)))
    else:
        gradient = e * scale
    if WITH_SMOOTHING:
        gradient -= tl.load(smoothing_ptr + row)
    gradient = factor * tl.where(columns == label, -neg_label_grad, gradient)
    if SOFTCAP:
        gradient *= softcap_grad
    if MASKED:
        gradient = tl.where(columns < tl.load(valid_columns_ptr), gradient, 0.0)
    tl.store(out_row_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)


def rounds_products(logits: Tensor, scale: float, *others: object) -> bool:
    """Whether logits times a scale or one of ``others``, a softcap or temperatures, have a rounding of their
    own that counts."""
    is_product = scale != 1.0 or any(other is not None for other in others)
    return is_product and logits.dtype == torch.float32


_row_statistics = Launch(_row_statistics_kernel, num_warps=STATISTICS_WARPS)
#: A scaled logit is then rounded before the row's maximum is subtracted, as the maximum was. Fused, their
#: difference is that rounding, not 0: 3e-5 for a logit of 600, relative to its probability.
_row_statistics_unfused = Launch(_row_statistics_kernel, num_warps=STATISTICS_WARPS, enable_fp_fusion=False)
_row_gradients = Launch(_row_gradients_kernel, num_warps=GRADIENT_WARPS)
_row_gradients_unfused = Launch(_row_gradients_kernel, num_warps=GRADIENT_WARPS, enable_fp_fusion=False)


def row_statistics(
    logits: Tensor,  # [C, V], unit column stride
    local_labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    logit_scale: float,
    with_argmax: bool = False,
    form: RowOptions = NO_OPTIONS,
    inv_temperature: Tensor | None = None,  # [C] fp32, times the logits after a softcap
) -> RowStatistics:
    """Row maximum, sum of exponentials without the label's column, and the label's logit (fp32)."""
    num_rows, num_columns = logits.shape
    shard = torch.empty((4, num_rows), dtype=torch.float32, device=logits.device)
    argmax = torch.empty_like(local_labels) if with_argmax or form.with_rest else None
    logit_sum = torch.empty_like(shard[0]) if form.with_logit_sum else None
    weighted = torch.empty_like(shard[0]) if form.with_weighted else None
    rest = torch.empty_like(shard[0], dtype=torch.float64) if form.with_rest else None
    rounds = rounds_products(logits, logit_scale, form.softcap, inv_temperature)
    launch = _row_statistics_unfused if rounds else _row_statistics
    launch(
        (num_rows,),
        (
            logits,
            local_labels,
            shard,
            local_labels if argmax is None else argmax,
            shard if logit_sum is None else logit_sum,
            shard if weighted is None else weighted,
            local_labels if form.valid_columns is None else form.valid_columns,
            shard if inv_temperature is None else inv_temperature,
            shard if rest is None else rest,
        ),
        (
            logits.stride(0),
            num_rows,
            num_columns,
            logit_scale,
            form.softcap or 1.0,
        ),
        BLOCK=min(STATISTICS_BLOCK, next_power_of_2(num_columns)),
        WITH_ARGMAX=with_argmax,
        WITH_SUM=logit_sum is not None,
        WEIGHTED=weighted is not None,
        MASKED=form.valid_columns is not None,
        SOFTCAP=form.softcap is not None,
        TEMPERATURE=inv_temperature is not None,
        REST=rest is not None,
    )
    extra = ExtraStatistics(logit_sum, weighted, rest=rest)
    return RowStatistics(shard, argmax, extra)


def row_gradients(
    logits: Tensor,  # [C, V], unit column stride
    local_labels: Tensor,  # [C] int64
    coefficients: GradCoefficients,
    logit_scale: float,
    out: Tensor,  # [C, V] in the logits' dtype; may be `logits` itself
    form: RowOptions = NO_OPTIONS,
    inv_temperature: Tensor | None = None,  # [C] fp32; ``coefficients`` have its factor of the gradient
) -> Tensor:
    """``out = d loss / d z`` times the upstream gradient, cast to the logits' dtype."""
    num_rows, num_columns = logits.shape
    block = min(GRADIENT_BLOCK, next_power_of_2(num_columns))
    unused = coefficients.factor
    rounds = rounds_products(logits, logit_scale, form.softcap, inv_temperature)
    launch = _row_gradients_unfused if rounds else _row_gradients
    launch(
        (num_rows, ceil_div(num_columns, block)),
        (
            logits,
            out,
            local_labels,
            coefficients.row_max,
            coefficients.scale,
            coefficients.neg_label_grad,
            coefficients.factor,
            unused if coefficients.entropy_scale is None else coefficients.entropy_scale,
            unused if coefficients.smoothing_per_class is None else coefficients.smoothing_per_class,
            local_labels if form.valid_columns is None else form.valid_columns,
            unused if inv_temperature is None else inv_temperature,
        ),
        (
            logits.stride(0),
            out.stride(0),
            num_columns,
            logit_scale,
            form.softcap or 1.0,
        ),
        BLOCK=block,
        WITH_ENTROPY=coefficients.entropy_scale is not None,
        WITH_SMOOTHING=coefficients.smoothing_per_class is not None,
        MASKED=form.valid_columns is not None,
        SOFTCAP=form.softcap is not None,
        TEMPERATURE=inv_temperature is not None,
    )
    return out
