"""What surrounds a call, and what is done with its results, is as with PyTorch's own loss; a call's key."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_token_outputs,
    fused_linear_topk_distillation,
)
from megatron_fused_ce.distillation.teacher import Distillation
from megatron_fused_ce.head import agree, spec
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import InPlaceGradWeight
from megatron_fused_ce.head.host_copy import HostCopy
from megatron_fused_ce.head.promise import Head
from megatron_fused_ce.losses.label import ZLoss
from megatron_fused_ce.ops.labels import SeveralLabels
from megatron_fused_ce.ranks import agreement
from megatron_fused_ce.scripts.lib.reference import make_inputs, relative_error
from tests.support.distillation import KINDS, fused, make_problem
from tests.support.op import STRATEGIES, at_odd_offset, leaves, run
from tests.support.problems import same_bits

SIZES = {"s": 6, "b": 2, "hidden_size": 16, "vocab": 24}


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

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing as PyTorch": {"label_smoothing": 0.3, "label_smoothing_form": "pytorch"},
    "z-loss, softcap, padding": {"z_loss": 1e-3, "logit_softcap": 5.0, "true_vocab_size": 20},
    "skipped": {"skip_masked": True},
}


def step(inputs, config, outputs=(), temperature=1.0) -> list[Tensor]:
    """Loss, outputs and gradients."""
    hidden, weight = leaves(inputs)
    weights = inputs.grad_loss.masked_fill(inputs.grad_loss < -0.5, 0.0)
    more = {"config": config, "token_weights": weights, "outputs": outputs, "temperature": temperature}
    made = linear_cross_entropy(Call(hidden, weight, inputs.labels, **more))
    made.loss.backward(weights)
    return [x for x in (*made.outputs.values(), hidden.grad, weight.grad) if x is not None]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.float16])
def test_a_default_dtype_changes_no_bit(other, strategy, dtype, options, device):
    """Lightning's half-precision plugin sets one around every forward. Cached under it, or before it."""
    inputs = problem(device, dtype)
    config = FusedCEConfig(strategy=strategy, num_chunks=2, **OPTIONS[options])
    outputs = ("lse", "entropy", "predicted") if strategy == "store" else ()
    given = (inputs, config, outputs, 0.5 + inputs.grad_loss.abs())
    expected = step(*given)
    for forgets in (True, False):  # made under the other, or found there
        if forgets:
            agreement.forget()
        with default_dtype(other):
            made = step(*given)
        for one, right in zip(made, expected, strict=True):
            assert one.dtype == right.dtype and same_bits(one, right)
    for one, right in zip(step(*given), expected, strict=True):  # looked up, made under the other
        assert same_bits(one, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.float16])
def test_a_default_dtype_and_a_teacher(other, kind, dtype, device):
    """Numbers that bf16 does not have: ``label_weights`` and ``beta``."""
    problem = make_problem(kind=kind, with_labels=True, label_weights=0.3, dtype=dtype, device=device)
    expected = fused(problem, problem.config(num_chunks=2))
    with default_dtype(other):
        made = fused(problem, problem.config(num_chunks=2))
    for one, right in zip((*made[0], *made[1:]), (*expected[0], *expected[1:]), strict=True):
        assert one.dtype == right.dtype and same_bits(one, right)


# --- the key ---------------------------------------------------------------------------------------


def arguments(device, **changes) -> Call:
    inputs = problem(device)
    weights = inputs.grad_loss.clone()
    args = Call(inputs.hidden, inputs.weight, inputs.labels, token_weights=weights)
    return args._replace(**changes).completed()


def opens_main_grad(weight, num_gemms, scaled):
    return InPlaceGradWeight(torch.zeros_like(weight), scaled, lambda: None)


opens_main_grad.kind = "main_grad"


def other_tensor(x: Tensor) -> dict[str, Tensor]:
    """The same numbers, of another kind."""
    return {
        "dtype": x.double() if x.is_floating_point() else x.int(),
        "shape": x[..., :-1],
        "strides": x.transpose(0, 1).contiguous().transpose(0, 1),
        "device": x.to("meta"),
        "class": x.as_subclass(type("Other", (Tensor,), {})),
        **({"gradient": x.clone().requires_grad_()} if x.is_floating_point() else {}),
    }


OF_TEACHER = {field.name for field in fields(Distillation)}


def changes_of(args: Call) -> dict[str, dict[str, Any]]:
    """Of each field, values that make another kind of call."""
    teacher = SeveralLabels(args.labels.unsqueeze(-1), args.token_weights.unsqueeze(-1))
    changes: dict[str, dict[str, Any]] = {
        name: other_tensor(getattr(args, name)) for name in ("hidden", "weight", "labels", "token_weights")
    }
    changes["token_weights"]["none"] = None
    changes["terms"] = {f"weight {w}": (("loss", ZLoss(w)),) for w in (0.1, 0.2)}
    beside = Distillation(args.hidden, args.weight, None, "jsd", 0.5, 1.0, None, False, True)
    of_beside: dict[str, dict[str, Any]] = {
        "hidden": other_tensor(beside.hidden),
        "weight": other_tensor(beside.weight),
        "label_weights": {
            **{"given": args.token_weights, "of double": args.token_weights.double(), "a number": 0.5}
        },
        "divergence": {"reverse_kl": "reverse_kl"},
        "beta": {"0.25": 0.25},
        "logit_scale": {"2.0": 2.0},
        "logit_softcap": {"5.0": 5.0},
        "sequence_parallel": {"on": True},
        "with_labels": {"off": False},
    }
    assert of_beside.keys() == OF_TEACHER, "a new field of the teacher"
    changes["other_targets"] = {
        "several": teacher,
        "several, kl": replace(teacher, kl=True),
        "several, labels": replace(teacher, log_probs=None),
        "several, of double": replace(teacher, log_probs=teacher.log_probs.double()),
        "several, elsewhere": replace(teacher, ids=teacher.ids.to("meta")),
        "given": beside,
    }
    for field, variants in of_beside.items():
        for how, value in variants.items():
            changes["other_targets"][f"{field}, {how}"] = replace(beside, **{field: value})
    changes |= {
        "sequence_parallel": {"on": True},
        "vocab_start": {"0": 0, "1": 1, "True": True},
        "outputs": {"lse": ("lse",)},
        "differentiable": {"lse": ("lse",)},
        "temperature": {"1": 1, "2.0": 2.0, "per token": args.token_weights},
        "zero_unknown": {"on": True},
        "reduce_grad_hidden": {"off": False},
        "with_argmax": {"on": True},
        "may_store": {"on": True},
        "open_grad_weight": {"main_grad": opens_main_grad},
        "uses_in_flight": {"2": 2},
        "head": {"another": Head("another")},
    }
    others = {
        **{"strategy": "store", "num_chunks": 2, "chunk_tokens": 4, "memory_mb": 9, "logit_scale": 2.0},
        **{"logit_softcap": 5.0, "z_loss": 0.1, "label_smoothing": 0.1, "label_smoothing_form": "pytorch"},
        **{"ignore_index": -100, "true_vocab_size": 9, "logit_precision": "fp32", "skip_masked": True},
        **{"debug_checks": True, "logits_backend": "gemm_rows", "merge": "packed"},
    }
    assert others.keys() == {field.name for field in fields(FusedCEConfig)}, "a new field of the config"
    changes["config"] = {name: replace(args.config, **{name: other}) for name, other in others.items()}
    return changes


#: Fields of which no spec depends: each for a reason.
SAME_SPEC = {
    "tp_group": "a history for each group",
    "caller_error": "no spec is kept with one",
    "unmasked": "a count of this call's numbers",
}


def test_every_field_of_the_arguments_is_in_the_key(device):
    """One field at a time: another key, with nothing to be remembered where a field is added."""
    args = arguments(device)
    changes = changes_of(args)
    assert changes.keys() | SAME_SPEC.keys() == set(Call._fields), "a new field"
    seen = {spec._key(args): "as it was"}
    for name, of_field in changes.items():
        for how, value in of_field.items():
            key = spec._key(args._replace(**{name: value}))
            if key is None:  # no address: nothing is kept
                assert how.endswith(("device", "elsewhere"))
                continue
            assert key not in seen, f"{name}, {how}: as {seen[key]}"
            seen[key] = f"{name}, {how}"
    with torch.no_grad():
        assert spec._key(args) not in seen
    hidden, weight = (at_odd_offset(operand) for operand in (args.hidden, args.weight))
    elsewhere = ({"hidden": hidden}, {"weight": weight}, {"hidden": hidden, "weight": weight})
    keys = {spec._key(args), *(spec._key(args._replace(**given)) for given in elsewhere)}
    assert len(keys) == 4, "each may be one that TMA cannot load"
    beside = changes["other_targets"]["label_weights, a number"]
    annealed = replace(beside, label_weights=0.25)
    assert spec._key(args._replace(other_targets=annealed)) == spec._key(args._replace(other_targets=beside))
    assert spec._key(args._replace(unmasked=HostCopy(torch.ones(1).long()))) == spec._key(args)
    assert spec._key(args._replace(caller_error=ValueError())) is None


def test_every_field_is_compared_over_the_ranks(device):
    """But for what a rank may have by itself."""
    args = arguments(device)
    of_rank = {"tp_group", "open_grad_weight", "head", "caller_error", "unmasked"}
    plain = agree.must_agree(args)
    assert agree.must_agree(args._replace(weight=args.weight[:5])) == plain
    changes = changes_of(args)
    beside = changes["other_targets"]["given"]
    of_teacher = agree.must_agree(args._replace(other_targets=beside))
    fewer = replace(beside, weight=beside.weight[:5])
    assert agree.must_agree(args._replace(other_targets=fewer)) == of_teacher
    for name, of_field in changes.items():
        for how, value in of_field.items():
            # A change of the teacher's is one from a call that has it.
            expected = of_teacher if how.partition(", ")[0] in OF_TEACHER else plain
            differs = agree.must_agree(args._replace(**{name: value})) != expected
            in_memory = how.rpartition(", ")[2] in ("strides", "device", "class")
            same = name in of_rank or in_memory or (name, how) == ("vocab_start", "")
            if name == "weight" and how == "shape":
                same = False  # its columns
            assert differs != same, (name, how)


def test_weights_on_another_device_are_refused_after_a_good_call(device):
    inputs = problem(device)
    given = (inputs.hidden.clone().requires_grad_(), inputs.weight, inputs.labels)
    config = FusedCEConfig("grad_in_forward")
    fused_linear_cross_entropy(*given, token_weights=inputs.grad_loss, config=config)
    with pytest.raises(ValueError, match="token_weights on meta"):
        fused_linear_cross_entropy(*given, token_weights=inputs.grad_loss.to("meta"), config=config)


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


# --- errors -----------------------------------------------------------------------------------------


def call_with(device, **changes):
    inputs = problem(device)
    given = {"hidden": inputs.hidden, "weight": inputs.weight, "labels": inputs.labels, **changes}
    return fused_linear_cross_entropy(**given)


def test_what_debug_checks_see_in_numbers(device):
    """Values that the device alone knows: the host waits for them there."""
    inputs = problem(device)
    config = FusedCEConfig("store", debug_checks=True)
    weights = inputs.grad_loss.clone()
    weights[1, 2] = torch.nan
    with pytest.raises(ValueError, match="token_weights have a NaN"):
        call_with(device, token_weights=weights, config=config)
    ids = torch.zeros(2, 6, 3, dtype=torch.int64, device=device)
    log_probs = torch.full((2, 6, 3), -1.0, device=device)
    log_probs[0, 1, 2] = 0.5
    with pytest.raises(ValueError, match="teacher_log_probs are above 0"):
        fused_linear_topk_distillation(inputs.hidden, inputs.weight, ids, log_probs, config=config)
    ids[0, 1, 2] = -1  # an empty entry may have any
    fused_linear_topk_distillation(inputs.hidden, inputs.weight, ids, log_probs, config=config)
