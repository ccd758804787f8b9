"""Properties of the head over random calls: against fp64, and of one way to compute it against another.

    make properties PROPERTIES="--hypothesis-seed 7"

CI tries 300 examples, always the same; this takes the profile `long` of tests/conftest.py, 12,000, and says
in the end what they were.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_fused_ce import FusedCEConfig, fused_linear_token_outputs, fused_linear_topk_distillation
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.losses.outputs import Outputs
from megatron_fused_ce.losses.statistics import merge_extra, merge_shards
from megatron_fused_ce.losses.terms import Rows
from megatron_fused_ce.ops.arguments import ENTROPY_CHOICES
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import (
    HeadInputs,
    make_teacher,
    plain_distillation,
    plain_head,
    plain_outputs,
)
from tests.support.op import rows_by
from tests.support.problems import (
    TRIED,
    DrawnProblem,
    check,
    holds_logits,
    largest_logits,
    loss_of,
    problems,
    run,
    run_on_shards,
    same_bits,
    tried,
)
from tests.support.roundings import UNIT_32


def share(part: float) -> settings:
    """This property's part of the profile's examples."""
    return settings(max_examples=round(settings.default.max_examples * part))


def definition(problem):
    inputs = problem.inputs()
    return lambda dtype, roundings: plain_head(inputs, dtype, roundings)._asdict()


@share(0.32)
@given(problems())
def test_loss_and_gradients(problem):
    tried("loss and gradients", problem)
    check(problem, run(problem, loss_of), definition(problem))


DIFFERENTIABLE = ("log_prob", "lse", "entropy")


def of_any_label(problem):
    """``plain_outputs`` knows no ignored label."""
    return replace(problem, main_grad="", config=replace(problem.config, ignore_index=None))


def outputs_in(inputs, upstreams):
    """Outputs and gradients by the definition."""

    def evaluate(dtype, roundings):
        made, grad_hidden, grad_weight = plain_outputs(inputs, upstreams, dtype, roundings)
        return {**made._asdict(), "grad_hidden": grad_hidden, "grad_weight": grad_weight}

    return evaluate


@share(0.12)
@given(
    problems(labels=("any", "one", "edges"), strategies=("store", "recompute", "auto")),
    st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1),
)
def test_outputs_beside_the_loss(problem, names):
    """Values and gradients of any of them, each with upstream gradients of its own; what is predicted."""
    problem = replace(of_any_label(problem), temperature="")
    tried("outputs beside the loss", problem)
    inputs = problem.inputs()
    if problem.config.true_vocab_size is not None:
        inputs.labels.remainder_(problem.config.true_vocab_size)
    names = tuple(sorted(names))
    upstreams = {name: inputs.grad_loss.roll(i, 1) for i, name in enumerate(names)}

    def head(*args, **options):
        made = fused_linear_token_outputs(*args, (*names, "predicted", "correct"), **options)
        return {name: getattr(made, name) for name in (*names, "predicted", "correct")}

    made = run(problem, head, upstreams, inputs=inputs)
    predicted, correct = made.pop("predicted"), made.pop("correct")
    check(problem, made, outputs_in(inputs, upstreams))
    z, resolution = logits_and_resolution(inputs)
    chosen = z.gather(-1, predicted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    held = holds_logits(inputs)
    assert bool(((z.amax(-1) - chosen <= 2 * resolution) & (predicted >= 0))[held].all())
    assert bool((correct | (predicted != inputs.labels))[held].all())


#: A softcap, one temperature for all tokens, and labels of no class.
OUTSIDE = DrawnProblem(
    seed=1, s=5, b=2, hidden_size=8, shards=(19,), dtype=torch.float32, labels="some outside",
    temperature="number", config=FusedCEConfig(strategy="store", logit_softcap=2.0),
)  # fmt: skip


@share(0.1)
@given(problems(strategies=("store", "recompute", "auto")), st.sampled_from(ENTROPY_CHOICES), st.booleans())
@example(OUTSIDE, "differentiable", True)
@example(replace(OUTSIDE, temperature="per token"), "detached", True)
def test_token_log_probs(problem, entropy, zero_unknown):
    """At any temperature, also of labels outside the vocabulary."""
    problem = of_any_label(problem)
    tried("token_log_probs", problem)
    inputs = problem.inputs()
    names = ("log_prob", "entropy") if entropy == "differentiable" else ("log_prob",)
    upstreams = {name: inputs.grad_loss.roll(i, 1) for i, name in enumerate(names)}

    def head(*args, token_weights=None, **options):
        made = token_log_probs(*args, entropy=entropy, zero_unknown=zero_unknown, **options)
        assert made.entropy is None or made.entropy.requires_grad == (entropy == "differentiable")
        return {name: value for name, value in made._asdict().items() if value is not None}

    def evaluate(dtype, roundings):
        made = outputs_in(inputs, upstreams)(dtype, roundings)
        num_classes = problem.config.true_vocab_size or problem.vocab
        known = (inputs.labels >= 0) & (inputs.labels < num_classes)
        return {**made, "log_prob": made["log_prob"].where(known | (not zero_unknown), 0.0)}

    check(problem, run(problem, head, upstreams, inputs=inputs), evaluate)


def logits_and_resolution(inputs: HeadInputs):
    """Logits ``[b, s, K]`` in fp64, and how far one may be off by rounding ``[b, s]``."""
    hidden, weight = inputs.hidden.double(), inputs.weight.double()
    z = (hidden @ weight.t()).transpose(0, 1) * inputs.logit_scale
    products = (hidden.abs() @ weight.abs().t()).amax(-1).t() * abs(inputs.logit_scale)
    info = torch.finfo(inputs.hidden.dtype)
    resolution = z.abs().amax(-1) * (info.eps / 2 + 8 * UNIT_32)
    resolution += products * inputs.hidden.shape[-1] * UNIT_32
    resolution += info.smallest_normal * info.eps * (1 + abs(inputs.logit_scale))
    cap = inputs.config.logit_softcap
    if cap is not None:
        resolution += cap * 2.0**-149  # z / cap may be below the smallest number
        z = cap * torch.tanh(z / cap)
    if inputs.temperature is not None:
        z, resolution = z / inputs.temperature.unsqueeze(-1), resolution / inputs.temperature
        resolution += z.abs().amax(-1) * 4 * UNIT_32
    return z[..., : inputs.config.true_vocab_size], resolution


@share(0.1)
@given(problems(labels=()), st.integers(1, 9))
def test_distillation(problem, k):
    problem = replace(problem, main_grad="", temperature="")
    tried("distillation", problem)
    inputs = problem.inputs()
    ids, log_probs = make_teacher(inputs, k)

    def head(hidden, weight, labels, **options):
        order = (lambda x: x.transpose(0, 1).flatten(0, 1)) if problem.flat else (lambda x: x)
        loss = fused_linear_topk_distillation(hidden, weight, order(ids), order(log_probs), **options)
        return {"loss": loss}

    def evaluate(dtype, roundings):
        return plain_distillation(inputs, ids, log_probs, dtype, roundings)._asdict()

    check(problem, run(problem, head), evaluate)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: Anything fp32 holds, and rows of ties, of infinities, of numbers near each other.
LOGITS = FLOATS | st.sampled_from((0.0, -0.0, 1.0, -torch.inf)) | st.floats(-80, 80, width=32)


@st.composite
def rows_of_logits(draw):
    """Logits ``[T, V]``, labels ``[T]``, and shards of ``V`` columns."""
    shards = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    row = st.lists(LOGITS, min_size=sum(shards), max_size=sum(shards))
    rows = draw(st.lists(row, min_size=1, max_size=3))
    labels = draw(st.lists(st.integers(-1, sum(shards)), min_size=len(rows), max_size=len(rows)))
    return torch.tensor(rows), torch.tensor(labels), shards


@share(0.1)
@given(rows_of_logits(), st.booleans())
def test_statistics_of_shards_merge(drawn, entropy):
    """Of any finite logits, -inf among them: the loss, and what its gradient is made of."""
    logits, labels, shards = drawn
    TRIED["merging of shards"] += 1
    outputs = Outputs.of(names=("entropy",) if entropy else ())
    edges = [sum(shards[:i]) for i in range(len(shards) + 1)]
    stats = [
        rows_torch.row_statistics(logits[:, a:b].contiguous(), labels - a, 1.0, form=outputs)
        for a, b in pairwise(edges)
    ]
    sent = torch.stack([one.shard for one in stats])
    merged = merge_shards(sent)
    row_max, inv_sum, miss, _ = merged.terms
    z = logits.double()
    largest = z.amax(-1)
    shifted = z - largest.unsqueeze(-1)
    inside = (labels >= 0) & (labels < z.shape[1])
    column = labels.where(inside, 0).unsqueeze(-1)
    e = shifted.exp()
    others = e.scatter(-1, column, e.gather(-1, column).masked_fill(inside.unsqueeze(-1), 0.0)).sum(-1)
    label = shifted.gather(-1, column).squeeze(-1).where(inside, 0.0)
    real = torch.isfinite(largest)  # a row of -inf alone has no softmax
    assert torch.equal(row_max, logits.amax(-1))
    # A sum of V terms, the largest of them 1; alone, a term has the rounding of its argument too, which is
    # above -104 where the term is not 0.
    ulps = (z.shape[1] + 16) * UNIT_32
    alone = ulps + 104 * UNIT_32
    close = partial(torch.testing.assert_close, check_dtype=False)
    close(merged.loss[real], (e.sum(-1).log() - label)[real], rtol=alone, atol=ulps)
    close(inv_sum[real], (1 / e.sum(-1))[real], rtol=ulps, atol=0)
    close(miss[real], (others / e.sum(-1))[real], rtol=alone, atol=2.0**-148)
    if entropy:
        extra = torch.stack([torch.stack(one.extra.rows()) for one in stats])
        merged = merged._replace(extra=merge_extra(("weighted",), extra, sent))
        made = outputs.values(Rows(merged))
        p = e / e.sum(-1, keepdim=True)
        true = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)
        torch.testing.assert_close(made["entropy"][real].double(), true[real], rtol=ulps, atol=4 * ulps)


def loss_resolution(inputs: HeadInputs):
    """How far the loss of a token may move by roundings ``[b, s]``; fp64."""
    config = inputs.config
    z, resolution = logits_and_resolution(inputs)
    size = z.abs().amax(-1) + math.log(z.shape[-1]) + 1
    moved = 2 * resolution + 16 * UNIT_32 * size
    return moved * (1 + 2 * config.z_loss * size) + 16 * UNIT_32 * config.z_loss * size**2


def assert_same_losses(one, other, inputs):
    """Token by token: no norm hides a wrong one."""
    held = holds_logits(inputs) & torch.isfinite(one)
    apart = (one.double() - other.double()).abs()
    assert bool((apart <= 2 * loss_resolution(inputs))[held].all())


@pytest.mark.rest
@share(0.14)
@given(problems(max_shards=4))
def test_shards_over_ranks(problem):
    """TP 2 to 4, shards of any sizes, with sequence parallelism or not: fp64's results, TP 1's losses."""
    tried("shards over ranks", problem)
    made = run_on_shards(problem)
    check(problem, made, definition(problem))
    inputs = problem.inputs()
    alone = replace(problem, shards=(problem.vocab,), sequence_parallel=False)
    assert_same_losses(made["loss"], run(alone, loss_of, inputs=inputs)["loss"], inputs)


@share(0.14)
@given(problems(), problems(), st.randoms(use_true_random=False))
def test_one_way_against_another(problem, other, order):
    """Another chunking, strategy, layout: the same losses; permuted tokens: permuted losses; twice: bits."""
    tried("one way against another", problem)
    inputs = problem.inputs()
    made = run(problem, loss_of)
    again = run(problem, loss_of)
    assert all(same_bits(made[name], again[name]) for name in made)

    cut = {name: getattr(other.config, name) for name in ("strategy", "num_chunks", "chunk_tokens")}
    layout = {name: getattr(other, name) for name in ("strides", "flat", "int32", "main_grad")}
    otherwise = replace(problem, config=replace(problem.config, **cut), **layout)
    another = run(otherwise, loss_of)
    assert_same_losses(made["loss"], another["loss"], inputs)
    check(otherwise, another, definition(otherwise))

    tokens = list(range(problem.s))
    order.shuffle(tokens)
    permuted = replace(
        inputs,
        hidden=inputs.hidden[tokens],
        labels=inputs.labels[:, tokens],
        grad_loss=inputs.grad_loss[:, tokens],
        temperature=None if inputs.temperature is None else inputs.temperature[:, tokens],
    )
    moved = run(problem, loss_of, inputs=permuted)
    assert_same_losses(made["loss"][:, tokens], moved["loss"], permuted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
@share(0.08)
@given(problems(), st.booleans(), st.booleans())
def test_triton_kernels(problem, exponentiating, negated):
    """Row kernels with every option, and the scaled-exp GEMM, by Triton's interpreter; also of a negated
    log-probability with its gradient, where that is the loss.
    """
    problem = replace(problem, b=1)
    if exponentiating:
        options = {name: getattr(FusedCEConfig(), name) for name in ("z_loss", "logit_softcap")}
        options |= {"label_smoothing": 0.0, "true_vocab_size": None, "logits_backend": "scaled_exp"}
        options["logit_scale"] = abs(problem.config.logit_scale)
        problem = replace(
            problem,
            dtype=torch.float32,
            hidden_size=4 * (1 + problem.hidden_size // 4),
            shards=(4 * (1 + problem.vocab // 4),),
            strides=("contiguous", "contiguous", problem.strides[2]),
            config=replace(problem.config, **options),
        )
        # Exponents are rounded in powers of two, a row's reference once for all columns: with larger logits
        # fp32, which it serves here alone, shows that in gradients that are small differences.
        assume(float(largest_logits(problem.inputs()).max()) < 2.0**6)
    tried("scaled-exp GEMM" if exponentiating else "row kernels", problem)
    head = loss_of
    if negated and not problem.config.z_loss and not problem.config.label_smoothing:
        if problem.config.strategy == "grad_in_forward":
            problem = replace(problem, config=replace(problem.config, strategy="auto"))
        head = neg_log_prob
    with rows_by("triton"):
        check(problem, run(problem, head), definition(problem))


def neg_log_prob(*args, **options):
    """The loss as two outputs whose upstream gradients add up."""
    options["token_weights"] = None  # those of the loss, whose upstream is another one here
    made = linear_cross_entropy(
        Call(*args, outputs=("log_prob",), differentiable=("log_prob",), **options)
    ).outputs
    return {"loss": -1.5 * made["log_prob"] - 0.5 * made["loss"]}
