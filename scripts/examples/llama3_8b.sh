#!/usr/bin/env bash
# Llama-3 8B on one host of 8 GPUs of 80 GB, mock data.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/examples/llama3_8b.sh [MEGATRON ARGUMENT...]
set -euo pipefail

TP=${TP:-2}
CP=${CP:-1}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
SEQUENCE=${SEQUENCE:-8192}
VOCAB=128256

# shellcheck source=scripts/examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

MODEL=(
    "${DENSE[@]}"
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --num-query-groups 8
    --rotary-base 500000
    --norm-epsilon 1e-5
)

LOSS=(
    # The one added line. Beside it these have no effect and can go: --cross-entropy-loss-fusion,
    # --cross-entropy-fusion-impl native. Megatron refuses --cross-entropy-fusion-impl te with or without it.
    --fused-chunked-ce
)

launch pretrain_gpt.py "${MODEL[@]}" "${LOSS[@]}" "$@"
