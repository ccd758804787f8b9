"""Triton kernels for the K largest of a chunk's logits ``[C, V]``: one read of it, then a few thousand keys.

A row's columns are cut into blocks of B. The K blocks with the largest maxima hold the K largest logits: an
entry of any other block has K maxima before it. So ``block_maxima`` reads the chunk once, with the softmax's
statistics, and ``best`` picks K of V / B maxima, then ``best_of_blocks`` K of the K * B entries of those
blocks. B near sqrt(V / K) makes both alike; their keys fit into the registers of one program, which finds the
K-th largest bit by bit.

Logits are compared as int32 keys of the same order. ``NOTHING`` is below all of them.

Predicted for one H200 (4.3 TB/s, 650 TFLOP/s in bf16), C = 1024, H = 4096, V = 248320, K = 64, B = 64:

==============  ===================================================  =============  ==============
step            work                                                 time           of the GEMM
==============  ===================================================  =============  ==============
the GEMM        ``2*C*H*V`` = 2.08 TFLOP, ``4*C*V`` = 1.02 GB write  3.2 to 3.4 ms  1
block_maxima    1.02 GB read, 16 MB written                          0.24 ms        0.07
best            16 MB read; 32 steps over 4096 keys a row            0.02 ms        0.01
best_of_blocks  16 MB read in pieces of 256 bytes; 32 steps as well  0.03 ms        0.01
the rest        a sort of ``[C, K]`` and some ten small kernels      0.08 ms        0.03
==============  ===================================================  =============  ==============

Measured on one H100 (T = 131072): 1.19 of the GEMMs (3.10 ms a chunk). block_maxima takes 0.37 ms, 2.8 TB/s,
in place of 0.24: an H100's memory has 0.7 of an H200's bandwidth; both picks 0.13 ms in place of 0.05.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.kernels.launch import Launch, ceil_div, next_power_of_2
from megatron_fused_ce.kernels.records import LOG2_E, NOTHING
from megatron_fused_ce.kernels.softcap import tanh_and_grad

#: Columns that one program of ``block_maxima`` holds at a time, and its warps: those of ``row_statistics``.
MAXIMA_BLOCK = 2048
MAXIMA_WARPS = 4
#: Keys that one program picks from, at most, and of which a thread holds about so many.
MOST_KEYS = 1 << 14
KEYS_PER_THREAD = 16
_NOTHING = tl.constexpr(NOTHING)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _scaled(x, logit_scale, softcap, SOFTCAP: tl.constexpr):
    z = tl.fma(x, logit_scale, 0.0)  # of -0.0 it makes 0.0
    if SOFTCAP:
        tanh, _ = tanh_and_grad(z / softcap)
        z = softcap * tanh
    return z


@triton.jit
def _as_key(z):
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _add_columns(
    row_ptr,
    maxima_ptr,
    start,
    num_columns,
    logit_scale,
    softcap,
    exponent,  # log2(e) / temperature
    largest,  # key
    sums,  # [BLOCK / GROUP, GROUP], of exponentials relative to ``largest`` (0 while that is -inf)
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
):
    of_block = tl.arange(0, BLOCK // GROUP)
    columns = start + of_block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if RAGGED:
        inside = columns < num_columns
        z = _scaled(
            tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32), logit_scale, softcap, SOFTCAP
        )
        keys = tl.where(inside, _as_key(z), _NOTHING)
        z = tl.where(inside, z, float("-inf"))
    else:
        z = _scaled(tl.load(row_ptr + columns).to(tl.float32), logit_scale, softcap, SOFTCAP)
        keys = _as_key(z)
    maxima = tl.max(keys, axis=1)
    blocks = start // GROUP + of_block
    tl.store(maxima_ptr + blocks, maxima, mask=blocks * GROUP < num_columns)
    top = tl.maximum(largest, tl.max(maxima, axis=0))
    new_max = _of_key(top)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    sums = sums * tl.exp2((_of_key(largest) - shift) * exponent) + tl.exp2((z - shift) * exponent)
    return top, sums


@triton.jit
def _block_maxima_kernel(
    logits_ptr,  # [C, V]
    maxima_ptr,  # [C, V / GROUP] int32, out: keys
    stats_ptr,  # [2, C] fp32, out: row maximum, sum of exponentials
    inv_temperature_ptr,  # [C] fp32
    row_stride,
    num_rows,
    num_columns,
    num_blocks,
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One program per row. A NaN reaches the sum, whatever it does to the maximum."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, of_row_ptr = logits_ptr + row * row_stride, maxima_ptr + row * num_blocks
    exponent = tl.load(inv_temperature_ptr + row) * _LOG2_E
    largest = _as_key(tl.full((), float("-inf"), tl.float32))
    sums = tl.zeros((BLOCK // GROUP, GROUP), tl.float32)
    whole = num_columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        largest, sums = _add_columns(
            row_ptr, of_row_ptr, start, num_columns, logit_scale, softcap, exponent, largest, sums,
            BLOCK, GROUP, SOFTCAP, False,
        )  # fmt: skip
    if whole < num_columns:
        largest, sums = _add_columns(
            row_ptr, of_row_ptr, whole, num_columns, logit_scale, softcap, exponent, largest, sums,
            BLOCK, GROUP, SOFTCAP, True,
        )  # fmt: skip
    tl.store(stats_ptr + row, _of_key(largest))
    tl.store(stats_ptr + num_rows + row, tl.sum(tl.sum(sums, axis=1), axis=0))


@triton.jit
def _best_kernel(
    from_ptr,  # [C, num] int32 keys, or logits [C, V]
    blocks_ptr,  # [C, num] int32, ascending: blocks of the logits
    keys_ptr,  # [C, count] int32, out
    places_ptr,  # [C, count] int32, out, ascending: columns
    row_stride,
    num,
    num_columns,
    count,
    logit_scale,
    softcap,
    SIZE: tl.constexpr,  # keys of this program, ``count`` or more
    GROUP: tl.constexpr,  # columns of a block; 0: keys are given
    SOFTCAP: tl.constexpr,
):
    """One program per row: its ``count`` largest keys, of equal ones those of the lowest columns."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = from_ptr + row * row_stride
    places = tl.arange(0, SIZE)
    if GROUP > 0:
        inside = places // GROUP < num
        block = tl.load(blocks_ptr + row * num + places // GROUP, mask=inside, other=0)
        places = block * GROUP + places % GROUP
        inside &= places < num_columns
        x = tl.load(row_ptr + places, mask=inside, other=0.0).to(tl.float32)
        keys = tl.where(inside, _as_key(_scaled(x, logit_scale, softcap, SOFTCAP)), _NOTHING)
    else:
        keys = tl.load(row_ptr + places, mask=places < num, other=_NOTHING)
    # The largest number that ``count`` keys reach, from its highest bit on.
    reached = tl.sum((keys >= 0).to(tl.int32), axis=0)
    last = tl.where(reached >= count, 0, _NOTHING)
    bit = 1 << 30
    for _ in range(31):
        tried = last | bit
        reached = tl.sum((keys >= tried).to(tl.int32), axis=0)
        last = tl.where(reached >= count, tried, last)
        bit = bit >> 1
    above, ties = keys > last, keys == last
    so_far = tl.cumsum((above.to(tl.int32) << 16) | ties.to(tl.int32), axis=0)
    wanted = count - tl.sum(above.to(tl.int32), axis=0)
    num_ties = so_far & 0xFFFF
    chosen = above | (ties & (num_ties <= wanted))
    at = row * count + (so_far >> 16) + tl.minimum(num_ties, wanted) - 1
    tl.store(keys_ptr + at, keys, mask=chosen)
    tl.store(places_ptr + at, places, mask=chosen)


# A scaled logit is rounded before it is compared and before the maximum is subtracted: not fused.
_block_maxima = Launch(_block_maxima_kernel, num_warps=MAXIMA_WARPS, enable_fp_fusion=False)
_best = {warps: Launch(_best_kernel, num_warps=warps, enable_fp_fusion=False) for warps in (1, 2, 4, 8, 16)}


def can_pick(num_columns: int, group: int, count: int) -> bool:
    """Whether one program can hold the keys of a row."""
    return max(ceil_div(num_columns, group), next_power_of_2(count * group)) <= MOST_KEYS


def block_maxima(
    logits: Tensor,  # [C, V'], unit column stride
    num_columns: int,  # V: those behind it are padding
    group: int,  # B, a power of 2 up to MAXIMA_BLOCK
    logit_scale: float,
    softcap: float | None,
    inv_temperature: Tensor,  # [C] fp32, times the logits after a softcap
) -> tuple[Tensor, Tensor]:
    """Keys of the blocks' largest logits, int32 ``[C, V / B]``; row maximum (before the temperature) and sum
    of exponentials (at it), fp32 ``[2, C]``."""
    num_rows, num_blocks = len(logits), ceil_div(num_columns, group)
    maxima = logits.new_empty((num_rows, num_blocks), dtype=torch.int32)
    stats = logits.new_empty((2, num_rows), dtype=torch.float32)
    _block_maxima(
        (num_rows,),
        (logits, maxima, stats, inv_temperature),
        (logits.stride(0), num_rows, num_columns, num_blocks, logit_scale, softcap or 1.0),
        BLOCK=max(group, min(MAXIMA_BLOCK, next_power_of_2(num_columns))),
        GROUP=group,
        SOFTCAP=softcap is not None,
    )
    return maxima, stats


def best(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of int32 keys ``[C, N]`` and their columns, int32 ``[C, count]``, by ascending
    column; of equal keys those of the lowest columns. ``NOTHING`` where there are fewer."""
    return _picked(keys, keys, keys.shape[1], keys.shape[1], count, keys.shape[1], 0, 1.0, None)


def best_of_blocks(
    logits: Tensor,  # [C, V'], unit column stride
    blocks: Tensor,  # [C, N] int32, ascending
    num_columns: int,
    group: int,
    count: int,
    logit_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """:func:`best` of the entries of some blocks; columns are the logits'."""
    num = blocks.shape[1]
    return _picked(logits, blocks, num, num_columns, count, num * group, group, logit_scale, softcap)


def _picked(
    source: Tensor,
    blocks: Tensor,
    num: int,
    num_columns: int,
    count: int,
    num_keys: int,
    group: int,
    logit_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    size = next_power_of_2(max(num_keys, count))
    keys, places = blocks.new_empty((2, len(source), count))
    _best[min(16, max(1, size // (32 * KEYS_PER_THREAD)))](
        (len(source),),
        (source, blocks, keys, places),
        (source.stride(0), num, num_columns, count, logit_scale, softcap or 1.0),
        SIZE=size,
        GROUP=group,
        SOFTCAP=softcap is not None,
    )
    return keys, places
