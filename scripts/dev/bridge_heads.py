r"""Heads of models that NVIDIA's Megatron-Bridge builds, flag off against flag on, on a CPU.

    pip install --no-deps --ignore-requires-python --target FOLDER megatron-bridge
    pip install --no-deps --target FOLDER 'transformers>=5.8,<=5.12.1' 'huggingface-hub<2' \
        'tokenizers<=0.23.0' httpx httpcore safetensors regex omegaconf \
        antlr4-python3-runtime==4.9.3 hydra-core datasets accelerate peft diffusers
    PYTHONPATH=MEGATRON:FOLDER python -m scripts.dev.bridge_heads

MEGATRON is a folder outside this clone with megatron-core 0.19 or newer: inside, its version would name this
clone's commit. For Bridge's newest source put its src/ before FOLDER. Empty classes stand in for Transformer
Engine, ModelOpt and the resiliency package.

Each family goes the way of Bridge's users: a small Hugging Face config, AutoBridge, a provider (or config),
its finalize() and the model that it builds. Model class, embedding, output layer and loss are Bridge's own;
the decoder is Megatron's without Transformer Engine. Both models have the same weights, tokens and gradient
of each token's loss. The head's weight is large, so that a softcap matters. cross_entropy_loss_fusion, on in
Bridge, is off here: without the flag it rounds the gradient of the logits to bf16.

A row says whether the head is fused, or why it stays with Megatron; how many of its calls went either way;
and how far loss and gradients are apart: norm of the difference by norm without the flag. Exit status 1 where
that is above 1e-5, where logits were materialised, or where a softcap changed nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import logging
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import report
from megatron_fused_ce.command_line import Parser
from megatron_fused_ce.scripts.lib import gloo, megatron_cpu, results, tables

BOUND = 1e-5
VOCAB, SEQUENCE, BATCH = 128, 16, 2
CAP = 3.0
COLUMNS = (
    *("family", "head", "calls fused", "calls by Megatron"),
    *("loss", "head's gradient", "worst gradient", "softcap"),
)

#: Of every Hugging Face config.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
#: Fields of providers, where they have them: fp32, no kernel that a CPU lacks, nothing random.
PLAIN = {
    "bf16": False, "fp16": False, "params_dtype": torch.float32, "autocast_dtype": torch.float32,
    "seq_length": SEQUENCE, "use_cpu_initialization": True, "cross_entropy_loss_fusion": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False, "window_size": None,
    "layernorm_zero_centered_gamma": False, "softmax_type": "vanilla", "persist_layer_norm": False,
    "apply_rope_fusion": False, "masked_softmax_fusion": False, "bias_activation_fusion": False,
    "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "moe_permute_fusion": False,
    "moe_grouped_gemm": False, "moe_shared_expert_overlap": False,
}  # fmt: skip


def plain_rotary(provider: Any) -> None:
    """Megatron's positions instead of two kinds for two kinds of attention."""

    def replace(chunks: list[Any]) -> list[Any]:
        from megatron.core.models.common.embeddings import RotaryEmbedding

        chunks[0].rotary_pos_emb = RotaryEmbedding(SIZES["head_dim"], 1.0, use_cpu_initialization=True)
        return chunks

    provider.register_pre_wrap_hook(replace)


def to_hybrid(provider: Any) -> None:
    """Attention and MLP: the Mamba layer needs kernels."""
    from megatron_fused_ce.scripts.lib.local_stack_spec import stack_spec

    provider.hybrid_stack_spec = stack_spec
    provider.hybrid_layer_pattern, provider.num_layers = "*-", 2


def to_hybrid_mtp(provider: Any) -> None:
    to_hybrid(provider)
    provider.mtp_num_layers, provider.mtp_hybrid_override_pattern = 1, "*-"


class NoLayers(torch.nn.Module):
    """In place of layers that need kernels: the head sees the embeddings."""

    input_tensor = None

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def no_layers(provider: Any) -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    provider.falconh1_stack_spec = ModuleSpec(module=NoLayers)


def text_alone(provider: Any) -> None:
    """No vision tower, and layers that this family's provider takes from a function of its module."""
    module: Any = sys.modules[type(provider).__module__]
    module.get_gpt_layer_with_transformer_engine_spec = lambda **_: local_spec(provider)
    provider.add_encoder, provider.mrope_section = False, [2, 3, 3]


def with_lora(*targets: str) -> Callable[[Any], None]:
    """Bridge's LoRA around these layers, everything else frozen."""

    def register(provider: Any) -> None:
        lora = importlib.import_module("megatron.bridge.peft.lora").LoRA
        peft = lora(target_modules=list(targets), dim=4, alpha=8)
        provider.register_pre_wrap_hook(lambda chunks: peft(chunks, training=True) and chunks)

    return register


@dataclass(frozen=True)
class Family:
    #: of transformers: prefixes of its config and of the architecture that Bridge looks up
    config: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] = lambda provider: None
    #: built by get_model(), which Bridge has for some families, instead of by a provider
    by_builder: bool = False


FAMILIES = {
    "Llama 3": Family("Llama", "LlamaForCausalLM"),
    "Llama 3, get_model()": Family("Llama", "LlamaForCausalLM", by_builder=True),
    "Llama 3, LoRA on linear_qkv": Family("Llama", "LlamaForCausalLM", change=with_lora("linear_qkv")),
    "Llama 3, LoRA on output_layer": Family("Llama", "LlamaForCausalLM", change=with_lora("output_layer")),
    "Qwen3": Family("Qwen3", "Qwen3ForCausalLM"),
    "Qwen3, tied": Family("Qwen3", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "Qwen3-VL": Family(
        "Qwen3VL", "Qwen3VLForConditionalGeneration",
        {"text_config": SIZES, "vision_config": {**VISION, "depth": 1, "deepstack_visual_indexes": [0]}},
        text_alone,
    ),
    "Gemma 2": Family("Gemma2", "Gemma2ForCausalLM", {"final_logit_softcapping": CAP}),
    "Gemma 3": Family("Gemma3Text", "Gemma3ForCausalLM", change=plain_rotary),
    "Gemma 4": Family("Gemma4Text", "Gemma4ForCausalLM", {"final_logit_softcapping": CAP}),
    "Gemma 4 MoE": Family(
        "Gemma4Text", "Gemma4ForCausalLM",
        {"final_logit_softcapping": CAP, "enable_moe_block": True, "num_experts": 2, "top_k_experts": 1,
         "moe_intermediate_size": 32},
        plain_rotary,
    ),
    "Gemma 4 VL": Family(
        "Gemma4", "Gemma4ForConditionalGeneration",
        {"text_config": {**SIZES, "final_logit_softcapping": CAP}, "vision_config": VISION},
    ),
    "DeepSeek V3, 1 MTP head": Family(
        "DeepseekV3", "DeepseekV3ForCausalLM",
        {"num_nextn_predict_layers": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
         "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
         "v_head_dim": 16, "num_key_value_heads": 4, **EXPERTS},
    ),
    "GPT-OSS": Family("GptOss", "GptOssForCausalLM", {"num_local_experts": 4, **EXPERTS}),
    "Falcon-H1": Family("FalconH1", "FalconH1ForCausalLM", {"lm_head_multiplier": 0.1}, no_layers),
    "Nemotron-H": Family("NemotronH", "NemotronHForCausalLM", change=to_hybrid),
    "Nemotron-H, 1 MTP head": Family("NemotronH", "NemotronHForCausalLM", change=to_hybrid_mtp),
}  # fmt: skip


# --- what a CPU lacks ------------------------------------------------------------------------------

#: Asked for by Bridge when it is imported.
STOOD_IN_FOR = ("transformer_engine", "modelopt", "nvidia_resiliency_ext")
#: Imported before those are stood in for: Megatron must find that there is none.
OF_CORE = (
    *("distributed", "extensions.transformer_engine", "models.gpt.gpt_layer_specs", "optimizer"),
    *("models.hybrid.hybrid_model", "pipeline_parallel.schedules", "post_training.modelopt.gpt.model_specs"),
)


class Anything(type):
    """A class with every attribute: each is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIn(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Anything(name, (), {}))
        return vars(self)[name]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so for what is not installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in STOOD_IN_FOR:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> None:
    """One rank on a CPU, and Bridge imported."""
    warnings.simplefilter("ignore")
    megatron_cpu.install()
    device, cuda = torch.device("cpu"), vars(torch.cuda)
    cuda.update(current_device=lambda: device, default_generators={device: torch.default_generator})
    gloo.use_one_thread()
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    logging.disable(logging.WARNING)
    try:
        for name in OF_CORE:
            importlib.import_module(f"megatron.core.{name}")
        layers = vars(sys.modules["megatron.core.extensions.transformer_engine"])
        mocks = [name for name in layers if name.startswith("TE") and not isinstance(layers[name], type)]
        layers.update((name, Anything(name, (), {})) for name in mocks)  # isinstance() takes no mock
        sys.meta_path.append(StandIns())
        importlib.import_module("megatron.bridge")
    except ModuleNotFoundError as error:
        raise SystemExit(f"bridge_heads: {error}; see --help for what to install") from error
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    parallel_state.initialize_model_parallel()
    mtp_spec, attention = gpt_layer_specs.get_gpt_mtp_block_spec, DotProductAttention.__init__

    def local_mtp_spec(*args: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
        return mtp_spec(*args, use_transformer_engine=False, **kwargs)

    def without_channels(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kw: Any) -> None:
        attention(self, *args, **kw)

    gpt_layer_specs.get_gpt_mtp_block_spec = local_mtp_spec
    DotProductAttention.__init__ = without_channels


def local_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Of layers without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = getattr(config, "transformer", config)
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention, normalization=config.normalization,
    )  # fmt: skip


# --- off against on --------------------------------------------------------------------------------


def build(family: Family) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    config = getattr(importlib.import_module("transformers"), f"{family.config}Config")
    sizes = {} if "text_config" in family.fields else SIZES
    config = config(**{**sizes, **family.fields}, architectures=[family.architecture])
    bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_config(config)
    if family.by_builder:
        provider = bridge.get_model_config()
    else:
        provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in {**PLAIN, "attention_backend": AttnBackend.auto}.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.transformer_layer_spec = local_spec
    family.change(provider)
    if family.by_builder:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        (model,) = bridge.get_model(provider, load_weights=False, pg_collection=groups, wrap_with_ddp=False)
        return model
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    return model


def head_of(model: Any) -> Any:
    model = getattr(model, "language_model", model)
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    layer = model.output_layer
    return getattr(layer, "to_wrap", layer).weight  # LoRA's own weight is a sum


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token, and the gradients of all parameters that train."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    given: dict[str, Any] = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
    given |= {"position_ids": None, "attention_mask": None}
    if not hasattr(model, "language_model"):  # which finds them itself
        given["position_ids"] = torch.arange(SEQUENCE).expand(BATCH, -1)
        given["attention_mask"] = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    model.zero_grad()
    loss = model(**given)
    loss = loss[0] if isinstance(loss, tuple) else loss  # beside its mask
    loss.backward(torch.rand(loss.shape, generator=generator))
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / one.double().norm().clamp_min(1e-30))


def compare(family: Family) -> tuple[list[str], bool]:
    """The cells of a family's row after its name, and whether it is right."""
    counters, printed = megatron_fused_ce.counters(), io.StringIO()
    report._said.clear()
    with contextlib.redirect_stdout(printed):
        megatron_fused_ce.disable()
        off = build(family)
        with torch.no_grad():
            head_of(off).mul_(30.0)
            for parameter in off.parameters():
                if not parameter.any():  # LoRA's second factor, so that the first has a gradient
                    parameter.normal_(0.0, 0.1)
        loss, gradients = step(off)
        cap = getattr(off.config, "final_logit_softcapping", None)
        moved = 0.0
        if cap:
            off.config.final_logit_softcapping = None
            moved = apart(loss, step(off)[0])
        megatron_fused_ce.enable(FusedCEConfig(strategy="store", num_chunks=3))
        try:
            on = build(family)
        finally:
            megatron_fused_ce.disable()
        with torch.no_grad():
            for mine, its in zip(on.parameters(), off.parameters(), strict=True):
                mine.copy_(its)
        counters.reset()
        loss_on, gradients_on = step(on)
    words = [line.partition("Megatron's own path: ")[2] for line in printed.getvalue().splitlines()]
    reason = "; ".join(filter(None, words)) or ("fused" if counters.fused else "never called")
    head = next((n for n, p in off.named_parameters() if p is head_of(off)), "")
    same = gradients.keys() == gradients_on.keys() and len(gradients) > 0
    errors = {"loss": apart(loss, loss_on)}
    errors |= {name: apart(gradients[name], gradients_on[name]) for name in gradients if same}
    worst = max(errors.values())
    right = same and worst <= BOUND and counters.materialised == 0 and (not cap or moved > 100 * BOUND)
    of_head = f"{errors[head]:.0e}" if head in errors else "frozen"
    softcap = f"{cap:g}, moves the loss by {moved:.0e}" if cap else "-"
    counted = [str(counters.fused), str(counters.stock)]
    differences = [f"{errors['loss']:.0e}", of_head, f"{worst:.0e}"]
    return [reason if right else f"WRONG: {reason}", *counted, *differences, softcap], right


def main() -> int:
    parser = Parser("python -m scripts.dev.bridge_heads", __doc__ or "")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write this, and the table beside it")
    out = parser.parse_args().out
    prepare()
    modules = ("megatron.bridge", "megatron.core", "transformers", "torch")
    versions = {name: str(sys.modules[name].__version__) for name in modules}
    rows, all_right = [], True
    for name, family in FAMILIES.items():
        try:
            cells, right = compare(family)
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            cells, right = [f"not run: {type(error).__name__}: {''.join(first)}", *["-"] * 6], True
        all_right &= right
        rows.append([name, *cells])
    source = results.made_by("", ["scripts.dev.bridge_heads", *sys.argv[1:]], **versions)
    source["megatron"] = versions["megatron.core"]
    made = [source["device"], f"commit {source['commit'][:7]}", *map(" ".join, versions.items())]
    text = f"{', '.join(made)}.\n\n{tables.markdown(COLUMNS, rows, 2)}\n"
    print(text, end="")
    if out:
        every = {"variant": "off and on"}
        keys = ("shape", *COLUMNS[1:])
        results.write(out, [every | dict(zip(keys, row, strict=True)) for row in rows], source)
        results.write_whole(out.with_suffix(".md"), f"# Heads of Megatron-Bridge, flag off and on\n\n{text}")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
