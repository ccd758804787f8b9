"""The kernels of a chunk's K largest logits (:mod:`.kernels.topk`) in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce.kernels.records import NOTHING
from megatron_fused_ce.logits.rows_torch import row_blocks, scaled_logits


def as_keys(z: Tensor) -> Tensor:
    """int32 keys in the order of fp32 numbers; one for 0.0 and -0.0."""
    bits = (z + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def of_keys(keys: Tensor) -> Tensor:
    """The fp32 numbers of :func:`as_keys`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


def block_maxima(
    logits: Tensor,  # [C, V']
    num_columns: int,
    group: int,
    logit_scale: float,
    softcap: float | None,
    inv_temperature: Tensor,  # [C] fp32
) -> tuple[Tensor, Tensor]:
    num_blocks = -(-num_columns // group)
    maxima = logits.new_empty((len(logits), num_blocks), dtype=torch.int32)
    stats = logits.new_empty((2, len(logits)), dtype=torch.float32)
    for rows in row_blocks(len(logits), num_columns):
        z = scaled_logits(logits[rows, :num_columns], logit_scale, softcap)
        keys = F.pad(as_keys(z), (0, num_blocks * group - num_columns), value=NOTHING)
        maxima[rows] = keys.view(-1, num_blocks, group).amax(-1)
        row_max = z.amax(-1)
        shift = row_max.masked_fill(row_max == -torch.inf, 0.0)
        e = z.sub_(shift.unsqueeze(-1)).mul_(inv_temperature[rows].unsqueeze(-1)).exp_()
        stats[:, rows] = torch.stack((row_max, e.sum(-1)))
    return maxima, stats


def best(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    keys = F.pad(keys, (0, max(0, count - keys.shape[1])), value=NOTHING)
    places = torch.arange(keys.shape[1], device=keys.device)
    distinct = (keys.to(torch.int64) << 31) - places  # of equal keys the lowest place first
    chosen = distinct.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    return keys.gather(1, chosen), chosen.to(torch.int32)


def best_of_blocks(
    logits: Tensor,  # [C, V']
    blocks: Tensor,  # [C, N] int32, ascending
    num_columns: int,
    group: int,
    count: int,
    logit_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    columns = (blocks.unsqueeze(-1) * group + torch.arange(group, device=blocks.device)).flatten(1)
    inside = columns < num_columns
    x = logits.gather(1, columns.where(inside, 0).to(torch.int64))
    keys = as_keys(scaled_logits(x, logit_scale, softcap)).masked_fill(~inside, NOTHING)
    keys, places = best(keys, count)
    columns = F.pad(columns, (0, max(0, count - columns.shape[1])))
    return keys, columns.gather(1, places.to(torch.int64)).to(torch.int32)
