"""Records and constants that the kernels share with the package, which imports them from here.

Plain PyTorch: no triton. Kernels know nothing of the package (tests/test_house.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

LOG2_E = 1.4426950408889634

#: int32 before the marks of a tile table (exp_rows.RowPrologue): the counter, and what keeps the marks at a
#: multiple of 16 bytes.
TABLE_HEADER = 4

#: Rows of :attr:`RowStatistics.shard`.
ROW_MAX, ROW_SHIFT, SUM_EXP_NONLABEL, LABEL_LOGIT = range(4)
NUM_STATISTICS = 4
#: A label logit that is not in this shard. A real one of ``+inf`` makes the row maximum ``+inf`` and the
#: token NaN, so nothing is lost.
NOT_HERE = float("inf")


@dataclass(frozen=True)
class RowOptions:
    """Options of the loss that kernels must know. Tensors are on the logits' device."""

    #: ``cap``; None for none
    softcap: float | None = None
    #: int64 [1]: valid columns of this shard, None for all
    valid_columns: Tensor | None = None
    #: which statistics of :class:`ExtraStatistics` are wanted of every row
    with_logit_sum: bool = False
    with_weighted: bool = False


NO_OPTIONS = RowOptions()


class SoftTargets(NamedTuple):
    """The ``k`` classes of each token that have a share of the target; no class twice."""

    ids: Tensor  # int64 [k, C]: columns of this shard; anything else: not here
    probs: Tensor  # fp32 [k, C]


class ExtraStatistics(NamedTuple):
    """Statistics that only some losses and outputs ask for, fp32 ``[C]``; None where not asked for.

    Of one shard, relative to its :attr:`RowStatistics.row_shift`; in :class:`Merged` over the whole
    vocabulary and relative to the row's maximum.
    """

    logit_sum: Tensor | None = None  # sum of z: label smoothing
    #: sum of exp(z - row_shift) * (z - row_shift), without the label's own column: entropy
    weighted: Tensor | None = None
    target_sum: Tensor | None = None  # sum of q * (z - row_shift) over the soft targets that are here
    target_mass: Tensor | None = None  # sum of their q
    #: global id of the largest logit, lowest on a tie (exact below 2**24): predicted ids
    best: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are given."""
        return tuple(name for name in self._fields if getattr(self, name) is not None)

    @staticmethod
    def of(names: tuple[str, ...], rows: Iterable[Tensor]) -> ExtraStatistics:
        return ExtraStatistics(**dict(zip(names, rows, strict=True)))

    def rows(self) -> list[Tensor]:
        return [row for row in self if row is not None]


NO_EXTRA = ExtraStatistics()


class RowStatistics(NamedTuple):
    """Statistics of each row over one vocabulary shard.

    ``shard`` is what the ranks exchange, in one piece, fp32 ``[4, C]``: the largest logit; what the sum is
    relative to (the largest logit, or near it); the sum of ``exp(z - row_shift)`` without the label's own
    column; the label's logit, :data:`NOT_HERE` where another shard holds it or none.
    """

    shard: Tensor
    argmax: Tensor | None = None  # int64 [C]: column of row_max, lowest on a tie; where asked for
    extra: ExtraStatistics = NO_EXTRA
    #: scaled-exp GEMM only, fp32 [C]: the row's tile_shift where its tiles differ in theirs, else -1
    tile_shift: Tensor | None = None
    #: where the shard is the whole vocabulary and the merge cost nothing
    merged: Merged | None = None

    @property
    def row_max(self) -> Tensor:
        return self.shard[ROW_MAX]

    @property
    def row_shift(self) -> Tensor:
        return self.shard[ROW_SHIFT]

    @property
    def sum_exp_nonlabel(self) -> Tensor:
        return self.shard[SUM_EXP_NONLABEL]

    @property
    def label_logit(self) -> Tensor:
        return self.shard[LABEL_LOGIT]


class TileStatistics(NamedTuple):
    """What the scaled-exp GEMM leaves of each row and tile of columns, ``[num_tiles, C]``.

    A tile's entries are ``E = 2**(z2 - row_shift2 - tile_shift)`` with ``z2 = log2(e) * logit_scale * z``
    and ``tile_shift`` 0, or ``tile_max`` where that is above 64.
    """

    tile_columns: int
    tile_max: Tensor  # fp32: largest z2 - row_shift2 of the tile, label left out
    tile_sum: Tensor  # fp32: sum of E over the tile, label left out
    #: fp32 [C]: logit_scale * z_y, before a softcap; undefined where the label is not here
    label_logit: Tensor
    tile_argmax: Tensor | None = None  # int32: column of tile_max
    #: fp32: sum of E times its exponent, in powers of two, label left out; with RowOptions.with_weighted
    tile_weighted: Tensor | None = None


class Merged(NamedTuple):
    """A chunk after its statistics met those of the other shards; the same on every rank."""

    loss: Tensor  # fp32 [C]: the plain one
    terms: Tensor  # fp32 [4, C]: TokenTerms, the mass left out
    #: fp32 [C]: the largest row_shift of any shard; None where the shard is the whole vocabulary
    row_shift: Tensor | None
    extra: ExtraStatistics = NO_EXTRA


class GradCoefficients(NamedTuple):
    """What the gradient of a token's logits needs, fp32 ``[C]``.

    ``d / d s_j = factor * (exp(t_j) * (scale + entropy_scale * t_j) - smoothing_per_class)`` with ``t_j = s_j
    - row_max``, and ``-factor * neg_label_grad`` at the label. Plain, they are the :class:`TokenTerms`
    themselves.
    """

    row_max: Tensor
    scale: Tensor
    neg_label_grad: Tensor
    factor: Tensor
    entropy_scale: Tensor | None = None
    smoothing_per_class: Tensor | None = None  # or []
