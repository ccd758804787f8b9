"""Leaves tokens of weight 0 out of every GEMM.

All ranks of the tensor-parallel group must work on the same number of tokens. So each part (one of R with
sequence parallelism) is cut to ``m`` tokens, the unmasked tokens of the part that has the most; the other
parts are filled up with masked tokens, whose results are dropped. The host must know ``m``: :func:`count`
sends it there without a wait while the device still has work, and :meth:`Count.wait` waits for it later.
Left-out tokens have loss 0 and gradient 0; an upstream gradient for one of them raises :mod:`.grad_guard`'s
error before the next optimizer step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fused_ce.grad_guard import Guard
from megatron_fused_ce.vocab_parallel import largest_over_ranks

#: ``m`` is rounded up to whole tiles of the GEMMs: fewer sizes for the allocator, at no cost in time.
ROUND_TO = 128


class Count:
    """The number of tokens to work on, while it is copied to the host."""

    def __init__(self, largest: Tensor) -> None:
        self._event = None
        self._value = largest
        if largest.is_cuda:
            self._value = torch.empty(1, dtype=torch.int64, pin_memory=True)
            self._value.copy_(largest, non_blocking=True)
            self._event = torch.cuda.current_stream(largest.device).record_event()

    def wait(self) -> int:
        """Wait until the device has counted, and return the number."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._value.item())


def count(
    weights: Tensor,  # [parts, n]: token weights, in token order
    group: Any,  # the tensor-parallel group, or None
) -> Count | None:
    """Start counting the unmasked tokens of the part that has the most; None while a CUDA graph is captured.

    Collectives: a MAX all-reduce of an int64 over ``group`` (R > 1), so that all ranks agree whatever their
    masks are.
    """
    if weights.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return Count(largest_over_ranks((weights != 0).sum(dim=1).amax().reshape(1), group))


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
        """Select this rank's kept hidden states, ``[n, H]`` to ``[m, H]``; differentiable."""
        if self.tokens.shape[1] == hidden.shape[0]:
            return hidden
        taken: Tensor = _Take.apply(hidden, self.tokens[part])
        return taken

    def put_back(self, per_token: Tensor, guard: Guard) -> Tensor:
        """Put results back in place: ``[parts * m]`` to ``[parts * n]``.

        Masked tokens get 0, -1 (ids) or False.

        ``guard`` records an upstream gradient for a masked token as a mismatch.
        """
        fill = -1 if per_token.dtype == torch.int64 else 0
        whole: Tensor = _PutBack.apply(per_token, self, fill, guard)
        return whole


def num_kept(largest: int, num_tokens: int) -> int:
    """``m`` for a part of ``num_tokens`` tokens: rounded up, at most all of them."""
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
    def forward(ctx: Any, per_token: Tensor, kept: Kept, fill: int, guard: Guard) -> Tensor:
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
        # An inf or NaN comes from a loss scale that overflowed; Megatron's own check finds it.
        ctx.guard.record_mismatch(torch.isfinite(grad).all() & (skipped & (grad != 0)).any())
        return torch.where(active, grad.gather(1, index), 0.0).flatten(), None, None, None
