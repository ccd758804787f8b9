"""What happens to a chunk's logits between the matrix products, and the maths of one token's loss.

Two passes over a chunk of logits ``[C, V]``, each with a Triton and a plain PyTorch form that take the
same arguments: :func:`row_statistics` (forward) and :func:`row_gradients` (backward). The rest of this
file is ``[C]``-sized arithmetic on what they return.

For a token with logits ``z`` over the whole vocabulary, label ``y``, ``m = max z``::

    others = sum over j != y of exp(z_j - m)          kept apart from the label's own term, so that
    label  = exp(z_y - m)                             a confident token does not cancel
    loss   = log(others + label) - (z_y - m)          = log1p(others / label) where label > others
    d loss / d z_j = exp(z_j - m) / (others + label)  for j != y
    d loss / d z_y = -others / (others + label)       = p_y - 1 without the subtraction

A label outside the vocabulary leaves no label term: ``loss = log(others) = lse - m``, which is what
Megatron's unfused loss gives for it. See docs/math.md.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class RowStatistics(NamedTuple):
    """Statistics of each row over one vocabulary shard, all fp32 ``[C]`` (``argmax`` int64)."""

    row_max: Tensor  # largest logit
    others: Tensor  # sum of exp(z - row_max) without the label's own column
    label_logit: Tensor  # z_y where this shard holds the label, else 0
    argmax: Tensor | None  # local column of row_max, lowest on a tie; None unless asked for


class TokenTerms(NamedTuple):
    """The same over the whole vocabulary, fp32 ``[C]``: what the backward needs of the forward."""

    row_max: Tensor  # m
    inv_sum: Tensor  # 1 / (others + label)
    miss: Tensor  # others / (others + label) = 1 - p_y


def backend_for(device: torch.device, requested: str) -> ModuleType:
    """The module with ``row_statistics`` and ``row_gradients`` for tensors on ``device``."""
    if requested == "auto":
        requested = "triton" if device.type == "cuda" else "torch"
    if requested == "triton":
        from megatron_fused_ce.kernels import row_kernels

        return row_kernels
    from megatron_fused_ce import row_ops_torch

    return row_ops_torch


def shard_terms(stats: RowStatistics, global_max: Tensor, label_here: Tensor) -> Tensor:
    """This shard's addends ``[3, C]`` (others, label, z_y - m), to be summed over the shards.

    A row without any finite logit in this shard (``row_max = -inf``) adds nothing.
    """
    rescale = torch.exp(stats.row_max - global_max)
    shifted_label = stats.label_logit - global_max
    zero = torch.zeros_like(global_max)
    return torch.stack(
        (
            torch.where(stats.others == 0, zero, stats.others * rescale),
            torch.where(label_here, torch.exp(shifted_label), zero),
            torch.where(label_here, shifted_label, zero),
        )
    )


def token_loss(terms: Tensor, global_max: Tensor) -> tuple[Tensor, TokenTerms]:
    """Loss ``[C]`` fp32 and what the backward needs, from the summed terms ``[3, C]``."""
    others, label, shifted_label = terms.unbind(0)
    total = others + label
    loss = torch.where(
        label > others, torch.log1p(others / label), torch.log(total) - shifted_label
    )
    return loss, TokenTerms(global_max, total.reciprocal(), others / total)
