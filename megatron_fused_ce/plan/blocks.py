"""The parts of a layer: their weights, and the bytes a token that they keep for the backward.

A layer is a word of letters, those of ``--hybrid-layer-pattern``: a GPT's ``*-`` (attention, MLP) or ``*E``
(experts), a hybrid's one. Every figure is bytes for one of the ``T`` tokens of the tensor-parallel group, on
one rank.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, which these come to for the layer of
that paper (``tests/plan/test_sums.py``), with what has changed since: flash attention keeps one fp32 a head
and token in place of scores; grouped queries have smaller keys and values; a gated MLP a first GEMM of twice
the size. What a backward needs beside was derived from Transformer Engine's and Megatron's code (which
tensors are alive at once) and checked to 1 MiB against runs of dense models on an H200 (docs/plan.md).
Experts and latent attention were not measured, Mamba mixers once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megatron_fused_ce.plan.setting import DecoderSizes, Setting

FP32 = 4
#: Of a dropout's mask.
MASK = 1
#: Tokens of a chunk of a Mamba mixer's scan (Megatron's MambaMixer).
SCAN_CHUNK = 128


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, or one of each expert."""

    shape: tuple[int, ...]
    divided: bool = False  # over the tensor-parallel ranks
    experts: int = 0  # of that many, which are divided over the expert-parallel ranks

    @property
    def count(self) -> int:
        return prod(self.shape) * (self.experts or 1)

    def local_shape(self, setting: Setting) -> tuple[int, ...]:
        """Of one rank (and one expert)."""
        ranks = setting.parallel.expert_tensor if self.experts else setting.parallel.tensor
        return (self.shape[0] // (ranks if self.divided else 1), *self.shape[1:])

    def local_count(self, setting: Setting) -> int:
        return prod(self.local_shape(setting)) * (self.experts // setting.parallel.expert or 1)


@dataclass(frozen=True)
class Block:
    """One part of a layer, behind its own norm and with its own residual connection."""

    weights: tuple[Weight, ...]
    parts: Mapping[str, float]  # bytes kept without recomputation, by name, its input first
    dropped: frozenset[str]  # of these, what --recompute-modules computes again
    backward: float  # most bytes of its backward, beside the kept ones and the gradient of its output

    @property
    def whole(self) -> float:
        return sum(self.parts.values())

    @property
    def kept(self) -> float:
        return sum(size for name, size in self.parts.items() if name not in self.dropped)


def _block(
    setting: Setting,
    weights: list[Weight],
    inner: dict[str, float],
    backward: float,
    modules: Mapping[str, set[str]],
    own_norm: bool = False,
) -> Block:
    """With norms and residual.

    ``inner``: what it keeps between its norm and its output. ``modules``: what each of
    ``--recompute-modules`` drops of it. ``own_norm``: no product of Transformer Engine runs the norm
    (``layernorm`` means those alone).
    """
    model, training, row = setting.model, setting.training, row_bytes(setting)
    parts = {
        **{"input": row, "norm output": row, **inner, "post norm input": row * model.post_norms},
        "dropout mask": MASK * row / setting.itemsize * training.hidden_dropout,
    }
    parts = {name: size for name, size in parts.items() if size}
    alone = {"norm output"} if own_norm or not training.transformer_engine else set()
    modules = {**modules, "layernorm": alone}
    dropped = {name for module in training.recompute.modules for name in modules.get(module, ())}
    norms = [Weight((model.norm_size,))] * (1 + model.post_norms)
    return Block((*weights, *norms), parts, frozenset(dropped), backward)


def row_bytes(setting: Setting) -> float:
    """A token's hidden states where norms, residuals and dropout are divided: ``e*H/p``."""
    return setting.itemsize * setting.model.hidden_size / setting.parallel.sequence_parts


def gathered_row(setting: Setting) -> float:
    """A token's hidden states gathered for a GEMM: a copy with sequence parallelism, else none."""
    return setting.itemsize * setting.model.hidden_size * (setting.parallel.sequence_parts > 1)


def _softmax(setting: Setting, query: int) -> tuple[float, float]:
    """What attention keeps of a token's softmax, and what its backward sums beside the gradients.

    One fp32 a head, and fp32 gradients of the queries; or the scores against the sequence, with dropout its
    mask and its result, too, and two gradients of scores.
    """
    training, e, t = setting.training, setting.itemsize, setting.parallel.tensor
    heads = setting.model.num_attention_heads
    if training.flash_attention:
        return FP32 * heads / t, FP32 * query / t
    an_entry = e * (1 + training.attention_dropout) + MASK * training.attention_dropout
    return an_entry * heads / t * training.sequence, 2 * e * heads * training.sequence / t


def _angles(setting: Setting, size: int) -> float:
    """Cosines and sines that each rotation without the fused kernel keeps, one for all sequences of a
    micro-batch (Megatron's rope_utils.py)."""
    rotates = not setting.training.rope_fusion
    return rotates * 2 * 2 * setting.itemsize * size / setting.training.micro_batch


def _attention(setting: Setting) -> Block:
    """Multi-head attention with grouped queries."""
    model, e, t = setting.model, setting.itemsize, setting.parallel.tensor
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_dim
    key_value = 2 * model.num_query_groups * model.head_dim
    rows, norms = query + key_value, [Weight((model.head_dim * (1 if model.rms_norm else 2),))] * 2
    weights = [
        *(Weight((rows, hidden), divided=True), Weight((hidden, query), divided=True)),
        *[Weight((rows,), divided=True)] * (model.linear_bias or model.qkv_bias),
        *[Weight((hidden,))] * model.linear_bias,
        *norms * model.qk_norm,
    ]
    softmax, sums = _softmax(setting, query)
    queries_keys = e * (query + key_value / 2) / t
    inner = {
        "queries, keys, values": e * rows / t,
        "attention output": e * query / t,
        "softmax": softmax,
        # Of flash attention no copies; values are a view of all three, which stay as they are.
        "rotated queries, keys": queries_keys * (model.rotary and not setting.training.flash_attention),
        "cosines, sines": _angles(setting, model.head_dim) * model.rotary,
        "queries, keys before their norm": queries_keys * model.qk_norm,
    }
    # Gradients of output, queries, keys and values.
    backward = e * (2 * query + key_value) / t + sums
    return _block(setting, weights, inner, backward, {"core_attn": {"softmax"}})


def _latent_attention(setting: Setting) -> Block:
    """Multi-head latent attention: queries, keys and values from two low-rank vectors."""
    model, latent, e, t = setting.model, setting.model.latent, setting.itemsize, setting.parallel.tensor
    assert latent is not None
    hidden, heads, low_query = model.hidden_size, model.num_attention_heads, latent.q_lora_rank or 0
    query, value = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim), heads * latent.v_head_dim
    low_key = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    norm = (low_query + latent.kv_lora_rank) * (1 if model.rms_norm else 2)
    weights = [
        *(Weight((query, low_query or hidden), divided=True), Weight((low_key, hidden))),
        *[Weight((low_query, hidden))] * bool(low_query),
        *[Weight((norm,))] * model.qk_norm,
        Weight((heads * latent.qk_head_dim + value, latent.kv_lora_rank), divided=True),
        Weight((hidden, value), divided=True),
    ]
    softmax, sums = _softmax(setting, query)
    angles = _angles(setting, latent.qk_pos_emb_head_dim)
    inner = {
        # before and behind their norms
        "low-rank vectors": 2 * e * (low_query + low_key) / setting.parallel.sequence_parts + angles,
        "queries, keys, values": e * (2 * query + value) / t,
        "attention output": e * value / t,
        "softmax": softmax,
    }
    modules = {"core_attn": {"softmax"}, "mla_up_proj": {"queries, keys, values"}}
    return _block(setting, weights, inner, e * (2 * query + 2 * value) / t + sums, modules, own_norm=True)


def _mlp_weights(model: DecoderSizes, rows: int, experts: int = 0) -> list[Weight]:
    columns, hidden = (1 + model.gated) * rows, model.hidden_size
    weights = [Weight((columns, hidden), True, experts), Weight((hidden, rows), True, experts)]
    biases = [Weight((columns,), True, experts), Weight((hidden,), experts=experts)]
    return weights + biases * model.linear_bias


def _mlp(setting: Setting) -> Block:
    """Two GEMMs with an activation between them, gated or not.

    Its backward is the largest of three moments, beside the first GEMM's result, the activation and the
    output's gradient:

    - second GEMM: its gathered gradient and the gradient of the activation
    - activation: the gradient of the first GEMM's result (the activation itself is freed)
    - first GEMM: its gathered input and that input's gradient; its result and the activation are freed
    """
    model, rows = setting.model, setting.model.ffn_hidden_size
    activation = setting.itemsize * rows / setting.parallel.tensor
    first, gathered = (1 + model.gated) * activation, gathered_row(setting)
    backward = max(gathered + activation, first, gathered + setting.itemsize * model.hidden_size - activation)
    inner = {"first product": first, "activation": activation}
    # Transformer Engine's first product has the norm in it.
    again = {*inner, *["norm output"] * setting.training.transformer_engine}
    return _block(setting, _mlp_weights(model, rows), inner, backward, {"mlp": again})


def _experts(setting: Setting) -> Block:
    """A mixture of experts, each an MLP, and a shared one beside them; tokens spread evenly, but for the
    busiest rank's load."""
    model, mixture, parallel = setting.model, setting.model.mixture, setting.parallel
    assert mixture is not None
    e, num, shared = setting.itemsize, mixture.num_experts, mixture.shared_ffn_hidden_size
    weights = [Weight((num, model.hidden_size)), *_mlp_weights(model, mixture.ffn_hidden_size, num)]
    weights += _mlp_weights(model, shared) * bool(shared)
    # Rows of a rank's experts for one token.
    sent = e * mixture.load * mixture.topk * parallel.expert_tensor / parallel.tensor
    activation = sent * mixture.ffn_hidden_size / parallel.expert_tensor
    dispatched, first = sent * model.hidden_size, (1 + model.gated) * activation
    inner = {
        "router": 2 * FP32 * num / parallel.sequence_parts,
        "dispatched tokens": dispatched,
        "first product": first,
        "activation": activation,
        # The router's weight is multiplied in behind it; a gate's fused kernel keeps neither.
        "activation before its weight": activation * (not model.gated),
        "shared expert": e * (2 + model.gated) * shared / parallel.tensor,
    }
    # As an MLP's over the dispatched tokens, whose gradients are sorted by expert in a copy first.
    backward = max(2 * dispatched, dispatched + activation, first)
    acts = {"activation", "activation before its weight"}
    modules = {"moe": set(inner), "moe_act": acts, "shared_experts": {"shared expert"}}
    return _block(setting, weights, inner, backward, modules, own_norm=True)


def _mamba(setting: Setting) -> Block:
    """A Mamba-2 mixer with Megatron's memory-efficient path, which keeps the input product's result."""
    model, space, e, t = setting.model, setting.model.state_space, setting.itemsize, setting.parallel.tensor
    assert space is not None
    inner, hidden = space.num_heads * space.head_dim, model.hidden_size
    convolved = inner + 2 * space.num_groups * space.state_dim
    columns = inner + convolved + space.num_heads  # of the input product: gate, convolved part, time steps
    shapes = [(columns, hidden), (convolved, space.conv_width), (convolved,), (inner,)]
    shapes += [(space.num_heads,)] * 3  # dt_bias, A_log, D; before them the gated norm
    weights = [Weight(shape, divided=True) for shape in (*shapes, (hidden, inner))]
    kept = {
        "input product": e * columns / t,
        # The scan saves its result before the gate, the norm the gated one, the output product its input.
        "scan, gate and norm": (3 * e * inner + FP32 * space.num_groups) / t,
    }
    # While the states' gradients pass from chunk to chunk, the norm's saved tensors gone: gradients of the
    # input product; the convolved part again and its gradient; states and their gradients of every chunk,
    # in fp32 and in the training's dtype; products of B and C within a chunk.
    states = (2 * FP32 + 2 * e) * inner * space.state_dim / SCAN_CHUNK
    within = FP32 * space.num_groups * SCAN_CHUNK
    backward = (e * (columns + 2 * convolved) + states + within) / t
    return _block(setting, weights, kept, backward, {})


_BUILDERS: Mapping[str, Callable[[Setting], Block]] = {
    "M": _mamba,
    "*": lambda setting: (_latent_attention if setting.model.latent else _attention)(setting),
    "-": _mlp,
    "E": _experts,
}


def kinds(setting: Setting) -> dict[str, Block]:
    """The blocks of a model, by their letters."""
    letters = set("".join(set(layers(setting.model))) + prediction_layer(setting.model))
    return {letter: _BUILDERS[letter](setting) for letter in letters}


@lru_cache(maxsize=64)
def layers(model: DecoderSizes) -> tuple[str, ...]:
    """The letters of every decoder layer, first to last."""
    mixture = model.mixture.layers if model.mixture else (False,) * model.num_layers
    return tuple(model.pattern) or tuple("*E" if mixed else "*-" for mixed in mixture)


def prediction_layer(model: DecoderSizes) -> str:
    """The layers of one depth of multi-token prediction; without a pattern the last decoder layer's kind."""
    return model.prediction_pattern or layers(model)[-1]
