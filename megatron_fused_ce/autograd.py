"""The head as one node of autograd's graph: saves, runs the loops, returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import autocast, loop, masked_tokens, promise
from megatron_fused_ce.grad_weight import OpenedAccumulators
from megatron_fused_ce.kernels.records import SoftTargets
from megatron_fused_ce.loop import PrecomputedGrads, Saved, SavedChunk, Targets
from megatron_fused_ce.masked_tokens import Kept
from megatron_fused_ce.pipeline import Context
from megatron_fused_ce.promise import Verdict
from megatron_fused_ce.token_outputs import OUTPUT_CHOICES, TokenOutputs, Upstream

#: What a backward returns: a gradient for each argument of the forward.
Gradients = tuple[Tensor | None, ...]


def differentiated_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Mark a backward whose own derivative does not exist.

    With ``create_graph=True`` its results carry torch's delayed error, which is raised where somebody
    differentiates them. torch's ``once_differentiable`` adds it only where an upstream gradient requires one
    itself: the gradient of a plain ``sum()`` would come without a graph, and a penalty on it would drop out
    of the loss in silence.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Gradients:
        with torch.no_grad():
            made = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return made
        words = b"the fused head has no second derivative: take Megatron's own head for a gradient penalty"
        delayed: Any = torch._C._functions.DelayedError(words, len(made))
        return tuple(delayed(*(None if g is None else g.detach().requires_grad_() for g in made)))

    return once


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
        """This shard's largest logits and their columns, each ``[T]``; then :class:`.TokenOutputs`."""
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
                out = loop.forward(context, flat, weight, targets)
        except BaseException:
            spec.comm.join(device)
            raise
        ctx.set_materialize_grads(False)
        outputs = out.outputs
        if any(spec.needs_grad):
            # Saved tensors go through autograd, which frees them with the graph; gradients made in the
            # forward are used up by the first backward.
            ctx.context, ctx.gradients = context, out.gradients
            ctx.skips = kept is not None
            entropy = None
            if outputs.entropy is not None and "entropy" in spec.form.differentiable:
                entropy = outputs.entropy.clone().view(targets.labels.shape)  # the caller may change it
            once = (flat, weight, targets.ignored, *(targets.soft or (None, None)), entropy)
            saved = out.saved
            of_all = saved.last_hidden, saved.matrix
            of_tokens = kept or (None,) * len(Kept._fields)
            ctx.save_for_backward(*once, targets.inv_temperature, *of_all, *of_tokens, *saved.tensors())
        of_shard = [None if whole is None else whole.flatten() for whole in (out.row_max, out.argmax)]
        if kept is not None:
            outputs = outputs.map(kept.put_back)
            of_shard = [None if whole is None else kept.put_back(whole) for whole in of_shard]
        outputs = _fill_ignored(outputs, targets.ignored)
        outputs = outputs.map(lambda whole: _own(in_labels_layout(whole, in_batch)))
        if spec.form.outputs or spec.with_argmax:
            with_grad = "loss", *spec.form.differentiable
            made = [*of_shard, *(getattr(outputs, name) for name in OUTPUT_CHOICES if name not in with_grad)]
            ctx.mark_non_differentiable(*(tensor for tensor in made if tensor is not None))
        return *of_shard, *outputs

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        """Collectives: the verdict's (:class:`.promise.Verdict`) where gradients were made in the forward or
        tokens were skipped; then :func:`.loop.backward`'s."""
        grad_outputs = grads[2:6]  # no gradient comes for the others
        nothing = (None,) * len(ctx.needs_input_grad)
        if all(grad is None for grad in grad_outputs):
            return nothing
        hidden, weight, ignored, ids, probs, entropy, *others = ctx.saved_tensors
        inv_temperature, last_hidden, matrix, tokens, active, skipped, *chunks = others
        saved = Saved(SavedChunk.of(chunks), last_hidden, matrix)
        kept = Kept(tokens, active, skipped) if ctx.skips else None
        soft, device, spec = None if ids is None else SoftTargets(ids, probs), weight.device, ctx.context.spec
        made, ctx.gradients = ctx.gradients, None
        upstream = _upstream(grad_outputs, spec.comm.num_parts, ignored, entropy, spec.form.is_plain)
        accumulators = OpenedAccumulators(ctx.context.open_grad_weight)
        context: Context = ctx.context._replace(open_grad_weight=accumulators)
        lost = None
        if kept is not None:
            lost = kept.count_lost(upstream)
            given, upstream = upstream, kept.upstream(upstream)
        try:
            with autocast.off(device):
                scale, verdict = _verdict(spec, made, upstream, lost)
                if verdict is not None and lost is not None:
                    masked_tokens.refuse_lost(verdict.num_lost)
                    accumulators.spoilt = verdict.lost_not_finite
                result = None
                if made is not None and scale is not None and verdict is not None:
                    result = loop.scale_precomputed(
                        context, weight, made, scale, verdict, ctx.needs_input_grad[:2]
                    )
                    del made  # before anything is allocated for others
                    if verdict.broken:
                        spec.promise_was_broken()
                if spec.plan.strategy == "grad_in_forward":
                    promise.count(result is not None)
                if result is None:
                    result = loop.backward(
                        context,
                        hidden,
                        weight,
                        soft,
                        inv_temperature,
                        saved,
                        upstream,
                        needs_grad=ctx.needs_input_grad[:2],
                    )
        except BaseException:
            accumulators.abandon()
            spec.comm.join(device)
            raise
        grad_hidden, grad_weight = result
        if grad_hidden is not None:
            if kept is not None:
                grad_hidden = kept.put_back_rows(grad_hidden, spec.comm.part)
                if accumulators.spoilt:
                    kept.spoil_rows_(grad_hidden, given, spec.comm.part)
            grad_hidden = grad_hidden.view(ctx.hidden_shape)
        return grad_hidden, grad_weight, *nothing[2:]


def _verdict(
    spec: Any, made: PrecomputedGrads | None, upstream: Upstream, lost: Tensor | None
) -> tuple[Tensor | None, Verdict | None]:
    """The scalar for gradients made in the forward, and what the host must know of the upstream gradient."""
    if made is None and lost is None:
        return None, None
    scale, found = None, torch.zeros((), dtype=torch.int64, device=upstream.loss.device)
    if made is not None:
        scale, found = promise.fit_scalar(upstream.loss, made.token_weights)
    return scale, Verdict(found, scale, lost, spec.comm.group)


def _own(result: Tensor) -> Tensor:
    """Not a view, which autograd would let nobody change in place once the forward has returned it."""
    return result.data if result._is_view() else result


def _fill_ignored(outputs: TokenOutputs, ignored: Tensor | None) -> TokenOutputs:
    """Loss 0 of ignored tokens."""
    if ignored is not None:
        for of_label in (outputs.loss, outputs.log_prob):
            if of_label is not None:
                of_label.masked_fill_(ignored.reshape(of_label.shape), 0.0)
    return outputs


def in_labels_layout(per_token: Tensor, in_batch: tuple[int, ...] | None) -> Tensor:
    """Results of all tokens, in s-major order, as ``[T]`` or ``[b, s]``."""
    if in_batch is None:
        return per_token.flatten()
    b, s = in_batch
    return per_token.reshape(b, s) if b == 1 else per_token.reshape(s, b).t().contiguous()


def _upstream(
    grads: Sequence[Tensor | None],  # of loss, log_prob, lse, entropy; [b, s] or [T]
    num_parts: int,
    ignored: Tensor | None,
    entropy: Tensor | None,
    loss_is_plain: bool,
) -> Upstream:
    """Upstream gradients in token order, ``[parts, n]`` fp32; ``log_prob``'s is taken into the loss's."""
    given = []
    for at, grad in enumerate(grads):
        if grad is not None:
            # Contiguous: that of a sum() is one number, seen as many.
            if grad.dim() == 2 and grad.shape[0] > 1:
                grad = grad.t()
            grad = grad.float().reshape(num_parts, -1).contiguous()
            if ignored is not None and at < 2:  # of the label
                grad = grad.masked_fill(ignored, 0.0)
        given.append(grad)
    loss, log_prob, lse, grad_entropy = given
    if log_prob is not None and loss_is_plain:
        loss, log_prob = -log_prob if loss is None else loss - log_prob, None
    if loss is None:
        loss = torch.zeros_like(next(grad for grad in given if grad is not None))
    return Upstream(loss, log_prob, lse, grad_entropy, entropy)
