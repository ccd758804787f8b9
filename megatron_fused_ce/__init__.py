"""Vocab-parallel fused linear cross-entropy for Megatron-LM: the loss without the logits.

Shape letters, the same in every file, kernel and document:

======  ==========================================================================
``s``   sequence length seen by the tensor-parallel group
``b``   micro-batch size
``T``   tokens seen by the tensor-parallel group, ``s * b``
``H``   hidden size
``V``   vocabulary rows held by this rank (the shard)
``R``   ranks of the tensor-parallel group
``C``   tokens of one chunk, counted over the whole tensor-parallel group
``n``   tokens of this rank's part: ``T / R`` with sequence parallelism, else ``T``
======  ==========================================================================

Names are imported when they are first used: the hook that waits for Megatron can then be installed
while Python starts, before torch can be imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_fused_ce.adapter.output_processor import output_processor
    from megatron_fused_ce.adapter.switch import Counters, counters, disable, enable
    from megatron_fused_ce.config import FusedCEConfig
    from megatron_fused_ce.distillation.loss import DistillationOutputs, fused_linear_distillation
    from megatron_fused_ce.ops.cross_entropy import (
        TokenOutputs,
        fused_linear_cross_entropy,
        fused_linear_token_outputs,
    )
    from megatron_fused_ce.ops.labels import fused_linear_topk_distillation
    from megatron_fused_ce.ops.terms import fused_linear_loss
    from megatron_fused_ce.ops.topk import fused_linear_topk

__version__ = "0.2.0"

__all__ = [
    "Counters",
    "DistillationOutputs",
    "FusedCEConfig",
    "TokenOutputs",
    "counters",
    "disable",
    "enable",
    "fused_linear_cross_entropy",
    "fused_linear_distillation",
    "fused_linear_loss",
    "fused_linear_token_outputs",
    "fused_linear_topk",
    "fused_linear_topk_distillation",
    "losses",
    "output_processor",
    "rl",
]

_HOMES = {
    name: home
    for home, names in (
        ("adapter.switch", "Counters counters disable enable"),
        ("adapter.output_processor", "output_processor"),
        ("config", "FusedCEConfig"),
        ("distillation.loss", "DistillationOutputs fused_linear_distillation"),
        ("ops.cross_entropy", "TokenOutputs fused_linear_cross_entropy fused_linear_token_outputs"),
        ("ops.labels", "fused_linear_topk_distillation"),
        ("ops.terms", "fused_linear_loss"),
        ("ops.topk", "fused_linear_topk"),
    )
    for name in names.split()
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in ("losses", "rl"):
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
