"""What a warm call may ask of the host: operators of torch, kernel launches, no waiting.

Counted on a CPU, where Triton's interpreter stands in for a GPU: a launch that creeps in fails here, not in
a benchmark of small heads.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.kernels.launch import Bound

T, H, V = 32, 16, 128


class Counted(TorchDispatchMode):
    """Operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[str(function).removeprefix("aten.").partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
@pytest.mark.parametrize(
    ("strategy", "ignored", "operators"),
    # Tokens labelled -100 take three. Two GEMMs are operators, views too; the scaled-exp GEMM is a launch.
    [("store", None, 29), ("recompute", None, 33), ("store", "auto", 29), ("recompute", "auto", 36)],
)
def test_a_warm_call(strategy, ignored, operators, monkeypatch):
    hidden, weight = torch.randn(T, H).requires_grad_(), torch.randn(V, H).requires_grad_()
    labels, grad_loss = torch.randint(0, V, (T,)), torch.rand(T)
    config = FusedCEConfig(strategy=strategy, ignore_index=ignored, logits_backend="scaled_exp")

    def step() -> None:
        hidden.grad = weight.grad = None
        loss = fused_linear_cross_entropy(hidden, weight, labels, config=config)
        loss.backward(grad_loss)

    step()  # the spec is made, kernels are interpreted once
    launches = []
    # Kernels would run operators of their own.
    monkeypatch.setattr(Bound, "__call__", lambda *given: launches.append(given))
    with Counted() as counted:
        step()
    names = counted.operators
    assert 0 < len(launches) <= 5
    assert sum(names.values()) <= operators, names
    assert names["mm"] and not names["_local_scalar_dense"] and not names["item"], "the host waits"
