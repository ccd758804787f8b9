"""Triton row passes of a divergence over the whole vocabulary, over both sides' logits ``[C, V]``.

With ``r = log p_s - log p_t`` and ``h(x) = exp(x) - 1 - x >= 0``::

    KL(p || q) = sum_j p_j h(x_j) = sum_j (q_j - p_j - p_j x_j),  x_j = log q_j - log p_j

as both sum to 1. No term is negative, so that nothing cancels between classes, and an error of a normalizer
enters in second order. Where ``abs(r) <= 1/4`` the terms are series in r, elsewhere the differences. So are
the gradients by the student's logits s::

    forward_kl  KL(p_t || p_s)                              p_s - p_t
    reverse_kl  KL(p_s || p_t)                              p_s (u - sum p_s u)
    jsd         beta KL(p_t || m) + (1 - beta) KL(p_s || m)
                m = (1 - beta) p_s + beta p_t               (1 - beta) p_s (v - sum p_s v)

u is r, and v is log(p_s / m), less what they are for the class of the student's largest logit: exactly 0 for
a class whose p_s is 1, where r and KL are two roundings of one number. Their sums serve gradients only: as
values they have lost what h keeps (docs/math.md).

What the passes must do for each element with bf16 logits, and the time that takes on an H200 for C = 8192,
V = 128256: 4.3 TB/s of copy bandwidth; 132 SMs at 1.75 GHz issue 128 instructions a clock (0.036 ms for one
an element) and 16 special functions (0.28 ms for one). Instructions: as triton 3.9 compiles them for sm_90;
jsd's were 78 and 54, 2.4 and 2.1 ms, before logits that are rounded had a form of their own.

========================  =====  =================  ============  ==========  ========
pass                      bytes  special functions  instructions  at least    measured
========================  =====  =================  ============  ==========  ========
sums, forward, reverse        4  2 exponentials               37  1.3 ms      1.04 ms
gradients, forward_kl         6  2 exponentials               29  1.5 ms
the same with sums            6  2 exponentials               39  1.5 ms      1.63 ms
gradients, reverse_kl         6  1 exponential                21  1.5 ms      1.54 ms
========================  =====  =================  ============  ==========  ========

Both columns are of before u. It takes about 10 instructions an element more in the sums of reverse_kl, 2 in
its gradients, 8 in either pass of jsd; 4 in the gradients of forward_kl, whose logits are subtracted before
they are scaled. The sums are faster than predicted: SMs ran at 1.98 GHz. Both passes of jsd are in the head's
figures (docs/benchmarks, distillation).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.kernels.launch import Launch, ceil_div, next_power_of_2
from megatron_fused_ce.kernels.records import DIVERGENCES, LN_2, LOG2_E, SERIES_UP_TO, LabelTerm, Side
from megatron_fused_ce.kernels.row_kernels import _exp, exact_exp, relative
from megatron_fused_ce.kernels.softcap import tanh_and_grad

#: Columns that one program holds in registers at a time, and its warps: of 1024 and 2048 columns by 4 warps,
#: 2048 and 4096 by 8, the fastest or within 2 % of it on an H200 (C = 8192, V = 128256, bf16).
SUMS_BLOCK = 2048
SUMS_WARPS = 4
GRADIENT_BLOCK = 2048
#: Of either pass over fp32 logits, whose terms take so many registers more.
FP32_BLOCK = 1024
GRADIENT_WARPS = 4
_FORWARD_KL = tl.constexpr(DIVERGENCES.index("forward_kl"))
_JSD = tl.constexpr(DIVERGENCES.index("jsd"))
_LN_2 = tl.constexpr(LN_2)
_LOG2_E = tl.constexpr(LOG2_E)
_SERIES_UP_TO = tl.constexpr(SERIES_UP_TO)
#: exp of less is 0.
_FAR = tl.constexpr(128.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _h(x):
    """``exp(x) - 1 - x`` for ``abs(x) <= 1/4``, to a relative error of 1e-8."""
    series = x * (1.0 / 5040.0) + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    return series * (x * x)


@triton.jit
def _probability(shifted, lost, log_sum, EXACT: tl.constexpr):
    """``exp(shifted + lost - log_sum)``, to the precision of its exponential."""
    if EXACT:
        p = exact_exp(shifted) * exact_exp(-log_sum)
        p += p * lost
    else:  # one multiply and add, and the hardware's exponential
        p = tl.exp2(shifted * _LOG2_E - log_sum * _LOG2_E)
    return p


@triton.jit
def _kl_term(p, q, x):
    """``p * h(x) = q - p - p * x`` for ``x = log q - log p``, what a class adds to KL(p || q)."""
    # p is 0 where x is above _FAR, or NaN because both logits are -inf. Where q's alone is -inf, a p that
    # underflows adds infinity all the same.
    far = q - p - p * tl.minimum(x, _FAR)
    far = tl.where(x == float("-inf"), float("inf"), far)
    return tl.where(tl.abs(x) <= _SERIES_UP_TO, p * _h(x), far)


@triton.jit
def _log_series(f):
    """``log(1 + f)`` for f in [-1/3, 1/3], to a relative error of 5e-8."""
    # log(1 + f) / f, of degree 8 through Chebyshev's points
    series = f * 0.1408732831478119 - 0.15403153982494354
    series = series * f + 0.1398070901632309
    series = series * f - 0.16412799060344696
    series = series * f + 0.20012426376342773
    series = series * f - 0.25008025765419006
    series = series * f + 0.3333315849304199
    series = series * f - 0.4999993145465851
    return f * (series * f + 1.0)


@triton.jit
def _log(v):
    """``log(v)`` of a normal ``v > 0``: to 5e-8 in [2/3, 4/3], elsewhere to 1 ulp more; 16 instructions."""
    bits = v.to(tl.int32, bitcast=True)
    above = bits - 0x3F2AAAAB  # 2/3
    f = (bits - (above & -0x800000)).to(tl.float32, bitcast=True) - 1.0
    return (above >> 23).to(tl.float32) * _LN_2 + _log_series(f)


@triton.jit
def _log_mixture(x, share, log_less, log_more):
    """``log(1 - share + share * exp(x))``, with its own digits where it is near 0.

    log_less is log(1 - share); log_more, of each class, ``log(share) + x`` without the rounding of either.
    An error that they have would be one of all classes, whose terms may nearly cancel: only share's own
    counts, but where the result is above 40 or below -1.4.
    """
    near = tl.abs(x) <= _SERIES_UP_TO
    y = share * tl.where(near, x + _h(x), exact_exp(tl.minimum(x, 40.0)) - 1.0)
    y = tl.where(x > 40.0, exact_exp(tl.minimum(log_more, 40.0)), y)
    direct = (y >= -0.75) & (log_more <= 40.0)
    y = tl.where(direct, y, exact_exp(-tl.abs(log_more - log_less)))
    small = tl.abs(y) <= 0.25
    log = tl.where(small, _log_series(tl.where(small, y, 0.0)), _log(1.0 + y))
    return log + tl.where(direct, 0.0, tl.maximum(log_more, log_less))


@triton.jit
def _mixture(r, beta, student_share):
    """m, the smaller side's share of it, and p_s, in units of the larger side's p; abs(r); log m.

    All are finite: abs(r) is at most _FAR, also where r is NaN because both logits are -inf. log m is 0 for
    r = 0.
    """
    student_larger = r > 0.0
    distance = tl.minimum(tl.abs(r), _FAR)
    q = tl.exp2(distance * -_LOG2_E)
    of_larger = tl.where(student_larger, student_share, beta)
    of_smaller = (1.0 - of_larger) * q
    m = of_larger + of_smaller
    return m, of_smaller, tl.where(student_larger, 1.0, q), distance, _log(m)


@triton.jit
def _mixture_of_rounded(s, t, student_log_sum, teacher_log_sum, beta, student_share):
    """p_s, p_t, ``log(p_s / m)`` and ``log(p_t / m)``, for logits whose own rounding is more than fp32's.

    Half of the instructions of :func:`_mixture`, to an error of some 1e-6 for a small p, 1e-7 for a large
    one; exactly 0 for equal sides.
    """
    log_p_s = tl.maximum(s - student_log_sum, -_FAR)  # -inf times 0 is NaN
    log_p_t = tl.maximum(t - teacher_log_sum, -_FAR)
    p_s, p_t = tl.exp2(log_p_s * _LOG2_E), tl.exp2(log_p_t * _LOG2_E)
    m = tl.maximum(student_share * p_s + beta * p_t, _SMALLEST_NORMAL)
    log_m = tl.where(log_p_s == log_p_t, log_p_s, _log(m))
    return p_s, p_t, log_p_s - log_m, log_p_t - log_m


@triton.jit
def _terms(
    s,  # relative to its row's maximum; t: so that log p_t = t - teacher_log_sum
    t,
    r,
    p_s,
    p_t,
    student_log_sum,
    teacher_log_sum,
    beta,
    student_share,  # 1 - beta
    KIND: tl.constexpr,
    EXACT: tl.constexpr,
):
    """What a class adds to the divergence."""
    if KIND == _FORWARD_KL:
        divergence = _kl_term(p_t, p_s, r)
    elif KIND != _JSD:
        divergence = _kl_term(p_s, p_t, -r)
    elif EXACT:
        m, of_smaller, p_s, distance, log_m = _mixture(r, beta, student_share)
        x_s = log_m + tl.where(r > 0.0, 0.0, distance)
        x_t = log_m + tl.where(r > 0.0, distance, 0.0)
        near = tl.abs(r) <= _SERIES_UP_TO  # and so are x_s and x_t
        of_both = student_share * p_s * _h(x_s) + (m - student_share * p_s) * _h(x_t)
        # Both sides' shares of -m log m.
        divergence = tl.where(near, of_both, -(m * log_m + of_smaller * distance))
        divergence *= exact_exp(tl.maximum(s - student_log_sum, t - teacher_log_sum))
    else:
        p_s, p_t, of_student, of_teacher = _mixture_of_rounded(
            s, t, student_log_sum, teacher_log_sum, beta, student_share
        )
        divergence = student_share * p_s * of_student + beta * p_t * of_teacher
    return divergence


@triton.jit
def _pull(
    s,
    t,
    r,
    u,
    at_top,  # of _terms_of, and the next two
    log_m,
    share,
    student_log_sum,
    teacher_log_sum,
    beta,
    student_share,
    KIND: tl.constexpr,
    EXACT: tl.constexpr,
):
    """u, or of jsd v: what the gradient has less its mean, times ``p_s``."""
    pull = u
    if KIND == _JSD:
        if EXACT:
            pull = -_log_mixture(-u, share, log_m, at_top - r)
        else:
            _, _, of_student, _ = _mixture_of_rounded(
                s, t, student_log_sum, teacher_log_sum, beta, student_share
            )
            pull = tl.where(u == 0.0, 0.0, of_student + log_m)
    return pull


@triton.jit
def _of_student(p_s, pull, KIND: tl.constexpr, EXACT: tl.constexpr):
    """``p_s * pull``: 0 where ``p_s`` is, though the pull may be infinite, or NaN as both logits are -inf."""
    product = p_s * pull
    if EXACT or KIND != _JSD:  # where it is finite
        product = tl.where(p_s == 0.0, 0.0, product)
    return product


@triton.jit
def _unit(logit, scale, softcap, SOFTCAP: tl.constexpr):
    """What is subtracted and then multiplied by the scale, or by the softcap; and the softcap's gradient."""
    slope = 1.0
    if SOFTCAP:
        logit, slope = tanh_and_grad(logit * scale / softcap)
    return logit, slope


@triton.jit
def _both(
    student_ptr,  # of the row, and the next
    teacher_ptr,
    columns,
    student_columns,
    teacher_columns,
    student_top,
    teacher_top,
    beside,
    student_log_sum,
    teacher_log_sum,
    log_ratio,
    at_top,
    student_scale,
    teacher_scale,
    student_softcap,
    teacher_softcap,
    KIND: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """A block of both sides: s, t, r, u, p_s, p_t; the teacher's log_sum that goes with t, and the softcap's
    gradient.

    Where no side is fp32, t is relative to the teacher's logit beside the student's largest, as u needs it.
    """
    EXACT_S: tl.constexpr = student_ptr.dtype.element_ty == tl.float32
    EXACT_T: tl.constexpr = teacher_ptr.dtype.element_ty == tl.float32
    EXACT: tl.constexpr = EXACT_S or EXACT_T
    if RAGGED:
        s = tl.load(student_ptr + columns, mask=columns < student_columns, other=0.0).to(tl.float32)
        t = tl.load(teacher_ptr + columns, mask=columns < teacher_columns, other=0.0).to(tl.float32)
    else:
        s = tl.load(student_ptr + columns).to(tl.float32)
        t = tl.load(teacher_ptr + columns).to(tl.float32)
    s, slope = _unit(s, student_scale, student_softcap, STUDENT_SOFTCAP)
    t, _ = _unit(t, teacher_scale, teacher_softcap, TEACHER_SOFTCAP)
    student_top, _ = _unit(student_top, student_scale, student_softcap, STUDENT_SOFTCAP)
    teacher_top, _ = _unit(teacher_top, teacher_scale, teacher_softcap, TEACHER_SOFTCAP)
    student_unit = student_softcap if STUDENT_SOFTCAP else student_scale
    teacher_unit = teacher_softcap if TEACHER_SOFTCAP else teacher_scale
    s, s_lost = relative(s, student_top, student_unit, EXACT)
    if KIND != _FORWARD_KL:
        beside, _ = _unit(beside, teacher_scale, teacher_softcap, TEACHER_SOFTCAP)
        from_beside, lost = relative(t, beside, teacher_unit, EXACT)
        u = (s - from_beside) + (s_lost - lost)
    if KIND == _FORWARD_KL or EXACT:
        t, t_lost = relative(t, teacher_top, teacher_unit, EXACT)
        r = (s - t) + (s_lost - t_lost) - log_ratio
        if KIND == _FORWARD_KL:
            u = r
    else:
        t, t_lost = from_beside, lost
        teacher_log_sum = student_log_sum + at_top
        r = u + at_top
    if EXACT_S and KIND == _FORWARD_KL:
        # Of p_s - p_t where both normalizers are large and alike: their roundings, 5e-7 each, as one.
        rounded = log_ratio - (student_log_sum - teacher_log_sum)
        s_lost -= tl.where(tl.abs(log_ratio) <= 1.0, rounded, 0.0)
    p_s = _probability(s, s_lost, student_log_sum, EXACT_S)
    p_t = _probability(t, t_lost, teacher_log_sum, EXACT_T)
    return s, t, r, u, p_s, p_t, teacher_log_sum, slope


@triton.jit
def _add_block(
    student_ptr,  # of the row, and the next
    teacher_ptr,
    start,
    num_columns,
    student_top,
    teacher_top,
    beside,
    student_log_sum,
    teacher_log_sum,
    log_ratio,
    at_top,
    log_m,
    share,
    student_scale,
    teacher_scale,
    student_softcap,
    teacher_softcap,
    beta,
    student_share,
    divergence,  # [BLOCK]
    mean,  # [BLOCK], or scalar for forward_kl
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """One block of columns into a row's sums, slot by slot."""
    EXACT_S: tl.constexpr = student_ptr.dtype.element_ty == tl.float32
    EXACT: tl.constexpr = EXACT_S or teacher_ptr.dtype.element_ty == tl.float32
    columns = start + tl.arange(0, BLOCK)
    s, t, r, u, p_s, p_t, teacher_log_sum, _ = _both(
        student_ptr, teacher_ptr, columns, num_columns, num_columns, student_top, teacher_top, beside,
        student_log_sum, teacher_log_sum, log_ratio, at_top, student_scale, teacher_scale, student_softcap,
        teacher_softcap, KIND, STUDENT_SOFTCAP, TEACHER_SOFTCAP, RAGGED,
    )  # fmt: skip
    added = _terms(
        s, t, r, p_s, p_t, student_log_sum, teacher_log_sum, beta, student_share, KIND, EXACT
    )  # fmt: skip
    divergence += tl.where(columns < num_columns, added, 0.0) if RAGGED else added
    if KIND != _FORWARD_KL:
        pull = _pull(
            s, t, r, u, at_top, log_m, share, student_log_sum, teacher_log_sum, beta, student_share, KIND,
            EXACT,
        )  # fmt: skip
        added = _of_student(p_s, pull, KIND, EXACT)
        mean += tl.where(columns < num_columns, added, 0.0) if RAGGED else added
    return divergence, mean


@triton.jit
def _divergence_sums_kernel(
    student_ptr,  # [C, V]
    teacher_ptr,  # [C, V_t]
    student_top_ptr,  # [C] fp32: of _terms_of, and the next eight
    student_log_sum_ptr,
    teacher_top_ptr,
    teacher_log_sum_ptr,
    log_ratio_ptr,
    beside_ptr,
    at_top_ptr,
    log_m_ptr,
    share_ptr,
    valid_columns_ptr,  # [1] int64
    sums_ptr,  # [2, C] fp32, out
    student_stride,
    teacher_stride,
    num_rows,
    num_columns,
    student_scale,
    teacher_scale,
    student_softcap,
    teacher_softcap,
    beta,
    student_share,  # 1 - beta
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    if MASKED:
        num_columns = tl.load(valid_columns_ptr).to(tl.int32)
    student_top = tl.load(student_top_ptr + row)
    teacher_top = tl.load(teacher_top_ptr + row)
    student_log_sum = tl.load(student_log_sum_ptr + row)
    teacher_log_sum = tl.load(teacher_log_sum_ptr + row)
    log_ratio = tl.load(log_ratio_ptr + row)
    beside = tl.load(beside_ptr + row)
    at_top, log_m, share = tl.load(at_top_ptr + row), tl.load(log_m_ptr + row), tl.load(share_ptr + row)
    divergence = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32) if KIND != _FORWARD_KL else tl.full((), 0.0, tl.float32)
    whole = num_columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        divergence, mean = _add_block(
            student_ptr, teacher_ptr, start, num_columns, student_top, teacher_top, beside, student_log_sum,
            teacher_log_sum, log_ratio, at_top, log_m, share, student_scale, teacher_scale, student_softcap,
            teacher_softcap, beta, student_share, divergence, mean, BLOCK, KIND, STUDENT_SOFTCAP,
            TEACHER_SOFTCAP, False,
        )  # fmt: skip
    if whole < num_columns:
        divergence, mean = _add_block(
            student_ptr, teacher_ptr, whole, num_columns, student_top, teacher_top, beside, student_log_sum,
            teacher_log_sum, log_ratio, at_top, log_m, share, student_scale, teacher_scale, student_softcap,
            teacher_softcap, beta, student_share, divergence, mean, BLOCK, KIND, STUDENT_SOFTCAP,
            TEACHER_SOFTCAP, True,
        )  # fmt: skip
    # NaN if a logit is: what is chosen by a comparison may have lost it.
    lost = (student_log_sum + teacher_log_sum) * 0.0
    tl.store(sums_ptr + row, tl.sum(divergence, axis=0) + lost)
    if KIND != _FORWARD_KL:
        lost += tl.sum(mean, axis=0)
    tl.store(sums_ptr + num_rows + row, lost)


@triton.jit
def _divergence_gradients_kernel(
    student_ptr,  # [C, V]
    teacher_ptr,  # [C, V_t]
    out_ptr,  # [C, V], may be student_ptr
    student_top_ptr,  # [C] fp32: of _terms_of, and the next eight
    student_log_sum_ptr,
    teacher_top_ptr,
    teacher_log_sum_ptr,
    log_ratio_ptr,
    beside_ptr,
    at_top_ptr,
    log_m_ptr,
    share_ptr,
    mean_ptr,  # [C] fp32
    valid_columns_ptr,  # [1] int64
    factor_ptr,  # [C] fp32
    part_ptr,  # [C, blocks] fp32, out: each block's part of the divergence
    label_ptr,  # [C] int64: records.LabelTerm, and the next three
    label_weight_ptr,
    label_inv_sum_ptr,
    label_one_minus_p_ptr,
    student_stride,
    teacher_stride,
    out_stride,
    num_columns,
    teacher_columns,
    student_scale,
    teacher_scale,
    student_softcap,
    teacher_softcap,
    beta,
    student_share,  # 1 - beta
    temperature,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    FACTOR: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    LABEL: tl.constexpr,
):
    """One program per row and block of columns; each element is read once, then written."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    valid = inside
    if MASKED:  # loads are by the widths, of which the compiler knows that they are multiples of 16
        valid = columns < tl.load(valid_columns_ptr)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    student_log_sum = tl.load(student_log_sum_ptr + row)
    EXACT_S: tl.constexpr = student_ptr.dtype.element_ty == tl.float32
    EXACT: tl.constexpr = EXACT_S or teacher_ptr.dtype.element_ty == tl.float32
    at_top, log_m, share = tl.load(at_top_ptr + row), tl.load(log_m_ptr + row), tl.load(share_ptr + row)
    s, t, r, u, p_s, p_t, teacher_log_sum, slope = _both(
        student_ptr, teacher_ptr, columns, num_columns, teacher_columns,
        tl.load(student_top_ptr + row), tl.load(teacher_top_ptr + row), tl.load(beside_ptr + row),
        student_log_sum, tl.load(teacher_log_sum_ptr + row), tl.load(log_ratio_ptr + row), at_top,
        student_scale, teacher_scale, student_softcap, teacher_softcap, KIND, STUDENT_SOFTCAP,
        TEACHER_SOFTCAP, True,
    )  # fmt: skip
    if WITH_SUMS:
        divergence = _terms(
            s, t, r, p_s, p_t, student_log_sum, teacher_log_sum, beta, student_share, KIND, EXACT
        )  # fmt: skip
        part = tl.sum(tl.where(valid, divergence, 0.0), axis=0) + (student_log_sum + teacher_log_sum) * 0.0
        tl.store(part_ptr + row * tl.num_programs(1) + block, part)
    if KIND == _FORWARD_KL:
        gradient = tl.where(tl.abs(r) <= _SERIES_UP_TO, p_t * (r + _h(r)), p_s - p_t)
    else:
        pull = _pull(
            s, t, r, u, at_top, log_m, share, student_log_sum, teacher_log_sum, beta, student_share, KIND,
            EXACT,
        )  # fmt: skip
        gradient = _of_student(p_s, pull - tl.load(mean_ptr + row), KIND, EXACT)
        if KIND == _JSD:
            gradient *= student_share
    if LABEL:
        label = tl.load(label_ptr + row)
        label = tl.where((label >= 0) & (label < num_columns), label, -1).to(tl.int32)
        weight = tl.load(label_weight_ptr + row)
        label_scale = weight * tl.load(label_inv_sum_ptr + row)
        at_label = -weight * tl.load(label_one_minus_p_ptr + row)
        e = _exp(s * temperature, EXACT_S)
        gradient += tl.where(columns == label, at_label, e * label_scale)
    if STUDENT_SOFTCAP:
        gradient *= slope
    if FACTOR:
        gradient *= tl.load(factor_ptr + row)
    gradient = tl.where(valid, gradient, 0.0)
    tl.store(out_ptr + row * out_stride + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)


#: Left alone, ptxas takes 96 registers and spills a few bytes; of 136, jsd does so on sm_100. Up to 168 an
#: SM holds three programs; the plain variants over bf16 take 122 at most, of which it holds four.
_divergence_sums = Launch(_divergence_sums_kernel, num_warps=SUMS_WARPS, maxnreg=168)
_divergence_gradients = Launch(_divergence_gradients_kernel, num_warps=GRADIENT_WARPS)


def _terms_of(student: Side, teacher: Side, kind: str, beta: float, exact: bool) -> tuple[Tensor, ...]:
    """Both sides' ``[C]``, in the kernels' order; last r where u is 0, and of jsd log(m / p_s) there.

    Of jsd over fp32 logits, rounded once, what :func:`_log_mixture` takes: log(beta * p_s / m) there, which
    has yet to have a class's r subtracted, log((1 - beta) * p_s / m), and beta's share of m.
    """
    assert teacher.log_ratio is not None
    dtype = torch.float64 if exact and kind == "jsd" else torch.float32
    at_top, beside = -teacher.log_ratio.to(dtype), teacher.top
    if teacher.beside is not None:
        beside = teacher.beside
        of_beside, of_top = beside.to(dtype), teacher.top.to(dtype)
        unit, cap = teacher.scale, teacher.softcap
        if cap is not None:
            of_beside, of_top = (torch.tanh(of * (teacher.scale / cap)) for of in (of_beside, of_top))
            unit = cap
        at_top = at_top - (of_beside - of_top) * unit
    log_m = share = at_top
    if kind == "jsd":
        less = math.log1p(-beta)
        log_m = torch.logaddexp(math.log(beta) - at_top, torch.full_like(at_top, less))
        if exact:
            more = math.log(beta) - log_m
            share = (more - at_top).exp().float()
            at_top, log_m = more.float(), (less - log_m).float()
    sides = student.top, student.log_sum, teacher.top, teacher.log_sum
    return *sides, teacher.log_ratio, beside, at_top, log_m, share


def divergence_sums(
    student: Side,
    teacher: Side,
    kind: str,  # of DIVERGENCES
    beta: float,  # jsd
    valid_columns: Tensor | None,  # int64 [1]; None: all of the student's
) -> Tensor:
    """This shard's part of the divergence, and of the mean that its gradient subtracts: fp32 ``[2, C]``.

    :func:`divergence_gradients` needs the second summed over all shards; for forward_kl it is 0.
    """
    num_rows, num_columns = student.logits.shape
    sums = student.top.new_empty((2, num_rows))
    exact = torch.float32 in (student.logits.dtype, teacher.logits.dtype)
    _divergence_sums(
        (num_rows,),
        (
            student.logits,
            teacher.logits,
            *_terms_of(student, teacher, kind, beta, exact),
            student.logits if valid_columns is None else valid_columns,
            sums,
        ),
        (
            student.logits.stride(0),
            teacher.logits.stride(0),
            num_rows,
            num_columns,
            student.scale,
            teacher.scale,
            student.softcap or 1.0,
            teacher.softcap or 1.0,
            beta,
            1.0 - beta,
        ),
        BLOCK=min(FP32_BLOCK if exact else SUMS_BLOCK, next_power_of_2(num_columns)),
        KIND=DIVERGENCES.index(kind),
        MASKED=valid_columns is not None,
        STUDENT_SOFTCAP=student.softcap is not None,
        TEACHER_SOFTCAP=teacher.softcap is not None,
    )
    return sums


def divergence_gradients(
    student: Side,
    teacher: Side,
    kind: str,  # of DIVERGENCES
    beta: float,  # jsd
    valid_columns: Tensor | None,  # int64 [1]; None: all of the student's
    mean: Tensor | None,  # fp32 [C], of all shards; None for forward_kl
    out: Tensor,  # [C, V], unit column stride, any dtype; may be the student's logits
    label: LabelTerm | None = None,
    factor: Tensor | None = None,  # fp32 [C]
    with_sums: bool = False,
) -> Tensor | None:
    """``out = factor * (d + label's term)`` by the student's logits before its softcap, times its scale.

    Without the scale itself: that belongs to ``factor``. Columns that are not valid get 0. With
    ``with_sums`` the first row of :func:`divergence_sums`, fp32 ``[C]``, from the same pass; its order of
    summation is fixed.
    """
    num_rows, num_columns = student.logits.shape
    exact = torch.float32 in (student.logits.dtype, teacher.logits.dtype)
    block = min(FP32_BLOCK if exact else GRADIENT_BLOCK, next_power_of_2(num_columns))
    num_blocks = ceil_div(num_columns, block)
    unused = student.top
    parts = unused.new_empty((num_rows, num_blocks)) if with_sums else None
    any_label = label or LabelTerm(unused, unused, unused, unused)
    _divergence_gradients(
        (num_rows, num_blocks),
        (
            student.logits,
            teacher.logits,
            out,
            *_terms_of(student, teacher, kind, beta, exact),
            unused if mean is None else mean,
            unused if valid_columns is None else valid_columns,
            unused if factor is None else factor,
            unused if parts is None else parts,
            *any_label[:4],
        ),
        (
            student.logits.stride(0),
            teacher.logits.stride(0),
            out.stride(0),
            num_columns,
            teacher.logits.shape[1],
            student.scale,
            teacher.scale,
            student.softcap or 1.0,
            teacher.softcap or 1.0,
            beta,
            1.0 - beta,
            any_label.temperature,
        ),
        BLOCK=block,
        KIND=DIVERGENCES.index(kind),
        MASKED=valid_columns is not None,
        STUDENT_SOFTCAP=student.softcap is not None,
        TEACHER_SOFTCAP=teacher.softcap is not None,
        FACTOR=factor is not None,
        WITH_SUMS=with_sums,
        LABEL=label is not None,
    )
    return None if parts is None else parts.sum(dim=1)
