"""The head as one node of autograd's graph: saves, runs the loops, returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from megatron_fused_ce.head import autocast, promise, tokens
from megatron_fused_ce.head.backward import PrecomputedGrads, Saved, SavedChunk, backward, scale_precomputed
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.forward import forward
from megatron_fused_ce.head.grad_weight import OpenedAccumulators
from megatron_fused_ce.head.promise import Verdict
from megatron_fused_ce.head.spec import CallSpec, Context, NeedsGrad, spec_of
from megatron_fused_ce.head.targets import Targets, labels_first
from megatron_fused_ce.head.tokens import Kept
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.planner.choose import Plan
from megatron_fused_ce.planner.chunks import first_tokens

#: What a backward returns: a gradient for each argument of the forward.
Gradients = tuple[Tensor | None, ...]


_REFUSED = "the fused head has no second derivative: take Megatron's own head for a gradient penalty"


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of the gradients, whose own backward raises: the head has no second derivative."""

    @staticmethod
    def forward(ctx: Any, num_made: int, *made_and_sources: Tensor | None) -> Gradients:
        return tuple(None if made is None else made.view_as(made) for made in made_and_sources[:num_made])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(_REFUSED)


def differentiated_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Mark a backward whose own derivative does not exist.

    With ``create_graph=True`` its results depend on the upstream gradients and on the saved inputs by a
    function that raises where somebody differentiates it. torch's ``once_differentiable`` puts its error
    behind new leaves: gradients for named inputs, as a Hessian-vector product asks for them, would be 0.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Gradients:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if ctx.needs_input_grad[0] and not getattr(ctx, "saves_input", True):
            raise RuntimeError(f"{_REFUSED}, and with skip_masked no backward under create_graph=True")
        # Read once, what a checkpoint gives once; used up by this backward, what was made in the forward.
        saved, node = ctx.saved_tensors, SimpleNamespace(**vars(ctx))
        node.saved_tensors, node.needs_input_grad, ctx.gradients = saved, ctx.needs_input_grad, None
        with torch.no_grad():
            made = backward(node, *grads)
        leaf = torch.zeros((), device=saved[1].device, requires_grad=True)
        refusing: Gradients = _NoSecondDerivative.apply(len(made), *made, *grads, *saved[:2], leaf)
        return refusing

    return once


def take_apart(structure: Any, tensors: list[Tensor | None]) -> Any:
    """Append the tensors of nested tuples, and Nones, to ``tensors``; the structure with None for each."""
    parts: list[Any] = []
    for part in structure:
        if isinstance(part, tuple):
            parts.append(take_apart(part, tensors))
        else:
            tensors.append(part)
            parts.append(None)
    return tuple.__new__(type(structure), parts)


def put_together(structure: Any, tensors: Iterator[Tensor | None]) -> Any:
    """The inverse of :func:`take_apart`."""
    parts = [next(tensors) if part is None else put_together(part, tensors) for part in structure]
    return tuple.__new__(type(structure), parts)


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Hidden states and weight in, losses and requested outputs out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [s, b, H] or [n, H]
        weight: Tensor,  # [V, H]
        targets: Targets,
        context: Context,
        kept: Kept | None,  # the tokens to work on, where others are skipped
        in_batch: tuple[int, int] | None,  # (b, s) for outputs [b, s]; None for [T]
    ) -> tuple[Tensor | None, ...]:
        """The outputs that :attr:`.LossForm.outputs` names, then this shard's largest logits and their
        columns, each ``[T]``."""
        spec, device = context.spec, hidden.device
        ctx.hidden_shape = hidden.shape
        flat = hidden.reshape(-1, hidden.shape[-1])
        copies_hidden, copies_weight = spec.copies
        if kept is not None:
            flat = kept.take(flat, spec.comm.part)
        if copies_hidden:
            flat = flat.clone(memory_format=torch.contiguous_format)
        if copies_weight:
            weight = weight.clone(memory_format=torch.contiguous_format)
        try:
            with autocast.off(device):
                out = forward(context, flat, weight, targets)
        except BaseException:
            spec.comm.join(device)
            raise
        ctx.set_materialize_grads(False)
        if any(spec.needs_grad):
            # Saved tensors go through autograd, which frees them with the graph; gradients made in the
            # forward are used up by the first backward.
            ctx.context, ctx.gradients = context, out.gradients
            saved = out.saved
            tensors: list[Tensor | None] = [*chain.from_iterable(saved.chunks)]
            ctx.num_of_chunks = len(tensors)
            others = None if targets.others is None else targets.others.saved(spec.remakes_logits)
            of_call = saved.last_hidden, saved.matrix, others, targets.inv_temperature, targets.ignored, kept
            ctx.structure = take_apart(of_call, tensors)
            # The input itself where it can be, which autograd knows.
            ctx.saves_input = kept is None and not copies_hidden
            ctx.save_for_backward(hidden if ctx.saves_input else flat, weight, *tensors)
        outputs, row_max, argmax = out.outputs, out.row_max, out.argmax
        local_max = None if row_max is None else _of_all_tokens(row_max, kept)
        local_argmax = None if argmax is None else _of_all_tokens(argmax, kept)
        made: list[Tensor | None] = []
        for name in spec.form.outputs:
            output, per_label = outputs[name], name in spec.form.per_label
            if kept is not None:
                output = kept.put_back(output, per_label)
            if targets.ignored is not None and name in spec.form.of_label:
                output.masked_fill_(targets.ignored.reshape(output.shape[per_label:]), 0.0)
            made.append(_per_label(output, in_batch) if per_label else _returned(output, in_batch))
        made += local_max, local_argmax
        if len(made) > 3 or spec.with_argmax:
            with_grad = {"loss", *spec.form.equal_to_loss, *spec.form.differentiable}
            names = (*spec.form.outputs, "", "")
            without = [each for name, each in zip(names, made, strict=True) if name not in with_grad]
            ctx.mark_non_differentiable(*(each for each in without if each is not None))
        return tuple(made)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        """Collectives: the verdict's (:class:`.promise.Verdict`) where gradients were made in the forward or
        tokens were skipped; then :func:`.backward.backward`'s."""
        *of_outputs, _, _ = grads
        wants_hidden, wants_weight, *others = ctx.needs_input_grad
        no_others = (None,) * len(others)
        if all(grad is None for grad in of_outputs):
            return None, None, *no_others
        hidden, weight, *tensors = ctx.saved_tensors
        hidden = hidden.reshape(-1, hidden.shape[-1])
        saved_chunks = zip(*[iter(tensors[: ctx.num_of_chunks])] * len(SavedChunk._fields), strict=True)
        *rest, ignored, kept = put_together(ctx.structure, iter(tensors[ctx.num_of_chunks :]))
        device, spec = weight.device, ctx.context.spec
        made, ctx.gradients = ctx.gradients, None
        upstream = _upstream(of_outputs, spec, ignored)
        if upstream.beside:  # the promise is of the loss alone
            made = None
        accumulators = OpenedAccumulators(ctx.context.open_grad_weight)
        context: Context = ctx.context._replace(open_grad_weight=accumulators)
        needs_grad = NeedsGrad(wants_hidden, wants_weight)
        lost = None
        if kept is not None:
            lost = kept.count_lost(upstream)
            of_all, upstream = upstream, kept.upstream(upstream)
        if rest[2] is not None:
            upstream = rest[2].masked(upstream)
        with accumulators.or_abandoned(spec.comm, device):
            scale, verdict = _verdict(spec, made, upstream, lost)
            if verdict is not None and lost is not None:
                tokens.refuse_lost(verdict.num_lost, spec.active_mask)
                accumulators.spoilt = verdict.lost_not_finite
            result = None
            if made is not None and scale is not None and verdict is not None:
                result = scale_precomputed(context, weight, made, scale, verdict, needs_grad)
                del made  # before anything is allocated for others
                if verdict.broken:
                    spec.promise_was_broken()
            if spec.plan.strategy == "grad_in_forward":
                promise.count(result is not None)
            if result is None:
                saved = Saved(tuple(map(SavedChunk._make, saved_chunks)), *rest)
                result = backward(context, hidden, weight, saved, upstream, needs_grad)
        grad_hidden, grad_weight = result
        if grad_hidden is not None:
            if kept is not None:
                grad_hidden = kept.put_back_rows(grad_hidden, spec.comm.part)
                if accumulators.spoilt:
                    kept.spoil_rows_(grad_hidden, of_all, spec.comm.part)
            grad_hidden = grad_hidden.view(ctx.hidden_shape)
        return grad_hidden, grad_weight, *no_others


def _of_all_tokens(of_kept: Tensor, kept: Kept | None) -> Tensor:
    return of_kept.flatten() if kept is None else kept.put_back(of_kept)


def _verdict(
    spec: CallSpec, made: PrecomputedGrads | None, upstream: Upstream, lost: Tensor | None
) -> tuple[Tensor | None, Verdict | None]:
    """The scalar for gradients made in the forward, and what the host must know of the upstream gradient."""
    if made is None and lost is None:
        return None, None
    scale = None
    if made is not None:
        scale, found = promise.fit_scalar(upstream.loss, made.token_weights)
    else:
        found = torch.zeros((), dtype=torch.int64, device=upstream.loss.device)
    return scale, Verdict(found, scale, lost, spec.comm.group)


def _returned(result: Tensor, in_batch: tuple[int, int] | None) -> Tensor:
    """In the labels' layout, and not a view, which autograd would let nobody change in place once the forward
    has returned it."""
    if in_batch is not None and in_batch[0] == 1 and result.dim() == 1 and not result._is_view():
        return result.unsqueeze_(0)  # one operator in place of two
    result = in_labels_layout(result, in_batch)
    return result.data if result._is_view() else result


def in_labels_layout(per_token: Tensor, in_batch: tuple[int, ...] | None) -> Tensor:
    """Results of all tokens, in s-major order, as ``[T]`` or ``[b, s]``."""
    if in_batch is None:
        return per_token.flatten()
    b, s = in_batch
    return per_token.reshape(b, s) if b == 1 else per_token.reshape(s, b).t().contiguous()


def _per_label(result: Tensor, in_batch: tuple[int, int] | None) -> Tensor:
    """``[K, ...]`` of all tokens as ``[T, K]`` or ``[b, s, K]``."""
    if in_batch is None:
        result = result.flatten(1).t().contiguous()
    else:
        b, s = in_batch
        result = result.view(len(result), s, b).permute(2, 1, 0).contiguous()
    return result.data if result._is_view() else result


def _upstream(grads: Sequence[Tensor | None], spec: CallSpec, ignored: Tensor | None) -> Upstream:
    """Upstream gradients of the outputs, in token order, ``[parts, n]`` fp32, or ``[K, parts, n]``.

    That of ``log_prob`` is taken into the loss's, where the loss is plain, and of outputs that are the loss.
    """
    loss, beside = None, []
    for name, grad in zip(spec.form.outputs, grads, strict=True):
        if grad is None:  # for 0
            continue
        if name in spec.form.per_label:
            grad = labels_first(grad.float(), spec.comm.num_parts)
        else:
            # Contiguous: that of a sum() is one number, seen as many.
            if grad.dim() == 2 and grad.shape[0] > 1:
                grad = grad.t()
            grad = grad.float().reshape(spec.comm.num_parts, -1).contiguous()
        if ignored is not None and name in spec.form.of_label:
            grad = grad.masked_fill(ignored, 0.0)
        if name == "log_prob" and spec.form.is_plain:
            loss = -grad if loss is None else loss - grad
        elif name == "loss" or name in spec.form.equal_to_loss:
            loss = grad if loss is None else loss + grad
        else:
            beside.append((name, grad))
    if loss is not None:
        return Upstream(loss, tuple(beside))
    of_any = beside[0][1]
    return Upstream(torch.zeros_like(of_any[0] if of_any.dim() == 3 else of_any), tuple(beside), False)


P = ParamSpec("P")
R = TypeVar("R")


class HeadOutputs(NamedTuple):
    """Results of :func:`linear_cross_entropy`."""

    outputs: dict[str, Tensor]  # the labels' shape
    local_max: Tensor | None  # fp32 [T] in token order (s-major): this shard's largest logit
    local_argmax: Tensor | None  # int64 [T]: its row in this shard
    plan: Plan  # strategy and chunks of this call
    logits_backend: str  # the one that was used
    why_not_scaled_exp: str  # empty if it was used

    @property
    def loss(self) -> Tensor:
        return self.outputs["loss"]


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable`` with the function's types."""
    return cast(Callable[P, R], torch.compiler.disable(function))


@uncompiled
def linear_cross_entropy(call: Call) -> HeadOutputs:
    """Evaluate a call of the head: for the functions above and for the Megatron adapter.

    Returns:
        the outputs for each token, this shard's largest logits where asked for, the plan and the logits
        backend.

    Errors and collectives: those of :func:`fused_linear_cross_entropy`.
    """
    call = call.completed()
    with call.on_its_device():
        spec = spec_of(call)
        # From here on every rank runs the same collectives.
        targets, kept = Targets.of(call, spec)
        chunks = spec.chunks
        if kept is not None:
            # The plan and the buffers are those of all tokens: the same in every step.
            chunks = first_tokens(chunks, kept.tokens.shape[1])
        context = Context(spec, chunks, call.open_grad_weight)
        in_batch = tuple(call.labels.shape) if call.labels.dim() == 2 else None
        *per_token, local_max, local_argmax = FusedLinearCrossEntropy.apply(
            call.hidden, call.weight, targets, context, kept, in_batch
        )
    outputs = dict(zip(spec.form.outputs, per_token, strict=True))
    return HeadOutputs(outputs, local_max, local_argmax, spec.plan, spec.logits.name, spec.why_not_scaled_exp)
