"""Token accuracy: from the head into the report of Megatron's loss function.

Megatron's loss functions return ``(loss, num_tokens, {"lm loss": [sum, count]})``. Its trainer adds such
pairs up, key by key, over micro-batches and the data-parallel group (context parallelism included), and
logs each quotient: training log, evaluation, TensorBoard, wandb. The accuracy is a second such pair.

All schedules of all versions hand the model's output and the loss function to ``forward_step_calc_loss``
right after a forward. The head stores its counts (:func:`remember`); the patched function takes them out in
any case, and adds them to the report if the output shares its memory with the loss they were counted with.
Wrappers of the model and combined 1F1B's detached and viewless tensors keep that memory.

Whether the key is there depends on the launch alone (flag, model, shape of the report), not on a call: a
key missing on one data-parallel rank would leave the others in a collective. Unknown counts are NaN.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.adapter import report
from megatron_fused_ce.adapter.token_weights import TokenWeights

KEY = "lm accuracy"
LOSS_KEY = "lm loss"
HOOK_POINT = "forward_step_calc_loss"


class TokenCounts(NamedTuple):
    """Counts of one micro-batch, fp32, on the labels' device."""

    pair: Tensor  # [2]: the correct tokens and all tokens that count, each by its weight
    mask_sum: Tensor  # []: of the whole loss mask, ignored labels too


class _Evaluated(NamedTuple):
    """The latest loss of a model's head."""

    loss: Tensor  # [b, s]; held so that nothing else gets its memory
    counts: TokenCounts | None
    unknown: str  # why there are no counts
    tp_rank: int


class _Latest(threading.local):
    """The latest loss of this thread: on GPUs a forward repeated in the backward runs in another one."""

    evaluated: _Evaluated | None = None


_latest = _Latest()


def reason_at_build(takes_mask: bool) -> str | None:
    """Why a launch with a fused head cannot have the accuracy, or None."""
    from megatron.core.pipeline_parallel import schedules

    if not hasattr(schedules, HOOK_POINT):
        return f"this Megatron's schedules have no {HOOK_POINT}"
    return None if takes_mask else "this Megatron calls the model without a loss_mask"


def count(
    labels: Tensor, weights: TokenWeights, correct: Tensor | None, ignore_index: int | None
) -> TokenCounts | None:
    """Count correct tokens ``[b, s]`` by their weights; None if either is unknown."""
    if weights.values is None or correct is None:
        return None
    mask = weights.values.float()
    counting = mask if ignore_index is None else mask.masked_fill(labels == ignore_index, 0.0)
    return TokenCounts(torch.stack([(counting * correct).sum(), counting.sum()]), mask.sum())


def remember(loss: Tensor, counts: TokenCounts | None, unknown: str, tp_rank: int) -> None:
    """Keep the counts of a head's ``loss`` ``[b, s]``, or why there are none, for the loss function.

    The heads of multi-token prediction are evaluated before the main one, which then replaces their counts.
    """
    _latest.evaluated = _Evaluated(loss.detach(), counts, unknown, tp_rank)


def patch(module: ModuleType) -> None:
    """Wrap the loss function that ``megatron.core.pipeline_parallel.schedules`` is about to call."""
    stock = getattr(module, HOOK_POINT, None)
    if stock is None:
        return  # reason_at_build reports it if the accuracy is on

    @wraps(stock)
    def forward_step_calc_loss(
        model: Any, output_tensor: Any, loss_func: Any, *args: Any, **kwargs: Any
    ) -> Any:
        evaluated, _latest.evaluated = _latest.evaluated, None
        if evaluated is not None and loss_func is not None:
            loss_func = _reporting(loss_func, evaluated, output_tensor)
        return stock(model, output_tensor, loss_func, *args, **kwargs)

    setattr(module, HOOK_POINT, forward_step_calc_loss)


def _reporting(loss_func: Callable[..., Any], evaluated: _Evaluated, output: Any) -> Callable[..., Any]:
    counts, unknown = evaluated.counts, evaluated.unknown
    if not _in_one_memory(evaluated.loss, output):
        counts, unknown = None, "the loss function gets something else than the loss of the head"

    def loss_and_accuracy(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(*args, **kwargs)
        if kwargs.get("non_loss_data"):
            return outputs
        lm_loss, why_not = _reported_loss(outputs)
        if lm_loss is None:
            report.say_once(evaluated.tp_rank, f"no {KEY}: {why_not}")
            return outputs
        if counts is None:
            report.say_once(evaluated.tp_rank, f"the {KEY} is NaN: {unknown}")
        *others, reported = outputs
        return (*others, {**reported, KEY: _beside(lm_loss, counts)})

    return loss_and_accuracy


def _in_one_memory(loss: Tensor, output: Any) -> bool:
    return (
        isinstance(output, Tensor) and output.data_ptr() == loss.data_ptr() and output.numel() == loss.numel()
    )


def _reported_loss(outputs: Any) -> tuple[Tensor | None, str]:
    """The pair ``[sum, count]`` in what a loss function returned, or why the accuracy cannot join it."""
    reported = outputs[-1] if isinstance(outputs, tuple) and outputs else None
    if not isinstance(reported, dict):
        return None, "the loss function returns no dict of what it reports"
    lm_loss = reported.get(LOSS_KEY)
    if not isinstance(lm_loss, Tensor) or lm_loss.numel() != 2:
        return None, f"the loss function does not report its '{LOSS_KEY}' as a sum and a count"
    if KEY in reported:
        return None, "the loss function reports one of its own"
    return lm_loss, ""


def _beside(lm_loss: Tensor, counts: TokenCounts | None) -> Tensor:
    """The pair ``[correct, count]``; NaN if the loss counted other tokens than the mask.

    Megatron reports the count as a whole number, rounded down.
    """
    if counts is None:
        return torch.full((2,), math.nan, device=lm_loss.device)
    differs = (counts.mask_sum - lm_loss.view(-1)[1]).abs() >= 1
    return counts.pair.masked_fill(differs, math.nan)
