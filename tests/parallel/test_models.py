"""Megatron's own models with the flag off and on: every parameter's gradient, losses, MTP metrics.

Each test builds the same model twice from one seed and trains a step of several micro-batches by Megatron's
own schedules, in its DDP. Under a pipeline (TP 2 x PP 2, with and without virtual stages) the head is on the
last stage, and tied weights end in Megatron's all-reduce between the first and the last one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce.head import tokens
from tests.support import megatron
from tests.support.megatron import BATCH, INSTALLED, SEQUENCE, Model, build, flag, have_groups, of_core
from tests.support.op import promises
from tests.support.ranks import Rank, Ranks, on_ranks

#: TP 2 with one core, 4 with the other, which :func:`test_the_installed_core` runs at 2.
MODELS, IN_DDP = (
    [
        of_core(2, megatron.NEWEST, needs_nccl=needs_nccl),
        of_core(1, megatron.NEWEST, pytest.mark.rest),
        of_core(4, INSTALLED),
    ]
    for needs_nccl in ("", megatron.DDP)
)
SP = {"sequence_parallel": True}
FUSED = {"fused_wgrad": True, "overlap": True}
FORWARD = {"strategy": "grad_in_forward"}
#: With a limit, inputs and gradients of different calls may be paired without an error.
DEFERRED = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 4}
BY_NAME = {
    "gpt bf16 sp": Model(**SP, dtype=torch.bfloat16),
    "gpt mtp 2 tied": Model(mtp=2, tied=True),
    "gpt fused wgrad overlap store": Model(**FUSED, strategy="store"),
    "gpt fused wgrad tied mtp 1 overlap": Model(**FUSED, tied=True, mtp=1),
    "gpt grad_in_forward sp": Model(**FORWARD, **SP),
    "gpt grad_in_forward fused wgrad tied mtp 1 overlap": Model(**FORWARD, **FUSED, tied=True, mtp=1),
    "gpt masked tokens skipped grad_in_forward sp mtp 1": Model(**FORWARD, **SP, skip_masked=True, mtp=1),
    "hybrid tied sp grad_in_forward": Model(family="hybrid", tied=True, **SP, **FORWARD),
    # Not in megatron-core 0.16.
    "gpt mup mtp 1": Model(extra=megatron.MUP, mtp=1),
    "hybrid mtp 1": Model(family="hybrid", mtp=1),
    "gpt mtp 1 detached heads": Model(mtp=1, extra={"mtp_detach_heads": True}),
}
SINCE_0_17 = ("gpt mup mtp 1", "hybrid mtp 1", "gpt mtp 1 detached heads")
PIPELINES = {
    "pp 2 tied grad_in_forward overlap fused wgrad": Model(tied=True, **FORWARD, **FUSED),
    "pp 2 mtp 1 tied grad_in_forward fused wgrad": Model(mtp=1, tied=True, **FORWARD, fused_wgrad=True),
    "pp 2 mtp 1 grad_in_forward sp, deferred": Model(
        mtp=1, **FORWARD, **SP, fused_wgrad=True, extra=DEFERRED
    ),
    "two virtual stages tied sp store, deferred": Model(
        virtual=2, tied=True, **SP, strategy="store", fused_wgrad=True, extra=DEFERRED
    ),
    "two virtual stages tied store overlap fused wgrad": Model(
        virtual=2, tied=True, strategy="store", **FUSED
    ),
}


def train(model: Model, rank: Rank, num_micro_batches: int = 2, steps: int = 1) -> dict[str, torch.Tensor]:
    """The last stage's losses, every accumulated gradient of this rank's, and the MTP metrics, by name.

    Of the last of ``steps`` with the same weights.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    stages = megatron.in_ddp(model, rank)
    generator = torch.Generator().manual_seed(3 + parallel_state.get_data_parallel_rank())
    batches = [
        megatron.draw(rank, generator, 0.3 if model.skip_masked else None) for _ in range(num_micro_batches)
    ]
    MTPLossLoggingHelper.tracker.clear()

    def step(data: Any, stage: Any) -> Any:
        batch = next(data)

        def loss(losses: torch.Tensor) -> Any:
            assert losses.shape == (BATCH, SEQUENCE)
            told = losses * batch.mask if model.skip_masked else losses
            return (losses * batch.mask).sum() / batch.mask.sum(), {"losses": told.detach().clone()}

        return megatron.losses_of(stage, batch, rank), loss

    for _ in range(steps):
        for stage in stages:
            stage.zero_grad_buffer()
        told = megatron.scheduled(step, stages, batches)
    results = {f"loss of micro-batch {i}": losses["losses"] for i, losses in enumerate(told)}
    for number, stage in enumerate(stages):
        named = megatron.gradients_of(stage.module).items()
        results |= {f"gradient of {name} in stage {number}": gradient for name, gradient in named}
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, torch.Tensor):
            results[f"MTP {name}"] = value.clone()
    return results


def compare(off: dict[str, torch.Tensor], on: dict[str, torch.Tensor], model: Model, pipeline: bool) -> None:
    half = model.dtype != torch.float32

    def bound(name: str) -> float:
        if "correct" in name or "total" in name:
            return 0.0
        if "loss" in name:
            return 2e-3 if half else megatron.LOSS_BOUND
        return megatron.HALF_BOUND if half else megatron.GRADIENT_BOUND

    zero = "loss of|MTP"
    if pipeline and model.tied and model.mtp:
        # MTP brings the embedding to the last stage, and the heads use its weight.
        zero += "|output_layer.weight"
        assert not any(off[name].any() for name in off if "output_layer.weight" in name)
    megatron.assert_same(on, off, bound, zero)


@on_ranks(*IN_DDP)
@pytest.mark.parametrize("name", BY_NAME)
def test_off_against_on(rank: Rank, name):
    from megatron_fused_ce.head.host_copy import HostCopy

    model = BY_NAME[name]
    if name in SINCE_0_17:
        megatron.needs_core(0, 19)
    if rank.size == 1 and model.sequence_parallel:
        pytest.skip("one rank has no sequence parallelism")
    have_groups(rank.size)
    # Of each micro-batch the main loss, and no other head, was grad_in_forward, and left its masked tokens
    # out.
    takes_mask = model.family == "gpt" or megatron.core_version() >= (0, 17)
    makes_gradients = model.strategy == "grad_in_forward" and takes_mask
    with (
        patch.object(tokens, "ROUND_TO", 2),
        patch.object(HostCopy, "read", autospec=True, side_effect=HostCopy.read) as read,
        promises(2 * makes_gradients),
    ):
        off = train(model, rank)
        with flag(strategy=model.strategy, num_chunks=3, skip_masked=model.skip_masked) as seen:
            on = train(model, rank)
    assert seen.counts == (2 * (1 + model.mtp), 0, 0)
    # The host waits once for each backward that has something to look at, and once more for a count.
    assert read.call_count == 2 * (makes_gradients or model.skip_masked) + 2 * model.skip_masked
    assert any(name.startswith("MTP") for name in off) == bool(model.mtp)
    compare(off, on, model, pipeline=False)


@on_ranks(Ranks(2, INSTALLED, needs_nccl=megatron.DDP))
def test_the_installed_core(rank: Rank):
    """One model of `make test` runs with the other megatron-core."""
    test_off_against_on.on_a_rank(rank, "gpt grad_in_forward sp")


@on_ranks(*megatron.both_cores(4))
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline(rank: Rank, name):
    from megatron.core import parallel_state

    model = PIPELINES[name]
    have_groups(2, 2, model.virtual)
    # Without Megatron's deferral, which loses gradients of multi-token prediction. 4 is a multiple of PP, as
    # virtual stages need.
    off = train(replace(model, extra={}), rank, 4)
    with flag(strategy=model.strategy, num_chunks=3) as seen:
        on = train(model, rank, 4)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert seen.counts == (4 * (1 + model.mtp) * is_last, 0, 0)
    assert sum("loss of" in name for name in off) == 4 * is_last
    speaks = is_last and not parallel_state.get_tensor_model_parallel_rank()
    assert len(seen.lines("-wgrad-compute has no effect")) == bool(model.extra and speaks)
    compare(off, on, model, pipeline=True)


@on_ranks(of_core(4, megatron.NEWEST, needs_nccl=megatron.DDP))
def test_real_logits_beside_deferral(rank: Rank):
    """Of every second loss. They come from Megatron's layer, whose lists nothing may enter: a metric's have
    no gradient, and of a fused loss there is nothing to pair with."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    model, fused, calls = Model(**SP, fused_wgrad=True), megatron.losses_of, []

    def losses_of(stage: Any, batch: megatron.Batch, rank: Rank) -> Any:
        calls.append(batch)
        if len(calls) % 2:
            return fused(stage, batch, rank)
        made = stage(batch.ids, *megatron.positions_and_mask(rank), labels=None)
        if not stage.module.post_process:
            return made
        with torch.no_grad():
            made.argmax(-1)
        logits = made.clone().transpose(0, 1).contiguous()
        return vocab_parallel_cross_entropy(logits, batch.labels.t().contiguous()).t()

    have_groups(2, 2)
    with patch.object(megatron, "losses_of", losses_of):
        right = train(model, rank, 4, 2)
        with flag(deferred_logits=True) as seen:
            got = train(replace(model, extra=DEFERRED), rank, 4, 2)
    assert (seen.counts[0] > 0) == (seen.counts[1] > 0) == ("loss of micro-batch 0" in right)
    compare(right, got, model, pipeline=True)


@on_ranks(MODELS[0])
def test_checkpoint_moves_between_flag_off_and_on(rank: Rank):
    """A state dict saved with the flag on loads strictly with it off, and the other way round."""
    have_groups(rank.size)
    off = build(Model(), rank)
    with flag():
        on = build(Model(), rank)
    assert type(on.output_layer) is not type(off.output_layer)
    assert type(on.output_layer).__name__ == type(off.output_layer).__name__
    assert list(on.state_dict()) == list(off.state_dict())
    off.load_state_dict(on.state_dict())
    on.load_state_dict(off.state_dict())
    assert sorted(on.sharded_state_dict()) == sorted(off.sharded_state_dict())


@on_ranks(*MODELS)
def test_start_up_line(rank: Rank):
    """One rank speaks, once."""
    import argparse

    from megatron_fused_ce.adapter import arguments

    have_groups(rank.size)
    of_rl = patch.object(arguments, "megatron_args", lambda: argparse.Namespace(perform_rl_step=True))
    with of_rl, flag(strategy="recompute", num_chunks=3, logits_backend="gemm_rows") as seen:
        for dtype in (torch.float32, None, torch.bfloat16):
            build(Model(dtype=dtype), rank)
        build(Model(tied=True), rank)
    lines = seen.lines("[fused-ce] on: ")
    if rank.rank > 0:
        assert lines == []
        return
    assert len(lines) == 1 and "strategy recompute" in lines[0], lines
    for dtype in ("float32", "bfloat16"):  # of train_rl.py, once each
        words = f"get_logprobs makes no logits; its log-probabilities are {dtype} on every pipeline stage"
        assert seen.said.count(words) == 1


@on_ranks(*MODELS)
def test_options_of_the_loss(rank: Rank):
    """The loss is the definition's on Megatron's own logits. Megatron's loss is refused: test_seams.py."""
    from megatron_fused_ce.adapter import arguments
    from megatron_fused_ce.scripts.lib.reference import HeadInputs, plain_head
    from tests.support.losses import LOSS_OPTIONS

    vocab = megatron.VOCAB
    have_groups(rank.size)
    labels = megatron.draw(rank).labels
    with torch.no_grad():
        logits = megatron.forward(build(Model(), rank), rank, False, runtime_gather_output=True)
    for options in LOSS_OPTIONS.values():
        with flag(**{**options, "ignore_index": 7}):
            on = build(Model(), rank)
            loss = megatron.forward(on, rank, True)
            # Hidden states that the identity makes these logits of.
            eye, ones = torch.eye(vocab, device=rank.device), torch.ones_like(loss)
            inputs = HeadInputs(logits.transpose(0, 1), eye, labels, ones, config=on.fused_ce_adopted)
            expected = plain_head(inputs, torch.float64).loss
            difference = (loss - expected).abs().max()
            assert difference < 2e-5 * expected.abs().max(), (options, difference)
            assert (loss[labels == 7] == 0).all()
    with pytest.raises(ValueError, match="takes the vocabulary size from Megatron's tokenizer"):
        arguments.config_from_args(
            arguments.args_from_argv(["--fused-chunked-ce", "--fused-ce-mask-padded-vocab"])
        )


@on_ranks(*MODELS)
@pytest.mark.parametrize(("mtp", "strategy"), [(0, "recompute"), (1, "grad_in_forward")])
def test_generation_and_evaluation(rank: Rank, mtp, strategy):
    """A rollout step is Megatron's; a labelled evaluation under inference mode is fused, options and all."""
    have_groups(rank.size)
    model = Model(mtp=mtp)
    off = build(model, rank)
    # 0.16 clones the labels of its MTP heads
    can_roll_out = not mtp or megatron.core_version() >= (0, 19)
    mask = torch.ones(BATCH, SEQUENCE, device=rank.device)
    mask[:, ::3] = 0.0

    def evaluation(built: Any) -> torch.Tensor:
        built.eval()
        with torch.inference_mode():
            return megatron.forward(built, rank, True, loss_mask=mask)

    for options in ({}, {"skip_masked": True}, {"z_loss": 1e-3}):
        with flag(strategy=strategy, num_chunks=3, **options):
            on = build(model, rank)
        with flag(False) as seen:
            for _ in range(2):
                if can_roll_out:
                    torch.testing.assert_close(megatron.rollout(on, rank), megatron.rollout(off, rank))
                loss, expected = evaluation(on), evaluation(off)
                if "z_loss" not in options:
                    torch.testing.assert_close(loss * mask, expected * mask)
                else:
                    assert (loss > expected).all()
        # Heads of multi-token prediction are evaluated with the main one, and make no logits in a rollout.
        assert seen.counts == (2 * (1 + mtp), 0, 4 if can_roll_out else 0)
        on.train()
        (megatron.forward(on, rank, True, loss_mask=mask) * mask).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in on.parameters())
        # A call without labels shows no loss: real logits, from Megatron's layer.
        if can_roll_out and not mtp:
            with torch.inference_mode(), flag(False) as seen:
                megatron.forward(on, rank, False)
            assert seen.counts == (0, 0, 1)
