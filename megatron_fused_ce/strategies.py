"""The loop over chunks, forward and backward: hidden -> loss -> gradients.

A strategy decides what of a chunk's logits outlives the forward. Adding one means: a subclass of
:class:`Strategy` and its line in :data:`STRATEGIES` (and its name in ``config.STRATEGY_CHOICES``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.grad_weight import OpenGradWeight
from megatron_fused_ce.row_ops import TokenTerms
from megatron_fused_ce.vocab_parallel import DONE, VocabParallel


@dataclass(frozen=True)
class Head:
    """What one call of the head fixes, beside its tensors."""

    comm: VocabParallel
    chunks: tuple[Chunk, ...]
    logit_scale: float
    rows: ModuleType  # row kernels, see row_ops.backend_for
    with_argmax: bool
    open_grad_weight: OpenGradWeight

    @property
    def chunk_capacity(self) -> int:
        """Tokens of the largest chunk over the tensor-parallel group."""
        return self.comm.num_parts * max((chunk.num_tokens for chunk in self.chunks), default=0)

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's entries ``[..., C]`` of a tensor ``[..., parts, n]``, rank after rank."""
        return per_token[..., chunk.start : chunk.stop].flatten(-2)


class Forward(NamedTuple):
    """What a forward pass leaves; ``parts`` is ``R`` with sequence parallelism, else 1."""

    loss: Tensor  # [parts, n] fp32
    terms: Tensor  # [3, parts, n] fp32: row_ops.TokenTerms of every token
    kept_logits: list[Tensor]  # [C, V] of the chunks that the strategy keeps, in order
    row_max: Tensor | None  # [parts, n] fp32, this shard's largest logit, with argmax only
    argmax: Tensor | None  # [parts, n] int64, its column in this shard


class Strategy:
    """Both loops. A subclass says which chunks' logits to keep until the backward."""

    name: str

    def keeps(self, chunk: Chunk) -> bool:
        """Whether this chunk's logits wait for the backward."""
        raise NotImplementedError

    def kept_bytes(self, num_tokens: int, num_rows: int, itemsize: int) -> int:
        """Bytes of logits that live from the forward to the backward."""
        raise NotImplementedError

    def forward(
        self,
        head: Head,
        hidden: Tensor,  # [n, H], this rank's tokens
        weight: Tensor,  # [V, H]
        labels: Tensor,  # [parts, n] int64, columns of this shard
        needs_grad: bool,
    ) -> Forward:
        """Loss of every token, chunk by chunk.

        Per chunk: gather of hidden states (sequence parallelism), product, row statistics, merge over
        the group (see :class:`VocabParallel` for each one's collectives).
        """
        num_rows = weight.shape[0]
        loss = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        terms = loss.new_empty((3, *labels.shape))
        row_max = torch.empty_like(loss) if head.with_argmax else None
        argmax = torch.empty_like(labels) if head.with_argmax else None
        kept: list[Tensor] = []
        reused: Tensor | None = None
        for chunk in head.chunks:
            tokens = head.comm.gather_hidden(hidden[chunk.start : chunk.stop])
            if needs_grad and self.keeps(chunk):
                logits = hidden.new_empty(tokens.shape[0], num_rows)
                kept.append(logits)
            else:
                if reused is None:
                    reused = hidden.new_empty(head.chunk_capacity, num_rows)
                logits = reused[: tokens.shape[0]]
            torch.mm(tokens, weight.t(), out=logits)
            chunk_labels = head.split(labels, chunk)
            stats = head.rows.row_statistics(
                logits, chunk_labels, head.logit_scale, head.with_argmax
            )
            label_here = (chunk_labels >= 0) & (chunk_labels < num_rows)
            chunk_loss, chunk_terms = head.comm.merge(stats, label_here)
            part = (slice(None), slice(chunk.start, chunk.stop))
            shape = (labels.shape[0], chunk.num_tokens)
            loss[part] = chunk_loss.view(shape)
            for saved, term in zip(terms, chunk_terms, strict=True):
                saved[part] = term.view(shape)
            if row_max is not None and argmax is not None:
                row_max[part] = stats.row_max.view(shape)
                argmax[part] = stats.argmax.view(shape)
        return Forward(loss, terms, kept, row_max, argmax)

    def backward(
        self,
        head: Head,
        hidden: Tensor,  # [n, H]
        weight: Tensor,  # [V, H]
        labels: Tensor,  # [parts, n] int64
        terms: Tensor,  # [3, parts, n]
        kept_logits: list[Tensor],
        grad_loss: Tensor,  # [parts, n] fp32
        needs_grad_hidden: bool,
        needs_grad_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """``grad_hidden`` of this rank's tokens and what autograd gets for the weight.

        Per chunk: gather of hidden states where they are needed, logits again where they were not
        kept, gradients of the logits in one reused buffer, the two products. The reduction of a
        chunk's ``grad_hidden`` runs under its ``grad_weight`` product and is waited for one chunk
        later.
        """
        num_rows = weight.shape[0]
        factor = grad_loss * head.logit_scale
        scale = inv_scale = None
        if hidden.dtype == torch.float16:
            scale, inv_scale = fp16_scale(factor)
            factor = factor * scale
        grad_hidden = torch.empty_like(hidden) if needs_grad_hidden else None
        end_point = None
        if needs_grad_weight:
            end_point = head.open_grad_weight(weight, len(head.chunks), scale is not None)
        buffer = hidden.new_empty(head.chunk_capacity, num_rows)
        kept = iter(kept_logits)
        pending = DONE
        for chunk in head.chunks:
            keeps = self.keeps(chunk)
            part = slice(chunk.start, chunk.stop)
            num_tokens = head.comm.num_parts * chunk.num_tokens
            tokens = None
            if needs_grad_weight or not keeps:
                tokens = head.comm.gather_hidden(hidden[part])
            grad_logits = buffer[:num_tokens]
            if keeps:
                logits = next(kept)
            else:
                assert tokens is not None
                logits = torch.mm(tokens, weight.t(), out=grad_logits)
            head.rows.row_gradients(
                logits,
                head.split(labels, chunk),
                TokenTerms(*head.split(terms, chunk)),
                head.split(factor, chunk),
                head.logit_scale,
                out=grad_logits,
            )
            if grad_hidden is not None:
                out = grad_hidden[part]
                partial = out
                if head.comm.num_parts > 1:
                    partial = out.new_empty(num_tokens, out.shape[-1])
                torch.mm(grad_logits, weight, out=partial)
                if inv_scale is not None:
                    partial.mul_(inv_scale)
                pending.wait()
                pending = head.comm.reduce_grad_hidden(partial, out)
            if end_point is not None:
                assert tokens is not None
                end_point.add(grad_logits, tokens)
        pending.wait()
        return grad_hidden, None if end_point is None else end_point.close(inv_scale)


class Recompute(Strategy):
    """Keeps three floats a token; the backward computes the logits again. Four products."""

    name = "recompute"

    def keeps(self, chunk: Chunk) -> bool:
        return False

    def kept_bytes(self, num_tokens: int, num_rows: int, itemsize: int) -> int:
        return 0


class Store(Strategy):
    """Keeps every chunk's logits for the backward. Three products, ``T * V`` logits held once."""

    name = "store"

    def keeps(self, chunk: Chunk) -> bool:
        return True

    def kept_bytes(self, num_tokens: int, num_rows: int, itemsize: int) -> int:
        return num_tokens * num_rows * itemsize


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (Recompute(), Store())}


def resolve_strategy(name: str) -> Strategy:
    """The strategy of that name; ``auto`` is ``recompute``."""
    return STRATEGIES["recompute" if name == "auto" else name]


#: fp16 gradients of logits are written as ``2**FP16_HEADROOM_BITS`` times their share of the largest
#: upstream gradient: 2.3e-10 is then the smallest probability that does not vanish, and a product's
#: output stays far below 65504 for weights of any use.
FP16_HEADROOM_BITS = 8


def fp16_scale(factor: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two that brings the largest ``|factor|`` near ``2**8``, and its inverse (fp32 []).

    Computed on the device, so the host never waits. 1 where there is nothing finite to scale by.
    """
    largest = factor.abs().amax() if factor.numel() else factor.new_zeros(())
    _, exponent = torch.frexp(largest)
    shift = (FP16_HEADROOM_BITS - exponent).clamp(-100, 100)
    shift = torch.where(torch.isfinite(largest) & (largest > 0), shift, 0)
    one = torch.ones_like(largest)
    return torch.ldexp(one, shift), torch.ldexp(one, -shift)


def predicted_peak_bytes(
    strategy: Strategy,
    *,
    num_tokens: int,
    hidden_size: int,
    num_rows: int,
    itemsize: int,
    chunk_capacity: int,
    num_parts: int,
    sums_grad_weight: bool,
) -> int:
    """Bytes of the head's own buffers at their peak, beside inputs, ``grad_hidden`` and the end point.

    Args:
        num_tokens: ``T``; hidden_size: ``H``; num_rows: ``V``; itemsize: bytes of a hidden state.
        chunk_capacity: ``C`` of the largest chunk.
        num_parts: ``R`` with sequence parallelism (two chunk buffers of hidden states), else 1.
        sums_grad_weight: whether ``grad_weight`` is summed in an fp32 buffer before its end point.

    Returns:
        chunk logits + kept logits + gathered chunk hidden states and their gradients + fp32 sum of
        ``grad_weight`` + 16 bytes a token of statistics and loss.
    """
    chunk_logits = chunk_capacity * num_rows * itemsize
    kept = strategy.kept_bytes(num_tokens, num_rows, itemsize)
    gathered = 3 * chunk_capacity * hidden_size * itemsize if num_parts > 1 else 0
    grad_weight = 4 * num_rows * hidden_size if sums_grad_weight else 0
    return chunk_logits + kept + gathered + grad_weight + 16 * num_tokens
