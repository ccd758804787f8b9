"""The launches that stand for grad_in_forward's arithmetic in PyTorch."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.head import fp16, promise
from megatron_fused_ce.head.promise import ATOL, RTOL
from megatron_fused_ce.kernels import upstream_kernels

NAN, INF = float("nan"), float("inf")
SIZES = (1, 7, 4096, 9001)


def plain(function, *args):
    """What PyTorch makes of it on a CPU."""
    return function(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in args))


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("factor", [1.0, -0.7])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("largest", [1.0, 3e-39, 1e-30, 7.7e37, 0.0, INF, NAN])
def test_scaled_weights(largest, size, factor, bits, device):
    others = 1.0 if largest in (INF, NAN) else largest
    weights = torch.rand(size, generator=torch.Generator().manual_seed(size)) * others
    weights[size // 2] = largest
    made = upstream_kernels.scaled_weights(weights.to(device), bits, factor)
    dtype = torch.float16 if bits else torch.bfloat16
    expected = plain(fp16.scale_token_weights, weights, factor, dtype)
    torch.testing.assert_close(made.cpu(), expected, rtol=0, atol=0, equal_nan=True)


CASES = {
    "fits": lambda g, w: g,
    "one token wrong": lambda g, w: g.index_fill(0, torch.tensor([len(g) - 1]), 5.0),
    "within rounding": lambda g, w: g * (1 + 2.0**-22),
    "all zero": lambda g, w: g * 0,
    "a NaN": lambda g, w: g.index_fill(0, torch.tensor([0]), NAN),
    "an inf": lambda g, w: g.index_fill(0, torch.tensor([0]), INF),
    "large": lambda g, w: g * 1e30,
    "tiny": lambda g, w: g * 1e-36,
    "a scalar beyond fp32": lambda g, w: g.clamp(max=1.0) * 3e38,
}


WEIGHTS = {
    "random": lambda w: w,
    "masked": lambda w: w.index_fill(0, torch.arange(0, len(w), 3), 0.0),
    "none": lambda w: w * 0,
    "a NaN": lambda w: w.index_fill(0, torch.tensor([len(w) // 2]), NAN),
    "an inf": lambda w: w.index_fill(0, torch.tensor([len(w) // 2]), INF),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", CASES)
def test_fit(case, weights, size, device):
    w = WEIGHTS[weights](torch.rand(size, generator=torch.Generator().manual_seed(size)) + 0.5)
    g = CASES[case](1.7 * w, w)
    scale, found = upstream_kernels.fit_scalar(g.to(device), w.to(device), RTOL, ATOL)
    c, expected = plain(promise.fit_scalar, g, w)
    assert int(found) == int(expected)
    torch.testing.assert_close(scale.cpu(), c, rtol=2.0**-22, atol=0, equal_nan=True)
