"""Heads of models that NVIDIA's Megatron-Bridge builds: rows of :mod:`.stacks`, flag off against flag on.

Each family goes the way of Bridge's users: a small Hugging Face config, AutoBridge, a provider, its
finalize() and the model that it builds. Model class, embedding, output layer and loss are Bridge's own; the
decoder is Megatron's without Transformer Engine, so families that differ only there are left out. Both models
have the same weights, tokens and gradient of each token's loss. Empty classes stand in for Transformer
Engine, ModelOpt and the resiliency package. A softcap that changes nothing is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import report
from megatron_fused_ce.scripts.lib import gloo, megatron_cpu
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages

BOUND = 1e-5
VOCAB, SEQUENCE, BATCH = 640, 16, 2
#: Of every Hugging Face config.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
CAP = {"final_logit_softcapping": 3.0}
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


def with_lora(*targets: str) -> Callable[[Any], None]:
    """Bridge's LoRA around these layers, everything else frozen."""

    def register(provider: Any) -> None:
        lora = importlib.import_module("megatron.bridge.peft.lora").LoRA
        peft = lora(target_modules=list(targets), dim=4, alpha=8)
        provider.register_pre_wrap_hook(lambda chunks: peft(chunks, training=True) and chunks)

    return register


@dataclass(frozen=True)
class Family:
    """A model of transformers: prefix of its config, what else that has, and what its provider needs."""

    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] = lambda provider: None
    is_fused: bool = True


FAMILIES = {
    "Llama 3": Family("Llama"),
    "Llama 3, LoRA on linear_qkv": Family("Llama", change=with_lora("linear_qkv")),
    "Llama 3, LoRA on output_layer": Family("Llama", change=with_lora("output_layer"), is_fused=False),
    "Qwen3": Family("Qwen3"),
    "Qwen3, tied": Family("Qwen3", {"tie_word_embeddings": True}),
    "Gemma 2": Family("Gemma2", CAP),
    "Gemma 4": Family("Gemma4Text", CAP),
    "Gemma 4 VL": Family("Gemma4", {"text_config": {**SIZES, **CAP}, "vision_config": VISION}),
    "GPT-OSS": Family("GptOss", EXPERTS),
    "Nemotron-H": Family("NemotronH", change=to_hybrid),
    "Nemotron-H, 1 MTP head": Family("NemotronH", change=lambda provider: to_hybrid(provider, 1)),
}


# --- what a CPU lacks ------------------------------------------------------------------------------


class Anything(type):
    """A class with every attribute: each is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIn(types.ModuleType):
    __version__ = "0.0"
    __getattr__ = Anything.__getattr__


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so for what is not installed of what Bridge asks for when it is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in ("transformer_engine", "modelopt", "nvidia_resiliency_ext"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


#: Imported before those are stood in for: Megatron must find that there is none.
OF_CORE = (
    *("distributed", "extensions.transformer_engine", "models.gpt.gpt_layer_specs", "optimizer"),
    *("models.hybrid.hybrid_model", "pipeline_parallel.schedules", "post_training.modelopt.gpt.model_specs"),
)


def prepare() -> None:
    """One rank on a CPU, and Bridge imported."""
    megatron_cpu.install()
    device, cuda = torch.device("cpu"), vars(torch.cuda)
    cuda.update(current_device=lambda: device, default_generators={device: torch.default_generator})
    gloo.use_one_thread()
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    logging.disable(logging.WARNING)
    for name in OF_CORE:
        importlib.import_module(f"megatron.core.{name}")
    layers = vars(sys.modules["megatron.core.extensions.transformer_engine"])
    mocks = [name for name in layers if name.startswith("TE") and not isinstance(layers[name], type)]
    layers.update((name, Anything(name, (), {})) for name in mocks)  # isinstance() takes no mock
    sys.meta_path.append(StandIns())
    importlib.import_module("megatron.bridge")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()


def local_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Of layers without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    named = {"qk_layernorm": config.qk_layernorm, "normalization": config.normalization}
    return get_gpt_layer_local_spec(config.num_moe_experts, **named)


# --- off against on --------------------------------------------------------------------------------


def build(family: Family) -> Any:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
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
    return model


def step(model: Any) -> tuple[dict[str, Tensor], int]:
    """``loss`` of each token and the gradients of all parameters that train; peak bytes of logits."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    given = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
    model.zero_grad()
    with LogitStorages(vocab_rows=VOCAB, hidden_size=SIZES["hidden_size"]) as storages:
        loss = model(**given, position_ids=None, attention_mask=None)
        loss = loss[0] if isinstance(loss, tuple) else loss  # beside its mask
        loss.backward(torch.rand(loss.shape, generator=generator))
    made = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **made}, storages.peak_bytes


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / one.double().norm().clamp_min(1e-30))


def compare(name: str, family: Family) -> dict[str, Any]:
    """A family's row."""
    counters, printed = megatron_fused_ce.counters(), io.StringIO()
    report._said.clear()
    with contextlib.redirect_stdout(printed):
        off = build(family)
        with torch.no_grad():
            for parameter in off.parameters():
                if not parameter.any():  # LoRA's second factor, so that the first has a gradient
                    parameter.normal_(0.0, 0.1)
        (without, peak), capped = step(off), True
        if getattr(off.config, "final_logit_softcapping", None):
            off.config.final_logit_softcapping = None
            capped = apart(without["loss"], step(off)[0]["loss"]) > 100 * BOUND
        megatron_fused_ce.enable(FusedCEConfig(strategy="recompute", num_chunks=4))
        try:
            on = build(family)
        finally:
            megatron_fused_ce.disable()
        with torch.no_grad():
            for mine, its in zip(on.parameters(), off.parameters(), strict=True):
                mine.copy_(its)
        counters.reset()
        with_flag, its_peak = step(on)
    words = [line.partition("Megatron's own path: ")[2] for line in printed.getvalue().splitlines()]
    reason = "; ".join(filter(None, words))
    heads = counters.fused, counters.materialised, counters.stock
    same = without.keys() == with_flag.keys() and len(without) > 1
    errors = {key: apart(without[key], with_flag[key]) for key in without if same}
    worst = max(errors.values(), default=float("inf"))
    is_fused = heads[0] > 0 and heads[1:] == (0, 0) and its_peak < peak
    return {
        "case": f"{name}: {reason}" if reason else name,
        "log_prob": errors.pop("loss", worst),
        "worst gradient": max(errors.values(), default=worst),
        "heads": [heads],
        "peak": (peak, its_peak),
        "equal": worst <= BOUND and capped and is_fused == family.is_fused,
    }


if __name__ == "__main__":
    prepare()
    print(json.dumps([compare(*family) for family in FAMILIES.items()]))
