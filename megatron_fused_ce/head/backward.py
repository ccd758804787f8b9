"""The backward: losses' upstream gradients -> ``grad_hidden`` and ``grad_weight``. Two loops, one each for

by chunks
    ``recompute``, ``mixed``, and ``store`` where each chunk adds to ``grad_weight``. Also ``grad_in_forward``
    where its own gradients do not serve.
at once
    ``store`` with saved ``E``: ``grad_weight`` is one GEMM over all tokens, after the last chunk.

A chunk of the first loop, step by step (the second has step 5 once, at the end)::

    1. gather        X = hidden states of the chunk                      [C, H]
    2. grad_logits   G = d loss / d logits from saved logits, or from the GEMM again; with saved E
                         G = row_scale * E, and the scale waits for steps 4 and 5   [C, V]
    3. GEMM          dH = G @ weight                                     [C, H]
    4. reduction     sum of dH over the ranks; its rows are scaled once, after the last chunk
    5. GEMM          dW += G.T @ X, where X has the row scale            [V, H]
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head.buffers import ChunkGradients, HiddenStates, Workspace, delay_next_gemm
from megatron_fused_ce.head.fp16 import scale_, scale_for_fp16
from megatron_fused_ce.head.promise import Verdict
from megatron_fused_ce.head.spec import Context, NeedsGrad
from megatron_fused_ce.logits import ChunkTargets, LogitsGrad, OrderedTargets
from megatron_fused_ce.losses.form import LossForm
from megatron_fused_ce.losses.statistics import TokenTerms, Upstream
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.phases import phase

#: ``grad_hidden`` of this rank's tokens, and what autograd gets for the weight.
Gradients = tuple[Tensor | None, Tensor | None]


class SavedChunk(NamedTuple):
    """Tensors of a chunk saved for the backward."""

    labels: Tensor | None  # [C] int64; None with a row_scale
    #: [C, V]: its logits, or E; None where they are computed again, or part of :attr:`Saved.matrix`
    matrix: Tensor | None
    #: [C] fp32: see LogitsBackend.finalize. Where it is there, neither labels nor terms are needed.
    row_scale: Tensor | None
    terms: Tensor | None  # [4, C] fp32 or more rows: LossForm.saved

    def token_terms(self, form: LossForm) -> TokenTerms | None:
        return None if self.terms is None else TokenTerms.of(self.terms, form.kept)


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward, beside hidden states and weight."""

    chunks: tuple[SavedChunk, ...] = ()
    #: [C, H]: hidden states of the last chunk, where they were gathered and the backward begins with them
    last_hidden: Tensor | None = None
    #: [T, V]: E of all chunks, one after the other, where :attr:`.CallSpec.wgrad_at_once`
    matrix: Tensor | None = None
    others: OrderedTargets | None = None  # the call's, as the next
    inv_temperature: Tensor | None = None  # [parts, n] fp32


def backward(
    context: Context,
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    saved: Saved,
    upstream: Upstream,  # [parts, n] fp32
    needs_grad: NeedsGrad,
) -> Gradients:
    """The gradients, the last chunk first: its hidden states are there.

    Collectives, in order: per chunk the gather of the next chunk's hidden states that are needed (sequence
    parallelism), under its first GEMM, and the reduction of its ``grad_hidden``, under its ``grad_weight``.
    At once: per chunk that reduction and that gather in one launch, under the next chunk's ``grad_hidden``,
    and the last reduction under ``grad_weight``.
    """
    spec = context.spec
    factor = None
    if weight.dtype == torch.float16 and not spec.form.is_bounded:
        factor = torch.ones_like(upstream.loss)
        for chunk, of_chunk in zip(context.chunks, saved.chunks, strict=True):
            targets = context.targets(chunk, None, saved.others, None)
            bound = spec.logits.bound_of(of_chunk.terms, of_chunk.row_scale, targets)
            if bound is not None:
                factor[:, chunk.start : chunk.stop] = bound.view(len(factor), -1)
    upstream, inv_scale = scaled_upstream(upstream, spec.logit_scale, saved.inv_temperature, weight, factor)
    at_once = saved.matrix is not None and needs_grad.weight
    loop = _at_once if at_once else _by_chunks
    return loop(context, hidden, weight, saved, upstream, inv_scale, needs_grad)


def _by_chunks(
    context: Context,
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    saved: Saved,
    upstream: Upstream,  # [parts, n] fp32, divided by inv_scale
    inv_scale: Tensor | None,  # fp32 []
    needs_grad: NeedsGrad,
) -> Gradients:
    """:func:`backward` in which every chunk adds to ``grad_weight``."""
    spec, device = context.spec, weight.device
    chunks = context.chunks[::-1]
    accumulator = None
    if needs_grad.weight:
        accumulator = context.open_grad_weight(weight, len(chunks), inv_scale is not None)
    read = [chunk for chunk in chunks if spec.backward_reads_hidden(chunk, needs_grad)]
    hidden_states = HiddenStates(context, hidden, read, depth=2, first=saved.last_hidden)
    workspace = Workspace(context, weight)
    gradients = ChunkGradients(context, weight, inv_scale, needs_grad.hidden)
    for chunk, of_chunk in zip(chunks, reversed(saved.chunks), strict=True):
        x = hidden_states.take(chunk) if chunk in read else None  # [C, H]
        if hidden_states.start():
            delay_next_gemm(context, device)
        targets = context.targets(chunk, of_chunk.labels, saved.others, saved.inv_temperature)
        of_tokens = upstream.map(partial(context.split, chunk=chunk))
        with phase("grad-logits"):
            if spec.stores(chunk):
                grad = _from_saved(context, chunk, of_chunk, saved.matrix, targets, of_tokens, workspace)
            else:
                assert x is not None
                terms = of_chunk.token_terms(spec.form)
                assert terms is not None
                logits, out = workspace.logits(chunk), workspace.grad_logits(chunk)
                grad = spec.logits.grad_recomputed(x, weight, targets, terms, of_tokens, logits, out)
        gradients.add(chunk, grad, x, hidden_states, accumulator)
    rows = gradients.hidden()
    if accumulator is None:
        return rows, None
    with phase("grad-weight"):
        return rows, accumulator.close(inv_scale)


def _at_once(
    context: Context,
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    saved: Saved,
    upstream: Upstream,  # [parts, n] fp32, divided by inv_scale
    inv_scale: Tensor | None,  # fp32 []
    needs_grad: NeedsGrad,
) -> Gradients:
    """:func:`backward` of ``store`` with ``E`` of all chunks in one matrix, and one GEMM for ``grad_weight``.

    Its second reduction buffer lets a chunk's reduction run under the next chunk's ``grad_hidden``.
    """
    spec = context.spec
    chunks = context.chunks[::-1]
    every_e = saved.matrix
    assert every_e is not None
    accumulator = context.open_grad_weight(weight, 1, inv_scale is not None)
    hidden_states = HiddenStates(context, hidden, chunks, depth=None, first=saved.last_hidden)
    gradients = ChunkGradients(context, weight, inv_scale, needs_grad.hidden, depth=2)
    for chunk, of_chunk in zip(chunks, reversed(saved.chunks), strict=True):
        targets = context.targets(chunk, of_chunk.labels, None, saved.inv_temperature)
        of_tokens = upstream.map(partial(context.split, chunk=chunk))
        with phase("grad-logits"):
            grad = _from_saved(context, chunk, of_chunk, every_e, targets, of_tokens, None)
        with spec.comm.coalesced(weight.device):
            gradients.start_hidden(chunk, grad)
            hidden_states.start()
        gradients.put_row_scales(chunk, grad)
        x = hidden_states.take(chunk)
        assert grad.row_scale is not None
        with phase("grad-weight"):
            spec.logits.scale_rows(x, grad.row_scale, hidden_states.buffer(chunk), grad.upstream)
    if hidden_states.all_tokens is not None:
        with phase("grad-weight"):
            accumulator.add(every_e, hidden_states.all_tokens)
    rows = gradients.hidden()
    with phase("grad-weight"):
        return rows, accumulator.close(inv_scale)


def _from_saved(
    context: Context,
    chunk: Chunk,
    saved: SavedChunk,
    every_e: Tensor | None,  # [T, V]: Saved.matrix
    targets: ChunkTargets,
    upstream: Upstream,  # [C] fp32
    workspace: Workspace | None,  # not read for E of all rows
) -> LogitsGrad:
    """Gradients of the chunk's logits from its saved logits or ``E``."""
    logits = context.spec.logits
    matrix = saved.matrix if every_e is None else context.chunk_of_all(every_e, chunk)
    assert matrix is not None
    out = None
    if not logits.saves_e:
        assert workspace is not None
        out = workspace.grad_logits(chunk)
    terms = saved.token_terms(targets.form)
    return logits.grad_from_saved(matrix, saved.row_scale, targets, terms, upstream, out)


class PrecomputedGrads(NamedTuple):
    """Gradients made in the forward, for an upstream gradient equal to the token weights; used up by one
    backward."""

    token_weights: Tensor  # [parts, n] fp32
    grad_weight: Tensor | None  # [V, H] fp32
    grad_hidden: Tensor | None  # [n, H], reduced
    row_scale: Tensor | None  # [n] fp32: of the rows of grad_hidden; None for 1


def scale_precomputed(
    context: Context,
    weight: Tensor,
    made: PrecomputedGrads,
    scale: Tensor,  # fp32 []: of promise.fit_scalar
    verdict: Verdict,
    needs_grad: NeedsGrad,
) -> Gradients | None:
    """The gradients that ``grad_in_forward`` made in the forward, ``scale`` times; None where the promise was
    not kept. Nothing has been added anywhere then, and ``made`` is spoilt.

    The host reads the verdict behind the launches, so that the device has work while it wakes up.

    Collectives: none.
    """
    grad_hidden = made.grad_hidden if needs_grad.hidden else None
    if grad_hidden is not None:
        with phase("grad-hidden"):
            if made.row_scale is not None:
                context.spec.logits.scale_rows(grad_hidden, made.row_scale, grad_hidden, scale)
            else:
                scale_(grad_hidden, scale)
    if made.grad_weight is None or not needs_grad.weight:
        return (grad_hidden, None) if verdict.kept else None
    with phase("grad-weight"):
        accumulator = context.open_grad_weight(weight, 1, False)
        if not accumulator.add_total(made.grad_weight, scale, verdict):
            return None
        return grad_hidden, accumulator.close(None)


def scaled_upstream(
    upstream: Upstream,
    logit_scale: float,
    inv_temperature: Tensor | None,
    weight: Tensor,
    factor: Tensor | float | None = None,  # [] or [parts, n] fp32: gradients may be so many times larger
) -> tuple[Upstream, Tensor | None]:
    """``upstream * logit_scale / temperature``, for fp16 times a power of two whose inverse comes second."""
    if logit_scale != 1.0:
        upstream = upstream.scaled(logit_scale)
    if inv_temperature is not None:
        upstream = upstream.scaled(inv_temperature)
    if weight.dtype != torch.float16:
        return upstream, None
    scale, inv_scale = scale_for_fp16(upstream.sizes, weight, factor)
    return upstream.scaled(scale), inv_scale
