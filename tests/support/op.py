"""The op on whole inputs, in one process, and what of the scaled-exp GEMM this device can run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.head import promise
from megatron_fused_ce.kernels import scaled_exp
from megatron_fused_ce.logits import gemm_rows
from megatron_fused_ce.ranks import agreement
from megatron_fused_ce.scripts.lib.reference import HeadInputs, HeadResult

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STRATEGIES = ("recompute", "store", "grad_in_forward")

ON_GPU = torch.cuda.is_available()
HAS_EXP = not ON_GPU or torch.cuda.get_device_capability() >= (9, 0)
#: What the scaled-exp GEMM runs in: bf16 on GPUs, fp32 by Triton's interpreter.
EXP_DTYPE = torch.bfloat16 if ON_GPU else torch.float32


@contextlib.contextmanager
def rows_by(backend: str) -> Iterator[None]:
    """Row passes by ``triton`` (on a CPU by its interpreter) or ``torch``; ``auto``: as the device has it."""
    if backend == "auto":
        yield
        return
    agreement.forget()  # specs know their backend
    try:
        with patch.object(gemm_rows, "by_triton", lambda device: backend == "triton"):
            yield
    finally:
        agreement.forget()


@contextlib.contextmanager
def promises(kept: int, remade: int = 0) -> Iterator[None]:
    """Inside, so many backwards hand over ``grad_in_forward``'s gradients, and so many make them again."""
    before = replace(promise.counts)
    yield
    seen = promise.counts.kept - before.kept, promise.counts.remade - before.remade
    assert seen == (kept, remade), f"(kept, made again): {seen}, expected {(kept, remade)}"


def products() -> list[ModuleType]:
    """Every form of the scaled-exp GEMM that this device can run."""
    forms = [scaled_exp]
    if ON_GPU and torch.cuda.get_device_capability()[0] == 9:
        from megatron_fused_ce.kernels import scaled_exp_hopper

        forms.append(scaled_exp_hopper)
    return forms


def leaves(inputs: Any, needs: tuple[bool, bool] = (True, True)) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and weight of a call; ``needs``: which of them get gradients."""
    hidden, weight = (x.detach().clone() for x in (inputs.hidden, inputs.weight))
    return hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1])


def run(inputs: HeadInputs, config: FusedCEConfig, **kwargs: Any) -> HeadResult:
    """The op on whole inputs; ``grad_in_forward`` gets token weights that the upstream is 1.5 times of."""
    if config.strategy == "grad_in_forward":
        kwargs.setdefault("token_weights", inputs.grad_loss / 1.5)
    hidden, weight = leaves(inputs)
    loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, config=config, **kwargs)
    loss.backward(inputs.grad_loss)
    assert hidden.grad is not None and weight.grad is not None
    return HeadResult(loss.detach(), hidden.grad, weight.grad)


def captured(iteration: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of ``iteration``, which ran once before, and what it gave."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        iteration()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = iteration()
    return graph, made


class RoundedFactors(TorchDispatchMode):
    """Multiplies as a GPU does: a factor without dimensions is first rounded to the other's dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        multiplies = func in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)
        if multiplies and args[0].dim() and isinstance(args[1], torch.Tensor) and not args[1].dim():
            args = args[0], args[1].to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def gemm_flops() -> FlopCounterMode:
    """Inside it counts the FLOPs of torch's GEMMs, 2 for each element of ``M * N * K``."""

    def product(a: torch.Size, b: torch.Size, *rest: Any, **more: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    # torch's own formulas do not know the form with an out_dtype.
    aten, added = torch.ops.aten, lambda _, *given, **more: product(*given, **more)
    mapping = {aten.addmm_: added, aten.addmm: added, aten.mm: product}
    return FlopCounterMode(display=False, custom_mapping=mapping)


def at_odd_offset(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind where an allocation begins."""
    room = tensor.new_empty(tensor.numel() + 1)
    placed = room[1:].view(tensor.shape)
    assert placed.data_ptr() % 16 or not placed.numel()  # of an empty one it is 0
    return placed.copy_(tensor)


def with_odd_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, in rows that are an odd number of elements apart."""
    room = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)
    return room[..., :-1].copy_(tensor)


def without_interpreter(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A script of tests/kernels, run by a Python whose triton compiles."""
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(root / "tests" / "kernels" / script), *words],
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
