"""The package of another checkout beside this one, in one process: did a change cost time?

    git worktree add build/old COMMIT
    python -m scripts.bench --preset commits --old build/old
    torchrun --nproc-per-node 2 -m scripts.bench --preset commits --old build/old --sequence-parallel

A row of this checkout is over the old one's, in the step's and in the host's time; both return gradients by
``fused_linear_cross_entropy``.
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

from megatron_fused_ce.scripts.bench import loss
from megatron_fused_ce.scripts.bench.cases import PACKAGE, Cell, parse_strategy
from megatron_fused_ce.scripts.bench.problem import PEER, Case, Op, Outputs, Problem, World

#: Modules of the old checkout, while this one's are in their place.
ASIDE: dict[str, ModuleType] = {}


class Returned(loss.Loss):
    wgrad_accumulator = "returned"


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
            found = import_module(PACKAGE).__file__
            if self.folder not in Path(str(found)).resolve().parents:
                raise ValueError(f"{PACKAGE} came from {found}")
            with super().ready(problem) as step:
                yield step
        finally:
            sys.path.remove(str(self.folder))
            ASIDE.update(_taken_out())
            sys.modules.update(own)


def _taken_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == PACKAGE}


def _loss(strategy: str, found: dict[str, Any], problem: Problem) -> Outputs:
    """``found``: what belongs to no step, of the case's own checkout."""
    if not found:
        package, world = import_module(PACKAGE), problem.world
        found["op"] = partial(
            package.fused_linear_cross_entropy,
            tp_group=world.group if world.size > 1 else None,
            sequence_parallel=world.sequence_parallel,
            config=package.FusedCEConfig(**parse_strategy(strategy)),
        )
    operands = problem.hidden, problem.weight, problem.labels
    return {"loss": found["op"](*operands, token_weights=problem.token_weights)}


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    found: list[Case] = []
    for name in given.strategies:
        more = loss.FOUR if parse_strategy(name)["strategy"] == "recompute" else {}
        old, new = partial(_loss, name, {}), partial(_loss, name, {})
        found.append(Old(f"old {name}", PEER, old, folder=given.old.resolve(), **more))
        found.append(Case(name, run=new, **{**more, "over": {"over_old": f"old {name}"}}))
    return found


OP = Op(Returned, cases_of, loss.OP.bases)
