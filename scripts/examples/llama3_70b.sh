#!/usr/bin/env bash
# Llama-3 70B on 8 hosts of 8 GPUs of 80 GB, mock data. On every host, NODE_RANK counting from 0:
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM MASTER_ADDR=first-host NODE_RANK=0 \
#       scripts/examples/llama3_70b.sh [MEGATRON ARGUMENT...]
set -euo pipefail

NODES=${NODES:-8}
TP=${TP:-8}
PP=${PP:-4}
CP=${CP:-1}
LAYERS_PER_VIRTUAL_STAGE=${LAYERS_PER_VIRTUAL_STAGE:-5}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
SEQUENCE=${SEQUENCE:-8192}
VOCAB=128256
LR=1.5e-4

# shellcheck source=scripts/examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

MODEL=(
    "${DENSE[@]}"
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --num-query-groups 8
    --rotary-base 500000
    --norm-epsilon 1e-5
    --make-vocab-size-divisible-by 32 # no padding at TP 8
)

PARALLEL=(
    --pipeline-model-parallel-size "$PP"
    --num-layers-per-virtual-pipeline-stage "$LAYERS_PER_VIRTUAL_STAGE"
)

LOSS=(
    # The one added line, in place of --cross-entropy-loss-fusion and --cross-entropy-fusion-impl. Only the
    # last stage has a head: the memory saved is saved there.
    --fused-chunked-ce
)

launch pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" "${LOSS[@]}" "$@"
