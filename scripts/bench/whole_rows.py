"""What has no backward: the likeliest K ids, and log-probabilities in Megatron's batch-invariant mode.

    python -m scripts.bench.whole_rows topk --name topk
    python -m scripts.bench.whole_rows invariant --name invariant
    torchrun --nproc-per-node 2 -m scripts.bench.whole_rows invariant --tokens 65536 --name invariant-tp2

``topk``: time over that of the same chunks' GEMMs with fp32 output, and peak above inputs and outputs; beside
it ``torch.topk`` on whole logits, at --whole-tokens. Ids and log-probabilities of some tokens are compared
with fp64 before.

``invariant``: whether chunks of each length have the bits of whole logits (--whole-tokens at once) by
Megatron's own kernels, of --tokens tokens; times and peaks of both. The exit status is 1 where bits differ or
ids are wrong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.chunking import Cut
from megatron_fused_ce.command_line import Parser, command, whole
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.logits.gemm_rows import write_logits
from megatron_fused_ce.rl import batch_invariant_log_probs
from megatron_fused_ce.scripts.bench.problem import MIB, World
from megatron_fused_ce.scripts.lib import gloo, gpu, results, tables
from megatron_fused_ce.shards import CHUNK_BYTES
from megatron_fused_ce.topk import fused_linear_topk

MODE = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
#: Tokens that are compared with fp64.
CHECKED = 128


def measured(world: World, step: Callable[[], Any], steps: int) -> tuple[float, float, float]:
    """Median ms of a step, their spread, and the peak in MiB above what was there before and what it gave."""
    world.synchronise()
    before = peak = 0
    if world.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    made = step()
    world.synchronise()
    if world.on_gpu:
        peak = torch.cuda.max_memory_allocated() - before
    kept = sum(x.nbytes for x in (made if isinstance(made, tuple) else (made,)) if isinstance(x, Tensor))
    del made
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        world.synchronise()
        times.append(1e3 * (time.perf_counter() - start))
    step()
    gpu.look()
    times = sorted(world.slowest(times))
    median = times[len(times) // 2]
    return median, (times[-1] - times[0]) / median, max(0.0, world.slowest([float(peak - kept)])[0]) / MIB


def operands(world: World, num_tokens: int, hidden_size: int, vocab: int) -> tuple[Tensor, Tensor]:
    """bf16 hidden states of all tokens and this rank's rows; logits of standard deviation 2."""
    generator = torch.Generator(device=world.device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=world.device, dtype=torch.bfloat16)

    hidden, weight = normal(num_tokens, hidden_size), normal(vocab, hidden_size) * (2.0 / hidden_size**0.5)
    return hidden, weight.chunk(world.size)[world.rank].clone()


def topk(given: argparse.Namespace, world: World) -> Iterator[results.Row]:
    vocab, k = given.vocabs[0], given.k
    hidden, weight = operands(world, given.tokens, given.hidden, vocab)
    group = world.group if world.size > 1 else None
    ours = partial(fused_linear_topk, tp_group=group)
    made, ids = ours(hidden[:CHECKED], weight, k)
    if world.size == 1:
        log_p = (hidden[:CHECKED].double() @ weight.double().t()).log_softmax(-1)
        off = (log_p.gather(1, ids) - made).abs().max(), (log_p.topk(k).values - made).abs().max()
        if not max(off) < 1e-4:
            raise ArithmeticError(f"ids or log-probabilities are off by {max(off):.1e} from fp64")
    tokens = CHUNK_BYTES // (4 * len(weight))
    chunks = Cut.of_length(len(hidden), max(tokens - tokens % 128, 1)).chunks
    buffer = hidden.new_empty((chunks[0].num_tokens, len(weight)), dtype=torch.float32)

    def gemms() -> None:
        for chunk in chunks:
            write_logits(hidden[chunk.start : chunk.stop], weight, buffer[: chunk.num_tokens])

    def on_whole_logits() -> tuple[Tensor, Tensor]:
        first = hidden[: given.whole_tokens]
        logits = first.new_empty((len(first), len(weight)), dtype=torch.float32)
        write_logits(first, weight, logits)
        lse = logits.logsumexp(-1, keepdim=True)
        values, found = logits.topk(k)
        return values.sub_(lse), found

    some, few = hidden[: given.whole_tokens], f"{given.whole_tokens} tokens"
    steps: dict[str, Callable[[], Any]] = {
        "GEMMs of the chunks, fp32 output": gemms,
        f"fused_linear_topk, K = {k}": partial(ours, hidden, weight, k),
        f"fused_linear_topk, {few}": partial(ours, some, weight, k),
        f"torch.topk on whole logits, {few}": on_whole_logits,
    }
    base = None
    for name, step in steps.items():
        time_ms, spread, peak_mib = measured(world, step, given.steps)
        base = base or time_ms
        row = {"shape": f"{given.tokens} x {given.hidden} x {vocab}", "variant": name, "time_ms": time_ms}
        ratio = None if few in name else time_ms / base
        yield {**row, "spread": spread, "peak_mib": peak_mib, "ratio": ratio}


def invariant(given: argparse.Namespace, world: World) -> Iterator[results.Row]:
    mode: Any = import_module(MODE).set_batch_invariant_mode
    chosen = {"backend": given.backend} if "backend" in signature(mode).parameters else {}
    group = world.group if world.size > 1 else None
    for vocab in (vocab - vocab % world.size for vocab in given.vocabs):
        _, weight = operands(world, 1, given.hidden, vocab)
        generator = torch.Generator(device=world.device).manual_seed(2)
        rows: dict[str, results.Row] = {}
        for first in range(0, given.tokens, given.whole_tokens):
            size = min(given.whole_tokens, given.tokens - first)
            hidden = torch.randn(size, given.hidden, generator=generator, device=world.device).bfloat16()
            labels = torch.randint(vocab, (size,), generator=generator, device=world.device)
            call = hidden, weight, labels
            steps: dict[str, Callable[[], Tensor]] = {"whole logits": partial(whole_logits, world, *call)}
            for length in (64, 1024) if first else (64, 1024, 1, 63, 65, size):
                config = FusedCEConfig(chunk_tokens=length)
                ours = partial(batch_invariant_log_probs, tp_group=group, config=config)
                steps[f"chunks of {length}"] = partial(ours, *call)
            with mode(True, **chosen), torch.no_grad():
                right = steps["whole logits"]()
                for name, step in steps.items():
                    row = rows.setdefault(name, {"variant": name, "tokens": 0, "different": 0})
                    row["tokens"] += size
                    row["different"] += int((step() != right).sum())
                    if not first:
                        found = measured(world, step, given.steps)
                        row |= zip(("time_ms", "spread", "peak_mib"), found, strict=True)
        for row in rows.values():
            row["ratio"] = row["time_ms"] / rows["whole logits"]["time_ms"]
            shape = f"{row['tokens']} x {given.hidden} x {vocab}, tp {world.size}"
            yield {"shape": shape, "backend": given.backend, **row}


def whole_logits(world: World, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As Megatron gathers them, and its ``selective_log_softmax``."""
    logits = torch.mm(hidden, weight.t())
    if world.size > 1:
        parts = [torch.empty_like(logits) for _ in range(world.size)]
        torch.distributed.all_gather(parts, logits, group=world.group)
        logits = torch.cat(parts, dim=-1)
    log_p = torch.nn.functional.log_softmax(logits.float(), dim=-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@command("bench.whole_rows")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.bench.whole_rows", __doc__ or "")
    parser.add_argument("what", choices=("topk", "invariant"))
    sizes = {"tokens": None, "whole-tokens": None, "hidden": 4096, "k": 64, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=whole(most=10**8), default=default)
    parser.add_argument("--vocabs", type=whole(most=10**7), nargs="+")
    parser.add_argument("--backend", default="triton", choices=("triton", "deepgemm"))
    parser.add_argument("--name", help="write docs/benchmarks/results/DATE-DEVICE-NAME.json")
    given = parser.parse_args(words)
    of_topk = given.what == "topk"
    given.tokens = given.tokens or (131072 if of_topk else 10**6)
    given.whole_tokens = given.whole_tokens or (16384 if of_topk else 4096)
    given.vocabs = given.vocabs or ([248320] if of_topk else [128256, 151936, 248320])
    world = World()
    try:
        rows = list((topk if of_topk else invariant)(given, world))
        if world.rank == 0:
            names = ("shape", "variant", "time_ms", "ratio", "peak_mib", "different")
            texts = [[row["shape"], row["variant"]] for row in rows]
            cells = [[tables.cell(row.get(name), ".5g") for name in names[2:]] for row in rows]
            print(tables.markdown(names, [a + b for a, b in zip(texts, cells, strict=True)], left=2))
            if given.name:
                device = torch.cuda.get_device_name() if world.on_gpu else ""
                path = results.default_path(results.RESULTS, device, given.name)
                results.write(path, rows, results.made_by(device, ["scripts.bench.whole_rows", *words]))
                print(f"written: {path}")
        return int(any(row.get("different") for row in rows))
    finally:
        world.close()


if __name__ == "__main__":
    gloo.end(main())
