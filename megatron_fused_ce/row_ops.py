"""The maths of one token's loss, given statistics of its logits.

:mod:`.logits_backend` computes the statistics, :mod:`.vocab_parallel` exchanges them between ranks. This file
is ``[C]``-sized arithmetic in plain PyTorch; :mod:`.kernels.token_kernels` has the same functions in one
launch each.

For a token with logits ``z`` over the whole vocabulary, label ``y``, ``m = max z``::

    sum_exp_nonlabel = sum over j != y of exp(z_j - m)
    label = exp(z_y - m)
    loss = log(sum_exp_nonlabel + label) - (z_y - m)
         = log1p(sum_exp_nonlabel / label)                           where label > sum_exp_nonlabel
    d loss / d z_j = exp(z_j - m) / (sum_exp_nonlabel + label)       for j != y
    d loss / d z_y = -sum_exp_nonlabel / (sum_exp_nonlabel + label)  which is p_y - 1

The label's term is kept out of the sum, so that nothing cancels for a confident token.

A label outside the vocabulary has no label term: ``loss = log(sum_exp_nonlabel) = lse - m``, which is what
Megatron's unfused loss gives for it. See docs/math.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import (
    NOT_HERE,
    ROW_MAX,
    ROW_SHIFT,
    SQUARED_UNIT,
    ExtraStatistics,
    Merged,
)


class TokenTerms(NamedTuple):
    """Terms of a token's loss that its backward needs, from merged statistics; fp32 ``[C]``, natural
    units."""

    row_max: Tensor  # m
    inv_sum: Tensor  # 1 / (sum_exp_nonlabel + label)
    one_minus_p_label: Tensor  # sum_exp_nonlabel / (sum_exp_nonlabel + label) = 1 - p_y
    label_shift: Tensor | None = None  # z_y - m, NOT_HERE for a label outside the vocabulary
    mass: Tensor | None = None  # of soft targets

    @staticmethod
    def of(merged: Tensor, mass: Tensor | None = None) -> TokenTerms:
        """Name the rows of :attr:`Merged.terms`."""
        row_max, inv_sum, one_minus_p_label, label_shift = merged.unbind(0)
        return TokenTerms(row_max, inv_sum, one_minus_p_label, label_shift, mass)


def shard_addends(
    shard: Tensor,  # [..., 4, C] fp32: RowStatistics.shard
    global_max: Tensor,  # [C] fp32
) -> Tensor:
    """This shard's addends ``[..., 3, C]`` (sum_exp_nonlabel, label, z_y - m), to be summed over the shards.

    A row without any finite logit in this shard (``row_max = -inf``) adds nothing; a maximum of ``+inf``
    gives NaN.
    """
    _, row_shift, sum_exp_nonlabel, label_logit = shard.unbind(-2)
    here = label_logit != NOT_HERE
    shifted_label = label_logit - global_max
    zero = torch.zeros_like(global_max)
    rescaled = torch.where(sum_exp_nonlabel == 0, zero, sum_exp_nonlabel * torch.exp(row_shift - global_max))
    return torch.stack(
        (
            torch.where(global_max == torch.inf, torch.nan, rescaled),
            torch.where(here, torch.exp(shifted_label), zero),
            torch.where(here, shifted_label, zero),
        ),
        dim=-2,
    )


def extra_addends(
    extra: ExtraStatistics,  # of each shard, [..., C]
    shard: Tensor,  # [..., 4, C] fp32: RowStatistics.shard
    global_max: Tensor,  # [C] fp32
) -> ExtraStatistics:
    """Extra statistics relative to the row's maximum, to be summed over the shards.

    Except ``best``, of which the smallest counts; it is ``inf`` if the maximum is not in this shard.
    """
    row_max, row_shift, sum_exp_nonlabel, _ = shard.unbind(-2)
    shift = row_shift - global_max
    weighted, target_sum, best, squares = extra.weighted, extra.target_sum, extra.best, extra.squares
    if weighted is not None:
        moved = torch.exp(shift) * (weighted + sum_exp_nonlabel * shift)
        weighted = torch.where(sum_exp_nonlabel == 0, 0.0, moved)
    if target_sum is not None:
        assert extra.target_mass is not None
        # A shard without any finite logit has the row shift -inf, and no soft target with a finite logit.
        moved = target_sum + extra.target_mass * shift
        target_sum = torch.where(extra.target_mass == 0, 0.0, moved)
    if best is not None:
        best = torch.where(row_max == global_max, best, torch.inf)
    if squares is not None:
        factor = torch.exp(shift) / SQUARED_UNIT
        squares = torch.where(squares == 0, 0.0, squares * factor * factor)
    return extra._replace(weighted=weighted, target_sum=target_sum, best=best, squares=squares)


def merge_extra(
    names: tuple[str, ...],  # one or more
    extra: Tensor,  # [R, K, C] fp32: the statistics that each shard has
    shards: Tensor,  # [R, 4, C] fp32
) -> ExtraStatistics:
    """Merge the extra statistics of all shards into those of the whole vocabulary."""
    addends = extra_addends(ExtraStatistics.of(names, extra.unbind(1)), shards, shards[:, ROW_MAX].amax(0))
    return ExtraStatistics.of(
        names,
        (
            row.amin(0) if name == "best" else row.sum(0)
            for name, row in zip(names, addends.rows(), strict=True)
        ),
    )


def token_loss(
    terms: Tensor,  # [3, C] fp32, summed over the shards
    global_max: Tensor,  # [C] fp32
) -> tuple[Tensor, Tensor]:
    """Loss ``[C]`` and, stacked ``[4, C]``, the :class:`TokenTerms`; fp32."""
    sum_exp_nonlabel, label, shifted_label = terms.unbind(0)
    total = sum_exp_nonlabel + label
    loss = torch.where(
        label > sum_exp_nonlabel,
        torch.log1p(sum_exp_nonlabel / label),
        torch.log(total) - shifted_label,
    )
    known = (label > 0) | (shifted_label != 0)
    label_shift = torch.where(known, shifted_label, NOT_HERE)
    return loss, torch.stack((global_max, total.reciprocal(), sum_exp_nonlabel / total, label_shift))


def merge_shards(shards: Tensor) -> Merged:
    """Merge the statistics of all shards, ``[R, 4, C]`` fp32, in rank order."""
    if len(shards) == 1:
        shard = shards[0]
        return Merged(*token_loss(shard_addends(shard, shard[ROW_MAX]), shard[ROW_MAX]), shard[ROW_SHIFT])
    global_max = shards[:, ROW_MAX].amax(0)
    loss, terms = token_loss(shard_addends(shards, global_max).sum(0), global_max)
    return Merged(loss, terms, shards[:, ROW_SHIFT].amax(0))
