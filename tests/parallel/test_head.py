"""The head over a tensor-parallel group against the definition in fp64, in calls where all pairs meet."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens as head_tokens
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.scripts.lib.reference import plain_head
from tests.support import pairs
from tests.support.losses import assert_within
from tests.support.op import EXP_DTYPE, SIZES, STRATEGIES, sizes_of, strategy_in_place, whole
from tests.support.problems import DrawnProblem, run
from tests.support.ranks import Rank, on_ranks

TWO, FOUR = pairs.cases(pairs.AXES), pairs.cases(pairs.LAYOUT)


@on_ranks(2)
@pytest.mark.parametrize("case", TWO)
def test_pairs(rank: Rank, case):
    against_fp64(rank, **TWO[case])


@on_ranks(4)
@pytest.mark.parametrize("case", FOUR)
def test_pairs_of_four(rank: Rank, case):
    against_fp64(rank, **FOUR[case])


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


def against_fp64(
    rank: Rank, *, option="plain", kind="plain", dtype=torch.float32, grad_weight="returned",
    vocab_start="given", tokens="[s, b, H]", strategy="recompute", backend="gemm_rows",
    sequence_parallel=False, merge="packed", shards="equal", skip_masked=False, chunk_tokens=20,
) -> None:  # fmt: skip
    """One call, and its backward."""
    vocab = 512 if backend == "scaled_exp" else 100 if shards == "equal" else 97
    options, fewer = {"ignore_index": None, **pairs.OPTIONS[option]}, 1
    if backend == "scaled_exp":
        options |= {"true_vocab_size": 200} if "true_vocab_size" in options else {}
        # Half the tokens, in chunks of half as many, for Triton's interpreter.
        dtype, fewer = EXP_DTYPE, 2 if rank.device.type == "cpu" else 1
    with strategy_in_place(strategy) as strategy, patch.object(head_tokens, "ROUND_TO", 4):
        options |= {"chunk_tokens": chunk_tokens // fewer, "logits_backend": backend, "merge": merge}
        problem = DrawnProblem(
            seed=0, s=SIZES["s"] // fewer, b=3, hidden_size=32, shards=sizes_of(rank, shards, vocab),
            dtype=dtype, values=kind, flat=tokens == "[T, H]", grad_weight=grad_weight, log2_promise=2,
            sequence_parallel=sequence_parallel, names_start=vocab_start == "given",
            config=FusedCEConfig(strategy, skip_masked=skip_masked, **options),
        )  # fmt: skip
        inputs = problem.inputs(rank.device)
        skipped = torch.zeros_like(inputs.labels, dtype=torch.bool)
        if skip_masked:
            # Other numbers of tokens in each rank's part, in one of four none at all.
            skipped[:, : problem.s // 4], skipped[0, 2 * (problem.s // 4) - 2 :: 2] = True, True
            inputs.grad_loss.masked_fill_(skipped, 0.0)
        exact, eager = (plain_head(inputs, of) for of in (torch.float64, dtype))
        earlier = exact.grad_weight.roll(1, 0) * ("main_grad" in grad_weight)  # of an earlier micro-batch
        earlier = earlier.to(dtype if "low" in grad_weight else torch.float32)
        made = run(problem, inputs=inputs, rank=rank.rank, group=rank.group, earlier=earlier)
    made = whole(rank, sequence_parallel, made)
    exact, eager = (
        of._replace(loss=of.loss.where(~skipped, 0.0), grad_weight=of.grad_weight + earlier)
        for of in (exact, eager)
    )
    assert_within(made, exact, eager, dtype)
    assert not made["grad_hidden"][skipped.t()].any()
