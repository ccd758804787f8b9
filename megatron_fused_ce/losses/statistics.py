"""Merges a token's statistics over the shards; its cross-entropy. :mod:`.terms` has the other losses.

:mod:`.logits` makes the statistics, :mod:`.ranks.collectives` merges those of the shards; here is
``[C]``-sized arithmetic in plain PyTorch. :mod:`.kernels.token_kernels` has ``merge_shards``,
``shard_addends`` and ``token_loss`` in one launch each.

For a token with logits ``z`` over the whole vocabulary, label ``y``, ``m = max z``::

    sum_exp_nonlabel = sum over j != y of exp(z_j - m)
    label = exp(z_y - m)
    loss = log(sum_exp_nonlabel + label) - (z_y - m)
         = log1p(sum_exp_nonlabel / label)                           where label > sum_exp_nonlabel
    d loss / d z_j = exp(z_j - m) / (sum_exp_nonlabel + label)       for j != y
    d loss / d z_y = -sum_exp_nonlabel / (sum_exp_nonlabel + label)  which is p_y - 1

The label's term is kept out of the sum, so that nothing cancels for a confident token.

A label outside the vocabulary has no label term: ``loss = log(sum_exp_nonlabel) = lse - m``, which is what
Megatron's unfused loss gives for it.

Derivations: docs/math.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import NO_EXTRA, NOT_HERE, ROW_MAX, ROW_SHIFT, ExtraStatistics, Merged

#: In place of a column: an empty entry among several labels, and an id of another shard or of none.
EMPTY, NO_COLUMN = -1, -2


class Upstream(NamedTuple):
    """Upstream gradients, fp32, of all tokens ``[parts, n]`` or of a chunk ``[C]``; ``[K, ...]`` of outputs
    with one number for each label."""

    loss: Tensor
    #: those of other outputs, by name; 0 for others
    beside: tuple[tuple[str, Tensor], ...] = ()
    #: whether the loss has one; else its zeros must not meet a slope of inf
    of_loss: bool = True

    @property
    def sizes(self) -> list[Tensor]:
        """Of each output, without the K of those that have one for each label: the sum of their absolutes."""
        given = [self.loss, *(grad for _, grad in self.beside)]
        return [grad.abs().sum(0) if grad.dim() > self.loss.dim() else grad for grad in given]

    def map(self, change: Callable[[Tensor], Tensor]) -> Upstream:
        """Apply a function to each gradient."""
        beside = tuple((name, change(grad)) for name, grad in self.beside)
        return Upstream(change(self.loss), beside, self.of_loss)

    def scaled(self, scale: Tensor | float) -> Upstream:
        return self.map(lambda grad: grad * scale)


class TokenStats(NamedTuple):
    """What a backward reads of a token's merged statistics; fp32 ``[C]``, natural units."""

    row_max: Tensor  # m
    inv_sum: Tensor  # 1 / (sum_exp_nonlabel + label)
    one_minus_p_label: Tensor  # sum_exp_nonlabel / (sum_exp_nonlabel + label) = 1 - p_y
    label_shift: Tensor  # z_y - m, NOT_HERE for a label outside the vocabulary
    extra: ExtraStatistics = NO_EXTRA  # those that a gradient needs
    label_shifts: Tensor | None = None  # [K, C]: see Merged

    @staticmethod
    def of(saved: Tensor, extra: tuple[str, ...] = ()) -> TokenStats:
        """Name the rows of :attr:`Merged.stats`, of the extra statistics that follow them, and of several
        labels behind those."""
        row_max, inv_sum, one_minus_p_label, label_shift, *more = saved.unbind(0)
        of_extra = ExtraStatistics.of(extra, more[: len(extra)]) if extra else NO_EXTRA
        of_labels = saved[4 + len(extra) :] if len(more) > len(extra) else None
        return TokenStats(row_max, inv_sum, one_minus_p_label, label_shift, of_extra, of_labels)


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
    ``rest`` is fp64.
    """
    row_max, row_shift, sum_exp_nonlabel, _ = shard.unbind(-2)
    shift = row_shift - global_max
    weighted, best = extra.weighted, extra.best
    if weighted is not None:
        moved = torch.exp(shift) * (weighted + sum_exp_nonlabel * shift)
        weighted = torch.where(sum_exp_nonlabel == 0, 0.0, moved)
    if best is not None:
        best = torch.where(row_max == global_max, best, torch.inf)
    rest, peak, top, beside = extra.rest, extra.peak, extra.top, extra.beside
    if rest is not None and extra.rest_low is not None and peak is not None:
        assert top is not None and beside is not None
        largest, rest = row_max == global_max, rest.double() + extra.rest_low
        others = (rest + peak) * torch.exp(row_max.double() - global_max)
        rest = torch.where(largest, rest, torch.where(row_max == -torch.inf, 0.0, others))
        peak = largest.to(peak.dtype)
        top, beside = (torch.where(largest, of_owner, 0.0) for of_owner in (top, beside))
    return extra._replace(
        weighted=weighted, best=best, rest=rest, rest_low=None, peak=peak, top=top, beside=beside
    )


def merge_extra(
    names: tuple[str, ...],  # one or more
    extra: Tensor,  # [R, K, C] fp32: the statistics that each shard has
    shards: Tensor,  # [R, 4, C] fp32
) -> ExtraStatistics:
    """Merge the extra statistics of all shards into those of the whole vocabulary."""
    addends = extra_addends(ExtraStatistics.of(names, extra.unbind(1)), shards, shards[:, ROW_MAX].amax(0))
    return ExtraStatistics.of(
        addends.names,
        (
            row.amin(0) if name == "best" else row.sum(0)
            for name, row in zip(addends.names, addends.rows(), strict=True)
        ),
    )


def token_loss(
    sums: Tensor,  # [3, C] fp32, summed over the shards
    global_max: Tensor,  # [C] fp32
) -> tuple[Tensor, Tensor]:
    """Loss ``[C]`` and, stacked ``[4, C]``, the :class:`TokenStats`; fp32."""
    sum_exp_nonlabel, label, shifted_label = sums.unbind(0)
    total = sum_exp_nonlabel + label
    loss = torch.where(
        label > sum_exp_nonlabel, torch.log1p(sum_exp_nonlabel / label), torch.log(total) - shifted_label
    )
    known = (label > 0) | (shifted_label != 0)
    label_shift = torch.where(known, shifted_label, NOT_HERE)
    return loss, torch.stack((global_max, total.reciprocal(), sum_exp_nonlabel / total, label_shift))


def merge_shards(shards: Tensor) -> Merged:
    """Merge the statistics of all shards, ``[R, 4, C]`` fp32, in rank order."""
    global_max = shards[:, ROW_MAX].amax(0)
    loss, stats = token_loss(shard_addends(shards, global_max).sum(0), global_max)
    return Merged(loss, stats, shards[:, ROW_SHIFT].amax(0))
