"""The head over a tensor-parallel group against the definition in fp64, in calls where all pairs meet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import ReturnedGradWeight
from megatron_fused_ce.scripts.lib.reference import HeadResult, assert_within, make_inputs, plain_head, truth
from tests.support import head, pairs
from tests.support.head import SIZES, rows_of, same_on_all_ranks, scaled_exp_dtype, strategy_in_place
from tests.support.op import STRATEGIES
from tests.support.problems import open_main_grad
from tests.support.ranks import Rank, on_ranks

#: What a case has unless it says otherwise.
USUAL = {
    "option": "plain",
    "kind": "plain",
    "dtype": "float32",
    "grad_weight": "returned",
    "vocab_start": "given",
    "tokens": "[s, b, H]",
    "strategy": "recompute",
    "backend": "gemm_rows",
    "sequence_parallel": False,
    "merge": "packed",
    "shards": "equal",
    "skip_masked": False,
    "chunk_tokens": 20,
}


def name_of(case: dict[str, Any]) -> str:
    """What is not as usual."""
    sayings = {
        "sequence_parallel": "sp",
        "skip_masked": "skip",
        "chunk_tokens": "chunks of {}",
    }
    words = []
    for axis, value in case.items():
        if value is not False and (axis == "strategy" or value != USUAL[axis]):
            words.append(sayings.get(axis, "{}").format(value))
    return ", ".join(words)


def cases(size: str) -> list[Any]:
    return [pytest.param(case, id=name_of(case)) for case in pairs.rows_of(size)]


@on_ranks(2)
@pytest.mark.parametrize("case", cases("2 ranks"))
def test_pairs(rank: Rank, case):
    against_fp64(rank, **case)


@on_ranks(4)
@pytest.mark.parametrize("case", cases("4 ranks"))
def test_pairs_of_four(rank: Rank, case):
    against_fp64(rank, **case)


@on_ranks(2)
def test_one_position_a_rank(rank: Rank):
    """Ignored labels of several sequences then lie in another order than the losses."""
    labels = torch.arange(3 * rank.size).view(3, rank.size).to(rank.device)
    hidden = torch.randn(1, 3, 16, device=rank.device)
    weight = torch.randn(16, 16, device=rank.device)
    config = FusedCEConfig(ignore_index=1)
    loss = linear_cross_entropy(
        Call(hidden, weight, labels, tp_group=rank.group, sequence_parallel=True, config=config)
    ).loss
    assert torch.equal(loss == 0, labels == 1)


@on_ranks(1)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_of_one(rank: Rank, strategy, sequence_parallel):
    """The op without a group is tests/op's."""
    against_fp64(rank, strategy=strategy, sequence_parallel=sequence_parallel)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_last_chunk_of_one_token_a_rank(rank: Rank, strategy):
    """What is cut out for it lies in memory as far apart as the ranks' parts."""
    # On a CPU both numbers are halved: see `fewer`.
    chunk_tokens = SIZES["s"] * SIZES["b"] - (2 if rank.device.type == "cuda" else 4)
    changes = {"backend": "scaled_exp", "sequence_parallel": True, "chunk_tokens": chunk_tokens}
    against_fp64(rank, strategy=strategy, **changes)


def against_fp64(rank: Rank, **changes: Any) -> None:
    """One call, and its backward, of a case: ``USUAL`` with changes."""
    case = {**USUAL, **changes}
    scaled_exp, equal = case["backend"] == "scaled_exp", case["shards"] == "equal"
    vocab = 512 if scaled_exp else 100 if equal else 97
    options = dict(pairs.OPTIONS[case["option"]])
    if scaled_exp and "true_vocab_size" in options:
        options["true_vocab_size"] = 200
    dtype = scaled_exp_dtype(rank) if scaled_exp else getattr(torch, case["dtype"])
    # Half the tokens, in chunks of half as many, for Triton's interpreter.
    fewer = 2 if scaled_exp and rank.device.type == "cpu" else 1
    sizes = {**SIZES, "vocab": vocab, "s": SIZES["s"] // fewer}
    scale = options.get("logit_scale", 1.0)
    inputs = make_inputs(case["kind"], **sizes, dtype=dtype, device=rank.device, logit_scale=scale)
    skipped = torch.zeros_like(inputs.labels, dtype=torch.bool)
    if case["skip_masked"]:
        # Other numbers of tokens in each rank's part, in one of four none at all.
        quarter = skipped.shape[1] // 4
        skipped[:, :quarter], skipped[0, 2 * quarter - 2 :: 2] = True, True
        inputs.grad_loss.masked_fill_(skipped, 0.0)
    weights = inputs.grad_loss / -3.0
    with strategy_in_place(case["strategy"]) as strategy:
        config = FusedCEConfig(
            strategy=strategy,
            chunk_tokens=case["chunk_tokens"] // fewer,
            logits_backend=case["backend"],
            merge=case["merge"],
            skip_masked=case["skip_masked"],
            **options,
        )
        inputs = replace(inputs, config=config)
        exact, eager = truth(inputs), plain_head(inputs, dtype)
        result, earlier = call(rank, case, inputs, weights, exact)
    loss = torch.where(skipped, 0.0, exact.loss)
    exact = HeadResult(loss, exact.grad_hidden, exact.grad_weight + earlier)
    eager = HeadResult(eager.loss.where(~skipped, 0.0), eager.grad_hidden, eager.grad_weight + earlier)
    if case["grad_weight"] == "frozen":
        result = result._replace(grad_weight=exact.grad_weight)
    assert_within(result, exact, eager, dtype)
    at = skipped.t()
    assert torch.equal(result.grad_hidden[at], torch.zeros_like(result.grad_hidden[at]))


def call(
    rank: Rank, case: dict[str, Any], inputs: Any, weights: torch.Tensor, exact: HeadResult
) -> tuple[HeadResult, Any]:
    """The whole result, on every rank, and what was in ``main_grad`` before."""
    rows = rows_of(rank, case["shards"], inputs.weight.shape[0])
    s, b, _ = inputs.hidden.shape
    hidden = inputs.hidden[head.tokens_of(rank, s, case["sequence_parallel"])].clone().requires_grad_()
    weight = inputs.weight[rows].clone().requires_grad_(case["grad_weight"] != "frozen")
    given, labels = hidden, inputs.labels
    if case["tokens"] == "[T, H]":
        given, labels, weights = hidden.flatten(0, 1), labels.t().reshape(-1), weights.t().flatten()
    main_grad, opened = None, ReturnedGradWeight
    earlier: Any = 0.0
    if "main_grad" in case["grad_weight"]:
        # Of an earlier micro-batch.
        dtype = weight.dtype if "low" in case["grad_weight"] else torch.float32
        earlier = exact.grad_weight.roll(1, 0).to(dtype)
        main_grad = earlier[rows].clone()
        opened = partial(open_main_grad, main_grad)
    with patch.object(tokens, "ROUND_TO", 4):
        loss = linear_cross_entropy(
            Call(
                given,
                weight,
                labels,
                tp_group=rank.group,
                sequence_parallel=case["sequence_parallel"],
                vocab_start=rows.start if case["vocab_start"] == "given" else None,
                config=inputs.config,
                token_weights=weights,
                open_grad_weight=opened,
            )
        ).loss
        if case["tokens"] == "[T, H]":
            loss = loss.view(s, b).t()
        loss.backward(inputs.grad_loss)
    same_on_all_ranks(rank, loss)
    assert weight.grad is None or main_grad is None
    of_weight = weight.grad if main_grad is None else main_grad
    return HeadResult(
        loss.detach(),
        head.whole_hidden(rank, hidden.grad, case["sequence_parallel"]),
        head.whole_rows(rank, weight if of_weight is None else of_weight),
    ), earlier


# --- the list of calls -----------------------------------------------------------------------


@pytest.mark.parametrize("size", pairs.AXES)
def test_all_pairs_meet(size):
    met = {pair for row in pairs.rows_of(size) for pair in pairs.pairs_of(row)}
    wanted = set(pairs.all_pairs(pairs.AXES[size]))
    assert met == wanted, f"missing {wanted - met}, not allowed {met - wanted}"
