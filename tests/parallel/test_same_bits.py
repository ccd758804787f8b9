"""A token's loss is the same to the bit wherever it stands, whatever is beside it, however chunks are cut.

The promise is the scaled-exp GEMM's, at a fixed tensor-parallel degree (docs/rl). A GPU can break it in
ways that Triton's interpreter cannot.
"""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.rl import token_log_probs
from tests.support.op import EXP_DTYPE
from tests.support.ranks import Rank, on_ranks

ON_GPUS = torch.cuda.is_available()
#: On a GPU many steps of the GEMM along k.
H = 1024 if ON_GPUS else 64
#: Numbers of tokens: odd ones, tiles of the GEMM and their neighbours; on a GPU up to a long sequence.
LENGTHS = (6, 1, 66, 128, 1000, 4094, 4096, 4098, 8192, 32768) if ON_GPUS else (6, 1, 10, 34)
PLACEMENTS = 6 if ON_GPUS else 1
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
    vocab = 2000 if ON_GPUS else 80
    dtype, device = EXP_DTYPE, rank.device
    draw = torch.Generator(device).manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=draw, device=device)
        # Few digits, so that products are exact: the interpreter's depend on a row's place in its tile.
        return drawn if ON_GPUS else (drawn * 8).round() / 8

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw, device=device)

    weight = (normal(rank.size * vocab, H) * 0.5)[rank.rank * vocab :][:vocab].to(dtype)
    probes, probe_labels = normal(PROBES, H), integers(0, rank.size * vocab, PROBES)
    first = None
    for length in LENGTHS:
        length = max(length, rank.size if sequence_parallel else 1)
        for placement in range(PLACEMENTS):
            hidden = normal(length, H) * 10 ** (float(integers(-8, 9)) / 8)
            labels = integers(-1, rank.size * vocab, length)
            places = torch.randperm(length, generator=draw, device=device)[:PROBES]
            hidden[places], labels[places] = probes[: len(places)], probe_labels[: len(places)]
            # Any chunks, and some whose neighbours give cuBLAS other kernels.
            chunk = int(integers(4093, 4100) if placement % 2 else integers(1, length + 1))
            part = hidden.chunk(rank.size)[rank.rank] if sequence_parallel else hidden
            inputs = part.to(dtype).requires_grad_(), weight, labels
            settings = {
                "tp_group": rank.group,
                "sequence_parallel": sequence_parallel,
                "vocab_start": rank.rank * vocab,
                "config": FusedCEConfig(strategy, chunk_tokens=max(2, chunk), logits_backend="scaled_exp"),
            }
            if temperatures:
                temperature = torch.exp2(normal(length))
                temperature[places] = torch.linspace(0.3, 3.0, PROBES, device=device)[: len(places)]
                loss = token_log_probs(*inputs, temperature=temperature, **settings).log_prob
            else:
                weights = torch.ones(length, device=device)
                loss = fused_linear_cross_entropy(*inputs, token_weights=weights, **settings)
            of_probes = loss[places].detach()
            first = of_probes if first is None else first
            assert torch.equal(of_probes, first[: len(places)]), (length, chunk, of_probes)
