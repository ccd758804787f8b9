"""The adapter to verl, on a stand-in for the module that it changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_fused_ce.adapter import verl
from megatron_fused_ce.testing.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support import stand_in


class CausalLMOutputForPPO(SimpleNamespace):
    """verl's, as its processor makes it."""

    def __init__(self, loss, logits, past_key_values, hidden_states, attentions):
        super().__init__(logits=logits, hidden_states=hidden_states)


@pytest.fixture
def module(monkeypatch):
    """verl's, with the processor's parameters as of 0.9.1."""

    def processor(
        *, hidden_states, output_layer, output_weight, labels, context, config, **_ignored
    ):  # fmt: skip
        raise AssertionError("not replaced")

    class GPTModel:
        def forward(self, input_ids, output_processor=None, output_processor_context=None):
            """From megatron-core 0.18 on."""

    members = {verl.FUNCTION: processor, "CausalLMOutputForPPO": CausalLMOutputForPPO, "GPTModel": GPTModel}
    return stand_in.module(monkeypatch, verl.MODULE, **members)


@pytest.mark.parametrize("tied", [False, True])
def test_its_processor_is_replaced(tied, module, device):
    """A temperature; gradients of both; the weight of the layer, or of tied embeddings."""
    sizes = {"s": 24, "b": 1, "hidden_size": 16, "vocab": 53}
    inputs = make_inputs("plain", **sizes, dtype=torch.float32, device=device, logit_scale=1 / 0.7)
    hidden, weight = inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    verl.serve_verl()
    verl.serve_verl()  # twice is once
    output = getattr(module, verl.FUNCTION)(
        hidden_states=hidden,
        output_layer=SimpleNamespace(weight=None if tied else weight, tp_group=None),
        output_weight=weight if tied else None,
        labels=inputs.labels,
        context=SimpleNamespace(temperature=0.7),
        config=SimpleNamespace(sequence_parallel=False),
        loss_mask=None,
        packed_seq_params=None,
    )
    assert output.logits is None and output.hidden_states is hidden
    assert output.log_probs.shape == output.entropy.shape == (24,)
    upstreams = {"log_prob": inputs.grad_loss, "entropy": -inputs.grad_loss}
    grads = [upstream.flatten() for upstream in upstreams.values()]
    torch.autograd.backward([output.log_probs, output.entropy], grads)
    exact, grad_hidden, grad_weight = plain_outputs(inputs, upstreams, torch.float64)
    bound = FLOOR[torch.float32]
    assert relative_error(output.log_probs.detach(), exact.log_prob.flatten()) < bound
    assert relative_error(output.entropy.detach(), exact.entropy.flatten()) < bound
    assert relative_error(hidden.grad, grad_hidden) < bound
    assert relative_error(weight.grad, grad_weight) < bound


def test_an_older_megatron_is_refused(module, monkeypatch):
    """verl then calls another function, which would stay its own."""
    stock = getattr(module, verl.FUNCTION)
    monkeypatch.setattr(module.GPTModel, "forward", lambda self, input_ids: None)
    with pytest.raises(RuntimeError, match=r"GPTModel.forward takes .*from megatron-core 0.18 on"):
        verl.serve_verl()
    assert getattr(module, verl.FUNCTION) is stock


def test_another_signature_is_refused(module):
    stock = lambda hidden_states, labels: None  # noqa: E731
    setattr(module, verl.FUNCTION, stock)
    with pytest.raises(RuntimeError, match=r"takes \['hidden_states', 'labels'\]; expected"):
        verl.serve_verl()
    assert getattr(module, verl.FUNCTION) is stock
    delattr(module, verl.FUNCTION)
    with pytest.raises(RuntimeError, match="it is not there"):
        verl.serve_verl()
    with pytest.raises(ValueError, match="verl reads it"):
        verl.serve_verl(entropy="none")
