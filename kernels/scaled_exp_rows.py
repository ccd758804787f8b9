"""The small kernels around the scaled-exp GEMM (its shifts and scales: docs/math.md).

Shapes: ``C`` tokens of a chunk, ``H`` hidden size, ``V`` vocabulary rows of this shard, ``num_tiles =
ceil(V / 256)`` tiles of columns. ``E`` is ``[C, V]`` in the operands' dtype; statistics are fp32.

Units: a logit ``z`` is natural (its exponential is ``e**z``); in base 2 it is ``z2 = log2(e) * z``
(``2**z2``). ``row_shift2``, ``tile_max``, ``tile_shift`` and ``tile_weighted`` are in base 2, the last three
relative to ``row_shift2``. Everything in ``RowStatistics.shard``, ``Merged`` and ``GradCoefficients`` is
natural. Each kernel converts where it reads or writes.

A kernel's pointer that its constants leave unused gets any valid tensor.

Bytes at ``C = 8192, H = 4096, V = 128256``, bf16; the three GEMMs of such a chunk take 38 ms on an
H200, so all of it together should stay below 0.2 ms:

=================  ==============================================  =========
kernel             bytes                                           predicted
=================  ==============================================  =========
row_prologue       ``2CH`` read, ``2C * 64 * H`` FLOP              0.02 ms
combine_tiles      ``8CV/256`` read                                0.01 ms
finalize_rows      one entry a row; whole rows only on demand      0.01 ms
scale_rows         ``4CH``                                         0.03 ms
=================  ==============================================  =========

docs/benchmarks has what they take together. The first forms were several times slower, by latency and strided
reads: 16 rows a program with a gather of the label's own weight row (the GEMM's epilogue has that logit
anyway); two dependent sweeps over the tiles; one program a row that read a column of the tile maxima.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.kernels.launch import MAX_REMEMBERED, Bound, Launch, ceil_div, next_power_of_2
from megatron_fused_ce.kernels.records import (
    HEADROOM,
    LN_2,
    LOG2_E,
    NO_OPTIONS,
    NOT_HERE,
    TABLE_HEADER,
    ExtraStatistics,
    Merged,
    RowOptions,
    RowStatistics,
    TileStatistics,
)
from megatron_fused_ce.kernels.sizes import HALF_TILE_ROWS, TILE_COLUMNS
from megatron_fused_ce.kernels.softcap import tanh_and_grad
from megatron_fused_ce.kernels.token_kernels import addends, store_loss

#: A token whose row scale is below ``2**FAR_BELOW`` has it multiplied into ``E``, and its row scale becomes
#: 1: the label's entry, which is divided by the row scale, would overflow. That is a token whose other logits
#: are far below its label's.
FAR_BELOW = tl.constexpr(-60.0)
_NOT_HERE = tl.constexpr(NOT_HERE)
_HEADER = tl.constexpr(TABLE_HEADER)
_HEADROOM = tl.constexpr(HEADROOM)
_LN_2 = tl.constexpr(LN_2)
_LOG2_E = tl.constexpr(LOG2_E)


class RowPrologue(NamedTuple):
    """Inputs of the scaled-exp GEMM that are computed before it."""

    row_shift2: Tensor  # [C] fp32: largest sampled logit, in base 2
    #: int32 ``[TABLE_HEADER + num_tiles * 2 * ceil(C / 128)]``. The header, 0 at first: the counter by which
    #: the Hopper kernel hands out its tiles, and words in which a cluster's first block publishes them. Then
    #: one mark for each half tile (a tile of columns and 64 rows), in that order: 1 where a label of these
    #: rows lies in these columns, else 0.
    table: Tensor


@triton.jit
def _fill_table(
    label_ptr,  # [C] int64
    table_ptr,  # int32, out: RowPrologue.table
    num_rows,  # C
    num_columns,  # V
    halves,  # half tiles of rows: 2 * ceil(C / 128)
    num_tiles,
    HALF_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write the marks of this program's 64 rows; the first program also sets the header to 0."""
    half = tl.program_id(0)
    marks_ptr = table_ptr + _HEADER + half
    for start in range(0, num_tiles, BLOCK_TILES):
        tiles = start + tl.arange(0, BLOCK_TILES)
        tl.store(marks_ptr + tiles * halves, tl.zeros((BLOCK_TILES,), tl.int32), mask=tiles < num_tiles)
    if half == 0:
        for start in range(0, _HEADER, 1024):
            header = start + tl.arange(0, 1024)
            tl.store(table_ptr + header, tl.zeros((1024,), tl.int32), mask=header < _HEADER)
    tl.debug_barrier()  # all zeros are written before the first mark
    rows = half * HALF_TILE + tl.arange(0, HALF_TILE)
    label = tl.load(label_ptr + rows, mask=rows < num_rows, other=-1)
    here = (label >= 0) & (label < num_columns)
    ones = tl.full((HALF_TILE,), 1, tl.int32)
    tl.store(marks_ptr + (tl.where(here, label, 0) // TILE) * halves, ones, mask=here)


@triton.jit
def _row_prologue_kernel(
    tokens_ptr,  # [C, H]
    sample_ptr,  # [S, H]
    label_ptr,  # [C] int64
    row_shift_ptr,  # [C] fp32, out, base 2
    table_ptr,  # int32, out: RowPrologue.table
    inv_temperature_ptr,  # [C] fp32
    tokens_stride,
    sample_stride,
    num_rows,
    num_columns,
    hidden_size,
    num_sampled,
    halves,
    num_tiles,
    logit_scale,
    softcap,
    HALF_TILE: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    """Row shifts and marks of the 64 rows of one half tile.

    Every row is summed over H in the same order, so its results do not depend on its neighbours.
    """
    _fill_table(
        label_ptr, table_ptr, num_rows, num_columns, halves, num_tiles,
        HALF_TILE, TILE, BLOCK_TILES,
    )  # fmt: skip
    rows = tl.program_id(0) * HALF_TILE + tl.arange(0, HALF_TILE)
    inside = rows < num_rows
    sampled = tl.arange(0, SAMPLED)
    real = sampled < num_sampled
    k = tl.arange(0, BLOCK_K)
    tokens_ptr += rows.to(tl.int64)[:, None] * tokens_stride + k[None, :]
    sample_ptr += sampled.to(tl.int64)[None, :] * sample_stride + k[:, None]
    z = tl.zeros((HALF_TILE, SAMPLED), tl.float32)
    for start in range(0, hidden_size, BLOCK_K):
        left = k < hidden_size - start
        a = tl.load(tokens_ptr, mask=inside[:, None] & left[None, :], other=0.0)
        b = tl.load(sample_ptr, mask=real[None, :] & left[:, None], other=0.0)
        z = tl.dot(a, b, z)
        tokens_ptr += BLOCK_K
        sample_ptr += BLOCK_K
    # The sampled rows of a shard without a valid column are NaN, and left out.
    row_shift = tl.max(tl.where(real[None, :] & (z == z), z, float("-inf")), axis=1) * logit_scale
    if SOFTCAP:
        tanh, _ = tanh_and_grad(row_shift / softcap)
        row_shift = softcap * tanh
    inv_temperature = 1.0
    if TEMPERATURE:
        inv_temperature = tl.load(inv_temperature_ptr + rows, mask=inside, other=1.0)
    tl.store(row_shift_ptr + rows, row_shift * inv_temperature * _LOG2_E, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # a row's order of summation would depend on it
def _combine_tiles_kernel(
    row_shift_ptr,  # [C] fp32, base 2: RowPrologue.row_shift2
    tile_max_ptr,  # [num_tiles, C] fp32, base 2, relative to the row shift
    tile_sum_ptr,  # [num_tiles, C] fp32: sums of E
    tile_argmax_ptr,  # [num_tiles, C] int32: columns
    tile_weighted_ptr,  # [num_tiles, C] fp32, base 2
    label_ptr,  # [C] int64: columns of this shard
    label_logit_ptr,  # [C] fp32, natural units, before the softcap
    shard_ptr,  # [4, C] fp32, out, natural units: records.RowStatistics.shard
    tile_shift_ptr,  # [C] fp32, out, base 2: RowStatistics.tile_shift
    argmax_ptr,  # [C] int64, out: column of the largest logit
    weighted_ptr,  # [C] fp32, out, natural units: records.ExtraStatistics.weighted
    loss_ptr,  # [C] fp32, out, natural units
    saved_ptr,  # [4, C] fp32, out: losses.statistics.TokenStats
    e_ptr,  # [C, V], in and out
    row_scale_ptr,  # [C] fp32, out: a factor
    inv_temperature_ptr,  # [C] fp32
    num_rows,
    num_columns,
    num_tiles,
    e_stride,
    softcap,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALONE: tl.constexpr,
    FINALIZE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    """Row statistics of a block of rows, in one sweep over their tiles.

    Each of ``BLOCK_TILES`` slots combines every ``BLOCK_TILES``-th tile; the slots are combined at the end.

    ``ALONE``: the shard is the whole vocabulary, so the tokens' losses are computed here too. With
    ``FINALIZE`` (plain loss only) this launch also does the work of :func:`_finalize_rows_kernel`.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    slots = tl.zeros((BLOCK_TILES, BLOCK_ROWS), dtype=tl.float32)
    slot_max = slots + float("-inf")
    slot_lowest = slots + float("inf")
    slot_shift = slots
    slot_sum_exp = slots
    slot_weighted = slots
    slot_best = slots.to(tl.int32)
    for start in range(0, num_tiles, BLOCK_TILES):
        tiles = start + tl.arange(0, BLOCK_TILES)
        at = tiles[:, None].to(tl.int64) * num_rows + rows[None, :]
        real = (tiles < num_tiles)[:, None] & inside[None, :]
        tile_max = tl.load(tile_max_ptr + at, mask=real, other=float("-inf"))
        tile_sum = tl.load(tile_sum_ptr + at, mask=real, other=0.0)
        if WITH_ARGMAX:
            columns = tl.load(tile_argmax_ptr + at, mask=real, other=0)
            slot_best = tl.where(tile_max > slot_max, columns, slot_best)
        slot_max = tl.maximum(slot_max, tile_max)
        tile_shift = tl.where(tile_max > _HEADROOM, tile_max, 0.0)
        slot_lowest = tl.minimum(slot_lowest, tl.where(real, tile_shift, float("inf")))
        new_shift = tl.maximum(slot_shift, tile_shift)
        of_slot, of_tile = slot_shift - new_shift, tile_shift - new_shift
        if WEIGHTED:
            tile_weighted = tl.load(tile_weighted_ptr + at, mask=real, other=0.0)
            slot_weighted = (slot_weighted + slot_sum_exp * of_slot) * tl.exp2(of_slot)
            slot_weighted += (tile_weighted + tile_sum * of_tile) * tl.exp2(of_tile)
        slot_sum_exp = slot_sum_exp * tl.exp2(of_slot)
        slot_sum_exp += tile_sum * tl.exp2(of_tile)
        slot_shift = new_shift
    largest = tl.max(slot_max, axis=0)
    lowest_shift = tl.min(slot_lowest, axis=0)
    row_tile_shift = tl.max(slot_shift, axis=0)
    of_slot = slot_shift - row_tile_shift[None, :]
    sum_exp_nonlabel = tl.sum(slot_sum_exp * tl.exp2(of_slot), axis=0)
    if WEIGHTED:
        weighted = tl.sum((slot_weighted + slot_sum_exp * of_slot) * tl.exp2(of_slot), axis=0)
        tl.store(weighted_ptr + rows, weighted * _LN_2, mask=inside)
    row_shift = tl.load(row_shift_ptr + rows, mask=inside, other=0.0)
    label = tl.load(label_ptr + rows, mask=inside, other=-1)
    here = (label >= 0) & (label < num_columns)
    label_logit = tl.load(label_logit_ptr + rows, mask=inside, other=0.0)
    label_factor = tl.full((BLOCK_ROWS,), 1.0, tl.float32)
    if SOFTCAP:
        tanh, label_factor = tanh_and_grad(label_logit / softcap)
        label_logit = softcap * tanh
    if TEMPERATURE:
        label_logit *= tl.load(inv_temperature_ptr + rows, mask=inside, other=1.0)
    nonlabel_max = (row_shift + largest) * _LN_2
    own_wins = here & (label_logit >= nonlabel_max)
    row_max = tl.where(own_wins, label_logit, nonlabel_max)
    label_logit = tl.where(here, label_logit, _NOT_HERE)
    tl.store(shard_ptr + rows, row_max, mask=inside)
    tl.store(shard_ptr + num_rows + rows, (row_shift + row_tile_shift) * _LN_2, mask=inside)
    tl.store(shard_ptr + 2 * num_rows + rows, sum_exp_nonlabel, mask=inside)
    tl.store(shard_ptr + 3 * num_rows + rows, label_logit, mask=inside)
    mixed_shift = tl.where(lowest_shift < row_tile_shift, row_tile_shift, -1.0)
    if not FINALIZE:
        tl.store(tile_shift_ptr + rows, mixed_shift, mask=inside)
    if WITH_ARGMAX:
        first = tl.where(slot_max == largest[None, :], slot_best, num_columns)
        best = tl.min(first, axis=0)
        tl.store(argmax_ptr + rows, tl.where(own_wins, label, best.to(tl.int64)), mask=inside)
    if ALONE:
        row_shift = (row_shift + row_tile_shift) * _LN_2
        sum_exp_nonlabel, of_label, shifted = addends(row_shift, sum_exp_nonlabel, label_logit, row_max)
        scale, neg_label_grad = store_loss(
            sum_exp_nonlabel,
            of_label,
            shifted,
            row_max,
            loss_ptr,
            saved_ptr,
            rows,
            inside,
            num_rows,
        )
        if FINALIZE:
            _finalize(
                e_ptr, label, tile_max_ptr, row_scale_ptr,
                row_shift, row_shift, mixed_shift, row_max, scale, neg_label_grad, label_factor,
                rows, inside, e_stride, num_rows, num_columns, num_tiles, TILE,
            )  # fmt: skip


@triton.jit
def _finalize_rows_kernel(
    e_ptr,  # [C, V], in and out
    label_ptr,  # [C] int64
    tile_max_ptr,  # [num_tiles, C] fp32, base 2
    shard_ptr,  # [4, C] fp32, natural units: records.RowStatistics.shard
    tile_shift_ptr,  # [C] fp32, base 2: RowStatistics.tile_shift
    row_shift_ptr,  # [C] fp32, natural units: the largest of all shards
    terms_ptr,  # [3, C] fp32: row_max, scale, neg_label_grad of records.GradCoefficients
    label_logit_ptr,  # [C] fp32, natural units, before the softcap
    row_scale_ptr,  # [C] fp32, out: a factor
    e_stride,
    num_rows,
    num_columns,
    num_tiles,
    softcap,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALONE: tl.constexpr,  # the shard is the whole vocabulary
):
    """Bring a block of rows of ``E`` to one row scale over all tiles and shards; write the label's entry."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    mixed_shift = tl.load(tile_shift_ptr + rows, mask=inside, other=-1.0)
    own_row_shift = tl.load(shard_ptr + num_rows + rows, mask=inside, other=0.0)
    row_shift = own_row_shift if ALONE else tl.load(row_shift_ptr + rows, mask=inside, other=0.0)
    row_max = tl.load(terms_ptr + rows, mask=inside, other=0.0)
    scale = tl.load(terms_ptr + num_rows + rows, mask=inside, other=1.0)
    neg_label_grad = tl.load(terms_ptr + 2 * num_rows + rows, mask=inside, other=0.0)
    label = tl.load(label_ptr + rows, mask=inside, other=-1)
    label_factor = tl.full((BLOCK_ROWS,), 1.0, tl.float32)
    if SOFTCAP:
        label_logit = tl.load(label_logit_ptr + rows, mask=inside, other=0.0)
        _, label_factor = tanh_and_grad(label_logit / softcap)
    _finalize(
        e_ptr, label, tile_max_ptr, row_scale_ptr,
        own_row_shift, row_shift, mixed_shift, row_max, scale, neg_label_grad, label_factor,
        rows, inside, e_stride, num_rows, num_columns, num_tiles, TILE,
    )  # fmt: skip


@triton.jit
def _finalize(
    e_ptr,
    label,
    tile_max_ptr,
    row_scale_ptr,
    own_row_shift,
    row_shift,
    mixed_shift,  # base 2: RowStatistics.tile_shift
    row_max,
    scale,
    neg_label_grad,
    label_factor,  # the softcap's gradient at the label's logit; 1 without a softcap
    rows,
    inside,
    e_stride,
    num_rows,
    num_columns,
    num_tiles,
    TILE: tl.constexpr,
):
    """The common part of the two kernels above; per-row arguments are ``[BLOCK_ROWS]``, natural units.

    The row scale has the sign of ``scale``, which a z-loss can make negative, or 0. The rest of a row of
    ``E`` is read and written only if its tiles or shards have different shifts, or its row scale would
    underflow.
    """
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    log2_row_scale = (row_shift - row_max) * _LOG2_E + tl.log2(tl.abs(scale))
    far_below = log2_row_scale < FAR_BELOW
    row_scale = tl.where(far_below, 1.0, sign * tl.exp2(log2_row_scale))
    mixed = mixed_shift >= 0.0
    moves = inside & (far_below | mixed | (own_row_shift != row_shift))
    here = inside & (label >= 0) & (label < num_columns)
    row_ptr = e_ptr + rows.to(tl.int64) * e_stride
    if tl.max(moves.to(tl.int32), axis=0) > 0:
        shift = (own_row_shift - row_shift) * _LOG2_E
        shift += tl.where(far_below, log2_row_scale, 0.0) - tl.where(mixed, mixed_shift, 0.0)
        sign = tl.where(far_below, sign, 1.0)
        tile_ptr = tile_max_ptr + rows
        for tile in range(0, num_tiles):
            tile_max = tl.load(tile_ptr, mask=moves, other=0.0)
            tile_ptr += num_rows
            tile_shift = tl.where(mixed & (tile_max > _HEADROOM), tile_max, 0.0)
            columns = tile * TILE + tl.arange(0, TILE)
            mask = moves[:, None] & (columns < num_columns)[None, :] & (columns[None, :] != label[:, None])
            at = row_ptr[:, None] + columns[None, :]
            e = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            e = e * (sign * tl.exp2(tile_shift + shift))[:, None]
            tl.store(at, e.to(e_ptr.dtype.element_ty), mask=mask)
    at_label = -neg_label_grad / row_scale * label_factor
    tl.store(row_ptr + tl.where(here, label, 0), at_label.to(e_ptr.dtype.element_ty), mask=here)
    tl.store(row_scale_ptr + rows, row_scale, mask=inside)


@triton.jit
def _scale_rows_kernel(
    x_ptr,  # [C, H], any float
    out_ptr,  # [C, H], any float; may be x_ptr
    row_scale_ptr,  # [C] or [] fp32
    upstream_ptr,  # [C] or [] fp32
    num_columns,
    x_stride,
    out_stride,
    row_scale_stride,
    upstream_stride,
    BLOCK: tl.constexpr,
    WITH_UPSTREAM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(row_scale_ptr + row * row_scale_stride)
    if WITH_UPSTREAM:
        factor *= tl.load(upstream_ptr + row * upstream_stride)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < num_columns
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        scaled = (x * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + columns, scaled, mask=mask)


@triton.jit
def _add_scaled_kernel(total_ptr, addend_ptr, scale_ptr, unless_ptr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.where(tl.load(unless_ptr) == 0, numel, 0)
    scale = tl.load(scale_ptr)
    total = tl.load(total_ptr + at, mask=mask)
    tl.store(total_ptr + at, total + scale * tl.load(addend_ptr + at, mask=mask), mask=mask)


@triton.jit
def _scaled_copy_kernel(x_ptr, scale_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    x = tl.load(x_ptr + at, mask=mask) * tl.load(scale_ptr)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)


_tile_table = Launch(_fill_table, num_warps=4)
_row_prologue = Launch(_row_prologue_kernel, num_warps=4, num_stages=4)
_combine_tiles = Launch(_combine_tiles_kernel, num_warps=8)
_finalize_rows = Launch(_finalize_rows_kernel, num_warps=8)
_scale_rows = Launch(_scale_rows_kernel, num_warps=4)
_add_scaled = Launch(_add_scaled_kernel, num_warps=8)
_scaled_copy = Launch(_scaled_copy_kernel, num_warps=8)


def _table_shape(num_rows: int, num_columns: int) -> tuple[int, int, int]:
    """Entries of :attr:`RowPrologue.table`, its half tiles of rows and its tiles of columns."""
    halves = 2 * ceil_div(num_rows, 2 * HALF_TILE_ROWS)
    num_tiles = ceil_div(num_columns, TILE_COLUMNS)
    return TABLE_HEADER + num_tiles * halves, halves, num_tiles


def tile_table(
    labels: Tensor,  # [C] int64, columns of this shard; other values are labels of other shards
    num_columns: int,
) -> Tensor:
    """:attr:`RowPrologue.table` without the row shifts, for :func:`.grad_logits_gemm`."""
    num_rows = labels.shape[0]
    size, halves, num_tiles = _table_shape(num_rows, num_columns)
    table = torch.empty(size, dtype=torch.int32, device=labels.device)
    _tile_table(
        (halves,),
        (labels, table),
        (num_rows, num_columns, halves, num_tiles),
        HALF_TILE=HALF_TILE_ROWS,
        TILE=TILE_COLUMNS,
        BLOCK_TILES=256,
    )
    return table


def sample_rows(weight: Tensor, num_sampled: int, form: RowOptions = NO_OPTIONS) -> Tensor:
    """``num_sampled`` evenly spread rows of ``weight`` ``[V, H]``: ``[num_sampled, H]``, mostly a strided
    view.

    With ``form.valid_columns`` a copy of valid rows only, all NaN for a shard without a valid column.
    """
    num_rows = weight.shape[0]
    if form.valid_columns is not None:
        at = torch.arange(num_sampled, device=weight.device) * form.valid_columns // num_sampled
        rows = weight.detach().index_select(0, at)
        return torch.where(form.valid_columns > 0, rows, torch.nan)
    if num_rows < num_sampled:
        weight = weight.repeat(-(-num_sampled // num_rows), 1)
        num_rows = weight.shape[0]
    step = num_rows // num_sampled * weight.stride(0)
    return weight.as_strided((num_sampled, weight.shape[1]), (step, 1))


@lru_cache(maxsize=MAX_REMEMBERED)
def _bound_prologue(
    tokens_shape: tuple[int, int],
    num_sampled: int,
    num_columns: int,
    tokens_stride: int,
    sample_stride: int,
    logit_scale: float,
    softcap: float | None,
    temperature: bool,
) -> tuple[int, Bound]:
    """Number of entries of the table, and the launch for these shapes."""
    num_rows, hidden_size = tokens_shape
    size, halves, num_tiles = _table_shape(num_rows, num_columns)
    return size, _row_prologue.bind(
        (halves,),
        (
            tokens_stride,
            sample_stride,
            num_rows,
            num_columns,
            hidden_size,
            num_sampled,
            halves,
            num_tiles,
            logit_scale,
            softcap or 1.0,
        ),
        HALF_TILE=HALF_TILE_ROWS,
        SAMPLED=max(16, next_power_of_2(num_sampled)),
        BLOCK_K=128,
        TILE=TILE_COLUMNS,
        BLOCK_TILES=256,
        SOFTCAP=softcap is not None,
        TEMPERATURE=temperature,
    )


def row_prologue(
    tokens: Tensor,  # [C, H]
    sample: Tensor,  # [S, H]: rows of the weight, unit column stride
    labels: Tensor,  # [C] int64, columns of this shard; other values are labels of other shards
    num_columns: int,
    logit_scale: float,
    form: RowOptions = NO_OPTIONS,
    inv_temperature: Tensor | None = None,  # [C] fp32, times the logits after a softcap
) -> RowPrologue:
    """Row shifts and the marks of the half tiles that hold labels, in one launch.

    ``2CH`` bytes read once, and the sample from L2 by every program. A cuBLAS GEMM with a memset and a kernel
    after it was slower.
    """
    row_shift2 = torch.empty(tokens.shape[0], dtype=torch.float32, device=tokens.device)
    size, launch = _bound_prologue(
        tokens.shape,
        sample.shape[0],
        num_columns,
        tokens.stride(0),
        sample.stride(0),
        logit_scale,
        form.softcap,
        inv_temperature is not None,
    )
    table = torch.empty(size, dtype=torch.int32, device=tokens.device)
    launch(
        (
            tokens,
            sample,
            labels,
            row_shift2,
            table,
            row_shift2 if inv_temperature is None else inv_temperature,
        )
    )
    return RowPrologue(row_shift2, table)


#: Rows of a program of the two kernels below: each walks all tiles of its rows, and more programs with fewer
#: rows hide that latency.
BLOCK_ROWS = 8


@lru_cache(maxsize=MAX_REMEMBERED)
def _bound_combine(
    num_rows: int,
    num_columns: int,
    num_tiles: int,
    tile_columns: int,
    e_stride: int | None,
    with_argmax: bool,
    weighted: bool,
    softcap: float | None,
    alone: bool,
    temperature: bool,
) -> Bound:
    return _combine_tiles.bind(
        (ceil_div(num_rows, BLOCK_ROWS),),
        (num_rows, num_columns, num_tiles, e_stride or 0, softcap or 1.0),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_TILES=64,
        TILE=tile_columns,
        WITH_ARGMAX=with_argmax,
        WEIGHTED=weighted,
        SOFTCAP=softcap is not None,
        ALONE=alone,
        FINALIZE=e_stride is not None,
        TEMPERATURE=temperature,
    )


def combine_tiles(
    prologue: RowPrologue,
    tiles: TileStatistics,
    labels: Tensor,  # [C] int64
    num_columns: int,
    form: RowOptions = NO_OPTIONS,
    alone: bool = False,
    e: Tensor | None = None,  # [C, V], in place; only with alone
    inv_temperature: Tensor | None = None,  # [C] fp32, times the logits after a softcap
) -> tuple[RowStatistics, Tensor | None]:
    """Row statistics of this shard from its tiles' statistics; returns them and a row scale, or None.

    ``alone``: the shard is the whole vocabulary, so ``RowStatistics.merged`` holds the tokens' losses. With
    ``e`` (plain loss only) the same launch does :func:`finalize_rows`, and the second result is its row
    scale, fp32 ``[C]``.
    """
    num_tiles, num_rows = tiles.tile_max.shape
    statistics = tiles.label_logit.new_empty(5 if e is None else 4, num_rows)
    shard, tile_shift, merged, row_scale = statistics, None, None, None
    if e is None:
        shard, tile_shift = statistics[:4], statistics[4]
    else:
        row_scale = torch.empty_like(tiles.label_logit)
    if alone:
        merged = Merged(torch.empty_like(tiles.label_logit), torch.empty_like(shard), None)
    argmax = None if tiles.tile_argmax is None else torch.empty_like(labels)
    weighted = None if tiles.tile_weighted is None else torch.empty_like(tiles.label_logit)
    launch = _bound_combine(
        num_rows,
        num_columns,
        num_tiles,
        tiles.tile_columns,
        None if e is None else e.stride(0),
        argmax is not None,
        weighted is not None,
        form.softcap,
        alone,
        inv_temperature is not None,
    )
    launch(
        (
            prologue.row_shift2,
            tiles.tile_max,
            tiles.tile_sum,
            tiles.tile_max if tiles.tile_argmax is None else tiles.tile_argmax,
            tiles.tile_max if tiles.tile_weighted is None else tiles.tile_weighted,
            labels,
            tiles.label_logit,
            shard,
            shard if tile_shift is None else tile_shift,
            labels if argmax is None else argmax,
            shard if weighted is None else weighted,
            *((shard, shard) if merged is None else (merged.loss, merged.stats)),
            *((shard, shard) if e is None or row_scale is None else (e, row_scale)),
            shard if inv_temperature is None else inv_temperature,
        ),
    )
    extra = ExtraStatistics(weighted=weighted)
    return RowStatistics(shard, argmax, extra, tile_shift, merged), row_scale


def finalize_rows(
    e: Tensor,  # [C, V], in place
    labels: Tensor,  # [C] int64
    tiles: TileStatistics,
    stats: RowStatistics,
    row_shift: Tensor | None,  # [C] fp32: Merged.row_shift
    coefficients: Tensor,  # [3, C] fp32, or more rows: row_max, scale, neg_label_grad of GradCoefficients
    form: RowOptions = NO_OPTIONS,
) -> Tensor:
    """Bring every row of ``E`` to one row scale over all shards and write the label's entry.

    Afterwards ``row_scale * E`` is the gradient of the loss with respect to the logits, for an upstream
    gradient of 1. Returns the row scale, fp32 ``[C]``, the same on every rank.
    """
    assert stats.tile_shift is not None
    num_rows, num_columns = e.shape
    row_scale = torch.empty_like(stats.tile_shift)
    _finalize_rows(
        (ceil_div(num_rows, BLOCK_ROWS),),
        (
            e,
            labels,
            tiles.tile_max,
            stats.shard,
            stats.tile_shift,
            stats.shard if row_shift is None else row_shift,
            coefficients,
            tiles.label_logit,
            row_scale,
        ),
        (e.stride(0), num_rows, num_columns, tiles.tile_max.shape[0], form.softcap or 1.0),
        BLOCK_ROWS=BLOCK_ROWS,
        TILE=tiles.tile_columns,
        SOFTCAP=form.softcap is not None,
        ALONE=row_shift is None,
    )
    return row_scale


@lru_cache(maxsize=MAX_REMEMBERED)
def _bound_scale(
    shape: tuple[int, int],
    x_stride: int,
    out_stride: int,
    row_scale_dim: int,
    upstream_dim: int | None,
) -> Bound:
    num_rows, num_columns = shape
    return _scale_rows.bind(
        (num_rows,),
        (num_columns, x_stride, out_stride, row_scale_dim, upstream_dim or 0),
        BLOCK=min(2048, next_power_of_2(num_columns)),
        WITH_UPSTREAM=upstream_dim is not None,
    )


def scale_rows(
    x: Tensor,  # [C, H]; copied without a unit column stride
    row_scale: Tensor,  # [C] or [] fp32
    out: Tensor,  # [C, H], unit column stride; may be x
    upstream: Tensor | None = None,  # [C] or [] fp32
) -> Tensor:
    """``out = (row_scale * upstream)[:, None] * x``, multiplied in fp32; returns ``out``."""
    x = x if x.stride(1) == 1 else x.contiguous()
    upstream_dim = None if upstream is None else upstream.dim()
    launch = _bound_scale(x.shape, x.stride(0), out.stride(0), row_scale.dim(), upstream_dim)
    launch((x, out, row_scale, row_scale if upstream is None else upstream))
    return out


def add_scaled_(total: Tensor, addend: Tensor, scale: Tensor, unless: Tensor) -> None:
    """``total += scale * addend`` in one pass, 12 bytes an element in fp32; not where ``unless`` is not 0.

    ``total`` and ``addend``: fp32, one shape, contiguous; ``scale``: fp32 ``[]``; ``unless``: int64 ``[1]``.
    ``addcmul_`` with such a factor was slower on an H200 than a plain ``add_``, whose bytes are the same.
    """
    block, tensors = 4096, (total, addend, scale, unless)
    _add_scaled((ceil_div(total.numel(), block),), tensors, (total.numel(),), BLOCK=block)


def scaled_copy(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``(scale * x).to(dtype)`` in one pass: 6 bytes an element from fp32 to bf16.

    ``x``: any float, contiguous; ``scale``: fp32 ``[]``.
    """
    block, out = 4096, torch.empty(x.shape, dtype=dtype, device=x.device)
    _scaled_copy((ceil_div(x.numel(), block),), (x, scale, out), (x.numel(),), BLOCK=block)
    return out
