#!/usr/bin/env bash
# A DeepSeek-like mixture of experts on one host of 8 GPUs of 80 GB, mock data: the size of DeepSeek-V2-Lite
# (16B parameters, latent attention), the router of V3 and its multi-token prediction.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/examples/deepseek_moe_mtp.sh [MEGATRON ARGUMENT...]
set -euo pipefail

TP=${TP:-1}
EP=${EP:-8}
MTP=${MTP:-1}
MICRO_BATCH=${MICRO_BATCH:-2}
GLOBAL_BATCH=${GLOBAL_BATCH:-256}
SEQUENCE=${SEQUENCE:-4096}
VOCAB=129280

# shellcheck source=scripts/examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

MODEL=(
    "${COMMON[@]}"
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 10944
    --num-attention-heads 16
    --position-embedding-type rope
    # Without YaRN, which is for contexts longer than the pretraining's; Megatron fuses YaRN's alone with MLA.
    --rope-type rope
    --no-rope-fusion
    --rotary-base 10000
    --norm-epsilon 1e-6
    --swiglu
    --multi-latent-attention
    --qk-layernorm
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --mtp-num-layers "$MTP"
    --mtp-loss-scaling-factor 0.1
)

EXPERTS=(
    --num-experts 64
    --moe-layer-freq '([0]+[1]*26)'
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-router-topk 6
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-router-dtype fp32
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)

PARALLEL=(
    --expert-model-parallel-size "$EP"
    --expert-tensor-parallel-size 1
)

LOSS=(
    # The one added line, in place of --cross-entropy-loss-fusion and --cross-entropy-fusion-impl. Every head
    # is fused: the main one and one for each layer of multi-token prediction. The latter know no loss mask in
    # the forward and never run `grad_in_forward`.
    --fused-chunked-ce
)

launch pretrain_gpt.py "${MODEL[@]}" "${EXPERTS[@]}" "${PARALLEL[@]}" "${LOSS[@]}" "$@"
