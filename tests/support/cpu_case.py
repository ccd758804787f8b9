"""Launches of pretrain_gpt.py on a CPU: cases of a tiny model, for tests on a Megatron-LM checkout.

Together they cover sequence parallelism, tied and untied weights, gradient accumulation fusion on and off,
several micro-batches per step, pipeline stages, and evaluation. Vocabulary 127 + eod, padded to 128·TP.
"""

from __future__ import annotations

import shlex

from megatron_fused_ce.scripts.lib.launches import NO_FUSED_WGRAD, UNTIED, Case
from megatron_fused_ce.scripts.runs.pretrain import CPU_ONLY_ARGS

BASE_ARGS = f"""
    --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5
    --lr 1e-3 --lr-decay-style constant
    --mock-data --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --eval-iters 1 --eval-interval 3 --log-interval 1 --tensor-model-parallel-size 2 {CPU_ONLY_ARGS}
"""
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
#: Ranks, whether gradients are accumulated by the fused kernel (its stand-in), arguments.
CASES = {
    "plain": (2, False, f"--num-layers 2 --sequence-parallel {UNTIED}"),
    "mtp": (2, True, "--num-layers 2 --mtp-num-layers 1 --sequence-parallel"),
    "distopt": (4, True, f"--num-layers 2 --sequence-parallel {UNTIED} {OVERLAPS}"),
    "pp2-mtp": (
        4, True,
        f"--num-layers 2 --mtp-num-layers 1 --pipeline-model-parallel-size 2 --sequence-parallel {UNTIED}",
    ),
    "vpp": (
        4, False,
        "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2"
        f" --sequence-parallel {OVERLAPS}",
    ),
    "vpp-wgrad": (
        4, True,
        "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2"
        " --sequence-parallel",
    ),
    "fsdp": (
        2, False,
        f"--num-layers 2 --tensor-model-parallel-size 1 {UNTIED} --no-gradient-reduce-div-fusion",
    ),
}  # fmt: skip


def cpu_case(name: str) -> Case:
    num_processes, fused_wgrad, extra = CASES[name]
    words = [BASE_ARGS, extra, "" if fused_wgrad else NO_FUSED_WGRAD]
    return Case(name, "pretrain_gpt.py", num_processes, shlex.split(" ".join(words)))
