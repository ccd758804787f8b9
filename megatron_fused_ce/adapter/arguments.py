"""The flags of a launch. Nothing else in the package reads command-line arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter import forms
from megatron_fused_ce.cli.command_line import BILLION, number, whole
from megatron_fused_ce.config import (
    LOGIT_PRECISION_CHOICES,
    LOGITS_BACKEND_CHOICES,
    MERGE_CHOICES,
    SMOOTHING_FORM_CHOICES,
    STRATEGY_CHOICES,
    FusedCEConfig,
)

FLAG = "--fused-chunked-ce"
#: How the other flags begin.
PREFIX = "--fused-ce-"


_at_least_one = whole()
_zero_or_more = number()
_above_zero = number(above=True)


def _share(text: str) -> float:
    value = _zero_or_more(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more and below 1, got {text!r}")
    return value


def _digest(text: str) -> str:
    if not forms.is_digest(text):
        raise argparse.ArgumentTypeError(
            f"expected 16 hexadecimal digits, as the log names them, got {text!r}"
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser (or any other): a group for users, one for experts."""
    _add_common(
        parser.add_argument_group(
            title="fused chunked cross-entropy",
            description="megatron_fused_ce: output layer and loss in one, chunk by chunk",
        )
    )
    _add_advanced(
        parser.add_argument_group(
            title="fused chunked cross-entropy, advanced",
            description="for comparisons and debugging; the defaults are right for training",
        )
    )
    return parser


def _add_common(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        FLAG,
        action="store_true",
        help="compute output layer and loss together: at most one copy of the logits in memory, one chunk of "
        "them where memory asks for it",
    )
    group.add_argument(
        "--fused-ce-strategy",
        choices=STRATEGY_CHOICES,
        default="auto",
        help="store: keep the logits in bf16 (or fp16, fp32) for the backward; grad_in_forward: compute the "
        "gradients in the forward, and again for a loss that is no scalar times sum(losses * loss_mask); "
        "recompute: compute the logits again in the backward, within a small budget; auto (default): the "
        "fastest that fits the memory budget",
    )
    group.add_argument(
        "--fused-ce-memory-mb",
        type=_at_least_one,
        default=None,
        metavar="M",
        help="memory budget of the head in MiB, beside its inputs and gradients "
        "(default: what grad_in_forward needs)",
    )
    chunking = group.add_mutually_exclusive_group()
    chunking.add_argument(
        "--fused-ce-num-chunks",
        type=_at_least_one,
        default=None,
        metavar="N",
        help="split the tokens of a micro-batch into N equal chunks (default: chosen by a planner; "
        "python -m megatron_fused_ce plan-head shows its choice)",
    )
    chunking.add_argument(
        "--fused-ce-chunk-tokens",
        type=_at_least_one,
        default=None,
        metavar="C",
        help="or into chunks of C tokens, counted over the tensor-parallel group",
    )
    group.add_argument(
        "--fused-ce-label-smoothing",
        type=_share,
        default=0.0,
        metavar="A",
        help="label smoothing over the whole vocabulary, for any tensor-parallel size",
    )
    group.add_argument(
        "--fused-ce-z-loss",
        type=_zero_or_more,
        default=0.0,
        metavar="Z",
        help="add Z * logsumexp(logits)**2 to the loss of each token",
    )
    group.add_argument(
        "--fused-ce-logit-softcap",
        type=_above_zero,
        default=None,
        metavar="CAP",
        help="replace the logits by CAP * tanh(logits / CAP), as in Gemma 2",
    )
    group.add_argument(
        "--fused-ce-ignore-index",
        type=whole(-BILLION),
        default=None,
        metavar="ID",
        help="label of tokens with loss 0 and no gradient (PyTorch's default is -100; here: none)",
    )
    group.add_argument(
        "--fused-ce-mask-padded-vocab",
        action="store_true",
        help="leave the padding of the vocabulary out of the softmax (stock Megatron includes it)",
    )
    group.add_argument(
        "--fused-ce-skip-masked",
        action="store_true",
        help="skip the GEMMs of tokens whose loss_mask is 0",
    )


def _add_advanced(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fused-ce-merge",
        choices=MERGE_CHOICES,
        default="auto",
        help="collectives that combine the tokens' statistics over tensor-parallel ranks: packed: one "
        "all-gather; all_reduce: a MAX and a SUM all-reduce; auto (default): packed",
    )
    group.add_argument(
        "--fused-ce-label-smoothing-form",
        choices=SMOOTHING_FORM_CHOICES,
        default="megatron",
        help="how much label smoothing A spreads over the K classes: megatron (default): A * K / (K - 1); "
        "pytorch: A",
    )
    group.add_argument(
        "--fused-ce-logit-precision",
        choices=LOGIT_PRECISION_CHOICES,
        default="auto",
        help="activations: round the logits to the activations' dtype, as Megatron's output layer does; "
        "fp32: do not, as with --output-logit-dtype fp32; auto (default): fp32 with the scaled-exp GEMM "
        "(--fused-ce-logits-backend), rounded elsewhere",
    )
    group.add_argument(
        "--fused-ce-logits-backend",
        choices=LOGITS_BACKEND_CHOICES,
        default="auto",
        help="scaled_exp: exponentiate in the GEMM's epilogue (bf16, Hopper and newer); gemm_rows: a plain "
        "GEMM, then row kernels; auto (default): scaled_exp on compute capability 9.0, where it was measured",
    )
    group.add_argument(
        "--fused-ce-debug-checks",
        action="store_true",
        help="compare shapes, options and the numbers of labels, token weights and temperatures over the "
        "tensor-parallel ranks on every call, not only shapes and options on the first",
    )
    group.add_argument(
        "--fused-ce-trust",
        type=_digest,
        nargs="+",
        default=None,
        metavar="DIGEST",
        help="stand in for functions that are not known, with these digests, which the log names: the head "
        "computes what Megatron's own do",
    )


def refuse_options_without_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let ``parser`` end with an error where one of the other flags is not at its default without the flag.

    Whatever the order of the words: they are looked at when all are parsed, as are names in the file of
    ``--yaml-cfg``, in whose place Megatron puts no command line.
    """
    parse: Any = parser.parse_known_args  # which parse_args calls
    plain = add_arguments(argparse.ArgumentParser(add_help=False))  # a script may set other defaults

    def parse_known_args(*given: Any, **named: Any) -> Any:
        parsed, rest = parse(*given, **named)
        beside = [
            action.option_strings[0]
            for action in parser._actions
            if action.option_strings
            and action.option_strings[0].startswith(PREFIX)
            and getattr(parsed, action.dest) != plain.get_default(action.dest)
        ]
        in_file = _names_in(getattr(parsed, "yaml_cfg", None))
        if in_file:
            parser.error(f"--yaml-cfg: {', '.join(in_file)} has no effect there; give it on the command line")
        if beside and not parsed.fused_chunked_ce:
            parser.error(f"{', '.join(beside)}: no effect without {FLAG}; give that too, or leave it out")
        return parsed, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    return parser


def _names_in(file: str | None) -> list[str]:
    """Names of this package's in a file of ``--yaml-cfg``, which Megatron reads and reports on."""
    try:
        text = Path(file).read_text() if file else ""
    except (OSError, UnicodeError):
        return []
    return re.findall(r"^\s*(fused_(?:chunked_ce|ce_\w+))\s*:", text, re.MULTILINE)


def config_from_args(args: Any) -> FusedCEConfig | None:
    """The config from parsed arguments; None without the flag."""
    if not getattr(args, "fused_chunked_ce", False):
        return None
    given = {
        option.name: getattr(args, f"fused_ce_{option.name}")
        for option in fields(FusedCEConfig)
        if hasattr(args, f"fused_ce_{option.name}")
    }
    if getattr(args, "fused_ce_mask_padded_vocab", False):
        given["true_vocab_size"] = _true_vocab_size()
    return FusedCEConfig(**given)


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


def trusted(args: Any) -> frozenset[str]:
    """Digests that parsed arguments vouch for."""
    return frozenset(getattr(args, "fused_ce_trust", None) or ())


def flag_given() -> bool:
    """Whether this process's command line has the flag."""
    return FLAG in sys.argv


def args_from_argv(argv: Sequence[str]) -> argparse.Namespace | None:
    """The flags in a raw command line, all other arguments ignored; None without the flag."""
    if FLAG not in argv:
        return None
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return parser.parse_known_args(list(argv))[0]


def megatron_args() -> Any:
    """Megatron's own parsed arguments, None where there are none (yet)."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def launch_args() -> Any:
    """The arguments with the flag; None without it.

    Megatron's parsed arguments if they have it, else those of ``sys.argv``, since ``--yaml-cfg`` replaces the
    parsed command line.
    """
    parsed = megatron_args()
    return parsed if getattr(parsed, "fused_chunked_ce", False) else args_from_argv(sys.argv[1:])
