"""The head's loop: hidden states -> losses -> gradients, one chunk of tokens at a time.

A chunk ``c`` takes three GEMMs. ``X`` are its hidden states, ``P`` its logits, ``G = d loss / d P``::

    P = X @ weight.T   [C, V]         dH = G @ weight   [C, H]         dW += G.T @ X   [V, H]

Each of ``R`` ranks holds ``V`` rows of the weight, so that ``P`` are the logits of that shard, and ``dH`` is
summed over shards. A chunk of a loss with one label a token has three collectives, in this order, on every
rank alike:

- **gather** (sequence parallelism only): each rank holds ``C / R`` of the chunk's tokens; an all-gather makes
  ``X``. It starts one or two chunks ahead.
- **merge**: the ranks exchange the statistics of their rows of ``P`` (maximum, sum of exponentials, the
  label's logit), four floats a token. The statistics over the whole vocabulary give the loss. The merge
  starts after ``P``, and ends after the ``P`` of the next chunk.
- **reduce**: an all-reduce sums ``dH`` over the ranks, or a reduce-scatter with sequence parallelism.

The forward (:func:`forward`) begins chunk ``c`` before it finishes ``c - 1``; over one rank, where no merge
has to be hidden, it finishes ``c`` at once::

    start the gather of chunks 0 and 1
    for each chunk c:
        begin c            X = wait for its gather;  P, and the statistics of its rows
                           start its merge, and the gather of a later chunk
        finish c - 1       wait for its merge: losses and other outputs; then
                           store: keep P          recompute: keep four floats a token
                           grad_in_forward: G;  dH, start its reduction;  dW

The backward (:func:`backward`), last chunk first, since its ``X`` is still there::

    for each chunk c:      X = wait for its gather;  start the gather of c - 1
                           store: G from the kept P          recompute: make P again, then G
                           dH, start its reduction;  dW

Each strategy is exact for any upstream gradient per token:

===================  =======================================================  ========
strategy             kept between forward and backward, beside hidden states  GEMMs
===================  =======================================================  ========
``store``            the logits ``P`` of every chunk, four floats a token     3
``recompute``        four floats a token                                      4
``mixed``            ``store`` for the first chunks, ``recompute`` for others 3 to 4
``grad_in_forward``  ``dH``, ``dW`` in fp32, four floats a token              3 (or 6)
===================  =======================================================  ========

``grad_in_forward`` makes its gradients for the token weights, a promised upstream gradient. If the real one
is a scalar times these, the backward multiplies ``dH`` and ``dW`` by the scalar (:func:`scale_made`); if not,
it is the backward of ``recompute``, with three GEMMs more.

The scaled-exp GEMM writes ``E = exp(logit - shift of the row)`` in the place of ``P``. Then ``G`` is ``E``
with its rows scaled, and nobody writes it: ``dW`` takes scaled rows of ``X``, and ``dH`` gets its scales at
the end. With ``store`` the ``E`` of all chunks may lie in one matrix; one GEMM then makes ``dW``.

The table in :mod:`.buffers` says, for each strategy, which collective runs under which GEMM;
:mod:`megatron_fused_ce.logits` has the GEMM and its row statistics, :meth:`.VocabParallel.start_merge` the
merge.
"""

from __future__ import annotations

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
from megatron_fused_ce.logits import LogitsGrad, SavedChunk, Scores, Targets
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.phases import phase

#: ``grad_hidden`` of this rank's tokens, and what autograd gets for the weight.
Gradients = tuple[Tensor | None, Tensor | None]

#: Waits for the merge of a chunk, and returns the statistics over the whole vocabulary.
Merge = Callable[[], Merged]
#: A chunk whose merge is under way: the chunk, X, its targets, P, the shard's statistics, the merge.
_UnderWay = tuple[Chunk, Tensor, Targets, Tensor | None, Scores, Merge]


class Saved(NamedTuple):
    """Tensors that the backward reads, beside hidden states and weight."""

    chunks: tuple[SavedChunk, ...]
    last_hidden: Tensor | None  # [C, H]: X of the last chunk, where it was gathered
    matrix: Tensor | None  # [T, V]: E of all chunks, one after the other, for the one GEMM of grad_weight
    targets: Targets  # without labels, which the chunks have


class Made(NamedTuple):
    """Gradients made in the forward, for an upstream gradient equal to the token weights."""

    token_weights: Tensor  # [parts, n] fp32
    grad_weight: Tensor | None  # [V, H] fp32
    grad_hidden: Tensor | None  # [n, H], summed over the ranks
    row_scale: Tensor | None  # [n] fp32: multiplies the rows of grad_hidden; None for 1


def forward(
    spec: Spec,
    tokens: Tokens,
    hidden: Tensor,  # [n, H], this rank's tokens
    weight: Tensor,  # [V, H]
    targets: Targets,  # [parts, n]
    token_weights: Tensor | None,  # [parts, n] fp32; with spec.in_forward
) -> tuple[dict[str, Tensor], Saved, Made | None]:
    """Compute the outputs of all tokens, ``[parts, n]`` (of a single chunk ``[C]``); keep what the backward
    reads, and the gradients if they are made here.

    Collectives, in order (:class:`.VocabParallel` describes each): the sampled rows of the weight, if the
    logits backend wants them, in one launch with the gather of chunk 0 (gathers are for sequence parallelism
    only); the gather of chunk 1. Then for each chunk ``c``:

    - ``store``, ``recompute``, ``mixed``: the merge of ``c`` and the gather of ``c + 2``, in one launch;
    - ``grad_in_forward``: the gather of ``c + 1``, before ``P``, from ``c = 2`` on (the gather of 2 leaves
      with the merge of 0); the first step of the merge of ``c``; the other steps of the merge of ``c - 1``;
      the reduction of the ``grad_hidden`` of ``c - 1``.
    """
    comm, logits, device = spec.comm, spec.logits, weight.device
    # Over several ranks the merge of a chunk runs under the P of the next one: two chunks are at work.
    lag = 1 if comm.size > 1 and not logits.settles_at_once else 0
    hidden_states = HiddenStates(tokens, comm, hidden, tokens.chunks, depth=3 if spec.in_forward else 2)
    # P of chunks that do not keep it; gradients of chunk c - 1 are made while chunk c has its P.
    ring = Ring(tokens, weight, len(weight), lag + 1 if spec.in_forward else 1, logits.logits_dtype)
    matrix = None
    if spec.wgrad_at_once and tokens.chunks:
        matrix = weight.new_empty(tokens.num_parts * tokens.num, len(weight))
    in_forward = None
    if spec.in_forward:
        assert token_weights is not None
        in_forward = _InForward(spec, tokens, weight, targets, token_weights, hidden_states, ring)
    outputs: dict[str, Tensor] = {}
    saved: list[SavedChunk] = []

    def begin(chunk: Chunk) -> _UnderWay:
        """Make P and the statistics of its rows; start their merge over the ranks."""
        x = hidden_states.take()
        if in_forward is not None and chunk.index > 1:
            hidden_states.start()  # before P: the gap after it belongs to the merge
        chunk_targets = targets.of_chunk(chunk, partial(tokens.split, chunk=chunk))
        p: Tensor | None
        if matrix is not None:
            p = tokens.of_all(matrix, chunk)
        elif chunk.index < spec.num_stored:
            p = weight.new_empty(len(x), len(weight), dtype=logits.logits_dtype)
        else:
            p = ring.slot(chunk.index, chunk) if spec.in_forward or logits.needs_logits_buffer else None
        scores = logits.logits_gemm(x, weight, chunk_targets, sample, p)
        stats = scores.stats
        if "best" in logits.outputs.needs:  # the lowest id wins a tie between shards
            assert stats.argmax is not None
            best = (stats.argmax + spec.vocab_start).float()
            stats = stats._replace(extra=stats.extra._replace(best=best))
        with comm.coalesced(device):
            merge = comm.start_merge(stats, logits.token_ops)
            if in_forward is None or chunk.index == 0:
                hidden_states.start()
        if p is None:  # nobody will read the statistics of its tiles: free them before the next GEMM
            scores = scores._replace(tiles=None)
        return chunk, x, chunk_targets, p, scores, merge

    def finish(
        chunk: Chunk, x: Tensor, chunk_targets: Targets, p: Tensor | None, scores: Scores, merge: Merge
    ) -> None:
        """Wait for the merge; make the outputs; keep P or four floats a token, or make the gradients."""
        read_p = p if spec.in_forward or chunk.index < spec.num_stored else None  # by the gradients
        with phase("merge"):
            merged, made = logits.settle(scores, chunk_targets, merge(), read_p, spec.needs_grad)
            results.put(outputs, tokens, chunk, made, logits.outputs.copies)
        if in_forward is not None:
            assert read_p is not None
            saved.append(in_forward.differentiate(chunk, x, chunk_targets, read_p, scores, merged))
        elif spec.needs_grad:
            row_scale = None if read_p is None else logits.finalize(read_p, chunk_targets, scores, merged)
            labels, stats = None, None
            if row_scale is None:
                labels, stats = chunk_targets.labels, logits.outputs.saved(merged)
            saved.append(SavedChunk(labels, read_p if matrix is None else None, row_scale, stats))

    with comm.coalesced(device):
        sample, sent = logits.start_sample(weight, targets.others) if tokens.chunks else (None, [])
        hidden_states.start()
    hidden_states.start()
    for work in sent:
        work.wait()
    waiting: deque[_UnderWay] = deque()
    for chunk in tokens.chunks:
        waiting.append(begin(chunk))
        if len(waiting) > lag:
            finish(*waiting.popleft())
    while waiting:
        finish(*waiting.popleft())
    last_hidden = hidden_states.last if spec.keeps_last and in_forward is None else None
    outputs = logits.whole(outputs or results.of_no_tokens(logits, tokens, device), targets.others)
    if targets.others is not None and spec.needs_grad:
        targets = targets._replace(others=targets.others.saved(spec.remakes))
    to_save = Saved(tuple(saved), last_hidden, matrix, targets._replace(labels=None))  # type: ignore[arg-type]
    return outputs, to_save, None if in_forward is None else in_forward.made()


class _InForward:
    """``grad_in_forward``: makes a chunk's gradients for the token weights, once its merge has ended."""

    def __init__(
        self,
        spec: Spec,
        tokens: Tokens,
        weight: Tensor,
        targets: Targets,
        token_weights: Tensor,  # [parts, n] fp32
        hidden_states: HiddenStates,
        ring: Ring,  # has the P of the chunks at work
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
        self, chunk: Chunk, x: Tensor, chunk_targets: Targets, p: Tensor, scores: Scores, merged: Merged
    ) -> SavedChunk:
        """Make G, dH and dW. Return what ``recompute`` keeps, for a broken promise.

        Collectives: those of :func:`_differentiate`.
        """
        logits = self.spec.logits
        upstream = self.upstream.map(partial(self.tokens.split, chunk=chunk))
        stats = logits.outputs.saved(merged)
        row_scale = logits.finalize(p, chunk_targets, scores, merged)
        with phase("grad-logits"):
            out = self.out.slot(chunk.index, chunk)
            now = SavedChunk(None, p, row_scale, stats)
            grad = logits.grad_from_saved(now, chunk_targets, upstream, out)
        _differentiate(self.spec, chunk, x, grad, self.hidden_states, self.grad_hidden, self.grad_weight)
        return SavedChunk(chunk_targets.labels, None, None, stats)

    def made(self) -> Made:
        """Wait for the last reduction, and return the gradients of all chunks. Collectives: none."""
        rows, scale, factor = (None,) * 3 if self.grad_hidden is None else self.grad_hidden.reduced()
        with phase("grad-weight"):
            total = None if self.grad_weight is None else self.grad_weight.total(self.inv_scale)
        return Made(self.weights, total, rows, scale if scale is None or factor is None else scale * factor)


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
    """Compute the gradients, the last chunk first: its hidden states are still there.

    Collectives, in order: per chunk the gather of the next hidden states that a GEMM reads (sequence
    parallelism), under the chunk's first GEMM, and the reduction of ``grad_hidden``, under ``dW``. With ``E``
    of all chunks in one matrix: per chunk the reduction and the next gather, in one launch, under the next
    chunk's ``dH``; the last reduction runs under ``dW``.
    """
    comm, logits, num_stored, device = spec.comm, spec.logits, spec.num_stored, weight.device
    bound = _bound(spec, tokens, saved, upstream) if weight.dtype == torch.float16 else None
    upstream, inv_scale = _scaled(spec, upstream, saved.targets.inv_temperature, weight, bound)
    matrix, at_once = saved.matrix, saved.matrix is not None and grad_weight is not None
    chunks = tokens.chunks[::-1]
    # X is read by dW, and by P where that is made again.
    read = [c for c in chunks if grad_weight is not None or (with_hidden and c.index >= num_stored)]
    hidden_states = HiddenStates(tokens, comm, hidden, read, None if at_once else 2, saved.last_hidden)
    grad_hidden = None
    if with_hidden:
        grad_hidden = GradHidden(tokens, comm, weight, inv_scale, depth=2 if at_once else 1)
    ring = Ring(tokens, weight, len(weight), dtype=logits.logits_dtype)  # of P
    out = ring if logits.logits_dtype is None else Ring(tokens, weight, len(weight))  # of G
    for chunk, entry in zip(chunks, reversed(saved.chunks), strict=True):
        x = None
        if not at_once:
            x = hidden_states.take() if chunk in read else None
            if hidden_states.start():
                comm.delay_next_gemm(device)
        split = partial(tokens.split, chunk=chunk)
        targets = saved.targets.of_chunk(chunk, split)._replace(labels=entry.labels)  # type: ignore[arg-type]
        chunk_upstream = upstream.map(split)
        with phase("grad-logits"):
            if chunk.index < num_stored:
                if matrix is not None:
                    entry = entry._replace(matrix=tokens.of_all(matrix, chunk))
                room = None if logits.saves_e else out.slot(0, chunk)
                grad = logits.grad_from_saved(entry, targets, chunk_upstream, room)
            else:
                assert x is not None and entry.stats is not None
                p, room = ring.slot(0, chunk), out.slot(0, chunk)
                grad = logits.grad_recomputed(x, weight, targets, entry.stats, chunk_upstream, p, room)
        if not at_once:
            _differentiate(spec, chunk, x, grad, hidden_states, grad_hidden, grad_weight)
            continue
        with comm.coalesced(device):
            if grad_hidden is not None:
                grad_hidden.add(chunk, grad)
            hidden_states.start()
        x = hidden_states.take()
        assert grad.row_scale is not None
        with phase("grad-weight"):
            logits.scale_rows(x, grad.row_scale, hidden_states.scaled(chunk), grad.upstream)
    if grad_weight is not None and matrix is not None and hidden_states.all_tokens is not None:
        with phase("grad-weight"):
            grad_weight.add(matrix, hidden_states.all_tokens)
    rows, scale, factor = (None,) * 3 if grad_hidden is None else grad_hidden.reduced()
    if rows is not None and scale is not None:
        with phase("grad-hidden"):
            logits.scale_rows(rows, scale, rows, factor)
    if grad_weight is None:
        return rows, None
    with phase("grad-weight"):
        return rows, grad_weight.close(inv_scale)


def _differentiate(
    spec: Spec,
    chunk: Chunk,
    x: Tensor | None,  # [C, H], taken from hidden_states; not read without grad_weight
    grad: LogitsGrad,  # G
    hidden_states: HiddenStates,
    grad_hidden: GradHidden | None,
    grad_weight: GradWeight | None,
) -> None:
    """Make ``dH`` and ``dW`` of a chunk. Collectives: the reduction of ``dH``, under ``dW``."""
    if grad_hidden is not None:
        grad_hidden.add(chunk, grad)
    if grad.row_scale is None:  # else the scaling of X gives the reduction its time
        spec.comm.delay_next_gemm(grad.matrix.device)
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
    verdict: Verdict,
    with_hidden: bool,
    grad_weight: Accumulator | None,
) -> Gradients | None:
    """Multiply the gradients made in the forward by the verdict's scale; None if these cannot be used.

    They cannot if the promise was broken, or if an upstream gradient is not finite. Then nothing has been
    added to ``grad_weight``, and ``made`` is spoilt. The host reads the verdict after the launches, so that
    the device has work while the host wakes up.

    Collectives: none.
    """
    grad_hidden, scale = made.grad_hidden if with_hidden else None, verdict.scale
    assert scale is not None
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
    bound: Tensor | float | None,  # [] or [parts, n] fp32: gradients may be this many times larger
) -> tuple[Upstream, Tensor | None]:
    """Return ``upstream * logit_scale / temperature``, and None. For fp16 the gradients are multiplied by a
    power of two, too, and its inverse is the second result."""
    if spec.logits.logit_scale != 1.0:
        upstream = upstream.scaled(spec.logits.logit_scale)
    if inv_temperature is not None:
        upstream = upstream.scaled(inv_temperature)
    if weight.dtype != torch.float16:
        return upstream, None
    scale, inv_scale = scale_for_fp16(upstream.sizes, weight, bound)
    return upstream.scaled(scale), inv_scale


def _bound(spec: Spec, tokens: Tokens, saved: Saved, upstream: Upstream) -> Tensor | None:
    """Upper bound of each token's gradients for an upstream gradient of 1, ``[parts, n]``; None for 1."""
    given = {name for name, _ in upstream.beside} | ({"loss"} if upstream.of_loss else set())
    if not given & spec.logits.outputs.unbounded.keys():
        return None
    bound = torch.ones_like(upstream.loss)
    for chunk, entry in zip(tokens.chunks, saved.chunks, strict=True):
        chunk_targets = saved.targets.of_chunk(chunk, partial(tokens.split, chunk=chunk))
        found = spec.logits.bound_of(entry, chunk_targets, given)
        if found is not None:
            bound[:, chunk.start : chunk.stop] = found.view(len(bound), -1)
    return bound
