# shellcheck shell=bash
# What the examples beside this file share: the training loop, what models share, mock data, torchrun. Sourced, not run.
# Argument names are those of Megatron-LM core_v0.19.0.

GPUS=${GPUS:-8} # of a host
NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
ITERATIONS=${ITERATIONS:-100}

# Overlap of tensor-parallel communication relies on it; Megatron refuses to start without it on Hopper.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

TRAINING=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$ITERATIONS"
    --bf16
    --lr "${LR:-3e-4}"
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --manual-gc
    --log-interval 1
    --log-throughput
    --eval-interval 1000
    --eval-iters 0
)

# What all models have in common, and what those of Llama and Qwen have besides; each script adds its sizes.
COMMON=(
    --seq-length "$SEQUENCE"
    --max-position-embeddings "$SEQUENCE"
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tensor-model-parallel-size "${TP:-1}"
    --context-parallel-size "${CP:-1}"
    --sequence-parallel
)
DENSE=("${COMMON[@]}" --group-query-attention --position-embedding-type rope --swiglu)

# Your own: --data-path PREFIX --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model NAME
DATA=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size "$VOCAB"
    --num-workers 1
)

# launch SCRIPT ARGUMENT...: SCRIPT of Megatron-LM on every GPU. After `python -m megatron_fused_ce.autoload
# install`, once in the environment, the words `-m megatron_fused_ce.launch` can go.
launch() {
    local script=$1
    shift
    if ! [ -f "${MEGATRON_LM_PATH:-}/$script" ]; then
        echo "$0: no $script in MEGATRON_LM_PATH='${MEGATRON_LM_PATH:-}': set it to a checkout of Megatron-LM" >&2
        exit 2
    fi
    exec torchrun \
        --nproc-per-node "$GPUS" --nnodes "$NODES" --node-rank "$NODE_RANK" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        -m megatron_fused_ce.launch "$MEGATRON_LM_PATH/$script" \
        "${TRAINING[@]}" "${DATA[@]}" "$@"
}
