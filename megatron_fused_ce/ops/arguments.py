"""Arguments that the functions for RL and distillation share: what they may be, and how a call takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ENTROPY_CHOICES = ("none", "detached", "differentiable")


def why_wrong_entropy(entropy: object, choices: tuple[str, ...] = ENTROPY_CHOICES) -> ValueError | None:
    """The error for anything but one of the words that a function takes."""
    if isinstance(entropy, str) and entropy in choices:
        return None
    return ValueError(f"entropy is {entropy!r}; choose one of {', '.join(choices)}")


def sequence_first(hidden: Any, batch_first: bool | None) -> Any:
    """``[b, s, H]`` as ``[s, b, H]`` where ``batch_first``."""
    is_batch = batch_first and isinstance(hidden, Tensor) and hidden.dim() == 3
    return hidden.transpose(0, 1) if is_batch else hidden


def why_no_layout(name: str, hidden: object, batch_first: bool | None) -> ValueError | None:
    """The error for hidden states of three dimensions whose order nothing tells."""
    if batch_first is not None or not isinstance(hidden, Tensor) or hidden.dim() != 3:
        return None
    return ValueError(
        f"{name} is {tuple(hidden.shape)}: give batch_first=True for [b, s, H], or False for [s, b, H]"
    )


def widened(hidden: Any, weight: Any) -> Any:
    """Half-precision hidden states cast to fp32 if the weight is fp32."""
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor)):
        return hidden  # the checks will report it
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    return hidden.float() if half and weight.dtype == torch.float32 else hidden


def temperature_of(temperature: Any, shape: torch.Size | tuple[int, ...]) -> Any:
    """A number, or one per token in the labels' ``shape``, of what a caller gave: of ``[b]`` beside ``[b,
    s]`` each sequence's; of a tensor without dimensions its number, for which the host waits."""
    if not isinstance(temperature, Tensor) or temperature.is_meta:
        return temperature
    if not temperature.dim():
        return temperature.item()
    if temperature.shape == shape[:1] and len(shape) == 2:
        return temperature.unsqueeze(-1).expand(shape)
    return temperature


def why_no_mask(mask: object, shape: torch.Size | tuple[int, ...]) -> ValueError | None:
    """The error for an ``active_mask`` that is not bool, one a token: ``shape``."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == shape:
        return None
    got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    return ValueError(f"active_mask is {got}; expected bool, one a token: {list(shape)}")
