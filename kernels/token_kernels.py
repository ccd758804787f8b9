"""The ``[C]``-sized maths of row_ops in one launch each, instead of some eight elementwise ones.

16 bytes read and 16 written a token: 0.3 MB at ``C = 8192``, all launch latency. Predicted: 2 us each
where the elementwise launches took 30 us a chunk together (docs/design.md has the profile).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce.row_ops import RowStatistics

BLOCK = 256


@triton.jit
def _shard_terms_kernel(
    row_max_ptr,  # [C] fp32: over the whole vocabulary
    reference_ptr,
    others_ptr,
    label_logit_ptr,
    label_ptr,  # [C] int64
    terms_ptr,  # [3, C] fp32, out
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    row_max = tl.load(row_max_ptr + rows, mask=inside, other=0.0)
    reference = tl.load(reference_ptr + rows, mask=inside, other=0.0)
    others = tl.load(others_ptr + rows, mask=inside, other=0.0)
    shifted = tl.load(label_logit_ptr + rows, mask=inside, other=0.0) - row_max
    label = tl.load(label_ptr + rows, mask=inside, other=-1)
    here = (label >= 0) & (label < num_columns)
    rescaled = tl.where(others == 0.0, 0.0, others * tl.exp(reference - row_max))
    tl.store(terms_ptr + rows, rescaled, mask=inside)
    tl.store(terms_ptr + num_rows + rows, tl.where(here, tl.exp(shifted), 0.0), mask=inside)
    tl.store(terms_ptr + 2 * num_rows + rows, tl.where(here, shifted, 0.0), mask=inside)


@triton.jit
def _log1p(x):
    """``log(1 + x)`` for x of 0 to 1, without the rounding of ``1 + x`` (Kahan's form)."""
    u = 1.0 + x
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def _token_loss_kernel(
    row_max_ptr,  # [C] fp32
    terms_ptr,  # [3, C] fp32, summed over the shards
    loss_ptr,  # [C] fp32, out
    saved_ptr,  # [3, C] fp32, out: row_ops.TokenTerms
    num_rows,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    others = tl.load(terms_ptr + rows, mask=inside, other=0.0)
    label = tl.load(terms_ptr + num_rows + rows, mask=inside, other=1.0)
    shifted = tl.load(terms_ptr + 2 * num_rows + rows, mask=inside, other=0.0)
    total = others + label
    confident = label > others
    ratio = others / tl.where(confident, label, 1.0)
    loss = tl.where(confident, _log1p(ratio), tl.log(total) - shifted)
    tl.store(loss_ptr + rows, loss, mask=inside)
    tl.store(saved_ptr + rows, tl.load(row_max_ptr + rows, mask=inside), mask=inside)
    tl.store(saved_ptr + num_rows + rows, 1.0 / total, mask=inside)
    tl.store(saved_ptr + 2 * num_rows + rows, others / total, mask=inside)


def shard_terms(
    stats: RowStatistics,
    global_max: Tensor,  # [C] fp32
    labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
    num_columns: int,
) -> Tensor:
    """:func:`.row_ops.shard_terms`: ``[3, C]`` fp32."""
    num_rows = global_max.shape[0]
    terms = torch.empty((3, num_rows), dtype=torch.float32, device=global_max.device)
    _shard_terms_kernel[(triton.cdiv(num_rows, BLOCK),)](
        global_max,
        stats.reference,
        stats.others,
        stats.label_logit,
        labels,
        terms,
        num_rows,
        num_columns,
        BLOCK=BLOCK,
    )
    return terms


def token_loss(
    terms: Tensor,  # [3, C] fp32, summed over the shards
    global_max: Tensor,  # [C] fp32
) -> tuple[Tensor, Tensor]:
    """:func:`.row_ops.token_loss`: loss ``[C]`` and its terms ``[3, C]``, fp32."""
    num_rows = global_max.shape[0]
    loss = torch.empty_like(global_max)
    saved = torch.empty_like(terms)
    _token_loss_kernel[(triton.cdiv(num_rows, BLOCK),)](
        global_max, terms, loss, saved, num_rows, BLOCK=BLOCK
    )
    return loss, saved
