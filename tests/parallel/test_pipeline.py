"""The head on the last stage of a pipeline, flag off and on: every parameter's gradient on every stage.

TP 2 × PP 2 on four ranks, with and without virtual stages, through Megatron's own schedules and its
DDP; tied weights end in Megatron's all-reduce between the first and the last stage.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support import rl_utils
from tests.support.megatron import (
    BATCH,
    GRADIENT_BOUND,
    HIDDEN,
    LOSS_BOUND,
    SEQUENCE,
    VOCAB,
    assert_same_gradients,
    both_cores,
    have_groups,
    needs_fused_wgrad,
    positions_and_mask,
    transformer_config,
)
from tests.support.ranks import Rank, on_ranks
from tests.support.rl_utils import assert_same, patched_caller, tokens_of

TP, PP = 2, 2
NUM_MICRO_BATCHES = 4  # a multiple of PP, as virtual stages need


@dataclass(frozen=True)
class Pipeline:
    """One model and how it is cut: ``virtual`` stages on each of the two ranks of a pipeline."""

    virtual: int = 1
    mtp: int = 0
    tied: bool = False
    sequence_parallel: bool = False
    fused_wgrad: bool = False
    overlap: bool = False
    strategy: str = "recompute"
    dtype: torch.dtype = torch.float32
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


def build(pipeline: Pipeline, rank: Rank) -> list[Any]:
    """This rank's stages, first to last, each in Megatron's DDP."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    if pipeline.fused_wgrad:
        needs_fused_wgrad()
    model_parallel_cuda_manual_seed(7)
    config = transformer_config(
        num_layers=PP * pipeline.virtual,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        gradient_accumulation_fusion=pipeline.fused_wgrad,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        virtual_pipeline_model_parallel_size=pipeline.virtual if pipeline.virtual > 1 else None,
        overlap_p2p_comm=pipeline.virtual > 1,
        batch_p2p_comm=pipeline.virtual == 1,
        pipeline_dtype=pipeline.dtype,
        params_dtype=pipeline.dtype,
        bf16=pipeline.dtype == torch.bfloat16,
        deallocate_pipeline_outputs=True,
        sequence_parallel=pipeline.sequence_parallel,
        mtp_num_layers=pipeline.mtp or None,
        **pipeline.extra,
    )
    stages = []
    for stage in range(pipeline.virtual):
        of = {"ignore_virtual": False, "vp_stage": stage if pipeline.virtual > 1 else None}
        is_last = parallel_state.is_pipeline_last_stage(**of)
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        mtp_spec = None
        if pipeline.mtp and is_last:
            mtp_spec = gpt_layer_specs.get_gpt_mtp_block_spec(
                config, spec, use_transformer_engine=False, vp_stage=of["vp_stage"]
            )
        torch.manual_seed(70 + stage)
        stages.append(
            GPTModel(
                config,
                spec,
                vocab_size=VOCAB,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**of),
                post_process=is_last,
                share_embeddings_and_output_weights=pipeline.tied,
                mtp_block_spec=mtp_spec,
                position_embedding_type="rope",
                vp_stage=of["vp_stage"],
            ).to(rank.device, pipeline.dtype)
        )
    if config.bf16:
        stages = [Float16Module(config, stage) for stage in stages]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=pipeline.overlap, bucket_size=1
    )
    wrapped = [DistributedDataParallel(config, ddp_config, stage) for stage in stages]
    if pipeline.overlap:
        config.no_sync_func = [stage.no_sync for stage in wrapped]
        if pipeline.virtual == 1:
            config.no_sync_func = config.no_sync_func[0]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def micro_batches(rank: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids ``[b, s + 1]`` and a loss mask of any weights ``[b, s]``, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator).to(rank.device),
            torch.rand(BATCH, SEQUENCE, generator=generator).to(rank.device),
        )
        for _ in range(NUM_MICRO_BATCHES)
    ]


def forward_step(rank: Rank, data: Any, stage: Any) -> tuple[torch.Tensor, Any]:
    """As pretrain_gpt.py's: the model's output and a function that makes a scalar of it."""
    ids, mask = next(data)
    output = stage(ids[:, :-1], *positions_and_mask(rank), labels=ids[:, 1:], loss_mask=mask)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert losses.shape == (BATCH, SEQUENCE)
        return (losses * mask).sum() / mask.sum(), {"losses": losses.detach().clone()}

    return output, loss_of


def train_one_step(pipeline: Pipeline, rank: Rank) -> dict[str, torch.Tensor]:
    """The last stage's losses, every gradient of this rank's stages, by name."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    stages = build(pipeline, rank)
    for stage in stages:
        stage.zero_grad_buffer()
    iterators = [iter(micro_batches(rank)) for _ in stages]
    told = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, rank),
        data_iterator=iterators if pipeline.virtual > 1 else iterators[0],
        model=stages if pipeline.virtual > 1 else stages[0],
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    results = {f"loss of micro-batch {i}": losses["losses"] for i, losses in enumerate(told)}
    for number, stage in enumerate(stages):
        for name, parameter in stage.module.named_parameters():
            results[f"gradient of {name} in stage {number}"] = parameter.main_grad.clone()
    return results


PIPELINES = {
    "pp 2": Pipeline(),
    "pp 2 tied sp store": Pipeline(tied=True, sequence_parallel=True, strategy="store"),
    "pp 2 tied grad_in_forward overlap fused wgrad": Pipeline(
        tied=True, strategy="grad_in_forward", overlap=True, fused_wgrad=True
    ),
    "pp 2 mtp 1 sp": Pipeline(mtp=1, sequence_parallel=True),
    "pp 2 mtp 1 tied grad_in_forward fused wgrad": Pipeline(
        mtp=1, tied=True, strategy="grad_in_forward", fused_wgrad=True
    ),
    "two virtual stages": Pipeline(virtual=2),
    "two virtual stages tied sp": Pipeline(virtual=2, tied=True, sequence_parallel=True),
    "two virtual stages grad_in_forward sp": Pipeline(
        virtual=2, strategy="grad_in_forward", sequence_parallel=True
    ),
    "two virtual stages tied store overlap fused wgrad": Pipeline(
        virtual=2, tied=True, strategy="store", overlap=True, fused_wgrad=True
    ),
}


@on_ranks(*both_cores(4))
@pytest.mark.parametrize("name", PIPELINES)
def test_off_against_on(rank: Rank, name):
    from megatron.core import parallel_state

    import megatron_fused_ce

    pipeline = PIPELINES[name]
    have_groups(TP, PP, pipeline.virtual if pipeline.virtual > 1 else None)
    counters = megatron_fused_ce.counters()
    with contextlib.ExitStack() as stack:
        megatron_fused_ce.disable()
        off = train_one_step(pipeline, rank)
        counters.reset()
        megatron_fused_ce.enable(megatron_fused_ce.FusedCEConfig(strategy=pipeline.strategy, num_chunks=3))
        stack.callback(megatron_fused_ce.disable)
        on = train_one_step(pipeline, rank)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    num_heads = NUM_MICRO_BATCHES * (1 + pipeline.mtp) if is_last else 0
    assert (counters.fused, counters.materialised, counters.stock) == (num_heads, 0, 0)
    assert off.keys() == on.keys()
    assert any("gradient" in name for name in off)
    assert sum("loss" in name for name in off) == (NUM_MICRO_BATCHES if is_last else 0)
    for name, expected in off.items():
        norm = float(expected.double().norm())
        if pipeline.tied and pipeline.mtp and "output_layer.weight" in name:
            # MTP brings the embedding to the last stage, and the heads use its weight.
            assert norm == 0 and not on[name].any()
            continue
        assert norm > 0, f"{name} is zero: the case tests nothing"
        difference = float((on[name].double() - expected.double()).norm()) / norm
        bound = LOSS_BOUND if "loss" in name else GRADIENT_BOUND
        assert difference <= bound, f"{name}: differs by {difference:.2e}, more than {bound:.0e}"


@on_ranks(*both_cores(4))
def test_log_probs_in_bf16(rank: Rank):
    """As compute_logprobs_batch: what the last stage has fits the buffer that the first receives into."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    import megatron_fused_ce

    pipeline = Pipeline(sequence_parallel=True, dtype=torch.bfloat16)
    have_groups(TP, PP)
    tokens, positions, upstream = tokens_of(rank)

    def step(no_grad: bool, data: Any, model: Any) -> tuple[torch.Tensor, Any]:
        log_probs = rl_utils.get_logprobs(model, tokens, positions, no_grad=no_grad)
        if no_grad:
            return log_probs, None
        return log_probs, lambda output: ((output.float() * upstream).sum(), {})

    def run(stage: Any, no_grad: bool) -> Any:
        return get_forward_backward_func()(
            forward_step_func=functools.partial(step, no_grad), data_iterator=None, model=stage,
            num_microbatches=1, seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=no_grad,
        )  # fmt: skip

    def seen() -> dict[str, torch.Tensor]:
        (stage,) = build(pipeline, rank)
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
        config = megatron_fused_ce.FusedCEConfig("recompute", num_chunks=3, logit_precision="activations")
        megatron_fused_ce.enable(config)
        on = seen()
    megatron_fused_ce.disable()
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert (counters.fused, counters.materialised, counters.stock) == (2 * is_last, 0, 0)
    assert_same(on.pop("log-probabilities"), off.pop("log-probabilities"))
    assert_same_gradients(on, off, in_half=True)
