"""Several labels a token: their logits out of a chunk's, and their entries of its gradient.

::

    forward    s_k = logits[id_k]                                   the largest over the shards
               log p_k = (s_k - m) - (lse - m)                      neither is above 0: nothing cancels
    backward   d / d s_j of the row kernel, whose label is in no column; then, at each label's column,
               own * (p - 1) + (others + alpha + eps * (s - m)) * p - delta

The statistics leave the label with the largest logit out of their sum, so that ``lse - m`` has its digits for
a confident token. Each entry is written once, from its log-probability: ``p - 1`` is ``expm1(log p)``.
``own`` is the sum of the ``at`` of the labels of that column, ``others`` of all others.

Bytes beside the row kernels': :data:`.planner.memory.CHUNK_LABEL_BYTES` for each label of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import NOT_HERE, Merged
from megatron_fused_ce.logits import LogitsGrad, OrderedTargets, SavedChunk, Scores, Targets, rows_torch
from megatron_fused_ce.logits.gemm_rows import GemmThenRows
from megatron_fused_ce.losses.statistics import EMPTY, NO_COLUMN, Upstream
from megatron_fused_ce.losses.terms import Rows
from megatron_fused_ce.planner.chunks import Chunk

#: In place of a label's logit of -inf, which stands for a label that no shard has.
LOWEST_FINITE = torch.finfo(torch.float32).min


class LabelSet(NamedTuple):
    """K labels of each token, ``[K, parts, n]``, or of a chunk's, ``[K, C]``."""

    columns: Tensor  # int32, of this shard; NO_COLUMN for others, EMPTY
    shares: Tensor | None  # fp32, of a teacher: its probabilities

    def kept(self, kept: Any, part: int) -> LabelSet:
        shares = None if self.shares is None else kept.of_tokens(self.shares)
        return LabelSet(kept.of_tokens(self.columns), shares)

    def of_chunk(self, chunk: Chunk, split: Callable[[Tensor], Tensor]) -> LabelSet:
        return LabelSet(split(self.columns), None if self.shares is None else split(self.shares))

    def saved(self, remakes: bool) -> LabelSet:
        return self

    def masked(self, upstream: Upstream) -> Upstream:
        """Without those of empty entries, whose log-probability is -inf."""
        empty = self.columns == EMPTY
        return upstream.map(lambda grad: grad.masked_fill(empty, 0.0) if grad.dim() == 3 else grad)


def _of(targets: Targets) -> LabelSet:
    assert isinstance(targets.others, LabelSet)
    return targets.others


@dataclass(frozen=True, kw_only=True)
class LabelSetRows(GemmThenRows):
    """:class:`.LogitsBackend` of several labels a token."""

    def settle(
        self, scores: Scores, targets: Targets, merged: Merged, matrix: Tensor | None, needs_grad: bool
    ) -> tuple[Merged, dict[str, Tensor]]:
        (label_logits,) = scores.beside
        merged = merged._replace(label_shifts=label_logits - merged.stats[0])
        rows = Rows(merged, None, self.outputs.num_classes, _of(targets).shares, scores.stats)
        return merged, self.outputs.values(rows)

    def bound_of(self, saved: SavedChunk, targets: Targets, given: set[str]) -> Tensor | None:
        assert saved.stats is not None
        return self.outputs.bound_of(self.outputs.rows_of(saved.stats, _of(targets).shares), given)

    def bound_ahead(self, others: OrderedTargets | None) -> Tensor | None:
        """The sum of a teacher's shares: no gradient of its labels is larger."""
        assert isinstance(others, LabelSet)
        return None if others.shares is None else others.shares.sum(0).clamp(min=1.0)

    def label_of(self, logits: Tensor, targets: Targets) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The column of each token's label with the largest logit, :data:`.NO_COLUMN` or :data:`.EMPTY` where
        another shard has it or none; beside it the labels' logits over all shards, fp32 ``[K, C]``: NOT_HERE
        of one that no shard has, -inf of an empty entry.

        Collectives: a MAX all-reduce of those (R > 1).
        """
        columns = _of(targets).columns.t().contiguous().long()  # [C, K]: a row's entries lie near each other
        products = logits.gather(1, columns.clamp(min=0))
        s = rows_torch.scaled_logits(products, self.logit_scale, self.outputs.softcap)
        if targets.inv_temperature is not None:
            s.mul_(targets.inv_temperature.unsqueeze(1))
        s = torch.where(columns >= 0, s.clamp_(min=LOWEST_FINITE), -torch.inf)
        if self.comm is not None:
            self.comm.over_shards_(s, largest=True)
        best = columns.gather(1, s.argmax(1, keepdim=True)).squeeze(1)
        empty = (columns == EMPTY) | (s == LOWEST_FINITE)
        return best, (torch.where(empty, -torch.inf, s.masked_fill_(s == -torch.inf, NOT_HERE)).t(),)

    def grad_from_saved(
        self, saved: SavedChunk, targets: Targets, upstream: Upstream, out: Tensor | None
    ) -> LogitsGrad:
        matrix, stats = saved.matrix, saved.stats
        assert matrix is not None and stats is not None and out is not None
        form, given = self.outputs, _of(targets).columns.t().contiguous()  # [C, K]
        of_rows = form.rows_of(stats, _of(targets).shares)
        pull, factor = form.pull(of_rows, upstream)
        at = torch.where(given == EMPTY, 0.0, pull.of_labels(of_rows).t())
        columns, place = _stand_ins(given)
        products = matrix.gather(1, columns)
        own = _of_column(at, columns, place, scratch=out)
        if out.data_ptr() == matrix.data_ptr():
            out.scatter_(1, columns, products)  # which the places have overwritten
        of_all, nowhere = at.sum(1), torch.full_like(given[:, 0], NO_COLUMN, dtype=torch.int64)
        coefficients = pull._replace(at=of_all).elsewhere(of_rows, factor)
        self.rows.row_gradients(
            matrix, nowhere, coefficients, self.logit_scale, out, form, targets.inv_temperature
        )
        del at
        log_p = of_rows.log_probs.t().gather(1, place)
        p, others = log_p.exp(), of_all.unsqueeze(1) - own
        if pull.alpha is not None:
            others += _column(pull.alpha)
        if pull.eps is not None:
            t = (log_p + of_rows.log_sum.unsqueeze(1)).masked_fill_(p == 0, 0.0)
            others += t.mul_(_column(pull.eps))
        grad = own.mul_(torch.expm1(log_p)).add_(others.mul_(p))
        if pull.delta is not None:
            grad -= _column(pull.delta)
        grad *= factor.unsqueeze(1)
        if form.softcap is not None:
            grad *= rows_torch.softcap_gradient(products, self.logit_scale, form.softcap)
        here = given.amax(1, keepdim=True) >= 0  # else column 0 stays as it is
        out.scatter_(1, columns, torch.where(here, grad.to(out.dtype), out.gather(1, columns)))
        return LogitsGrad(out)


def _column(coefficient: Tensor | float) -> Tensor | float:
    return coefficient.unsqueeze(1) if isinstance(coefficient, Tensor) else coefficient


def _stand_ins(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Columns to read and write, ``[C, K]``, and the place among the K of each.

    An entry that is not in this shard stands for its token's first that is; column 0 for a token without any.
    """
    here = columns >= 0
    first = here.to(torch.uint8).argmax(1, keepdim=True)
    place = torch.where(here, torch.arange(columns.shape[1], device=columns.device), first)
    return columns.gather(1, place).clamp_(min=0).long(), place


def _of_column(shares: Tensor, columns: Tensor, place: Tensor, scratch: Tensor) -> Tensor:
    """Sums of the shares of one token's entries in one column, at each of them; ``[C, K]``.

    Every entry writes its place into its column of ``scratch`` ``[C, V]``, and all of a column read the one
    that stayed there. What else was there is not read.
    """
    places = scratch.view(torch.int16 if scratch.element_size() == 2 else torch.int32)
    places.scatter_(1, columns, place.to(places.dtype))
    owner = places.gather(1, columns).long()
    own = torch.arange(shares.shape[1], device=shares.device) == place
    return torch.zeros_like(shares).scatter_add_(1, owner, shares * own).gather(1, owner)
