"""Megatron-LM's ``train_rl.py``: log-probabilities of tokens without their logits.

``megatron.rl.rl_utils.get_logprobs`` calls the model for the logits of the whole vocabulary and gives those
of all positions but the last to ``selective_log_softmax``, in 0.15 to 0.19 and main. Both are patched: while
the first runs, its model returns deferred logits, and the second evaluates them. All other callers
(generation, the check of copied weights) get real logits.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor

from megatron_fused_ce.adapter import caller, deferred_logits, forms, stock_path
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.import_hook import replace_everywhere
from megatron_fused_ce.adapter.switch import trusted


def patch(module: Any) -> None:
    """Wrap both functions of ``rl_utils``, the first also where it was imported by name before."""
    stock_get_logprobs = getattr(module, "get_logprobs", None)
    stock_log_softmax = getattr(module, "selective_log_softmax", None)
    if stock_get_logprobs is None or stock_log_softmax is None:
        return  # the logits are real then, and the head logs why once

    @wraps(stock_get_logprobs)
    def get_logprobs(model: Any, *args: Any, **kwargs: Any) -> Any:
        why_real = stock_path.reason_for_log_probs(model) or why_unknown(model)
        with caller.returned_to_caller(why_real):
            return deferred_logits.real(stock_get_logprobs(model, *args, **kwargs))

    @wraps(stock_log_softmax)
    def selective_log_softmax(logits: Any, index: Tensor) -> Any:
        made = logits.log_probs(index) if isinstance(logits, DeferredLogits) else None
        if made is not None:
            return made[0]
        return stock_log_softmax(deferred_logits.real(logits), index)

    verdict: list[tuple[forms.Held, str]] = []  # once there is a head

    def why_unknown(model: Any) -> str:
        if not verdict and (head := _head_of(model)) is not None:
            held = forms.Held("log_softmax", trusted())
            verdict.append((held, stock_path.of_all_ranks(held.why_unknown, held, head.tp_group)))
        return next((reason or held.changed() for held, reason in verdict), "")

    if forms.is_defined_in(module, stock_log_softmax):  # a user's stays as it is
        module.selective_log_softmax = selective_log_softmax
    replace_everywhere(module, "get_logprobs", get_logprobs)


def _head_of(model: Any) -> Any:
    """The adopted output layer of a model, perhaps wrapped; None where it has none."""
    from megatron_fused_ce.adapter.output_layer import ColumnParallelLinear

    modules = model.modules() if hasattr(model, "_modules") else ()
    return next((module for module in modules if isinstance(module, ColumnParallelLinear)), None)


def patch_upcast(module: Any) -> None:
    """Let ``Float16Module`` upcast deferred logits too, unless its caller switches the upcast off.

    ``get_logprobs`` switches it off in half precision. The schedules of overlapped experts (combined 1F1B)
    import the function by name.
    """
    stock_upcast = getattr(module, "float16_to_fp32", None)
    if stock_upcast is None:
        return

    @wraps(stock_upcast)
    def float16_to_fp32(value: Any) -> Any:
        return value.float() if isinstance(value, DeferredLogits) else stock_upcast(value)

    replace_everywhere(module, "float16_to_fp32", float16_to_fp32)
