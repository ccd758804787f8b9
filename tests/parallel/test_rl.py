"""Log-probabilities for reinforcement learning over a tensor-parallel group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import make_inputs, plain_outputs, relative_error
from tests.support.head import same_on_all_ranks, scaled_exp_dtype, shard_of, whole_hidden, whole_rows
from tests.support.ranks import Rank, on_ranks

#: Number of temperatures, entropy, logits backend, whether ``grad_hidden`` is summed here.
CALLS = {
    "one temperature": ("number", "none", "scaled_exp", True),
    "one temperature, partial": ("number", "none", "scaled_exp", False),
    "a temperature per token": ("per token", "differentiable", "gemm_rows", True),
    "a temperature per token, in the GEMM": ("per token", "detached", "scaled_exp", True),
    "a temperature per token, gradients in the GEMM": ("per token", "differentiable", "scaled_exp", True),
    "a temperature per token, partial": ("per token", "detached", "gemm_rows", False),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "sp"), [("store", True), ("recompute", False)], ids=["store-sp", "recompute"]
)
@pytest.mark.parametrize("call", CALLS)
def test_against_fp64(rank: Rank, call, strategy, sp):
    """Some labels are outside the vocabulary. Over one rank: tests/op/test_properties.py."""
    temperatures, entropy, backend, reduces = CALLS[call]
    sp = sp and reduces  # else refused: see below
    dtype = scaled_exp_dtype(rank) if backend == "scaled_exp" else torch.float32
    # Three chunks; on a GPU many steps of a GEMM along k, and of each row.
    sizes = {"s": 12, "b": 3, "hidden_size": 32, "vocab": 512}
    chunk_tokens = 14
    if rank.device.type == "cuda":
        sizes, chunk_tokens = {"s": 2050, "b": 2, "hidden_size": 1024, "vocab": 12800}, 1400
    inputs = make_inputs("odd-labels", **sizes, dtype=dtype, device=rank.device)
    temperature = 0.7
    inputs = replace(inputs, temperature=torch.full_like(inputs.grad_loss, temperature))
    if temperatures == "per token":
        temperature = inputs.grad_loss.abs() + 0.5
        inputs = replace(inputs, temperature=temperature)
    names = ("log_prob", "entropy") if entropy == "differentiable" else ("log_prob",)
    upstreams = {name: inputs.grad_loss.roll(i, 1) for i, name in enumerate(names)}
    hidden, weight, settings = shard_of(rank, inputs, sp)
    made = token_log_probs(
        hidden,
        weight,
        inputs.labels,
        temperature=temperature,
        entropy=entropy,
        zero_unknown=True,
        reduce_grad_hidden=reduces,
        config=FusedCEConfig(strategy=strategy, chunk_tokens=chunk_tokens, logits_backend=backend),
        **settings,
    )
    torch.autograd.backward([getattr(made, name) for name in upstreams], list(upstreams.values()))
    same_on_all_ranks(rank, *made)
    if not reduces:
        dist.all_reduce(hidden.grad, group=rank.group)
    (exact, *true_grads), (eager, *eager_grads) = (
        plain_outputs(inputs, upstreams, precision) for precision in (torch.float64, dtype)
    )
    unknown = (inputs.labels < 0) | (inputs.labels >= sizes["vocab"])
    assert unknown.any() and not made.log_prob[unknown].any()
    pairs = {
        "log_prob": (made.log_prob.masked_fill(unknown, 0.0), exact.log_prob.masked_fill(unknown, 0.0)),
        "entropy": (made.entropy, exact.entropy),
        "grad_hidden": (whole_hidden(rank, hidden.grad, sp), true_grads[0]),
        "grad_weight": (whole_rows(rank, weight.grad), true_grads[1]),
    }
    theirs = {**eager._asdict(), "grad_hidden": eager_grads[0], "grad_weight": eager_grads[1]}
    theirs["log_prob"] = eager.log_prob.masked_fill(unknown, 0.0)
    floor = 4e-6 if dtype == torch.float32 else 4e-3
    for name, (ours, true) in pairs.items():
        if ours is not None:
            bound = max(floor, 2 * relative_error(theirs[name], true))
            assert relative_error(ours.detach(), true) < bound, name


#: What the last rank alone gives, in a later call of its head too, and every rank's words.
BAD = {
    "a temperature of 0": (
        lambda per_token: {"temperature": per_token.masked_fill(per_token > 0, 0.0)},
        "not all",
    ),
    "NaN": (lambda per_token: {"temperature": per_token.masked_fill(per_token > 0, torch.nan)}, "not all"),
}


@on_ranks(2)
@pytest.mark.parametrize("what", BAD)
def test_bad_temperatures_of_one_rank(rank: Rank, what):
    """After a first call of the same kind."""
    make, words = BAD[what]
    hidden = torch.ones(8, 1, 4, device=rank.device)
    weight = torch.ones(5, 4, device=rank.device)
    labels = torch.zeros(1, 8, dtype=torch.int64, device=rank.device)
    good = {"temperature": torch.ones(1, 8, device=rank.device), "tp_group": rank.group}
    token_log_probs(hidden, weight, labels, **good)
    bad = make(good["temperature"]) if rank.rank == rank.size - 1 else {}
    with pytest.raises(ValueError, match=words):
        token_log_probs(hidden, weight, labels, **{**good, **bad})
    token_log_probs(hidden, weight, labels, **good)


@on_ranks(2)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"entropy": "yes"}, "choose one of none"),
        ({"reduce_grad_hidden": False}, "that the caller has gathered"),
    ],
    ids=["entropy", "partial gradients under sequence parallelism"],
)
def test_bad_arguments_of_one_rank(rank: Rank, given, words):
    """In a group's first call."""
    group = dist.new_group(list(range(rank.size)))
    given = given if rank.rank == rank.size - 1 else {}
    hidden = torch.ones(4, 1, 4, device=rank.device)
    labels = torch.zeros(1, 8, dtype=torch.int64, device=rank.device)
    with pytest.raises(ValueError, match=words):
        token_log_probs(hidden, hidden[:, 0], labels, tp_group=group, sequence_parallel=True, **given)
