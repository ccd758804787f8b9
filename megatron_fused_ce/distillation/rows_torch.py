"""Row passes of a divergence over the whole vocabulary, in plain PyTorch: for CPUs, and to test Triton's.

Both walk the rows in blocks, as :mod:`.rows_torch` does, in fp64. The formulas stand in
``kernels/divergence.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import LabelTerm, Side
from megatron_fused_ce.logits.rows_torch import masked_columns, relative_logits, row_blocks, softcap_gradient


class _Pair(NamedTuple):
    """Some rows of both sides, fp64 ``[rows, V]``."""

    s: Tensor  # relative to the student's largest
    p_s: Tensor
    p_t: Tensor
    r: Tensor  # log p_s - log p_t
    u: Tensor  # r, less what it is where the student's logit is the largest: exactly 0 there
    at_top: Tensor  # [rows, 1]: what it is there


def _row_blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """At most a third of the rows at a time: fp64 of both sides beside each other is large."""
    for block in row_blocks(num_rows, num_columns):
        step = -(-(block.stop - block.start) // 3)
        for start in range(block.start, block.stop, step):
            yield slice(start, min(start + step, block.stop))


def _pair(student: Side, teacher: Side, rows: slice, num_columns: int) -> _Pair:
    s, t = (_relative(side, side.top, rows, num_columns) for side in (student, teacher))
    assert teacher.log_ratio is not None
    student_sum, teacher_sum, log_ratio = (
        of[rows].double().unsqueeze(-1) for of in (student.log_sum, teacher.log_sum, teacher.log_ratio)
    )
    u = r = (s - t) - log_ratio
    at_top = -log_ratio
    if teacher.beside is not None:
        u = s - _relative(teacher, teacher.beside, rows, num_columns)
        beside = teacher._replace(logits=teacher.beside.unsqueeze(-1))
        at_top = at_top - _relative(beside, teacher.top, rows, 1)
    return _Pair(s, (s - student_sum).exp_(), (t - teacher_sum).exp_(), r, u, at_top)


def _relative(side: Side, to: Tensor, rows: slice, num_columns: int) -> Tensor:
    return relative_logits(side.logits[rows, :num_columns], to[rows].unsqueeze(-1), side.scale, side.softcap)


def _excess(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """``p * (exp(x) - 1 - x) = q - p - p * x`` for ``x = log(q / p)``: what a class adds to KL(p || q)."""
    far = q - p - torch.where(p == 0.0, 0.0, p * x)
    far = torch.where(x == -torch.inf, torch.inf, far)  # a p that underflows, too
    return torch.where(x.abs() <= 1.0, p * (torch.expm1(x) - x), far)


def _log_mixture(x: Tensor, share: float | Tensor, log_share: float | Tensor) -> Tensor:
    """``log(1 - share + share * exp(x))``, to its own digits; ``share`` and its logarithm in [0, 1]."""
    share, log_share = (torch.as_tensor(of, dtype=x.dtype, device=x.device) for of in (share, log_share))
    far = torch.logaddexp(torch.log1p(-share), log_share + x)
    return torch.where(x > 1.0, far, torch.log1p(share * torch.expm1(x)))


def _terms(pair: _Pair, kind: str, beta: float) -> Tensor:
    """What each class adds to the divergence."""
    _, p_s, p_t, r, _, _ = pair
    if kind == "forward_kl":
        return _excess(p_t, p_s, r)
    if kind == "reverse_kl":
        return _excess(p_s, p_t, -r)
    m = (1.0 - beta) * p_s + beta * p_t
    of_student = _excess(p_s, m, _log_mixture(-r, beta, math.log(beta)))
    of_teacher = _excess(p_t, m, _log_mixture(r, 1.0 - beta, math.log1p(-beta)))
    return beta * of_teacher + (1.0 - beta) * of_student


def _pull(pair: _Pair, kind: str, beta: float) -> Tensor:
    """reverse_kl: u. jsd: ``log(p_s / m)``, less what it is where u is 0."""
    if kind == "reverse_kl":
        return pair.u
    # m / p_s there is 1 - beta + beta * exp(-at_top); of a class, times 1 - share + share * exp(-u).
    log_share = math.log(beta) - pair.at_top
    log_share = log_share - torch.logaddexp(log_share, torch.full_like(log_share, math.log1p(-beta)))
    return -_log_mixture(-pair.u, log_share.exp(), log_share)


def _of_student(p_s: Tensor, pull: Tensor) -> Tensor:
    """``p_s * pull``: 0 where ``p_s`` is."""
    return (p_s * pull).masked_fill_(p_s == 0.0, 0.0)


def _gradient(pair: _Pair, kind: str, beta: float, mean: Tensor | None) -> Tensor:
    """By the student's logits ``s``; ``mean`` [rows, 1]."""
    if kind == "forward_kl":
        near = pair.p_t * torch.expm1(pair.r)
        return torch.where(pair.r.abs() <= 1.0, near, pair.p_s - pair.p_t)
    assert mean is not None
    gradient = _of_student(pair.p_s, _pull(pair, kind, beta) - mean)
    return gradient.mul_(1.0 - beta) if kind == "jsd" else gradient


def divergence_sums(
    student: Side,
    teacher: Side,
    kind: str,
    beta: float,
    valid_columns: Tensor | None,
) -> Tensor:
    """This shard's part of the divergence, and of the mean that the gradient subtracts: fp32 ``[2, C]``."""
    num_rows, num_columns = _shape(student, teacher)
    sums = student.top.new_zeros((2, num_rows))
    masked = masked_columns(student.logits[:, :num_columns], valid_columns)
    for rows in _row_blocks(num_rows, num_columns):
        pair = _pair(student, teacher, rows, num_columns)
        sums[0, rows] = _row_sums(_terms(pair, kind, beta), masked)
        if kind != "forward_kl":
            sums[1, rows] = _row_sums(_of_student(pair.p_s, _pull(pair, kind, beta)), masked)
    assert teacher.log_ratio is not None
    sums[1] += 0.0 * teacher.log_ratio  # NaN if a logit is: u of the others has no teacher's sum
    return sums


def divergence_gradients(
    student: Side,
    teacher: Side,
    kind: str,
    beta: float,
    valid_columns: Tensor | None,
    mean: Tensor | None,
    out: Tensor,  # [C, V], may be the student's logits
    label: LabelTerm | None = None,
    factor: Tensor | None = None,  # [C] fp32
    with_sums: bool = False,
) -> Tensor | None:
    """The divergence's gradient by the student's logits before scale and softcap, the scale left out."""
    num_rows, num_columns = _shape(student, teacher)
    sums = torch.empty_like(student.top) if with_sums else None
    masked = masked_columns(student.logits[:, :num_columns], valid_columns)
    for rows in _row_blocks(num_rows, num_columns):
        pair = _pair(student, teacher, rows, num_columns)
        if sums is not None:
            sums[rows] = _row_sums(_terms(pair, kind, beta), masked)
        of_rows = None if mean is None else mean[rows].double().unsqueeze(-1)
        gradient = _gradient(pair, kind, beta, of_rows)
        if label is not None:
            gradient.add_(_label_gradient(pair.s, label, rows))
        if student.softcap is not None:
            logits = student.logits[rows, :num_columns]
            gradient.mul_(softcap_gradient(logits, student.scale, student.softcap))
        if factor is not None:
            gradient.mul_(factor[rows].unsqueeze(-1))
        if masked is not None:
            gradient.masked_fill_(masked, 0.0)
        out[rows, :num_columns] = gradient.to(out.dtype)
        out[rows, num_columns:] = 0.0
    return sums


def _label_gradient(s: Tensor, label: LabelTerm, rows: slice) -> Tensor:
    weight = label.weight[rows].unsqueeze(-1)
    gradient = (s * label.temperature).exp_().mul_(weight * label.inv_sum[rows].unsqueeze(-1))
    here = torch.arange(s.shape[1], device=s.device) == label.columns[rows].unsqueeze(-1)
    at_label = -weight * label.one_minus_p[rows].unsqueeze(-1)
    return torch.where(here, at_label.double(), gradient)


def _shape(student: Side, teacher: Side) -> tuple[int, int]:
    """Rows, and the columns that both sides have: all that may be valid."""
    return student.logits.shape[0], min(student.logits.shape[1], teacher.logits.shape[1])


def _row_sums(terms: Tensor, masked: Tensor | None) -> Tensor:
    """fp32 ``[rows]``."""
    return (terms if masked is None else terms.masked_fill_(masked, 0.0)).sum(dim=-1).float()
