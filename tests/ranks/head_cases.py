"""The op over a tensor-parallel group: each rank's part of the truth over the whole vocabulary."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_token_outputs,
    planner,
    vocab_parallel,
)
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.testing.reference import (
    LOSS_OPTIONS,
    HeadResult,
    assert_close,
    assert_within,
    make_inputs,
    make_teacher,
    plain_distillation,
    plain_outputs,
    relative_error,
    truth,
)
from megatron_fused_ce.token_outputs import OUTPUT_CHOICES
from tests.ranks.runner import Rank

STRATEGIES = ("recompute", "store", "grad_in_forward")
UNEQUAL = {1: (97,), 2: (64, 33), 4: (1, 50, 13, 33)}


def bounds(rank: Rank, vocab: int, unequal: bool) -> list[int]:
    sizes = UNEQUAL[rank.size] if unequal else [vocab // rank.size] * rank.size
    return [sum(sizes[:i]) for i in range(rank.size + 1)]


def known_weights(config, inputs, flat):
    """Weights that the upstream gradient is -3 times of, for the strategy that needs them."""
    if config.strategy != "grad_in_forward":
        return None
    weights = inputs.grad_loss / -3.0
    return weights.t().reshape(-1) if flat else weights


def run_sharded(
    rank: Rank, inputs, config, *, sequence_parallel=False, unequal=False, named=False, flat=False
):
    """Run on this rank's shard and part, collect the whole result on every rank."""
    vocab = inputs.weight.shape[0]
    edges = bounds(rank, vocab, unequal)
    assert edges[-1] == vocab
    rows = slice(edges[rank.rank], edges[rank.rank + 1])
    weight = inputs.weight[rows].clone().requires_grad_()
    s, b, _ = inputs.hidden.shape
    tokens = slice(0, s)
    if sequence_parallel:
        tokens = slice(rank.rank * s // rank.size, (rank.rank + 1) * s // rank.size)
    hidden = inputs.hidden[tokens].clone().requires_grad_()
    given, labels = hidden, inputs.labels
    if flat:
        given, labels = hidden.flatten(0, 1), inputs.labels.t().reshape(-1)
    loss = fused_linear_cross_entropy(
        given,
        weight,
        labels,
        tp_group=rank.group,
        sequence_parallel=sequence_parallel,
        vocab_start=rows.start if named else None,
        config=config,
        token_weights=known_weights(config, inputs, flat),
    )
    if flat:
        loss = loss.view(s, b).t()
    loss.backward(inputs.grad_loss)

    parts = [None] * rank.size
    dist.all_gather_object(parts, (loss.detach().cpu(), hidden.grad.cpu(), weight.grad.cpu()))
    losses, hiddens, weights = zip(*parts, strict=True)
    assert all(torch.equal(losses[0], other) for other in losses), "the ranks' losses differ"
    if not sequence_parallel and rank.size > 1:
        assert all(torch.equal(hiddens[0], other) for other in hiddens)
    grad_hidden = torch.cat(hiddens) if sequence_parallel else hiddens[0]
    whole = HeadResult(losses[0], grad_hidden, torch.cat(weights))
    return HeadResult(*(part.to(rank.device) for part in whole))


def against_fp64(
    rank,
    *,
    kind,
    dtype,
    strategy,
    sequence_parallel,
    unequal,
    named,
    flat=False,
    merge="auto",
    options=None,
):
    vocab = 97 if unequal else 100
    inputs = make_inputs(
        kind, s=24, b=3, hidden_size=32, vocab=vocab, dtype=dtype, device=rank.device,
        logit_scale=(options or {}).get("logit_scale", 1.0),
    )  # fmt: skip
    # Up to six chunks of unequal size: more than any ring of buffers has room for.
    config = FusedCEConfig(
        strategy=strategy,
        chunk_tokens=28 if merge == "auto" else 12,
        merge=merge,
        **(options or {}),
    )
    inputs = replace(inputs, config=config)
    result = run_sharded(
        rank, inputs, config, sequence_parallel=sequence_parallel, unequal=unequal, named=named,
        flat=flat,
    )  # fmt: skip
    assert_close(result, inputs)


def shard_of(rank: Rank, inputs, sequence_parallel, **settings):
    """Leaves of this rank's tokens and rows of 97 classes, and the other arguments of a call."""
    edges = bounds(rank, inputs.weight.shape[0], True)
    weight = inputs.weight[edges[rank.rank] : edges[rank.rank + 1]].clone().requires_grad_()
    hidden = inputs.hidden.chunk(rank.size)[rank.rank] if sequence_parallel else inputs.hidden
    settings |= {"tp_group": rank.group, "sequence_parallel": sequence_parallel}
    return hidden.clone().requires_grad_(), weight, settings


def whole(rank: Rank, hidden, weight, sequence_parallel):
    """Gradients of all tokens and all rows, on every rank."""
    parts = [None] * rank.size
    dist.all_gather_object(parts, (hidden.grad.cpu(), weight.grad.cpu()))
    hiddens, weights = zip(*parts, strict=True)
    grad_hidden = torch.cat(hiddens) if sequence_parallel else hiddens[0]
    return grad_hidden.to(rank.device), torch.cat(weights).to(rank.device)


def on_every_rank_alike(rank: Rank, made):
    for value in made:
        if value is not None:
            parts = [None] * rank.size
            dist.all_gather_object(parts, value.detach().cpu())
            assert all(torch.equal(parts[0], other) for other in parts)


def token_outputs(rank, *, strategy, sequence_parallel, merge):
    """Every output and the gradients of all three, a gap of 30 between the shards' logits."""
    inputs = make_inputs(
        "plain", s=24, b=3, hidden_size=32, vocab=97, dtype=torch.float32, device=rank.device
    )
    inputs.hidden[..., 0] = 1.0
    inputs.weight[::2, 0] += 30.0
    generator = torch.Generator().manual_seed(3)
    upstreams = {
        name: torch.randn(3, 24, generator=generator).to(rank.device)
        for name in ("log_prob", "lse", "entropy")
    }
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28, merge=merge)
    hidden, weight, settings = shard_of(rank, inputs, sequence_parallel, config=config)
    made = fused_linear_token_outputs(hidden, weight, inputs.labels, OUTPUT_CHOICES, **settings)
    torch.autograd.backward([getattr(made, name) for name in upstreams], list(upstreams.values()))
    on_every_rank_alike(rank, made)
    exact, *true_grads = plain_outputs(inputs, upstreams, torch.float64)
    for name in upstreams:
        error = (getattr(made, name).detach().double() - getattr(exact, name)).abs().max()
        assert error < 2e-6 * 30, (name, error)
    assert torch.equal(made.predicted, exact.predicted)
    assert torch.equal(made.correct, exact.correct)
    grads = whole(rank, hidden, weight, sequence_parallel)
    for value, true in zip(grads, true_grads, strict=True):
        assert relative_error(value, true) < 4e-6


def outputs_without_gradients(rank, *, strategy, sequence_parallel):
    """Beside grad_in_forward's gradients too; equal logits: the lowest id of the first shard is predicted."""
    inputs = make_inputs(
        "plain", s=24, b=3, hidden_size=32, vocab=97, dtype=torch.float32, device=rank.device
    )
    inputs.hidden.mul_(4).round_()  # whole numbers: equal whatever the order of a shard's sums
    inputs.weight.fill_(1.0)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28)
    hidden, weight, settings = shard_of(
        rank, inputs, sequence_parallel, config=config, token_weights=inputs.grad_loss
    )
    made = fused_linear_token_outputs(
        hidden, weight, inputs.labels, OUTPUT_CHOICES, differentiable=False, **settings
    )
    made.loss.backward(inputs.grad_loss)
    on_every_rank_alike(rank, made)
    assert made.predicted.max() == 0 and made.correct.all()
    assert (made.entropy - math.log(97)).abs().max() < 1e-5
    grads = whole(rank, hidden, weight, sequence_parallel)
    assert_close(HeadResult(made.loss.detach(), *grads), inputs)


def masked_tokens_skipped(rank, *, strategy, sequence_parallel):
    """The parts of the ranks keep different numbers of tokens, one of them none."""
    inputs = make_inputs(
        "plain", s=24, b=3, hidden_size=32, vocab=97, dtype=torch.float32, device=rank.device
    )
    masked = torch.zeros_like(inputs.labels, dtype=torch.bool)
    masked[:, :6] = True
    masked[0, 10::2] = True
    inputs.grad_loss.masked_fill_(masked, 0.0)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28, skip_masked=True)
    hidden, weight, settings = shard_of(
        rank, inputs, sequence_parallel, config=config, token_weights=inputs.grad_loss / -3.0
    )
    with patch("megatron_fused_ce.masked_tokens.ROUND_TO", 4):
        loss = fused_linear_cross_entropy(hidden, weight, inputs.labels, **settings)
        loss.backward(inputs.grad_loss)
    on_every_rank_alike(rank, (loss,))
    exact = truth(inputs)
    torch.testing.assert_close(
        loss.detach().double(), exact.loss.masked_fill(masked, 0.0), rtol=2e-6, atol=2e-6
    )
    grads = whole(rank, hidden, weight, sequence_parallel)
    for value, true in zip(grads, exact[1:], strict=True):
        assert relative_error(value, true) < 4e-6
    at = masked.t()
    assert torch.equal(grads[0][at], torch.zeros_like(grads[0][at]))


def distillation(rank, *, strategy, sequence_parallel, merge):
    """Entries of one id on both sides of a shard's edge, and outside of the vocabulary."""
    inputs = make_inputs(
        "plain", s=24, b=3, hidden_size=32, vocab=97, dtype=torch.float32, device=rank.device
    )
    ids, log_probs = make_teacher(inputs, 6)
    config = FusedCEConfig(strategy=strategy, chunk_tokens=28, merge=merge)
    weights = inputs.grad_loss / -3.0 if strategy == "grad_in_forward" else None
    hidden, weight, settings = shard_of(
        rank, inputs, sequence_parallel, config=config, token_weights=weights
    )
    loss = fused_linear_distillation(hidden, weight, ids, log_probs, **settings)
    loss.backward(inputs.grad_loss)
    on_every_rank_alike(rank, (loss,))
    result = HeadResult(loss.detach(), *whole(rank, hidden, weight, sequence_parallel))
    exact = plain_distillation(inputs, ids, log_probs, torch.float64)
    eager = plain_distillation(inputs, ids, log_probs, torch.float32)
    assert_within(result, exact, eager, torch.float32)


def exp_dtype(rank):
    """What the scaled-exp GEMM runs in: bf16 on GPUs, fp32 by Triton's interpreter."""
    return torch.bfloat16 if rank.device.type == "cuda" else torch.float32


def exponentiating_product(
    rank, *, kind, strategy, sequence_parallel, merge="auto", named=True, options=None
):
    """Its statistics and label entries differ from shard to shard."""
    inputs = make_inputs(
        kind, s=24, b=3, hidden_size=32, vocab=512, dtype=exp_dtype(rank), device=rank.device
    )
    config = FusedCEConfig(
        strategy=strategy,
        chunk_tokens=16,
        logits_backend="scaled_exp",
        merge=merge,
        **(options or {}),
    )
    inputs = replace(inputs, config=config)
    result = run_sharded(rank, inputs, config, sequence_parallel=sequence_parallel, named=named)
    assert_close(result, inputs)


def gap_between_shards(rank, *, logits_backend="gemm_rows", gap=-600.0):
    """Shards 600 nats apart: the far ones vanish without NaN."""
    dtype = exp_dtype(rank) if logits_backend == "scaled_exp" else torch.float32
    # Tokens enough for an error in norm: all that is left of one is its label's entry, which two bf16
    # roundings can move by 7.8e-3.
    inputs = make_inputs(
        "plain", s=96, b=1, hidden_size=16, vocab=512, dtype=dtype, device=rank.device
    )
    edges = bounds(rank, 512, False)
    inputs.hidden[..., 0] = 1.0
    for index in range(rank.size):
        inputs.weight[edges[index] : edges[index + 1], 0] = gap * index
    for strategy in STRATEGIES:
        config = FusedCEConfig(strategy=strategy, num_chunks=2, logits_backend=logits_backend)
        result = run_sharded(rank, inputs, config)
        if dtype == torch.float32 and logits_backend == "scaled_exp":
            # Exponents of up to 4 * 600 * log2(e) rounded to 24 bits, twice: fp32 is for tests only.
            for part, true in zip(result, truth(inputs), strict=True):
                assert relative_error(part, true) < 2 * 3463 * 2.0**-24 * math.log(2)
        else:
            assert_close(result, inputs)


def outlier_in_one_shard(rank, *, strategy, sequence_parallel):
    """A logit of 100 that the sampled rows miss: the other shards' rows follow into its unit."""
    dtype, outlier = exp_dtype(rank), 100.0
    inputs = make_inputs(
        "plain", s=96, b=1, hidden_size=16, vocab=512, dtype=dtype, device=rank.device
    )
    inputs.hidden[..., 0] = 1.0
    inputs.weight[:, 0] = 0.0
    inputs.weight[301] = 0.0
    inputs.weight[301, 0] = outlier
    # Half of the tokens do not meet it.
    inputs.hidden[48:, 0, 0] = 0.0
    config = FusedCEConfig(strategy=strategy, num_chunks=3, logits_backend="scaled_exp")
    result = run_sharded(rank, inputs, config, sequence_parallel=sequence_parallel, named=True)
    if dtype == torch.float32:
        for part, true in zip(result, truth(inputs), strict=True):
            assert relative_error(part, true) < 2 * outlier * 2.0**-24
    else:
        assert_close(result, inputs)


class AtItsWait:
    """A collective that reads its input and writes its output when it is waited for, no sooner."""

    def __init__(self, collective, tensors, options):
        self.run = functools.partial(collective, *tensors, **options)

    def wait(self):
        if self.run is not None:
            self.run()
        self.run = None


def late_collectives(rank, *, strategy, sequence_parallel, merge, logits_backend):
    """Nothing that is under way is overwritten, and nothing is read that has not been waited for."""
    inputs = make_inputs(
        "plain", s=24, b=2, hidden_size=32, vocab=512, dtype=torch.float32, device=rank.device
    )
    config = FusedCEConfig(
        strategy=strategy, chunk_tokens=8, merge=merge, logits_backend=logits_backend
    )
    with patch.object(vocab_parallel, "_start", lambda c, *t, **o: AtItsWait(c, t, o)):
        result = run_sharded(rank, inputs, config, sequence_parallel=sequence_parallel, named=True)
    assert_close(result, inputs)


def nan_on_one_shard(rank):
    """A NaN that only one rank can see is a NaN loss on every rank, and only for its token."""
    inputs = make_inputs(
        "plain", s=8, b=1, hidden_size=16, vocab=100, dtype=torch.float32, device=rank.device
    )
    inputs.weight[99, 3] = float("nan")  # in the last shard
    inputs.hidden[..., 3] = 0.0
    inputs.hidden[5, 0, 3] = 1.0
    edges = bounds(rank, 100, False)
    loss = fused_linear_cross_entropy(
        inputs.hidden, inputs.weight[edges[rank.rank] : edges[rank.rank + 1]], inputs.labels,
        tp_group=rank.group, config=FusedCEConfig(num_chunks=3),
    )  # fmt: skip
    assert torch.isnan(loss).all()  # 0 * NaN is NaN: every token meets that row


def argmax_of_each_shard(rank):
    inputs = make_inputs(
        "plain", s=8, b=2, hidden_size=16, vocab=100, dtype=torch.float32, device=rank.device
    )
    edges = bounds(rank, 100, False)
    weight = inputs.weight[edges[rank.rank] : edges[rank.rank + 1]]
    for sequence_parallel in (False, True):
        hidden = inputs.hidden
        if sequence_parallel:
            hidden = hidden.chunk(rank.size)[rank.rank]
        out = linear_cross_entropy(
            hidden, weight, inputs.labels, tp_group=rank.group,
            sequence_parallel=sequence_parallel, config=FusedCEConfig(num_chunks=3),
            with_argmax=True,
        )  # fmt: skip
        expected = (inputs.hidden @ weight.t()).flatten(0, 1).max(-1)
        assert torch.equal(out.local_argmax, expected.indices)
        torch.testing.assert_close(out.local_max, expected.values)


def frozen_operands_and_no_grad(rank):
    """Every requires_grad subset under sequence parallelism, both strategies, backward twice."""
    inputs = make_inputs(
        "plain", s=8, b=2, hidden_size=16, vocab=100, dtype=torch.float32, device=rank.device
    )
    edges = bounds(rank, 100, False)
    exact = truth(inputs)
    rows = slice(edges[rank.rank], edges[rank.rank + 1])
    mine = slice(rank.rank * 8 // rank.size, (rank.rank + 1) * 8 // rank.size)
    for strategy in ("recompute", "store"):
        for needs_hidden, needs_weight in ((True, False), (False, True), (True, True)):
            hidden = inputs.hidden[mine].clone().requires_grad_(needs_hidden)
            weight = inputs.weight[rows].clone().requires_grad_(needs_weight)
            loss = fused_linear_cross_entropy(
                hidden, weight, inputs.labels, tp_group=rank.group, sequence_parallel=True,
                config=FusedCEConfig(strategy=strategy, num_chunks=2, debug_checks=True),
            )  # fmt: skip
            loss.backward(inputs.grad_loss, retain_graph=True)
            loss.backward(inputs.grad_loss)
            assert (hidden.grad is None, weight.grad is None) == (
                not needs_hidden,
                not needs_weight,
            )
            if needs_hidden:
                assert relative_error(hidden.grad, 2 * exact.grad_hidden[mine]) < 2e-6
            if needs_weight:
                assert relative_error(weight.grad, 2 * exact.grad_weight[rows]) < 2e-6
        with torch.no_grad():
            loss = fused_linear_cross_entropy(
                inputs.hidden[mine], inputs.weight[rows], inputs.labels, tp_group=rank.group,
                sequence_parallel=True, config=FusedCEConfig(strategy=strategy),
            )  # fmt: skip
        assert loss.grad_fn is None
        assert relative_error(loss, exact.loss) < 2e-6


def empty_batch(rank):
    hidden = torch.empty(0, 2, 8, device=rank.device, requires_grad=True)
    weight = torch.randn(5, 8, device=rank.device, requires_grad=True)
    labels = torch.empty(2, 0, dtype=torch.int64, device=rank.device)
    loss = fused_linear_cross_entropy(
        hidden, weight, labels, tp_group=rank.group, sequence_parallel=True
    )
    loss.sum().backward()
    assert loss.shape == (2, 0) and weight.grad.abs().sum() == 0


def one_call(rank, group, **changes):
    """A small call that one rank makes with other arguments than the rest."""
    arguments = {
        "hidden": torch.ones(8, 1, 4, device=rank.device),
        "weight": torch.ones(5, 4, device=rank.device),
        "labels": torch.zeros(1, 8, dtype=torch.int64, device=rank.device),
        "tp_group": group,
        "config": FusedCEConfig(num_chunks=2),
    }
    return linear_cross_entropy(**{**arguments, **changes})


def disagreement(rank, changes, words, debug_call):
    """A fresh group's first call (or a later one under debug_checks) where the last rank differs."""
    if rank.size == 1:
        return
    group = dist.new_group(list(range(rank.size)))
    odd_one = rank.rank == rank.size - 1
    debug = {}
    if debug_call:
        one_call(rank, group, config=FusedCEConfig(num_chunks=2, debug_checks=True))
        debug = {"config": FusedCEConfig(num_chunks=2, debug_checks=True)}
    made = {name: make(rank) for name, make in changes.items()} if odd_one else {}
    try:
        one_call(rank, group, **{**debug, **made})
    except (TypeError, ValueError) as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError("no error on this rank")


def other_shards_over_the_same_group(rank):
    """A head with unequal shards, then equal ones as small as the smallest: planned alike on every rank."""
    group = dist.new_group(list(range(rank.size)))
    with patch.object(planner, "plan", wraps=planner.plan) as plan:
        for rows in (5 + 40 * rank.rank, 5, 5 + 3 * rank.rank, 9):
            one_call(rank, group, weight=torch.ones(rows, 4, device=rank.device))
    planned, last = [call.args[0].num_rows for call in plan.call_args_list], rank.size - 1
    assert planned == [5 + 40 * last, 5, 5 + 3 * last, 9], planned


def overlapping_shards(rank):
    if rank.size == 1:
        return
    group = dist.new_group(list(range(rank.size)))
    try:
        one_call(rank, group, vocab_start=0)
    except ValueError as error:
        assert "overlap" in str(error), str(error)
    else:
        raise AssertionError("no error on this rank")


def more_real_tokens_than_rows(rank):
    """Five rows a rank."""
    group = dist.new_group(list(range(rank.size)))
    one_call(rank, group, config=FusedCEConfig(true_vocab_size=5 * rank.size))
    group = dist.new_group(list(range(rank.size)))
    try:
        one_call(rank, group, config=FusedCEConfig(true_vocab_size=5 * rank.size + 1))
    except ValueError as error:
        assert f"the vocabulary has {5 * rank.size} rows" in str(error), str(error)
    else:
        raise AssertionError("no error on this rank")


def unchecked_calls_cost_no_check(rank):
    """After the first call no agreement is exchanged: a changed option passes unseen, by design."""
    group = dist.new_group(list(range(rank.size)))
    one_call(rank, group)
    one_call(rank, group, config=FusedCEConfig(num_chunks=2, logit_scale=1.0 + rank.rank))


CASES = {
    "shards 600 nats apart": gap_between_shards,
    "NaN in one shard": nan_on_one_shard,
    "argmax of each shard": argmax_of_each_shard,
    "frozen operands, no_grad, backward twice": frozen_operands_and_no_grad,
    "empty batch": empty_batch,
    "overlapping vocab_start": overlapping_shards,
    "other shards over the same group": other_shards_over_the_same_group,
    "more real tokens than rows": more_real_tokens_than_rows,
    "later calls are not checked": unchecked_calls_cost_no_check,
}
for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    for _strategy in STRATEGIES:
        for _sp in (False, True):
            CASES[f"plain {_dtype} {_strategy} sp={_sp} equal shards"] = functools.partial(
                against_fp64, kind="plain", dtype=_dtype, strategy=_strategy,
                sequence_parallel=_sp, unequal=False, named=_sp,
            )  # fmt: skip
for _kind in ("peaked", "high", "low", "wide", "equal", "odd-labels"):
    for _sp in (False, True):
        CASES[f"{_kind} bf16 sp={_sp} unequal shards"] = functools.partial(
            against_fp64, kind=_kind, dtype=torch.bfloat16, strategy="recompute",
            sequence_parallel=_sp, unequal=True, named=_sp, flat=_sp,
        )  # fmt: skip
for _gap in (-600.0, 600.0):
    CASES[f"shards {_gap} nats apart, scaled-exp GEMM"] = functools.partial(
        gap_between_shards, logits_backend="scaled_exp", gap=_gap
    )
for _strategy in STRATEGIES:
    for _kind in ("plain", "peaked", "odd-labels"):
        for _sp in (False, True):
            CASES[f"scaled-exp GEMM, {_kind} {_strategy} sp={_sp}"] = functools.partial(
                exponentiating_product, kind=_kind, strategy=_strategy, sequence_parallel=_sp
            )
    for _sp in (False, True):
        CASES[f"an outlier in one shard, {_strategy} sp={_sp}"] = functools.partial(
            outlier_in_one_shard, strategy=_strategy, sequence_parallel=_sp
        )
        CASES[f"two all-reduces, scaled-exp GEMM {_strategy} sp={_sp}"] = functools.partial(
            exponentiating_product, kind="odd-labels", strategy=_strategy, sequence_parallel=_sp,
            merge="all_reduce",
        )  # fmt: skip
        CASES[f"two all-reduces, rows {_strategy} sp={_sp}"] = functools.partial(
            against_fp64, kind="peaked", dtype=torch.bfloat16, strategy=_strategy,
            sequence_parallel=_sp, unequal=True, named=True, merge="all_reduce",
        )  # fmt: skip
for _strategy in STRATEGIES:
    for _sp, _merge in ((False, "packed"), (True, "packed"), (True, "all_reduce")):
        CASES[f"collectives at their wait: {_strategy} sp={_sp} {_merge}"] = functools.partial(
            late_collectives, strategy=_strategy, sequence_parallel=_sp, merge=_merge,
            logits_backend="gemm_rows",
        )  # fmt: skip
for _name, _options in (
    ("z-loss", {"z_loss": 1e-2}),
    ("softcap", {"logit_softcap": 5.0}),
    # Two of four shards, or all but a part of the first of two, are padding.
    ("masked padding", {"true_vocab_size": 200}),
):
    for _strategy in STRATEGIES:
        for _sp in (False, True):
            CASES[f"scaled-exp GEMM with {_name}, {_strategy} sp={_sp}"] = functools.partial(
                exponentiating_product, kind="odd-labels", strategy=_strategy,
                sequence_parallel=_sp, merge="packed" if _sp else "all_reduce", named=_sp,
                options=_options,
            )  # fmt: skip
for _name, _options in {
    **LOSS_OPTIONS,
    "logit scale": {"logit_scale": 0.25},
    "logits rounded": {"logit_precision": "activations"},
}.items():
    for _strategy in STRATEGIES:
        for _sp in (False, True):
            # Masked padding leaves a shard without a column that takes part, at two ranks and at four.
            CASES[f"{_name}, {_strategy} sp={_sp}"] = functools.partial(
                against_fp64, kind="odd-labels", dtype=torch.float32, strategy=_strategy,
                sequence_parallel=_sp, unequal=True, named=not _sp,
                merge="packed" if _sp else "all_reduce", options=_options,
            )  # fmt: skip
for _strategy in STRATEGIES:
    for _sp in (False, True):
        for _merge in ("packed", "all_reduce"):
            if _strategy != "grad_in_forward":
                CASES[f"outputs, {_strategy} sp={_sp} {_merge}"] = functools.partial(
                    token_outputs, strategy=_strategy, sequence_parallel=_sp, merge=_merge
                )
            CASES[f"distillation, {_strategy} sp={_sp} {_merge}"] = functools.partial(
                distillation, strategy=_strategy, sequence_parallel=_sp, merge=_merge
            )
        CASES[f"masked tokens skipped, {_strategy} sp={_sp}"] = functools.partial(
            masked_tokens_skipped, strategy=_strategy, sequence_parallel=_sp
        )
        CASES[f"outputs without gradients, {_strategy} sp={_sp}"] = functools.partial(
            outputs_without_gradients, strategy=_strategy, sequence_parallel=_sp
        )
_BAD = {
    "outputs": (
        {"outputs": lambda rank: ("lse", "entropy")},
        "disagree on outputs beside the loss",
    ),
    "tokens": (
        {
            "hidden": lambda rank: torch.ones(6, 1, 4, device=rank.device),
            "labels": lambda rank: torch.zeros(1, 6, dtype=torch.int64, device=rank.device),
        },
        "disagree on tokens in hidden",
    ),
    "chunking": ({"config": lambda rank: FusedCEConfig(num_chunks=3)}, "disagree on"),
    "merge": (
        {"config": lambda rank: FusedCEConfig(num_chunks=2, merge="all_reduce")},
        "disagree on merge",
    ),
    "z-loss": (
        {"config": lambda rank: FusedCEConfig(num_chunks=2, z_loss=1e-4)},
        "disagree on z_loss",
    ),
    "bad shape": ({"hidden": lambda rank: torch.ones(8, 1, 3, device=rank.device)}, "H = 3"),
    "bad dtype": ({"labels": lambda rank: torch.ones(1, 8, device=rank.device)}, "expected int64"),
}
for _name, (_changes, _words) in _BAD.items():
    for _debug in (False, True):
        if _debug and "config" in _changes:
            continue  # debug_checks must be given on all ranks
        CASES[f"one rank differs: {_name}, {'debug call' if _debug else 'first call'}"] = (
            functools.partial(disagreement, changes=_changes, words=_words, debug_call=_debug)
        )
