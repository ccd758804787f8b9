"""The loops over chunks, forward and backward: hidden -> loss -> gradients.

A strategy decides when the gradients are made and what of a chunk's logits outlives the forward:

=============  ========================================  ========  ======================================
strategy       between forward and backward              products  upstream gradient it is exact for
=============  ========================================  ========  ======================================
``store``      every chunk's logits                      3         any
``recompute``  three floats a token                      4         any
mixed          the logits of the first chunks            3 to 4    any
``grad_in_forward``      ``grad_hidden`` and fp32 ``grad_weight``  3         a scalar times the token weights
=============  ========================================  ========  ======================================

The first three are one class. How logits become statistics and gradients is :mod:`.logits_backend`'s, what
runs beside what :mod:`.pipeline`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce import logits_backend, upstream_guard
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.grad_weight import HeldGradWeight
from megatron_fused_ce.logits_backend import ChunkInputs, Scores
from megatron_fused_ce.loss_form import SoftTargets
from megatron_fused_ce.pipeline import Head, Products, Rooms, Tokens, let_in
from megatron_fused_ce.row_ops import Merged, TokenTerms
from megatron_fused_ce.token_outputs import TokenOutputs, Upstream
from megatron_fused_ce.vocab_parallel import Merge


class Targets(NamedTuple):
    """What the tokens are to become."""

    labels: Tensor  # [parts, n] int64, columns of this shard
    soft: SoftTargets | None = None  # [k, parts, n] each; in the labels' place


class Needs(NamedTuple):
    """Which gradients the backward will be asked for."""

    grad_hidden: bool
    grad_weight: bool


class KeptChunk(NamedTuple):
    """What of a chunk waits for the backward: ``[C, V]``, and its seal (see :mod:`.logits_backend`)."""

    matrix: Tensor
    seal: Tensor | None


class MadeGradients(NamedTuple):
    """Gradients made in the forward, for an upstream gradient equal to the token weights."""

    token_weights: Tensor  # [parts, n] fp32
    grad_hidden: Tensor | None  # [n, H]
    #: [n] fp32 that ``grad_hidden`` still has to be multiplied by, None for 1
    row_factor: Tensor | None
    grad_weight: Tensor | None  # [V, H] fp32


@dataclass
class Forward:
    """What a forward pass leaves; ``parts`` is ``R`` with sequence parallelism, else 1."""

    outputs: TokenOutputs  # [parts, n] each
    terms: Tensor  # [form.kept_terms, parts, n] fp32: row_ops.TokenTerms of every token
    row_max: Tensor | None  # [parts, n] fp32, this shard's largest logit, with argmax only
    argmax: Tensor | None  # [parts, n] int64, its column in this shard
    kept: list[KeptChunk] = field(default_factory=list)
    #: [C, H]: hidden states of the last chunk, where they were gathered and the backward begins with them
    last_tokens: Tensor | None = None
    gradients: MadeGradients | None = None

    def kept_tensors(self) -> list[Tensor | None]:
        """``last_tokens``, then matrix and seal of each kept chunk."""
        return [self.last_tokens, *(tensor for chunk in self.kept for tensor in chunk)]

    @staticmethod
    def empty(head: Head, targets: Targets) -> Forward:
        labels = targets.labels
        loss = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
        dtypes = {"predicted": torch.int64, "correct": torch.bool}
        asked = {name: torch.empty_like(loss, dtype=dtypes.get(name)) for name in head.form.outputs}
        return Forward(
            TokenOutputs(loss, **asked),
            loss.new_empty((len(head.form.kept_terms), *labels.shape)),
            torch.empty_like(loss) if head.with_argmax else None,
            torch.empty_like(labels) if head.with_argmax else None,
        )


class Waiting(NamedTuple):
    """What of a :class:`Forward` its backward is given."""

    terms: Tensor  # [form.kept_terms, parts, n] fp32
    kept: list[KeptChunk]
    last_tokens: Tensor | None  # [C, H]
    gradients: MadeGradients | None  # None too for a second backward


class Strategy(Protocol):
    """Both loops."""

    @property
    def name(self) -> str: ...

    def forward(
        self,
        head: Head,
        hidden: Tensor,  # [n, H], this rank's tokens
        weight: Tensor,  # [V, H]
        targets: Targets,
        needs: Needs,
    ) -> Forward:
        """Loss of every token, chunk by chunk.

        Collectives, in order (see :class:`.VocabParallel` for each): the sampled rows of the weight, where
        the logits backend wants them; the gathers of the first two chunks' hidden states (sequence
        parallelism); then what the strategy says for each chunk.
        """

    def backward(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        waited: Waiting,
        upstream: Upstream,  # [parts, n] fp32
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None]:
        """``grad_hidden`` of this rank's tokens and what autograd gets for the weight."""


@dataclass
class _Scored:
    """A chunk between its product and the end of its merge."""

    chunk: Chunk
    inputs: ChunkInputs
    scores: Scores
    matrix: Tensor | None  # [C, V]: its logits, or E, where they outlive the product
    merge: Merge | None = None
    merged: Merged | None = None

    def start_merge(self, head: Head) -> None:
        stats = self.scores.stats
        if "predicted" in head.form.outputs:
            assert stats.argmax is not None
            best = (stats.argmax + head.vocab_start).float()
            stats = stats._replace(further=stats.further._replace(best=best))
        self.merge = head.comm.start_merge(stats, head.logits.token_ops)
        head.phases.moved("merge", head.comm.merge_bytes(stats))

    def finish_merge(self, out: Forward) -> Merged:
        """Its loss and terms go to their places in ``out``; once."""
        if self.merged is not None:
            return self.merged
        assert self.merge is not None
        self.merged = merged = self.merge.finish()
        chunk, stats, form = self.chunk, self.scores.stats, self.inputs.form
        columns = slice(chunk.start, chunk.stop)
        shape = (out.terms.shape[1], chunk.num_tokens)
        for whole, made in zip(out.outputs, form.finish(merged), strict=True):
            if whole is not None and made is not None:
                whole[:, columns] = made.view(shape)
        kept = merged.terms[: len(out.terms)]
        out.terms[: len(kept), :, columns] = kept.view(-1, *shape)
        if form.soft:
            assert merged.further.target_mass is not None
            out.terms[form.kept_terms.index("mass"), :, columns] = merged.further.target_mass.view(
                shape
            )
        if out.row_max is not None and out.argmax is not None:
            assert stats.argmax is not None
            out.row_max[:, columns] = stats.row_max.view(shape)
            out.argmax[:, columns] = stats.argmax.view(shape)
        return merged


@dataclass(frozen=True)
class KeepOrRecompute:
    """Keeps the logits of the first ``stored_chunks`` chunks (None: of all), makes the others again."""

    name: str
    stored_chunks: int | None

    def _keeps(self, chunk: Chunk) -> bool:
        return self.stored_chunks is None or chunk.index < self.stored_chunks

    def forward(
        self, head: Head, hidden: Tensor, weight: Tensor, targets: Targets, needs: Needs
    ) -> Forward:
        """Collectives per chunk: its merge and the gather of the next chunk but one, in one launch. What is
        left of a merge comes after the next chunk's product.
        """
        out = Forward.empty(head, targets)
        rooms = Rooms(head, hidden, weight.shape[0])
        tokens = Tokens(head, hidden, head.chunks, depth=2)
        sample = head.begin(weight, tokens)
        waiting: deque[_Scored] = deque()
        lag = 1 if head.comm.size > 1 else 0

        def finish(one: _Scored) -> None:
            with head.phases("merge"):
                merged = one.finish_merge(out)
            if self._keeps(one.chunk):
                assert one.matrix is not None
                with head.phases("statistics"):
                    seal = head.logits.seal(one.matrix, one.inputs, one.scores, merged)
                out.kept.append(KeptChunk(one.matrix, seal))

        for chunk in head.chunks:
            inputs = _inputs(head, chunk, tokens.take(chunk), weight, targets, sample)
            matrix = None
            if self._keeps(chunk):
                matrix = hidden.new_empty(inputs.labels.shape[0], weight.shape[0])
            elif head.logits.scores_in_memory:
                matrix = rooms.logits(chunk)
            with head.phases("logits"):
                statistics = head.logits.multiply(inputs, matrix, head.needs_argmax)
            with head.phases("statistics"):
                scores = statistics()
            if not self._keeps(chunk):
                scores = scores._replace(tiles=None)  # only a seal reads them
            scored = _Scored(chunk, inputs, scores, matrix)
            with head.comm.together(hidden.device):
                scored.start_merge(head)
                tokens.start()
            waiting.append(scored)
            del statistics, scores, scored  # tile statistics must not outlive their chunk
            if len(waiting) > lag:
                finish(waiting.popleft())
        while waiting:
            finish(waiting.popleft())
        if head.chunks and self._reads_tokens(head.chunks[-1], needs):
            out.last_tokens = tokens.last()
        return out

    def _reads_tokens(self, chunk: Chunk, needs: Needs) -> bool:
        """Whether the backward needs the chunk's hidden states."""
        return needs.grad_weight or (needs.grad_hidden and not self._keeps(chunk))

    def backward(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        waited: Waiting,
        upstream: Upstream,
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The last chunk first: its hidden states are there.

        Collectives, in order: per chunk the gather of the next chunk's hidden states that are needed
        (sequence parallelism), under its first product, and the reduction of its ``grad_hidden``, under its
        ``grad_weight``.
        """
        upstream, inv_scale = _scaled(upstream, head.logit_scale, weight)
        accumulator = None
        if needs.grad_weight:
            accumulator = head.open_grad_weight(weight, len(head.chunks), inv_scale is not None)
        chunks = head.chunks[::-1]
        read = [chunk for chunk in chunks if self._reads_tokens(chunk, needs)]
        tokens = Tokens(head, hidden, read, depth=2, first=waited.last_tokens)
        rooms = Rooms(head, hidden, weight.shape[0])
        products = Products(
            head, hidden, weight, needs.grad_hidden, accumulator, inv_scale, rooms, tokens
        )
        kept = list(waited.kept)
        for chunk in chunks:
            taken = tokens.take(chunk) if self._reads_tokens(chunk, needs) else None
            if tokens.start():
                let_in(head, hidden.device)
            inputs = _inputs(head, chunk, taken, weight, targets)
            kept_terms = head.split(waited.terms, chunk)
            terms = TokenTerms(**dict(zip(head.form.kept_terms, kept_terms, strict=True)))
            of_chunk = upstream.map(partial(head.split, chunk=chunk))
            with head.phases("grad-logits"):
                if self._keeps(chunk):
                    chunk_kept = kept.pop()
                    room = None if head.logits.reads_kept else rooms.logits(chunk)
                    operand = head.logits.operand_of_kept(
                        *chunk_kept, inputs, terms, of_chunk, room
                    )
                else:
                    room = rooms.logits(chunk)
                    operand = head.logits.operand_again(inputs, terms, of_chunk, room)
            products.add_hidden(chunk, operand)
            if operand.factor is None:
                let_in(head, hidden.device)
            products.add_weight(chunk, operand, taken)
        grad_hidden, row_factor = products.finish()
        if grad_hidden is not None and row_factor is not None:
            with head.phases("grad-hidden"):
                logits_backend.scale_rows(grad_hidden, row_factor, out=grad_hidden)
        if accumulator is None:
            return grad_hidden, None
        with head.phases("grad-weight"):
            return grad_hidden, accumulator.close(inv_scale)


class GradInForward:
    """Makes the gradients in the forward, for the token weights that are known there.

    The backward multiplies them by the one scalar that the upstream gradient then is; whether it is one
    is checked on the device (:mod:`.upstream_guard`). Gradients are used up by the first backward.
    """

    name = "grad_in_forward"

    def forward(
        self, head: Head, hidden: Tensor, weight: Tensor, targets: Targets, needs: Needs
    ) -> Forward:
        """Over several ranks a chunk's gradients are made after the next chunk's product.

        Collectives per chunk, in order: the gather of the next chunk's hidden states; the first step of its
        merge (of the first chunk in one launch with the gather of the third's hidden states); what is left of
        the merge of the chunk before and the reduction of that one's ``grad_hidden``.
        """
        assert head.token_weights is not None
        head.guard.prepare(hidden.device)
        token_weights = normalised(head.token_weights, head.logit_scale, hidden.dtype)
        upstream = Upstream(token_weights)
        upstream, inv_scale = _scaled(upstream, head.logit_scale, weight)
        out = Forward.empty(head, targets)
        held = HeldGradWeight(weight) if needs.grad_weight else None
        lag = 1 if head.comm.size > 1 else 0
        rooms = Rooms(head, hidden, weight.shape[0], depth=lag + 1)
        tokens = Tokens(head, hidden, head.chunks, depth=lag + 2)
        products = Products(head, hidden, weight, needs.grad_hidden, held, inv_scale, rooms, tokens)
        sample = head.begin(weight, tokens)
        waiting: deque[_Scored] = deque()

        def make_gradients(one: _Scored) -> None:
            with head.phases("merge"):
                merged = one.finish_merge(out)
            assert one.matrix is not None
            terms = head.form.terms(merged)
            of_chunk = upstream.map(partial(head.split, chunk=one.chunk))
            with head.phases("grad-logits"):
                seal = head.logits.seal(one.matrix, one.inputs, one.scores, merged)
                operand = head.logits.operand_of_kept(
                    one.matrix, seal, one.inputs, terms, of_chunk, one.matrix
                )
            products.add_hidden(one.chunk, operand)
            if operand.factor is None:
                let_in(head, hidden.device)
            products.add_weight(one.chunk, operand, one.inputs.tokens)

        for chunk in head.chunks:
            inputs = _inputs(head, chunk, tokens.take(chunk), weight, targets, sample)
            if chunk.index > 1:
                tokens.start()
            logits = rooms.logits(chunk)
            with head.phases("logits"):
                statistics = head.logits.multiply(inputs, logits, head.needs_argmax)
            with head.phases("statistics"):
                scored = _Scored(chunk, inputs, statistics(), logits)
            with head.comm.together(hidden.device):
                scored.start_merge(head)
                if chunk.index == 0:
                    tokens.start()
            waiting.append(scored)
            del statistics, scored
            if len(waiting) > lag:
                make_gradients(waiting.popleft())
        while waiting:
            make_gradients(waiting.popleft())
        grad_hidden, row_factor = products.finish()
        with head.phases("grad-weight"):
            total = None if held is None else held.total(inv_scale)
        out.gradients = MadeGradients(token_weights, grad_hidden, row_factor, total)
        return out

    def backward(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        waited: Waiting,
        upstream: Upstream,
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Scales what the forward made. Collectives: none."""
        gradients = waited.gradients
        if gradients is None:
            raise RuntimeError(
                "backward ran twice through an grad_in_forward head, whose gradients the first one used up; "
                "use strategy 'recompute' or 'store' with retain_graph=True"
            )
        scale, mismatch = upstream_guard.fit(upstream.loss, gradients.token_weights)
        head.guard.watch(mismatch)
        grad_hidden = None
        if needs.grad_hidden and gradients.grad_hidden is not None:
            grad_hidden = gradients.grad_hidden
            row_factor = gradients.row_factor
            with head.phases("grad-hidden"):
                if row_factor is not None:
                    logits_backend.scale_rows(grad_hidden, row_factor * scale, out=grad_hidden)
                elif grad_hidden.is_cuda:
                    # mul_ would round a scalar that lives on the device to grad_hidden's dtype first.
                    rows = scale.expand(grad_hidden.shape[0]).contiguous()
                    logits_backend.scale_rows(grad_hidden, rows, out=grad_hidden)
                else:
                    grad_hidden.mul_(scale)
        if not needs.grad_weight or gradients.grad_weight is None:
            return grad_hidden, None
        with head.phases("grad-weight"):
            accumulator = head.open_grad_weight(weight, 1, False)
            accumulator.add_total(gradients.grad_weight, scale)
            return grad_hidden, accumulator.close(None)


RECOMPUTE = KeepOrRecompute("recompute", 0)
STORE = KeepOrRecompute("store", None)
GRAD_IN_FORWARD = GradInForward()


def strategy_of(name: str, stored_chunks: int) -> Strategy:
    """The strategy of a plan: ``store``, ``recompute``, ``grad_in_forward``, or ``mixed`` with a number."""
    fixed: dict[str, Strategy] = {
        "store": STORE,
        "recompute": RECOMPUTE,
        "grad_in_forward": GRAD_IN_FORWARD,
    }
    return fixed.get(name) or KeepOrRecompute(name, stored_chunks)


def _inputs(
    head: Head,
    chunk: Chunk,
    tokens: Tensor | None,  # [C, H]
    weight: Tensor,  # [V, H]
    targets: Targets,
    sample: Tensor | None = None,
) -> ChunkInputs:
    labels, soft = head.split(targets.labels, chunk), None
    if targets.soft is not None:
        soft = SoftTargets(*(head.split(part, chunk).contiguous() for part in targets.soft))
    return ChunkInputs(tokens, weight, labels, head.logit_scale, sample, head.form, soft)


def _scaled(
    upstream: Upstream, logit_scale: float, weight: Tensor
) -> tuple[Upstream, Tensor | None]:
    """``upstream * logit_scale``, for fp16 times a power of two whose inverse comes second."""
    upstream = upstream.scaled(logit_scale)
    if weight.dtype != torch.float16:
        return upstream, None
    scale, inv_scale = fp16_scale(upstream.gradients, weight)
    return upstream.scaled(scale), inv_scale


#: fp16 gradients of logits are written as ``2**FP16_HEADROOM_BITS`` times their share of the largest
#: upstream gradient: 2.3e-10 is then the smallest probability that does not vanish.
FP16_HEADROOM_BITS = 8
#: And less where entries of the weight reach ``2**FP16_WEIGHT_BITS`` or more: a row of gradients sums up to
#: twice its upstream in absolute value (four times that with the outputs beside the loss and their like), and
#: ``2 * 4 * 2**(8 + 4)`` is half of what fp16 holds.
FP16_WEIGHT_BITS = 4
#: ``grad_in_forward`` keeps fp16's ``grad_hidden`` for upstream gradients of up to ``2**FP16_WAITING_BITS``:
#: as far from what vanishes (2**-24, before the loss scale comes) as weights of up to 2**8 allow.
FP16_WAITING_BITS = 4


def fp16_scale(gradients: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two that brings the largest entry of any near ``2**8``, and its inverse (fp32 []).

    Less near for a large ``weight`` ``[V, H]``, so that the product with it stays finite. Computed on the
    device, so the host never waits. 1 where there is nothing finite to scale by.
    """
    largest = gradients[0].new_zeros(())
    for factor in gradients:
        if factor.numel():
            largest = torch.maximum(largest, factor.abs().amax())
    _, of_weight = torch.frexp(torch.stack(weight.detach().aminmax()).float().abs().amax())
    headroom = FP16_HEADROOM_BITS - (of_weight - FP16_WEIGHT_BITS).clamp(0, 16)
    shift = _shift_to(headroom, largest)
    one = torch.ones_like(largest)
    return torch.ldexp(one, shift), torch.ldexp(one, -shift)


def normalised(token_weights: Tensor, logit_scale: float, dtype: torch.dtype) -> Tensor:
    """Times a power of two that brings the largest, times ``logit_scale``, near a common size.

    ``grad_in_forward`` makes gradients for them in the forward and multiplies by a scalar in the backward:
    what ``dtype`` cannot hold in between would be lost. The same on every rank.
    """
    if not token_weights.numel():
        return token_weights
    bits = FP16_WAITING_BITS if dtype == torch.float16 else 0
    return torch.ldexp(
        token_weights, _shift_to(bits, token_weights.abs().amax() * abs(logit_scale))
    )


def _shift_to(bits: int | Tensor, largest: Tensor) -> Tensor:
    """The ``n`` with ``2**(bits - 1) <= largest * 2**n < 2**bits``, 0 for none."""
    _, exponent = torch.frexp(largest)
    shift = (bits - exponent).clamp(-100, 100)
    return torch.where(torch.isfinite(largest) & (largest > 0), shift, 0)
