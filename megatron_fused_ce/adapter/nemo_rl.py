"""NeMo-RL's fused log-probabilities, made by this head.

    from megatron_fused_ce.adapter.nemo_rl import serve_nemo_rl
    serve_nemo_rl()  # in every worker of the policy, before the first step

Replaces one function of NeMo-RL, after a look at its parameters (those of 0.7). NeMo-RL's own
``GPTModel.forward`` calls it if ``use_fused_linear_logprobs`` (0.7: ``use_linear_ce_fusion_loss``) is on.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import rl_stacks
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.rl import token_log_probs

MODULE = "nemo_rl.distributed.model_utils"
FUNCTION = "from_parallel_hidden_states_to_logprobs"


def serve_nemo_rl(config: FusedCEConfig | None = None) -> None:
    """Let NeMo-RL's fused log-probabilities be this head's, with ``config``; its chunk length is not used.

    Raises:
        ImportError: there is no NeMo-RL.
        RuntimeError: its function has other parameters than those that this was written for.
    """
    way_out = "leave serve_nemo_rl() out, NeMo-RL then makes its log-probabilities itself"
    rl_stacks.serve(MODULE, FUNCTION, log_probs_of, config, way_out)


def log_probs_of(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    config: FusedCEConfig | None = None,
) -> Tensor:
    """fp32 ``[B, S - 1]``, of each token but the first, by NeMo-RL's conventions.

    Hidden states are ``[S / R, B, H]`` with sequence parallelism, else ``[S, B, H]`` (over several ranks
    NeMo-RL's own backward raises then). ``target`` is ``[B, S]``, not shifted; a token outside the vocabulary
    has log-probability 0. ``runtime_gather_output``, ``vocab_end_index`` and ``chunk_size`` are not used.

    Raises:
        ValueError: there is context parallelism, which NeMo-RL's own function refuses too. It would shift
            targets across the borders of the ranks' parts.
    """
    if cp_group is not None and cp_group.size() > 1:
        raise ValueError("NeMo-RL's fused log-probabilities cannot do context parallelism: leave one out")
    with torch.no_grad() if inference_only else nullcontext():
        made = token_log_probs(
            tensor_parallel_hidden_states,
            output_weight_layer,
            target.roll(-1, -1),
            zero_unknown=True,
            tp_group=tp_group,
            sequence_parallel=tensor_parallel_hidden_states.shape[0] != target.shape[1],
            vocab_start=vocab_start_index,
            config=config,
        )
    return made.log_prob[:, :-1]
