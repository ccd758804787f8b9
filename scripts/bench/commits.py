"""The package of another checkout beside this one, in one process: did a change cost time?

    git worktree add build/old COMMIT
    python -m scripts.bench.commits --old build/old
    torchrun --nproc-per-node 2 -m scripts.bench.commits --old build/old --sequence-parallel

It is scripts.bench with ``--preset commits``, whose options it takes. Each row of this checkout is over the old one's: the median of the blocks' own ratios with its 95 % interval,
of the step's and of the host's time. Both return gradients to autograd, by ``fused_linear_cross_entropy``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.bench import __main__ as bench
from megatron_fused_ce.scripts.bench.cases import Cell, parse_strategy
from megatron_fused_ce.scripts.bench.loss import Loss
from megatron_fused_ce.scripts.bench.problem import PEER, Case, Op, Outputs, Problem, World, bare
from megatron_fused_ce.scripts.lib import gloo

PACKAGE = "megatron_fused_ce"
#: Modules of the old checkout, while this one's are in their place.
ASIDE: dict[str, ModuleType] = {}


@dataclass(frozen=True)
class Old(Case):
    """A case of the package in a folder."""

    folder: Path = Path()

    @contextmanager
    def ready(self, problem: Problem) -> Iterator[Callable[..., Outputs]]:
        own = _taken_out()
        sys.modules.update(ASIDE)
        sys.path.insert(0, str(self.folder))
        try:
            found = Path(str(import_module(PACKAGE).__file__))
            if self.folder not in found.resolve().parents:
                raise ValueError(f"{PACKAGE} came from {found}")
            with super().ready(problem) as step:
                yield step
        finally:
            sys.path.remove(str(self.folder))
            ASIDE.update(_taken_out())
            sys.modules.update(own)


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def _loss(strategy: str, found: dict[str, Any], problem: Problem) -> Outputs:
    """``found``: what belongs to no step, of the case's own checkout."""
    if not found:
        package = import_module(PACKAGE)
        found["op"] = package.fused_linear_cross_entropy
        found["config"] = package.FusedCEConfig(**parse_strategy(strategy))
    world = problem.world
    loss = found["op"](
        problem.hidden,
        problem.weight,
        problem.labels,
        tp_group=world.group if world.size > 1 else None,
        sequence_parallel=world.sequence_parallel,
        token_weights=problem.token_weights,
        config=found["config"],
    )
    return {"loss": loss}


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    if not (given.old / PACKAGE / "__init__.py").is_file():
        raise UsageError(f"{given.old} is no checkout of this project: it has no {PACKAGE}")
    found: list[Case] = []
    for name in given.strategies:
        four = parse_strategy(name)["strategy"] == "recompute"
        more: dict[str, Any] = {"base": "roof-4", "products": 4} if four else {}
        old, new = partial(_loss, name, {}), partial(_loss, name, {})
        found.append(Old(f"old {name}", PEER, old, folder=given.old.resolve(), **more))
        found.append(Case(name, run=new, over={"over_old": f"old {name}"}, **more))
    return found


OP = Op(Loss, cases_of, (bare("roof", 3), bare("roof-4", 4)), over_ranks=True, wgrad_accumulator="returned")


def main(words: list[str] | None = None) -> int:
    return bench.main(["--preset", "commits", *(sys.argv[1:] if words is None else words)])


if __name__ == "__main__":
    gloo.end(main())
