"""The op in one process: loss and both gradients against fp64, eager PyTorch's error the yardstick."""

from __future__ import annotations

import dataclasses
import inspect
import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig, forward, fused_linear_cross_entropy, planner
from megatron_fused_ce.call import Call
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.lib.reference import (
    KINDS,
    HeadInputs,
    HeadResult,
    assert_close,
    assert_within,
    make_inputs,
    plain_head,
    relative_error,
    truth,
)
from tests.support.head import column_plans, mixed_plans
from tests.support.op import DTYPES, STRATEGIES, RoundedFactors, run, weights_for
from tests.support.problems import open_main_grad


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_fp64(kind, dtype, strategy, device):
    inputs = make_inputs(kind, s=23, b=3, hidden_size=48, vocab=331, dtype=dtype, device=device)
    result = run(inputs, FusedCEConfig(strategy=strategy, num_chunks=4))
    assert result.loss.dtype == torch.float32
    assert result.loss.shape == inputs.labels.shape
    assert_close(result, inputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "chunking",
    [{}, {"num_chunks": 1}, {"num_chunks": 7}, {"num_chunks": 1000}]
    + [{"chunk_tokens": c} for c in (1, 5, 32, 33, 34, 4096)],
    ids=str,
)
def test_any_chunking(chunking, strategy, device):
    """33 tokens: one chunk, ragged last chunks, more chunks than tokens, chunks beyond the end."""
    inputs = make_inputs("plain", s=11, b=3, hidden_size=16, vocab=67, dtype=torch.bfloat16, device=device)
    assert_close(run(inputs, FusedCEConfig(strategy=strategy, **chunking)), inputs)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("s", "b", "hidden_size", "vocab"), [(1, 1, 1, 1), (5, 1, 3, 2), (2, 9, 8, 1)])
def test_smallest_shapes(s, b, hidden_size, vocab, flat, device):
    inputs = make_inputs(
        "plain", s=s, b=b, hidden_size=hidden_size, vocab=vocab, dtype=torch.float32, device=device
    )
    result = run(inputs, FusedCEConfig(chunk_tokens=2), flat=flat)
    if vocab == 1:  # a certain token: loss and gradients are exactly 0
        assert all(part.abs().max() == 0 for part in result)
    else:
        assert_close(result, inputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty_batch(strategy, device):
    hidden = torch.empty(0, 2, 8, device=device, requires_grad=True)
    weight = torch.randn(11, 8, device=device, requires_grad=True)
    labels = torch.empty(2, 0, dtype=torch.int64, device=device)
    loss = fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        config=FusedCEConfig(strategy=strategy),
        **weights_for(strategy, torch.empty(2, 0, device=device)),
    )
    assert loss.shape == (2, 0)
    loss.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", [0.25, -2.0])
def test_logit_scale(scale, strategy, device):
    inputs = make_inputs(
        *("plain",), s=9, b=2, hidden_size=16, vocab=50, dtype=torch.float32,
        device=device, logit_scale=scale,
    )  # fmt: skip
    result = run(inputs, FusedCEConfig(strategy=strategy, num_chunks=3, logit_scale=scale))
    assert_close(result, inputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["hidden", "weight"])
def test_frozen_operand(needs, strategy, device, monkeypatch):
    """A frozen operand gets no gradient and costs no product."""
    inputs = make_inputs("plain", s=9, b=2, hidden_size=16, vocab=50, dtype=torch.float32, device=device)
    hidden = inputs.hidden.clone().requires_grad_(needs[0])
    weight = inputs.weight.clone().requires_grad_(needs[1])
    config = FusedCEConfig(strategy=strategy, num_chunks=3, logits_backend="gemm_rows")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = fused_linear_cross_entropy(
            hidden,
            weight,
            inputs.labels,
            config=config,
            **weights_for(strategy, inputs.grad_loss),
        )
        loss.backward(inputs.grad_loss)
    calls = {event.key: event.count for event in profile.key_averages()}
    num_products = sum(calls.get(name, 0) for name in ("aten::mm", "aten::addmm", "aten::addmm_"))
    assert num_products == 3 * (3 if strategy == "recompute" else 2)
    exact = truth(inputs)
    assert (hidden.grad is not None, weight.grad is not None) == needs
    if needs[0]:
        assert relative_error(hidden.grad, exact.grad_hidden) < 2e-6
    if needs[1]:
        assert relative_error(weight.grad, exact.grad_weight) < 2e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_is_the_forward_alone(strategy, device, monkeypatch):
    """One product a chunk and no buffer of a gradient; the token weights need not be known."""
    inputs = make_inputs("plain", s=32, b=2, hidden_size=16, vocab=50, dtype=torch.float32, device=device)
    hidden, weight = inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    for made_for_gradients in ("HeldGradWeight", "ChunkGradients"):
        monkeypatch.delattr(forward, made_for_gradients)
    config = FusedCEConfig(strategy=strategy, num_chunks=4, logits_backend="gemm_rows")
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen,
    ):
        loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, config=config)
    assert loss.grad_fn is None
    assert relative_error(loss, truth(inputs).loss) < 2e-6
    assert {event.key: event.count for event in seen.key_averages()}["aten::mm"] == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", ["recompute", "store"])
def test_backward_twice(strategy, dtype, device):
    inputs = make_inputs("plain", s=9, b=2, hidden_size=16, vocab=50, dtype=dtype, device=device)
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    config = FusedCEConfig(strategy=strategy, num_chunks=3)
    loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, config=config)
    first = torch.autograd.grad(loss, (hidden, weight), inputs.grad_loss, retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), inputs.grad_loss, retain_graph=True)
    other = torch.autograd.grad(loss, (hidden, weight), 2 * inputs.grad_loss)
    for one, same, double in zip(first, again, other, strict=True):
        assert torch.equal(one, same)
        assert relative_error(double, 2 * one.double()) < 4e-3
    assert_close(HeadResult(loss.detach(), *first), inputs)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("accumulator", ["returned", "main_grad", "low main_grad"])
def test_a_backward_by_columns(accumulator, needs, device):
    """Its own accumulators, an earlier micro-batch's gradient in them, twice, and with a frozen operand."""
    inputs = make_inputs(
        "odd-labels", s=23, b=3, hidden_size=48, vocab=331, dtype=torch.bfloat16, device=device
    )
    hidden, weight = inputs.hidden.clone(), inputs.weight.clone()
    hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1])
    earlier, main_grad = truth(inputs).grad_weight.roll(1, 0), None
    options = {}
    if accumulator != "returned":
        main_grad = earlier.to(torch.bfloat16 if "low" in accumulator else torch.float32)
        earlier = main_grad.double()
        options = {"open_grad_weight": partial(open_main_grad, main_grad)}
    config = FusedCEConfig(strategy="recompute", num_chunks=4)
    with column_plans(64):
        loss = linear_cross_entropy(Call(hidden, weight, inputs.labels, config=config, **options)).loss
    wanted = [x for x in (hidden, weight) if x.requires_grad]
    made = torch.autograd.grad(loss, wanted, inputs.grad_loss, retain_graph=True, allow_unused=True)
    exact, eager = truth(inputs), plain_head(inputs, torch.bfloat16)
    grad_hidden = made[0] if needs[0] else exact.grad_hidden
    grad_weight = made[-1] if needs[1] else exact.grad_weight
    if main_grad is not None and needs[1]:
        assert made[-1] is None
        grad_weight = main_grad.double()
        exact, eager = (r._replace(grad_weight=r.grad_weight + earlier) for r in (exact, eager))
    assert_within(HeadResult(loss.detach(), grad_hidden, grad_weight), exact, eager, torch.bfloat16)
    again = torch.autograd.grad(loss, wanted, inputs.grad_loss, allow_unused=True)
    assert all(one is None or torch.equal(one, other) for one, other in zip(made, again, strict=True))


def test_grad_in_forward_without_token_weights_names_the_fix(device):
    inputs = make_inputs("plain", s=9, b=2, hidden_size=16, vocab=50, dtype=torch.float32, device=device)
    config = FusedCEConfig(strategy="grad_in_forward")
    with pytest.raises(ValueError, match=r"token_weights.*'store' or 'recompute'"):
        fused_linear_cross_entropy(
            inputs.hidden.requires_grad_(), inputs.weight, inputs.labels, config=config
        )
    with torch.no_grad():  # an evaluation makes no gradients
        loss = fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, config=config)
    assert relative_error(loss, truth(inputs).loss) < 2e-6


@pytest.mark.parametrize("stored", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_saves_the_first_chunks(stored, dtype, device):
    """``mixed`` between ``recompute`` (0 of 4 chunks) and ``store`` (all): bitwise the same."""
    inputs = make_inputs("plain", s=9, b=4, hidden_size=16, vocab=50, dtype=dtype, device=device)
    saved = []

    def remember(tensor):
        saved.append(tensor)
        return tensor

    config = FusedCEConfig(strategy="recompute", num_chunks=4, logits_backend="gemm_rows")
    with mixed_plans(stored), torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        result = run(inputs, config)
    chunk_logits = (inputs.hidden.shape[0] * inputs.hidden.shape[1] // 4, inputs.weight.shape[0])
    assert sum(tensor.shape == chunk_logits for tensor in saved) == stored
    assert_close(result, inputs)
    for part, plain in zip(result, run(inputs, config), strict=True):
        assert torch.equal(part, plain)


def test_auto_within_a_budget_mixes(device):
    """The planner's choice reaches the op: as many chunks stored as the budget allows."""
    inputs = make_inputs(
        "plain", s=1024, b=1, hidden_size=16, vocab=8192, dtype=torch.bfloat16, device=device
    )
    facts = dict(
        num_tokens=1024,
        hidden_size=16,
        num_rows=8192,
        logits_backend="gemm_rows",
        wgrad_accumulator="returned",
    )
    config = FusedCEConfig(chunk_tokens=128, memory_mb=16, logits_backend="gemm_rows")
    plan = planner.plan(planner.PlanInputs(config=config, device="cpu", **facts))
    assert plan.strategy == "mixed" and 0 < plan.stored_chunks < 8
    assert_close(run(inputs, config), inputs)


def test_grad_weight_does_not_lose_precision_with_chunks(device):
    """bf16 accumulation would be at 9e-3 with 64 chunks; fp32 stays where one chunk is."""
    inputs = make_inputs("plain", s=256, b=1, hidden_size=64, vocab=97, dtype=torch.bfloat16, device=device)
    exact = truth(inputs).grad_weight
    errors = [relative_error(run(inputs, FusedCEConfig(num_chunks=n)).grad_weight, exact) for n in (1, 64)]
    assert errors[1] < 1.2 * errors[0] + 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_token_weights_never_change_the_loss(strategy, device):
    """Non-binary weights, and the upstream they promise: a scalar times them."""
    inputs = make_inputs("plain", s=9, b=2, hidden_size=16, vocab=50, dtype=torch.float32, device=device)
    weights = torch.rand_like(inputs.grad_loss) * 3
    inputs = inputs.__class__(inputs.hidden, inputs.weight, inputs.labels, 0.37 * weights)
    config = FusedCEConfig(strategy=strategy, num_chunks=3)
    with_weights = run(inputs, config, token_weights=weights)
    assert_close(with_weights, inputs)
    assert torch.equal(with_weights.loss, run(inputs, config).loss)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_confident_tokens_keep_their_gradient(strategy, device):
    """fp32, 1 - p = 3e-13: a subtraction p - 1 would give 0; the loss stays positive."""
    vocab, hidden_size, gap = 64, 8, 33.0
    weight = torch.zeros(vocab, hidden_size, device=device)
    weight[5, 0] = gap
    weight.requires_grad_()
    hidden = torch.zeros(4, 1, hidden_size, device=device)
    hidden[..., 0] = 1.0
    hidden.requires_grad_()
    labels = torch.full((1, 4), 5, device=device)
    loss = fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        config=FusedCEConfig(strategy=strategy, num_chunks=2),
        **weights_for(strategy, torch.ones(1, 4, device=device)),
    )
    loss.sum().backward()
    miss = (vocab - 1) * math.exp(-gap)
    torch.testing.assert_close(loss, torch.full_like(loss, math.log1p(miss)), rtol=1e-4, atol=0)
    got = weight.grad[5, 0].item()
    assert got == pytest.approx(-4 * miss / (1 + miss), rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_hidden_states_give_nan_like_stock(bad, strategy, device):
    inputs = make_inputs("plain", s=4, b=1, hidden_size=8, vocab=20, dtype=torch.float32, device=device)
    inputs.hidden[2, 0, 3] = bad
    loss = run(inputs, FusedCEConfig(strategy=strategy, num_chunks=2)).loss
    assert torch.isnan(loss[0]).tolist() == [False, False, True, False]


def test_expanded_and_strided_operands(device):
    inputs = make_inputs("plain", s=10, b=4, hidden_size=16, vocab=50, dtype=torch.float32, device=device)
    hidden = inputs.hidden.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = inputs.weight.t().contiguous().t().requires_grad_()
    labels = inputs.labels.t().contiguous().t().to(torch.int32)
    loss = fused_linear_cross_entropy(hidden, weight, labels, config=FusedCEConfig(num_chunks=3))
    loss.sum().backward()  # upstream: one expanded scalar
    ones = inputs.__class__(inputs.hidden, inputs.weight, inputs.labels, torch.ones_like(inputs.grad_loss))
    assert_close(HeadResult(loss.detach(), hidden.grad, weight.grad), ones)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_column_major_hidden_states(strategy, device):
    """Gradients are rows whatever the hidden states' layout: kernels scale them row by row."""
    inputs = make_inputs("plain", s=10, b=4, hidden_size=16, vocab=50, dtype=torch.float32, device=device)
    flat = inputs.hidden.flatten(0, 1).t().contiguous().t().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    upstream = inputs.grad_loss.t().flatten()
    config = FusedCEConfig(strategy, num_chunks=3, logits_backend="gemm_rows")
    loss = fused_linear_cross_entropy(
        flat, weight, inputs.labels.t().flatten(), config=config, **weights_for(strategy, upstream)
    )
    loss.backward(upstream)
    made = HeadResult(loss.detach().view(10, 4).t(), flat.grad.view(10, 4, 16), weight.grad)
    assert_close(made, inputs)


def test_autocast(device):
    """Under autocast fp32 parameters are used in its dtype, as torch's own linear does."""
    inputs = make_inputs("plain", s=10, b=4, hidden_size=16, vocab=50, dtype=torch.bfloat16, device=device)
    # What bf16 rounds to the inputs, and fp32 does not.
    hidden = (inputs.hidden.float() * (1 + 2.0**-12)).requires_grad_()
    weight = (inputs.weight.float() * (1 - 2.0**-12)).requires_grad_()
    config = FusedCEConfig(num_chunks=3)
    with torch.autocast(device.type, torch.bfloat16):
        loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, config=config)
    of_rounded = fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, config=config)
    assert torch.equal(loss, of_rounded)
    loss.backward(inputs.grad_loss)
    assert weight.grad.dtype == torch.float32
    assert_close(HeadResult(loss.detach(), hidden.grad, weight.grad), inputs)


def test_fp16_small_upstream_does_not_vanish(device):
    """An upstream of 2**-20 would leave nothing of most softmax gradients in plain fp16."""
    inputs = make_inputs("plain", s=16, b=1, hidden_size=16, vocab=2000, dtype=torch.float16, device=device)
    tiny = inputs.__class__(inputs.hidden, inputs.weight, inputs.labels, inputs.grad_loss * 2.0**-14)
    result = run(tiny, FusedCEConfig(num_chunks=3))
    exact = truth(tiny)
    # The outputs are fp16 and partly subnormal there: their own rounding is what is left.
    assert relative_error(result.grad_weight, exact.grad_weight.half()) < 2e-3
    assert relative_error(result.grad_hidden, exact.grad_hidden.half()) < 2e-2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_smaller_upstream_does_not_vanish(strategy, device):
    """Below 2**-17 the inverse of the power of two is no number of fp16: it must not be rounded to one."""
    inputs = make_inputs("plain", s=16, b=1, hidden_size=16, vocab=2000, dtype=torch.float16, device=device)
    tiny = inputs.__class__(inputs.hidden, inputs.weight, inputs.labels, inputs.grad_loss * 2.0**-20)
    with RoundedFactors():
        result = run(tiny, FusedCEConfig(strategy=strategy, num_chunks=3))
    exact = truth(tiny)
    for name in ("grad_hidden", "grad_weight"):  # in steps of 2**-24, and rounded once
        error = getattr(result, name).double() - getattr(exact, name)
        assert error.abs().max() < 1.05 * 2.0**-25, name
        assert getattr(exact, name).abs().max() > 2.0**-22


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_small_probabilities_do_not_vanish(strategy, device):
    """2**-32 of an upstream just below a power of two: 2**-24, fp16's smallest number, once scaled."""
    weight = torch.tensor([[22.1875 / 1024], [0.0]], dtype=torch.float16, device=device)
    hidden = torch.full((1, 1, 1), 1024.0, dtype=torch.float16, device=device)
    labels = torch.zeros(1, 1, dtype=torch.int64, device=device)
    upstream = torch.full((1, 1), 1.99, device=device)
    inputs = HeadInputs(hidden, weight, labels, upstream)
    config = FusedCEConfig(strategy=strategy)
    grad_weight = run(inputs, config, token_weights=upstream).grad_weight
    assert grad_weight[1].item() == pytest.approx(math.exp(-22.1875) * 1.99 * 1024, rel=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_large_weights_do_not_overflow(strategy, device):
    """Gradients of logits stand at 2**8: a wrong token's, times weights of 250, would be beyond 65504."""
    inputs = make_inputs("plain", s=16, b=1, hidden_size=4, vocab=60, dtype=torch.float16, device=device)
    inputs.hidden.fill_(0.05)
    inputs.weight[:30], inputs.weight[30:] = 250.0, -250.0
    inputs.labels.remainder_(30).add_(30)
    inputs.grad_loss.fill_(0.99)
    assert_close(run(inputs, FusedCEConfig(strategy=strategy, num_chunks=3)), inputs)


@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
@pytest.mark.parametrize("log2_promise", [-60, -24, 16, 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grad_in_forward_keeps_gradients_whatever_size_the_weights_have(dtype, log2_promise, scale, device):
    """A mask divided by its sum, say, and a loss scale: the product is what counts."""
    inputs = make_inputs(
        *("plain",), s=16, b=1, hidden_size=16, vocab=60, dtype=dtype, device=device,
        logit_scale=scale,
    )  # fmt: skip
    result = run(
        inputs,
        FusedCEConfig(strategy="grad_in_forward", num_chunks=3, logit_scale=scale),
        token_weights=inputs.grad_loss * 2.0**log2_promise,
    )
    if dtype == torch.float16 and scale < 1:  # the results themselves are subnormal there
        exact = truth(inputs)
        for name in ("grad_hidden", "grad_weight"):
            rounded = getattr(exact, name).half()
            assert relative_error(getattr(result, name), rounded) < 0.1
    else:
        assert_close(result, inputs)


def test_deterministic(device):
    inputs = make_inputs("plain", s=32, b=2, hidden_size=32, vocab=500, dtype=torch.bfloat16, device=device)
    one, two = (run(inputs, FusedCEConfig(num_chunks=3)) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": torch.zeros(4, 2, 9)}, "H = 9"),
        ({"hidden": torch.zeros(4, 8)}, r"hidden has shape \(4, 8\) .*expected hidden \[s, b, H\]"),
        ({"hidden": torch.zeros(8, 8)}, r"hidden has shape \(8, 8\) .*\[T, H\] with \[T\]"),
        ({"hidden": torch.zeros(2, 4, 8)}, r"hidden has shape \(2, 4, 8\) .*is transposed"),
        ({"hidden": torch.zeros(8)}, r"hidden has shape \(8,\); expected"),
        ({"hidden": torch.zeros(1, 4, 2, 8)}, r"hidden has shape \(1, 4, 2, 8\); expected"),
        ({"hidden": torch.zeros(4, 2, 8, dtype=torch.float64)}, "float64"),
        ({"hidden": torch.zeros(4, 2, 8, dtype=torch.bfloat16)}, "one dtype"),
        ({"hidden": [1.0]}, "must be a torch.Tensor"),
        ({"weight": torch.zeros(0, 8)}, "at least one row"),
        ({"weight": torch.zeros(8)}, "expected \\[V, H\\]"),
        ({"labels": torch.zeros(4, 2, dtype=torch.int64)}, "one of them is transposed"),
        ({"labels": torch.zeros(2, 5, dtype=torch.int64)}, "labels have shape"),
        (
            {"config": "store"},
            r"FusedCEConfig, got 'store': give FusedCEConfig\(strategy='store'\)",
        ),
        ({"config": {"num_chunks": 4}}, "must be a FusedCEConfig, got {'num_chunks': 4}"),
        ({"labels": torch.zeros(2, 4)}, "expected int64"),
        ({"token_weights": torch.zeros(3)}, "token_weights"),
        ({"vocab_start": -1}, "vocab_start"),
    ],
    ids=str,
)
def test_bad_arguments(change, words):
    arguments = {
        "hidden": torch.zeros(4, 2, 8),
        "weight": torch.zeros(11, 8),
        "labels": torch.zeros(2, 4, dtype=torch.int64),
        **change,
    }
    with pytest.raises((TypeError, ValueError), match=words):
        fused_linear_cross_entropy(**arguments)


FUNCTIONS = (
    fused_linear_cross_entropy,
    megatron_fused_ce.fused_linear_token_outputs,
    megatron_fused_ce.fused_linear_topk_distillation,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(FusedCEConfig)])
def test_an_option_beside_the_config_is_told_where_it_goes(function, name):
    said = rf"{name} belongs to the config: give config=FusedCEConfig\({name}=4\)"
    with pytest.raises(TypeError, match=said):
        function(torch.zeros(4, 2, 8), torch.zeros(11, 8), torch.zeros(2, 4), **{name: 4})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_signatures_name_every_argument(function):
    """No catch-all: a misspelled keyword is Python's own error, and editors see the arguments."""
    parameters = inspect.signature(function).parameters.values()
    assert {"hidden", "weight", "config"} <= {parameter.name for parameter in parameters}
    assert all(p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stratgy'"):
        function(torch.zeros(4, 2, 8), torch.zeros(11, 8), torch.zeros(2, 4), stratgy="store")


def test_all_tokens_where_a_part_is_expected():
    from megatron_fused_ce.validation import check_call

    for hidden, labels in (((8, 2, 4), (2, 8)), ((8, 4), (8,))):
        tokens, ids = torch.zeros(hidden), torch.zeros(labels, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"hidden has shape .* expected this rank's part"):
            check_call(tokens, torch.zeros(11, 4), ids, None, None, num_parts=2, tp_size=2)


@pytest.mark.parametrize("name", ["hidden", "weight", "labels"])
def test_sharded_operands_are_refused(name):
    """FSDP2's DTensors claim the whole shape and hold a part: a kernel would read past it."""

    class Sharded(torch.Tensor):
        placements = ("Shard(dim=0)",)

    arguments = {
        "hidden": torch.zeros(4, 2, 8),
        "weight": torch.zeros(11, 8),
        "labels": torch.zeros(2, 4, dtype=torch.int64),
    }
    arguments[name] = arguments[name].as_subclass(Sharded)
    with pytest.raises(TypeError, match=f"{name} is a Sharded, placed .*full_tensor"):
        fused_linear_cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_chunks": 0}, "1 or more"),
        ({"chunk_tokens": -3}, "1 or more"),
        ({"num_chunks": 2.5}, "whole number"),
        ({"num_chunks": 2, "chunk_tokens": 8}, "give one of them"),
        ({"strategy": "fastest"}, "choose one of"),
        ({"row_backend": "cuda"}, "choose one of"),
        ({"logit_scale": 0.0}, "not 0"),
    ],
    ids=str,
)
def test_bad_config(fields, words):
    with pytest.raises(ValueError, match=words):
        FusedCEConfig(**fields)


class WeightCasts(TorchDispatchMode):
    """Counts copies of ``[V, H]`` into another dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.shape, self.count = weight.shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


def test_autocast_copies_the_weight_once(device):
    """As of torch's own linear: one copy for all calls while the context is on, and none is stale after."""
    inputs = make_inputs("plain", s=10, b=4, hidden_size=16, vocab=50, dtype=torch.bfloat16, device=device)
    hidden = inputs.hidden.float()
    weight = torch.nn.Parameter(inputs.weight.float())

    def loss():
        return fused_linear_cross_entropy(hidden, weight, inputs.labels, config=FusedCEConfig(num_chunks=3))

    with WeightCasts(weight) as casts, torch.autocast(device.type, torch.bfloat16):
        with torch.inference_mode():
            loss()
        with torch.no_grad():
            evaluated = loss()
        torch.nn.functional.linear(hidden, weight)
        made = loss() + loss()
    assert casts.count == 1
    made.backward(inputs.grad_loss)
    (twice,) = torch.autograd.grad(
        fused_linear_cross_entropy(
            inputs.hidden, leaf := inputs.weight.clone().requires_grad_(), inputs.labels
        ),
        leaf,
        2 * inputs.grad_loss,
    )
    assert relative_error(weight.grad, twice.double()) < 1e-2
    weight.data.mul_(2)  # bumps no version
    with torch.autocast(device.type, torch.bfloat16):
        assert (loss() - evaluated).abs().max() > 0.1
    weight.data.mul_(0.5)
    with WeightCasts(weight) as casts, torch.autocast(device.type, torch.bfloat16), torch.no_grad():
        torch.nn.functional.linear(hidden, weight)  # torch caches it, and it carries no gradient
        with torch.enable_grad():
            assert torch.autograd.grad(loss().sum(), weight)[0].abs().max() > 0
    with (
        WeightCasts(weight) as casts,
        torch.autocast(device.type, torch.bfloat16, cache_enabled=False),
    ):
        torch.testing.assert_close(loss() + loss(), made)
    assert casts.count == 2
