"""A call's labels or teacher, token weights and temperatures, in the order of its hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce import masked_tokens
from megatron_fused_ce.call import Call, CallSpec
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.distillation import Teacher
from megatron_fused_ce.loss import EMPTY, NO_COLUMN, LabelSet, SeveralLabels
from megatron_fused_ce.masked_tokens import Kept
from megatron_fused_ce.parallel import VocabParallel, raise_if_any


class Targets(NamedTuple):
    """Labels of the tokens, their weights and temperatures."""

    labels: Tensor  # [parts, n] int64, columns of this shard
    soft: LabelSet | Teacher | None = None  # in the labels' place, or beside them
    ignored: Tensor | None = None  # [parts, n] bool, of all tokens
    token_weights: Tensor | None = None  # [parts, n] fp32, for grad_in_forward
    inv_temperature: Tensor | None = None  # [parts, n] fp32

    @staticmethod
    def of(call: Call, spec: CallSpec) -> tuple[Targets, Kept | None]:
        """Build a call's targets; also the kept tokens where masked ones are skipped, else None.

        Collectives: those of :func:`.parallel.raise_if_any`, with ``config.debug_checks`` and with a
        temperature per token; :func:`.masked_tokens.count`'s, here or earlier if ``call.unmasked`` was given.
        """
        if call.config.debug_checks:
            _check_numbers(call.token_weights, call.several, spec.comm)
        parts, labels, weights = spec.comm.num_parts, call.labels, call.token_weights
        inv_temperature = inv_temperature_of(call.temperature, labels, spec.comm)
        in_order = None if weights is None else in_token_order(weights.detach(), labels, parts)
        kept = None
        if call.config.skip_masked and in_order is not None:
            unmasked = call.unmasked or masked_tokens.count(in_order, spec.comm.group)
            num_kept = num_tokens = spec.plan.cut.num_tokens
            if unmasked is not None:
                num_kept = masked_tokens.num_kept(masked_tokens.num_unmasked(unmasked), num_tokens)
            kept = Kept.of(in_order, num_kept)
        targets = _in_columns(call, in_order, inv_temperature, spec)
        return (targets if kept is None else targets.kept(kept, spec.comm.part)), kept

    def kept(self, kept: Kept, part: int) -> Targets:
        """Those of the tokens to work on, ``[parts, m]``; ``ignored`` stays as it is."""
        weights, inv_temperature = self.token_weights, self.inv_temperature
        return Targets(
            kept.of_tokens(self.labels),
            soft_of_kept(self.soft, kept, part),
            self.ignored,
            None if weights is None else kept.of_tokens(weights),
            None if inv_temperature is None else kept.of_tokens(inv_temperature),
        )


def soft_of_kept(soft: LabelSet | Teacher | None, kept: Kept, part: int) -> LabelSet | Teacher | None:
    """Those of the tokens to work on."""
    if isinstance(soft, LabelSet):
        return LabelSet(*(None if of is None else kept.of_tokens(of) for of in soft))  # type: ignore[arg-type]
    return None if soft is None else soft.kept(kept, part)


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


def _check_numbers(token_weights: Tensor | None, several: SeveralLabels | None, comm: VocabParallel) -> None:
    """Raise on every rank for numbers that make no loss anybody means; the host waits."""
    if token_weights is not None:
        raise_if_any(token_weights.isnan().any(), "token_weights have a NaN; give 0 or more", comm.group)
    if several is not None and several.log_probs is not None:
        wrong = ((several.ids >= 0) & (several.log_probs > 0)).any()
        words = "teacher_log_probs are above 0: expected logarithms of probabilities"
        raise_if_any(wrong, words, comm.group)


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
    reads_labels = spec.plan.strategy != "store" or not spec.logits.saves_e  # in a backward
    if config.ignore_index is not None:
        ignored = ids == config.ignore_index
        local = local.masked_fill(ignored, -1)
    elif any(spec.needs_grad) and reads_labels and local.data_ptr() == labels.data_ptr():
        local = local.clone()  # whose caller may refill its buffer before the backward
    soft: LabelSet | Teacher | None = None
    if call.several is not None:
        soft = _label_set(call.several, spec, call)
    elif call.distillation is not None:
        beside = call.distillation.label_weights
        if isinstance(beside, Tensor):
            given, beside = beside, in_token_order(beside.detach().float(), labels, spec.comm.num_parts)
            read_again = any(spec.needs_grad) and spec.plan.strategy != "store"  # which saves what they make
            if read_again and beside.data_ptr() == given.data_ptr():
                beside = beside.clone()  # as of labels
        elif beside is not None:
            beside = torch.full(ids.shape, beside, dtype=torch.float32, device=ids.device)
        soft = Teacher.of(call.distillation, call.weight.shape[0], beside, spec.comm)
    weights = None
    if token_weights is not None and spec.plan.strategy == "grad_in_forward":
        weights = token_weights.float()
        if ignored is not None and "loss" in spec.form.of_label:
            weights = weights.masked_fill(ignored, 0.0)
    return Targets(local, soft, ignored, weights, inv_temperature)


def _label_set(several: SeveralLabels, spec: CallSpec, call: Call) -> LabelSet:
    ids = labels_first(several.ids.to(torch.int64), spec.comm.num_parts)
    columns = columns_of(ids, spec, call.config)
    here = (columns >= 0) & (columns < call.weight.shape[0])
    columns = torch.where(here, columns, NO_COLUMN).masked_fill_(ids == EMPTY, EMPTY).to(torch.int32)
    if several.log_probs is None:
        return LabelSet(columns, None)
    shares = labels_first(several.log_probs.detach().float().exp(), spec.comm.num_parts)
    return LabelSet(columns, shares.masked_fill(ids == EMPTY, 0.0))


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
