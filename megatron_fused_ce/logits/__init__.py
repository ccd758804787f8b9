"""From hidden states to statistics of the logits, and to their gradients: one protocol.

:mod:`.gemm_rows`
    A cuBLAS GEMM writes the logits; row kernels (Triton, or plain PyTorch in :mod:`.rows_torch`) read them
    for their statistics and write their gradients. Any device, any dtype.
:mod:`.scaled_exp`
    The GEMM's own epilogue exponentiates and writes ``E = exp(logit - the row's shift)``, without a pass over
    the logits (``recompute``: nothing in the forward, ``grad_logits`` in the backward). Where gradients are
    no multiple of ``E`` it writes logits, and row kernels make the gradients. bf16 on Hopper and newer.

Over one of them stand :mod:`.label_set`, for several labels a token, and :mod:`.divergence`, for a student
beside its teacher.

All give ``grad_logits`` as a matrix ``[C, V]`` in the hidden states' dtype and a scale of its rows
(:class:`LogitsGrad`), for any upstream gradient per token. :mod:`.choose` has the choice and its reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce.head.tokens import Kept
from megatron_fused_ce.kernels.records import Merged, RowStatistics, TileStatistics
from megatron_fused_ce.losses.form import PLAIN, LossForm
from megatron_fused_ce.losses.statistics import TokenTerms, Upstream
from megatron_fused_ce.losses.terms import Rows
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import DONE, VocabParallel, Work


class OrderedTargets(Protocol):
    """:class:`.call.OtherTargets` in the order of the hidden states, of all tokens or of a chunk.

    A named tuple of tensors, which autograd saves. The backend that it belongs to reads it.
    """

    def kept(self, kept: Kept, part: int) -> OrderedTargets:
        """Those of the tokens to work on."""

    def of_chunk(self, chunk: Chunk, split: Callable[[Tensor], Tensor]) -> OrderedTargets:
        """Those of a chunk. ``split``: :meth:`.call.Context.split` for it."""

    def saved(self, remakes_logits: bool) -> OrderedTargets | None:
        """What a backward reads of them: see :attr:`.CallSpec.remakes_logits`."""

    def masked(self, upstream: Upstream) -> Upstream:
        """Upstream gradients without those of entries that are empty."""


class ChunkTargets(NamedTuple):
    """What a chunk's logits are compared with, and how they are scaled."""

    #: [C] int64, columns of this shard; anything else: not here. None for a backward that reads none.
    labels_if_read: Tensor | None
    logit_scale: float
    form: LossForm = PLAIN
    inv_temperature: Tensor | None = None  # [C] fp32, times the logits after a softcap
    #: beside the label, or in its place
    others: OrderedTargets | None = None
    comm: VocabParallel | None = None

    @property
    def labels(self) -> Tensor:
        assert self.labels_if_read is not None
        return self.labels_if_read

    @property
    def alone(self) -> bool:
        """Whether this shard is the whole vocabulary."""
        return self.comm is not None and self.comm.size == 1


class Scores(NamedTuple):
    """Statistics of a chunk's rows, and the inputs of :meth:`LogitsBackend.finalize`."""

    stats: RowStatistics
    tiles: TileStatistics | None = None
    #: [C] fp32: the result of :meth:`LogitsBackend.finalize`, if the statistics' launch has done its work
    row_scale: Tensor | None = None
    #: what the backend's :meth:`LogitsBackend.settle` reads beside
    beside: tuple[Tensor, ...] = ()


class LogitsGrad(NamedTuple):
    """``grad_logits = (row_scale * upstream)[:, None] * matrix``; fp32 ``[C]``, both None for 1.

    They are the same on every rank of the group, so that ``grad_hidden`` may be summed over the ranks before
    its rows are scaled.
    """

    matrix: Tensor  # [C, V]
    row_scale: Tensor | None = None
    upstream: Tensor | None = None


class LogitsBackend(Protocol):
    """One way from hidden states to statistics of the logits, and to their gradients."""

    #: Whether :meth:`logits_gemm` needs a buffer ``[C, V]`` even where nothing is saved.
    needs_logits_buffer: bool
    #: Whether a chunk's merge ends before the next chunk's GEMM, so that the logits of one chunk live.
    settles_at_once: bool

    @property
    def name(self) -> str:
        """The one that was asked for or chosen."""

    @property
    def saves_logits(self) -> bool:
        """Whether it is the scaled-exp GEMM and saves logits instead of ``E``."""

    @property
    def saves_e(self) -> bool:
        """Whether the saved matrix is ``E``. :meth:`grad_from_saved` then leaves it as it is, and its result
        has a row scale."""

    @property
    def logits_dtype(self) -> torch.dtype | None:
        """dtype of the matrix that :meth:`logits_gemm` writes; None for the hidden states'."""

    @property
    def token_ops(self) -> ModuleType:
        """``merge_shards``, ``shard_addends`` and ``token_loss``: :mod:`.loss`, or its kernels."""

    def logits_gemm(
        self,
        hidden: Tensor,  # [C, H]
        weight: Tensor,  # [V, H]
        targets: ChunkTargets,
        sample: Any,  # see start_sample
        out: Tensor | None,  # [C, V]
        with_argmax: bool,
    ) -> Scores:
        """``hidden @ weight.T`` into ``out``, as logits or ``E``, and the statistics of its rows."""

    def start_sample(
        self, weight: Tensor, others: OrderedTargets | None, comm: VocabParallel, form: LossForm
    ) -> tuple[Any, Work]:
        """What :meth:`logits_gemm` needs of the whole weight, such as some rows ``[S, H]``, the same on every
        rank; to be waited for.

        Collectives: starts one all-gather of each weight's (R > 1), where there is something.
        """

    def settle(
        self,
        scores: Scores,
        targets: ChunkTargets,
        merged: Merged,
        matrix: Tensor | None,  # [C, V]: for the gradient, where it is made now
        needs_grad: bool,
    ) -> tuple[Merged, dict[str, Tensor]]:
        """A chunk after its merge: what later steps read of it, and its outputs ``[C]`` or ``[K, C]``."""

    def whole(
        self, outputs: dict[str, Tensor], others: OrderedTargets | None, comm: VocabParallel
    ) -> dict[str, Tensor]:
        """The outputs of all tokens ``[parts, n]``, or of a single chunk ``[C]``."""

    def bound_of(
        self, terms: Tensor | None, row_scale: Tensor | None, targets: ChunkTargets
    ) -> Tensor | None:
        """What a row's gradient may reach for an upstream gradient of 1, fp32 ``[C]``, for fp16; from saved
        terms or a saved row scale. None for 1."""

    def bound_ahead(self, others: OrderedTargets | None) -> Tensor | float | None:
        """The same for ``grad_in_forward``, before there are logits: ``[parts, n]``, or one for all."""

    def finalize(
        self, matrix: Tensor, targets: ChunkTargets, scores: Scores, merged: Merged
    ) -> Tensor | None:
        """Make ``matrix`` ``[C, V]``, in place, what :meth:`grad_from_saved` reads; its row scale ``[C]``."""

    def grad_from_saved(
        self,
        matrix: Tensor,
        row_scale: Tensor | None,
        targets: ChunkTargets,
        terms: TokenTerms | None,  # None where there is a row scale
        upstream: Upstream,  # [C] fp32 each: upstream gradients times logit_scale
        out: Tensor | None,  # [C, V]; may be ``matrix``
    ) -> LogitsGrad:
        """Gradients of the logits from a matrix that was finalized."""

    def grad_recomputed(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: ChunkTargets,
        terms: TokenTerms,
        upstream: Upstream,
        logits: Tensor,
        out: Tensor,
    ) -> LogitsGrad:
        """Gradients of the logits from the GEMM again, into ``out`` ``[C, V]``; ``logits``, of
        :attr:`logits_dtype`, may be the same buffer.
        """

    def scale_rows(self, x: Tensor, row_scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
        """``out = (row_scale * factor)[:, None] * x`` in fp32; for gradients with a row scale alone.

        ``x``: ``[C, H]``; ``row_scale`` and ``factor``: fp32 ``[C]``, or ``[]`` for one number.
        """


class MadeOfTerms:
    """Methods of a :class:`LogitsBackend` whose outputs are the terms of :class:`.LossForm`, of one label."""

    settles_at_once = False

    def start_sample(
        self, weight: Tensor, others: OrderedTargets | None, comm: VocabParallel, form: LossForm
    ) -> tuple[Tensor | None, Work]:
        return None, DONE

    def settle(
        self, scores: Scores, targets: ChunkTargets, merged: Merged, matrix: Tensor | None, needs_grad: bool
    ) -> tuple[Merged, dict[str, Tensor]]:
        return merged, targets.form.finish(Rows(merged, num_classes=targets.form.num_classes))

    def whole(
        self, outputs: dict[str, Tensor], others: OrderedTargets | None, comm: VocabParallel
    ) -> dict[str, Tensor]:
        return outputs

    def bound_of(
        self, terms: Tensor | None, row_scale: Tensor | None, targets: ChunkTargets
    ) -> Tensor | None:
        return None if terms is None else targets.form.bound_of(targets.form.rows_saved(terms))

    def bound_ahead(self, others: OrderedTargets | None) -> Tensor | float | None:
        return None
