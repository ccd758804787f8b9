"""What a warm call may ask of the host: operators of torch, kernel launches, new buffers, no waiting.

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
BUFFERS = ("empty", "zeros", "ones", "full", "clone", "new_", "_like")


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
    ("strategy", "ignored", "launches", "operators", "buffers"),
    # Tokens labelled -100 take three operators. Two GEMMs are operators, views too. The scaled-exp GEMM is a
    # launch. One buffer has the labels, which the caller may refill before the backward.
    [
        ("store", None, 5, 29, 13),
        ("recompute", None, 5, 33, 12),
        ("store", "auto", 5, 29, 13),
        ("recompute", "auto", 5, 36, 12),
    ],
)
def test_a_warm_call(strategy, ignored, launches, operators, buffers, monkeypatch):
    hidden = torch.randn(T, H).requires_grad_()
    weight = torch.randn(V, H).requires_grad_()
    labels, grad_loss = torch.randint(0, V, (T,)), torch.rand(T)
    config = FusedCEConfig(strategy=strategy, ignore_index=ignored, logits_backend="scaled_exp")

    def step() -> None:
        hidden.grad = weight.grad = None
        loss = fused_linear_cross_entropy(hidden, weight, labels, config=config)
        loss.backward(grad_loss)

    step()  # the spec is made, kernels are interpreted once
    seen = Counter()

    def launch(self, tensors, descriptors=()) -> None:
        seen["launches"] += 1

    # Kernels would run operators of their own.
    monkeypatch.setattr(Bound, "__call__", launch)
    with Counted() as counted:
        step()
    names = counted.operators
    assert 0 < seen["launches"] <= launches
    assert sum(names.values()) <= operators, names
    assert sum(count for name, count in names.items() if any(w in name for w in BUFFERS)) <= buffers, names
    assert names["mm"] and not names["_local_scalar_dense"] and not names["item"], "the host waits"
