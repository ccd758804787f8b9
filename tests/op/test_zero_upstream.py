"""Tokens without an upstream gradient left out of the backward's GEMMs; tests/op/test_losses.py has every
loss so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_fused_ce import (
    FusedCEConfig,
    TokenOutputs,
    fused_linear_distillation,
    masked_tokens,
    planner,
    zero_upstream,
)
from megatron_fused_ce.call import Call
from megatron_fused_ce.host_copy import HostCopy
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support.head import strategy_in_place
from tests.support.losses import NUM_GEMMS
from tests.support.op import EXP_DTYPE, captured, gemm_flops, leaves
from tests.support.problems import open_main_grad

SIZES = {"s": 23, "b": 3, "hidden_size": 48, "vocab": 331}
STRATEGIES = ("store", "mixed", "recompute")


@pytest.fixture(autouse=True)
def every_number_of_rows(monkeypatch):
    monkeypatch.setattr(masked_tokens, "ROUND_TO", 1)


def problem(share, device, dtype=torch.float32, kind="odd-labels", **changes):
    """Inputs, and upstream gradients ``[2, b, s]`` of which every token of a ``share`` has one, not always
    the same one; others have 0 or -0.0 in both."""
    inputs = make_inputs(kind, **{**SIZES, **changes}, dtype=dtype, device=device)
    draw = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(5)).to(device)
    upstreams = torch.stack((inputs.grad_loss, inputs.grad_loss.roll(1, 1)))
    upstreams[0][(draw < share / 3) | (draw >= share)] = 0.0
    upstreams[1][draw >= share / 2] = -0.0
    return inputs, upstreams, draw < share


def outputs_of(inputs, names=("log_prob", "entropy"), **call):
    hidden, weight = leaves(inputs)
    call = {"config": inputs.config, "outputs": names, "differentiable": names, **call}
    outputs = linear_cross_entropy(Call(hidden, weight, inputs.labels, **call)).outputs
    return TokenOutputs(**outputs), hidden, weight


def assert_exact(grads, inputs, upstreams, dtype):
    """Against fp64, by the error of the plain definition in the same dtype."""
    (_, *true), (_, *eager) = (plain_outputs(inputs, upstreams, of) for of in (torch.float64, dtype))
    for ours, right, plain in zip(grads, true, eager, strict=True):
        assert relative_error(ours, right) <= max(FLOOR[dtype], 2 * relative_error(plain, right))


@pytest.mark.parametrize("precision", ["auto", "activations"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["store", "mixed", "recompute"])
def test_several_labels_a_token(strategy, dtype, precision, device):
    """A token counts where one of its labels or its entropy has an upstream gradient."""
    inputs, upstreams, _ = problem(0.3, device, dtype, kind="plain")
    b, s = inputs.labels.shape
    labels = torch.randint(331, (b, s, 4), generator=torch.Generator().manual_seed(2)).to(device)
    labels[..., 3] = -1
    of_labels = torch.zeros(b, s, 4, device=device)
    of_labels[..., 1], of_labels[..., 2], of_labels[..., 3] = upstreams[0], upstreams[1], 1.0
    of_entropy = upstreams[1].roll(1, 1)
    grads = []
    for skips in (False, True):
        hidden, weight = leaves(inputs)
        with strategy_in_place(strategy) as named:
            config = FusedCEConfig(named, num_chunks=4, logit_precision=precision, skip_zero_upstream=skips)
            made = token_log_probs(hidden, weight, labels, entropy="differentiable", config=config)
        with gemm_flops() as flops:
            torch.autograd.backward([made.log_prob, made.entropy], [of_labels, of_entropy])
        grads.append((hidden.grad, weight.grad))
    counts = int(((upstreams != 0).any(0) | (of_entropy != 0)).sum())
    if strategy != "mixed":
        assert flops.get_total_flops() == NUM_GEMMS[strategy] * counts * 2 * weight.numel()
    for whole, ours in zip(*grads, strict=True):
        assert relative_error(ours, whole) <= FLOOR[dtype]


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_a_teacher_beside_the_student(strategy, divergence, device):
    """Its GEMM is left out too; what a call without the option gives is tested elsewhere."""
    inputs, upstreams, _ = problem(0.3, device, kind="plain")
    teacher_hidden, teacher_weight = inputs.hidden[..., :24].flip(0), inputs.weight[:, :24].contiguous()
    made = []
    for skips in (False, True):
        hidden, weight = leaves(inputs)
        config = FusedCEConfig(strategy, num_chunks=3, skip_zero_upstream=skips)
        options = {"labels": inputs.labels, "label_weights": inputs.grad_loss, "config": config}
        given = hidden, weight, teacher_hidden, teacher_weight
        outputs = fused_linear_distillation(*given, divergence=divergence, **options)
        with gemm_flops() as flops:
            outputs.loss.backward(upstreams[0])
        made.append((hidden.grad, weight.grad))
    num_gemms = 2.0 if strategy == "store" else 3.5
    counts = int((upstreams[0] != 0).sum())
    assert flops.get_total_flops() == num_gemms * counts * 2 * weight.numel()
    for whole, ours in zip(*made, strict=True):
        assert relative_error(ours, whole) < FLOOR[torch.float32]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_in_a_graph(strategy):
    """Captured on all tokens, replayed on some: to the bit what a call without the option gives."""
    inputs, upstreams, _ = problem(0.3, "cuda", torch.bfloat16, vocab=328)
    hidden, weight = leaves(inputs)
    upstream = inputs.grad_loss.clone()

    def iteration(skips):
        hidden.grad = weight.grad = None
        config = FusedCEConfig(strategy, num_chunks=3, skip_zero_upstream=skips)
        token_log_probs(hidden, weight, inputs.labels, config=config).log_prob.backward(upstream)

    graph, _ = captured(lambda: iteration(True))
    of_graph = hidden.grad, weight.grad
    upstream.copy_(upstreams[0])
    graph.replay()
    replayed = [grad.clone() for grad in of_graph]
    iteration(False)
    for ours, expected in zip(replayed, (hidden.grad, weight.grad), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_and_inf_are_not_0(strategy, bad, device):
    """An overflow of the loss scale, of one token and one output, is seen."""
    inputs, upstreams, _ = problem(0.2, device)
    at = (upstreams == 0).all(0).nonzero()[4]
    upstreams[1][tuple(at)] = bad
    with strategy_in_place(strategy) as named:
        inputs = replace(inputs, config=FusedCEConfig(named, num_chunks=3, skip_zero_upstream=True))
        made, hidden, weight = outputs_of(inputs)
    torch.autograd.backward([made.log_prob, made.entropy], list(upstreams))
    assert not torch.isfinite(weight.grad).any(0).all()
    rows = ~torch.isfinite(hidden.grad).all(-1)
    assert rows.sum() == 1 and rows[at[1], at[0]]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_token_counts(dtype, strategy, device):
    """``main_grad`` is opened and closed all the same, and keeps what it had."""
    inputs, upstreams, _ = problem(0.0, device, dtype)
    total = torch.ones(inputs.weight.shape, device=device)
    opened = []

    def open_once(weight, num_gemms, scaled):
        opened.append(num_gemms)
        return open_main_grad(total, weight, num_gemms, scaled)

    with strategy_in_place(strategy) as named:
        inputs = replace(inputs, config=FusedCEConfig(named, num_chunks=3, skip_zero_upstream=True))
        made, hidden, _ = outputs_of(inputs, open_grad_weight=open_once)
    torch.autograd.backward([made.log_prob, made.entropy], list(upstreams))
    assert opened == [0]
    assert torch.equal(total, torch.ones_like(total))
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("needs_grad", [(True, False), (False, True)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_of_the_gradients_alone(strategy, needs_grad, device):
    inputs, upstreams, _ = problem(0.4, device)
    hidden, weight = leaves(inputs, needs_grad)
    with strategy_in_place(strategy) as named:
        config = FusedCEConfig(named, num_chunks=3, skip_zero_upstream=True)
        made = token_log_probs(hidden, weight, inputs.labels, config=config)
    made.log_prob.backward(upstreams[0])
    _, *true = plain_outputs(inputs, {"log_prob": upstreams[0]}, torch.float64)
    for ours, right, wanted in zip((hidden.grad, weight.grad), true, needs_grad, strict=True):
        assert relative_error(ours, right) < FLOOR[torch.float32] if wanted else ours is None


@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_beside_an_active_mask(strategy, device, monkeypatch):
    """Of the tokens that the forward worked on; the host waits for two numbers, once each."""
    inputs, upstreams, counts = problem(0.3, device)
    active = counts | (torch.rand(counts.shape, generator=torch.Generator().manual_seed(1)).to(device) < 0.3)
    config = FusedCEConfig(strategy, num_chunks=3, skip_zero_upstream=True)
    hidden, weight = leaves(inputs)
    with gemm_flops() as flops:
        made = token_log_probs(
            hidden, weight, inputs.labels, entropy="differentiable", active_mask=active, config=config
        )
    of_one_token = 2 * weight.numel()
    assert flops.get_total_flops() == int(active.sum()) * of_one_token
    waits = []
    read = HostCopy.read
    monkeypatch.setattr(HostCopy, "read", lambda copy: waits.append(copy) or read(copy))
    with gemm_flops() as flops:
        torch.autograd.backward([made.log_prob, made.entropy], list(upstreams))
    assert flops.get_total_flops() == NUM_GEMMS[strategy] * int(counts.sum()) * of_one_token
    assert len(waits) == 2
    by_name = dict(zip(("log_prob", "entropy"), upstreams, strict=True))
    assert_exact((hidden.grad, weight.grad), inputs, by_name, torch.float32)


def test_rows_are_whole_tiles(device, monkeypatch):
    """A few tokens more than count, as many as fill the GEMM's tiles; never more than there are."""
    monkeypatch.setattr(masked_tokens, "ROUND_TO", 8)
    inputs, upstreams, _ = problem(0.3, device)
    inputs = replace(inputs, config=FusedCEConfig("store", num_chunks=1, skip_zero_upstream=True))
    made, hidden, weight = outputs_of(inputs)
    with gemm_flops() as flops:
        torch.autograd.backward([made.log_prob, made.entropy], list(upstreams))
    counts = int((upstreams != 0).any(0).sum())
    assert counts % 8
    assert flops.get_total_flops() == 2 * -(-counts // 8) * 8 * 2 * weight.numel()
    by_name = dict(zip(("log_prob", "entropy"), upstreams, strict=True))
    assert_exact((hidden.grad, weight.grad), inputs, by_name, torch.float32)


@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_short_chunks_are_joined(strategy, device):
    """A sixth of every chunk's tokens: one GEMM where there were six, with nothing to sum in fp32."""
    inputs, upstreams, _ = problem(0.15, device, EXP_DTYPE, vocab=512)
    opened = []

    def open_once(weight, num_gemms, scaled, stock=Call._field_defaults["open_grad_weight"]):
        opened.append(num_gemms)
        return stock(weight, num_gemms, scaled)

    config = FusedCEConfig(strategy, num_chunks=6, logits_backend="scaled_exp", skip_zero_upstream=True)
    made, *_ = outputs_of(replace(inputs, config=config), (), open_grad_weight=open_once)
    made.loss.backward(upstreams[0])
    assert opened == [1]


def test_nothing_is_copied_where_every_token_counts(device, monkeypatch):
    inputs, upstreams, _ = problem(1.0, device)
    inputs = replace(inputs, config=FusedCEConfig("store", num_chunks=3, skip_zero_upstream=True))
    made, *_ = outputs_of(inputs)
    monkeypatch.setattr(zero_upstream, "Kept", None)
    torch.autograd.backward([made.log_prob, made.entropy], list(upstreams))


def test_grad_in_forward_is_refused(device, monkeypatch):
    monkeypatch.setattr(planner, "SMALLEST_FLOP_TO_WAIT", 0)  # which this head is far below
    with pytest.raises(ValueError, match=r"skip_zero_upstream .* use 'store', 'recompute' or 'auto'"):
        FusedCEConfig("grad_in_forward", skip_zero_upstream=True)
    inputs = make_inputs("plain", **{**SIZES, "s": 128}, dtype=torch.float32, device=device)
    for skips in (False, True):
        # On a GPU cuBLAS's workspaces alone are 64 MiB.
        config = FusedCEConfig(memory_mb=1 if device.type == "cpu" else 66, skip_zero_upstream=skips)
        operands = leaves(inputs, (True, False))
        head = linear_cross_entropy(
            Call(*operands, inputs.labels, token_weights=inputs.grad_loss, config=config)
        )
        assert (head.plan.strategy == "grad_in_forward") == (not skips)


def test_no_tokens_at_all(device):
    hidden = torch.randn(0, 8, device=device, requires_grad=True)
    weight = torch.randn(11, 8, device=device, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    config = FusedCEConfig(skip_zero_upstream=True)
    token_log_probs(hidden, weight, labels, config=config).log_prob.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
