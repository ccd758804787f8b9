"""Several labels a token over a tensor-parallel group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.ranks.agreement import RankDisagreement
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_several, relative_error
from tests.support.head import SIZES, same_on_all_ranks, shard_of, whole_hidden, whole_rows
from tests.support.ranks import Rank, on_ranks

#: Number of labels, sequence parallelism, whether ``grad_hidden`` is summed here, dtype, options.
CALLS = {
    "one": (1, False, True, torch.float32, {}),
    "five, parts": (5, True, True, torch.float32, {"merge": "all_reduce"}),
    "five, partial": (5, False, False, torch.float32, {"logit_softcap": 5.0}),
    "bf16": (5, False, True, torch.bfloat16, {}),
    "bf16, parts": (64, True, True, torch.bfloat16, {"logit_softcap": 5.0}),
    "many, parts": (300, True, True, torch.float32, {"true_vocab_size": 90}),
}


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["store", "recompute"])
@pytest.mark.parametrize("call", CALLS)
def test_against_fp64(rank: Rank, call, strategy):
    """Shards of unequal sizes, tokens sure of a label of either, ids twice, of one shard alone, of none."""
    count, sp, reduces, dtype, options = CALLS[call]
    inputs = make_inputs("peaked", **SIZES, dtype=dtype, device=rank.device)
    b, s = inputs.labels.shape
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 97, (b, s, count), generator=generator).to(rank.device)
    labels[:, ::2, 0] = inputs.labels[:, ::2]
    labels[:, 1::5] = labels[:, 1::5] % 33  # of the first rank alone
    labels[:, 2::5, -1] = labels[:, 2::5, 0]
    labels[:, 3::5, count // 2] = 97
    labels[:, 4::5, count // 2 :] = -1
    labels[:, 6] = -1
    upstream = torch.randn(labels.shape, generator=generator).to(rank.device)
    temperature = inputs.grad_loss.abs() + 0.5
    of_entropy = inputs.grad_loss.roll(1, 1)
    hidden, weight, settings = shard_of(rank, inputs, sp)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28, debug_checks=True, **options)
    made = token_log_probs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        entropy="differentiable",
        reduce_grad_hidden=reduces,
        config=config,
        **settings,
    )
    torch.autograd.backward([made.log_prob, made.entropy], [upstream, of_entropy])
    same_on_all_ranks(rank, *made)
    if not reduces:
        dist.all_reduce(hidden.grad, group=rank.group)
    inputs = replace(inputs, config=config, temperature=temperature)
    exact, eager = (
        plain_several(inputs, labels, upstream, precision, of_entropy) for precision in (torch.float64, dtype)
    )
    given = labels != -1
    assert (made.log_prob[~given] == -torch.inf).all()
    assert relative_error(made.log_prob.detach()[given], exact[0][given]) < 4e-6
    assert relative_error(made.entropy.detach(), exact[1]) < 1e-5
    found = whole_hidden(rank, hidden.grad, sp), whole_rows(rank, weight.grad)
    for ours, rough, true in zip(found, eager[2:], exact[2:], strict=True):
        assert relative_error(ours, true) < max(2 * FLOOR[dtype], 2 * relative_error(rough, true))


@on_ranks(2)
def test_ranks_with_different_numbers_of_labels(rank: Rank):
    """An error on both, not a collective that never ends; as with what one rank alone has wrong."""
    hidden = torch.ones(3, 4, device=rank.device, requires_grad=True)
    labels = torch.zeros(3, 2 + rank.rank, dtype=torch.int64, device=rank.device)
    with pytest.raises(
        RankDisagreement, match=r"disagree on labels or teacher: labels int64 \[3, 2\]; labels int64 \[3, 3\]"
    ):
        token_log_probs(hidden, hidden, labels, tp_group=rank.group)
    wrong = labels[:, : 2 * rank.rank]
    with pytest.raises(ValueError, match=r"expected \[\.\., K\] with K of 1"):
        token_log_probs(hidden, hidden, wrong, tp_group=rank.group)
