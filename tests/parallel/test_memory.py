"""The bytes that the planner predicts of a forward and a backward, against those that a call holds."""

from __future__ import annotations

import gc
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.planner import memory
from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.scripts.lib.live_storages import LiveStorages
from tests.support.op import EXP_DTYPE, STRATEGIES
from tests.support.ranks import Rank, on_ranks

#: Logits of a chunk are most of it, hidden states the next: each buffer more is seen.
#: On a GPU a chunk has twice the tokens: the tables of its kernels have 8 KiB, whatever the chunk.
H, V, C = 192, 384, 96 if torch.cuda.is_available() else 48
CASES: dict[str, dict[str, Any]] = {
    "": {},
    "sp": {"sp": True},
    "one chunk, sp": {"sp": True, "num_chunks": 1},
    "frozen weight, sp": {"sp": True, "trained": False},
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("backend", "case"), [*(("gemm_rows", case) for case in CASES), ("scaled_exp", ""), ("scaled_exp", "sp")]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes(rank: Rank, strategy, backend, case):
    """Of a forward and of a backward, that of grad_in_forward for another upstream gradient than promised."""
    # Row kernels in plain PyTorch work in copies of fewer rows than a chunk has.
    with patch.object(rows_torch, "BLOCK_ELEMENTS", V):
        peaks_are_as_predicted(rank, strategy, backend, **CASES[case])


def peaks_are_as_predicted(rank: Rank, strategy, backend, sp=False, num_chunks=4, trained=True) -> None:
    dtype, num_tokens, parts = EXP_DTYPE, num_chunks * C, rank.size if sp else 1
    generator = torch.Generator().manual_seed(rank.rank)
    hidden, weight = (
        torch.randn(size, H, generator=generator).to(rank.device, dtype) for size in (num_tokens // parts, V)
    )
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    # The same on every rank.
    labels = torch.arange(num_tokens, device=rank.device) % (rank.size * V)
    weights = torch.rand(num_tokens, generator=torch.Generator().manual_seed(9)).to(rank.device)
    config = FusedCEConfig(strategy, chunk_tokens=C, logits_backend=backend, merge="packed")
    inputs = memory.PlanInputs(
        config=config,
        num_tokens=num_tokens,
        hidden_size=H,
        num_rows=V,
        dtype=str(dtype).removeprefix("torch."),
        num_parts=parts,
        tp_size=rank.size,
        wgrad_accumulator="returned" if trained else "none",
        token_weights_known=True,
        logits_backend=backend,
        device="cpu",
    )
    in_forward, stored = strategy == "grad_in_forward", num_chunks if strategy == "store" else 0
    facts = inputs, Cut.of_length(num_tokens // parts, C // parts), stored, in_forward
    at_once = strategy == "store" and inputs.saves_e and trained
    # The caller's gradients are not the head's; Triton's interpreter copies its arguments' storages.
    of_hidden, of_weight = hidden.numel() * dtype.itemsize, V * H * dtype.itemsize
    interpreted = backend == "scaled_exp" and rank.device.type == "cpu"
    others = [in_forward * of_hidden, of_hidden + trained * of_weight]
    if interpreted:
        others = [n + of_weight + (not sp) * of_hidden for n in others]
        others[0] += C * H * dtype.itemsize
    # At the start of such a backward the sum of the forward is beside its copy in the weight's dtype.
    copied = dtype.itemsize * (dtype != torch.float32)
    at_start = in_forward * (of_hidden + trained * V * H * (4 + copied))

    def head() -> torch.Tensor:
        return fused_linear_cross_entropy(
            hidden, weight, labels, tp_group=rank.group, sequence_parallel=sp, config=config,
            token_weights=weights, vocab_start=rank.rank * V,
        )  # fmt: skip

    if rank.device.type == "cuda":
        head()  # the first on a GPU tries the GEMM on small matrices
    with warnings.catch_warnings(), LiveStorages() as live:
        warnings.simplefilter("ignore")
        gc.collect()  # the interpreter leaves cycles
        loss = head()
        seen = [live.peak_bytes]
        gc.collect()
        live.peak_bytes = live.live_bytes
        loss.backward(weights.square() if in_forward else weights)
        seen.append(live.peak_bytes)
    for found, of_others, backward in zip(seen, others, (False, True), strict=True):
        predicted = memory.memory_of(*facts, at_once, backward=backward)
        expected = max(predicted.total + of_others, (at_start + predicted.token_floats) * backward)
        buffers = (found - expected) / (C // parts * H * dtype.itemsize)
        assert abs(buffers) < 0.8, f"{buffers} buffers of hidden states more than {predicted}"
