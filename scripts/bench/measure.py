"""One cell of the benchmark (a shape, a number of tokens): checks, peaks, interleaved times, rows."""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import promise
from megatron_fused_ce.scripts.bench.cases import LONGEST_WARM_STEP_MS, ROOFS, Cell
from megatron_fused_ce.scripts.bench.peers import one_line
from megatron_fused_ce.scripts.bench.problem import MIB, Clock, FullReference, Problem, World, full_reference
from megatron_fused_ce.scripts.bench.report import KEYS
from megatron_fused_ce.scripts.bench.roof import SLACK_BYTES, Roof
from megatron_fused_ce.scripts.bench.variants import Variant, chosen
from megatron_fused_ce.scripts.lib.live_storages import LiveStorages
from megatron_fused_ce.scripts.lib.reference import (
    FLOOR,
    HeadInputs,
    HeadResult,
    plain_head,
    relative_error,
    truth,
)

#: Loss error that is always allowed; else plain PyTorch's own at the dtype, and 1 % for its rounding.
LOSS_FLOOR = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 1e-6}
LOSS_SLACK = 1.01
#: A foreign implementation above this is not computing the same thing; below, its error is told.
FOREIGN_ERROR = 0.1
#: Steps below this have their host time measured on three steps of each turn, after a first one.
SHORT_STEP_MS = 30.0
#: Turns of each roof in a block: every ratio has it below the line.
ROOF_TURNS = 2
MOST_TRIES = 3
MOST_STEPS = 200
#: Most parts that the roof is cut into where its buffers do not fit.
MOST_SLICES = 64
OUT_OF_MEMORY = "out of memory"


class WrongVariant(RuntimeError):
    """A strategy of this package failed its check: nothing is printed."""


class DeviceLost(RuntimeError):
    """A variant left the GPU unusable for this process."""


@dataclass(frozen=True)
class Settings:
    """How a cell is measured."""

    dtype: torch.dtype = torch.bfloat16
    upstream: str = "weights"
    wgrad_accumulator: str = "main_grad"
    check_tokens: int = 2048
    check_foreign: bool = True  # the others against fp64 too, not at the timed size alone
    blocks: int = 5
    sample_ms: float = 100.0
    seed: int = 0
    roofs: tuple[str, ...] = tuple(ROOFS)
    deadline: float = math.inf  # time.monotonic(); no further block starts after it


@dataclass
class Outcome:
    """What is known of one variant at one cell."""

    variant: Variant
    reason: str | None = None  # why there are no times
    error: float | None = None  # gradients, norm-relative
    loss_error: float | None = None
    peak_mib: float | None = None
    step_ms: float = 0.0  # a first estimate
    samples: list[list[float]] = field(default_factory=list)  # [forward, backward] of each block
    host: list[float] = field(default_factory=list)  # ms of each block, where it had warm steps
    steps: int = 0
    chunk_tokens: int | None = None  # that it ran with
    logits_backend: str | None = None  # that served
    extra: dict[str, Any] = field(default_factory=dict)


def give_back(world: World) -> None:
    """What nobody holds any more goes back to the driver."""
    if world.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """torch's allocator's, and what cuBLAS, NCCL and foreign launchers say in words."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower() or "ALLOC_FAILED" in text
    )


def attempt(action: Callable[[], Any], world: World) -> tuple[Any, str | None]:
    """``(result, None)``, or ``(None, reason)`` where it failed on any rank; memory is given back.

    Raises DeviceLost where no further work on the device is possible.
    """
    result, reason = None, None
    try:
        result = action()
        if world.on_gpu:
            torch.cuda.synchronize()
    except WrongVariant:
        raise
    except Exception as error:
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else one_line(error)
        error.__traceback__ = None  # its frames hold tensors
        if world.on_gpu:
            try:
                torch.cuda.synchronize()
            except Exception:
                raise DeviceLost(reason) from None
    reason = world.first_word(reason)
    if reason is not None:
        result = None
        give_back(world)
    return result, reason


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(f"benchmark: {text}", file=sys.stderr, flush=True)


def tell_if_long(variant: Variant, started: float, world: World) -> None:
    seconds = time.monotonic() - started
    if seconds > 5:
        say(world, f"  {variant.key}: first step and its check took {seconds:.0f} s")


def nothing() -> None:
    """A mark that is not timed."""


# --- checks against the truth ----------------------------------------------------------------------


@dataclass(frozen=True)
class SmallCheck:
    """A problem of real H whose truth in fp64 is known, and plain PyTorch's errors on it."""

    problem: Problem
    exact: dict[bool, HeadResult]  # by Variant.one_upstream; this rank's parts
    plain_loss_error: float
    plain_error: float
    vocab: int  # rows over all ranks: fewer than the cell's where memory is short

    @staticmethod
    def of(cell: Cell, settings: Settings, world: World, one_upstream: bool) -> SmallCheck:
        num_tokens = min(cell.num_tokens, settings.check_tokens)
        num_tokens = max(world.parts, num_tokens // world.parts * world.parts)
        vocab = rows_for_truth(cell, num_tokens, world)
        problem = Problem(
            world,
            num_tokens=num_tokens,
            hidden_size=cell.hidden_size,
            vocab=vocab,
            dtype=settings.dtype,
            upstream=settings.upstream,
            wgrad_accumulator=settings.wgrad_accumulator,
            keep_whole=True,
        )
        assert problem.whole is not None
        whole = problem.whole
        exact = truth(whole)
        plain = plain_head(whole, settings.dtype)
        errors = [relative_error(a, b) for a, b in zip(plain, exact, strict=True)]
        del plain
        results = {False: _part(problem, exact)}
        del exact
        if one_upstream:
            upstream = problem.one_upstream.expand_as(whole.grad_loss)
            same = HeadInputs(whole.hidden, whole.weight, whole.labels, upstream)
            results[True] = _part(problem, truth(same))
        problem.whole = None
        return SmallCheck(problem, results, errors[0], max(errors[1:]), vocab)

    def errors(self, variant: Variant) -> tuple[float, float]:
        """Norm-relative errors of the loss and of the gradients (the larger), this rank's."""
        assert variant.run is not None
        self.problem.zero_wgrad_accumulator()
        loss = variant.run(self.problem, nothing)
        exact = self.exact[variant.one_upstream]
        exact_loss = exact.loss.sum() if variant.one_upstream else exact.loss
        result = (
            relative_error(loss, exact_loss),
            max(
                relative_error(self.problem.grad_hidden(), exact.grad_hidden),
                relative_error(self.problem.grad_weight(), exact.grad_weight),
            ),
        )
        self.problem.reset()
        return result

    def bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """What a strategy of this package may have: of the loss, of the gradients."""
        loss = max(LOSS_FLOOR[dtype], LOSS_SLACK * self.plain_loss_error)
        return loss, max(FLOOR[dtype], 2 * self.plain_error)


def _part(problem: Problem, whole: HeadResult) -> HeadResult:
    rows = slice(problem.vocab_start, problem.vocab_start + problem.num_rows)
    return HeadResult(
        whole.loss[0],
        whole.grad_hidden[problem.tokens, 0].clone(),
        whole.grad_weight if problem.world.size == 1 else whole.grad_weight[rows].clone(),
    )


def rows_for_truth(cell: Cell, num_tokens: int, world: World) -> int:
    """The vocabulary, or as much of it as the fp64 truth fits beside (7 copies of the logits)."""
    free = -world.slowest([-float(world.free_bytes())])[0]
    unit = 128 * world.size
    vocab = cell.vocab
    while vocab > 2 * unit:
        need = 8 * vocab * (4 * cell.hidden_size + 7 * num_tokens)
        if need < 0.8 * free:
            break
        vocab = vocab // 2 // unit * unit
    return vocab


def check_small(
    outcomes: list[Outcome], cell: Cell, settings: Settings, world: World, known: dict[Any, Any]
) -> tuple[float, float, dict[str, Any]]:
    """Fill in every outcome's errors; WrongVariant where one of ours is above its bound.

    ``known`` keeps results between cells of one shape. Returns plain PyTorch's loss and gradient
    errors and what to record of the check.
    """
    tokens = min(cell.num_tokens, settings.check_tokens)
    home: tuple[Any, ...] = (cell.hidden_size, cell.vocab, tokens, world.parts)
    home += (settings.dtype, settings.upstream)

    def place(outcome: Outcome) -> Any:
        # A check in one chunk says nothing of other chunk sizes that are one chunk there as well,
        # but the same as they do.
        return (*home, outcome.variant.key)

    def left_out(outcome: Outcome) -> bool:
        # A loss that was summed has no samples of gradients at the timed size.
        variant = outcome.variant
        foreign = variant.family != "ours" and not variant.one_upstream
        return outcome.reason is not None or (foreign and not settings.check_foreign)

    outcomes = [outcome for outcome in outcomes if not left_out(outcome)]
    todo = [o for o in outcomes if place(o) not in known]
    if todo or home not in known:
        one_upstream = any(o.variant.one_upstream for o in todo)
        check = SmallCheck.of(cell, settings, world, one_upstream)
        known[home] = (
            check.plain_loss_error,
            check.plain_error,
            check.bounds(settings.dtype),
            {
                "check_tokens": check.problem.num_tokens,
                "check_vocab": check.vocab,
                "plain_error": check.plain_error,
                "plain_loss_error": check.plain_loss_error,
            },
        )
        for outcome in todo:
            known[place(outcome)] = _errors(outcome.variant, check, world)
        del check
        give_back(world)
    plain_loss, plain, (loss_bound, bound), facts = known[home]
    for outcome in outcomes:
        errors, outcome.reason = known[place(outcome)]
        if errors is None:
            if outcome.variant.family == "ours" and outcome.reason != OUT_OF_MEMORY:
                raise WrongVariant(f"{outcome.variant.key} failed: {outcome.reason}")
            continue
        outcome.loss_error, outcome.error = errors
        _judge(outcome, "", loss_bound, bound)
    return plain_loss, plain, facts


def _errors(
    variant: Variant, check: SmallCheck, world: World
) -> tuple[tuple[float, float] | None, str | None]:
    why_not = variant.limits(check.problem) if variant.limits is not None else None
    if why_not is not None:
        return None, why_not
    started = time.monotonic()
    found, reason = attempt(partial(check.errors, variant), world)
    tell_if_long(variant, started, world)
    if reason is not None:
        return None, reason
    loss_error, error = world.slowest(list(found))
    return (loss_error, error), None


def _judge(outcome: Outcome, where: str, loss_bound: float, bound: float) -> None:
    """WrongVariant for ours above a bound; a reason for others that are grossly wrong."""
    assert outcome.error is not None and outcome.loss_error is not None
    if outcome.variant.family == "ours":
        if not (outcome.error <= bound and outcome.loss_error <= loss_bound):
            raise WrongVariant(
                f"{outcome.variant.key} is wrong{where}: gradients off by {outcome.error:.2e} "
                f"(bound {bound:.2e}), loss by {outcome.loss_error:.2e} (bound {loss_bound:.2e})"
            )
    elif not max(outcome.error, outcome.loss_error) <= FOREIGN_ERROR:
        worst = max(outcome.error, outcome.loss_error)
        outcome.reason = f"wrong result{where}: error {worst:.1e}"


def full_errors(variant: Variant, problem: Problem, reference: FullReference) -> tuple[float, float, bool]:
    """Errors of loss and gradients at the timed size, and whether all of them is finite."""
    assert variant.run is not None
    problem.zero_wgrad_accumulator()
    loss = variant.run(problem, nothing)
    grad_hidden, grad_weight = problem.grad_hidden(), problem.grad_weight()
    finite = all(_finite(value) for value in (loss, grad_hidden, grad_weight))
    if variant.one_upstream:
        return relative_error(loss, reference.loss.double().sum()), 0.0, finite
    return (
        relative_error(loss, reference.loss),
        max(
            relative_error(grad_hidden[reference.tokens], reference.grad_hidden),
            relative_error(grad_weight[reference.rows], reference.grad_weight),
        ),
        finite,
    )


def _finite(value: Tensor) -> bool:
    # A sum is finite only where every term is: no mask of the value's size.
    return math.isfinite(float(value.sum(dtype=torch.float32).item()))


def check_full(
    outcomes: list[Outcome], problem: Problem, world: World, plain_loss: float, plain: float
) -> FullReference:
    """Every variant at the timed size, blockwise reference in fp32; it compiles what it needs, too.

    Returns the reference.
    """
    reference = full_reference(problem)
    loss_bound = max(2 * plain_loss, 1e-5)
    bound = max(FLOOR[problem.dtype], 2 * plain)
    for outcome in outcomes:
        if outcome.reason is not None:
            continue
        variant = outcome.variant
        if variant.limits is not None and (why_not := variant.limits(problem)) is not None:
            outcome.reason = why_not
            continue
        started = time.monotonic()
        found, outcome.reason = attempt(partial(full_errors, variant, problem, reference), world)
        problem.reset()
        if outcome.reason is None:
            loss_error, error, finite = found
            unbounded = 0.0 if finite else math.inf
            loss_error, error, unbounded = world.slowest([loss_error, error, unbounded])
            small = (outcome.loss_error, outcome.error)
            outcome.loss_error, outcome.error = loss_error + unbounded, error + unbounded
            _judge(outcome, f" at T = {problem.num_tokens}", loss_bound, bound)
            if small[1] is not None:
                outcome.loss_error, outcome.error = small
            outcome.extra["full_error"] = None if variant.one_upstream else error
            outcome.extra["full_loss_error"] = loss_error
        elif variant.family == "ours" and outcome.reason != OUT_OF_MEMORY:
            raise WrongVariant(f"{variant.key} failed at full size: {outcome.reason}")
        if promise.counts.remade:
            raise WrongVariant(
                f"{variant.key}: its upstream gradient is not the token weights that grad_in_forward was "
                "given; timed would be a recomputation"
            )
        tell_if_long(variant, started, world)
    return reference


# --- memory, times ---------------------------------------------------------------------------------


def measure_peak(outcome: Outcome, problem: Problem, world: World) -> float:
    """Peak above inputs, grad_hidden and the wgrad accumulator; returns the allocator's peak as a whole."""
    variant = outcome.variant
    assert variant.run is not None
    clock = Clock(world.on_gpu)
    problem.reset()
    before, whole = peak_bytes(partial(variant.run, problem, clock.mark), world)
    outcome.step_ms = sum(clock.spans_ms())
    outcome.peak_mib = (whole - before - problem.output_bytes()) / MIB
    if world.slowest([outcome.step_ms])[0] < 200:  # that step also asked the driver for memory
        outcome.step_ms = sum(turn(variant, problem, world, 1, 1)[0])
    problem.reset()
    return float(whole)


def peak_bytes(step: Callable[[], Any], world: World) -> tuple[int, int]:
    """Allocated before ``step``, and at most while it ran, cuBLAS's workspace counted.

    On a CPU 0, and the most that lived of what the step allocated.
    """
    if not world.on_gpu:
        with LiveStorages() as live:
            step()
        return 0, live.peak_bytes
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return before, torch.cuda.max_memory_allocated()


def turn(
    variant: Variant, problem: Problem, world: World, warm: int, steps: int, host: list[float] | None = None
) -> list[list[float]]:
    """``[forward, backward]`` ms of ``steps`` steps, without a wait between them.

    ``warm`` untimed steps come first. With none, a step in which the allocator asked the driver for
    memory, or gave some back, is run again instead. What the calls of a step on an idle device take to
    return is added to ``host``, in ms: of the untimed steps, or where there are none of the timed.
    """
    assert variant.run is not None

    def steps_ms(count: int) -> list[list[float]]:
        clocks = [Clock(world.on_gpu) for _ in range(count)]
        start = time.perf_counter()
        for clock in clocks:
            variant.run(problem, clock.mark)  # type: ignore[misc]
        if host is not None and not warm:
            host.append(1e3 * (time.perf_counter() - start) / count)
        return [clock.spans_ms() for clock in clocks]

    for _ in range(warm):
        if world.on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        variant.run(problem, nothing)
        if host is not None:
            host.append(1e3 * (time.perf_counter() - start))
    if warm:
        spans = steps_ms(steps)
    else:
        spans = []
        for _ in range(steps):
            for _ in range(MOST_TRIES):
                before = driver_calls(world)
                step = steps_ms(1)
                if driver_calls(world) == before:
                    break
            spans += step
    problem.reset()
    return spans


def ratios_beside(
    own: Callable[[], float], reference: Callable[[], float], blocks: int
) -> tuple[list[float], list[float]]:
    """(own turn over the mean of the reference's turns before and after it, the reference's turns)."""
    ratios, others = [], [reference()]
    for _ in range(blocks):
        time = own()
        others.append(reference())
        ratios.append(2 * time / (others[-2] + others[-1]))
    return ([1.0] if own is reference else ratios), others


def driver_calls(world: World) -> int:
    """How often the allocator has called the driver, so far."""
    if not world.on_gpu:
        return 0
    stats = torch.cuda.memory_stats()
    return int(stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0))


def block_order(names: list[str], blocks: int, seed: int) -> list[list[str]]:
    """The order of each block: every name as often as it is given, shuffled anew, always the same."""
    generator = random.Random(seed)
    return [generator.sample(names, len(names)) for _ in range(blocks)]


def measure_times(
    outcomes: dict[str, Outcome],
    roofs: dict[str, Outcome],
    roof: Roof,
    problem: Problem,
    settings: Settings,
    world: World,
) -> int:
    """Interleaved blocks; returns how many there were."""
    everything = outcomes | roofs

    def roof_turn(name: str, warm: int, steps: int) -> tuple[Any, str | None]:
        while True:
            spans, reason = attempt(partial(roof.turn, name, warm, steps), world)
            if reason != OUT_OF_MEMORY or roof.num_slices >= MOST_SLICES:
                return spans, reason
            roof.cut()

    for name, outcome in roofs.items():
        spans, outcome.reason = roof_turn(name, 0, 1)
        if spans is not None:
            outcome.step_ms = sum(spans[0])
    running = [name for name, outcome in everything.items() if outcome.reason is None]
    roof_turns = ROOF_TURNS if settings.blocks > 1 else 1
    names = [name for name in running for _ in range(roof_turns if name in roofs else 1)]
    estimates = world.slowest([everything[name].step_ms for name in running])
    for name, estimate in zip(running, estimates, strict=True):
        outcome = everything[name]
        outcome.step_ms = max(estimate, 1e-3)
        outcome.steps = max(1, min(MOST_STEPS, math.ceil(settings.sample_ms / outcome.step_ms)))

    done = 0
    for order in block_order(names, settings.blocks, settings.seed):
        late = float(time.monotonic() > settings.deadline)
        if done and world.slowest([late])[0]:
            say(world, f"  time limit: {done} of {settings.blocks} blocks")
            break
        of_block: dict[str, list[list[float]]] = {}
        for name in order:
            outcome = everything[name]
            if outcome.reason is not None:
                continue
            # Ranks would not agree on what to run again. A roof that was just built comes from passes
            # that draw less power than its products.
            warm = int(
                outcome.step_ms < LONGEST_WARM_STEP_MS
                or world.size > 1
                or (name in roofs and not roof.resident and settings.blocks > 1)
            )
            if warm and name not in roofs and outcome.step_ms < SHORT_STEP_MS:
                warm = 4  # the first one, after another variant, finds cold caches

            host: list[float] = []
            if name in roofs:
                spans, reason = roof_turn(name, warm, outcome.steps)
            else:
                take_turn = partial(turn, outcome.variant, problem, world, warm, outcome.steps, host)
                spans, reason = attempt(take_turn, world)
                if reason == OUT_OF_MEMORY and roof.resident:
                    roof.release(for_good=True)
                    host.clear()
                    spans, reason = attempt(take_turn, world)
                if reason is None:
                    outcome.host.append(world.slowest([statistics.median(host[-3:])])[0])
            problem.reset()
            if reason is not None:
                outcome.reason = reason
                if outcome.variant.family == "ours" and reason != OUT_OF_MEMORY:
                    raise WrongVariant(f"{name} failed while it was timed: {reason}")
                continue
            of_block.setdefault(name, []).extend(spans)
        for name, spans in of_block.items():
            flat = world.slowest([statistics.median(column) for column in zip(*spans, strict=True)])
            total = world.slowest([statistics.median([sum(step) for step in spans])])[0]
            everything[name].samples.append([*flat, total])
        done += 1
    return done


# --- a cell ----------------------------------------------------------------------------------------


def measure_cell(
    cell: Cell,
    variants: list[Variant],
    settings: Settings,
    world: World,
    facts: dict[str, Any],
    known: dict[Any, Any],
) -> list[dict[str, Any]]:
    """The rows of one cell: the roofs first, then the variants in their order.

    Raises WrongVariant before anything was timed where a strategy of this package is wrong, DeviceLost
    where a foreign kernel broke the device.
    """
    started = time.monotonic()
    world.sequence_parallel = cell.sequence_parallel
    outcomes = {v.key: Outcome(v, v.why_not, chunk_tokens=v.chunk_tokens) for v in variants}
    plain_loss, plain, check_facts = check_small(list(outcomes.values()), cell, settings, world, known)
    checked = time.monotonic()
    problem = Problem.of(
        cell,
        world,
        dtype=settings.dtype,
        upstream=settings.upstream,
        wgrad_accumulator=settings.wgrad_accumulator,
    )
    for outcome in outcomes.values():
        if outcome.variant.config is not None:
            choice = chosen(outcome.variant, problem, world)
            outcome.chunk_tokens, outcome.logits_backend = (choice.chunk_tokens, choice.logits_backend)
            outcome.extra["plan"] = choice.strategy
            outcome.extra["predicted_peak_mib"] = choice.predicted_peak_mib
    check_full(list(outcomes.values()), problem, world, plain_loss, plain)
    give_back(world)
    free = float(world.free_bytes())
    base = float(torch.cuda.memory_allocated()) if world.on_gpu else 0.0
    largest = base
    for outcome in outcomes.values():
        if outcome.reason is None:
            peak, outcome.reason = attempt(partial(measure_peak, outcome, problem, world), world)
            largest = max(largest, peak or 0.0)
            if outcome.reason is None and outcome.peak_mib is not None:
                outcome.peak_mib = world.slowest([outcome.peak_mib])[0]
        problem.reset()
    free = min(free, float(world.free_bytes()))
    roof = Roof(problem, world)
    roof.plan(free, free - (largest - base) - SLACK_BYTES)
    roofs = {name: Outcome(Variant(name, "roof", products=ROOFS[name])) for name in settings.roofs}
    ready = time.monotonic()
    blocks = measure_times(outcomes, roofs, roof, problem, settings, world)
    say(
        world,
        f"{cell}: checks {checked - started:.0f} s, full size {ready - checked:.0f} s, "
        f"{blocks} blocks {time.monotonic() - ready:.0f} s",
    )
    roof.release()
    if roof.num_slices > 1:
        check_facts["roof_slices"] = roof.num_slices
    facts = facts | {"V": problem.num_rows, "sp": world.sequence_parallel}
    more = check_facts | {"blocks": blocks}
    if not settings.check_foreign:
        more["check_foreign"] = False
    return rows_of(cell, outcomes, roofs, settings, facts, more)


def rows_of(
    cell: Cell,
    outcomes: dict[str, Outcome],
    roofs: dict[str, Outcome],
    settings: Settings,
    facts: dict[str, Any],
    more: dict[str, Any],
) -> list[dict[str, Any]]:
    """One row for each roof and variant: the keys of `report.KEYS`, then the others."""

    def median_ms(outcome: Outcome | None) -> float | None:
        if outcome is None or not outcome.samples:
            return None
        return statistics.median([sample[-1] for sample in outcome.samples])

    roof_ms = {name: median_ms(outcome) for name, outcome in roofs.items()}
    rows = []
    for outcome in (*roofs.values(), *outcomes.values()):
        variant = outcome.variant
        roof_name = "roof-4" if variant.products == 4 else "roof"
        below = roof_ms.get(roof_name)
        raw = roof_ms.get("roof-raw") if variant.products == 3 else None
        row: dict[str, Any] = {
            **facts,
            "shape": cell.shape,
            "T": cell.num_tokens,
            "H": cell.hidden_size,
            "variant": variant.name,
            "chunk_tokens": outcome.chunk_tokens,
            "forward_ms": None,
            "backward_ms": None,
            "time_ms": None,
            "roof_ms": rounded(below, 3),
            "ratio": None,
            "peak_mib": rounded(outcome.peak_mib, 4),
            "error": outcome.reason if outcome.reason is not None else outcome.error,
            "family": variant.family,
            "roof_products": variant.products,
            "ratio_raw": None,
            "spread": None,
            "tflops": None,
            "steps": outcome.steps,
            "logits_backend": outcome.logits_backend,
            "wgrad_accumulator": settings.wgrad_accumulator,
            "upstream": "one scalar" if variant.one_upstream else settings.upstream,
            "loss_error": outcome.loss_error,
            "host_ms": rounded(statistics.median(outcome.host), 3) if outcome.host else None,
            **more,
            **outcome.extra,
        }
        total = median_ms(outcome)
        if total is not None and outcome.reason is None:
            forward, backward = (
                statistics.median([sample[column] for sample in outcome.samples]) for column in (0, 1)
            )
            totals = [sample[-1] for sample in outcome.samples]
            flop = 2.0 * variant.products * cell.num_tokens * cell.hidden_size * facts["V"]
            row |= {
                "forward_ms": rounded(forward, 3),
                "backward_ms": rounded(backward, 3),
                "time_ms": rounded(total, 3),
                "ratio": rounded(total / below, 4) if below else None,
                "ratio_raw": rounded(total / raw, 4) if raw else None,
                "spread": rounded((max(totals) - min(totals)) / total, 4),
                "tflops": rounded(flop / total / 1e9, 1),
            }
        rows.append({key: row[key] for key in KEYS} | row)
    return rows


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
