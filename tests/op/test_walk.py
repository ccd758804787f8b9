"""How far a reader walks: the files and functions that the hidden states pass through, and back."""

from __future__ import annotations

import torch

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from tests.support.walk import Walk


def test_the_walk_of_the_hidden_states():
    """``store``, one chunk, one rank, on a CPU; not the first call of its kind, which is checked besides."""
    hidden = torch.randn(8, 2, 16, requires_grad=True)
    weight, labels = torch.randn(40, 16, requires_grad=True), torch.randint(40, (2, 8))
    config = FusedCEConfig(strategy="store")
    fused_linear_cross_entropy(hidden, weight, labels, config=config).sum().backward()
    walk = Walk(hidden)
    with walk.watching():
        loss = fused_linear_cross_entropy(hidden, weight, labels, config=config).sum()
        loss.backward()
    print(f"\n{len(walk.files)} files, {len(walk.functions)} functions, {len(walk.returns)} returns")
    for file, function in walk.steps:
        print(f"  {file:22} {function}")
    assert {"op.py", "forward.py", "backward.py", "wgrad.py"} < set(walk.files), "the tracer sees nothing"
    assert len(walk.files) <= 10
    assert len(walk.functions) <= 30
    assert set(walk.returns) <= {"overlap.py"}
