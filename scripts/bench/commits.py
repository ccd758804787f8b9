"""The package of another checkout beside this one, in one process: did a change cost time?

    git worktree add build/old COMMIT
    python -m scripts.bench --preset commits --old build/old

Each row of this checkout is over the old one's: the median of the blocks' own ratios with its 95 % interval,
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
from megatron_fused_ce.scripts.bench.cases import Cell, parse_strategy
from megatron_fused_ce.scripts.bench.loss import Loss
from megatron_fused_ce.scripts.bench.problem import PEER, Case, Op, Outputs, Problem, World, bare

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


def _loss(strategy: str, problem: Problem) -> Outputs:
    package, world = import_module(PACKAGE), problem.world
    loss = package.fused_linear_cross_entropy(
        problem.hidden,
        problem.weight,
        problem.labels,
        tp_group=world.group if world.size > 1 else None,
        sequence_parallel=world.sequence_parallel,
        token_weights=problem.token_weights,
        config=package.FusedCEConfig(**parse_strategy(strategy)),
    )
    return {"loss": loss}


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    if not (given.old / PACKAGE / "__init__.py").is_file():
        raise UsageError(f"{given.old} is no checkout of this project: it has no {PACKAGE}")
    found: list[Case] = []
    for name in given.strategies:
        shared: dict[str, Any] = {"run": partial(_loss, name)}
        if parse_strategy(name)["strategy"] == "recompute":
            shared |= {"base": "roof-4", "products": 4}
        found.append(Old(f"old {name}", PEER, folder=given.old.resolve(), **shared))
        found.append(Case(name, over={"over_old": f"old {name}"}, **shared))
    return found


OP = Op(Loss, cases_of, (bare("roof", 3), bare("roof-4", 4)), over_ranks=True, wgrad_accumulator="returned")
