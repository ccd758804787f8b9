"""An op's cases, each a row of the result; the bare products below them; a turn of either on the clock.

The chip is limited by power and power depends on the data, so the products run on the operands of the real
step and on a true gradient of the logits, rounded to the step's dtype; ``grad_weight`` ends where every
case's does.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.head.grad_weight import accumulate_
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.problem import Clock, Outputs, Problem, World
from megatron_fused_ce.scripts.lib import gpu

OURS, MEGATRON, PEER, BASE = "ours", "megatron", "peer", "base"

#: Longest reason that still fits a cell of the result table.
REASON_CHARS = 160
#: CuTe's errors come in terminal colours.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Mark = Callable[[], None]


def nothing() -> None:
    """A mark that is not timed."""


def one_line(error: BaseException) -> str:
    """``error`` as one line of at most `REASON_CHARS`: its type and its text without colours."""
    text = " ".join(_COLOUR.sub("", str(error)).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"


def why_not(find: Callable[[], object]) -> str | None:
    """Why what ``find`` finds cannot be had, in one line."""
    try:
        find()
    except Exception as error:
        return one_line(error)
    return None


def limits(*dtypes: torch.dtype, T: int = 1, H: int = 1, V: int = 1) -> Callable[[Problem], str | None]:
    """Why a problem is refused that has another dtype, or sizes that these do not divide."""

    def refusal(problem: Problem) -> str | None:
        if problem.dtype not in dtypes:
            return f"takes {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} only"
        sizes = {"T": problem.num_tokens, "H": problem.weight.shape[1], "V": problem.num_rows}
        rules = {"T": T, "H": H, "V": V}
        if any(sizes[name] % divisor for name, divisor in rules.items()):
            return "needs " + " and ".join(f"{n} % {by} == 0" for n, by in rules.items() if by > 1)
        return None

    return refusal


@dataclass(frozen=True)
class Case:
    """One row. ``why_not`` says in one line why there is nothing to run."""

    name: str
    family: str = OURS
    run: Callable[[Any], Outputs] | None = None  # the forward: outputs with their graph
    kind: Hashable = None  # what the definition has to know
    #: (output, the problem's attribute that is its upstream gradient); none: forward only
    grads: tuple[tuple[str, str], ...] = (("loss", "grad_loss"),)
    base: str = "roof"  # the row that is its ratio's denominator
    products: int = 3  # matrix products of a step
    over: dict[str, str] = field(default_factory=dict)  # further ratio -> the row that it is over
    why_not: str | None = None
    limits: Callable[[Any], str | None] | None = None  # why it refuses a problem
    #: its logits are exact: the outputs' error is no more than eager PyTorch's, which rounds them
    is_exact: bool = False
    told: dict[str, Any] = field(default_factory=dict)  # what it found out, for its row

    def step(self, problem: Problem, mark: Mark = nothing) -> Outputs:
        """Forward and backward, with a mark before, between and after; the outputs."""
        assert self.run is not None
        problem.reset()
        mark()
        with torch.set_grad_enabled(bool(self.grads)):
            outputs = self.run(problem)
        mark()
        if self.grads:
            upstreams = [getattr(problem, of) for _, of in self.grads]
            torch.autograd.backward([outputs[name] for name, _ in self.grads], upstreams)
            problem.finish_backward()
        mark()
        return {name: value.detach() for name, value in outputs.items()}

    @contextlib.contextmanager
    def ready(self, problem: Problem) -> Iterator[Callable[[Mark], Outputs]]:
        """Its step, while what that needs beside the problem is there."""
        yield partial(self.step, problem)


@dataclass(frozen=True)
class Bare(Case):
    """Matrix products alone: each side's logits, then ``grad_hidden`` and ``grad_weight``."""

    backward: bool = True
    again: bool = False  # the logits once more, as `recompute` makes them

    @contextlib.contextmanager
    def ready(self, problem: Problem) -> Iterator[Callable[[Mark], Outputs]]:
        """With its logits ``[T, V]`` and a true gradient of them."""
        grad = logits = problem.hidden.new_empty(problem.num_tokens, problem.num_rows)
        sides, main_grad = problem.sides(), problem.main_grad
        hidden, weight = sides[-1]
        with torch.no_grad():
            if self.backward:
                grad = torch.empty_like(logits)
                for part in problem.blocks():
                    grad[part] = problem.grad_logits(part)
            of_hidden = torch.empty_like(hidden)
            of_weight = torch.empty_like(problem.weight) if main_grad is None else main_grad

            def step(mark: Mark) -> Outputs:
                mark()
                for of_side, rows in sides:
                    torch.mm(of_side, rows.t(), out=logits)
                mark()
                if self.again:
                    torch.mm(hidden, weight.t(), out=logits)
                if self.backward:
                    torch.mm(grad, weight, out=of_hidden)
                    if main_grad is None:
                        torch.mm(grad.t(), hidden, out=of_weight)
                    else:
                        accumulate_(main_grad, grad, hidden)
                mark()
                return {"grad_hidden": of_hidden, "grad_weight": of_weight}

            yield step


def bare(name: str, products: int, **how: Any) -> Bare:
    """The base of that name, and its own."""
    return Bare(name, BASE, base=name, products=products, **how)


@dataclass(frozen=True)
class Op:
    """What a preset measures."""

    problem: type[Problem]
    cases_of: Callable[[argparse.Namespace, Cell, World], list[Case]]
    bases: tuple[Bare, ...] = ()
    over_ranks: bool = False  # knows tensor parallelism
    wgrad_accumulator: str = "main_grad"

    def rows(self, cases: Sequence[Case]) -> list[Case]:
        """The bases that these need, then they."""
        wanted = {case.base for case in cases if case.why_not is None}
        return [*(base for base in self.bases if base.name in wanted), *cases]

    def chosen(self, given: argparse.Namespace, cells: Sequence[Cell], world: World) -> list[list[Case]]:
        """Each cell's cases but for ``--skip``; of ``--options`` alone, and what they are over.

        A word names the rows that are called so, up to a comma. Raises UsageError where there is none.
        """

        def named(name: str, words: Sequence[str]) -> bool:
            return any(f"{name}, ".startswith(f"{word}, ") for word in words)

        everything = [self.cases_of(given, cell, world) for cell in cells]
        names = dict.fromkeys(case.name for cases in everything for case in cases)
        wanted = given.options or list(names)
        if unknown := [word for word in wanted if not any(named(name, [word]) for name in names)]:
            raise UsageError(f"no row {', '.join(unknown)}; there are {', '.join(names)}")
        bases = {case.base for cases in everything for case in cases}
        wanted = [name for name in names if name in bases or named(name, wanted)]
        wanted = [name for name in wanted if not named(name, given.skip)]
        return [[case for case in cases if case.name in wanted] for cases in everything]


# --- on the clock ----------------------------------------------------------------------------------


def turn(step: Callable[[Mark], object], world: World, warm: int, steps: int) -> list[float]:
    """``[forward, backward, both, host]`` ms: medians over ``steps`` steps, without a wait between them.

    ``warm`` untimed steps come first; what the calls of one take to return, on an idle device, is the host's
    time, of the last three of them but the first. The GPU is looked at in the last step.
    """
    host: list[float] = []
    for _ in range(warm):
        world.synchronise()
        start = time.perf_counter()
        step(nothing)
        host.append(1e3 * (time.perf_counter() - start))
    clocks = [Clock(world.on_gpu) for _ in range(steps)]
    for clock in clocks:
        step(clock.mark)
    clocks[-1].wait_for_start()
    gpu.look()
    spans = [clock.spans_ms() for clock in clocks]
    columns = [*zip(*spans, strict=True), [sum(span) for span in spans], host[1:][-3:] or host or [0.0]]
    return [statistics.median(column) for column in columns]
