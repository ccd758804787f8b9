"""Megatron's output layer with deferred logits. Imports megatron, so import it only after that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_fused_ce.adapter import caller, forms, say, stock_path
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.forms import name_of
from megatron_fused_ce.adapter.layer_call import LayerCall
from megatron_fused_ce.adapter.requests import Answer
from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.adapter.token_weights import TokenWeights, of_loss
from megatron_fused_ce.config import FusedCEConfig


class ColumnParallelLinear(layers.ColumnParallelLinear):  # type: ignore[misc]
    """The stock layer whose call defers the logits.

    It keeps the stock name because Megatron-FSDP finds a layer's tensor-parallel layout by the name of
    its class, and adds no parameter, buffer or state-dict key: a layer becomes one by assigning its
    ``__class__`` and stays loadable without this package's flag.
    """

    fused_ce_config: FusedCEConfig
    fused_ce_sequence_parallel: bool
    fused_ce_with_argmax: bool
    fused_ce_model: str  # the name of the model's class
    fused_ce_held: forms.Held  # Megatron's functions as they were when the model was built
    fused_ce_joined = False  # ModelOpt has joined a student's and its teacher's (adapter/modelopt.py)

    @staticmethod
    def adopt(layer: Any, config: FusedCEConfig, with_argmax: bool, model: str, held: forms.Held) -> None:
        """Make a stock layer, or one of a known subclass, defer its logits from now on.

        Its new attributes can be copied and pickled with the model.
        """
        kind: Any = type(layer)
        layer.__class__ = _adopting(kind)
        layer.fused_ce_config = config
        layer.fused_ce_sequence_parallel = layer.sequence_parallel
        layer.fused_ce_with_argmax = with_argmax
        layer.fused_ce_model = model
        layer.fused_ce_held = held

    def __call__(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Deferred logits and None, where the stock layer returns logits and bias; losses ``[b, s]`` of
        ``labels`` ``[b, s]`` with ``output_cross_entropy_loss``, which LinearCrossEntropyModule takes."""
        gathers = bool(self.gather_output if runtime_gather_output is None else runtime_gather_output)
        frame = None if torch.compiler.is_compiling() else sys._getframe(1)
        config, softcap = self.fused_ce_config, 0.0
        reason = stock_path.reason_at_call(self, input_, weight, gathers, frame)
        if not reason:
            softcap, reason = softcap_around(self, config)
        if kwargs and not reason:
            reason = f"the caller passes {', '.join(kwargs)}, which this package does not know"
        if reason:
            counters().stock += 1
            say.once(self.tp_group, f"a call of the head takes Megatron's own path: {reason}")
            if output_cross_entropy_loss:
                kwargs |= {"output_cross_entropy_loss": True, "labels": labels}
            made = super().__call__(
                input_, weight=weight, runtime_gather_output=runtime_gather_output, **kwargs
            )
            logits = made if output_cross_entropy_loss else made[0]
            if config.loss_options and logits.requires_grad:  # their loss would leave these options out
                logits.register_hook(lambda _: stock_path.refuse_options(config, reason))
            return made
        assert frame is not None
        if type(self).forward is not ColumnParallelLinear.forward:
            self.__dict__["forward"] = MethodType(_answers_first, self)
        if output_cross_entropy_loss and config.ignore_index == "auto":
            config = replace(config, ignore_index=-100)
        used = self.weight if weight is None else weight
        captures = stock_path.captures_of(self)
        weights = of_loss(caller.model_of(frame)) if captures else TokenWeights(None)
        num_parts = self.tp_group.size() if self.sequence_parallel else 1
        vocabulary = self.output_size if gathers else self.output_size_per_partition
        deferred = DeferredLogits(
            LayerCall(self, input_, used, gathers, config, softcap, weights),
            torch.Size((input_.shape[0] * num_parts, input_.shape[1], vocabulary)),
            dtype=getattr(self, "output_dtype", None),  # --output-logit-dtype
            for_caller=stock_path.stays_deferred(used),
            needs_grad=torch.is_grad_enabled() and (input_.requires_grad or used.requires_grad),
        )
        if output_cross_entropy_loss:
            assert labels is not None
            return deferred.loss(labels, of_loss(caller.model_of(frame), labels))
        for capture in captures:
            capture(self, (input_,), (deferred, None))
        return deferred, None

    @property
    def stock_forward(self) -> Any:
        """What ``forward`` was before the layer was adopted."""
        return super().forward

    @property
    def stock_call(self) -> Any:
        """What a call of the layer was before it was adopted."""
        return super().__call__

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        fused_ce_answer: Callable[[Any, Tensor, Tensor], Answer] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits and bias by the stock forward, or the answer to a request (:mod:`.requests`) instead."""
        if fused_ce_answer is not None:
            return fused_ce_answer(self, input_, self.weight if weight is None else weight)
        return super().forward(input_, weight=weight, runtime_gather_output=runtime_gather_output, **kwargs)


@cache
def _adopting(kind: Any) -> Any:
    """:class:`ColumnParallelLinear` over ``kind``, a stock layer's class, whose name and methods it keeps."""
    if issubclass(ColumnParallelLinear, kind):
        return ColumnParallelLinear
    return type(kind.__name__, (ColumnParallelLinear, kind), {})


# --- a softcap around the layer's forward ----------------------------------------------------------

#: Forwards of Megatron-Bridge (module, name) that softcap what the layer's own returns, and the attribute of
#: the layer's config that has the cap.
SOFTCAPS = {
    ("megatron.bridge.models.gemma.gemma2_provider", "Gemma2OutputLayer.forward"): "final_logit_softcapping",
    ("megatron.bridge.models.gemma.modeling_gemma4", "Gemma4OutputLayer.forward"): "final_logit_softcapping",
}


def softcap_around(layer: Any, config: FusedCEConfig) -> tuple[float, str]:
    """The cap of a known forward around the layer's own, 0 for none; and why another one is not served."""
    forward, of_class = layer.forward, MethodType(type(layer).forward, layer)
    if getattr(forward, "__func__", None) in (of_class.__func__, _answers_first):
        if of_class.__func__ is ColumnParallelLinear.forward:
            return 0.0, ""
        cap, forward = _cap_of(of_class), of_class
        if cap is not None and config.logit_softcap in (None, cap):
            return cap, ""
    return 0.0, f"its forward is {name_of(forward)}, which may change the logits"


def _cap_of(forward: Any) -> float | None:
    """The cap of a forward in :data:`SOFTCAPS`, 0 for none; None for another forward.

    What it makes of numbers is compared, so that it is known to do nothing else.
    """
    attribute = SOFTCAPS.get((getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")))
    if attribute is None:
        return None
    cap = getattr(forward.__self__.config, attribute, None) or 0.0
    logits = torch.linspace(-90.0, 90.0, 7, dtype=torch.float64).view(7, 1, 1)
    expected = cap * torch.tanh(logits / cap) if cap else logits
    with torch.no_grad():
        made, bias = forward(logits, fused_ce_answer=lambda *_: (logits, None))
    return float(cap) if bias is None and torch.equal(made, expected) else None


def _answers_first(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a layer whose class softcaps what its own returns: answers go past the softcap."""
    kind = type(self) if kwargs.get("fused_ce_answer") is None else ColumnParallelLinear
    return kind.forward(self, *args, **kwargs)
