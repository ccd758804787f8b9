"""The tokens that a call works on: cut into chunks, and without those of weight 0 where these are skipped.

All ranks of the tensor-parallel group must work on the same number of tokens. So each part (one of R with
sequence parallelism) is cut to ``m`` tokens, the unmasked tokens of the part that has the most; the other
parts are filled up with masked tokens, whose results are dropped. The host must know ``m``: :func:`count`
sends it there without a wait while the device still has work, and :func:`num_unmasked` waits for it later.
They must be the same tokens, too: what the ranks know of one is merged.

Left-out tokens have loss 0 and gradient 0. One whose upstream gradient is not 0 cannot be made right any
more: the backward raises (:func:`refuse_lost`), or makes the gradients NaN where that upstream is inf or NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head.host_copy import HostCopy
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.planner.chunks import Chunk, first_tokens
from megatron_fused_ce.ranks.collectives import largest_over_ranks


class Tokens(NamedTuple):
    """Chunks of a call's tokens, and their slices of tensors."""

    chunks: tuple[Chunk, ...]
    num_parts: int  # ranks that hold different tokens: R with sequence parallelism, else 1
    part: int  # which of the parts is this rank's
    capacity: int  # tokens of the longest chunk over all parts, for buffers

    @property
    def num(self) -> int:
        """``n``: this rank's tokens."""
        return self.chunks[-1].stop if self.chunks else 0

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's entries ``[..., C]`` of a tensor ``[..., parts, n]``, rank after rank, contiguous."""
        if len(self.chunks) > 1:
            per_token = per_token[..., chunk.start : chunk.stop]
        # Of one token a rank, flatten gives a strided view.
        return per_token.flatten(-2).contiguous()

    def of_all(self, matrix: Tensor, chunk: Chunk) -> Tensor:
        """Rows ``[C, ...]`` of one chunk in a tensor ``[T, ...]`` ordered chunk after chunk."""
        return matrix[self.num_parts * chunk.start : self.num_parts * chunk.stop]

    def first(self, num: int) -> Tokens:
        """The first ``num`` tokens of each part, in the same buffers."""
        return self._replace(chunks=first_tokens(self.chunks, num))

    def own_part(self, per_token: Tensor) -> Tensor:
        """This rank's entries ``[n]`` of a chunk's ``[C]``."""
        return per_token if self.num_parts == 1 else per_token.view(self.num_parts, -1)[self.part]


#: ``m`` is rounded up to whole tiles of the GEMMs: fewer sizes for the allocator, at no cost in time.
ROUND_TO = 128


def count(
    weights: Tensor,  # [parts, n]: token weights, in token order
    group: Any,  # the tensor-parallel group, or None
) -> HostCopy | None:
    """Start counting the unmasked tokens of the part that has the most, for :func:`num_unmasked`; None while
    a CUDA graph is captured.

    Collectives: a MAX all-reduce of two bytes a token over ``group`` (R > 1): whether a rank keeps the token,
    and whether one leaves it out.
    """
    if weights.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    unmasked = weights != 0
    either = largest_over_ranks(torch.stack((unmasked, ~unmasked)).to(torch.uint8), group)
    return HostCopy(torch.stack((either[0].sum(dim=1).amax(), either.amin(dim=0).sum())))


def num_unmasked(counted: HostCopy) -> int:
    """Unmasked tokens of the part that has the most. The host waits.

    Raises:
        ValueError: on every rank, where the ranks' masks differ: each would work on other tokens.
    """
    largest, num_differing = counted.read()
    if num_differing:
        raise ValueError(
            f"the ranks of the tensor-parallel group leave out different tokens: {num_differing} are masked "
            "on one and not on another; expected one active_mask on every rank, or with skip_masked token "
            "weights that are 0 at the same tokens: broadcast them, or draw them from one seed"
        )
    return largest


class Kept(NamedTuple):
    """The tokens of each part that are worked on."""

    tokens: Tensor  # int64 [parts, m]: indices of the tokens, unmasked ones first, in their order
    active: Tensor  # bool [parts, m]: whether they are unmasked
    skipped: Tensor  # bool [parts, n]: tokens with weight 0

    @staticmethod
    def of(weights: Tensor, num_kept: int) -> Kept:
        skipped = weights == 0
        if num_kept == weights.shape[1]:
            tokens = torch.arange(num_kept, device=weights.device).expand_as(weights)
            return Kept(tokens, ~skipped, skipped)
        index = skipped.to(torch.uint8).argsort(dim=1, stable=True)[:, :num_kept]
        return Kept(index, ~skipped.gather(1, index), skipped)

    def of_tokens(self, per_token: Tensor) -> Tensor:
        """Select the kept tokens: ``[..., parts, n]`` to ``[..., parts, m]``."""
        index = self.tokens.expand(*per_token.shape[:-1], self.tokens.shape[1])
        return per_token.gather(-1, index)

    def take(self, hidden: Tensor, part: int) -> Tensor:
        """This rank's kept hidden states, ``[n, H]`` to ``[m, H]``."""
        return hidden if self._is_all else hidden.index_select(0, self.tokens[part])

    def put_back_rows(self, rows: Tensor, part: int) -> Tensor:
        """The gradient of :meth:`take`: ``[m, H]`` to ``[n, H]``, 0 at the other tokens."""
        if self._is_all:
            return rows
        whole = rows.new_zeros(self.skipped.shape[1], rows.shape[1])
        return whole.index_copy_(0, self.tokens[part], rows)

    def put_back(self, per_token: Tensor, per_label: bool = False) -> Tensor:
        """Results put back in place, ``[parts * m]`` to ``[parts * n]``, or ``[K, ...]`` each; masked tokens
        get 0, -1 (ids) or False."""
        fill = -1 if per_token.dtype == torch.int64 else 0
        lead = per_token.shape[:per_label]
        whole = per_token.new_full((*lead, *self.skipped.shape), fill)
        made = per_token.view(*lead, *self.tokens.shape)
        made = torch.where(self.active, made, fill).to(made.dtype)
        whole.scatter_(-1, self.tokens.expand_as(made), made)
        return whole.flatten(-2)

    def upstream(self, upstream: Upstream) -> Upstream:
        """Upstream gradients ``[parts, n]`` of the kept tokens, ``[parts, m]``.

        0 for the masked tokens among them, but where it is inf or NaN.
        """

        def of_kept(grad: Tensor) -> Tensor:
            grad = self.of_tokens(grad)
            return torch.where(self.active | ~torch.isfinite(grad), grad, 0.0)

        return upstream.map(of_kept)

    def count_lost(self, upstream: Upstream) -> Tensor:
        """int64 ``[2]``: skipped tokens whose upstream gradients are finite, one of them not 0; and skipped
        tokens with an inf or NaN among them."""
        given = torch.stack(upstream.sizes)
        finite = torch.isfinite(given).all(0)
        lost = self.skipped & finite & (given != 0).any(0)
        return torch.stack((lost.sum(), (self.skipped & ~finite).sum()))

    def spoil_rows_(self, rows: Tensor, upstream: Upstream, part: int) -> None:
        """Make rows of this rank's ``[n, H]`` NaN, those of tokens whose upstream gradients ``[parts, n]``
        have an inf or NaN."""
        finite = torch.isfinite(torch.stack(upstream.sizes)).all(0)[part]
        rows.masked_fill_(~finite.unsqueeze(-1), torch.nan)

    @property
    def _is_all(self) -> bool:
        return self.tokens.shape[1] == self.skipped.shape[1]


def num_kept(largest: int, num_tokens: int) -> int:
    """``m`` for a part of ``num_tokens`` tokens: rounded up, at most all of them."""
    return min(num_tokens, -(-largest // ROUND_TO) * ROUND_TO)


def refuse_lost(num_lost: int) -> None:
    """Raise if the upstream gradients of left-out tokens are not all 0.

    Raises:
        RuntimeError: with their number, and what to do.
    """
    if num_lost:
        raise RuntimeError(
            f"{num_lost} tokens were left out (outside active_mask; with skip_masked, of weight 0 or "
            "labelled ignore_index), and their upstream gradient is not 0: their part of the gradient was "
            "never computed. Multiply the loss and its entropy term by the mask, or give a mask or weights "
            "that have every token they use (in Megatron: the loss_mask of the model's call), or leave "
            "skip_masked (--fused-ce-skip-masked) out"
        )
