"""A call's labels and other targets, token weights and temperatures, in the order of its hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.spec import CallSpec
from megatron_fused_ce.head.tokens import Kept
from megatron_fused_ce.logits import OrderedTargets
from megatron_fused_ce.ranks.collectives import VocabParallel, raise_if_any


class Targets(NamedTuple):
    """Labels of the tokens, their weights and temperatures."""

    labels: Tensor  # [parts, n] int64, columns of this shard
    others: OrderedTargets | None = None
    ignored: Tensor | None = None  # [parts, n] bool, of all tokens
    token_weights: Tensor | None = None  # [parts, n] fp32, for grad_in_forward
    inv_temperature: Tensor | None = None  # [parts, n] fp32

    @staticmethod
    def of(call: Call, spec: CallSpec) -> tuple[Targets, Kept | None]:
        """Build a call's targets; also the kept tokens where masked ones are skipped, else None.

        Collectives: those of :func:`.parallel.raise_if_any`, with ``config.debug_checks`` and with a
        temperature per token; :func:`.masked_tokens.count`'s, here or earlier if ``call.unmasked`` was given;
        :meth:`.OtherTargets.in_order`'s.
        """
        parts, labels, weights = spec.comm.num_parts, call.labels, call.token_weights
        if call.config.debug_checks and weights is not None:  # the host waits
            raise_if_any(weights.isnan().any(), "token_weights have a NaN; give 0 or more", spec.comm.group)
        inv_temperature = inv_temperature_of(call.temperature, labels, spec.comm)
        in_order = None if weights is None else in_token_order(weights.detach(), labels, parts)
        kept = None
        if call.config.skip_masked and in_order is not None:
            unmasked = call.unmasked or tokens.count(in_order, spec.comm.group)
            num_kept = num_tokens = spec.plan.cut.num_tokens
            if unmasked is not None:
                num_kept = tokens.num_kept(tokens.num_unmasked(unmasked), num_tokens)
            kept = Kept.of(in_order, num_kept)
        targets = _in_columns(call, in_order, inv_temperature, spec)
        return (targets if kept is None else targets.kept(kept, spec.comm.part)), kept

    def kept(self, kept: Kept, part: int) -> Targets:
        """Those of the tokens to work on, ``[parts, m]``; ``ignored`` stays as it is."""
        weights, inv_temperature = self.token_weights, self.inv_temperature
        return Targets(
            kept.of_tokens(self.labels),
            None if self.others is None else self.others.kept(kept, part),
            self.ignored,
            None if weights is None else kept.of_tokens(weights),
            None if inv_temperature is None else kept.of_tokens(inv_temperature),
        )


def in_token_order(per_token: Tensor, labels: Tensor, num_parts: int) -> Tensor:
    """``[parts, n]``, s-major, of a tensor in the shape of ``labels``."""
    if labels.dim() == 2 and per_token.shape[0] > 1:
        per_token = per_token.t()
    return per_token.reshape(num_parts, -1)


def inv_temperature_of(temperature: float | Tensor, labels: Tensor, comm: VocabParallel) -> Tensor | None:
    """The inverse of a temperature per token, ``[parts, n]`` fp32; None for a single temperature.

    Collectives: those of :func:`.parallel.raise_if_any`, with a temperature per token.
    """
    if not isinstance(temperature, Tensor):
        return None
    inverse = temperature.detach().double().reciprocal().float()
    wrong = ~(torch.isfinite(inverse) & (inverse > 0)).all()
    words = "temperatures are not all above 0 and finite; give a token that does not count the temperature 1"
    raise_if_any(wrong, words, comm.group)
    return in_token_order(inverse, labels, comm.num_parts)


def _in_columns(
    call: Call,
    token_weights: Tensor | None,  # [parts, n]
    inv_temperature: Tensor | None,  # [parts, n] fp32
    spec: CallSpec,
) -> Targets:
    """The targets of all tokens, with columns of this shard in the place of global ids."""
    labels, config = call.labels, call.config
    ids = in_token_order(labels, labels, spec.comm.num_parts).to(torch.int64)
    local, ignored = columns_of(ids, spec, config), None
    reads_labels = spec.remakes_logits or not spec.logits.saves_e  # in a backward
    if config.ignore_index is not None:
        ignored = ids == config.ignore_index
        local = local.masked_fill(ignored, -1)
    elif any(spec.needs_grad) and reads_labels and local.data_ptr() == labels.data_ptr():
        local = local.clone()  # whose caller may refill its buffer before the backward
    others = call.other_targets.in_order(labels, call.weight.shape[0], config, spec)
    weights = None
    if token_weights is not None and spec.plan.strategy == "grad_in_forward":
        weights = token_weights.float()
        if ignored is not None and "loss" in spec.form.of_label:
            weights = weights.masked_fill(ignored, 0.0)
    return Targets(local, others, ignored, weights, inv_temperature)


def labels_first(per_label: Tensor, num_parts: int) -> Tensor:
    """``[K, parts, n]``, tokens s-major, of ``[b, s, K]`` or ``[T, K]``."""
    if per_label.dim() == 3:
        per_label = per_label.transpose(0, 1)
    k = per_label.shape[-1]
    return per_label.reshape(per_label.shape[:-1].numel(), k).t().reshape(k, num_parts, -1)


def columns_of(ids: Tensor, spec: CallSpec, config: FusedCEConfig) -> Tensor:
    """Columns of this shard for global ids. No shard has one in the padding that is masked."""
    # Of several ranks the first subtracts too: all run the same operators.
    whole = spec.comm.size == 1 and spec.vocab_start == 0
    local = ids.contiguous() if whole else ids - spec.vocab_start
    if config.true_vocab_size is not None:
        local = local.masked_fill(ids >= config.true_vocab_size, -1)
    return local
