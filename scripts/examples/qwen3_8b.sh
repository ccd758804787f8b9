#!/usr/bin/env bash
# Qwen3 8B at 32768 tokens on one host of 8 GPUs of 80 GB, mock data.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/examples/qwen3_8b.sh [MEGATRON ARGUMENT...]
set -euo pipefail

TP=${TP:-4}
CP=${CP:-2}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-32}
SEQUENCE=${SEQUENCE:-32768}
VOCAB=151936 # 128 * 1187

# shellcheck source=scripts/examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

MODEL=(
    "${DENSE[@]}"
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --rotary-base 1000000
    --norm-epsilon 1e-6
    # No padding at any TP that is a power of two: the checkpoint's rows are the model's.
    --make-vocab-size-divisible-by 1187
)

PARALLEL=(
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

LOSS=(
    # The one added line, in place of --cross-entropy-loss-fusion and --cross-entropy-fusion-impl.
    --fused-chunked-ce
)

launch pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" "${LOSS[@]}" "$@"
