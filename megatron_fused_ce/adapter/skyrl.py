"""SkyRL's fused log-probabilities (``fused_lm_head_logprob``), made by this head.

    from megatron_fused_ce.adapter.skyrl import serve_skyrl
    serve_skyrl()  # on every rank, before the first step

Replaces one private function of SkyRL, after a look at its parameters. SkyRL shifts the labels before it; its
entropy stays as it is. The two functions that call it would divide a copy of the weight by the temperature:
they get 1, and the logits are divided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import rl_stacks
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.rl import token_log_probs

MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
FUNCTION = "_fused_lm_head_logprob_apply"
CALLERS = ("from_parallel_hidden_to_logprobs", "from_parallel_hidden_to_logprobs_packed_sequences")

_temperature: ContextVar[float] = ContextVar("temperature", default=1.0)


def serve_skyrl(config: FusedCEConfig | None = None) -> None:
    """Let SkyRL's fused log-probabilities be this head's, with ``config``; its chunk length is then not used.

    Raises:
        ImportError: there is no SkyRL.
        RuntimeError: its functions have other parameters than those that this was written for.
    """
    way_out = "leave serve_skyrl() out, SkyRL then makes its log-probabilities itself"
    module = import_module(MODULE)
    callers = [rl_stacks.function_of(module, name, ("temperature",), True, way_out) for name in CALLERS]
    rl_stacks.serve(MODULE, FUNCTION, log_probs_of, config, way_out)
    for name, caller in zip(CALLERS, callers, strict=True):
        rl_stacks.replace_everywhere(module, name, _past(caller))


def _past(caller: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``caller`` with its temperature, a keyword, given to :func:`log_probs_of` instead."""

    @functools.wraps(caller)
    def served(*args: Any, temperature: float = 1.0, **kwargs: Any) -> Tensor:
        before = _temperature.set(_temperature.get() * temperature)
        try:
            return caller(*args, **kwargs)
        finally:
            _temperature.reset(before)

    return served


def log_probs_of(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """fp32 ``[B, S]`` of hidden states ``[B, S, H]``, by SkyRL's conventions.

    A label outside the vocabulary has log-probability 0; ``grad_hidden`` is this rank's part, which the
    backward of SkyRL's gather sums. ``backend``, ``vocab_end_index`` and ``chunk_size`` are not used.
    """
    with torch.no_grad() if inference_only else nullcontext():
        made = token_log_probs(
            hidden.transpose(0, 1),
            weight,
            target,
            temperature=_temperature.get(),
            zero_unknown=True,
            reduce_grad_hidden=False,
            tp_group=tp_group,
            vocab_start=vocab_start_index,
            config=config,
        )
    return made.log_prob
