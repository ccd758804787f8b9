"""The two passes over a chunk of logits in plain PyTorch: the CPU path, and the Triton kernels' twin.

Both walk the rows in blocks, so that their fp32 temporaries stay far below a chunk of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fused_ce.row_ops import NOT_HERE, RowStatistics, TokenTerms

#: Elements of one fp32 temporary (512 KiB).
BLOCK_ELEMENTS = 1 << 17


def _row_blocks(num_rows: int, num_columns: int) -> list[slice]:
    rows = max(1, BLOCK_ELEMENTS // max(1, num_columns))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def row_statistics(
    logits: Tensor,  # [C, V]
    local_labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    logit_scale: float,
    with_argmax: bool = False,
) -> RowStatistics:
    """Row maximum, sum of exponentials without the label's column, and the label's logit."""
    num_rows, num_columns = logits.shape
    shard = logits.new_empty((4, num_rows), dtype=torch.float32)
    argmax = torch.empty_like(local_labels) if with_argmax else None
    for rows in _row_blocks(num_rows, num_columns):
        z = logits[rows].to(torch.float32, copy=True).mul_(logit_scale)
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
    return RowStatistics(shard, argmax)


def row_gradients(
    logits: Tensor,  # [C, V]
    local_labels: Tensor,  # [C] int64
    terms: TokenTerms,
    row_factor: Tensor,  # [C] fp32: upstream gradient times logit_scale
    logit_scale: float,
    out: Tensor,  # [C, V] in the logits' dtype; may be `logits` itself
) -> Tensor:
    """``out = row_factor * d loss / d z``, cast to the logits' dtype."""
    num_rows, num_columns = logits.shape
    for rows in _row_blocks(num_rows, num_columns):
        z = logits[rows].to(torch.float32, copy=True).mul_(logit_scale)
        labels = local_labels[rows]
        here = (labels >= 0) & (labels < num_columns)
        column = torch.where(here, labels, 0).unsqueeze(-1)
        factor = row_factor[rows].unsqueeze(-1)
        e = z.sub_(terms.row_max[rows].unsqueeze(-1)).exp_()
        e.mul_(terms.inv_sum[rows].unsqueeze(-1))
        at_label = torch.where(here, -terms.miss[rows], e.gather(-1, column).squeeze(-1))
        e.scatter_(-1, column, at_label.unsqueeze(-1))
        out[rows] = e.mul_(factor)
    return out
