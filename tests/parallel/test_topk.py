"""The likeliest ids from hidden states, over one rank and several, against the definition in fp64."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_topk
from megatron_fused_ce.head import tokens as head_tokens
from megatron_fused_ce.scripts.lib.reference import FLOOR, relative_error
from tests.support.op import gemm_flops, rows_of, same_on_all_ranks, tokens_of
from tests.support.ranks import Rank, on_ranks

S, B, H, V = 24, 3, 8, 97

#: ids asked for, options of the config, temperature, dtype, sequence parallelism.
CALLS: dict[str, tuple[int, dict[str, Any], str, torch.dtype, bool]] = {
    "one": (1, {}, "number", torch.float32, False),
    "more than a rank has": (60, {}, "number", torch.bfloat16, True),
    "the whole vocabulary": (V, {"chunk_tokens": 99}, "per token", torch.float32, True),
    "softcap, scale below 0": (
        *(5, {"logit_softcap": 30.0, "logit_scale": -0.75}),
        *("per token", torch.float32, False),
    ),
    "a rank of padding": (40, {"true_vocab_size": 40}, "per sequence", torch.float16, True),
    "padding, rounded": (
        *(7, {"true_vocab_size": 90, "logit_precision": "activations"}),
        *("tensor", torch.bfloat16, False),
    ),
}


def operands(rank: Rank, dtype: torch.dtype = torch.float32):
    """Small whole numbers: products are exact in every dtype and order, and many logits are equal."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randint(-2, 3, size, generator=generator) for size in ((S, B, H), (V, H)))
    return hidden.to(rank.device, dtype), weight.to(rank.device, dtype)


def likeliest(hidden, weight, k, config, temperature):
    """``[b, s, k]`` by the definition; ``temperature [b, s]``."""
    z = config.logit_scale * (hidden.double() @ weight.double().t())[..., : config.true_vocab_size]
    cap = config.logit_softcap
    z = (z if cap is None else cap * torch.tanh(z / cap)).transpose(0, 1)
    ids = z.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return (z / temperature.double().unsqueeze(-1)).log_softmax(-1).gather(-1, ids), ids


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("call", CALLS)
def test_against_fp64(rank: Rank, call):
    """Shards of unequal sizes, one of a single row; a last chunk that is shorter; ids equal one by one."""
    k, options, kind, dtype, sp = CALLS[call]
    hidden, weight = operands(rank, dtype)
    config = FusedCEConfig(**{"chunk_tokens": 28, **options})
    temperature: Any = torch.full((B, S), 0.7, device=rank.device)
    if kind == "per token":
        temperature = 0.5 + torch.rand(B, S, generator=torch.Generator().manual_seed(2)).to(rank.device)
    elif kind == "per sequence":
        temperature = torch.tensor([0.5, 1.0, 2.0], device=rank.device).unsqueeze(-1).expand(B, S)
    given = {"number": 0.7, "tensor": temperature[0, 0], "per sequence": temperature[:, 0]}.get(
        kind, temperature
    )
    made, ids = fused_linear_topk(
        hidden[tokens_of(rank, S, sp)],
        weight[rows_of(rank, "unequal", V)],
        k,
        temperature=given,
        batch_first=False,
        tp_group=rank.group,
        sequence_parallel=sp,
        config=config,
    )
    true, true_ids = likeliest(hidden, weight, k, config, temperature)
    same_on_all_ranks(rank, made, ids)
    assert (made.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert made.is_contiguous() and ids.is_contiguous()
    assert torch.equal(ids, true_ids), call
    assert relative_error(made, true) < FLOOR[torch.float32], call


@on_ranks(1, 2)
def test_rows_without_a_softmax(rank: Rank):
    """NaN, +inf, all -inf: NaN and ids -1, of that row alone. -inf beside numbers is a probability of 0, and
    -0.0 is 0.0."""
    hidden = torch.eye(5, H, device=rank.device)
    weight = torch.zeros(10, H, device=rank.device)
    weight[:4, 0], weight[4:, 0] = torch.arange(4.0), -torch.inf
    weight[7, 1], weight[3, 2], weight[:, 3], weight[::2, 4] = torch.nan, torch.inf, -torch.inf, -0.0
    logits = torch.stack([weight[:, column] for column in range(5)])
    # A product of 0 and inf is NaN: logits as they are, one column of the weight each.
    rows = slice(rank.rank * 10 // rank.size, (rank.rank + 1) * 10 // rank.size)

    def write(x, w, out):
        out.copy_(logits[:, rows])

    with patch("megatron_fused_ce.ops.topk.write_logits", write):
        made, ids = fused_linear_topk(hidden, weight[rows], 7, tp_group=rank.group)
    same_on_all_ranks(rank, made, ids)
    assert ids[0].tolist() == [3, 2, 1, 0, 4, 5, 6] and ids[4].tolist() == [*range(7)]
    torch.testing.assert_close(made[[0, 4]], logits[[0, 4]].log_softmax(-1).topk(7).values)
    assert made[1:4].isnan().all() and ids[1:4].tolist() == [[-1] * 7] * 3


@on_ranks(2)
@pytest.mark.parametrize("sp", [False, True])
def test_tokens_outside_the_active_mask_cost_no_gemm(rank: Rank, sp):
    """Of one sequence most are outside: the parts have different numbers of tokens."""
    hidden, weight = operands(rank)
    active = torch.rand(B, S, generator=torch.Generator().manual_seed(1)).to(rank.device) < 0.4
    active[:, : S // 2] &= active[:, S // 2 :]
    options = {"tp_group": rank.group, "sequence_parallel": sp, "config": FusedCEConfig(chunk_tokens=14)}
    given = hidden[tokens_of(rank, S, sp)].transpose(0, 1), weight[rows_of(rank, "unequal", V)], 4
    right, right_ids = fused_linear_topk(*given, batch_first=True, **options)
    with patch.object(head_tokens, "ROUND_TO", 1), gemm_flops() as flops:
        made, ids = fused_linear_topk(*given, batch_first=True, active_mask=active, **options)
    parts = active.chunk(rank.size if sp else 1, dim=1)
    tokens = len(parts) * max(int(part.sum()) for part in parts)
    assert flops.get_total_flops() == 2 * tokens * given[1].numel()
    assert torch.equal(ids, right_ids.masked_fill(~active.unsqueeze(-1), -1))
    assert torch.equal(made, right.masked_fill(~active.unsqueeze(-1), -torch.inf))


@pytest.mark.parametrize(("vocab", "k"), [(4203, 40), (2048, 3)])
def test_blocks_of_many_columns(vocab, k, device):
    """Equal logits in every block, as many as asked for and more."""
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = (
        torch.randint(-1, 2, (n, H), generator=generator).to(device).float() for n in (9, vocab)
    )
    made, ids = fused_linear_topk(hidden, weight, k)
    logits = hidden.double() @ weight.double().t()
    assert torch.equal(ids, logits.argsort(dim=-1, descending=True, stable=True)[:, :k])
    assert relative_error(made, logits.log_softmax(-1).gather(1, ids)) < FLOOR[torch.float32]
