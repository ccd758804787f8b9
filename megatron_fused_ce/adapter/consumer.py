"""Who takes the logits of a call of the head: they are deferred only for code that is known.

Megatron's model code scales what its output layer returns and hands it to ``compute_language_model_loss``,
which this package patches. Any other code may do anything with logits. In an autograd function, say, which
runs without grad mode and knows no ``__torch_function__``, deferred ones would lose their gradient. So the
layer looks at the frame that calls it. Its functions are remembered by their code objects when a head is
adopted: one that somebody puts in their place, or wraps around the loss, has another.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from megatron_fused_ce.adapter import forms

#: Known model classes, by name, since versions have them in different modules; subclasses count.
MODELS = ("GPTModel", "HybridModel", "MambaModel")
#: The functions of theirs that call the head, depending on class and version.
CALLERS = ("forward", "_postprocess")
#: Since 0.17 the heads of multi-token prediction are called by a function of this module.
MTP = ("megatron.core.transformer.multi_token_prediction", "process_mtp_loss")
#: Of Megatron's dev branch: the forward of ColumnParallelLinear, or a loss on request.
FORWARD_WITH_LOSS = "LinearCrossEntropyModule.forward"

_models: set[CodeType] = set()
_mtp: set[CodeType] = set()
_losses: set[CodeType] = set()


def learn_loss(function: Any) -> None:
    """Remember a ``compute_language_model_loss`` that takes deferred logits."""
    _losses.add(function.__code__)


def learn(model_class: type) -> None:
    """Remember the functions that call the head of ``model_class``."""
    for cls in model_class.__mro__:
        if cls.__name__ in MODELS:
            _models.update(code for name in CALLERS if (code := _megatrons(vars(cls).get(name))))
    module, name = MTP
    code = _megatrons(getattr(sys.modules.get(module), name, None))
    if code is not None:
        _mtp.add(code)


def _megatrons(function: Callable[..., Any] | None) -> CodeType | None:
    """The code of a function, under what is wrapped around it, if it is written in Megatron's core."""
    if function is None:
        return None
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function.__code__ if is_megatrons(function) else None


def is_megatrons(function: Any) -> bool:
    """Whether a function is written in Megatron's core, and nothing is wrapped around it."""
    function = _function(function)
    return function is not None and str(function.__globals__.get("__name__", "")).startswith("megatron.core.")


def _function(found: Any) -> FunctionType | None:
    """The function of a method; None of anything else, as a proxy that passes on another's attributes."""
    found = found.__func__ if type(found) is MethodType else found
    return found if type(found) is FunctionType else None


def is_plain_forward(forward: Any) -> bool:
    """Whether this forward of an output layer is one of Megatron's that are known, with nothing around it."""
    return forward is forms.of_layer("forward") or (
        is_megatrons(forward) and getattr(forward, "__qualname__", "") == FORWARD_WITH_LOSS
    )


def takes_deferred(loss: Any) -> bool:
    """Whether this ``compute_language_model_loss`` is the patched one, with nothing wrapped around it."""
    function = _function(loss)
    return function is not None and function.__code__ in _losses


def why_unknown(caller: FrameType) -> str:
    """Why deferred logits are not safe with the code that calls the head; empty if they are."""
    code, given = caller.f_code, caller.f_locals
    if code in _mtp:
        loss, scale = given.get("compute_language_model_loss"), given.get("scale_logits_fn")
    elif code in _models:
        model = given["self"]
        loss, scale = model.compute_language_model_loss, getattr(model, "_scale_logits", None)
    else:
        where = caller.f_globals.get("__name__", "?")
        return f"it is called by {where}.{code.co_name}, which may do anything with its logits"
    if not takes_deferred(loss):
        return f"the loss of this call is {name_of(loss)}, which may need real logits"
    if scale is not None and not is_megatrons(scale):
        return f"the logits are scaled by {name_of(scale)}, which may need real ones"
    return ""


def model_of(caller: FrameType) -> Any:
    """The model whose head a known frame calls."""
    if caller.f_code in _mtp:
        return caller.f_locals["compute_language_model_loss"].__self__
    return caller.f_locals["self"]


def returns_logits(caller: FrameType) -> bool:
    """Whether a model's own code, which :func:`why_unknown` knows, returns the logits: it has no labels."""
    return caller.f_code in _models and caller.f_locals.get("labels") is None


def name_of(function: Any) -> str:
    function = getattr(function, "func", function)
    if hasattr(function, "__wrapped__") and hasattr(function, "__code__"):
        own = f"{function.__globals__.get('__name__')}.{function.__code__.co_name}"
        return f"{own} around {name_of(function.__wrapped__)}"
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"
