"""The adapter to SkyRL, on a stand-in for the module that it changes."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.adapter import skyrl
from megatron_fused_ce.testing.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support import stand_in


@pytest.fixture
def module(monkeypatch):
    """SkyRL's, with the function as at a956457."""

    def fused(
        backend,
        hidden,
        weight,
        target,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only,
    ):
        raise AssertionError("not replaced")

    return stand_in.module(monkeypatch, skyrl.MODULE, **{skyrl.FUNCTION: fused})


def test_its_function_is_replaced(module, device):
    """bf16 hidden states, an fp32 weight, targets outside the vocabulary: the case that its tests name."""
    sizes = {"s": 12, "b": 2, "hidden_size": 16, "vocab": 53}
    inputs = make_inputs("odd-labels", **sizes, dtype=torch.float32, device=device)
    inputs.hidden.copy_(inputs.hidden.bfloat16())
    hidden = inputs.hidden.transpose(0, 1).bfloat16().contiguous().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    skyrl.serve_skyrl()
    skyrl.serve_skyrl()  # twice is once
    function = getattr(module, skyrl.FUNCTION)
    made = function("torch", hidden, weight, inputs.labels, 0, 53, 5, None, False)
    made.backward(inputs.grad_loss)
    exact, grad_hidden, grad_weight = plain_outputs(inputs, {"log_prob": inputs.grad_loss}, torch.float64)
    unknown = (inputs.labels < 0) | (inputs.labels >= 53)
    assert relative_error(made.detach(), exact.log_prob.masked_fill(unknown, 0.0)) < FLOOR[torch.float32]
    assert relative_error(hidden.grad.transpose(0, 1), grad_hidden) < FLOOR[torch.bfloat16]
    assert relative_error(weight.grad, grad_weight) < FLOOR[torch.float32]
    assert not function("torch", hidden, weight, inputs.labels, 0, 53, 5, None, True).requires_grad


def test_another_signature_is_refused(module):
    stock = lambda backend, hidden, target: None  # noqa: E731
    setattr(module, skyrl.FUNCTION, stock)
    with pytest.raises(RuntimeError, match=r"takes \['backend', 'hidden', 'target'\]; expected"):
        skyrl.serve_skyrl()
    assert getattr(module, skyrl.FUNCTION) is stock
    delattr(module, skyrl.FUNCTION)
    with pytest.raises(RuntimeError, match="it is not there"):
        skyrl.serve_skyrl()
