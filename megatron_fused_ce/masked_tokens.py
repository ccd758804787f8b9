"""Leaving masked tokens out: what has weight 0 takes part in no product.

Every rank of the tensor-parallel group works on the same number of tokens, so each part of them (one of R
with sequence parallelism) is cut down to the ``m`` of the part that has the most; the shorter ones are
filled up with masked tokens of their own, whose results are dropped. ``m`` must be known on the host:
:func:`count` sends it there without a wait, at a time when the device still has work, and
:meth:`Count.wait` is called where it is needed. Left-out tokens have loss 0 and gradient 0; an upstream
gradient for one of them breaks the promise that the token weights are, and ends in
:mod:`.grad_guard`'s error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fused_ce.grad_guard import WITHOUT_MODEL, Guard
from megatron_fused_ce.vocab_parallel import largest_over_ranks

#: ``m`` is rounded up to whole tiles of the products: fewer sizes for the allocator, and no time lost.
ROUND_TO = 128


class Count:
    """The number of tokens to work on, on its way to the host."""

    def __init__(self, largest: Tensor) -> None:
        self._event = None
        self._value = largest
        if largest.is_cuda:
            self._value = torch.empty(1, dtype=torch.int64, pin_memory=True)
            self._value.copy_(largest, non_blocking=True)
            self._event = torch.cuda.current_stream(largest.device).record_event()

    def wait(self) -> int:
        """Wait for the device to have reached the place where it was counted."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._value.item())


def count(
    weights: Tensor,  # [parts, n]: token weights, in token order
    group: Any,  # the tensor-parallel group, or None
) -> Count | None:
    """Unmasked tokens of the part that has the most; None while a CUDA graph is captured.

    Collectives: a MAX all-reduce of an int64 over ``group`` (R > 1), so that all ranks agree whatever their
    masks are.
    """
    if weights.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return Count(largest_over_ranks((weights != 0).sum(dim=1).amax().reshape(1), group))


class Kept(NamedTuple):
    """Which tokens of each part are worked on."""

    tokens: Tensor  # int64 [parts, m]: those with a weight first, in their order
    active: Tensor  # bool [parts, m]: whether they have one
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
        """``[..., parts, m]`` of ``[..., parts, n]``."""
        index = self.tokens.expand(*per_token.shape[:-1], self.tokens.shape[1])
        return per_token.gather(-1, index)

    def take(self, hidden: Tensor, part: int) -> Tensor:
        """``[m, H]`` of this rank's ``[n, H]``; a gradient goes back to its place, 0 elsewhere."""
        if self.tokens.shape[1] == hidden.shape[0]:
            return hidden
        taken: Tensor = _Take.apply(hidden, self.tokens[part])
        return taken

    def put_back(self, per_token: Tensor, guard: Guard = WITHOUT_MODEL) -> Tensor:
        """``[parts * n]`` of ``[parts * m]``; 0 for masked tokens (ids: -1, bool: False).

        An upstream gradient for one of those is remembered by ``guard``.
        """
        fill = -1.0 if per_token.dtype == torch.int64 else 0.0
        whole: Tensor = _PutBack.apply(per_token, self, fill, guard)
        return whole


def num_kept(largest: int, num_tokens: int) -> int:
    """``m``, of ``num_tokens`` in a part."""
    return min(num_tokens, -(-largest // ROUND_TO) * ROUND_TO)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = hidden.shape[0]
        return hidden.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        whole = grad.new_zeros(ctx.num_tokens, grad.shape[1])
        return whole.index_copy_(0, index, grad), None


class _PutBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_token: Tensor, kept: Kept, fill: float, guard: Guard) -> Tensor:
        ctx.save_for_backward(*kept)
        whole = per_token.new_full(kept.skipped.shape, fill)
        made = per_token.view(kept.tokens.shape)
        whole.scatter_(1, kept.tokens, torch.where(kept.active, made, fill).to(made.dtype))
        if per_token.requires_grad:
            guard.prepare(per_token.device)
            ctx.guard = guard
        return whole.flatten()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, active, skipped = ctx.saved_tensors
        grad = grad.view(skipped.shape)
        # An inf or NaN is a loss scale that overflowed, for Megatron's own check to find.
        ctx.guard.record_mismatch(torch.isfinite(grad).all() & (skipped & (grad != 0)).any())
        return torch.where(active, grad.gather(1, index), 0.0).flatten(), None, None, None
