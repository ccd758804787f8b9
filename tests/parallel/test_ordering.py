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

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.scripts.lib.collectives import (
    Collective,
    Collectives,
    RandomDelays,
    first_difference,
)
from tests.support.head import strategy_in_place
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
        strategy=strategy,
        num_chunks=NUM_CHUNKS,
        logits_backend=setup.logits_backend,
        merge=setup.merge,
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


@on_ranks(4)
@pytest.mark.parametrize(
    "setup",
    [*SETUPS, *(pytest.param(setup, marks=pytest.mark.rest) for setup in SCALED_EXP)],
    ids=str,
)
def test_disturbed_timing(rank: Rank, setup):
    """Random sleeps before every collective, other ones on each rank: the same bits come out."""
    with groups_of(rank, setup.tp) as groups:
        data = make_data(rank, groups, setup, dtype_of(rank, setup))
        train_step(rank, groups, setup, data)  # a group's first call compares shapes besides
        with Collectives(groups.names) as quiet:
            expected = train_step(rank, groups, setup, data)
        # A step of four ranks takes Triton's interpreter seconds.
        interpreted = setup.logits_backend == "scaled_exp" and rank.device.type == "cpu"
        for repeat in range(1 if interpreted else NUM_DISTURBED_STEPS):
            delays = RandomDelays(1000 * repeat + rank.rank, longest_s=LONGEST_DELAY_S, device=rank.device)
            with Collectives(groups.names, before=delays) as disturbed:
                got = train_step(rank, groups, setup, data)
            assert disturbed.calls == quiet.calls
            names = ("loss", "grad_weight", "the layer's gradient", "gathered")
            for name, a, b in zip(names, got, expected, strict=True):
                assert torch.equal(bits(a), bits(b)), f"{name} differs in repeat {repeat}"
    assert all(torch.isfinite(tensor).all() for tensor in expected)
    check_calls_of_a_step(setup, quiet.calls)


def check_calls_of_a_step(setup: Setup, calls: list[Collective]) -> None:
    """What was watched is a whole step: the second communicator's, and each chunk's own."""
    beside = [call for call in calls if call.group == "dp"]
    assert [call.name for call in beside] == ["all_reduce"] * 3
    assert all(call.group in ("tp", "dp") for call in calls)
    reduction = "reduce_scatter" if setup.sequence_parallel else "all_reduce"
    part = (SEQUENCE // (setup.tp if setup.sequence_parallel else 1)) * BATCH // NUM_CHUNKS
    reduced = [call for call in calls if call.group == "tp" and call.name == reduction]
    reduced = [call for call in reduced if call.shapes[0] == (part, HIDDEN)]
    assert len(reduced) == NUM_CHUNKS, f"{len(reduced)} reductions of grad_hidden"
    mine = [call for call in calls if call.group == "tp"]
    if setup.sequence_parallel:
        gathers = [c for c in mine if c.name == "all_gather" and (part, HIDDEN) in c.shapes[1:]]
        # A backward may begin with the hidden states that its forward gathered last.
        of_two_passes = (2 * NUM_CHUNKS - 1, 2 * NUM_CHUNKS)
        wanted = (NUM_CHUNKS,) if setup.strategy == "grad_in_forward" else of_two_passes
        assert len(gathers) in wanted, f"{len(gathers)} gathers of hidden states"
    num_maxima = sum(call.op == "MAX" for call in mine)
    verdict = setup.strategy == "grad_in_forward"
    assert num_maxima == (NUM_CHUNKS if setup.merge == "all_reduce" else 0) + verdict


KINDS = (
    "labels on one shard",
    "labels out of range",
    "weights of zero",
    "NaN on one shard",
    "NaN in one rank's tokens",
)


@on_ranks(4)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_same_order_whatever_the_data(rank: Rank, setup):
    """One sequence of (group, collective, shapes, dtype, operation) for all ranks and all data."""
    sequences: dict[str, list[Collective]] = {}
    with groups_of(rank, setup.tp) as groups:
        for kind in ("plain", *KINDS):
            of_kind = replace(setup, kind=kind)
            data = make_data(rank, groups, of_kind, dtype_of(rank, setup))
            if kind == "plain":
                train_step(rank, groups, of_kind, data)
            with Collectives(groups.names) as issued:
                train_step(rank, groups, of_kind, data)
            sequences[kind] = issued.calls
    by_rank: list[Any] = [None] * rank.size
    dist.all_gather_object(by_rank, sequences)
    for kind in sequences:
        difference = first_difference([told[kind] for told in by_rank])
        assert not difference, f"{kind}: {difference}"
        assert sequences[kind] == sequences["plain"], (
            f"{kind}: {first_difference([sequences[kind], sequences['plain']])}"
        )
    check_calls_of_a_step(setup, sequences["plain"])


def test_another_order_is_seen():
    """The check itself: a rank that issues two collectives the other way round, or one less, is named."""
    a, b = (Collective(group, "all_reduce", ((4,),), "float32", "SUM") for group in ("tp", "dp"))
    assert not first_difference([[a, b], [a, b]])
    assert "collective 0 differs" in first_difference([[a, b], [b, a]])
    assert "rank 1: nothing more" in first_difference([[a, b], [a]])
