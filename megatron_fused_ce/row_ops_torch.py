"""The two passes over a chunk of logits in plain PyTorch: the CPU path, and the Triton kernels' twin.

Both walk the rows in blocks, so that their fp32 temporaries stay far below a chunk of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fused_ce.loss_form import PLAIN, LossForm
from megatron_fused_ce.row_ops import NOT_HERE, RowStatistics, TokenTerms

#: Elements of one fp32 temporary (512 KiB).
BLOCK_ELEMENTS = 1 << 17


def _row_blocks(num_rows: int, num_columns: int) -> list[slice]:
    rows = max(1, BLOCK_ELEMENTS // max(1, num_columns))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def _scaled(logits: Tensor, logit_scale: float, form: LossForm) -> Tensor:
    """A new fp32 tensor: the logits that the loss is made of."""
    z = logits.to(torch.float32, copy=True).mul_(logit_scale)
    if form.softcap is not None:
        z.div_(form.softcap).tanh_().mul_(form.softcap)
    return z


def _masked(logits: Tensor, form: LossForm) -> Tensor | None:
    """Which columns take no part, bool ``[V]``; None where all do."""
    if form.num_columns is None:
        return None
    return torch.arange(logits.shape[1], device=logits.device) >= form.num_columns


def row_statistics(
    logits: Tensor,  # [C, V]
    local_labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    logit_scale: float,
    with_argmax: bool = False,
    form: LossForm = PLAIN,
) -> RowStatistics:
    """Row maximum, sum of exponentials without the label's column, and the label's logit."""
    num_rows, num_columns = logits.shape
    shard = logits.new_empty((4, num_rows), dtype=torch.float32)
    argmax = torch.empty_like(local_labels) if with_argmax else None
    logit_sum = None if form.sigma is None else torch.empty_like(shard[0])
    masked = _masked(logits, form)
    for rows in _row_blocks(num_rows, num_columns):
        z = _scaled(logits[rows], logit_scale, form)
        if logit_sum is not None:
            taking_part = z if masked is None else z.masked_fill(masked, 0.0)
            logit_sum[rows] = taking_part.sum(dim=-1)
        if masked is not None:
            z.masked_fill_(masked, -torch.inf)
        block_max, block_argmax = z.max(dim=-1)
        labels = local_labels[rows]
        here = (labels >= 0) & (labels < num_columns)
        column = torch.where(here, labels, 0).unsqueeze(-1)
        picked = z.gather(-1, column).squeeze(-1)
        reference = torch.where(block_max == -torch.inf, 0.0, block_max)
        e = z.sub_(reference.unsqueeze(-1)).exp_()
        e.scatter_(-1, column, e.gather(-1, column).masked_fill_(here.unsqueeze(-1), 0.0))
        label_logit = torch.where(here, picked, NOT_HERE)
        shard[:, rows] = torch.stack((block_max, block_max, e.sum(dim=-1), label_logit))
        if argmax is not None:
            argmax[rows] = block_argmax
    return RowStatistics(shard, argmax, logit_sum)


def row_gradients(
    logits: Tensor,  # [C, V]
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
    masked = _masked(logits, form)
    for rows in _row_blocks(num_rows, num_columns):
        slope = None
        if form.softcap is not None:
            # 1 - tanh**2 of a bent logit keeps nothing of a slope below fp32's resolution of 1.
            bent = logits[rows].to(torch.float32, copy=True).mul_(logit_scale / form.softcap)
            e = bent.abs_().mul_(-2).exp_()
            slope = 4 * e / (1 + e).square()
        z = _scaled(logits[rows], logit_scale, form)
        labels = local_labels[rows]
        here = (labels >= 0) & (labels < num_columns)
        column = torch.where(here, labels, 0).unsqueeze(-1)
        factor = row_factor[rows].unsqueeze(-1)
        e = z.sub_(row_max[rows].unsqueeze(-1)).exp_()
        e.mul_(scale[rows].unsqueeze(-1))
        if form.share is not None:
            e.sub_(form.share)
        at_label = torch.where(here, -deficit[rows], e.gather(-1, column).squeeze(-1))
        e.scatter_(-1, column, at_label.unsqueeze(-1))
        if slope is not None:
            e.mul_(slope)
        if masked is not None:
            e.masked_fill_(masked, 0.0)
        out[rows] = e.mul_(factor)
    return out
