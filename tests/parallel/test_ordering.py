"""Every rank issues the same collectives in the same order, whatever its timing and its data.

A head beside a data-parallel group: parameters are gathered over it under the head's forward, and a
hook in the backward launches its gradients' all-reduce, as Megatron's overlaps do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from tests.support.collectives import Collective, Collectives, random_delays
from tests.support.distillation import make_problem
from tests.support.op import fresh_group, rows_of, shard_of, strategy_in_place, tokens_of
from tests.support.ranks import Rank, on_ranks

NUM_CHUNKS = 4
SEQUENCE, BATCH, HIDDEN, VOCAB = 48, 2, 16, 512
STRATEGIES = ("store", "grad_in_forward", "recompute", "mixed")

#: With four chunks some 30 collectives a step: a step of tens of milliseconds, each rank far out of
#: step with the others.
LONGEST_DELAY_S = 3e-3
NUM_DISTURBED_STEPS = 3


#: Data that may tempt a rank to skip something.
KINDS = (
    *("labels on one shard", "labels out of range", "weights of zero"),
    *("NaN on one shard", "NaN in one rank's tokens"),
)


def train_step(
    rank: Rank, beside: dist.ProcessGroup, strategy: str, sp: bool, kind: str = "plain"
) -> list[torch.Tensor]:
    """Loss and both parameters' gradients, reduced over the second communicator. Without sequence parallelism
    the statistics are all-reduced, with it they are packed."""
    generator = torch.Generator().manual_seed(100)
    source = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
    layer = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    token_weights = (torch.rand(BATCH, SEQUENCE, generator=generator) + 0.5).to(rank.device)
    rows = VOCAB // rank.size
    if kind == "labels on one shard":
        labels = labels % rows + VOCAB - rows
    elif kind == "labels out of range":
        labels = torch.where(labels % 2 == 0, -100, VOCAB + labels)
    elif kind == "weights of zero":
        token_weights.zero_()
    elif kind == "NaN on one shard":
        weight[VOCAB - 1] = float("nan")
    elif kind == "NaN in one rank's tokens":
        source[SEQUENCE - 1] = float("nan")
    dtype = torch.bfloat16
    layer = layer.to(rank.device, dtype).requires_grad_()
    weight = weight.chunk(rank.size)[rank.rank].to(rank.device, dtype).requires_grad_()
    source = source[tokens_of(rank, SEQUENCE, sp)].to(rank.device, dtype)
    pending = []

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        pending.append(dist.all_reduce(parameter.grad, group=beside, async_op=True))

    weight.register_post_accumulate_grad_hook(reduce)
    layer.register_post_accumulate_grad_hook(reduce)
    gathered = torch.ones(HIDDEN, device=rank.device)
    with strategy_in_place(strategy, NUM_CHUNKS // 2) as strategy:
        under_way = dist.all_reduce(gathered, group=beside, async_op=True)
        loss = fused_linear_cross_entropy(
            source @ layer,
            weight,
            labels.to(rank.device),
            tp_group=rank.group,
            sequence_parallel=sp,
            token_weights=token_weights if strategy == "grad_in_forward" else None,
            config=FusedCEConfig(
                strategy,
                num_chunks=NUM_CHUNKS,
                logits_backend="gemm_rows",
                merge="packed" if sp else "all_reduce",
            ),
        )
        under_way.wait()
        (loss * token_weights).sum().backward()
    assert len(pending) == 2
    for work in pending:
        work.wait()
    assert weight.grad is not None and layer.grad is not None
    return [loss.detach(), weight.grad, layer.grad, gathered]


@on_ranks(2)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_order(rank: Rank, strategy, sp):
    """One sequence of (group, collective, shapes, dtype, operation) for all ranks, all data and all timings:
    random sleeps before every collective, other ones on each rank, leave the same bits."""
    issued: dict[str, list[Collective]] = {}
    with fresh_group(rank) as beside:

        def step(name: str, *before: Any, kind: str = "plain") -> list[torch.Tensor]:
            with Collectives({rank.group: "tp", beside: "dp"}, *before) as seen:
                made = train_step(rank, beside, strategy, sp, kind)
            issued[name] = seen.calls
            return made

        step("plain")  # a group's first call compares shapes besides
        expected = step("plain")
        assert all(torch.isfinite(tensor).all() for tensor in expected)
        for repeat in range(NUM_DISTURBED_STEPS):
            delays = random_delays(1000 * repeat + rank.rank, longest_s=LONGEST_DELAY_S, device=rank.device)
            got = step(f"disturbed {repeat}", delays)
            assert all(map(torch.equal, got, expected)), f"bits differ in repeat {repeat}"
        for kind in KINDS:
            step(kind, kind=kind)
    by_rank: list[Any] = [None] * rank.size
    dist.all_gather_object(by_rank, issued)
    for name, calls in issued.items():
        for told in by_rank:
            assert told[name] == calls == issued["plain"], f"{name}: {told[name]}; {calls}"
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
    ("store", False, "all_reduce"): ("xxsxss", "ggg"),
    ("store", True, "packed"): ("hhmhmm", "hghgg"),
    ("recompute", False, "packed"): ("mmm", "ggg"),
    ("recompute", True, "all_reduce"): ("hhxhxsxss", "hghgg"),
    ("grad_in_forward", False, "packed"): ("mmgmgg", "v"),
    ("grad_in_forward", True, "packed"): ("hhmhmgmgg", "v"),
    ("grad_in_forward", True, "all_reduce"): ("hhxhxsgxsgsg", "v"),
}
#: The same of two chunks, beside a teacher and without labels.
OF_DIVERGENCES = {
    # kind, strategy, the student's and the teacher's sequence parallelism
    ("forward_kl", "store", False, True): ("tmmd", "gg"),
    ("jsd", "store", True, True): ("hhtmktmkd", "ghg"),
    ("reverse_kl", "recompute", False, False): ("mkmkd", "gg"),
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
    merge = "packed" if beside else order[2]
    config = replace(problem.config, strategy=strategy, num_chunks=2 if beside else 3, merge=merge)
    hidden, weight, settings = shard_of(rank, problem, sp, "equal")
    settings |= {"config": config, "token_weights": problem.grad_loss}
    of_hidden, of_weight = problem.teacher
    teacher = of_hidden[tokens_of(rank, 6, teacher_sp)], of_weight[rows_of(rank, "equal", 100)]

    def loss() -> torch.Tensor:
        if not beside:
            return fused_linear_cross_entropy(hidden, weight, problem.labels, **settings)
        return problem.ask(
            hidden, weight, *teacher, entropy="none", teacher_sequence_parallel=teacher_sp, **settings
        )["loss"]

    seen = []
    for _ in range(2):  # a head's first call is compared
        with Collectives({rank.group: "tp"}) as forward:
            made = loss()
        with Collectives({rank.group: "tp"}) as backward:
            made.backward(problem.grad_loss)
        seen.append((forward.calls, backward.calls))
    letters = letters_of(6 if beside else 4)
    told = tuple("".join(letters.get((c.name, c.shapes), f" {c} ") for c in calls) for calls in seen[1])
    assert told == {**OF_LOSSES, **OF_DIVERGENCES}[order]
    first, then = (len(calls[0]) for calls in seen)
    assert first - then == 1 + beside, "the comparison, and whether a shard of the teacher is another"
