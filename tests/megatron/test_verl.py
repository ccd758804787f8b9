"""The adapter to verl, on a stand-in for the module that it changes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce.adapter import verl
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support import stand_in
from tests.support.head import shard_of, whole_rows
from tests.support.ranks import Rank, on_ranks


class CausalLMOutputForPPO(SimpleNamespace):
    """verl's, as its processor makes it."""

    def __init__(self, loss, logits, past_key_values, hidden_states, attentions):
        super().__init__(logits=logits, hidden_states=hidden_states)


@pytest.fixture
def module(monkeypatch):
    return stand_ins(monkeypatch)


def stand_ins(monkeypatch, overlap=True):
    """verl's modules, with parameters as of 0.9.1; an older Megatron has no ``overlap`` of experts."""

    def processor(
        *, hidden_states, output_layer, output_weight, labels, context, config, **_ignored
    ):  # fmt: skip
        raise AssertionError("not replaced")

    class LinearCrossEntropy:
        def forward(ctx, hidden, weight, labels, temperature, reduction, dist_process_group):
            raise AssertionError("not replaced")

    stand_in.module(monkeypatch, verl.KERNEL, LinearCrossEntropy=LinearCrossEntropy)
    if overlap:
        stand_in.module(monkeypatch, verl.CALLERS[1], linear_cross_entropy=None)
    members = {verl.FUNCTION: processor, "CausalLMOutputForPPO": CausalLMOutputForPPO}
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


@on_ranks(1, 2)
@pytest.mark.parametrize("overlap", [True, False], ids=["", "without overlap"])
def test_its_kernel_is_replaced(rank: Rank, overlap):
    """As it is called with an older megatron-core: hidden states gathered, whose gradient the gather sums."""
    sizes = {"s": 24, "b": 1, "hidden_size": 16, "vocab": 100}
    inputs = make_inputs("plain", **sizes, dtype=torch.float32, device=rank.device, logit_scale=1 / 0.7)
    hidden, weight, _ = shard_of(rank, inputs, False, "equal")
    with pytest.MonkeyPatch.context() as monkeypatch:
        modules = [stand_ins(monkeypatch, overlap)]
        modules += [sys.modules[verl.CALLERS[1]]] if overlap else []
        verl.serve_verl(entropy="detached")
    for module in modules:
        hidden.grad = weight.grad = None
        given = hidden, weight, inputs.labels, 0.7
        log_prob, entropy = module.linear_cross_entropy(*given, "none", rank.group)
        assert log_prob.shape == entropy.shape == (24,) and not entropy.requires_grad
        log_prob.backward(inputs.grad_loss.flatten())
        dist.all_reduce(hidden.grad, group=rank.group)
        exact, grad_hidden, grad_weight = plain_outputs(inputs, {"log_prob": inputs.grad_loss}, torch.float64)
        bound = FLOOR[torch.float32]
        assert relative_error(log_prob.detach(), exact.log_prob.flatten()) < bound
        assert relative_error(entropy, exact.entropy.flatten()) < bound
        assert relative_error(hidden.grad, grad_hidden) < bound
        assert relative_error(whole_rows(rank, weight.grad), grad_weight) < bound
        with pytest.raises(ValueError, match="reduction is 'mean'"):
            module.linear_cross_entropy(*given, "mean", rank.group)


def test_another_kernel_is_refused(module, monkeypatch):
    stock = getattr(module, verl.FUNCTION)
    kernel = sys.modules[verl.KERNEL].LinearCrossEntropy
    monkeypatch.setattr(kernel, "forward", lambda ctx, hidden, weight: None)
    with pytest.raises(RuntimeError, match=r"LinearCrossEntropy.forward takes \['ctx', 'hidden', 'weight'\]"):
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
