"""A caller with the steps of ``megatron.rl.rl_utils``, which megatron-core's wheel does not have."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Log-softmax ``[b, n]`` of logits ``[b, n, V]`` at ``index`` ``[b, n]``, in the logits' dtype."""
    return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]


def get_logprobs(model: Any, tokens: Tensor, positions: Tensor, no_grad: bool = False) -> Tensor:
    """``[b, s - 1]`` on the last stage of a pipeline, hidden states on the others."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    own_dtype = {"fp32_output": False} if any(isinstance(m, Float16Module) for m in model.modules()) else {}
    # The log-softmax is outside, as Megatron's is.
    with torch.no_grad() if no_grad else contextlib.nullcontext():
        logits = model(tokens, positions, None, runtime_gather_output=True, **own_dtype)
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return logits
    return selective_log_softmax(logits[:, :-1, :], tokens[:, 1:])
