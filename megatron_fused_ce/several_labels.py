"""Log-probabilities of K labels a token.

The head's own loops and plan (:mod:`.forward`, :mod:`.backward`), with logits in fp32 and a backend that
reads and writes K entries of each row beside the row kernels::

    forward    s_k = logits[id_k]                                   gathered from a chunk's fp32 logits
               log p_k = log p_best + (s_k - s_best)                best: the label with the largest logit
    backward   d / d s_j = sum of u_k with id_k = j, minus U p_j    U = sum u_k

``best`` is the label that the head's statistics leave out of their sum, so that ``log p_best`` has its digits
for a confident token; the second summand cancels nothing, since neither is above 0. In the backward the row
kernel writes ``-U p`` everywhere; then the K entries are written, each rounded once, from their
log-probabilities: ``p - 1`` is ``expm1(log p)``.

Beside the plan for one label: 16 bytes a label, and 56 a label of a chunk (``planner.LABEL_BYTES``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.autograd import FusedLinearCrossEntropy, Gradients, differentiated_once
from megatron_fused_ce.call import Call, CallSpec, Context, spec_of
from megatron_fused_ce.chunking import first_tokens
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.records import RowStatistics
from megatron_fused_ce.logits import ChunkTargets, LogitsGrad, rows_torch
from megatron_fused_ce.logits.gemm_rows import GemmThenRows, row_gradients
from megatron_fused_ce.loss import TokenLogProbs, TokenTerms, Upstream
from megatron_fused_ce.losses import Rows
from megatron_fused_ce.losses.label import SoftTargets
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.masked_tokens import Kept
from megatron_fused_ce.op import uncompiled
from megatron_fused_ce.parallel import VocabParallel, compare_numbers
from megatron_fused_ce.targets import Targets, columns_of, in_token_order

#: Labels of a token, at most: their places are written as int16.
MOST_LABELS = 2**15
#: In place of a column: an empty entry, and an id of another shard or of none.
EMPTY, NO_COLUMN = -1, -2
#: In place of a label's logit of -inf, which stands for a label that no shard has.
LOWEST_FINITE = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True)
class _Gathering(GemmThenRows):
    """The forward's. ``targets.labels`` holds token positions, which index ``columns``."""

    columns: Tensor  # int32 [T, K], in the order of the caller's labels
    comm: VocabParallel
    label_logits: Tensor  # fp32 [T, K], written: of any shard; -inf for a label that no shard has
    row_max: Tensor  # fp32 [T], written: of this shard

    def statistics(self, logits: Tensor, targets: ChunkTargets, with_argmax: bool) -> RowStatistics:
        """Collectives: a MAX all-reduce of fp32 ``[C, K]`` (R > 1), before the statistics."""
        tokens, inv_temperature = targets.labels, targets.inv_temperature
        columns = self.columns[tokens].long()
        products = logits.gather(1, columns.clamp(min=0))
        s = rows_torch.scaled_logits(products, targets.logit_scale, targets.form.softcap)
        if inv_temperature is not None:
            s.mul_(inv_temperature.unsqueeze(1))
        s = torch.where(columns >= 0, s.clamp_(min=LOWEST_FINITE), -torch.inf)
        self.comm.take_largest_(s)
        best = columns.gather(1, s.argmax(1, keepdim=True)).squeeze(1)
        stats = super().statistics(logits, targets._replace(labels_if_read=best), with_argmax)
        self.label_logits.index_copy_(0, tokens, s)
        self.row_max.index_copy_(0, tokens, stats.row_max)
        return stats


@dataclass(frozen=True, kw_only=True)
class _Scattering(GemmThenRows):
    """The backward's. ``upstream.loss`` of a token is the sum of its ``|u_k|``: what fp16 must hold."""

    columns: Tensor  # as the forward's
    log_probs: Tensor  # fp32 [T, K]
    shares: Tensor | None  # fp32 [T, K]: u_k over that sum; None without upstream gradients

    def grad_from_saved(
        self,
        matrix: Tensor,
        row_scale: Tensor | None,
        targets: ChunkTargets,
        terms: TokenTerms | None,
        upstream: Upstream,
        out: Tensor | None,
    ) -> LogitsGrad:
        assert terms is not None and out is not None
        tokens = targets.labels
        targets = targets._replace(labels_if_read=torch.full_like(tokens, NO_COLUMN))
        if self.shares is None:
            return row_gradients(self.rows, matrix, targets, terms, upstream, out)
        targets = targets._replace(form=replace(targets.form, loss=SoftTargets()))
        shares = self.shares[tokens]
        of_all = shares.sum(1)
        columns, place = _stand_ins(self.columns[tokens])
        products = matrix.gather(1, columns)
        shares = _of_column(shares, columns, place, scratch=out)
        if out.data_ptr() == matrix.data_ptr():
            out.scatter_(1, columns, products)  # which the places have overwritten
        # The row kernel's loss is (sum q) lse - sum q s: -U p is its gradient for q of -U in all, without the
        # entries of q.
        terms = terms._replace(extra=terms.extra._replace(target_mass=-of_all))
        row_gradients(self.rows, matrix, targets, terms, upstream, out)
        # u - U p = -u expm1(log p) - (U - u) p at the entries.
        log_p = self.log_probs[tokens].gather(1, place)
        p = log_p.exp()
        rest = (of_all.unsqueeze(1) - shares).mul_(p)
        grad = shares.mul_(torch.expm1(log_p)).add_(rest).mul_(-upstream.loss.unsqueeze(1))
        of_entropy = dict(upstream.beside).get("entropy")
        if of_entropy is not None:
            entropy = OUTPUTS["entropy"].value(Rows(saved=terms))
            pull = (log_p + entropy.unsqueeze(1)).mul_(p).masked_fill_(p == 0, 0.0)
            grad.sub_(pull.mul_(of_entropy.unsqueeze(1)))
        if targets.form.softcap is not None:
            bent = rows_torch.softcap_gradient(products, targets.logit_scale, targets.form.softcap)
            grad.mul_(bent)
        here = self.columns[tokens].amax(1, keepdim=True) >= 0  # else column 0 stays as it is
        out.scatter_(1, columns, torch.where(here, grad.to(out.dtype), out.gather(1, columns)))
        return LogitsGrad(out)


def _stand_ins(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Columns to read and write, ``[C, K]``, and the place among the K of each.

    An entry that is not in this shard stands for its token's first that is; column 0 for a token without any.
    """
    here = columns >= 0
    first = here.to(torch.uint8).argmax(1, keepdim=True)
    place = torch.where(here, torch.arange(columns.shape[1], device=columns.device), first)
    return columns.gather(1, place).clamp_(min=0).long(), place


def _of_column(shares: Tensor, columns: Tensor, place: Tensor, scratch: Tensor) -> Tensor:
    """Sums of the shares of one token's entries in one column, at each of them; ``[C, K]``.

    Every entry writes its place into its column of ``scratch`` ``[C, V]``, and all of a column read the one
    that stayed there. What else was there is not read.
    """
    places = scratch.view(torch.int16 if scratch.element_size() == 2 else torch.int32)
    places.scatter_(1, columns, place.to(places.dtype))
    owner = places.gather(1, columns).long()
    own = torch.arange(shares.shape[1], device=shares.device) == place
    return torch.zeros_like(shares).scatter_add_(1, owner, shares * own).gather(1, owner)


class LabelLogProbs(FusedLinearCrossEntropy):
    """The head with an output more, log-probabilities in the labels' shape; then entropy and sum of squares.

    Collectives: those of :class:`.FusedLinearCrossEntropy`; :meth:`_Gathering.statistics`'s behind each
    chunk's first GEMM; a MAX all-reduce of fp32 ``[T]`` after the last (R > 1).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,  # [s, b, H] or [n, H]
        weight: Tensor,  # [V, H]
        targets: Targets,  # whose labels are positions
        context: Context,
        kept: Kept | None,
        columns: Tensor,  # int32 [b, s, K] or [T, K]
        zero_unknown: bool,
    ) -> tuple[Tensor | None, ...]:
        comm, flat = context.spec.comm, columns.flatten(0, -2)
        label_logits = torch.empty_like(flat, dtype=torch.float32)
        row_max = label_logits.new_empty(len(flat))
        gathering = _Gathering(
            **vars(context.spec.logits), columns=flat, comm=comm, label_logits=label_logits, row_max=row_max
        )
        in_batch = (columns.shape[0], columns.shape[1]) if columns.dim() == 3 else None
        *of_tokens, _, _ = FusedLinearCrossEntropy.forward(
            ctx, hidden, weight, targets, _with(context, gathering), kept, in_batch
        )
        outputs = dict(zip(context.spec.form.outputs, of_tokens, strict=True))
        comm.take_largest_(row_max)
        log_prob = outputs["log_prob"]
        assert log_prob is not None
        log_probs = _log_probs(label_logits, log_prob.flatten(), row_max)
        if zero_unknown:
            log_probs.masked_fill_(label_logits == -torch.inf, 0.0)
        log_probs.masked_fill_(flat == EMPTY, -torch.inf)
        if kept is not None:  # 0 in empty entries too: 0 times a mask is then 0
            left_out = torch.ones_like(row_max, dtype=torch.bool)
            left_out[targets.labels.flatten()] = ~kept.active.flatten()
            log_probs.masked_fill_(left_out.unsqueeze(1), 0.0)
        if any(context.spec.needs_grad):
            ctx.context = context
            ctx.save_for_backward(*ctx.to_save, flat, log_probs)
        return log_probs.view(columns.shape).clone(), outputs.get("entropy"), outputs.get("sum_p_squared")

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        of_log_probs, of_entropy, _ = grads
        *of_head, columns, log_probs = ctx.saved_tensors  # once: a checkpoint has them no more
        shares = size = None
        if of_log_probs is not None:
            empty = (columns == EMPTY).view(of_log_probs.shape)
            shares = of_log_probs.float().masked_fill(empty, 0.0)
            size = shares.abs().sum(-1)
            shares = shares.div_(torch.where(size == 0, 1.0, size).unsqueeze(-1)).view(columns.shape)
        logits = vars(ctx.context.spec.logits)
        scattering = _Scattering(**logits, columns=columns, log_probs=log_probs, shares=shares)
        node = SimpleNamespace(**vars(ctx))
        node.context, node.saved_tensors = _with(ctx.context, scattering), of_head
        node.needs_input_grad = ctx.needs_input_grad
        given = {"loss": size, "entropy": of_entropy}  # None for 0
        of_outputs = map(given.get, ctx.context.spec.form.outputs)
        return FusedLinearCrossEntropy.backward(node, *of_outputs, None, None)


def _with(context: Context, logits: GemmThenRows) -> Context:
    return context._replace(spec=context.spec._replace(logits=logits))


def _log_probs(label_logits: Tensor, log_prob: Tensor, row_max: Tensor) -> Tensor:
    """Log-probabilities ``[T, K]`` from the head's ``log_prob`` ``[T]`` of the label with the largest logit:
    ``max s - lse`` for a token whose labels no shard has, and for each such label."""
    unknown = label_logits == -torch.inf
    largest = label_logits.amax(1)
    reference = torch.where(largest == -torch.inf, row_max, largest)
    above = torch.where(unknown, row_max.unsqueeze(1), label_logits).sub_(reference.unsqueeze(1))
    return above.add_(log_prob.unsqueeze(1)).masked_fill_(label_logits == LOWEST_FINITE, -torch.inf)


@lru_cache(maxsize=64)
def _unfused(config: FusedCEConfig) -> FusedCEConfig:
    """``config`` for this backend; logits in fp32 unless the user wants them rounded. Options that change the
    loss alone do not count."""
    named = config.logit_precision != "auto"
    return replace(
        config,
        logits_backend="gemm_rows",
        logit_precision=config.logit_precision if named else "fp32",
        z_loss=0.0,
        label_smoothing=0.0,
    )


def _refused(labels: Tensor, config: FusedCEConfig, masked: bool) -> ValueError | None:
    """What this backend cannot do."""
    if not 1 <= labels.shape[-1] <= MOST_LABELS:
        return ValueError(f"labels are {tuple(labels.shape)}; expected [.., K] with K of 1 to {MOST_LABELS}")
    if config.ignore_index is not None:
        return ValueError("ignore_index is for one label a token; here -1 marks an empty entry: leave it out")
    if config.logits_backend == "scaled_exp":
        return ValueError(
            "logits_backend='scaled_exp' cannot serve several labels a token; use 'auto' or 'gemm_rows'"
        )
    if config.skip_masked and not masked:
        return ValueError(
            "skip_masked leaves out tokens by labels; several labels a token have no such label"
        )
    return None


@uncompiled
def several_log_probs(call: Call) -> TokenLogProbs:
    """:func:`.rl.token_log_probs` of a call with ``labels`` ``[b, s, K]`` or ``[T, K]``."""
    call = call.completed()
    labels, zero_unknown = call.labels, call.zero_unknown
    wrong = call.caller_error or _refused(labels, call.config, masked=call.token_weights is not None)
    call = call._replace(
        labels=labels.new_full(labels.shape[:-1], EMPTY),  # none: for checks and the plan
        labels_per_token=labels.shape[-1],
        config=_unfused(call.config),
        zero_unknown=False,
        caller_error=wrong,
    )
    with call.on_its_device():
        spec = spec_of(call)
        if call.config.debug_checks:
            compare_numbers({"labels": labels}, spec.comm.group)
        targets, kept = Targets.of(call, spec)
        positions = torch.arange(call.labels.numel(), device=labels.device).view(call.labels.shape)
        positions = in_token_order(positions, call.labels, spec.comm.num_parts)
        chunks = spec.chunks
        if kept is not None:
            positions, chunks = kept.of_tokens(positions), first_tokens(chunks, kept.tokens.shape[1])
        targets = targets._replace(labels=positions)
        context = Context(spec, chunks, call.open_grad_weight)
        columns = _columns(labels, spec, call)
        return TokenLogProbs(
            *LabelLogProbs.apply(call.hidden, call.weight, targets, context, kept, columns, zero_unknown)
        )


def _columns(labels: Tensor, spec: CallSpec, call: Call) -> Tensor:
    """Columns of this shard, int32, in the labels' shape."""
    columns = columns_of(labels, spec, call.config)
    here = (columns >= 0) & (columns < call.weight.shape[0])
    return torch.where(here, columns, NO_COLUMN).masked_fill_(labels == EMPTY, EMPTY).to(torch.int32)
