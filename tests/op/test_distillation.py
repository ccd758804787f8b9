"""Divergence of a student from its teacher over the whole vocabulary, in one process: against fp64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_distillation
from megatron_fused_ce.distillation.teacher import Distillation
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.rl import token_divergence
from megatron_fused_ce.scripts.lib.live_storages import LiveStorages
from megatron_fused_ce.scripts.lib.reference import relative_error
from tests.support import pairs
from tests.support.distillation import (
    KINDS,
    OPTIONS,
    DistillationProblem,
    assert_right,
    confident,
    exact_rows,
    make_problem,
    of_logits,
    plain,
    worst_row,
)
from tests.support.losses import GRADIENTS
from tests.support.op import (
    DTYPES,
    EXP_DTYPE,
    HAS_EXP,
    ON_GPU,
    STRATEGIES,
    Parts,
    leaves,
    open_main_grad,
    promises,
    rows_by,
    step,
    strategy_in_place,
)

needs_exp = pytest.mark.skipif(not HAS_EXP, reason="the scaled-exp GEMM needs Hopper or newer")

#: Of the rows. On a GPU the Triton kernels serve alone.
BACKENDS = ("triton",) if ON_GPU else ("torch", "triton")
OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.bfloat16}


def run(problem, strategy="store", num_chunks=3, rows="auto", token_weights=None, **config) -> Parts:
    """``grad_in_forward`` is told what the upstream is 1.5 times of."""
    options = {}
    if strategy == "grad_in_forward":
        options["token_weights"] = problem.grad_loss / 1.5 if token_weights is None else token_weights
    with strategy_in_place(strategy) as name, rows_by(rows):
        config = replace(problem.config, strategy=name, num_chunks=num_chunks, **config)
        return step(problem, partial(problem.ask, config=config, **options))


def call_of(problem: DistillationProblem, operands, config: FusedCEConfig, **call) -> Call:
    """As the adapter's, with a teacher in the labels' place."""
    of, (hidden, weight) = problem.options, problem.teacher
    teacher = hidden.view(*operands[0].shape[:-1], -1), weight
    how = None, of["divergence"], of.get("beta", 0.5), 1.0, None, False, False
    return Call(*operands, problem.labels, config=config, other_targets=Distillation(*teacher, *how), **call)


@pairs.parametrize(
    {
        "values": (
            *("plain", "near", "sure student", "sure teacher", "both sure", "sure of others"),
            *("wide student", "wide teacher", "both wide"),
        ),
        "kind": tuple(KINDS),
        "option": tuple(OPTIONS),
        "dtype": DTYPES,
        "teacher_dtype": ("the student's", "another"),
        "strategy": (*STRATEGIES, "mixed"),
        "temperature": (1.0, 0.5, 4.0),
        "num_chunks": (1, 4),
    }
)
def test_against_fp64(values, kind, option, dtype, teacher_dtype, strategy, temperature, num_chunks, device):
    problem = make_problem(
        values,
        s=19 if dtype == torch.float32 else 64,  # more of the roundings that a norm is of
        sizes=(24, 24) if values == "near" else (24, 40),
        dtype=dtype,
        teacher_dtype=OTHER[dtype] if teacher_dtype == "another" else None,
        device=device,
        kind=kind,
        temperature=temperature,
        **OPTIONS[option],
    )
    assert_right(problem, run(problem, strategy, num_chunks))


@pytest.mark.parametrize(
    ("kind", "s", "b", "vocab"),
    [
        *(("forward_kl", 1, 1, 331), ("reverse_kl", 1, 3, 5), ("jsd", 4096, 1, 61), ("jsd 0.1", 5, 2, 1)),
        *(("jsd 0.9", 1, 1, 331), ("forward_kl", 4096, 1, 61), ("reverse_kl", 5, 2, 1)),
    ],
)
def test_sizes(s, b, vocab, kind, device):
    """One token, more tokens than classes, a single class."""
    problem = make_problem(s=s, b=b, vocab=vocab, sizes=(8, 4), kind=kind, device=device, temperature=2.0)
    for strategy in STRATEGIES:
        assert_right(problem, run(problem, strategy, min(s, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_row_passes_of_triton(kind, device):
    """As the op calls them: the labels' term at another temperature, padding, a softcap."""
    problem = make_problem(
        "sure teacher", s=3, b=1, vocab=45, padding=(3, 7), kind=kind, temperature=2.0, with_labels=True,
        label_weights="per token", ignore_index=-1, logit_softcap=20.0, device=device,
    )  # fmt: skip
    assert_right(problem, run(problem, "store", 2, rows="triton"))
    assert_right(problem, run(problem, "recompute", 1, rows="triton"))


@needs_exp
@pytest.mark.parametrize(
    ("kind", "option", "strategy"),
    [
        ("forward_kl", "label weights", "store"),
        ("reverse_kl", "plain", "store"),
        ("jsd", "a label weight", "recompute"),
        ("forward_kl", "plain", "grad_in_forward"),
    ],
)
def test_logits_of_the_scaled_exp_gemm(kind, option, strategy, device):
    """Of both sides."""
    problem = make_problem(
        "sure student", s=7, b=2, sizes=(16, 32), vocab=64, kind=kind, temperature=0.5, dtype=EXP_DTYPE,
        device=device, **OPTIONS[option],
    )  # fmt: skip
    assert_right(problem, run(problem, strategy, 2, logits_backend="scaled_exp"))
    # What recompute makes anew are the same logits, to the bit.
    made = [run(problem, name, 1, logits_backend="scaled_exp") for name in ("store", "recompute")]
    assert all(torch.equal(made[0][name], made[1][name]) for name in GRADIENTS)


@pytest.mark.parametrize(
    ("dtype", "teacher_dtype"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "mixed"])
def test_logits_in_fp32(strategy, dtype, teacher_dtype, device):
    """Sums of products are not rounded, on either side: a loss has fp32's error."""
    dtypes = {"dtype": getattr(torch, dtype), "teacher_dtype": getattr(torch, teacher_dtype)}
    problem = make_problem(**dtypes, kind="jsd", with_labels=True, label_weights=0.5, device=device)
    made = run(problem, strategy, logit_precision="fp32")
    assert_right(problem, made)
    exact = plain(problem, torch.float64)
    for name in made.keys() - GRADIENTS:
        assert (made[name] - exact[name]).abs().max() < 4e-6


# --- a student that has learnt everything -------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "strategy", "dtype", "config"),
    [
        *(
            (values, STRATEGIES[i % 3], DTYPES[i // 2], {})
            for i, values in enumerate(("plain", "wide student") * 3)
        ),
        ("sure student", "mixed", torch.bfloat16, {}),
        ("sure student", "store", EXP_DTYPE, {"rows": "triton"}),
        pytest.param("sure student", "store", EXP_DTYPE, {"logits_backend": "scaled_exp"}, marks=needs_exp),
    ],
)
def test_a_student_that_is_its_teacher(kind, values, strategy, dtype, config, device):
    """The same bits on both sides: no divergence and no gradient, exactly."""
    options = {"dtype": dtype, "device": device, "kind": kind, "temperature": 0.7, "s": 2 if config else 19}
    given = make_problem(values, b=2, vocab=64, sizes=(16, 16), **options)
    made = run(replace(given, teacher=(given.hidden, given.weight)), strategy, 2, **config)
    assert not any(made[name].any() for name in ("divergence", "loss", *GRADIENTS))


@pytest.mark.parametrize(("backend", "size"), [*((name, 1e-9) for name in BACKENDS), (BACKENDS[0], 1e-6)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_of_a_billionth(size, kind, backend, device):
    """Logits that differ by 4e-5 and are fp32's to the bit (one product each): right to 1 %, token by token,
    and so are the gradients. What is left are roundings of each side's ``s - max``, up to 2**-22, against
    4e-5; logits that are sums have more of them.
    """
    generator = torch.Generator().manual_seed(1)
    num_tokens, vocab = 6, 150
    weight = torch.randn(vocab, num_tokens, generator=generator)
    beside = weight + (2 * size) ** 0.5 * torch.randn(vocab, num_tokens, generator=generator)
    problem = of_logits(weight.to(device), beside.to(device), kind=kind)
    made, exact = run(problem, rows=backend), plain(problem, torch.float64)
    true = exact["divergence"]
    assert size / 20 < true.min() and true.max() < 3 * size
    assert ((made["divergence"] - true).abs() / true).max() < 1e-2
    assert relative_error(made["grad_weight"], exact["grad_weight"]) < 1e-2


@pytest.mark.parametrize(
    "options", [{"logit_softcap": 20.0, "teacher_logit_softcap": 30.0}, {"logit_scale": -0.5}], ids=str
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_confident_rows_with_options(kind, backend, options, device):
    """And classes that either side excludes; two that are largest alike."""
    problem = confident(300, 30.0, "one class", rows=2, device=device, kind=kind, **options)
    if "logit_softcap" in options:
        problem.weight[5] = problem.weight[0]
    else:
        problem.weight.neg_()
    if kind == "jsd":
        problem.weight[100:110] = -1e30 if "logit_softcap" in options else 1e30
        problem.teacher[1][105:120] = -1e30
    made = run(problem, "recompute", num_chunks=1, rows=backend)["grad_weight"]
    assert worst_row(made.t(), exact_rows(problem)) <= 2e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("kind", "values", "temperature", "label_weights", "scale"),
    [
        ("forward_kl", "plain", 20.0, 20.0, 1.0),
        ("forward_kl", "plain", 1.0, 400.0, 512.0),
        ("reverse_kl", "both wide", 1.0, None, 1.0),
        ("reverse_kl", "plain", 1.0, 50.0, 1.0),
    ],
)
def test_fp16_gradients_stay_finite(kind, values, temperature, label_weights, scale, strategy, device):
    """Rows whose gradient is hundreds of times its upstream, times weights of up to 15."""
    problem = make_problem(
        values, dtype=torch.float16, device=device, kind=kind, temperature=temperature, logit_scale=scale,
        with_labels=label_weights is not None, label_weights=label_weights,
    )  # fmt: skip
    problem.weight[:, 0] = -15.0
    problem.weight[problem.labels.unique(), 0] = 15.0
    problem.hidden[..., 0] = 0.01
    problem.grad_loss.div_(scale)
    assert_right(problem, run(problem, strategy))


# --- what is asked for --------------------------------------------------------------------------


def test_what_has_a_gradient(device):
    """The loss, and the divergence where it is the loss."""
    problem = make_problem("plain", with_labels=True, label_weights=0.5, device=device)
    hidden, _ = leaves(problem)
    given = hidden, problem.weight, *problem.teacher
    made = fused_linear_distillation(*given, **problem.options, entropy="detached")
    assert made.loss.requires_grad and not made.teacher_cross_entropy.requires_grad
    for name in ("divergence", "cross_entropy", "entropy"):
        with pytest.raises(RuntimeError, match=f"{name} of .* has no gradient.*: differentiate loss"):
            torch.autograd.grad((made.loss + getattr(made, name)).sum(), hidden, retain_graph=True)
    # As a reentrant checkpoint, which asks for the gradients of all its results.
    ones, zeros = torch.ones_like(made.loss), torch.zeros_like(made.loss)
    (right,) = torch.autograd.grad(made.loss, hidden, ones, retain_graph=True)
    found = torch.autograd.grad(made[:3], hidden, (ones, zeros, zeros))
    assert torch.equal(found[0], right)
    made = fused_linear_distillation(*given)
    assert made.cross_entropy is made.teacher_cross_entropy is made.entropy is None
    assert torch.equal(made.loss, made.divergence)
    for config in (FusedCEConfig(), FusedCEConfig("grad_in_forward", ignore_index=int(problem.labels[0, 1]))):
        options = {"labels": problem.labels, "token_weights": problem.grad_loss, "config": config}
        made = fused_linear_distillation(*given, **options)
        losses = made.loss * 3, made.divergence * 3, made.loss + 2 * made.divergence
        first, *others = (
            torch.autograd.grad(loss, hidden, problem.grad_loss, retain_graph=True)[0] for loss in losses
        )
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        made = fused_linear_distillation(*given, config=FusedCEConfig(strategy="grad_in_forward"))
    assert not made.loss.requires_grad


def test_an_ignored_label_of_a_call_without_labels(device):
    """Whatever it is, no token has it."""
    problem = make_problem(device=device)
    for ignored in (-1, -2, -100):
        assert_right(problem, run(problem, ignore_index=ignored))


@pytest.mark.parametrize("kind", KINDS)
def test_a_promise_kept_and_broken(kind, device):
    """Token weights that the upstream gradient is a multiple of, and others."""
    problem = make_problem(kind=kind, with_labels=True, label_weights=0.5, temperature=2.0, device=device)
    with promises(kept=1):
        assert_right(problem, run(problem, "grad_in_forward", token_weights=-2 * problem.grad_loss))
    with pytest.warns(UserWarning, match="upstream gradient"), promises(kept=0, remade=1):
        assert_right(problem, run(problem, "grad_in_forward", token_weights=problem.grad_loss.exp()))


def test_a_budget(device):
    """Of 6 MiB where ``store`` needs 9: a mixed plan, whose buffers are within it; into ``main_grad``."""
    if device.type == "cuda":
        pytest.skip("cuBLAS's workspaces alone are more")
    problem = make_problem(s=4096, b=1, vocab=331, sizes=(16, 24), kind="reverse_kl", device=device)
    hidden, weight = leaves(problem)
    main_grad = torch.full_like(weight, 2.0**-10)
    opened = {"open_grad_weight": partial(open_main_grad, main_grad)}
    call = call_of(
        problem, (hidden, weight), replace(problem.config, memory_mb=6), outputs=("divergence",), **opened
    )
    # Row passes in plain PyTorch work in copies of fewer rows than a chunk has.
    with patch.object(rows_torch, "BLOCK_ELEMENTS", 16 * 331), LiveStorages() as live:
        made = linear_cross_entropy(call)
        made.loss.backward(problem.grad_loss)
    assert made.plan.strategy == "mixed" and made.plan.predicted_peak_bytes <= 6 * 2**20
    grads = hidden.nbytes + weight.nbytes
    assert 4 * 2**20 < live.peak_bytes <= made.plan.predicted_peak_bytes + grads
    grads = {"grad_hidden": hidden.grad, "grad_weight": main_grad - 2.0**-10}
    assert_right(problem, {"loss": made.loss.detach(), **grads})


# --- the names of on-policy distillation ----------------------------------------------------------


def test_token_divergence(device):
    """Hidden states ``[b, s, H]``, half-precision ones with a weight in fp32, reverse KL."""
    problem = make_problem(kind="reverse_kl", device=device)
    rounded = [x.bfloat16() for x in (problem.hidden, problem.teacher[0])]
    of_teacher = problem.teacher[1]
    problem = replace(problem, hidden=rounded[0].float(), teacher=(rounded[1].float(), of_teacher))
    student, teacher = (x.transpose(0, 1) for x in rounded)
    student.requires_grad_()
    made = token_divergence(student, problem.weight, teacher, of_teacher, batch_first=True)
    made.loss.backward(problem.grad_loss)
    exact = plain(problem, torch.float64)
    assert (made.loss.detach() - exact["loss"]).abs().max() < 2e-6
    assert student.grad.dtype == torch.bfloat16
    assert relative_error(student.grad.transpose(0, 1), exact["grad_hidden"]) < 4e-3


def test_a_teacher_that_no_backward_could_save(device):
    problem = make_problem(device=device)
    with torch.inference_mode():
        made = [x.clone() for x in problem.teacher]
    with pytest.raises(ValueError, match=r"run the teacher under torch\.no_grad"):
        fused_linear_distillation(problem.hidden, problem.weight, *made)


def test_a_call_without_outputs_of_which_no_token_is_left(device):
    """As the adapter's, of a micro-batch whose loss mask is 0 throughout."""
    problem = make_problem(device=device)
    hidden, weight = leaves(problem, (True, False))
    weights = torch.zeros_like(problem.grad_loss)
    call = call_of(problem, (hidden, weight), FusedCEConfig(skip_masked=True), token_weights=weights)
    loss = linear_cross_entropy(call).loss
    (0 * loss.sum()).backward()
    assert loss.shape == weights.shape and not loss.any() and not hidden.grad.any()
