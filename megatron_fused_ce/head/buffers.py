"""Buffers of a pass over the chunks, and the table of which collective runs under which GEMM.

``P(c)`` is the GEMM that makes the logits of chunk ``c`` (or ``E``), ``dH(c)`` and ``dW(c)`` are those of its
gradients. Under each GEMM stands the collective that starts just before it; over one rank there is none::

    forward of store    P(c)                          P(c+1)
    and recompute       merge(c-1) + gather X(c+1)    merge(c) + gather X(c+2)

    backward of recompute,   [P(c)]                     dH(c)                      dW(c)
    last chunk first         gather X(next)                                        reduce(c)

    backward of store        dH(c)                      dH(next)                   dW of all chunks
    (scaled-exp GEMM)                                   reduce(c), gather X(next)  reduce(last)

    grad_in_forward               P(c)              dH(c-1)          dW(c-1)
                        gather X(c+1)     merge(c)         reduce(c-1)

A GEMM, ours or cuBLAS's, fills every SM until it ends, whatever the priority of what waits. The kernels of a
collective enter in the gap between two GEMMs, or wait for the next gap; once in, they hold their SMs until
they have entered on every rank. Hence two rules:

- A large collective starts when a GEMM has ended, before the small kernels that precede the next one
  (statistics, scaling of rows: 10 us and more). If there is no small kernel,
  :meth:`.VocabParallel.delay_next_gemm` makes a gap.
- No collective is queued behind another. It could miss the gap on one rank, while the other ranks hold SMs
  and wait; and under ``CUDA_DEVICE_MAX_CONNECTIONS=1``, where kernels start in the order of their launch, it
  would hold back the GEMM behind it. Two collectives that share a gap leave as one launch.

Only the first gather of a forward and the end of its last collective are exposed; with
``config.merge="all_reduce"`` the SUM of each chunk's merge, too. The hidden states gathered
last stay for the backward, which begins with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fused_ce.head.fp16 import scale_
from megatron_fused_ce.head.tokens import Tokens
from megatron_fused_ce.logits import LogitsGrad
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import DONE, VocabParallel, Work
from megatron_fused_ce.ranks.phases import phase


class Ring:
    """``depth`` buffers ``[C, width]`` used in turn, each with room for the longest chunk.

    A buffer is allocated when it is first asked for.
    """

    def __init__(
        self, tokens: Tokens, like: Tensor, width: int, depth: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        self._tokens, self._like, self._width, self._dtype = tokens, like, width, dtype
        self._buffers: list[Tensor | None] = [None] * depth

    def slot(self, index: int, chunk: Chunk) -> Tensor:
        """Buffer number ``index``, cut to the size of ``chunk``; ``index + depth`` has the same memory."""
        at = index % len(self._buffers)
        buffer = self._buffers[at]
        if buffer is None:
            shape = self._tokens.capacity, self._width
            buffer = self._buffers[at] = self._like.new_empty(shape, dtype=self._dtype)
        num_tokens = self._tokens.num_parts * (chunk.stop - chunk.start)
        return buffer if buffer.shape[0] == num_tokens else buffer[:num_tokens]


def _own(rows: Tensor, chunk: Chunk) -> Tensor:
    """A chunk's rows of a tensor ``[n, H]`` of this rank's tokens."""
    return rows if chunk.stop - chunk.start == len(rows) else rows[chunk.start : chunk.stop]


class HiddenStates:
    """Hidden states ``[C, H]`` of the chunks, taken one after the other.

    With sequence parallelism they are gathered into a ring of ``depth`` buffers. With ``depth`` None they
    stay, all in one buffer, :attr:`all_tokens`.
    """

    def __init__(
        self,
        tokens: Tokens,
        comm: VocabParallel,
        hidden: Tensor,  # [n, H], this rank's tokens
        chunks: Sequence[Chunk],  # the chunks that are read, in this order
        depth: int | None,
        first: Tensor | None = None,  # [C, H]: hidden states of the first of them, if gathered before
    ) -> None:
        self._tokens, self._comm, self._hidden, self._chunks = tokens, comm, hidden, chunks
        self._ring = Ring(tokens, hidden, hidden.shape[1], depth or 1)
        self.all_tokens: Tensor | None = None  # [T, H], chunk after chunk
        if depth is None and chunks:
            self.all_tokens = hidden.new_empty(tokens.num_parts * tokens.num, hidden.shape[1])
        self._under_way: dict[int, tuple[Tensor, Work]] = {}
        self._started = self._taken = 0
        if first is not None:
            self._under_way[0] = first, DONE
            self._started = 1
        #: the chunk gathered last, with which a backward begins; None without sequence parallelism
        self.last: Tensor | None = None

    def start(self) -> bool:
        """Start the gather of the next chunk; return False if there is none to start.

        Its buffer may be overwritten: every kernel that reads it has been launched.

        Collectives: one all-gather with sequence parallelism, none after the last chunk.
        """
        index = self._started
        if not self._comm.sequence_parallel or index >= len(self._chunks):
            return False
        self._started += 1
        chunk = self._chunks[index]
        out = self._buffer(index, chunk)
        self._under_way[index] = out, self._comm.gather(self._hidden[chunk.start : chunk.stop], out)
        return True

    def take(self) -> Tensor:
        """Wait for the next chunk's hidden states, and return them.

        Collectives: the gather of this chunk, if it was not started before.
        """
        index, self._taken = self._taken, self._taken + 1
        if not self._comm.sequence_parallel:
            return _own(self._hidden, self._chunks[index])
        if index not in self._under_way:
            self.start()
        self.last, pending = self._under_way.pop(index)
        with phase("gather"):
            pending.wait()
        return self.last

    def scaled(self, chunk: Chunk) -> Tensor:
        """Buffer ``[C, H]`` for the scaled hidden states of ``chunk``, the last or the last but one taken.

        With sequence parallelism it is the buffer that they were gathered into.
        """
        return self._buffer(self._chunks.index(chunk) if self._comm.sequence_parallel else 0, chunk)

    def _buffer(self, index: int, chunk: Chunk) -> Tensor:
        if self.all_tokens is not None:
            return self._tokens.of_all(self.all_tokens, chunk)
        return self._ring.slot(index, chunk)


class GradHidden:
    """``grad_hidden`` ``[n, H]`` of this rank's tokens: one GEMM a chunk, summed over the ranks.

    With sequence parallelism the GEMM writes into a buffer of its own; with ``depth`` 2 there are two, and
    the reduction of one chunk runs under the GEMM of the next. Rows are scaled once, after the last
    reduction: the scales are the same on every rank, and this rank then scales its own tokens alone.
    """

    def __init__(
        self,
        tokens: Tokens,
        comm: VocabParallel,
        weight: Tensor,  # [V, H]
        inv_scale: Tensor | None,  # fp32 []: undoes a scale of all gradients
        depth: int = 1,
    ) -> None:
        self._tokens, self._comm, self._weight, self._inv_scale = tokens, comm, weight, inv_scale
        self._rows = weight.new_empty(tokens.num, weight.shape[1])
        self._unreduced = Ring(tokens, weight, weight.shape[1], depth)
        self._depth = depth
        self._under_way: deque[Work] = deque()
        self._scales: list[tuple[Chunk, Tensor, Tensor]] = []

    def add(self, chunk: Chunk, grad: LogitsGrad) -> None:
        """Compute a chunk's rows, and start their reduction.

        Collectives: those of :meth:`.VocabParallel.reduce_grad_hidden`.
        """
        own = out = _own(self._rows, chunk)
        if self._tokens.num_parts > 1:
            self._wait(but=self._depth - 1)
            out = self._unreduced.slot(chunk.index, chunk)
        with phase("grad-hidden"):
            torch.mm(grad.matrix, self._weight, out=out)
            if self._inv_scale is not None:
                scale_(out, self._inv_scale)
        self._under_way.append(self._comm.reduce_grad_hidden(out, own))
        if grad.row_scale is not None and grad.upstream is not None:
            own_part = self._tokens.own_part
            self._scales.append((chunk, own_part(grad.row_scale), own_part(grad.upstream)))

    def reduced(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Wait for all reductions; ``grad_hidden``, and what its rows must still be multiplied by: two
        factors ``[n]`` fp32, each None for 1."""
        self._wait(but=0)
        if not self._scales:
            return self._rows, None, None
        if len(self._tokens.chunks) == 1:
            return self._rows, *self._scales[0][1:]  # the launch that scales the rows takes both factors
        whole = self._rows.new_ones(self._tokens.num, dtype=torch.float32)
        for chunk, row_scale, upstream in self._scales:
            torch.mul(row_scale, upstream, out=whole[chunk.start : chunk.stop])
        return self._rows, whole, None

    def _wait(self, but: int) -> None:
        """Wait for all but the last ``but`` reductions under way."""
        if len(self._under_way) > but:
            with phase("reduce"):
                while len(self._under_way) > but:
                    self._under_way.popleft().wait()
