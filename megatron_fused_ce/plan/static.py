"""Memory held all the time: weights, gradients, optimizer, and the libraries' buffers.

Megatron with ``--bf16`` has 2 bytes of weight, 4 of gradient (``main_grad`` in fp32) and 12 of optimizer
(fp32 weight and two moments) for a parameter; its distributed optimizer divides the last 12 over the
data- and context-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from megatron_fused_ce.plan import blocks
from megatron_fused_ce.plan.blocks import Weight
from megatron_fused_ce.plan.setting import Parallel, Setting
from megatron_fused_ce.planner.memory import MIB

#: cuBLAS's workspace on Hopper, one of Transformer Engine's own products and one of torch's for each
#: thread (forward, autograd): MiB of 2026-11-21-h200-longest-sequence.json, which has room for no other.
CUBLAS_WORKSPACE = 32 * MIB
#: Labels, tokens, positions (int64) and the loss mask (fp32) of one token.
BATCH_BYTES = 8 + 8 + 8 + 4


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: which layers, and whether embedding and head are on it."""

    index: int
    chunks: tuple[tuple[str, ...], ...]  # model chunks in the order of the forward, each with layers' letters
    first: bool
    last: bool


def stages(setting: Setting) -> list[Stage]:
    """The pipeline stages: chunk by chunk, each stage takes its layers in turn."""
    rest, pipeline = iter(blocks.layers(setting.model)), setting.parallel.pipeline
    sizes = setting.parallel.chunk_layers(setting.model.num_layers)
    chunks = [tuple(next(rest) for _ in range(size)) for size in sizes]
    return [
        Stage(index, tuple(chunks[index::pipeline]), index == 0, index == pipeline - 1)
        for index in range(pipeline)
    ]


def stage_weights(setting: Setting, stage: Stage) -> Counter[Weight]:
    """Every parameter of a stage, and how often it is there."""
    model, kinds = setting.model, blocks.kinds(setting)
    table = Weight((setting.padded_vocab_size, model.hidden_size), divided=True)
    predicts = model.mtp_num_layers if stage.last else 0
    found: Counter[Weight] = Counter()
    if stage.first:
        found[table] += 1
        if model.learned_positions:
            found[Weight((model.learned_positions, model.hidden_size))] += 1
    if stage.last:
        found[Weight((model.norm_size,))] += 1
        # Tied weights: the last stage has a copy. And the embedding, for predicted tokens.
        found[table] += (not model.tied or not stage.first) + (predicts > 0 and not stage.first)
    if predicts:  # beside a depth's layer: the product of both inputs, three norms
        found[Weight((model.hidden_size, 2 * model.hidden_size), divided=True)] += predicts
        found[Weight((model.norm_size,))] += 3 * predicts
    letters = "".join("".join(chunk) for chunk in stage.chunks) + predicts * blocks.prediction_layer(model)
    for letter, times in Counter(letters).items():
        for weight in kinds[letter].weights:
            found[weight] += times
    return found


def parameters(setting: Setting) -> int:
    """Number of parameters of the whole model, with padding and multi-token prediction; a tied weight counts
    once."""
    whole = replace(setting, parallel=Parallel(), padded_vocab=setting.padded_vocab_size)
    (stage,) = stages(whole)
    return sum(often * weight.count for weight, often in stage_weights(whole, stage).items())


def counts(setting: Setting, stage: Stage) -> tuple[int, int]:
    """Parameters of one rank of ``stage``: dense ones, and those of experts."""
    found = [0, 0]
    for weight, often in stage_weights(setting, stage).items():
        found[weight.experts > 0] += often * weight.local_count(setting)
    return found[0], found[1]


def static(setting: Setting, stage: Stage) -> dict[str, int]:
    """Bytes on one rank of ``stage``; what a step adds while the optimizer runs under its own name."""
    of_rank, training = counts(setting, stage), setting.training
    count, shared = sum(of_rank), float(sum(of_rank))
    if training.distributed_optimizer:
        shared = sum(number / setting.parallel.shards(bool(kind)) for kind, number in enumerate(of_rank))
    return {
        "weights": setting.itemsize * count,
        "gradients": training.gradient_bytes * count,
        "optimizer": round(training.state_bytes * shared),
        "optimizer's copies": round(training.step_bytes * shared),
    }


def dummy_gradients(setting: Setting, stage: Stage) -> int:
    """Dummy gradients, given to autograd for weights whose gradient went into ``main_grad``: one for each
    shape.

    Megatron and Transformer Engine keep one buffer a shape (``get_dummy_wgrad``) for the whole run.
    """
    if not setting.training.gradient_fusion:
        return 0
    weights = stage_weights(setting, stage)
    shapes = {weight.local_shape(setting) for weight in weights if len(weight.shape) == 2 and weight.divided}
    if stage.first and not stage.last:
        # An embedding has no product.
        shapes.discard((setting.vocab_rows, setting.model.hidden_size))
    return sum(setting.itemsize * rows * columns for rows, columns in shapes)


def libraries(setting: Setting, *, stock_head: bool) -> int:
    """Buffers that stay: Transformer Engine's workspace, rotary angles, the batch, its mask.

    And Megatron's global memory buffer, as large as the largest of its uses: the scores that its own
    attention multiplies into, the hidden states that its own products gather.
    """
    training, model, parallel = setting.training, setting.model, setting.parallel
    held = BATCH_BYTES * setting.num_tokens
    if training.transformer_engine:
        held += CUBLAS_WORKSPACE
    if model.rotary:
        held += blocks.FP32 * model.head_dim * training.sequence // parallel.context
    if training.attention_mask:
        held += training.micro_batch * training.sequence**2
    a_token = [0.0]
    if not training.flash_attention:
        a_token.append(setting.itemsize * model.num_attention_heads // parallel.tensor * training.sequence)
    if stock_head or not training.transformer_engine:
        a_token.append(blocks.gathered_row(setting))
    if model.mixture and model.mixture.gathers:
        a_token.append(blocks.row_bytes(setting) * parallel.expert * parallel.expert_tensor)
    return held + round(max(a_token) * setting.num_tokens)
