"""Megatron's optimizers read ``upstream_guard``'s flag in the steps that torch's hook does not see.

torch's hook before each optimizer step guards every parameter. But under fp16 Megatron drops the
gradients of an overflowing step: a loss that mismatches would go unseen for as long as that lasts. And
a step that is replayed from a CUDA graph runs no hook: a Python error is better there than the
assertion that was captured.
"""

from __future__ import annotations

import os
from functools import wraps
from types import ModuleType
from typing import Any

from megatron_fused_ce import upstream_guard
from megatron_fused_ce.adapter import report, switch


def patch(module: ModuleType) -> None:
    """Make every ``step`` of ``megatron.core.optimizer.optimizer`` check where it changed nothing.

    After the step and only then: where it does change parameters, the hook has read the flag at a
    point where Megatron has just waited for the gradient norm; reading it earlier would cost a wait.
    """
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            stock = vars(cls).get("step")
            if stock is not None and not getattr(stock, "__isabstractmethod__", False):
                cls.step = _checking_what_was_skipped(stock)  # type: ignore[attr-defined]


def _checking_what_was_skipped(stock: Any) -> Any:
    @wraps(stock)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        succeeded, *rest = stock(self, *args, **kwargs)
        if not succeeded or _has_no_parameters(self):
            upstream_guard.check()
        return succeeded, *rest

    return step


def _has_no_parameters(optimizer: Any) -> bool:
    """A rank whose parameters are all frozen still sends gradients to the stages before it."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return all(map(_has_no_parameters, chained))
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def patch_cuda_graph(module: ModuleType) -> None:
    """Make the call of a captured optimizer step check first.

    Where Megatron has moved it, one line to those who use the head: the assertion that was captured with the
    step is then what ends the launch.
    """
    wrapper: Any = getattr(module, "OptimizerCudaGraphWrapper", None)
    stock = vars(wrapper).get("__call__") if isinstance(wrapper, type) else None
    if stock is None:
        if switch.asked_for() and os.environ.get("RANK", "0") == "0":
            report.say(
                f"{module.__name__} has no OptimizerCudaGraphWrapper: a mismatch met by an optimizer step "
                "in a CUDA graph ends in a device-side assertion instead of UpstreamMismatch"
            )
        return

    @wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        upstream_guard.check()
        return stock(self, *args, **kwargs)

    wrapper.__call__ = call
