"""Several labels a token: log-probabilities, each with any upstream gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.planner import choose, memory
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.live_storages import LiveStorages
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_several, relative_error
from tests.support.op import leaves, rows_by

SIZES = {"s": 12, "b": 2, "hidden_size": 16, "vocab": 53}
#: Of log-probabilities in every dtype: they come from fp32 sums of products.
OF_VALUES = 4e-6


def several(inputs, count: int) -> torch.Tensor:
    """``[b, s, K]``: the label first; ids twice and more, empty entries, ids of none, a token without any."""
    b, s = inputs.labels.shape
    vocab = inputs.weight.shape[0]
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(0, vocab, (b, s, count), generator=generator).to(inputs.labels.device)
    labels[..., 0] = inputs.labels
    labels[:, 1::5, count // 2 :] = -1
    labels[:, 2::5, count // 2] = vocab + 3
    labels[:, 3::5, count // 3 :] = labels[:, 3::5, :1]  # one id many times
    labels[:, 4] = -1
    labels[0, 5] = -100
    return labels


def upstream_of(labels: torch.Tensor) -> torch.Tensor:
    """Random; those of every third token sum up to 0, those of one are all 0."""
    upstream = torch.randn(labels.shape, generator=torch.Generator().manual_seed(1)).to(labels.device)
    counted = upstream.masked_fill(labels == -1, 0.0)
    upstream[:, ::3, 0] -= counted[:, ::3].sum(-1)
    upstream[:, 7] = 0.0
    return upstream


def bent(cap: float, scale: float = 1.0) -> FusedCEConfig:
    return FusedCEConfig(logit_softcap=cap, logit_scale=scale)


#: Kind of inputs, dtype, number of labels, config, temperature.
CASES: dict[str, tuple[str, torch.dtype, int, FusedCEConfig, Any]] = {
    "one": ("plain", torch.float32, 1, FusedCEConfig(), 1.0),
    "sixty-four": ("plain", torch.bfloat16, 64, FusedCEConfig(), "per token"),
    "a thousand": ("plain", torch.float32, 1024, FusedCEConfig(), 5.0),
    "a thousand in fp16": ("plain", torch.float16, 1024, FusedCEConfig(), 0.7),
    "sure": ("peaked", torch.bfloat16, 3, FusedCEConfig(), 1.0),
    "wide": ("wide", torch.float32, 5, FusedCEConfig(), 1.0),
    "cold": ("plain", torch.float32, 5, FusedCEConfig(), 0.01),
    "softcap": ("wide", torch.bfloat16, 64, bent(30.0), 0.7),
    "softcap and scale": ("wide", torch.float32, 7, bent(5.0, 0.3), "per token"),
    "padded vocabulary": ("plain", torch.float32, 7, FusedCEConfig(true_vocab_size=50), 1.0),
    "triton": ("plain", torch.float32, 7, bent(5.0), "per token"),
    "options of the loss": ("plain", torch.float32, 7, FusedCEConfig(z_loss=0.1, label_smoothing=0.1), 1.0),
}


class Made(NamedTuple):
    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor


def step(inputs, labels, upstream, of_entropy=None, **options) -> Made:
    """Values, and gradients of both where the entropy has an upstream gradient."""
    operands = leaves(inputs)
    entropy = "none" if of_entropy is None else "differentiable"
    made = token_log_probs(*operands, labels, entropy=entropy, **options)
    outputs, upstreams = [made.log_prob, made.entropy], [upstream, of_entropy]
    kept = 1 if of_entropy is None else 2
    grads = torch.autograd.grad(outputs[:kept], operands, upstreams[:kept])
    return Made(made.log_prob.detach(), None if made.entropy is None else made.entropy.detach(), *grads)


def plain(device, dtype=torch.float32, kind="plain", **sizes):
    return make_inputs(kind, **{**SIZES, **sizes}, dtype=dtype, device=device)


@pytest.mark.parametrize("strategy", ["store", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_against_fp64(case, strategy, device):
    """And the entropy beside them, whose gradient reaches the same entries."""
    kind, dtype, count, config, temperature = CASES[case]
    inputs = plain(device, dtype, kind)
    labels = several(inputs, count)
    upstream, of_entropy = upstream_of(labels), 0.3 * inputs.grad_loss
    per_token = torch.full_like(inputs.grad_loss, 1.0 if temperature == "per token" else temperature)
    if temperature == "per token":
        temperature = per_token = inputs.grad_loss.abs() + 0.5
    config = replace(config, strategy=strategy, num_chunks=3)
    with rows_by("triton" if case == "triton" else "auto"):
        made = step(inputs, labels, upstream, of_entropy, temperature=temperature, config=config)
    # Eager's logits from GEMMs of the head's shape: for logits of 300 in fp32 the order of a GEMM's sums
    # decides over the entropy's error, which is then 1e-6 to 1.1e-5, eager's and the head's alike.
    inputs = replace(inputs, config=config, temperature=per_token, logit_scale=config.logit_scale, gemms=3)
    exact, eager = (
        plain_several(inputs, labels, upstream, precision, of_entropy) for precision in (torch.float64, dtype)
    )
    assert made.log_prob.shape == labels.shape and made.log_prob.dtype == torch.float32
    given = labels != -1
    assert (made.log_prob[~given] == -torch.inf).all()
    assert relative_error(made.log_prob[given], exact[0][given]) < OF_VALUES
    of_eager = 2 * relative_error(eager[1], exact[1]) * (dtype == torch.float32)
    assert relative_error(made.entropy, exact[1]) < max(OF_VALUES, of_eager)
    for ours, rough, true in zip(made[2:], eager[2:], exact[2:], strict=True):
        assert relative_error(ours, true) < max(FLOOR[dtype], 2 * relative_error(rough, true))


@pytest.mark.parametrize("kind", ["peaked", "odd-labels", "wide"])
@pytest.mark.parametrize("zero_unknown", [False, True])
def test_one_label_is_the_single_label_path(kind, zero_unknown, device):
    inputs = plain(device, kind=kind)
    inputs.labels[inputs.labels == -1] = 60  # -1 is an empty entry here
    options = {"zero_unknown": zero_unknown, "config": FusedCEConfig(strategy="store", num_chunks=2)}
    one = step(inputs, inputs.labels, inputs.grad_loss, **options)
    other = step(inputs, inputs.labels.unsqueeze(-1), inputs.grad_loss.unsqueeze(-1), **options)
    assert relative_error(other.log_prob.squeeze(-1), one.log_prob) < 3e-7
    for ours, right in zip(other[2:], one[2:], strict=True):
        assert relative_error(ours, right) < 3e-7


def test_digits_of_a_sure_token(device):
    """log p of -2e-9, and the gradient p - 1 at its label: nothing is subtracted from 1."""
    weight = torch.tensor([[0.0], [20.0], [-5.0]], device=device, requires_grad=True)
    hidden = torch.ones(1, 1, device=device, requires_grad=True)
    for strategy in ("store", "recompute"):
        weight.grad = None
        config = FusedCEConfig(strategy=strategy)
        made = token_log_probs(hidden, weight, torch.tensor([[2, 1, 1]], device=device), config=config)
        made.log_prob[0, 1].backward()
        true = weight.detach().double().flatten().log_softmax(0)
        assert relative_error(made.log_prob.detach(), true[[2, 1, 1]].unsqueeze(0)) < 1e-6
        assert abs(made.log_prob[0, 1].item() / true[1].item() - 1) < 1e-5 and true[1] > -3e-9
        assert relative_error(weight.grad.flatten(), torch.eye(3)[1].to(device) - true.exp()) < 1e-5


@pytest.mark.parametrize("upstream", [2.0**-20, 2.0**18], ids=["tiny", "large"])
def test_fp16_holds_the_sum_of_a_tokens_upstreams(upstream, device):
    """The scale that keeps its gradients in range is that of one id 1024 times."""
    inputs = plain(device, torch.float16)
    labels = inputs.labels.unsqueeze(-1).expand(-1, -1, 1024).contiguous()
    of_labels = torch.full(labels.shape, upstream / 1024, device=device)
    made = step(inputs, labels, of_labels, config=FusedCEConfig(num_chunks=2))
    _, _, *exact = plain_several(inputs, labels, of_labels, torch.float64)
    for ours, true in zip(made[2:], exact, strict=True):
        if upstream < 1:  # gradients below fp16's smallest normal number are rounded to multiples of 2**-24
            assert (ours - true).norm() < FLOOR[ours.dtype] * true.norm() + true.numel() ** 0.5 * 2.0**-25
        elif ours.isfinite().all():
            assert relative_error(ours, true) < FLOOR[ours.dtype]
        else:
            assert true.abs().max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_tokens_that_are_left_out(strategy, device):
    """Results 0; an upstream gradient for one of their labels raises."""
    inputs = plain(device, s=200)
    labels, operands = several(inputs, 5), leaves(inputs)
    counts = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(4)).to(device) < 0.3
    upstream = upstream_of(labels).masked_fill(~counts.unsqueeze(-1), 0.0)
    options = {"active_mask": counts, "config": FusedCEConfig(strategy=strategy, chunk_tokens=150)}
    made = token_log_probs(*operands, labels, entropy="differentiable", **options)
    upstreams = upstream, inputs.grad_loss * counts
    log_p, entropy, *grads = plain_several(inputs, labels, upstreams[0], torch.float64, upstreams[1])
    torch.autograd.backward([made.log_prob, made.entropy], upstreams, retain_graph=True)
    given = (labels != -1) & counts.unsqueeze(-1)
    assert relative_error(made.log_prob.detach()[given], log_p[given]) < OF_VALUES
    assert relative_error(made.entropy.detach(), entropy * counts) < OF_VALUES
    assert not made.log_prob[~counts].any(), "in empty entries too: a mask times them is 0"
    for operand, true in zip(operands, grads, strict=True):
        assert relative_error(operand.grad, true) < FLOOR[torch.float32]
    with pytest.raises(RuntimeError, match="outside active_mask"):
        made.log_prob.backward(upstream_of(labels))


@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_memory_is_the_plans(strategy):
    """Bytes a label, beyond a call with one: at most what the planner counts, and not half of it less."""
    num_tokens, size, vocab, count = 160, 16, 448, 65
    config = FusedCEConfig(strategy=strategy, chunk_tokens=40, logit_softcap=3.0)
    peaks, predicted = [], []
    for k in (1, count):
        hidden, weight = torch.randn(num_tokens, size), torch.randn(vocab, size)
        labels = torch.randint(0, vocab, (num_tokens, k))
        operands = hidden.requires_grad_(), weight.requires_grad_()
        with patch.object(rows_torch, "BLOCK_ELEMENTS", vocab), LiveStorages() as live:
            made = token_log_probs(*operands, labels, entropy="differentiable", config=config).log_prob
            made.backward(torch.ones_like(made))
        peaks.append(live.peak_bytes)
        inputs = memory.PlanInputs(
            config=config, num_tokens=num_tokens, hidden_size=size, num_rows=vocab, dtype="float32",
            wgrad_accumulator="returned", logits_backend="gemm_rows", labels_per_token=k, device="cpu",
        )  # fmt: skip
        predicted.append(choose.plan(inputs).predicted_peak_bytes)
    grown, counted = peaks[1] - peaks[0], predicted[1] - predicted[0]
    upstream = 4 * num_tokens * (count - 1)  # the caller's
    assert counted / 2 < grown - upstream <= counted
