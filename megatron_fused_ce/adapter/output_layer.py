"""Megatron's output layer with deferred logits. Imports megatron, so import it only after that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_fused_ce.adapter import deferred_logits, forms, report, stock_path
from megatron_fused_ce.adapter.consumer import model_of, name_of
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits, LossAndArgmax
from megatron_fused_ce.adapter.main_grad import open_grad_weight_for
from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.adapter.token_weights import TokenWeights, of_call, of_loss
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.distillation.teacher import Distillation
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.promise import Head
from megatron_fused_ce.ops.log_probs import unrounded


class ColumnParallelLinear(layers.ColumnParallelLinear):  # type: ignore[misc]
    """The stock layer whose call defers the logits.

    It keeps the stock name because Megatron-FSDP finds a layer's tensor-parallel layout by the name of
    its class, and adds no parameter, buffer or state-dict key: a layer becomes one by assigning its
    ``__class__`` and stays loadable without this package's flag.

    The loss is evaluated inside ``nn.Module.__call__``, so that every hook on the layer fires around it:
    DDP's wait for an overlapped parameter gather, FSDP's gather and release.
    """

    fused_ce_config: FusedCEConfig
    fused_ce_sequence_parallel: bool
    fused_ce_with_argmax: bool
    fused_ce_model: str  # name of its class
    fused_ce_held: forms.Held  # what its loss was when the model was built
    fused_ce_joined = False  # a student's with its teacher's, by ModelOpt (adapter/modelopt.py)

    @staticmethod
    def adopt(layer: Any, config: FusedCEConfig, with_argmax: bool, model: str) -> None:
        """Make a stock layer, or one of a known subclass, defer its logits from now on.

        Its new attributes can be copied and pickled with the model.
        """
        kind: Any = type(layer)
        layer.__class__ = _adopting(kind)
        layer.fused_ce_config = config
        layer.fused_ce_sequence_parallel = layer.sequence_parallel
        layer.fused_ce_with_argmax = with_argmax
        layer.fused_ce_model = model

    def __call__(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Deferred logits and None, as stock's logits and bias; the loss ``[b, s]`` of ``labels`` ``[b, s]``
        with ``output_cross_entropy_loss``, an argument of LinearCrossEntropyModule's."""
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        reason: str | None = stock_path.why_parametrized(self)
        used = weight if reason or weight is not None else self.weight
        for_caller = not reason and deferred_logits.for_caller(used)
        if torch.compiler.is_compiling():
            reason = "it is called within torch.compile"
        elif not reason:
            caller = sys._getframe(1)
            reason = stock_path.reason_at_call(self, input_, used, gathers, caller, gathers or for_caller)
        config, softcap = self.fused_ce_config, 0.0
        if reason is None:
            softcap, reason = softcap_around(self, config)
        if kwargs and reason is None:
            reason = f"the caller passes {', '.join(kwargs)}, which this package does not know"
        if reason is not None:
            counters().stock += 1
            report.stock_path_once(self, reason)
            if output_cross_entropy_loss:
                kwargs |= {"output_cross_entropy_loss": True, "labels": labels}
            made = super().__call__(
                input_, weight=weight, runtime_gather_output=runtime_gather_output, **kwargs
            )
            logits = made if output_cross_entropy_loss else made[0]
            if self.fused_ce_config.loss_options and logits.requires_grad:
                refuse = partial(stock_path.refuse_options, self.fused_ce_config, reason)
                logits.register_hook(lambda _: refuse())
            return made
        assert used is not None
        if output_cross_entropy_loss and config.ignore_index is None:
            config = replace(config, ignore_index=-100)
        num_parts = self.tp_group.size() if self.sequence_parallel else 1
        vocabulary = self.output_size if gathers else self.output_size_per_partition
        shape = torch.Size((input_.shape[0] * num_parts, input_.shape[1], vocabulary))
        dtype = getattr(self, "output_dtype", None)  # --output-logit-dtype
        captures = stock_path.captures_of(self)
        weights = of_call(model_of(caller)) if captures else None
        at_call = _AtCall(config, softcap, used, used.requires_grad, _versions(input_, used), weights)
        needs_grad = torch.is_grad_enabled() and (input_.requires_grad or used.requires_grad)
        deferred = DeferredLogits(
            self, input_, weight, shape, gathers, dtype, for_caller, needs_grad, at_call
        )
        if not output_cross_entropy_loss:
            for capture in captures:
                capture(self, (input_,), (deferred, None))
            return deferred, None
        assert labels is not None
        return deferred.loss(labels, of_loss(model_of(caller), labels))

    @property
    def stock_forward(self) -> Any:
        """Of the class that this one was before it was adopted."""
        return super().forward

    @property
    def stock_call(self) -> Any:
        """The same of what a call of it runs."""
        return super().__call__

    def fused_loss(
        self, deferred: DeferredLogits, labels: Tensor, token_weights: TokenWeights
    ) -> LossAndArgmax:
        """Evaluate the loss of deferred logits, with all hooks of the layer around it."""
        request = _LossRequest(_config_of(deferred), labels, token_weights)
        loss = self._evaluate(deferred, request)
        return LossAndArgmax(loss, request.local_max, request.local_argmax)

    def _evaluate(self, deferred: DeferredLogits, request: _Request) -> Tensor:
        if not _is_own(self.forward):
            self.__dict__["forward"] = MethodType(_with_request, self)
        with self._as_called(deferred) as weight, _nothing_kept(self):
            # The call's output, not `forward`'s result: a hook of FSDP's may have replaced it by a view.
            loss, _ = super().__call__(deferred.hidden, weight=weight, fused_ce_request=request)
        if not request.answered:
            raise RuntimeError(
                "the fused head's own argument did not reach its forward: a hook of the output layer, or "
                "something wrapped around it, drops arguments that it does not know"
            )
        return loss  # type: ignore[no-any-return]

    def fused_log_probs(
        self,
        deferred: DeferredLogits,
        labels: Tensor,
        entropy: str = "none",
        active: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability and, if asked for, entropy of ``labels`` in the vocabulary: fp32 ``[b, s]``.

        Args:
            active: bool ``[b, s]``, the tokens that need them, None for all.
        """
        stock_path.refuse_log_probs(self.fused_ce_config)
        unknown = TokenWeights(None, "the caller of log-probabilities weighs each token as it likes")
        request = _LossRequest(_config_of(deferred), labels, unknown, entropy, active)
        return self._evaluate(deferred, request).neg(), request.made_entropy

    def fused_nothing(self, deferred: DeferredLogits, batch: int, positions: int) -> Tensor:
        """Losses ``[b, s]`` of some label, for upstream gradients of 0 or NaN alone: see :meth:`_nothing`."""
        labels = torch.zeros(batch, positions, dtype=torch.int64, device=deferred.device)
        unknown = TokenWeights(None, "its upstream gradients are 0")
        request = _LossRequest(_config_of(deferred), labels, unknown, nothing=True)
        return self._evaluate(deferred, request)

    def fused_divergence(
        self, deferred: DeferredLogits, teacher: DeferredLogits, kind: str, temperature: float
    ) -> Tensor:
        """Divergence ``[b, s]`` from the softmax of ``teacher``."""
        weights = deferred.at_call.token_weights
        given = teacher.head.as_teacher(teacher, kind)
        request = _DivergenceRequest(_config_of(deferred), deferred.shape, given, temperature, weights)
        return self._evaluate(deferred, request)

    def as_teacher(self, deferred: DeferredLogits, kind: str) -> Distillation:
        """What a student's call takes of deferred logits, with all hooks of the layer around it."""
        operands = _OperandsRequest()
        self._evaluate(deferred, operands)
        assert operands.hidden is not None and operands.weight is not None
        config = _config_of(deferred)
        return Distillation(
            operands.hidden.detach(),
            operands.weight.detach(),
            label_weights=None,
            divergence=kind,
            beta=0.5,
            logit_scale=config.logit_scale,
            logit_softcap=config.logit_softcap,
            sequence_parallel=self.sequence_parallel,
            with_labels=False,
        )

    def stock_logits(self, deferred: DeferredLogits) -> Tensor:
        """Real logits ``[s, b, V]``, by Megatron's own forward."""
        gathers = deferred.gathered or None
        with self._as_called(deferred) as weight, _nothing_kept(self):
            logits, _ = super().__call__(deferred.hidden, weight=weight, runtime_gather_output=gathers)
        return logits  # type: ignore[no-any-return]

    @contextmanager
    def _as_called(self, deferred: DeferredLogits) -> Iterator[Tensor | None]:
        """The weight of the call that deferred these logits, which may have changed since.

        ``torch.func.functional_call`` puts another in the layer's place while it runs; callers freeze weights
        for a while. None for the layer's own, which FSDP's hooks gather inside of its call.

        Raises:
            RuntimeError: its numbers, or the hidden states', are no longer those of the call.
        """
        used, requires_grad = deferred.at_call.weight, deferred.at_call.requires_grad
        if _versions(deferred.hidden, used) != deferred.at_call.versions:
            raise RuntimeError(
                "the output layer's weight or hidden states were changed in place between its call and the "
                "first use of its logits, which the fused head computes only then: use the logits before"
            )
        weight = deferred.weight
        if weight is None and self.weight is not used:
            weight = used
        if used.requires_grad == requires_grad or not used.is_leaf:
            yield weight
            return
        used.requires_grad_(requires_grad)
        try:
            yield weight
        finally:
            used.requires_grad_(not requires_grad)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        fused_ce_request: _Request | _Probe | None = None,
        **kwargs: Any,
    ) -> Any:
        """The stock forward, or what is requested instead of the logits: a loss ``[b, s]``, mostly."""
        if isinstance(fused_ce_request, _Probe):
            return fused_ce_request.logits, None
        if fused_ce_request is None:
            return super().forward(
                input_, weight=weight, runtime_gather_output=runtime_gather_output, **kwargs
            )
        fused_ce_request.answered = True
        weight = self.weight if weight is None else weight
        if isinstance(fused_ce_request, _OperandsRequest):
            fused_ce_request.hidden, fused_ce_request.weight = input_, weight
            return input_, None
        if isinstance(fused_ce_request, _DivergenceRequest):
            return self._divergence(input_, weight, fused_ce_request), None
        if fused_ce_request.nothing:
            return self._nothing(input_, weight, fused_ce_request), None
        labels, token_weights = fused_ce_request.labels, fused_ce_request.token_weights
        entropy = fused_ce_request.entropy
        config = self._config_of_call(fused_ce_request.config, token_weights, entropy)
        active = fused_ce_request.active
        if active is not None:
            token_weights, config = TokenWeights(active.float()), replace(config, skip_masked=True)
        out = linear_cross_entropy(
            self._call(
                input_,
                weight,
                labels,
                token_weights,
                config,
                outputs=("entropy",) if entropy != "none" else (),
                differentiable=("entropy",) if entropy == "differentiable" else (),
                with_argmax=self.fused_ce_with_argmax and self.training,
                head=_head_of(self),
            )
        )
        report.evaluation_once(self, input_, out.plan, out.why_not_scaled_exp)
        fused_ce_request.made_entropy = out.outputs.get("entropy")
        if "shard_max" in out.outputs:
            fused_ce_request.local_max = out.outputs["shard_max"].t()
            fused_ce_request.local_argmax = out.outputs["shard_argmax"].t()
        return out.loss, None

    def _call(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: TokenWeights,
        config: FusedCEConfig,
        **more: Any,
    ) -> Call:
        """A call with all that follows from the layer and its token weights."""
        return Call(
            hidden,
            weight,
            labels,
            config=config,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            token_weights=token_weights.values,
            vocab_start=self.tp_group.rank() * self.output_size_per_partition,
            unmasked=token_weights.unmasked(),
            open_grad_weight=open_grad_weight_for(weight, self.gradient_accumulation_fusion),
            uses_in_flight=1 + (getattr(self.config, "mtp_num_layers", None) or 0),
            **more,
        )

    def _nothing(self, hidden: Tensor, weight: Tensor, request: _LossRequest) -> Tensor:
        """Losses ``[b, s]`` without a gradient, plus the zeros of a head that has no active token.

        The backward of those gives zeros, or NaN for an upstream gradient of NaN, and runs no GEMM.
        """
        config = replace(request.config, strategy="recompute")
        call = self._call(hidden, weight, request.labels, request.token_weights, config, head=_head_of(self))
        with torch.no_grad():
            losses = linear_cross_entropy(call).loss
        of_none = call._replace(
            token_weights=torch.zeros_like(losses), config=replace(config, skip_masked=True)
        )
        return losses + linear_cross_entropy(of_none).loss

    def _divergence(self, hidden: Tensor, weight: Tensor, request: _DivergenceRequest) -> Tensor:
        token_weights = request.token_weights
        no_labels = torch.full(request.shape[1::-1], -1, dtype=torch.int64, device=hidden.device)  # [b, s]
        out = linear_cross_entropy(
            self._call(
                hidden,
                weight,
                no_labels,
                token_weights,
                self._config_of_call(request.config, token_weights),
                other_targets=request.teacher,
                temperature=request.temperature,
                head=_head_of(self, "distillation by "),
            )
        )
        report.divergence_once(self, request.teacher.divergence, request.temperature, out.plan)
        return out.loss

    def _config_of_call(
        self, config: FusedCEConfig, token_weights: TokenWeights, entropy: str = "none"
    ) -> FusedCEConfig:
        """The layer's config for one call: ``grad_in_forward`` only if the token weights are known."""
        if entropy == "differentiable":
            config = unrounded(config)
        if config.strategy != "grad_in_forward" or token_weights.values is not None:
            return config
        if torch.is_grad_enabled():
            report.say_once(
                self.tp_group.rank(),
                "strategy auto instead of grad_in_forward for a head whose token weights are not known in "
                f"the forward: {token_weights.unknown}",
            )
        return replace(config, strategy="auto")


@cache
def _adopting(kind: Any) -> Any:
    """The class above over ``kind``, with the name and methods of that one."""
    if issubclass(ColumnParallelLinear, kind):
        return ColumnParallelLinear
    return type(kind.__name__, (ColumnParallelLinear, kind), {})


#: Of every layer that was evaluated, by its losses; not an attribute, which a copy of the layer would share.
_heads: WeakKeyDictionary[Any, dict[str, Head]] = WeakKeyDictionary()


def _head_of(layer: ColumnParallelLinear, loss: str = "") -> Head:
    heads = _heads.setdefault(layer, {})
    if loss not in heads:
        say = partial(report.say_of_a_replica, layer.tp_group.rank())
        heads[loss] = Head(f"{loss}the head of {layer.fused_ce_model}", say=say)
    return heads[loss]


class _AtCall(NamedTuple):
    """What a call of the layer found, and its evaluation needs."""

    config: FusedCEConfig
    softcap: float  # of a forward around the layer's own, 0 for none
    weight: Tensor
    requires_grad: bool  # of the weight
    versions: list[int]  # of hidden states and weight
    token_weights: TokenWeights | None  # where ModelOpt asks for a divergence


def _config_of(deferred: DeferredLogits) -> FusedCEConfig:
    """The call's, with what happened to the logits since.

    A softcap around the layer comes before their scale, the config's own after it:
    ``s * cap * tanh(z / cap)`` is the softcap ``s * cap`` of ``s * z``.
    """
    config: FusedCEConfig = deferred.at_call.config
    scale, softcap = deferred.logit_scale, deferred.at_call.softcap
    if softcap:
        config = replace(config, logit_softcap=softcap * abs(scale))
    return config if scale == config.logit_scale else replace(config, logit_scale=scale)


@contextmanager
def _nothing_kept(layer: ColumnParallelLinear) -> Iterator[None]:
    """A call that is not the model's: what ModelOpt's hooks keep of it is forgotten."""
    if not stock_path.captures_of(layer):
        yield
        return
    before, layer._intermediate_output = vars(layer).get("_intermediate_output"), None
    try:
        yield
    finally:
        layer._intermediate_output = before


def _versions(*tensors: Tensor) -> list[int]:
    """Counters of the changes in place; inference tensors have none."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class _Probe(NamedTuple):
    """Numbers for :meth:`ColumnParallelLinear.forward` to return, to see what is made of them."""

    logits: Tensor


#: Forwards of Megatron-Bridge (module, name) that softcap what the layer's own returns, and the attribute of
#: the layer's config that has the cap.
SOFTCAPS = {
    ("megatron.bridge.models.gemma.gemma2_provider", "Gemma2OutputLayer.forward"): "final_logit_softcapping",
    ("megatron.bridge.models.gemma.modeling_gemma4", "Gemma4OutputLayer.forward"): "final_logit_softcapping",
}


def _is_own(forward: Any) -> bool:
    return getattr(forward, "__func__", None) is ColumnParallelLinear.forward


def _with_request(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a layer whose class has another: with a request this package's, else that one."""
    own = isinstance(kwargs.get("fused_ce_request"), _Request)
    return (ColumnParallelLinear if own else type(self)).forward(self, *args, **kwargs)


def _beneath(layer: Any) -> Any:
    """``layer.forward``, or the one of its class where :func:`_with_request` stands before that."""
    forward = layer.forward
    if getattr(forward, "__func__", None) is _with_request:
        return MethodType(type(layer).forward, layer)
    return forward


def softcap_around(layer: Any, config: FusedCEConfig) -> tuple[float, str | None]:
    """The cap of a known forward around the layer's own, 0 for none; and why it cannot be served, or None."""
    forward = _beneath(layer)
    if _is_own(forward):
        return 0.0, None
    found = _softcap_of(layer, forward)
    if found is None or config.logit_softcap not in (None, found):
        return 0.0, f"its forward is {name_of(forward)}, which may change the logits"
    return found, None


def _softcap_of(layer: Any, forward: Any) -> float | None:
    """The cap of a known forward around the layer's own, 0 for none; None for another forward.

    By its name, and by what it makes of numbers, so that it is known to do nothing else.
    """
    if "forward" in vars(layer) and forward is layer.forward:
        return None  # an instance's own, before which nothing can stand
    attribute = SOFTCAPS.get((getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")))
    if attribute is None:
        return None
    cap = getattr(layer.config, attribute, None) or 0.0
    logits = torch.linspace(-90.0, 90.0, 7, dtype=torch.float64).view(7, 1, 1)
    expected = cap * torch.tanh(logits / cap) if cap else logits
    with torch.no_grad():
        made, bias = forward(logits, fused_ce_request=_Probe(logits))
    return float(cap) if bias is None and torch.equal(made, expected) else None


@dataclass(eq=False)
class _LossRequest:
    """Carries labels in, argmax and entropy out of ``nn.Module.__call__``, as one argument."""

    config: FusedCEConfig
    labels: Tensor
    token_weights: TokenWeights
    entropy: str = "none"
    active: Tensor | None = None  # bool [b, s]; of log-probabilities
    nothing: bool = False  # the losses have upstream gradients of 0 alone
    answered: bool = False
    made_entropy: Tensor | None = None
    local_max: Tensor | None = None
    local_argmax: Tensor | None = None


@dataclass(eq=False)
class _OperandsRequest:
    """Carries a teacher's hidden states and weight out, as its layer's hooks leave them."""

    answered: bool = False
    hidden: Tensor | None = None
    weight: Tensor | None = None


@dataclass(eq=False)
class _DivergenceRequest:
    """Carries a teacher in."""

    config: FusedCEConfig
    shape: torch.Size  # [s, b, V]
    teacher: Distillation
    temperature: float
    token_weights: TokenWeights
    answered: bool = False


_Request = _LossRequest | _OperandsRequest | _DivergenceRequest
