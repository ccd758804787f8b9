"""The one way to measure: checked against fp64, then timed in turn, block after block, each over its base.

Every case is first run at the timed size and compared with the op's definition in fp64: every output of every
token, every entry of both gradients. Ours may have the error of eager PyTorch in the operands' dtype
(`_bound`), or nothing is timed at all; others that are wrong are rows without times. Then every case has a
turn in each block, in an order that is shuffled anew, so that a drifting clock favours none; the bases have
two. A ratio is the median of the blocks' own ratios.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.head import promise
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.op import BASE, OURS, Case, Op, one_line, turn
from megatron_fused_ce.scripts.bench.problem import MIB, Outputs, Problem, World
from megatron_fused_ce.scripts.lib import gpu
from megatron_fused_ce.scripts.lib.live_storages import LiveStorages
from megatron_fused_ce.scripts.lib.reference import FLOOR, relative_error
from megatron_fused_ce.scripts.lib.results import Row

#: Error of an exact case's outputs that is always allowed; else eager PyTorch's, and 1 % for its rounding.
EXACT_FLOOR = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 1e-6}
EXACT_SLACK = 1.01
#: A foreign implementation above this is not computing the same thing; below, its error is told. Cut Cross
#: Entropy's filter leaves out 0.11 of grad_hidden on trained operands.
FOREIGN_ERROR = 0.3
#: Steps below this have their host time measured on three steps of each turn, others on one; both after one
#: with cold caches.
SHORT_STEP_MS = 30.0
MOST_STEPS = 200
OUT_OF_MEMORY = "out of memory"


class WrongResult(RuntimeError):
    """A case of this package failed its check: nothing is printed."""


@dataclass
class Outcome:
    """What is known of one case at one cell."""

    case: Case
    reason: str | None = None  # why there are no times
    errors: dict[str, float] = field(default_factory=dict)  # norm-relative, of each output and gradient
    peak_mib: float | None = None
    samples: list[list[float]] = field(default_factory=list)  # of each block what `turn` gives
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
    text = str(error)
    said = "out of memory" in text.lower() or "ALLOC_FAILED" in text
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
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else one_line(error)
        error.__traceback__ = None  # its frames hold tensors
    outcome.reason = world.first_word(reason)
    if outcome.reason is None:
        return result
    if outcome.case.family == OURS and outcome.reason != OUT_OF_MEMORY:
        raise WrongResult(f"{outcome.case.name} failed: {outcome.reason}")
    result = None
    give_back(world)
    return None


# --- checks against the truth ----------------------------------------------------------------------


@torch.no_grad()
def evaluated(problem: Problem, case: Case, dtype: torch.dtype) -> Outputs:
    """The definition in ``dtype``, by autograd, over blocks of tokens whose gradients add in fp64.

    Outputs of all tokens, ``grad_hidden`` of this rank's and ``grad_weight`` of its rows, both kept in fp32:
    they stay beside the steps that are checked, whose errors are above its rounding. Collectives: none; every
    rank evaluates all of it.
    """
    weight = problem.all_weight.detach().to(dtype).requires_grad_()
    of_weight = torch.zeros_like(problem.weight, dtype=torch.float64, requires_grad=False)
    found: dict[str, list[Tensor]] = {}
    for part in problem.blocks():
        hidden = problem.all_hidden[part].detach().to(dtype).requires_grad_()
        with torch.set_grad_enabled(bool(case.grads)):
            outputs = problem.definition(case.kind, hidden, weight, part)
        if case.grads:
            differentiated = [outputs[name] for name, _ in case.grads]
            upstreams = [getattr(problem, of) for _, of in case.grads]
            upstreams = [of[part] if of.dim() else of.expand(len(hidden)) for of in upstreams]
            pairs = zip(upstreams, differentiated, strict=True)
            torch.autograd.backward(differentiated, [upstream.to(of.dtype) for upstream, of in pairs])
            assert hidden.grad is not None and weight.grad is not None
            outputs["grad_hidden"] = hidden.grad.float()
            of_weight += weight.grad[problem.rows]
            weight.grad = None
        for name, value in outputs.items():
            found.setdefault(name, []).append(value.detach())
        del outputs, hidden
    values = {name: torch.cat(blocks) for name, blocks in found.items()}
    if case.grads:
        values["grad_hidden"] = values["grad_hidden"][problem.tokens]
        values["grad_weight"] = of_weight.float()
    return values


def errors_of(case: Case, problem: Problem, exact: Outputs) -> dict[str, float]:
    """This rank's norm-relative errors after one step; infinite for an inf or NaN."""
    if problem.main_grad is not None:
        problem.main_grad.zero_()
    made = dict(case.step(problem))
    if case.grads:
        made |= problem.gradients()
    problem.reset()
    errors = {}
    for name in sorted(made.keys() & exact.keys()):
        true = exact[name] if made[name].dim() else exact[name].sum()
        errors[name] = relative_error(made[name].view_as(true), true)
    return errors


def _bound(case: Case, dtype: torch.dtype, name: str, eager: float) -> float:
    """What ours may have beside eager PyTorch's error."""
    if case.is_exact and not name.startswith("grad_"):
        return max(EXACT_FLOOR[dtype], EXACT_SLACK * eager)
    return max(FLOOR[dtype], 2 * eager)


def check(outcomes: Sequence[Outcome], problem: Problem, world: World) -> dict[str, float]:
    """Fill in every outcome's errors; it compiles what they need, too. Returns eager PyTorch's.

    Raises WrongResult where one of ours is above its bound.
    """
    alike: dict[Any, list[Outcome]] = {}
    eager_errors: dict[str, float] = {}
    for outcome in outcomes:
        case = outcome.case
        if outcome.reason is None and case.limits is not None:
            outcome.reason = case.limits(problem)
        if outcome.reason is None:
            alike.setdefault((case.kind, case.grads), []).append(outcome)
    for same in alike.values():
        exact = evaluated(problem, same[0].case, torch.float64)
        eager = evaluated(problem, same[0].case, problem.dtype)
        found = [relative_error(eager.pop(name), true) for name, true in exact.items()]
        give_back(world)
        of_eager = dict(zip(exact, world.slowest(found), strict=True))
        eager_errors |= {name: max(e, eager_errors.get(name, 0.0)) for name, e in of_eager.items()}
        for outcome in same:
            began = time.monotonic()
            _check_one(outcome, problem, exact, of_eager, world)
            took = f"{time.monotonic() - began:.1f} s"
            say(world, f"{outcome.case.name}: {outcome.reason or 'right'}, checked in {took}")
        del exact
    return eager_errors


def _check_one(
    outcome: Outcome, problem: Problem, exact: Outputs, eager: dict[str, float], world: World
) -> None:
    name = outcome.case.name
    found = attempt(partial(errors_of, outcome.case, problem, exact), outcome, world)
    problem.reset()
    if found is None:
        return
    outcome.errors = dict(zip(found, world.slowest(list(found.values())), strict=True))
    if outcome.case.family == OURS:
        pairs = [(k, e, _bound(outcome.case, problem.dtype, k, eager[k])) for k, e in outcome.errors.items()]
        if wrong := [f"{k} {e:.2e} (bound {most:.2e})" for k, e, most in pairs if not e <= most]:
            raise WrongResult(f"{name} is wrong: {', '.join(wrong)}")
        if promise.counts.remade:
            raise WrongResult(
                f"{name}: its upstream gradient is not the token weights that grad_in_forward was given; "
                "timed would be a recomputation"
            )
    elif not max(outcome.errors.values()) <= FOREIGN_ERROR:
        outcome.reason = f"wrong result: error {max(outcome.errors.values()):.1e}"


# --- memory, times ---------------------------------------------------------------------------------


def peak_mib(case: Case, problem: Problem, world: World) -> float:
    """A step's peak above inputs, grad_hidden and the wgrad accumulator, cuBLAS's workspace counted."""
    problem.reset()
    if world.on_gpu:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.step(problem)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with LiveStorages() as live:
            case.step(problem)
        peak = live.peak_bytes
    if case.grads:
        peak -= problem.hidden.nbytes + (problem.weight.nbytes if problem.main_grad is None else 0)
    problem.reset()
    return peak / MIB


def interleave(
    turns: Mapping[str, Callable[[], list[float] | None]], twice: Sequence[str], blocks: int
) -> dict[str, list[list[float]]]:
    """Every turn once a block, those of ``twice`` again, in an order that is shuffled anew in each block.

    Of each turn what it gave in each block, means where it had several. One that gives None has failed, and
    is not asked again.
    """
    generator = random.Random(0)  # the same on every rank
    names = [*turns, *twice]
    samples: dict[str, list[list[float]]] = {name: [] for name in turns}
    for _ in range(blocks):
        found: dict[str, list[list[float]]] = {}
        for name in generator.sample(names, len(names)):
            if (sample := turns[name]()) is None:
                names = [other for other in names if other != name]
            else:
                found.setdefault(name, []).append(sample)
        for name, several in found.items():
            samples[name].append([statistics.mean(column) for column in zip(*several, strict=True)])
    return samples


def time_cases(outcomes: dict[str, Outcome], problem: Problem, given: argparse.Namespace) -> None:
    """Interleaved blocks of those that have no reason not to run; their samples are added."""
    world = problem.world

    def turn_of(case: Case, warm: int, steps: int) -> list[float]:
        with case.ready(problem) as step:
            return turn(step, world, warm, steps)

    def take(name: str, warm: int, steps: int) -> list[float] | None:
        outcome, seen = outcomes[name], len(gpu.readings)
        if outcome.reason is not None:
            return None
        sample = attempt(partial(turn_of, outcome.case, warm, steps), outcome, world)
        outcome.readings += gpu.readings[seen:]
        problem.reset()
        return None if sample is None else world.slowest(sample)

    turns = {}
    for name in outcomes:
        if (first := take(name, 1, 1)) is not None:
            step_ms = max(first[2], 1e-3)
            steps = max(1, min(MOST_STEPS, math.ceil(given.sample_ms / step_ms)))
            turns[name] = partial(take, name, 4 if step_ms < SHORT_STEP_MS else 2, steps)
    bases = [name for name in dict.fromkeys(outcomes[name].case.base for name in turns) if name in turns]
    for name, samples in interleave(turns, bases, given.blocks).items():
        outcomes[name].samples += samples


# --- a cell ----------------------------------------------------------------------------------------


def paired(key: str, own: Outcome, base: Outcome | None, column: int = 2) -> Row:
    """``key``: the median of the blocks' ratios of what `turn` gives in ``column``, the step's time; and its
    `interval`."""
    ratios: list[float] = []
    if base is not None and not own.reason and not base.reason:
        pairs = zip(own.samples, base.samples, strict=False)
        ratios = [round(a[column] / max(b[column], 1e-9), 4) for a, b in pairs]
    middle = round(statistics.median(ratios), 4) if ratios else None
    return {key: middle, f"{key}_interval": interval(ratios)}


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The order statistics between which the median of what these are drawn from lies with 95 %; None of
    fewer than six."""
    count, outside, below = len(values), 0.5 ** len(values), 0
    while outside <= 0.025 and below < count:
        below += 1
        outside += math.comb(count, below) * 0.5**count
    ordered = sorted(values)
    return (ordered[below - 1], ordered[-below]) if below else None


def row_of(outcome: Outcome, outcomes: dict[str, Outcome], size: int) -> Row:
    """What is of this outcome alone; ``size``: T * H * V."""
    case, samples, errors = outcome.case, outcome.samples, outcome.errors
    gradients = [error for key, error in errors.items() if key.startswith("grad_")]
    others = {key: outcomes.get(other) for key, other in case.over.items()}
    row: Row = {
        **{"variant": case.name, "family": case.family, "base": case.base, "roof_products": case.products},
        "peak_mib": None if outcome.peak_mib is None else round(outcome.peak_mib, 4),
        "error": outcome.reason or max(gradients or errors.values(), default=None),
        "loss_error": errors.get("loss"),
        "errors": errors,
        "upstream": "one scalar" if ("loss", "one_upstream") in case.grads else "weights",
        **paired("ratio", outcome, outcomes.get(case.base)),
        "over": case.over,
        **gpu.medians(outcome.readings),
        **dict.fromkeys(("forward_ms", "backward_ms", "time_ms", "host_ms", "spread", "tflops")),
        **case.told,
    }
    for key, other in others.items():
        row |= paired(key, outcome, other) | paired(f"host_{key}", outcome, other, 3)
    if samples and outcome.reason is None:
        columns = [*zip(*samples, strict=True)]
        for name, column in zip(("forward_ms", "backward_ms", "time_ms", "host_ms"), columns, strict=True):
            row[name] = round(statistics.median(column), 3)
        times, time_ms = columns[2], statistics.median(columns[2])
        row |= {"blocks": len(samples), "spread": round((max(times) - min(times)) / time_ms, 4)}
        row["tflops"] = round(2.0 * case.products * size / time_ms / 1e9, 1)
    return row


def measure(
    op: Op, cell: Cell, cases: Sequence[Case], given: argparse.Namespace, world: World, facts: Row
) -> list[Row]:
    """The rows of one cell, each with ``facts``: the bare products first, then the cases in their order.

    Of ``given`` its dtype, blocks and sample_ms. Raises WrongResult before anything was timed where a case of
    this package is wrong.
    """
    world.sequence_parallel = cell.sequence_parallel
    dtype: torch.dtype = getattr(torch, given.dtype)
    problem = op.problem(cell, world, dtype=dtype, wgrad_accumulator=op.wgrad_accumulator)
    outcomes = {case.name: Outcome(case, case.why_not) for case in op.rows(cases)}
    eager = check([outcomes[case.name] for case in cases], problem, world)
    del problem.all_weight
    give_back(world)
    for outcome in outcomes.values():
        if outcome.reason is None and outcome.case.family != BASE:
            peak = attempt(partial(peak_mib, outcome.case, problem, world), outcome, world)
            outcome.peak_mib = None if peak is None else world.slowest([peak])[0]
    time_cases(outcomes, problem, given)
    T, H, V = cell.num_tokens, cell.hidden_size, problem.num_rows
    facts = {**facts, "shape": cell.shape, "T": T, "H": H, "V": V, "sp": cell.sequence_parallel}
    facts |= {"wgrad_accumulator": op.wgrad_accumulator, "eager_errors": eager}
    facts |= {"operands": cell.origin, "operands_made": problem.about} if cell.operands else {}
    return [facts | row_of(outcome, outcomes, T * H * V) for outcome in outcomes.values()]
