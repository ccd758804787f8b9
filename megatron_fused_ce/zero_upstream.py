"""Leaves tokens whose upstream gradients are all 0 out of the backward's GEMMs.

Their rows of the logits' gradient are 0, so that nothing changes but the number of rows. -0.0 is 0, inf and
NaN are not. (A token whose own logits are inf or NaN gives NaN with an upstream gradient of 0, and nothing
where it is left out.)

Each chunk is cut to the tokens that count; chunks that become short are joined, up to the length of the
longest. Over several parts (sequence parallelism) each part of a chunk is cut to as many tokens as the part
that has the most, before anything is gathered: gathers and reductions shrink alike. Cut out beforehand are
``[n, H]``-sized rows; saved logits or ``E`` are copied chunk by chunk, into one buffer ``[C, V]``. What the
forward saved stays as it is, for another backward.

Exact where the backward reads saved logits or ``E``, or makes them by the scaled-exp GEMM. With ``recompute``
and the row kernels a GEMM of fewer rows may round otherwise than the forward's, whose statistics it is
combined with: fp32 gradients of logits of 70 were off by 1.9e-4 instead of 2.8e-5 on a CPU.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from megatron_fused_ce.backward import Gradients, Saved, SavedChunk, backward
from megatron_fused_ce.call import Context, NeedsGrad
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.host_copy import HostCopy
from megatron_fused_ce.loss import Upstream
from megatron_fused_ce.masked_tokens import Kept, num_kept
from megatron_fused_ce.parallel import largest_over_ranks


def backward_of_nonzero(
    context: Context,
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    saved: Saved,
    upstream: Upstream,  # [parts, n] fp32
    needs_grad: NeedsGrad,
) -> Gradients:
    """:func:`.backward.backward` of the tokens with an upstream gradient. The host waits for their number.

    Of all tokens while a CUDA graph is captured.

    Collectives, in order: a MAX all-reduce of a byte a token (R > 1), so that a token counts on all ranks if
    it does on one; those of :func:`.backward.backward`, with the hidden states of the last chunk gathered
    again (sequence parallelism).
    """
    chunks, comm = context.chunks, context.spec.comm
    of_all = context, hidden, weight, saved, upstream, needs_grad
    if not chunks or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return backward(*of_all)
    found = reduce(torch.logical_or, [size != 0 for size in upstream.sizes])
    nonzero = largest_over_ranks(found.to(torch.uint8), comm.group)
    of_parts = [nonzero[:, chunk.start : chunk.stop].sum(1).amax() for chunk in chunks]
    counts = HostCopy(torch.stack(of_parts)).read()
    sizes = [num_kept(count, chunk.num_tokens) for count, chunk in zip(counts, chunks, strict=True)]
    if sizes == [chunk.num_tokens for chunk in chunks]:
        return backward(*of_all)
    of_chunks = [
        Kept.of(nonzero[:, chunk.start : chunk.stop], size) for chunk, size in zip(chunks, sizes, strict=True)
    ]
    kept = Kept(
        torch.cat([of.tokens + chunk.start for of, chunk in zip(of_chunks, chunks, strict=True)], 1),
        torch.cat([of.active for of in of_chunks], 1),
        nonzero == 0,
    )
    joined, of_nonzero = _cut(context, saved, of_chunks)
    per_token = saved.inv_temperature
    saved = of_nonzero._replace(
        others=None if saved.others is None else saved.others.kept(kept, comm.part),
        inv_temperature=None if per_token is None else kept.of_tokens(per_token),
    )
    grad_hidden, grad_weight = backward(
        context._replace(chunks=joined),
        kept.take(hidden, comm.part),
        weight,
        saved,
        upstream.map(kept.of_tokens),
        needs_grad,
    )
    if grad_hidden is not None:
        grad_hidden = kept.put_back_rows(grad_hidden, comm.part)
    return grad_hidden, grad_weight


def _cut(context: Context, saved: Saved, of_chunks: list[Kept]) -> tuple[tuple[Chunk, ...], Saved]:
    """Cut chunks and what was saved for them to the kept tokens; matrices stay whole, rows are indexed."""
    longest = context.spec.plan.cut.longest
    joined: list[Chunk] = []
    groups: list[list[SavedChunk]] = []
    stop = 0
    for chunk, of_chunk, kept in zip(context.chunks, saved.chunks, of_chunks, strict=True):
        size = kept.tokens.shape[1]
        if not size:
            continue
        piece = _pick(context, chunk, of_chunk, saved.matrix, kept.tokens)
        start, stop = stop, stop + size
        same_matrix = bool(groups) and groups[-1][0].matrix is piece.matrix
        if same_matrix and stop - joined[-1].start <= longest:
            joined[-1] = Chunk(joined[-1].index, joined[-1].start, stop)
            groups[-1].append(piece)
        else:
            # The index tells whether the chunk was stored.
            joined.append(Chunk(chunk.index, start, stop))
            groups.append([piece])
    return tuple(joined), Saved(tuple(map(_join, groups)))


def _pick(
    context: Context,
    chunk: Chunk,
    saved: SavedChunk,
    every_e: Tensor | None,  # [T, V]: Saved.matrix
    tokens: Tensor,  # int64 [parts, m]: indices within the chunk
) -> SavedChunk:
    """The kept tokens' part of a saved chunk, ``[..., parts, m]`` in the place of ``[..., C]``."""
    parts = tokens.shape[0]
    index = tokens + chunk.num_tokens * torch.arange(parts, device=tokens.device).unsqueeze(1)
    per_token = saved._replace(matrix=None)
    picked = SavedChunk(*(None if of is None else of[..., index] for of in per_token))  # type: ignore[arg-type]
    if every_e is not None:
        return picked._replace(matrix=every_e, rows=index + parts * chunk.start)
    return picked._replace(matrix=saved.matrix, rows=None if saved.matrix is None else index)


def _join(pieces: list[SavedChunk]) -> SavedChunk:
    """Pieces ``[..., parts, m]`` of one matrix as a chunk, rank after rank."""
    fields = zip(*(piece._replace(matrix=None) for piece in pieces), strict=True)
    joined = [None if of[0] is None else torch.cat(of, -1).flatten(-2) for of in fields]
    return SavedChunk(*joined)._replace(matrix=pieces[0].matrix)  # type: ignore[arg-type]
