"""Stands where a launch expects pretrain_gpt.py or pretrain_hybrid.py; goes as far as they go without GPUs.

Megatron's own parser and checks, the tokenizer, the configuration of model, optimizer and DDP; then it
prints what test_examples.py asks about, as JSON behind ``PROBE``. Started by the launch's own words
(tests/support/forked_launches.py, which stands in for CUDA).
"""

from __future__ import annotations

import json
import os

from megatron.training import argument_utils
from megatron.training.arguments import parse_and_validate_args
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from megatron_fused_ce.adapter.switch import active_config

args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
if args.hybrid_layer_pattern is None:
    model = argument_utils.gpt_config_from_args(args)
    weights_bytes = compute_weight_and_optimizer_memory(args, verbose=True)
else:
    model = argument_utils.hybrid_config_from_args(args)
    weights_bytes = None  # Megatron's estimate knows transformers only
argument_utils.pretrain_cfg_container_from_args(args, model)

found = {name: of for name, of in vars(args).items() if isinstance(of, bool | int | None)}
found |= {"padded_vocab_size": model.vocab_size, "weights_bytes": weights_bytes}
found |= {"script": os.path.basename(__file__), "config": repr(active_config())}
print(f"PROBE{json.dumps(found)}", flush=True)
