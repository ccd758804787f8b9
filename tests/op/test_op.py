"""The op in one process: shapes, chunks, layouts, autocast, fp16's range, arguments that do not fit."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.scripts.lib.reference import HeadInputs, make_inputs, plain_head, relative_error
from tests.support.losses import assert_close, problem
from tests.support.op import DTYPES, STRATEGIES, gemm_flops, leaves, run, strategy_in_place


def plain(device, dtype=torch.float32, **changes):
    return problem("plain", dtype, device, **{"s": 9, "b": 2, "hidden_size": 16, "vocab": 50, **changes})


def test_a_single_class(device):
    """A certain token: loss and gradients are exactly 0."""
    for s, b, hidden_size in ((1, 1, 1), (2, 9, 8)):
        inputs = plain(device, s=s, b=b, hidden_size=hidden_size, vocab=1)
        assert not any(part.any() for part in run(inputs, FusedCEConfig(chunk_tokens=2)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_frozen_operands(needs, strategy, device):
    """One gets no gradient and costs no product; without both the token weights need not be known."""
    inputs = plain(device, s=32)
    operands = leaves(inputs, needs)
    config = FusedCEConfig(strategy=strategy, num_chunks=4, logits_backend="gemm_rows")
    more = {"token_weights": inputs.grad_loss} if strategy == "grad_in_forward" and any(needs) else {}
    with gemm_flops() as flops:
        loss = fused_linear_cross_entropy(*operands, inputs.labels, config=config, **more)
        if any(needs):
            loss.backward(inputs.grad_loss)
    of_one = 2 * inputs.labels.numel() * inputs.weight.numel()
    products = 1 + any(needs) * (2 if strategy == "recompute" else 1)
    assert flops.get_total_flops() == of_one * products and loss.requires_grad == any(needs)
    exact = plain_head(inputs, torch.float64)
    assert relative_error(loss.detach(), exact.loss) < 2e-6
    for operand, needed, true in zip(operands, needs, exact[1:], strict=True):
        assert (operand.grad is not None) == needed
        assert not needed or relative_error(operand.grad, true) < 2e-6


@pytest.mark.parametrize("stored", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_saves_the_first_chunks(stored, dtype, device):
    """``mixed`` between ``recompute`` (0 of 4 chunks) and ``store`` (all): bitwise the same."""
    inputs = plain(device, dtype, b=4)
    saved = []

    def remember(tensor):
        saved.append(tensor)
        return tensor

    config = FusedCEConfig(strategy="recompute", num_chunks=4, logits_backend="gemm_rows")
    with strategy_in_place("mixed", stored), torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        result = run(inputs, config)
    chunk_logits = (inputs.hidden.shape[0] * inputs.hidden.shape[1] // 4, inputs.weight.shape[0])
    assert sum(tensor.shape == chunk_logits for tensor in saved) == stored
    assert_close(result, inputs)
    for part, other in zip(result, run(inputs, config), strict=True):
        assert torch.equal(part, other)


def test_grad_weight_does_not_lose_precision_with_chunks(device):
    """bf16 accumulation would be at 9e-3 with 64 chunks; fp32 stays where one chunk is."""
    inputs = make_inputs("plain", s=256, b=1, hidden_size=64, vocab=97, dtype=torch.bfloat16, device=device)
    exact = plain_head(inputs, torch.float64).grad_weight
    errors = [relative_error(run(inputs, FusedCEConfig(num_chunks=n)).grad_weight, exact) for n in (1, 64)]
    assert errors[1] < 1.2 * errors[0] + 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_confident_tokens_keep_their_gradient(strategy, device):
    """fp32, 1 - p = 3e-13: a subtraction p - 1 would give 0; the loss stays positive."""
    vocab, gap = 64, 33.0
    hidden, weight = torch.zeros(4, 1, 8, device=device), torch.zeros(vocab, 8, device=device)
    hidden[..., 0], weight[5, 0] = 1.0, gap
    labels, ones = torch.full((1, 4), 5, device=device), torch.ones(1, 4, device=device)
    config = FusedCEConfig(strategy=strategy, num_chunks=2)
    loss, _, grad_weight = run(HeadInputs(hidden, weight, labels, ones), config)
    miss = (vocab - 1) * math.exp(-gap)
    torch.testing.assert_close(loss, torch.full_like(loss, math.log1p(miss)), rtol=1e-4, atol=0)
    assert grad_weight[5, 0].item() == pytest.approx(-4 * miss / (1 + miss), rel=1e-4)


class RoundedFactors(TorchDispatchMode):
    """Multiplies as a GPU does: a factor without dimensions is first rounded to the other's dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        multiplies = func in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)
        if multiplies and args[0].dim() and isinstance(args[1], torch.Tensor) and not args[1].dim():
            args = args[0], args[1].to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_smaller_upstream_does_not_vanish(strategy, device):
    """Below 2**-17 the inverse of the power of two is no number of fp16: it must not be rounded to one."""
    tiny = plain(device, torch.float16, s=16, b=1, vocab=2000)
    tiny.grad_loss.mul_(2.0**-20)
    with RoundedFactors():
        result = run(tiny, FusedCEConfig(strategy=strategy, num_chunks=3))
    exact = plain_head(tiny, torch.float64)
    for name in ("grad_hidden", "grad_weight"):  # in steps of 2**-24, and rounded once
        error = getattr(result, name).double() - getattr(exact, name)
        assert error.abs().max() < 1.05 * 2.0**-25, name
        assert getattr(exact, name).abs().max() > 2.0**-22


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_small_probabilities_do_not_vanish(strategy, device):
    """2**-32 of an upstream just below a power of two: 2**-24, fp16's smallest number, once scaled."""
    weight = torch.tensor([[22.1875 / 1024], [0.0]], dtype=torch.float16, device=device)
    hidden = torch.full((1, 1, 1), 1024.0, dtype=torch.float16, device=device)
    labels = torch.zeros(1, 1, dtype=torch.int64, device=device)
    upstream = torch.full((1, 1), 1.99, device=device)
    inputs = HeadInputs(hidden, weight, labels, upstream)
    config = FusedCEConfig(strategy=strategy)
    grad_weight = run(inputs, config, token_weights=upstream).grad_weight
    assert grad_weight[1].item() == pytest.approx(math.exp(-22.1875) * 1.99 * 1024, rel=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_large_weights_do_not_overflow(strategy, device):
    """Gradients of logits stand at 2**8: a wrong token's, times weights of 250, would be beyond 65504."""
    inputs = plain(device, torch.float16, s=16, b=1, hidden_size=4, vocab=60)
    inputs.hidden.fill_(0.05)
    inputs.weight[:30], inputs.weight[30:] = 250.0, -250.0
    inputs.labels.remainder_(30).add_(30)
    inputs.grad_loss.fill_(0.99)
    assert_close(run(inputs, FusedCEConfig(strategy=strategy, num_chunks=3)), inputs)


@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
@pytest.mark.parametrize("log2_promise", [-60, -24, 16, 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grad_in_forward_keeps_gradients_whatever_size_the_weights_have(dtype, log2_promise, scale, device):
    """A mask divided by its sum, say, and a loss scale: the product is what counts."""
    config = FusedCEConfig(strategy="grad_in_forward", num_chunks=3, logit_scale=scale)
    inputs = plain(device, dtype, s=16, b=1, vocab=60, options={"logit_scale": scale})
    result = run(inputs, config, token_weights=inputs.grad_loss * 2.0**log2_promise)
    if dtype == torch.float16 and scale < 1:  # the results themselves are subnormal there
        exact = plain_head(inputs, torch.float64)
        for name in ("grad_hidden", "grad_weight"):
            rounded = getattr(exact, name).half()
            assert relative_error(getattr(result, name), rounded) < 0.1
    else:
        assert_close(result, inputs)


class WeightCasts(TorchDispatchMode):
    """Counts copies of ``[V, H]`` into another dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.shape, self.count = weight.shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


def test_autocast_copies_the_weight_once(device):
    """As of torch's own linear: one copy for all calls while the context is on, and none is stale after."""
    inputs = plain(device, torch.bfloat16, s=10, b=4)
    hidden, weight = inputs.hidden.float(), torch.nn.Parameter(inputs.weight.float())
    linear, autocast = torch.nn.functional.linear, partial(torch.autocast, device.type, torch.bfloat16)

    def loss():
        return fused_linear_cross_entropy(hidden, weight, inputs.labels, config=FusedCEConfig(num_chunks=3))

    with WeightCasts(weight) as casts, autocast():
        with torch.inference_mode():
            loss()
        with torch.no_grad():
            evaluated = loss()
        linear(hidden, weight)
        made = loss() + loss()
    assert casts.count == 1
    made.backward(inputs.grad_loss)
    assert relative_error(weight.grad, 2 * plain_head(inputs, torch.float64).grad_weight) < 1e-2
    weight.data.mul_(2)  # bumps no version
    with autocast():
        assert (loss() - evaluated).abs().max() > 0.1
    weight.data.mul_(0.5)
    with autocast(), torch.no_grad():
        linear(hidden, weight)  # torch caches it, and it carries no gradient
        with torch.enable_grad():
            assert torch.autograd.grad(loss().sum(), weight)[0].abs().max() > 0
    with WeightCasts(weight) as casts, autocast(cache_enabled=False):
        torch.testing.assert_close(loss() + loss(), made)
    assert casts.count == 2
