"""Arguments that several public functions share: their checks, and their form in a call of the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ENTROPY_CHOICES = ("none", "detached", "differentiable")


def why_wrong_entropy(entropy: object, choices: tuple[str, ...] = ENTROPY_CHOICES) -> ValueError | None:
    """The error for an ``entropy`` that is none of the words in ``choices``."""
    if isinstance(entropy, str) and entropy in choices:
        return None
    return ValueError(f"entropy is {entropy!r}; choose one of {', '.join(choices)}")


def sequence_first(hidden: Any, batch_first: bool | None) -> Any:
    """Transpose ``[b, s, H]`` to ``[s, b, H]`` if ``batch_first``; leave anything else as it is."""
    is_batch = batch_first and isinstance(hidden, Tensor) and hidden.dim() == 3
    return hidden.transpose(0, 1) if is_batch else hidden


def why_no_layout(name: str, hidden: object, batch_first: bool | None) -> ValueError | None:
    """The error for hidden states of three dimensions without a ``batch_first`` that tells their order."""
    if batch_first is not None or not isinstance(hidden, Tensor) or hidden.dim() != 3:
        return None
    return ValueError(
        f"{name} is {tuple(hidden.shape)}: give batch_first=True for [b, s, H], or False for [s, b, H]"
    )


def widened(hidden: Any, weight: Any) -> Any:
    """Cast half-precision hidden states to fp32 if the weight is fp32."""
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor)):
        return hidden  # the checks will report it
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    return hidden.float() if half and weight.dtype == torch.float32 else hidden


def temperature_of(temperature: Any, shape: torch.Size | tuple[int, ...]) -> Any:
    """The temperature as a number, or as a tensor in the labels' ``shape``.

    ``[b]`` beside labels ``[b, s]`` is expanded. For a tensor without dimensions the host waits.
    """
    if not isinstance(temperature, Tensor) or temperature.is_meta:
        return temperature
    if not temperature.dim():
        return temperature.item()
    if temperature.shape == shape[:1] and len(shape) == 2:
        return temperature.unsqueeze(-1).expand(shape)
    return temperature


def why_no_mask(mask: object, shape: torch.Size | tuple[int, ...]) -> ValueError | None:
    """The error for an ``active_mask`` that is not bool of the labels' ``shape``."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == shape:
        return None
    got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    return ValueError(f"active_mask is {got}; expected bool, one a token: {list(shape)}")
