"""The adapter to SkyRL, on a stand-in for the module that it changes."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce.adapter import skyrl
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_outputs, relative_error
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

    def caller(hidden, lm_head_weight, target, temperature=1.0):
        if temperature != 1.0:
            lm_head_weight = lm_head_weight / temperature
        function = getattr(made, skyrl.FUNCTION)
        return function("torch", hidden, lm_head_weight, target, 0, 53, 5, None, False)

    members = {skyrl.FUNCTION: fused, **dict.fromkeys(skyrl.CALLERS, caller)}
    made = stand_in.module(monkeypatch, skyrl.MODULE, **members)
    return made


@pytest.mark.parametrize("name", skyrl.CALLERS)
def test_a_temperature_divides_no_weight(name, module, device, monkeypatch):
    """In bf16 that would round it; also where the caller was imported by name before. Twice is once."""
    by_name = stand_in.module(monkeypatch, "importer", **{name: getattr(module, name)})
    sizes = {"s": 12, "b": 2, "hidden_size": 16, "vocab": 53}
    inputs = make_inputs("plain", **sizes, dtype=torch.float32, device=device, logit_scale=1 / 0.7)
    inputs.weight.copy_(inputs.weight.bfloat16())
    hidden = inputs.hidden.transpose(0, 1).contiguous().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    skyrl.serve_skyrl()
    skyrl.serve_skyrl()
    seen = []
    stock = getattr(module, skyrl.FUNCTION)
    monkeypatch.setattr(module, skyrl.FUNCTION, lambda *given: seen.append(given[2]) or stock(*given))
    made = getattr(by_name, name)(hidden, weight, inputs.labels, temperature=0.7)
    made.backward(inputs.grad_loss)
    assert len(seen) == 1 and seen[0] is weight
    exact, grad_hidden, grad_weight = plain_outputs(inputs, {"log_prob": inputs.grad_loss}, torch.float64)
    assert relative_error(made.detach(), exact.log_prob) < FLOOR[torch.float32]
    assert relative_error(hidden.grad.transpose(0, 1), grad_hidden) < FLOOR[torch.float32]
    assert relative_error(weight.grad, grad_weight) < FLOOR[torch.float32]
    alone = getattr(by_name, name)(hidden, weight, inputs.labels)
    assert relative_error(alone.detach(), exact.log_prob) > 0.01


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
    setattr(module, skyrl.CALLERS[1], lambda hidden, lm_head_weight, target: None)
    with pytest.raises(RuntimeError, match=r"takes .*'target'\]; expected \['temperature'\]"):
        skyrl.serve_skyrl()
    delattr(module, skyrl.FUNCTION)
    delattr(module, skyrl.CALLERS[1])
    with pytest.raises(RuntimeError, match="it is not there"):
        skyrl.serve_skyrl()
