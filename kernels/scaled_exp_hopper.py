"""The scaled-exp GEMM on Hopper, in Gluon: warp-specialised, its epilogue hidden.

The same maths as :mod:`.scaled_exp`. One program per SM: a loader warp brings 128 x 64 tokens and
256 x 64 weights into a ring of shared memory by TMA; two warpgroups take 64 rows each of the
128 x 256 tile. They wait for the ring one by one, never for each other, so one can run up to the ring's
length ahead: while it exponentiates, the other has the tensor cores to itself.

Cost of the epilogue per tile of 32768 logits (the GEMM takes ``H/64 * 1024`` cycles): exponentials 2048
cycles at 16 a cycle; maximum 512; multiply-add and sum 512. The label and the ragged last columns would
double that: a branch that only their tiles take (12 % of the half tiles) leaves them out. Predicted: 1.03 of
cuBLAS's time at H = 4096 with half of the epilogue hidden. Measured within whole steps: 0.96 to 1.02
(docs/benchmarks/results/2026-11-21-h200-profile.json). More is hidden than predicted: the ring of four slots
lets a warpgroup run 2048 cycles ahead.

Logits rounded on purpose: 768 cycles more (a conversion of two, a shift, an AND; 256 each), no bytes.
Predicted: 1 % of the GEMM at H = 4096 with half of them hidden. A temperature per token: four bytes a row of
each tile, from L2; it scales a vector of rows, which the exponent's multiply-add reads in a number's place.
A softcap: 4096 cycles of exponentials and reciprocals more, and six other instructions an element, so that a
warpgroup's epilogue takes longer than the ring lets the other run ahead. Predicted: 1 to 1.7 % of a step at
H = 4096. Measured: 0 to 3 %, as at H = 2304 (docs/benchmarks/2026-11-23.md).

Tiles are handed out by a counter in global memory: a program that starts late, because NCCL's kernels
hold its SM, takes fewer of them. The loader asks for its next tile while it loads the present one and
puts the number into shared memory beside the tile's first slot, whose barrier the consumers wait for
anyway: nobody waits for the atomic, and no barrier is added. One program computes a whole tile and writes it,
so results do not depend on the order of the tiles.

With triton 3.9 a program is a cluster of two thread blocks and its tile 256 x 256. The first block loads the
weights into both by multicast: 32 KiB from L2 for 64 columns of H and a block, where one block reads 48.
cuBLAS does the same; it takes less power, and at its limit the chip then clocks higher. A slot's weights wait
until both blocks have given it back, its tokens until their own has. The first block asks for tiles and
publishes each in a 64-bit word of the table, half way between the question and the next tile. The same bits
as with one block. Predicted: 1.00 to 1.015 of cuBLAS's time. Measured within whole steps: 1.007 to 1.016, at
H = 2048 1.030 (docs/benchmarks/results/2026-11-23-h200-clusters-{roof,long,h2048}.json).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_fused_ce.kernels.launch import (
    MAX_REMEMBERED,
    Bound,
    DescriptorTemplates,
    Launch,
    num_sms,
)
from megatron_fused_ce.kernels.records import (
    HEADROOM,
    LOG2_E,
    LOWEST,
    NO_OPTIONS,
    TABLE_HEADER,
    TABLE_WORDS,
    GradEpilogue,
    RowOptions,
    TileStatistics,
)

_HEADER = gl.constexpr(TABLE_HEADER)
_HEADROOM = gl.constexpr(HEADROOM)
_LOG2_E = gl.constexpr(LOG2_E)
_LOWEST = gl.constexpr(LOWEST)
_SMALLEST = gl.constexpr(2.0**-126)  # that is not subnormal

#: A NaN logit must reach the sums.
PROPAGATE_NAN = gl.constexpr(triton.language.PropagateNan.ALL)

BLOCK_M = gl.constexpr(128)  # two warpgroups of 64 rows
HALF_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(64)
#: Slots of 48 KiB in the ring; a tile is written in halves, through 16 KiB per warpgroup: 224 KiB in all.
#: Three slots and whole tiles were slower, more so at H = 2048; four slots and quarters through two buffers
#: of 8 KiB, so that none waits for the one before, slightly slower.
NUM_SLOTS = gl.constexpr(4)
#: Row blocks that share the columns in L2: as many as hold 16 MiB of tokens, and at most 16, which was the
#: fastest of 8, 16, 32 and 64 on an H200 (8192 x 4096 x 128256 and 8192 x 2048 x 151936).
GROUP_BYTES = 16 * 2**20
LARGEST_GROUP = 16
#: Registers of a consumer's thread and of the loader's, of the 168 * 384 that a program has.
CONSUMER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)
#: Slots before a tile's end at which its loader asks for the next tile: 8 * 1024 cycles, 5 us, for an
#: atomic of about 1 us. Not earlier: all programs have then begun their first tile, so that the tiles
#: in flight stay neighbours, and a program that starts late finds more left.
CLAIM_AHEAD = gl.constexpr(8)

STATISTICS = gl.constexpr(0)
GRADIENTS = gl.constexpr(1)

#: Thread blocks of a cluster. Two share the weights of a tile, with 128 rows each: a third less is read from
#: L2. Gluon's multicast was tried with triton 3.9; 3.6 has none.
CLUSTER = 2 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 1
_WORDS = gl.constexpr(TABLE_WORDS)

# Names that changed after triton 3.6, which has the older ones.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class _Rows(NamedTuple):
    """Pointers to one number for each row, ``[C]``."""

    label: gl.tensor
    shift: gl.tensor  # STATISTICS: row_shift2; GRADIENTS: the row maximum, in powers of two
    factor: gl.tensor
    at_label: gl.tensor
    entropy_factor: gl.tensor
    inv_temperature: gl.tensor


class _Tiles(NamedTuple):
    """Pointers to what tiles write for each row (records.TileStatistics), and to the marks of half tiles."""

    marks: gl.tensor
    max: gl.tensor
    sum: gl.tensor
    argmax: gl.tensor
    weighted: gl.tensor
    label_logit: gl.tensor


class _Ring(NamedTuple):
    """Shared memory of the slots, and their barriers."""

    weights: gl.shared_memory_descriptor
    tile_ids: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    empty_in_cluster: gl.shared_memory_descriptor  # in both blocks; in the first's memory, and it alone waits


class _Sizes(NamedTuple):
    num_rows: gl.tensor
    valid_columns: gl.tensor
    num_m: gl.tensor
    num_n: gl.tensor
    num_k: gl.tensor


class _Scales(NamedTuple):
    logit_scale: gl.tensor
    scale2: gl.tensor
    softcap: gl.tensor


class _HalfTile(NamedTuple):
    """What the epilogue of 64 rows reads: one number for each row unless said otherwise."""

    index: gl.tensor  # of the row, in the chunk
    inside: gl.tensor  # bool: a row of the chunk
    shift: gl.tensor
    label: gl.tensor  # its column in the tile; -1: not in this tile
    holds_label: gl.tensor  # one number: not 0 if any of the rows has its label here
    scale2: gl.tensor  # these three: one number without a temperature per token
    to_exponent: gl.tensor  # always one number
    softcap2: gl.tensor
    factor: gl.tensor  # from here on only GRADIENTS reads
    at_label: gl.tensor
    entropy_factor: gl.tensor


class _Kind(NamedTuple):
    """What a launch is compiled for."""

    GROUP_M: gl.constexpr  # row blocks that share the columns in L2
    MODE: gl.constexpr
    WRITE: gl.constexpr  # E, or LOGITS; gradients
    LOGITS: gl.constexpr
    WITH_ARGMAX: gl.constexpr
    WEIGHTED: gl.constexpr  # sums of E times its exponent: entropy
    ENTROPY: gl.constexpr  # its gradient
    MASKED: gl.constexpr  # padding
    SOFTCAP: gl.constexpr
    ROUNDED: gl.constexpr  # logits, to bf16
    TEMPERATURE: gl.constexpr  # one for each row


@gluon.constexpr_function
def _over(ctas, *step):
    """For a layout: where the cluster's second block is, seen from the first; zeros where they share."""
    return [list(step)] if ctas > 1 else []


@gluon.constexpr_function
def _accumulators(ctas):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, int(BLOCK_N), 16], _over(ctas, 1, 0))


@gluon.constexpr_function
def _one_for_all(ctas, num_warps):
    return gl.BlockedLayout([1], [32], [num_warps], [0], _over(ctas, 0))


@gluon.constexpr_function
def _one_in_each(ctas):
    return gl.SwizzledSharedLayout(1, 1, 1, order=[0], cga_layout=_over(ctas, 0))


@gluon.constexpr_function
def _barriers(ctas, step):
    """``step`` 1: each block has its own; 0: only the first has one, for all."""
    return mbarrier.MBarrierLayout(_over(ctas, step))


@gluon.jit
def _tile_of(tile, num_m, num_n, GROUP_M: gl.constexpr):
    per_group = GROUP_M * num_n
    first_m = (tile // per_group) * GROUP_M
    in_group = gl.minimum(num_m - first_m, GROUP_M)
    return first_m + (tile % per_group) % in_group, (tile % per_group) // in_group


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _larger_first(value, index, other, other_index):
    """The larger value, and of equal ones the lower index."""
    first = (value > other) | ((value == other) & (index < other_index))
    return gl.where(first, value, other), gl.where(first, index, other_index)


@gluon.jit
def _reciprocal(x):
    """One instruction, good to 1 ulp; a division takes eight."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _rounded(z):
    """``z`` rounded to bf16, in pairs: a conversion alone takes as long as an exponential."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 pair;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xffff0000;
        }""",
        "=r,=r,r,r",
        [z],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _softcapped(z, to_exponent, softcap2, shift, kind):
    """Softcapped logits in powers of two, less ``shift``; and the softcap's gradient: softcap.tanh_and_grad.

    ``tanh(x) = 1 - u`` and its gradient ``e u**2`` with ``e = exp(2 x)``, ``u = 2 / (1 + e)``; ``e`` stays
    below ``2**60``, where both have long reached their ends.
    """
    x2 = gl.minimum(z * to_exponent, 60.0, propagate_nan=PROPAGATE_NAN)
    e = gl.exp2(x2)
    u = _reciprocal(0.5 * e + 0.5)
    exponent = (softcap2 - shift) - softcap2 * u
    if kind.MODE == STATISTICS:
        # A column left out is -inf and stays so; no other value changes. A selection took 5 instructions.
        exponent += x2 * _SMALLEST
    return exponent, (e * u) * u


@gluon.jit
def _halves(tile):
    """Its left and its right columns."""
    halves = gl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return gl.split(gl.permute(halves, (0, 2, 1)))


@gluon.jit
def _rows_of(x, z):
    """A vector of rows, to be combined with ``z``; a number as it is."""
    if len(x.shape) == 0:
        return x
    else:
        return gl.convert_layout(x, gl.SliceLayout(1, z.type.layout))[:, None]


@gluon.jit
def _exponentials(z, shift, row, kind):
    """``E = 2**(z2 - shift)``, 0 where z is -inf, times the softcap's gradient, in bf16; with ``LOGITS`` z.

    Before it, of each row, without the softcap's gradient and where z is not -inf: the sum of E, that of E
    times its exponent (where ``WEIGHTED``).
    """
    shifts = _rows_of(shift, z)
    if kind.SOFTCAP:
        exponent, softcap_grad = _softcapped(z, row.to_exponent, _rows_of(row.softcap2, z), shifts, kind)
    else:
        exponent = z * _rows_of(row.scale2, z) - shifts
    if kind.WEIGHTED:
        exponent = gl.maximum(exponent, _LOWEST, propagate_nan=PROPAGATE_NAN)
    e = gl.exp2(exponent)
    total = gl.reduce(e, 1, _plus)
    weighted = total
    if kind.WEIGHTED:
        weighted = gl.reduce(e * exponent, 1, _plus)
    if kind.LOGITS:
        e = z
    elif kind.SOFTCAP:
        e = e * softcap_grad
    return total, weighted, e.to(gl.bfloat16)


@gluon.jit
def _gradients(z, label, row, kind):
    """Gradients of the logits (records.GradEpilogue), in bf16."""
    if kind.SOFTCAP:
        exponent, softcap_grad = _softcapped(
            z, row.to_exponent, _rows_of(row.softcap2, z), _rows_of(row.shift, z), kind
        )
    else:
        exponent = z * _rows_of(row.scale2, z) - _rows_of(row.shift, z)
    if kind.ENTROPY:
        exponent = gl.maximum(exponent, _LOWEST, propagate_nan=PROPAGATE_NAN)
        out = gl.exp2(exponent) * (_rows_of(row.factor, z) + _rows_of(row.entropy_factor, z) * exponent)
    else:
        out = gl.exp2(exponent) * _rows_of(row.factor, z)
    columns = gl.arange(0, z.shape[1], gl.SliceLayout(0, z.type.layout))
    out = gl.where(columns[None, :] == _rows_of(label, z), _rows_of(row.at_label, z), out)
    if kind.SOFTCAP:
        out = out * softcap_grad
    return out.to(gl.bfloat16)


@gluon.jit
def _without_padding(out, valid_columns):
    columns = gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    return gl.where((columns < valid_columns)[None, :], out, 0.0)


@gluon.jit
def _rank():
    """This block's place in its cluster: for addresses alone, since Gluon's numbers are the cluster's."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _claim(table_ptr):
    """The cluster's first block asks for a tile. Nothing waits for it before :func:`_answer`."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        .reg .b32 lane, rank;
        mov.u32 lane, %laneid;
        mov.u32 rank, %cluster_ctarank;
        or.b32 lane, lane, rank;
        setp.eq.u32 asks, lane, 0;
        mov.u32 $0, 0;
        @asks atom.global.gpu.relaxed.add.u32 $0, [$1], 1;
        }""",
        "=r,l",
        [table_ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _answer(claim):
    """The tile of :func:`_claim`, on all lanes; 0 in other blocks than the first."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [claim],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _publish(tile, word, number):
    """The cluster's first block writes its tile for the others, with its number. Returns the tile."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 rank;
        .reg .b64 both;
        mov.u32 rank, %cluster_ctarank;
        setp.eq.u32 first, rank, 0;
        mov.u32 $0, $1;
        mov.b64 both, {$1, $3};
        @first st.global.gpu.relaxed.u64 [$2], both;
        }""",
        "=&r,r,l,r",
        [tile, word.to(gl.int64), number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _published(tile, word, number):
    """The first block's tile, in all of them: the others wait for ``number``."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred waits;
        .reg .b32 rank, seen;
        .reg .b64 both;
        mov.u32 rank, %cluster_ctarank;
        setp.ne.u32 waits, rank, 0;
        mov.u32 $0, $1;
        again:
        @waits ld.global.gpu.relaxed.u64 both, [$2];
        @waits mov.b64 {$0, seen}, both;
        @waits setp.ne.u32 waits, seen, $3;
        @waits bra again;
        }""",
        "=&r,r,l,r",
        [tile, word.to(gl.int64), number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _tell(tile_ids, empty, step, tile):
    """Put the tile's number beside the slot of its first step: whoever sees that slot full sees it."""
    slot = step % NUM_SLOTS
    mbarrier.wait(empty.index(slot), ((step // NUM_SLOTS) & 1) ^ 1)
    layout: gl.constexpr = _one_for_all(gl.num_ctas(), 1)
    tile_ids.index(slot).store(gl.full([1], tile, gl.int32, layout))
    # All lanes have stored before one of them arrives at the slot's barrier.
    _barrier()


@gluon.jit
def _told(tile_ids, full, step):
    """Wait for a tile's first slot and read the tile's number there."""
    slot = step % NUM_SLOTS
    mbarrier.wait(full.index(slot), (step // NUM_SLOTS) & 1)
    layout: gl.constexpr = _one_for_all(gl.num_ctas(), 4)
    return gl.reduce(tile_ids.index(slot).load(layout), 0, _plus)


@gluon.jit
def _fill(  # steps first_k to last_k of a tile; returns the step after them
    tokens_desc,
    weight_desc,
    upper_slots,
    lower_slots,
    ring,
    m,
    n,
    first_k,
    last_k,
    step,
):
    CTAS: gl.constexpr = gl.num_ctas()
    for k in range(first_k, last_k):
        slot = step % NUM_SLOTS
        phase = ((step // NUM_SLOTS) & 1) ^ 1
        mbarrier.wait(ring.empty.index(slot), phase)
        bar = ring.full.index(slot)
        mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
        row = m * (CTAS * BLOCK_M)
        _tma_load(tokens_desc, [row, k * BLOCK_K], bar, upper_slots.index(slot))
        _tma_load(tokens_desc, [row + CTAS * HALF_M, k * BLOCK_K], bar, lower_slots.index(slot))
        if CTAS > 1:
            mbarrier.wait(ring.empty_in_cluster.index(slot), phase)
            weights = ring.weights.index(slot)
            _tma_load(weight_desc, [n * BLOCK_N, k * BLOCK_K], bar, weights, multicast=True)
        else:
            _tma_load(weight_desc, [n * BLOCK_N, k * BLOCK_K], bar, ring.weights.index(slot))
        step += 1
    return step


@gluon.jit
def _loader(
    tokens_desc,
    weight_desc,
    table_ptr,
    upper_slots,
    lower_slots,
    ring,  # _Ring
    sizes,  # _Sizes
    GROUP_M: gl.constexpr,
):
    """One warp: fills the ring, slot by slot, ahead of the consumers and across tiles."""
    CTAS: gl.constexpr = gl.num_ctas()
    step = 0
    number = 1
    num_tiles = sizes.num_m * sizes.num_n
    early = gl.maximum(sizes.num_k - CLAIM_AHEAD, 0)
    late = gl.maximum(sizes.num_k - CLAIM_AHEAD // 2, 0)
    words = table_ptr + 4 + gl.program_id(0) * (2 * _WORDS)
    tile = _answer(_claim(table_ptr))
    if CTAS > 1:
        tile = _published(_publish(tile, words, number), words, number)
    while tile < num_tiles:
        m, n = _tile_of(tile, sizes.num_m, sizes.num_n, GROUP_M)
        _tell(ring.tile_ids, ring.empty, step, tile)
        step = _fill(tokens_desc, weight_desc, upper_slots, lower_slots, ring, m, n, 0, early, step)
        claim = _claim(table_ptr)
        if CTAS > 1:
            # Half way, so that no block waits for the first one's answer.
            step = _fill(tokens_desc, weight_desc, upper_slots, lower_slots, ring, m, n, early, late, step)
            word = words + 2 * (number % _WORDS)
            number += 1
            tile = _publish(_answer(claim), word, number)
            step = _fill(
                tokens_desc, weight_desc, upper_slots, lower_slots, ring, m, n, late, sizes.num_k, step
            )
            tile = _published(tile, word, number)
        else:
            step = _fill(
                tokens_desc, weight_desc, upper_slots, lower_slots, ring, m, n, early, sizes.num_k, step
            )
            tile = _answer(claim)
    # A number past the last tile's, in a slot without anything else, ends the consumers.
    _tell(ring.tile_ids, ring.empty, step, tile)
    mbarrier.arrive(ring.full.index(step % NUM_SLOTS), count=1)


@gluon.jit
def _store_half(out_desc, half, staging, row, column):
    """Through shared memory, once the half before it has been read from there."""
    tma.store_wait(0)
    _barrier()
    staging.store(half)
    fence_async_shared()
    _barrier()
    _tma_store(out_desc, [row, column], staging)


@gluon.jit
def _release(ring, slot):
    """Give a slot back, once all four warps are done with it."""
    _barrier()
    mbarrier.arrive(ring.empty.index(slot), count=1)
    if gl.num_ctas() > 1:
        mbarrier.arrive(ring.empty_in_cluster.index(slot), count=1)


@gluon.jit
def _multiply(token_slots, ring, num_k, step):
    """The half tile's GEMM over all of H, and the step after its last; its first slot is full."""
    CTAS: gl.constexpr = gl.num_ctas()
    z = gl.zeros([CTAS * HALF_M, BLOCK_N], gl.float32, _accumulators(CTAS))
    slot = step % NUM_SLOTS
    weights = ring.weights.index(slot).permute((1, 0))
    z = warpgroup_mma(token_slots.index(slot), weights, z, use_acc=False, is_async=True)
    z = warpgroup_mma_wait(1, deps=[z])
    step += 1
    for _k in range(1, num_k):
        slot = step % NUM_SLOTS
        mbarrier.wait(ring.full.index(slot), (step // NUM_SLOTS) & 1)
        weights = ring.weights.index(slot).permute((1, 0))
        z = warpgroup_mma(token_slots.index(slot), weights, z, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])
        _release(ring, (step - 1) % NUM_SLOTS)
        step += 1
    z = warpgroup_mma_wait(0, deps=[z])
    _release(ring, (step - 1) % NUM_SLOTS)
    return z, step


@gluon.jit
def _statistics_epilogue(z, row, first_column, n, of_tiles, num_rows, valid_columns, scales, kind):
    """Write a half tile's statistics; its left and right columns of E or logits, in bf16."""
    ACC: gl.constexpr = z.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ACC)
    if (row.holds_label != 0) | (first_column + BLOCK_N > valid_columns):
        columns = gl.arange(0, BLOCK_N, COLUMNS)
        is_label = columns[None, :] == row.label[:, None]
        picked = gl.reduce(gl.where(is_label, z, 0.0), 1, _plus)
        here = row.inside & (row.label >= 0)
        gl.store(of_tiles.label_logit + row.index, picked * scales.logit_scale, mask=here)
        left_out = is_label | ((columns + first_column)[None, :] >= valid_columns)
        z = gl.where(left_out, float("-inf"), z)
    at = n.to(gl.int64) * num_rows + row.index
    if kind.WITH_ARGMAX:
        columns = gl.arange(0, BLOCK_N, COLUMNS) + first_column
        index = gl.zeros(z.shape, gl.int32, ACC) + columns[None, :]
        row_max, row_argmax = gl.reduce((z, index), 1, _larger_first)
        gl.store(of_tiles.argmax + at, row_argmax, mask=row.inside)
    else:
        row_max = gl.reduce(z, 1, _larger)
    # logit_scale is above 0 here, so the maximum commutes with it.
    if kind.SOFTCAP:
        tile_max, _ = _softcapped(row_max, row.to_exponent, row.softcap2, row.shift, kind)
    else:
        tile_max = row_max * row.scale2 - row.shift
    shift = gl.where(tile_max > _HEADROOM, tile_max, 0.0) + row.shift
    gl.store(of_tiles.max + at, tile_max, mask=row.inside)
    if kind.SOFTCAP | kind.WEIGHTED | kind.LOGITS:
        # By halves: registers hold no more than one of them beside what it is multiplied by.
        left, right = _halves(z)
        left_sum, left_weighted, left = _exponentials(left, shift, row, kind)
        right_sum, right_weighted, right = _exponentials(right, shift, row, kind)
        gl.store(of_tiles.sum + at, gl.convert_layout(left_sum + right_sum, ROWS), mask=row.inside)
        if kind.WEIGHTED:
            weighted = gl.convert_layout(left_weighted + right_weighted, ROWS)
            gl.store(of_tiles.weighted + at, weighted, mask=row.inside)
    else:
        e = gl.exp2(z * _rows_of(row.scale2, z) - shift[:, None])
        gl.store(of_tiles.sum + at, gl.reduce(e, 1, _plus), mask=row.inside)
        left, right = _halves(e.to(gl.bfloat16))
    return left, right


@gluon.jit
def _gradient_epilogue(z, row, first_column, valid_columns, kind):
    """Gradients of a half tile's logits: its left and right columns, in bf16."""
    if kind.SOFTCAP | kind.ENTROPY:
        left, right = _halves(z)
        left = _gradients(left, row.label, row, kind)
        right = _gradients(right, row.label - BLOCK_N // 2, row, kind)
    else:
        grad = gl.exp2(z * _rows_of(row.scale2, z) - row.shift[:, None]) * row.factor[:, None]
        if row.holds_label != 0:
            columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, z.type.layout))
            grad = gl.where(columns[None, :] == row.label[:, None], row.at_label[:, None], grad)
        left, right = _halves(grad.to(gl.bfloat16))
    if kind.MASKED:  # noqa: SIM102 (known when compiled, unlike the next)
        if first_column + BLOCK_N > valid_columns:
            left = _without_padding(left, valid_columns - first_column)
            right = _without_padding(right, valid_columns - first_column - BLOCK_N // 2)
    return left, right


@gluon.jit
def _consume_tile(
    tile,
    step,
    out_desc,
    of_rows,  # _Rows
    of_tiles,  # _Tiles
    token_slots,
    staging,
    ring,  # _Ring
    sizes,  # _Sizes
    scales,  # _Scales
    FIRST_ROW: gl.constexpr,
    kind,  # _Kind
):
    """64 rows of one tile, whose first slot is full; returns the step after its last."""
    CTAS: gl.constexpr = gl.num_ctas()
    ROWS: gl.constexpr = gl.SliceLayout(1, _accumulators(CTAS))
    m, n = _tile_of(tile, sizes.num_m, sizes.num_n, kind.GROUP_M)
    first_row = m * (CTAS * BLOCK_M) + CTAS * FIRST_ROW
    first_column = n * BLOCK_N
    # Row vectors first: their latency hides under the GEMMs.
    rows = first_row + gl.arange(0, CTAS * HALF_M, ROWS)
    inside = rows < sizes.num_rows
    shift = gl.load(of_rows.shift + rows, mask=inside, other=0.0)
    label = gl.load(of_rows.label + rows, mask=inside, other=-1) - first_column
    label = gl.where((label >= 0) & (label < BLOCK_N), label, -1).to(gl.int32)
    inv_temperature = 1.0
    if kind.TEMPERATURE:
        inv_temperature = gl.load(of_rows.inv_temperature + rows, mask=inside, other=1.0)
    half = first_row // HALF_M
    if CTAS > 1:
        half += _rank()
    # A cluster's last block may be past the last row.
    halves = 2 * gl.cdiv(sizes.num_rows, BLOCK_M)
    holds_label = gl.load(of_tiles.marks + n * halves + half, mask=half < halves, other=0)
    factor, at_label, entropy_factor = shift, shift, shift
    if kind.MODE == GRADIENTS:
        factor = gl.load(of_rows.factor + rows, mask=inside, other=0.0)
        at_label = gl.load(of_rows.at_label + rows, mask=inside, other=0.0)
        if kind.ENTROPY:
            entropy_factor = gl.load(of_rows.entropy_factor + rows, mask=inside, other=0.0)

    z, step = _multiply(token_slots, ring, sizes.num_k, step)
    if kind.ROUNDED:
        z = _rounded(z)

    row = _HalfTile(
        rows,
        inside,
        shift,
        label,
        holds_label,
        scales.scale2 * inv_temperature,
        2.0 * scales.scale2 / scales.softcap,
        scales.softcap * _LOG2_E * inv_temperature,
        factor,
        at_label,
        entropy_factor,
    )
    if kind.MODE == STATISTICS:
        left, right = _statistics_epilogue(
            z, row, first_column, n, of_tiles, sizes.num_rows, sizes.valid_columns, scales, kind
        )
    else:
        left, right = _gradient_epilogue(z, row, first_column, sizes.valid_columns, kind)
    if kind.WRITE:
        _store_half(out_desc, left, staging, first_row, first_column)
        _store_half(out_desc, right, staging, first_row, first_column + BLOCK_N // 2)
    return step


@gluon.jit
def _consumer(
    out_desc,
    of_rows,
    of_tiles,
    token_slots,
    staging,
    ring,
    sizes,
    scales,
    FIRST_ROW: gl.constexpr,
    kind,
):
    """One warpgroup: 64 rows of every tile of this program."""
    step = 0
    num_tiles = sizes.num_m * sizes.num_n
    tile = _told(ring.tile_ids, ring.full, step)
    while tile < num_tiles:
        step = _consume_tile(
            tile,
            step,
            out_desc,
            of_rows,
            of_tiles,
            token_slots,
            staging,
            ring,
            sizes,
            scales,
            FIRST_ROW,
            kind,
        )
        tile = _told(ring.tile_ids, ring.full, step)
    if kind.WRITE:
        tma.store_wait(0)


@gluon.jit
def _gemm_kernel(
    tokens_desc,
    weight_desc,
    out_desc,
    label_ptr,
    row_shift_ptr,
    factor_ptr,
    at_label_ptr,
    entropy_factor_ptr,
    table_ptr,  # int32: scaled_exp_rows.RowPrologue.table
    tile_max_ptr,
    tile_sum_ptr,
    label_logit_ptr,
    tile_argmax_ptr,
    tile_weighted_ptr,
    valid_columns_ptr,
    inv_temperature_ptr,
    num_rows,
    num_columns,
    hidden_size,
    logit_scale,
    scale2,
    softcap,
    GROUP_M: gl.constexpr,
    MODE: gl.constexpr,
    WRITE: gl.constexpr,
    LOGITS: gl.constexpr,
    WITH_ARGMAX: gl.constexpr,
    WEIGHTED: gl.constexpr,
    ENTROPY: gl.constexpr,
    MASKED: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ROUNDED: gl.constexpr,
    TEMPERATURE: gl.constexpr,
):
    CTAS: gl.constexpr = gl.num_ctas()
    label_tiles_ptr = table_ptr + _HEADER
    valid_columns = gl.load(valid_columns_ptr).to(gl.int32) if MASKED else num_columns
    num_m = gl.cdiv(num_rows, CTAS * BLOCK_M)
    num_n = gl.cdiv(num_columns, BLOCK_N)
    num_k = gl.cdiv(hidden_size, BLOCK_K)
    dtype: gl.constexpr = tokens_desc.dtype
    token_layout: gl.constexpr = tokens_desc.layout
    upper_slots = gl.allocate_shared_memory(dtype, [NUM_SLOTS, CTAS * HALF_M, BLOCK_K], token_layout)
    lower_slots = gl.allocate_shared_memory(dtype, [NUM_SLOTS, CTAS * HALF_M, BLOCK_K], token_layout)
    weight_slots = gl.allocate_shared_memory(dtype, [NUM_SLOTS, BLOCK_N, BLOCK_K], weight_desc.layout)
    staged: gl.constexpr = [CTAS * HALF_M, BLOCK_N // 2] if WRITE else [CTAS * HALF_M, BLOCK_K]
    upper_staging = gl.allocate_shared_memory(dtype, staged, out_desc.layout)
    lower_staging = gl.allocate_shared_memory(dtype, staged, out_desc.layout)
    one_each: gl.constexpr = _one_in_each(CTAS)
    tile_ids = gl.allocate_shared_memory(gl.int32, [NUM_SLOTS, 1], one_each)
    full = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, CTAS], _barriers(CTAS, 1))
    empty = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, CTAS], _barriers(CTAS, 1))
    empty_in_cluster = empty
    if CTAS > 1:
        # One barrier, in the first block.
        shared: gl.constexpr = _barriers(CTAS, 0)
        empty_in_cluster = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, 1], shared)
    for slot in gl.static_range(NUM_SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
        if CTAS > 1:
            mbarrier.init(empty_in_cluster.index(slot), count=2)
    fence_async_shared()
    of_rows = _Rows(
        label_ptr,
        row_shift_ptr,
        factor_ptr,
        at_label_ptr,
        entropy_factor_ptr,
        inv_temperature_ptr,
    )
    of_tiles = _Tiles(
        label_tiles_ptr, tile_max_ptr, tile_sum_ptr, tile_argmax_ptr, tile_weighted_ptr, label_logit_ptr,
    )  # fmt: skip
    ring = _Ring(weight_slots, tile_ids, full, empty, empty_in_cluster)
    sizes = _Sizes(num_rows, valid_columns, num_m, num_n, num_k)
    scales = _Scales(logit_scale, scale2, softcap)
    kind: gl.constexpr = _Kind(
        GROUP_M, MODE, WRITE, LOGITS, WITH_ARGMAX, WEIGHTED, ENTROPY,
        MASKED, SOFTCAP, ROUNDED, TEMPERATURE,
    )  # fmt: skip
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (
                out_desc, of_rows, of_tiles, upper_slots, upper_staging, ring, sizes, scales, 0,
                kind,
            )),
            (_consumer, (
                out_desc, of_rows, of_tiles, lower_slots, lower_staging, ring, sizes, scales, HALF_M,
                kind,
            )),
            (_loader, (
                tokens_desc, weight_desc, table_ptr, upper_slots, lower_slots, ring, sizes, GROUP_M,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )
    # fmt: on


@lru_cache(maxsize=8)
def descriptor_layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Of tokens, outputs (``rows`` of a warpgroup in all blocks) and weights, which the blocks share."""
    over = {} if CLUSTER == 1 else {"cga_layout": [[0, 0] if rows == int(BLOCK_N) else [1, 0]]}
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16, **over)


_descriptor = DescriptorTemplates(
    lambda tensor, block: TensorDescriptor.from_tensor(tensor, block, descriptor_layout(*block))
)
_gemm = Launch(_gemm_kernel, num_warps=4, maxnreg=168, num_ctas=CLUSTER)


def group_m(hidden_size: int) -> int:
    """Row blocks of a group."""
    block = CLUSTER * int(BLOCK_M)
    return max(1, min(LARGEST_GROUP // CLUSTER, GROUP_BYTES // (block * 2 * hidden_size)))


def _launch(
    tokens: Tensor,
    weight: Tensor,
    out: Tensor | None,
    labels: Tensor,
    table: Tensor,
    gradient: GradEpilogue,
    tiles: tuple[Tensor, ...],
    logit_scale: float,
    mode: int,
    with_argmax: bool,
    form: RowOptions,
    logits: bool = False,
    inv_temperature: Tensor | None = None,
) -> None:
    half, half_n = CLUSTER * int(HALF_M), int(BLOCK_N) // 2
    tokens_desc = _descriptor(tokens, (half, int(BLOCK_K)))
    launch = _bound_gemm(
        tokens.device,
        tokens.shape,
        weight.shape[0],
        logit_scale,
        mode,
        out is not None,
        logits,
        with_argmax,
        form.with_weighted,
        gradient.entropy_factor is not None,
        form.valid_columns is not None,
        form.softcap,
        form.rounded,
        inv_temperature is not None,
    )
    unused = gradient.factor
    rows = tuple(unused if row is None else row for row in gradient)
    launch(
        (
            labels,
            *rows,
            table,
            *tiles,
            labels if form.valid_columns is None else form.valid_columns,
            rows[0] if inv_temperature is None else inv_temperature,
        ),
        descriptors=(
            tokens_desc,
            _descriptor(weight, (int(BLOCK_N), int(BLOCK_K))),
            tokens_desc if out is None else _descriptor(out, (half, half_n)),
        ),
    )


@lru_cache(maxsize=MAX_REMEMBERED)
def _bound_gemm(
    device: torch.device,
    tokens_shape: tuple[int, int],
    num_columns: int,
    logit_scale: float,
    mode: int,
    write: bool,
    logits: bool,
    with_argmax: bool,
    with_weighted: bool,
    entropy: bool,
    masked: bool,
    softcap: float | None,
    rounded: bool,
    temperature: bool,
) -> Bound:
    num_rows, hidden_size = tokens_shape
    return _gemm.bind(
        (num_sms(device) // CLUSTER,),
        (
            num_rows,
            num_columns,
            hidden_size,
            logit_scale,
            logit_scale * LOG2_E,
            softcap or 1.0,
        ),
        GROUP_M=group_m(hidden_size),
        MODE=mode,
        WRITE=write,
        LOGITS=write and logits,
        WITH_ARGMAX=with_argmax,
        WEIGHTED=with_weighted and mode == int(STATISTICS),
        ENTROPY=entropy,
        MASKED=masked,
        SOFTCAP=softcap is not None,
        ROUNDED=rounded,
        TEMPERATURE=temperature,
    )


def scaled_exp_gemm(
    tokens: Tensor,  # [C, H] bf16
    weight: Tensor,  # [V, H] bf16
    labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    row_shift2: Tensor,  # [C] fp32
    table: Tensor,  # int32: scaled_exp_rows.RowPrologue.table; its counter is used up here
    logit_scale: float,  # above 0
    out: Tensor | None,  # [C, V] bf16
    with_argmax: bool = False,
    form: RowOptions = NO_OPTIONS,
    logits: bool = False,
    inv_temperature: Tensor | None = None,  # [C] fp32, times the logits after a softcap
) -> TileStatistics:
    """``E`` or logits into ``out`` (unless None), with tiles' statistics; as in :mod:`.scaled_exp`."""
    tiles = TileStatistics.empty(row_shift2, weight.shape[0], int(BLOCK_N), with_argmax, form)
    _launch(
        tokens,
        weight,
        out,
        labels,
        table,
        GradEpilogue(row_shift2, row_shift2, row_shift2),
        tuple(tiles.tile_max if each is None else each for each in tiles[1:]),
        logit_scale,
        int(STATISTICS),
        with_argmax,
        form,
        logits,
        inv_temperature,
    )
    return tiles


def grad_logits_gemm(
    tokens: Tensor,  # [C, H] bf16
    weight: Tensor,  # [V, H] bf16
    labels: Tensor,  # [C] int64
    table: Tensor,  # int32: see scaled_exp
    gradient: GradEpilogue,
    logit_scale: float,
    out: Tensor,  # [C, V] bf16
    form: RowOptions = NO_OPTIONS,
    inv_temperature: Tensor | None = None,  # [C] fp32, times the logits after a softcap
) -> None:
    """Gradients of the logits into ``out``."""
    _launch(
        tokens,
        weight,
        out,
        labels,
        table,
        gradient,
        (gradient.max2,) * 5,
        logit_scale,
        int(GRADIENTS),
        False,
        form,
        inv_temperature=inv_temperature,
    )
