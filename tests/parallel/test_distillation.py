"""Divergence of a student from its teacher over a tensor-parallel group."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import (
    DistillationOutputs,
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_distillation,
)
from megatron_fused_ce.head import tokens
from megatron_fused_ce.rl import token_divergence
from tests.support import distillation, head, pairs
from tests.support.collectives import Collective, Collectives
from tests.support.distillation import CONFIDENT, KINDS, DistillationResult, assert_right, make_problem, plain
from tests.support.head import rows_of, same_on_all_ranks, scaled_exp_dtype, tokens_of
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, Ranks, on_ranks

#: Rows of the vocabulary, with the student's padding: as tests/support/head.py cuts them.
VOCAB = {"equal": 100, "unequal": 97}


def over_ranks(
    rank: Rank,
    problem: distillation.DistillationProblem,
    config: FusedCEConfig,
    *,
    sp: bool = False,
    teacher_sp: bool | None = None,
    shards: str = "unequal",
    **options,
) -> DistillationResult:
    """The whole result, on every rank."""
    s, vocab = problem.hidden.shape[0], problem.weight.shape[0]
    rows, tokens = rows_of(rank, shards, vocab), tokens_of(rank, s, sp)
    hidden = problem.hidden[tokens].clone().requires_grad_()
    weight = problem.weight[rows].clone().requires_grad_()
    of_teacher = rows if rank.rank < rank.size - 1 else slice(rows.start, None)
    made = fused_linear_distillation(
        hidden,
        weight,
        problem.teacher_hidden[tokens_of(rank, s, sp if teacher_sp is None else teacher_sp)],
        problem.teacher_weight[of_teacher],
        **{
            **problem.options,
            **{"entropy": "detached", "token_weights": problem.upstream / 1.5, "config": config},
            **{"tp_group": rank.group, "sequence_parallel": sp, "teacher_sequence_parallel": teacher_sp},
            **options,
        },
    )
    made.loss.backward(problem.upstream)
    outputs = DistillationOutputs(*(None if each is None else each.detach() for each in made))
    same_on_all_ranks(rank, *outputs)
    return DistillationResult(outputs, *head.whole(rank, sp, hidden.grad, weight.grad))


def against_fp64(
    rank: Rank, *, values="plain", kind="forward_kl", option="plain", strategy="store",
    sequence_parallel=False, teacher_sequence_parallel=None, merge="auto", shards="unequal",
    skips="nothing", chunk_tokens=20, dtype="float32", s=24,
):  # fmt: skip
    options, rows = dict(distillation.OPTIONS[option]), VOCAB[shards]
    if "padding" in options:
        rows -= options["padding"][0]
    problem = make_problem(
        values, s=s, b=3, sizes=(32, 32 if values == "near" else 16), vocab=rows, kind=kind, temperature=2.0,
        dtype=getattr(torch, dtype), device=rank.device, **options,
    )  # fmt: skip
    left_out = torch.zeros_like(problem.labels, dtype=torch.bool)
    if skips != "nothing":
        left_out = torch.rand(3, s, generator=torch.Generator().manual_seed(1)).to(rank.device) < 0.6
        left_out[:, : s // 4] = True  # the ranks' parts differ in how many
        problem = replace(problem, upstream=problem.upstream.masked_fill(left_out, 0.0))
        left_out = problem.upstream == 0
    with head.strategy_in_place(strategy) as name, patch.object(tokens, "ROUND_TO", 4):
        config = problem.config(
            strategy=name,
            chunk_tokens=chunk_tokens,
            merge=merge,
            skip_masked=skips == "masked",
        )
        layout = {"sp": sequence_parallel, "teacher_sp": teacher_sequence_parallel, "shards": shards}
        made = over_ranks(rank, problem, config, **layout)
    exact = plain(problem).outputs
    outputs = DistillationOutputs(
        *(None if x is None else true.where(left_out, x) for true, x in zip(exact, made.outputs, strict=True))
    )
    for value in made.outputs:
        assert value is None or not value[left_out].any()
    assert_right(problem, made._replace(outputs=outputs))


CASES = pairs.cases("divergence over ranks")
FOUR = {"kind": "reverse_kl", "strategy": "grad_in_forward", "values": "sure of others", "skips": "masked"}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_against_fp64(rank: Rank, case):
    case = CASES[case]
    against_fp64(rank, **case, s=24 if case["dtype"] == "float32" else 48)


@on_ranks(4)
@pytest.mark.parametrize("case", [FOUR, {"s": 4, "kind": "jsd", "option": "label weights"}])
def test_four_ranks(rank: Rank, case):
    """A shard of one class, classes that the sides are sure of on shards of their own; a position each."""
    against_fp64(rank, **case, sequence_parallel=True, teacher_sequence_parallel=False, merge="packed")


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "strategy"), [("forward_kl", "recompute"), ("reverse_kl", "store"), ("jsd", "grad_in_forward")]
)
def test_logits_of_the_scaled_exp_gemm(rank: Rank, kind, strategy):
    """Of both sides, each with its own sample of all shards' rows."""
    problem = make_problem(
        "sure of others", s=12, b=2, sizes=(16, 32), vocab=512, kind=kind, dtype=scaled_exp_dtype(rank),
        temperature=2.0, with_labels=True, label_weights=0.5, device=rank.device,
    )  # fmt: skip
    config = problem.config(strategy=strategy, chunk_tokens=16, logits_backend="scaled_exp")
    assert_right(problem, over_ranks(rank, problem, config, sp=True))


@on_ranks(2)
@pytest.mark.parametrize("merge", ["packed", "all_reduce"])
@pytest.mark.parametrize("kind", KINDS)
def test_confident_rows(rank: Rank, kind, merge):
    """The sides' largest logits on shards of their own; on both shards alike. More of them on one rank:
    tests/op."""
    for sides, temperature, raised in itertools.product(CONFIDENT, (0.1, 1.0), (8, 30, 100)):
        problem = distillation.confident(
            512, raised, sides, device=rank.device, kind=kind, temperature=temperature
        )
        if raised == 8:
            problem.weight[-1] = problem.weight[0]
        made = over_ranks(rank, problem, problem.config(strategy="store", merge=merge), entropy="none")
        assert made.grad_weight is not None
        error = distillation.worst_row(made.grad_weight.t(), distillation.exact_rows(problem))
        assert error <= 2e-6, f"{sides}, temperature {temperature}, raised by {raised}: {error}"


@on_ranks(2)
@pytest.mark.parametrize("at", ["start", "wait"])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_at_their_start_or_wait(rank: Rank, strategy, kind, at):
    """Of nine chunks, both sides gathered: nothing is overwritten that is still read or under way."""
    with head.collectives_run(at):
        against_fp64(rank, strategy=strategy, kind=kind, sequence_parallel=True, chunk_tokens=8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no streams")
@on_ranks(Ranks(2, needs_nccl="its collectives run on a stream"))
@pytest.mark.parametrize("kind", ["loss", "forward_kl", "jsd"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "mixed"])
def test_collectives_that_are_late(rank: Rank, strategy, kind):
    """Random delays on their stream, other ones on each rank: every bit stays."""
    sp = (strategy, kind) != ("recompute", "loss")
    problem = make_problem(
        s=96, b=2, sizes=(64, 32), vocab=12800, kind="forward_kl" if kind == "loss" else kind,
        dtype=torch.bfloat16, device=rank.device,
    )  # fmt: skip
    random = Random(rank.rank)

    def delay(call: Collective) -> None:
        torch.cuda._sleep(random.randrange(1_000_000))  # cycles

    def result() -> list[torch.Tensor]:
        if kind != "loss":
            made = over_ranks(rank, problem, config, sp=sp)
            return [made.outputs.loss, made.grad_hidden, made.grad_weight]
        hidden = problem.hidden[tokens_of(rank, 96, sp)].clone().requires_grad_()
        weight = problem.weight[rows_of(rank, "unequal", 12800)].clone().requires_grad_()
        loss = fused_linear_cross_entropy(
            hidden, weight, problem.labels, token_weights=problem.upstream / 1.5, config=config,
            tp_group=rank.group, sequence_parallel=sp,
        )  # fmt: skip
        loss.backward(problem.upstream)
        return [loss.detach(), hidden.grad, weight.grad]

    with head.strategy_in_place(strategy, 3) as name:
        config = problem.config(strategy=name, num_chunks=6, merge="packed" if sp else "all_reduce")
        expected = result()
        for _ in range(3):
            with Collectives({rank.group: "tp"}, before=delay):
                assert all(map(torch.equal, result(), expected))


@on_ranks(2)
def test_gradients_that_the_caller_sums(rank: Rank):
    """As verl and SkyRL gather hidden states themselves."""
    problem = make_problem(s=6, b=2, vocab=97, kind="reverse_kl", device=rank.device)
    hidden, rows = problem.hidden.clone().requires_grad_(), rows_of(rank, "unequal", 97)
    made = token_divergence(
        hidden, problem.weight[rows], problem.teacher_hidden, problem.teacher_weight[rows],
        tp_group=rank.group, reduce_grad_hidden=False, config=FusedCEConfig(num_chunks=2), batch_first=False,
    )  # fmt: skip
    made.loss.backward(problem.upstream)
    dist.all_reduce(hidden.grad)
    outputs = plain(problem, torch.float64).outputs._replace(loss=made.loss.detach())
    assert_right(problem, DistillationResult(outputs, hidden.grad, None))
