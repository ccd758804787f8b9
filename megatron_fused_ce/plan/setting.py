"""Model, GPUs and training of a plan: sizes only, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.planner.memory import ITEMSIZES

#: Parts of a layer that Megatron's ``--recompute-modules`` computes again, by its own names.
RECOMPUTE_MODULES = (*("core_attn", "layernorm", "mlp", "moe"), *("moe_act", "mla_up_proj", "shared_experts"))

#: Layers of a hybrid model that are counted: Mamba, attention, MLP, experts.
LETTERS = "M*-E"


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts."""

    num_experts: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int
    layers: tuple[bool, ...]  # of each layer: whether its MLP is a mixture
    gathers: bool = False  # tokens are gathered from all ranks of the experts, and each takes its own
    load: float = 1  # tokens that a rank's experts are sent, over an even spread's


@dataclass(frozen=True)
class StateSpace:
    """Sizes of a Mamba-2 mixer."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int = 4


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder, by Megatron's names. ``ValueError`` where they contradict each other."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # rows of the embedding before padding
    ffn_hidden_size: int
    num_query_groups: int
    head_dim: int
    gated: bool = False
    tied: bool = True
    rms_norm: bool = False
    linear_bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # norms behind attention and MLP as well (Gemma 2)
    learned_positions: int = 0  # rows of a learned position embedding; 0 for rotary or none
    rotary: bool = False
    mtp_num_layers: int = 0
    #: one letter a layer, as in ``--hybrid-layer-pattern``: ``M`` Mamba, ``*`` attention, ``-`` MLP,
    #: ``E`` experts; empty for a GPT
    pattern: str = ""
    prediction_pattern: str = ""  # of one depth of multi-token prediction; empty for the last layer's kind
    latent: Latent | None = None
    mixture: Mixture | None = None
    state_space: StateSpace | None = None

    def __post_init__(self) -> None:
        heads, groups, mixture = self.num_attention_heads, self.num_query_groups, self.mixture
        if heads % groups:
            raise ValueError(
                f"{heads} attention heads cannot be divided into {groups} query groups: give "
                "--num-query-groups a divisor of them"
            )
        if mixture and not 1 <= mixture.topk <= mixture.num_experts:
            raise ValueError(
                f"--moe-router-topk {mixture.topk} of {mixture.num_experts} experts: give 1 or more, and no "
                "more than there are"
            )
        if mixture and len(mixture.layers) != self.num_layers:
            raise ValueError(f"--moe-layer-freq lists {len(mixture.layers)} layers of {self.num_layers}")

    @property
    def norm_size(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (1 if self.rms_norm else 2)


@dataclass(frozen=True)
class Parallel:
    """The parallel sizes. ``ValueError`` if they do not divide."""

    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    chunks: int = 1  # model chunks of a pipeline stage (virtual stages)
    first_stage_layers: int | None = None  # where they differ from the others'
    last_stage_layers: int | None = None
    layout: tuple[int, ...] = ()  # layers of each model chunk in the model's order, where they are named
    #: whether embedding and loss count as a layer each, of the first and of the last chunk
    ends_count: tuple[bool, bool] = (False, False)
    optimizer_instances: int = 1  # of the distributed optimizer, each of which has all of it

    def __post_init__(self) -> None:
        model = self.tensor * self.pipeline * self.context
        experts = self.expert * self.expert_tensor * self.pipeline
        of_model = f"TP {self.tensor} x PP {self.pipeline} x CP {self.context}"
        of_experts = f"EP {self.expert} x expert TP {self.expert_tensor} x PP {self.pipeline}"
        for ranks, product in ((model, of_model), (experts, of_experts)):
            if self.gpus % ranks:
                raise ValueError(
                    f"{self.gpus} GPUs cannot be divided into groups of {ranks} ({product}): give --gpus a "
                    f"multiple of {ranks}"
                )
        if self.chunks > 1 and self.pipeline == 1:
            raise ValueError("virtual pipeline stages need --pipeline-model-parallel-size above 1")

    def chunk_layers(self, num_layers: int) -> list[int]:
        """Layers of each model chunk, in the order of the model. ``ValueError`` where they do not divide."""
        layers, parts = sum(self.layout), len(self.layout)
        if self.layout and (layers, parts) == (num_layers, self.pipeline * self.chunks):
            return list(self.layout)
        if self.layout:
            raise ValueError(
                f"--pipeline-model-parallel-layout has {layers} layers in {parts} parts; there are "
                f"{num_layers} layers and {self.pipeline} stages: change one of them"
            )
        ends = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        given = {stage: number for stage, number in ends.items() if number is not None}
        counted = num_layers + sum(self.ends_count)
        a_stage = (counted - sum(given.values())) // max(1, self.pipeline - len(given))
        stages = [given.get(stage, a_stage) for stage in range(self.pipeline)]
        if sum(stages) != counted or any(n < 1 or n % self.chunks for n in stages):
            virtual = f" of {self.chunks} virtual ones each" if self.chunks > 1 else ""
            raise ValueError(
                f"{num_layers} layers cannot be divided into {self.pipeline} pipeline stages{virtual}: give "
                "--decoder-last-pipeline-num-layers, or another number of stages"
            )
        chunks = [number // self.chunks for number in stages] * self.chunks
        chunks[0] -= self.ends_count[0]
        chunks[-1] -= self.ends_count[1]
        return chunks

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def sequence_parts(self) -> int:
        """``p``: ranks over which norms, residuals and dropout are divided."""
        return self.tensor if self.sequence else 1

    def shards(self, experts: bool) -> int:
        """Ranks over which a distributed optimizer divides a parameter, of experts or a dense one."""
        of_experts = self.gpus // (self.expert * self.expert_tensor * self.pipeline)
        ranks = of_experts if experts else self.data * self.context
        return max(1, ranks // self.optimizer_instances)


@dataclass(frozen=True)
class Recompute:
    """Which activations are computed again in the backward."""

    full: bool = False  # every layer keeps its input only
    #: layers between two kept inputs (method uniform), or layers of a chunk that keep only their input
    #: (method block); None for all, one by one
    num_layers: int | None = None
    block: bool = False
    modules: tuple[str, ...] = ()  # of RECOMPUTE_MODULES


@dataclass(frozen=True)
class StepSettings:
    """Batch, precision and implementation of a step."""

    sequence: int
    micro_batch: int = 1
    num_micro_batches: int | None = None  # of a step and data-parallel rank; None: as the pipeline can hold
    dtype: str = "bfloat16"
    recompute: Recompute = Recompute()
    distributed_optimizer: bool = True  # divides the optimizer's states over data-parallel ranks
    #: of one parameter: its gradient; main weight and both moments; what one step adds for each of the shard
    #: (fp32 gradients where they are kept in a lower precision)
    gradient_bytes: int = 4
    state_bytes: float = 12
    step_bytes: int = 0
    transformer_engine: bool = True
    flash_attention: bool = True  # without it attention keeps its scores
    rope_fusion: bool = True  # queries and keys are rotated by one kernel
    attention_dropout: bool = False
    hidden_dropout: bool = False
    attention_mask: bool = False  # [s, s] bytes on the GPU (Megatron makes one unless told not to)
    gradient_fusion: bool = True  # weight gradients go straight into main_grad
    fused_ce: FusedCEConfig = field(default_factory=FusedCEConfig)


@dataclass(frozen=True)
class Setting:
    """A model, its GPUs and its training. ``ValueError`` where they contradict each other."""

    model: DecoderSizes
    parallel: Parallel
    training: StepSettings
    vocab_divisor: int = 128  # the padded vocabulary is a multiple of it times the tensor-parallel size
    padded_vocab: int | None = None  # where a launch names it
    beside: int = 0  # bytes that a measured run held more (or fewer) than its plan

    def __post_init__(self) -> None:
        model, parallel, training = self.model, self.parallel, self.training
        for name, size, ranks in (
            ("attention heads", model.num_attention_heads, parallel.tensor),
            ("rows of an MLP", model.ffn_hidden_size, parallel.tensor),
            ("tokens of a sequence", training.sequence, parallel.context * parallel.sequence_parts),
        ):
            if size % ranks:
                raise ValueError(f"{size} {name} cannot be divided over {ranks} ranks")
        groups, ranks = model.num_query_groups, parallel.tensor
        if groups % ranks and ranks % groups:
            raise ValueError(f"{groups} query groups cannot be divided over {ranks} ranks")
        parallel.chunk_layers(model.num_layers)  # its own checks
        if model.mixture and model.mixture.num_experts % parallel.expert:
            raise ValueError(
                f"{model.mixture.num_experts} experts cannot be divided over {parallel.expert} ranks: "
                "give --expert-model-parallel-size a divisor of them"
            )

    @cached_property
    def padded_vocab_size(self) -> int:
        """As Megatron pads it: to a multiple of the divisor times the tensor-parallel size."""
        multiple = self.vocab_divisor * self.parallel.tensor
        return self.padded_vocab or -(-self.model.vocab_size // multiple) * multiple

    @property
    def itemsize(self) -> int:
        """``e``"""
        return ITEMSIZES[self.training.dtype]

    @property
    def vocab_rows(self) -> int:
        """``V``: rows of the vocabulary that one rank holds."""
        return self.padded_vocab_size // self.parallel.tensor

    @property
    def num_tokens(self) -> int:
        """``T``: tokens of a micro-batch seen by the tensor-parallel group."""
        return self.training.sequence * self.training.micro_batch // self.parallel.context
