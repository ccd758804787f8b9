"""Divergence of a student from its teacher over a tensor-parallel group."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.rl import token_divergence
from tests.support import distillation, pairs
from tests.support.collectives import Collective, Collectives
from tests.support.distillation import CONFIDENT, KINDS, assert_right, make_problem, plain
from tests.support.losses import GRADIENTS
from tests.support.op import (
    DTYPES,
    EXP_DTYPE,
    STRATEGIES,
    Parts,
    collectives_run,
    rows_of,
    run,
    step,
    strategy_in_place,
    tokens_of,
)
from tests.support.ranks import Rank, Ranks, on_ranks

#: Rows of the vocabulary, with the student's padding: as tests/support/op.py cuts them.
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
) -> Parts:
    """The whole result, on every rank."""
    rows, (hidden, weight) = rows_of(rank, shards, problem.weight.shape[0]), problem.teacher
    positions = tokens_of(rank, len(hidden), sp if teacher_sp is None else teacher_sp)
    of_teacher = hidden[positions], weight[rows.start : rows.stop if rank.rank < rank.size - 1 else None]
    options = {"token_weights": problem.grad_loss / 1.5, "config": config, **options}

    def ask(hidden, weight, **group):
        return problem.ask(
            hidden, weight, *of_teacher, teacher_sequence_parallel=teacher_sp, **options, **group
        )

    return step(problem, ask, rank, sp, shards)


def against_fp64(
    rank: Rank, *, values="plain", kind="forward_kl", option="plain", strategy="store",
    sequence_parallel=False, teacher_sequence_parallel=None, merge="packed", shards="unequal",
    skips="nothing", chunk_tokens=20, dtype=torch.float32, s=24,
):  # fmt: skip
    options, rows = dict(distillation.OPTIONS[option]), VOCAB[shards]
    if "padding" in options:
        rows -= options["padding"][0]
    problem = make_problem(
        values, s=s, b=3, sizes=(32, 32 if values == "near" else 16), vocab=rows, kind=kind, temperature=2.0,
        dtype=dtype, device=rank.device, **options,
    )  # fmt: skip
    left_out = torch.zeros_like(problem.labels, dtype=torch.bool)
    if skips != "nothing":
        left_out = torch.rand(3, s, generator=torch.Generator().manual_seed(1)).to(rank.device) < 0.6
        left_out[:, : s // 4] = True  # the ranks' parts differ in how many
        problem = replace(problem, grad_loss=problem.grad_loss.masked_fill(left_out, 0.0))
        left_out = problem.grad_loss == 0
    with strategy_in_place(strategy) as name, patch.object(tokens, "ROUND_TO", 4):
        given = {"chunk_tokens": chunk_tokens, "merge": merge, "skip_masked": skips == "masked"}
        config = replace(problem.config, strategy=name, **given)
        layout = {"sp": sequence_parallel, "teacher_sp": teacher_sequence_parallel, "shards": shards}
        made = over_ranks(rank, problem, config, **layout)
    exact = plain(problem)
    for name in made.keys() - GRADIENTS:
        assert not made[name][left_out].any()
        made[name] = exact[name].where(left_out, made[name])
    assert_right(problem, made)


CASES = pairs.cases(
    {
        "values": ("plain", "near", "sure of others", "wide student"),
        "kind": tuple(KINDS)[:3],
        "option": ("plain", "label weights", "more padding", "less padding"),
        "strategy": (*STRATEGIES, "mixed"),
        "sequence_parallel": (False, True),
        "teacher_sequence_parallel": (False, True),
        "merge": ("packed", "all_reduce"),
        "shards": ("equal", "unequal"),
        "skips": ("nothing", "masked"),
        "chunk_tokens": (40, 12),
        "dtype": DTYPES,
    }
)
FOUR = {"kind": "reverse_kl", "strategy": "grad_in_forward", "values": "sure of others", "skips": "masked"}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_against_fp64(rank: Rank, case):
    case = CASES[case]
    against_fp64(rank, **case, s=24 if case["dtype"] == torch.float32 else 48)


@on_ranks(4)
@pytest.mark.parametrize("case", [FOUR, {"s": 4, "kind": "jsd", "option": "label weights"}])
def test_four_ranks(rank: Rank, case):
    """A shard of one class, classes that the sides are sure of on shards of their own; a position each."""
    against_fp64(rank, **case, sequence_parallel=True, teacher_sequence_parallel=False, merge="packed")


@on_ranks(2)
def test_fp16_bounds_of_their_own_tokens(rank: Rank):
    """Three tokens' gradients are 3000 times their upstream gradients; other tokens have none."""
    problem = make_problem(
        s=24, vocab=97, dtype=torch.float16, with_labels=True, label_weights="per token", device=rank.device
    )
    heavy = torch.arange(24, device=rank.device) == 12
    problem.options["label_weights"].copy_(3000.0 * heavy)
    problem.grad_loss.mul_(heavy)
    config = replace(problem.config, strategy="store", chunk_tokens=20)
    assert_right(problem, over_ranks(rank, problem, config, sp=True))


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "strategy"), [("forward_kl", "recompute"), ("reverse_kl", "store"), ("jsd", "grad_in_forward")]
)
def test_logits_of_the_scaled_exp_gemm(rank: Rank, kind, strategy):
    """Of both sides, each with its own sample of all shards' rows."""
    problem = make_problem(
        "sure of others", s=12, b=2, sizes=(16, 32), vocab=512, kind=kind, dtype=EXP_DTYPE,
        temperature=2.0, with_labels=True, label_weights=0.5, device=rank.device,
    )  # fmt: skip
    config = replace(problem.config, strategy=strategy, chunk_tokens=16, logits_backend="scaled_exp")
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
        made = over_ranks(
            rank, problem, replace(problem.config, strategy="store", merge=merge), entropy="none"
        )
        error = distillation.worst_row(made["grad_weight"].t(), distillation.exact_rows(problem))
        assert error <= 2e-6, f"{sides}, temperature {temperature}, raised by {raised}: {error}"


@on_ranks(2)
@pytest.mark.parametrize("at", ["start", "wait"])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_at_their_start_or_wait(rank: Rank, strategy, kind, at):
    """Of nine chunks, both sides gathered: nothing is overwritten that is still read or under way."""
    with collectives_run(at):
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
        if kind == "loss":
            weights = {"token_weights": problem.grad_loss / 1.5}
            return list(run(problem, config, rank, sp, **weights))
        made = over_ranks(rank, problem, config, sp=sp)
        return [made[name] for name in ("loss", *GRADIENTS)]

    with strategy_in_place(strategy, 3) as name:
        config = replace(problem.config, strategy=name, num_chunks=6, merge="packed" if sp else "all_reduce")
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
        hidden, problem.weight[rows], problem.teacher[0], problem.teacher[1][rows],
        tp_group=rank.group, reduce_grad_hidden=False, config=FusedCEConfig(num_chunks=2), batch_first=False,
    )  # fmt: skip
    made.loss.backward(problem.grad_loss)
    dist.all_reduce(hidden.grad)
    assert_right(problem, {"loss": made.loss.detach(), "grad_hidden": hidden.grad})
