"""What RL stacks hand in beside tokens: weights in fp32, temperatures that are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.testing.reference import FLOOR, make_inputs, plain_outputs, relative_error

SIZES = {"s": 12, "b": 2, "hidden_size": 16, "vocab": 53}


def test_half_hidden_states_and_an_fp32_weight(device):
    """As SkyRL has them: the products are fp32, and each gradient has the dtype of its operand."""
    inputs = make_inputs("odd-labels", **SIZES, dtype=torch.float32, device=device)
    inputs = replace(inputs, hidden=inputs.hidden.bfloat16().float())
    hidden = inputs.hidden.bfloat16().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    made = token_log_probs(hidden, weight, inputs.labels, config=FusedCEConfig(num_chunks=3))
    made.log_prob.backward(inputs.grad_loss)
    exact, grad_hidden, grad_weight = plain_outputs(inputs, {"log_prob": inputs.grad_loss}, torch.float64)
    assert relative_error(made.log_prob.detach(), exact.log_prob) < FLOOR[torch.float32]
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    assert relative_error(hidden.grad, grad_hidden) < FLOOR[torch.bfloat16]
    assert relative_error(weight.grad, grad_weight) < FLOOR[torch.float32]


def test_without_gradients_nothing_is_saved(device):
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    hidden = inputs.hidden.clone().requires_grad_()
    with torch.no_grad():
        made = token_log_probs(hidden, inputs.weight, inputs.labels, entropy="differentiable")
    assert not made.log_prob.requires_grad and not made.entropy.requires_grad


BAD = {
    "zero": ({"temperature": 0}, ValueError, "above 0 and finite"),
    "nan": ({"temperature": float("nan")}, ValueError, "above 0 and finite"),
    "words": ({"temperature": "1"}, TypeError, "expected a number"),
    "one of many zero": ({"temperature": torch.tensor([1.0, 1.0, 0.0])}, ValueError, "not all above 0"),
    "one of many inf": ({"temperature": torch.tensor([1.0, torch.inf, 1.0])}, ValueError, "not all above 0"),
    "a scalar tensor": ({"temperature": torch.tensor(1.0)}, ValueError, "one a token"),
    "whole numbers": ({"temperature": torch.tensor([1, 2, 3])}, TypeError, "expected floats"),
    "entropy": ({"entropy": True}, ValueError, "choose one of none, detached"),
    "strategy": (
        {"config": FusedCEConfig(strategy="grad_in_forward")},
        ValueError,
        "cannot know the upstream",
    ),
    "option": ({"strategy": "store"}, TypeError, "belongs to the config"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what, device):
    given, error, words = BAD[what]
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    hidden = torch.ones(3, 4, device=device, requires_grad=True)
    with pytest.raises(error, match=words):
        token_log_probs(hidden, hidden, torch.arange(3, device=device), **given)
