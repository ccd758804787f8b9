"""Every rank issues the same collectives in the same order, whatever its timing and its data.

A head beside a data-parallel group: parameters are gathered over it under the head's forward, and a
hook in the backward launches its gradients' all-reduce, as Megatron's overlaps do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, fused_linear_distillation
from tests.support.collectives import Collective, Collectives, RandomDelays, first_difference
from tests.support.distillation import make_problem
from tests.support.head import rows_of, strategy_in_place, tokens_of
from tests.support.ranks import Rank, on_ranks

NUM_CHUNKS = 4
SEQUENCE, BATCH, HIDDEN, VOCAB = 48, 2, 16, 512
STRATEGIES = ("store", "grad_in_forward", "recompute", "mixed")

#: With four chunks some 30 collectives a step: a step of tens of milliseconds, each rank far out of
#: step with the others.
LONGEST_DELAY_S = 3e-3
NUM_DISTURBED_STEPS = 3


@dataclass(frozen=True)
class Setup:
    """TP and DP sizes and how the head is called."""

    tp: int
    strategy: str
    sequence_parallel: bool
    merge: str = "packed"
    logits_backend: str = "gemm_rows"
    kind: str = "plain"

    def __str__(self) -> str:
        sp = "sp, " if self.sequence_parallel else ""
        scaled_exp = ", scaled-exp GEMM" if self.logits_backend == "scaled_exp" else ""
        return f"TP {self.tp}, {self.strategy}, {sp}{self.merge}{scaled_exp}"


SETUPS = [
    # Without sequence parallelism the statistics are all-reduced, with it they are packed; below the
    # other way round. TP 2 has half of what TP 4 has.
    *(
        Setup(tp, strategy, sp, merge="packed" if sp else "all_reduce")
        for tp in (2, 4)
        for number, strategy in enumerate(STRATEGIES)
        for sp in (False, True)
        if tp == 4 or sp == bool(number % 2)
    ),
    Setup(4, "grad_in_forward", True, merge="all_reduce"),
    Setup(4, "mixed", True, merge="all_reduce"),
    Setup(4, "grad_in_forward", False),
]
SCALED_EXP = [
    Setup(2, "recompute", False, logits_backend="scaled_exp"),
    Setup(4, "mixed", True, logits_backend="scaled_exp"),
    Setup(4, "grad_in_forward", True, merge="all_reduce", logits_backend="scaled_exp"),
]


@dataclass(frozen=True)
class Groups:
    """This rank's two communicators; at TP 4 the second one runs over the same ranks."""

    tp: dist.ProcessGroup
    tp_rank: int
    beside: dist.ProcessGroup
    beside_rank: int

    @property
    def names(self) -> dict[dist.ProcessGroup, str]:
        return {self.tp: "tp", self.beside: "dp"}


@contextlib.contextmanager
def groups_of(rank: Rank, tp: int) -> Iterator[Groups]:
    """Made in the same order on every rank."""
    everyone = list(range(rank.size))
    tp_groups = [everyone[i : i + tp] for i in range(0, rank.size, tp)]
    dp_groups = [everyone] if tp == rank.size else [everyone[i::tp] for i in range(tp)]
    mine: list[Any] = []
    for members in [*tp_groups, *dp_groups]:
        group = dist.new_group(members)
        if rank.rank in members:
            mine += [group, members.index(rank.rank)]
    yield Groups(*mine)
    for group in mine[::2]:
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class Data:
    """What one data-parallel rank trains on; hidden states and weight of this rank."""

    source: torch.Tensor  # [s, b, H], goes through one layer before the head
    weight: torch.Tensor  # [V, H]
    labels: torch.Tensor  # [b, s]
    token_weights: torch.Tensor  # [b, s] fp32


def make_data(rank: Rank, groups: Groups, setup: Setup, dtype: torch.dtype) -> Data:
    """``setup.kind``: plain, or one of the ways in which data may tempt a rank to skip something."""
    generator = torch.Generator().manual_seed(100 + groups.beside_rank * (setup.tp < rank.size))
    source = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    token_weights = torch.rand(BATCH, SEQUENCE, generator=generator) + 0.5
    rows = VOCAB // setup.tp
    if setup.kind == "labels on one shard":
        labels = labels % rows + VOCAB - rows
    elif setup.kind == "labels out of range":
        labels = torch.where(labels % 2 == 0, -100, VOCAB + labels)
    elif setup.kind == "weights of zero":
        token_weights = torch.zeros_like(token_weights)
    elif setup.kind == "NaN on one shard":
        weight[VOCAB - 1] = float("nan")
    elif setup.kind == "NaN in one rank's tokens":
        source[SEQUENCE - 1] = float("nan")
    shard = weight[groups.tp_rank * rows : (groups.tp_rank + 1) * rows]
    part = source
    if setup.sequence_parallel:
        part = source.chunk(setup.tp)[groups.tp_rank]
    return Data(
        part.to(rank.device, dtype),
        shard.to(rank.device, dtype),
        labels.to(rank.device),
        token_weights.to(rank.device),
    )


def train_step(rank: Rank, groups: Groups, setup: Setup, data: Data) -> list[torch.Tensor]:
    """Loss and both parameters' gradients, reduced over the second communicator."""
    with strategy_in_place(setup.strategy, NUM_CHUNKS // 2) as strategy:
        return _train_step(rank, groups, setup, data, strategy)


def _train_step(rank: Rank, groups: Groups, setup: Setup, data: Data, strategy: str) -> list[torch.Tensor]:
    torch.manual_seed(9)
    layer = (torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5).to(data.source).requires_grad_()
    weight = data.weight.clone().requires_grad_()
    pending = []

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        pending.append(dist.all_reduce(parameter.grad, group=groups.beside, async_op=True))

    weight.register_post_accumulate_grad_hook(reduce)
    layer.register_post_accumulate_grad_hook(reduce)
    gathered = torch.ones(HIDDEN, device=rank.device)
    under_way = dist.all_reduce(gathered, group=groups.beside, async_op=True)
    config = FusedCEConfig(
        strategy=strategy, num_chunks=NUM_CHUNKS, logits_backend=setup.logits_backend, merge=setup.merge
    )
    loss = fused_linear_cross_entropy(
        data.source @ layer,
        weight,
        data.labels,
        tp_group=groups.tp,
        sequence_parallel=setup.sequence_parallel,
        token_weights=data.token_weights if setup.strategy == "grad_in_forward" else None,
        config=config,
    )
    under_way.wait()
    (loss * data.token_weights).sum().backward()
    assert len(pending) == 2
    for work in pending:
        work.wait()
    assert weight.grad is not None and layer.grad is not None
    return [loss.detach(), weight.grad, layer.grad, gathered]


def dtype_of(rank: Rank, setup: Setup) -> torch.dtype:
    """The scaled-exp GEMM runs in bf16 on GPUs and in fp32 by Triton's interpreter."""
    on_gpu = rank.device.type == "cuda"
    return torch.bfloat16 if on_gpu or setup.logits_backend == "gemm_rows" else torch.float32


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


KINDS = (
    "labels on one shard",
    "labels out of range",
    "weights of zero",
    "NaN on one shard",
    "NaN in one rank's tokens",
)


@on_ranks(4)
@pytest.mark.parametrize(
    "setup", [*SETUPS, *(pytest.param(setup, marks=pytest.mark.rest) for setup in SCALED_EXP)], ids=str
)
def test_same_order(rank: Rank, setup):
    """One sequence of (group, collective, shapes, dtype, operation) for all ranks, all data and all timings:
    random sleeps before every collective, other ones on each rank, leave the same bits."""
    # A step of four ranks takes Triton's interpreter seconds.
    interpreted = setup.logits_backend == "scaled_exp" and rank.device.type == "cpu"
    issued: dict[str, list[Collective]] = {}
    with groups_of(rank, setup.tp) as groups:
        data = make_data(rank, groups, setup, dtype_of(rank, setup))
        train_step(rank, groups, setup, data)  # a group's first call compares shapes besides

        def step(name: str, of: Data, before: Any = None) -> list[torch.Tensor]:
            with Collectives(groups.names, before=before) as seen:
                made = train_step(rank, groups, setup, of)
            issued[name] = seen.calls
            return made

        expected = step("plain", data)
        assert all(torch.isfinite(tensor).all() for tensor in expected)
        for repeat in range(1 if interpreted else NUM_DISTURBED_STEPS):
            delays = RandomDelays(1000 * repeat + rank.rank, longest_s=LONGEST_DELAY_S, device=rank.device)
            got = step(f"disturbed {repeat}", data, delays)
            names = ("loss", "grad_weight", "the layer's gradient", "gathered")
            for name, a, b in zip(names, got, expected, strict=True):
                assert torch.equal(bits(a), bits(b)), f"{name} differs in repeat {repeat}"
        for kind in () if interpreted else KINDS:
            step(kind, make_data(rank, groups, replace(setup, kind=kind), dtype_of(rank, setup)))
    by_rank: list[Any] = [None] * rank.size
    dist.all_gather_object(by_rank, issued)
    for name, calls in issued.items():
        difference = first_difference([told[name] for told in by_rank])
        difference = difference or first_difference([calls, issued["plain"]])
        assert not difference, f"{name}: {difference}"
    assert [call.name for call in issued["plain"] if call.group == "dp"] == ["all_reduce"] * 3


# --- which collectives ---------------------------------------------------------------------------


def letters_of(chunk: int) -> dict[tuple[str, tuple[tuple[int, ...], ...]], str]:
    """What leaves, by a letter each, of two ranks, 12 tokens, H = 8, H_t = 4, ``chunk`` tokens a chunk."""
    part = chunk // 2
    return {
        ("all_gather", ((chunk, 8), (part, 8))): "h",  # hidden states
        ("all_gather", ((chunk, 4), (part, 4))): "t",  # the teacher's, or of all tokens
        ("all_gather", ((12, 4), (6, 4))): "t",
        ("all_gather", ((8, chunk), (4, chunk))): "m",  # the packed merge; of both sides
        ("all_gather", ((18, 2 * chunk), (9, 2 * chunk))): "m",
        ("all_reduce", ((2, chunk),)): "x",  # maxima, and sums
        ("all_reduce", ((3, chunk),)): "s",
        ("all_reduce", ((chunk, 8),)): "g",  # grad_hidden
        ("reduce_scatter", ((part, 8), (chunk, 8))): "g",
        ("all_reduce", ((chunk,),)): "k",  # KL(p_s || m)
        ("all_reduce", ((1, 12),)): "d",  # the divergence of all tokens
        ("all_reduce", ((2, 6),)): "d",
        ("all_reduce", ((3,),)): "v",  # what grad_in_forward was promised
    }


#: Forward and backward, of three chunks.
OF_LOSSES = {
    # strategy, sequence parallelism, merge
    ("store", False, "packed"): ("mmm", "ggg"),
    ("store", False, "all_reduce"): ("xxsxss", "ggg"),
    ("store", True, "packed"): ("hhmhmm", "hghgg"),
    ("store", True, "all_reduce"): ("hhxhxsxss", "hghgg"),
    ("recompute", False, "packed"): ("mmm", "ggg"),
    ("recompute", False, "all_reduce"): ("xxsxss", "ggg"),
    ("recompute", True, "packed"): ("hhmhmm", "hghgg"),
    ("recompute", True, "all_reduce"): ("hhxhxsxss", "hghgg"),
    ("grad_in_forward", False, "packed"): ("mmgmgg", "v"),
    ("grad_in_forward", False, "all_reduce"): ("xxsgxsgsg", "v"),
    ("grad_in_forward", True, "packed"): ("hhmhmgmgg", "v"),
    ("grad_in_forward", True, "all_reduce"): ("hhxhxsgxsgsg", "v"),
}
#: The same of two chunks, beside a teacher and without labels.
OF_DIVERGENCES = {
    # kind, strategy, the student's and the teacher's sequence parallelism
    ("forward_kl", "store", False, False): ("mmd", "gg"),
    ("forward_kl", "store", False, True): ("tmmd", "gg"),
    ("forward_kl", "store", True, False): ("hhmmd", "ghg"),
    ("forward_kl", "store", True, True): ("hhtmtmd", "ghg"),
    ("jsd", "store", True, True): ("hhtmktmkd", "ghg"),
    ("reverse_kl", "recompute", False, False): ("mkmkd", "gg"),
    ("reverse_kl", "recompute", False, True): ("tmkmkd", "gg"),
    ("reverse_kl", "recompute", True, True): ("hhtmktmkd", "htgtg"),
    ("forward_kl", "grad_in_forward", True, True): ("hhtmgtmgd", "v"),
    ("reverse_kl", "grad_in_forward", False, False): ("mkgmkgd", "v"),
}


@on_ranks(2)
@pytest.mark.parametrize("order", [*OF_LOSSES, *OF_DIVERGENCES], ids=str)
def test_which_collectives(rank: Rank, order):
    """Their order and sizes: the bytes that a head sends. Hidden states of two chunks are under way before
    the first merge."""
    beside = order in OF_DIVERGENCES
    kind, strategy, sp, teacher_sp = order if beside else ("forward_kl", *order[:2], False)
    problem = make_problem(s=6, b=2, sizes=(8, 4), vocab=100, kind=kind, device=rank.device)
    config = problem.config(
        strategy=strategy, num_chunks=2 if beside else 3, merge="packed" if beside else order[2]
    )
    hidden = problem.hidden[tokens_of(rank, 6, sp)].clone().requires_grad_()
    rows = rows_of(rank, "equal", 100)
    weight = problem.weight[rows].clone().requires_grad_()
    settings = {"tp_group": rank.group, "sequence_parallel": sp, "config": config}
    settings["token_weights"] = problem.upstream

    def loss() -> torch.Tensor:
        if not beside:
            return fused_linear_cross_entropy(hidden, weight, problem.labels, **settings)
        teacher = problem.teacher_hidden[tokens_of(rank, 6, teacher_sp)], problem.teacher_weight[rows]
        options = {**problem.options, "teacher_sequence_parallel": teacher_sp}
        return fused_linear_distillation(hidden, weight, *teacher, **options, **settings).loss

    seen = []
    for _ in range(2):  # a head's first call is compared
        with Collectives({rank.group: "tp"}) as forward:
            made = loss()
        with Collectives({rank.group: "tp"}) as backward:
            made.backward(problem.upstream)
        seen.append((forward.calls, backward.calls))
    letters = letters_of(6 if beside else 4)
    told = tuple("".join(letters.get((c.name, c.shapes), f" {c} ") for c in calls) for calls in seen[1])
    assert told == {**OF_LOSSES, **OF_DIVERGENCES}[order]
    first, then = (len(calls[0]) for calls in seen)
    assert first - then == 1 + beside, "the comparison, and whether a shard of the teacher is another"


def test_another_order_is_seen():
    """The check itself: a rank that issues two collectives the other way round, or one less, is named."""
    a, b = (Collective(group, "all_reduce", ((4,),), "float32", "SUM") for group in ("tp", "dp"))
    assert not first_difference([[a, b], [a, b]])
    assert "collective 0 differs" in first_difference([[a, b], [b, a]])
    assert "rank 1: nothing more" in first_difference([[a, b], [a]])
