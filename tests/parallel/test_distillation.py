"""Divergence of a student from its teacher over a tensor-parallel group."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import (
    DistillationOutputs,
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_distillation,
    masked_tokens,
    parallel,
)
from megatron_fused_ce.rl import token_divergence
from megatron_fused_ce.scripts.lib.collectives import Collectives
from tests.support import pairs
from tests.support.distillation import (
    CONFIDENT,
    KINDS,
    OPTIONS,
    RAISED,
    TEMPERATURES,
    DistillationProblem,
    DistillationResult,
    assert_right,
    confident,
    exact_rows,
    make_problem,
    plain,
    worst_row,
)
from tests.support.head import (
    AtItsStart,
    AtItsWait,
    fresh_group,
    rows_of,
    same_on_all_ranks,
    scaled_exp_dtype,
    strategy_in_place,
    tokens_of,
    whole_hidden,
    whole_rows,
)
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks

#: Rows of the vocabulary, with the student's padding: as tests/support/head.py cuts them.
VOCAB = {"equal": 100, "unequal": 97}


def over_ranks(
    rank: Rank,
    problem: DistillationProblem,
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
            **{"entropy": True, "token_weights": problem.upstream / 1.5, "config": config},
            **{"tp_group": rank.group, "sequence_parallel": sp, "teacher_sequence_parallel": teacher_sp},
            **options,
        },
    )
    made.loss.backward(problem.upstream)
    outputs = DistillationOutputs(*(None if each is None else each.detach() for each in made))
    same_on_all_ranks(rank, *outputs)
    return DistillationResult(outputs, whole_hidden(rank, hidden.grad, sp), whole_rows(rank, weight.grad))


def against_fp64(
    rank: Rank, *, values="plain", kind="forward_kl", option="plain", strategy="store",
    sequence_parallel=False, teacher_sequence_parallel=None, merge="auto", shards="unequal",
    skips="nothing", chunk_tokens=20, dtype="float32", s=24,
):  # fmt: skip
    options, rows = dict(OPTIONS[option]), VOCAB[shards]
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
        left_out = (problem.upstream == 0) & (skips == "masked")
    with strategy_in_place(strategy) as name, patch.object(masked_tokens, "ROUND_TO", 4):
        config = problem.config(
            strategy=name,
            chunk_tokens=chunk_tokens,
            merge=merge,
            skip_masked=skips == "masked",
            skip_zero_upstream=skips == "zero upstream",
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


CASES = {"-".join(map(str, row.values())): row for row in pairs.rows_of("divergence over ranks")}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_against_fp64(rank: Rank, case):
    case = CASES[case]
    against_fp64(rank, **case, s=24 if case["dtype"] == "float32" else 48)


@on_ranks(4)
@pytest.mark.parametrize(
    "case",
    [
        {"kind": "forward_kl", "strategy": "store", "sequence_parallel": True},
        {
            "kind": "jsd",
            "strategy": "recompute",
            "teacher_sequence_parallel": True,
            "option": "label weights",
        },
        {
            **{"kind": "reverse_kl", "strategy": "grad_in_forward", "sequence_parallel": True},
            **{"teacher_sequence_parallel": False, "values": "sure of others", "skips": "masked"},
        },
    ],
    ids=lambda case: case["kind"],
)
def test_four_ranks(rank: Rank, case):
    """A shard of one class, and classes that the sides are sure of on shards of their own."""
    against_fp64(rank, **case, merge="packed")


@pytest.mark.rest
@on_ranks(1, 4)
@pytest.mark.parametrize("case", CASES)
def test_against_fp64_on_one_and_four(rank: Rank, case):
    case = CASES[case]
    against_fp64(rank, **case, s=24 if case["dtype"] == "float32" else 48)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("forward_kl", "recompute"), ("reverse_kl", "store"), ("jsd", "grad_in_forward")],
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
    """The sides' largest logits on shards of their own; on both shards alike."""
    for sides in CONFIDENT:
        for temperature in TEMPERATURES:
            for raised in RAISED:
                problem = confident(
                    512, raised, sides, device=rank.device, kind=kind, temperature=temperature
                )
                if raised == 8:
                    problem.weight[-1] = problem.weight[0]
                made = over_ranks(rank, problem, problem.config(strategy="store", merge=merge), entropy=False)
                assert made.grad_weight is not None
                error = worst_row(made.grad_weight.t(), exact_rows(problem))
                assert error <= 2e-6, f"{sides}, temperature {temperature}, raised by {raised}: {error}"


@on_ranks(2)
@pytest.mark.parametrize("moment", [AtItsStart, AtItsWait])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "mixed"])
def test_collectives_at_their_start_or_wait(rank: Rank, strategy, kind, moment):
    """Of nine chunks, both sides gathered: nothing is overwritten that is still read or under way."""
    with patch.object(parallel, "_start", lambda c, *t, beside=True, **o: moment(c, t, o)):
        against_fp64(rank, strategy=strategy, kind=kind, sequence_parallel=True, chunk_tokens=8)


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


# --- collectives --------------------------------------------------------------------------------

#: Of two chunks of C = 6 tokens, H = 8, H_t = 4, without labels: what leaves, by a letter each.
LETTERS = {
    ("all_gather", 8): "h",  # hidden states of a chunk [C, H]
    ("all_gather", 4): "t",  # the teacher's [C, H_t], or of all tokens
    ("all_gather", 12): "m",  # the merge: statistics of both sides [4, 2 C]
    ("all_reduce", 8): "g",  # grad_hidden of a chunk
    ("reduce_scatter", 8): "g",
}


def letter_of(call) -> str:
    if call.op == "MAX":
        return "v"  # what grad_in_forward was promised
    shape = call.shapes[0]
    if call.name == "all_reduce" and shape in ((6,), (1, 12), (2, 6)):
        # KL(p_s || m) of a chunk; the divergence of all tokens.
        return "k" if shape == (6,) else "d"
    return LETTERS.get((call.name, shape[-1]), str(call))


ORDERS = {
    # kind, strategy, the student's and the teacher's sequence parallelism: forward and backward
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
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_collectives_in_order(rank: Rank, order):
    kind, strategy, sp, teacher_sp = order
    problem = make_problem(s=6, b=2, sizes=(8, 4), vocab=100, kind=kind, device=rank.device)
    config = problem.config(strategy=strategy, num_chunks=2, merge="packed")
    hidden = problem.hidden[tokens_of(rank, 6, sp)].clone().requires_grad_()
    rows = rows_of(rank, "equal", 100)
    weight = problem.weight[rows].clone().requires_grad_()
    teacher = problem.teacher_hidden[tokens_of(rank, 6, teacher_sp)], problem.teacher_weight[rows]
    settings = {**problem.options, "tp_group": rank.group, "sequence_parallel": sp, "config": config}
    settings |= {"teacher_sequence_parallel": teacher_sp, "token_weights": problem.upstream}
    seen = []
    for _ in range(2):  # a head's first call is compared
        with Collectives({rank.group: "tp"}) as forward:
            loss = fused_linear_distillation(hidden, weight, *teacher, **settings).loss
        with Collectives({rank.group: "tp"}) as backward:
            loss.backward(problem.upstream)
        seen.append((forward.calls, backward.calls))
    letters = tuple("".join(map(letter_of, calls)) for calls in seen[1])
    assert letters == ORDERS[order], letters
    first, then = (len(calls[0]) for calls in seen)
    assert first - then == 2, "the comparison, and whether a shard of the teacher is another"


# --- ranks that disagree ------------------------------------------------------------------------


def one_call(rank: Rank, group, **changes):
    """A small call that one rank makes with other arguments than the rest."""

    def ones(*shape):
        return torch.ones(*shape, device=rank.device)

    arguments = {
        **{"hidden": ones(8, 1, 4).requires_grad_(), "weight": ones(5, 4)},
        **{"teacher_hidden": ones(8, 1, 3), "teacher_weight": ones(5, 3)},
        **{"config": FusedCEConfig(num_chunks=2), "tp_group": group},
    }
    return fused_linear_distillation(**{**arguments, **changes})


#: What the last rank gives otherwise, and the words of every rank's error.
DIFFERENCES = {
    "no tensor": (lambda ones: {"teacher_hidden": [1.0]}, "teacher_hidden is a list"),
    "tokens": (lambda ones: {"teacher_hidden": ones(6, 1, 3)}, r"expected \(8, 1, 3\), the student's tokens"),
    "a gradient": (lambda ones: {"teacher_hidden": ones(8, 1, 3).requires_grad_()}, "the teacher gets none"),
    "H_t": (
        lambda ones: {"teacher_hidden": ones(8, 1, 2), "teacher_weight": ones(5, 2)},
        "disagree on distillation",
    ),
    "dtype": (
        lambda ones: {"teacher_hidden": ones(8, 1, 3).half(), "teacher_weight": ones(5, 3).half()},
        "disagree on distillation",
    ),
    "divergence": (lambda ones: {"divergence": "jsd"}, "disagree on distillation"),
    "beta": (lambda ones: {"beta": 0.25}, "disagree on distillation"),
    "no such divergence": (lambda ones: {"divergence": "kl"}, "choose one of forward_kl"),
    "temperature": (lambda ones: {"temperature": 2.0}, "disagree on temperature"),
    "scale": (lambda ones: {"teacher_logit_scale": 2.0}, "disagree on distillation"),
    "split": (
        lambda ones: {"teacher_hidden": ones(4, 1, 3), "teacher_sequence_parallel": True},
        "disagree on distillation",
    ),
    "labels": (lambda ones: {"labels": ones(1, 8).long()}, "disagree on outputs"),
    "label weights": (lambda ones: {"label_weights": 1.0}, "without labels"),
    "no teacher": (None, "disagree on"),
    "more rows": (
        lambda ones: {"teacher_weight": ones(6, 3)},
        "one cut of the vocabulary|teacher's shard does not fit",
    ),
    "fewer rows": (
        lambda ones: {"teacher_weight": ones(4, 3)},
        "one cut of the vocabulary|teacher's shard does not fit",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_one_rank_differs(rank: Rank, what):
    """In a group's first call: every rank raises."""
    make, words = DIFFERENCES[what]
    with fresh_group(rank) as group, pytest.raises((TypeError, ValueError), match=words):
        if rank.rank < rank.size - 1:
            one_call(rank, group)
        elif make is None:
            hidden, weight = torch.ones(8, 1, 4, requires_grad=True), torch.ones(5, 4)
            labels = torch.zeros(1, 8, dtype=torch.int64)
            config = FusedCEConfig(num_chunks=2)
            given = (x.to(rank.device) for x in (hidden, weight, labels))
            fused_linear_cross_entropy(*given, tp_group=group, config=config)
        else:
            one_call(rank, group, **make(lambda *shape: torch.ones(*shape, device=rank.device)))


@on_ranks(2)
def test_another_teacher_of_one_student(rank: Rank):
    """A cut that does not fit is found in the call that brings it; other lengths are not compared."""

    def ones(*shape):
        return torch.ones(*shape, device=rank.device)

    with fresh_group(rank) as group:
        one_call(rank, group)
        with pytest.raises(ValueError, match="expected one cut of the vocabulary"):
            one_call(rank, group, teacher_weight=ones(6, 3))
        with Collectives({group: "tp"}) as seen:
            one_call(rank, group, hidden=ones(6, 1, 4), teacher_hidden=ones(6, 1, 3))
        assert [call.name for call in seen.calls] == ["all_gather"] * 2 + ["all_reduce"]
