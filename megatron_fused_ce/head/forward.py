"""The forward: hidden states -> losses, one loop over the chunks. One chunk, step by step::

    1. gather      X = hidden states of the chunk, of all ranks (sequence parallelism)          [C, H]
    2. GEMM        P = X @ weight.T as logits, or E = exp(logit - row shift); with it, or after it, the
                   statistics of each row: maximum, sum of exponentials without the label's column, the
                   label's logit                                                                [C, V]
    3. merge       the statistics over the ranks' shards, under the next chunk's GEMM           [4, C]
    4. loss        and the requested outputs of each token                                      [C]
    5. save        what the backward needs: P (store), or four floats a token (recompute); or
       differentiate (grad_in_forward): the gradients of P, then dH and dW as in :mod:`.backward`

Each strategy is exact for any upstream gradient. They differ in step 5:

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

:mod:`.logits` has steps 2 and, for ``E``, 5; :mod:`.parallel` has step 3; :mod:`.loss` step 4;
:mod:`.overlap` says which collective runs under which GEMM.
"""

from __future__ import annotations

from collections import deque
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head.backward import PrecomputedGrads, Saved, SavedChunk, scaled_upstream
from megatron_fused_ce.head.buffers import ChunkGradients, HiddenStates, Workspace
from megatron_fused_ce.head.fp16 import scale_token_weights
from megatron_fused_ce.head.grad_weight import HeldGradWeight
from megatron_fused_ce.head.spec import Context
from megatron_fused_ce.head.targets import Targets
from megatron_fused_ce.kernels.records import Merged, RowStatistics
from megatron_fused_ce.logits import ChunkTargets, Scores
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import DONE, Merge, Work
from megatron_fused_ce.ranks.phases import phase


class Forward(NamedTuple):
    """Results of a forward, of all tokens: ``[parts, n]``, or ``[C]`` of a single chunk.

    ``parts`` is ``R`` with sequence parallelism, else 1.
    """

    outputs: dict[str, Tensor]
    row_max: Tensor | None  # fp32, this shard's largest logit, with argmax only
    argmax: Tensor | None  # int64, its column in this shard
    saved: Saved
    gradients: PrecomputedGrads | None  # of grad_in_forward


class _Scored(NamedTuple):
    """A chunk between its GEMM and the end of its merge."""

    chunk: Chunk
    targets: ChunkTargets
    scores: Scores
    logits: Tensor | None  # [C, V]: P, where it outlives the GEMM
    hidden: Tensor | None  # [C, H]: X, for grad_in_forward
    merge: Merge


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
    spec, chunks = context.spec, context.chunks
    lag = 1 if spec.comm.size > 1 and not spec.logits.settles_at_once else 0
    differentiates = spec.gradients_in_forward
    with_argmax = spec.with_argmax or "best" in spec.form.needs
    hidden_states = HiddenStates(context, hidden, chunks, depth=3 if differentiates else 2)
    results = _Results(context)
    strategy: _Save | _Differentiate
    if differentiates:
        strategy = _Differentiate(context, weight, targets, hidden_states, lag + 1)
    else:
        strategy = _Save(context, weight)
    with spec.comm.coalesced(weight.device):
        sample, sent = _start_sample(context, weight, targets)
        hidden_states.start()
    hidden_states.start()
    sent.wait()
    waiting: deque[_Scored] = deque()
    for chunk in chunks:
        # 1. Gather.
        x = hidden_states.take(chunk)
        if differentiates and chunk.index > 1:
            hidden_states.start()  # before the GEMM; the gap after it belongs to the merge
        # 2. The first GEMM, and the statistics of its rows.
        labels = context.split(targets.labels, chunk)
        of_chunk = context.targets(chunk, labels, targets.others, targets.inv_temperature)
        p = strategy.buffer(chunk)
        scores = spec.logits.logits_gemm(x, weight, of_chunk, sample, p, with_argmax)
        # 3. The merge begins; over several ranks it ends after the next chunk's GEMM.
        with spec.comm.coalesced(weight.device):
            merge = _start_merge(context, scores.stats)
            if not differentiates or chunk.index == 0:
                hidden_states.start()
        if p is None:  # tile statistics that finalize will not read must not live through a GEMM
            scores = scores._replace(tiles=None)
        waiting.append(_Scored(chunk, of_chunk, scores, p, x if differentiates else None, merge))
        del scores, merge  # tile statistics must not outlive their chunk
        # 3 to 5. Merged statistics, losses, and what follows of the strategy.
        if len(waiting) > lag:
            _finish(context, waiting.popleft(), results, strategy)
    while waiting:
        _finish(context, waiting.popleft(), results, strategy)
    saved, gradients = strategy.finish(hidden_states.last())
    return results.whole(saved, gradients, targets)


def _start_sample(context: Context, weight: Tensor, targets: Targets) -> tuple[Any, Work]:
    """Collectives: starts those of :meth:`.LogitsBackend.start_sample`."""
    spec = context.spec
    if not context.chunks:
        return None, DONE
    return spec.logits.start_sample(weight, targets.others, spec.comm, spec.form)


def _start_merge(context: Context, stats: RowStatistics) -> Merge:
    """Collectives: starts those of :meth:`.VocabParallel.start_merge`."""
    spec = context.spec
    if "best" in spec.form.needs:
        assert stats.argmax is not None
        best = (stats.argmax + spec.vocab_start).float()
        stats = stats._replace(extra=stats.extra._replace(best=best))
    return spec.comm.start_merge(stats, spec.logits.token_ops)


def _finish(context: Context, scored: _Scored, results: _Results, strategy: _Save | _Differentiate) -> None:
    """The end of step 3, and steps 4 and 5. Collectives: those of :meth:`.LogitsBackend.settle`."""
    spec = context.spec
    with phase("merge"):
        matrix = scored.logits if spec.gradients_in_forward or spec.stores(scored.chunk) else None
        merged, outputs = spec.logits.settle(
            scored.scores, scored.targets, scored.merge.finish(), matrix, any(spec.needs_grad)
        )
        results.put(scored.chunk, outputs, scored.scores.stats)
    strategy.after_merge(scored, merged)


#: Of this shard, beside the outputs.
_ROW_MAX, _ARGMAX = "row_max of this shard", "argmax of this shard"


class _Results:
    """Results of all tokens, put together from those of the chunks: :class:`Forward`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._whole: dict[str, Tensor] = {}

    def put(self, chunk: Chunk, outputs: dict[str, Tensor], stats: RowStatistics) -> None:
        """A chunk's outputs ``[C]``."""
        context = self._context
        if context.spec.with_argmax:
            assert stats.argmax is not None
            outputs = {**outputs, _ROW_MAX: stats.row_max, _ARGMAX: stats.argmax}
        if len(context.chunks) == 1:
            # Each the caller's own, to be changed in place.
            copies = context.spec.form.copies
            self._whole = {name: of.clone() for name, of in outputs.items()} if copies else outputs
            return
        parts = context.spec.comm.num_parts
        for name, of_chunk in outputs.items():
            if name not in self._whole:
                self._whole[name] = of_chunk.new_empty(*of_chunk.shape[:-1], parts, context.num_tokens)
            of_chunk = of_chunk.view(*of_chunk.shape[:-1], parts, -1)
            self._whole[name][..., chunk.start : chunk.stop] = of_chunk

    def whole(self, saved: Saved, gradients: PrecomputedGrads | None, targets: Targets) -> Forward:
        """All tokens'. Collectives: those of :meth:`.LogitsBackend.whole`."""
        if not self._context.chunks:
            self._put_nothing(targets.labels)
        outputs, spec = self._whole, self._context.spec
        row_max, argmax = outputs.pop(_ROW_MAX, None), outputs.pop(_ARGMAX, None)
        outputs = spec.logits.whole(outputs, targets.others, spec.comm)
        return Forward(outputs, row_max, argmax, saved, gradients)

    def _put_nothing(self, labels: Tensor) -> None:
        """Results for an empty batch."""
        spec = self._context.spec
        empty = labels.new_empty(spec.comm.num_parts, 0, dtype=torch.float32)
        self._whole = {"loss": empty, **{name: empty.to(term.dtype) for name, term in spec.form.beside}}
        for name in spec.form.per_label:
            self._whole[name] = empty.expand(spec.form.num_labels, -1, -1)
        if spec.with_argmax:
            self._whole |= {_ROW_MAX: empty, _ARGMAX: empty.to(torch.int64)}


class _Save:
    """Step 5 of ``store``, ``recompute`` and ``mixed``: saves the logits of all, no or the first chunks."""

    def __init__(self, context: Context, weight: Tensor) -> None:
        self._context, self._weight = context, weight
        self._workspace = Workspace(context, weight)
        self._saved: list[SavedChunk] = []
        self._matrix: Tensor | None = None  # [T, V]: all chunks', where grad_weight is made at once

    def buffer(self, chunk: Chunk) -> Tensor | None:
        """``[C, V]`` for the chunk's logits; None where the GEMM leaves statistics alone."""
        context, spec = self._context, self._context.spec
        num_columns, parts = self._weight.shape[0], spec.comm.num_parts
        if not spec.stores(chunk):
            return self._workspace.logits(chunk) if spec.logits.needs_logits_buffer else None
        if not spec.wgrad_at_once:
            size = parts * chunk.num_tokens, num_columns
            return self._weight.new_empty(size, dtype=spec.logits.logits_dtype)
        if self._matrix is None:
            self._matrix = self._weight.new_empty(parts * context.num_tokens, num_columns)
        return context.chunk_of_all(self._matrix, chunk)

    def after_merge(self, scored: _Scored, merged: Merged) -> None:
        spec = self._context.spec
        if not any(spec.needs_grad):
            return
        row_scale = matrix = None
        if spec.stores(scored.chunk):
            assert scored.logits is not None
            with phase("statistics"):
                row_scale = spec.logits.finalize(scored.logits, scored.targets, scored.scores, merged)
            matrix = scored.logits if self._matrix is None else None  # else saved with all others
        terms = None if row_scale is not None else spec.form.saved(merged)
        labels = None if row_scale is not None else scored.targets.labels
        self._saved.append(SavedChunk(labels, matrix, row_scale, terms))

    def finish(self, last_hidden: Tensor | None) -> tuple[Saved, None]:
        chunks, spec = self._context.chunks, self._context.spec
        reads = bool(chunks) and spec.backward_reads_hidden(chunks[-1], spec.needs_grad)
        last = last_hidden if reads and spec.plan.saves_last_hidden else None
        return Saved(tuple(self._saved), last, self._matrix), None


class _Differentiate:
    """Step 5 of ``grad_in_forward``: the gradients, for the token weights that are known in the forward.

    The backward multiplies them by the one scalar that the upstream gradient then is
    (:func:`.backward.scale_precomputed`). The tensors that ``recompute`` saves are saved beside them, for an
    upstream that is no multiple.
    """

    def __init__(
        self, context: Context, weight: Tensor, targets: Targets, hidden_states: HiddenStates, depth: int
    ) -> None:
        assert targets.token_weights is not None
        spec = context.spec
        self._context, self._hidden_states = context, hidden_states
        bound = spec.logits.bound_ahead(targets.others)
        weights = scale_token_weights(targets.token_weights, spec.logit_scale, weight.dtype, bound)
        self._token_weights = weights
        upstream, inv_temperature = Upstream(weights), targets.inv_temperature
        self._upstream, self._inv_scale = scaled_upstream(
            upstream, spec.logit_scale, inv_temperature, weight, bound
        )
        self._grad_weight = HeldGradWeight(weight) if spec.needs_grad.weight else None
        self._gradients = ChunkGradients(context, weight, self._inv_scale, spec.needs_grad.hidden)
        self._workspace = Workspace(context, weight, depth)
        self._saved: list[SavedChunk] = []

    def buffer(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` for the chunk's logits."""
        return self._workspace.logits(chunk)

    def after_merge(self, scored: _Scored, merged: Merged) -> None:
        """Collectives: starts the reduction of the chunk's ``grad_hidden``."""
        context, logits = self._context, self._context.spec.logits
        chunk, targets, p, x = scored.chunk, scored.targets, scored.logits, scored.hidden
        assert p is not None and x is not None
        upstream = self._upstream.map(partial(context.split, chunk=chunk))
        saved = SavedChunk(targets.labels, None, None, targets.form.saved(merged))
        with phase("grad-logits"):
            row_scale = logits.finalize(p, targets, scored.scores, merged)
            terms = saved.token_terms(targets.form) if row_scale is None else None
            out = self._workspace.grad_logits(chunk)
            grad = logits.grad_from_saved(p, row_scale, targets, terms, upstream, out)
        self._gradients.add(chunk, grad, x, self._hidden_states, self._grad_weight)
        self._saved.append(saved)

    def finish(self, last_hidden: Tensor | None) -> tuple[Saved, PrecomputedGrads]:
        rows, total = self._gradients.reduced(), None
        if self._grad_weight is not None:
            with phase("grad-weight"):
                total = self._grad_weight.total(self._inv_scale)
        factors = self._gradients.row_scales
        row_scale = reduce(torch.mul, factors) if factors else None
        made = PrecomputedGrads(self._token_weights, total, rows, row_scale)
        return Saved(tuple(self._saved)), made
