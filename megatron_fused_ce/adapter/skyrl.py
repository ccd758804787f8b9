"""SkyRL's fused log-probabilities (``fused_lm_head_logprob``), made by this head.

    from megatron_fused_ce.adapter.skyrl import serve_skyrl
    serve_skyrl()  # on every rank, before the first step

Replaces one private function of SkyRL, after a look at its parameters. SkyRL shifts the labels before it, and
divides a copy of the weight by the temperature; both stay as they are, and so does its entropy.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import rl_stacks
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.rl import token_log_probs

MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
FUNCTION = "_fused_lm_head_logprob_apply"


def serve_skyrl(config: FusedCEConfig | None = None) -> None:
    """Let SkyRL's fused log-probabilities be this head's, with ``config``; its chunk length is then not used.

    Raises:
        ImportError: there is no SkyRL.
        RuntimeError: its function has other parameters than those that this was written for.
    """
    way_out = "leave serve_skyrl() out, SkyRL then makes its log-probabilities itself"
    rl_stacks.serve(MODULE, FUNCTION, log_probs_of, config, way_out)


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
            zero_unknown=True,
            reduce_grad_hidden=False,
            tp_group=tp_group,
            vocab_start=vocab_start_index,
            config=config,
        )
    return made.log_prob
