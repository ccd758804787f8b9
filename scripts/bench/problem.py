"""What the benchmark measures on: shapes, the group of ranks, operands, and two references.

`Problem` holds one rank's operands. `full_reference` gives the exact loss and a sample of both
gradients at the timed size, block by block; the fp64 truth at a smaller size is
`megatron_fused_ce.scripts.lib.reference.truth` on `Problem.whole`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.scripts.bench.cases import Cell, world_size
from megatron_fused_ce.scripts.lib import gloo
from megatron_fused_ce.scripts.lib.reference import HeadInputs
from megatron_fused_ce.wgrad import GradWeight, InPlaceGradWeight, OpenGradWeight, ReturnedGradWeight

MIB = 1024 * 1024

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


#: The upstream gradient is this times the token weights: no power of two, so that a strategy that
#: forgets it, or rounds it away, shows.
UPSTREAM_SCALAR = 0.3
#: One token in so many has weight 0. Few: rows of zeros draw less power and would flatter the roof.
ZERO_WEIGHT_EVERY = 64
#: Elements of one fp32 block of logits in the blockwise reference (1 GiB).
BLOCK_ELEMENTS = 2**28
#: A rank that fails alone leaves the others in a collective: they end after this. Longer than any
#: compilation (megatron-native: 32 s on an H200's host).
TIMEOUT = timedelta(minutes=2)


class World:
    """The tensor-parallel group of all ranks; with a GPU also Megatron's idea of it, if installed.

    ``sequence_parallel`` may change between cells; ``use_gpu`` None: where there is one.
    """

    def __init__(self, sequence_parallel: bool = False, use_gpu: bool | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = world_size()
        self.on_gpu = torch.cuda.is_available() if use_gpu is None else use_gpu
        self.device = torch.device("cuda", self.rank) if self.on_gpu else torch.device("cpu")
        backend = "gloo"
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            backend = "nccl"
        gloo.use_one_thread()
        if self.size > 1:
            dist.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        else:
            store = dist.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]  # a free port
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self.group = dist.group.WORLD
        self.sequence_parallel = sequence_parallel and self.size > 1
        self.has_megatron = False
        if self.on_gpu:
            try:
                from megatron.core import parallel_state

                parallel_state.initialize_model_parallel(
                    self.size, distributed_timeout_minutes=TIMEOUT.seconds // 60
                )
                self.group = parallel_state.get_tensor_model_parallel_group()
                self.has_megatron = True
            except ImportError:
                pass

    @property
    def parts(self) -> int:
        """Ranks that hold different tokens."""
        return self.size if self.sequence_parallel else 1

    def close(self) -> None:
        if self.has_megatron:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def sum_(self, value: Tensor) -> Tensor:
        """Collectives: one SUM all-reduce (R > 1)."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def max_(self, value: Tensor) -> Tensor:
        """Collectives: one MAX all-reduce (R > 1)."""
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def slowest(self, values: list[float]) -> list[float]:
        """Each value's largest over the ranks. Collectives: one MAX all-reduce (R > 1)."""
        if self.size == 1 or not values:
            return values
        gathered = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(value) for value in self.max_(gathered).tolist()]

    def everyone(self, value: Any) -> list[Any]:
        """Each rank's value. Collectives: one all-gather of objects (R > 1)."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def first_word(self, word: str | None) -> str | None:
        """The first rank's word that is not None. Collectives: one all-gather of objects (R > 1)."""
        return next((said for said in self.everyone(word) if said is not None), None)

    def gather_tokens(self, part: Tensor) -> Tensor:
        """``[T, ...]`` from each rank's ``[T / parts, ...]``. Collectives: one all-gather (SP)."""
        if self.parts == 1:
            return part
        whole = part.new_empty(part.shape[0] * self.size, *part.shape[1:])
        # torch 2.13 renamed it and warns at the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, part.contiguous(), group=self.group)
        return whole

    def free_bytes(self) -> int:
        """Memory that new tensors may take."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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

    def spans_ms(self) -> list[float]:
        """Waits for the device."""
        spans = pairwise(self._marks)
        if self._on_gpu:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) for first, second in spans]
        return [1e3 * (second - first) for first, second in spans]


class Problem:
    """This rank's operands.

    ``hidden`` ``[T / parts, H]`` and ``weight`` ``[V, H]`` are leaves, ``labels`` ``[T]`` global ids,
    ``grad_loss`` ``[T]`` fp32: ``scalar * token_weights``, or random per token (``upstream`` "random",
    ``token_weights`` is then None). ``main_grad`` ``[V, H]`` fp32 is the wgrad accumulator
    unless ``wgrad_accumulator`` is "returned". ``whole`` keeps all ranks' operands for the fp64 truth.
    """

    def __init__(
        self,
        world: World,
        *,
        num_tokens: int,
        hidden_size: int,
        vocab: int,
        dtype: torch.dtype,
        upstream: str = "weights",
        wgrad_accumulator: str = "main_grad",
        keep_whole: bool = False,
    ) -> None:
        self.world, self.dtype, self.wgrad_accumulator = world, dtype, wgrad_accumulator
        generator = torch.Generator(device=world.device).manual_seed(1)

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*size, generator=generator, device=world.device, dtype=dtype)

        # The same on every rank; each keeps its part.
        hidden = normal(num_tokens, hidden_size, dtype=dtype)
        weight = normal(vocab, hidden_size, dtype=dtype).mul_(2.0 / math.sqrt(hidden_size))
        self.labels = torch.randint(vocab, (num_tokens,), generator=generator, device=world.device)
        weights = 0.5 + torch.rand(num_tokens, generator=generator, device=world.device)
        weights[::ZERO_WEIGHT_EVERY] = 0.0
        self.scalar = UPSTREAM_SCALAR
        self.token_weights: Tensor | None = weights
        self.grad_loss = self.scalar * weights
        if upstream == "random":
            self.token_weights, self.grad_loss = None, normal(num_tokens)
        # For implementations that take one upstream gradient for all tokens.
        self.one_upstream = self.grad_loss.square().mean().sqrt()
        self.num_rows = vocab // world.size
        self.vocab_start = world.rank * self.num_rows
        mine = world.rank if world.parts > 1 else 0
        self.tokens = slice(mine * (num_tokens // world.parts), (mine + 1) * (num_tokens // world.parts))
        self.whole: HeadInputs | None = None
        if keep_whole:
            self.whole = HeadInputs(
                hidden.unsqueeze(1), weight, self.labels.unsqueeze(0), self.grad_loss.unsqueeze(0)
            )
        part = hidden if world.parts == 1 else hidden[self.tokens].clone()
        shard = weight
        if world.size > 1:
            shard = weight[self.vocab_start : self.vocab_start + self.num_rows].clone()
        self.hidden = part.detach().requires_grad_()
        self.weight = shard.detach().requires_grad_()
        self.main_grad: Tensor | None = None
        if wgrad_accumulator == "main_grad":
            self.main_grad = torch.zeros(self.weight.shape, device=world.device)

    @staticmethod
    def of(cell: Cell, world: World, *, dtype: torch.dtype, **more: Any) -> Problem:
        """The cell's."""
        tokens, hidden_size = cell.num_tokens, cell.hidden_size
        return Problem(
            world, num_tokens=tokens, hidden_size=hidden_size, vocab=cell.vocab, dtype=dtype, **more
        )

    @property
    def num_tokens(self) -> int:
        """``T``, over the whole tensor-parallel group."""
        return self.labels.shape[0]

    def reset(self) -> None:
        """Forget both gradients that autograd holds (no device work)."""
        self.hidden.grad = self.weight.grad = None

    def zero_wgrad_accumulator(self) -> None:
        if self.main_grad is not None:
            self.main_grad.zero_()

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

        def open_main_grad(weight: Tensor, num_gemms: int, scaled: bool) -> GradWeight:
            return InPlaceGradWeight(main_grad, scaled, lambda: None)

        open_main_grad.kind = "main_grad"  # type: ignore[attr-defined]
        return open_main_grad

    def grad_weight(self) -> Tensor:
        """``[V, H]`` at the wgrad accumulator: fp32 in ``main_grad``, else the weight's dtype."""
        end = self.weight.grad if self.main_grad is None else self.main_grad
        assert end is not None, "no gradient of the weight arrived"
        return end

    def grad_hidden(self) -> Tensor:
        """``[T / parts, H]``."""
        assert self.hidden.grad is not None, "no gradient of the hidden states arrived"
        return self.hidden.grad

    def output_bytes(self) -> int:
        """Bytes of ``grad_hidden`` and, where the wgrad accumulator is ``.grad``, of ``grad_weight``."""
        grad_weight = self.weight.nbytes if self.main_grad is None else 0
        return self.hidden.nbytes + grad_weight


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` in fp32 from operands of a lower dtype, without rounding the result."""
    if a.dtype == torch.float32:
        return a @ b.t()
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)  # type: ignore[call-overload,no-any-return]
    return a.float() @ b.float().t()


def token_blocks(start: int, stop: int, num_rows: int) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // num_rows)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


@torch.no_grad()
def exact_block(problem: Problem, hidden: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Loss ``[c]`` and ``grad_logits`` ``[c, V]`` in fp32 of the tokens ``part`` of ``hidden [T, H]``.

    Collectives (R > 1): MAX all-reduce ``[c]``, SUM all-reduce ``[2, c]``.
    """
    world = problem.world
    z = wide_product(hidden[part], problem.weight.detach())
    z -= world.max_(z.amax(-1))[:, None]
    labels = problem.labels[part] - problem.vocab_start
    here = (labels >= 0) & (labels < problem.num_rows)
    column = labels.where(here, 0)[:, None]
    label_logit = z.gather(1, column)[:, 0].where(here, 0.0)
    z.exp_()
    total, label_logit = world.sum_(torch.stack([z.sum(-1), label_logit]))
    z /= total[:, None]
    z.scatter_add_(1, column, -here.float()[:, None])
    z *= problem.grad_loss[part, None]
    return total.log() - label_logit, z


@dataclass(frozen=True)
class FullReference:
    """The truth at the timed size: every token's loss, and samples of both gradients (all fp32)."""

    loss: Tensor  # [T]
    tokens: Tensor  # [S] int64, tokens of this rank whose grad_hidden is known
    grad_hidden: Tensor  # [S, H]
    rows: Tensor  # [Q] int64, rows of this rank's shard whose grad_weight is known
    grad_weight: Tensor  # [Q, H]


@torch.no_grad()
def full_reference(problem: Problem, samples: int = 1024) -> FullReference:
    """Blockwise in fp32, products of the low-precision operands included.

    ``samples`` tokens spread over all of them, as many vocabulary rows spread over the shard, and the
    rows that the first tokens' labels name.
    """
    world, T = problem.world, problem.num_tokens
    device = problem.weight.device
    hidden = world.gather_tokens(problem.hidden.detach())
    weight = problem.weight.detach()
    tokens = torch.arange(0, T, max(1, T // samples), device=device)
    spread = torch.arange(0, problem.num_rows, max(1, problem.num_rows // samples), device=device)
    labels = problem.labels[: samples // 4] - problem.vocab_start
    labels = labels[(labels >= 0) & (labels < problem.num_rows)]
    rows = torch.cat([spread, labels]).unique()
    losses, grads = [], []
    grad_weight = torch.zeros(rows.shape[0], hidden.shape[1], device=device)
    for part in token_blocks(0, T, problem.num_rows):
        loss, grad_logits = exact_block(problem, hidden, part)
        losses.append(loss)
        inside = tokens[(tokens >= part.start) & (tokens < part.stop)] - part.start
        sample = grad_logits[inside]
        partial = torch.zeros(inside.shape[0], hidden.shape[1], device=device)
        for columns in torch.arange(problem.num_rows, device="cpu").split(16384):
            cut = slice(int(columns[0]), int(columns[-1]) + 1)
            partial.addmm_(sample[:, cut], weight[cut].float())
        grads.append(world.sum_(partial))
        grad_weight.addmm_(grad_logits[:, rows].t(), hidden[part].float())
        del grad_logits, sample
    mine = (tokens >= problem.tokens.start) & (tokens < problem.tokens.stop)
    return FullReference(
        loss=torch.cat(losses),
        tokens=tokens[mine] - problem.tokens.start,
        grad_hidden=torch.cat(grads)[mine],
        rows=rows,
        grad_weight=grad_weight,
    )


#: Runs one step on a problem, calling the second argument at the beginning, between forward and
#: backward, and at the end; returns the loss [T].
Run = Callable[[Problem, Callable[[], None]], Tensor]
