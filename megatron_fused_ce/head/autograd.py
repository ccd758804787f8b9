"""The head as one node of autograd's graph: it saves, runs the loops and returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from megatron_fused_ce.head import loop, promise
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import OpenGradWeight
from megatron_fused_ce.head.results import returned, upstream_of
from megatron_fused_ce.head.spec import Spec, spec_of
from megatron_fused_ce.head.targets import Prepared, prepare
from megatron_fused_ce.head.tokens import refuse_lost
from megatron_fused_ce.logits import choose
from megatron_fused_ce.planner.choose import Plan

#: What a backward returns: a gradient for each argument of the forward.
Gradients = tuple[Tensor | None, ...]


_REFUSED = "the fused head has no second derivative: take Megatron's own head for a gradient penalty"


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of the gradients, whose own backward raises."""

    @staticmethod
    def forward(ctx: Any, num_made: int, *made_and_sources: Tensor | None) -> Gradients:
        return tuple(None if made is None else made.view_as(made) for made in made_and_sources[:num_made])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(_REFUSED)


def differentiated_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorator of a backward that has no derivative: differentiating its results raises.

    With ``create_graph=True`` the results depend on the upstream gradients and on the saved inputs through a
    function that raises. torch's ``once_differentiable`` would make them depend on new leaves instead:
    gradients for named inputs, as a Hessian-vector product asks for them, would silently be 0.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Gradients:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if ctx.needs_input_grad[0] and not getattr(ctx, "saves_input", True):
            raise RuntimeError(f"{_REFUSED}, and with skip_masked no backward under create_graph=True")
        # Under checkpointing saved_tensors may be read once; gradients of the forward are used up here.
        saved, node = ctx.saved_tensors, SimpleNamespace(**vars(ctx))
        node.saved_tensors, node.needs_input_grad, ctx.made = saved, ctx.needs_input_grad, None
        with torch.no_grad():
            made = backward(node, *grads)
        leaf = torch.zeros((), device=saved[1].device, requires_grad=True)
        refusing: Gradients = _NoSecondDerivative.apply(len(made), *made, *grads, *saved[:2], leaf)
        return refusing

    return once


def take_apart(structure: Any, tensors: list[Tensor | None]) -> Any:
    """Append the leaves of nested tuples to ``tensors``; return the tuples with None for each leaf."""
    parts: list[Any] = []
    for part in structure:
        if isinstance(part, tuple):
            parts.append(take_apart(part, tensors))
        else:
            tensors.append(part)
            parts.append(None)
    return tuple.__new__(type(structure), parts)


def put_together(structure: Any, tensors: Iterator[Tensor | None]) -> Any:
    """Undo :func:`take_apart`. (torch's pytree takes five times as long.)"""
    parts = [next(tensors) if part is None else put_together(part, tensors) for part in structure]
    return tuple.__new__(type(structure), parts)


class FusedLinearCrossEntropy(torch.autograd.Function):
    """The node: takes hidden states and weight, gives losses and requested outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [s, b, H] or [n, H]
        weight: Tensor,  # [V, H]
        spec: Spec,
        prepared: Prepared,
        open_grad_weight: OpenGradWeight,
        in_batch: tuple[int, int] | None,  # (b, s) for outputs [b, s]; None for [T]
    ) -> tuple[Tensor, ...]:
        """Compute the outputs, in the order of :attr:`.Outputs.terms`.

        Collectives: those of :func:`.loop.forward`.
        """
        tokens, targets, token_weights, ignored, kept = prepared
        flat = hidden.reshape(-1, hidden.shape[-1])
        if kept is not None:
            flat = kept.take(flat, spec.comm.part)
        if any(spec.copies):
            flat, weight = choose.copied(spec.copies, flat, weight)
        try:
            with autocast_off(hidden.device):
                whole, saved, made = loop.forward(spec, tokens, flat, weight, targets, token_weights)
        except BaseException:
            spec.comm.join(hidden.device)
            raise
        ctx.set_materialize_grads(False)
        if spec.needs_grad:
            # Autograd frees saved tensors with the graph. Gradients made in the forward stay outside: the
            # first backward uses them up.
            ctx.spec, ctx.tokens, ctx.open_grad_weight, ctx.made = spec, tokens, open_grad_weight, made
            ctx.hidden_shape = hidden.shape
            # Save the input itself, if possible: differentiated_once needs its place in the graph.
            ctx.saves_input = kept is None and not spec.copies[0]
            tensors: list[Tensor | None] = []
            ctx.structure = take_apart((saved, ignored, kept), tensors)
            ctx.save_for_backward(hidden if ctx.saves_input else flat, weight, *tensors)
        outputs = spec.logits.outputs
        results = returned(whole, outputs, kept, ignored, in_batch)
        if len(results) > 1:
            with_grad = {"loss", *outputs.equal_to_loss, *outputs.differentiable}
            named = zip(outputs.by_name, results, strict=True)
            ctx.mark_non_differentiable(*(result for name, result in named if name not in with_grad))
        return tuple(results)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        """Compute the gradients, or scale those made in the forward.

        Collectives: those of :class:`.promise.Verdict`, if gradients were made in the forward or tokens were
        skipped; then those of :func:`.loop.backward`, unless the gradients made in the forward serve.
        """
        with_hidden, with_weight, *others = ctx.needs_input_grad
        no_others = (None,) * len(others)
        if all(grad is None for grad in grads):
            return None, None, *no_others
        hidden, weight, *tensors = ctx.saved_tensors
        saved, ignored, kept = put_together(ctx.structure, iter(tensors))
        spec, tokens, made, device = ctx.spec, ctx.tokens, ctx.made, weight.device
        ctx.made = None
        upstream = upstream_of(grads, spec.logits.outputs, tokens.num_parts, ignored)
        if upstream.beside:  # the promise is about the loss alone
            made = None
        lost, of_all = None, upstream
        if kept is not None:
            lost, upstream = kept.count_lost(upstream), kept.upstream(upstream)
        if saved.targets.others is not None:
            upstream = saved.targets.others.masked(upstream)
        grad_weight = None
        if with_weight:
            num_gemms = len(tokens.chunks) if saved.matrix is None else 1
            grad_weight = ctx.open_grad_weight(weight, num_gemms, weight.dtype == torch.float16)
        spoilt, result = False, None
        try:
            with autocast_off(device):
                if made is not None or lost is not None:
                    weights = None if made is None else made.token_weights
                    verdict = promise.Verdict(upstream.loss, weights, lost, spec.comm.group)
                    if lost is not None:
                        _, num_lost, num_not_finite = verdict.read()
                        refuse_lost(num_lost)
                        spoilt = num_not_finite > 0
                    if spoilt and grad_weight is not None:
                        grad_weight.spoil()
                    if made is not None:
                        result = loop.scale_made(spec, made, verdict, with_hidden, grad_weight)
                        del made  # its memory serves the gradients that are made again
                        if verdict.read()[0] == promise.BROKEN:
                            spec.promise_was_broken()
                if spec.in_forward:
                    promise.count(result is not None)
                if result is None:
                    hidden = hidden.reshape(-1, hidden.shape[-1])
                    result = loop.backward(
                        spec, tokens, hidden, weight, saved, upstream, with_hidden, grad_weight
                    )
        except BaseException:  # leave no partial sum, and no running collective
            if grad_weight is not None:
                grad_weight.abandon()
            spec.comm.join(device)
            raise
        grad_hidden, of_weight = result
        if grad_hidden is not None:
            if kept is not None:
                grad_hidden = kept.put_back_rows(grad_hidden, spec.comm.part)
                if spoilt:
                    kept.spoil_rows_(grad_hidden, of_all, spec.comm.part)
            grad_hidden = grad_hidden.view(ctx.hidden_shape)
        return grad_hidden, of_weight, *no_others


def autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    """Context without autocast: the tensors of a call are cast already, and its sums are fp32."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable`` with the function's types."""
    return cast(Callable[P, R], torch.compiler.disable(function))


class HeadOutputs(NamedTuple):
    """Results of :func:`linear_cross_entropy`, and how they were computed."""

    outputs: dict[str, Tensor]  # the labels' shape
    plan: Plan  # strategy and chunks
    logits_backend: str  # its name
    why_not_scaled_exp: str  # empty if logits_backend is scaled_exp

    @property
    def loss(self) -> Tensor:
        return self.outputs["loss"]


@uncompiled
def linear_cross_entropy(call: Call) -> HeadOutputs:
    """Evaluate a call of the head. Every public function and the Megatron adapter end here.

    Errors and collectives: those of :func:`.fused_linear_cross_entropy`.
    """
    call = call.completed()
    with call.on_its_device():
        spec = spec_of(call)
        # From here on every rank runs the same collectives.
        prepared = prepare(call, spec)
        in_batch = tuple(call.labels.shape) if call.labels.dim() == 2 else None
        made = FusedLinearCrossEntropy.apply(
            call.hidden, call.weight, spec, prepared, call.open_grad_weight, in_batch
        )
    outputs = dict(zip(spec.logits.outputs.by_name, made, strict=True))
    return HeadOutputs(outputs, spec.plan, spec.logits.name, spec.why_not_scaled_exp)
