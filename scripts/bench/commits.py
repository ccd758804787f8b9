"""Times the op of another commit beside this checkout's, interleaved in one process: did a change cost time?

    git worktree add build/old COMMIT
    python -m scripts.bench.commits --old build/old --shapes 4096x1024x32064 32768x4096x128256
    torchrun --nproc-per-node 2 -m scripts.bench.commits --old build/old --sequence-parallel

A shape is TxHxV, V of this rank. One step is forward and backward of ``fused_linear_cross_entropy`` with
gradients returned to autograd, on random data. Device time is between two events, host time is what the calls
take to return, with the device idle before. The last column is the mean paired difference of the blocks,
(new - old) / old, with its 95 % interval. ``--json FILE`` writes every figure.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_fused_ce.command_line import Parser, UsageError, command, whole, writable_file
from megatron_fused_ce.scripts.lib import results

PACKAGE = "megatron_fused_ce"
#: The name of strategy grad_in_forward until 2026-11-22.
OLD_NAMES = {"grad_in_forward": "eager"}


class Checkout:
    """The package of one folder; its modules are in ``sys.modules`` only while it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._modules: dict[str, ModuleType] = {}
        with self:
            package = import_module(PACKAGE)
            home = Path(str(package.__file__)).resolve()
            if self.folder not in home.parents:
                raise ValueError(f"{PACKAGE} came from {home}, not from {self.folder}")
            self._op, self._config = package.fused_linear_cross_entropy, package.FusedCEConfig

    def __enter__(self) -> Checkout:
        sys.path.insert(0, str(self.folder))
        sys.modules.update(self._modules)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.path.remove(str(self.folder))
        for name in [n for n in sys.modules if n.partition(".")[0] == PACKAGE]:
            self._modules[name] = sys.modules.pop(name)

    def config(self, strategy: str, chunk_tokens: int | None) -> Any:
        try:
            return self._config(strategy=strategy, chunk_tokens=chunk_tokens)
        except ValueError:
            return self._config(strategy=OLD_NAMES[strategy], chunk_tokens=chunk_tokens)

    def step(self, problem: dict[str, Any], config: Any) -> None:
        loss = self._op(**problem["inputs"], config=config)
        loss.backward(problem["grad_loss"])


def make_problem(shape: tuple[int, int, int], group: Any, sequence_parallel: bool) -> Any:
    """bf16 hidden states of this rank, its rows of the weight, labels over the whole vocabulary."""
    tokens, hidden_size, rows = shape
    ranks, rank = (group.size(), group.rank()) if group else (1, 0)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(1)
    weights = torch.rand(tokens, device=device, generator=generator)
    labels = torch.randint(rows * ranks, (tokens,), device=device, generator=generator)
    hidden = torch.randn(tokens, hidden_size, device=device, generator=generator).to(dtype)
    if sequence_parallel and ranks > 1:
        hidden = hidden.chunk(ranks)[rank].clone()
    generator.manual_seed(2 + rank)
    weight = torch.randn(rows, hidden_size, device=device, generator=generator)
    weight = (weight * (2 / math.sqrt(hidden_size))).to(dtype)
    inputs = {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "labels": labels,
        "tp_group": group,
        "sequence_parallel": sequence_parallel and ranks > 1,
        "token_weights": weights,
    }
    return {"inputs": inputs, "grad_loss": 0.5 * weights, "device": device}


def timed(checkout: Checkout, problem: Any, config: Any, steps: int) -> tuple[float, float]:
    """(device, host) ms of a step, the median over ``steps``."""
    on_gpu = problem["device"].type == "cuda"
    device_ms, host_ms = [], []
    with checkout:
        for _ in range(steps + 1):  # the first warms up
            problem["inputs"]["hidden"].grad = problem["inputs"]["weight"].grad = None
            if on_gpu:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                before.record()
            start = time.perf_counter()
            checkout.step(problem, config)
            host_ms.append(1e3 * (time.perf_counter() - start))
            if on_gpu:
                after.record()
                torch.cuda.synchronize()
                device_ms.append(before.elapsed_time(after))
    return statistics.median((device_ms or host_ms)[1:]), statistics.median(host_ms[1:])


def difference(old: list[float], new: list[float]) -> tuple[float, float]:
    """Mean of (new - old) / old over the blocks, and half of its 95 % interval."""
    ratios = [(n - o) / o for o, n in zip(old, new, strict=True)]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else math.nan
    return statistics.mean(ratios), 1.96 * spread / math.sqrt(len(ratios))


def shape_of(text: str) -> tuple[int, int, int]:
    try:
        tokens, hidden_size, rows = map(whole(), text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"expected TxHxV, such as 4096x1024x32064, got {text[:40]!r}"
        ) from None
    return tokens, hidden_size, rows


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m scripts.bench.commits", __doc__ or "")
    add = parser.add_argument
    add("--old", type=Path, required=True, help="checkout of the other commit")
    add("--shapes", type=shape_of, nargs="+", default=[(4096, 1024, 32064)], metavar="TxHxV")
    add("--strategies", nargs="+", default=["store", "grad_in_forward"])
    add("--chunk-tokens", type=whole())
    add("--sequence-parallel", action="store_true")
    add("--blocks", type=whole(most=10**6), default=15)
    add("--steps", type=whole(most=10**6), default=5, help="of a block, after a warm-up")
    add("--json", type=Path)
    given = parser.parse_args(words)
    if not (given.old / PACKAGE / "__init__.py").is_file():
        raise UsageError(f"{given.old} is no checkout of this project: it has no {PACKAGE}")
    if given.json:
        writable_file(given.json)
    return given


@command("commits")
def main(words: list[str]) -> int:
    given = parse(words)
    source = results.made_by("", ["scripts.bench.commits", *words])
    # From here on the package is that of a checkout, never the one that read the command line.
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    this = Checkout(results.REPOSITORY)
    group, rank = None, int(os.environ.get("RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with this:
            gloo = import_module(f"{PACKAGE}.scripts.lib.gloo")
            gloo.use_one_thread()
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        group = dist.group.WORLD
    checkouts = {"old": Checkout(given.old), "new": this}
    order = random.Random(1)  # the same on every rank
    rows = []
    for shape in given.shapes:
        problem = make_problem(shape, group, given.sequence_parallel)
        for strategy in given.strategies:
            times: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
            configs = {n: c.config(strategy, given.chunk_tokens) for n, c in checkouts.items()}
            for _ in range(given.blocks):
                for name in order.sample(("old", "new"), 2):
                    took = timed(checkouts[name], problem, configs[name], given.steps)
                    times[name].append(took)
            row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "variant": strategy}
            for index, what in enumerate(("device", "host")):
                old, new = ([took[index] for took in times[name]] for name in ("old", "new"))
                mean, half = difference(old, new)
                row[what] = {
                    "old_ms": statistics.median(old),
                    "new_ms": statistics.median(new),
                    "difference": mean,
                    "half_interval": half,
                }
                if rank == 0:
                    print(
                        f"{row['shape']:>20} {strategy:16} {what:6} old {row[what]['old_ms']:8.3f} ms  "
                        f"new {row[what]['new_ms']:8.3f} ms  {100 * mean:+6.2f} % ± {100 * half:.2f}",
                        flush=True,
                    )
            rows.append(
                {
                    **row,
                    "time_ms": row["device"]["new_ms"],
                    "host_ms": row["host"]["new_ms"],
                    "ratio": 1 + row["device"]["difference"],
                    "spread": row["device"]["half_interval"],
                }
            )
        del problem
    if given.json and rank == 0:
        if torch.cuda.is_available():
            source["device"] = torch.cuda.get_device_name()
        results.write(given.json, rows, source)
    if group is not None:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
