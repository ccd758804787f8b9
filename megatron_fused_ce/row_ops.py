"""The maths of one token's loss, given statistics of its logits.

Where the statistics come from is :mod:`.logit_pass`'s matter, how they travel between ranks
:mod:`.vocab_parallel`'s. This file is ``[C]``-sized arithmetic in plain PyTorch;
:mod:`.kernels.token_kernels` has the same three functions in one launch each.

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

#: Rows of :attr:`RowStatistics.shard`.
ROW_MAX, REFERENCE, OTHERS, LABEL_LOGIT = range(4)
NUM_STATISTICS = 4
#: A label logit that is not in this shard. A real one of ``+inf`` makes the row maximum ``+inf`` and the
#: token NaN, so nothing is lost.
NOT_HERE = float("inf")


class RowStatistics(NamedTuple):
    """Statistics of each row over one vocabulary shard.

    ``shard`` is what the ranks exchange, in one piece, fp32 ``[4, C]``: the largest logit; what the sum is
    relative to (the largest logit, or near it); the sum of ``exp(z - reference)`` without the label's own
    column; the label's logit, :data:`NOT_HERE` where another shard holds it or none.
    """

    shard: Tensor
    argmax: Tensor | None = None  # int64 [C]: column of row_max, lowest on a tie; where asked for
    #: fp32 [C]: sum of the logits (label smoothing only)
    logit_sum: Tensor | None = None
    #: exponentiating product only, fp32 [C]: the row's excess where its tiles differ in theirs, else -1
    excess: Tensor | None = None

    @property
    def row_max(self) -> Tensor:
        return self.shard[ROW_MAX]

    @property
    def reference(self) -> Tensor:
        return self.shard[REFERENCE]

    @property
    def others(self) -> Tensor:
        return self.shard[OTHERS]

    @property
    def label_logit(self) -> Tensor:
        return self.shard[LABEL_LOGIT]


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


class Merged(NamedTuple):
    """A chunk after its statistics met those of the other shards; the same on every rank."""

    loss: Tensor  # fp32 [C]
    terms: Tensor  # fp32 [3, C]: TokenTerms
    reference: Tensor  # fp32 [C]: the largest reference of any shard
    logit_sum: Tensor | None = None  # fp32 [C]: sum of the logits, where asked for


def shard_terms(
    shard: Tensor,  # [..., 4, C] fp32: RowStatistics.shard
    global_max: Tensor,  # [C] fp32
) -> Tensor:
    """This shard's addends ``[..., 3, C]`` (others, label, z_y - m), to be summed over the shards.

    A row without any finite logit in this shard (``row_max = -inf``) adds nothing; a maximum of ``+inf``
    gives NaN.
    """
    _, reference, others, label_logit = shard.unbind(-2)
    here = label_logit != NOT_HERE
    shifted_label = label_logit - global_max
    zero = torch.zeros_like(global_max)
    rescaled = torch.where(others == 0, zero, others * torch.exp(reference - global_max))
    return torch.stack(
        (
            torch.where(global_max == torch.inf, torch.nan, rescaled),
            torch.where(here, torch.exp(shifted_label), zero),
            torch.where(here, shifted_label, zero),
        ),
        dim=-2,
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


def merge_shards(shards: Tensor) -> Merged:
    """From the statistics of all shards, ``[R, 4, C]`` fp32, in rank order."""
    global_max = shards[:, ROW_MAX].amax(0)
    loss, terms = token_loss(shard_terms(shards, global_max).sum(0), global_max)
    return Merged(loss, terms, shards[:, REFERENCE].amax(0))
