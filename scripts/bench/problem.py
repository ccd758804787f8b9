"""What is measured: the ranks and their clock, one rank's operands, an op's cases, the bare products.

The chip is limited by power and power depends on the data: the products run on the operands of the real step
and on a true gradient of the logits in the step's dtype; ``grad_weight`` ends where every case's does.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.head.grad_weight import accumulate_
from megatron_fused_ce.scripts.bench.cases import ALIKE, Cell, world_size
from megatron_fused_ce.scripts.lib import gloo

UPSTREAM_SCALAR = 0.3  # over the token weights; no power of two: a strategy that forgets it shows
ZERO_WEIGHT_EVERY = 64  # tokens; few: rows of zeros draw less power and would flatter the roof
BLOCK_ELEMENTS = 2**27  # of logits that are made block by block
TIMEOUT = timedelta(minutes=2)  # of ranks that wait for one which failed; compilations take up to 32 s

Outputs = dict[str, Tensor]
Mark = Callable[[], object]


class World:
    """The ranks of this run, one tensor-parallel group; ``sequence_parallel`` may change between cells."""

    def __init__(self, on_gpu: bool, sequence_parallel: bool = False) -> None:
        self.rank, self.size, self.on_gpu = int(os.environ.get("RANK", "0")), world_size(), on_gpu
        self.device = torch.device("cuda", self.rank) if self.on_gpu else torch.device("cpu")
        self.sequence_parallel = sequence_parallel and self.size > 1
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            dynamo: Any = import_module("torch._dynamo")  # of what is compiled: each shape of a run alone
            dynamo.config.cache_size_limit, dynamo.config.automatic_dynamic_shapes = 64, False
        gloo.use_one_thread()
        options: dict[str, Any] = {"rank": self.rank, "world_size": self.size}
        if self.size == 1:  # a free port
            options |= {"store": dist.TCPStore("127.0.0.1", 0, 1, True)}  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if self.on_gpu else "gloo", timeout=TIMEOUT, **options)
        self.group: Any = dist.group.WORLD
        if self.on_gpu:
            with suppress(ImportError):  # Megatron's layer asks its own state for the group
                from megatron.core import parallel_state

                minutes = TIMEOUT.seconds // 60
                parallel_state.initialize_model_parallel(
                    self.size, distributed_timeout_minutes=minutes, create_gloo_process_groups=False
                )
                self.group = parallel_state.get_tensor_model_parallel_group()

    @property
    def parts(self) -> int:
        """Ranks that hold different tokens."""
        return self.size if self.sequence_parallel else 1

    def close(self) -> None:
        dist.destroy_process_group()

    def everyone(self, value: Any) -> list[Any]:
        """Each rank's value. Collectives: one all-gather of objects (R > 1)."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def slowest(self, values: list[float]) -> list[float]:
        """Each value's largest over the ranks. Collectives: `everyone`'s."""
        return [max(each) for each in zip(*self.everyone(values), strict=True)]

    def synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def now(self) -> Any:
        """The moment at which the device comes to here; on a CPU seconds."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, first: Any, second: Any) -> float:
        """Between two moments that are over."""
        return float(first.elapsed_time(second) if self.on_gpu else 1e3 * (second - first))


class Problem:
    """This rank's operands of a cell; the class of an op adds its definition and what else it is given.

    ``hidden [T / parts, H]`` and ``weight [V, H]`` are leaves, ``labels [T]`` global ids, ``grad_loss [T]``
    fp32 a scalar times ``token_weights``; ``one_upstream []`` is for implementations that take one for all
    tokens. ``main_grad [V, H]`` fp32 is the wgrad accumulator unless that is "returned". ``all_hidden
    [T, H]`` and ``all_weight`` (all rows; deleted before anything is timed) are the same on every rank.
    """

    wgrad_accumulator = "main_grad"

    def __init__(self, cell: Cell, world: World, dtype: torch.dtype = torch.bfloat16) -> None:
        self.cell, self.world, self.dtype, self.num_tokens = cell, world, dtype, cell.num_tokens
        self.generator = torch.Generator(device=world.device).manual_seed(1)
        T, H, V = cell.num_tokens, cell.hidden_size, cell.vocab
        self.all_hidden = self.normal(T, H, dtype=dtype)
        self.all_weight = self.normal(V, H, dtype=dtype).mul_(2.0 / math.sqrt(H))
        self.labels = self.ids(T)
        self.about: dict[str, Any] = {}  # how the operands were made
        if cell.operands is not None:
            self._take(cell.operands, cell.origin == ALIKE)
        self.token_weights = 0.5 + self.uniform(T)
        self.token_weights[::ZERO_WEIGHT_EVERY] = 0.0
        self.grad_loss = UPSTREAM_SCALAR * self.token_weights
        self.one_upstream = self.grad_loss.square().mean().sqrt()
        self.num_rows, own = V // world.size, T // world.parts
        self.rows = slice(world.rank * self.num_rows, (world.rank + 1) * self.num_rows)
        first = own * (world.rank % world.parts)
        self.tokens = slice(first, first + own)  # of this rank's hidden states
        self.hidden = self.all_hidden[self.tokens].detach().requires_grad_()
        self.weight = self.all_weight[self.rows].clone().requires_grad_()
        self.main_grad: Tensor | None = None
        if self.wgrad_accumulator == "main_grad":
            self.main_grad = torch.zeros(self.weight.shape, device=world.device)
        self.weight.main_grad = self.main_grad  # type: ignore[attr-defined]

    def _take(self, file: Path, alike: bool) -> None:
        """A trained head's operands; with ``alike`` its labels, and random ones as wide."""
        try:
            given: dict[str, Any] = torch.load(file, map_location=self.world.device, weights_only=True)
            self.labels, self.about = given["labels"][: self.num_tokens].clone(), given["about"]
            hidden = given["hidden"][: self.num_tokens]
            for own, theirs in ((self.all_hidden, hidden), (self.all_weight, given["weight"])):
                theirs = theirs.view_as(own)  # or it says which sizes there are
                own.copy_(own * (theirs.float().std() / own.float().std()) if alike else theirs)
        except Exception as error:
            raise UsageError(f"{file} has no operands of {self.cell}: {error}") from None

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=self.generator, device=self.world.device, dtype=dtype)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.generator, device=self.world.device)

    def ids(self, *size: int) -> Tensor:
        return torch.randint(self.cell.vocab, size, generator=self.generator, device=self.world.device)

    def blocks(self) -> Iterator[slice]:
        """The tokens, as many at once as logits of all rows may have."""
        size = max(1, BLOCK_ELEMENTS // self.cell.vocab)
        for first in range(0, self.num_tokens, size):
            yield slice(first, min(first + size, self.num_tokens))

    def definition(self, kind: Any, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        """The outputs of the tokens ``part`` in plain PyTorch, in the dtype of ``hidden [t, H]`` and of
        ``weight`` (all rows), with their graph; ``kind`` is the case's. Every op has its own."""
        raise NotImplementedError

    def grad_logits(self, part: slice) -> Tensor:
        """``[t, V]``: a true gradient of this rank's logits of these tokens, for the bare products."""
        raise NotImplementedError

    def sides(self) -> list[tuple[Tensor, Tensor]]:
        """``(hidden [T, H], weight [V, H])`` of each product of logits in a step; the last has gradients."""
        return [(self.all_hidden, self.weight)]

    def reset(self) -> None:
        """Forget both gradients that autograd holds (no device work)."""
        self.hidden.grad = self.weight.grad = None

    def gradients(self) -> Outputs:
        """``grad_hidden [T / parts, H]``; ``grad_weight [V, H]`` in fp32, or in the weight's dtype."""
        of_weight = self.weight.grad if self.main_grad is None else self.main_grad
        assert self.hidden.grad is not None and of_weight is not None, "a gradient did not arrive"
        return {"grad_hidden": self.hidden.grad, "grad_weight": of_weight}


OURS, MEGATRON, PEER, BASE = "ours", "megatron", "peer", "base"


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
    is_exact: bool = False  # outputs may have eager PyTorch's error, which rounds logits, and no more
    told: dict[str, Any] = field(default_factory=dict)  # what it found out, for its row

    def step(self, problem: Problem, mark: Mark = lambda: None) -> Outputs:
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
            if problem.main_grad is not None and problem.weight.grad is not None:  # as Megatron's DDP does
                problem.main_grad.add_(problem.weight.grad)
                problem.weight.grad = None
        mark()
        return {name: value.detach() for name, value in outputs.items()}

    @contextmanager
    def ready(self, problem: Problem) -> Iterator[Callable[..., Outputs]]:
        """Its step, while what that needs beside the problem is there."""
        yield partial(self.step, problem)


@dataclass(frozen=True)
class Bare(Case):
    """Matrix products alone: each side's logits; with two more ``grad_hidden`` and ``grad_weight``; with a
    third the logits once again before those, as `recompute` makes them."""

    @contextmanager
    def ready(self, problem: Problem) -> Iterator[Callable[..., Outputs]]:
        grad = logits = problem.hidden.new_empty(problem.num_tokens, problem.num_rows)
        sides, main_grad = problem.sides(), problem.main_grad
        hidden, weight = sides[-1]
        again = self.products - len(sides) - 2
        with torch.no_grad():
            if again >= 0:
                grad = torch.empty_like(logits)
                for part in problem.blocks():
                    grad[part] = problem.grad_logits(part)
            of_hidden = torch.empty_like(hidden)
            of_weight = torch.empty_like(problem.weight) if main_grad is None else main_grad

            def step(mark: Mark = lambda: None) -> Outputs:
                mark()
                for of_side, rows in sides:
                    torch.mm(of_side, rows.t(), out=logits)
                mark()
                for _ in range(again):
                    torch.mm(hidden, weight.t(), out=logits)
                if again >= 0:
                    torch.mm(grad, weight, out=of_hidden)
                    if main_grad is None:
                        torch.mm(grad.t(), hidden, out=of_weight)
                    else:
                        accumulate_(main_grad, grad, hidden)
                mark()
                return {"grad_hidden": of_hidden, "grad_weight": of_weight}

            yield step


def bare(name: str, products: int) -> Bare:
    """The base of that name, and its own."""
    return Bare(name, BASE, base=name, products=products)


@dataclass(frozen=True)
class Op:
    """What a preset measures."""

    problem: type[Problem]
    cases_of: Callable[[argparse.Namespace, Cell, World], list[Case]]
    bases: tuple[Bare, ...] = ()
