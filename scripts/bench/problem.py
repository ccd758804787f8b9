"""What is measured on: the ranks and their group, a clock, and one rank's operands of a cell."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.head.grad_weight import (
    Accumulator,
    InPlaceGradWeight,
    OpenGradWeight,
    ReturnedGradWeight,
)
from megatron_fused_ce.scripts.bench.cases import Cell, world_size
from megatron_fused_ce.scripts.lib import gloo

MIB = 1024 * 1024

#: The upstream gradient is this times the token weights: no power of two, so that a strategy that
#: forgets it, or rounds it away, shows.
UPSTREAM_SCALAR = 0.3
#: One token in so many has weight 0. Few: rows of zeros draw less power and would flatter the roof.
ZERO_WEIGHT_EVERY = 64
#: Elements of one block of logits where they are made block by block.
BLOCK_ELEMENTS = 2**27
#: A rank that fails alone leaves the others in a collective: they end after this. Longer than any
#: compilation (megatron-native: 32 s on an H200's host).
TIMEOUT = timedelta(minutes=2)


class World:
    """The ranks of this run, and the communicator that the head is measured with.

    ``group`` is what the op, Megatron's layer and the peers are given: torchrun's ranks.
    ``sequence_parallel`` may change between cells; ``use_gpu`` None: where there is one.
    """

    def __init__(self, sequence_parallel: bool = False, use_gpu: bool | None = None) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), world_size()
        self.on_gpu = torch.cuda.is_available() if use_gpu is None else use_gpu
        self.device = torch.device("cuda", self.rank) if self.on_gpu else torch.device("cpu")
        self.has_megatron = False
        self.sequence_parallel = sequence_parallel and self.size > 1
        self.group = self._init_group()

    def _init_group(self) -> Any:
        backend = "nccl" if self.on_gpu else "gloo"
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        gloo.use_one_thread()
        options: dict[str, Any] = {"rank": self.rank, "world_size": self.size}
        if self.size == 1:  # a free port
            options |= {"store": dist.TCPStore("127.0.0.1", 0, 1, True)}  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=TIMEOUT, **options)
        if self.on_gpu:
            try:
                from megatron.core import parallel_state

                minutes = TIMEOUT.seconds // 60
                parallel_state.initialize_model_parallel(
                    self.size, distributed_timeout_minutes=minutes, create_gloo_process_groups=False
                )
                self.has_megatron = True
                return parallel_state.get_tensor_model_parallel_group()
            except ImportError:
                pass
        return dist.group.WORLD

    @property
    def parts(self) -> int:
        """Ranks that hold different tokens."""
        return self.size if self.sequence_parallel else 1

    def close(self) -> None:
        if self.has_megatron:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
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

    def first_word(self, word: str | None) -> str | None:
        """The first rank's word that is not None. Collectives: `everyone`'s."""
        return next((said for said in self.everyone(word) if said is not None), None)

    def synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


class Clock:
    """Milliseconds of device time between marks, launch gaps included; of wall time on a CPU."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def wait_for_start(self) -> None:
        """Waits until the device is at the first mark."""
        if self._on_gpu:
            self._marks[0].synchronize()

    def spans_ms(self) -> list[float]:
        """Waits for the device."""
        spans = pairwise(self._marks)
        if self._on_gpu:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) for first, second in spans]
        return [1e3 * (second - first) for first, second in spans]


Outputs = dict[str, Tensor]


class Problem:
    """This rank's operands of a cell; the class of an op adds its definition and what else it is given.

    ``hidden`` ``[T / parts, H]`` and ``weight`` ``[V, H]`` are leaves, ``labels`` ``[T]`` global ids,
    ``grad_loss`` ``[T]`` fp32 a scalar times ``token_weights``; ``one_upstream`` ``[]`` is for
    implementations that take one for all tokens. ``main_grad`` ``[V, H]`` fp32 is the wgrad accumulator
    unless ``wgrad_accumulator`` is "returned". ``all_hidden`` ``[T, H]`` and ``all_weight`` (all rows;
    deleted before anything is timed) are the same on every rank.
    """

    def __init__(
        self,
        cell: Cell,
        world: World,
        *,
        dtype: torch.dtype = torch.bfloat16,
        wgrad_accumulator: str = "main_grad",
    ) -> None:
        self.cell, self.world, self.dtype, self.num_tokens = cell, world, dtype, cell.num_tokens
        self._generator = torch.Generator(device=world.device).manual_seed(1)
        T, H, V = cell.num_tokens, cell.hidden_size, cell.vocab
        self.all_hidden = self.normal(T, H, dtype=dtype)
        self.all_weight = self.normal(V, H, dtype=dtype).mul_(2.0 / math.sqrt(H))
        self.labels = self.ids(T)
        self.about: dict[str, Any] = {}  # how the operands were made
        if cell.operands is not None:
            self._take(cell.operands, cell.alike)
        self.token_weights = 0.5 + self.uniform(T)
        self.token_weights[::ZERO_WEIGHT_EVERY] = 0.0
        self.grad_loss = UPSTREAM_SCALAR * self.token_weights
        self.one_upstream = self.grad_loss.square().mean().sqrt()
        self.num_rows = V // world.size
        self.rows = slice(world.rank * self.num_rows, (world.rank + 1) * self.num_rows)
        own = T // world.parts
        first = own * world.rank if world.parts > 1 else 0
        self.tokens = slice(first, first + own)  # of this rank's hidden states
        hidden = self.all_hidden if world.parts == 1 else self.all_hidden[self.tokens].clone()
        weight = self.all_weight if world.size == 1 else self.all_weight[self.rows].clone()
        self.hidden = hidden.detach().requires_grad_()
        self.weight = weight.detach().requires_grad_()
        self.main_grad: Tensor | None = None
        if wgrad_accumulator == "main_grad":
            self.main_grad = torch.zeros(self.weight.shape, device=world.device)

    def _take(self, file: Path, alike: bool) -> None:
        """Operands of a trained head; with ``alike`` its labels, and random ones of its standard deviations.

        Raises UsageError where the file has others than the cell's.
        """
        try:
            given: dict[str, Any] = torch.load(file, map_location=self.world.device, weights_only=True)
            self.labels, self.about = given["labels"][: self.num_tokens].clone(), given["about"]
        except Exception as error:
            raise UsageError(f"{file} is none of scripts.bench.trained: {type(error).__name__}") from None
        for name in ("hidden", "weight"):
            own, theirs = getattr(self, f"all_{name}"), given[name]
            if (
                len(theirs) < len(own)
                or theirs.shape[1] != own.shape[1]
                or len(given["weight"]) != self.cell.vocab
            ):
                sizes = f"hidden {[*given['hidden'].shape]} and weight {[*given['weight'].shape]}"
                raise UsageError(f"{file} has {sizes}: name these sizes with --shapes HxV and --tokens")
            if alike:
                own *= theirs.float().std() / own.float().std()
            else:
                own.copy_(theirs[: len(own)])

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=self._generator, device=self.world.device, dtype=dtype)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self._generator, device=self.world.device)

    def ids(self, *size: int) -> Tensor:
        return torch.randint(self.cell.vocab, size, generator=self._generator, device=self.world.device)

    def blocks(self) -> Iterator[slice]:
        """The tokens, as many at once as logits of all rows may have."""
        size = max(1, BLOCK_ELEMENTS // self.cell.vocab)
        for first in range(0, self.num_tokens, size):
            yield slice(first, min(first + size, self.num_tokens))

    # --- an op's part ------------------------------------------------------------------------

    def definition(self, kind: Any, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        """The outputs of the tokens ``part`` in plain PyTorch, in the dtype of ``hidden [t, H]`` and of
        ``weight`` (all rows), with their graph; ``kind`` is the case's."""
        raise NotImplementedError

    def sides(self) -> list[tuple[Tensor, Tensor]]:
        """``(hidden [T, H], weight [V, H])`` of each product of logits in a step; the last has gradients."""
        return [(self.all_hidden, self.weight)]

    def grad_logits(self, part: slice) -> Tensor:
        """``[t, V]``: a true gradient of this rank's logits of the tokens ``part``, for the bare products."""
        raise NotImplementedError

    # --- a step's ends -----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget both gradients that autograd holds (no device work)."""
        self.hidden.grad = self.weight.grad = None

    def finish_backward(self) -> None:
        """What Megatron's DDP hook does: add autograd's gradient to ``main_grad`` and drop it."""
        if self.main_grad is not None and self.weight.grad is not None:
            self.main_grad.add_(self.weight.grad)
            self.weight.grad = None

    @property
    def open_grad_weight(self) -> OpenGradWeight:
        """Opens this problem's wgrad accumulator, for `linear_cross_entropy`."""
        main_grad = self.main_grad
        if main_grad is None:
            return ReturnedGradWeight

        def open_main_grad(weight: Tensor, num_gemms: int, scaled: bool) -> Accumulator:
            return InPlaceGradWeight(main_grad, scaled, lambda: None)

        open_main_grad.kind = "main_grad"  # type: ignore[attr-defined]
        return open_main_grad

    def gradients(self) -> Outputs:
        """``grad_hidden [T / parts, H]``; ``grad_weight [V, H]`` in fp32, or in the weight's dtype."""
        grad_weight = self.weight.grad if self.main_grad is None else self.main_grad
        assert self.hidden.grad is not None and grad_weight is not None, "a gradient did not arrive"
        return {"grad_hidden": self.hidden.grad, "grad_weight": grad_weight}
