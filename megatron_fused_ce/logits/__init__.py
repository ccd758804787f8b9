"""From hidden states to statistics of the logits, and to their gradients: one protocol.

:mod:`.gemm_rows`
    A cuBLAS GEMM writes the logits; row kernels (Triton, or plain PyTorch in :mod:`.rows_torch`) read them
    for their statistics and write their gradients. Any device, any dtype.
:mod:`.scaled_exp`
    The GEMM's own epilogue exponentiates and writes ``E = exp(logit - the row's shift)``, without a pass over
    the logits (``recompute``: nothing in the forward, ``grad_logits`` in the backward). Where gradients are
    no multiple of ``E`` it writes logits, and row kernels make the gradients. bf16 on Hopper and newer.

For a student beside its teacher :mod:`.divergence` takes one of them for both sides.

All give ``grad_logits`` as a matrix ``[C, V]`` in the hidden states' dtype and a scale of its rows
(:class:`LogitsGrad`), for any upstream gradient per token. :mod:`.choose` has the choice and its reasons.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce.distillation import Teacher
from megatron_fused_ce.kernels.records import Merged, RowStatistics, TileStatistics
from megatron_fused_ce.loss import LabelSet, TokenTerms, Upstream
from megatron_fused_ce.losses.form import PLAIN, LossForm
from megatron_fused_ce.parallel import DONE, VocabParallel, Work


class ChunkTargets(NamedTuple):
    """What a chunk's logits are compared with, and how they are scaled."""

    #: [C] int64, columns of this shard; anything else: not here. None for a backward that reads none.
    labels_if_read: Tensor | None
    logit_scale: float
    form: LossForm = PLAIN
    several: LabelSet | None = None  # in the label's place
    #: whether this shard is the whole vocabulary
    alone: bool = False
    inv_temperature: Tensor | None = None  # [C] fp32, times the logits after a softcap
    #: its hidden states of the chunk, [C, H_t] or to be gathered, and its label_weights [C]
    teacher: Teacher | None = None
    #: over which those are gathered, [C / R, H_t] of each rank; or over which labels' logits are merged
    over: VocabParallel | None = None

    @property
    def labels(self) -> Tensor:
        assert self.labels_if_read is not None
        return self.labels_if_read

    def start_teacher(self) -> tuple[Tensor, Work]:
        """The teacher's hidden states ``[C, H_t]``, to be waited for.

        Collectives: starts one all-gather of them, with sequence parallelism.
        """
        assert self.teacher is not None
        part, over = self.teacher.hidden, self.over
        return (part, DONE) if over is None else over.gathered(part)


class Scores(NamedTuple):
    """Statistics of a chunk's rows, and the inputs of :meth:`LogitsBackend.finalize`."""

    stats: RowStatistics
    tiles: TileStatistics | None = None
    #: [C] fp32: the result of :meth:`LogitsBackend.finalize`, if the statistics' launch has done its work
    row_scale: Tensor | None = None
    #: logits of the student and of its teacher, [C, V] each
    sides: tuple[Tensor, Tensor] | None = None


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
        sample: Tensor | None,  # [S, H]: see sample_rows
        out: Tensor | None,  # [C, V]
        with_argmax: bool,
    ) -> Scores:
        """``hidden @ weight.T`` into ``out``, as logits or ``E``, and the statistics of its rows."""

    def sample_rows(self, weight: Tensor, num_ranks: int, form: LossForm = PLAIN) -> Tensor | None:
        """This rank's part ``[S / num_ranks, H]`` of the ``sample``: valid rows of ``weight``.

        None where :meth:`logits_gemm` needs no sample.
        """

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
