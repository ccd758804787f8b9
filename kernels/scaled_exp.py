"""The scaled-exp GEMM: ``hidden @ weight.T`` whose epilogue replaces a pass over the logits.

A persistent GEMM with TMA loads computes one tile of logits in fp32 registers and, before it leaves
them, either

* exponentiates it against a shift of its row and writes ``E = 2**(z2 - row_shift2 - tile_shift)`` in the
  operands' dtype (or nothing at all) with the tile's row sums and maxima (:func:`scaled_exp_gemm`), or
* turns it into gradients of the logits with statistics that are known already
  (:func:`grad_logits_gemm`).

``z2 = logit_scale * log2(e) * z`` throughout: all exponents here are base 2. This is the portable form
in Triton's language (Hopper, Blackwell, the interpreter); :mod:`.scaled_exp_hopper` is the fast one.

FLOP and bytes at ``C = 8192, H = 4096, V = 128256``, bf16. On an H200 it is slower than cuBLAS's GEMM of the
same shape, more so at H = 2048: of eight instructions an element four go to the half-rate integer pipe
(maximum, two comparisons, a selection) and take as long as the exponentials, and nothing hides either. The
Hopper form solves that.

====================  =============================  ==================================
kernel                FLOP                           bytes
====================  =============================  ==================================
scaled_exp           ``2CHV`` = 8.6 T, ``CV`` exp2  ``2(CH + VH)`` read, ``2CV`` (or 0)
                                                     ``+ 8CV/256`` written
grad_logits_gemm      the same                       the same, without the ``8CV/256``
====================  =============================  ==================================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_fused_ce.kernels.launch import DescriptorTemplates, Launch, num_sms
from megatron_fused_ce.kernels.records import (
    HEADROOM,
    LOG2_E,
    LOWEST,
    NO_OPTIONS,
    GradEpilogue,
    RowOptions,
    TileStatistics,
)
from megatron_fused_ce.kernels.softcap import tanh_and_grad

_HEADROOM = tl.constexpr(HEADROOM)
_LOG2_E = tl.constexpr(LOG2_E)
_LOWEST = tl.constexpr(LOWEST)
_PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)


class Tiling(NamedTuple):
    """Compile-time choices of the GEMM."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    #: Row blocks that share the columns in L2: 16 was the fastest of 8, 16, 32 and 64 on an H200 (8192 x 4096
    #: x 128256).
    group_m: int = 16
    num_warps: int = 8
    num_stages: int = 3


TILING = Tiling()

#: What the interpreter can run in a moment.
INTERPRETER_TILING = Tiling(32, 64, 32, 2, 4, 1)


@triton.jit
def _tile_of(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of the tile, GROUP_M row blocks down before one column block on."""
    per_group = GROUP_M * num_n
    first_m = (tile // per_group) * GROUP_M
    in_group = min(num_m - first_m, GROUP_M)
    return first_m + (tile % per_group) % in_group, (tile % per_group) // in_group


@triton.jit
def _scaled_exp_kernel(
    tokens_desc,  # [C, H]
    weight_desc,  # [V, H]
    out_desc,  # [C, V]
    label_ptr,  # [C] int64
    row_shift_ptr,  # [C] fp32
    tile_max_ptr,  # [num_n, C] fp32
    tile_sum_ptr,  # [num_n, C] fp32
    label_logit_ptr,  # [C] fp32
    tile_argmax_ptr,  # [num_n, C] int32
    tile_weighted_ptr,  # [num_n, C] fp32
    valid_columns_ptr,  # [1] int64: how many columns are valid
    inv_temperature_ptr,  # [C] fp32
    num_rows,
    num_columns,
    hidden_size,
    logit_scale,
    scale2,
    softcap,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WRITE: tl.constexpr,
    LOGITS: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUNDED: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    valid_columns = tl.load(valid_columns_ptr) if MASKED else num_columns
    num_m = tl.cdiv(num_rows, BLOCK_M)
    num_n = tl.cdiv(num_columns, BLOCK_N)
    num_k = tl.cdiv(hidden_size, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=True):
        m, n = _tile_of(tile, num_m, num_n, GROUP_M)
        z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(num_k):
            a = tokens_desc.load([m * BLOCK_M, k * BLOCK_K])
            b = weight_desc.load([n * BLOCK_N, k * BLOCK_K])
            z = tl.dot(a, b.T, z)
        if ROUNDED:
            z = z.to(tokens_desc.dtype).to(tl.float32)
        rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = rows < num_rows
        row_shift = tl.load(row_shift_ptr + rows, mask=inside, other=0.0)
        inv_temperature = 1.0
        if TEMPERATURE:
            inv_temperature = tl.load(inv_temperature_ptr + rows, mask=inside, other=1.0)[:, None]
        label = tl.load(label_ptr + rows, mask=inside, other=-1)
        # The label's column, or one that no column has.
        label = tl.where((label >= 0) & (label < num_columns), label, -1).to(tl.int32)
        # Not `columns == label`, which comes below: triton 3.9 would keep its 128 bits a thread for that, in
        # words that take five instructions an element.
        is_label = tl.arange(0, BLOCK_N)[None, :] == (label - n * BLOCK_N)[:, None]
        picked = tl.sum(tl.where(is_label, z, 0.0), axis=1)
        in_tile = (label >= n * BLOCK_N) & (label < (n + 1) * BLOCK_N)
        tl.store(label_logit_ptr + rows, picked * logit_scale, mask=inside & in_tile)
        if LOGITS:
            out_desc.store([m * BLOCK_M, n * BLOCK_N], z.to(out_desc.dtype))
        if SOFTCAP:
            z, softcap_grad = tanh_and_grad(z * (logit_scale / softcap))
            z = z * (softcap * _LOG2_E * inv_temperature)
        else:
            z = z * (scale2 * inv_temperature)
        left_out = (columns[None, :] == label[:, None]) | (columns[None, :] >= valid_columns)
        at = n.to(tl.int64) * num_rows + rows
        z = tl.where(left_out, float("-inf"), z - row_shift[:, None])
        if WITH_ARGMAX:
            tile_max, tile_argmax = tl.max(z, axis=1, return_indices=True)
            tl.store(tile_argmax_ptr + at, n * BLOCK_N + tile_argmax, mask=inside)
        else:
            tile_max = tl.max(z, axis=1)
        tile_shift = tl.where(tile_max > _HEADROOM, tile_max, 0.0)
        z -= tile_shift[:, None]
        if WEIGHTED:
            z = tl.maximum(z, _LOWEST, propagate_nan=_PROPAGATE_NAN)
        e = tl.exp2(z)
        if WEIGHTED:
            tl.store(tile_weighted_ptr + at, tl.sum(e * z, axis=1), mask=inside)
        tl.store(tile_max_ptr + at, tile_max, mask=inside)
        tl.store(tile_sum_ptr + at, tl.sum(e, axis=1), mask=inside)
        if WRITE:
            if SOFTCAP:
                e = e * softcap_grad
            out_desc.store([m * BLOCK_M, n * BLOCK_N], e.to(out_desc.dtype))


@triton.jit
def _grad_logits_kernel(
    tokens_desc,  # [C, H]
    weight_desc,  # [V, H]
    out_desc,  # [C, V]
    label_ptr,  # [C] int64
    max2_ptr,  # [C] fp32: records.GradEpilogue, and the next three
    factor_ptr,
    at_label_ptr,
    entropy_factor_ptr,
    valid_columns_ptr,  # [1] int64: how many columns are valid
    inv_temperature_ptr,  # [C] fp32
    num_rows,
    num_columns,
    hidden_size,
    logit_scale,
    scale2,
    softcap,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ENTROPY: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUNDED: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    valid_columns = tl.load(valid_columns_ptr) if MASKED else num_columns
    num_m = tl.cdiv(num_rows, BLOCK_M)
    num_n = tl.cdiv(num_columns, BLOCK_N)
    num_k = tl.cdiv(hidden_size, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=True):
        m, n = _tile_of(tile, num_m, num_n, GROUP_M)
        z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(num_k):
            a = tokens_desc.load([m * BLOCK_M, k * BLOCK_K])
            b = weight_desc.load([n * BLOCK_N, k * BLOCK_K])
            z = tl.dot(a, b.T, z)
        if ROUNDED:
            z = z.to(tokens_desc.dtype).to(tl.float32)
        rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = rows < num_rows
        max2 = tl.load(max2_ptr + rows, mask=inside, other=0.0)
        inv_temperature = 1.0
        if TEMPERATURE:
            inv_temperature = tl.load(inv_temperature_ptr + rows, mask=inside, other=1.0)[:, None]
        factor = tl.load(factor_ptr + rows, mask=inside, other=0.0)
        at_label = tl.load(at_label_ptr + rows, mask=inside, other=0.0)
        label = tl.load(label_ptr + rows, mask=inside, other=-1)
        label = tl.where((label >= 0) & (label < num_columns), label, -1).to(tl.int32)
        if SOFTCAP:
            z, softcap_grad = tanh_and_grad(z * (logit_scale / softcap))
            z = z * (softcap * _LOG2_E * inv_temperature)
        else:
            z = z * (scale2 * inv_temperature)
        z -= max2[:, None]
        gradient = factor[:, None]
        if ENTROPY:
            entropy_factor = tl.load(entropy_factor_ptr + rows, mask=inside, other=0.0)
            z = tl.maximum(z, _LOWEST, propagate_nan=_PROPAGATE_NAN)
            gradient += entropy_factor[:, None] * z
        gradient = tl.exp2(z) * gradient
        gradient = tl.where(columns[None, :] == label[:, None], at_label[:, None], gradient)
        if SOFTCAP:
            gradient = gradient * softcap_grad
        if MASKED:
            gradient = tl.where(columns[None, :] < valid_columns, gradient, 0.0)
        out_desc.store([m * BLOCK_M, n * BLOCK_N], gradient.to(out_desc.dtype))


def _of_each_tiling(kernel: Any) -> dict[Tiling, Launch]:
    return {
        tiling: Launch(kernel, num_warps=tiling.num_warps, num_stages=tiling.num_stages)
        for tiling in (TILING, INTERPRETER_TILING)
    }


_scaled_exp = _of_each_tiling(_scaled_exp_kernel)
_grad_logits = _of_each_tiling(_grad_logits_kernel)
_descriptor = DescriptorTemplates(TensorDescriptor.from_tensor)


def _launch_shape(device: torch.device) -> tuple[Tiling, int]:
    """The tiling and the number of persistent programs."""
    if device.type != "cuda":
        return INTERPRETER_TILING, 2
    return TILING, num_sms(device)


def _launch(
    kernels: dict[Tiling, Launch],
    tokens: Tensor,
    weight: Tensor,
    out: Tensor | None,
    of_rows: tuple[Tensor, ...],  # labels [C] int64, and others, which begin with [C] fp32
    logit_scale: float,
    form: RowOptions,
    inv_temperature: Tensor | None,
    **constants: bool,
) -> None:
    labels, unused, *_ = of_rows
    tiling, num_programs = _launch_shape(tokens.device)
    tokens_desc = _descriptor(tokens, (tiling.block_m, tiling.block_k))
    kernels[tiling](
        (num_programs,),
        (
            *of_rows,
            labels if form.valid_columns is None else form.valid_columns,
            unused if inv_temperature is None else inv_temperature,
        ),
        (
            tokens.shape[0],
            weight.shape[0],
            tokens.shape[1],
            logit_scale,
            logit_scale * LOG2_E,
            form.softcap or 1.0,
        ),
        descriptors=(
            tokens_desc,
            _descriptor(weight, (tiling.block_n, tiling.block_k)),
            tokens_desc if out is None else _descriptor(out, (tiling.block_m, tiling.block_n)),
        ),
        NUM_PROGRAMS=num_programs,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP_M=tiling.group_m,
        **constants,
        MASKED=form.valid_columns is not None,
        SOFTCAP=form.softcap is not None,
        ROUNDED=form.rounded,
        TEMPERATURE=inv_temperature is not None,
    )


def scaled_exp_gemm(
    tokens: Tensor,  # [C, H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    row_shift2: Tensor,  # [C] fp32
    table: Tensor | None,  # unused here: every program has its own tiles
    logit_scale: float,
    out: Tensor | None,  # [C, V]
    with_argmax: bool = False,
    form: RowOptions = NO_OPTIONS,
    logits: bool = False,
    inv_temperature: Tensor | None = None,  # [C] fp32, times the logits after a softcap
) -> TileStatistics:
    """``E`` into ``out`` (unless None) and the statistics of its tiles, labels left out of both.

    The label's own entry of ``out`` is 0 afterwards; see :func:`.scaled_exp_rows.finalize_rows`. So are
    masked columns; with a softcap ``out`` is times the softcap's gradient (the statistics are not).

    ``logits``: ``out`` gets the logits instead, before ``logit_scale`` and softcap; undefined at labels and
    in masked columns.
    """
    tiling, _ = _launch_shape(tokens.device)
    tiles = TileStatistics.empty(row_shift2, weight.shape[0], tiling.block_n, with_argmax, form)
    _launch(
        _scaled_exp,
        tokens,
        weight,
        out,
        (labels, row_shift2, *(tiles.tile_max if each is None else each for each in tiles[1:])),
        logit_scale,
        form,
        inv_temperature,
        WRITE=out is not None and not logits,
        LOGITS=out is not None and logits,
        WITH_ARGMAX=with_argmax,
        WEIGHTED=form.with_weighted,
    )
    return tiles


def grad_logits_gemm(
    tokens: Tensor,  # [C, H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [C] int64
    table: Tensor | None,  # unused here
    gradient: GradEpilogue,
    logit_scale: float,
    out: Tensor,  # [C, V]
    form: RowOptions = NO_OPTIONS,
    inv_temperature: Tensor | None = None,  # [C] fp32, times the logits after a softcap
) -> None:
    """Gradients of the logits into ``out``."""
    rows = tuple(gradient.factor if row is None else row for row in gradient)
    entropy = gradient.entropy_factor is not None
    args = tokens, weight, out, (labels, *rows), logit_scale, form, inv_temperature
    _launch(_grad_logits, *args, ENTROPY=entropy)
