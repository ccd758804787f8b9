"""The maths of one token's loss, given statistics of its logits.

Where the statistics come from is :mod:`.logit_pass`'s matter. This file is ``[C]``-sized arithmetic in
plain PyTorch; :mod:`.kernels.token_kernels` has the same two functions in one launch each.

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

from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634


class RowStatistics(NamedTuple):
    """Statistics of each row over one vocabulary shard, all fp32 ``[C]`` (``argmax`` int64)."""

    row_max: Tensor  # largest logit
    reference: Tensor  # what `others` is relative to: row_max, or near it
    others: Tensor  # sum of exp(z - reference) without the label's own column
    label_logit: Tensor  # z_y where this shard holds the label, else 0
    argmax: Tensor | None = None  # local column of row_max, lowest on a tie; None unless asked for
    #: exponentiating product only: the row's excess where its tiles differ in theirs, else -1
    excess: Tensor | None = None


class TileStatistics(NamedTuple):
    """What the exponentiating product leaves of each row and tile of columns, ``[num_tiles, C]``.

    A tile's entries are ``E = 2**(z2 - reference2 - excess)`` with ``z2 = log2(e) * logit_scale * z``
    and ``excess`` 0, or ``tile_max`` where that is above 64.
    """

    tile_columns: int
    tile_max: Tensor  # fp32: largest z2 - reference2 of the tile, label left out
    tile_sum: Tensor  # fp32: sum of E over the tile, label left out
    label_logit: Tensor  # fp32 [C]: logit_scale * z_y, 0 where the label is not here
    tile_argmax: Tensor | None  # int32: column of tile_max


class TokenTerms(NamedTuple):
    """The same over the whole vocabulary, fp32 ``[C]``: what the backward needs of the forward."""

    row_max: Tensor  # m
    inv_sum: Tensor  # 1 / (others + label)
    miss: Tensor  # others / (others + label) = 1 - p_y


def shard_terms(
    stats: RowStatistics,
    global_max: Tensor,  # [C] fp32
    labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    num_columns: int,
) -> Tensor:
    """This shard's addends ``[3, C]`` (others, label, z_y - m), to be summed over the shards.

    A row without any finite logit in this shard (``row_max = -inf``) adds nothing.
    """
    label_here = (labels >= 0) & (labels < num_columns)
    rescale = torch.exp(stats.reference - global_max)
    shifted_label = stats.label_logit - global_max
    zero = torch.zeros_like(global_max)
    return torch.stack(
        (
            torch.where(stats.others == 0, zero, stats.others * rescale),
            torch.where(label_here, torch.exp(shifted_label), zero),
            torch.where(label_here, shifted_label, zero),
        )
    )


def token_loss(
    terms: Tensor,  # [3, C] fp32, summed over the shards
    global_max: Tensor,  # [C] fp32
) -> tuple[Tensor, Tensor]:
    """Loss ``[C]`` and, stacked ``[3, C]``, the :class:`TokenTerms` that the backward needs; fp32."""
    others, label, shifted_label = terms.unbind(0)
    total = others + label
    loss = torch.where(
        label > others, torch.log1p(others / label), torch.log(total) - shifted_label
    )
    return loss, torch.stack((global_max, total.reciprocal(), others / total))
