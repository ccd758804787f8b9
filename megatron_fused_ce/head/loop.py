"""The head's loop: hidden states -> losses -> gradients, one chunk of tokens at a time.

Three matrix products a chunk. ``X`` are its hidden states and ``P`` its logits, or ``E = exp(logit - shift of
the row)`` where the product exponentiates itself; ``G = d loss / d P`` takes the place of ``P``::

    P = X @ weight.T   [C, V]         dH = G @ weight   [C, H]         dW += G.T @ X   [V, H]

The forward::

    start the sample of the weight and the gather of the first X
    for each chunk c:        X = take;  P = product, and statistics of its rows
                             start their merge over the ranks (and the gather of c + 2 in the same launch;
                             where gradients are made here, that of c + 1 starts before P)
        of the chunk before  end its merge: losses and other outputs; then
                             store: keep P.   recompute: keep four floats a token.
                             grad_in_forward: G;  dH, start its reduction;  dW

Over one rank a chunk's merge ends at once, before the next chunk. The backward, last chunk first::

    grad_in_forward, and the upstream gradient is what was promised: scale dH and dW.  Else
    for each chunk c:        X = take;  start the gather of c - 1;  G from the kept P, or from P made again
                             dH, start its reduction;  dW
    E of all chunks kept:    dH, start its reduction and the gather of c - 1;  X times the row factors of E
    at the end:              of that dW, one product for all chunks;  the rows' factors of dH

Each strategy is exact for any upstream gradient per token:

===================  =======================================================  ========
strategy             kept between forward and backward, beside hidden states  products
===================  =======================================================  ========
``store``            every chunk's logits                                     3
``recompute``        four floats a token                                      4
``mixed``            the logits of the first chunks                           3 to 4
``grad_in_forward``  ``grad_hidden``, fp32 ``grad_weight``, the four floats   3 (6)
===================  =======================================================  ========

``grad_in_forward`` takes six where the upstream gradient is no scalar times the token weights: its backward
is then that of ``recompute``. Here a strategy is three facts of the plan: how many chunks keep their logits,
whether gradients are made in the forward, and whether one product makes ``grad_weight``.

:mod:`.buffers` says which collective runs under which product. :mod:`megatron_fused_ce.logits` has the
products with their row statistics, :mod:`megatron_fused_ce.ranks.collectives` the merge and its collectives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head import results
from megatron_fused_ce.head.buffers import GradHidden, HiddenStates, Ring
from megatron_fused_ce.head.fp16 import scale_, scale_for_fp16, scale_token_weights
from megatron_fused_ce.head.grad_weight import Accumulator, GradWeight
from megatron_fused_ce.head.promise import Verdict
from megatron_fused_ce.head.spec import Spec
from megatron_fused_ce.head.tokens import Tokens
from megatron_fused_ce.kernels.records import Merged
from megatron_fused_ce.logits import LogitsGrad, Scores, Targets
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import DONE
from megatron_fused_ce.ranks.phases import phase

#: ``grad_hidden`` of this rank's tokens, and what autograd gets for the weight.
Gradients = tuple[Tensor | None, Tensor | None]


#: Ends a chunk's merge.
Merge = Callable[[], Merged]
#: A chunk between the start of its merge and the end: X, its targets, P, statistics, the merge.
_UnderWay = tuple[Chunk, Tensor, Targets, Tensor | None, Scores, Merge]


class SavedChunk(NamedTuple):
    """Tensors of a chunk that the backward reads."""

    labels: Tensor | None  # [C] int64; None with a row scale
    matrix: Tensor | None  # [C, V]: P or E; None where it is made again, or part of Saved.matrix
    row_scale: Tensor | None  # [C] fp32: LogitsBackend.finalize's; then neither labels nor terms are read
    terms: Tensor | None  # [4, C] fp32 or more rows: Outputs.saved


class Saved(NamedTuple):
    """Tensors that the backward reads, beside hidden states and weight."""

    chunks: tuple[SavedChunk, ...]
    last_hidden: Tensor | None  # [C, H]: X of the last chunk, where it was gathered
    matrix: Tensor | None  # [T, V]: E of all chunks, one after the other, for one product of grad_weight
    targets: Targets  # but the labels, which the chunks have


class Made(NamedTuple):
    """Gradients made in the forward, for an upstream gradient equal to the token weights."""

    token_weights: Tensor  # [parts, n] fp32
    grad_weight: Tensor | None  # [V, H] fp32
    grad_hidden: Tensor | None  # [n, H], summed over the ranks
    row_scale: Tensor | None  # [n] fp32: of the rows of grad_hidden; None for 1


def forward(
    spec: Spec,
    tokens: Tokens,
    hidden: Tensor,  # [n, H], this rank's tokens
    weight: Tensor,  # [V, H]
    targets: Targets,  # [parts, n]
    token_weights: Tensor | None,  # [parts, n] fp32; with plan.in_forward
) -> tuple[dict[str, Tensor], Saved, Made | None]:
    """The outputs of all tokens, ``[parts, n]`` (of a single chunk ``[C]``), and what the backward reads.

    Collectives, in order (see :class:`.VocabParallel` for each): the sampled rows of the weight where the
    logits backend wants them, in one launch with the gather of the first chunk's hidden states (sequence
    parallelism); the gather of the second's. Then for each chunk ``c``, counted from 0:

    - ``store``, ``recompute``, ``mixed``: its merge and the gather of ``c + 2``, in one launch;
    - ``grad_in_forward``: the gather of ``c + 1``, before the product, from ``c = 2`` on (that of 2 leaves
      with the merge of 0); the first step of its merge; what is left of the merge of ``c - 1``; the reduction
      of the ``grad_hidden`` of ``c - 1``.
    """
    comm, logits, device = spec.comm, spec.logits, weight.device
    num_stored, in_forward = spec.num_stored, spec.in_forward
    lag = 1 if comm.size > 1 and not logits.settles_at_once else 0
    hidden_states = HiddenStates(tokens, comm, hidden, tokens.chunks, depth=3 if in_forward else 2)
    ring = Ring(tokens, weight, len(weight), lag + 1 if in_forward else 1, logits.logits_dtype)
    matrix = None
    if spec.one_product and tokens.chunks:
        matrix = weight.new_empty(tokens.num_parts * tokens.num, len(weight))
    here = None
    if in_forward:
        assert token_weights is not None
        here = _InForward(spec, tokens, weight, targets, token_weights, hidden_states, ring)
    whole: dict[str, Tensor] = {}
    saved: list[SavedChunk] = []

    def begin(chunk: Chunk) -> _UnderWay:
        """Up to the start of the merge."""
        x = hidden_states.take(chunk)
        if in_forward and chunk.index > 1:
            hidden_states.start()  # before the product; the gap after it belongs to the merge
        of_chunk = targets.of_chunk(chunk, partial(tokens.split, chunk=chunk))
        p: Tensor | None
        if matrix is not None:
            p = tokens.of_all(matrix, chunk)
        elif chunk.index < num_stored:
            p = weight.new_empty(len(x), len(weight), dtype=logits.logits_dtype)
        else:
            p = ring.slot(chunk.index, chunk) if in_forward or logits.needs_logits_buffer else None
        scores = logits.logits_gemm(x, weight, of_chunk, sample, p)
        stats = scores.stats
        if "best" in logits.outputs.needs:  # of several shards the lowest id counts
            assert stats.argmax is not None
            best = (stats.argmax + spec.vocab_start).float()
            stats = stats._replace(extra=stats.extra._replace(best=best))
        with comm.coalesced(device):
            merge = comm.start_merge(stats, logits.token_ops)
            if not in_forward or chunk.index == 0:
                hidden_states.start()
        if p is None:  # tile statistics that finalize will not read must not live through a product
            scores = scores._replace(tiles=None)
        return chunk, x, of_chunk, p, scores, merge

    def finish(
        chunk: Chunk, x: Tensor, of_chunk: Targets, p: Tensor | None, scores: Scores, merge: Merge
    ) -> None:
        """From the end of the merge on."""
        uses_p = in_forward or chunk.index < num_stored
        with phase("merge"):
            merged, made = logits.settle(scores, of_chunk, merge(), p if uses_p else None, spec.needs_grad)
            results.put(whole, tokens, chunk, made, logits.outputs.copies)
        if here is not None:
            assert p is not None
            saved.append(here.differentiate(chunk, x, of_chunk, p, scores, merged))
        elif spec.needs_grad:
            row_scale = None
            if uses_p:
                assert p is not None
                row_scale = logits.finalize(p, of_chunk, scores, merged)
            terms, labels = None, None
            if row_scale is None:
                terms, labels = logits.outputs.saved(merged), of_chunk.labels
            saved.append(SavedChunk(labels, p if uses_p and matrix is None else None, row_scale, terms))

    with comm.coalesced(device):
        sample, sent = logits.start_sample(weight, targets.others) if tokens.chunks else (None, DONE)
        hidden_states.start()
    hidden_states.start()
    sent.wait()
    waiting: deque[_UnderWay] = deque()
    for chunk in tokens.chunks:
        waiting.append(begin(chunk))
        if len(waiting) > lag:
            finish(*waiting.popleft())
    while waiting:
        finish(*waiting.popleft())
    last = hidden_states.last if spec.keeps_last and here is None else None
    outputs = logits.whole(whole or results.of_no_tokens(logits, tokens, device), targets.others)
    if targets.others is not None and spec.needs_grad:
        targets = targets._replace(others=targets.others.saved(spec.remakes))
    kept = Saved(tuple(saved), last, matrix, targets._replace(labels=None))  # type: ignore[arg-type]
    return outputs, kept, None if here is None else here.made()


class _InForward:
    """``grad_in_forward``: a chunk's gradients for the token weights, as soon as its merge has ended."""

    def __init__(
        self,
        spec: Spec,
        tokens: Tokens,
        weight: Tensor,
        targets: Targets,
        token_weights: Tensor,  # [parts, n] fp32
        hidden_states: HiddenStates,
        ring: Ring,
    ) -> None:
        bound = spec.logits.bound_ahead(targets.others)
        self.weights = scale_token_weights(token_weights, spec.logits.logit_scale, weight.dtype, bound)
        upstream, temperature = Upstream(self.weights), targets.inv_temperature
        self.upstream, self.inv_scale = _scaled(spec, upstream, temperature, weight, bound)
        self.spec, self.tokens, self.hidden_states = spec, tokens, hidden_states
        self.grad_weight = GradWeight(weight) if spec.grad_weight else None
        self.grad_hidden = GradHidden(tokens, spec.comm, weight, self.inv_scale) if spec.grad_hidden else None
        self.out = ring if spec.logits.logits_dtype is None else Ring(tokens, weight, len(weight))

    def differentiate(
        self, chunk: Chunk, x: Tensor, of_chunk: Targets, p: Tensor, scores: Scores, merged: Merged
    ) -> SavedChunk:
        """Collectives: those of :func:`_differentiate`. Returns what ``recompute`` saves, for an upstream
        gradient that is no multiple of the token weights."""
        logits = self.spec.logits
        upstream = self.upstream.map(partial(self.tokens.split, chunk=chunk))
        terms = logits.outputs.saved(merged)
        row_scale = logits.finalize(p, of_chunk, scores, merged)
        with phase("grad-logits"):
            out = self.out.slot(chunk.index, chunk)
            grad = logits.grad_from_saved(p, row_scale, of_chunk, terms, upstream, out)
        _differentiate(self.spec, chunk, x, grad, self.hidden_states, self.grad_hidden, self.grad_weight)
        return SavedChunk(of_chunk.labels, None, None, terms)

    def made(self) -> Made:
        """Collectives: none; waits for the last reduction."""
        rows, scales = (None, ()) if self.grad_hidden is None else self.grad_hidden.reduced()
        with phase("grad-weight"):
            total = None if self.grad_weight is None else self.grad_weight.total(self.inv_scale)
        return Made(self.weights, total, rows, math.prod(scales[1:], start=scales[0]) if scales else None)


def backward(
    spec: Spec,
    tokens: Tokens,
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    saved: Saved,
    upstream: Upstream,  # [parts, n] fp32
    with_hidden: bool,  # whether grad_hidden is wanted
    grad_weight: Accumulator | None,  # None where it is not wanted
) -> Gradients:
    """The gradients, the last chunk first: its hidden states are there.

    Collectives, in order: per chunk the gather of the next chunk's hidden states that are needed (sequence
    parallelism), under its first product, and the reduction of ``grad_hidden``, under its ``grad_weight``.
    With ``E`` of all chunks in one matrix: per chunk that reduction and that gather in one launch, under the
    next chunk's ``grad_hidden``, and the last reduction under ``grad_weight``.
    """
    comm, logits, num_stored, device = spec.comm, spec.logits, spec.num_stored, weight.device
    bound = _bound(spec, tokens, saved, upstream) if weight.dtype == torch.float16 else None
    upstream, inv_scale = _scaled(spec, upstream, saved.targets.inv_temperature, weight, bound)
    matrix, at_once = saved.matrix, saved.matrix is not None and grad_weight is not None
    chunks = tokens.chunks[::-1]
    read = [c for c in chunks if grad_weight is not None or (with_hidden and c.index >= num_stored)]
    hidden_states = HiddenStates(tokens, comm, hidden, read, None if at_once else 2, saved.last_hidden)
    grad_hidden = None
    if with_hidden:
        grad_hidden = GradHidden(tokens, comm, weight, inv_scale, depth=2 if at_once else 1)
    ring = out = Ring(tokens, weight, len(weight), dtype=logits.logits_dtype)
    if logits.logits_dtype is not None:
        out = Ring(tokens, weight, len(weight))
    for chunk, kept in zip(chunks, reversed(saved.chunks), strict=True):
        x = None
        if not at_once:
            x = hidden_states.take(chunk) if chunk in read else None
            if hidden_states.start():
                comm.delay_next_product(device)
        split = partial(tokens.split, chunk=chunk)
        of_chunk = saved.targets.of_chunk(chunk, split)._replace(labels=kept.labels)  # type: ignore[arg-type]
        of_tokens = upstream.map(split)
        with phase("grad-logits"):
            if chunk.index < num_stored:
                p = kept.matrix if matrix is None else tokens.of_all(matrix, chunk)
                room = None if logits.saves_e else out.slot(0, chunk)
                assert p is not None
                grad = logits.grad_from_saved(p, kept.row_scale, of_chunk, kept.terms, of_tokens, room)
            else:
                assert x is not None and kept.terms is not None
                p, room = ring.slot(0, chunk), out.slot(0, chunk)
                grad = logits.grad_recomputed(x, weight, of_chunk, kept.terms, of_tokens, p, room)
        if not at_once:
            _differentiate(spec, chunk, x, grad, hidden_states, grad_hidden, grad_weight)
            continue
        with comm.coalesced(device):
            if grad_hidden is not None:
                grad_hidden.add(chunk, grad)
            hidden_states.start()
        x = hidden_states.take(chunk)
        assert grad.row_scale is not None
        with phase("grad-weight"):
            logits.scale_rows(x, grad.row_scale, hidden_states.scaled(chunk), grad.upstream)
    if grad_weight is not None and matrix is not None and hidden_states.all_tokens is not None:
        with phase("grad-weight"):
            grad_weight.add(matrix, hidden_states.all_tokens)
    rows = None if grad_hidden is None else grad_hidden.finish(logits)
    if grad_weight is None:
        return rows, None
    with phase("grad-weight"):
        return rows, grad_weight.close(inv_scale)


def _differentiate(
    spec: Spec,
    chunk: Chunk,
    x: Tensor | None,  # [C, H]; not read without grad_weight
    grad: LogitsGrad,
    hidden_states: HiddenStates,  # x is of
    grad_hidden: GradHidden | None,
    grad_weight: GradWeight | None,
) -> None:
    """A chunk's ``dH`` and ``dW``. Collectives: the reduction of ``dH``, under ``dW``."""
    if grad_hidden is not None:
        grad_hidden.add(chunk, grad)
    if grad.row_scale is None:  # no small kernel follows
        spec.comm.delay_next_product(grad.matrix.device)
    if grad_weight is None:
        return
    assert x is not None
    with phase("grad-weight"):
        if grad.row_scale is not None:
            scaled = hidden_states.scaled(chunk)
            spec.logits.scale_rows(x, grad.row_scale, scaled, grad.upstream)
            x = scaled
        grad_weight.add(grad.matrix, x)


def scale_made(
    spec: Spec,
    made: Made,
    scale: Tensor,  # fp32 []: of promise.fit_scalar
    verdict: Verdict,
    with_hidden: bool,
    grad_weight: Accumulator | None,
) -> Gradients | None:
    """The gradients made in the forward, ``scale`` times; None where the promise was not kept. Nothing has
    been added anywhere then, and ``made`` is spoilt.

    The host reads the verdict behind the launches, so that the device has work while it wakes up.

    Collectives: none.
    """
    grad_hidden = made.grad_hidden if with_hidden else None
    if grad_hidden is not None:
        with phase("grad-hidden"):
            if made.row_scale is not None:
                spec.logits.scale_rows(grad_hidden, made.row_scale, grad_hidden, scale)
            else:
                scale_(grad_hidden, scale)
    if made.grad_weight is None or grad_weight is None:
        return (grad_hidden, None) if verdict.kept else None
    with phase("grad-weight"):
        if not grad_weight.add_total(made.grad_weight, scale, verdict):
            return None
        return grad_hidden, grad_weight.close(None)


def _scaled(
    spec: Spec,
    upstream: Upstream,
    inv_temperature: Tensor | None,
    weight: Tensor,
    bound: Tensor | float | None,  # [] or [parts, n] fp32: gradients may be so many times larger
) -> tuple[Upstream, Tensor | None]:
    """``upstream * logit_scale / temperature``, for fp16 times a power of two whose inverse comes second."""
    if spec.logits.logit_scale != 1.0:
        upstream = upstream.scaled(spec.logits.logit_scale)
    if inv_temperature is not None:
        upstream = upstream.scaled(inv_temperature)
    if weight.dtype != torch.float16:
        return upstream, None
    scale, inv_scale = scale_for_fp16(upstream.sizes, weight, bound)
    return upstream.scaled(scale), inv_scale


def _bound(spec: Spec, tokens: Tokens, saved: Saved, upstream: Upstream) -> Tensor | None:
    """What each token's gradients may reach for an upstream gradient of 1, ``[parts, n]``; None for 1."""
    if not spec.logits.outputs.unbounded:
        return None
    bound = torch.ones_like(upstream.loss)
    for chunk, kept in zip(tokens.chunks, saved.chunks, strict=True):
        of_chunk = saved.targets.of_chunk(chunk, partial(tokens.split, chunk=chunk))
        found = spec.logits.bound_of(kept.terms, kept.row_scale, of_chunk)
        if found is not None:
            bound[:, chunk.start : chunk.stop] = found.view(len(bound), -1)
    return bound
