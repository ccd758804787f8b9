"""Cases of `pretrain --lengths`: one model at one sequence length after the other, for speed and reach.

Micro-batch 1 on mock data, bf16, Transformer Engine's layers, every layer recomputed in the backward unless
``--recompute none``; several GPUs are one tensor-parallel group with sequence parallelism. On a CPU,
``--model tiny`` tries it and measures nothing. Losses are shown and not judged: the iterations are few.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.estimate.command import setting_of as planned_setting
from megatron_fused_ce.scripts.lib.launches import NO_FUSED_WGRAD, UNTIED, Case, Checkout

#: In order: time may run out.
DEFAULT_VARIANTS = "auto,native,unfused,store,grad_in_forward,recompute"


@dataclass(frozen=True)
class Model:
    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    vocab: int
    untied: bool = False

    def args(self) -> list[str]:
        """Megatron's flags; the tokenizer adds its end of document to ``--vocab-size``."""
        return shlex.split(
            f"--num-layers {self.num_layers} --hidden-size {self.hidden_size}"
            f" --ffn-hidden-size {self.ffn_hidden_size} --num-attention-heads {self.num_heads}"
            f" --group-query-attention --num-query-groups {self.num_query_groups}"
            f" --vocab-size {self.vocab - 1} --tokenizer-type NullTokenizer"
            " --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear"
            " --position-embedding-type rope --rotary-base 500000"
            " --use-rope-scaling --rope-scaling-factor 32" + (f" {UNTIED}" if self.untied else "")
        )


def _named(name: str, layers: int | None = None) -> Model:
    """A model of the plan's own table, or the first ``layers`` of it."""
    found = planned_setting(["--model", name, "--seq-length", "1024"]).model
    if layers:
        name += f"-{layers}-layer{'s' if layers > 1 else ''}"
    return Model(
        name,
        layers or found.num_layers,
        found.hidden_size,
        found.ffn_hidden_size,
        found.num_attention_heads,
        found.num_query_groups,
        found.vocab_size,
        untied=not found.tied,
    )


MODELS = {
    model.name: model
    for model in (
        _named("llama-3.2-1b"),
        _named("llama-3.2-1b", layers=1),  # the head is what limits the length
        _named("llama-3-8b"),
        _named("llama-3-8b", layers=2),  # the head is a large part of the step
        Model("tiny", 2, 64, 128, 4, 2, 128),
    )
}

# Without the last one each sample builds a [T, T] fp32 mask on the host, which the causal attention
# never reads: 64 GiB at T = 131072.
COMMON_ARGS = """
    --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --lr-decay-style constant --mock-data
    --split 100,0,0 --eval-iters 0 --eval-interval 100 --log-interval 1 --log-memory-interval 1
    --num-workers 0 --attention-dropout 0 --hidden-dropout 0
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --no-create-attention-mask-in-dataloader
"""
GPU_ARGS = "--bf16 --transformer-impl transformer_engine"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def default_iterations(num_tokens: int) -> tuple[int, int]:
    """(iterations, of them warm-up): half a second each at 16384 tokens, 15 s at 131072.

    The first iteration of a launch took 4 s longer on an H200, the second 2 s; where only one warms
    up, the median of the three after it shrugs off the second, and beyond 131072 tokens 2 s are little.
    """
    for longest, iterations, warmup in ((16384, 20, 5), (32768, 10, 3), (65536, 6, 2)):
        if num_tokens <= longest:
            return iterations, warmup
    return (4, 1) if num_tokens <= 131072 else (2, 1)


def case_of(options: argparse.Namespace, checkout: Checkout, num_tokens: int, cpu_args: str) -> Case:
    """One length. Raises UsageError where the checkout is too old."""
    if checkout.version < (0, 16):
        raise UsageError("Megatron-LM 0.15 has no --log-memory-interval: give a checkout of 0.16 or newer")
    ranks, (iterations, warmup) = options.nproc, default_iterations(num_tokens)
    words = [*MODELS[options.model].args(), *shlex.split(COMMON_ARGS)]
    words += shlex.split(GPU_ARGS if options.device == "cuda" else f"{cpu_args} {NO_FUSED_WGRAD}")
    words += ["--seq-length", str(num_tokens), "--max-position-embeddings", str(num_tokens)]
    words += ["--train-iters", str(iterations), "--tensor-model-parallel-size", str(ranks)]
    # Megatron pads the vocabulary to a multiple of this times the TP size: 128 as with one GPU.
    words += ["--make-vocab-size-divisible-by", str(max(1, 128 // ranks))]
    words += ["--sequence-parallel"] * (ranks > 1)
    words += shlex.split(FULL_RECOMPUTE) * (options.recompute == "full")
    words += options.script_args
    name = str(num_tokens)
    return Case(name, "pretrain_gpt.py", ranks, words, num_tokens=num_tokens, warmup=warmup)
