"""The loops over chunks, forward and backward: hidden -> loss -> gradients.

The forward is one loop for all strategies, each exact for any upstream gradient. They differ in what follows
a chunk's merge:

===================  =======================================================  =====
strategy             kept between forward and backward, beside hidden states  GEMMs
===================  =======================================================  =====
``store``            every chunk's logits                                     3
``recompute``        four floats a token                                      4
``mixed``            the logits of the first chunks                           3 to 4
``grad_in_forward``  ``grad_hidden``, fp32 ``grad_weight``, the four floats   3 (6)
===================  =======================================================  =====

``grad_in_forward`` takes six where the upstream gradient is no scalar times the token weights: its backward
is then that of ``recompute``.

:mod:`.logits_backend` turns logits into statistics and gradients, :mod:`.pipeline` decides what overlaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce.call import CallSpec
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.grad_weight import HeldGradWeight, accumulate_
from megatron_fused_ce.kernels.records import Merged, SoftTargets
from megatron_fused_ce.logits_backend import ChunkInputs, LogitsGrad, Scores
from megatron_fused_ce.masked_tokens import Kept
from megatron_fused_ce.phases import phase
from megatron_fused_ce.pipeline import (
    Context,
    GradientGemms,
    HiddenStates,
    UnscaledGradHidden,
    Workspace,
    delay_next_gemm,
)
from megatron_fused_ce.promise import Verdict
from megatron_fused_ce.row_ops import TokenTerms
from megatron_fused_ce.scaling import scale_, scale_for_fp16, scale_token_weights
from megatron_fused_ce.token_outputs import TokenOutputs, Upstream
from megatron_fused_ce.vocab_parallel import DONE, Merge


class Targets(NamedTuple):
    """Labels or soft targets of the tokens, their weights and temperatures."""

    labels: Tensor  # [parts, n] int64, columns of this shard
    soft: SoftTargets | None = None  # [k, parts, n] each; in the labels' place
    ignored: Tensor | None = None  # [parts, n] bool, of all tokens
    token_weights: Tensor | None = None  # [parts, n] fp32, for grad_in_forward
    inv_temperature: Tensor | None = None  # [parts, n] fp32

    def of(self, kept: Kept) -> Targets:
        """Those of the tokens to work on, ``[parts, m]``; ``ignored`` stays as it is."""
        labels, soft, ignored, *others = self
        weights, inv_temperature = (None if one is None else kept.of_tokens(one) for one in others)
        if soft is not None:
            soft = SoftTargets(*map(kept.of_tokens, soft))
        return Targets(kept.of_tokens(labels), soft, ignored, weights, inv_temperature)


class SavedChunk(NamedTuple):
    """Tensors of a chunk saved for the backward."""

    labels: Tensor  # [C] int64
    #: [C, V]: its logits, or E; None where they are computed again, or part of :attr:`Saved.matrix`
    matrix: Tensor | None
    #: [C] fp32: see LogitsBackend.finalize. Where it is there, the terms are not needed.
    row_scale: Tensor | None
    terms: Tensor | None  # [4, C] fp32: Merged.terms
    target_mass: Tensor | None  # [C] fp32, of soft targets

    @staticmethod
    def of(tensors: Sequence[Any]) -> list[SavedChunk]:
        """From :meth:`Saved.tensors`."""
        size = len(SavedChunk._fields)
        return [SavedChunk(*tensors[at : at + size]) for at in range(0, len(tensors), size)]


class PrecomputedGrads(NamedTuple):
    """Gradients made in the forward, for an upstream gradient equal to the token weights; used up by one
    backward."""

    token_weights: Tensor  # [parts, n] fp32
    grad_weight: Tensor | None  # [V, H] fp32
    grad_hidden: UnscaledGradHidden


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward."""

    chunks: Sequence[SavedChunk] = ()
    #: [C, H]: hidden states of the last chunk, where they were gathered and the backward begins with them
    last_hidden: Tensor | None = None
    #: [T, V]: E of all chunks, one after the other, where :attr:`.CallSpec.wgrad_at_once`
    matrix: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Of all chunks, one after the other."""
        return [tensor for chunk in self.chunks for tensor in chunk]


class Forward(NamedTuple):
    """Results of a forward, of all tokens: ``[parts, n]``, or ``[C]`` of a single chunk.

    ``parts`` is ``R`` with sequence parallelism, else 1.
    """

    outputs: TokenOutputs
    row_max: Tensor | None  # fp32, this shard's largest logit, with argmax only
    argmax: Tensor | None  # int64, its column in this shard
    saved: Saved
    gradients: PrecomputedGrads | None = None  # of grad_in_forward


class _Scored(NamedTuple):
    """A chunk between its GEMM and the end of its merge."""

    chunk: Chunk
    inputs: ChunkInputs
    scores: Scores
    matrix: Tensor | None  # [C, V]: its logits, or E, where they outlive the GEMM
    merge: Merge


def _start_merge(
    context: Context, chunk: Chunk, inputs: ChunkInputs, scores: Scores, matrix: Tensor | None
) -> _Scored:
    """Starts merging the chunk's statistics. Collectives: :meth:`.VocabParallel.start_merge`'s."""
    spec, stats = context.spec, scores.stats
    if "predicted" in spec.form.outputs:
        assert stats.argmax is not None
        best = (stats.argmax + spec.vocab_start).float()
        stats = stats._replace(extra=stats.extra._replace(best=best))
    merge = spec.comm.start_merge(stats, spec.logits.token_ops)
    if matrix is None:
        # Tile statistics that `finalize` will not read must not live through the next chunk's GEMM.
        scores = scores._replace(tiles=None)
    return _Scored(chunk, inputs, scores, matrix, merge)


class _AfterMerge(Protocol):
    """A strategy's work on a chunk after its merge."""

    #: whether the next gather starts before a chunk's GEMM, since a later gap is another collective's
    gathers_early: bool

    def matrix(self, chunk: Chunk) -> Tensor | None:
        """``[C, V]`` for its logits; None where the GEMM leaves statistics alone."""

    def after_merge(self, scored: _Scored, merged: Merged) -> None: ...

    def finish(self) -> tuple[Saved, PrecomputedGrads | None]: ...


def forward(
    context: Context,
    hidden: Tensor,  # [n, H], this rank's tokens
    weight: Tensor,  # [V, H]
    targets: Targets,
) -> Forward:
    """Loss of every token, chunk by chunk. Over several ranks a merge ends after the next chunk's GEMM.

    Collectives, in order (see :class:`.VocabParallel` for each): the sampled rows of the weight where the
    logits backend wants them, in one launch with the gather of the first chunk's hidden states (sequence
    parallelism); the gather of the second's. Then for each chunk ``c``, counted from 0:

    - ``store``, ``recompute``, ``mixed``: its merge and the gather of ``c + 2``, in one launch;
    - ``grad_in_forward``: the gather of ``c + 1``, before the GEMM, from ``c = 2`` on (that of 2 leaves with
      the merge of 0); the first step of its merge; what is left of the merge of ``c - 1``; the reduction of
      the ``grad_hidden`` of ``c - 1``.
    """
    spec = context.spec
    lag = 1 if spec.comm.size > 1 else 0
    makes_gradients = spec.plan.strategy == "grad_in_forward" and any(spec.needs_grad)
    hidden_states = HiddenStates(context, hidden, context.chunks, depth=lag + 2 if makes_gradients else 2)
    strategy_class = _GradInForward if makes_gradients else _Save
    strategy: _AfterMerge = strategy_class(context, hidden, weight, targets, hidden_states)
    sample = _begin(context, weight, hidden_states)
    results = _Results(context)
    waiting: deque[_Scored] = deque()

    def finish_oldest() -> None:
        scored = waiting.popleft()
        with phase("merge"):
            merged = scored.merge.finish()
            results.put(scored, merged)
        strategy.after_merge(scored, merged)

    for chunk in context.chunks:
        labels = context.split(targets.labels, chunk)
        taken = hidden_states.take(chunk)
        inputs = _inputs(context, chunk, taken, weight, labels, targets.soft, targets.inv_temperature)
        inputs = inputs._replace(sample=sample)
        if strategy.gathers_early and chunk.index > 1:
            hidden_states.start()
        matrix = strategy.matrix(chunk)
        with phase("logits"):
            statistics = spec.logits.logits_gemm(inputs, matrix, spec.needs_argmax)
        with phase("statistics"):
            scores = statistics()
        with spec.comm.coalesced(hidden.device):
            waiting.append(_start_merge(context, chunk, inputs, scores, matrix))
            if not strategy.gathers_early or chunk.index == 0:
                hidden_states.start()
        del statistics, scores  # tile statistics must not outlive their chunk
        if len(waiting) > lag:
            finish_oldest()
    while waiting:
        finish_oldest()
    return results.whole(*strategy.finish(), targets.labels)


def _begin(context: Context, weight: Tensor, hidden_states: HiddenStates) -> Tensor | None:
    """Start the first two gathers of hidden states; some rows ``[S, H]`` of the whole weight, the same on
    every rank, where the logits backend wants them.
    """
    spec = context.spec
    size = spec.comm.size
    sample, pending = None, DONE
    with spec.comm.coalesced(weight.device):
        if context.chunks:
            sample = rows = spec.logits.sample_rows(weight, size, spec.form)
            if rows is not None and size > 1:
                sample = rows.new_empty(size * rows.shape[0], rows.shape[1])
                pending = spec.comm.gather(rows, sample)
        hidden_states.start()
    hidden_states.start()
    pending.wait()
    return sample


def _inputs(
    context: Context,
    chunk: Chunk,
    hidden: Tensor | None,  # [C, H]
    weight: Tensor,
    labels: Tensor,  # [C]
    soft: SoftTargets | None,  # [k, parts, n] each
    inv_temperature: Tensor | None,  # [parts, n] fp32
) -> ChunkInputs:
    if soft is not None:
        soft = SoftTargets(*(context.split(part, chunk) for part in soft))
    spec = context.spec
    alone = spec.comm.size == 1
    if inv_temperature is not None:
        inv_temperature = context.split(inv_temperature, chunk)
    return ChunkInputs(
        hidden, weight, labels, spec.logit_scale, None, spec.form, soft, alone, inv_temperature
    )


class _Results:
    """Results of all tokens, put together from those of the chunks: :class:`Forward`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._whole: list[Tensor | None] = [None] * (len(TokenOutputs._fields) + 2)

    def put(self, scored: _Scored, merged: Merged) -> None:
        """A chunk's."""
        context, chunk, stats = self._context, scored.chunk, scored.scores.stats
        row_max = argmax = None
        if context.spec.with_argmax:
            row_max, argmax = stats.row_max, stats.argmax
        parts = context.spec.comm.num_parts
        for at, made in enumerate((*context.spec.form.finish(merged), row_max, argmax)):
            if made is None:
                continue
            if len(context.chunks) == 1:
                self._whole[at] = made
                continue
            whole = self._whole[at]
            if whole is None:
                whole = self._whole[at] = made.new_empty(parts, context.chunks[-1].stop)
            whole[:, chunk.start : chunk.stop] = made.view(parts, -1)

    def whole(self, saved: Saved, gradients: PrecomputedGrads | None, labels: Tensor) -> Forward:
        if not self._context.chunks:
            self._put_nothing(labels)
        *outputs, row_max, argmax = self._whole
        return Forward(TokenOutputs(*outputs), row_max, argmax, saved, gradients)  # type: ignore[arg-type]

    def _put_nothing(self, labels: Tensor) -> None:
        """Results for an empty batch."""
        spec = self._context.spec
        empty = labels.new_empty(spec.comm.num_parts, 0, dtype=torch.float32)
        dtypes = {"predicted": torch.int64, "correct": torch.bool}
        for at, name in enumerate(TokenOutputs._fields):
            if name == "loss" or name in spec.form.outputs:
                self._whole[at] = empty.to(dtypes.get(name))
        if spec.with_argmax:
            self._whole[-2:] = empty, empty.to(torch.int64)


class _Save:
    """``store``, ``recompute`` and ``mixed``: saves the logits of the first chunks, maybe of none or all."""

    gathers_early = False

    def __init__(
        self,
        context: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        hidden_states: HiddenStates,
    ) -> None:
        self._context, self._hidden_states = context, hidden_states
        self._hidden, self._num_rows = hidden, weight.shape[0]
        self._workspace = Workspace(context.spec, hidden, self._num_rows)
        self._saved: list[SavedChunk] = []
        self._matrix: Tensor | None = None  # [T, V]: all chunks', where grad_weight is made at once

    def matrix(self, chunk: Chunk) -> Tensor | None:
        context, spec = self._context, self._context.spec
        if _stored(spec, chunk):
            parts = spec.comm.num_parts
            if not spec.wgrad_at_once:
                num_tokens = parts * chunk.num_tokens
                return self._hidden.new_empty(num_tokens, self._num_rows, dtype=spec.logits.logits_dtype)
            if self._matrix is None:
                num_tokens = parts * context.chunks[-1].stop
                self._matrix = self._hidden.new_empty(num_tokens, self._num_rows)
            return context.chunk_of_all(self._matrix, chunk)
        return self._workspace.logits(chunk) if spec.logits.needs_logits_buffer else None

    def after_merge(self, scored: _Scored, merged: Merged) -> None:
        spec = self._context.spec
        if not any(spec.needs_grad):
            return
        row_scale = matrix = None
        if _stored(spec, scored.chunk):
            matrix = scored.matrix
            assert matrix is not None
            with phase("statistics"):
                row_scale = spec.logits.finalize(matrix, scored.inputs, scored.scores, merged)
        if self._matrix is not None:
            matrix = None  # saved with all others
        terms = None if row_scale is not None else merged.terms
        mass = merged.extra.target_mass
        self._saved.append(SavedChunk(scored.inputs.labels, matrix, row_scale, terms, mass))

    def finish(self) -> tuple[Saved, None]:
        chunks, last = self._context.chunks, None
        spec = self._context.spec
        if spec.plan.saves_last_hidden and chunks and _reads_hidden(spec, chunks[-1], spec.needs_grad):
            last = self._hidden_states.last()
        return Saved(self._saved, last, matrix=self._matrix), None


def _stored(spec: CallSpec, chunk: Chunk) -> bool:
    """Whether the chunk's logits are saved."""
    return chunk.index < spec.plan.stored_chunks and any(spec.needs_grad)


def _reads_hidden(spec: CallSpec, chunk: Chunk, needs_grad: tuple[bool, bool]) -> bool:
    """Whether the backward needs the chunk's hidden states."""
    grad_hidden, grad_weight = needs_grad
    return grad_weight or (grad_hidden and not _stored(spec, chunk))


class _GradInForward:
    """Makes the gradients in the forward, for the token weights that are known there.

    The backward multiplies them by the one scalar that the upstream gradient then is
    (:func:`scale_precomputed`). What ``recompute`` saves is saved beside them, for an upstream that is not.
    """

    gathers_early = True

    def __init__(
        self,
        context: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        hidden_states: HiddenStates,
    ) -> None:
        assert targets.token_weights is not None
        spec = context.spec
        weights = scale_token_weights(targets.token_weights, spec.logit_scale, hidden.dtype)
        self._token_weights = weights
        upstream, inv_temperature = Upstream(weights), targets.inv_temperature
        self._upstream, self._inv_scale = scaled_upstream(upstream, spec.logit_scale, inv_temperature, weight)
        wants_grad_hidden, wants_grad_weight = spec.needs_grad
        self._held = HeldGradWeight(weight) if wants_grad_weight else None
        depth = 2 if spec.comm.size > 1 else 1
        self._workspace = Workspace(spec, hidden, weight.shape[0], depth)
        self._gemms = GradientGemms(
            context,
            hidden,
            weight,
            wants_grad_hidden,
            self._held,
            self._inv_scale,
            self._workspace,
            hidden_states,
            scales_later=True,
        )
        self._context = context
        self._saved: list[SavedChunk] = []

    def matrix(self, chunk: Chunk) -> Tensor:
        return self._workspace.logits(chunk)

    def after_merge(self, scored: _Scored, merged: Merged) -> None:
        """Collectives: starts the reduction of the chunk's ``grad_hidden``."""
        context, matrix = self._context, scored.matrix
        assert matrix is not None
        logits, inputs = context.spec.logits, scored.inputs
        upstream = self._upstream.map(partial(context.split, chunk=scored.chunk))
        with phase("grad-logits"):
            row_scale = logits.finalize(matrix, inputs, scored.scores, merged)
            terms = None
            if row_scale is None:
                terms = TokenTerms.of(merged.terms, merged.extra.target_mass)
            out = self._workspace.grad_logits(scored.chunk)
            grad = logits.grad_from_saved(matrix, row_scale, inputs, terms, upstream, out)
        self._gemms.add(scored.chunk, grad, inputs.hidden)
        mass = merged.extra.target_mass
        self._saved.append(SavedChunk(inputs.labels, None, None, merged.terms, mass))

    def finish(self) -> tuple[Saved, PrecomputedGrads]:
        grad_hidden = self._gemms.finish()
        with phase("grad-weight"):
            total = None if self._held is None else self._held.total(self._inv_scale)
        return Saved(self._saved), PrecomputedGrads(self._token_weights, total, grad_hidden)


def backward(
    context: Context,
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    soft: SoftTargets | None,  # [k, parts, n] each
    inv_temperature: Tensor | None,  # [parts, n] fp32
    saved: Saved,
    upstream: Upstream,  # [parts, n] fp32
    needs_grad: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """``grad_hidden`` of this rank's tokens and what autograd gets for the weight; the last chunk first,
    whose hidden states are there. Of ``grad_in_forward`` only where its own gradients do not serve: see
    :func:`scale_precomputed`.

    Collectives, in order: per chunk the gather of the next chunk's hidden states that are needed (sequence
    parallelism), under its first GEMM, and the reduction of its ``grad_hidden``, under its ``grad_weight``.
    Where ``grad_weight`` is one GEMM for all chunks: per chunk that reduction and that gather in one launch,
    under the next chunk's ``grad_hidden``, and the last reduction under ``grad_weight``.
    """
    spec = context.spec
    factor = None
    if weight.dtype == torch.float16 and spec.form.z_loss:
        factor = _largest_factor(spec.form.z_loss, saved.chunks)
    upstream, inv_scale = scaled_upstream(upstream, spec.logit_scale, inv_temperature, weight, factor)
    if spec.plan.block_columns and saved.chunks:
        return _backward_by_columns(
            context, hidden, weight, inv_temperature, saved.chunks, upstream, needs_grad
        )
    return _backward_by_chunks(
        context, hidden, weight, soft, inv_temperature, saved, upstream, inv_scale, needs_grad
    )


def _backward_by_chunks(
    context: Context,
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    soft: SoftTargets | None,
    inv_temperature: Tensor | None,
    saved: Saved,
    upstream: Upstream,  # [parts, n] fp32, times inv_scale's inverse
    inv_scale: Tensor | None,  # fp32 []
    needs_grad: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """:func:`backward` of ``store``, ``mixed`` and ``recompute``: its collectives are here."""
    spec = context.spec
    wants_grad_hidden, wants_grad_weight = needs_grad
    accumulator = None
    at_once = saved.matrix is not None and wants_grad_weight
    if wants_grad_weight:
        num_gemms = 1 if at_once else len(context.chunks)
        accumulator = context.open_grad_weight(weight, num_gemms, inv_scale is not None)
    chunks = context.chunks[::-1]
    read = [chunk for chunk in chunks if _reads_hidden(spec, chunk, needs_grad)]
    hidden_states = HiddenStates(context, hidden, read, depth=None if at_once else 2, first=saved.last_hidden)
    workspace = Workspace(spec, hidden, weight.shape[0])
    gemms = GradientGemms(
        context,
        hidden,
        weight,
        wants_grad_hidden,
        accumulator,
        inv_scale,
        workspace,
        hidden_states,
        all_e=saved.matrix if at_once else None,
    )
    for chunk, of_chunk in zip(chunks, reversed(saved.chunks), strict=True):
        taken = None
        if chunk in read and not at_once:
            taken = hidden_states.take(chunk)
        if not at_once and hidden_states.start():
            delay_next_gemm(context, hidden.device)
        if saved.matrix is not None:
            of_chunk = of_chunk._replace(matrix=context.chunk_of_all(saved.matrix, chunk))
        inputs = _inputs(context, chunk, taken, weight, of_chunk.labels, soft, inv_temperature)
        of_chunk_upstream = upstream.map(partial(context.split, chunk=chunk))
        grad = _grad_logits(context, chunk, of_chunk, inputs, of_chunk_upstream, workspace)
        gemms.add(chunk, grad, taken)
    reduced = gemms.finish()
    grad_hidden = reduced.grad_hidden
    if grad_hidden is not None and reduced.row_scale is not None:
        with phase("grad-hidden"):
            reduced.scale()
    if accumulator is None:
        return grad_hidden, None
    with phase("grad-weight"):
        return grad_hidden, accumulator.close(inv_scale)


def _backward_by_columns(
    context: Context,
    hidden: Tensor,  # [T, H]
    weight: Tensor,  # [V, H]
    inv_temperature: Tensor | None,  # [1, T] fp32
    saved: Sequence[SavedChunk],
    upstream: Upstream,  # [1, T] fp32
    needs_grad: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """:func:`backward` of ``recompute`` over one rank: blocks of columns in place of chunks of tokens.

    A block is some rows of the weight, whose ``grad_weight`` is one GEMM over all tokens; summed over the
    blocks is ``grad_hidden``, in fp32. No collectives.
    """
    spec = context.spec
    wants_grad_hidden, wants_grad_weight = needs_grad
    num_tokens, num_columns = hidden.shape[0], weight.shape[0]
    everything = Chunk(0, 0, num_tokens)
    context = context._replace(chunks=(everything,))
    labels = torch.cat([chunk.labels for chunk in saved])
    terms = TokenTerms.of(torch.cat([chunk.terms for chunk in saved if chunk.terms is not None], -1))
    upstream = upstream.map(partial(context.split, chunk=everything))
    accumulator = total = None
    if wants_grad_weight:
        accumulator = context.open_grad_weight(weight, 1, False)
    if wants_grad_hidden:
        total = hidden.new_empty(hidden.shape, dtype=torch.float32)
    buffer = hidden.new_empty(num_tokens * min(spec.plan.block_columns, num_columns))
    for start in range(0, num_columns, spec.plan.block_columns):
        rows = slice(start, min(start + spec.plan.block_columns, num_columns))
        block = weight[rows]
        out = buffer[: num_tokens * block.shape[0]].view(num_tokens, -1)
        inputs = _inputs(context, everything, hidden, block, labels - start, None, inv_temperature)
        inputs = inputs._replace(form=spec.form.from_column(start))
        with phase("grad-logits"):
            grad = spec.logits.grad_recomputed(inputs, terms, upstream, out, out).matrix
        if total is not None:
            with phase("grad-hidden"):
                accumulate_(total, grad.t(), block, overwrite=start == 0)
        if accumulator is not None:
            with phase("grad-weight"):
                accumulator.add_rows(rows, grad, hidden)
    return (
        None if total is None else total.to(hidden.dtype),
        None if accumulator is None else accumulator.close(None),
    )


def _grad_logits(
    context: Context,
    chunk: Chunk,
    saved: SavedChunk,
    inputs: ChunkInputs,
    upstream: Upstream,  # [C] fp32
    workspace: Workspace,
) -> LogitsGrad:
    """Gradients of the chunk's logits, from its saved tensors."""
    logits = context.spec.logits
    terms = None if saved.terms is None else TokenTerms.of(saved.terms, saved.target_mass)
    with phase("grad-logits"):
        if saved.matrix is None:
            assert terms is not None
            buffers = workspace.logits(chunk), workspace.grad_logits(chunk)
            return logits.grad_recomputed(inputs, terms, upstream, *buffers)
        out = None if logits.reads_saved_in_place else workspace.grad_logits(chunk)
        return logits.grad_from_saved(saved.matrix, saved.row_scale, inputs, terms, upstream, out)


def scale_precomputed(
    context: Context,
    weight: Tensor,
    made: PrecomputedGrads,
    scale: Tensor,  # fp32 []: of promise.fit_scalar
    verdict: Verdict,
    needs_grad: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None] | None:
    """The gradients that ``grad_in_forward`` made in the forward, ``scale`` times; None where the promise was
    not kept. Nothing has been added anywhere then, and ``made`` is spoilt.

    The host reads the verdict behind the launches, so that the device has work while it wakes up.

    Collectives: none.
    """
    grad_hidden = made.grad_hidden.grad_hidden if needs_grad[0] else None
    if grad_hidden is not None:
        with phase("grad-hidden"):
            if made.grad_hidden.row_scale is not None:
                made.grad_hidden.scale(scale)
            else:
                scale_(grad_hidden, scale)
    if made.grad_weight is None or not needs_grad[1]:
        return (grad_hidden, None) if verdict.kept else None
    with phase("grad-weight"):
        accumulator = context.open_grad_weight(weight, 1, False)
        if not accumulator.add_total(made.grad_weight, scale, verdict):
            return None
        return grad_hidden, accumulator.close(None)


def _largest_factor(z_loss: float, saved: Sequence[SavedChunk]) -> Tensor | None:
    """By how much z-loss makes gradients larger than their upstream gradient, at most: fp32 []; None for no
    tokens."""
    terms = [TokenTerms.of(chunk.terms) for chunk in saved if chunk.terms is not None]
    largest = [(of.row_max - of.inv_sum.log()).abs().amax() for of in terms]
    return 1 + 2 * z_loss * torch.stack(largest).amax() if largest else None


def scaled_upstream(
    upstream: Upstream,
    logit_scale: float,
    inv_temperature: Tensor | None,
    weight: Tensor,
    factor: Tensor | None = None,  # fp32 []: gradients may be so many times larger
) -> tuple[Upstream, Tensor | None]:
    """``upstream * logit_scale / temperature``, for fp16 times a power of two whose inverse comes second."""
    if logit_scale != 1.0:
        upstream = upstream.scaled(logit_scale)
    if inv_temperature is not None:
        upstream = upstream.scaled(inv_temperature)
    if weight.dtype != torch.float16:
        return upstream, None
    scale, inv_scale = scale_for_fp16(upstream.gradients, weight, factor)
    return upstream.scaled(scale), inv_scale
