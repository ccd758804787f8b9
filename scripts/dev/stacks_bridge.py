"""Heads of models that NVIDIA's Megatron-Bridge builds: rows of :mod:`.stacks`, flag off against flag on.

Each family goes the way of Bridge's users: a small Hugging Face config, AutoBridge, a provider, its
finalize() and the model that it builds. Model class, embedding, output layer and loss are Bridge's own; the
decoder is Megatron's without Transformer Engine, so families that differ only there are left out. Mocks stand
in for Transformer Engine, ModelOpt and the resiliency package. A softcap that changes nothing is an error.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.scripts.dev.stacks import Mocks, Stack

VOCAB, HIDDEN, SEQUENCE, BATCH = 640, 64, 16, 2
#: Of every Hugging Face config.
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CAP = {"final_logit_softcapping": 3.0}
GEMMA_4 = {**CAP, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
#: Fields of providers, where they have them: fp32, no kernel that a CPU lacks, nothing random, and
#: weights so large that a softcap matters. No fusion either: cross_entropy_loss_fusion, on in Bridge, rounds
#: the gradient of the logits to bf16.
PLAIN = {
    "params_dtype": torch.float32, "autocast_dtype": torch.float32, "bf16": False, "fp16": False,
    "use_cpu_initialization": True, "init_method_std": 0.6, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "add_bias_linear": False, "window_size": None, "softmax_type": "vanilla", "persist_layer_norm": False,
    "layernorm_zero_centered_gamma": False, "moe_grouped_gemm": False,
}  # fmt: skip


def to_hybrid(provider: Any, mtp_heads: int | None = None) -> None:
    """Attention and MLP: the Mamba layer needs kernels."""
    from megatron_fused_ce.scripts.lib.local_stack_spec import stack_spec

    provider.hybrid_stack_spec = stack_spec
    provider.hybrid_layer_pattern, provider.num_layers = "*-", 2
    provider.mtp_num_layers, provider.mtp_hybrid_override_pattern = mtp_heads, "*-" if mtp_heads else None


def with_lora(provider: Any, target: str) -> None:
    """Bridge's LoRA around this layer, everything else frozen."""
    lora = importlib.import_module("megatron.bridge.peft.lora").LoRA
    peft = lora(target_modules=[target], dim=4, alpha=8)
    provider.register_pre_wrap_hook(lambda chunks: peft(chunks, training=True) and chunks)


def family(name: str, config: str, fields: Any = None, change: Any = None, left: int | None = 0) -> Any:
    """A model of transformers: prefix of its config, what else that has, and what its provider needs."""
    return SimpleNamespace(
        line=name, tp=1, cp=1, dtype="fp32", rows=VOCAB, hidden_size=HIDDEN, left=left, config=config,
        fields=fields or {}, change=change or (lambda it: None),
    )  # fmt: skip


FAMILIES = (
    family("Llama 3", "Llama"),
    family("Llama 3, LoRA on linear_qkv", "Llama", {}, lambda it: with_lora(it, "linear_qkv")),
    family("Llama 3, LoRA on output_layer", "Llama", {}, lambda it: with_lora(it, "output_layer"), left=None),
    family("Qwen3", "Qwen3"),
    family("Qwen3, tied", "Qwen3", {"tie_word_embeddings": True}),
    family("Gemma 2", "Gemma2", CAP),
    family("Gemma 4", "Gemma4Text", GEMMA_4),
    family("Gemma 4 VL", "Gemma4", {"text_config": {**SIZES, **GEMMA_4}, "vision_config": VISION}),
    family("GPT-OSS", "GptOss", EXPERTS),
    family("Nemotron-H", "NemotronH", {}, to_hybrid),
    family("Nemotron-H, 1 MTP head", "NemotronH", {}, lambda it: to_hybrid(it, 1)),
)


def prepare() -> None:
    # Before Transformer Engine is stood in for: Megatron must find that there is none.
    for name in (
        *("distributed", "extensions.transformer_engine", "models.gpt.gpt_layer_specs", "optimizer"),
        *("models.hybrid.hybrid_model", "pipeline_parallel.schedules"),
        "post_training.modelopt.gpt.model_specs",
    ):
        importlib.import_module(f"megatron.core.{name}")
    layers = vars(sys.modules["megatron.core.extensions.transformer_engine"])
    mocks = [name for name in layers if name.startswith("TE") and not isinstance(layers[name], type)]
    layers.update((name, type(name, (), {})) for name in mocks)  # isinstance() takes no mock
    mocked = {"transformer_engine", "modelopt", "nvidia_resiliency_ext"}
    sys.meta_path.append(Mocks(lambda package: package in mocked))
    importlib.import_module("megatron.bridge")


def local_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Of layers without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    named = {"qk_layernorm": config.qk_layernorm, "normalization": config.normalization}
    return get_gpt_layer_local_spec(config.num_moe_experts, **named)


def build(family: Any) -> Any:
    from megatron.core.transformer.enums import AttnBackend

    sees = "vision_config" in family.fields
    config = getattr(importlib.import_module("transformers"), f"{family.config}Config")
    architecture = f"{family.config.removesuffix('Text')}For{'ConditionalGeneration' if sees else 'CausalLM'}"
    config = config(**{**({} if sees else SIZES), **family.fields}, architectures=[architecture])
    bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_config(config)
    provider = bridge.to_megatron_provider(load_weights=False)
    fusions = {name: False for name in dir(provider) if name.endswith("_fusion")}
    for name, value in {**fusions, **PLAIN, "attention_backend": AttnBackend.auto}.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.transformer_layer_spec = local_spec
    family.change(provider)
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    for parameter in model.parameters():
        if not parameter.any():  # LoRA's second factor, so that the first has a gradient
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model


def run(model: Any, family: Any, ours: bool) -> dict[str, Tensor]:
    """Minus each token's loss, and the gradients of all parameters that train."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)

    def loss_of() -> Any:
        given = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
        loss = model(**given, position_ids=None, attention_mask=None)
        return loss[0] if isinstance(loss, tuple) else loss  # beside its mask

    loss = loss_of()
    loss.backward(torch.rand(loss.shape, generator=generator))
    if not ours and getattr(model.config, "final_logit_softcapping", None):
        model.config.final_logit_softcapping = None
        assert (loss_of() - loss).norm() > 1e-3 * loss.norm(), f"{family.line}: the softcap changes nothing"
    trained = ((name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None)
    return {"log_prob": -loss, **{f"gradient of {name}": gradient for name, gradient in trained}}


STACKS = {"bridge": Stack(FAMILIES, build, run, prepare, lambda copy, name: None, {}, has_diff=False)}
