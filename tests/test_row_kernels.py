"""The Triton row kernels against their plain PyTorch twin and fp64: on a CPU under the interpreter."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, row_ops_torch
from megatron_fused_ce.kernels import row_kernels, token_kernels
from megatron_fused_ce.row_ops import RowStatistics, TokenTerms, shard_terms, token_loss
from megatron_fused_ce.testing.reference import KINDS, assert_close, make_inputs
from tests.test_op import run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def chunk(num_columns, dtype, device, spread=3.0):
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randn(7, num_columns, generator=generator) * spread
    labels = torch.randint(0, num_columns, (7,), generator=generator)
    labels[1], labels[2], labels[3] = -5, num_columns, num_columns - 1
    return logits.to(device, dtype), labels.to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_columns", [1, 2, 127, 128, 4096, 4097, 9001])
def test_statistics_and_gradients_match_plain_pytorch(num_columns, dtype, device):
    logits, labels = chunk(num_columns, dtype, device)
    kept = logits.clone()
    ours = row_kernels.row_statistics(logits, labels, 0.7, with_argmax=True)
    plain = row_ops_torch.row_statistics(logits, labels, 0.7, with_argmax=True)
    assert torch.equal(logits, kept), "the statistics pass must not write"
    assert torch.equal(ours.argmax, plain.argmax)
    for left, right in zip(ours[:3], plain[:3], strict=True):
        torch.testing.assert_close(left, right, rtol=2e-6, atol=1e-6)

    _, terms = token_loss(shard_terms(plain, plain.row_max, labels, num_columns), plain.row_max)
    terms = TokenTerms(*terms)
    factor = torch.randn(7, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.empty_like(logits)
    row_kernels.row_gradients(logits, labels, terms, factor, 0.7, out=out)
    expected = row_ops_torch.row_gradients(
        logits, labels, terms, factor, 0.7, out=torch.empty_like(logits)
    )
    assert torch.equal(logits, kept), "out of place must leave the logits alone"
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-7)
    row_kernels.row_gradients(logits, labels, terms, factor, 0.7, out=logits)
    assert torch.equal(logits, out), "in place must equal out of place"


def test_token_kernels_match_their_definition(device):
    """Confident and hopeless tokens, labels elsewhere, an empty shard, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    num_rows = 300
    row_max = torch.randn(num_rows, generator=generator) * 50
    others = torch.exp(torch.randn(num_rows, generator=generator) * 12)
    label_logit = row_max - torch.rand(num_rows, generator=generator) * 20
    labels = torch.randint(-3, 12, (num_rows,), generator=generator)
    reference = row_max - 3 * torch.rand(num_rows, generator=generator)
    others[0], reference[0] = 0.0, -torch.inf
    others[1], reference[2], others[3] = torch.nan, torch.nan, torch.inf
    others[4:40] *= 1e-30  # 1 - p far below fp32's resolution of 1
    parts = (row_max, reference, others, label_logit)
    stats = RowStatistics(*(part.to(device) for part in parts))
    labels = labels.to(device)
    plain = shard_terms(stats, stats.row_max, labels, 9)
    ours = token_kernels.shard_terms(stats, stats.row_max, labels, 9)
    torch.testing.assert_close(ours, plain, rtol=4e-6, atol=0, equal_nan=True)
    for got, expected in zip(
        token_kernels.token_loss(plain, stats.row_max),
        token_loss(plain, stats.row_max),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=4e-6, atol=1e-45, equal_nan=True)


@pytest.mark.parametrize("backend", [row_kernels, row_ops_torch], ids=["triton", "torch"])
def test_rows_with_infinities_and_nan(backend, device):
    logits = torch.zeros(5, 6, device=device)
    logits[0, :] = -torch.inf  # no finite logit in this shard
    logits[1, 2] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, :5] = -torch.inf  # one finite logit
    labels = torch.tensor([-1, -1, -1, 5, 0], device=device)
    stats = backend.row_statistics(logits, labels, 1.0)
    assert stats.others[0] == 0 and stats.row_max[0] == -torch.inf
    assert torch.isnan(stats.others[1:3]).all()
    assert stats.others[3] == 0 and stats.row_max[3] == 0 and stats.label_logit[3] == 0
    assert stats.others[4] == 5


@pytest.mark.parametrize("backend", [row_kernels, row_ops_torch], ids=["triton", "torch"])
def test_argmax_takes_the_lowest_column_of_a_tie(backend, device):
    logits = torch.zeros(2, 9000, device=device)
    logits[1, [4500, 8999]] = 1.0
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    stats = backend.row_statistics(logits, labels, 1.0, with_argmax=True)
    assert stats.argmax.tolist() == [0, 4500]


@pytest.mark.parametrize("strategy", ["recompute", "store"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_op_on_the_triton_path(kind, strategy, device):
    inputs = make_inputs(
        kind, s=7, b=2, hidden_size=32, vocab=150, dtype=torch.bfloat16, device=device
    )
    config = FusedCEConfig(strategy=strategy, num_chunks=2, row_backend="triton")
    assert_close(run(inputs, config), inputs)
