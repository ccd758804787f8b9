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
import re
import statistics
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from megatron_fused_ce.cli.command_line import Parser, UsageError, command, whole, writable_file
from megatron_fused_ce.scripts.bench.cases import Cell, parse_strategy, world_size
from megatron_fused_ce.scripts.bench.measure import interleave
from megatron_fused_ce.scripts.bench.op import Case, turn
from megatron_fused_ce.scripts.bench.problem import Outputs, Problem, World
from megatron_fused_ce.scripts.lib import gloo, results

PACKAGE = "megatron_fused_ce"


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

    def turn(self, problem: Problem, strategy: str, steps: int) -> list[float]:
        """``[forward, backward, both, host]`` ms of a step, the first ones untimed."""
        config = self._config(**parse_strategy(strategy))

        def run(problem: Problem) -> Outputs:
            world = problem.world
            loss = self._op(
                problem.hidden,
                problem.weight,
                problem.labels,
                tp_group=world.group if world.size > 1 else None,
                sequence_parallel=world.sequence_parallel,
                token_weights=problem.token_weights,
                config=config,
            )
            return {"loss": loss}

        with self:
            return turn(partial(Case("", run=run).step, problem), problem.world, warm=4, steps=steps)


def both(old: Path) -> dict[str, Checkout]:
    """The other checkout and this one. From here on the package is that of a checkout, never the one that
    read the command line."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    return {"old": Checkout(old), "new": Checkout(results.REPOSITORY)}


def difference(old: list[float], new: list[float]) -> tuple[float, float]:
    """Mean of (new - old) / old over the blocks, and half of its 95 % interval."""
    ratios = [(n - o) / o for o, n in zip(old, new, strict=True)]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else math.nan
    return statistics.mean(ratios), 1.96 * spread / math.sqrt(len(ratios))


def shape_of(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){2}", text):
        raise argparse.ArgumentTypeError(f"expected TxHxV, such as 4096x1024x32064, got {text[:40]!r}")
    return tuple(map(int, text.split("x")))


def compared(text: str, strategy: str, samples: dict[str, list[list[float]]], tell: bool) -> results.Row:
    """The row of one shape and strategy, which is printed too."""
    row: results.Row = {"shape": text, "variant": strategy}
    for column, what in ((2, "device"), (3, "host")):
        old, new = ([sample[column] for sample in samples[name]] for name in ("old", "new"))
        mean, half = difference(old, new)
        of_old, of_new = statistics.median(old), statistics.median(new)
        row[what] = {"old_ms": of_old, "new_ms": of_new, "difference": mean, "half_interval": half}
        line = f"{text:>20} {strategy:16} {what:6} old {of_old:8.3f} ms  new {of_new:8.3f} ms  "
        if tell:
            print(f"{line}{100 * mean:+6.2f} % ± {100 * half:.2f}", flush=True)
    device = row["device"]
    row |= {"time_ms": device["new_ms"], "host_ms": row["host"]["new_ms"]}
    return row | {"ratio": 1 + device["difference"], "spread": device["half_interval"]}


@command("commits")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.bench.commits", __doc__ or "")
    add = parser.add_argument
    add("--old", type=Path, required=True, help="checkout of the other commit")
    add("--shapes", type=shape_of, nargs="+", default=[(4096, 1024, 32064)], metavar="TxHxV")
    add("--strategies", nargs="+", default=["store", "grad_in_forward"], metavar="NAME[:C]")
    add("--sequence-parallel", action="store_true")
    add("--blocks", type=whole(most=10**6), default=15)
    add("--steps", type=whole(most=10**6), default=5, help="of a block, after a warm-up")
    add("--json", type=Path)
    given = parser.parse_args(words)
    if not (given.old / PACKAGE / "__init__.py").is_file():
        raise UsageError(f"{given.old} is no checkout of this project: it has no {PACKAGE}")
    for name in given.strategies:
        parse_strategy(name)
    if given.json:
        writable_file(given.json)
    world = World(given.sequence_parallel)
    device = torch.cuda.get_device_name() if world.on_gpu else ""
    source = results.made_by(device, ["scripts.bench.commits", *words])
    checkouts = both(given.old)
    rows = []
    for T, H, V in given.shapes:
        cell = Cell("", T, H, V * world_size())
        dtype = torch.bfloat16 if world.on_gpu else torch.float32
        problem = Problem(cell, world, dtype=dtype, wgrad_accumulator="returned")
        for strategy in given.strategies:
            turns = {n: partial(c.turn, problem, strategy, given.steps) for n, c in checkouts.items()}
            samples = interleave(turns, (), given.blocks)
            rows.append(compared(f"{T}x{H}x{V}", strategy, samples, world.rank == 0))
        del problem
    if given.json and world.rank == 0:
        results.write(given.json, rows, source)
    world.close()
    return 0


if __name__ == "__main__":
    gloo.end(main())
