"""Models by name: Megatron's arguments, the parameters that the makers publish, and the source of both.

Sizes are those of the ``config.json`` that each model is published with (``source`` names it), checked
against Megatron settings of others: NeMo at 8cfedd7 (``nemo/collections/llm/gpt/model``: Llama, Qwen,
DeepSeek), Megatron-Bridge at 067f987 (``docs/models``: Nemotron, Gemma, GPT-OSS, GLM, Mistral) and slime at
624b824 (``scripts/models``: Qwen3, GLM, Kimi, Moonlight). ``tests/tools/test_estimate.py`` counts them.

Counted otherwise than they are: Gemma's GELU gate as SwiGLU; OLMo 2's norms, behind its blocks alone, as one
before each; GPT-OSS's windows and sinks as plain attention.
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
    #: the figure is the checkpoint's: with multi-token prediction, and its copies of embedding and head
    with_prediction: bool = False


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


def _plain(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    vocab: int,
    published: str,
    source: str,
    more: str = "",
) -> NamedModel:
    sizes = _sizes(layers, hidden, ffn, heads, groups, vocab)
    return NamedModel(" ".join(f"{sizes} {_UNTIED} {more}".split()), published, source)


def _olmo2(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, published: str, name: str
) -> NamedModel:
    source = f"allenai/{name}"
    return _plain(layers, hidden, ffn, heads, groups, 100352, published, source, "--qk-layernorm")


def _gemma3(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    width: int,
    vocab: int,
    published: str,
    name: str,
) -> NamedModel:
    sizes = _sizes(layers, hidden, ffn, heads, groups, vocab)
    return NamedModel(
        f"{sizes} --kv-channels {width} --qk-layernorm --post-norms", published, f"google/{name}"
    )


def _gpt_oss(layers: int, experts: int, published: str, name: str) -> NamedModel:
    sizes = _sizes(layers, 2880, 2880, 64, 8, 201088).replace(" --disable-bias-linear", "")
    mixture = _experts(experts, 4, 2880, 0)
    return NamedModel(f"{sizes} --kv-channels 64 {_UNTIED} {mixture}", published, f"openai/{name}")


def _latent(
    layers: int, dense: int, hidden: int, ffn: int, heads: int, vocab: int, experts: str, published: str,
    source: str, queries: str = "--q-lora-rank 1536", more: str = "",
) -> NamedModel:  # fmt: skip
    """DeepSeek-V3 and its kin."""
    return NamedModel(
        "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
        f" --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads}"
        f" --vocab-size {vocab} {_UNTIED} --multi-latent-attention --qk-layernorm --kv-channels 128"
        f" {queries} --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 {experts}"
        f" --moe-layer-freq [0]*{dense}+[1]*{layers - dense} --expert-tensor-parallel-size 1{more}",
        published,
        source,
    )


def _glm(
    layers: int, dense: int, hidden: int, ffn: int, experts: str, published: str, name: str, more: str = ""
) -> NamedModel:
    sizes = f"{_sizes(layers, hidden, ffn, 96, 8, 151552)} --kv-channels 128 --add-qkv-bias {_UNTIED}{more}"
    layout = f"--moe-layer-freq [0]*{dense}+[1]*{layers - dense} --mtp-num-layers 1"
    return NamedModel(f"{sizes} {experts} {layout}", published, f"zai-org/{name}", with_prediction=True)


def _nemotron_h(pattern: str, sizes: str, published: str, name: str) -> NamedModel:
    return NamedModel(
        "--disable-bias-linear --normalization RMSNorm --position-embedding-type none"
        f" --hybrid-layer-pattern {pattern} {sizes} --kv-channels 128 --group-query-attention"
        f" --num-query-groups 8 --vocab-size 131072 {_UNTIED} --mamba-state-dim 128 --mamba-num-groups 8",
        published,
        f"nvidia/{name}",
    )


def _experts(count: int, topk: int, ffn: int, shared: int) -> str:
    return (
        f"--num-experts {count} --moe-router-topk {topk} --moe-ffn-hidden-size {ffn}"
        f" --moe-shared-expert-intermediate-size {shared}"
    )


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
    "llama-3.1-405b": _llama3(126, 16384, 53248, 128, "405.85", "Llama-3.1-405B"),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, "3.21", "Llama-3.2-3B", untied=False),
    "llama-2-13b": _plain(40, 5120, 13824, 40, 40, 32000, "13.02", "meta-llama/Llama-2-13b-hf"),
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
    "gemma-3-1b": _gemma3(26, 1152, 6912, 4, 1, 256, 262144, "1.00", "gemma-3-1b-pt"),
    "gemma-3-12b": _gemma3(48, 3840, 15360, 16, 8, 256, 262208, "11.77", "gemma-3-12b-pt"),
    "gemma-3-27b": _gemma3(62, 5376, 21504, 32, 16, 128, 262208, "27.01", "gemma-3-27b-pt"),
    "mistral-7b": _plain(32, 4096, 14336, 32, 8, 32768, "7.25", "mistralai/Mistral-7B-v0.3"),
    "mistral-nemo-12b": _plain(
        40, 5120, 14336, 32, 8, 131072, "12.25", "mistralai/Mistral-Nemo-Base-2407", "--kv-channels 128"
    ),
    "mistral-small-24b": _plain(
        40, 5120, 32768, 32, 8, 131072, "23.57", "mistralai/Mistral-Small-24B-Base-2501", "--kv-channels 128"
    ),
    "olmo-2-7b": _olmo2(32, 4096, 11008, 32, 32, "7.30", "OLMo-2-1124-7B"),
    "olmo-2-13b": _olmo2(40, 5120, 13824, 40, 40, "13.72", "OLMo-2-1124-13B"),
    "olmo-2-32b": _olmo2(64, 5120, 27648, 40, 8, "32.23", "OLMo-2-0325-32B"),
    "gpt-oss-20b": _gpt_oss(24, 32, "20.91", "gpt-oss-20b"),
    "gpt-oss-120b": _gpt_oss(36, 128, "116.83", "gpt-oss-120b"),
    "deepseek-v3": _latent(
        61, 3, 7168, 18432, 128, 129280, _experts(256, 8, 2048, 2048), "671", "deepseek-ai/DeepSeek-V3",
        more=" --mtp-num-layers 1",
    ),
    "kimi-k2": _latent(
        61, 1, 7168, 18432, 64, 163840, _experts(384, 8, 2048, 2048), "1026", "moonshotai/Kimi-K2-Base"
    ),
    "moonlight-16b-a3b": _latent(
        27, 1, 2048, 11264, 16, 163840, _experts(64, 6, 1408, 2816), "15.96", "moonshotai/Moonlight-16B-A3B",
        queries="",
    ),
    "glm-4.5": _glm(
        92, 3, 5120, 12288, _experts(160, 8, 1536, 1536), "358", "GLM-4.5", " --qk-layernorm"
    ),
    "glm-4.5-air": _glm(46, 1, 4096, 10944, _experts(128, 8, 1408, 1408), "110", "GLM-4.5-Air"),
    "nemotron-h-8b": _nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "--hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --mamba-num-heads 128"
        " --mamba-head-dim 64",
        "8.1",
        "Nemotron-H-8B-Base-8K",
    ),
    "nemotron-nano-2-12b": _nemotron_h(
        "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        "--hidden-size 5120 --ffn-hidden-size 20480 --num-attention-heads 40 --mamba-num-heads 128"
        " --mamba-head-dim 80",
        "12.3",
        "NVIDIA-Nemotron-Nano-12B-v2-Base",
    ),
}  # fmt: skip
#: The same sizes under other names.
MODELS |= {
    "llama-3.1-8b": MODELS["llama-3-8b"],
    "llama-3.1-70b": MODELS["llama-3-70b"],
    "llama-3.3-70b": MODELS["llama-3-70b"],
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
