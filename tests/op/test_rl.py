"""What RL stacks hand in beside tokens: weights in fp32, temperatures that are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_topk_distillation
from megatron_fused_ce.ops.log_probs import unrounded
from megatron_fused_ce.rl import token_divergence, token_log_probs
from megatron_fused_ce.scripts.lib.reference import (
    FLOOR,
    make_inputs,
    make_teacher,
    plain_outputs,
    relative_error,
)
from tests.support.op import leaves

SIZES = {"s": 12, "b": 2, "hidden_size": 16, "vocab": 53}


def test_half_hidden_states_and_an_fp32_weight(device):
    """As SkyRL has them: the products are fp32, and each gradient has the dtype of its operand."""
    inputs = make_inputs("odd-labels", **SIZES, dtype=torch.float32, device=device)
    inputs = replace(inputs, hidden=inputs.hidden.bfloat16().float())
    hidden, weight = leaves(replace(inputs, hidden=inputs.hidden.bfloat16()))
    made = token_log_probs(hidden, weight, inputs.labels, config=FusedCEConfig(num_chunks=3))
    made.log_prob.backward(inputs.grad_loss)
    exact, grad_hidden, grad_weight = plain_outputs(inputs, {"log_prob": inputs.grad_loss}, torch.float64)
    assert relative_error(made.log_prob.detach(), exact.log_prob) < FLOOR[torch.float32]
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    assert relative_error(hidden.grad, grad_hidden) < FLOOR[torch.bfloat16]
    assert relative_error(weight.grad, grad_weight) < FLOOR[torch.float32]


def test_an_entropy_with_a_gradient_rounds_nothing():
    """`recompute` in auto's place saves no rounded logits; a named strategy or precision stays."""
    assert unrounded(None).strategy == "recompute"
    for config in (FusedCEConfig(strategy="store"), FusedCEConfig(logit_precision="fp32")):
        assert unrounded(config) is config


def test_skip_masked_leaves_ignored_tokens_out(device):
    """Their entropy is 0 too; the others' results and gradients are those of a call without them."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    inputs.labels[:, :9] = -100
    keeping = FusedCEConfig(ignore_index=-100, num_chunks=2)
    skipping, results = replace(keeping, skip_masked=True), []
    for config in (skipping, keeping):
        operands = leaves(inputs)
        made = token_log_probs(*operands, inputs.labels, entropy="detached", config=config)
        grads = torch.autograd.grad(made.log_prob, operands, inputs.grad_loss)  # an ignored label's has none
        results.append([made.log_prob.detach(), made.entropy[:, 9:], *grads])
        assert made.entropy[:, :9].any() == (config is keeping)
    for skipped, right in zip(*results, strict=True):
        assert relative_error(skipped, right) < FLOOR[torch.float32]
    made = token_log_probs(*operands, inputs.labels, entropy="differentiable", config=skipping)
    with pytest.raises(RuntimeError, match=r"^18 tokens were left out .*labelled ignore_index"):
        made.entropy.sum().backward()


@pytest.mark.parametrize("name", ["log_prob", "entropy"])
def test_an_upstream_gradient_outside_the_active_mask_raises(name, device):
    """It names the mask, and what to do; a NaN of a loss scale that overflowed gives NaN instead."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    hidden, weight = leaves(inputs)
    active = torch.ones_like(inputs.labels, dtype=torch.bool)
    active[1, 3:5] = False
    made = token_log_probs(hidden, weight, inputs.labels, entropy="differentiable", active_mask=active)
    words = (
        r"^2 tokens were left out \(outside active_mask.* Multiply the loss and its entropy term by the mask"
    )
    with pytest.raises(RuntimeError, match=words):
        getattr(made, name).sum().backward(retain_graph=True)
    assert hidden.grad is None and weight.grad is None
    (getattr(made, name) * active).sum().backward(retain_graph=True)
    assert torch.isfinite(weight.grad).all()
    (getattr(made, name) * torch.where(active, 1.0, torch.nan)).sum().backward()
    assert weight.grad.isnan().all()


def test_the_active_mask_and_ignored_labels(device):
    """With ``skip_masked`` the tokens of both are left out."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    inputs.labels[:, :3] = -100
    active = torch.ones_like(inputs.labels, dtype=torch.bool)
    active[:, -2:] = False
    keeping = FusedCEConfig(ignore_index=-100)
    for config, left_out in ((keeping, 0), (replace(keeping, skip_masked=True), 3)):
        made = token_log_probs(
            inputs.hidden, inputs.weight, inputs.labels, entropy="detached", active_mask=active, config=config
        )
        assert (made.entropy == 0).sum(1).tolist() == [left_out + 2] * 2


@pytest.mark.parametrize("form", ["a tensor without dimensions", "one of each sequence"])
def test_temperatures(form, device):
    """They are those of each token; divergences and a teacher's targets take the first, too."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    hidden, weight = inputs.hidden, inputs.weight
    given = torch.tensor([0.5, 2.0], device=device)
    given = given[0] if form.startswith("a tensor") else given
    each = given.reshape(-1, 1).expand(inputs.labels.shape)
    teacher = make_teacher(inputs, 4)
    for labels in (inputs.labels, inputs.labels.unsqueeze(-1).expand(2, 12, 3)):
        made, right = (token_log_probs(hidden, weight, labels, temperature=t).log_prob for t in (given, each))
        torch.testing.assert_close(made, right)
    made, right = (
        fused_linear_topk_distillation(hidden, weight, *teacher, temperature=t) for t in (given, each)
    )
    torch.testing.assert_close(made, right)
    if not given.dim():
        made, right = (
            token_divergence(hidden, weight, -hidden, weight, temperature=t, batch_first=False).loss
            for t in (given, 0.5)
        )
        assert torch.equal(made, right)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_a_divergence_of_the_active_tokens(divergence, device):
    """The others' are 0, and so are their gradients; an entropy has no gradient here."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    teacher = inputs.hidden.flip(0), inputs.weight
    active = inputs.grad_loss > 0
    results = []
    for options in ({"active_mask": active}, {}):
        hidden, weight = leaves(inputs)
        given = {"divergence": divergence, "batch_first": False, "entropy": "detached", **options}
        made = token_divergence(hidden, weight, *teacher, **given)
        (made.loss * active).sum().backward()
        results.append((made.loss.detach() * active, made.entropy * active, hidden.grad, weight.grad))
        assert bool(options) == (not made.loss[~active].any() and not made.entropy[~active].any())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strategy", ["store", "grad_in_forward"])
def test_kl_from_a_teachers_likeliest(strategy, device):
    """Entry by entry, of those in the vocabulary, with the gradient of the cross-entropy; z-loss beside."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=device)
    ids, log_q = make_teacher(inputs, 5)
    temperature = inputs.grad_loss.abs() + 0.5
    weights = {"token_weights": inputs.grad_loss} if strategy == "grad_in_forward" else {}
    results = []
    for loss in ("kl", "cross_entropy"):
        hidden, weight = leaves(inputs)
        given = {"loss": loss, "temperature": temperature, "config": FusedCEConfig(strategy, z_loss=1e-3)}
        made = fused_linear_topk_distillation(hidden, weight, ids, log_q, **given, **weights)
        made.backward(inputs.grad_loss)
        results.append((made.detach(), hidden.grad, weight.grad))
    hidden, weight = (x.double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    z = (hidden @ weight.t()).transpose(0, 1) / temperature.unsqueeze(-1)
    inside = (ids >= 0) & (ids < len(weight))
    log_p = z.log_softmax(-1).gather(-1, ids.where(inside, 0))
    true = (log_q.exp() * (log_q - log_p) * inside).sum(-1) + 1e-3 * z.logsumexp(-1) ** 2
    true.backward(inputs.grad_loss.double())
    for made, right in zip(results[0], (true.detach(), hidden.grad, weight.grad), strict=True):
        assert relative_error(made, right) < FLOOR[torch.float32]
    for made, right in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.equal(made, right)
