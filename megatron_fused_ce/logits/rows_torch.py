"""The row kernels, two passes over a chunk of logits, in plain PyTorch: for CPUs, and to test Triton's.

Both go through the rows in blocks, so that their fp32 temporaries stay far below a chunk of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import (
    NO_OPTIONS,
    NOT_HERE,
    ExtraStatistics,
    GradCoefficients,
    RowOptions,
    RowStatistics,
)

#: Elements of one fp32 temporary (512 KiB).
BLOCK_ELEMENTS = 1 << 17


def row_blocks(num_rows: int, num_columns: int) -> list[slice]:
    """Slices of rows with at most :data:`BLOCK_ELEMENTS` elements each, but at least one row."""
    rows = max(1, BLOCK_ELEMENTS // max(1, num_columns))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def scaled_logits(
    logits: Tensor, logit_scale: float, softcap: float | None, in_place: bool = False
) -> Tensor:
    """The scaled and softcapped logits in fp32: a new tensor, or ``in_place`` for fp32 logits."""
    z = logits.to(torch.float32, copy=not in_place)
    if logit_scale != 1.0:
        z.mul_(logit_scale)
    if softcap is not None:
        z.div_(softcap).tanh_().mul_(softcap)
    return z


def relative_logits(
    logits: Tensor,  # [rows, V]
    top: Tensor,  # [rows, 1]
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``softcap(scale * logits) - softcap(scale * top)`` in a new fp64 tensor, exactly 0 at ``top``.

    A row whose ``top`` is -inf is -inf throughout.
    """
    z, top = logits.double(), top.double()
    if softcap is not None:
        return z.mul_(scale / softcap).tanh_().sub_((top * (scale / softcap)).tanh()).mul_(softcap)
    return z.sub_(top.masked_fill(top == -torch.inf, 0.0)).mul_(scale)


def softcap_gradient(logits: Tensor, logit_scale: float, softcap: float) -> Tensor:
    """``1 - tanh(scale * logits / softcap)**2`` in fp32, by a formula that keeps its digits."""
    e = logits.to(torch.float32, copy=True).mul_(logit_scale / softcap).abs_().mul_(-2).exp_()
    return 4 * e / (1 + e).square()


def masked_columns(logits: Tensor, valid_columns: Tensor | None) -> Tensor | None:
    """Which columns are masked padding, bool ``[V]``; None if all are valid."""
    if valid_columns is None:
        return None
    return torch.arange(logits.shape[1], device=logits.device) >= valid_columns


def columns_here(labels: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Columns of the labels ``[rows, 1]``, and which labels are in this shard; the others get column 0."""
    labels = labels.unsqueeze(-1)
    here = (labels >= 0) & (labels < num_columns)
    return torch.where(here, labels, 0), here


def row_statistics(
    logits: Tensor,  # [C, V]
    local_labels: Tensor,  # [C] int64, columns of this shard; other values are labels of other shards
    logit_scale: float,
    with_argmax: bool = False,
    form: RowOptions = NO_OPTIONS,
    inv_temperature: Tensor | None = None,  # [C] fp32, 1 / temperature, after the softcap
) -> RowStatistics:
    """Compute the statistics of each row: maximum, sum of exponentials without the label's, label's logit."""
    num_rows, num_columns = logits.shape
    shard = logits.new_empty((4, num_rows), dtype=torch.float32)
    argmax = torch.empty_like(local_labels) if with_argmax or form.with_rest else None
    logit_sum = torch.empty_like(shard[0]) if form.with_logit_sum else None
    weighted = torch.empty_like(shard[0]) if form.with_weighted else None
    rest = torch.empty_like(shard[0], dtype=torch.float64) if form.with_rest else None
    masked = masked_columns(logits, form.valid_columns)
    for rows in row_blocks(num_rows, num_columns):
        z = scaled_logits(logits[rows], logit_scale, form.softcap)
        if inv_temperature is not None:
            z.mul_(inv_temperature[rows].unsqueeze(-1))
        if logit_sum is not None:
            valid = z if masked is None else z.masked_fill(masked, 0.0)
            logit_sum[rows] = valid.sum(dim=-1)
        if masked is not None:
            z.masked_fill_(masked, -torch.inf)
        block_max, block_argmax = z.max(dim=-1)
        if rest is not None:
            at = block_argmax.unsqueeze(-1)
            others = relative_logits(logits[rows], logits[rows].gather(-1, at), logit_scale, form.softcap)
            others.scatter_(-1, at, -torch.inf)
            if masked is not None:
                others.masked_fill_(masked, -torch.inf)
            rest[rows] = others.exp_().sum(dim=-1)
        columns, here = columns_here(local_labels[rows], num_columns)
        at_label = z.gather(-1, columns)
        label_logit = torch.where(here, at_label, NOT_HERE).squeeze(-1)
        row_shift = block_max.masked_fill(block_max == -torch.inf, 0.0)
        # -inf leaves the label's own column out of the sum.
        z.scatter_(-1, columns, at_label.masked_fill_(here, -torch.inf))
        shifted = z.sub_(row_shift.unsqueeze(-1))
        e = shifted.exp() if weighted is not None else shifted.exp_()
        if weighted is not None:
            weighted[rows] = shifted.mul_(e).masked_fill_(e == 0, 0.0).sum(dim=-1)
        shard[:, rows] = torch.stack((block_max, block_max, e.sum(dim=-1), label_logit))
        if argmax is not None:
            argmax[rows] = block_argmax
    extra = ExtraStatistics(logit_sum, weighted, rest=rest)
    return RowStatistics(shard, argmax, extra)


def row_gradients(
    logits: Tensor,  # [C, V]
    local_labels: Tensor,  # [C] int64
    coefficients: GradCoefficients,
    logit_scale: float,
    out: Tensor,  # [C, V] in the logits' dtype; may be `logits` itself
    form: RowOptions = NO_OPTIONS,
    inv_temperature: Tensor | None = None,  # [C] fp32, 1 / temperature; ``coefficients`` have its factor
) -> Tensor:
    """Write the gradient of the logits, ``d loss / d z`` times the upstream gradient, into ``out``."""
    num_rows, num_columns = logits.shape
    masked = masked_columns(logits, form.valid_columns)
    for rows in row_blocks(num_rows, num_columns):
        softcap_grad = None
        if form.softcap is not None:
            softcap_grad = softcap_gradient(logits[rows], logit_scale, form.softcap)
        shifted = scaled_logits(logits[rows], logit_scale, form.softcap)
        if inv_temperature is not None:
            shifted.mul_(inv_temperature[rows].unsqueeze(-1))
        shifted.sub_(coefficients.row_max[rows].unsqueeze(-1))
        e = shifted.exp() if coefficients.entropy_scale is not None else shifted.exp_()
        scale = coefficients.scale[rows].unsqueeze(-1)
        if coefficients.entropy_scale is not None:
            shifted.mul_(coefficients.entropy_scale[rows].unsqueeze(-1)).add_(scale)
            e = shifted.mul_(e).masked_fill_(e == 0, 0.0)
        else:
            e.mul_(scale)
        if coefficients.smoothing_per_class is not None:
            e.sub_(coefficients.smoothing_per_class[rows].unsqueeze(-1))
        columns, here = columns_here(local_labels[rows], num_columns)
        at_label = -coefficients.neg_label_grad[rows].unsqueeze(-1)
        e.scatter_(-1, columns, at_label.where(here, e.gather(-1, columns)))
        if softcap_grad is not None:
            e.mul_(softcap_grad)
        if masked is not None:
            e.masked_fill_(masked, 0.0)
        out[rows] = e.mul_(coefficients.factor[rows].unsqueeze(-1))
    return out
