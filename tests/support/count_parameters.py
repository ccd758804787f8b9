"""Parameters of Megatron's own models, rank by rank, for tests/plan/test_sums.py; a process of its own.

Reads a list of cases (keyword arguments of Megatron's classes) as JSON from standard input and prints, for
each, the parameters that every pipeline stage's first rank holds. Groups are torch's fake ones: nothing is
ever sent.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fused_ce.scripts.lib import megatron_cpu


def count(case: dict[str, Any], rank: int) -> int:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["world"])
    parallel_state.initialize_model_parallel(**case["parallel"], create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    is_latent = case["config"].get("multi_latent_attention")
    made = {**case["config"], **case["parallel"], "pipeline_dtype": torch.float32}
    config = (MLATransformerConfig if is_latent else TransformerConfig)(**made, use_cpu_initialization=True)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if is_latent:
        # It asks for Transformer Engine's classes, which are not there; Megatron's own attention, which
        # has no parameters, refuses keys wider than values.
        multi_latent_attention.HAVE_TE = False
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    more = {"pre_process": first, "post_process": last, "mtp_block_spec": mtp, **case["model"]}
    parameters = GPTModel(config, spec, **more).parameters()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return sum(parameter.numel() for parameter in parameters)


if __name__ == "__main__":
    megatron_cpu.install(fused_wgrad=False)
    counts = []
    for case in json.load(sys.stdin):
        step = case["world"] // case["parallel"]["pipeline_model_parallel_size"]
        counts.append([count(case, rank) for rank in range(0, case["world"], step)])
    print("counts", json.dumps(counts))
