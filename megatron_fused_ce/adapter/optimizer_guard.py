"""Megatron's optimizers read ``upstream_guard``'s flag before they look at a gradient.

torch's hook before each optimizer step guards every parameter already. This is for the steps that
Megatron does not take: under fp16 it drops the gradients of an overflowing step, and a loss that
mismatches would go unseen for as long as that lasts; and for the step that it replays from a CUDA
graph, where a Python error is better than a device-side assertion.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from megatron_fused_ce import upstream_guard


def patch(module: ModuleType) -> None:
    """Make every ``prepare_grads`` of ``megatron.core.optimizer.optimizer`` check first."""
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            stock = vars(cls).get("prepare_grads")
            if stock is not None and not getattr(stock, "__isabstractmethod__", False):
                cls.prepare_grads = _checking(stock)  # type: ignore[attr-defined]


def patch_cuda_graph(module: ModuleType) -> None:
    """Make the call of a captured optimizer step check first."""
    wrapper: Any = module.OptimizerCudaGraphWrapper
    wrapper.__call__ = _checking(wrapper.__call__)


def _checking(stock: Any) -> Any:
    @wraps(stock)
    def checking(self: Any, *args: Any, **kwargs: Any) -> Any:
        upstream_guard.check()
        return stock(self, *args, **kwargs)

    return checking
