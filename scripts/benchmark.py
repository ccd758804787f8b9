"""Time and memory of the head against its matrix products and Megatron's own paths, in one run.

    python scripts/benchmark.py --shapes llama3-8b --tokens 8192 32768
    torchrun --nproc-per-node 4 scripts/benchmark.py --sequence-parallel --shapes llama3-8b

Under torchrun all ranks form one tensor-parallel group. The variants run interleaved, block after
block, so that a drifting clock favours none; figures are medians over the blocks. Before anything is
timed every variant is checked against fp64 on a part of the tokens. Each variant ends with a
``grad_weight`` in the weight's dtype, as autograd accumulates it.

    roof      the three matrix products alone, by torch.mm, on the operands of the real step
    unfused, native, te
              Megatron's output layer and its three cross entropies, where they are installed
    recompute, store
              this package
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.testing.provenance import commit
from megatron_fused_ce.testing.reference import HeadInputs, relative_error, truth

MIB = 1024 * 1024

#: name -> (H, vocabulary)
SHAPES = {
    "llama3-8b": (4096, 128256),
    "llama3-70b": (8192, 128256),
    "qwen3-1.7b": (2048, 151936),
    "tiny": (64, 512),
}
KEYS = (
    *("commit", "device", "torch", "triton", "shape", "T", "H", "V", "dtype", "tp", "sp"),
    *("variant", "chunk_tokens", "forward_ms", "backward_ms", "time_ms", "roof_ms", "ratio"),
    *("peak_mib", "error"),
)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Problem:
    """This rank's operands: ``hidden`` ``[T / parts, 1, H]``, ``weight`` ``[V / R, H]``."""

    def __init__(self, num_tokens: int, shape: str, dtype: torch.dtype, world: World) -> None:
        hidden_size, vocab = SHAPES[shape]
        generator = torch.Generator(device=world.device).manual_seed(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=world.device)

        # The same on every rank; each keeps its part.
        hidden = normal(num_tokens, 1, hidden_size).to(dtype)
        weight = (normal(vocab, hidden_size) * (2.0 / math.sqrt(hidden_size))).to(dtype)
        self.rows = vocab // world.size
        self.vocab_start = world.rank * self.rows
        parts = world.size if world.sequence_parallel else 1
        self.hidden = hidden.chunk(parts)[world.rank if parts > 1 else 0].clone()
        self.weight = weight[self.vocab_start : self.vocab_start + self.rows].clone()
        self.labels = torch.randint(
            0, vocab, (1, num_tokens), generator=generator, device=world.device
        )
        self.grad_loss = normal(1, num_tokens) / num_tokens
        self.whole = HeadInputs(hidden, weight, self.labels, self.grad_loss)
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    def forget_whole(self) -> None:
        del self.whole


class World:
    """The tensor-parallel group of all ranks, and Megatron's idea of it where it is installed."""

    def __init__(self, sequence_parallel: bool) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29611")
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo", rank=self.rank, world_size=self.size
        )
        self.group = dist.group.WORLD
        self.sequence_parallel = sequence_parallel and self.size > 1
        try:
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(self.size)
            self.group = parallel_state.get_tensor_model_parallel_group()
            self.has_megatron = True
        except ImportError:
            self.has_megatron = False


def megatron_losses(world: World) -> dict[str, Loss]:
    """Megatron's output layer with each of its cross entropies."""
    if not (world.has_megatron and world.on_gpu):
        return {}
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import (
        linear_with_grad_accumulation_and_async_allreduce as linear,
    )

    def logits(hidden: Tensor, weight: Tensor) -> Any:
        return linear(
            hidden,
            weight,
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=world.size > 1 and not world.sequence_parallel,
            sequence_parallel=world.sequence_parallel,
            tp_group=world.group,
        )

    losses: dict[str, Loss] = {
        "unfused": lambda h, w, y: vocab_parallel_cross_entropy(logits(h, w), y.t()).t(),
        "native": lambda h, w, y: fused_vocab_parallel_cross_entropy(
            logits(h, w), y.t().contiguous(), world.group
        ).t(),
    }
    try:
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy
    except ImportError:
        te_parallel_cross_entropy = None
    if te_parallel_cross_entropy is not None:

        def te(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            target = labels.t().contiguous()
            target = torch.as_strided(target, target.size(), (target.size(1), 1))
            loss: Tensor = te_parallel_cross_entropy(logits(hidden, weight), target, world.group)
            return loss.t()

        losses["te"] = te
    return losses


def fused_losses(world: World, problem_start: int, chunk_tokens: int) -> dict[str, Loss]:
    def of(strategy: str) -> Loss:
        config = FusedCEConfig(strategy=strategy, chunk_tokens=chunk_tokens)
        return lambda h, w, y: fused_linear_cross_entropy(
            h,
            w,
            y,
            tp_group=world.group,
            sequence_parallel=world.sequence_parallel,
            vocab_start=problem_start,
            config=config,
        )

    return {strategy: of(strategy) for strategy in ("recompute", "store")}


class Clock:
    """Milliseconds of device time between marks."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans_ms(self) -> list[float]:
        spans = pairwise(self._marks)
        if self._on_gpu:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) for first, second in spans]
        return [1e3 * (second - first) for first, second in spans]


def one_step(loss_of: Loss, problem: Problem, clock: Clock) -> Tensor:
    problem.hidden.grad = problem.weight.grad = None
    clock.mark()
    loss = loss_of(problem.hidden, problem.weight, problem.labels)
    clock.mark()
    loss.backward(problem.grad_loss)  # type: ignore[no-untyped-call]
    clock.mark()
    return loss.detach()


def roof_step(problem: Problem, world: World) -> Callable[[Clock], None]:
    """The three products on the operands of the real step, true ``grad_logits`` included."""
    with torch.no_grad():
        hidden = problem.hidden.detach().flatten(0, 1)
        if world.sequence_parallel:
            whole = hidden.new_empty(hidden.shape[0] * world.size, hidden.shape[1])
            dist.all_gather_into_tensor(whole, hidden, group=world.group)
            hidden = whole
        weight = problem.weight.detach()
        grad_logits = hidden @ weight.t()
        # Block by block: the fp32 copy of one block is all that it needs beside the logits.
        label = (problem.labels[0] - problem.vocab_start).clamp(0, problem.rows - 1)
        for rows in torch.arange(hidden.shape[0], device="cpu").split(1024):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            p = grad_logits[part].float().softmax(-1) / world.size
            p.scatter_add_(-1, label[part, None], torch.full_like(p[:, :1], -1.0))
            grad_logits[part] = (p * problem.grad_loss[0, part, None]).to(grad_logits.dtype)
        logits = torch.empty_like(grad_logits)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def step(clock: Clock) -> None:
        with torch.no_grad():
            clock.mark()
            torch.mm(hidden, weight.t(), out=logits)
            clock.mark()
            torch.mm(grad_logits, weight, out=grad_hidden)
            torch.mm(grad_logits.t(), hidden, out=grad_weight)
            clock.mark()

    return step


def errors_of(losses: dict[str, Loss], shape: str, dtype: torch.dtype, world: World, T: int) -> Any:
    """Each variant's largest norm-relative error of loss and gradients against fp64."""
    problem = Problem(T, shape, dtype, world)
    exact = truth(problem.whole)
    parts = world.size if world.sequence_parallel else 1
    mine = exact.grad_hidden.chunk(parts)[world.rank if parts > 1 else 0]
    rows = slice(problem.vocab_start, problem.vocab_start + problem.rows)
    errors = {}
    for name, loss_of in losses.items():
        loss = one_step(loss_of, problem, Clock(world.on_gpu))
        assert problem.hidden.grad is not None and problem.weight.grad is not None
        errors[name] = max(
            relative_error(loss, exact.loss),
            relative_error(problem.hidden.grad, mine),
            relative_error(problem.weight.grad, exact.grad_weight[rows]),
        )
    return errors


def peak_mib(loss_of: Loss, problem: Problem, world: World) -> float | None:
    """Peak above inputs and the two gradients."""
    if not world.on_gpu:
        return None
    problem.hidden.grad = problem.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_step(loss_of, problem, Clock(True))
    torch.cuda.synchronize()
    outputs = problem.hidden.nbytes + problem.weight.nbytes
    return round((torch.cuda.max_memory_allocated() - before - outputs) / MIB, 1)


def measure(shape: str, num_tokens: int, options: Any, world: World) -> list[dict[str, Any]]:
    dtype = getattr(torch, options.dtype)
    start = world.rank * (SHAPES[shape][1] // world.size)
    losses = megatron_losses(world) | fused_losses(world, start, options.chunk_tokens)
    check_tokens = min(num_tokens, options.check_tokens)
    errors = errors_of(losses, shape, dtype, world, check_tokens)
    bound = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}[dtype]
    for name in ("recompute", "store"):
        allowed = max(bound, 2 * errors.get("unfused", 0.0))
        if not errors[name] <= allowed:
            raise SystemExit(f"benchmark: {name} is off by {errors[name]:.1e}, bound {allowed:.1e}")

    problem = Problem(num_tokens, shape, dtype, world)
    problem.forget_whole()
    facts = {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if world.on_gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton_version(),
        "shape": shape,
        "T": num_tokens,
        "H": SHAPES[shape][0],
        "V": problem.rows,
        "dtype": options.dtype,
        "tp": world.size,
        "sp": world.sequence_parallel,
    }
    peaks: dict[str, float | None] = {}
    out_of_memory = set()
    for name, loss_of in losses.items():
        try:
            one_step(loss_of, problem, Clock(world.on_gpu))  # compile, load
            peaks[name] = peak_mib(loss_of, problem, world)
        except torch.OutOfMemoryError:
            out_of_memory.add(name)
    times: dict[str, list[list[float]]] = {name: [] for name in ("roof", *losses)}
    roof = roof_step(problem, world)
    for block in range(options.blocks + 1):
        for name in times:
            if name in out_of_memory:
                continue
            clock = Clock(world.on_gpu)
            if name == "roof":
                problem.hidden.grad = problem.weight.grad = None
                roof(clock)
            else:
                one_step(losses[name], problem, clock)
            spans = clock.spans_ms()
            if block:  # the first warms up
                times[name].append(spans)
    roof_ms = statistics.median([sum(spans) for spans in times["roof"]])
    rows = []
    for name, steps in times.items():
        row: dict[str, Any] = (
            dict.fromkeys(KEYS) | facts | {"variant": name, "roof_ms": round(roof_ms, 3)}
        )
        if name in ("recompute", "store"):
            row["chunk_tokens"] = options.chunk_tokens
        if steps:
            forward, backward = (statistics.median(column) for column in zip(*steps, strict=True))
            total = statistics.median([sum(spans) for spans in steps])
            row |= {
                "forward_ms": round(forward, 3),
                "backward_ms": round(backward, 3),
                "time_ms": round(total, 3),
                "ratio": round(total / roof_ms, 4),
            }
        row["peak_mib"] = peaks.get(name)
        row["error"] = "out of memory" if name in out_of_memory else errors.get(name)
        rows.append(row)
    return rows


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def markdown(rows: list[dict[str, Any]]) -> str:
    head = ("shape", "T", "tp", "sp", "variant", "chunk_tokens", "forward_ms", "backward_ms")
    head += ("time_ms", "ratio", "peak_mib", "error")  # type: ignore[assignment]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = []
        for key in head:
            value = row[key]
            if key == "error" and isinstance(value, float):
                value = f"{value:.1e}"
            cells.append("" if value is None else str(value))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama3-8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="T of each run")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument(
        "--check-tokens", type=int, default=1024, help="T of the check against fp64"
    )
    parser.add_argument("--blocks", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file; a .md is written beside it")
    options = parser.parse_args()
    world = World(options.sequence_parallel)
    rows = []
    for shape in options.shapes:
        for num_tokens in options.tokens:
            if num_tokens % world.size or SHAPES[shape][1] % world.size:
                parser.error(f"{num_tokens} tokens or {shape}'s rows do not divide over the ranks")
            rows += measure(shape, num_tokens, options, world)
    if world.rank == 0:
        print(markdown(rows))
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(markdown(rows))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
