"""The floor: the step's matrix products alone, by cuBLAS, on the operands of the real step.

The chip is limited by power and power depends on the data, so the products run on the true
``grad_logits``, rounded to the step's dtype; ``grad_weight`` accumulates in fp32 into the same end
point as every variant's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fused_ce.scripts.bench.problem import Clock, Problem, World, exact_block, token_blocks
from megatron_fused_ce.wgrad import accumulate_

#: Bytes that the roof leaves free beside its own buffers: cuBLAS, the reference's fp32 block.
SLACK_BYTES = 5 * 2**30


class Roof:
    """All roofs of one problem, on shared operands.

    ``roof``: ``logits``, then ``grad_hidden`` and ``grad_weight`` from the true ``grad_logits``.
    ``roof-4``: the logits twice, as `recompute` computes them. ``roof-raw``: the last two products read
    the logits instead.

    The two ``[T, V]`` buffers stay between turns where they fit beside every variant (``resident``),
    else each turn builds them before it times; where they do not fit at all the products run in slices
    of the tokens, each slice built and timed by itself (``num_slices``).
    """

    def __init__(self, problem: Problem, world: World) -> None:
        self.problem, self.world = problem, world
        self.resident = False
        self.num_slices = 1
        self._built: slice | None = None
        self._logits: Tensor | None = None
        self._grad_logits: Tensor | None = None

    def plan(self, free_bytes: float, resident_bytes: float) -> None:
        """Decide from what is free without any variant and beside the largest of them."""
        free_bytes, resident_bytes = (-x for x in self.world.slowest([-free_bytes, -resident_bytes]))
        item = self.problem.weight.element_size()
        num_tokens, hidden_size = self.problem.num_tokens, self.problem.weight.shape[1]
        need = 2 * num_tokens * self.problem.num_rows * item + 2 * num_tokens * hidden_size * item
        self.resident = need + SLACK_BYTES <= resident_bytes
        self.num_slices = 1
        while need / self.num_slices + SLACK_BYTES > free_bytes and self.num_slices < num_tokens:
            self.num_slices *= 2

    def release(self, for_good: bool = False) -> None:
        """Give the buffers back; ``for_good``: after every turn from now on."""
        self._built = self._logits = self._grad_logits = None
        if for_good:
            self.resident = False

    def cut(self) -> None:
        """Twice as many slices: this many did not fit."""
        self.release(for_good=True)
        self.num_slices *= 2

    def turn(self, name: str, warm: int, steps: int) -> list[list[float]]:
        """``[forward, backward]`` ms of ``steps`` steps, after ``warm`` untimed ones."""
        problem = self.problem
        problem.reset()
        T = problem.num_tokens
        width = -(-T // self.num_slices)
        totals = [[0.0, 0.0] for _ in range(steps)]
        hidden = self.world.gather_tokens(problem.hidden.detach())
        for start in range(0, T, width):
            part = slice(start, min(start + width, T))
            self._build(hidden, part)
            grad_hidden = torch.empty_like(hidden[part])
            grad_weight = torch.empty_like(problem.weight) if problem.main_grad is None else None
            clocks = []
            for step in range(-warm, steps):
                clock = Clock(self.world.on_gpu)
                self._products(name, hidden[part], grad_hidden, grad_weight, clock.mark)
                if step >= 0:
                    clocks.append(clock)
            for total, clock in zip(totals, clocks, strict=True):
                for column, span in enumerate(clock.spans_ms()):
                    total[column] += span
        if not self.resident:
            self.release()
        return totals

    @torch.no_grad()
    def _build(self, hidden: Tensor, part: slice) -> None:
        """Fill the buffers with the true ``grad_logits`` of the tokens ``part``."""
        if self._built == part:
            return
        shape = (part.stop - part.start, self.problem.num_rows)
        if self._logits is None or self._logits.shape != shape:
            self.release()
            self._logits = hidden.new_empty(shape)
            self._grad_logits = hidden.new_empty(shape)
        assert self._grad_logits is not None
        for block in token_blocks(part.start, part.stop, self.problem.num_rows):
            _, exact = exact_block(self.problem, hidden, block)
            self._grad_logits[block.start - part.start : block.stop - part.start] = exact
            del exact
        self._built = part

    @torch.no_grad()
    def _products(
        self,
        name: str,
        hidden: Tensor,  # [t, H]
        grad_hidden: Tensor,  # [t, H]
        grad_weight: Tensor | None,  # [V, H], where there is no main_grad
        mark: Callable[[], None],
    ) -> None:
        weight, logits = self.problem.weight.detach(), self._logits
        assert logits is not None and self._grad_logits is not None
        operand = logits if name == "roof-raw" else self._grad_logits
        mark()
        torch.mm(hidden, weight.t(), out=logits)
        mark()
        if name == "roof-4":
            torch.mm(hidden, weight.t(), out=logits)
        torch.mm(operand, weight, out=grad_hidden)
        if grad_weight is None:
            assert self.problem.main_grad is not None
            accumulate_(self.problem.main_grad, operand, hidden)
        else:
            torch.mm(operand.t(), hidden, out=grad_weight)
        mark()
