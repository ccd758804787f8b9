"""Options of the loss in one process, against PyTorch's and Megatron's own definitions."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.scripts.lib import gloo
from megatron_fused_ce.scripts.lib.reference import make_inputs, plain_head, relative_error
from tests.support.losses import LOSS_OPTIONS, assert_close, problem
from tests.support.op import DTYPES, STRATEGIES, captured, run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none", *LOSS_OPTIONS])
def test_in_a_graph(name, dtype, strategy):
    """Captured on other numbers, replayed on these: to the bit what the call gives outside of a graph.

    Skipping masked tokens is on too, which a capture cannot: it works on all of them.
    """
    options = {**LOSS_OPTIONS, "none": {}}[name]
    inputs = problem("odd-labels", dtype, "cuda", options=options, hidden_size=64, vocab=328)
    config = replace(inputs.config, strategy=strategy, num_chunks=4, skip_masked=True)
    expected = run(inputs, replace(config, skip_masked=False))
    these = (inputs.hidden, inputs.weight, inputs.labels, inputs.grad_loss)
    static = hidden, weight, labels, upstream = [tensor.flip(0) for tensor in these]
    hidden.requires_grad_(), weight.requires_grad_()

    def iteration():
        loss = fused_linear_cross_entropy(hidden, weight, labels, token_weights=upstream / 1.5, config=config)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), upstream)

    graph, made = captured(iteration)
    with torch.no_grad():
        for of_graph, this in zip(static, these, strict=True):
            of_graph.copy_(this)
    graph.replay()
    assert all(map(torch.equal, made, expected))


@pytest.mark.parametrize("name", LOSS_OPTIONS)
def test_an_option_changes_the_loss(name):
    """Else every test here could pass without it."""
    inputs = problem("odd-labels", torch.float64, "cpu", options=LOSS_OPTIONS[name])
    plain = plain_head(replace(inputs, config=FusedCEConfig(ignore_index=None)), torch.float64)
    assert relative_error(plain_head(inputs, torch.float64).loss, plain.loss) > 1e-3


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_as_torch_defines_them(smoothing, device):
    inputs = problem("odd-labels", torch.float32, device)
    inputs.labels.masked_fill_((inputs.labels < 0) | (inputs.labels >= 331), -100)
    config = FusedCEConfig(label_smoothing=smoothing, label_smoothing_form="pytorch")
    result = run(inputs, config)
    hidden = inputs.hidden.double().requires_grad_()
    weight = inputs.weight.double().requires_grad_()
    loss = F.cross_entropy(
        (hidden @ weight.t()).permute(1, 2, 0),
        inputs.labels,
        ignore_index=-100,
        label_smoothing=smoothing,
        reduction="none",
    )
    loss.backward(inputs.grad_loss.double())
    for ours, true in zip(result, (loss, hidden.grad, weight.grad), strict=True):
        assert relative_error(ours, true.detach()) < 2e-6


def test_as_megatron_smooths_labels_on_one_rank(tmp_path):
    """On more ranks Megatron smooths over the shard alone; ours is tested against fp64 there."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    os.environ.setdefault("MASTER_ADDR", "localhost")
    gloo.use_one_thread()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        inputs = make_inputs("plain", s=9, b=2, hidden_size=16, vocab=50, dtype=torch.float32)
        result = run(inputs, FusedCEConfig(label_smoothing=0.1))
        hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
        loss = vocab_parallel_cross_entropy(hidden @ weight.t(), inputs.labels.t().contiguous(), 0.1).t()
        loss.backward(inputs.grad_loss)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    for ours, theirs in zip(result, (loss.detach(), hidden.grad, weight.grad), strict=True):
        assert relative_error(ours, theirs) < 4e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_ignored_token_takes_no_upstream(strategy, device):
    """Nor does it break grad_in_forward's promise, whatever its weight and its upstream gradient are."""
    inputs = problem("plain", torch.float32, device, options={"ignore_index": -100})
    inputs.labels[:, ::2] = -100
    expected = run(inputs, replace(inputs.config, strategy=strategy))
    weights = inputs.grad_loss.clone()
    inputs.grad_loss[:, ::2] = torch.inf
    made = run(inputs, replace(inputs.config, strategy=strategy), token_weights=weights)
    for one, other in zip(made, expected, strict=True):
        assert relative_error(one, other) < 2e-6
    assert not made.grad_hidden[::2].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", ["activations", "fp32"])
def test_precision_of_logits(precision, dtype, strategy, device):
    """Losses are those of what a plain layer of that dtype writes, or of logits that are never rounded."""
    inputs = problem("plain", dtype, device)
    x, weight = inputs.hidden.flatten(0, 1), inputs.weight
    logits = x.float() @ weight.float().t() if precision == "fp32" else (x @ weight.t()).float()
    plain = F.cross_entropy(logits, inputs.labels.t().flatten(), reduction="none").view(23, 3).t()
    num_chunks = 4 if precision == "fp32" else 1
    result = run(inputs, FusedCEConfig(strategy, logit_precision=precision, num_chunks=num_chunks))
    torch.testing.assert_close(result.loss, plain, rtol=2e-6, atol=2e-6)
    assert_close(result, inputs)


def test_an_ignored_id_that_int32_cannot_hold(device):
    """No label of int32 is that one, whatever it becomes in int32."""
    inputs = make_inputs("plain", s=8, b=1, hidden_size=4, vocab=11, dtype=torch.float32, device=device)
    labels, config = torch.full_like(inputs.labels, 5).int(), FusedCEConfig(ignore_index=2**32 + 5)
    assert fused_linear_cross_entropy(inputs.hidden, inputs.weight, labels, config=config).all()
