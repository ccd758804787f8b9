"""Thousands of random steps of the head over ranks: the same bits, no hang, no leak.

    torchrun --nproc-per-node 4 -m scripts.dev.soak --steps 5000 --time-limit 80
    torchrun --nproc-per-node 4 -m scripts.dev.soak --device cpu --steps 200

A pool of random problems (shapes, dtypes, strategies, chunks, merges, sequence parallelism, wgrad
accumulators, labels, tensor-parallel sizes, calls in flight) is visited in random order. Each step runs as
beside Megatron's data parallelism: an all-reduce on a second communicator is under way in the forward, and
hooks in the backward launch the gradients' all-reduces on it. Before some collectives every rank sleeps,
each another time; on GPUs their streams do too.

A problem's first result is compared with the plain definition over the whole vocabulary (TP 1, fp64);
every later one must repeat its bits. At the end of each window of steps the ranks compare the sequences
of collectives that they issued, and their memory is looked at; some problems are replaced by new ones.

Stops with exit status 1, and says why, at

    drift   a result outside its bound (twice plain PyTorch's error), or other bits than the first time
    order   ranks of one step that issued different collectives, or in another order
    leak    bytes or tensors that outlive their step and grow
    hang    a rank without progress for --hang-timeout seconds: where it stands, and its stacks

0: all steps done, or the time limit reached. 2: arguments that do not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import gc
import os
import random
import resource
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, call, promise
from megatron_fused_ce.command_line import NO_LIMIT, Parser, command, number, seconds, whole, writable_file
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.lib import gloo, results
from megatron_fused_ce.scripts.lib.collectives import Call, Collectives, RandomDelays
from megatron_fused_ce.scripts.lib.reference import (
    FLOOR,
    HeadInputs,
    make_inputs,
    plain_head,
    relative_error,
    truth,
)
from megatron_fused_ce.wgrad import InPlaceGradWeight, OpenGradWeight, ReturnedGradWeight

MIB = 2**20
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

#: Few sizes, many combinations: each new hidden size or alignment costs a compilation on a GPU.
HIDDEN_SIZES = {"cuda": (128, 256, 512), "cpu": (16, 32)}
SHARD_ROWS = {"cuda": (256, 1000, 1536), "cpu": (24, 64, 100)}
#: Above the 64 MiB of cuBLAS's workspaces that plans count on a GPU.
BUDGETS_MIB = {"cuda": (65, 72), "cpu": (1, 2)}
#: What any of the problems needs with a strategy by name, whose plan a smaller budget ends with an error.
NAMED_BUDGETS_MIB = {"cuda": (112, 160), "cpu": (8, 16)}
KINDS = ("plain", "peaked", "odd-labels", "high", "low")
BESIDE = "beside"

#: What may be allocated late without being a leak: workspaces and caches of libraries.
SLACK = {"device MiB": 4.0, "host MiB": 24.0, "tensors": 40.0}

#: Between two lines of progress.
SAY_EVERY_S = 10.0

#: Share of the run after which no problem is new. Only then the host's memory says something: libraries
#: keep what they made for a shape (2.4 MiB a problem on a CPU, kernels' code on a GPU).
QUIET_AFTER = 0.6


class Stop(Exception):
    """Why the soak ends with status 1: the kind of failure, then its words."""


# --- problems --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One way to call the head, the same on every rank."""

    seed: int
    tp: int
    dtype: torch.dtype
    kind: str
    tokens: int  # of the sequence dimension
    batch: int
    hidden_size: int
    shard_rows: tuple[int, ...]
    sequence_parallel: bool
    strategy: str
    chunk_tokens: int | None
    num_chunks: int | None
    memory_mb: int | None
    merge: str
    logits_backend: str
    knows_weights: bool
    in_place: bool  # grad_weight goes into an fp32 main_grad
    in_flight: int  # forwards before the first backward

    @staticmethod
    def draw(seed: int, device: str, tp_sizes: Sequence[int]) -> Problem:
        """The problem of this seed."""
        r = random.Random(seed)
        tp = r.choice(list(tp_sizes))
        dtype = r.choice([torch.bfloat16] * 3 + [torch.float32, torch.float16])
        logits_backend = r.choice(["auto", "auto", "gemm_rows"])
        rows = (r.choice(SHARD_ROWS[device]),) * tp
        if logits_backend == "gemm_rows" and r.random() < 0.3:
            rows = tuple(n + r.randrange(9) for n in rows)
        batch = r.choice([1, 2, 3])
        cut = r.choice(["chunks", "tokens", "budget"])
        strategy = r.choice(["store", "grad_in_forward", "grad_in_forward", "recompute", "auto"])
        budgets = (BUDGETS_MIB if strategy == "auto" else NAMED_BUDGETS_MIB)[device]
        return Problem(
            seed=seed,
            tp=tp,
            dtype=dtype,
            kind=r.choice(KINDS),
            tokens=tp * (r.randrange(24, 400 if device == "cuda" else 40) // batch),
            batch=batch,
            hidden_size=r.choice(HIDDEN_SIZES[device]),
            shard_rows=rows,
            sequence_parallel=tp > 1 and r.random() < 0.6,
            strategy=strategy,
            chunk_tokens=r.randrange(16, 300) if cut == "tokens" else None,
            num_chunks=r.randrange(1, 8) if cut == "chunks" else None,
            memory_mb=r.randint(*budgets) if cut == "budget" else None,
            merge=r.choice(["packed", "all_reduce"]),
            logits_backend=logits_backend,
            knows_weights=strategy == "grad_in_forward" or r.random() < 0.5,
            in_place=r.random() < 0.5,
            in_flight=r.choice([1, 1, 2]),
        )

    @property
    def config(self) -> FusedCEConfig:
        return FusedCEConfig(
            strategy=self.strategy,
            chunk_tokens=self.chunk_tokens,
            num_chunks=self.num_chunks,
            memory_mb=self.memory_mb,
            merge=self.merge,
            logits_backend=self.logits_backend,
            # Shards of unequal sizes are planned for together once they have been compared.
            debug_checks=len(set(self.shard_rows)) > 1 or self.seed % 16 == 0,
        )

    def inputs(self, replica: int, device: torch.device) -> HeadInputs:
        """The whole problem of one data-parallel replica; the weight is the same for all."""
        made, of_all = (
            make_inputs(
                self.kind,
                s=self.tokens,
                b=self.batch,
                hidden_size=self.hidden_size,
                vocab=sum(self.shard_rows),
                dtype=self.dtype,
                seed=seed,
                device=device,
            )
            for seed in (self.seed + 1 + replica, self.seed + 1)
        )
        if self.kind == "peaked":  # towards the labels' rows: these belong to the weight
            return of_all
        return HeadInputs(made.hidden, of_all.weight, made.labels, made.grad_loss)

    def tokens_of(self, tp_rank: int) -> slice:
        if not self.sequence_parallel:
            return slice(0, self.tokens)
        part = self.tokens // self.tp
        return slice(tp_rank * part, (tp_rank + 1) * part)

    def rows_of(self, tp_rank: int) -> slice:
        start = sum(self.shard_rows[:tp_rank])
        return slice(start, start + self.shard_rows[tp_rank])


@dataclass(frozen=True)
class Layout:
    """This rank's groups for one tensor-parallel size.

    ``beside`` is the data-parallel group; where there is none, a second communicator over all ranks.
    """

    tp_rank: int
    replica: int
    tp: dist.ProcessGroup | None
    beside: dist.ProcessGroup
    beside_ranks: tuple[int, ...]  # in the world

    @staticmethod
    def make(tp: int) -> Layout:
        """Collective over the world, in the same order on every rank."""
        everyone = list(range(WORLD))
        tp_groups = [everyone[i : i + tp] for i in range(0, WORLD, tp)]
        beside = [everyone] if tp == WORLD else [everyone[i::tp] for i in range(tp)]
        mine: list[tuple[dist.ProcessGroup, list[int]]] = []
        for groups in (tp_groups, beside):
            for ranks in groups:
                group = dist.new_group(ranks)
                if RANK in ranks:
                    mine.append((group, ranks))
        (tp_group, _), (beside_group, beside_ranks) = mine
        return Layout(RANK % tp, RANK // tp, tp_group, beside_group, tuple(beside_ranks))

    def sums_weights_of(self, problem: Problem) -> bool:
        """Whether ``grad_weight`` has one shape over the second communicator."""
        return len({problem.shard_rows[rank % problem.tp] for rank in self.beside_ranks}) == 1


@dataclass
class Entry:
    """A problem in the pool: this rank's inputs, and its first result."""

    problem: Problem
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    token_weights: Tensor | None
    grad_loss: Tensor
    under_way: Tensor  # what the second communicator sums during the forward
    first: list[Tensor] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        own = (self.hidden, self.weight, self.labels, self.grad_loss, self.under_way)
        weights = [] if self.token_weights is None else [self.token_weights]
        return [*own, *weights, *(self.first or ())]

    @staticmethod
    def make(problem: Problem, layout: Layout, device: torch.device) -> Entry:
        inputs = problem.inputs(layout.replica, device)
        part = problem.tokens_of(layout.tp_rank)
        return Entry(
            problem,
            inputs.hidden[part].clone(),
            inputs.weight[problem.rows_of(layout.tp_rank)].clone(),
            inputs.labels,
            inputs.grad_loss / -3.0 if problem.knows_weights else None,
            inputs.grad_loss,
            torch.full((4096,), float(1 + RANK), device=device),
        )


# --- one step --------------------------------------------------------------------------------


@dataclass
class Issued:
    """What this rank is doing, for the watchdog, and what it did in this window."""

    step: int = 0
    problem: Problem | None = None
    last_call: Call | None = None
    num_calls: int = 0
    digest: int = 0
    progress: float = field(default_factory=time.monotonic)

    def note(self, call: Call) -> None:
        self.last_call, self.progress = call, time.monotonic()
        self.num_calls += 1
        if call.group.startswith(BESIDE):  # of the shard's own shape, which other groups do not share
            call = call._replace(shapes=())
        self.digest = zlib.crc32(repr(call).encode(), self.digest)


def train_step(entry: Entry, layout: Layout, plans: Counter[str]) -> list[Tensor]:
    """Losses and gradients, the latter summed over the second communicator."""
    problem = entry.problem
    pending = []

    def reduce(tensor: Tensor) -> None:
        pending.append(dist.all_reduce(tensor, group=layout.beside, async_op=True))

    gathered = entry.under_way.clone()
    during_forward = dist.all_reduce(gathered, group=layout.beside, async_op=True)
    weight = entry.weight.clone().requires_grad_()
    main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    open_grad_weight: OpenGradWeight = ReturnedGradWeight
    if problem.in_place:

        def opened(weight: Tensor, num_gemms: int, scaled: bool) -> InPlaceGradWeight:
            return InPlaceGradWeight(main_grad, scaled, lambda: None)

        open_grad_weight = opened
    hiddens, losses = [], []
    for _ in range(problem.in_flight):
        hidden = entry.hidden.clone().requires_grad_()
        outputs = linear_cross_entropy(
            call.Call(
                hidden,
                weight,
                entry.labels,
                tp_group=layout.tp,
                sequence_parallel=problem.sequence_parallel,
                token_weights=entry.token_weights,
                config=problem.config,
                open_grad_weight=open_grad_weight,
                uses_in_flight=problem.in_flight,
            )
        )
        plans[outputs.plan.strategy] += 1
        hiddens.append(hidden)
        losses.append(outputs.loss)
    during_forward.wait()
    for hidden, loss in zip(hiddens, losses, strict=True):
        hidden.register_post_accumulate_grad_hook(lambda leaf: reduce(_grad(leaf)))
        loss.backward(entry.grad_loss)
    total = main_grad if problem.in_place else _grad(weight)
    if layout.sums_weights_of(problem):
        reduce(total)
    for work in pending:
        work.wait()
    return [*(loss.detach() for loss in losses), *map(_grad, hiddens), total, gathered]


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def bits_differ(results: list[Tensor], first: list[Tensor]) -> Tensor:
    """Bool [] on the device: nobody waits for it here."""
    differ = [
        (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).any()
        for a, b in zip(results, first, strict=True)
    ]
    return torch.stack(differ).any()


def against_tp_1(entry: Entry, layout: Layout, results: list[Tensor]) -> float:
    """The largest error over its bound, against the whole vocabulary in fp64.

    The bound is twice plain PyTorch's error at this dtype or twice the dtype's floor: the sum over the
    second communicator rounds once more.
    """
    problem, device = entry.problem, entry.hidden.device
    members = [(rank % problem.tp, rank // problem.tp) for rank in layout.beside_ranks]
    exact_of, plain_of = {}, {}
    for replica in sorted({replica for _, replica in members} | {layout.replica}):
        inputs = problem.inputs(replica, device)
        exact_of[replica] = truth(inputs)
        plain_of[replica] = plain_head(inputs, problem.dtype)

    def expected(of: dict[int, Any]) -> tuple[Tensor, Tensor, Tensor]:
        loss = of[layout.replica].loss
        parts = [of[r].grad_hidden[problem.tokens_of(t)].double() for t, r in members]
        summed = members if layout.sums_weights_of(problem) else [(layout.tp_rank, layout.replica)]
        rows = [of[r].grad_weight[problem.rows_of(t)].double() for t, r in summed]
        total = torch.stack(rows).sum(0) * problem.in_flight
        return loss, torch.stack(parts).sum(0), total

    exact, plain = expected(exact_of), expected(plain_of)
    names = ("loss", "grad_hidden", "grad_weight")
    *of_each, total, gathered = results
    losses, grads = of_each[: problem.in_flight], of_each[problem.in_flight :]
    pairs = [*((loss, 0) for loss in losses), *((grad, 1) for grad in grads), (total, 2)]
    worst = 0.0
    for value, index in pairs:
        bound = 2 * max(relative_error(plain[index], exact[index]), FLOOR[problem.dtype])
        error = relative_error(value, exact[index])
        if not error <= bound:
            raise Stop(
                f"drift: {names[index]} is {error:.2e} from the reference, more than {bound:.2e}, "
                f"in the first run of {problem}"
            )
        worst = max(worst, error / bound)
    if not torch.equal(gathered, torch.full_like(gathered, sum(1.0 + r for r in layout.beside_ranks))):
        raise Stop(f"drift: the second communicator's own sum is wrong beside {problem}")
    return worst


# --- memory and hangs ------------------------------------------------------------------------


def leak_in(history: Sequence[float], slack: float) -> float:
    """How much the last windows hold more than the earlier ones, 0 where that is within the slack.

    The first two windows allocate what stays: workspaces, compiled kernels. A leak is growth that the
    smallest of the last four windows still shows over the largest of the second quarter.
    """
    if len(history) < 12:
        return 0.0
    earlier = max(history[2 : len(history) // 2])
    growth = min(history[-4:]) - earlier
    return growth if growth > slack else 0.0


def memory_now(pool: Sequence[Entry], device: torch.device) -> dict[str, float]:
    """What is held beside the pool: MiB on the device, or tensors where they can be counted."""
    tensors = [tensor for entry in pool for tensor in entry.tensors]
    if device.type == "cuda":
        torch.cuda.synchronize()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        own = sum(-(-size // 512) * 512 for size in storages.values())  # as the allocator rounds
        held = {"device MiB": (torch.cuda.memory_allocated() - own) / MIB}
    else:
        gc.collect()
        alive = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
        held = {"tensors": float(alive - len(tensors))}
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return {**held, "host MiB": resident / MIB}


class Watchdog(threading.Thread):
    """Ends this process, and torchrun with it the others, when nothing has moved for a while."""

    def __init__(self, issued: Issued, timeout_s: float) -> None:
        super().__init__(daemon=True)
        self._issued = issued
        self._timeout_s = timeout_s
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(min(1.0, self._timeout_s / 4)):
            waited = time.monotonic() - self._issued.progress
            if waited > self._timeout_s:
                now = self._issued
                print(
                    f"soak: rank {RANK}: hang: no progress for {waited:.0f} s in step {now.step}; "
                    f"its last collective, number {now.num_calls}, is {now.last_call}; "
                    f"the step's problem: {now.problem}",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(1)

    def stop(self) -> None:
        self._over.set()


# --- the soak --------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was done, for the last line and the JSON."""

    steps: int = 0
    problems: int = 0
    worst_error_over_bound: float = 0.0
    collectives: int = 0
    seconds: float = 0.0
    plans: Counter[str] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    memory: dict[str, float] = field(default_factory=dict)


class Soak:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.tally = Tally()
        self.issued = Issued()
        # The verdicts' own group: it must work where the others hang.
        self.control = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=4 * options.hang_timeout)
        )
        self.layouts = {tp: Layout.make(tp) for tp in options.tp}
        self.order = random.Random(options.seed)  # the same on every rank
        self.next_seed = 1000 * options.seed
        self.pool = [self._entry() for _ in range(options.pool)]
        self.history: dict[str, list[float]] = {}
        self.differ = torch.zeros((), dtype=torch.bool, device=device)
        self.drift = ""
        self.quiet = False

    def _entry(self) -> Entry:
        self.next_seed += 10
        problem = Problem.draw(self.next_seed, self.device.type, self.options.tp)
        return Entry.make(problem, self.layouts[problem.tp], self.device)

    def names(self) -> dict[dist.ProcessGroup, str]:
        names = {self.control: "control"}
        for tp, layout in self.layouts.items():
            names[layout.beside] = f"{BESIDE} {tp}"
            if layout.tp is not None:
                names[layout.tp] = f"tp {tp}"
        return names

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        """Within it every collective is noted, and some are delayed."""
        delays = RandomDelays(
            self.options.seed * WORLD + RANK,
            longest_s=self.options.delay_ms / 1e3,
            share=self.options.delay_share,
            device=self.device,
        )

        def before(call: Call) -> None:
            self.issued.note(call)
            delays(call)

        with Collectives(self.names(), before=before, keep=False):
            yield

    def run(self) -> None:
        """All windows. Raises Stop on every rank."""
        started = said = time.monotonic()
        watchdog = Watchdog(self.issued, self.options.hang_timeout)
        watchdog.start()
        try:
            over = False
            while not over:
                self._window()
                now = time.monotonic()
                self.tally.seconds = now - started
                over = self._verdict(
                    max(self.tally.steps / self.options.steps, self.tally.seconds / self.options.time_limit)
                )
                if RANK == 0 and (now - said > SAY_EVERY_S or over):
                    said = now
                    print(self.line(), flush=True)
                for _ in range(0 if self.quiet else self.options.fresh):
                    self.pool[self.order.randrange(len(self.pool))] = self._entry()
        finally:
            watchdog.stop()

    def _window(self) -> None:
        steps = min(self.options.check_every, self.options.steps - self.tally.steps)
        with self.disturbed():
            for _ in range(steps):
                self.step(self.pool[self.order.randrange(len(self.pool))])

    def step(self, entry: Entry) -> None:
        problem = entry.problem
        self.tally.steps += 1
        self.issued.step, self.issued.problem = self.tally.steps, problem
        self.issued.progress = time.monotonic()
        layout = self.layouts[problem.tp]
        results = train_step(entry, layout, self.tally.plans)
        if entry.first is None:
            # Compared at once, told at the end of the window, where all ranks listen.
            try:
                worst = against_tp_1(entry, layout, results)
                self.tally.worst_error_over_bound = max(self.tally.worst_error_over_bound, worst)
            except Stop as stop:
                self.drift = self.drift or f"step {self.tally.steps}: {stop}"
            entry.first = results
            self.tally.problems += 1
            name = str(problem.dtype).removeprefix("torch.")
            self.tally.settings[f"{name} {'sp' if problem.sequence_parallel else 'no sp'}"] += 1
        else:
            self.differ |= bits_differ(results, entry.first)

    def _verdict(self, done: float) -> bool:
        """Compare notes at the end of a window; whether to end, on rank 0's word.

        ``done``: the share of steps or time that is over.
        """
        if bool(self.differ):  # waits for the device
            self.drift = self.drift or (
                f"drift: within {self.options.check_every} steps before step {self.tally.steps} "
                "a result had other bits than the problem's first one"
            )
        if promise.counts.remade and not self.drift:
            self.drift = f"drift: {promise.counts.remade} gradients of grad_in_forward were made again"
        self.tally.memory = memory_now(self.pool, self.device)
        failure = self.drift
        for name, value in self.tally.memory.items():
            if name == "host MiB" and not self.quiet:
                continue
            history = self.history.setdefault(name, [])
            history.append(value)
            if growth := leak_in(history, SLACK[name]):
                failure = failure or (
                    f"leak: {growth:.1f} {name} more than in earlier windows after step "
                    f"{self.tally.steps}: {', '.join(f'{x:.1f}' for x in history[2:])}"
                )
        told: list[Any] = [None] * WORLD
        mine = (failure, self.issued.num_calls, self.issued.digest, done)
        dist.all_gather_object(told, mine, group=self.control)
        self.issued.progress = time.monotonic()
        self.tally.collectives = self.issued.num_calls
        for rank, (words, *_) in enumerate(told):
            if words:
                raise Stop(f"rank {rank}: {words}")
        sequences = [(count, digest) for _, count, digest, _ in told]
        if len(set(sequences)) > 1:
            raise Stop(
                f"order: up to step {self.tally.steps} the ranks issued other collectives, or in another "
                f"order: (number, checksum) is {sequences} by rank; scripts/dev/soak.py --check-every 1 "
                "--pool 1 narrows it down"
            )
        done = told[0][3]
        self.quiet = done > QUIET_AFTER
        return bool(done >= 1.0)

    def line(self) -> str:
        t = self.tally
        memory = ", ".join(f"{value:.1f} {name}" for name, value in t.memory.items())
        return (
            f"step {t.steps}, {t.steps / t.seconds:.0f} steps/s, {t.problems} problems within "
            f"{t.worst_error_over_bound:.2f} of their bounds, {t.collectives} collectives a rank, "
            f"beside the pool {memory}"
        )


# --- command line ----------------------------------------------------------------------------


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m scripts.dev.soak", __doc__ or "")
    parser.add_argument("--steps", type=whole(), default=2000)
    parser.add_argument("--seed", type=whole(0), default=1)
    parser.add_argument("--time-limit", type=seconds, default=NO_LIMIT, metavar="S")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="[cuda where there are GPUs enough]")
    parser.add_argument(
        "--tp",
        type=whole(most=4096),
        nargs="+",
        metavar="R",
        help="sizes in turn [all ranks, and half of them]",
    )
    parser.add_argument(
        "--pool", type=whole(most=10**6), default=24, metavar="N", help="problems at a time [24]"
    )
    parser.add_argument(
        "--fresh", type=whole(0), default=1, metavar="N", help="of them replaced after a window [1]"
    )
    parser.add_argument("--check-every", type=whole(), default=50, metavar="K", help="steps of a window [50]")
    parser.add_argument("--delay-ms", type=number(), default=4.0, help="the longest sleep [4]")
    parser.add_argument(
        "--delay-share", type=number(most=1), default=0.01, help="of collectives that sleep before [0.01]"
    )
    parser.add_argument("--hang-timeout", type=seconds, default=60.0, metavar="S", help="[60]")
    parser.add_argument("--json", type=Path, help="write the tally here")
    options = parser.parse_args(words)
    if WORLD < 2:
        parser.error("start it over 2 ranks or more: torchrun --nproc-per-node 4 -m scripts.dev.soak")
    if options.tp is None:
        options.tp = sorted({WORLD, WORLD // 2 if WORLD % 2 == 0 and WORLD > 2 else WORLD})
    for tp in options.tp:
        if tp < 1 or WORLD % tp:
            parser.error(f"--tp {tp} does not divide {WORLD} ranks")
    if options.device is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= WORLD
        options.device = "cuda" if enough else "cpu"
    return options


@command("soak")
def main(words: list[str]) -> int:
    options = parse(words)
    if options.json:
        writable_file(options.json)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    # Ours speaks first, with clearer words.
    timeout = datetime.timedelta(seconds=4 * options.hang_timeout)
    gloo.use_one_thread()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    soak = Soak(options, device)
    status, why = 0, ""
    try:
        soak.run()
    except Stop as stop:
        status, why = 1, str(stop)
    if RANK == 0:
        _report(soak, options, why)
    # The first rank to end ends the others: not before all is said.
    dist.barrier(group=soak.control)
    if status == 0:
        dist.destroy_process_group()
    return status


def _report(soak: Soak, options: argparse.Namespace, words: str) -> None:
    tally = soak.tally
    counts = ", ".join(f"{name} {number}" for name, number in sorted(tally.plans.items()))
    settings = ", ".join(f"{name} {number}" for name, number in sorted(tally.settings.items()))
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    print(f"plans: {counts}; problems: {settings}; CUDA_DEVICE_MAX_CONNECTIONS: {connections}")
    if words:
        print(f"soak: {words}", flush=True)
    else:
        print(f"soak: {tally.steps} steps in {tally.seconds:.0f} s: no drift, hang or leak", flush=True)
    if options.json:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
        record = {
            "shape": f"{WORLD} ranks",
            "variant": "soak",
            "ranks": WORLD,
            "tp": options.tp,
            "seed": options.seed,
            "cuda_device_max_connections": connections,
            "failure": words or None,
            **{
                key: dict(value) if isinstance(value, Counter) else value
                for key, value in vars(tally).items()
            },
        }
        results.write(options.json, [record], results.made_by(gpu, ["scripts.dev.soak", *sys.argv[1:]]))


if __name__ == "__main__":
    code = main()
    # A normal exit would wait for collectives that a failure left under way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code else gloo.end(0)
