"""A turn of steps on the clock, and the floor below them: a step's matrix products alone, by cuBLAS.

The chip is limited by power and power depends on the data, so the products run on the operands of the real
step and on a true gradient of the logits, rounded to the step's dtype; ``grad_weight`` ends where every
case's does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_fused_ce.scripts.bench.op import Bare, Mark, nothing
from megatron_fused_ce.scripts.bench.problem import Clock, Problem, World
from megatron_fused_ce.wgrad import accumulate_


def turn(step: Callable[[Mark], object], world: World, warm: int, steps: int) -> list[float]:
    """``[forward, backward, both, host]`` ms: medians over ``steps`` steps, without a wait between them.

    ``warm`` untimed steps come first; what the calls of one take to return, on an idle device, is the host's
    time, of the last three of them.
    """
    host = [0.0]
    for _ in range(warm):
        world.synchronise()
        start = time.perf_counter()
        step(nothing)
        host.append(1e3 * (time.perf_counter() - start))
    clocks = [Clock(world.on_gpu) for _ in range(steps)]
    for clock in clocks:
        step(clock.mark)
    spans = [clock.spans_ms() for clock in clocks]
    columns = [*zip(*spans, strict=True), [sum(span) for span in spans], host[-3:]]
    return [statistics.median(column) for column in columns]


@torch.no_grad()
def bare_turn(
    problem: Problem, bare: Bare, slices: int, warm: int, steps: int, run: Callable[..., list[float]] = turn
) -> list[float]:
    """As :func:`turn`, of bare products.

    Their logits and the gradient of these, ``[T, V]``, are made before; where both do not fit, in ``slices``
    of the tokens, each of which is made, and timed, by itself.
    """
    total = [0.0] * 4
    for part in problem.blocks(-(-problem.num_tokens // slices)):
        grad = logits = problem.hidden.new_empty(part.stop - part.start, problem.num_rows)
        if bare.backward:
            grad = torch.empty_like(logits)
            for block in problem.blocks(start=part.start, stop=part.stop):
                grad[block.start - part.start : block.stop - part.start] = problem.grad_logits(block)
        sides = [(hidden[part], weight) for hidden, weight in problem.sides()]
        main_grad = problem.main_grad
        end = torch.empty_like(problem.weight) if main_grad is None else main_grad
        ends = (torch.empty_like(sides[-1][0]), end)
        step = partial(_products, bare, sides, logits, grad, ends, main_grad is not None)
        total = [a + b for a, b in zip(total, run(step, problem.world, warm, steps), strict=True)]
    return total


def _products(
    bare: Bare,
    sides: list[tuple[Tensor, Tensor]],  # [t, H], [V, H]: the last one has gradients
    logits: Tensor,  # [t, V]
    grad: Tensor,  # [t, V]
    ends: tuple[Tensor, Tensor],  # grad_hidden [t, H], grad_weight [V, H]
    accumulates: bool,
    mark: Mark,
) -> None:
    hidden, weight = sides[-1]
    mark()
    for of_side, rows in sides:
        torch.mm(of_side, rows.t(), out=logits)
    mark()
    if bare.again:
        torch.mm(hidden, weight.t(), out=logits)
    if bare.backward:
        torch.mm(grad, weight, out=ends[0])
        if accumulates:
            accumulate_(ends[1], grad, hidden)
        else:
            torch.mm(grad.t(), hidden, out=ends[1])
    mark()
