"""The bytes that a head sends, from the collectives it issued, against its sizes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.scripts.lib.collectives import Collective, Collectives
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks

S, B, H, V, CHUNKS, FP32 = 16, 1, 12, 32, 2, 4


def sent(calls: list[Collective], size: int) -> Counter:
    """Bytes that a rank sends in a ring, as nccl-tests count them. The ranks' agreement and verdict, a few
    int64, are left out."""
    found: Counter = Counter()
    for call in calls:
        if call.dtype != "float32":
            continue
        whole = max(map(math.prod, call.shapes)) * FP32 * (size - 1) // size
        of = "hidden" if call.shapes[0][-1] == H else "statistics"
        found[f"{call.name} of {of}"] += whole * (2 if call.name == "all_reduce" else 1)
    return found


@on_ranks(2, 4)
@pytest.mark.parametrize("merge", ["packed", "all_reduce"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moved_bytes(rank: Rank, strategy, sequence_parallel, merge):
    sizes = {"s": S, "b": B, "hidden_size": H, "vocab": V}
    inputs = make_inputs("odd-labels", **sizes, dtype=torch.float32, device=rank.device)
    parts = inputs.hidden.chunk(rank.size) if sequence_parallel else [inputs.hidden] * rank.size
    with Collectives({rank.group: "tp"}) as forward:
        loss = fused_linear_cross_entropy(
            parts[rank.rank].clone().requires_grad_(),
            inputs.weight.chunk(rank.size)[rank.rank].clone().requires_grad_(),
            inputs.labels,
            tp_group=rank.group,
            sequence_parallel=sequence_parallel,
            token_weights=inputs.grad_loss if strategy == "grad_in_forward" else None,
            config=FusedCEConfig(strategy=strategy, num_chunks=CHUNKS, merge=merge),
        )
    with Collectives({rank.group: "tp"}) as backward:
        loss.backward(inputs.grad_loss)
    tokens, others = S * B, rank.size - 1
    of_hidden = tokens * H * FP32 // rank.size * others  # gathered or scattered once
    in_forward, in_backward = Counter(), Counter()
    # All-gather: four statistics to each other rank; all-reduce: each of five there and back.
    if merge == "packed":
        in_forward["all_gather of statistics"] = 4 * tokens * FP32 * others
    else:
        in_forward["all_reduce of statistics"] = 2 * 5 * tokens * FP32 * others // rank.size
    of_gradients = in_forward if strategy == "grad_in_forward" else in_backward
    if sequence_parallel:
        of_gradients["reduce_scatter of hidden"] = of_hidden
        in_forward["all_gather of hidden"] = of_hidden
        if strategy != "grad_in_forward":  # the last chunk's were kept
            in_backward["all_gather of hidden"] = of_hidden * (CHUNKS - 1) // CHUNKS
    else:
        of_gradients["all_reduce of hidden"] = 2 * of_hidden
    assert sent(forward.calls, rank.size) == in_forward
    assert sent(backward.calls, rank.size) == in_backward
