"""A call of the output layer that has not been computed yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_fused_ce.adapter import stock_path
from megatron_fused_ce.adapter.requests import Answer, Request
from megatron_fused_ce.adapter.token_weights import TokenWeights
from megatron_fused_ce.config import FusedCEConfig


@dataclass(eq=False)
class LayerCall:
    """What the output layer was called with: later it gives real logits, or the answer to a request.

    Only then is the layer run, with all its hooks: DDP waits for a parameter gather, FSDP gathers and frees.
    """

    layer: Any
    hidden: Tensor  # [s, b, H]; this rank's part with sequence parallelism
    weight: Tensor  # the argument of the call, or the layer's own
    gathered: bool  # the logits of the whole vocabulary are asked for
    config: FusedCEConfig
    softcap: float  # of a forward around the layer's own, 0 for none
    token_weights: TokenWeights  # for a divergence, where ModelOpt asks for one

    def __post_init__(self) -> None:
        self._requires_grad, self._before = self.weight.requires_grad, self._versions()

    def _versions(self) -> list[int]:
        """Counters of the changes in place; inference tensors have none."""
        return [tensor._version for tensor in (self.hidden, self.weight) if not tensor.is_inference()]

    def logits(self) -> Tensor:
        """Real logits ``[s, b, V]``, by Megatron's own forward."""
        logits: Tensor = self._run(runtime_gather_output=self.gathered or None)[0]
        return logits

    def ask(self, request: Request, *given: Any) -> Answer:
        """The answer to a request with its own arguments ``given``, without logits."""
        asked = []

        def answer(layer: Any, hidden: Tensor, weight: Tensor) -> Answer:
            asked.append(layer)
            return request(layer, hidden, weight, *given)

        result, beside = self._run(fused_ce_answer=answer)
        if not asked:
            raise RuntimeError(
                "the fused head's own argument did not reach its forward: a hook of the output layer, or "
                "something wrapped around it, drops arguments that it does not know"
            )
        return result, beside

    def _run(self, **given: Any) -> Any:
        """Run the layer on the hidden states and the weight of the call, trained or frozen as it was.

        The layer may have another weight by now: ``torch.func.functional_call`` lends it one, callers freeze
        it for a while. None stands for its own, which FSDP's hooks gather inside of the call.

        Raises:
            RuntimeError: weight or hidden states were changed in place since.
        """
        if self._versions() != self._before:
            raise RuntimeError(
                "the output layer's weight or hidden states were changed in place between its call and the "
                "first use of its logits, which the fused head computes only then: use the logits before"
            )
        layer, weight = self.layer, self.weight
        turned = weight.requires_grad != self._requires_grad and weight.is_leaf
        captures = stock_path.captures_of(layer)  # keep nothing: this call is not the model's
        before = vars(layer).get("_intermediate_output")
        try:
            if turned:
                weight.requires_grad_(self._requires_grad)
            if captures:
                layer._intermediate_output = None
            own = None if layer.weight is weight else weight
            return layer.stock_call(self.hidden, weight=own, **given)
        finally:
            if turned:
                weight.requires_grad_(not self._requires_grad)
            if captures:
                layer._intermediate_output = before
