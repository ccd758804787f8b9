"""Puts outputs of chunks together in the labels' layout, and upstream gradients into token order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fused_ce.head.tokens import Kept, Tokens
from megatron_fused_ce.logits import LogitsBackend
from megatron_fused_ce.losses.outputs import Outputs
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.planner.chunks import Chunk


def put(
    whole: dict[str, Tensor], tokens: Tokens, chunk: Chunk, made: dict[str, Tensor], copies: bool
) -> None:
    """Put the outputs of a chunk, ``[C]`` or ``[K, C]``, into those of all tokens, ``[(K,) parts, n]``.

    The outputs of a single chunk are not moved; with ``copies`` each becomes a tensor of its own.
    """
    if len(tokens.chunks) == 1:
        whole |= {name: of.clone() for name, of in made.items()} if copies else made
        return
    for name, of_chunk in made.items():
        if name not in whole:
            whole[name] = of_chunk.new_empty(*of_chunk.shape[:-1], tokens.num_parts, tokens.num)
        whole[name][..., chunk.start : chunk.stop] = of_chunk.view(*of_chunk.shape[:-1], tokens.num_parts, -1)


def of_no_tokens(logits: LogitsBackend, tokens: Tokens, device: torch.device) -> dict[str, Tensor]:
    """Outputs of an empty batch."""
    outputs, empty = logits.outputs, torch.empty(tokens.num_parts, 0, dtype=torch.float32, device=device)
    return {
        name: empty.expand(outputs.num_labels, -1, -1) if term.per_label else empty.to(term.dtype)
        for name, term in outputs.terms
    }


def returned(
    whole: dict[str, Tensor],
    outputs: Outputs,
    kept: Kept | None,
    ignored: Tensor | None,  # bool, the labels' shape
    in_batch: tuple[int, int] | None,  # (b, s) for outputs [b, s]; None for [T]
) -> list[Tensor]:
    """All outputs in the order of their terms and in the labels' layout, ``[T]`` or ``[b, s]``, K at the end.

    None of them is a view: autograd would forbid the caller to change it in place.
    """
    made = []
    for name, term in outputs.terms:
        output = whole[name]
        if kept is not None:
            output = kept.put_back(output, term.per_label)
        if in_batch is None:
            output = output.flatten(1).t() if term.per_label else output.flatten()
        elif term.per_label:
            output = output.view(len(output), *in_batch[::-1]).permute(2, 1, 0)
        elif in_batch[0] > 1:
            output = output.reshape(in_batch[::-1]).t()
        elif output.dim() == 1 and not output._is_view():
            output = output.unsqueeze_(0)  # in place: no view to be copied
        else:
            output = output.reshape(in_batch)
        output = output.contiguous()
        if ignored is not None and term.of_label:
            output.masked_fill_(ignored.unsqueeze(-1) if term.per_label else ignored, 0.0)
        made.append(output.data if output._is_view() else output)
    return made


def upstream_of(
    grads: Sequence[Tensor | None], outputs: Outputs, num_parts: int, ignored: Tensor | None
) -> Upstream:
    """Upstream gradients of the outputs in token order, fp32 ``[parts, n]`` or ``[K, parts, n]``.

    The upstream gradient of an output that equals the loss is added to the loss's; so is, negated, that of
    ``log_prob`` beside a plain loss.
    """
    loss, beside = None, []
    for (name, term), grad in zip(outputs.terms, grads, strict=True):
        if grad is None:  # it is 0
            continue
        if ignored is not None and term.of_label:
            grad = grad.masked_fill(ignored.unsqueeze(-1) if term.per_label else ignored, 0.0)
        if term.per_label:
            grad = labels_first(grad.float(), num_parts)
        else:
            # contiguous: the gradient of a sum() is one number, expanded.
            if grad.dim() == 2 and grad.shape[0] > 1:
                grad = grad.t()
            grad = grad.float().reshape(num_parts, -1).contiguous()
        if name == "log_prob" and outputs.is_plain:
            loss = -grad if loss is None else loss - grad
        elif name == "loss" or name in outputs.equal_to_loss:
            loss = grad if loss is None else loss + grad
        else:
            beside.append((name, grad))
    if loss is not None:
        return Upstream(loss, tuple(beside))
    of_any = beside[0][1]
    return Upstream(torch.zeros_like(of_any[0] if of_any.dim() == 3 else of_any), tuple(beside), False)


def labels_first(per_label: Tensor, num_parts: int) -> Tensor:
    """Reorder ``[b, s, K]`` or ``[T, K]`` to token order, ``[K, parts, n]``."""
    if per_label.dim() == 3:
        per_label = per_label.transpose(0, 1)
    k = per_label.shape[-1]
    return per_label.reshape(per_label.shape[:-1].numel(), k).t().reshape(k, num_parts, -1)
