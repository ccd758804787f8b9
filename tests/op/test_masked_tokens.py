"""Masked tokens left out of every product, in one process: same results as with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_fused_ce import (
    FusedCEConfig,
    TokenOutputs,
    fused_linear_token_outputs,
    fused_linear_topk_distillation,
)
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.scripts.lib.reference import (
    HeadResult,
    make_inputs,
    make_teacher,
    plain_distillation,
    relative_error,
)
from tests.support.losses import assert_close, assert_within
from tests.support.op import STRATEGIES, gemm_flops, leaves, open_main_grad


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(tokens, "ROUND_TO", 4)


def masked_problem(share, device, dtype=torch.float32, **shape):
    """Labels of masked tokens are anything; their upstream gradient is 0, as a masked loss's is."""
    inputs = make_inputs(
        "plain", **{"s": 23, "b": 3, "hidden_size": 48, "vocab": 331, **shape}, dtype=dtype, device=device
    )
    generator = torch.Generator().manual_seed(7)
    masked = torch.rand(inputs.labels.shape, generator=generator) < share
    masked = masked.to(inputs.labels.device)
    inputs.grad_loss.masked_fill_(masked, 0.0)
    return inputs, masked


def run(inputs, config, **settings):
    hidden, weight = leaves(inputs)
    more = {"token_weights": inputs.grad_loss / 1.5, "config": config, **settings}
    made = linear_cross_entropy(Call(hidden, weight, inputs.labels, **more))
    made.loss.backward(inputs.grad_loss)
    return HeadResult(made.loss.detach(), hidden.grad, weight.grad), made.plan


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_others_are_as_before_and_masked_ones_cost_nothing(strategy, device):
    """Their results are 0. One plan serves all of their counts: the order of collectives is the shapes'."""
    config = FusedCEConfig(strategy, num_chunks=3, skip_masked=True, logits_backend="gemm_rows")
    plans = set()
    for share in (0.0, 0.3, 0.8, 1.0):
        inputs, masked = masked_problem(share, device)
        with gemm_flops() as flops:  # torch's
            result, plan = run(inputs, config)
        plans.add(plan)
        rounded = -(-int((~masked).sum()) // 4) * 4
        per_token = (4 if strategy == "recompute" else 3) * 2 * inputs.weight.numel()
        assert flops.get_total_flops() == per_token * min(rounded, masked.numel())
        assert not result.loss[masked].any() and not result.grad_hidden[masked.t()].any()
        # The truth of all tokens, masked ones with an upstream gradient of 0; their losses apart.
        whole, _ = run(inputs, replace(config, skip_masked=False))
        assert_close(whole, inputs)
        assert relative_error(result.grad_hidden, whole.grad_hidden) < 2e-6
        assert relative_error(result.grad_weight, whole.grad_weight) < 2e-6
        torch.testing.assert_close(result.loss, whole.loss.masked_fill(masked, 0.0), rtol=1e-6, atol=1e-6)
    assert len(plans) == 1


def outputs_of(inputs, weights, strategy, names=(), **options):
    """The loss and other outputs, differentiable; operands that end in nothing else."""
    hidden, weight = leaves(inputs)
    config = FusedCEConfig(strategy=strategy, skip_masked=True, **options)
    more = {"token_weights": weights, "config": config, "outputs": names, "differentiable": names}
    head = linear_cross_entropy(Call(hidden, weight, inputs.labels, **more))
    return TokenOutputs(**head.outputs), hidden, weight


@pytest.mark.parametrize("rounded_to", [4, 128], ids=["", "all of them in the GEMMs"])
@pytest.mark.parametrize("name", ["loss", "entropy"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_upstream_gradient_for_a_masked_token_raises(strategy, name, rounded_to, device, monkeypatch):
    """In the backward, before anything is added, whichever output it is of."""
    if (strategy, name) == ("grad_in_forward", "entropy"):
        pytest.skip("it takes no outputs with gradients")
    monkeypatch.setattr(tokens, "ROUND_TO", rounded_to)
    inputs, masked = masked_problem(0.5, device)
    weights = inputs.grad_loss.clone()
    names = () if name == "loss" else ("log_prob", "entropy")
    made, hidden, weight = outputs_of(inputs, weights, strategy, names)
    given = inputs.grad_loss
    at = masked.nonzero()
    given[at[-1][0], at[-1][1]] = 1e-20
    given[at[0][0], at[0][1]] = -1.0
    with pytest.raises(RuntimeError, match=r"^2 tokens were left out .*with skip_masked, of weight 0"):
        getattr(made, name).backward(given)
    assert hidden.grad is None and weight.grad is None


def test_an_ignored_label_may_have_any_weight_and_upstream(device):
    """Its loss has no gradient, whatever comes."""
    inputs, masked = masked_problem(0.5, device)
    weights = inputs.grad_loss.clone()
    inputs.labels[masked] = -100
    made, hidden, weight = outputs_of(inputs, weights, "store", ignore_index=-100)
    expected, _ = run(inputs, FusedCEConfig("store", skip_masked=True, ignore_index=-100))
    made.loss.backward(inputs.grad_loss.masked_fill(masked, 3.0))
    assert torch.equal(hidden.grad, expected.grad_hidden)
    assert torch.equal(weight.grad, expected.grad_weight)


@pytest.mark.parametrize("main_grad", [False, True], ids=["", "main_grad"])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_leaves_nan(strategy, share, main_grad, device):
    """As without skipping: the loss scale has overflowed, and Megatron must see it in the gradients."""
    inputs, masked = masked_problem(share, device)
    weights, operands = (~masked).float(), leaves(inputs)
    for skip_masked in (False, True):
        total = torch.ones_like(inputs.weight)
        opened = {"open_grad_weight": partial(open_main_grad, total)} if main_grad else {}
        config = FusedCEConfig(strategy=strategy, skip_masked=skip_masked)
        call = Call(*operands, inputs.labels, token_weights=weights, config=config, **opened)
        upstream = weights * torch.inf  # NaN at masked tokens
        grads = torch.autograd.grad(linear_cross_entropy(call).loss, operands, upstream, allow_unused=True)
        assert grads[0].isnan().any(-1).all() and (total if main_grad else grads[1]).isnan().all()


def test_outputs_and_teachers(device):
    inputs, masked = masked_problem(0.5, device)
    config = FusedCEConfig(skip_masked=True, num_chunks=2)
    settings = {"token_weights": inputs.grad_loss, "config": config}
    given = inputs.hidden, inputs.weight, inputs.labels, ("lse", "predicted", "correct")
    made, whole = fused_linear_token_outputs(*given, **settings), fused_linear_token_outputs(*given)
    assert torch.equal(made.predicted, whole.predicted.masked_fill(masked, -1))
    assert torch.equal(made.correct, whole.correct & ~masked)
    torch.testing.assert_close(made.lse, whole.lse.masked_fill(masked, 0.0), rtol=1e-6, atol=1e-6)

    teacher, (hidden, weight) = make_teacher(inputs, 5), leaves(inputs)
    loss = fused_linear_topk_distillation(hidden, weight, *teacher, **settings)
    loss.backward(inputs.grad_loss)
    parts = (plain_distillation(inputs, *teacher, dtype) for dtype in (torch.float64, torch.float32))
    result = HeadResult(loss.detach(), hidden.grad, weight.grad)
    assert_within(
        result, *(of._replace(loss=of.loss.masked_fill(masked, 0.0)) for of in parts), torch.float32
    )


def test_a_count_that_was_started_before(device):
    inputs, _ = masked_problem(0.5, device)
    weights = inputs.grad_loss.t().reshape(1, -1)
    config = FusedCEConfig(strategy="store", skip_masked=True)
    early = tokens.count(weights, None)
    assert early.read() == [int((weights != 0).sum()), 0]
    made, right = (run(inputs, config, **given)[0] for given in ({"unmasked": early}, {}))
    assert torch.equal(made.grad_hidden, right.grad_hidden)


def test_without_weights_nothing_is_skipped(device):
    inputs, _ = masked_problem(0.5, device)
    call = Call(inputs.hidden, inputs.weight, inputs.labels, config=FusedCEConfig(skip_masked=True))
    assert (linear_cross_entropy(call).loss > 0).all()
