"""Arguments that the functions for RL and distillation share: what they may be, and how a call takes them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
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


def in_words(value: Any, within: tuple[Any, ...] = ()) -> str:
    """What is compared of a value over ranks: the text of each of its parts.

    Of a function module, name, defaults and closure, of a partial the arguments, too.

    Raises:
        TypeError: a part has no text but its address.
    """
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, ModuleType) or any(value is outer for outer in within):
        return f"{value.__name__}"
    name = "" if type(value) is tuple else type(value).__qualname__
    parts: list[Any]
    if isinstance(value, FunctionType):
        name, within = f"{value.__module__}.{value.__qualname__}", (*within, value)
        cells = value.__closure__ or ()
        parts = [value.__defaults__, value.__kwdefaults__, *(cell.cell_contents for cell in cells)]
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        name, parts = value.__qualname__, [getattr(value, "__func__", None), value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, (tuple, list)):
        parts = list(value)
    elif isinstance(value, (set, frozenset)):
        parts = sorted(value, key=in_words)
    elif is_dataclass(value):
        parts = [getattr(value, each.name) for each in fields(value)]
    else:
        words = repr(value)
        if " at 0x" in words:
            raise TypeError(
                f"{words:.80} is told from others by its address alone, which ranks cannot compare: give its "
                "class a __repr__, or use a function, numbers or text"
            )
        return words
    return f"{name}({', '.join(in_words(part, within) for part in parts)})"
