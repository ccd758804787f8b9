"""The moments of a training step at which a GPU holds most, and which of them is the peak.

Three moments of each pipeline stage, each a sum of named parts:

``head``
    the loss: activations of every layer until its backward, and the head's own peak
``layers``
    the backward of one layer, the largest: its kept or recomputed tensors, and its gradients
``step``
    the optimizer's step: no activations, but the optimizer's copies

In each of them weights, gradients, optimizer and the libraries' buffers. Megatron with ``--bf16`` has 2 bytes
of weight, 4 of gradient (``main_grad`` in fp32) and 12 of optimizer (fp32 weight and two moments) for a
parameter; its distributed optimizer divides the last 12 over the data- and context-parallel ranks. Not in it:
the allocator's fragments and what the driver, NCCL and kernels hold beside it, a GPU's ``overhead``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_fused_ce.plan import blocks
from megatron_fused_ce.plan.blocks import Weight
from megatron_fused_ce.plan.heads import CUBLAS_WORKSPACE, HeadMemory
from megatron_fused_ce.plan.setting import Parallel, Setting

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


@dataclass(frozen=True)
class Moment:
    """Bytes on one GPU at one moment, part by part."""

    name: str
    stage: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """A step with one way of computing the loss."""

    head: HeadMemory
    moments: tuple[Moment, ...]  # the worst of each kind, largest first
    #: "fits", "tight", "does not fit", "over budget" where the launch would refuse its budget
    verdict: str = ""

    @property
    def bound(self) -> Moment:
        return self.moments[0]

    @property
    def peak(self) -> int:
        return self.bound.total

    def moment(self, name: str) -> Moment:
        return next(moment for moment in self.moments if moment.name == name)


def estimate(setting: Setting, head: HeadMemory, *, last_stage: bool = False) -> Estimate:
    """The largest moment of each kind over all stages, or of the last one alone."""
    looked_at = stages(setting)[-1 if last_stage else 0 :]
    worst: dict[str, Moment] = {}
    for moment in (moment for stage in looked_at for moment in _moments(setting, stage, head)):
        if moment.name not in worst or moment.total > worst[moment.name].total:
            worst[moment.name] = moment
    return Estimate(head, tuple(sorted(worst.values(), key=lambda moment: moment.total, reverse=True)))


def _moments(setting: Setting, stage: Stage, head: HeadMemory) -> Iterator[Moment]:
    activations = Activations(setting, stage)
    held = static(setting, stage)
    copies = held.pop("optimizer's copies")
    held |= {
        "dummy gradients": dummy_gradients(setting, stage),
        "libraries": libraries(setting, stock_head=head.stock and stage.last),
        "measured beside the plan": setting.beside,
    }
    if stage.last:
        # The final norm's input and output, for each use of the head.
        norm = round(2 * activations.row * (1 + setting.model.mtp_num_layers) * setting.num_tokens)
        at_head = {"activations": activations.waiting(), "final norm": norm, "head": head.peak}
        yield Moment("head", stage.index, held | at_head)
    workspaces = {"cuBLAS workspaces": head.workspaces if stage.last else 0}
    yield Moment("layers", stage.index, held | activations.worst_backward() | workspaces)
    yield Moment("step", stage.index, held | workspaces | {"optimizer's copies": copies})


class Activations:
    """Bytes that the layers of one stage keep, and that their backward needs."""

    def __init__(self, setting: Setting, stage: Stage) -> None:
        self.setting, self.stage, self.recompute = setting, stage, setting.training.recompute
        self.kinds = blocks.kinds(setting)
        self.row = blocks.row_bytes(setting)
        predicted = setting.model.mtp_num_layers if stage.last else 0
        #: The chunk that ends at the head, or at the next stage: its backward runs first.
        last = next((chunk for chunk in reversed(stage.chunks) if chunk), ())  # a layout may leave one empty
        self.ends_full = bool(stage.chunks[-1]) or predicted > 0
        self.last = (*last, *[blocks.prediction_layer(setting.model)] * predicted)
        self.kept = self._kept_by_layer(self.last)
        for depth in range(len(self.last) - predicted, len(self.last)):
            # Both inputs of a depth, and the two joined.
            self.kept[depth] += 4 * self.row

    def waiting(self) -> int:
        """Bytes kept by all layers when the last forward is done; a layout may end with an empty chunk."""
        return self._bytes(self._other_chunks() + (sum(self.kept) if self.ends_full else 0))

    def worst_backward(self) -> dict[str, int]:
        """The layer at whose backward most bytes are held; the layers before it still keep theirs."""
        before = accumulate(self.kept, initial=self._other_chunks())
        working_at = zip(before, map(self._backward, range(len(self.last))), strict=False)
        waiting, working = max(working_at, key=sum, default=(0.0, 0.0))
        return {"activations": self._bytes(waiting), "layer at work": self._bytes(working)}

    def _bytes(self, a_token: float) -> int:
        return round(a_token * self.setting.num_tokens)

    def _other_chunks(self) -> float:
        """Chunks of other micro-batches, and earlier ones of this, that wait; embeddings' masks."""
        parallel, micro_batches = self.setting.parallel, self.setting.training.num_micro_batches
        # Chunks whose backward has not run, at most, in Megatron's 1F1B schedules.
        behind, chunks = parallel.pipeline - self.stage.index - 1, parallel.chunks
        in_flight = behind + 1 if chunks == 1 else 2 * behind + (chunks - 1) * parallel.pipeline + 1
        if micro_batches is not None:
            in_flight = min(in_flight, micro_batches * chunks)
        held = (in_flight - 1) * max(sum(self._kept_by_layer(chunk)) for chunk in self.stage.chunks)
        if self.stage.first and self.setting.training.hidden_dropout:
            mask = blocks.MASK * self.setting.model.hidden_size / parallel.sequence_parts
            held += mask * -(-in_flight // len(self.stage.chunks))
        return held

    def _kept_by_layer(self, chunk: tuple[str, ...]) -> list[float]:
        recompute, kept = self.recompute, []
        for index, layer in enumerate(chunk):
            if self._keeps_its_input_only(index):
                begins = recompute.block or index % (recompute.num_layers or 1) == 0
                kept.append(self.row if begins else 0.0)
            else:
                kept.append(sum(self.kinds[letter].kept for letter in layer))
        return kept

    def _keeps_its_input_only(self, index: int) -> bool:
        recompute = self.recompute
        return recompute.full and not (recompute.block and index >= (recompute.num_layers or 1))

    def _backward(self, index: int) -> float:
        """Most bytes of a layer in its backward: its blocks up to the current one, and gradients.

        Blocks behind the current one are freed. A recomputed layer is there as a whole, with its output and
        the layers of its unit before it (method uniform), beside the input that the unit kept.
        """
        again, before, worst = self._keeps_its_input_only(index), 0.0, 0.0
        for block in (self.kinds[letter] for letter in self.last[index]):
            worst = max(worst, before + block.whole + block.backward)
            before += block.whole if again else block.kept
        if not again:
            return worst + self.row
        begin = index if self.recompute.block else index - index % (self.recompute.num_layers or 1)
        unit = sum(self.kinds[letter].whole for letter in "".join(self.last[begin:index]))
        return worst + 2 * self.row + unit - (self.row if index > begin else 0.0)
