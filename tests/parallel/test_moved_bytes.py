"""The bytes that a head says it sends, counted again from its sizes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.phases import PhaseTimes
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks

S, B, H, V, CHUNKS, FP32 = 16, 1, 8, 32, 2, 4


@on_ranks(2, 4)
@pytest.mark.parametrize("merge", ["packed", "all_reduce"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moved_bytes(rank: Rank, strategy, sequence_parallel, merge):
    sizes = {"s": S, "b": B, "hidden_size": H, "vocab": V}
    inputs = make_inputs("odd-labels", **sizes, dtype=torch.float32, device=rank.device)
    parts = inputs.hidden.chunk(rank.size) if sequence_parallel else [inputs.hidden] * rank.size
    times = PhaseTimes()
    made = linear_cross_entropy(
        parts[rank.rank].clone().requires_grad_(),
        inputs.weight.chunk(rank.size)[rank.rank].clone().requires_grad_(),
        inputs.labels,
        tp_group=rank.group,
        sequence_parallel=sequence_parallel,
        token_weights=inputs.grad_loss if strategy == "grad_in_forward" else None,
        config=FusedCEConfig(strategy=strategy, num_chunks=CHUNKS, merge=merge),
        phases=times,
    )
    made.loss.backward(inputs.grad_loss)
    tokens, others = S * B, rank.size - 1
    of_hidden = tokens * H * FP32 // rank.size * others  # gathered or scattered once
    gradients = "forward" if strategy == "grad_in_forward" else "backward"
    expected = Counter()
    # All-gather: four statistics to each other rank; all-reduce: each of five sums there and back.
    expected["forward-merge"] = {
        "packed": 4 * tokens * FP32 * others,
        "all_reduce": 2 * 5 * tokens * FP32 * others // rank.size,
    }[merge]
    expected[f"{gradients}-reduce"] = of_hidden if sequence_parallel else 2 * of_hidden
    if sequence_parallel:
        expected["forward-gather"] = of_hidden
        if strategy != "grad_in_forward":  # the last chunk's were kept
            expected["backward-gather"] = of_hidden * (CHUNKS - 1) // CHUNKS
    tallies = times.read()
    found = {name: tally.moved_bytes for name, tally in tallies.items() if tally.moved_bytes}
    totals = {of_pass: found.pop(of_pass, 0) for of_pass in ("forward", "backward")}
    assert found == expected, (found, expected)
    for of_pass, total in totals.items():
        assert total == sum(found[name] for name in found if name.startswith(of_pass))
    assert all(tallies[name].seconds > 0 for name in found)
