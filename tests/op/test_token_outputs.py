"""Outputs beside the loss, and a teacher's targets: edges that the table of losses does not have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_token_outputs, fused_linear_topk_distillation
from megatron_fused_ce.losses.outputs import OUTPUTS, differentiable_of
from megatron_fused_ce.scripts.lib.reference import (
    HeadInputs,
    make_teacher,
    plain_distillation,
    relative_error,
)
from tests.support.losses import Loss, problem
from tests.support.op import leaves

DIFFERENTIABLE = differentiable_of(OUTPUTS)


def plain(device, **sizes):
    return problem("plain", torch.float32, device, **sizes)


def test_fp16_large_weights_do_not_overflow(device):
    """A row of all outputs' gradients sums up to 8.5 times its upstream, times weights of 31."""
    weight = torch.tensor([-31.0, 0.0]).repeat(131072, 1)
    weight[0], weight[1] = torch.tensor([31.0, 12.5]), torch.tensor([-31.0, -20.0])
    inputs = HeadInputs(
        torch.tensor([[[0.0, 1.0]]], dtype=torch.float16, device=device),
        weight.to(device, torch.float16),
        torch.ones(1, 1, dtype=torch.int64, device=device),
        torch.full((1, 1), 1.99, device=device),
    )
    up = inputs.grad_loss
    upstreams = {"loss": up, "log_prob": -up, "lse": up, "entropy": -up}
    loss, (hidden, weight) = Loss(beside=DIFFERENTIABLE), leaves(inputs)
    made = loss.ask(hidden, weight, inputs, config=FusedCEConfig(strategy="store"))
    torch.autograd.backward([made[name] for name in upstreams], list(upstreams.values()))
    exact = loss.plain(inputs, upstreams, torch.float64)["grad_hidden"]
    assert relative_error(hidden.grad, exact) < 4e-3


def test_a_certain_token_has_no_entropy(device):
    """1 - p of 1e-13: its entropy is about 3e-12, not fp32's rounding of 1."""
    hidden, weight = torch.zeros(1, 1, 8, device=device), torch.zeros(5, 8, device=device)
    hidden[..., 0], weight[2, 0] = 30.0, 1.0
    for label in (2, 3):
        labels = torch.tensor([[label]], device=device)
        made = fused_linear_token_outputs(hidden, weight, labels, ("entropy",))
        exact = 4 * torch.exp(torch.tensor(-30.0, dtype=torch.float64)) * 31
        error = abs(float(made.entropy) - float(exact))
        # exp(-30) in fp32: its argument in powers of two is rounded to 2**-24 of 43.
        assert error < (43 * 2.0**-23 * exact if label == 2 else 1e-7)


def test_a_label_that_is_impossible_leaves_the_rest_as_it_is(device):
    """A label's logit of -inf (fp16 overflows): loss inf, lse and entropy of the others."""
    weight = torch.tensor([[1.0], [2.0], [-torch.inf]], device=device)
    given = torch.ones(1, 1, device=device), weight, torch.tensor([2], device=device)
    made = fused_linear_token_outputs(*given, ("lse", "entropy"))
    z = torch.tensor([1.0, 2.0])
    assert made.loss.item() == math.inf
    assert made.lse.item() == pytest.approx(z.logsumexp(0).item(), rel=1e-6)
    p = z.softmax(0)
    assert made.entropy.item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-6)


def test_nan_predicts_nothing(device):
    inputs = plain(device, s=2, b=1)
    inputs.hidden[0, 0, 0] = torch.nan
    made = fused_linear_token_outputs(inputs.hidden, inputs.weight, inputs.labels, ("predicted", "correct"))
    assert made.predicted[0, 0] == -1 and not made.correct[0, 0]
    assert made.predicted[0, 1] >= 0


def test_ignored_tokens_have_no_log_prob(device):
    inputs = plain(device, options={"ignore_index": -100})
    inputs.labels[:, ::2] = -100
    upstream = torch.full(inputs.labels.shape, torch.inf, device=device)
    upstream[:, 1::2] = 1.0
    hidden, weight = leaves(inputs)
    made = fused_linear_token_outputs(hidden, weight, inputs.labels, ("log_prob",), config=inputs.config)
    made.log_prob.backward(upstream)
    assert not made.log_prob[:, ::2].any() and not hidden.grad[::2].any()
    assert torch.isfinite(hidden.grad).all() and hidden.grad.abs().max() > 0


# Distillation


def test_a_token_without_entries_costs_nothing(device):
    inputs = plain(device)
    ids, log_probs = make_teacher(inputs, 3)
    ids[:, ::2] = -1
    hidden = inputs.hidden.clone().requires_grad_()
    loss = fused_linear_topk_distillation(hidden, inputs.weight, ids, log_probs)
    loss.sum().backward()
    assert torch.equal(loss[:, ::2], torch.zeros_like(loss[:, ::2]))
    assert torch.equal(hidden.grad[::2], torch.zeros_like(hidden.grad[::2]))
    assert hidden.grad[1::2].abs().amin(-1).amax() > 0


def test_the_yardstick_of_distillation_is_no_worse_than_its_logits(device):
    """Logits of 300 in fp32: eager's error is that of rounding the logits, or the bound would allow more."""
    inputs = problem("wide", torch.float32, device)
    teacher = make_teacher(inputs, 5)
    exact, eager = (plain_distillation(inputs, *teacher, of) for of in (torch.float64, torch.float32))
    z, weight = inputs.hidden @ inputs.weight.t(), inputs.weight.double()
    of_logits = replace(inputs, hidden=z, weight=torch.eye(len(weight), device=device))
    rounded = plain_distillation(of_logits, *teacher, torch.float64).grad_hidden @ weight
    of_rounding = relative_error(rounded, exact.grad_hidden)
    assert relative_error(eager.grad_hidden, exact.grad_hidden) < 1.5 * of_rounding
