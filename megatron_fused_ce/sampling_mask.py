"""Log-probabilities over the ids that sampling kept for each token.

One GEMM computes all logits of a block of tokens, and only those of the kept ids leave the block. The
backward writes their gradients into a block of zeros for two more GEMMs. Three GEMMs cost less than gathered
rows of the weight did from ten ids a token on (H200), and hardly more for many. The rest is
the head's maths (:mod:`.rows_torch`, :mod:`.loss`) with a set instead of the vocabulary. Every rank
computes the ids of its own shard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce import autocast, loss
from megatron_fused_ce.autograd import differentiated_once, in_labels_layout
from megatron_fused_ce.backward import scaled_upstream
from megatron_fused_ce.call import Call, at_temperature, check_arguments
from megatron_fused_ce.kernels.records import (
    NOT_HERE,
    ExtraStatistics,
    GradCoefficients,
    RowStatistics,
)
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.logits.gemm_rows import write_logits
from megatron_fused_ce.loss import TokenLogProbs, TokenTerms, Upstream
from megatron_fused_ce.losses import Rows
from megatron_fused_ce.losses.form import LossForm
from megatron_fused_ce.op import linear_cross_entropy, uncompiled
from megatron_fused_ce.parallel import VocabParallel
from megatron_fused_ce.scaling import scale_
from megatron_fused_ce.shards import Shards
from megatron_fused_ce.targets import in_token_order, inv_temperature_of
from megatron_fused_ce.wgrad import OpenedAccumulators, OpenGradWeight

#: Bytes of a block: logits in the forward, their gradients in the operands' dtype in the backward.
BLOCK_BYTES = 1 << 30


class Mask(NamedTuple):
    """The kept ids of all tokens; token ``t`` of ``labels.flatten()`` has ``ids[offsets[t] : offsets[t +
    1]]``."""

    ids: Tensor  # int64 [N], global
    offsets: Tensor  # int64 [T + 1]
    token: Tensor  # int64 [N]: the token of each id
    active: Tensor | None  # bool [T]: the others have no ids and no results
    #: numbers that must be the same on every rank, by their name in an error
    facts: dict[str, int]

    @staticmethod
    def of(ids: Tensor, offsets: Tensor, labels: Tensor, active: Tensor | None = None) -> Mask:
        """Check a mask, except against the vocabulary's size. The host waits.

        Raises:
            TypeError, ValueError: a dtype, shape, or value does not fit.
        """
        for name, tensor in (("mask_ids", ids), ("mask_offsets", offsets)):
            if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"{name} must be an int64 or int32 tensor, got {tensor!r:.60}")
            if tensor.dim() != 1 or tensor.device != labels.device:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; expected one dimension, on "
                    f"{labels.device}"
                )
        num_tokens, num_ids = labels.numel(), ids.numel()
        if offsets.numel() != num_tokens + 1:
            raise ValueError(
                f"mask_offsets has {offsets.numel()} entries; expected one more than the {num_tokens} tokens"
            )
        ids, offsets = ids.to(torch.int64), offsets.to(torch.int64)
        count = offsets.diff()
        ends = torch.stack((offsets[0], offsets[-1], (count < 0).sum(), (count == 0).sum())).tolist()
        if ends[:3] != [0, num_ids, 0]:
            raise ValueError(
                f"mask_offsets go from {ends[0]} to {ends[1]} and descend {ends[2]} times; expected 0 to "
                f"{num_ids}, the number of mask_ids, never descending"
            )
        token = torch.repeat_interleave(count)
        facts = {"kept ids": num_ids, "tokens without a set": ends[3], "smallest id": 0, "largest id": -1}
        facts |= {"checksum of mask_ids": 0, "checksum of mask_offsets": 0, "checksum of active_mask": 0}
        if num_ids:
            key = ((token << 31) + ids.clamp(-1, 2**31 - 2) + 1).sort().values
            twice = (key[1:] == key[:-1]).any().to(torch.int64)
            sums = (ids * (token % 8191 + 1)).sum(), (offsets * offsets).sum()
            again, *numbers = torch.stack((twice, ids.amin(), ids.amax(), *sums)).tolist()
            if again:
                raise ValueError("mask_ids names an id twice for one token; give each once")
            facts |= dict(zip(list(facts)[2:6], numbers, strict=True))
        if active is not None:
            active = active.to(labels.device).flatten()
            ids, token, count = ids[active[token]], token[active[token]], count * active
            place = torch.arange(num_tokens, device=labels.device) % 8191 + 1
            of_active = torch.stack((((count == 0) & active).sum(), (place * active).sum()))
            facts["tokens without a set"], facts["checksum of active_mask"] = of_active.tolist()
            offsets = _offsets_of(count)
        return Mask(ids, offsets, token, active, facts)

    @staticmethod
    def unknown() -> dict[str, int]:
        """The facts' names with placeholder values, for a rank whose mask is bad."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return Mask.of(nothing, torch.zeros(1, dtype=torch.int64), nothing).facts

    def with_labels(self, labels: Tensor, known: Tensor) -> Mask:
        """With the labels ``[T]`` that are ``known`` in the sets of tokens that have one. The host waits."""
        count = self.offsets.diff()
        inside = self.token[self.ids == labels[self.token]]
        missing = known & (count > 0) & (torch.zeros_like(count).index_fill_(0, inside, 1) == 0)
        more = missing.nonzero().squeeze(-1)
        token, order = torch.cat((self.token, more)).sort(stable=True)
        ids = torch.cat((self.ids, labels[more]))[order]
        return self._replace(ids=ids, token=token, offsets=_offsets_of(count + missing))


def _offsets_of(count: Tensor) -> Tensor:
    """int64 ``[T + 1]`` of the numbers ``[T]`` of ids."""
    return torch.cat((count.new_zeros(1), count.cumsum(0)))


class Pairs(NamedTuple):
    """Pairs of a token and a kept id in this shard, sorted by token."""

    columns: Tensor  # int64 [P], of this shard
    first: Tensor  # int64 [T]: first pair of each token
    length: Tensor  # int64 [T]
    labels: Tensor  # int64 [T], columns of this shard or outside of it

    @staticmethod
    def of(mask: Mask, order: Tensor, labels: Tensor, vocab_start: int, num_rows: int) -> Pairs:
        """The pairs of the tokens ``order`` ``[T]`` of a mask, with the tokens' labels (global ids
        ``[T]``)."""
        columns = mask.ids - vocab_start
        here = (columns >= 0) & (columns < num_rows)
        ends = torch.searchsorted(mask.token[here], torch.arange(len(order) + 1, device=order.device))
        return Pairs(columns[here], ends[:-1][order], ends.diff()[order], labels - vocab_start)

    def blocks(self, bytes_per_token: int) -> list[_Block]:
        """Blocks of the tokens with a kept id here, by the length of their sets, longest first.

        The host waits for the lengths.
        """
        order = self.length.argsort(descending=True, stable=True)
        lengths = [length for length in self.length[order].tolist() if length]
        size = max(1, BLOCK_BYTES // bytes_per_token)
        starts = range(0, len(lengths), size)
        return [_Block(order[: len(lengths)][at : at + size], lengths[at]) for at in starts]

    def sets(self, block: _Block) -> _Sets:
        """The block's sets, padded to its longest."""
        tokens = block.tokens
        place, last = torch.arange(block.longest, device=tokens.device), self.length[tokens].unsqueeze(-1) - 1
        real, place = place <= last, torch.minimum(place, last)
        pairs = self.first[tokens].unsqueeze(-1) + place
        columns = self.columns[pairs]
        is_label = real & (columns == self.labels[tokens].unsqueeze(-1))
        label = torch.where(is_label.any(-1), is_label.to(torch.uint8).argmax(-1), -1)
        return _Sets(pairs, place, columns, real, label)


class _Block(NamedTuple):
    """``B`` tokens with up to ``K`` kept ids."""

    tokens: Tensor  # int64 [B]
    longest: int  # K


class _Sets(NamedTuple):
    """Sets of a block; padding repeats a token's last id."""

    pairs: Tensor  # int64 [B, K]
    place: Tensor  # int64 [B, K]: position of the id in its set
    columns: Tensor  # int64 [B, K]
    real: Tensor  # bool [B, K]: no padding
    label: Tensor  # int64 [B]: position of the label among the K, -1 if it is not there


class MaskedCall(NamedTuple):
    """A call's inputs other than the operands; tokens in the order of the hidden states."""

    comm: VocabParallel
    pairs: Pairs
    logit_scale: float
    inv_temperature: Tensor | None  # [T] fp32
    softcap: float | None
    form: LossForm  # without the softcap, which is applied here
    open_grad_weight: OpenGradWeight
    logits_dtype: torch.dtype  # in which the GEMM writes them

    def logits(self, tokens: Tensor, sets: _Sets, product: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, K]`` fp32, -inf in the padding, and the softcap's derivatives.

        ``product``: ``hidden @ weight.T`` at the kept ids.
        """
        cap = self.softcap
        z = rows_torch.scaled_logits(product, self.logit_scale, cap)
        softcap_grad = z.new_ones(())
        if cap is not None:
            softcap_grad = rows_torch.softcap_gradient(product, self.logit_scale, cap)
        if self.inv_temperature is not None:
            z = z * self.inv_temperature[tokens].unsqueeze(-1)
        return z.masked_fill(~sets.real, -torch.inf), softcap_grad


class MaskedLogProbs(torch.autograd.Function):
    """:class:`.TokenLogProbs` over the kept ids, fp32 ``[T]``; undefined for a token without any.

    Collectives of the forward: the all-gather of all hidden states (sequence parallelism), then the merge of
    all tokens' statistics. Of the backward: that gather again, and the reduction of ``grad_hidden``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, H]
        weight: Tensor,  # [V, H]
        call: MaskedCall,
    ) -> tuple[Tensor | None, ...]:
        pairs, form = call.pairs, call.form
        num_tokens = len(pairs.labels)
        shard = torch.zeros(4, num_tokens, dtype=torch.float32, device=hidden.device)
        shard[:2], shard[3] = -torch.inf, NOT_HERE
        extra = ExtraStatistics(weighted=torch.zeros_like(shard[0]) if form.with_weighted else None)
        products = shard.new_empty(len(pairs.columns))  # of every pair
        with autocast.off(hidden.device):
            all_hidden = _gathered(call.comm, hidden)
            blocks = pairs.blocks(call.logits_dtype.itemsize * len(weight))
            size = len(blocks[0].tokens) if blocks else 0
            buffer = hidden.new_empty(size, len(weight), dtype=call.logits_dtype)
            for block in blocks:
                sets, out = pairs.sets(block), buffer[: len(block.tokens)]
                write_logits(all_hidden[block.tokens], weight, out)
                product = out.gather(1, sets.columns).float()
                products[sets.pairs] = product
                z, _ = call.logits(block.tokens, sets, product)
                stats = rows_torch.row_statistics(z, sets.label, 1.0, form=form)
                shard[:, block.tokens] = stats.shard
                for of_all, of_block in zip(extra.rows(), stats.extra.rows(), strict=True):
                    of_all[block.tokens] = of_block
            del buffer
            merged = call.comm.start_merge(RowStatistics(shard, extra=extra), loss).finish()
            made = form.finish(Rows(merged))
        known = merged.terms[3] != NOT_HERE
        ctx.call = call
        ctx.save_for_backward(hidden, weight, products, form.saved(merged), known)
        ctx.set_materialize_grads(False)
        with_grad = ("log_prob", *form.differentiable)
        # One call: a second would take the place of the first.
        ctx.mark_non_differentiable(*(each for name, each in made.items() if name not in with_grad))
        log_prob = torch.where(known, made["log_prob"], -torch.inf)
        return log_prob, made.get("entropy")

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        of_log_prob, of_entropy = grads
        if of_log_prob is None and of_entropy is None:
            return None, None, None
        hidden, weight, products, saved, known = ctx.saved_tensors
        call: MaskedCall = ctx.call
        comm, pairs = call.comm, call.pairs
        wants_grad_hidden, wants_grad_weight, _ = ctx.needs_input_grad
        grad_loss = torch.zeros_like(saved[0])
        if of_log_prob is not None:
            grad_loss = torch.where(known, -of_log_prob, 0.0)
        terms = TokenTerms.of(saved, call.form.kept)
        upstream = Upstream(grad_loss, () if of_entropy is None else (("entropy", of_entropy),))
        upstream, inv_scale = scaled_upstream(upstream, call.logit_scale, call.inv_temperature, weight)
        coefficients = call.form.grad_coefficients(terms, upstream)
        accumulators = OpenedAccumulators(call.open_grad_weight)
        with accumulators.or_abandoned(comm, hidden.device):
            all_hidden = _gathered(comm, hidden)
            partial = torch.zeros_like(all_hidden) if wants_grad_hidden else None
            blocks = pairs.blocks(weight.element_size() * len(weight))
            accumulator = None
            if wants_grad_weight:
                accumulator = accumulators(weight, len(blocks), inv_scale is not None)
            buffer = weight.new_empty(len(blocks[0].tokens) if blocks else 0, len(weight))
            for block in blocks:
                tokens, sets = block.tokens, pairs.sets(block)
                grad_logits = buffer[: len(tokens)].zero_()
                _write_gradients(call, tokens, sets, products[sets.pairs], coefficients, grad_logits)
                if partial is not None:
                    partial[tokens] = grad_logits @ weight
                if accumulator is not None:
                    accumulator.add(grad_logits, all_hidden[tokens])
            del buffer
            grad_hidden = None
            if partial is not None:
                if inv_scale is not None:
                    scale_(partial, inv_scale)
                grad_hidden = hidden.new_empty(hidden.shape) if comm.num_parts > 1 else partial
                comm.reduce_grad_hidden(partial, grad_hidden).wait()
            grad_weight = None if accumulator is None else accumulator.close(inv_scale)
        return grad_hidden, grad_weight, None


def _write_gradients(
    call: MaskedCall,
    tokens: Tensor,  # int64 [B]
    sets: _Sets,
    product: Tensor,  # [B, K] fp32
    coefficients: GradCoefficients,  # [T] fp32 each
    out: Tensor,  # [B, V]
) -> None:
    """Write the gradients with respect to ``hidden @ weight.T`` at the kept ids."""
    z, softcap_grad = call.logits(tokens, sets, product)
    of_block = coefficients._replace(
        **{name: value[tokens] for name, value in coefficients._asdict().items() if value is not None}
    )
    grad = rows_torch.row_gradients(z, sets.label, of_block, 1.0, z, call.form) * softcap_grad
    # Padding writes what the token's last id writes.
    out.scatter_(1, sets.columns, grad.gather(1, sets.place).to(out.dtype))


@uncompiled
def masked_log_probs(
    call: Call, ids: Tensor, offsets: Tensor, active: Tensor | None, keep_label: bool
) -> TokenLogProbs:
    """:func:`.rl.masked_token_log_probs`: ``mask_ids``, ``mask_offsets``, and what it has by these names."""
    call = call.completed()
    with call.on_its_device():
        return _evaluate(call, ids, offsets, active, keep_label)


def _evaluate(
    call: Call, ids: Tensor, offsets: Tensor, active: Tensor | None, keep_label: bool
) -> TokenLogProbs:
    config, reduces = call.config, call.reduce_grad_hidden
    comm = VocabParallel.of(call.tp_group, call.sequence_parallel, config.merge, reduces)
    mask, error, found = None, None, Mask.unknown()
    try:
        check_arguments(call, comm)
        mask = Mask.of(ids, offsets, call.labels, active)
        found = mask.facts
    except (TypeError, ValueError) as one:
        error = one
    found["keep_label"] = keep_label
    shards = Shards.agreed(call, comm, error, found)
    assert mask is not None
    first, end = shards.first, shards.end
    smallest, largest = mask.facts["smallest id"], mask.facts["largest id"]
    if mask.facts["kept ids"] and not first <= smallest <= largest < end:
        raise ValueError(
            f"mask_ids are {smallest} to {largest}; expected ids of the vocabulary, {first} to {end - 1}"
        )
    known = (call.labels >= first) & (call.labels < end)
    if keep_label:
        mask = mask.with_labels(call.labels.flatten().to(torch.int64), known.flatten())
    among_kept = _among_kept(call, mask, comm, shards.starts[comm.rank])
    if call.zero_unknown:
        among_kept = among_kept._replace(log_prob=among_kept.log_prob.masked_fill(~known, 0.0))
    if mask.facts["tokens without a set"] or mask.active is not None:
        return _with_unfiltered(call, mask, among_kept)
    return among_kept


def _among_kept(call: Call, mask: Mask, comm: VocabParallel, vocab_start: int) -> TokenLogProbs:
    labels, hidden = call.labels, call.hidden
    order = torch.arange(labels.numel(), device=labels.device).view(labels.shape)
    order, in_order = (in_token_order(x, labels, 1).flatten() for x in (order, labels.to(torch.int64)))
    inv_temperature = inv_temperature_of(call.temperature, labels, comm)
    logit_scale, softcap = at_temperature(call)
    pairs = Pairs.of(mask, order, in_order, vocab_start, call.weight.shape[0])
    form = LossForm.of(outputs=call.outputs, differentiable=call.differentiable)
    flat = None if inv_temperature is None else inv_temperature.flatten()
    rounds = call.config.logit_precision == "activations"
    dtype = hidden.dtype if rounds else torch.float32
    masked = MaskedCall(comm, pairs, logit_scale, flat, softcap, form, call.open_grad_weight, dtype)
    made = MaskedLogProbs.apply(hidden.reshape(-1, hidden.shape[-1]), call.weight, masked)
    b_s = tuple(labels.shape) if labels.dim() == 2 else None
    in_layout = (None if x is None else in_labels_layout(x, b_s) for x in made)
    return TokenLogProbs(*in_layout)  # type: ignore[arg-type]  # the first is there


def _with_unfiltered(call: Call, mask: Mask, among_kept: TokenLogProbs) -> TokenLogProbs:
    """Fill in the tokens without a set, by the head over the whole vocabulary.

    Collectives: the head's, with ``skip_masked``."""
    unfiltered = (mask.offsets.diff() == 0).view(call.labels.shape)
    counts = unfiltered if mask.active is None else unfiltered & mask.active.view(call.labels.shape)
    if call.config.ignore_index is not None:
        counts = counts & (call.labels != call.config.ignore_index)
    head: dict[str, Tensor] = among_kept._asdict()
    if mask.facts["tokens without a set"]:
        config = replace(call.config, skip_masked=True)
        head = linear_cross_entropy(call._replace(config=config, token_weights=counts.float())).outputs
    # No upstream gradient reaches a token that the head has left out.
    ignored = unfiltered & ~counts

    def filled(of_all: Tensor | None, of_kept: Tensor | None) -> Tensor | None:
        if of_all is None or of_kept is None:
            return None
        return torch.where(counts, of_all, of_kept).masked_fill(ignored, 0.0)

    of_head = map(head.get, TokenLogProbs._fields)
    return TokenLogProbs(*map(filled, of_head, among_kept))  # type: ignore[arg-type]  # the first is there


def _gathered(comm: VocabParallel, hidden: Tensor) -> Tensor:
    """Hidden states of the group, ``[T, H]``. Collectives: an all-gather with sequence parallelism."""
    if comm.num_parts == 1:
        return hidden
    whole, gathering = comm.gathered(hidden)
    gathering.wait()
    return whole
