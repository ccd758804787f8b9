"""The Triton kernels of a chunk's K largest logits against their plain PyTorch twin."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.kernels import topk
from megatron_fused_ce.kernels.records import NOTHING
from megatron_fused_ce.logits import topk_torch


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_columns", "padding", "group", "count"),
    [(1, 0, 8, 1), (7, 2, 8, 9), (300, 20, 8, 5), (2048, 0, 64, 3), (4203, 5, 64, 40)],
)
@pytest.mark.parametrize("scaled", [(1.0, None), (-0.7, 3.0)], ids=str)
def test_against_the_twin(num_columns, padding, group, count, scaled, dtype, device):
    """Ties, both zeros, infinities and NaN among the logits; more asked for than there are."""
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randn(6, num_columns + padding, generator=generator).mul(4).round().div(2)
    logits[1], logits[2, ::3], logits[3, ::2], logits[4, -1 - padding] = (
        -torch.inf,
        -torch.inf,
        -0.0,
        torch.inf,
    )
    logits[5, num_columns // 2], logits[:, num_columns:] = torch.nan, 99.0
    logits = logits.to(device, dtype)
    inv_temperature = torch.linspace(0.5, 2, 6, device=device)
    maxima, stats = topk.block_maxima(logits, num_columns, group, *scaled, inv_temperature)
    true_maxima, true_stats = topk_torch.block_maxima(logits, num_columns, group, *scaled, inv_temperature)
    # A tanh of its own: what rounds otherwise is compared as the number that it stands for.
    assert maxima.shape == true_maxima.shape == (6, -(-num_columns // group))
    rows = slice(None, 5)  # NaN stands anywhere
    near = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(
        topk_torch.of_keys(maxima[rows]), topk_torch.of_keys(true_maxima[rows]), **near
    )
    torch.testing.assert_close(stats[1], true_stats[1], rtol=3e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(stats[0, rows], true_stats[0, rows], **near)
    num_blocks = min(count, maxima.shape[1])
    keys, blocks = topk.best(true_maxima, num_blocks)
    true_keys, true_blocks = topk_torch.best(true_maxima, num_blocks)
    assert torch.equal(keys, true_keys) and torch.equal(blocks, true_blocks)
    given = logits, true_blocks, num_columns, group, count, *scaled
    (keys, columns), (true_keys, true_columns) = (
        topk.best_of_blocks(*given),
        topk_torch.best_of_blocks(*given),
    )
    real = true_keys != NOTHING
    assert torch.equal(keys != NOTHING, real) and int(real.sum(1).amin()) == min(count, num_columns)
    if scaled[1] is None:
        assert torch.equal(columns.where(real, 0), true_columns.where(real, 0))
    finite = real & (topk_torch.of_keys(true_keys) == topk_torch.of_keys(true_keys))
    torch.testing.assert_close(*(topk_torch.of_keys(k).where(finite, 0.0) for k in (keys, true_keys)), **near)


@pytest.mark.parametrize("ops", [topk, topk_torch], ids=["triton", "torch"])
@pytest.mark.parametrize("count", [1, 5, 6, 8])
def test_of_equal_keys_the_lowest_columns(ops, count, device):
    keys = torch.tensor(
        [[3, 7, 3, 7, 2, 3], [NOTHING, 1, NOTHING, 1, 1, -5]], dtype=torch.int32, device=device
    )
    made, places = ops.best(keys, count)
    for row in range(2):
        order = sorted(range(6), key=lambda at: (-int(keys[row, at]), at))[:count]
        assert places[row, : len(order)].tolist() == sorted(order)
        assert made[row, : len(order)].tolist() == [int(keys[row, at]) for at in sorted(order)]
        assert made[row, 6:].tolist() == [NOTHING] * max(0, count - 6)
