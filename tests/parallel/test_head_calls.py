"""Calls of the head over a group that no pair of options covers: data that differs from shard to shard, other
outputs, ranks that disagree, collectives that end late.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_token_outputs,
    fused_linear_topk_distillation,
    parallel,
    planner,
)
from megatron_fused_ce.call import Call
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.lib.collectives import Collectives
from megatron_fused_ce.scripts.lib.reference import (
    HeadResult,
    assert_close,
    assert_within,
    make_inputs,
    make_teacher,
    plain_distillation,
    plain_outputs,
    relative_error,
    truth,
)
from tests.support import pairs
from tests.support.head import (
    SIZES,
    AtItsStart,
    AtItsWait,
    fresh_group,
    plain_inputs,
    rows_of,
    same_on_all_ranks,
    scaled_exp_dtype,
    shard_of,
    tokens_of,
    whole_hidden,
    whole_rows,
)
from tests.support.losses import LOSSES, compare
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks

SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


def fused_result(rank: Rank, inputs, config, *, sp=False, shards="equal"):
    """Loss and gradients of the whole, on every rank; the upstream gradient is -3 times the token weights."""
    hidden, weight, settings = shard_of(rank, inputs, sp, shards)
    loss = fused_linear_cross_entropy(
        hidden,
        weight,
        inputs.labels,
        **settings,
        vocab_start=rows_of(rank, shards, inputs.weight.shape[0]).start,
        config=config,
        token_weights=inputs.grad_loss / -3.0,
    )
    loss.backward(inputs.grad_loss)
    return whole(rank, loss, hidden, weight, sp)


def whole(rank: Rank, loss, hidden, weight, sp) -> HeadResult:
    same_on_all_ranks(rank, loss)
    return HeadResult(loss.detach(), whole_hidden(rank, hidden.grad, sp), whole_rows(rank, weight.grad))


@on_ranks(2, pytest.param(4, marks=pytest.mark.rest))
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["all outputs", "users' own"])
def test_a_sum_of_terms(rank: Rank, name, strategy, sp):
    inputs = make_inputs("odd-labels", **SIZES, dtype=torch.float32, device=rank.device)
    hidden, weight, group = shard_of(rank, inputs, sp)

    def wholes(grad_hidden, grad_weight):
        return whole_hidden(rank, grad_hidden, sp), whole_rows(rank, grad_weight)

    compare(LOSSES[name], inputs, strategy, (hidden, weight), wholes, group)


# --- data that differs from shard to shard ---------------------------------------------------


def num_tokens(rank: Rank) -> int:
    """In bf16 enough for an error in norm: all that may be left of a token is its label's entry, which two
    roundings can move by 7.8e-3. Fewer for Triton's interpreter.
    """
    return 96 if rank.device.type == "cuda" else 24


@on_ranks(2, pytest.param(4, marks=pytest.mark.rest))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("backend", "gap"), [("gemm_rows", -600.0), ("scaled_exp", -600.0), ("scaled_exp", 600.0)]
)
def test_shards_600_nats_apart(rank: Rank, backend, gap, strategy):
    """The far ones vanish without NaN."""
    dtype = scaled_exp_dtype(rank) if backend == "scaled_exp" else torch.float32
    inputs = make_inputs(
        "plain", s=num_tokens(rank), b=1, hidden_size=16, vocab=512, dtype=dtype, device=rank.device
    )
    inputs.hidden[..., 0] = 1.0
    for index, rows in enumerate(inputs.weight.chunk(rank.size)):
        rows[:, 0] = gap * index
    config = FusedCEConfig(strategy=strategy, num_chunks=2, logits_backend=backend)
    result = fused_result(rank, inputs, config)
    if dtype == torch.float32 and backend == "scaled_exp":
        # Exponents of up to 4 * 600 * log2(e) rounded to 24 bits, twice: fp32 is for tests only.
        for part, true in zip(result, truth(inputs), strict=True):
            assert relative_error(part, true) < 2 * 3463 * 2.0**-24 * math.log(2)
    else:
        assert_close(result, inputs)


@on_ranks(2)
@SP
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_outlier_in_one_shard(rank: Rank, strategy, sp):
    """A logit of 100 that the sampled rows miss: the other shards' rows follow into its unit."""
    dtype, outlier = scaled_exp_dtype(rank), 100.0
    s = num_tokens(rank)
    inputs = make_inputs("plain", s=s, b=1, hidden_size=16, vocab=512, dtype=dtype, device=rank.device)
    inputs.hidden[..., 0] = 1.0
    inputs.weight[:, 0] = 0.0
    inputs.weight[301] = 0.0
    inputs.weight[301, 0] = outlier
    inputs.hidden[s // 2 :, 0, 0] = 0.0  # half of the tokens do not meet it
    config = FusedCEConfig(strategy=strategy, num_chunks=3, logits_backend="scaled_exp")
    result = fused_result(rank, inputs, config, sp=sp)
    if dtype == torch.float32:
        for part, true in zip(result, truth(inputs), strict=True):
            assert relative_error(part, true) < 2 * outlier * 2.0**-24
    else:
        assert_close(result, inputs)


@on_ranks(2, 4)
@SP
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_nan_of_one_token(rank: Rank, where, strategy, sp):
    """Its loss is NaN on every rank, and every other token's, and its gradient, is as without."""
    inputs = plain_inputs(rank, vocab=100)
    at = (2, 13)  # [b, s]
    inputs.weight[99, 3] = 1e38
    inputs.hidden[..., 3] = 0.0
    config = FusedCEConfig(strategy=strategy, num_chunks=3)
    clean = fused_result(rank, inputs, config, sp=sp)
    if where == "hidden":
        inputs.hidden[at[1], at[0], 5] = torch.nan
    else:
        inputs.hidden[at[1], at[0], 3] = 1e10  # inf in the last shard's logits, NaN in the sum
    broken = fused_result(rank, inputs, config, sp=sp)
    others = torch.ones(3, 24, dtype=torch.bool)
    others[at] = False
    assert torch.equal(broken.loss.isnan(), ~others.to(rank.device))
    assert torch.equal(broken.loss[others], clean.loss[others])
    # In fp32 the sums over the vocabulary are per token; grad_in_forward's scale is the whole call's.
    assert torch.equal(broken.grad_hidden[others.t()], clean.grad_hidden[others.t()])


@on_ranks(2)
@SP
def test_argmax_of_each_shard(rank: Rank, sp):
    inputs = plain_inputs(rank, s=8, b=2, vocab=100)
    hidden, weight, settings = shard_of(rank, inputs, sp, "equal")
    config = FusedCEConfig(num_chunks=3)
    out = linear_cross_entropy(
        Call(hidden, weight, inputs.labels, **settings, config=config, with_argmax=True)
    )
    expected = (inputs.hidden @ weight.t()).flatten(0, 1).max(-1)
    assert torch.equal(out.local_argmax, expected.indices)
    torch.testing.assert_close(out.local_max, expected.values)


# --- what is asked for -----------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("trained", ["hidden", "weight", "both"])
@pytest.mark.parametrize("strategy", ["recompute", "store"])
def test_frozen_operands_and_backward_twice(rank: Rank, strategy, trained):
    """Every requires_grad subset under sequence parallelism; without gradients, too."""
    inputs = plain_inputs(rank, s=8, b=2, vocab=100)
    exact = truth(inputs)
    hidden, weight, settings = shard_of(rank, inputs, True, "equal")
    hidden.requires_grad_(trained != "weight")
    weight.requires_grad_(trained != "hidden")
    settings["config"] = FusedCEConfig(strategy=strategy, num_chunks=2, debug_checks=True)
    loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, **settings)
    loss.backward(inputs.grad_loss, retain_graph=True)
    loss.backward(inputs.grad_loss)
    assert (hidden.grad is None, weight.grad is None) == (trained == "weight", trained == "hidden")
    if hidden.grad is not None:
        mine = exact.grad_hidden[tokens_of(rank, 8, True)]
        assert relative_error(hidden.grad, 2 * mine) < 2e-6
    if weight.grad is not None:
        mine = exact.grad_weight[rows_of(rank, "equal", 100)]
        assert relative_error(weight.grad, 2 * mine) < 2e-6
    with torch.no_grad():
        loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, **settings)
    assert loss.grad_fn is None
    assert relative_error(loss, exact.loss) < 2e-6


@on_ranks(1, 2)
def test_empty_batch(rank: Rank):
    hidden = torch.empty(0, 2, 8, device=rank.device, requires_grad=True)
    weight = torch.randn(5, 8, device=rank.device, requires_grad=True)
    labels = torch.empty(2, 0, dtype=torch.int64, device=rank.device)
    loss = fused_linear_cross_entropy(hidden, weight, labels, tp_group=rank.group, sequence_parallel=True)
    loss.sum().backward()
    assert loss.shape == (2, 0) and weight.grad.abs().sum() == 0


@on_ranks(2, 4)
@pairs.parametrize("other results")
def test_other_results(rank: Rank, asked, strategy, sequence_parallel, merge):
    """Beside the loss, or of a teacher's targets; all pairs of strategy, sequence parallelism and merge."""
    checks = {
        "outputs": outputs,
        "outputs without gradients": outputs_without_gradients,
        "distillation": distillation,
    }
    checks[asked](rank, strategy, sequence_parallel, merge)


def outputs(rank: Rank, strategy, sp, merge):
    """Every output and the gradients of all three, a gap of 30 between the shards' logits."""
    inputs = plain_inputs(rank)
    inputs.hidden[..., 0] = 1.0
    inputs.weight[::2, 0] += 30.0
    generator = torch.Generator().manual_seed(3)
    upstreams = {
        name: torch.randn(3, 24, generator=generator).to(rank.device)
        for name in ("log_prob", "lse", "entropy")
    }
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28, merge=merge)
    hidden, weight, settings = shard_of(rank, inputs, sp)
    made = fused_linear_token_outputs(
        hidden, weight, inputs.labels, tuple(OUTPUTS), **settings, config=config
    )
    torch.autograd.backward([getattr(made, name) for name in upstreams], list(upstreams.values()))
    same_on_all_ranks(rank, *made)
    exact, *true_grads = plain_outputs(inputs, upstreams, torch.float64)
    for name in upstreams:
        error = (getattr(made, name).detach().double() - getattr(exact, name)).abs().max()
        assert error < 2e-6 * 30, (name, error)
    assert torch.equal(made.predicted, exact.predicted)
    assert torch.equal(made.correct, exact.correct)
    assert relative_error(whole_hidden(rank, hidden.grad, sp), true_grads[0]) < 4e-6
    assert relative_error(whole_rows(rank, weight.grad), true_grads[1]) < 4e-6


def outputs_without_gradients(rank: Rank, strategy, sp, merge):
    """Beside grad_in_forward's gradients too; equal logits: the lowest id of the first shard is predicted."""
    inputs = plain_inputs(rank)
    inputs.hidden.mul_(4).round_()  # whole numbers: equal whatever the order of a shard's sums
    inputs.weight.fill_(1.0)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28, merge=merge)
    hidden, weight, settings = shard_of(rank, inputs, sp)
    settings |= {"config": config, "token_weights": inputs.grad_loss, "differentiable": False}
    made = fused_linear_token_outputs(hidden, weight, inputs.labels, tuple(OUTPUTS), **settings)
    made.loss.backward(inputs.grad_loss)
    same_on_all_ranks(rank, *made)
    assert made.predicted.max() == 0 and made.correct.all()
    assert (made.entropy - math.log(97)).abs().max() < 1e-5
    assert_close(whole(rank, made.loss, hidden, weight, sp), inputs)


@on_ranks(2)
@pytest.mark.parametrize("merge", ["packed", "all_reduce"])
def test_entropy_of_scaled_exp_shards(rank: Rank, merge):
    """A gap of 30 between the shards' logits: tiles of one shard differ in their shifts from the other's."""
    inputs = plain_inputs(rank, vocab=512, s=8)
    inputs.hidden[..., 0] = 1.0
    inputs.weight[300:, 0] += 30.0
    dtype = scaled_exp_dtype(rank)
    inputs = replace(inputs, hidden=inputs.hidden.to(dtype), weight=inputs.weight.to(dtype))
    config = FusedCEConfig(chunk_tokens=14, merge=merge, logits_backend="scaled_exp")
    hidden, weight, settings = shard_of(rank, inputs, True)
    with torch.no_grad():
        made = fused_linear_token_outputs(
            hidden, weight, inputs.labels, ("log_prob", "entropy"), **settings, config=config
        )
    same_on_all_ranks(rank, *made)
    exact, *_ = plain_outputs(inputs, {"entropy": inputs.grad_loss}, torch.float64)
    assert (made.entropy.double() - exact.entropy).abs().max() < 2e-6 * 30
    assert (made.log_prob.double() - exact.log_prob).abs().max() < 2e-6 * 30


def distillation(rank: Rank, strategy, sp, merge):
    """Entries of one id on both sides of a shard's edge, and outside of the vocabulary."""
    inputs = plain_inputs(rank)
    ids, log_probs = make_teacher(inputs, 6)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28, merge=merge)
    hidden, weight, settings = shard_of(rank, inputs, sp)
    if strategy == "grad_in_forward":
        settings["token_weights"] = inputs.grad_loss / -3.0
    loss = fused_linear_topk_distillation(hidden, weight, ids, log_probs, **settings, config=config)
    loss.backward(inputs.grad_loss)
    exact = plain_distillation(inputs, ids, log_probs, torch.float64)
    eager = plain_distillation(inputs, ids, log_probs, torch.float32)
    assert_within(whole(rank, loss, hidden, weight, sp), exact, eager, torch.float32)


# --- collectives that end early or late ------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("moment", "sp", "merge"),
    [
        (AtItsWait, False, "packed"),
        (AtItsWait, True, "packed"),
        (AtItsWait, True, "all_reduce"),
        (AtItsStart, True, "packed"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_at_their_start_or_wait(rank: Rank, strategy, moment, sp, merge):
    """Nothing that is under way is overwritten, nothing is read that has not been waited for, and no gather
    goes into a slot that is still read.
    """
    inputs = plain_inputs(rank, b=2, vocab=512)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=8, merge=merge, logits_backend="gemm_rows")
    with patch.object(parallel, "_start", lambda c, *t, beside=True, **o: moment(c, t, o)):
        result = fused_result(rank, inputs, config, sp=sp)
    assert_close(result, inputs)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_gathers_are_ahead(rank: Rank, strategy):
    """Hidden states of the first two chunks are under way before the first chunk's statistics are merged."""
    inputs = plain_inputs(rank, b=2, vocab=512)
    config = FusedCEConfig(strategy=strategy, num_chunks=4, logits_backend="gemm_rows")
    fused_result(rank, inputs, config, sp=True)  # a group's first call compares shapes besides
    with Collectives({rank.group: "tp"}) as issued:
        fused_result(rank, inputs, config, sp=True)
    size = inputs.hidden.shape[-1]
    of_hidden = [call.shapes[0][-1] == size for call in issued.calls if call.group == "tp"]
    assert of_hidden[:3] == [True, True, False]


# --- ranks that disagree ---------------------------------------------------------------------


def one_call(rank: Rank, group, **changes):
    """A small call that one rank makes with other arguments than the rest."""
    arguments = {
        "hidden": torch.ones(8, 1, 4, device=rank.device),
        "weight": torch.ones(5, 4, device=rank.device),
        "labels": torch.zeros(1, 8, dtype=torch.int64, device=rank.device),
        "tp_group": group,
        "config": FusedCEConfig(num_chunks=2),
    }
    return linear_cross_entropy(Call(**{**arguments, **changes}))


def ones(device, *shape, dtype=torch.float32):
    return torch.ones(*shape, device=device, dtype=dtype)


#: What one rank gives otherwise, and the words of every rank's error.
DIFFERENCES = {
    "outputs": (lambda device: {"outputs": ("lse", "entropy")}, "disagree on outputs: \\(\\);"),
    "tokens": (
        lambda device: {
            "hidden": ones(device, 6, 1, 4),
            "labels": ones(device, 1, 6, dtype=torch.int64),
        },
        r"disagree on hidden: float32 \[8, 1, 4\]",
    ),
    "chunking": (lambda device: {"config": FusedCEConfig(num_chunks=3)}, "disagree on"),
    "merge": (
        lambda device: {"config": FusedCEConfig(num_chunks=2, merge="all_reduce")},
        "disagree on merge",
    ),
    "z-loss": (
        lambda device: {"config": FusedCEConfig(num_chunks=2, z_loss=1e-4)},
        "disagree on z_loss",
    ),
    "temperature": (lambda device: {"temperature": 0.5}, "disagree on temperature"),
    "temperatures": (
        lambda device: {"temperature": ones(device, 1, 8)},
        "disagree on temperature",
    ),
    "reduction": (lambda device: {"reduce_grad_hidden": False}, "disagree on reduce_grad_hidden"),
    "temperature below 0": (lambda device: {"temperature": -1.0}, "above 0 and finite"),
    "bad shape": (lambda device: {"hidden": ones(device, 8, 1, 3)}, "H = 3"),
    "bad dtype": (lambda device: {"labels": ones(device, 1, 8)}, "expected int64"),
    "bad dtype of hidden": (lambda device: {"hidden": ones(device, 8, 1, 4).double()}, "has dtype"),
    "another dtype of hidden": (
        lambda device: {"hidden": ones(device, 8, 1, 4).half()},
        "expected one dtype",
    ),
    "config's type": (lambda device: {"config": "store"}, "config must be a FusedCEConfig"),
    "weights elsewhere": (lambda device: {"token_weights": ones("meta", 1, 8)}, "token_weights on meta"),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_one_rank_differs(rank: Rank, what):
    """In a group's first call, the last rank: every rank raises."""
    make, words = DIFFERENCES[what]
    changes = make(rank.device) if rank.rank == rank.size - 1 else {}
    with fresh_group(rank) as group, pytest.raises((TypeError, ValueError), match=words):
        one_call(rank, group, **changes)


@on_ranks(2)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_one_rank_differs_where_a_head_is_new(rank: Rank, what):
    """To a group that knows another head: every rank compares the new one, the bad one too."""
    make, words = DIFFERENCES[what]
    changes = make(rank.device) if rank.rank == rank.size - 1 else {}
    with fresh_group(rank) as group:
        one_call(rank, group, weight=ones(rank.device, 9, 4))
        with pytest.raises((TypeError, ValueError), match=words):
            one_call(rank, group, **changes)
        one_call(rank, group)


@on_ranks(2)
def test_a_teacher_that_is_no_tensor(rank: Rank):
    """On one rank: every rank raises."""
    hidden, weight = ones(rank.device, 8, 1, 4), ones(rank.device, 5, 4)
    ids = torch.zeros(1, 8, 2, dtype=torch.int64, device=rank.device)
    given = ids.tolist() if rank.rank else ids
    with fresh_group(rank) as group, pytest.raises((TypeError, ValueError), match="must be tensors"):
        fused_linear_topk_distillation(hidden, weight, given, ids.float(), tp_group=group)


@on_ranks(2)
@pytest.mark.parametrize("what", ["outputs", "tokens", "bad shape", "bad dtype"])
def test_one_rank_differs_later(rank: Rank, what):
    """In a later call, under debug_checks, which all ranks give."""
    make, words = DIFFERENCES[what]
    debug = {"config": FusedCEConfig(num_chunks=2, debug_checks=True)}
    changes = make(rank.device) if rank.rank == rank.size - 1 else {}
    with fresh_group(rank) as group:
        one_call(rank, group, **debug)
        with pytest.raises((TypeError, ValueError), match=words):
            one_call(rank, group, **debug, **changes)


@on_ranks(2, 4)
def test_other_shards_over_the_same_group(rank: Rank):
    """A head with unequal shards, then equal ones as small as the smallest: planned alike on every rank."""
    last = rank.size - 1
    with (
        fresh_group(rank) as group,
        patch.object(planner, "plan", wraps=planner.plan) as plan,
    ):
        for rows in (5 + 40 * rank.rank, 5, 5 + 3 * rank.rank, 9):
            one_call(rank, group, weight=torch.ones(rows, 4, device=rank.device))
    planned = [call.args[0].num_rows for call in plan.call_args_list]
    assert planned == [5 + 40 * last, 5, 5 + 3 * last, 9], planned


@on_ranks(2)
def test_shards_that_overlap(rank: Rank):
    with fresh_group(rank) as group, pytest.raises(ValueError, match="overlap"):
        one_call(rank, group, vocab_start=0)


@on_ranks(1, 2)
def test_more_real_tokens_than_rows(rank: Rank):
    """Five rows a rank."""
    with fresh_group(rank) as group:
        one_call(rank, group, config=FusedCEConfig(true_vocab_size=5 * rank.size))
    words = f"the vocabulary has {5 * rank.size} rows"
    with fresh_group(rank) as group, pytest.raises(ValueError, match=words):
        one_call(rank, group, config=FusedCEConfig(true_vocab_size=5 * rank.size + 1))


@on_ranks(2)
def test_later_calls_are_not_checked(rank: Rank):
    """After the first call nothing is compared: a changed option passes unseen, and costs no collective."""
    with fresh_group(rank) as group:
        issued = []
        for scale in (1.0, 1.0, 1.0 + rank.rank):
            config = FusedCEConfig(num_chunks=2, logit_scale=scale)
            with Collectives({group: "tp"}) as seen:
                one_call(rank, group, vocab_start=5 * rank.rank, config=config)
            issued.append([call.name for call in seen.calls])
    first, *later = issued
    assert later == [["all_gather"] * 2] * 2, issued  # a merge for each chunk
    assert len(first) > 2
