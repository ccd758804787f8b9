"""The parts of a layer: their weights, and the bytes a token that they keep for the backward.

A layer of a GPT is attention and an MLP (or experts); a layer of a hybrid model is one block. Every
figure is bytes for one of the ``T`` tokens of the tensor-parallel group, on one rank.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, which these come to for the layer of
that paper (``tests/plan/test_sums.py``), with what has changed since:

- flash attention keeps one fp32 a head and token where attention kept its scores;
- with grouped queries, keys and values are smaller than queries;
- a gated MLP (SwiGLU) has a first GEMM of twice the size.

The bytes that a block's backward needs beside its kept tensors were derived from Transformer Engine's and
Megatron's code (which tensors are alive at once) and checked to 1 MiB against runs of dense models on an H200
(docs/plan.md). Experts and latent attention were not measured, Mamba mixers once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megatron_fused_ce.plan.setting import DecoderSizes, Mixture, Setting

FP32 = 4
#: Of a dropout's mask.
MASK = 1
#: Tokens of a chunk of a Mamba mixer's scan (Megatron's MambaMixer).
SCAN_CHUNK = 128


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, or one of each expert."""

    shape: tuple[int, ...]
    #: divided over the tensor-parallel ranks
    divided: bool = False
    #: of that many experts, which are divided over the expert-parallel ranks
    experts: int = 0

    @property
    def count(self) -> int:
        return prod(self.shape) * (self.experts or 1)

    def local_shape(self, setting: Setting) -> tuple[int, ...]:
        """Of one rank (and one expert)."""
        parallel = setting.parallel
        ranks = parallel.expert_tensor if self.experts else parallel.tensor
        return (self.shape[0] // (ranks if self.divided else 1), *self.shape[1:])

    def local_count(self, setting: Setting) -> int:
        experts = self.experts // setting.parallel.expert if self.experts else 1
        parallel = setting.parallel
        ranks = parallel.expert_tensor if self.experts else parallel.tensor
        return prod(self.shape) * experts // (ranks if self.divided else 1)


@dataclass(frozen=True)
class Block:
    """One part of a layer, behind its own norm and with its own residual connection."""

    model: DecoderSizes

    def weights(self) -> Iterator[Weight]:
        """All parameters but the block's norms."""
        raise NotImplementedError

    def norms(self) -> Iterator[Weight]:
        yield Weight((self.model.norm_size,))
        if self.model.post_norms:
            yield Weight((self.model.norm_size,))

    def inner(self, setting: Setting) -> dict[str, float]:
        """Bytes kept between the block's norm and its output, by name."""
        raise NotImplementedError

    def backward(self, setting: Setting) -> float:
        """Most bytes of its backward, beside the kept ones and the gradient of its output."""
        raise NotImplementedError

    def recomputed(self, setting: Setting) -> set[str]:
        """Names of :meth:`kept` that ``--recompute-modules`` computes again."""
        raise NotImplementedError

    def kept(self, setting: Setting) -> dict[str, float]:
        """All kept bytes, the block's input first, without recomputation."""
        row = _row(setting)
        parts = {"input": row, "norm output": row, **self.inner(setting)}
        if self.model.post_norms:
            parts["post norm input"] = row
        if setting.training.hidden_dropout:
            parts["dropout mask"] = MASK * self.model.hidden_size / setting.parallel.sequence_parts
        return parts

    def dropped(self, setting: Setting) -> set[str]:
        """The parts of :meth:`kept` that are computed again in this setting."""
        modules = setting.training.recompute.modules
        norm = "layernorm" in modules and not self.norm_in_product(setting)
        return self.recomputed(setting) | ({"norm output"} if norm else set())

    def norm_in_product(self, setting: Setting) -> bool:
        """Whether Transformer Engine's first product runs the norm: ``layernorm`` then means none."""
        return setting.training.transformer_engine


def _row(setting: Setting) -> float:
    """A token's hidden states where norms, residuals and dropout are divided: ``e*H/p``."""
    return setting.itemsize * setting.model.hidden_size / setting.parallel.sequence_parts


def gathered_row(setting: Setting) -> float:
    """A token's hidden states gathered for a GEMM: a copy with sequence parallelism, else none."""
    return setting.itemsize * setting.model.hidden_size * (setting.parallel.sequence_parts > 1)


def _scores(setting: Setting) -> float:
    """Softmax, and with dropout its mask and its result, of one token against the sequence."""
    training = setting.training
    an_entry = setting.itemsize * (1 + training.attention_dropout) + MASK * training.attention_dropout
    return an_entry * setting.model.num_attention_heads / setting.parallel.tensor * training.sequence


def _angles(setting: Setting, size: int) -> float:
    """Without the fused kernel each rotation keeps a cosine and a sine of its own, one for all sequences of a
    micro-batch (Megatron's rope_utils.py)."""
    return 2 * 2 * setting.itemsize * size / setting.training.micro_batch


def _inside(setting: Setting, query: int) -> float:
    """What attention's backward sums, over all ranks: fp32 gradients of the queries, or the scores' two."""
    training = setting.training
    if training.flash_attention:
        return FP32 * query
    return 2 * setting.itemsize * setting.model.num_attention_heads * training.sequence


@dataclass(frozen=True)
class Attention(Block):
    """Multi-head attention with grouped queries."""

    @property
    def _query(self) -> int:
        return self.model.num_attention_heads * self.model.head_dim

    @property
    def _key_value(self) -> int:
        return 2 * self.model.num_query_groups * self.model.head_dim

    def weights(self) -> Iterator[Weight]:
        model, rows = self.model, self._query + self._key_value
        yield Weight((rows, model.hidden_size), divided=True)
        yield Weight((model.hidden_size, self._query), divided=True)
        if model.linear_bias or model.qkv_bias:
            yield Weight((rows,), divided=True)
        if model.linear_bias:
            yield Weight((model.hidden_size,))
        if model.qk_norm:
            size = model.head_dim * (1 if model.rms_norm else 2)
            yield from (Weight((size,)), Weight((size,)))

    def inner(self, setting: Setting) -> dict[str, float]:
        e, t = setting.itemsize, setting.parallel.tensor
        kept = {
            "queries, keys, values": e * (self._query + self._key_value) / t,
            "attention output": e * self._query / t,
        }
        if setting.training.flash_attention:
            kept["softmax statistics"] = FP32 * self.model.num_attention_heads / t
        else:
            kept["scores"] = _scores(setting)
            if self.model.rotary:
                # The rotated copies; values are a view of all three, which stay as they are.
                kept["rotated queries, keys"] = e * (self._query + self._key_value / 2) / t
        if self.model.rotary and not setting.training.rope_fusion:
            kept["cosines, sines"] = _angles(setting, self.model.head_dim)
        if self.model.qk_norm:
            kept["queries, keys before their norm"] = e * (self._query + self._key_value / 2) / t
        return kept

    def backward(self, setting: Setting) -> float:
        """Gradients of output, queries, keys and values; fp32 sums of the queries', or the scores' two."""
        e, t = setting.itemsize, setting.parallel.tensor
        return (e * (2 * self._query + self._key_value) + _inside(setting, self._query)) / t

    def recomputed(self, setting: Setting) -> set[str]:
        modules = setting.training.recompute.modules
        return {"softmax statistics", "scores"} if "core_attn" in modules else set()


@dataclass(frozen=True)
class LatentAttention(Block):
    """Multi-head latent attention: queries, keys and values from two low-rank vectors."""

    def _sizes(self) -> tuple[int, int, int]:
        """Columns of queries (and of keys), of values, and of the two low-rank vectors."""
        latent, heads = self.model.latent, self.model.num_attention_heads
        assert latent is not None
        query = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
        low = (latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        return query, heads * latent.v_head_dim, low

    def norm_in_product(self, setting: Setting) -> bool:
        return False

    def weights(self) -> Iterator[Weight]:
        latent, hidden = self.model.latent, self.model.hidden_size
        assert latent is not None
        query, value, _ = self._sizes()
        if latent.q_lora_rank is None:
            yield Weight((query, hidden), divided=True)
        else:
            yield Weight((latent.q_lora_rank, hidden))
            yield Weight((query, latent.q_lora_rank), divided=True)
        yield Weight((latent.kv_lora_rank + latent.qk_pos_emb_head_dim, hidden))
        if self.model.qk_norm:
            each = 1 if self.model.rms_norm else 2
            yield Weight((each * (latent.q_lora_rank or 0),))
            yield Weight((each * latent.kv_lora_rank,))
        up = self.model.num_attention_heads * latent.qk_head_dim + value
        yield Weight((up, latent.kv_lora_rank), divided=True)
        yield Weight((hidden, value), divided=True)

    def inner(self, setting: Setting) -> dict[str, float]:
        e, t, p = setting.itemsize, setting.parallel.tensor, setting.parallel.sequence_parts
        query, value, low = self._sizes()
        flash, latent = setting.training.flash_attention, self.model.latent
        assert latent is not None
        angles = 0.0 if setting.training.rope_fusion else _angles(setting, latent.qk_pos_emb_head_dim)
        return {
            "low-rank vectors": 2 * e * low / p + angles,  # before and behind their norms
            "queries, keys, values": e * (2 * query + value) / t,
            "attention output": e * value / t,
            "softmax statistics": FP32 * self.model.num_attention_heads / t if flash else _scores(setting),
        }

    def backward(self, setting: Setting) -> float:
        query, value, _ = self._sizes()
        t = setting.parallel.tensor
        return (setting.itemsize * (2 * query + 2 * value) + _inside(setting, query)) / t

    def recomputed(self, setting: Setting) -> set[str]:
        modules = setting.training.recompute.modules
        names = {"softmax statistics"} if "core_attn" in modules else set()
        return names | ({"queries, keys, values"} if "mla_up_proj" in modules else set())


@dataclass(frozen=True)
class MLP(Block):
    """Two GEMMs with an activation between them, gated or not."""

    def weights(self) -> Iterator[Weight]:
        yield from _mlp_weights(self.model, self.model.ffn_hidden_size)

    def inner(self, setting: Setting) -> dict[str, float]:
        e, t, rows = setting.itemsize, setting.parallel.tensor, self.model.ffn_hidden_size
        return {
            "first product": e * _gates(self.model) * rows / t,
            "activation": e * rows / t,
        }

    def backward(self, setting: Setting) -> float:
        inner = self.inner(setting)
        return _mlp_backward(inner["first product"], inner["activation"], setting)

    def recomputed(self, setting: Setting) -> set[str]:
        if "mlp" not in setting.training.recompute.modules:
            return set()
        return {"first product", "activation"} | ({"norm output"} if self.norm_in_product(setting) else set())


def _gates(model: DecoderSizes) -> int:
    return 2 if model.gated else 1


def _mlp_weights(model: DecoderSizes, rows: int, experts: int = 0) -> Iterator[Weight]:
    columns = _gates(model) * rows
    yield Weight((columns, model.hidden_size), divided=True, experts=experts)
    yield Weight((model.hidden_size, rows), divided=True, experts=experts)
    if model.linear_bias:
        yield Weight((columns,), divided=True, experts=experts)
        yield Weight((model.hidden_size,), experts=experts)


def _mlp_backward(first: float, activation: float, setting: Setting) -> float:
    """The largest of three moments, beside the first GEMM's result, the activation and the output's gradient.

    - second GEMM: its gathered gradient and the gradient of the activation
    - activation: the gradient of the first GEMM's result (the activation itself is freed)
    - first GEMM: its gathered input and that input's gradient; its result and the activation are freed
    """
    gathered = gathered_row(setting)
    row = setting.itemsize * setting.model.hidden_size
    return max(gathered + activation, first, gathered + row - activation)


@dataclass(frozen=True)
class Experts(Block):
    """A mixture of experts, each an MLP, and a shared one beside them; tokens spread evenly."""

    @property
    def _mixture(self) -> Mixture:
        assert self.model.mixture is not None
        return self.model.mixture

    def norm_in_product(self, setting: Setting) -> bool:
        return False

    def weights(self) -> Iterator[Weight]:
        model, mixture = self.model, self._mixture
        yield Weight((mixture.num_experts, model.hidden_size))
        yield from _mlp_weights(model, mixture.ffn_hidden_size, mixture.num_experts)
        if mixture.shared_ffn_hidden_size:
            yield from _mlp_weights(model, mixture.shared_ffn_hidden_size)

    def _routed(self, setting: Setting) -> tuple[float, float]:
        """Rows of a rank's experts for one token, and the ranks that divide an expert."""
        parallel = setting.parallel
        tokens = self._mixture.load * self._mixture.topk * parallel.expert_tensor / parallel.tensor
        return tokens, parallel.expert_tensor

    def inner(self, setting: Setting) -> dict[str, float]:
        e, t, p = setting.itemsize, setting.parallel.tensor, setting.parallel.sequence_parts
        mixture = self._mixture
        tokens, ranks = self._routed(setting)
        kept = {
            "router": 2 * FP32 * mixture.num_experts / p,
            "dispatched tokens": e * tokens * self.model.hidden_size,
            "first product": e * tokens * _gates(self.model) * mixture.ffn_hidden_size / ranks,
            "activation": e * tokens * mixture.ffn_hidden_size / ranks,
        }
        if not self.model.gated:
            # The router's weight is multiplied in behind it; a gate's fused kernel keeps neither.
            kept["activation before its weight"] = kept["activation"]
        if shared := mixture.shared_ffn_hidden_size:
            kept["shared expert"] = e * (_gates(self.model) + 1) * shared / t
        return kept

    def backward(self, setting: Setting) -> float:
        """As an MLP's over the dispatched tokens, whose gradients are sorted by expert in a copy first."""
        inner = self.inner(setting)
        dispatched, activation = inner["dispatched tokens"], inner["activation"]
        return max(2 * dispatched, dispatched + activation, inner["first product"])

    def recomputed(self, setting: Setting) -> set[str]:
        modules, kept = setting.training.recompute.modules, set(self.inner(setting))
        names = {"activation", "activation before its weight"} & kept if "moe_act" in modules else set()
        names |= {"shared expert"} & kept if "shared_experts" in modules else set()
        return kept if "moe" in modules else names


@dataclass(frozen=True)
class Mamba(Block):
    """A Mamba-2 mixer with Megatron's memory-efficient path, which keeps the input product's result."""

    def weights(self) -> Iterator[Weight]:
        space, hidden = self.model.state_space, self.model.hidden_size
        assert space is not None
        yield Weight((self._product_size, hidden), divided=True)
        yield Weight((space.conv_size, space.conv_width), divided=True)
        yield Weight((space.conv_size,), divided=True)
        for _ in ("dt_bias", "A_log", "D"):
            yield Weight((space.num_heads,), divided=True)
        yield Weight((space.inner_size,), divided=True)  # its gated norm
        yield Weight((hidden, space.inner_size), divided=True)

    @property
    def _product_size(self) -> int:
        """Columns of the input product: gate, convolved part, time steps."""
        space = self.model.state_space
        assert space is not None
        return space.inner_size + space.conv_size + space.num_heads

    def inner(self, setting: Setting) -> dict[str, float]:
        """The scan saves its result before the gate, the norm the gated one, the output product its input."""
        e, t, space = setting.itemsize, setting.parallel.tensor, self.model.state_space
        assert space is not None
        return {
            "input product": e * self._product_size / t,
            "scan, gate and norm": (3 * e * space.inner_size + FP32 * space.num_groups) / t,
        }

    def backward(self, setting: Setting) -> float:
        """While the states' gradients pass from chunk to chunk, the norm's saved tensors gone.

        Gradients of the scan behind and before its gate and of the input product; the convolved part again
        and its gradient; states and their gradients of every chunk, in fp32 and in the training's dtype;
        products of ``B`` and ``C`` within a chunk.
        """
        e, t, space = setting.itemsize, setting.parallel.tensor, self.model.state_space
        assert space is not None
        inner = space.inner_size
        rows = e * (2 * inner + self._product_size + 2 * space.conv_size - 2 * inner)
        states = (2 * FP32 + 2 * e) * inner * space.state_dim / SCAN_CHUNK
        return (rows + states + FP32 * space.num_groups * SCAN_CHUNK) / t

    def recomputed(self, setting: Setting) -> set[str]:
        return set()


Layer = tuple[Block, ...]


@lru_cache(maxsize=64)
def layers(model: DecoderSizes) -> tuple[Layer, ...]:
    """Every decoder layer, first to last; those of a kind are one object."""
    if model.pattern:
        kinds = {letter: (block,) for letter, block in _kinds(model).items()}
        return tuple(kinds[letter] for letter in model.pattern)
    dense, mixed = (_attention(model), MLP(model)), (_attention(model), Experts(model))
    mixture = model.mixture
    return tuple(mixed if mixture and mixture.layers[index] else dense for index in range(model.num_layers))


def _attention(model: DecoderSizes) -> Block:
    return LatentAttention(model) if model.latent else Attention(model)


def _kinds(model: DecoderSizes) -> dict[str, Block]:
    """Blocks of a hybrid model by their letters."""
    return {"M": Mamba(model), "*": _attention(model), "-": MLP(model), "E": Experts(model)}


@lru_cache(maxsize=64)
def prediction_layer(model: DecoderSizes) -> Layer:
    """The layers of one depth of multi-token prediction; without a pattern the last decoder layer's kind."""
    if model.prediction_pattern:
        return tuple(_kinds(model)[letter] for letter in model.prediction_pattern)
    return layers(model)[-1]


def prediction_weights(model: DecoderSizes) -> Iterator[Weight]:
    """Of one depth of multi-token prediction, beside its layer: the product of both inputs, three norms."""
    yield Weight((model.hidden_size, 2 * model.hidden_size), divided=True)
    yield from (Weight((model.norm_size,)) for _ in range(3))
