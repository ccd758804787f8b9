"""The head on whole inputs: in one process, or this rank's part of them and the whole result again."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.head import promise
from megatron_fused_ce.head.grad_weight import InPlaceGradWeight
from megatron_fused_ce.kernels import gemm_variants
from megatron_fused_ce.logits import gemm_rows
from megatron_fused_ce.planner import choose
from megatron_fused_ce.ranks import agreement, collectives
from megatron_fused_ce.scripts.lib.reference import HeadInputs, HeadResult
from tests.support.ranks import Rank

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STRATEGIES = ("recompute", "store", "grad_in_forward")

ON_GPU = torch.cuda.is_available()
HAS_EXP = not gemm_variants.triton_lacks() and (not ON_GPU or torch.cuda.get_device_capability() >= (9, 0))
#: What the scaled-exp GEMM runs in: bf16 on GPUs, fp32 by Triton's interpreter.
EXP_DTYPE = torch.bfloat16 if ON_GPU else torch.float32

#: Results by name: ``grad_hidden``, ``grad_weight``, and per token ``[b, s]`` whatever else.
Parts = dict[str, Tensor]


# --- a call and its result -------------------------------------------------------------------


def leaves(inputs: Any, needs: tuple[bool, bool] = (True, True)) -> tuple[Tensor, Tensor]:
    """Hidden states and weight of a call; ``needs``: which of them get gradients."""
    hidden, weight = (x.detach().clone() for x in (inputs.hidden, inputs.weight))
    return hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1])


def step(
    inputs: HeadInputs,
    ask: Callable[..., Parts],
    rank: Rank | None = None,
    sp: bool = False,
    shards: str = "unequal",
) -> Parts:
    """A forward and the loss's backward; over ranks the whole result, on every rank.

    Args:
        ask: called with hidden states, weight and the group's arguments; gives outputs by name.
    """
    hidden, weight, group = shard_of(rank, inputs, sp, shards)
    made = ask(hidden, weight, **group)
    made["loss"].backward(inputs.grad_loss)
    assert hidden.grad is not None and weight.grad is not None
    return whole(rank, sp, {**made, "grad_hidden": hidden.grad, "grad_weight": weight.grad})


def run(inputs: HeadInputs, config: FusedCEConfig, *where: Any, **options: Any) -> HeadResult:
    """The loss's `step`; ``grad_in_forward`` gets token weights that the upstream is 1.5 times of."""
    if config.strategy == "grad_in_forward":
        options.setdefault("token_weights", inputs.grad_loss / 1.5)

    def ask(hidden: Tensor, weight: Tensor, **group: Any) -> Parts:
        options.update(group, config=config)
        return {"loss": fused_linear_cross_entropy(hidden, weight, inputs.labels, **options)}

    return HeadResult(**step(inputs, ask, *where))


def open_main_grad(main_grad: Tensor, weight: Tensor, num_gemms: int, scaled: bool) -> InPlaceGradWeight:
    return InPlaceGradWeight(main_grad, scaled, lambda: None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN too is equal to itself."""
    of_a, of_b = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(of_a, of_b)


def assert_same_bits(made: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, right in zip(made, expected, strict=True):
        assert same_bits(one, right)


def at_odd_offset(tensor: Tensor) -> Tensor:
    """The same values, one element behind where an allocation begins."""
    room = tensor.new_empty(tensor.numel() + 1)
    placed = room[1:].view(tensor.shape)
    assert placed.data_ptr() % 16 or not placed.numel()  # of an empty one it is 0
    return placed.copy_(tensor)


# --- over ranks ------------------------------------------------------------------------------

SIZES = {"s": 24, "b": 3, "hidden_size": 32, "vocab": 97}

#: Rows of the ranks' shards where they are not equal; the scaled-exp GEMM's begin at multiples of 16 bytes.
SHARDS = {
    97: {1: (97,), 2: (64, 33), 4: (1, 50, 13, 33)},
    512: {2: (384, 128), 4: (8, 264, 40, 200)},
    12800: {2: (6656, 6144)},
}


def sizes_of(rank: Rank, kind: str, vocab: int) -> tuple[int, ...]:
    """Rows of each shard; ``kind``: equal or unequal ones."""
    return SHARDS[vocab][rank.size] if kind == "unequal" else (vocab // rank.size,) * rank.size


def rows_of(rank: Rank, kind: str, vocab: int) -> slice:
    """This rank's rows of the vocabulary."""
    sizes = sizes_of(rank, kind, vocab)
    return slice(sum(sizes[: rank.rank]), sum(sizes[: rank.rank + 1]))


def tokens_of(rank: Rank, s: int, sequence_parallel: bool) -> slice:
    """This rank's positions of a sequence."""
    at, size = (rank.rank, rank.size) if sequence_parallel else (0, 1)
    return slice(at * s // size, (at + 1) * s // size)


def shard_of(
    rank: Rank | None, inputs: HeadInputs, sp: bool, shards: str = "unequal"
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Leaves, this rank's tokens ``[s', b, H]`` and rows ``[V', H]``, and the group's arguments; without a
    rank all of them, and none."""
    if rank is None:
        return *leaves(inputs), {}
    weight = inputs.weight[rows_of(rank, shards, inputs.weight.shape[0])]
    hidden = inputs.hidden[tokens_of(rank, inputs.hidden.shape[0], sp)]
    group = {"tp_group": rank.group, "sequence_parallel": sp}
    return *leaves(SimpleNamespace(hidden=hidden, weight=weight)), group


def whole(rank: Rank | None, sp: bool, made: Parts) -> Parts:
    """The result of all tokens and rows, on every rank; what they all have is the same to the bit."""
    made = {name: value.detach() for name, value in made.items()}
    if rank is None:
        return made
    received: list[Any] = [None] * rank.size
    dist.all_gather_object(received, {name: value.cpu() for name, value in made.items()})
    return {name: value.to(rank.device) for name, value in joined(received, sp).items()}


def joined(received: list[Parts], sp: bool) -> Parts:
    """The whole result of the ranks' parts."""
    cut = ("grad_hidden", "grad_weight") if sp else ("grad_weight",)
    for name in received[0].keys() - cut:
        for other in received[1:]:
            assert same_bits(received[0][name], other[name]), f"the ranks' {name} differs"
    return {
        name: torch.cat([part[name] for part in received]) if name in cut else first
        for name, first in received[0].items()
    }


def same_on_all_ranks(rank: Rank, *values: Tensor | None) -> None:
    whole(rank, False, {f"value {at}": value for at, value in enumerate(values) if value is not None})


@contextlib.contextmanager
def fresh_group(rank: Rank) -> Iterator[dist.ProcessGroup]:
    """A group that has had no call."""
    group = dist.new_group(list(range(rank.size)))
    yield group
    dist.destroy_process_group(group)


@contextlib.contextmanager
def collectives_run(at: str) -> Iterator[None]:
    """At their ``start`` or their ``wait``, no sooner, each alone, also those that NCCL launches as one."""

    def start(collective: Any, *tensors: Tensor, overlap: bool = True, **options: Any) -> Any:
        once = functools.cache(functools.partial(collective, *tensors, **options))
        if at == "start":
            once()
        return SimpleNamespace(wait=once)

    alone = patch.object(collectives.VocabParallel, "coalesced", lambda *_: contextlib.nullcontext())
    with patch.object(collectives, "_start", start), alone:
        yield


# --- how it runs -----------------------------------------------------------------------------


@contextlib.contextmanager
def _changed(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Specs know what they were made with: none is kept."""
    agreement.forget()
    try:
        with patch.object(module, name, value):
            yield
    finally:
        agreement.forget()


def rows_by(backend: str) -> contextlib.AbstractContextManager[None]:
    """Row passes by ``triton`` (on a CPU by its interpreter) or ``torch``; ``auto``: as the device has it."""
    if backend == "auto":
        return contextlib.nullcontext()
    return _changed(gemm_rows, "by_triton", lambda device: backend == "triton")


@contextlib.contextmanager
def strategy_in_place(strategy: str, stored_chunks: int = 1) -> Iterator[str]:
    """The name to give a config. ``mixed`` is otherwise the planner's choice, for budgets of whole MiB: every
    plan stores the first chunks and recomputes the others."""
    if strategy != "mixed":
        yield strategy
        return
    plan, changes = choose.plan, {"strategy": "mixed", "stored_chunks": stored_chunks, "wgrad_at_once": False}
    with _changed(choose, "plan", lambda inputs: replace(plan(inputs), **changes)):
        yield "store"


@contextlib.contextmanager
def promises(kept: int, remade: int = 0) -> Iterator[None]:
    """Inside, so many backwards hand over ``grad_in_forward``'s gradients, and so many make them again."""
    before = replace(promise.counts)
    yield
    seen = promise.counts.kept - before.kept, promise.counts.remade - before.remade
    assert seen == (kept, remade), f"(kept, made again): {seen}, expected {(kept, remade)}"


def products() -> list[ModuleType]:
    """Every form of the scaled-exp GEMM that this device can run."""
    from megatron_fused_ce.kernels import scaled_exp

    forms = [scaled_exp]
    if ON_GPU and torch.cuda.get_device_capability()[0] == 9:
        from megatron_fused_ce.kernels import scaled_exp_hopper

        forms.append(scaled_exp_hopper)
    return forms


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


def gemm_flops() -> FlopCounterMode:
    """Inside it counts the FLOPs of torch's GEMMs, 2 for each element of ``M * N * K``."""

    def product(a: torch.Size, b: torch.Size, *rest: Any, **more: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    # torch's own formulas do not know the form with an out_dtype.
    aten, added = torch.ops.aten, lambda _, *given, **more: product(*given, **more)
    mapping = {aten.addmm_: added, aten.addmm: added, aten.mm: product}
    return FlopCounterMode(display=False, custom_mapping=mapping)


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
