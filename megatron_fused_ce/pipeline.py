"""What of a chunk is under way beside the products of its neighbours, and the buffers that takes.

Over one rank there is nothing to hide and every buffer is there once. Over several, in the order of issue,
for ``eager`` (the longest of the pipelines; ``P`` is the product that makes logits or ``E``)::

    products      P(c)              grad_hidden(c-1)   grad_weight(c-1)   P(c+1)
    collectives   gather X(c+1)     statistics(c)      reduce(c-1)        gather X(c+2)

Each collective starts when the product before it in that order has ended, and is waited for one product
later at the earliest; only the first gather and the last reduction's end stand alone. What is alive then,
each ``[C, H]`` but the first: two chunks of logits ``[C, V]``; three chunks of gathered hidden states (one is
read by ``grad_weight(c-1)``, one by ``P(c)``, one on its way); one unreduced ``grad_hidden``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fused_ce import logit_pass
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.grad_weight import GradWeight, OpenGradWeight
from megatron_fused_ce.logit_pass import LogitPass, Operand
from megatron_fused_ce.vocab_parallel import Pending, VocabParallel


@dataclass(frozen=True)
class Head:
    """What one call of the head fixes, beside its tensors."""

    comm: VocabParallel
    chunks: tuple[Chunk, ...]
    logit_scale: float
    logits: LogitPass
    with_argmax: bool
    open_grad_weight: OpenGradWeight
    token_weights: Tensor | None = None  # [parts, n] fp32

    @property
    def chunk_capacity(self) -> int:
        """Tokens of the largest chunk over the tensor-parallel group."""
        return self.comm.num_parts * max((chunk.num_tokens for chunk in self.chunks), default=0)

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's entries ``[..., C]`` of a tensor ``[..., parts, n]``, rank after rank."""
        return per_token[..., chunk.start : chunk.stop].flatten(-2)

    def own_part(self, per_token: Tensor) -> Tensor:
        """This rank's entries ``[n]`` of a chunk's ``[C]``."""
        return per_token.view(self.comm.num_parts, -1)[self.comm.part]

    def sample(self, weight: Tensor) -> Tensor | None:
        """Some rows ``[S, H]`` of the whole weight, the same on every rank, where the logits want them.

        Collectives: one all-gather of ``[S / R, H]`` over several ranks, none without chunks.
        """
        wanted = self.logits.num_sampled
        if not wanted or not self.chunks:
            return None
        rows = self.logits.sample_rows(weight, -(-wanted // self.comm.size))
        return self.comm.gather_rows(rows)


class Tokens:
    """The chunks' hidden states ``[C, H]``, taken in order.

    With sequence parallelism they are gathered one chunk ahead into a ring of ``depth`` buffers: what was
    taken stays whole until ``depth - 1`` more have been taken, and may be overwritten by who took it.
    """

    def __init__(self, head: Head, hidden: Tensor, chunks: Sequence[Chunk], depth: int) -> None:
        self._head = head
        self._hidden = hidden  # [n, H], this rank's tokens
        self._chunks = chunks
        self._ring: list[Tensor | None] = [None] * depth
        self._under_way: dict[int, tuple[Tensor, Pending]] = {}
        self._next = 0
        #: Whether what is taken is a buffer of the ring rather than the caller's own tensor.
        self.gathers = head.comm.sequence_parallel

    def take(self, chunk: Chunk) -> Tensor:
        """The next chunk's. Collectives: starts the gather of the one after it (and its own, the first)."""
        mine = self._hidden[chunk.start : chunk.stop]
        if not self.gathers:
            return mine
        if self._next not in self._under_way:
            self._start(self._next)
        tokens, pending = self._under_way.pop(self._next)
        pending.wait()
        self._next += 1
        self._start(self._next)
        return tokens

    def _start(self, index: int) -> None:
        if index >= len(self._chunks):
            return
        chunk, slot = self._chunks[index], index % len(self._ring)
        room = self._ring[slot]
        if room is None:
            room = self._hidden.new_empty(self._head.chunk_capacity, self._hidden.shape[1])
            self._ring[slot] = room
        out = room[: self._head.comm.num_parts * chunk.num_tokens]
        mine = self._hidden[chunk.start : chunk.stop]
        self._under_way[index] = out, self._head.comm.gather_hidden(mine, out)


class Rooms:
    """Buffers that the chunks of a pass share, allocated when first asked for."""

    def __init__(self, head: Head, hidden: Tensor, num_rows: int, depth: int = 1) -> None:
        self._head = head
        self._hidden = hidden
        self._num_rows = num_rows
        self._logits: list[Tensor | None] = [None] * depth
        self._tokens: Tensor | None = None
        self._grad_hidden: Tensor | None = None

    def logits(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` in the hidden states' dtype; of ``depth`` chunks at a time."""
        slot = chunk.index % len(self._logits)
        room = self._logits[slot]
        if room is None:
            room = self._logits[slot] = self._new(self._num_rows)
        return self._cut(room, chunk)

    def tokens(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` in the hidden states' dtype."""
        if self._tokens is None:
            self._tokens = self._new(self._hidden.shape[1])
        return self._cut(self._tokens, chunk)

    def grad_hidden(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` in the hidden states' dtype."""
        if self._grad_hidden is None:
            self._grad_hidden = self._new(self._hidden.shape[1])
        return self._cut(self._grad_hidden, chunk)

    def _new(self, width: int) -> Tensor:
        return self._hidden.new_empty(self._head.chunk_capacity, width)

    def _cut(self, room: Tensor, chunk: Chunk) -> Tensor:
        return room[: self._head.comm.num_parts * chunk.num_tokens]


class Sink(Protocol):
    """Takes a chunk's addend to ``grad_weight``."""

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None: ...


class Products:
    """The two products that follow a chunk's gradients of logits.

    ``grad_hidden`` is summed over the ranks before its rows are multiplied by their factor, which all ranks
    share: that pass then runs over this rank's tokens only, and at the end.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        wants_grad_hidden: bool,
        grad_weight: GradWeight | Sink | None,
        inv_scale: Tensor | None,
        rooms: Rooms,
    ) -> None:
        self._head = head
        self._weight = weight
        self._grad_hidden = torch.empty_like(hidden) if wants_grad_hidden else None
        self._grad_weight = grad_weight
        self._inv_scale = inv_scale
        self._rooms = rooms
        self._pending: list[Pending] = []
        self._row_factor: Tensor | None = None  # [n] fp32

    def add_hidden(self, chunk: Chunk, operand: Operand) -> None:
        """``grad_hidden`` of the chunk. Collectives: starts its reduction."""
        if self._grad_hidden is None:
            return
        matrix, factor = operand
        comm = self._head.comm
        out = self._grad_hidden[chunk.start : chunk.stop]
        partial = out
        if comm.num_parts > 1:
            # The room's last reader is the reduction of the chunk before, which has long ended.
            self._wait()
            partial = self._rooms.grad_hidden(chunk)
        torch.mm(matrix, self._weight, out=partial)
        if factor is not None:
            if self._row_factor is None:
                self._row_factor = factor.new_ones(self._grad_hidden.shape[0])
            self._row_factor[chunk.start : chunk.stop] = self._head.own_part(factor)
        if self._inv_scale is not None:
            partial.mul_(self._inv_scale)
        self._pending.append(comm.reduce_grad_hidden(partial, out))

    def add_weight(
        self, chunk: Chunk, operand: Operand, tokens: Tensor | None, may_overwrite: bool
    ) -> None:
        """``grad_weight`` of the chunk from its ``tokens`` ``[C, H]``, which may be overwritten or not."""
        if self._grad_weight is None:
            return
        assert tokens is not None
        matrix, factor = operand
        if factor is not None:
            room = tokens if may_overwrite else self._rooms.tokens(chunk)
            tokens = logit_pass.scale_rows(tokens, factor, out=room)
        self._grad_weight.add(matrix, tokens)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """``grad_hidden`` ``[n, H]``, reduced, and ``[n]`` fp32 to multiply it by (None for 1)."""
        self._wait()
        return self._grad_hidden, self._row_factor

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
