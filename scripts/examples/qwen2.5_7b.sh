#!/usr/bin/env bash
# Qwen2.5 7B on one host of 8 GPUs of 80 GB, mock data.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/examples/qwen2.5_7b.sh [MEGATRON ARGUMENT...]
set -euo pipefail

TP=${TP:-2} # 4 at most: that many query groups
CP=${CP:-1}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
SEQUENCE=${SEQUENCE:-8192}
VOCAB=152064

# shellcheck source=scripts/examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

MODEL=(
    "${DENSE[@]}"
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --num-query-groups 4
    --add-qkv-bias
    --rotary-base 1000000
    --norm-epsilon 1e-6
)

LOSS=(
    # The one added line, in place of --cross-entropy-loss-fusion and --cross-entropy-fusion-impl.
    --fused-chunked-ce
    # Qwen's tokenizer has fewer words than the embedding has rows. Stock Megatron's softmax counts the rows
    # that are left over; with a real tokenizer this leaves them out:
    # --fused-ce-mask-padded-vocab
)

launch pretrain_gpt.py "${MODEL[@]}" "${LOSS[@]}" "$@"
