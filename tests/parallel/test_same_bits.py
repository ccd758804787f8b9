"""A token's loss is the same to the bit wherever it stands, whatever is beside it, however chunks are cut.

The promise is the scaled-exp GEMM's, at a fixed tensor-parallel degree (docs/rl.md). A GPU can break it in
ways that Triton's interpreter cannot.
"""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.rl import token_log_probs
from tests.support.head import scaled_exp_dtype
from tests.support.ranks import Rank, on_ranks

H = 64
#: Numbers of tokens: odd ones, tiles of the GEMM and their neighbours; on a GPU up to a long sequence.
LENGTHS = (6, 10, 34) if not torch.cuda.is_available() else (6, 66, 128, 1000, 4094, 4096, 4098, 8192, 32768)
PLACEMENTS = 1 if not torch.cuda.is_available() else 25
PROBES = 5


@on_ranks(pytest.param(1, marks=pytest.mark.rest), 2)
@pytest.mark.parametrize(
    ("strategy", "sequence_parallel", "temperatures"),
    [
        ("store", True, False),
        ("recompute", False, False),
        ("grad_in_forward", True, False),
        ("store", True, True),
    ],
)
def test_bits_of_a_token(rank: Rank, strategy, sequence_parallel, temperatures):
    """With ``temperatures`` the log-probability, at one temperature per token."""
    vocab = 2000 if rank.device.type == "cuda" else 80
    dtype = scaled_exp_dtype(rank)
    draw = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=draw)
        # Few digits, so that products are exact: the interpreter's depend on a row's place in its tile.
        return drawn if rank.device.type == "cuda" else (drawn * 8).round() / 8

    weight = (normal(rank.size * vocab, H) * 0.5)[rank.rank * vocab :][:vocab].to(rank.device, dtype)
    probes, probe_labels = normal(PROBES, H), torch.randint(0, rank.size * vocab, (PROBES,), generator=draw)
    first = None
    for length in LENGTHS:
        for _ in range(PLACEMENTS):
            hidden = normal(length, H) * 10 ** float(torch.empty(()).uniform_(-1, 1, generator=draw))
            labels = torch.randint(-1, rank.size * vocab, (length,), generator=draw)
            places = torch.randperm(length, generator=draw)[:PROBES]
            hidden[places], labels[places] = probes, probe_labels
            chunk = int(torch.randint(1, length + 1, (), generator=draw))
            part = hidden.chunk(rank.size)[rank.rank] if sequence_parallel else hidden
            inputs = part.to(rank.device, dtype).requires_grad_(), weight, labels.to(rank.device)
            settings = {
                "tp_group": rank.group,
                "sequence_parallel": sequence_parallel,
                "vocab_start": rank.rank * vocab,
                "config": FusedCEConfig(strategy, chunk_tokens=max(2, chunk), logits_backend="scaled_exp"),
            }
            if temperatures:
                temperature = torch.exp2(torch.randn(length, generator=draw))
                temperature[places] = torch.linspace(0.3, 3.0, PROBES)
                loss = token_log_probs(*inputs, temperature=temperature.to(rank.device), **settings).log_prob
            else:
                weights = torch.ones(length, device=rank.device)
                loss = fused_linear_cross_entropy(*inputs, token_weights=weights, **settings)
            of_probes = loss[places.to(rank.device)].detach()
            first = of_probes if first is None else first
            assert torch.equal(of_probes, first), (length, chunk, of_probes - first)
