"""Row passes of a divergence over the whole vocabulary, in plain PyTorch: for CPUs, and to test Triton's.

Both walk the rows in blocks, as :mod:`.rows_torch` does. The formulas stand in ``kernels/divergence.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import SERIES_UP_TO, LabelTerm, Side
from megatron_fused_ce.logits.rows_torch import masked_columns, row_blocks, scaled_logits, softcap_gradient


class _Pair(NamedTuple):
    """Both sides' probabilities of some rows, fp32 ``[rows, V]``, and ``r = log p_s - log p_t``."""

    p_s: Tensor
    p_t: Tensor
    r: Tensor


def _pair(student: Side, teacher: Side, rows: slice, num_columns: int) -> _Pair:
    a_s, p_s = _probabilities(student, rows, num_columns)
    a_t, p_t = _probabilities(teacher, rows, num_columns)
    return _Pair(p_s, p_t, (a_s - a_t) - (student.log_sum[rows] - teacher.log_sum[rows]).unsqueeze(-1))


def _probabilities(side: Side, rows: slice, num_columns: int) -> tuple[Tensor, Tensor]:
    """``s - row_max`` and the probabilities."""
    shifted = scaled_logits(side.logits[rows, :num_columns], side.scale, side.softcap)
    shifted.sub_(side.row_max[rows].unsqueeze(-1))
    return shifted, shifted.exp().mul_(side.log_sum[rows].neg().exp().unsqueeze(-1))


def _h(x: Tensor) -> Tensor:
    """``exp(x) - 1 - x`` for ``abs(x) <= 1/4``, to a relative error of 1e-8."""
    series = 1.0 + x / 7.0
    for n in (6.0, 5.0, 4.0, 3.0):
        series = 1.0 + x / n * series
    return 0.5 * x * x * series


def _excess(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """``p * (exp(x) - 1 - x) = q - p - p * x`` for ``x = log(q / p)``: what a class adds to KL(p || q)."""
    plain = q - p - torch.where(p == 0.0, 0.0, p * x)
    plain = torch.where(x == -torch.inf, torch.inf, plain)  # a p that underflows, too
    return torch.where(x.abs() <= SERIES_UP_TO, p * _h(x), plain)


def _of_mixture(r: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``log m - log p_s`` and ``log m - log p_t`` for ``m = (1 - beta) p_s + beta p_t``."""
    distance = r.abs()
    of_smaller = torch.full_like(r, beta).where(r > 0.0, 1.0 - beta)  # of two numbers: the default dtype
    of_larger = torch.full_like(r, 1.0 - beta).where(r > 0.0, beta)
    to_larger = torch.log(of_larger + of_smaller * torch.exp(-distance))
    to_smaller = to_larger + distance
    x_s, x_t = to_smaller.where(r <= 0.0, to_larger), to_larger.where(r <= 0.0, to_smaller)
    near = distance <= SERIES_UP_TO
    return (
        torch.where(near, torch.log1p(beta * torch.expm1(-r)), x_s),
        torch.where(near, torch.log1p((1.0 - beta) * torch.expm1(r)), x_t),
    )


def _terms(pair: _Pair, kind: str, beta: float) -> tuple[Tensor, Tensor | None]:
    """What each class adds to the divergence, and to KL(p_s || m) if a gradient needs that."""
    p_s, p_t, r = pair
    if kind == "forward_kl":
        return _excess(p_t, p_s, r), None
    if kind == "reverse_kl":
        of_student = _excess(p_s, p_t, -r)
        return of_student, of_student
    m = (1.0 - beta) * p_s + beta * p_t
    x_s, x_t = _of_mixture(r, beta)
    of_student = _excess(p_s, m, x_s)
    return beta * _excess(p_t, m, x_t) + (1.0 - beta) * of_student, of_student


def _gradient(pair: _Pair, kind: str, beta: float, kl_student: Tensor | None) -> Tensor:
    """By the student's logits ``s``; ``kl_student`` [rows, 1]."""
    p_s, p_t, r = pair
    if kind == "forward_kl":
        return torch.where(r.abs() <= SERIES_UP_TO, p_t * (r + _h(r)), p_s - p_t)
    assert kl_student is not None
    if kind == "reverse_kl":
        gradient = p_s * (r - kl_student)
    else:
        x_s, _ = _of_mixture(r, beta)
        gradient = (beta - 1.0) * p_s * (x_s + kl_student)
    return gradient.masked_fill_(p_s == 0.0, 0.0)


def _label_gradient(student: Side, label: LabelTerm, rows: slice, num_columns: int) -> Tensor:
    s = scaled_logits(student.logits[rows, :num_columns], student.scale, student.softcap)
    s.mul_(label.temperature).sub_(label.row_max[rows].unsqueeze(-1))
    weight = label.weight[rows].unsqueeze(-1)
    gradient = s.exp_().mul_(weight * label.inv_sum[rows].unsqueeze(-1))
    columns = label.columns[rows].unsqueeze(-1)
    here = torch.arange(num_columns, device=columns.device) == columns
    return torch.where(here, -weight * label.one_minus_p[rows].unsqueeze(-1), gradient)


def divergence_sums(
    student: Side,
    teacher: Side,
    kind: str,
    beta: float,
    valid_columns: Tensor | None,
) -> Tensor:
    """This shard's part of the divergence, and of KL(p_s || m): fp32 ``[2, C]``."""
    num_rows, num_columns = _shape(student, teacher)
    sums = student.row_max.new_zeros((2, num_rows))
    masked = masked_columns(student.logits[:, :num_columns], valid_columns)
    for rows in row_blocks(num_rows, num_columns):
        pair = _pair(student, teacher, rows, num_columns)
        for out, terms in zip(sums, _terms(pair, kind, beta), strict=True):
            if terms is not None:
                out[rows] = _row_sums(terms, masked)
    return sums


def divergence_gradients(
    student: Side,
    teacher: Side,
    kind: str,
    beta: float,
    valid_columns: Tensor | None,
    kl_student: Tensor | None,
    out: Tensor,  # [C, V], may be the student's logits
    label: LabelTerm | None = None,
    factor: Tensor | None = None,  # [C] fp32
    with_sums: bool = False,
) -> Tensor | None:
    """The divergence's gradient by the student's logits before scale and softcap, the scale left out."""
    num_rows, num_columns = _shape(student, teacher)
    sums = torch.empty_like(student.row_max) if with_sums else None
    masked = masked_columns(student.logits[:, :num_columns], valid_columns)
    for rows in row_blocks(num_rows, num_columns):
        pair = _pair(student, teacher, rows, num_columns)
        if sums is not None:
            sums[rows] = _row_sums(_terms(pair, kind, beta)[0], masked)
        kl = None if kl_student is None else kl_student[rows].unsqueeze(-1)
        gradient = _gradient(pair, kind, beta, kl)
        if label is not None:
            gradient.add_(_label_gradient(student, label, rows, num_columns))
        if student.softcap is not None:
            logits = student.logits[rows, :num_columns]
            gradient.mul_(softcap_gradient(logits, student.scale, student.softcap))
        if factor is not None:
            gradient.mul_(factor[rows].unsqueeze(-1))
        if masked is not None:
            gradient.masked_fill_(masked, 0.0)
        out[rows, :num_columns] = gradient
        out[rows, num_columns:] = 0.0
    return sums


def _shape(student: Side, teacher: Side) -> tuple[int, int]:
    """Rows, and the columns that both sides have: all that may be valid."""
    return student.logits.shape[0], min(student.logits.shape[1], teacher.logits.shape[1])


def _row_sums(terms: Tensor, masked: Tensor | None) -> Tensor:
    return (terms if masked is None else terms.masked_fill_(masked, 0.0)).sum(dim=-1)
