"""The log-probabilities of Megatron-LM's train_rl.py with the flag off and on, by a caller with its steps.

The caller is tests/support/rl_utils.py. What was run with Megatron-LM's own: docs/megatron.md.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fused_ce.testing.collectives import Call, Collectives
from megatron_fused_ce.testing.live_storages import LogitStorages
from tests.parallel.test_pipeline import Pipeline
from tests.parallel.test_pipeline import build as build_pipeline
from tests.support import rl_utils
from tests.support.megatron import (
    BATCH,
    GRADIENT_BOUND,
    HIDDEN,
    INSTALLED,
    NEWEST,
    SEQUENCE,
    VOCAB,
    Model,
    both_cores,
    build,
    core_version,
    have_groups,
    needs_core,
    of_core,
    rollout,
)
from tests.support.ranks import Rank, on_ranks

#: Norm-relative, of log-probabilities in fp32.
BOUND = 2e-7
CHUNKS = 6

MODELS = {
    "gpt": Model(),
    "gpt store": Model(strategy="store"),
    "gpt grad_in_forward tied sp": Model(strategy="grad_in_forward", tied=True, sequence_parallel=True),
    "gpt bf16 sp": Model(dtype=torch.bfloat16, sequence_parallel=True),
    "hybrid tied sp": Model(family="hybrid", tied=True, sequence_parallel=True),
    # Since 0.19 heads of multi-token prediction are trained in get_logprobs too.
    "gpt mup mtp 1": Model(mup=True, mtp=1),
}


@contextlib.contextmanager
def patched_caller() -> Any:
    """The caller as the import hook leaves Megatron's."""
    from megatron_fused_ce.adapter import rl_logprobs

    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_logprobs", "selective_log_softmax"):
            patch.setattr(rl_utils, name, getattr(rl_utils, name))
        rl_logprobs.patch(rl_utils)
        yield


def tokens_of(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and positions ``[b, s]``, and an upstream gradient for each log-probability."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    upstream = torch.randn(BATCH, SEQUENCE - 1, generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return tokens.to(rank.device), positions.to(rank.device), upstream.to(rank.device)


def on_model(model: Model, built: Any) -> Any:
    """As Megatron wraps it: half-precision models in Float16Module."""
    from megatron.core.transformer.module import Float16Module

    return built if model.dtype == torch.float32 else Float16Module(built.config, built)


class Seen:
    """What one model gives: log-probabilities of three passes, gradients, logits held, collectives."""

    def __init__(self, model: Model, rank: Rank) -> None:
        tokens, positions, upstream = tokens_of(rank)
        built = build(model, rank)
        caller = on_model(model, built)
        self.generated = None
        if core_version() >= (0, 19) or not model.mtp:
            self.generated = rollout(built, rank) if model.dtype == torch.float32 else None
        caller.train()
        hidden: list[torch.Tensor] = []

        def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
            hidden.append(output)
            output.retain_grad()

        hook = built.decoder.register_forward_hook(keep)
        with (
            LogitStorages(vocab_rows=VOCAB // rank.size, hidden_size=HIDDEN) as self.shards,
            LogitStorages(vocab_rows=VOCAB, hidden_size=HIDDEN) as self.gathered,
            Collectives({rank.group: "tp"}) as issued,
        ):
            self.trained = rl_utils.get_logprobs(caller, tokens, positions)
            self.trained.backward(upstream.to(self.trained.dtype))
        hook.remove()
        self.calls = issued.calls
        self.gradients = {name: parameter.grad for name, parameter in built.named_parameters()}
        self.gradients["hidden states"] = hidden[0].grad
        caller.eval()
        # The last two as train_rl.py asks for them, and as upstream's tests do: no gradient either way.
        with torch.no_grad():
            self.old = rl_utils.get_logprobs(caller, tokens, positions, no_grad=True)
        self.reference = rl_utils.get_logprobs(caller, tokens, positions, no_grad=True)


def largest(calls: list[Call]) -> int:
    """Elements of the largest tensor that these collectives moved."""
    return max((torch.Size(shape).numel() for call in calls for shape in call.shapes), default=0)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 2e-7 in fp32, within one ulp in bf16."""
    assert got.dtype == expected.dtype and got.shape == expected.shape == (BATCH, SEQUENCE - 1)
    if expected.dtype == torch.bfloat16:
        # All are negative: neighbours in bf16 are neighbours as integers.
        assert (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max() <= 1
    else:
        difference = (got.double() - expected.double()).norm() / expected.double().norm()
        assert difference <= BOUND, f"differs by {difference:.1e}"


@on_ranks(of_core(2, NEWEST), of_core(1, NEWEST, pytest.mark.rest), of_core(2, INSTALLED))
@pytest.mark.parametrize("name", MODELS)
def test_off_against_on(rank: Rank, name):
    import megatron_fused_ce

    model = MODELS[name]
    if model.mup:
        needs_core(0, 19)
    if rank.size == 1:
        model = replace(model, sequence_parallel=False)
    have_groups(rank.size)
    counters = megatron_fused_ce.counters()
    megatron_fused_ce.disable()
    off = Seen(model, rank)
    counters.reset()
    with patched_caller():
        megatron_fused_ce.enable(megatron_fused_ce.FusedCEConfig(strategy=model.strategy, num_chunks=CHUNKS))
        on = Seen(model, rank)
    megatron_fused_ce.disable()
    # Of each pass one head, and over one rank that of multi-token prediction; over several Megatron's loss
    # takes its gathered logits.
    on_one = model.mtp if rank.size == 1 else 0
    expected = (3 * (1 + on_one), 3 * (model.mtp - on_one), 0 if on.generated is None else 2)
    assert (counters.fused, counters.materialised, counters.stock) == expected
    if off.generated is not None:
        torch.testing.assert_close(on.generated, off.generated, rtol=0, atol=0)
    for got, right in ((on.trained, off.trained), (on.old, off.old), (on.reference, off.reference)):
        assert got.requires_grad == right.requires_grad
        assert_same(got, right)
    assert on.trained.requires_grad and not on.reference.requires_grad
    bound = GRADIENT_BOUND if model.dtype == torch.float32 else 2e-2
    for name, right in off.gradients.items():
        norm = right.double().norm()
        assert norm > 0, f"{name} is zero: the case tests nothing"
        difference = (on.gradients[name].double() - right.double()).norm() / norm
        assert difference <= bound, f"{name}: differs by {difference:.2e}"
    if model.mtp:
        return
    # Neither all tokens' logits nor the whole vocabulary's of any.
    all_logits = BATCH * SEQUENCE * VOCAB // rank.size
    whole = all_logits * off.trained.element_size()
    assert off.shards.peak_bytes >= whole
    if model.strategy == "recompute" and model.dtype == torch.float32:
        assert 0 < on.shards.peak_bytes <= 2 * whole / CHUNKS
    if rank.size > 1:
        assert off.gathered.num_storages > 0 and on.gathered.num_storages == 0
        assert largest(off.calls) == BATCH * SEQUENCE * VOCAB
        assert 0 < largest(on.calls) <= BATCH * SEQUENCE * HIDDEN


@on_ranks(*both_cores(4))
def test_bf16_over_two_pipeline_stages(rank: Rank):
    """As compute_logprobs_batch: what the last stage has fits the buffer that the first receives into."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    import megatron_fused_ce

    pipeline = Pipeline(sequence_parallel=True, dtype=torch.bfloat16)
    have_groups(2, 2)
    tokens, positions, upstream = tokens_of(rank)

    def forward_step(no_grad: bool, data: Any, model: Any) -> tuple[torch.Tensor, Any]:
        log_probs = rl_utils.get_logprobs(model, tokens, positions, no_grad=no_grad)
        if no_grad:
            return log_probs, None
        return log_probs, lambda output: ((output.float() * upstream).sum(), {})

    def run(stage: Any, no_grad: bool) -> Any:
        return get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, no_grad), data_iterator=None, model=stage,
            num_microbatches=1, seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=no_grad,
        )  # fmt: skip

    def seen() -> dict[str, torch.Tensor]:
        (stage,) = build_pipeline(pipeline, rank)
        stage.eval()
        outputs = run(stage, no_grad=True)
        group = parallel_state.get_pipeline_model_parallel_group()
        received = torch.empty(BATCH, SEQUENCE - 1, dtype=pipeline.dtype, device=rank.device)
        if outputs:
            assert outputs[0].dtype == received.dtype
            received = outputs[0].detach()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(received, src=last, group=group)
        stage.train()
        stage.zero_grad_buffer()
        run(stage, no_grad=False)
        gradients = {name: parameter.main_grad for name, parameter in stage.module.named_parameters()}
        return {"log-probabilities": received, **gradients}

    counters = megatron_fused_ce.counters()
    megatron_fused_ce.disable()
    off = seen()
    counters.reset()
    with patched_caller():
        megatron_fused_ce.enable(megatron_fused_ce.FusedCEConfig("recompute", num_chunks=CHUNKS))
        on = seen()
    megatron_fused_ce.disable()
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert (counters.fused, counters.materialised, counters.stock) == (2 * is_last, 0, 0)
    assert_same(on.pop("log-probabilities"), off.pop("log-probabilities"))
    for name, right in off.items():
        assert (on[name] - right).norm() <= 2e-2 * right.norm() > 0, name


@on_ranks(of_core(2, NEWEST))
def test_gathered_logits_of_a_shard(rank: Rank):
    """Their argmax is of the whole vocabulary; options of the loss are refused before any collective."""
    import megatron_fused_ce
    from megatron_fused_ce.adapter import deferred_logits

    have_groups(rank.size)
    tokens, positions, _ = tokens_of(rank)
    megatron_fused_ce.disable()
    expected = build(Model(), rank)(tokens, positions, None, runtime_gather_output=True)
    megatron_fused_ce.enable(megatron_fused_ce.FusedCEConfig(z_loss=1e-4))
    on = build(Model(), rank)
    megatron_fused_ce.disable()
    with patched_caller(), Collectives({rank.group: "tp"}) as issued:
        with deferred_logits.returned_to_caller():
            logits = on(tokens, positions, None, runtime_gather_output=True)
        before = len(issued.calls)
        with pytest.raises(
            ValueError, match="z_loss: get_logprobs' log-probabilities are those of the plain"
        ):
            logits.log_probs(tokens)
        assert len(issued.calls) == before > 0
    # Half of the tokens or so have it on the other rank.
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits.max(dim=-1).values, expected.max(dim=-1).values)
    assert logits.shape == (BATCH, SEQUENCE, VOCAB)


@on_ranks(of_core(2, NEWEST), of_core(2, INSTALLED))
def test_float16_module_upcasts(rank: Rank):
    """Where its caller does not ask for the model's own dtype: fp32 log-probabilities of bf16 logits."""
    from megatron.core.transformer.module import Float16Module

    import megatron_fused_ce
    from megatron_fused_ce.adapter import deferred_logits

    have_groups(rank.size)
    model = Model(dtype=torch.bfloat16)
    tokens, positions, _ = tokens_of(rank)
    found = []
    for turn in (megatron_fused_ce.disable, megatron_fused_ce.enable):
        turn()
        built = build(model, rank)
        with deferred_logits.returned_to_caller(), patched_caller():
            logits = Float16Module(built.config, built)(tokens, positions, None, runtime_gather_output=True)
            found.append(rl_utils.selective_log_softmax(logits[:, :-1], tokens[:, 1:]))
    megatron_fused_ce.disable()
    assert isinstance(logits, deferred_logits.DeferredLogits)
    assert found[0].dtype == torch.float32
    assert_same(found[1], found[0])
