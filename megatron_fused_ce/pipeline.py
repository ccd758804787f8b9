"""Overlap of a chunk's collectives with the GEMMs of its neighbours, and the buffers it needs.

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
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce import logits_backend
from megatron_fused_ce.call import CallSpec
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.grad_weight import GradWeight, HeldGradWeight, OpenGradWeight
from megatron_fused_ce.logits_backend import LogitsGrad, first_rows
from megatron_fused_ce.phases import phase
from megatron_fused_ce.scaling import scale_
from megatron_fused_ce.vocab_parallel import DONE, Work


class Context(NamedTuple):
    """One call: its spec, and its own chunks."""

    spec: CallSpec
    #: the spec's, or fewer where masked tokens are skipped
    chunks: tuple[Chunk, ...]
    open_grad_weight: OpenGradWeight

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's entries ``[..., C]`` of a tensor ``[..., parts, n]``, rank after rank, contiguous."""
        if len(self.chunks) > 1:
            per_token = per_token[..., chunk.start : chunk.stop]
        # Of one token a rank, flatten gives a strided view.
        return per_token.flatten(-2).contiguous()

    def rows(self, of_rank: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's rows of this rank's ``[n, ...]``."""
        return of_rank if len(self.chunks) == 1 else of_rank[chunk.start : chunk.stop]

    def chunk_of_all(self, of_all: Tensor, chunk: Chunk) -> Tensor:
        """Rows ``[C, ...]`` of one chunk in a tensor ``[T, ...]`` ordered chunk after chunk."""
        if len(self.chunks) == 1:
            return of_all
        parts = self.spec.comm.num_parts
        return of_all[parts * chunk.start : parts * chunk.stop]

    def own_part(self, per_token: Tensor) -> Tensor:
        """This rank's entries ``[n]`` of a chunk's ``[C]``."""
        comm = self.spec.comm
        if comm.num_parts == 1:
            return per_token
        return per_token.view(comm.num_parts, -1)[comm.part]


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
            num_tokens = context.spec.comm.num_parts * context.chunks[-1].stop
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
        comm = self._context.spec.comm
        out = first_rows(self._slot(index, chunk), comm.num_parts * chunk.num_tokens)
        part = self._hidden[chunk.start : chunk.stop]
        self._under_way[index] = out, comm.gather(part, out)
        return True

    def take(self, chunk: Chunk) -> Tensor:
        """The next chunk's hidden states, after waiting for them. Collectives: its gather, where it was not
        started before."""
        self._position += 1
        if not self._gathers:
            self._taken = self._context.rows(self._hidden, chunk)
            return self._taken
        if self._position not in self._under_way:
            self.start()
        self._taken, pending = self._under_way.pop(self._position)
        with phase("gather"):
            pending.wait()
        return self._taken

    def buffer(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` to write the scaled hidden states of ``chunk`` into, the last or the last but one taken.

        With sequence parallelism their own slot of the ring.
        """
        index = self._chunks.index(chunk) if self._gathers else 0
        return self._slot(index, chunk)

    def last(self) -> Tensor | None:
        """The chunk gathered last, with which a backward begins; None without sequence parallelism."""
        return self._taken if self._gathers else None

    def _slot(self, index: int, chunk: Chunk) -> Tensor:
        if self.all_tokens is not None:
            return self._context.chunk_of_all(self.all_tokens, chunk)
        slot = index % len(self._ring)
        buffer = self._ring[slot]
        if buffer is None:
            buffer = _chunk_buffer(self._context.spec, self._hidden, self._hidden.shape[1])
            self._ring[slot] = buffer
        return first_rows(buffer, self._context.spec.comm.num_parts * chunk.num_tokens)


class Workspace:
    """Buffers that the chunks of a pass share, allocated when first asked for."""

    def __init__(self, spec: CallSpec, hidden: Tensor, num_rows: int, depth: int = 1) -> None:
        self._spec = spec
        self._hidden = hidden
        self._num_rows = num_rows
        self._logits: list[Tensor | None] = [None] * depth
        self._grad_logits: Tensor | None = None
        self._grad_hidden: list[Tensor | None] = [None] * 2

    def logits(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` in the dtype of the logits; of ``depth`` chunks at a time."""
        slot = chunk.index % len(self._logits)
        buffer = self._logits[slot]
        if buffer is None:
            dtype = self._spec.logits.logits_dtype
            buffer = _chunk_buffer(self._spec, self._hidden, self._num_rows, dtype)
            self._logits[slot] = buffer
        return first_rows(buffer, self._spec.comm.num_parts * chunk.num_tokens)

    def grad_logits(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` in the hidden states' dtype: :meth:`logits`, where these have it."""
        if self._spec.logits.logits_dtype is None:
            return self.logits(chunk)
        if self._grad_logits is None:
            self._grad_logits = _chunk_buffer(self._spec, self._hidden, self._num_rows)
        return first_rows(self._grad_logits, self._spec.comm.num_parts * chunk.num_tokens)

    def grad_hidden(self, chunk: Chunk, slot: int) -> Tensor:
        """``[C, H]`` in the hidden states' dtype; ``slot`` is 0 or 1."""
        buffer = self._grad_hidden[slot]
        if buffer is None:
            buffer = _chunk_buffer(self._spec, self._hidden, self._hidden.shape[1])
            self._grad_hidden[slot] = buffer
        return first_rows(buffer, self._spec.comm.num_parts * chunk.num_tokens)


def _chunk_buffer(spec: CallSpec, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(spec.plan.capacity, width, dtype=dtype)


class UnscaledGradHidden(NamedTuple):
    """``grad_hidden`` ``[n, H]``, reduced, whose rows may still have to be scaled.

    It is then ``row_scale[:, None] * grad_hidden``.
    """

    grad_hidden: Tensor | None
    row_scale: Tensor | None  # [n] fp32, None for 1

    def scale(self, scale: Tensor | None = None) -> None:
        """Scale them in place, ``scale`` (fp32 ``[]``) times as far."""
        assert self.grad_hidden is not None and self.row_scale is not None
        logits_backend.scale_rows(self.grad_hidden, self.row_scale, self.grad_hidden, scale)


class GradientGemms:
    """The two GEMMs that follow a chunk's gradients of logits.

    Over one rank the rows of ``grad_hidden`` are scaled in the launch that scales the hidden states, unless
    ``scales_later``. Over several it is summed first, since all ranks share the scale: that pass then runs
    over this rank's tokens only, and at the end.

    ``all_e`` ``[T, V]`` holds the gradients of all chunks, but for the scale of their rows: then one GEMM
    after the last chunk makes ``grad_weight``.
    """

    def __init__(
        self,
        context: Context,
        hidden: Tensor,
        weight: Tensor,
        wants_grad_hidden: bool,
        grad_weight: GradWeight | HeldGradWeight | None,
        inv_scale: Tensor | None,
        workspace: Workspace,
        hidden_states: HiddenStates,
        scales_later: bool = False,
        all_e: Tensor | None = None,
    ) -> None:
        self._context = context
        self._weight = weight
        self._grad_hidden = hidden.new_empty(hidden.shape) if wants_grad_hidden else None
        self._grad_weight = grad_weight
        self._inv_scale = inv_scale
        self._workspace = workspace
        self._hidden_states = hidden_states
        spec = context.spec
        self._scales_later = scales_later or spec.comm.size > 1
        self._all_e = all_e
        self._pending: deque[Work] = deque()
        self._row_scale: Tensor | None = None  # [n] fp32

    def add(self, chunk: Chunk, grad: LogitsGrad, hidden: Tensor | None) -> None:
        """Gradients of the chunk with ``hidden`` ``[C, H]``, None where they are not read, or with ``all_e``.

        Collectives: starts the reduction of its ``grad_hidden``; with ``all_e`` in one launch with the gather
        of the next chunk's hidden states.
        """
        grad_hidden = None  # whose rows are to be scaled
        with self._coalesced(grad.matrix.device):
            if self._grad_hidden is not None:
                grad_hidden = self._multiply_weight(chunk, grad.matrix)
            if self._all_e is not None:
                self._hidden_states.start()
        if self._all_e is not None:
            hidden = self._hidden_states.take(chunk)
        if grad.row_scale is None:
            delay_next_gemm(self._context, grad.matrix.device)
        elif self._scales_later and grad_hidden is not None:
            self._remember_scale(chunk, grad)
            grad_hidden = None
        if self._grad_weight is None:
            if grad.row_scale is not None and grad_hidden is not None:
                logits_backend.scale_rows(grad_hidden, grad.row_scale, grad_hidden, grad.upstream)
            return
        assert hidden is not None
        with phase("grad-weight"):
            if grad.row_scale is not None:
                scaled = self._hidden_states.buffer(chunk)
                logits_backend.scale_rows(hidden, grad.row_scale, scaled, grad.upstream, also=grad_hidden)
                hidden = scaled
            if self._all_e is None:
                self._grad_weight.add(grad.matrix, hidden)

    def _coalesced(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext() if self._all_e is None else self._context.spec.comm.coalesced(device)

    def _multiply_weight(self, chunk: Chunk, matrix: Tensor) -> Tensor:
        """The chunk's rows of ``grad_hidden``. Collectives: starts their reduction."""
        assert self._grad_hidden is not None
        comm = self._context.spec.comm
        out = self._context.rows(self._grad_hidden, chunk)
        partial = out
        if comm.num_parts > 1:
            # With `all_e` the reduction of the chunk before runs under this GEMM and reads the other buffer.
            # Else it has long ended, under the GEMM of grad_weight.
            in_use = 0 if self._all_e is None else 1
            self._wait(in_use)
            partial = self._workspace.grad_hidden(chunk, in_use and chunk.index % 2)
        with phase("grad-hidden"):
            torch.mm(matrix, self._weight, out=partial)
            if self._inv_scale is not None:
                scale_(partial, self._inv_scale)
        self._pending.append(comm.reduce_grad_hidden(partial, out))
        return out

    def _remember_scale(self, chunk: Chunk, grad: LogitsGrad) -> None:
        assert grad.row_scale is not None
        row_scale = self._context.own_part(grad.row_scale)
        if grad.upstream is not None:
            row_scale = row_scale * self._context.own_part(grad.upstream)
        if len(self._context.chunks) == 1:
            self._row_scale = row_scale
            return
        if self._row_scale is None:
            assert self._grad_hidden is not None
            self._row_scale = row_scale.new_ones(self._grad_hidden.shape[0])
        self._row_scale[chunk.start : chunk.stop] = row_scale

    def finish(self) -> UnscaledGradHidden:
        if self._all_e is not None and self._grad_weight is not None and self._context.chunks:
            hidden = self._hidden_states.all_tokens
            assert hidden is not None
            with phase("grad-weight"):
                self._grad_weight.add(self._all_e, hidden)
        self._wait()
        return UnscaledGradHidden(self._grad_hidden, self._row_scale)

    def _wait(self, but: int = 0) -> None:
        """Wait for all running reductions, or all but the last."""
        if len(self._pending) > but:
            with phase("reduce"):
                while len(self._pending) > but:
                    self._pending.popleft().wait()
