"""The one way to measure: checked against fp64, then timed in turn, block after block, each over its base.

Every case is first run at the timed size and compared with the op's definition in fp64: every output of every
token, samples of both gradients. Ours may have the error of eager PyTorch in the operands' dtype (`_bound`),
or nothing is timed at all; others that are wrong are rows without times. Then every case has a turn in each
block, in an order that is shuffled anew, so that a drifting clock favours none; the bases have two. A ratio
is the median of the blocks' own ratios.
"""

from __future__ import annotations

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

from megatron_fused_ce import promise
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.op import OURS, Case, Op, one_line
from megatron_fused_ce.scripts.bench.problem import MIB, Outputs, Problem, World
from megatron_fused_ce.scripts.bench.roof import bare_turn, turn
from megatron_fused_ce.scripts.lib.live_storages import LiveStorages
from megatron_fused_ce.scripts.lib.reference import FLOOR, relative_error
from megatron_fused_ce.scripts.lib.results import Row

#: Error of an exact case's outputs that is always allowed; else eager PyTorch's, and 1 % for its rounding.
EXACT_FLOOR = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 1e-6}
EXACT_SLACK = 1.01
#: A foreign implementation above this is not computing the same thing; below, its error is told.
FOREIGN_ERROR = 0.1
#: Tokens, and rows of the weight, whose gradients are compared.
SAMPLES = 1024
#: Steps below this have their host time measured on three steps of each turn, after one with cold caches.
SHORT_STEP_MS = 30.0
MOST_STEPS = 200
#: Most parts that bare products are cut into where their operands do not fit.
MOST_SLICES = 64
OUT_OF_MEMORY = "out of memory"


class WrongResult(RuntimeError):
    """A case of this package failed its check: nothing is printed."""


class DeviceLost(RuntimeError):
    """A case left the GPU unusable for this process."""


@dataclass(frozen=True)
class Settings:
    """How a cell is measured."""

    dtype: torch.dtype = torch.bfloat16
    wgrad_accumulator: str = "main_grad"
    blocks: int = 5
    sample_ms: float = 100.0
    bases: bool = True  # the bare products too


@dataclass
class Outcome:
    """What is known of one case at one cell."""

    case: Case
    reason: str | None = None  # why there are no times
    errors: dict[str, float] = field(default_factory=dict)  # norm-relative, of each output and gradient
    peak_mib: float | None = None
    step_ms: float = 0.0  # a first estimate
    steps: int = 0  # of a turn
    slices: int = 1  # of bare products
    samples: list[list[float]] = field(default_factory=list)  # of each block what `turn` gives

    @property
    def is_ours(self) -> bool:
        return self.case.family == OURS


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

    Raises WrongResult where one of ours fails otherwise than for memory, DeviceLost where no further work on
    the device is possible. Collectives: `World.everyone`'s.
    """
    result = reason = None
    try:
        result = action()
        world.synchronise()
    except Exception as error:
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else one_line(error)
        error.__traceback__ = None  # its frames hold tensors
        try:
            world.synchronise()
        except Exception:
            raise DeviceLost(reason) from None
    outcome.reason = world.first_word(reason)
    if outcome.reason is None:
        return result
    if outcome.is_ours and outcome.reason != OUT_OF_MEMORY:
        raise WrongResult(f"{outcome.case.name} failed: {outcome.reason}")
    result = None
    give_back(world)
    return None


# --- checks against the truth ----------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluated:
    """The definition's results, as far as this rank compares them."""

    values: Outputs  # outputs of all tokens; grad_hidden of `tokens`, grad_weight of `rows`
    tokens: Tensor  # of this rank's part
    rows: Tensor  # of this rank's shard


@torch.no_grad()
def evaluated(problem: Problem, case: Case, dtype: torch.dtype, samples: int = SAMPLES) -> Evaluated:
    """The definition in ``dtype``, by autograd, over blocks of tokens whose gradients add in fp64.

    ``samples`` tokens spread over this rank's part, as many rows spread over its shard, and those that the
    first tokens' labels name. Collectives: none; every rank evaluates all of it.
    """
    device, first = problem.labels.device, problem.rows.start
    tokens = torch.arange(problem.tokens.start, problem.tokens.stop, device=device)
    tokens = tokens[:: max(1, len(tokens) // samples)]
    named = problem.labels[: max(1, samples // 4)] - first
    named = named[(named >= 0) & (named < problem.num_rows)]
    spread = torch.arange(0, problem.num_rows, max(1, problem.num_rows // samples), device=device)
    rows = torch.cat([spread, named]).unique()
    weight = problem.all_weight.detach().to(dtype).requires_grad_()
    of_weight = torch.zeros(len(rows), weight.shape[1], dtype=torch.float64, device=device)
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
            inside = tokens[(tokens >= part.start) & (tokens < part.stop)] - part.start
            outputs["grad_hidden"] = hidden.grad[inside].double()
            of_weight += weight.grad[first + rows].double()
            weight.grad = None
        for name, value in outputs.items():
            found.setdefault(name, []).append(value.detach())
        del outputs, hidden
    values = {name: torch.cat(blocks) for name, blocks in found.items()}
    if case.grads:
        values["grad_weight"] = of_weight
    return Evaluated(values, tokens - problem.tokens.start, rows)


def errors_of(case: Case, problem: Problem, exact: Evaluated) -> dict[str, float]:
    """This rank's norm-relative errors after one step; infinite for an inf or NaN anywhere in a gradient."""
    if problem.main_grad is not None:
        problem.main_grad.zero_()
    made, unbounded = dict(case.step(problem)), 0.0
    if case.grads:
        grads = problem.gradients()
        # A sum is finite only where every term is: no mask of the value's size.
        finite = [bool(value.sum(dtype=torch.float32).isfinite()) for value in grads.values()]
        unbounded = 0.0 if all(finite) else math.inf
        made["grad_hidden"] = grads["grad_hidden"][exact.tokens]
        made["grad_weight"] = grads["grad_weight"][exact.rows]
    problem.reset()
    errors = {}
    for name in made.keys() & exact.values.keys():
        true = exact.values[name] if made[name].dim() else exact.values[name].sum()
        errors[name] = relative_error(made[name].view_as(true), true) + unbounded
    return dict(sorted(errors.items()))


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
        eager = evaluated(problem, same[0].case, problem.dtype).values
        found = [relative_error(eager.pop(name), true) for name, true in exact.values.items()]
        give_back(world)
        of_eager = dict(zip(exact.values, world.slowest(found), strict=True))
        eager_errors |= {name: max(e, eager_errors.get(name, 0.0)) for name, e in of_eager.items()}
        for outcome in same:
            _check_one(outcome, problem, exact, of_eager, world)
        del exact
    return eager_errors


def _check_one(
    outcome: Outcome, problem: Problem, exact: Evaluated, eager: dict[str, float], world: World
) -> None:
    name = outcome.case.name
    found = attempt(partial(errors_of, outcome.case, problem, exact), outcome, world)
    problem.reset()
    if found is None:
        return
    outcome.errors = dict(zip(found, world.slowest(list(found.values())), strict=True))
    if outcome.is_ours:
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
    turns: Mapping[str, Callable[[], list[float] | None]],
    twice: Sequence[str],
    blocks: int,
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


def time_cases(
    outcomes: dict[str, Outcome],
    problem: Problem,
    op: Op,
    settings: Settings,
    world: World,
) -> None:
    """Interleaved blocks of those that have no reason not to run; their samples are added."""

    def take(name: str, warm: int, steps: int) -> list[float] | None:
        outcome, bare, sample = outcomes[name], op.bases.get(name), None
        while outcome.reason is None:
            action = partial(turn, partial(outcome.case.step, problem), world)
            if bare is not None:
                action = partial(bare_turn, problem, bare, outcome.slices)
            sample = attempt(partial(action, warm, steps), outcome, world)
            problem.reset()
            if bare is None or outcome.reason != OUT_OF_MEMORY or outcome.slices >= MOST_SLICES:
                break
            outcome.slices, outcome.reason = 2 * outcome.slices, None
        return None if sample is None else world.slowest(sample)

    for name, outcome in outcomes.items():
        if not outcome.steps and (first := take(name, 1, 1)) is not None:
            outcome.step_ms = max(first[2], 1e-3)
            outcome.steps = max(1, min(MOST_STEPS, math.ceil(settings.sample_ms / outcome.step_ms)))
    running = {name: one for name, one in outcomes.items() if one.reason is None}
    turns = {
        name: partial(take, name, 4 if one.step_ms < SHORT_STEP_MS else 1, one.steps)
        for name, one in running.items()
    }

    bases = [name for name in dict.fromkeys(one.case.base for one in running.values()) if name in running]
    for name, samples in interleave(turns, bases, settings.blocks).items():
        outcomes[name].samples += samples


# --- a cell ----------------------------------------------------------------------------------------


def measure(
    op: Op, cell: Cell, cases: Sequence[Case], settings: Settings, world: World
) -> dict[str, Outcome]:
    """The outcomes of one cell: the bare products first, then the cases in their order.

    Raises WrongResult before anything was timed where a case of this package is wrong, DeviceLost where one
    broke the device.
    """
    started = time.monotonic()
    world.sequence_parallel = cell.sequence_parallel
    problem = op.problem(cell, world, dtype=settings.dtype, wgrad_accumulator=settings.wgrad_accumulator)
    wanted = {case.base for case in cases if case.why_not is None} if settings.bases else set()
    bare = [(name, of_base.products) for name, of_base in op.bases.items() if name in wanted]
    of_bases = [Case(name, "base", base=name, products=products) for name, products in bare]
    outcomes = {case.name: Outcome(case, case.why_not) for case in (*of_bases, *cases)}
    if not world.ghost:
        eager = check([outcomes[case.name] for case in cases], problem, world)
        for outcome in outcomes.values():
            outcome.case.told["eager_errors"] = eager
    del problem.all_weight
    give_back(world)
    for outcome in outcomes.values():
        if outcome.reason is None and outcome.case.run is not None:
            peak = attempt(partial(peak_mib, outcome.case, problem, world), outcome, world)
            outcome.peak_mib = None if peak is None else world.slowest([peak])[0]
    ready = time.monotonic()
    time_cases(outcomes, problem, op, settings, world)
    seconds = f"checks and peaks {ready - started:.0f} s"
    say(world, f"{cell}: {seconds}, blocks {time.monotonic() - ready:.0f} s")
    return outcomes


def paired(own: Outcome | None, base: Outcome | None, column: int = 2) -> float | None:
    """The median of the blocks' ratios of what `turn` gives in ``column``: the step's time."""
    if own is None or base is None or own.reason or base.reason or not own.samples or not base.samples:
        return None
    pairs = zip(own.samples, base.samples, strict=False)
    return round(statistics.median(a[column] / max(b[column], 1e-9) for a, b in pairs), 4)


def rows_of(
    cell: Cell, outcomes: dict[str, Outcome], settings: Settings, world: World, facts: Row
) -> list[Row]:
    """One row of each outcome."""
    T, H, V = cell.num_tokens, cell.hidden_size, cell.vocab // world.size
    rows = []
    for name, outcome in outcomes.items():
        case, samples, errors = outcome.case, outcome.samples, outcome.errors
        gradients = [error for key, error in errors.items() if key.startswith("grad_")]
        others = {key: outcomes.get(other) for key, other in case.over.items()}
        row: Row = {
            **facts,
            **{"shape": cell.shape, "T": T, "H": H, "V": V, "sp": cell.sequence_parallel},
            **{"variant": name, "family": case.family, "base": case.base, "roof_products": case.products},
            "peak_mib": None if outcome.peak_mib is None else round(outcome.peak_mib, 4),
            "error": outcome.reason or max(gradients or errors.values(), default=None),
            "loss_error": errors.get("loss"),
            "errors": errors,
            "wgrad_accumulator": settings.wgrad_accumulator,
            "upstream": "one scalar" if ("loss", "one_upstream") in case.grads else "weights",
            "ratio": paired(outcome, outcomes.get(case.base)),
            "over": case.over,
            **{key: paired(outcome, other) for key, other in others.items()},
            **{f"host_{key}": paired(outcome, other, 3) for key, other in others.items()},
            **({"roof_slices": outcome.slices} if outcome.slices > 1 else {}),
            **dict.fromkeys(("forward_ms", "backward_ms", "time_ms", "host_ms", "spread", "tflops")),
            **case.told,
        }
        if samples and outcome.reason is None:
            columns = [*zip(*samples, strict=True)]
            forward, backward, time_ms, host = (statistics.median(column) for column in columns)
            times = columns[2]
            row |= {"forward_ms": round(forward, 3), "backward_ms": round(backward, 3)}
            row |= {"time_ms": round(time_ms, 3), "host_ms": round(host, 3), "blocks": len(samples)}
            row["spread"] = round((max(times) - min(times)) / time_ms, 4)
            row["tflops"] = round(2.0 * case.products * T * H * V / time_ms / 1e9, 1)
        rows.append(row)
    return rows
