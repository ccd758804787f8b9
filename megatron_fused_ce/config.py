"""The options of one head, in one frozen dataclass."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

#: Numbers stay below this: they are used in fp32.
FP32_LIMIT = 2.0**127

STRATEGY_CHOICES = ("auto", "store", "grad_in_forward", "recompute")
LOGITS_BACKEND_CHOICES = ("auto", "scaled_exp", "gemm_rows")
MERGE_CHOICES = ("packed", "all_reduce")
SMOOTHING_FORM_CHOICES = ("megatron", "pytorch")
LOGIT_PRECISION_CHOICES = ("auto", "activations", "fp32")


@dataclass(frozen=True)
class FusedCEConfig:
    """Options of :func:`megatron_fused_ce.fused_linear_cross_entropy`.

    Raises ``ValueError`` when a field does not fit, saying what to do.
    """

    #: ``store`` keeps the chunks' logits until the backward (3 GEMMs), ``recompute`` computes them again (4),
    #: ``grad_in_forward`` computes the gradients in the forward (3, or 6 where the upstream gradient is no
    #: scalar times the token weights, which it needs); beside a teacher 4, 6 and 4; ``auto`` takes the
    #: fastest that fits ``memory_mb``, perhaps a mix of the first two (see :mod:`.planner`).
    strategy: str = "auto"
    #: Cut the tokens into this many chunks of equal size (they differ by one token at most).
    num_chunks: int | None = None
    #: Or cut them into chunks of this many tokens, counted over the tensor-parallel group.
    chunk_tokens: int | None = None
    #: Budget in MiB of the head's own buffers, beside inputs, ``grad_hidden`` and the wgrad
    #: accumulator; None for what ``grad_in_forward`` needs.
    memory_mb: int | None = None
    #: The logits are ``logit_scale * hidden @ weight.T`` (MuP, temperature).
    logit_scale: float = 1.0
    #: ``z -> cap * tanh(z / cap)`` of the scaled logits, before everything else (Gemma 2); None for none.
    logit_softcap: float | None = None
    #: Adds ``z_loss * lse**2`` to each token's loss.
    z_loss: float = 0.0
    #: Share of the target that goes to all classes alike, over the whole vocabulary; 0 for none.
    label_smoothing: float = 0.0
    #: ``megatron``: the share is ``label_smoothing * K / (K - 1)`` of K classes; ``pytorch``: as given.
    label_smoothing_form: str = "megatron"
    #: Tokens with this label have loss and log-probability 0 without a gradient; None: no label is ignored;
    #: ``auto``: -100 in the functions for the loss of one label a token, none elsewhere.
    ignore_index: int | str | None = "auto"
    #: Columns from this global id on (the padding) are left out of the softmax; None: all count, as in stock
    #: Megatron.
    true_vocab_size: int | None = None
    #: ``activations``: logits are rounded to the hidden states' dtype, as by a plain output layer; ``fp32``:
    #: they are not; ``auto``: not with the scaled-exp GEMM, but with the row kernels.
    logit_precision: str = "auto"
    #: Leave tokens of weight 0 out of every GEMM; needs ``token_weights``, and the host waits for the number
    #: of the others (:mod:`.head.tokens`). No token is left out while a CUDA graph is captured.
    skip_masked: bool = False
    #: Compare shapes and options over the ranks on every call, not only on the first, and look for NaN among
    #: token weights and a teacher's log-probabilities above 0. Shards of unequal sizes need it where the
    #: group has had equal ones first.
    debug_checks: bool = False
    #: How logits become gradients: the scaled-exp GEMM (``scaled_exp``), a plain one and row kernels
    #: (``gemm_rows``), or the first where it can run and was measured (see :mod:`.logits.choose`).
    logits_backend: str = "auto"
    #: How a chunk's statistics are merged over the tensor-parallel group: by one all-gather (``packed``), or
    #: by a MAX and a SUM all-reduce (``all_reduce``).
    merge: str = "packed"

    def __post_init__(self) -> None:
        for name, choices in (
            ("strategy", STRATEGY_CHOICES),
            ("logits_backend", LOGITS_BACKEND_CHOICES),
            ("merge", MERGE_CHOICES),
            ("label_smoothing_form", SMOOTHING_FORM_CHOICES),
            ("logit_precision", LOGIT_PRECISION_CHOICES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        if self.num_chunks is not None and self.chunk_tokens is not None:
            raise ValueError(
                f"both num_chunks={self.num_chunks} and chunk_tokens={self.chunk_tokens} are given; "
                "give one of them"
            )
        for name in ("skip_masked", "debug_checks"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("num_chunks", "chunk_tokens", "memory_mb", "true_vocab_size"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if not 0 < abs(self.logit_scale) < FP32_LIMIT:
            raise ValueError(f"logit_scale must be finite, also in fp32, and not 0, got {self.logit_scale}")
        if not 0 <= self.z_loss < FP32_LIMIT:
            raise ValueError(f"z_loss must be finite, also in fp32, and 0 or more, got {self.z_loss}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be 0 or more and below 1, got {self.label_smoothing}")
        if self.true_vocab_size == 1 and self.label_smoothing:
            raise ValueError("label_smoothing needs two classes or more, true_vocab_size is 1")
        cap = self.logit_softcap
        if cap is not None and not 0 < cap < FP32_LIMIT:
            raise ValueError(f"logit_softcap must be finite, also in fp32, and above 0, got {cap}")
        label = self.ignored_label
        if isinstance(label, bool) or not isinstance(label, (int, type(None))):
            raise ValueError(f"ignore_index must be a whole number, None or 'auto', got {label!r}")
        if label is not None and not -(2**62) < label < 2**62:
            raise ValueError(f"ignore_index must be between -2**62 and 2**62, got {label}")

    @functools.cached_property
    def ignored_label(self) -> int | None:
        """``ignore_index``; None for ``auto``."""
        return None if self.ignore_index == "auto" else self.ignore_index  # type: ignore[return-value]

    @property
    def loss_terms(self) -> str:
        """Names of the options that add terms to the loss, or empty."""
        return ", ".join(name for name in ("label_smoothing", "z_loss") if getattr(self, name))

    @property
    def loss_options(self) -> str:
        """Names of the options that change the loss, for messages; or empty.

        The scale is not among them, since Megatron has it too.
        """
        names = {
            "label_smoothing": bool(self.label_smoothing),
            "z_loss": bool(self.z_loss),
            "logit_softcap": self.logit_softcap is not None,
            "true_vocab_size": self.true_vocab_size is not None,
            "ignore_index": self.ignored_label is not None,
        }
        return ", ".join(name for name, given in names.items() if given)


@functools.lru_cache(maxsize=64)
def changed(config: FusedCEConfig, **change: Any) -> FusedCEConfig:
    """``dataclasses.replace``, looked up from the second time on."""
    return replace(config, **change)


def why_no_config(config: object) -> TypeError | None:
    """The error for anything but a config or None, which says what to give instead."""
    if config is None or isinstance(config, FusedCEConfig):
        return None
    example = f"strategy={config!r}" if config in STRATEGY_CHOICES else "strategy='store'"
    return TypeError(
        f"config must be a FusedCEConfig, got {config!r:.80}: give FusedCEConfig({example}) or the like"
    )
