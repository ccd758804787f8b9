"""``--defer-embedding-wgrad-compute``: the head's ``grad_weight`` is made in the pipeline's last bubble.

Megatron keeps the output layer's inputs and the gradients of its logits in two lists of the model, and
``finish_embedding_wgrad_compute`` makes the products from them, after the last backward and before
``finalize_model_grads_func``. Here each call keeps what its own backward reads (:class:`.wgrad.Later`): with
``store`` the logits, in the operands' dtype, else hidden states and a few floats a token, from which the
logits are made again. Calls of multi-token prediction wait like others.

Where the reduction of gradients may start before the bubble, or nothing would end the wait, ``grad_weight``
is made at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_fused_ce.adapter import accuracy, report
from megatron_fused_ce.wgrad import Later, OpenGradWeight, kind_of

#: Wgrad accumulators that the bubble can add to.
MAIN_GRADS = "main_grad", "low_main_grad"
CLEAR, FINISH = "clear_embedding_activation_buffer", "finish_embedding_wgrad_compute"
#: The schedules that call these.
SCHEDULES = (
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

#: Of each output layer that has one; not an attribute, which a copy of the layer would share.
_of_layer: WeakKeyDictionary[Any, Later] = WeakKeyDictionary()
#: Of each in a step that a schedule has begun, until its end: why its ``grad_weight`` cannot wait, or empty.
_why_not: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def is_on(config: Any) -> bool:
    return bool(getattr(config, "defer_embedding_wgrad_compute", False))


def reason_at_build(config: Any) -> str:
    """Why a model with deferral stays on Megatron's path, or empty."""
    if not is_on(config):
        return ""
    from megatron.core.pipeline_parallel import schedules

    missing = [name for name in (CLEAR, FINISH) if not hasattr(schedules, name)]
    return (
        f"--defer-embedding-wgrad-compute: the schedules have no {' and '.join(missing)}" if missing else ""
    )


def later_of(layer: Any, open_grad_weight: OpenGradWeight) -> Later | None:
    """Where a call of this layer leaves its ``grad_weight``, or None to make it at once."""
    config = layer.config
    if not (is_on(config) and torch.is_grad_enabled()):
        return None
    why_not = _why_at_once(layer, kind_of(open_grad_weight))
    if why_not:
        report.say_once(
            layer.tp_group.rank(),
            "--defer-embedding-wgrad-compute has no effect: grad_weight is made in each backward, since "
            f"{why_not}",
        )
        return None
    if layer not in _of_layer:
        _of_layer[layer] = Later(getattr(config, "wgrad_deferral_limit", 0))
    return _of_layer[layer]


@contextmanager
def at_once(config: Any) -> Iterator[None]:
    """Context in which a call of Megatron's own layer leaves nothing in its lists, and makes ``grad_weight``
    in its backward: one for a metric has none, and would part inputs from gradients."""
    if not is_on(config):
        yield
        return
    config.defer_embedding_wgrad_compute = False
    try:
        yield
    finally:
        config.defer_embedding_wgrad_compute = True


def _why_at_once(layer: Any, kind: str) -> str:
    if layer not in _why_not:
        return "the step was begun by no schedule of Megatron's, which would end the wait"
    if kind not in MAIN_GRADS:
        return "the weight's gradient goes to no main_grad"
    return _why_not[layer]


def _why_not_with(config: Any, model: Any) -> str:
    """``config``: the schedule's, its first chunk's; in 0.16 each chunk has its own."""
    asked = [getattr(config, name, None) for name in ("no_sync_func", "grad_sync_func")]
    if _reduces_early(model) or asked != [None, None]:
        return "the reduction of gradients starts before the bubble (--overlap-grad-reduce)"
    if getattr(config, "finalize_model_grads_func", None) is None:
        return "the schedules make it before finalize_model_grads_func alone, and there is none"
    return ""


#: So many that nothing but hidden states and floats are kept.
UNKNOWN_MICRO_BATCHES = 1024


def calls_later(config: Any) -> int:
    """Calls of a head whose ``grad_weight`` waits at once, at most, beside the last micro-batch's."""
    if not is_on(config):
        return 0
    from megatron.core import num_microbatches_calculator

    try:
        micro_batches = int(num_microbatches_calculator.get_num_microbatches())
    except (AssertionError, AttributeError):  # nobody has set it up
        micro_batches = UNKNOWN_MICRO_BATCHES
    calls = (1 + (getattr(config, "mtp_num_layers", None) or 0)) * (micro_batches - 1)
    return min(calls, int(getattr(config, "wgrad_deferral_limit", 0)) or calls)


def patch(module: ModuleType) -> None:
    """Wrap functions of ``megatron.core.pipeline_parallel.schedules``, which its schedules call by name."""
    accuracy.patch(module)
    for name, own in ((CLEAR, _clear), (FINISH, _finish), *((name, _schedule) for name in SCHEDULES)):
        if hasattr(module, name):
            setattr(module, name, own(getattr(module, name)))


def _schedule(stock: Any) -> Any:
    """After a step that ends in an exception nothing may wait: a later backward may be of no schedule."""

    @wraps(stock)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        before = set(_why_not)
        try:
            return stock(*args, **kwargs)
        except BaseException:
            for layer in set(_why_not) - before:
                del _why_not[layer]
                _of_layer.get(layer, Later(0)).clear()
            raise

    return schedule


def _clear(stock: Any) -> Any:
    @wraps(stock)
    def clear(config: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        embedding_module = stock(config, model, *args, **kwargs)
        _waiting(embedding_module).clear()  # of a step that nothing finished
        layer = getattr(embedding_module, "output_layer", None)
        if layer is not None:
            _why_not[layer] = _why_not_with(config, model[-1] if isinstance(model, list) else model)
        return embedding_module

    return clear


def _reduces_early(model: Any) -> bool:
    """Whether a data-parallel wrapper of the model starts reductions in the backward."""
    while model is not None:
        if getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False):
            return True
        model = getattr(model, "module", None)
    return False


def _finish(stock: Any) -> Any:
    @wraps(stock)
    def finish(config: Any, embedding_module: Any, *args: Any, **kwargs: Any) -> None:
        _waiting(embedding_module).drain()
        is_own = hasattr(getattr(embedding_module, "output_layer", None), "fused_ce_config")
        # Calls on Megatron's path wait in its lists; of empty ones it would raise IndexError.
        if not is_own or embedding_module.grad_output_buffer:
            stock(config, embedding_module, *args, **kwargs)
        if is_own:  # a step that is not begun like this one would not be finished, either
            _why_not.pop(embedding_module.output_layer, None)

    return finish


def _waiting(embedding_module: Any) -> Later:
    layer = getattr(embedding_module, "output_layer", None)
    return Later(0) if layer is None else _of_layer.get(layer, Later(0))
