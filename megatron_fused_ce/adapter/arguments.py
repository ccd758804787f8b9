"""The flags of a launch. Nothing else in the package reads command-line arguments."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_fused_ce.config import (
    LOGIT_PRECISION_CHOICES,
    MERGE_CHOICES,
    SMOOTHING_FORM_CHOICES,
    STRATEGY_CHOICES,
    FusedCEConfig,
)

FLAG = "--fused-chunked-ce"


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return value


def _number(text: str, fits: Callable[[float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise argparse.ArgumentTypeError(f"expected a number {words}, got {text!r}")
    return value


def _zero_or_more(text: str) -> float:
    return _number(text, lambda value: value >= 0, "of 0 or more")


def _above_zero(text: str) -> float:
    return _number(text, lambda value: value > 0, "above 0")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 <= value < 1, "of 0 or more and below 1")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser (or any other), in a group of their own."""
    group = parser.add_argument_group(
        title="fused chunked cross-entropy",
        description="megatron_fused_ce: the language-model head without its logits",
    )
    group.add_argument(
        FLAG,
        action="store_true",
        help="compute the language-model loss one sequence chunk at a time, never holding the logits",
    )
    chunking = group.add_mutually_exclusive_group()
    chunking.add_argument(
        "--fused-ce-num-chunks",
        type=_at_least_one,
        default=None,
        metavar="N",
        help="cut the tokens of a micro-batch into N chunks of equal size",
    )
    chunking.add_argument(
        "--fused-ce-chunk-tokens",
        type=_at_least_one,
        default=None,
        metavar="C",
        help="or into chunks of C tokens, counted over the tensor-parallel group "
        "(default: the planner's, see python -m megatron_fused_ce plan-head)",
    )
    group.add_argument(
        "--fused-ce-strategy",
        choices=STRATEGY_CHOICES,
        default="auto",
        help="recompute: least memory, computes the logits twice; store: keeps them in the dtype of "
        "the hidden states until the backward; grad_in_forward: gradients in the forward, for the loss mask "
        "known there; auto: the fastest that fits the budget, storing some chunks and recomputing "
        "the rest where neither fits",
    )
    group.add_argument(
        "--fused-ce-memory-mb",
        type=_at_least_one,
        default=None,
        metavar="M",
        help="budget in MiB of the head's own buffers, beside its inputs and gradients "
        "(default: what grad_in_forward needs)",
    )
    group.add_argument(
        "--fused-ce-merge",
        choices=MERGE_CHOICES,
        default="auto",
        help="how the tokens' statistics meet over the tensor-parallel ranks: packed: one all-gather "
        "of all of them; all_reduce: a MAX, then a SUM; auto: packed",
    )
    group.add_argument(
        "--fused-ce-label-smoothing",
        type=_share,
        default=0.0,
        metavar="A",
        help="smooth the labels over the whole vocabulary, on any number of tensor-parallel ranks",
    )
    group.add_argument(
        "--fused-ce-label-smoothing-form",
        choices=SMOOTHING_FORM_CHOICES,
        default="megatron",
        help="megatron: A * K / (K - 1) of K classes is spread over all of them; pytorch: A is",
    )
    group.add_argument(
        "--fused-ce-z-loss",
        type=_zero_or_more,
        default=0.0,
        metavar="Z",
        help="add Z * logsumexp(logits)**2 to each token's loss",
    )
    group.add_argument(
        "--fused-ce-logit-softcap",
        type=_above_zero,
        default=None,
        metavar="CAP",
        help="bend the logits to CAP * tanh(logits / CAP)",
    )
    group.add_argument(
        "--fused-ce-ignore-index",
        type=int,
        default=None,
        metavar="ID",
        help="tokens with this label have loss 0 and no gradient",
    )
    group.add_argument(
        "--fused-ce-mask-padded-vocab",
        action="store_true",
        help="leave the columns that pad the vocabulary out of the softmax (stock Megatron has them in)",
    )
    group.add_argument(
        "--fused-ce-logit-precision",
        choices=LOGIT_PRECISION_CHOICES,
        default="auto",
        help="activations: round the logits to the activations' dtype, as Megatron's output layer does; "
        "auto: fp32 where the scaled-exp GEMM serves (bf16 on Hopper and newer)",
    )
    group.add_argument(
        "--fused-ce-skip-masked",
        action="store_true",
        help="leave tokens that the loss_mask gives no weight out of every product",
    )
    group.add_argument(
        "--fused-ce-log-accuracy",
        action="store_true",
        help="report the share of tokens whose label has the largest logit beside the lm loss, in training "
        "and evaluation",
    )
    group.add_argument(
        "--fused-ce-report",
        action="store_true",
        help="time and bytes of the head's phases, at each log interval: Megatron's timers, log, TensorBoard",
    )
    group.add_argument(
        "--fused-ce-debug-checks",
        action="store_true",
        help="compare shapes and options over the tensor-parallel ranks on every call",
    )
    return parser


def config_from_args(args: Any) -> FusedCEConfig | None:
    """The config that parsed arguments ask for, None without the flag."""
    if not getattr(args, "fused_chunked_ce", False):
        return None
    masks = getattr(args, "fused_ce_mask_padded_vocab", False)
    return FusedCEConfig(
        strategy=getattr(args, "fused_ce_strategy", "auto"),
        num_chunks=getattr(args, "fused_ce_num_chunks", None),
        chunk_tokens=getattr(args, "fused_ce_chunk_tokens", None),
        memory_mb=getattr(args, "fused_ce_memory_mb", None),
        debug_checks=getattr(args, "fused_ce_debug_checks", False),
        merge=getattr(args, "fused_ce_merge", "auto"),
        label_smoothing=getattr(args, "fused_ce_label_smoothing", 0.0),
        label_smoothing_form=getattr(args, "fused_ce_label_smoothing_form", "megatron"),
        z_loss=getattr(args, "fused_ce_z_loss", 0.0),
        logit_softcap=getattr(args, "fused_ce_logit_softcap", None),
        ignore_index=getattr(args, "fused_ce_ignore_index", None),
        true_vocab_size=_true_vocab_size() if masks else None,
        logit_precision=getattr(args, "fused_ce_logit_precision", "auto"),
        skip_masked=getattr(args, "fused_ce_skip_masked", False),
    )


def _true_vocab_size() -> int:
    """The tokenizer's vocabulary, which Megatron pads."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    tokenizer = getattr(global_vars, "_GLOBAL_TOKENIZER", None)
    size = getattr(tokenizer, "vocab_size", None)
    if not isinstance(size, int):
        raise ValueError(
            "--fused-ce-mask-padded-vocab takes the vocabulary size from Megatron's tokenizer, and there is "
            "none yet; launch pretrain_gpt.py with its tokenizer, or give true_vocab_size to "
            "megatron_fused_ce.enable()"
        )
    return size


def logs_accuracy(args: Any) -> bool:
    """Whether parsed arguments ask for the accuracy beside the loss."""
    return bool(getattr(args, "fused_ce_log_accuracy", False))


def reports_phases(args: Any) -> bool:
    """Whether parsed arguments ask for the head's phases."""
    return bool(getattr(args, "fused_ce_report", False))


def flag_given() -> bool:
    """Whether this process's command line has the flag."""
    return FLAG in sys.argv


def args_from_argv(argv: Sequence[str]) -> argparse.Namespace | None:
    """The flags in a raw command line, all other arguments ignored; None without the flag."""
    if FLAG not in argv:
        return None
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return parser.parse_known_args(list(argv))[0]


def config_from_argv(argv: Sequence[str]) -> FusedCEConfig | None:
    """The config that a raw command line asks for, None without the flag."""
    return config_from_args(args_from_argv(argv))


def megatron_args() -> Any:
    """Megatron's own parsed arguments, None where there are none (yet)."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def launch_args() -> Any:
    """The arguments that ask for the fused head, None where none do.

    Megatron's parsed ones where they ask for it; else those of ``sys.argv``, since ``--yaml-cfg``
    replaces what was parsed from the command line.
    """
    parsed = megatron_args()
    return parsed if getattr(parsed, "fused_chunked_ce", False) else args_from_argv(sys.argv[1:])
