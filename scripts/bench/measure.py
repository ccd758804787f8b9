"""The one way to measure: checked against fp64, then timed in turn, block after block, each over its base.

Every case is first run at the timed size and compared with the op's definition in fp64: every output of every
token, every entry of both gradients. Ours may be off by what eager PyTorch is in the operands' dtype
(`bound_of`), or nothing is timed at all; others that are wrong are rows without times. Then every case has a
turn in each block, in an order that is shuffled anew, so that a drifting clock favours none; the bases have
two. A ratio is the median of the blocks' own ratios, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_fused_ce.head import promise
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.problem import BASE, OURS, Case, Op, Outputs, Problem, World
from megatron_fused_ce.scripts.lib import gpu
from megatron_fused_ce.scripts.lib.live_storages import LiveStorages
from megatron_fused_ce.scripts.lib.reference import FLOOR, relative_error
from megatron_fused_ce.scripts.lib.results import Row

FOREIGN_ERROR = 0.3  # others above it compute something else; Cut Cross Entropy's filter leaves out 0.11
WARM, MOST_STEPS = 3, 200  # of a turn
OUT_OF_MEMORY = "out of memory"
TIMES = ("forward_ms", "backward_ms", "time_ms", "host_ms")  # what `turn` gives


class WrongResult(RuntimeError):
    """A case of this package failed its check: nothing is printed."""


@dataclass
class Outcome:
    """What is known of one case at one cell."""

    case: Case
    reason: str | None = None  # why there are no times
    errors: dict[str, float] = field(default_factory=dict)  # norm-relative, of each output and gradient
    peak_mib: float | None = None
    samples: list[list[float]] = field(default_factory=list)  # of each block `TIMES`
    readings: list[gpu.Reading] = field(default_factory=list)  # of the GPU, in its turns


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(f"benchmark: {text}", file=sys.stderr, flush=True)


def give_back(world: World) -> None:
    """What nobody holds any more goes back to the driver."""
    if world.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """torch's allocator's, and what cuBLAS, NCCL and foreign launchers say in words."""
    said = "out of memory" in str(error).lower() or "ALLOC_FAILED" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError)


def attempt(action: Callable[[], Any], outcome: Outcome, world: World) -> Any:
    """The action's result; None where it failed on any rank, which is the outcome's reason then.

    Raises WrongResult where one of ours fails otherwise than for memory. Collectives: `World.everyone`'s.
    """
    result = reason = None
    try:
        result = action()
        world.synchronise()
    except Exception as error:
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 160)
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else said
        error.__traceback__ = None  # its frames hold tensors
    outcome.reason = next(filter(None, world.everyone(reason)), None)
    if outcome.reason is not None:
        result = None
        give_back(world)
        if outcome.case.family == OURS and outcome.reason != OUT_OF_MEMORY:
            raise WrongResult(f"{outcome.case.name} failed: {outcome.reason}")
    return result


@torch.no_grad()
def evaluated(problem: Problem, case: Case, dtype: torch.dtype) -> Outputs:
    """The definition in ``dtype``, by autograd, over blocks of tokens whose gradients add in fp64.

    Outputs of all tokens; ``grad_hidden`` of this rank's and ``grad_weight`` of its rows in fp32, since they
    stay beside the steps that are checked. Collectives: none; every rank evaluates all of it.
    """
    weight = problem.all_weight.detach().to(dtype).requires_grad_()
    of_weight = torch.zeros_like(problem.weight, dtype=torch.float64, requires_grad=False)
    blocks: list[Outputs] = []
    for part in problem.blocks():
        hidden = problem.all_hidden[part].detach().to(dtype).requires_grad_()
        with torch.set_grad_enabled(bool(case.grads)):
            outputs = problem.definition(case.kind, hidden, weight, part)
        blocks.append({name: value.detach() for name, value in outputs.items()})
        if case.grads:
            pairs = [(outputs[name], getattr(problem, of)) for name, of in case.grads]
            given = [(of[part] if of.dim() else of.expand(len(hidden))).to(z.dtype) for z, of in pairs]
            of_hidden, added = torch.autograd.grad([z for z, _ in pairs], [hidden, weight], given)
            blocks[-1]["grad_hidden"] = of_hidden.float()
            of_weight += added[problem.rows]
            del pairs, added
        del outputs, hidden
    values = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    if case.grads:
        values["grad_hidden"] = values["grad_hidden"][problem.tokens]
        values["grad_weight"] = of_weight.float()
    return values


def errors_of(case: Case, problem: Problem, exact: Outputs) -> dict[str, float]:
    """This rank's norm-relative errors after one step; infinite for an inf or NaN."""
    if problem.main_grad is not None:
        problem.main_grad.zero_()
    with case.ready(problem) as step:
        made = {**step(), **(problem.gradients() if case.grads else {})}
    errors = {}
    for name in sorted(made.keys() & exact.keys()):
        true = exact[name] if made[name].dim() else exact[name].sum()
        errors[name] = relative_error(made[name].view_as(true), true)
    return errors


def bound_of(case: Case, dtype: torch.dtype, name: str, eager: float) -> float:
    """Outputs of exact logits may have eager PyTorch's error, all else of ours twice that."""
    if case.family != OURS:
        return FOREIGN_ERROR
    exact = case.is_exact and not name.startswith("grad_")
    return max(1e-6, 1.01 * eager) if exact else max(FLOOR[dtype], 2 * eager)


def check(outcomes: Sequence[Outcome], problem: Problem, world: World) -> dict[str, float]:
    """Fill in every outcome's errors; it compiles what they need, too. Returns eager PyTorch's.

    Raises WrongResult where one of ours is above its bound.
    """
    eager, alike = dict[str, float](), dict[Any, list[Outcome]]()
    for outcome in outcomes:
        if outcome.reason is None:
            alike.setdefault((outcome.case.kind, outcome.case.grads), []).append(outcome)
    for same in alike.values():
        exact, rounded = (evaluated(problem, same[0].case, dtype) for dtype in (torch.float64, problem.dtype))
        found = world.slowest([relative_error(rounded.pop(name), true) for name, true in exact.items()])
        give_back(world)
        own = dict(zip(exact, found, strict=True))
        eager |= {name: max(error, eager.get(name, 0.0)) for name, error in own.items()}
        for outcome in same:
            began = time.monotonic()
            errors = attempt(partial(errors_of, outcome.case, problem, exact), outcome, world)
            problem.reset()
            took = f"checked in {time.monotonic() - began:.1f} s"
            say(world, f"{outcome.case.name}: {outcome.reason or took}")
            if errors is None:
                continue
            outcome.errors = dict(zip(errors, world.slowest(list(errors.values())), strict=True))
            bounds = {name: bound_of(outcome.case, problem.dtype, name, own[name]) for name in errors}
            off = [
                f"{n} {e:.2e} (bound {bounds[n]:.2e})"
                for n, e in outcome.errors.items()
                if not e <= bounds[n]
            ]
            off += ["made again in the backward, against its promise"] * bool(promise.counts.remade)
            if off and outcome.case.family == OURS:
                raise WrongResult(f"{outcome.case.name} is wrong: {', '.join(off)}")
            outcome.reason = f"wrong result: {', '.join(off)}" if off else None
        del exact
    return eager


def peak_mib(case: Case, problem: Problem, world: World) -> float:
    """A step's peak above inputs, grad_hidden and the wgrad accumulator, cuBLAS's workspace counted."""
    problem.reset()
    with case.ready(problem) as step:
        if world.on_gpu:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        else:
            with LiveStorages() as live:
                step()
            peak = live.peak_bytes
    if case.grads:
        peak -= problem.hidden.nbytes + (problem.weight.nbytes if problem.main_grad is None else 0)
    problem.reset()
    return peak / 2**20


def turn(step: Callable[..., object], world: World, warm: int, steps: int) -> list[float]:
    """`TIMES`: medians over ``steps`` steps, without a wait between them.

    ``warm`` untimed steps come first; what the calls of one take to return, on an idle device, is the host's
    time, of all but the first, which finds cold caches. The GPU is looked at in the last step.
    """
    host: list[float] = []
    for _ in range(warm):
        world.synchronise()
        start = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - start))
    marks: list[Any] = []
    for _ in range(steps):
        step(lambda: marks.append(world.now()))
    if world.on_gpu:
        marks[-3].synchronize()  # the last step begins
    gpu.look()
    world.synchronise()
    of_steps = zip(marks[::3], marks[1::3], marks[2::3], strict=True)
    spans = [[world.ms(a, b), world.ms(b, c), world.ms(a, c)] for a, b, c in of_steps]
    return [statistics.median(column) for column in (*zip(*spans, strict=True), host[1:] or host or [0.0])]


def time_cases(outcomes: dict[str, Outcome], problem: Problem, given: argparse.Namespace) -> None:
    """A turn a block of all that have no reason not to run, in an order that is shuffled anew in each; of a
    base two, whose mean counts."""
    world, steps = problem.world, dict[str, int]()  # of a turn

    def take(name: str, warm: int, count: int) -> list[float] | None:
        def action() -> list[float]:
            with outcome.case.ready(problem) as step:
                return turn(step, world, warm, count)

        outcome, seen = outcomes[name], len(gpu.readings)
        sample = None if outcome.reason else attempt(action, outcome, world)
        outcome.readings += gpu.readings[seen:]
        problem.reset()
        return None if sample is None else world.slowest(sample)

    for name in outcomes:
        if (first := take(name, 1, 1)) is not None:
            steps[name] = max(1, min(MOST_STEPS, math.ceil(given.sample_ms / max(first[2], 1e-3))))
    names = [*steps, *sorted({outcomes[name].case.base for name in steps} & steps.keys())]
    generator = random.Random(0)  # the same on every rank
    for _ in range(given.blocks):
        found: dict[str, list[list[float]]] = {}
        for name in generator.sample(names, len(names)):
            if (sample := take(name, WARM, steps[name])) is not None:
                found.setdefault(name, []).append(sample)
        for name, several in found.items():
            outcomes[name].samples.append([statistics.mean(column) for column in zip(*several, strict=True)])


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The order statistics between which the median of what these are drawn from lies with 95 %; None of
    fewer than six."""
    count, outside, below = len(values), 0.5 ** len(values), 0
    while outside <= 0.025 and below < count:
        below += 1
        outside += math.comb(count, below) * 0.5**count
    ordered = sorted(values)
    return (ordered[below - 1], ordered[-below]) if below else None


def paired(key: str, own: Outcome, base: Outcome | None, time: str = "time_ms") -> Row:
    """``key``: the median of the blocks' ratios of these times; and its `interval`."""
    ratios: list[float] = []
    if base is not None and not own.reason and not base.reason:
        at, pairs = TIMES.index(time), zip(own.samples, base.samples, strict=False)
        ratios = [round(a[at] / max(b[at], 1e-9), 4) for a, b in pairs]
    return {key: statistics.median(ratios) if ratios else None, f"{key}_interval": interval(ratios)}


def row_of(outcome: Outcome, outcomes: dict[str, Outcome], size: int) -> Row:
    """What is of this outcome alone; ``size``: T * H * V."""
    case, samples, errors = outcome.case, outcome.samples, outcome.errors
    gradients = [error for key, error in errors.items() if key.startswith("grad_")]
    row: Row = {"variant": case.name, "family": case.family, "base": case.base, "over": case.over}
    row |= {"roof_products": case.products, "peak_mib": outcome.peak_mib, "blocks": len(samples)}
    row |= {"error": outcome.reason or max(gradients or errors.values(), default=None), "errors": errors}
    row["upstream"] = "one scalar" if ("loss", "one_upstream") in case.grads else "weights"
    row |= case.told | gpu.medians(outcome.readings) | dict.fromkeys((*TIMES, "spread", "tflops"))
    row |= paired("ratio", outcome, outcomes.get(case.base))
    for key, name in case.over.items():
        row |= paired(key, outcome, outcomes.get(name))
        row |= paired(f"host_{key}", outcome, outcomes.get(name), "host_ms")
    if samples and outcome.reason is None:
        columns = dict(zip(TIMES, zip(*samples, strict=True), strict=True))
        times, time_ms = columns["time_ms"], statistics.median(columns["time_ms"])
        row |= {name: round(statistics.median(column), 3) for name, column in columns.items()}
        row["spread"] = round((max(times) - min(times)) / time_ms, 4)
        row["tflops"] = round(2.0 * case.products * size / time_ms / 1e9, 1)
    return row


def measure(
    op: Op, cell: Cell, cases: Sequence[Case], given: argparse.Namespace, world: World, facts: Row
) -> list[Row]:
    """The rows of one cell, each with ``facts``: the bare products first, then the cases in their order.

    Of ``given`` dtype, blocks and sample_ms. Raises WrongResult before the times where one of ours is wrong.
    """
    world.sequence_parallel = cell.sequence_parallel
    problem = op.problem(cell, world, getattr(torch, given.dtype))
    wanted = {case.base for case in cases if case.why_not is None}
    rows = [*(base for base in op.bases if base.name in wanted), *cases]
    outcomes = {case.name: Outcome(case, case.why_not) for case in rows}
    eager = check([outcomes[case.name] for case in cases], problem, world)
    del problem.all_weight
    give_back(world)
    for outcome in outcomes.values():
        if outcome.reason is None and outcome.case.family != BASE:
            peak = attempt(partial(peak_mib, outcome.case, problem, world), outcome, world)
            outcome.peak_mib = None if peak is None else round(world.slowest([peak])[0], 4)
    time_cases(outcomes, problem, given)
    T, H, V = cell.num_tokens, cell.hidden_size, problem.num_rows
    facts = {**facts, "shape": cell.shape, "T": T, "H": H, "V": V, "sp": cell.sequence_parallel}
    facts |= {"wgrad_accumulator": problem.wgrad_accumulator, "eager_errors": eager}
    facts |= {"operands": cell.origin, "operands_made": problem.about} if cell.operands else {}
    return [facts | row_of(outcome, outcomes, T * H * V) for outcome in outcomes.values()]
