"""Calls of the head over a group that no pair of options covers: data that differs from shard to shard, other
outputs, ranks that disagree, collectives that end late.
"""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, fused_linear_token_outputs
from megatron_fused_ce.head import tokens
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.scripts.lib import reference
from megatron_fused_ce.scripts.lib.reference import make_inputs, plain_head, relative_error
from tests.support import pairs
from tests.support.losses import TABLE, assert_close, compare
from tests.support.op import (
    DTYPES,
    EXP_DTYPE,
    SIZES,
    STRATEGIES,
    collectives_run,
    rows_of,
    run,
    same_on_all_ranks,
    shard_of,
    tokens_of,
)
from tests.support.ranks import Rank, on_ranks

STRATEGY_SP = pytest.mark.parametrize(
    ("strategy", "sp"), [("store", True), ("recompute", False), ("grad_in_forward", True)]
)


def fused_result(rank: Rank, inputs, config, sp=False) -> reference.HeadResult:
    """Loss and gradients of the whole, on every rank; the upstream gradient is -3 times the token weights."""
    return run(inputs, config, rank, sp, "equal", token_weights=inputs.grad_loss / -3.0)


def assert_right(rank: Rank, result, inputs, exponents: float) -> None:
    """``exponents``: the scaled-exp GEMM's largest, rounded to 24 bits twice in the tests' fp32."""
    if exponents and rank.device.type == "cpu":
        for part, true in zip(result, plain_head(inputs, torch.float64), strict=True):
            assert relative_error(part, true) < 2 * exponents * 2.0**-24
    else:
        assert_close(result, inputs)


# --- data that differs from shard to shard ---------------------------------------------------


def with_a_column_of_ones(rank: Rank, dtype: torch.dtype) -> reference.HeadInputs:
    """In bf16 enough tokens for an error in norm: all that may be left of one is its label's entry, which two
    roundings can move by 7.8e-3. Fewer for Triton's interpreter."""
    s = 96 if rank.device.type == "cuda" else 24
    inputs = make_inputs("plain", s=s, b=1, hidden_size=16, vocab=512, dtype=dtype, device=rank.device)
    inputs.hidden[..., 0] = 1.0
    return inputs


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("backend", "gap"), [("gemm_rows", -600.0), ("scaled_exp", 600.0)])
def test_shards_600_nats_apart(rank: Rank, backend, gap, strategy):
    """The far ones vanish without NaN."""
    dtype = EXP_DTYPE if backend == "scaled_exp" else torch.float32
    inputs = with_a_column_of_ones(rank, dtype)
    for index, rows in enumerate(inputs.weight.chunk(rank.size)):
        rows[:, 0] = gap * index
    config = FusedCEConfig(strategy=strategy, num_chunks=2, logits_backend=backend)
    assert_right(rank, fused_result(rank, inputs, config), inputs, 4 * gap * (backend == "scaled_exp"))


@on_ranks(2)
@STRATEGY_SP
def test_an_outlier_in_one_shard(rank: Rank, strategy, sp):
    """A logit of 100 that the sampled rows miss: the other shards' rows follow into its unit."""
    inputs, outlier = with_a_column_of_ones(rank, EXP_DTYPE), 100.0
    inputs.weight[:, 0] = inputs.weight[301] = 0.0
    inputs.weight[301, 0] = outlier
    inputs.hidden[len(inputs.hidden) // 2 :, 0, 0] = 0.0  # half of the tokens do not meet it
    config = FusedCEConfig(strategy=strategy, num_chunks=3, logits_backend="scaled_exp")
    assert_right(rank, fused_result(rank, inputs, config, sp), inputs, outlier)


@on_ranks(2)
@STRATEGY_SP
@pytest.mark.parametrize("where", ["hidden", "weight", "upstream"])
def test_nan_of_one_token(rank: Rank, where, strategy, sp):
    """Its loss is NaN on every rank, or, where its upstream gradient is NaN and it is left out, its gradient;
    every other token's are as without."""
    inputs = make_inputs("plain", **SIZES | {"vocab": 100}, dtype=torch.float32, device=rank.device)
    at = (2, 13)  # [b, s]
    inputs.weight[99, 3] = 1e38
    inputs.hidden[..., 3] = 0.0
    inputs.grad_loss[2, 1::12] *= where != "upstream"  # a token of each part
    config = FusedCEConfig(strategy=strategy, num_chunks=3, skip_masked=where == "upstream")
    weights = inputs.grad_loss / -3.0
    result = partial(run, inputs, config, rank, sp, "equal", token_weights=weights)
    result = patch.object(tokens, "ROUND_TO", 1)(result)
    clean = result()
    if where == "hidden":
        inputs.hidden[at[1], at[0], 5] = torch.nan
    elif where == "weight":
        inputs.hidden[at[1], at[0], 3] = 1e10  # inf in the last shard's logits, NaN in the sum
    else:
        inputs.grad_loss[at] = torch.nan
    broken = result()
    others = torch.ones(3, 24, dtype=torch.bool)
    others[at] = False
    spoilt = broken.grad_hidden[..., 0].t() if where == "upstream" else broken.loss
    assert torch.equal(spoilt.isnan(), ~others.to(rank.device))
    assert torch.equal(broken.loss[others], clean.loss[others])
    # In fp32 the sums over the vocabulary are per token; grad_in_forward makes its gradients again.
    ours, right = (of.grad_hidden[others.t()] for of in (broken, clean))
    assert relative_error(ours, right) <= 1e-6 * (where == "upstream")


# --- what is asked for -----------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["recompute", "store"])
def test_frozen_operands(rank: Rank, strategy):
    """One of them under sequence parallelism, with the gradients of two backwards; without gradients, too."""
    inputs = make_inputs("plain", **SIZES | {"s": 8, "vocab": 100}, dtype=torch.float32, device=rank.device)
    exact = plain_head(inputs, torch.float64)
    mine = exact.grad_hidden[tokens_of(rank, 8, True)], exact.grad_weight[rows_of(rank, "equal", 100)]
    for trained in (0, 1, None):
        hidden, weight, settings = shard_of(rank, inputs, True, "equal")
        settings["config"] = FusedCEConfig(strategy=strategy, num_chunks=2, debug_checks=True)
        for number, operand in enumerate((hidden, weight)):
            operand.requires_grad_(number == trained)
        loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, **settings)
        assert relative_error(loss, exact.loss) < 2e-6
        assert (loss.grad_fn is None) == (trained is None)
        if trained is not None:
            loss.backward(inputs.grad_loss, retain_graph=True)
            loss.backward(inputs.grad_loss)
            grads = [hidden.grad, weight.grad]
            assert grads[1 - trained] is None
            assert relative_error(grads[trained], 2 * mine[trained]) < 2e-6


@on_ranks(1, 2)
def test_empty_batch(rank: Rank):
    hidden = torch.empty(0, 2, 8, device=rank.device, requires_grad=True)
    weight = torch.randn(5, 8, device=rank.device, requires_grad=True)
    labels = torch.empty(2, 0, dtype=torch.int64, device=rank.device)
    loss = fused_linear_cross_entropy(hidden, weight, labels, tp_group=rank.group, sequence_parallel=True)
    loss.sum().backward()
    assert loss.shape == (2, 0) and weight.grad.abs().sum() == 0


@on_ranks(2)
@pairs.parametrize(
    {
        "asked": ("every output", "5 entries", "terms: users' own", "terms: several labels"),
        "strategy": STRATEGIES,
        "sp": (False, True),
        "merge": ("packed", "all_reduce"),
        "dtype": DTYPES[:2],
    }
)
def test_other_results(rank: Rank, asked, strategy, sp, merge, dtype):
    """Every output beside the loss; a teacher's targets; sums of terms."""
    inputs = make_inputs("odd-labels", **SIZES, dtype=dtype, device=rank.device)
    compare(TABLE[asked], inputs, strategy, rank, sp, merge=merge)


@on_ranks(2)
@pytest.mark.parametrize("merge", ["packed", "all_reduce"])
def test_equal_logits(rank: Rank, merge):
    """The lowest id of the first shard is predicted."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=rank.device)
    inputs.hidden.mul_(4).round_()  # whole numbers: equal whatever the order of a shard's sums
    inputs.weight.fill_(1.0)
    hidden, weight, settings = shard_of(rank, inputs, True)
    settings["config"] = FusedCEConfig(chunk_tokens=28, merge=merge)
    made = fused_linear_token_outputs(hidden, weight, inputs.labels, tuple(OUTPUTS), **settings)
    same_on_all_ranks(rank, *made)
    assert made.predicted.max() == 0 and made.correct.all()
    assert (made.entropy - math.log(97)).abs().max() < 1e-5


# --- collectives that end early or late ------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("at", "sp", "merge"),
    [("wait", False, "packed"), ("wait", True, "all_reduce"), ("start", True, "packed")],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_at_their_start_or_wait(rank: Rank, strategy, at, sp, merge):
    """Nothing that is under way is overwritten, nothing is read that has not been waited for, and no gather
    goes into a slot that is still read. Random delays: test_distillation.py."""
    inputs = make_inputs("plain", **SIZES | {"b": 2, "vocab": 512}, dtype=torch.float32, device=rank.device)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=8, merge=merge, logits_backend="gemm_rows")
    with collectives_run(at):
        result = fused_result(rank, inputs, config, sp)
    assert_close(result, inputs)
