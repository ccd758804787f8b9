"""The adapters to slime and miles: the steps of their losses in Megatron's schedules, off and on."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fused_ce.adapter import deferred_logits, miles, slime
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from tests.support import stand_in
from tests.support.megatron import (
    GRADIENT_BOUND,
    HIDDEN,
    INSTALLED,
    NEWEST,
    SEQUENCE,
    VOCAB,
    Model,
    build,
    have_groups,
    of_core,
    positions_and_mask,
)
from tests.support.ranks import Rank, on_ranks

TEMPERATURE = 0.7
#: Of three samples: all tokens, those of the response. The rest of the sequence is padding.
LENGTHS = ((9, 4), (4, 3), (8, 7))
MODELS = {
    "gpt": Model(),
    "gpt tied sp": Model(tied=True, sequence_parallel=True),
    "hybrid sp": Model(family="hybrid", sequence_parallel=True),
    "gpt bf16 sp": Model(dtype=torch.bfloat16, sequence_parallel=True),
}


def calculate_for_slime(
    logits,
    tokens,
    tp_group,
    with_entropy=False,
    chunk_size=-1,
    log_prob_keep_mask=None,
    with_entropy_grad=True,
):
    """The definition, with slime's parameters: ``[T, 1]`` and ``[T]``. The mask is not for the entropy."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    assert isinstance(logits, Tensor) and chunk_size == 5
    z = gather_from_tensor_model_parallel_region(logits)
    kept = z
    if log_prob_keep_mask is not None:
        kept = z.masked_fill(
            ~gather_from_tensor_model_parallel_region(log_prob_keep_mask.float()).bool(), -1e4
        )
    log_prob = kept.log_softmax(-1).gather(-1, tokens[:, None])
    if not with_entropy:
        return log_prob, None
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_prob, entropy if with_entropy_grad else entropy.detach()


def calculate_for_miles(
    logits,
    tokens,
    tp_group,
    with_entropy=False,
    entropy_requires_grad=True,
    chunk_size=-1,
    true_on_policy=False,
    vocab_size=None,
):
    """The same with miles' parameters."""
    return calculate_for_slime(
        logits, tokens, tp_group, with_entropy, chunk_size, with_entropy_grad=entropy_requires_grad
    )


def get_responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths, max_seq_lens=None):
    """Of each sample the rows that predict its response, with miles' parameters and checks."""
    assert logits.dtype == torch.float32 and len(logits.shape) == 3 and logits.size(0) == 1
    rows = logits.squeeze(0)
    if rows.size(-1) > 1:
        rows = rows.div(args.rollout_temperature)
    end = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        yield rows[end - response - 1 : end - 1], tokens[-response:]


def by_slime(module: Any, logits: Any, ids: Tensor, group: Any, entropy: str, keep: Tensor | None) -> Any:
    """All tokens at once, as slime calls it."""
    assert logits.dtype == torch.float32 and len(logits.shape) == 3 and logits.size(0) == 1
    logits = (logits.squeeze(0) / TEMPERATURE).contiguous()
    assert logits.size(0) == SEQUENCE and logits.size(-1) == VOCAB // group.size()
    return module.calculate_log_probs_and_entropy(
        logits,
        ids.roll(-1),
        group,
        with_entropy=entropy != "none",
        with_entropy_grad=entropy == "differentiable",
        chunk_size=5,
        log_prob_keep_mask=keep,
    )


def by_miles(module: Any, logits: Any, ids: Tensor, group: Any, entropy: str, true_on_policy: bool) -> Any:
    """Sample by sample, as miles calls it."""
    totals, responses = zip(*LENGTHS, strict=True)
    made = [
        module.calculate_log_probs_and_entropy(
            rows,
            tokens,
            group,
            with_entropy=entropy != "none",
            entropy_requires_grad=entropy == "differentiable",
            chunk_size=5,
            true_on_policy=true_on_policy,
            vocab_size=None,
        )
        for rows, tokens in module.get_responses(
            logits,
            args=SimpleNamespace(rollout_temperature=TEMPERATURE, true_on_policy_mode=true_on_policy),
            unconcat_tokens=ids[: sum(totals)].split(totals),
            total_lengths=totals,
            response_lengths=responses,
            max_seq_lens=None,
        )
    ]
    assert [log_prob.shape for log_prob, _ in made] == [(length, 1) for length in responses]
    return [None if parts[0] is None else torch.cat(parts) for parts in zip(*made, strict=True)]


#: Adapter's module, what it replaces, the caller.
FRAMEWORKS = {
    "slime": (slime, {slime.FUNCTION: calculate_for_slime}, by_slime),
    "miles": (miles, {miles.CUT: get_responses, miles.FUNCTION: calculate_for_miles}, by_miles),
}


class Seen:
    """Of one model: a pass without gradients, then a training step, both by Megatron's schedule."""

    def __init__(self, model: Model, rank: Rank, log_probs: Any, entropy: str, real: bool) -> None:
        """``real``: with slime's mask, or in miles' true-on-policy mode, which need real logits."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module

        built = build(model, rank)
        caller = built if model.dtype == torch.float32 else Float16Module(built.config, built)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, VOCAB, (1, SEQUENCE), generator=generator).to(rank.device)
        upstream = torch.randn(2, SEQUENCE, generator=generator).to(rank.device)
        positions, causal = positions_and_mask(rank)
        needs: Any = real
        if log_probs.func is by_slime:
            keep = torch.rand(SEQUENCE, VOCAB // rank.size, generator=generator).to(rank.device) < 0.5
            needs = keep if real else None
        self.made: list[tuple[Tensor, Tensor | None]] = []

        def loss(logits: Any, non_loss_data: bool = False) -> Any:
            log_prob, of_entropy = log_probs(logits, ids[0], rank.group, entropy, needs)
            assert log_prob.shape[1:] == (1,)
            self.made.append((log_prob.squeeze(-1), of_entropy))
            if non_loss_data:
                return self.made[-1]
            total = (log_prob.squeeze(-1) * upstream[0, : len(log_prob)]).sum()
            if entropy == "differentiable":
                total = total + (of_entropy * upstream[1, : len(log_prob)]).sum()
            return total, torch.ones((), dtype=torch.int, device=logits.device), {}

        def step(data: Any, model: Any) -> Any:
            return model(ids, positions[:1], causal, labels=None), loss

        run = functools.partial(
            get_forward_backward_func(), forward_step_func=step, data_iterator=None, model=[caller],
            num_microbatches=1, seq_length=SEQUENCE, micro_batch_size=1,
        )  # fmt: skip
        with LogitStorages(vocab_rows=VOCAB // rank.size, hidden_size=HIDDEN) as self.storages:
            run(forward_only=True, collect_non_loss_data=True)
            run(forward_only=False)
        self.gradients = {name: parameter.grad for name, parameter in built.named_parameters()}


@on_ranks(of_core(2, NEWEST), of_core(1, NEWEST, pytest.mark.rest), of_core(2, INSTALLED))
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("name", "entropy", "real"),
    [
        ("gpt", "none", False),
        ("gpt tied sp", "differentiable", False),
        ("gpt tied sp", "detached", True),
        ("hybrid sp", "detached", False),
        ("gpt bf16 sp", "detached", False),
    ],
)
def test_off_against_on(rank: Rank, framework, name, entropy, real):
    import megatron_fused_ce

    adapter, members, caller = FRAMEWORKS[framework]
    serve = getattr(adapter, f"serve_{framework}")
    model = MODELS[name]
    if rank.size == 1:
        model = replace(model, sequence_parallel=False)
    have_groups(rank.size)
    counters = megatron_fused_ce.counters()
    megatron_fused_ce.disable()
    with pytest.MonkeyPatch.context() as patch:
        log_probs = functools.partial(caller, stand_in.module(patch, adapter.MODULE, **members))
        off = Seen(model, rank, log_probs, entropy, real)
        patch.setattr(deferred_logits, "_takes_shards", False)
        precision = "activations" if model.dtype == torch.bfloat16 else "auto"
        config = megatron_fused_ce.FusedCEConfig(
            strategy="recompute", num_chunks=6, logit_precision=precision
        )
        serve(object(), config)
        serve(object(), config)  # twice is once
        counters.reset()
        on = Seen(model, rank, log_probs, entropy, real)
        megatron_fused_ce.disable()
    assert (counters.fused, counters.materialised, counters.stock) == ((0, 2, 0) if real else (2, 0, 0))
    bound = 2e-7 if model.dtype == torch.float32 else 1e-2
    for got, right in zip(on.made, off.made, strict=True):
        assert [x is None for x in got] == [x is None for x in right] == [False, entropy == "none"]
        for mine, theirs in zip(got, right, strict=True):
            if theirs is None:
                continue
            assert mine.dtype == torch.float32 and mine.shape == theirs.shape
            assert mine.requires_grad == theirs.requires_grad
            assert (mine.double() - theirs.double()).norm() <= bound * theirs.double().norm()
    bound = GRADIENT_BOUND if model.dtype == torch.float32 else 2e-2
    for parameter, right in off.gradients.items():
        norm = right.double().norm()
        assert norm > 0, f"{parameter} is zero: the case tests nothing"
        assert (on.gradients[parameter].double() - right.double()).norm() <= bound * norm, parameter
    # Stock holds [T, V / R] in fp32 at least, the head some of six chunks (entropy takes a third one).
    everything = 4 * SEQUENCE * VOCAB // rank.size
    assert off.storages.peak_bytes >= everything
    if not real and entropy != "differentiable":
        assert 0 < on.storages.peak_bytes <= everything * 4 / 6


@pytest.mark.parametrize(
    ("framework", "name"), [("slime", slime.FUNCTION), ("miles", miles.FUNCTION), ("miles", miles.CUT)]
)
def test_another_signature_is_refused(monkeypatch, framework, name):
    adapter, members, _ = FRAMEWORKS[framework]
    older = lambda logits, tokens, tp_group, with_entropy=False, chunk_size=-1: None  # noqa: E731
    module = stand_in.module(monkeypatch, adapter.MODULE, **{**members, name: older})
    refused(
        monkeypatch, framework, module, rf"{name} takes \['logits'.*expected .*leave serve_{framework} out"
    )
    assert getattr(module, name) is older


def test_a_recomputed_loss_of_miles_is_refused(monkeypatch):
    """Its checkpoint takes tensors alone for inputs with a gradient."""
    module = stand_in.module(monkeypatch, miles.MODULE, **FRAMEWORKS["miles"][1])
    args = SimpleNamespace(recompute_loss_function=True)
    refused(monkeypatch, "miles", module, "--recompute-loss-function gives no gradient", args)


def refused(monkeypatch, framework, module, words, *args) -> None:
    """Nothing is changed then."""
    import megatron_fused_ce

    before = dict(vars(module))
    with pytest.raises(RuntimeError, match=words):
        getattr(FRAMEWORKS[framework][0], f"serve_{framework}")(*args)
    assert vars(module) == before
    assert not deferred_logits.for_caller(torch.zeros(1))
    assert megatron_fused_ce.adapter.switch._enabled_config is None


@on_ranks(of_core(2, NEWEST))
def test_weights_that_were_changed_before_their_log_probs(rank: Rank):
    """Logits were computed at the call; the fused head computes only now, and would take the new ones."""
    import megatron_fused_ce

    have_groups(rank.size)
    ids = torch.zeros(1, SEQUENCE, dtype=torch.int64, device=rank.device)
    with pytest.MonkeyPatch.context() as patch:
        module = stand_in.module(patch, slime.MODULE, **{slime.FUNCTION: calculate_for_slime})
        patch.setattr(deferred_logits, "_takes_shards", False)
        slime.serve_slime(object(), megatron_fused_ce.FusedCEConfig())
        model = build(Model(), rank)
        positions, causal = positions_and_mask(rank)
        with torch.no_grad():
            logits = model(ids, positions[:1], causal, labels=None)
            model.output_layer.weight.mul_(1.5)
            with pytest.raises(RuntimeError, match="changed in place between its call"):
                by_slime(module, logits, ids[0], rank.group, "none", None)
        megatron_fused_ce.disable()
