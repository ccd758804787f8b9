"""The head as one node of autograd's graph: saves, runs the loops, returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fused_ce import autocast, loop
from megatron_fused_ce.grad_weight import OpenedAccumulators
from megatron_fused_ce.kernels.records import SoftTargets
from megatron_fused_ce.loop import Saved, SavedChunk, Targets
from megatron_fused_ce.phases import UNTIMED
from megatron_fused_ce.pipeline import Context
from megatron_fused_ce.token_outputs import OUTPUT_CHOICES, TokenOutputs, Upstream


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Hidden states and weight in, losses and requested outputs out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [s, b, H] or [n, H]
        weight: Tensor,  # [V, H]
        targets: Targets,
        context: Context,
        in_batch: tuple[int, int] | None,  # (b, s) for outputs [b, s]; None for [T]
    ) -> tuple[Tensor | None, ...]:
        """This shard's largest logits and their columns, each ``[T]``; then :class:`.TokenOutputs`."""
        spec, phases, device = context.spec, context.phases, hidden.device
        ctx.hidden_shape = hidden.shape
        flat = hidden.reshape(-1, hidden.shape[-1])
        copies_hidden, copies_weight = spec.copies
        if copies_hidden:
            flat = flat.clone(memory_format=torch.contiguous_format)
        if copies_weight:
            weight = weight.clone(memory_format=torch.contiguous_format)
        kind = "forward" if any(spec.needs_grad) else "evaluation"
        try:
            with autocast.off(device), phases.of_pass(kind, device):
                out = loop.forward(context, flat, weight, targets)
                saved, tensors = out.saved, out.saved.tensors()
                if phases is not UNTIMED:
                    gradients = () if saved.gradients is None else saved.gradients.tensors()
                    phases.saved(saved.last_hidden, saved.matrix, *tensors, *gradients)
        except BaseException:
            spec.comm.join(device)
            raise
        outputs = _fill_ignored(out.outputs, targets.ignored)
        ctx.set_materialize_grads(False)
        if any(spec.needs_grad):
            # Saved tensors go through autograd, which frees them with the graph; the first backward hands
            # over the gradients that grad_in_forward computed.
            ctx.context, ctx.gradients = context, saved.gradients
            ctx.token_shape = targets.labels.shape
            entropy = None
            if outputs.entropy is not None and "entropy" in spec.form.differentiable:
                entropy = outputs.entropy.view(ctx.token_shape)
            # Gradients made in the forward need the hidden states no more.
            reread = flat if saved.gradients is None else None
            once = (reread, weight, targets.ignored, *(targets.soft or (None, None)), entropy)
            of_all = saved.last_hidden, saved.matrix, saved.column_sum
            ctx.save_for_backward(*once, targets.inv_temperature, *of_all, *tensors)
        outputs = outputs.map(lambda whole: in_labels_layout(whole, in_batch))
        of_shard = [None if whole is None else whole.flatten() for whole in (out.row_max, out.argmax)]
        if spec.form.outputs or spec.with_argmax:
            with_grad = "loss", *spec.form.differentiable
            made = [*of_shard, *(getattr(outputs, name) for name in OUTPUT_CHOICES if name not in with_grad)]
            ctx.mark_non_differentiable(*(tensor for tensor in made if tensor is not None))
        return *of_shard, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_outputs = grads[2:6]  # no gradient comes for the others
        if all(grad is None for grad in grad_outputs):
            return (None,) * 5
        hidden, weight, ignored, ids, probs, entropy, *others = ctx.saved_tensors
        inv_temperature, last_hidden, matrix, column_sum, *chunks = others
        saved = Saved(SavedChunk.of(chunks), last_hidden, ctx.gradients, matrix, column_sum)
        ctx.gradients = None
        soft, device = None if ids is None else SoftTargets(ids, probs), weight.device
        is_plain = ctx.context.spec.form.is_plain
        upstream = _upstream(grad_outputs, ctx.token_shape, ignored, entropy, is_plain)
        accumulators = OpenedAccumulators(ctx.context.open_grad_weight)
        context: Context = ctx.context._replace(open_grad_weight=accumulators)
        try:
            with autocast.off(device), context.phases.of_pass("backward", device):
                grad_hidden, grad_weight = loop.backward(
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
            context.spec.comm.join(device)
            raise
        if grad_hidden is not None:
            grad_hidden = grad_hidden.view(ctx.hidden_shape)
        return grad_hidden, grad_weight, None, None, None


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
    token_shape: torch.Size,
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
            grad = grad.float().reshape(token_shape).contiguous()
            if ignored is not None and at < 2:  # of the label
                grad = grad.masked_fill(ignored, 0.0)
        given.append(grad)
    loss, log_prob, lse, grad_entropy = given
    if log_prob is not None and loss_is_plain:
        loss, log_prob = -log_prob if loss is None else loss - log_prob, None
    if loss is None:
        loss = torch.zeros_like(next(grad for grad in given if grad is not None))
    return Upstream(loss, log_prob, lse, grad_entropy, entropy)
