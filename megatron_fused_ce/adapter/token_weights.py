"""Which token weights the loss of a head will be multiplied by: Megatron's ``loss_mask``.

Megatron's models are called with ``labels`` and ``loss_mask``, but hand only the labels to the loss
that this package computes. :func:`remember_calls` keeps both for the time of a call;
:func:`of_loss` finds the mask again when a loss is asked for, by the labels being *the same object*:
the heads of multi-token prediction come with rolled labels and get no weights.

Where masked tokens are to be skipped, their number sets out for the host as soon as the mask is seen, while
the device still has the whole model before it (:func:`.tokens.count`).

What is found is a promise by whoever wrote the loss function. The backward verifies it
(:mod:`megatron_fused_ce.head.promise`).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head.host_copy import HostCopy
from megatron_fused_ce.head.tokens import count


class TokenWeights(NamedTuple):
    """Weights ``[b, s]`` (float, on the labels' device), or why there are none."""

    values: Tensor | None
    unknown: str = ""
    call: _Call | None = None

    def unmasked(self) -> HostCopy | None:
        """What was counted where masked tokens are skipped; counted again if the mask was changed since."""
        call = self.call
        return call.unmasked if call is not None and _version(call.loss_mask) == call.version else None


class _Call(NamedTuple):
    """A model's call under way."""

    model: Any
    labels: Any
    loss_mask: Any
    unmasked: HostCopy | None
    version: int  # of the mask, when its unmasked tokens were counted
    generates: bool  # an inference context is given


class _Calls(threading.local):
    """Of this thread, innermost last: models call models, and a backward may run a forward again."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


_calls = _Calls()

#: Where labels and mask arrive together: a model's own call, and the entry that combined 1F1B's
#: schedule uses instead of it (GPTModel). Some versions' MambaModel.forward takes no mask.
_ENTRIES = ("forward", "_postprocess")


def remember_calls(model_class: type) -> None:
    """Make the entries of a model class and its bases remember labels and mask while they run.

    A subclass that makes up its mask and passes it to ``super().forward`` is remembered twice; the
    inner call counts. Calling this again changes nothing.
    """
    for cls in model_class.__mro__:
        for name in _ENTRIES:
            entry = vars(cls).get(name)
            if not callable(entry) or hasattr(entry, "__fused_ce_entry__"):
                continue
            if "labels" in inspect.signature(entry).parameters:
                setattr(cls, name, _remembering(entry))


def _remembering(entry: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(entry)

    @wraps(entry)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            return entry(self, *args, **kwargs)  # raises the same with its own words
        labels, mask = given.get("labels"), given.get("loss_mask")
        contexts = (given.get(name) for name in ("inference_context", "inference_params"))
        generates = any(context is not None for context in contexts)
        unmasked = _count(self, labels, mask)
        _calls.stack.append(_Call(self, labels, mask, unmasked, _version(mask), generates))
        try:
            return entry(self, *args, **kwargs)
        finally:
            _calls.stack.pop()

    remembering.__fused_ce_entry__ = True  # type: ignore[attr-defined]
    return remembering


def _count(model: Any, labels: Any, mask: Any) -> HostCopy | None:
    """Collectives: :func:`.tokens.count`'s over the head's tensor-parallel group, where it skips."""
    layer: Any = getattr(model, "output_layer", None)
    config = getattr(layer, "fused_ce_config", None)
    if config is None or not config.skip_masked or not _fits(labels, mask):
        return None
    outer = _call_of(model)
    if outer is not None and outer.loss_mask is mask and outer.version == _version(mask):
        return outer.unmasked  # an entry that another one of the same model called
    num_parts = layer.tp_group.size() if layer.sequence_parallel else 1
    return count(mask.detach().t().reshape(num_parts, -1), layer.tp_group)


def _version(mask: Any) -> int:
    """Counter of the changes in place; inference tensors have none."""
    return mask._version if isinstance(mask, Tensor) and not mask.is_inference() else 0


def _fits(labels: Any, mask: Any) -> bool:
    return (
        isinstance(mask, Tensor)
        and isinstance(labels, Tensor)
        and mask.shape == labels.shape
        and mask.device == labels.device
    )


def _call_of(model: Any) -> _Call | None:
    """The innermost call of ``model`` under way."""
    return next((call for call in reversed(_calls.stack) if call.model is model), None)


def why_no_loss(layer: Any) -> str:
    """Why the logits that ``layer``, a model's head, is asked for now are no loss's; empty where they may be.

    Generation is recognised by Megatron's own signs of it. Under ``torch.inference_mode`` logits may leave
    the model as a tensor, so there only a call with labels is known to end in a loss.
    """
    engine = sys.modules.get("megatron.core.inference.utils")
    inference_mode = getattr(engine, "InferenceMode", None)  # since 0.19
    if inference_mode is not None and inference_mode.is_active():
        return "an inference engine uses the model"
    calls = (c for c in reversed(_calls.stack) if getattr(c.model, "output_layer", None) is layer)
    call = next(calls, None)
    if call is not None and call.generates:
        return "the model was called with an inference context"
    if torch.is_inference_mode_enabled() and (call is None or call.labels is None):
        return "inference mode, and no labels in the model's call"
    return ""


def of_loss(model: Any, labels: Any = None) -> TokenWeights:
    """The token weights of ``model``'s loss for ``labels`` ``[b, s]``, from the call under way.

    Args:
        labels: None for those that the model was called with.
    """
    call, name = _call_of(model), type(model).__name__
    if call is None:
        return TokenWeights(None, f"{name} was called in a way that shows no loss_mask")
    if labels is not None and call.labels is not labels:
        return TokenWeights(
            None, f"its labels are not those that {name} was called with (multi-token prediction)"
        )
    labels, mask = call.labels, call.loss_mask
    for given, words in ((mask, "a loss_mask"), (labels, "labels")):
        if not isinstance(given, Tensor):
            return TokenWeights(None, f"{name} was called without {words}")
    if not _fits(labels, mask):
        return TokenWeights(
            None,
            f"the loss_mask is {tuple(mask.shape)} on {mask.device}, the labels are "
            f"{tuple(labels.shape)} on {labels.device}",
        )
    mask = mask.detach()
    values = mask if mask.is_floating_point() else mask.to(torch.float32)
    return TokenWeights(values, call=call)
