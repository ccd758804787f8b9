"""Brings the targets of a call into the order of its hidden states, with labels as columns of this shard."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.spec import Spec
from megatron_fused_ce.head.tokens import Kept, Tokens
from megatron_fused_ce.logits import Targets
from megatron_fused_ce.ranks.collectives import VocabParallel, raise_if_any


class Prepared(NamedTuple):
    """Inputs of the loop beside hidden states and weight."""

    tokens: Tokens  # the tokens that are worked on
    targets: Targets
    token_weights: Tensor | None  # [parts, n] fp32, if gradients are made in the forward
    ignored: Tensor | None  # bool, the labels' shape: tokens labelled ignore_index
    kept: Kept | None  # which tokens are worked on; None for all


def prepare(call: Call, spec: Spec) -> Prepared:
    """Prepare the tensors of a call for the loop.

    Collectives, in order: those of :func:`.raise_if_any`, with ``config.debug_checks`` and with a temperature
    per token; with ``skip_masked`` that of :func:`.tokens.count`, unless ``call.unmasked`` was given; those
    of :meth:`.OtherTargets.in_order`.
    """
    comm, config, labels, weights = spec.comm, call.config, call.labels, call.token_weights
    if config.debug_checks and weights is not None:  # the host waits
        raise_if_any(weights.isnan().any(), "token_weights have a NaN; give 0 or more", comm.group)
    inv_temperature = inv_temperature_of(call.temperature, labels, comm)
    if weights is not None:
        weights = in_token_order(weights.detach(), labels, comm.num_parts)
    kept = None
    if config.skip_masked and weights is not None:
        unmasked = call.unmasked or tokens.count(weights, comm.group)
        kept = Kept.of(weights, tokens.num_kept(unmasked, spec.tokens.num))
    ids = in_token_order(labels, labels, comm.num_parts).to(torch.int64)
    columns, ignored = columns_of(ids, comm, spec.vocab_start, config), None
    if (label := config.ignored_label) is not None:
        ignored = labels.long() == label  # int32 cannot hold each number that is ignored
        if label >= 0:
            columns = columns.masked_fill(ids == label, -1)
    read_again = spec.needs_grad and (spec.remakes or not spec.logits.saves_e)
    if read_again and columns.data_ptr() == labels.data_ptr():
        columns = columns.clone()  # the caller may refill the labels' buffer before the backward
    others = call.other_targets.in_order(call, comm, spec.logits, spec.vocab_start, spec.remakes)
    if weights is not None:
        weights = weights.float() if spec.in_forward else None
    if weights is not None and ignored is not None and spec.logits.outputs.loss.of_label:
        weights = weights.masked_fill(in_token_order(ignored, labels, comm.num_parts), 0.0)
    if kept is None:
        return Prepared(spec.tokens, Targets(columns, inv_temperature, others), weights, ignored, None)
    of_kept = Targets(
        kept.of_tokens(columns),
        None if inv_temperature is None else kept.of_tokens(inv_temperature),
        None if others is None else others.kept(kept, comm.part),
    )
    weights = None if weights is None else kept.of_tokens(weights)
    # Plan and buffers are made for all tokens, so that they are the same in every step.
    return Prepared(spec.tokens.first(kept.tokens.shape[1]), of_kept, weights, ignored, kept)


def in_token_order(per_token: Tensor, labels: Tensor, num_parts: int) -> Tensor:
    """Reorder a tensor in the shape of ``labels`` to ``[parts, n]``, sequence-major as hidden states are."""
    if labels.dim() == 2 and per_token.shape[0] > 1:
        per_token = per_token.t()
    return per_token.reshape(num_parts, -1)


def inv_temperature_of(temperature: float | Tensor, labels: Tensor, comm: VocabParallel) -> Tensor | None:
    """Inverse of a temperature per token, ``[parts, n]`` fp32; None for a single temperature.

    Collectives: those of :func:`.raise_if_any`, with a temperature per token.
    """
    if not isinstance(temperature, Tensor):
        return None
    inverse = temperature.detach().double().reciprocal().float()
    wrong = ~(torch.isfinite(inverse) & (inverse > 0)).all()
    words = "temperatures are not all above 0 and finite; give a token that does not count the temperature 1"
    raise_if_any(wrong, words, comm.group)
    return in_token_order(inverse, labels, comm.num_parts)


def columns_of(ids: Tensor, comm: VocabParallel, vocab_start: int, config: FusedCEConfig) -> Tensor:
    """Columns of this shard for global ids. Ids in the masked padding get -1, on every shard."""
    # Rank 0 of several subtracts its 0, too: all ranks run the same operators.
    local = ids.contiguous() if comm.size == 1 else ids - vocab_start
    if config.true_vocab_size is not None:
        local = local.masked_fill(ids >= config.true_vocab_size, -1)
    return local
