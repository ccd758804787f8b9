"""Which tokens a call works on: all of them in chunks, or without the tokens of weight 0 (``skip_masked``).

All ranks of the tensor-parallel group must work on the same number of tokens. So each part of the tokens (one
of R with sequence parallelism) is cut to ``m`` tokens, where ``m`` is the largest number of unmasked tokens
in any part; other parts are filled up with masked tokens, whose results are dropped. The host must know
``m``. :func:`count` starts to count, and does not wait; :func:`num_kept` waits for the number later, when the
device has other work. All ranks must also skip the same tokens, since statistics of one token are merged.

A skipped token has loss 0 and gradient 0. If its upstream gradient is not 0, the backward cannot compute what
is missing: it raises (:func:`refuse_lost`), or makes the gradients NaN if that upstream is inf or NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head.host_copy import HostCopy
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import largest_over_ranks


class Tokens(NamedTuple):
    """The chunks of a call's tokens, and how to slice tensors by them."""

    chunks: tuple[Chunk, ...]
    num_parts: int  # ranks that hold different tokens: R with sequence parallelism, else 1
    part: int  # index of this rank's part
    capacity: int  # tokens of the longest chunk over all parts: the size of buffers

    @property
    def num(self) -> int:
        """``n``, the number of this rank's tokens."""
        return self.chunks[-1].stop if self.chunks else 0

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """Entries ``[..., C]`` of a chunk in a tensor ``[..., parts, n]``, rank after rank, contiguous."""
        if len(self.chunks) > 1:
            per_token = per_token[..., chunk.start : chunk.stop]
        # flatten gives a strided view where each rank has one token.
        return per_token.flatten(-2).contiguous()

    def of_all(self, matrix: Tensor, chunk: Chunk) -> Tensor:
        """Rows ``[C, ...]`` of a chunk in a tensor ``[T, ...]`` that is ordered chunk after chunk."""
        start, stop = self.num_parts * chunk.start, self.num_parts * chunk.stop
        return matrix if stop - start == len(matrix) else matrix[start:stop]  # a slice takes host time

    def first(self, num: int) -> Tokens:
        """The first ``num`` tokens of each part, in the same buffers; the last chunk is shortened."""
        leading = (chunk for chunk in self.chunks if chunk.start < num)
        return self._replace(chunks=tuple(replace(chunk, stop=min(chunk.stop, num)) for chunk in leading))

    def own_part(self, per_token: Tensor) -> Tensor:
        """This rank's entries of a tensor ``[C]`` of one chunk."""
        return per_token if self.num_parts == 1 else per_token.view(self.num_parts, -1)[self.part]


#: ``m`` is rounded up to whole tiles of the GEMMs: the allocator sees fewer sizes, and no GEMM takes longer.
ROUND_TO = 128


def count(
    weights: Tensor,  # [parts, n]: token weights, in token order
    group: Any,  # the tensor-parallel group, or None
) -> HostCopy | None:
    """Start to count the unmasked tokens of each part, for :func:`num_kept`; None while a CUDA graph is
    captured.

    Collectives: a MAX all-reduce of two bytes a token over ``group`` (R > 1): whether some rank keeps the
    token, and whether some rank skips it.
    """
    if weights.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    unmasked = weights != 0
    either = largest_over_ranks(torch.stack((unmasked, ~unmasked)).to(torch.uint8), group)
    return HostCopy(torch.stack((either[0].sum(dim=1).amax(), either.amin(dim=0).sum())))


def num_kept(counted: HostCopy | None, num_tokens: int) -> int:
    """``m``: the largest number of unmasked tokens in any part, rounded up, at most the ``num_tokens`` of a
    part; all of them where nothing was counted. The host waits.

    Raises:
        ValueError: on every rank, if the ranks' masks differ: they would work on different tokens.
    """
    if counted is None:
        return num_tokens
    largest, num_differing = counted.read()
    if num_differing:
        raise ValueError(
            f"the ranks of the tensor-parallel group leave out different tokens: {num_differing} are masked "
            "on one and not on another; expected one active_mask on every rank, or with skip_masked token "
            "weights that are 0 at the same tokens: broadcast them, or draw them from one seed"
        )
    return min(num_tokens, -(-largest // ROUND_TO) * ROUND_TO)


class Kept(NamedTuple):
    """The ``m`` tokens of each part that are worked on."""

    tokens: Tensor  # int64 [parts, m]: their indices, unmasked tokens first, in ascending order
    active: Tensor  # bool [parts, m]: whether they are unmasked
    skipped: Tensor  # bool [parts, n]: tokens of weight 0

    @staticmethod
    def of(weights: Tensor, num_kept: int) -> Kept:
        """Keep ``num_kept`` tokens of each part, for token weights ``[parts, n]``."""
        skipped = weights == 0
        if num_kept == weights.shape[1]:
            tokens = torch.arange(num_kept, device=weights.device).expand_as(weights)
            return Kept(tokens, ~skipped, skipped)
        index = skipped.to(torch.uint8).argsort(dim=1, stable=True)[:, :num_kept]
        return Kept(index, ~skipped.gather(1, index), skipped)

    def of_tokens(self, per_token: Tensor) -> Tensor:
        """Select the kept tokens of a tensor: ``[..., parts, n]`` to ``[..., parts, m]``."""
        index = self.tokens.expand(*per_token.shape[:-1], self.tokens.shape[1])
        return per_token.gather(-1, index)

    def take(self, hidden: Tensor, part: int) -> Tensor:
        """Select the kept hidden states of one part: ``[n, H]`` to ``[m, H]``."""
        return hidden if self._is_all else hidden.index_select(0, self.tokens[part])

    def put_back_rows(self, rows: Tensor, part: int) -> Tensor:
        """Gradient of :meth:`take`: ``[m, H]`` to ``[n, H]``, with 0 at the other tokens."""
        if self._is_all:
            return rows
        whole = rows.new_zeros(self.skipped.shape[1], rows.shape[1])
        return whole.index_copy_(0, self.tokens[part], rows)

    def put_back(self, per_token: Tensor, per_label: bool = False) -> Tensor:
        """Put results back among all tokens: ``[parts * m]`` to ``[parts * n]``, or ``[K, ...]`` both.

        Skipped tokens get 0, False, or -1 in place of an id.
        """
        fill = -1 if per_token.dtype == torch.int64 else 0
        lead = per_token.shape[:per_label]
        whole = per_token.new_full((*lead, *self.skipped.shape), fill)
        made = per_token.view(*lead, *self.tokens.shape)
        made = torch.where(self.active, made, fill).to(made.dtype)
        whole.scatter_(-1, self.tokens.expand_as(made), made)
        return whole.flatten(-2)

    def upstream(self, upstream: Upstream) -> Upstream:
        """Upstream gradients of the kept tokens, ``[parts, n]`` to ``[parts, m]``.

        A masked token among them gets 0, unless its upstream gradient is inf or NaN.
        """

        def of_kept(grad: Tensor) -> Tensor:
            grad = self.of_tokens(grad)
            return torch.where(self.active | ~torch.isfinite(grad), grad, 0.0)

        return upstream.map(of_kept)

    def count_lost(self, upstream: Upstream) -> Tensor:
        """Count skipped tokens that have an upstream gradient, int64 ``[2]``: first those whose upstream
        gradients are finite and not all 0, then those that have an inf or NaN."""
        given = torch.stack(upstream.sizes)
        finite = torch.isfinite(given).all(0)
        lost = self.skipped & finite & (given != 0).any(0)
        return torch.stack((lost.sum(), (self.skipped & ~finite).sum()))

    def spoil_rows_(self, rows: Tensor, upstream: Upstream, part: int) -> None:
        """Fill rows of this rank's ``[n, H]`` with NaN where the token has an inf or NaN in its upstream
        gradients ``[parts, n]``."""
        finite = torch.isfinite(torch.stack(upstream.sizes)).all(0)[part]
        rows.masked_fill_(~finite.unsqueeze(-1), torch.nan)

    @property
    def _is_all(self) -> bool:
        return self.tokens.shape[1] == self.skipped.shape[1]


def refuse_lost(num_lost: int) -> None:
    """Raise RuntimeError if skipped tokens have an upstream gradient, ``num_lost`` of them."""
    if num_lost:
        raise RuntimeError(
            f"{num_lost} tokens were left out (outside active_mask; with skip_masked, of weight 0 or "
            "labelled ignore_index), and their upstream gradient is not 0: their part of the gradient was "
            "never computed. Multiply the loss and its entropy term by the mask, or give a mask or weights "
            "that have every token they use (in Megatron: the loss_mask of the model's call), or leave "
            "skip_masked (--fused-ce-skip-masked) out"
        )
