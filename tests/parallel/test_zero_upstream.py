"""Tokens outside an active mask or without an upstream gradient, over two ranks; on one: tests/op."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_distillation,
    masked_tokens,
)
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import FLOOR, make_inputs, plain_outputs, relative_error
from tests.support import head
from tests.support.head import SIZES, rows_of, same_on_all_ranks, shard_of, whole_hidden, whole_rows
from tests.support.op import gemm_flops
from tests.support.ranks import Rank, on_ranks

NUM_CHUNKS = 3


def largest_parts(counts: torch.Tensor, num_parts: int) -> int:
    """Tokens worked on, over all parts, of bool ``[b, s]``: in each chunk as many of each part as of the part
    that has the most."""
    of_parts = counts.t().reshape(num_parts, -1)
    num_tokens = of_parts.shape[1]
    bounds = [num_tokens * at // NUM_CHUNKS for at in range(NUM_CHUNKS + 1)]
    chunks = [of_parts[:, start:stop] for start, stop in pairwise(bounds)]
    return num_parts * sum(int(chunk.sum(1).max()) for chunk in chunks)


def some_tokens(what: str, inputs) -> torch.Tensor:
    """Which count, bool ``[b, s]``: a third in every part, all of the last part and a few others, or none."""
    counts = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    if what == "one part whole":
        counts[:, : counts.shape[1] // 2] &= counts[:, : counts.shape[1] // 2].roll(1, 1)
        counts[:, counts.shape[1] // 2 :] = True
    elif what == "none":
        counts[:] = False
    return counts.to(inputs.labels.device)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", ["store", "recompute"])
@pytest.mark.parametrize("what", ["a third", "one part whole", "none"])
def test_against_fp64(rank: Rank, what, strategy, sp, dtype):
    """Of two outputs whose rows without an upstream gradient differ, and of another upstream in a second
    backward. Unequal shards. No rank works on more tokens than the fullest part has."""
    inputs = make_inputs("odd-labels", **SIZES, dtype=dtype, device=rank.device)
    temperature = inputs.grad_loss.abs() + 0.5
    inputs = replace(inputs, temperature=temperature)
    parts = rank.size if sp else 1
    counts = some_tokens(what, inputs)
    odd = torch.arange(counts.shape[1], device=rank.device) % 2 == 1
    first = {
        "log_prob": inputs.grad_loss.masked_fill(~counts | odd, 0.0),
        "entropy": inputs.grad_loss.roll(1, 1).masked_fill(~counts | ~odd, -0.0),
    }
    upstreams = (first, {name: grad.flip(0) for name, grad in first.items()})
    hidden, weight, settings = shard_of(rank, inputs, sp)
    config = FusedCEConfig(
        strategy, num_chunks=NUM_CHUNKS, logits_backend="gemm_rows", skip_zero_upstream=True
    )
    with patch.object(masked_tokens, "ROUND_TO", 1):
        made = token_log_probs(
            hidden,
            weight,
            inputs.labels,
            temperature=temperature,
            entropy="differentiable",
            config=config,
            **settings,
        )
        for of_this in upstreams:
            hidden.grad = weight.grad = None
            with gemm_flops() as flops:
                torch.autograd.backward([getattr(made, name) for name in of_this], [*of_this.values()], True)
            worked_on = largest_parts(of_this["log_prob"].ne(0) | of_this["entropy"].ne(0), parts)
            num_gemms = 2 if strategy == "store" else 3
            assert flops.get_total_flops() == num_gemms * worked_on * 2 * weight.numel()
            (_, *true), (_, *eager) = (plain_outputs(inputs, of_this, of) for of in (torch.float64, dtype))
            ours = whole_hidden(rank, hidden.grad, sp), whole_rows(rank, weight.grad)
            for grad, right, plain in zip(ours, true, eager, strict=True):
                assert relative_error(grad, right) <= max(FLOOR[dtype], 2 * relative_error(plain, right))


def skipped_alike(rank: Rank, inputs, call, upstream, counts, num_gemms, *, sp, strategy, shards="unequal"):
    """The gradients of ``call(hidden, weight, settings)`` are those without the option, by GEMMs over
    ``counts`` alone."""
    grads = []
    for skips in (False, True):
        hidden, weight, settings = shard_of(rank, inputs, sp, shards)
        settings["config"] = FusedCEConfig(strategy, num_chunks=NUM_CHUNKS, skip_zero_upstream=skips)
        made = call(hidden, weight, settings)
        with patch.object(masked_tokens, "ROUND_TO", 1), gemm_flops() as flops:
            made.backward(upstream)
        grads.append((hidden.grad, weight.grad))
    worked_on = largest_parts(counts, rank.size if sp else 1)
    assert flops.get_total_flops() == num_gemms * worked_on * 2 * weight.numel()
    for without, ours in zip(*grads, strict=True):
        assert relative_error(ours, without) < 1e-6


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_ranks_whose_upstream_gradients_differ(rank: Rank, strategy):
    """A token counts on all ranks where it counts on one."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=rank.device)
    upstream, counts = inputs.grad_loss.clone(), inputs.grad_loss != 0
    upstream[:, rank.rank :: 4] = 0.0
    upstream[:, 2::4], counts[:, 2::4] = 0.0, False

    def call(hidden, weight, settings):
        return token_log_probs(hidden, weight, inputs.labels, **settings).log_prob

    num_gemms = 2 if strategy == "store" else 3
    skipped_alike(rank, inputs, call, upstream, counts, num_gemms, sp=False, strategy=strategy)


@on_ranks(2)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("strategy", ["store", "recompute"])
@pytest.mark.parametrize("what", ["a third", "one part whole", "none"])
def test_several_labels_a_token(rank: Rank, what, strategy, sp):
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=rank.device)
    labels = torch.stack((inputs.labels, inputs.labels.roll(1, 1), inputs.labels.roll(3, 1)), -1)
    counts = some_tokens(what, inputs)
    upstream = torch.stack([inputs.grad_loss.roll(at, 1) for at in range(3)], -1)
    upstream.masked_fill_(~counts.unsqueeze(-1), 0.0)[..., 1] = 0.0

    def call(hidden, weight, settings):
        return token_log_probs(hidden, weight, labels, **settings).log_prob

    num_gemms = 2 if strategy == "store" else 3
    skipped_alike(rank, inputs, call, upstream, counts, num_gemms, sp=sp, strategy=strategy)


@on_ranks(2)
@pytest.mark.parametrize("teacher_sp", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("what", ["a third", "one part whole", "none"])
def test_a_teacher_beside_the_student(rank: Rank, what, teacher_sp):
    """With sequence parallelism, the teacher's hidden states of this rank's tokens or of all."""
    inputs = make_inputs("plain", **{**SIZES, "vocab": 100}, dtype=torch.float32, device=rank.device)
    teacher_hidden = inputs.hidden.flip(0)[head.tokens_of(rank, SIZES["s"], teacher_sp)]
    teacher_weight = inputs.weight.roll(1, 1)[rows_of(rank, "equal", 100)]
    counts = some_tokens(what, inputs)
    upstream = inputs.grad_loss.masked_fill(~counts, 0.0)

    def call(*student_and_settings):
        *student, settings = student_and_settings
        settings["teacher_sequence_parallel"] = teacher_sp
        return fused_linear_distillation(*student, teacher_hidden, teacher_weight, **settings).loss

    skipped_alike(rank, inputs, call, upstream, counts, 4, sp=True, strategy="recompute", shards="equal")


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("what", ["a third", "one part whole", "none"])
def test_an_active_mask(rank: Rank, what, sp, dtype):
    """Neither pass works on more tokens than the fullest part has. A gradient outside, on one rank, raises on
    all."""
    inputs = make_inputs("odd-labels", **SIZES, dtype=dtype, device=rank.device)
    parts = rank.size if sp else 1
    active = some_tokens(what, inputs)
    upstreams = {"log_prob": inputs.grad_loss, "entropy": inputs.grad_loss.roll(1, 1)}
    upstreams = {name: grad.masked_fill(~active, 0.0) for name, grad in upstreams.items()}
    hidden, weight, settings = shard_of(rank, inputs, sp)
    forward = partial(
        token_log_probs,
        hidden,
        weight,
        inputs.labels,
        entropy="differentiable",
        active_mask=active,
        config=FusedCEConfig("recompute", num_chunks=NUM_CHUNKS),
        **settings,
    )
    with patch.object(masked_tokens, "ROUND_TO", 1), gemm_flops() as flops:
        made = forward()
        torch.autograd.backward([made.log_prob, made.entropy], list(upstreams.values()))
    worked_on = parts * int(active.t().reshape(parts, -1).sum(1).max())
    assert flops.get_total_flops() == 4 * worked_on * 2 * weight.numel()
    same_on_all_ranks(rank, *made)
    (exact, *true), (eager, *plain) = (plain_outputs(inputs, upstreams, of) for of in (torch.float64, dtype))
    ours = whole_hidden(rank, hidden.grad, sp), whole_rows(rank, weight.grad)
    pairs = list(zip(ours, true, plain, strict=True))
    for name in upstreams:
        values = (getattr(of, name).detach() for of in (made, exact, eager))
        pairs.append(tuple(value.masked_fill(~active, 0.0) for value in values))
        assert not getattr(made, name)[~active].any()
    for value, right, of_eager in pairs:
        assert relative_error(value, right) <= max(FLOOR[dtype], 2 * relative_error(of_eager, right))
    outside = torch.zeros_like(inputs.grad_loss)
    if rank.rank == 0:
        outside[tuple((~active).nonzero()[0])] = 1e-20
    with pytest.raises(RuntimeError, match=r"^1 tokens outside active_mask"):
        forward().entropy.backward(outside)


@on_ranks(2)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("what", ["active_mask", "several labels", "token_weights"])
def test_masks_that_differ(rank: Rank, what, sp):
    """As many tokens on each rank, but others: their statistics would be merged. In every call."""
    inputs = make_inputs("plain", **SIZES, dtype=torch.float32, device=rank.device)
    hidden, weight, settings = shard_of(rank, inputs, sp)
    active = some_tokens("a third", inputs)
    labels = inputs.labels.unsqueeze(-1) if what == "several labels" else inputs.labels

    def call(mask):
        if what == "token_weights":
            config = FusedCEConfig(skip_masked=True)
            fused_linear_cross_entropy(
                hidden, weight, labels, token_weights=mask.float(), config=config, **settings
            )
        else:
            token_log_probs(hidden, weight, labels, active_mask=mask, **settings)

    call(active)
    of_rank = active.clone()
    if rank.rank == 0:
        of_rank[tuple(active.nonzero()[-1])] = False
        of_rank[tuple((~active).nonzero()[0])] = True
    with pytest.raises(ValueError, match="leave out different tokens: 2 are masked on one"):
        call(of_rank)
    call(active)
