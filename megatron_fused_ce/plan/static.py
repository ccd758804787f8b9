"""Memory held all the time: weights, gradients, optimizer, and the libraries' buffers.

Megatron with ``--bf16`` has 2 bytes of weight, 4 of gradient (``main_grad`` in fp32) and 12 of optimizer
(fp32 weight and two moments) for a parameter; its distributed optimizer divides the last 12 over the
data- and context-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fused_ce.plan import blocks
from megatron_fused_ce.plan.blocks import Layer, Weight
from megatron_fused_ce.plan.setting import Setting
from megatron_fused_ce.planner import MIB

#: cuBLAS's workspace on Hopper, one of Transformer Engine's own products and one of torch's for each
#: thread (forward, autograd): MiB of 2026-11-21-h200-longest-sequence.json, which has room for no other.
CUBLAS_WORKSPACE = 32 * MIB
#: Labels, tokens, positions (int64) and the loss mask (fp32) of one token.
BATCH_BYTES = 8 + 8 + 8 + 4


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: which layers, and whether embedding and head are on it."""

    index: int
    #: model chunks, each with its layers, in the order in which they are computed
    chunks: tuple[tuple[Layer, ...], ...]
    first: bool
    last: bool

    @property
    def layers(self) -> Iterator[Layer]:
        for chunk in self.chunks:
            yield from chunk


def stages(setting: Setting) -> list[Stage]:
    """The pipeline stages: chunk by chunk, each stage takes its layers in turn."""
    parallel, rest = setting.parallel, iter(blocks.layers(setting.model))
    held: list[list[tuple[Layer, ...]]] = [[] for _ in range(parallel.pipeline)]
    for index, size in enumerate(parallel.chunk_layers(setting.model.num_layers)):
        held[index % parallel.pipeline].append(tuple(next(rest) for _ in range(size)))
    last = parallel.pipeline - 1
    return [Stage(index, tuple(chunks), index == 0, index == last) for index, chunks in enumerate(held)]


def stage_weights(setting: Setting, stage: Stage) -> Counter[Weight]:
    """Every parameter of a stage, and how often it is there."""
    model = setting.model
    table = Weight((setting.padded_vocab_size, model.hidden_size), divided=True)
    predicts = model.mtp_num_layers if stage.last else 0
    found: Counter[Weight] = Counter()
    if stage.first:
        found[table] += 1
        if model.learned_positions:
            found[Weight((model.learned_positions, model.hidden_size))] += 1
    if stage.last:
        found[Weight((model.norm_size,))] += 1
        if not model.tied or not stage.first:
            found[table] += 1  # tied weights: the last stage has a copy
        if predicts and not stage.first:
            found[table] += 1  # the embedding, for the predicted tokens
    # Layers of a kind are one object.
    kinds = {id(layer): layer for layer in stage.layers}
    often = Counter(map(id, stage.layers))
    if predicts:
        layer = blocks.prediction_layer(model)
        kinds[id(layer)] = layer
        often[id(layer)] += predicts
        for weight in blocks.prediction_weights(model):
            found[weight] += predicts
    for kind, times in often.items():
        for weight in _weights_of(kinds[kind]):
            found[weight] += times
    return found


def _weights_of(layer: Layer) -> Iterator[Weight]:
    for block in layer:
        yield from block.weights()
        yield from block.norms()


def parameters(setting: Setting) -> int:
    """Number of parameters of the whole model, with padding and multi-token prediction; a tied weight counts
    once."""
    model = setting.model
    table = setting.padded_vocab_size * model.hidden_size
    whole = table * (1 if model.tied else 2) + model.learned_positions * model.hidden_size
    whole += model.norm_size + sum(map(_layer_parameters, blocks.layers(model)))
    one_depth = _layer_parameters(blocks.prediction_layer(model)) + sum(
        weight.count for weight in blocks.prediction_weights(model)
    )
    return whole + model.mtp_num_layers * one_depth


def _layer_parameters(layer: Layer) -> int:
    return sum(weight.count for weight in _weights_of(layer))


@dataclass(frozen=True)
class Static:
    """Bytes on one GPU of a stage."""

    #: parameters of this rank: dense ones, and those of experts
    dense: int
    experts: int
    weights: int
    gradients: int
    optimizer: int
    #: only while the optimizer steps
    step: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def static(setting: Setting, stage: Stage) -> Static:
    """Weights, gradients and optimizer of one rank of ``stage``."""
    counts = {
        weight: often * weight.local_count(setting) for weight, often in stage_weights(setting, stage).items()
    }
    dense = sum(count for weight, count in counts.items() if not weight.experts)
    experts = sum(count for weight, count in counts.items() if weight.experts)
    optimizer, parallel = setting.training.optimizer, setting.parallel
    shards = (parallel.shards, parallel.expert_shards)
    if optimizer.sharding == "none":
        shards = (1, 1)
    shared = dense / shards[0] + experts / shards[1]
    held = shared if optimizer.sharding == "full" else dense + experts
    return Static(
        dense=dense,
        experts=experts,
        weights=round(setting.itemsize * held),
        gradients=round(optimizer.gradient_bytes * held),
        optimizer=round(optimizer.state_bytes * shared),
        step=round(optimizer.step_bytes * shared),
    )


def dummy_gradients(setting: Setting, stage: Stage) -> int:
    """Dummy gradients, given to autograd for weights whose gradient went into ``main_grad``: one for each
    shape.

    Megatron and Transformer Engine keep one buffer a shape (``get_dummy_wgrad``) for the whole run.
    """
    optimizer = setting.training.optimizer
    if not setting.training.gradient_fusion or optimizer.sharding == "full":
        return 0
    shapes = {
        weight.local_shape(setting)
        for weight in stage_weights(setting, stage)
        if len(weight.shape) == 2 and weight.divided
    }
    if not stage.last and stage.first:
        # An embedding has no product.
        shapes.discard((setting.vocab_rows, setting.model.hidden_size))
    return sum(setting.itemsize * rows * columns for rows, columns in shapes)


def gathered(setting: Setting, stage: Stage) -> int:
    """Gathered weights with full sharding: embedding and head, and two of the largest layers.

    The table's unit stays gathered from forward to backward (FSDP's root); one layer is at work while
    the next is on its way. Not measured.
    """
    if setting.training.optimizer.sharding != "full":
        return 0
    model = setting.model
    tables = setting.vocab_rows * model.hidden_size * (1 if model.tied else 2)
    largest = max(
        sum(weight.local_count(setting) for block in layer for weight in block.weights())
        for layer in stage.layers
    )
    return setting.itemsize * (tables + 2 * largest)


def gathered_gradient(setting: Setting, stage: Stage) -> int:
    """The head's whole ``grad_weight`` with full sharding: FSDP reduces its root's gradients last."""
    if setting.training.optimizer.sharding != "full" or not stage.last:
        return 0
    return setting.itemsize * setting.vocab_rows * setting.model.hidden_size


def libraries(setting: Setting, *, stock_head: bool) -> int:
    """Buffers that stay: Transformer Engine's workspace, rotary angles, the batch, its mask.

    And Megatron's global memory buffer, as large as the largest of its uses: the scores that its own
    attention multiplies into, the hidden states that its own products gather.
    """
    training, model = setting.training, setting.model
    held = BATCH_BYTES * setting.num_tokens
    if training.transformer_engine:
        held += CUBLAS_WORKSPACE
    if model.rotary:
        held += blocks.FP32 * model.head_dim * training.sequence // setting.parallel.context
    if training.attention_mask:
        held += training.micro_batch * training.sequence**2
    scores = rows = 0
    if not training.flash_attention:
        heads = model.num_attention_heads // setting.parallel.tensor
        scores = setting.itemsize * heads * training.sequence * setting.num_tokens
    if stock_head or not training.transformer_engine:
        rows = round(blocks.gathered_row(setting) * setting.num_tokens)
    if model.mixture and model.mixture.gathers:
        parallel = setting.parallel
        ranks = parallel.expert * parallel.expert_tensor
        gathered = (
            setting.itemsize * model.hidden_size * setting.num_tokens * ranks // parallel.sequence_parts
        )
        rows = max(rows, gathered)
    return held + max(scores, rows)
