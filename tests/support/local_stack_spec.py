"""Local layers (no Transformer Engine) for Megatron's Hybrid and Mamba stacks.

Megatron ships these stacks with Transformer Engine layers only. `stack_spec` offers the attention
(``*``) and MLP (``-``) layers, made of the parts of GPT's own local layer spec, and the MTP block
where the stack has one (>= 0.17). It has no Mamba layer: that needs mamba-ssm's kernels.
Importing this module imports megatron.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

try:  # >= 0.18
    from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as StackSubmodules
except ImportError:
    from megatron.core.ssm.mamba_block import MambaStack as Stack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as StackSubmodules


def _build() -> ModuleSpec:
    gpt = get_gpt_layer_local_spec().submodules
    parts: dict[str, Any] = {
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=gpt.self_attention,
                self_attn_bda=gpt.self_attn_bda,
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=gpt.mlp, mlp_bda=gpt.mlp_bda
            ),
        ),
    }
    if "mtp_block_spec" in {field.name for field in dataclasses.fields(StackSubmodules)}:
        layer = ModuleSpec(
            module=mtp.MultiTokenPredictionLayer,
            submodules=mtp.MultiTokenPredictionLayerSubmodules(
                enorm=WrappedTorchNorm,
                hnorm=WrappedTorchNorm,
                eh_proj=ColumnParallelLinear,
                mtp_model_layer=None,  # built by the stack from the pattern
                layer_norm=WrappedTorchNorm,
            ),
        )
        parts["mtp_block_spec"] = ModuleSpec(
            module=mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
        )
    return ModuleSpec(module=Stack, submodules=StackSubmodules(**parts))


stack_spec = _build()
