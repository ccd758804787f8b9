"""The ``[C]``-sized maths of losses/statistics.py in one launch each, instead of some eight elementwise ones.

16 bytes read of each shard and 24 written a token: 0.7 MB at ``C = 8192`` and 4 shards, all launch latency.
Predicted: 2 us each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.kernels.launch import Launch, ceil_div
from megatron_fused_ce.kernels.records import NOT_HERE, Merged

BLOCK = 256
_NOT_HERE = tl.constexpr(NOT_HERE)


@triton.jit
def _addends(shard_ptr, rows, inside, num_rows, row_max):
    """One shard's addends, loaded from records.RowStatistics.shard."""
    row_shift = tl.load(shard_ptr + num_rows + rows, mask=inside, other=0.0)
    sum_exp_nonlabel = tl.load(shard_ptr + 2 * num_rows + rows, mask=inside, other=0.0)
    label_logit = tl.load(shard_ptr + 3 * num_rows + rows, mask=inside, other=0.0)
    return addends(row_shift, sum_exp_nonlabel, label_logit, row_max)


@triton.jit
def addends(row_shift, sum_exp_nonlabel, label_logit, row_max):
    """One shard's addends to (sum_exp_nonlabel, label, z_y - m): losses.statistics.shard_addends."""
    shifted = label_logit - row_max
    here = label_logit != _NOT_HERE
    rescaled = tl.where(sum_exp_nonlabel == 0.0, 0.0, sum_exp_nonlabel * tl.exp(row_shift - row_max))
    rescaled = tl.where(row_max == float("inf"), float("nan"), rescaled)
    return rescaled, tl.where(here, tl.exp(shifted), 0.0), tl.where(here, shifted, 0.0)


@triton.jit
def _shard_addends_kernel(
    shard_ptr,  # [4, C] fp32: records.RowStatistics.shard
    row_max_ptr,  # [C] fp32: over the whole vocabulary
    addends_ptr,  # [3, C] fp32, out
    num_rows,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    row_max = tl.load(row_max_ptr + rows, mask=inside, other=0.0)
    sum_exp_nonlabel, label, shifted = _addends(shard_ptr, rows, inside, num_rows, row_max)
    tl.store(addends_ptr + rows, sum_exp_nonlabel, mask=inside)
    tl.store(addends_ptr + num_rows + rows, label, mask=inside)
    tl.store(addends_ptr + 2 * num_rows + rows, shifted, mask=inside)


@triton.jit
def _log1p(x):
    """``log(1 + x)`` for x of 0 to 1, without the rounding of ``1 + x`` (Kahan's form)."""
    u = 1.0 + x
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def store_loss(sum_exp_nonlabel, label, shifted, row_max, loss_ptr, saved_ptr, rows, inside, num_rows):
    """Loss and statistics of tokens whose addends were summed over the shards: loss.token_loss.

    Returns what multiplies their exponentials in the gradient, and the label's gradient, negated.
    """
    total = sum_exp_nonlabel + label
    confident = label > sum_exp_nonlabel
    ratio = sum_exp_nonlabel / tl.where(confident, label, 1.0)
    loss = tl.where(confident, _log1p(ratio), tl.log(total) - shifted)
    tl.store(loss_ptr + rows, loss, mask=inside)
    tl.store(saved_ptr + rows, row_max, mask=inside)
    inv_sum, one_minus_p_label = 1.0 / total, sum_exp_nonlabel / total
    tl.store(saved_ptr + num_rows + rows, inv_sum, mask=inside)
    tl.store(saved_ptr + 2 * num_rows + rows, one_minus_p_label, mask=inside)
    known = (label > 0) | (shifted != 0)
    tl.store(saved_ptr + 3 * num_rows + rows, tl.where(known, shifted, _NOT_HERE), mask=inside)
    return inv_sum, one_minus_p_label


@triton.jit
def _token_loss_kernel(
    row_max_ptr,  # [C] fp32
    sums_ptr,  # [3, C] fp32, summed over the shards
    loss_ptr,  # [C] fp32, out
    saved_ptr,  # [4, C] fp32, out: losses.statistics.TokenStats
    num_rows,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    row_max = tl.load(row_max_ptr + rows, mask=inside, other=0.0)
    sum_exp_nonlabel = tl.load(sums_ptr + rows, mask=inside, other=0.0)
    label = tl.load(sums_ptr + num_rows + rows, mask=inside, other=1.0)
    shifted = tl.load(sums_ptr + 2 * num_rows + rows, mask=inside, other=0.0)
    store_loss(sum_exp_nonlabel, label, shifted, row_max, loss_ptr, saved_ptr, rows, inside, num_rows)


@triton.jit
def _larger(a, b):
    """The larger, NaN where one is."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _merge_shards_kernel(
    shards_ptr,  # [R, 4, C] fp32
    loss_ptr,  # [C] fp32, out
    saved_ptr,  # [4, C] fp32, out: losses.statistics.TokenStats
    row_shift_ptr,  # [C] fp32, out
    num_shards,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Two sweeps over the shards: the maxima, then what is relative to them. In rank order."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    row_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    largest_row_shift = row_max
    for shard in range(num_shards):
        shard_ptr = shards_ptr + shard * 4 * num_rows
        row_max = _larger(tl.load(shard_ptr + rows, mask=inside, other=0.0), row_max)
        row_shift = tl.load(shard_ptr + num_rows + rows, mask=inside, other=0.0)
        largest_row_shift = _larger(row_shift, largest_row_shift)
    sum_exp_nonlabel = tl.zeros((BLOCK,), tl.float32)
    label = sum_exp_nonlabel
    shifted = sum_exp_nonlabel
    for shard in range(num_shards):
        shard_ptr = shards_ptr + shard * 4 * num_rows
        a, b, c = _addends(shard_ptr, rows, inside, num_rows, row_max)
        sum_exp_nonlabel += a
        label += b
        shifted += c
    tl.store(row_shift_ptr + rows, largest_row_shift, mask=inside)
    store_loss(sum_exp_nonlabel, label, shifted, row_max, loss_ptr, saved_ptr, rows, inside, num_rows)


_shard_addends = Launch(_shard_addends_kernel)
_token_loss = Launch(_token_loss_kernel)
_merge_shards = Launch(_merge_shards_kernel)


def shard_addends(
    shard: Tensor,  # [4, C] fp32: RowStatistics.shard, contiguous
    global_max: Tensor,  # [C] fp32
) -> Tensor:
    """:func:`.statistics.shard_addends`: ``[3, C]`` fp32."""
    num_rows = global_max.shape[0]
    out = torch.empty((3, num_rows), dtype=torch.float32, device=global_max.device)
    grid = (ceil_div(num_rows, BLOCK),)
    _shard_addends(grid, (shard, global_max, out), (num_rows,), BLOCK=BLOCK)
    return out


def token_loss(
    sums: Tensor,  # [3, C] fp32, summed over the shards
    global_max: Tensor,  # [C] fp32
) -> tuple[Tensor, Tensor]:
    """:func:`.statistics.token_loss`: loss ``[C]`` and :class:`.TokenStats` ``[4, C]``, fp32."""
    num_rows = global_max.shape[0]
    loss = torch.empty_like(global_max)
    saved = sums.new_empty((4, num_rows))
    grid = (ceil_div(num_rows, BLOCK),)
    _token_loss(grid, (global_max, sums, loss, saved), (num_rows,), BLOCK=BLOCK)
    return loss, saved


def merge_shards(shards: Tensor) -> Merged:
    """:func:`.statistics.merge_shards` of ``[R, 4, C]`` fp32, contiguous."""
    num_shards, _, num_rows = shards.shape
    loss = torch.empty(num_rows, dtype=torch.float32, device=shards.device)
    saved = loss.new_empty((4, num_rows))
    row_shift = torch.empty_like(loss)
    grid = (ceil_div(num_rows, BLOCK),)
    _merge_shards(grid, (shards, loss, saved, row_shift), (num_shards, num_rows), BLOCK=BLOCK)
    return Merged(loss, saved, row_shift)


#: What a collective's kernels take from the event they wait for to their first SMs, with some to spare.
PAUSE_NS = 10000


@triton.jit
def _pause_kernel(NANOSECONDS: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""{{
        .reg .pred early;
        .reg .u64 begin, now;
        mov.u64 begin, %globaltimer;
        again:
        nanosleep.u32 500;
        mov.u64 now, %globaltimer;
        sub.u64 now, now, begin;
        setp.lt.u64 early, now, {NANOSECONDS};
        @early bra again;
        mov.u32 $0, 0;
        }}""",
        "=r",
        [],
        tl.int32,
        is_pure=False,
        pack=1,
    )


def pause(device: torch.device) -> None:
    """Hold the current stream for :data:`PAUSE_NS`."""
    with torch.cuda.device(device):
        _pause_kernel[(1,)](NANOSECONDS=PAUSE_NS, num_warps=1)
