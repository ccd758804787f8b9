"""The loops over chunks, forward and backward: hidden -> loss -> gradients.

A strategy decides when the gradients are made and what of a chunk's logits outlives the forward:

=============  ========================================  ========  ======================================
strategy       between forward and backward              products  upstream gradient it is exact for
=============  ========================================  ========  ======================================
``store``      every chunk's logits                      3         any
``recompute``  three floats a token                      4         any
mixed          the logits of the first chunks            3 to 4    any
``eager``      ``grad_hidden`` and fp32 ``grad_weight``  3         a scalar times the token weights
=============  ========================================  ========  ======================================

The first three are one class. How logits become statistics and gradients is :mod:`.logit_pass`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce import logit_pass, upstream_guard
from megatron_fused_ce.chunking import Chunk
from megatron_fused_ce.grad_weight import (
    GradWeight,
    HeldGradWeight,
    OpenGradWeight,
    has_wide_product,
    wide_product,
)
from megatron_fused_ce.logit_pass import ChunkInputs, LogitPass, Operand, Scores
from megatron_fused_ce.row_ops import TokenTerms
from megatron_fused_ce.vocab_parallel import DONE, VocabParallel


@dataclass(frozen=True)
class Head:
    """What one call of the head fixes, beside its tensors."""

    comm: VocabParallel
    chunks: tuple[Chunk, ...]
    logit_scale: float
    logits: LogitPass
    with_argmax: bool
    open_grad_weight: OpenGradWeight
    token_weights: Tensor | None = None  # [parts, n] fp32

    @property
    def chunk_capacity(self) -> int:
        """Tokens of the largest chunk over the tensor-parallel group."""
        return self.comm.num_parts * max((chunk.num_tokens for chunk in self.chunks), default=0)

    def split(self, per_token: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's entries ``[..., C]`` of a tensor ``[..., parts, n]``, rank after rank."""
        return per_token[..., chunk.start : chunk.stop].flatten(-2)

    def inputs(
        self,
        chunk: Chunk,
        hidden: Tensor | None,  # [n, H], this rank's tokens; None where they are not needed
        weight: Tensor,  # [V, H]
        labels: Tensor,  # [parts, n] int64
    ) -> ChunkInputs:
        """The chunk's operands. Collectives: the gather of its hidden states (sequence parallelism)."""
        tokens = None
        if hidden is not None:
            tokens = self.comm.gather_hidden(hidden[chunk.start : chunk.stop])
        return ChunkInputs(tokens, weight, self.split(labels, chunk), self.logit_scale)


class Needs(NamedTuple):
    """Which gradients the backward will be asked for."""

    grad_hidden: bool
    grad_weight: bool


class KeptChunk(NamedTuple):
    """What of a chunk waits for the backward: ``[C, V]``, and its seal (see :mod:`.logit_pass`)."""

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

    loss: Tensor  # [parts, n] fp32
    terms: Tensor  # [3, parts, n] fp32: row_ops.TokenTerms of every token
    row_max: Tensor | None  # [parts, n] fp32, this shard's largest logit, with argmax only
    argmax: Tensor | None  # [parts, n] int64, its column in this shard
    kept: list[KeptChunk] = field(default_factory=list)
    gradients: MadeGradients | None = None

    @staticmethod
    def empty(head: Head, labels: Tensor) -> Forward:
        loss = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
        return Forward(
            loss,
            loss.new_empty((3, *labels.shape)),
            torch.empty_like(loss) if head.with_argmax else None,
            torch.empty_like(labels) if head.with_argmax else None,
        )


class Waiting(NamedTuple):
    """What of a :class:`Forward` its backward is given."""

    terms: Tensor  # [3, parts, n] fp32
    kept: list[KeptChunk]
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
        labels: Tensor,  # [parts, n] int64, columns of this shard
        needs: Needs,
    ) -> Forward:
        """Loss of every token, chunk by chunk.

        Per chunk: gather of hidden states (sequence parallelism), product and row statistics, merge
        over the group (see :class:`VocabParallel` for each one's collectives).
        """

    def backward(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        waited: Waiting,
        grad_loss: Tensor,  # [parts, n] fp32
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None]:
        """``grad_hidden`` of this rank's tokens and what autograd gets for the weight."""


@dataclass(frozen=True)
class KeepOrRecompute:
    """Keeps the logits of the first ``stored_chunks`` chunks (None: of all), makes the others again."""

    name: str
    stored_chunks: int | None

    def _keeps(self, chunk: Chunk) -> bool:
        return self.stored_chunks is None or chunk.index < self.stored_chunks

    def forward(
        self, head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, needs: Needs
    ) -> Forward:
        out = Forward.empty(head, labels)
        scratch = _Scratch(head, hidden, weight.shape[0])
        for chunk in head.chunks:
            inputs = head.inputs(chunk, hidden, weight, labels)
            keeps, kept = self._keeps(chunk), None
            if keeps:
                kept = hidden.new_empty(inputs.labels.shape[0], weight.shape[0])
            elif head.logits.scores_in_memory:
                kept = scratch.logits(chunk)
            scores, terms = _score(head, out, chunk, inputs, kept)
            if keeps:
                assert kept is not None
                seal = head.logits.seal(kept, inputs, scores, terms)
                out.kept.append(KeptChunk(kept, seal))
            del scores  # its tile statistics must not live beside the next chunk's
        return out

    def backward(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        waited: Waiting,
        grad_loss: Tensor,
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Per chunk: gather of hidden states where they are needed, gradients of the logits, the two
        products. The reduction of a chunk's ``grad_hidden`` runs under its ``grad_weight`` product
        and is waited for one chunk later.
        """
        factor, inv_scale = _row_factor(grad_loss, head.logit_scale, hidden.dtype)
        end_point = None
        if needs.grad_weight:
            end_point = head.open_grad_weight(weight, len(head.chunks), inv_scale is not None)
        scratch = _Scratch(head, hidden, weight.shape[0])
        products = _Products(head, hidden, weight, needs.grad_hidden, end_point, inv_scale, scratch)
        kept = iter(waited.kept)
        for chunk in head.chunks:
            gathers = needs.grad_weight or not self._keeps(chunk)
            inputs = head.inputs(chunk, hidden if gathers else None, weight, labels)
            terms = TokenTerms(*head.split(waited.terms, chunk))
            chunk_factor = head.split(factor, chunk)
            if self._keeps(chunk):
                chunk_kept = next(kept)
                room = None if head.logits.reads_kept else scratch.logits(chunk)
                operand = head.logits.operand_of_kept(
                    *chunk_kept, inputs, terms, chunk_factor, room
                )
            else:
                room = scratch.logits(chunk)
                operand = head.logits.operand_again(inputs, terms, chunk_factor, room)
            products.add(chunk, operand, inputs.tokens)
        grad_hidden = products.finish()
        return grad_hidden, None if end_point is None else end_point.close(inv_scale)


class Eager:
    """Makes the gradients in the forward, for the token weights that are known there.

    The backward multiplies them by the one scalar that the upstream gradient then is; whether it is one
    is checked on the device (:mod:`.upstream_guard`). Gradients are used up by the first backward.
    """

    name = "eager"

    def forward(
        self, head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, needs: Needs
    ) -> Forward:
        assert head.token_weights is not None
        upstream_guard.prepare(hidden.device)
        factor, inv_scale = _row_factor(head.token_weights, head.logit_scale, hidden.dtype)
        out = Forward.empty(head, labels)
        held = HeldGradWeight(weight) if needs.grad_weight else None
        scratch = _Scratch(head, hidden, weight.shape[0])
        products = _Products(
            head, hidden, weight, needs.grad_hidden, held, inv_scale, scratch, eager=True
        )
        for chunk in head.chunks:
            inputs = head.inputs(chunk, hidden, weight, labels)
            logits = scratch.logits(chunk)
            scores, terms = _score(head, out, chunk, inputs, logits)
            seal = head.logits.seal(logits, inputs, scores, terms)
            del scores
            chunk_factor = head.split(factor, chunk)
            operand = head.logits.operand_of_kept(logits, seal, inputs, terms, chunk_factor, logits)
            products.add(chunk, operand, inputs.tokens)
        grad_hidden = products.finish()
        total = None if held is None else held.total(inv_scale)
        out.gradients = MadeGradients(head.token_weights, grad_hidden, products.row_factor, total)
        return out

    def backward(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        waited: Waiting,
        grad_loss: Tensor,
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Scales what the forward made. Collectives: none."""
        gradients = waited.gradients
        if gradients is None:
            raise RuntimeError(
                "backward ran twice through an eager head, whose gradients the first one used up; "
                "use strategy 'recompute' or 'store' with retain_graph=True"
            )
        scale, mismatch = upstream_guard.fit(grad_loss, gradients.token_weights)
        upstream_guard.watch(mismatch)
        grad_hidden = None
        if needs.grad_hidden and gradients.grad_hidden is not None:
            grad_hidden = gradients.grad_hidden
            row_factor = gradients.row_factor
            if row_factor is not None:
                logit_pass.scale_rows(grad_hidden, row_factor * scale, out=grad_hidden)
            elif grad_hidden.is_cuda:
                # mul_ would round a scalar that lives on the device to grad_hidden's dtype first.
                rows = scale.expand(grad_hidden.shape[0]).contiguous()
                logit_pass.scale_rows(grad_hidden, rows, out=grad_hidden)
            else:
                grad_hidden.mul_(scale)
        if not needs.grad_weight or gradients.grad_weight is None:
            return grad_hidden, None
        end_point = head.open_grad_weight(weight, 1, False)
        end_point.add_total(gradients.grad_weight, scale)
        return grad_hidden, end_point.close(None)


RECOMPUTE = KeepOrRecompute("recompute", 0)
STORE = KeepOrRecompute("store", None)
EAGER = Eager()


def strategy_of(name: str, stored_chunks: int) -> Strategy:
    """The strategy of a plan: ``store``, ``recompute``, ``eager``, or ``mixed`` with a number."""
    fixed: dict[str, Strategy] = {"store": STORE, "recompute": RECOMPUTE, "eager": EAGER}
    return fixed.get(name) or KeepOrRecompute(name, stored_chunks)


def _score(
    head: Head,
    out: Forward,
    chunk: Chunk,
    inputs: ChunkInputs,
    kept: Tensor | None,  # [C, V]
) -> tuple[Scores, TokenTerms]:
    """Product, statistics and merge of one chunk; its loss and terms go to their places in ``out``."""
    scores = head.logits.score(inputs, kept, head.with_argmax)
    loss, terms = head.comm.merge(
        scores.stats, inputs.labels, inputs.weight.shape[0], head.logits.token_ops
    )
    part = (slice(None), slice(chunk.start, chunk.stop))
    shape = (out.loss.shape[0], chunk.num_tokens)
    out.loss[part] = loss.view(shape)
    out.terms[:, :, chunk.start : chunk.stop] = terms.view(3, *shape)
    if out.row_max is not None and out.argmax is not None:
        assert scores.stats.argmax is not None
        out.row_max[part] = scores.stats.row_max.view(shape)
        out.argmax[part] = scores.stats.argmax.view(shape)
    return scores, TokenTerms(*terms)


class _Scratch:
    """Buffers that all chunks of a pass share, allocated when first asked for."""

    def __init__(self, head: Head, hidden: Tensor, num_rows: int) -> None:
        self._head = head
        self._hidden = hidden
        self._num_rows = num_rows
        self._logits: Tensor | None = None
        self._tokens: Tensor | None = None
        self._wide: Tensor | None = None

    def logits(self, chunk: Chunk) -> Tensor:
        """``[C, V]`` in the hidden states' dtype."""
        if self._logits is None:
            self._logits = self._hidden.new_empty(self._head.chunk_capacity, self._num_rows)
        return self._logits[: self._head.comm.num_parts * chunk.num_tokens]

    def tokens(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` in the hidden states' dtype."""
        if self._tokens is None:
            self._tokens = self._hidden.new_empty(self._head.chunk_capacity, self._hidden.shape[1])
        return self._tokens[: self._head.comm.num_parts * chunk.num_tokens]

    def wide(self, chunk: Chunk) -> Tensor:
        """``[C, H]`` in fp32."""
        if self._wide is None:
            self._wide = torch.empty(
                (self._head.chunk_capacity, self._hidden.shape[1]),
                dtype=torch.float32,
                device=self._hidden.device,
            )
        return self._wide[: self._head.comm.num_parts * chunk.num_tokens]


class _Sink(Protocol):
    """Takes a chunk's addend to ``grad_weight``."""

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None: ...


class _Products:
    """The two products of every chunk, and the reduction of ``grad_hidden`` under the second.

    ``eager`` rounds ``grad_hidden`` once more than the others, when its backward scales it. So that the
    whole stays below the error of three roundings, its rows' factor waits for the backward too
    (``row_factor``); over several ranks, whose factors differ, the product goes through fp32 instead.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        wants_grad_hidden: bool,
        grad_weight: GradWeight | _Sink | None,
        inv_scale: Tensor | None,
        scratch: _Scratch,
        eager: bool = False,
    ) -> None:
        self._head = head
        self._weight = weight
        self._grad_hidden = torch.empty_like(hidden) if wants_grad_hidden else None
        self._grad_weight = grad_weight
        self._inv_scale = inv_scale
        self._scratch = scratch
        self._waits = eager and head.comm.size == 1
        self._widens = eager and head.comm.size > 1
        self._pending = DONE
        self.row_factor: Tensor | None = None  # [n] fp32

    def add(self, chunk: Chunk, operand: Operand, tokens: Tensor | None) -> None:
        """``tokens`` ``[C, H]`` are needed where ``grad_weight`` is."""
        matrix, factor = operand
        if self._grad_hidden is not None:
            out = self._grad_hidden[chunk.start : chunk.stop]
            partial = out
            if self._head.comm.num_parts > 1:
                partial = out.new_empty(matrix.shape[0], out.shape[-1])
            if factor is None:
                torch.mm(matrix, self._weight, out=partial)
            elif self._waits:
                torch.mm(matrix, self._weight, out=partial)
                if self.row_factor is None:
                    self.row_factor = factor.new_empty(self._grad_hidden.shape[0])
                self.row_factor[chunk.start : chunk.stop] = factor
            elif self._widens and has_wide_product(matrix):
                wide = wide_product(matrix, self._weight, self._scratch.wide(chunk))
                logit_pass.scale_rows(wide, factor, out=partial)
            else:
                torch.mm(matrix, self._weight, out=partial)
                logit_pass.scale_rows(partial, factor, out=partial)
            if self._inv_scale is not None:
                partial.mul_(self._inv_scale)
            self._pending.wait()
            self._pending = self._head.comm.reduce_grad_hidden(partial, out)
        if self._grad_weight is not None:
            assert tokens is not None
            if factor is not None:
                tokens = logit_pass.scale_rows(tokens, factor, out=self._scratch.tokens(chunk))
            self._grad_weight.add(matrix, tokens)

    def finish(self) -> Tensor | None:
        """``grad_hidden`` ``[n, H]``, reduced."""
        self._pending.wait()
        return self._grad_hidden


def _row_factor(
    upstream: Tensor, logit_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """``upstream * logit_scale``, for fp16 times a power of two whose inverse comes second."""
    factor = upstream * logit_scale
    if dtype != torch.float16:
        return factor, None
    scale, inv_scale = fp16_scale(factor)
    return factor * scale, inv_scale


#: fp16 gradients of logits are written as ``2**FP16_HEADROOM_BITS`` times their share of the largest
#: upstream gradient: 2.3e-10 is then the smallest probability that does not vanish, and a product's
#: output stays far below 65504 for weights of any use.
FP16_HEADROOM_BITS = 8


def fp16_scale(factor: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two that brings the largest ``|factor|`` near ``2**8``, and its inverse (fp32 []).

    Computed on the device, so the host never waits. 1 where there is nothing finite to scale by.
    """
    largest = factor.abs().amax() if factor.numel() else factor.new_zeros(())
    _, exponent = torch.frexp(largest)
    shift = (FP16_HEADROOM_BITS - exponent).clamp(-100, 100)
    shift = torch.where(torch.isfinite(largest) & (largest > 0), shift, 0)
    one = torch.ones_like(largest)
    return torch.ldexp(one, shift), torch.ldexp(one, -shift)
