"""The log-probabilities of Megatron-LM's train_rl.py with the flag off and on, by a caller with its steps.

The caller is tests/support/rl_utils.py. What was run with Megatron-LM's own: docs/megatron.md.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from tests.support import megatron, rl_utils
from tests.support.collectives import Collective, Collectives
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, VOCAB, Model, build, flag, have_groups, of_core
from tests.support.ranks import Rank, on_ranks
from tests.support.rl_utils import assert_same, patched_caller, tokens_of

CHUNKS = 6

MODELS = {
    "gpt": Model(strategy="store"),
    "gpt grad_in_forward tied sp": Model(strategy="grad_in_forward", tied=True, sequence_parallel=True),
    "gpt bf16 sp": Model(dtype=torch.bfloat16, sequence_parallel=True),
    "hybrid tied sp": Model(family="hybrid", tied=True, sequence_parallel=True),
    # Since 0.19 heads of multi-token prediction are trained in get_logprobs too.
    "gpt mup mtp 1": Model(mup=True, mtp=1),
}


class Seen:
    """What one model gives: log-probabilities of three passes, gradients, logits held, collectives."""

    def __init__(self, model: Model, rank: Rank) -> None:
        tokens, positions, upstream = tokens_of(rank)
        built = build(model, rank)
        caller = megatron.as_called(model, built)
        self.generated = None
        if megatron.core_version() >= (0, 19) or not model.mtp:
            self.generated = megatron.rollout(built, rank) if model.dtype == torch.float32 else None
        caller.train()
        hidden: list[torch.Tensor] = []

        def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
            hidden.append(output)
            output.retain_grad()

        hook = built.decoder.register_forward_hook(keep)
        with (
            LogitStorages(vocab_rows=VOCAB // rank.size, hidden_size=megatron.HIDDEN) as self.shards,
            LogitStorages(vocab_rows=VOCAB, hidden_size=megatron.HIDDEN) as self.gathered,
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


def largest(calls: list[Collective]) -> int:
    """Elements of the largest tensor that these collectives moved."""
    return max((torch.Size(shape).numel() for call in calls for shape in call.shapes), default=0)


@on_ranks(of_core(2, NEWEST), of_core(1, NEWEST, pytest.mark.rest))
@pytest.mark.parametrize("name", MODELS)
def test_off_against_on(rank: Rank, name):
    model = MODELS[name]
    if model.mup:
        megatron.needs_core(0, 19)
    have_groups(rank.size)
    off = Seen(model, rank)
    options = {"strategy": model.strategy, "num_chunks": CHUNKS, "logit_precision": "activations"}
    options["logits_backend"] = (
        "gemm_rows"  # the scaled-exp GEMM gathers more rows of a sample than there are tokens
    )
    with patched_caller(), flag(**options) as seen:
        on = Seen(model, rank)
    # Of each pass one head, and over one rank that of multi-token prediction; over several Megatron's loss
    # takes its gathered logits.
    on_one = model.mtp if rank.size == 1 else 0
    expected = (3 * (1 + on_one), 3 * (model.mtp - on_one), 0 if on.generated is None else 2)
    assert seen.counts == expected
    if off.generated is not None:
        torch.testing.assert_close(on.generated, off.generated, rtol=0, atol=0)
    for got, right in ((on.trained, off.trained), (on.old, off.old), (on.reference, off.reference)):
        assert got.requires_grad == right.requires_grad
        assert_same(got, right)
    assert on.trained.requires_grad and not on.reference.requires_grad
    megatron.assert_same_gradients(on.gradients, off.gradients, model.dtype != torch.float32)
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
        assert 0 < largest(on.calls) <= BATCH * SEQUENCE * megatron.HIDDEN


@on_ranks(of_core(2, NEWEST))
def test_gathered_logits_of_a_shard(rank: Rank):
    """Their argmax is of the whole vocabulary; options of the loss are refused before any collective."""
    from megatron_fused_ce.adapter import caller

    have_groups(rank.size)
    tokens, positions, _ = tokens_of(rank)
    expected = build(Model(), rank)(tokens, positions, None, runtime_gather_output=True)
    with flag(z_loss=1e-4), patched_caller(), Collectives({rank.group: "tp"}) as issued:
        on = build(Model(), rank)
        with caller.returned_to_caller():
            logits = on(tokens, positions, None, runtime_gather_output=True)
        before = len(issued.calls)
        with pytest.raises(ValueError, match="z_loss: the caller's log-probabilities are those of the plain"):
            logits.log_probs(tokens)
        assert len(issued.calls) == before > 0
    # Half of the tokens or so have it on the other rank.
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits.max(dim=-1).values, expected.max(dim=-1).values)
    assert logits.shape == expected.shape


@on_ranks(of_core(2, megatron.INSTALLED))
def test_float16_module_upcasts(rank: Rank):
    """Where its caller does not ask for the model's own dtype: fp32 log-probabilities of bf16 logits."""
    from megatron_fused_ce.adapter import caller, deferred_logits

    have_groups(rank.size)
    model = Model(dtype=torch.bfloat16)
    tokens, positions, _ = tokens_of(rank)
    found = []
    for turn in (contextlib.nullcontext(), flag(logit_precision="activations")):
        with turn, caller.returned_to_caller(), patched_caller():
            built = megatron.as_called(model, build(model, rank))
            logits = built(tokens, positions, None, runtime_gather_output=True)
            found.append(rl_utils.selective_log_softmax(logits[:, :-1], tokens[:, 1:]))
    assert isinstance(logits, deferred_logits.DeferredLogits)
    assert found[0].dtype == torch.float32
    assert_same(found[1], found[0])


@on_ranks(*megatron.both_cores(4))
def test_a_pipeline_in_bf16(rank: Rank):
    """As compute_logprobs_batch: what the last stage has fits the buffer that the first receives into."""
    from megatron.core import parallel_state

    have_groups(2, 2)
    tokens, positions, upstream = tokens_of(rank)

    def run(stage: Any, no_grad: bool) -> Any:
        def step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
            log_probs = rl_utils.get_logprobs(model, tokens, positions, no_grad=no_grad)
            return log_probs, None if no_grad else lambda made: ((made.float() * upstream).sum(), {})

        return megatron.scheduled(step, [stage], [None], forward_only=no_grad)

    def seen() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        (stage,) = megatron.in_ddp(Model(sequence_parallel=True, dtype=torch.bfloat16), rank)
        stage.eval()
        outputs = run(stage, no_grad=True)
        received = torch.empty(BATCH, SEQUENCE - 1, dtype=torch.bfloat16, device=rank.device)
        if outputs:
            assert outputs[0].dtype == received.dtype
            received = outputs[0].detach()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(received, src=last, group=group)
        run(stage.train(), no_grad=False)
        return received, {name: parameter.main_grad for name, parameter in stage.module.named_parameters()}

    off = seen()
    with patched_caller(), flag(strategy="recompute", num_chunks=3, logit_precision="activations") as counted:
        on = seen()
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert counted.counts == (2 * is_last, 0, 0)
    assert_same(on[0], off[0])
    megatron.assert_same_gradients(on[1], off[1], in_half=True)
