"""From hidden states to statistics of the logits, and to their gradients: one protocol and its kinds.

:mod:`.gemm_rows`
    A cuBLAS GEMM writes the logits; row kernels (Triton, or plain PyTorch in :mod:`.rows_torch`) read them
    for their statistics and write their gradients. Any device, any dtype.
:mod:`.scaled_exp`
    The GEMM's own epilogue exponentiates and writes ``E = exp(logit - the row's shift)``, without a pass over
    the logits (``recompute``: nothing in the forward, the gradient of the logits in the backward). Where
    gradients are no multiple of ``E`` it writes logits, and row kernels make the gradients. bf16 on Hopper
    and newer.
:mod:`.label_set`
    The first, for several labels a token.

All give the gradient of the logits as a matrix ``[C, V]`` in the hidden states' dtype and a scale of its rows
(:class:`LogitsGrad`), for any upstream gradient per token. :mod:`.choose` has the choice and its reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import Merged, RowStatistics, TileStatistics
from megatron_fused_ce.losses.outputs import PLAIN, Outputs
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.losses.terms import Rows
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import VocabParallel, Work


class OrderedTargets(Protocol):
    """What tokens are compared with beside one label, in the order of the hidden states: of all tokens, or of
    a chunk. A named tuple of tensors, which autograd saves; the backend that it belongs to reads it."""

    def kept(self, kept: Any, part: int) -> OrderedTargets:
        """Those of the tokens to work on, which ``kept`` (:class:`.head.tokens.Kept`) selects."""

    def of_chunk(self, chunk: Chunk, split: Callable[[Tensor], Tensor]) -> OrderedTargets:
        """Those of a chunk; ``split`` gives its entries ``[..., C]`` of ``[..., parts, n]``."""

    def saved(self, remakes: bool) -> OrderedTargets | None:
        """What a backward reads of them; ``remakes``: logits of some chunk are made again."""

    def masked(self, upstream: Upstream) -> Upstream:
        """Upstream gradients without those of entries that are empty."""


class Targets(NamedTuple):
    """What tokens are compared with, and their temperatures: ``[parts, n]``, of a chunk ``[C]``."""

    #: int64, columns of this shard; anything else: not here. None where a backward reads none.
    labels: Tensor
    inv_temperature: Tensor | None = None  # fp32, times the logits after a softcap
    others: OrderedTargets | None = None  # beside the label, or in its place

    def of_chunk(self, chunk: Chunk, split: Callable[[Tensor], Tensor]) -> Targets:
        """``split`` gives the chunk's entries ``[..., C]`` of ``[..., parts, n]``."""
        labels, inv_temperature, others = self
        return Targets(
            None if labels is None else split(labels),
            None if inv_temperature is None else split(inv_temperature),
            None if others is None else others.of_chunk(chunk, split),
        )


class Scores(NamedTuple):
    """Statistics of a chunk's rows, and the inputs of :meth:`LogitsBackend.finalize`."""

    stats: RowStatistics
    tiles: TileStatistics | None = None
    #: [C] fp32: the result of :meth:`LogitsBackend.finalize`, if the statistics' launch has done its work
    row_scale: Tensor | None = None
    #: what the backend's :meth:`LogitsBackend.settle` reads beside
    beside: tuple[Tensor, ...] = ()


class SavedChunk(NamedTuple):
    """Tensors of a chunk that its backward reads: P with labels and statistics, or E with its row scale."""

    labels: Tensor | None  # [C] int64; None beside a row scale
    matrix: Tensor | None  # [C, V], P or E; None if the backward makes it again, or Saved.matrix holds it
    row_scale: Tensor | None  # [C] fp32: E times this is G for an upstream gradient of 1
    stats: Tensor | None  # [4, C] fp32 or more rows: the merged statistics (Outputs.saved)


class LogitsGrad(NamedTuple):
    """``(row_scale * upstream)[:, None] * matrix``; fp32 ``[C]``, both None for 1.

    They are the same on every rank of the group, so that ``grad_hidden`` may be summed over the ranks before
    its rows are scaled.
    """

    matrix: Tensor  # [C, V]
    row_scale: Tensor | None = None
    upstream: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LogitsBackend:
    """One way from hidden states to statistics of the logits, and to their gradients; of one kind of call."""

    outputs: Outputs = PLAIN
    logit_scale: float = 1.0
    #: the ranks of the vocabulary; None where statistics are merged elsewhere
    comm: VocabParallel | None = None
    token_ops: ModuleType  # losses.statistics, or its kernels: merge_shards, shard_addends, token_loss
    #: of the matrix that :meth:`logits_gemm` writes; None for the hidden states'
    logits_dtype: torch.dtype | None = None
    #: Whether it is the scaled-exp GEMM and saves logits instead of ``E``.
    saves_logits: bool = False
    #: Whether the saved matrix is ``E``. :meth:`grad_from_saved` then leaves it as it is, and its result has
    #: a row scale.
    saves_e: bool = False

    #: The one that was asked for or chosen.
    name = ""
    #: Whether :meth:`logits_gemm` needs a buffer ``[C, V]`` even where nothing is saved.
    needs_logits_buffer = True
    #: Whether a chunk's merge ends before the next chunk's GEMM, so that the logits of one chunk live.
    settles_at_once = False

    def start_sample(self, weight: Tensor, others: OrderedTargets | None) -> tuple[Any, list[Work]]:
        """What :meth:`logits_gemm` needs of the whole weight, such as some rows ``[S, H]``, the same on every
        rank; and what to wait for.

        Collectives: starts one all-gather of each weight's (R > 1), where there is something.
        """
        return None, []

    def logits_gemm(
        self,
        hidden: Tensor,  # [C, H]
        weight: Tensor,  # [V, H]
        targets: Targets,  # of the chunk
        sample: Any,  # of start_sample
        out: Tensor | None,  # [C, V]
    ) -> Scores:
        """``hidden @ weight.T`` into ``out``, as logits or ``E``, and the statistics of its rows."""
        raise NotImplementedError

    def write_logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Logits as :meth:`logits_gemm` saves them, to the bit, without statistics."""
        raise NotImplementedError

    def settle(
        self,
        scores: Scores,
        targets: Targets,
        merged: Merged,
        matrix: Tensor | None,  # [C, V]: for the gradient, where it is made now
        needs_grad: bool,
    ) -> tuple[Merged, dict[str, Tensor]]:
        """A chunk after its merge: what later steps read of it, and its outputs ``[C]`` or ``[K, C]``."""
        rows = Rows(merged, num_classes=self.outputs.num_classes, shard=scores.stats)
        return merged, self.outputs.values(rows)

    def whole(self, made: dict[str, Tensor], others: OrderedTargets | None) -> dict[str, Tensor]:
        """The outputs of all tokens ``[parts, n]``, or of a single chunk ``[C]``."""
        return made

    def finalize(self, matrix: Tensor, targets: Targets, scores: Scores, merged: Merged) -> Tensor | None:
        """Change ``matrix`` ``[C, V]``, in place, into what :meth:`grad_from_saved` reads.

        Return the row scale ``[C]`` that goes with it, or None.
        """
        return None

    def grad_from_saved(
        self,
        saved: SavedChunk,  # with its matrix; labels are those of ``targets``
        targets: Targets,
        upstream: Upstream,  # [C] fp32 each: upstream gradients times logit_scale
        out: Tensor | None,  # [C, V]; may be the matrix; None for E
    ) -> LogitsGrad:
        """Gradients of the logits from a matrix that was finalized."""
        raise NotImplementedError

    def grad_recomputed(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        stats: Tensor,
        upstream: Upstream,
        logits: Tensor,
        out: Tensor,
    ) -> LogitsGrad:
        """Gradients of the logits from the GEMM again, into ``out`` ``[C, V]``; ``logits``, of
        :attr:`logits_dtype`, may be the same buffer.
        """
        raise NotImplementedError

    def bound_of(self, saved: SavedChunk, targets: Targets, given: set[str]) -> Tensor | None:
        """What a row's gradient may reach for upstream gradients of 1 of the outputs ``given``, fp32 ``[C]``,
        for fp16; from saved statistics or a saved row scale. None for 1."""
        if saved.stats is None:
            return None
        return self.outputs.bound_of(self.outputs.rows_of(saved.stats), given)

    def bound_ahead(self, others: OrderedTargets | None) -> Tensor | float | None:
        """The same for ``grad_in_forward``, before there are logits: ``[parts, n]``, or one for all."""
        return None

    def scale_rows(self, x: Tensor, row_scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
        """``out = (row_scale * factor)[:, None] * x`` in fp32; for gradients with a row scale alone.

        ``x``: ``[C, H]``; ``row_scale`` and ``factor``: fp32 ``[C]``, or ``[]`` for one number.
        """
        raise NotImplementedError
