"""What surrounds a call, and what is done with its results, is as with PyTorch's own loss."""

from __future__ import annotations

import ast
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, fused_linear_token_outputs
from megatron_fused_ce.head import spec
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.losses.label import ZLoss
from megatron_fused_ce.ops.labels import SeveralLabels
from megatron_fused_ce.ranks import agreement
from megatron_fused_ce.scripts.lib.reference import make_inputs, relative_error
from tests.support.distillation import fused, make_problem
from tests.support.op import STRATEGIES, at_odd_offset, leaves, run
from tests.support.problems import same_bits

PACKAGE = Path(megatron_fused_ce.__file__).parent
ROOMS = ("distillation", "head", "logits", "losses", "ops", "ranks")
MAKES_FLOATS = {f"torch.{name}" for name in ("empty", "eye", "linspace", "ones", "rand", "randn", "zeros")}
SIZES = {"s": 6, "b": 2, "hidden_size": 16, "vocab": 24}


def assert_same_bits(made, expected):
    for one, right in zip(made, expected, strict=True):
        assert one.dtype == right.dtype and same_bits(one, right)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def problem(device, dtype=torch.float32, **sizes):
    return make_inputs("odd-labels", **{**SIZES, **sizes}, dtype=dtype, device=device)


# --- the default dtype ---------------------------------------------------------------------------


def step(inputs, config, outputs=(), temperature=1.0) -> list[Tensor]:
    """Loss, outputs and gradients."""
    hidden, weight = leaves(inputs)
    weights = inputs.grad_loss.masked_fill(inputs.grad_loss < -0.5, 0.0)
    more = {"config": config, "token_weights": weights, "outputs": outputs, "temperature": temperature}
    made = linear_cross_entropy(Call(hidden, weight, inputs.labels, **more))
    made.loss.backward(weights)
    return [x for x in (*made.outputs.values(), hidden.grad, weight.grad) if x is not None]


#: Strategy, dtype and options of each: a rule over the source says it of all other calls.
UNDER_ANOTHER = [
    ("store", torch.float32, {"z_loss": 1e-3, "logit_softcap": 5.0, "true_vocab_size": 20}),
    ("recompute", torch.bfloat16, {"label_smoothing": 0.3, "label_smoothing_form": "pytorch"}),
    ("grad_in_forward", torch.float16, {"label_smoothing": 0.1}),
    ("grad_in_forward", torch.bfloat16, {"skip_masked": True}),
]


@pytest.mark.parametrize(("strategy", "dtype", "options"), UNDER_ANOTHER)
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_a_default_dtype_changes_no_bit(other, strategy, dtype, options, device):
    """Lightning's half-precision plugin sets one around every forward. Cached under it, or before it."""
    inputs = problem(device, dtype)
    config = FusedCEConfig(strategy=strategy, num_chunks=2, **options)
    outputs = ("lse", "entropy", "predicted") if strategy == "store" else ()
    given = inputs, config, outputs, 0.5 + inputs.grad_loss.abs()
    # Numbers that bf16 does not have: label_weights and beta.
    teacher = make_problem(kind="jsd 0.1", with_labels=True, label_weights=0.3, dtype=dtype, device=device)

    def made():
        of_teacher = fused(teacher, teacher.config(num_chunks=2))
        return [*step(*given), *of_teacher[0], *of_teacher[1:]]

    expected = made()
    for forgets in (True, False):  # made under the other, or found there
        if forgets:
            agreement.forget()
        with default_dtype(other):
            assert_same_bits(made(), expected)
    assert_same_bits(made(), expected)  # looked up, made under the other


def test_every_new_tensor_names_its_dtype():
    """Else it has the caller's default."""
    files = [file for room in ROOMS for file in (PACKAGE / room).rglob("*.py")]
    unnamed = {
        (file.name, ast.unparse(call.func))
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in MAKES_FLOATS
        and all(keyword.arg != "dtype" for keyword in call.keywords)
    }
    # A graph's anchor that has no numbers, and draws on which a term is tried.
    assert unnamed == {("autograd.py", "torch.zeros"), ("check.py", "torch.linspace")}


# --- the calls before ------------------------------------------------------------------------------

#: Changes of a call after which what was remembered of the one before must not serve.
OTHER_CALLS = {
    "dtype": lambda call: {name: getattr(call, name).bfloat16() for name in ("hidden", "weight")},
    "fewer tokens": lambda call: {
        **{name: getattr(call, name)[:, :4] for name in ("labels", "token_weights")},
        "hidden": call.hidden[:4],
    },
    "strides": lambda call: {"hidden": call.hidden.transpose(0, 1).contiguous().transpose(0, 1)},
    "an odd offset": lambda call: {"hidden": at_odd_offset(call.hidden)},
    "a weight at one": lambda call: {"weight": at_odd_offset(call.weight)},
    "int32": lambda call: {"labels": call.labels.int()},
    "no weights": lambda call: {"token_weights": None},
    "frozen": lambda call: {"hidden": call.hidden.detach().clone()},
    "a number": lambda call: {"temperature": 2.0},
    "temperatures": lambda call: {"temperature": call.token_weights.abs() + 0.5},
    "outputs": lambda call: {"outputs": ("lse",)},
    "with gradients": lambda call: {"differentiable": ("entropy",)},
    "another term": lambda call: {"terms": (("loss", ZLoss(0.2)),), "outputs": ()},
    "zeros": lambda call: {"zero_unknown": True},
    "several labels": lambda call: {
        "other_targets": SeveralLabels(call.labels.unsqueeze(-1), call.token_weights.unsqueeze(-1).exp()),
        "outputs": (),
    },
    **{
        f"config, {name}": lambda call, option={name: value}: {"config": replace(call.config, **option)}
        for name, value in {
            **{"strategy": "grad_in_forward", "num_chunks": 3, "logit_scale": 2.0, "z_loss": 0.1},
            **{"label_smoothing": 0.1, "ignore_index": 3, "true_vocab_size": 20, "logit_softcap": 5.0},
            **{"logit_precision": "activations", "skip_masked": True, "logits_backend": "gemm_rows"},
        }.items()
    },
}


@pytest.mark.parametrize("change", OTHER_CALLS)
def test_a_call_after_one_of_another_kind(change, device):
    """Both have the bits that they have alone; on the way back, too."""
    inputs = problem(device)
    hidden, weight = leaves(inputs)
    weights = inputs.grad_loss.masked_fill(inputs.grad_loss < -0.5, 0.0)
    plain = Call(hidden, weight, inputs.labels, token_weights=weights, outputs=("log_prob", "entropy"))
    other = plain._replace(**OTHER_CALLS[change](plain))

    def made(call):
        operands = [x.detach().requires_grad_(x.requires_grad) for x in (call.hidden, call.weight)]
        done = linear_cross_entropy(call._replace(hidden=operands[0], weight=operands[1]))
        trained = [operand for operand in operands if operand.requires_grad]
        results = [done.loss, *done.outputs.values()]
        graded = [result for result in results if result.requires_grad]
        upstreams = [weights[:, : done.loss.shape[1]]] * len(graded)
        return [*[x.detach() for x in results], *torch.autograd.grad(graded, trained, upstreams)]

    alone = []
    for call in (plain, other):
        agreement.forget()
        alone.append(made(call))
    for call, expected in zip((plain, other), alone, strict=True):
        assert_same_bits(made(call), expected)


def test_threads_that_evict_each_others_specs(device, monkeypatch):
    monkeypatch.setattr(spec, "MAX_SPECS", 2)
    errors = []

    def calls(first: int) -> None:
        try:
            for tokens in range(first, first + 40):
                hidden = torch.ones(tokens % 7 + 1, 4, device=device)
                labels = torch.zeros(tokens % 7 + 1, dtype=torch.int64, device=device)
                fused_linear_cross_entropy(hidden, torch.ones(5, 4, device=device), labels)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# --- what the caller does with results and inputs ---------------------------------------------------


SHAPES = pytest.mark.parametrize("shape", ["[1, s]", "[2, s]", "[T]"])


def in_shape(shape, device):
    """Hidden states, weight, labels and upstream gradients."""
    inputs = problem(device, b=1 if shape == "[1, s]" else 2)
    hidden, labels, upstream = inputs.hidden, inputs.labels, inputs.grad_loss
    if shape == "[T]":
        hidden, labels, upstream = hidden.flatten(0, 1), labels.t().flatten(), upstream.t().flatten()
    return hidden.requires_grad_(), inputs.weight.requires_grad_(), labels, upstream


@pytest.mark.parametrize("num_chunks", [1, 2])
@SHAPES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_may_be_changed_in_place(strategy, shape, num_chunks, device):
    """``loss.mul_(mask)``, as Megatron's users write."""
    *operands, labels, upstream = in_shape(shape, device)
    config = FusedCEConfig(strategy, num_chunks=num_chunks)
    results = []
    for in_place in (False, True):
        loss = fused_linear_cross_entropy(*operands, labels, token_weights=upstream, config=config)
        assert not loss._is_view()
        loss = loss.mul_(upstream) if in_place else loss * upstream
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), operands)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["lse", "entropy", "log_prob", "correct", "predicted"])
def test_outputs_may_be_changed_in_place(name, device):
    """An entropy that the backward needs, too."""
    inputs = problem(device, b=1)
    gradients = []
    for changes in (False, True):
        hidden = inputs.hidden.clone().requires_grad_()
        made = fused_linear_token_outputs(
            hidden, inputs.weight, inputs.labels, ("entropy", name)[-2 + (name == "entropy") :]
        )
        changed = getattr(made, name)
        if changes:
            with torch.no_grad():
                changed.zero_()
        made.entropy.backward(inputs.grad_loss)
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)


@SHAPES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_label_buffer_may_be_filled_again(strategy, shape, device):
    """With the next micro-batch's labels, before this one's backward."""
    *operands, labels, upstream = in_shape(shape, device)
    gradients = []
    for refills in (False, True):
        buffers = labels.clone(), upstream.clone()
        config = FusedCEConfig(strategy, num_chunks=2)
        loss = fused_linear_cross_entropy(*operands, buffers[0], token_weights=buffers[1], config=config)
        if refills:
            buffers[0].zero_(), buffers[1].zero_()
        gradients.append(torch.autograd.grad(loss, operands, upstream))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


# --- numbers at the edge ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize("z_loss", [1e-4, 1.0, 30.0])
def test_fp16_with_a_z_loss_stays_finite(z_loss, strategy, device):
    """Whose gradients are many times the upstream gradient, for logits of some hundred."""
    inputs = problem(device, torch.float16)
    inputs = replace(inputs, hidden=inputs.hidden * 40, labels=inputs.labels.clamp(0, 23))
    config, upstream = FusedCEConfig(strategy, z_loss=z_loss, num_chunks=2), 1e-3 * inputs.grad_loss
    made = run(replace(inputs, grad_loss=upstream), config, token_weights=inputs.grad_loss)
    x, weight = (t.double().requires_grad_() for t in (inputs.hidden, inputs.weight))
    exact = x @ weight.t()
    logits = exact + (exact.half().double() - exact).detach()  # rounded, with the gradients of exact ones
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, inputs.labels.t().unsqueeze(-1)).squeeze(-1)
    (lse - picked + z_loss * lse.square()).backward(upstream.t().double())
    for ours, true in zip(made[1:], (x.grad, weight.grad), strict=True):
        assert relative_error(ours, true) < 1e-2
