"""What of a chunk is under way beside the products of its neighbours, and the buffers that takes.

Over one rank there is nothing to hide and every buffer is there once. Over several, ``X(c)`` being a
chunk's hidden states, ``P(c)`` the product that makes its logits or ``E``, ``dH`` and ``dW`` the two after
it; under each product the collective that starts just before it::

    forward of store    P(c)                          P(c+1)
    and recompute       stats(c-1) + gather X(c+1)    stats(c) + gather X(c+2)

    backward of both,   [P(c)]                        dH(c)          dW(c)
    chunks in reverse   gather X(c+1), or under dH                   reduce(c)

    grad_in_forward               P(c)              dH(c-1)          dW(c-1)
                        gather X(c+1)     stats(c)         reduce(c-1)

A product fills every SM as long as it runs, ours and cuBLAS's alike, whatever the priority of what waits.
A collective's kernels enter between two products or not before the next gap; and where they entered on one
rank, they hold SMs there until they entered on all. So

- a large one starts when a product has ended, before the small kernels that precede the next one (statistics,
  scaling of rows: 10 us and more), or before :func:`let_in` where there are none;
- it starts when no other is under way: one that waited for another would miss the gap on the rank whose
  product is a little earlier, and hold SMs on the others for as long as that product takes; and under
  ``CUDA_DEVICE_MAX_CONNECTIONS=1``, where kernels start in the order of their launch, it would hold back the
  product behind it instead. Where two share a gap (a forward without ``dW``) they leave as one launch.

Only the first gather of a forward and the tail of its last collective stand alone; the hidden states
gathered last wait for the backward, which begins with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fused_ce import logits_backend
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.grad_weight import GradWeight, OpenGradWeight
from megatron_fused_ce.logits_backend import LogitsBackend, Operand
from megatron_fused_ce.loss_form import LossForm
from megatron_fused_ce.phases import UNTIMED, Phases
from megatron_fused_ce.upstream_guard import WITHOUT_MODEL, Guard
from megatron_fused_ce.vocab_parallel import DONE, Pending, VocabParallel


@dataclass(frozen=True)
class Head:
    """What one call of the head fixes, beside its tensors."""

    comm: VocabParallel
    chunks: tuple[Chunk, ...]
    #: tokens, over the tensor-parallel group, that a chunk's buffers have room for
    chunk_capacity: int
    logit_scale: float
    form: LossForm
    logits: LogitsBackend
    with_argmax: bool
    vocab_start: int | Tensor
    open_grad_weight: OpenGradWeight
    token_weights: Tensor | None = None  # [parts, n] fp32
    phases: Phases = UNTIMED
    guard: Guard = WITHOUT_MODEL

    @property
    def needs_argmax(self) -> bool:
        return self.with_argmax or "predicted" in self.form.outputs

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's entries ``[..., C]`` of a tensor ``[..., parts, n]``, rank after rank."""
        return per_token[..., chunk.start : chunk.stop].flatten(-2)

    def own_part(self, per_token: Tensor) -> Tensor:
        """This rank's entries ``[n]`` of a chunk's ``[C]``."""
        return per_token.view(self.comm.num_parts, -1)[self.comm.part]

    def begin(self, weight: Tensor, tokens: Tokens) -> Tensor | None:
        """Start the first two gathers of hidden states; some rows ``[S, H]`` of the whole weight, the same
        on every rank, where the logits backend wants them.

        Collectives, over several ranks: all-gathers of the sampled rows ``[S / R, H]`` and of the first
        chunk's hidden states in one launch, of the second chunk's (sequence parallelism).
        """
        wanted, size = self.logits.num_sampled, self.comm.size
        sample, pending = None, DONE
        with self.comm.together(weight.device):
            if wanted and self.chunks:
                sample = rows = self.logits.sample_rows(weight, -(-wanted // size), self.form)
                if size > 1:
                    sample = rows.new_empty(size * rows.shape[0], rows.shape[1])
                    pending = self.comm.gather(rows, sample)
            tokens.start()
        tokens.start()
        pending.wait()
        return sample


def let_in(head: Head, device: torch.device) -> None:
    """Hold the next product back for some microseconds, until the collective just started has its SMs.

    Only where the order of launch does not see to it.
    """
    ordered = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if head.comm.size > 1 and device.type == "cuda" and not ordered:
        from megatron_fused_ce.kernels import token_kernels

        token_kernels.pause(device)


class Tokens:
    """The chunks' hidden states ``[C, H]``, taken in order.

    With sequence parallelism they are gathered into a ring of ``depth`` buffers; a slot is used again
    ``depth`` chunks later.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,  # [n, H], this rank's tokens
        chunks: Sequence[Chunk],
        depth: int,
        first: Tensor | None = None,  # [C, H]: the first of these chunks, gathered before
    ) -> None:
        self._head = head
        self._hidden = hidden
        self._chunks = chunks
        self._ring: list[Tensor | None] = [None] * depth
        self._under_way: dict[int, tuple[Tensor, Pending]] = {}
        self._gathers = head.comm.sequence_parallel
        self._started = 0
        if first is not None:
            self._under_way[0] = first, DONE
            self._started = 1
        self._taken: Tensor | None = None
        self._position = -1

    def start(self) -> bool:
        """Start the next gather, into a slot whose last use has been issued; whether there was one.

        Collectives: one all-gather with sequence parallelism, none after the last chunk.
        """
        index = self._started
        if not self._gathers or index >= len(self._chunks):
            return False
        self._started += 1
        chunk = self._chunks[index]
        out = self._slot(index, chunk)
        part = self._hidden[chunk.start : chunk.stop]
        self._under_way[index] = out, self._head.comm.gather(part, out)
        self._head.phases.moved("gather", self._head.comm.ring_bytes(out.nbytes))
        return True

    def take(self, chunk: Chunk) -> Tensor:
        """The next chunk's, waited for. Collectives: its gather, where it was not started before."""
        self._position += 1
        if not self._gathers:
            self._taken = self._hidden[chunk.start : chunk.stop]
            return self._taken
        if self._position not in self._under_way:
            self.start()
        self._taken, pending = self._under_way.pop(self._position)
        with self._head.phases("gather"):
            pending.wait()
        return self._taken

    def room(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` for what was made of ``chunk``'s, which was the last or the last but one taken.

        With sequence parallelism the slot it lies in, or would have.
        """
        index = self._chunks.index(chunk) if self._gathers else 0
        return self._slot(index, chunk)

    def last(self) -> Tensor | None:
        """What was gathered last, to begin a backward with; None without sequence parallelism."""
        return self._taken if self._gathers else None

    def _slot(self, index: int, chunk: Chunk) -> Tensor:
        slot = index % len(self._ring)
        room = self._ring[slot]
        if room is None:
            room = self._hidden.new_empty(self._head.chunk_capacity, self._hidden.shape[1])
            self._ring[slot] = room
        return room[: self._head.comm.num_parts * chunk.num_tokens]


class Rooms:
    """Buffers that the chunks of a pass share, allocated when first asked for."""

    def __init__(self, head: Head, hidden: Tensor, num_rows: int, depth: int = 1) -> None:
        self._head = head
        self._hidden = hidden
        self._num_rows = num_rows
        self._logits: list[Tensor | None] = [None] * depth
        self._grad_hidden: Tensor | None = None

    def logits(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` in the hidden states' dtype; of ``depth`` chunks at a time."""
        slot = chunk.index % len(self._logits)
        room = self._logits[slot]
        if room is None:
            room = self._logits[slot] = self._new(self._num_rows)
        return self._cut(room, chunk)

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
        tokens: Tokens,
    ) -> None:
        self._head = head
        self._weight = weight
        self._grad_hidden = torch.empty_like(hidden) if wants_grad_hidden else None
        self._grad_weight = grad_weight
        self._inv_scale = inv_scale
        self._rooms = rooms
        self._tokens = tokens
        self._pending: list[Pending] = []
        self._row_factor: Tensor | None = None  # [n] fp32

    def add_hidden(self, chunk: Chunk, operand: Operand) -> None:
        """``grad_hidden`` of the chunk. Collectives: starts its reduction."""
        if self._grad_hidden is None:
            return
        matrix, factor = operand
        comm, phases = self._head.comm, self._head.phases
        out = self._grad_hidden[chunk.start : chunk.stop]
        partial = out
        if comm.num_parts > 1:
            # The room's last reader is the reduction of the chunk before, which has long ended.
            self._wait()
            partial = self._rooms.grad_hidden(chunk)
        with phases("grad-hidden"):
            torch.mm(matrix, self._weight, out=partial)
            if factor is not None:
                if self._row_factor is None:
                    self._row_factor = factor.new_ones(self._grad_hidden.shape[0])
                self._row_factor[chunk.start : chunk.stop] = self._head.own_part(factor)
            if self._inv_scale is not None:
                partial.mul_(self._inv_scale)
        self._pending.append(comm.reduce_grad_hidden(partial, out))
        phases.moved("reduce", comm.ring_bytes(partial.nbytes, not comm.sequence_parallel))

    def add_weight(self, chunk: Chunk, operand: Operand, tokens: Tensor | None) -> None:
        """``grad_weight`` of the chunk from its ``tokens`` ``[C, H]``."""
        if self._grad_weight is None:
            return
        assert tokens is not None
        matrix, factor = operand
        with self._head.phases("grad-weight"):
            if factor is not None:
                tokens = logits_backend.scale_rows(tokens, factor, out=self._tokens.room(chunk))
            self._grad_weight.add(matrix, tokens)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """``grad_hidden`` ``[n, H]``, reduced, and ``[n]`` fp32 to multiply it by (None for 1)."""
        self._wait()
        return self._grad_hidden, self._row_factor

    def _wait(self) -> None:
        if not self._pending:
            return
        with self._head.phases("reduce"):
            for pending in self._pending:
                pending.wait()
        self._pending.clear()
