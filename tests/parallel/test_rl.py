"""Log-probabilities for reinforcement learning over a tensor-parallel group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.rl import masked_token_log_probs, token_log_probs
from megatron_fused_ce.scripts.lib.reference import make_inputs, plain_outputs, relative_error
from tests.support.head import SIZES, same_on_all_ranks, scaled_exp_dtype, shard_of, whole_hidden, whole_rows
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


def sets_of(inputs, num_classes: int, generator: torch.Generator):
    """Kept classes ``[b, s, K]`` and which sets are empty: of many ids, of the label alone, of one shard."""
    b, s = inputs.labels.shape
    kept = torch.rand(b, s, num_classes, generator=generator) < 0.1
    kept[:, 1::4] = False
    kept[:, 2::4, num_classes // 4 :] = False
    known = ((inputs.labels >= 0) & (inputs.labels < num_classes)).cpu().unsqueeze(-1)
    of_label = inputs.labels.cpu().unsqueeze(-1).where(known, 0)
    with_label = kept.scatter(-1, of_label, kept.gather(-1, of_label) | known)
    kept[:, ::2], kept[:, 1::4] = with_label[:, ::2], with_label[:, 1::4]
    kept[:, 4::5] = False
    return kept, ~kept.any(-1)


@on_ranks(1, 2)
@pytest.mark.parametrize(("sp", "reduces"), [(False, True), (True, True), (False, False)], ids=str)
@pytest.mark.parametrize("temperatures", ["number", "per token", "number, labels kept, some active"])
def test_kept_ids_against_fp64(rank: Rank, temperatures, sp, reduces):
    """Sets without an id of a shard, of the label alone, without the label, and none."""
    keeps = "kept" in temperatures
    inputs = make_inputs("odd-labels", **SIZES, dtype=torch.float32, device=rank.device)
    kept, empty = sets_of(inputs, 97, torch.Generator().manual_seed(2))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), kept.sum(-1).flatten().cumsum(0)))
    ids = kept.flatten(0, 1).nonzero()[:, 1]
    temperature = torch.full_like(inputs.grad_loss, 0.7)
    if temperatures == "per token":
        temperature = inputs.grad_loss.abs() + 0.5
    kept, empty = kept.to(rank.device), empty.to(rank.device)
    known = (inputs.labels >= 0) & (inputs.labels < 97)
    active = torch.ones_like(empty)
    if keeps:
        of_label = inputs.labels.where(known, 0).unsqueeze(-1)
        outside = known & ~empty & ~kept.gather(-1, of_label).squeeze(-1)
        kept = kept.scatter(-1, of_label, kept.gather(-1, of_label) | outside.unsqueeze(-1))
        active[:, ::5], active[0] = False, inputs.grad_loss[0] > 0
        assert outside.any() and (empty & ~active).any() and (empty & active).any()
    inputs = replace(inputs, temperature=temperature, kept=kept | empty.unsqueeze(-1))
    upstreams = {"log_prob": inputs.grad_loss, "entropy": inputs.grad_loss.roll(1, 1)}
    hidden, weight, settings = shard_of(rank, inputs, sp)
    made = masked_token_log_probs(
        hidden,
        weight,
        inputs.labels,
        ids.to(rank.device),
        offsets.to(rank.device),
        temperature=temperature if temperatures == "per token" else 0.7,
        entropy="differentiable",
        keep_label=keeps,
        active_mask=active if keeps else None,
        reduce_grad_hidden=reduces,
        config=FusedCEConfig(chunk_tokens=28, debug_checks=True),
        **settings,
    )
    if keeps:
        assert not any(value[~active].any() for value in made)
    inside = kept.gather(-1, inputs.labels.where(known, 0).unsqueeze(-1)).squeeze(-1) & known
    outside = ~inside & ~empty
    assert outside.any() and empty.any() and inside.any()
    torch.autograd.backward([getattr(made, name) for name in upstreams], list(upstreams.values()))
    same_on_all_ranks(rank, *made)
    if not reduces:
        dist.all_reduce(hidden.grad, group=rank.group)
    upstreams = {name: of.masked_fill(~active, 0.0) for name, of in upstreams.items()}
    upstreams["log_prob"] = upstreams["log_prob"].masked_fill(outside, 0.0)
    exact, *true_grads = plain_outputs(inputs, upstreams, torch.float64)
    assert bool((made.log_prob[outside & active] == -torch.inf).all())
    counts = ~outside & active
    assert relative_error(made.log_prob.detach()[counts], exact.log_prob[counts]) < 4e-6
    assert relative_error(made.entropy.detach()[active], exact.entropy[active]) < 4e-6
    assert relative_error(whole_hidden(rank, hidden.grad, sp), true_grads[0]) < 4e-6
    assert relative_error(whole_rows(rank, weight.grad), true_grads[1]) < 4e-6


#: Ids and offsets that the last rank alone gives for three tokens, and every rank's words.
BAD_MASKS = {
    "an id outside": ([0, 1, 10, 2], [0, 2, 3, 4], "expected ids of the vocabulary"),
    "a negative id": ([0, 1, -1, 2], [0, 2, 3, 4], "expected ids of the vocabulary"),
    "twice": ([0, 0, 1, 2], [0, 2, 3, 4], "twice for one token"),
    "descending offsets": ([0, 1, 2, 3], [0, 3, 2, 4], "descend 1 times"),
    "offsets that end early": ([0, 1, 2, 3], [0, 2, 3, 3], "never descending"),
    "too few offsets": ([0, 1, 2, 3], [0, 2, 4], "one more than the 3 tokens"),
    "floats": ([0.0, 1.0, 2.0, 3.0], [0, 2, 3, 4], "int64 or int32"),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
@pytest.mark.parametrize("what", BAD_MASKS)
def test_bad_masks(rank: Rank, what, everywhere):
    """In a later call too, which goes on without."""
    ids, offsets, words = BAD_MASKS[what]
    hidden = torch.ones(3, 4, device=rank.device, requires_grad=True)
    weight = torch.ones(10 // rank.size, 4, device=rank.device)
    labels = torch.arange(3, device=rank.device)
    good = [torch.tensor(part, device=rank.device) for part in ([0, 1, 2, 3], [0, 2, 3, 4])]
    bad = [torch.tensor(part, device=rank.device) for part in (ids, offsets)]
    if not everywhere and rank.size > 1 and "id" in what.split():
        words = "disagree on (smallest|largest) id"
    given = bad if everywhere or rank.rank == rank.size - 1 else good
    for _ in range(2):
        masked_token_log_probs(hidden, weight, labels, *good, tp_group=rank.group)
        with pytest.raises((TypeError, ValueError), match=words):
            masked_token_log_probs(hidden, weight, labels, *given, tp_group=rank.group)


@on_ranks(2)
def test_a_mask_over_shards_with_a_gap(rank: Rank):
    """No rank alone: what is between the shards is nobody's."""
    hidden, labels = torch.ones(3, 4, device=rank.device), torch.arange(3, device=rank.device)
    mask = [torch.tensor(part, device=rank.device) for part in ([0, 1, 2, 3], [0, 2, 3, 4])]
    weight = torch.ones(5, 4, device=rank.device)
    given = {"tp_group": rank.group, "vocab_start": rank.rank * 9}
    with pytest.raises(ValueError, match=r"leave gaps: \[start, stop\) is \[\(0, 5\), \(9, 14\)\]"):
        masked_token_log_probs(hidden, weight, labels, *mask, **given)


@on_ranks(2)
def test_a_mask_over_shards_in_another_order(rank: Rank):
    generator = torch.Generator().manual_seed(1)
    hidden, whole = (torch.randn(n, 4, generator=generator).to(rank.device) for n in (3, 10))
    labels = torch.tensor([0, 2, 9], device=rank.device)
    mask = [torch.tensor(part, device=rank.device) for part in ([0, 7, 2, 3, 9], [0, 2, 4, 5])]
    expected = masked_token_log_probs(hidden, whole, labels, *mask).log_prob
    start = 5 * (1 - rank.rank)
    given = {"tp_group": rank.group, "vocab_start": start}
    made = masked_token_log_probs(hidden, whole[start : start + 5], labels, *mask, **given).log_prob
    torch.testing.assert_close(made, expected)


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
