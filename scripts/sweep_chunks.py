"""Time and peak bytes of logits against the number of chunks, one process or under torchrun.

    python scripts/sweep_chunks.py
    python scripts/sweep_chunks.py --device cuda --tokens 8192 --hidden 4096 --vocab 128256
    torchrun --nproc-per-node 4 scripts/sweep_chunks.py --device cuda --sequence-parallel

Before anything is timed, the loss and both gradients of every variant are compared with the plain
definition in fp64. Times are of forward and backward together, medians over repeats that go round
all variants in turn, the slowest rank's. Peak bytes are of the rank that held most: on a CPU those
of live storages that hold logits, on a GPU the allocator's peak above inputs and outputs.

Writes sweep.json, sweep.md and sweep.png to --out. Exit code 1: an error above its bound (twice
eager PyTorch's at the same dtype, or the dtype's floor); 2: arguments that do not fit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.config import STRATEGY_CHOICES
from megatron_fused_ce.grad_weight import GradWeight, InPlaceGradWeight, ReturnedGradWeight
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.testing.live_storages import LogitStorages
from megatron_fused_ce.testing.provenance import commit
from megatron_fused_ce.testing.reference import (
    FLOOR,
    HeadInputs,
    HeadResult,
    plain_head,
    relative_error,
)

MIB = 1024 * 1024
REPOSITORY = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REFERENCE_TOKENS = 512  # of one slice of the reference: its logits in fp64 need not fit as a whole
RANK = int(os.environ.get("RANK", "0"))
TP = int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    commit: str
    device: str
    torch: str
    triton: str
    T: int
    H: int
    V: int  # rows of one rank's shard
    dtype: str
    tp: int
    sp: bool
    variant: str
    num_chunks: int
    chunk_tokens: int
    time_ms: float
    peak_mib: float
    error: float  # the largest of loss, grad_hidden and grad_weight, norm-relative, to fp64


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, once, and ends with exit code 2."""

    def error(self, message: str) -> NoReturn:
        if RANK == 0:
            print(f"sweep_chunks: {message}", file=sys.stderr)
        raise SystemExit(2)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--tokens", type=int, help="T (default 2048 on a CPU, 8192 on a GPU)")
    add("--hidden", type=int, help="H (default 96, 4096)")
    add("--vocab", type=int, help="vocabulary over all ranks (default 16384, 128256)")
    add("--dtype", choices=list(DTYPES), help="(default fp32, bf16)")
    add("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    strategies = [name for name in STRATEGY_CHOICES if name != "auto"]
    add("--strategies", nargs="+", choices=strategies, default=strategies)
    add("--sequence-parallel", action="store_true", help="each rank holds its part of the tokens")
    add(
        "--end-point",
        choices=["main_grad", "returned"],
        default="main_grad",
        help="grad_weight is added into an fp32 main_grad, as under Megatron, or returned",
    )
    add("--repeats", type=int, default=3, help="timed rounds over all variants")
    add("--out", type=Path, default=REPOSITORY / "build" / "sweep")
    given = parser.parse_args(words)

    num_gpus = torch.cuda.device_count()
    if given.device == "auto":
        given.device = "cuda" if num_gpus >= TP else "cpu"
    if given.device == "cuda" and num_gpus < TP:
        parser.error(f"expected {TP} GPUs, found {num_gpus}: use --device cpu or fewer ranks")
    on_gpu = given.device == "cuda"
    defaults = {"tokens": (2048, 8192), "hidden": (96, 4096), "vocab": (16384, 128256)}
    for name, (on_cpu, default_on_gpu) in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, default_on_gpu if on_gpu else on_cpu)
        if getattr(given, name) < 1:
            parser.error(f"expected --{name} of at least 1, got {getattr(given, name)}")
    given.dtype = given.dtype or ("bf16" if on_gpu else "fp32")
    given.chunks = sorted(set(given.chunks))
    given.strategies = list(dict.fromkeys(given.strategies))
    if given.repeats < 1:
        parser.error(f"expected --repeats of at least 1, got {given.repeats}")
    if given.vocab % TP:
        parser.error(f"expected --vocab to divide by {TP} ranks, got {given.vocab}")
    if given.sequence_parallel and given.tokens % TP:
        parser.error(f"expected --tokens to divide by {TP} ranks, got {given.tokens}")
    most = given.tokens // (TP if given.sequence_parallel else 1)
    if given.chunks[0] < 1 or given.chunks[-1] > most:
        parser.error(
            f"expected --chunks from 1 to {most}, got {given.chunks[0]} to {given.chunks[-1]}"
        )
    ambiguous = [num for num in given.chunks if given.hidden in _chunk_sizes(given.tokens, num)]
    if not on_gpu and (ambiguous or given.hidden == given.vocab // TP):
        parser.error(
            f"--hidden {given.hidden} is also a chunk's tokens or a rank's vocabulary, so live "
            "storages could not tell logits from weights: change --hidden"
        )
    return given


def _chunk_sizes(num_tokens: int, num_chunks: int) -> set[int]:
    return {num_tokens // num_chunks, math.ceil(num_tokens / num_chunks)}


@dataclass(frozen=True)
class Problem:
    """The whole head, what this rank holds of it, and the truth for that."""

    given: argparse.Namespace
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    grad_loss: Tensor
    truth: HeadResult
    eager_error: float
    main_grad: Tensor | None  # fp32 [V, H], with --end-point main_grad

    def run(self, config: FusedCEConfig) -> tuple[Tensor, ...]:
        """Forward and backward: loss, grad_hidden, grad_weight."""
        if self.main_grad is not None:
            self.main_grad.zero_()
        loss = linear_cross_entropy(
            self.hidden,
            self.weight,
            self.labels,
            tp_group=dist.group.WORLD if TP > 1 else None,
            sequence_parallel=self.given.sequence_parallel,
            config=config,
            open_grad_weight=self._open_grad_weight,
        ).loss
        operands = (self.hidden, self.weight)
        grad_hidden, grad_weight = torch.autograd.grad(
            loss, operands, self.grad_loss, allow_unused=True
        )
        return loss.detach(), grad_hidden, grad_weight if self.main_grad is None else self.main_grad

    def _open_grad_weight(self, weight: Tensor, num_chunks: int, scaled: bool) -> GradWeight:
        if self.main_grad is None:
            return ReturnedGradWeight(weight, num_chunks, scaled)
        return InPlaceGradWeight(self.main_grad, num_chunks, scaled, lambda: None)

    def error(self, outputs: tuple[Tensor, ...]) -> float:
        return max(
            relative_error(value, true) for value, true in zip(outputs, self.truth, strict=True)
        )


def _plain_in_slices(inputs: HeadInputs, dtype: torch.dtype) -> HeadResult:
    """`plain_head`, a slice of tokens at a time, with `grad_weight` added up in fp64."""
    losses, grads_hidden = [], []
    grad_weight = torch.zeros_like(inputs.weight, dtype=torch.float64)
    for start in range(0, inputs.hidden.shape[0], REFERENCE_TOKENS):
        part = slice(start, start + REFERENCE_TOKENS)
        result = plain_head(
            HeadInputs(
                inputs.hidden[part],
                inputs.weight,
                inputs.labels[:, part],
                inputs.grad_loss[:, part],
            ),
            dtype,
        )
        losses.append(result.loss)
        grads_hidden.append(result.grad_hidden)
        grad_weight += result.grad_weight
    return HeadResult(torch.cat(losses, 1)[0], torch.cat(grads_hidden)[:, 0], grad_weight)


def make_problem(given: argparse.Namespace) -> Problem:
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[given.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = HeadInputs(
        hidden=normal(given.tokens, 1, given.hidden).to(given.device, dtype),
        weight=(normal(given.vocab, given.hidden) / given.hidden**0.5).to(given.device, dtype),
        labels=torch.randint(given.vocab, (1, given.tokens), generator=generator).to(given.device),
        grad_loss=normal(1, given.tokens).to(given.device),
    )
    truth = _plain_in_slices(inputs, torch.float64)
    eager = _plain_in_slices(inputs, dtype)
    eager_error = max(relative_error(a, b) for a, b in zip(eager, truth, strict=True))

    num_rows = given.vocab // TP
    rows = slice(RANK * num_rows, (RANK + 1) * num_rows)
    tokens = slice(None)
    if given.sequence_parallel:
        num_tokens = given.tokens // TP
        tokens = slice(RANK * num_tokens, (RANK + 1) * num_tokens)
    return Problem(
        given,
        hidden=inputs.hidden[tokens, 0].clone().requires_grad_(),
        weight=inputs.weight[rows].clone().requires_grad_(),
        labels=inputs.labels[0],
        grad_loss=inputs.grad_loss[0],
        truth=HeadResult(
            truth.loss, truth.grad_hidden[tokens].clone(), truth.grad_weight[rows].clone()
        ),
        eager_error=eager_error,
        main_grad=torch.zeros(num_rows, given.hidden, device=given.device)
        if given.end_point == "main_grad"
        else None,
    )


def peak_bytes(problem: Problem, config: FusedCEConfig) -> int:
    if problem.given.device == "cpu":
        num_rows, hidden_size = problem.weight.shape
        with LogitStorages(vocab_rows=num_rows, hidden_size=hidden_size) as logits:
            problem.run(config)
        return int(logits.peak_bytes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = problem.run(config)
    torch.cuda.synchronize()
    above_inputs = torch.cuda.max_memory_allocated() - before
    # main_grad was there before.
    new = sum(output.nbytes for output in outputs if output is not problem.main_grad)
    peak: int = above_inputs - new
    return peak


def time_ms(problem: Problem, config: FusedCEConfig) -> float:
    if TP > 1:
        dist.barrier()
    if problem.given.device == "cpu":
        started = time.perf_counter()
        problem.run(config)
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    problem.run(config)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def largest_over_ranks(values: list[float], device: str) -> list[float]:
    if TP == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    largest: list[float] = tensor.tolist()
    return largest


def measure(given: argparse.Namespace, console: Console) -> tuple[list[Row], float]:
    """All rows, and the bound that each row's error was held to."""
    variants = [(name, num) for name in given.strategies for num in given.chunks]
    configs = [FusedCEConfig(strategy=name, num_chunks=num) for name, num in variants]
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        disable=RANK != 0,
    ) as progress:
        task = progress.add_task("reference in fp64", total=len(variants) * (1 + given.repeats))
        problem = make_problem(given)
        bound = max(2 * problem.eager_error, FLOOR[DTYPES[given.dtype]])

        progress.update(task, description="errors and peaks")
        errors, peaks = [], []
        for config in configs:
            errors.append(problem.error(problem.run(config)))  # warms up, too
            peaks.append(float(peak_bytes(problem, config)))
            progress.advance(task)
        errors = largest_over_ranks(errors, given.device)
        peaks = largest_over_ranks(peaks, given.device)
        if max(errors) > bound:
            variant, num_chunks = variants[errors.index(max(errors))]
            progress.stop()
            if RANK == 0:
                print(
                    f"sweep_chunks: {variant} with {num_chunks} chunks has an error of "
                    f"{max(errors):.2e}, expected at most {bound:.2e}: nothing was timed",
                    file=sys.stderr,
                )
            raise SystemExit(1)

        progress.update(task, description="times")
        times: list[list[float]] = [[] for _ in configs]
        for _ in range(given.repeats):
            for config, of_config in zip(configs, times, strict=True):
                of_config.append(time_ms(problem, config))
                progress.advance(task)
        medians = largest_over_ranks([median(of_config) for of_config in times], given.device)

    about = environment(given)
    rows = [
        Row(
            **about,
            variant=variant,
            num_chunks=num_chunks,
            chunk_tokens=max(_chunk_sizes(given.tokens, num_chunks)),
            time_ms=time,
            peak_mib=peak / MIB,
            error=error,
        )
        for (variant, num_chunks), time, peak, error in zip(
            variants, medians, peaks, errors, strict=True
        )
    ]
    return rows, bound


def environment(given: argparse.Namespace) -> dict[str, Any]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    if given.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "commit": commit(),
        "device": device,
        "torch": torch.__version__,
        "triton": triton_version,
        "T": given.tokens,
        "H": given.hidden,
        "V": given.vocab // TP,
        "dtype": given.dtype,
        "tp": TP,
        "sp": given.sequence_parallel,
    }


def markdown(rows: list[Row], bound: float) -> str:
    first = rows[0]
    lines = [
        f"T = {first.T}, H = {first.H}, V = {first.V} rows a rank, {first.dtype}, TP {first.tp}"
        f"{', sequence parallel' if first.sp else ''}; {first.device}, torch {first.torch}, "
        f"triton {first.triton}, commit {first.commit}.",
        f"Errors are norm-relative to fp64, the largest of loss and both gradients; bound {bound:.1e}.",
        "",
        "| variant | chunks | tokens a chunk | forward + backward, ms | peak, MiB | of 1 chunk | error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    fewest = {row.variant: row for row in reversed(rows)}
    lines += [
        f"| {row.variant} | {row.num_chunks} | {row.chunk_tokens} | {row.time_ms:.1f} "
        f"| {row.peak_mib:.2f} | {row.peak_mib / fewest[row.variant].peak_mib:.4f} "
        f"| {row.error:.1e} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    colors = ["#08306b", "#e6550d", "#31a354", "#756bb1"]
    for color, variant in zip(colors, dict.fromkeys(row.variant for row in rows), strict=False):
        of_variant = [row for row in rows if row.variant == variant]
        counts = [row.num_chunks for row in of_variant]
        left.plot(counts, [row.peak_mib for row in of_variant], "o-", color=color, label=variant)
        right.plot(counts, [row.time_ms for row in of_variant], "o-", color=color, label=variant)
    counts = sorted({row.num_chunks for row in rows})
    itemsize = DTYPES[rows[0].dtype].itemsize
    ideal = [rows[0].T * rows[0].V * itemsize / num / MIB for num in counts]
    left.plot(counts, ideal, "--", color="#969696", label="T·V/chunks", zorder=0)
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:g}")
    where = "held by logits" if "CPU" in rows[0].device else "above inputs and outputs"
    left.set_ylabel(f"peak {where}, MiB per rank")
    right.set_ylabel("forward + backward, ms")
    right.set_ylim(0, 1.15 * max(row.time_ms for row in rows))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("chunks")
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    first = rows[0]
    sequence_parallel = " + SP" if first.sp else ""
    figure.suptitle(
        f"T = {first.T}, H = {first.H}, V = {first.V} a rank, {first.dtype}, "
        f"TP {first.tp}{sequence_parallel}, {first.device}",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    given = parse_arguments()
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if TP > 1:
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    console = Console(highlight=False)
    rows, bound = measure(given, console)
    if RANK == 0:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "sweep.json").write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        )
        text = markdown(rows, bound)
        (given.out / "sweep.md").write_text(text)
        plot(rows, given.out / "sweep.png")
        print(text)
        print(f"written to {given.out}: sweep.json, sweep.md, sweep.png")
    if TP > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
