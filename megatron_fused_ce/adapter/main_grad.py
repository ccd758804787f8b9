"""The wgrad accumulator under Megatron: ``main_grad``, by the same rules as its own layer.

With ``gradient_accumulation_fusion`` Megatron's linear layer adds into ``weight.main_grad`` itself,
sets ``grad_added_to_main_grad`` and returns a dummy, so that its gradient hooks still run. If one of several
uses of a weight (multi-token prediction, tied embeddings) did otherwise, DDP would drop its gradient or count
it twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.head.grad_weight import (
    Accumulator,
    InPlaceGradWeight,
    OpenGradWeight,
    ReturnedGradWeight,
)


def open_grad_weight_for(weight: Any, gradient_accumulation_fusion: bool) -> OpenGradWeight:
    """The wgrad accumulator for ``weight``, decided in the forward as Megatron does.

    Megatron-FSDP's parameters (``__fsdp_param__``) get a plain gradient: its own hook adds it to the
    sharded buffer.
    """
    main_grad = getattr(weight, "main_grad", None)
    if (
        not gradient_accumulation_fusion
        or main_grad is None
        or not weight.requires_grad
        or hasattr(weight, "__fsdp_param__")
    ):
        return ReturnedGradWeight

    def open_main_grad(saved_weight: Tensor, num_gemms: int, scaled: bool) -> Accumulator:
        # A view of the same parameter may have replaced the attribute since.
        weight.main_grad = main_grad
        return InPlaceGradWeight(main_grad, scaled, lambda: _what_autograd_gets(weight, saved_weight.dtype))

    kind = "main_grad" if main_grad.dtype == torch.float32 else "low_main_grad"
    open_main_grad.kind = kind  # type: ignore[attr-defined]
    return open_main_grad


def _what_autograd_gets(weight: Any, dtype: torch.dtype) -> Tensor | None:
    """A dummy gradient if DDP waits for one, else None.

    The dummy must be zeros if another use of the parameter (a tied embedding) returns a real gradient, since
    autograd sums the two.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    zero = bool(getattr(weight, "zero_out_wgrad", False))
    shape = list(weight.main_grad.shape)
    from megatron.core.tensor_parallel import layers

    if getattr(layers, "HAVE_TE", False):
        # Transformer Engine shares one dummy between layers.
        dummy: Tensor = layers.get_dummy_wgrad(shape, dtype, **({"zero": True} if zero else {}))
    else:
        make = torch.zeros if zero else torch.empty
        dummy = make(shape, dtype=dtype, device=weight.main_grad.device)
    weight.grad_added_to_main_grad = True
    return dummy
