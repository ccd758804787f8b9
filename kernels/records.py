"""Records and constants that the kernels share with the package, which imports them from here.

Plain PyTorch: no triton. Kernels know nothing of the package (tests/test_house.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Divergences of a student from a teacher: KL(p_t || p_s), KL(p_s || p_t), generalized Jensen-Shannon.
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")

#: Up to it the exp(x) - 1 - x of a divergence is its series.
SERIES_UP_TO = 0.25

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

#: int32 entries before the marks of a tile table (scaled_exp_rows.RowPrologue): the counter, padding to a
#: multiple of 16 bytes, and of each cluster of thread blocks TABLE_WORDS numbers of tiles in 64 bits.
TABLE_WORDS = 8
MAX_CLUSTERS = 128
TABLE_HEADER = 4 + 2 * TABLE_WORDS * MAX_CLUSTERS

#: The first two rows of :attr:`RowStatistics.shard`, and the number of all.
ROW_MAX, ROW_SHIFT = range(2)
NUM_STATISTICS = 4
#: Label logit of a token whose label is not in this shard. A real label logit of ``+inf`` makes the token NaN
#: anyway, so the two cannot be confused.
NOT_HERE = float("inf")
#: A tile of the scaled-exp GEMM is exponentiated against its own maximum once that exceeds the row's shift by
#: more than this many powers of two: sums then stay below ``2**(64 + 18)``, and an entry that underflows is
#: below ``2**-126`` of the row's largest.
HEADROOM = 64.0
#: Its exponents are no lower than this where they are summed times their exponential: 0 times -inf is NaN.
LOWEST = -1000.0


@dataclass(frozen=True)
class RowOptions:
    """Options of the loss that kernels need. Tensors are on the logits' device."""

    #: the cap, in natural units; None: no softcap
    softcap: float | None = None
    #: int64 [1]: valid columns of this shard, None for all
    valid_columns: Tensor | None = None
    #: compute ``logit_sum``, ``weighted`` of :class:`ExtraStatistics`
    with_logit_sum: bool = False
    with_weighted: bool = False
    #: and its ``rest``, and where the largest logit is: of several, the label's or the lowest
    with_rest: bool = False
    #: scaled-exp GEMM only: round the logits to the operands' dtype before everything else
    rounded: bool = False


NO_OPTIONS = RowOptions()


class Side(NamedTuple):
    """One side's logits in a divergence, ``s = softcap(scale * z)``, and what makes them log-probabilities:
    ``log p_j = s_j - softcap(scale * top) - log_sum`` over the vocabulary of all ranks. Natural units.

    ``top`` is a logit as the matrix has it: logits are subtracted before they are scaled, and lose nothing.
    """

    logits: Tensor  # [C, V'], unit column stride; columns from valid_columns on are padding
    top: Tensor  # fp32 [C]: the largest logit of all shards, before scale and softcap
    log_sum: Tensor  # fp32 [C]: log sum exp(s - max s), with its own digits where it is near 0
    scale: float = 1.0  # divided by the temperature, as the cap is
    softcap: float | None = None
    #: fp32 [C], of a teacher: the student's log_sum less this one; and its logit, as top is, where the
    #: student's largest is. Finite.
    log_ratio: Tensor | None = None
    beside: Tensor | None = None


class LabelTerm(NamedTuple):
    """A cross-entropy beside a divergence, for the student's logits ``s`` of its :class:`Side`:
    ``weight * (softmax(temperature * s) - onehot(label))`` is added to the gradient."""

    columns: Tensor  # int64 [C]: the label's column of this shard; anything else: not here
    weight: Tensor  # fp32 [C]
    inv_sum: Tensor  # fp32 [C]: 1 / sum exp(temperature * (s - max s))
    one_minus_p: Tensor  # fp32 [C]: 1 - p of the label
    temperature: float = 1.0


class ExtraStatistics(NamedTuple):
    """Statistics that only some losses and outputs need, fp32 ``[C]``, natural units; None if not needed.

    Of one shard: relative to the row shift in :attr:`RowStatistics.shard`. In :class:`Merged`: over the whole
    vocabulary, relative to the row's maximum.
    """

    logit_sum: Tensor | None = None  # sum of z: label smoothing
    #: sum of exp(z - row_shift) * (z - row_shift), without the label's own column: entropy
    weighted: Tensor | None = None
    #: global id of the largest logit, lowest on a tie (exact below 2**24): predicted ids
    best: Tensor | None = None
    #: Of a divergence: sum of exp(z - z_a) without z_a, the row's largest, fp64; ranks exchange it in two
    #: parts, relative to row_max, of which exp(z_a - row_max) = peak is 1 but for rounding. In Merged fp64
    #: again, and peak is the number of shards that have the largest.
    rest: Tensor | None = None
    rest_low: Tensor | None = None
    peak: Tensor | None = None
    #: the largest logit, and the teacher's in its column, both before scale and softcap; in Merged: their
    #: sums over the shards that have the largest
    top: Tensor | None = None
    beside: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the statistics that are there."""
        return tuple(name for name in self._fields if getattr(self, name) is not None)

    @staticmethod
    def of(names: tuple[str, ...], rows: Iterable[Tensor]) -> ExtraStatistics:
        return ExtraStatistics(**dict(zip(names, rows, strict=True)))

    def rows(self) -> list[Tensor]:
        return [row for row in self if row is not None]


NO_EXTRA = ExtraStatistics()


class RowStatistics(NamedTuple):
    """Statistics of each row over one vocabulary shard.

    ``shard`` is fp32 ``[4, C]`` in natural units, which the ranks exchange in one piece. Its rows: the
    largest logit; the row shift (the largest logit, or near it); the sum of ``exp(z - row_shift)`` without
    the label's own column; the label's logit, :data:`NOT_HERE` if this shard does not hold it.
    """

    shard: Tensor
    argmax: Tensor | None = None  # int64 [C]: column of row_max, lowest on a tie; None if not needed
    extra: ExtraStatistics = NO_EXTRA
    #: scaled-exp GEMM only, fp32 [C], base 2: the row's largest tile shift if its tiles' shifts differ,
    #: else -1
    tile_shift: Tensor | None = None
    #: if the shard is the whole vocabulary: the merged result, computed in the same launch
    merged: Merged | None = None

    @property
    def row_max(self) -> Tensor:
        return self.shard[ROW_MAX]


class TileStatistics(NamedTuple):
    """Statistics of each row and tile of columns that the scaled-exp GEMM writes, ``[num_tiles, C]``.

    A tile's entries are ``E = 2**(z2 - row_shift2 - tile_shift)`` with ``z2 = log2(e) * logit_scale * z``
    and ``tile_shift`` 0, or ``tile_max`` where that is above 64.
    """

    tile_columns: int
    tile_max: Tensor  # fp32: largest z2 - row_shift2 of the tile, label left out
    tile_sum: Tensor  # fp32: sum of E over the tile, label left out
    #: fp32 [C], natural units: logit_scale * z_y, before a softcap; undefined if the label is in another
    #: shard
    label_logit: Tensor
    tile_argmax: Tensor | None = None  # int32: column of tile_max
    #: fp32: sum of E times its exponent, in base 2, label left out; with RowOptions.with_weighted
    tile_weighted: Tensor | None = None

    @staticmethod
    def empty(
        row_shift2: Tensor,  # [C] fp32
        num_columns: int,
        tile_columns: int,
        with_argmax: bool,
        form: RowOptions,
    ) -> TileStatistics:
        """Those that ``form`` needs, for a kernel to write."""
        tile_max = row_shift2.new_empty(-(-num_columns // tile_columns), row_shift2.shape[0])
        return TileStatistics(
            tile_columns,
            tile_max,
            torch.empty_like(tile_max),
            torch.empty_like(row_shift2),
            torch.empty_like(tile_max, dtype=torch.int32) if with_argmax else None,
            torch.empty_like(tile_max) if form.with_weighted else None,
        )


class Merged(NamedTuple):
    """A chunk's statistics over all shards, natural units; the same on every rank."""

    loss: Tensor  # fp32 [C]: the plain loss, without options
    stats: Tensor  # fp32 [4, C]: the fields of losses.statistics.TokenStats
    #: fp32 [C]: the largest row_shift of any shard; None if the shard is the whole vocabulary
    row_shift: Tensor | None
    extra: ExtraStatistics = NO_EXTRA
    #: of several labels a token: their logits less the row's maximum, fp32 [K, C]; NOT_HERE of one that no
    #: shard has, -inf of an empty entry
    label_shifts: Tensor | None = None


class GradCoefficients(NamedTuple):
    """Coefficients of the gradient of a token's logits, fp32 ``[C]``.

    ``d / d s_j = factor * (exp(t_j) * (scale + entropy_scale * t_j) - smoothing_per_class)`` for ``t_j =
    s_j - row_max``, and ``-factor * neg_label_grad`` at the label. For the plain loss they are the
    :class:`.TokenStats` themselves.
    """

    row_max: Tensor
    scale: Tensor
    neg_label_grad: Tensor
    factor: Tensor
    entropy_scale: Tensor | None = None
    smoothing_per_class: Tensor | None = None  # fp32 [C]

    def in_base_2(self) -> GradEpilogue:
        """For the epilogue of ``grad_logits_gemm``, which has no label smoothing."""
        factor = self.factor * self.scale
        return GradEpilogue(
            self.row_max * LOG2_E,
            factor,
            -self.factor * self.neg_label_grad,
            None if self.entropy_scale is None else self.factor * self.entropy_scale / LOG2_E,
        )


class GradEpilogue(NamedTuple):
    """:class:`GradCoefficients` in base 2, fp32 ``[C]``.

    ``d / d s_j = 2**t_j * (factor + entropy_factor * t_j)`` for ``t_j = log2(e) * s_j - max2``, and
    ``at_label`` at the label, before the softcap's gradient.
    """

    max2: Tensor
    factor: Tensor
    at_label: Tensor
    entropy_factor: Tensor | None = None
