"""Tokens outside an active mask, over two ranks; on one: tests/op."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.head import tokens
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support.head import SIZES, same_on_all_ranks, shard_of, whole_hidden, whole_rows
from tests.support.op import gemm_flops
from tests.support.ranks import Rank, on_ranks

NUM_CHUNKS = 3


def some_tokens(what: str, inputs) -> torch.Tensor:
    """Which count, bool ``[b, s]``: a third in every part, all of the last part and a few others, or none."""
    counts = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    if what == "one part whole":
        counts[:, : counts.shape[1] // 2] &= counts[:, : counts.shape[1] // 2].roll(1, 1)
        counts[:, counts.shape[1] // 2 :] = True
    elif what == "none":
        counts[:] = False
    return counts.to(inputs.labels.device)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("what", ["a third", "one part whole", "none"])
def test_an_active_mask(rank: Rank, what, sp, dtype):
    """Neither pass works on more tokens than the fullest part has. A gradient outside, on one rank, raises on
    all."""
    inputs = make_inputs("odd-labels", **SIZES, dtype=dtype, device=rank.device)
    parts = rank.size if sp else 1
    active = some_tokens(what, inputs)
    upstreams = {"log_prob": inputs.grad_loss, "entropy": inputs.grad_loss.roll(1, 1)}
    upstreams = {name: grad.masked_fill(~active, 0.0) for name, grad in upstreams.items()}
    hidden, weight, settings = shard_of(rank, inputs, sp)
    forward = partial(
        token_log_probs,
        hidden,
        weight,
        inputs.labels,
        entropy="differentiable",
        active_mask=active,
        config=FusedCEConfig("recompute", num_chunks=NUM_CHUNKS),
        **settings,
    )
    with patch.object(tokens, "ROUND_TO", 1), gemm_flops() as flops:
        made = forward()
        torch.autograd.backward([made.log_prob, made.entropy], list(upstreams.values()))
    worked_on = parts * int(active.t().reshape(parts, -1).sum(1).max())
    assert flops.get_total_flops() == 4 * worked_on * 2 * weight.numel()
    same_on_all_ranks(rank, *made)
    (exact, *true), (eager, *plain) = (plain_outputs(inputs, upstreams, of) for of in (torch.float64, dtype))
    ours = whole_hidden(rank, hidden.grad, sp), whole_rows(rank, weight.grad)
    pairs = list(zip(ours, true, plain, strict=True))
    for name in upstreams:
        values = (getattr(of, name).detach() for of in (made, exact, eager))
        pairs.append(tuple(value.masked_fill(~active, 0.0) for value in values))
        assert not getattr(made, name)[~active].any()
    for value, right, of_eager in pairs:
        assert relative_error(value, right) <= max(FLOOR[dtype], 2 * relative_error(of_eager, right))
    outside = torch.zeros_like(inputs.grad_loss)
    if rank.rank == 0:
        outside[tuple((~active).nonzero()[0])] = 1e-20
    with pytest.raises(RuntimeError, match=r"^1 tokens were left out .outside active_mask"):
        forward().entropy.backward(outside)


@on_ranks(2)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("what", ["active_mask", "several labels", "token_weights"])
def test_masks_that_differ(rank: Rank, what, sp):
    """As many tokens on each rank, but others: their statistics would be merged. In every call."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=rank.device)
    hidden, weight, settings = shard_of(rank, inputs, sp)
    active = some_tokens("a third", inputs)
    labels = inputs.labels.unsqueeze(-1) if what == "several labels" else inputs.labels

    def call(mask):
        if what == "token_weights":
            config = FusedCEConfig(skip_masked=True)
            fused_linear_cross_entropy(
                hidden, weight, labels, token_weights=mask.float(), config=config, **settings
            )
        else:
            token_log_probs(hidden, weight, labels, active_mask=mask, **settings)

    call(active)
    of_rank = active.clone()
    if rank.rank == 0:
        of_rank[tuple(active.nonzero()[-1])] = False
        of_rank[tuple((~active).nonzero()[0])] = True
    with pytest.raises(ValueError, match="leave out different tokens: 2 are masked on one"):
        call(of_rank)
    call(active)
