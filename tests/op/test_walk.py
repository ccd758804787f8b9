"""How far a reader walks: the files and functions that the hidden states pass through, and back."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, fused_linear_distillation
from tests.support.walk import Walk


def cross_entropy(hidden, weight, config):
    labels = torch.randint(40, (2, 8))
    return fused_linear_cross_entropy(hidden, weight, labels, config=config)


def divergence(hidden, weight, config):
    teacher = torch.randn(8, 2, 4), torch.randn(40, 4)
    return fused_linear_distillation(hidden, weight, *teacher, config=config).loss


@pytest.mark.parametrize(
    ("head", "returns"),
    [(cross_entropy, {"overlap.py"}), (divergence, {"overlap.py", "logits/divergence.py"})],
)
def test_the_walk_of_the_hidden_states(head, returns):
    """``store``, one chunk, one rank, on a CPU; not the first call of its kind, which is checked besides."""
    hidden, weight = torch.randn(8, 2, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    config = FusedCEConfig(strategy="store")
    head(hidden, weight, config).sum().backward()
    walk = Walk(hidden)
    with walk.watching():
        head(hidden, weight, config).sum().backward()
    print(f"\n{len(walk.files)} files, {len(walk.functions)} functions, {len(walk.returns)} returns")
    for file, function in walk.steps:
        print(f"  {file:22} {function}")
    assert {"op.py", "forward.py", "backward.py"} < set(walk.files), "the tracer sees nothing"
    assert len(walk.files) <= 10
    assert len(walk.functions) <= 30
    assert set(walk.returns) <= returns
