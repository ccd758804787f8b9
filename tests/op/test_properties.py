"""Random calls of the head against fp64: every loss of a token, shards over ranks, Triton's kernels.

    make properties PROPERTIES="--hypothesis-seed 7"

CI tries 300 examples, always the same; this takes the profile `long` of tests/conftest.py, 12,000.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_fused_ce import FusedCEConfig
from tests.support.losses import Loss
from tests.support.op import rows_by, same_bits, whole
from tests.support.problems import DrawnProblem, check, largest_logits, problems, run
from tests.support.ranks import Rank, RankProcesses


def share(part: float) -> settings:
    """This property's part of the profile's examples."""
    return settings(max_examples=round(settings.default.max_examples * part))


#: Of which fp16 keeps its digits by the power of two that gradients of logits are multiplied by.
SMALL_IN_FP16 = DrawnProblem(
    seed=0, s=1, b=1, hidden_size=1, shards=(2,), dtype=torch.float16, values="high",
    config=FusedCEConfig(strategy="store", logit_softcap=5.0, ignore_index=None),
)  # fmt: skip


@share(0.4)
@given(problems())
@example(SMALL_IN_FP16)
def test_loss_and_gradients(problem):
    """And twice the same bits."""
    made, again = run(problem), run(problem)
    check(problem, made)
    assert all(same_bits(made[name], again[name]) for name in made)


#: Ways to ask for a loss; what is beside it has upstream gradients of its own.
LOSSES = [
    *(Loss(beside=names) for names in (("log_prob",), ("entropy",), ("lse", "entropy"))),
    Loss(temperatures=True),
    *(Loss(entries=k) for k in (1, 4, 9)),
]
#: A softcap, one temperature for all tokens, and labels of no class.
OUTSIDE = DrawnProblem(
    seed=1, s=5, b=2, hidden_size=8, shards=(19,), dtype=torch.float32, values="odd-labels",
    temperature="number", config=FusedCEConfig(strategy="store", logit_softcap=2.0),
)  # fmt: skip


@share(0.3)
@given(problems(), st.sampled_from(LOSSES))
@example(OUTSIDE, Loss(temperatures=True))
def test_other_losses(problem, loss):
    """Values and gradients; log-probabilities at any temperature, also of labels outside the vocabulary."""
    # What these functions take, and their definitions know.
    options = {"ignore_index": None} | ({"label_smoothing": 0.0} if loss.entries else {})
    if not loss.entries and problem.config.strategy == "grad_in_forward":
        options["strategy"] = "recompute"  # the other upstream gradients must be known
    problem = replace(
        problem,
        grad_weight="returned",
        temperature=problem.temperature if loss.temperatures else "",
        flat=problem.flat and not loss.entries,
        config=replace(problem.config, **options),
    )
    inputs = problem.inputs()
    upstreams = {name: inputs.grad_loss.roll(i, 1) for i, name in enumerate(loss.with_gradient)}

    def head(hidden, weight, labels, token_weights=None, **options):
        known = {} if loss.temperatures else {"token_weights": token_weights}
        made = loss.ask(hidden, weight, replace(inputs, labels=labels), **known, **options)
        return {name: value for name, value in made.items() if value is not None}

    made = run(problem, head, upstreams, inputs=inputs)
    check(problem, made, lambda *how: loss.plain(inputs, upstreams, *how))


def check_shards(rank: Rank, problem):
    made = whole(rank, problem.sequence_parallel, run(problem, rank=rank.rank, group=rank.group))
    if rank.rank == 0:
        check(problem, made)


@pytest.mark.rest
@share(0.14)
@given(problems(max_shards=4))
def test_shards_over_ranks(problem):
    """TP 2 to 4, shards of any sizes, with sequence parallelism or not."""
    with RankProcesses(len(problem.shards)) as world:
        world.run(check_shards, problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
@share(0.08)
@given(problems(), st.booleans())
def test_triton_kernels(problem, exponentiating):
    """Row kernels with every option, and the scaled-exp GEMM, by Triton's interpreter."""
    problem = replace(problem, b=1)
    if exponentiating:
        options = {name: getattr(FusedCEConfig(), name) for name in ("z_loss", "logit_softcap")}
        options |= {"label_smoothing": 0.0, "true_vocab_size": None, "logits_backend": "scaled_exp"}
        options["logit_scale"] = abs(problem.config.logit_scale)
        problem = replace(
            problem,
            dtype=torch.float32,
            hidden_size=4 * (1 + problem.hidden_size // 4),
            shards=(4 * (1 + sum(problem.shards) // 4),),
            strides=("contiguous", "contiguous", problem.strides[2]),
            config=replace(problem.config, **options),
        )
        # Exponents are rounded in powers of two, a row's reference once for all columns: with larger logits
        # fp32, which it serves here alone, shows that in gradients that are small differences.
        assume(float(largest_logits(problem.inputs()).max()) < 2.0**6)
    with rows_by("triton"):
        check(problem, run(problem))
