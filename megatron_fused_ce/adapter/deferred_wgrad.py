"""``--defer-embedding-wgrad-compute`` has no effect on a fused head: each backward makes its ``grad_weight``.

With the option Megatron's output layer leaves inputs and gradients in two lists of the model, and
``finish_embedding_wgrad_compute`` makes the products of them after the last backward. A fused head leaves
nothing there, nor may calls of its layer on Megatron's path: a metric's logits have an input and no gradient,
and the lists would pair inputs with gradients of other calls.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from megatron_fused_ce.adapter import say

FINISH = "finish_embedding_wgrad_compute"


def turn_off(layer: Any) -> None:
    """Turn the option off in the config of a fused head's layer, and log it."""
    if getattr(layer.config, "defer_embedding_wgrad_compute", False):
        layer.config.defer_embedding_wgrad_compute = False
        say.once(
            layer.tp_group,
            "--defer-embedding-wgrad-compute has no effect on the fused head: grad_weight is made in each "
            "backward",
        )


def patch(schedules: ModuleType) -> None:
    """Let Megatron's schedules finish nothing where nothing waits: they would take it from empty lists.

    They read the option in the first virtual stage's config, which need not be the head's.
    """
    stock = getattr(schedules, FINISH, None)
    if stock is None:
        return

    @wraps(stock)
    def finish(config: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        # No model where there is no head, or the option is off.
        if model is None or model.embedding_activation_buffer or model.grad_output_buffer:
            stock(config, model, *args, **kwargs)

    setattr(schedules, FINISH, finish)
