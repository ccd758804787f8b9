"""Outputs beside the loss, and a teacher's targets, in one process: against fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_token_outputs,
    fused_linear_topk_distillation,
)
from megatron_fused_ce.chunking import Cut
from megatron_fused_ce.logits import choose
from megatron_fused_ce.logits.choose import RequestedOutputs
from megatron_fused_ce.losses.outputs import OUTPUTS, differentiable_of
from megatron_fused_ce.scripts.lib.reference import (
    FLOOR,
    KINDS,
    LOSS_OPTIONS,
    HeadInputs,
    HeadResult,
    assert_within,
    make_inputs,
    make_teacher,
    plain_distillation,
    plain_head,
    plain_outputs,
    relative_error,
    truth,
)
from tests.support import pairs
from tests.support.op import EXP_DTYPE, HAS_EXP

#: Options that every output follows.
DIFFERENTIABLE = differentiable_of(OUTPUTS)
OPTIONS = {
    name: options
    for name, options in LOSS_OPTIONS.items()
    if name in ("z-loss", "softcap", "smoothing", "masked padding")
}


def problem(kind, dtype, device, options=None, **shape):
    made = make_inputs(
        kind,
        **{"s": 19, "b": 3, "hidden_size": 48, "vocab": 331, **shape},
        dtype=dtype,
        device=device,
    )
    config = FusedCEConfig(**(options or {}))
    if config.true_vocab_size is not None:
        made.labels.remainder_(config.true_vocab_size)
    return replace(made, config=config)


def upstreams_of(inputs, names):
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(inputs.labels.shape, generator=generator).to(inputs.labels.device) for name in names
    }


def run(inputs, config, names, upstreams):
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    made = fused_linear_token_outputs(hidden, weight, inputs.labels, names, config=config)
    tensors = [getattr(made, name) for name in upstreams]
    torch.autograd.backward(tensors, list(upstreams.values()))
    return made, hidden.grad, weight.grad


def assert_outputs(made, inputs, exact, eager):
    """Each value asked for, within twice eager's error or the dtype's floor, of the largest lse: all their
    errors are those of the logits."""
    floor = FLOOR[inputs.hidden.dtype]
    largest = max(1.0, float(exact.lse.abs().max()))
    for name in (*DIFFERENTIABLE, "sum_p_squared"):
        value, true, yardstick = (getattr(part, name) for part in (made, exact, eager))
        if value is None:
            continue
        assert value.shape == inputs.labels.shape and value.dtype == torch.float32
        worst = 2 * float((yardstick.double() - true).abs().max())
        error = float((value.detach().double() - true).abs().max())
        assert error <= max(worst, floor * largest), (name, error, worst)
    if made.predicted is not None:
        z = inputs.hidden.double() @ inputs.weight.double().t() * inputs.logit_scale
        z = z[..., : inputs.config.true_vocab_size].transpose(0, 1)
        chosen = z.gather(-1, made.predicted.unsqueeze(-1)).squeeze(-1)
        below = (z.amax(-1) - chosen) / z.abs().amax(-1).clamp(min=1e-3)
        # Two logits rounded by half a unit each can change places; and fp32's own sums of 48 products.
        assert float(below.max()) <= torch.finfo(inputs.hidden.dtype).eps + 2e-6
        alone = made.predicted == inputs.labels
        assert not (alone & ~made.correct).any()
        rounding = (torch.finfo(inputs.hidden.dtype).eps + 2e-6) * z.abs().amax(-1, keepdim=True)
        ties = z.amax(-1, keepdim=True) - z <= rounding
        assert not (made.correct & ~alone & (ties.sum(-1) == 1)).any()


@pairs.parametrize("outputs")
def test_all_outputs_against_fp64(kind, dtype, strategy, device):
    dtype = getattr(torch, dtype)
    inputs = problem(kind, dtype, device)
    upstreams = upstreams_of(inputs, DIFFERENTIABLE)
    config = replace(inputs.config, strategy=strategy, num_chunks=4)
    made, grad_hidden, grad_weight = run(inputs, config, tuple(OUTPUTS), upstreams)
    exact, *true_grads = plain_outputs(inputs, upstreams, torch.float64)
    eager, *eager_grads = plain_outputs(inputs, upstreams, dtype)
    assert_outputs(made, inputs, exact, eager)
    bounds = [
        max(2 * relative_error(a, b), FLOOR[dtype]) for a, b in zip(eager_grads, true_grads, strict=True)
    ]
    for value, true, bound in zip((grad_hidden, grad_weight), true_grads, bounds, strict=True):
        assert relative_error(value, true) <= bound
    assert not made.sum_p_squared.requires_grad
    of_squares = [relative_error(part.sum_p_squared, exact.sum_p_squared) for part in (made, eager)]
    assert of_squares[0] <= max(2 * of_squares[1], FLOOR[dtype])
    assert relative_error(made.loss, truth(inputs).loss) <= max(
        2 * relative_error(plain_head(inputs, dtype).loss, truth(inputs).loss), FLOOR[dtype]
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("asked", [*((name,) for name in DIFFERENTIABLE), ("lse", "sum_p_squared")], ids=str)
def test_few_outputs_with_options(asked, name, backend, device):
    """No upstream gradient for the loss, none for the others: each term by itself."""
    if backend == "torch" and device.type == "cuda":
        pytest.skip("the Triton kernels serve there")
    inputs = problem("plain", torch.float32, device, OPTIONS[name], s=7, b=2)
    upstreams = upstreams_of(inputs, asked[:1])
    config = replace(inputs.config, num_chunks=3, row_backend=backend)
    made, *grads = run(inputs, config, asked, upstreams)
    exact, *true_grads = plain_outputs(inputs, upstreams, torch.float64)
    eager, *_ = plain_outputs(inputs, upstreams, torch.float32)
    assert_outputs(made, inputs, exact, eager)
    assert {name for name in OUTPUTS if getattr(made, name) is not None} == set(asked)
    if made.sum_p_squared is not None:
        assert relative_error(made.sum_p_squared, exact.sum_p_squared) <= FLOOR[torch.float32]
    for value, true in zip(grads, true_grads, strict=True):
        assert relative_error(value, true) <= FLOOR[torch.float32]


@pytest.mark.sanitize
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_of_loss_and_outputs_add_up(backend, device):
    inputs = problem("plain", torch.float32, device, {"label_smoothing": 0.1, "z_loss": 1e-2}, s=7, b=2)
    upstreams = upstreams_of(inputs, DIFFERENTIABLE)
    config = replace(inputs.config, num_chunks=3, row_backend=backend)
    _, *grads = run(inputs, config, DIFFERENTIABLE, {**upstreams, "loss": inputs.grad_loss})
    _, *of_outputs = plain_outputs(inputs, upstreams, torch.float64)
    of_loss = truth(inputs)[1:]
    for value, one, other in zip(grads, of_outputs, of_loss, strict=True):
        assert relative_error(value, one + other) <= FLOOR[torch.float32]


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
    _, grad_hidden, _ = run(inputs, FusedCEConfig(strategy="store"), DIFFERENTIABLE, upstreams)
    upstreams = {"log_prob": -2 * up, "lse": up, "entropy": -up}  # the loss is a log_prob negated
    _, exact, _ = plain_outputs(inputs, upstreams, torch.float64)
    assert relative_error(grad_hidden, exact) < 4e-3


@pytest.mark.parametrize("strategy", ["recompute", "store", "grad_in_forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_every_strategy_serves(kind, strategy, device):
    inputs = problem(kind, torch.float32, device)
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    made = fused_linear_token_outputs(
        hidden,
        weight,
        inputs.labels,
        tuple(OUTPUTS),
        differentiable=False,
        token_weights=inputs.grad_loss,
        config=FusedCEConfig(strategy=strategy, num_chunks=3),
    )
    assert not any(getattr(made, name).requires_grad for name in OUTPUTS)
    made.loss.backward(inputs.grad_loss)
    exact = truth(inputs)
    eager = plain_head(inputs, torch.float32)
    assert_within(HeadResult(made.loss.detach(), hidden.grad, weight.grad), exact, eager, torch.float32)
    assert torch.equal(made.log_prob, -made.loss.detach())
    if kind == "odd-labels":
        outside = (inputs.labels < 0) | (inputs.labels >= inputs.weight.shape[0])
        assert outside.any() and not made.correct[outside].any()


def test_a_certain_token_has_no_entropy(device):
    """1 - p of 1e-13: its entropy is about 3e-12, not fp32's rounding of 1."""
    hidden = torch.zeros(1, 1, 8, device=device)
    hidden[..., 0] = 30.0
    weight = torch.zeros(5, 8, device=device)
    weight[2, 0] = 1.0
    for label in (2, 3):
        made = fused_linear_token_outputs(
            hidden, weight, torch.tensor([[label]], device=device), ("entropy",)
        )
        exact = 4 * torch.exp(torch.tensor(-30.0, dtype=torch.float64)) * 31
        error = abs(float(made.entropy) - float(exact))
        # exp(-30) in fp32: its argument in powers of two is rounded to 2**-24 of 43.
        assert error < (43 * 2.0**-23 * exact if label == 2 else 1e-7)


def test_a_label_that_is_impossible_leaves_the_rest_as_it_is(device):
    """A label's logit of -inf (fp16 overflows): loss inf, lse and entropy of the others."""
    weight = torch.tensor([[1.0], [2.0], [-torch.inf]], device=device)
    made = fused_linear_token_outputs(
        torch.ones(1, 1, device=device),
        weight,
        torch.tensor([2], device=device),
        ("lse", "entropy"),
    )
    z = torch.tensor([1.0, 2.0])
    assert made.loss.item() == math.inf
    assert made.lse.item() == pytest.approx(z.logsumexp(0).item(), rel=1e-6)
    p = z.softmax(0)
    assert made.entropy.item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-6)


def test_nan_predicts_nothing(device):
    inputs = problem("plain", torch.float32, device, s=2, b=1)
    inputs.hidden[0, 0, 0] = torch.nan
    made = fused_linear_token_outputs(inputs.hidden, inputs.weight, inputs.labels, ("predicted", "correct"))
    assert made.predicted[0, 0] == -1 and not made.correct[0, 0]
    assert made.predicted[0, 1] >= 0


def test_ignored_tokens_have_no_log_prob(device):
    inputs = problem("plain", torch.float32, device, {"ignore_index": -100})
    inputs.labels[:, ::2] = -100
    upstreams = {"log_prob": torch.full(inputs.labels.shape, torch.inf, device=device)}
    upstreams["log_prob"][:, 1::2] = 1.0
    made, grad_hidden, _ = run(inputs, inputs.config, ("log_prob",), upstreams)
    assert torch.equal(made.log_prob[:, ::2], torch.zeros_like(made.log_prob[:, ::2]))
    assert torch.equal(grad_hidden[::2], torch.zeros_like(grad_hidden[::2]))
    assert torch.isfinite(grad_hidden).all() and grad_hidden.abs().max() > 0


@pytest.mark.parametrize(
    ("names", "settings", "words"),
    [
        (("accuracy",), {}, "no such output: 'accuracy'"),
        (("lse", "lse"), {}, "name each once"),
        (("lse",), {"strategy": "grad_in_forward"}, "cannot know the upstream"),
    ],
    ids=str,
)
def test_what_cannot_be_had(names, settings, words, device):
    inputs = problem("plain", torch.float32, device)
    weight = inputs.weight.clone().requires_grad_()
    with pytest.raises(ValueError, match=words):
        fused_linear_token_outputs(
            inputs.hidden,
            weight,
            inputs.labels,
            names,
            token_weights=inputs.grad_loss,
            config=FusedCEConfig(**settings),
        )


def test_ids_that_fp32_cannot_hold():
    weight = torch.empty(2**24 + 1, 1)
    with pytest.raises(ValueError, match="exact below"):
        fused_linear_token_outputs(
            torch.zeros(1, 1), weight, torch.zeros(1, dtype=torch.int64), ("predicted",)
        )


@pytest.mark.skipif(not HAS_EXP, reason="needs Hopper or newer")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "none") for kind in KINDS if kind != "odd-labels"),
        ("wide", "softcap"),
        ("plain", "masked padding"),
    ],
)
def test_entropy_by_the_scaled_exp_gemm(kind, name, device):
    """Without a gradient of its own, beside a loss that has one."""
    inputs = problem(kind, EXP_DTYPE, device, OPTIONS.get(name), vocab=336, s=11, b=2)
    asked = ("log_prob", "lse", "entropy")
    weight = inputs.weight.clone().requires_grad_()
    config = replace(inputs.config, logits_backend="scaled_exp", chunk_tokens=16)
    made = fused_linear_token_outputs(
        inputs.hidden, weight, inputs.labels, asked, config=config, differentiable=False
    )
    made.loss.backward(inputs.grad_loss)
    upstreams = upstreams_of(inputs, asked)
    exact, *_ = plain_outputs(inputs, upstreams, torch.float64)
    eager, *_ = plain_outputs(inputs, upstreams, EXP_DTYPE)
    assert_outputs(made, inputs, exact, eager)
    # Where a token is certain nothing cancels but the logits' own errors, of sums in fp32 or in tensor cores.
    rtol, of_logits = (2e-5, 2.0**-25) if device.type == "cpu" else (1e-3, 2.0**-22)
    atol = 1e-6 + of_logits * float(exact.lse.abs().max())
    assert torch.allclose(made.entropy.double(), exact.entropy, rtol=rtol, atol=atol)
    true, plain = truth(inputs).grad_weight, plain_head(inputs, EXP_DTYPE).grad_weight
    assert relative_error(weight.grad, true) <= max(2 * relative_error(plain, true), FLOOR[EXP_DTYPE])


@pytest.mark.skipif(not HAS_EXP, reason="needs Hopper or newer")
@pytest.mark.parametrize("strategy", ["store", "recompute", "mixed"])
@pytest.mark.parametrize("kind", ["plain", "wide", "odd-labels"])
@pytest.mark.parametrize("asked", [("entropy",), ("lse",), DIFFERENTIABLE], ids=str)
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-3}], ids=str)
def test_gradients_that_are_no_multiple_of_e(options, asked, kind, strategy, device):
    """By the scaled-exp GEMM, which saves logits, or whose second run makes gradients in its epilogue."""
    if strategy == "recompute" and not options:
        options = {"logit_softcap": 20.0}
    inputs = problem(kind, EXP_DTYPE, device, options, vocab=336, s=11, b=2)
    upstreams = upstreams_of(inputs, asked)
    memory_mb = {"memory_mb": 1} if strategy == "mixed" else {}
    config = replace(
        inputs.config, strategy="auto" if memory_mb else strategy, logits_backend="scaled_exp", **memory_mb
    )
    made, *grads = run(inputs, replace(config, chunk_tokens=8), asked, upstreams)
    exact, *true_grads = plain_outputs(inputs, upstreams, torch.float64)
    eager, *eager_grads = plain_outputs(inputs, upstreams, EXP_DTYPE)
    assert_outputs(made, inputs, exact, eager)
    if kind == "wide" and device.type == "cpu":
        return  # fp32, which this GEMM is not offered for: exponents of logits of 300 are off by 2e-5
    for value, true, plain in zip(grads, true_grads, eager_grads, strict=True):
        assert relative_error(value, true) <= max(2 * relative_error(plain, true), FLOOR[EXP_DTYPE])


@pytest.mark.skipif(not HAS_EXP, reason="needs Hopper or newer")
def test_which_outputs_leave_the_exponentiating_product(device):
    x = torch.zeros(8, 32, device=device, dtype=EXP_DTYPE)
    by_name = FusedCEConfig(logits_backend="scaled_exp")
    with_z_loss = replace(by_name, z_loss=1e-4)
    for asked in (
        RequestedOutputs(),
        RequestedOutputs(("log_prob",)),
    ):
        chosen, _ = choose.choose(by_name, x, x, asked)
        assert chosen.name == "scaled_exp" and not chosen.saves_logits
    entropy = RequestedOutputs(("entropy",))
    for config, asked in (
        (by_name, entropy),
        (by_name, RequestedOutputs(("log_prob", "lse"))),
        (with_z_loss, RequestedOutputs(("log_prob",))),
    ):
        chosen, _ = choose.choose(config, x, x, asked)
        assert chosen.name == "scaled_exp" and chosen.saves_logits
        again = replace(config, strategy="recompute", logit_softcap=30.0, logit_precision="fp32")
        chosen, _ = choose.choose(again, x, x, asked)
        assert chosen.name == "scaled_exp" and not chosen.saves_logits
    for config, asked, words in (
        (replace(by_name, logit_softcap=30.0), entropy, "entropy with a gradient beside a softcap"),
        (replace(by_name, logit_precision="fp32"), entropy, "entropy with a gradient of fp32 logits"),
        (replace(by_name, label_smoothing=0.1), entropy, "label_smoothing"),
        (by_name, RequestedOutputs(several=True), "several labels"),
    ):
        with pytest.raises(ValueError, match=words):
            choose.choose(config, x, x, asked)
        assert choose.choose(replace(config, logits_backend="auto"), x, x, asked)[0].name == "gemm_rows"


# Distillation


@pairs.parametrize("distillation")
def test_distillation_against_fp64(entries, kind, dtype, strategy, device):
    inputs = problem(kind, getattr(torch, dtype), device)
    check_distillation(inputs, entries, replace(inputs.config, strategy=strategy, num_chunks=4))


@pytest.mark.parametrize("name", ["z-loss", "softcap", "masked padding"])
@pytest.mark.parametrize("k", [3, 64])
def test_distillation_by_triton_kernels(k, name, device):
    """64 entries of 331 classes: blocks of columns with many targets, some without."""
    inputs = problem("plain", torch.float32, device, LOSS_OPTIONS[name], s=7, b=2)
    check_distillation(inputs, k, replace(inputs.config, num_chunks=3, row_backend="triton"))


def check_distillation(inputs, k, config):
    ids, log_probs = make_teacher(inputs, k)
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    weights = inputs.grad_loss / 1.5 if config.strategy == "grad_in_forward" else None
    loss = fused_linear_topk_distillation(
        hidden, weight, ids, log_probs, token_weights=weights, config=config
    )
    loss.backward(inputs.grad_loss)
    assert_within(
        HeadResult(loss.detach(), hidden.grad, weight.grad),
        plain_distillation(inputs, ids, log_probs, torch.float64),
        eager_by_chunks(inputs, ids, log_probs, config.num_chunks),
        inputs.hidden.dtype,
    )


def eager_by_chunks(inputs, ids, log_probs, num_chunks):
    """Eager PyTorch with products of the shapes that the head's have.

    The order in which cuBLAS sums the products of a logit depends on the number of tokens: on an H200 it made
    the errors at logits of 300 differ by a factor of two.
    """
    b, s = inputs.labels.shape

    def tokens_first(x):  # [s * b, ...], as the head cuts them
        return x.transpose(0, 1).flatten(0, 1)

    parts = []
    for chunk in Cut.into(b * s, num_chunks).chunks:
        at = slice(chunk.start, chunk.stop)
        part = replace(
            inputs,
            hidden=inputs.hidden.flatten(0, 1)[at].unsqueeze(1),
            labels=tokens_first(inputs.labels)[None, at],
            grad_loss=tokens_first(inputs.grad_loss)[None, at],
        )
        of_part = (tokens_first(x)[None, at] for x in (ids, log_probs))
        parts.append(plain_distillation(part, *of_part, inputs.hidden.dtype))
    loss, grad_hidden, grad_weight = zip(*parts, strict=True)
    return HeadResult(
        torch.cat(loss, 1).view(s, b).t(),
        torch.cat(grad_hidden).view_as(inputs.hidden),
        torch.stack(grad_weight).sum(0),
    )


def test_a_student_that_is_its_teacher_has_no_gradient(device):
    """All classes named: the loss is the teacher's entropy and stands still there."""
    inputs = problem("plain", torch.float32, device, vocab=16)
    log_p = (inputs.hidden @ inputs.weight.t()).log_softmax(-1).transpose(0, 1)
    ids = torch.arange(16, device=device).expand(log_p.shape)
    hidden = inputs.hidden.clone().requires_grad_()
    loss = fused_linear_topk_distillation(hidden, inputs.weight, ids, log_p)
    torch.testing.assert_close(loss, -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-6)
    loss.sum().backward()
    assert hidden.grad.abs().max() < 1e-6


def test_a_token_without_entries_costs_nothing(device):
    inputs = problem("plain", torch.float32, device)
    ids, log_probs = make_teacher(inputs, 3)
    ids[:, ::2] = -1
    hidden = inputs.hidden.clone().requires_grad_()
    loss = fused_linear_topk_distillation(hidden, inputs.weight, ids, log_probs)
    loss.sum().backward()
    assert torch.equal(loss[:, ::2], torch.zeros_like(loss[:, ::2]))
    assert torch.equal(hidden.grad[::2], torch.zeros_like(hidden.grad[::2]))
    assert hidden.grad[1::2].abs().amin(-1).amax() > 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda ids, p: (ids[..., :2], p), ValueError, "expected both"),
        (
            lambda ids, p: (ids.flatten(0, 1), p.flatten(0, 1)),
            ValueError,
            r"teacher_ids are \(\d+, \d+\) for hidden",
        ),
        (lambda ids, p: (ids.float(), p), TypeError, "expected int64"),
        (lambda ids, p: (ids, ids), TypeError, "floats"),
        (lambda ids, p: (ids[..., :0], p[..., :0]), ValueError, "K of 1 to"),
    ],
)
def test_bad_teachers(change, error, words, device):
    inputs = problem("plain", torch.float32, device)
    ids, log_probs = change(*make_teacher(inputs, 3))
    with pytest.raises(error, match=words):
        fused_linear_topk_distillation(inputs.hidden, inputs.weight, ids, log_probs)


@pytest.mark.parametrize("option", [{"label_smoothing": 0.1}, {"ignore_index": -100}], ids=str)
def test_options_that_belong_to_labels(option, device):
    inputs = problem("plain", torch.float32, device)
    with pytest.raises(ValueError, match="belong to labels"):
        fused_linear_topk_distillation(
            inputs.hidden, inputs.weight, *make_teacher(inputs, 3), config=FusedCEConfig(**option)
        )


@pytest.mark.parametrize("names", [("correct",), ("predicted", "correct")], ids=str)
def test_outputs_without_gradients_take_nothing_away(names, device, monkeypatch):
    """grad_in_forward serves them, and so does every logits backend, whatever differentiable says."""
    asked = []
    chosen = choose.choose
    monkeypatch.setattr(choose, "choose", lambda *args: asked.append(args[3]) or chosen(*args))
    inputs = problem("plain", torch.float32, device)
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    config = FusedCEConfig("grad_in_forward", num_chunks=3)
    made = fused_linear_token_outputs(
        hidden, weight, inputs.labels, names, token_weights=inputs.grad_loss, config=config
    )
    made.loss.backward(inputs.grad_loss)
    exact = truth(inputs)
    assert relative_error(weight.grad, exact.grad_weight) < 1e-5
    assert relative_error(hidden.grad, exact.grad_hidden) < 1e-5
    assert made.correct.dtype == torch.bool
    with pytest.raises(ValueError, match="upstream gradients of lse;"):
        fused_linear_token_outputs(
            hidden, weight, inputs.labels, (*names, "lse"),
            token_weights=inputs.grad_loss, config=config,
        )  # fmt: skip
    fused_linear_token_outputs(hidden, weight, inputs.labels, (*names, "lse"))
    assert [a.differentiable for a in asked] == [(), ("lse",)]


@pytest.mark.parametrize("k", [1, 5])
def test_the_yardstick_of_distillation_is_no_worse_than_its_logits(k, device):
    """Logits of 300 in fp32: eager's error is that of rounding the logits, or the bound would allow more."""
    inputs = problem("wide", torch.float32, device)
    ids, log_probs = make_teacher(inputs, k)
    exact = plain_distillation(inputs, ids, log_probs, torch.float64).grad_hidden
    eager = plain_distillation(inputs, ids, log_probs, torch.float32).grad_hidden
    z = (inputs.hidden @ inputs.weight.t()).double().requires_grad_()
    targets = ids.transpose(0, 1)
    inside = (targets >= 0) & (targets < z.shape[-1])
    shares = log_probs.transpose(0, 1).double().exp() * inside
    loss = -(shares * z.log_softmax(-1).gather(-1, targets.where(inside, 0))).sum(-1)
    loss.backward(inputs.grad_loss.t().double())
    of_rounding = relative_error(z.grad @ inputs.weight.double(), exact)
    assert relative_error(eager, exact) < 1.5 * of_rounding
