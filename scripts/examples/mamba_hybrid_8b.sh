#!/usr/bin/env bash
# A hybrid of 24 Mamba-2, 4 attention and 28 MLP layers (8B parameters) on one host of 8 GPUs of 80 GB, mock
# data. pretrain_hybrid.py is there from Megatron-LM core_v0.18.0 on; pretrain_mamba.py still starts it.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/examples/mamba_hybrid_8b.sh [MEGATRON ARGUMENT...]
set -euo pipefail

TP=${TP:-4}
MICRO_BATCH=${MICRO_BATCH:-2}
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
SEQUENCE=${SEQUENCE:-4096}
VOCAB=256000

# shellcheck source=scripts/examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

MODEL=(
    "${COMMON[@]}"
    # M: Mamba, *: attention, -: MLP.
    --hybrid-layer-pattern 'M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-'
    --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec
    --hidden-size 4096
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --mamba-state-dim 128
    --mamba-head-dim 64
    --mamba-num-groups 8
    --position-embedding-type none
)

LOSS=(
    # The one added line, in place of --cross-entropy-loss-fusion and --cross-entropy-fusion-impl.
    --fused-chunked-ce
)

launch pretrain_hybrid.py "${MODEL[@]}" "${LOSS[@]}" "$@"
