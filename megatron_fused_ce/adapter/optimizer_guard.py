"""Megatron's optimizers read ``grad_guard``'s flag in the steps that torch's hook does not see.

torch's hook before each optimizer step guards every parameter, except in three cases. Under fp16 Megatron
skips an overflowing step, so a mismatch would go unseen as long as steps overflow. A step replayed from a
CUDA graph runs no hook; a Python error is clearer there than the captured assertion. And torch's optimizers
mostly step copies of parameters; Megatron's optimizers know the models.
"""

from __future__ import annotations

import os
from functools import partial, wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_fused_ce import grad_guard
from megatron_fused_ce.adapter import report, switch

_GROUPS = ("float16", "fp32_from_fp32")


def patch(module: ModuleType) -> None:
    """Make every ``step`` of ``megatron.core.optimizer.optimizer`` check the flag if it changed nothing.

    After the step only: if it does change parameters, the hook has read the flag where Megatron has just
    waited for the gradient norm. Reading it earlier would cost a wait.
    """
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            stock = vars(cls).get("step")
            if stock is not None and not getattr(stock, "__isabstractmethod__", False):
                cls.step = _checking_what_was_skipped(stock)  # type: ignore[attr-defined]


def _checking_what_was_skipped(stock: Any) -> Any:
    @wraps(stock)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with grad_guard.stepping(partial(_model_parameters, self)):
            result = stock(self, *args, **kwargs)
            # Megatron's own return (succeeded, gradient norm, number of zeros); others may say a bool alone.
            succeeded = result[0] if isinstance(result, tuple) else result
            if not succeeded or _has_no_parameters(self):
                grad_guard.raise_if_mismatch()
        return result

    return step


def _model_parameters(optimizer: Any) -> list[Tensor] | None:
    """The models' own parameters that a Megatron optimizer steps, not its copies; None if unknown."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained:
        lists = [_model_parameters(one) for one in chained]
        return None if None in lists else [one for known in lists for one in known or ()]
    chunks = getattr(optimizer, "model_chunks", None)
    if chunks:  # DistributedOptimizer
        return [parameter for chunk in chunks for parameter in chunk.parameters()]
    float16, fp32 = (getattr(optimizer, f"{name}_groups", None) for name in _GROUPS)
    if float16 is not None and fp32 is not None:  # Float16OptimizerWithFloat16Params
        return [parameter for group in [*float16, *fp32] for parameter in group]
    if type(optimizer).__name__ == "FP32Optimizer" and optimizer.optimizer is not None:
        return [one for group in optimizer.optimizer.param_groups for one in group["params"]]
    return None


def _has_no_parameters(optimizer: Any) -> bool:
    """Whether the optimizer has no parameters. Such a rank still sends gradients to earlier stages."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return all(map(_has_no_parameters, chained))
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def patch_cuda_graph(module: ModuleType) -> None:
    """Make the replay of a captured optimizer step check the flag first.

    If this Megatron has moved that function, one line in the log of launches with the head: the assertion
    captured with the step then ends the launch.
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
        grad_guard.raise_if_mismatch()
        return stock(self, *args, **kwargs)

    wrapper.__call__ = call
