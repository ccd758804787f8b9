"""The flags of a launch. Nothing else in the package reads command-line arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter import forms
from megatron_fused_ce.cli.command_line import BILLION, number, whole
from megatron_fused_ce.config import LOGIT_PRECISION_CHOICES, MERGE_CHOICES, STRATEGY_CHOICES, FusedCEConfig

FLAG = "--fused-chunked-ce"
#: How the other flags begin.
PREFIX = "--fused-ce-"


def _share(text: str) -> float:
    value = number()(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more and below 1, got {text!r}")
    return value


def _label(text: str) -> int | str:
    return text if text == "auto" else whole(-BILLION)(text)


def _digest(text: str) -> str:
    if not forms.is_digest(text):
        raise argparse.ArgumentTypeError(
            f"expected 16 hexadecimal digits, as the log names them, got {text!r}"
        )
    return text


#: Of each flag the name, of a field of :class:`FusedCEConfig`, whose default it has, or one beside those;
#: what ``add_argument`` takes; its help.
_Options = tuple[tuple[str, dict[str, Any], str], ...]
_COMMON: _Options = (
    ("memory_mb", {"type": whole(), "metavar": "M"},
        "memory budget of the head in MiB, beside its inputs and gradients "
        "(default: what grad_in_forward needs)"),
)  # fmt: skip
_ADVANCED: _Options = (
    ("strategy", {"choices": STRATEGY_CHOICES},
        "store: keep the logits in bf16 (or fp16, fp32) for the backward; grad_in_forward: compute the "
        "gradients in the forward, and again for a loss that is no scalar times sum(losses * loss_mask); "
        "recompute: compute the logits again in the backward, within a small budget; auto (default): the "
        "fastest that fits the memory budget"),
    ("num_chunks", {"type": whole(), "metavar": "N"},
        "split the tokens of a micro-batch into N equal chunks (default: chosen by a planner; "
        "python -m megatron_fused_ce plan-head shows its choice)"),
    ("label_smoothing", {"type": _share, "metavar": "A"},
        "label smoothing over the whole vocabulary, for any tensor-parallel size"),
    ("z_loss", {"type": number(), "metavar": "Z"},
        "add Z * logsumexp(logits)**2 to the loss of each token"),
    ("logit_softcap", {"type": number(above=True), "metavar": "CAP"},
        "replace the logits by CAP * tanh(logits / CAP), as in Gemma 2"),
    ("ignore_index", {"type": _label, "metavar": "ID"},
        "label of tokens with loss 0 and no gradient (PyTorch's default is -100; here: none)"),
    ("mask_padded_vocab", {"action": "store_true"},
        "leave the padding of the vocabulary out of the softmax (stock Megatron includes it)"),
    ("skip_masked", {"action": "store_true"}, "skip the GEMMs of tokens whose loss_mask is 0"),
    ("merge", {"choices": MERGE_CHOICES},
        "collectives that combine the tokens' statistics over tensor-parallel ranks: packed (default): one "
        "all-gather; all_reduce: a MAX and a SUM all-reduce"),
    ("logit_precision", {"choices": LOGIT_PRECISION_CHOICES},
        "activations: round the logits to the activations' dtype, as Megatron's output layer does; "
        "fp32: do not, as with --output-logit-dtype fp32; auto (default): fp32 with the scaled-exp GEMM, "
        "rounded elsewhere"),
    ("debug_checks", {"action": "store_true"},
        "compare shapes, options and the numbers of labels, token weights and temperatures over the "
        "tensor-parallel ranks on every call, not only shapes and options on the first"),
    ("trust", {"type": _digest, "nargs": "+", "metavar": "DIGEST"},
        "stand in for functions that are not known, with these digests, which the log names: the head "
        "computes what Megatron's own do"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser (or any other): two flags for all, the rest "advanced"."""
    common = parser.add_argument_group(
        title="fused chunked cross-entropy",
        description="megatron_fused_ce: output layer and loss in one, chunk by chunk",
    )
    common.add_argument(
        FLAG,
        action="store_true",
        help="compute output layer and loss together: at most one copy of the logits in memory, one chunk of "
        "them where memory asks for it",
    )
    advanced = parser.add_argument_group(
        title="fused chunked cross-entropy, advanced",
        description="options of the loss; comparisons and debugging, whose defaults are right for training",
    )
    defaults = vars(FusedCEConfig())
    for group, options in ((common, _COMMON), (advanced, _ADVANCED)):
        for name, how, words in options:
            default = defaults.get(name, False if "action" in how else None)
            flag = PREFIX + name.replace("_", "-")
            group.add_argument(flag, default=default, help=words, **how)
    return parser


def patch(module: Any) -> None:
    """Wrap ``add_megatron_arguments``: every version looks it up in its module when it parses."""
    stock = module.add_megatron_arguments

    @wraps(stock)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return refuse_options_without_flag(add_arguments(stock(parser)))

    module.add_megatron_arguments = add_megatron_arguments


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
