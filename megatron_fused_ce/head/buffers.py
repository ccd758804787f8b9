"""Which collective runs under which GEMM, and the buffers that this takes.

Over one rank there is nothing to hide and every buffer is there once. Over several, ``X(c)`` being a
chunk's hidden states, ``P(c)`` the GEMM that makes its logits or ``E``, ``dH`` and ``dW`` the two after
it; under each GEMM the collective that starts just before it::

    forward of store    P(c)                          P(c+1)
    and recompute       stats(c-1) + gather X(c+1)    stats(c) + gather X(c+2)

    backward of recompute,   [P(c)]                     dH(c)                      dW(c)
    last chunk first         gather X(next)                                        reduce(c)

    backward of store        dH(c)                      dH(next)                   dW of all chunks
    (scaled-exp GEMM)                                   reduce(c), gather X(next)  reduce(last)

    grad_in_forward               P(c)              dH(c-1)          dW(c-1)
                        gather X(c+1)     stats(c)         reduce(c-1)

A GEMM fills every SM as long as it runs, ours and cuBLAS's alike, whatever the priority of what waits.
A collective's kernels enter between two GEMMs or not before the next gap; and where they entered on one
rank, they hold SMs there until they entered on all. So

- a large one starts when a GEMM has ended, before the small kernels that precede the next one (statistics,
  scaling of rows: 10 us and more), or, where no small kernel follows, before :func:`delay_next_gemm`;
- never queue a collective behind another. A rank that misses the gap between two GEMMs starts late, and the
  other ranks hold SMs waiting for it; and under ``CUDA_DEVICE_MAX_CONNECTIONS=1``, where kernels start in the
  order of their launch, it would hold back the GEMM behind it instead. Where two share a gap (a forward
  without ``dW``) they leave as one launch.

Only the first gather of a forward and the tail of its last collective stand alone; the hidden states
gathered last wait for the backward, which begins with them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fused_ce.head.fp16 import scale_
from megatron_fused_ce.head.grad_weight import GradWeight, HeldGradWeight
from megatron_fused_ce.head.spec import Context
from megatron_fused_ce.logits import LogitsGrad
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import DONE, Work
from megatron_fused_ce.ranks.phases import phase


def delay_next_gemm(context: Context, device: torch.device) -> None:
    """Hold the next GEMM back for some microseconds, until the collective just started has its SMs.

    Only where the order of launch does not see to it.
    """
    if context.spec.comm.size == 1 or device.type != "cuda":
        return
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        from megatron_fused_ce.kernels import token_kernels

        token_kernels.pause(device)


class HiddenStates:
    """The chunks' hidden states ``[C, H]``, taken in order.

    With sequence parallelism they are gathered into a ring of ``depth`` buffers; a slot is used again
    ``depth`` chunks later. Without a depth there is one buffer for all tokens, :attr:`all_tokens`.
    """

    def __init__(
        self,
        context: Context,
        hidden: Tensor,  # [n, H], this rank's tokens
        chunks: Sequence[Chunk],
        depth: int | None,
        first: Tensor | None = None,  # [C, H]: the first of these chunks, gathered before
    ) -> None:
        self._context = context
        self._hidden = hidden
        self._chunks = chunks
        self._ring: list[Tensor | None] = [None] * (depth or 0)
        self.all_tokens: Tensor | None = None  # [T, H], chunk after chunk
        if depth is None and chunks:
            num_tokens = context.spec.comm.num_parts * context.num_tokens
            self.all_tokens = hidden.new_empty(num_tokens, hidden.shape[1])
        self._under_way: dict[int, tuple[Tensor, Work]] = {}
        self._gathers = context.spec.comm.sequence_parallel
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
        self._under_way[index] = out, self._context.spec.comm.gather(part, out)
        return True

    def take(self, chunk: Chunk) -> Tensor:
        """The next chunk's hidden states, after waiting for them. Collectives: its gather, where it was not
        started before."""
        self._position += 1
        if not self._gathers:
            whole = len(self._context.chunks) == 1
            self._taken = self._hidden if whole else self._hidden[chunk.start : chunk.stop]
            return self._taken
        if self._position not in self._under_way:
            self.start()
        self._taken, pending = self._under_way.pop(self._position)
        with phase("gather"):
            pending.wait()
        return self._taken

    def buffer(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` for the scaled hidden states of ``chunk``, the last or the last but one taken.

        With sequence parallelism their own slot of the ring.
        """
        return self._slot(self._chunks.index(chunk) if self._gathers else 0, chunk)

    def last(self) -> Tensor | None:
        """The chunk gathered last, with which a backward begins; None without sequence parallelism."""
        return self._taken if self._gathers else None

    def _slot(self, index: int, chunk: Chunk) -> Tensor:
        if self.all_tokens is not None:
            return self._context.chunk_of_all(self.all_tokens, chunk)
        return _chunk_buffer(self._context, self._ring, index, chunk, self._hidden, self._hidden.shape[1])


class Workspace:
    """Buffers for the logits of a pass's chunks and for their gradients, allocated when first asked for."""

    def __init__(self, context: Context, weight: Tensor, depth: int = 1) -> None:
        self._context = context
        self._weight = weight
        self._logits: list[Tensor | None] = [None] * depth
        self._grad_logits: list[Tensor | None] = [None]

    def logits(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` in the dtype of the logits; of ``depth`` chunks at a time."""
        dtype = self._context.spec.logits.logits_dtype
        return self._buffer(self._logits, chunk, dtype)

    def grad_logits(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` in the hidden states' dtype: :meth:`logits`, where these have it."""
        if self._context.spec.logits.logits_dtype is None:
            return self.logits(chunk)
        return self._buffer(self._grad_logits, chunk)

    def _buffer(self, ring: list[Tensor | None], chunk: Chunk, dtype: torch.dtype | None = None) -> Tensor:
        weight = self._weight
        return _chunk_buffer(self._context, ring, chunk.index, chunk, weight, weight.shape[0], dtype)


class GradHidden:
    """``grad_hidden`` ``[n, H]`` of this rank's tokens, and the reductions of its chunks over the ranks.

    A GEMM writes a chunk's rows into :meth:`unreduced`, and :meth:`reduce` starts their reduction. With
    sequence parallelism that is a buffer of its own; with ``depth`` 2 the reduction of the chunk before runs
    under this chunk's GEMM, and reads the other buffer.
    """

    def __init__(self, context: Context, weight: Tensor, depth: int = 1) -> None:
        self._context = context
        self.rows = weight.new_empty(context.num_tokens, weight.shape[1])
        self._unreduced: list[Tensor | None] = [None] * depth
        self._pending: deque[Work] = deque()

    def unreduced(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` for the chunk's GEMM; waits for the reduction that reads this buffer."""
        if self._context.spec.comm.num_parts == 1:
            return self._context.rows(self.rows, chunk)
        self.wait(but=len(self._unreduced) - 1)
        return _chunk_buffer(
            self._context, self._unreduced, chunk.index, chunk, self.rows, self.rows.shape[1]
        )

    def reduce(self, chunk: Chunk, unreduced: Tensor) -> None:
        """Collectives: starts those of :meth:`.VocabParallel.reduce_grad_hidden`."""
        own = self._context.rows(self.rows, chunk)
        self._pending.append(self._context.spec.comm.reduce_grad_hidden(unreduced, own))

    def wait(self, but: int = 0) -> None:
        """Wait for all running reductions, or all but the last."""
        if len(self._pending) > but:
            with phase("reduce"):
                while len(self._pending) > but:
                    self._pending.popleft().wait()


class ChunkGradients:
    """Steps 3 to 5 of every chunk: of a backward over chunks, and of ``grad_in_forward``.

    The rows of ``grad_hidden`` get their scales once, after the last chunk and its reduction. All ranks of
    the group share these, so that over several ranks they run over this rank's tokens only.
    """

    def __init__(
        self,
        context: Context,
        weight: Tensor,
        inv_scale: Tensor | None,  # fp32 []: undoes a scale of all gradients
        with_hidden: bool,  # whether there is a grad_hidden
        depth: int = 1,
    ) -> None:
        self._context, self._weight, self._inv_scale = context, weight, inv_scale
        self._grad_hidden = GradHidden(context, weight, depth) if with_hidden else None
        #: [n] fp32: whose product scales the rows; none for 1
        self.row_scales: tuple[Tensor, ...] = ()

    def add(
        self,
        chunk: Chunk,
        grad: LogitsGrad,
        x: Tensor | None,  # [C, H]; not read without grad_weight
        hidden_states: HiddenStates,  # x is of
        grad_weight: GradWeight | HeldGradWeight | None,
    ) -> None:
        """Collectives: those of :meth:`start_hidden`, under the chunk's ``grad_weight``."""
        self.start_hidden(chunk, grad)
        if grad.row_scale is None:  # no small kernel follows
            delay_next_gemm(self._context, self._weight.device)
        else:
            self.put_row_scales(chunk, grad)
        if grad_weight is not None:
            assert x is not None
            with phase("grad-weight"):
                if grad.row_scale is not None:
                    scaled = hidden_states.buffer(chunk)
                    self._context.spec.logits.scale_rows(x, grad.row_scale, scaled, grad.upstream)
                    x = scaled
                grad_weight.add(grad.matrix, x)

    def start_hidden(self, chunk: Chunk, grad: LogitsGrad) -> None:
        """Collectives: starts the reduction of the chunk's ``grad_hidden``."""
        if self._grad_hidden is None:
            return
        dh = self._grad_hidden.unreduced(chunk)
        with phase("grad-hidden"):
            torch.mm(grad.matrix, self._weight, out=dh)
            if self._inv_scale is not None:
                scale_(dh, self._inv_scale)
        self._grad_hidden.reduce(chunk, dh)

    def put_row_scales(self, chunk: Chunk, grad: LogitsGrad) -> None:
        """Record those of one chunk."""
        if self._grad_hidden is None or grad.row_scale is None:
            return
        assert grad.upstream is not None
        row_scale, upstream = map(self._context.own_part, (grad.row_scale, grad.upstream))
        if len(self._context.chunks) == 1:
            self.row_scales = row_scale, upstream  # the launch that scales the rows multiplies them
            return
        if not self.row_scales:
            self.row_scales = (row_scale.new_ones(self._context.num_tokens),)
        torch.mul(row_scale, upstream, out=self.row_scales[0][chunk.start : chunk.stop])

    def reduced(self) -> Tensor | None:
        """``grad_hidden`` ``[n, H]``, reduced, its rows not scaled yet."""
        if self._grad_hidden is None:
            return None
        self._grad_hidden.wait()
        return self._grad_hidden.rows

    def hidden(self) -> Tensor | None:
        """``grad_hidden`` ``[n, H]``."""
        rows = self.reduced()
        if rows is not None and self.row_scales:
            row_scale, *upstream = self.row_scales
            with phase("grad-hidden"):
                self._context.spec.logits.scale_rows(rows, row_scale, rows, *upstream)
        return rows


def _chunk_buffer(
    context: Context,
    ring: list[Tensor | None],
    index: int,
    chunk: Chunk,
    like: Tensor,
    width: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``[C, width]`` in the ring's slot for ``index``, which has room for the longest chunk."""
    slot = index % len(ring)
    buffer = ring[slot]
    if buffer is None:
        buffer = ring[slot] = like.new_empty(context.spec.plan.capacity, width, dtype=dtype)
    num_tokens = context.spec.comm.num_parts * chunk.num_tokens
    return buffer if buffer.shape[0] == num_tokens else buffer[:num_tokens]
