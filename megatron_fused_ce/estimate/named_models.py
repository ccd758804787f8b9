"""Models by name: Megatron's arguments for each, the parameters that its makers publish, and the source.

Sizes are those of the ``config.json`` that each model is published with, checked against NVIDIA's own
Megatron settings: NeMo at 8cfedd7 (``nemo/collections/llm/gpt/model``) and Megatron-Bridge at 067f987
(``docs/models/nemotron``, ``docs/models/gemma``). ``tests/tools/test_estimate.py`` counts their parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class NamedModel:
    #: Megatron's arguments
    arguments: str
    #: billions of parameters as published, multi-token prediction not counted, and where
    published: str
    source: str


_DECODER = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    " --group-query-attention"
)
_UNTIED = "--untie-embeddings-and-output-weights"


def _sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> str:
    return (
        f"{_DECODER} --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn}"
        f" --num-attention-heads {heads} --num-query-groups {groups} --vocab-size {vocab}"
    )


def _llama3(
    layers: int, hidden: int, ffn: int, heads: int, published: str, name: str, untied: bool = True
) -> NamedModel:
    sizes = _sizes(layers, hidden, ffn, heads, 8, 128256)
    return NamedModel(f"{sizes} {_UNTIED}" if untied else sizes, published, f"meta-llama/{name}")


def _qwen25(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, published: str, name: str
) -> NamedModel:
    sizes = _sizes(layers, hidden, ffn, heads, groups, 152064)
    return NamedModel(f"{sizes} --add-qkv-bias {_UNTIED}", published, f"Qwen/{name}")


def _qwen3(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    published: str,
    name: str,
    groups: int = 8,
    more: str = _UNTIED,
) -> NamedModel:
    sizes = _sizes(layers, hidden, ffn, heads, groups, 151936)
    return NamedModel(f"{sizes} --qk-layernorm --kv-channels 128 {more}", published, f"Qwen/{name}")


def _qwen3_experts(ffn: int) -> str:
    return f"{_UNTIED} --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size {ffn}"


MODELS = {
    "llama-3-8b": _llama3(32, 4096, 14336, 32, "8.03", "Meta-Llama-3-8B"),
    "llama-3-70b": _llama3(80, 8192, 28672, 64, "70.55", "Meta-Llama-3-70B"),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, "1.24", "Llama-3.2-1B", untied=False),
    "qwen2.5-7b": _qwen25(28, 3584, 18944, 28, 4, "7.62", "Qwen2.5-7B"),
    "qwen2.5-14b": _qwen25(48, 5120, 13824, 40, 8, "14.77", "Qwen2.5-14B"),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, "0.6", "Qwen3-0.6B", more=""),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, "1.7", "Qwen3-1.7B", more=""),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, "4.02", "Qwen3-4B", more=""),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, "8.19", "Qwen3-8B"),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, "14.77", "Qwen3-14B"),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, "32.76", "Qwen3-32B"),
    "qwen3-30b-a3b": _qwen3(48, 2048, 6144, 32, "30.53", "Qwen3-30B-A3B", groups=4, more=_qwen3_experts(768)),
    "qwen3-235b-a22b": _qwen3(
        94, 4096, 12288, 64, "235.09", "Qwen3-235B-A22B", groups=4, more=_qwen3_experts(1536)
    ),
    "gemma-2-2b": NamedModel(
        # Its gate is a GELU; counted as SwiGLU. Its head softcaps the logits.
        f"{_sizes(26, 2304, 9216, 8, 4, 256000)} --kv-channels 256 --post-norms --fused-ce-logit-softcap 30",
        "2.61",
        "google/gemma-2-2b",
    ),
    "deepseek-v3": NamedModel(
        "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
        " --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128"
        f" --vocab-size 129280 {_UNTIED} --multi-latent-attention --qk-layernorm --kv-channels 128"
        " --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64"
        " --v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048"
        " --moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*58"
        " --mtp-num-layers 1 --expert-tensor-parallel-size 1",
        "671",
        "deepseek-ai/DeepSeek-V3",
    ),
    "nemotron-h-8b": NamedModel(
        "--disable-bias-linear --normalization RMSNorm --position-embedding-type none"
        " --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        " --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --kv-channels 128"
        f" --group-query-attention --num-query-groups 8 --vocab-size 131072 {_UNTIED}"
        " --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8",
        "8.1",
        "nvidia/Nemotron-H-8B-Base-8K",
    ),
}


def known_name(text: str, names: Collection[str] = tuple(MODELS)) -> str:
    """The name in ``names`` that equals ``text``, whatever the case.

    Raises:
        ValueError: no such name; names a close one, else all of them.
    """
    lower = text.lower()
    if lower in names:
        return lower
    close = difflib.get_close_matches(lower, names, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    raise ValueError(f"no model {text!r}; {hint}")


def head_sizes(name: str) -> tuple[int, int]:
    """``H`` and the vocabulary of a named model's head."""
    words = MODELS[name].arguments.split()
    hidden_size, vocab = (int(words[words.index(flag) + 1]) for flag in ("--hidden-size", "--vocab-size"))
    return hidden_size, vocab
