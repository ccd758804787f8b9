"""Rows of other outputs than a loss of labels: checked against fp64, then timed in turn (rl.py, distill.py).

A `Case` makes outputs and takes an upstream gradient for some of them; a `Subject` gives the cases of a cell,
their further inputs and their definition in plain PyTorch. Before anything is timed each row's outputs and
gradients are compared with the definition in fp64 on ``--check-tokens`` tokens, and ours at the timed size on
`SAMPLED` of its tokens; ours may have twice eager PyTorch's error, or `FLOOR`. Times and peaks are taken as
for the other presets (measure.py). Gradients end in ``.grad``, in the operands' dtype.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import promise
from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.measure import (
    OUT_OF_MEMORY,
    Outcome,
    Settings,
    WrongVariant,
    attempt,
    give_back,
    measure_peak,
    measure_times,
    rounded,
    say,
    turn,
)
from megatron_fused_ce.scripts.bench.problem import DTYPES, MIB, Problem, World
from megatron_fused_ce.scripts.bench.roof import Roof
from megatron_fused_ce.scripts.bench.variants import Variant
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.reference import FLOOR, relative_error
from megatron_fused_ce.scripts.lib.results import Row

#: Tokens of the timed size whose outputs and ``grad_hidden`` are compared with fp64.
SAMPLED = 64

Outputs = dict[str, Tensor]
Mark = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One row. Without ``made`` and ``products`` it is not run: ``why_not``."""

    name: str
    made: Callable[[Problem, Any], Outputs] | None = None  # outputs with their graph
    kind: Hashable = None  # what the definition has to know
    #: (output, name of its upstream gradient among the inputs); none: forward only
    grads: tuple[tuple[str, str], ...] = ()
    is_ours: bool = True
    products: Callable[[Problem, Any, Mark], None] | None = None  # bare, with a mark before the backward's
    why_not: str | None = None
    too_large: Callable[[Problem], str | None] | None = None  # why it is not run at this size
    over: dict[str, str] = field(default_factory=dict)  # key of the row -> the row that it is divided by

    def step(self, inputs: Any, problem: Problem, mark: Mark) -> Outputs:
        problem.reset()
        mark()
        if self.products is not None:
            with torch.no_grad():
                self.products(problem, inputs, mark)
            mark()
            return {}
        assert self.made is not None
        with torch.set_grad_enabled(bool(self.grads)):
            outputs = self.made(problem, inputs)
        mark()
        if self.grads:
            torch.autograd.backward(
                [outputs[name] for name, _ in self.grads], [getattr(inputs, of) for _, of in self.grads]
            )
        mark()
        return outputs


@dataclass(frozen=True)
class Subject:
    """What a preset measures."""

    title: str
    base: str  # the row of bare products: every ratio's denominator
    cases_of: Callable[[argparse.Namespace, Cell], list[Case]]
    inputs_of: Callable[[Problem, Cell], Any]
    #: (kind, hidden [t, H], weight [V, H], problem, inputs, tokens [t]) -> outputs
    plain: Callable[[Any, Tensor, Tensor, Problem, Any, Tensor], Outputs]


# --- checks ----------------------------------------------------------------------------------


def defined(
    subject: Subject, case: Case, problem: Problem, inputs: Any, dtype: torch.dtype, tokens: Tensor
) -> Outputs:
    """The definition's outputs and gradients for these tokens alone, computed in ``dtype``."""
    hidden = problem.hidden.detach()[tokens].to(dtype).requires_grad_()
    weight = problem.weight.detach().to(dtype).requires_grad_()
    with torch.set_grad_enabled(bool(case.grads)):
        found = subject.plain(case.kind, hidden, weight, problem, inputs, tokens)
    for at, (name, of) in enumerate(case.grads):
        upstream = getattr(inputs, of)
        upstream = upstream[tokens] if upstream.dim() else upstream
        found[name].backward(upstream.to(found[name].dtype), retain_graph=at + 1 < len(case.grads))
    found = {name: value.detach() for name, value in found.items()}
    if case.grads:
        assert hidden.grad is not None and weight.grad is not None
        found |= {"grad_hidden": hidden.grad, "grad_weight": weight.grad}
    return found


def errors(
    case: Case, problem: Problem, inputs: Any, true: Outputs, eager: dict[str, float], tokens: Tensor | None
) -> dict[str, tuple[float, float]]:
    """Of each output and gradient: norm-relative error, and what ours may have beside plain PyTorch's.

    ``tokens``: ``true`` is of these alone (and the weight's gradient then of no use).
    """
    found: dict[str, Tensor | None] = dict(case.step(inputs, problem, lambda: None))
    found |= {"grad_hidden": problem.hidden.grad, "grad_weight": problem.weight.grad}
    result = {}
    for name, exact in true.items():
        value = found.get(name)
        if name not in found or (tokens is not None and name == "grad_weight"):
            continue  # an output that was not asked for
        assert value is not None, f"{name} did not arrive"
        value = value.detach() if tokens is None else value.detach()[tokens]
        error = relative_error(value.view(exact.shape), exact)
        result[name] = (error, max(FLOOR[problem.dtype], 2 * eager[name]))
    problem.reset()
    return result


def check(
    subject: Subject,
    cases: list[Case],
    problem: Problem,
    inputs: Any,
    world: World,
    known: dict[str, Row],
    tokens: Tensor | None = None,
) -> None:
    """Fill in each row's errors, of ``tokens`` or of all. Raises ArithmeticError where ours is wrong."""
    true: Outputs = {}
    eager: dict[str, float] = {}
    kind: tuple[Any, ...] | None = None
    of = torch.arange(problem.num_tokens, device=problem.labels.device) if tokens is None else tokens
    for case in cases:
        row = known[case.name]
        if case.made is None or row["error"] is not None:
            continue
        if kind != (kind := (case.kind, case.grads)):
            true.clear()  # the weight's gradient in fp64 is large: one at a time
            give_back(world)
            true = defined(subject, case, problem, inputs, torch.float64, of)
            rough = defined(subject, case, problem, inputs, problem.dtype, of)
            eager = {name: relative_error(rough.pop(name), exact) for name, exact in true.items()}
            give_back(world)
        started = time.monotonic()
        found, row["error"] = attempt(partial(errors, case, problem, inputs, true, eager, tokens), world)
        if time.monotonic() - started > 5:
            say(world, f"  {case.name}: first step and its check took {time.monotonic() - started:.0f} s")
        if row["error"] is None:
            row["errors" if tokens is None else "full_errors"] = {
                name: pair[0] for name, pair in found.items()
            }
            wrong = {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
            if case.is_ours and wrong:
                raise ArithmeticError(f"{case.name}: (error, bound) {wrong}")
        elif case.is_ours and row["error"] != OUT_OF_MEMORY:
            raise ArithmeticError(f"{case.name}: {row['error']}")
        if promise.counts.remade:
            raise ArithmeticError(f"{case.name}: timed would be a recomputation, not grad_in_forward")


# --- times -----------------------------------------------------------------------------------


def measure(
    subject: Subject, given: argparse.Namespace, cell: Cell, world: World, started: float
) -> list[Row]:
    cases = [case for case in subject.cases_of(given, cell) if case.name not in given.skip]
    if given.options:
        cases = [case for case in cases if case.name in (subject.base, *given.options)]

    def problem_of(tokens: int) -> tuple[Problem, Any]:
        problem = Problem.of(
            replace(cell, num_tokens=tokens),
            world,
            dtype=DTYPES[given.dtype],
            wgrad_accumulator="returned",
        )
        return problem, subject.inputs_of(problem, cell)

    of_cell = {"shape": cell.shape, "tokens": cell.num_tokens}
    rows: dict[str, Row] = {
        case.name: {**of_cell, "variant": case.name, "error": case.why_not} for case in cases
    }
    began = time.monotonic()
    check(subject, cases, *problem_of(min(cell.num_tokens, given.check_tokens)), world, rows)
    give_back(world)
    problem, inputs = problem_of(cell.num_tokens)
    for case in cases:
        if case.too_large is not None and rows[case.name]["error"] is None:
            rows[case.name]["error"] = case.too_large(problem)
    sampled = torch.arange(0, cell.num_tokens, max(1, cell.num_tokens // SAMPLED), device=world.device)
    ours = [case for case in cases if case.is_ours]
    check(subject, ours, problem, inputs, world, rows, sampled)
    checked = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    for case in cases:
        variant = Variant(case.name, "ours" if case.is_ours else "peer", partial(_run, case, inputs))
        outcome = outcomes[case.name] = Outcome(variant, rows[case.name]["error"])
        for step in (
            partial(turn, variant, problem, world, 1, 1),
            partial(measure_peak, outcome, problem, world),
        ):
            if outcome.reason is None:  # the first compiles
                _, outcome.reason = attempt(step, world)
        if outcome.peak_mib is not None and not case.grads:
            outcome.peak_mib += problem.output_bytes() / MIB  # no gradients, so none to leave out
    settings = Settings(blocks=given.blocks, sample_ms=given.sample_ms, seed=given.seed)
    settings = replace(settings, deadline=started + given.time_limit)
    ready = time.monotonic()
    blocks = measure_times(outcomes, {}, Roof(problem, world), problem, settings, world)
    seconds = f"{checked - began:.0f} s, first steps {ready - checked:.0f} s"
    say(world, f"{cell}: checks {seconds}, {blocks} blocks {time.monotonic() - ready:.0f} s")
    for name, outcome in outcomes.items():
        rows[name]["error"] = outcome.reason
        if outcome.reason is None:
            forward, backward, time_ms = (statistics.median(ms) for ms in zip(*outcome.samples, strict=True))
            totals = [sample[-1] for sample in outcome.samples]
            rows[name] |= {
                "forward_ms": rounded(forward, 3),
                "backward_ms": rounded(backward, 3),
                "time_ms": rounded(time_ms, 3),
                "spread": rounded((max(totals) - min(totals)) / time_ms, 4),
                "peak_mib": rounded(outcome.peak_mib, 1),
                "host_ms": rounded(statistics.median(outcome.host), 3),
                "blocks": len(totals),
            }
    for case in cases:
        row = rows[case.name]
        for key, other in ({"ratio": subject.base} | case.over).items():
            own, its = row.get("time_ms"), rows.get(other, {}).get("time_ms")
            row[key] = None if own is None or its is None else round(own / its, 4)
        row["over"] = {key: other for key, other in case.over.items() if row[key] is not None}
    return list(rows.values())


def _run(case: Case, inputs: Any, problem: Problem, mark: Mark) -> Tensor:
    case.step(inputs, problem, mark)
    return problem.hidden  # a variant returns a tensor


# --- pages -----------------------------------------------------------------------------------


def table(base: str, rows: Iterable[Row]) -> str:
    head = ["shape", "tokens", "row", "forward ms", "backward ms", "ms", f"over {base}", "over"]
    head += ["spread", "host ms", "peak MiB", "largest error"]
    lines = []
    for row in rows:
        found: Any = row["error"]
        if found is None:
            known = [e for key in ("errors", "full_errors") for e in row.get(key, {}).values()]
            found = format(max(known), ".1e") if known else ""
        forms = {"forward_ms": ".2f", "backward_ms": ".2f", "time_ms": ".2f", "ratio": ".3f"}
        values = [tables.cell(row.get(key), form, "") for key, form in forms.items()]
        values.append("; ".join(f"{row[key]:.3f} of {other}" for key, other in row["over"].items()))
        forms = {"spread": ".3f", "host_ms": ".2f", "peak_mib": ".0f"}
        values += [tables.cell(row.get(key), form, "") for key, form in forms.items()]
        lines.append([row["shape"], row["tokens"], row["variant"], *values, found])
    return tables.markdown(head, lines, left=3) + "\n"


def run(subject: Subject, given: argparse.Namespace, world: World, source: Row, started: float) -> int:
    """What the command line asks for, on one rank."""
    known = [case.name for cell in given.cells for case in subject.cases_of(given, cell)]
    if unknown := set(given.options or ()) - set(known):
        raise UsageError(f"no row {', '.join(sorted(unknown))}; there are {', '.join(dict.fromkeys(known))}")
    if world.size > 1:
        raise UsageError(f"--preset {given.preset} knows no tensor parallelism: leave out --tp")
    rows: list[Row] = []
    for cell in given.cells:
        if time.monotonic() - started > given.time_limit:
            say(world, f"{cell}: not started, the time limit is over")
            continue
        try:
            found = measure(subject, given, cell, world, started)
        except (ArithmeticError, WrongVariant) as wrong:
            say(world, f"{cell}: {wrong}: nothing of this cell is printed")
            return 1
        give_back(world)
        rows += found
        print(table(subject.base, found), flush=True)
        if given.path:
            results.write(given.path, rows, source)
            head = f"# {subject.title}\n\n{source['device']}, commit {source['commit']}.\n\n"
            results.write_whole(given.path.with_suffix(".md"), head + table(subject.base, rows))
            print(f"written: {given.path}")
    return 0
