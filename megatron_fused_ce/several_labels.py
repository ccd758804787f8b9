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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce import autocast
from megatron_fused_ce.autograd import differentiated_once, in_labels_layout, put_together, take_apart
from megatron_fused_ce.backward import backward
from megatron_fused_ce.call import Call, CallSpec, Context, NeedsGrad, spec_of
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.forward import forward
from megatron_fused_ce.logits import ChunkTargets, LogitsGrad, Scores, rows_torch
from megatron_fused_ce.logits.gemm_rows import GemmThenRows, row_gradients, write_logits
from megatron_fused_ce.loss import TokenLogProbs, TokenTerms, Upstream
from megatron_fused_ce.op import uncompiled
from megatron_fused_ce.parallel import VocabParallel
from megatron_fused_ce.phases import phase
from megatron_fused_ce.targets import Targets, inv_temperature_of
from megatron_fused_ce.wgrad import OpenedAccumulators
from megatron_fused_ce.zero_upstream import backward_of_nonzero

#: Labels of a token, at most: their places are written as int16.
MOST_LABELS = 2**15
#: In place of a column: an empty entry, and an id of another shard or of none.
EMPTY, NOT_HERE = -1, -2
#: In place of a label's logit of -inf, which stands for a label that no shard has.
LOWEST = torch.finfo(torch.float32).min


class _Options(NamedTuple):
    """A call beside its tensors."""

    context: Context
    zero_unknown: bool
    in_batch: tuple[int, ...] | None  # (b, s) for labels [b, s, K]; None for [T, K]


@dataclass(frozen=True, kw_only=True)
class _WithLabels(GemmThenRows):
    """:class:`.GemmThenRows` whose targets' labels are the tokens' own positions, by which it finds their
    columns here."""

    columns: Tensor  # int32 [T, K]


@dataclass(frozen=True, kw_only=True)
class _Gathering(_WithLabels):
    """The forward's."""

    comm: VocabParallel
    label_logits: Tensor  # fp32 [T, K], written: of any shard; -inf for a label that no shard has
    row_max: Tensor  # fp32 [T], written: of this shard

    def logits_gemm(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: ChunkTargets,
        sample: Tensor | None,
        out: Tensor | None,
        with_argmax: bool,
    ) -> Scores:
        """Collectives: a MAX all-reduce of fp32 ``[C, K]`` (R > 1), before the statistics."""
        assert out is not None
        tokens, form, inv_temperature = targets.labels, targets.form, targets.inv_temperature
        with phase("logits"):
            write_logits(hidden, weight, out)
        with phase("statistics"):
            columns = self.columns[tokens].long()
            products = out.gather(1, columns.clamp(min=0))
            s = rows_torch.scaled_logits(products, targets.logit_scale, form.softcap)
            if inv_temperature is not None:
                s.mul_(inv_temperature.unsqueeze(1))
            s = torch.where(columns >= 0, s.clamp_(min=LOWEST), -torch.inf)
            self.comm.take_largest_(s)
            best = columns.gather(1, s.argmax(1, keepdim=True)).squeeze(1)
            stats = self.rows.row_statistics(
                out, best, targets.logit_scale, with_argmax, form, None, inv_temperature
            )
            self.label_logits.index_copy_(0, tokens, s)
            self.row_max.index_copy_(0, tokens, stats.row_max)
        return Scores(stats)


@dataclass(frozen=True, kw_only=True)
class _Scattering(_WithLabels):
    """The backward's. ``upstream.loss`` of a token is the sum of its ``|u_k|``: what fp16 must hold."""

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
        targets = targets._replace(labels=torch.full_like(tokens, NOT_HERE))
        if self.shares is None:
            return row_gradients(self.rows, matrix, targets, terms, upstream, out)
        shares = self.shares[tokens]
        of_all = shares.sum(1)
        columns, place = _stand_ins(self.columns[tokens])
        products = matrix.gather(1, columns)
        shares = _of_column(shares, columns, place, scratch=out)
        if out.data_ptr() == matrix.data_ptr():
            out.scatter_(1, columns, products)  # which the places have overwritten
        # The row kernel's loss is (sum q) lse - sum q s: -U p is its gradient for q of -U in all, without the
        # entries of q.
        row_gradients(self.rows, matrix, targets, terms._replace(mass=-of_all), upstream, out)
        # u - U p = -u expm1(log p) - (U - u) p at the entries.
        log_p = self.log_probs[tokens].gather(1, place)
        p = log_p.exp()
        rest = (of_all.unsqueeze(1) - shares).mul_(p)
        grad = shares.mul_(torch.expm1(log_p)).add_(rest).mul_(-upstream.loss.unsqueeze(1))
        if upstream.entropy is not None:
            assert terms.entropy is not None
            pull = (log_p + terms.entropy.unsqueeze(1)).mul_(p).masked_fill_(p == 0, 0.0)
            grad.sub_(pull.mul_(upstream.entropy.unsqueeze(1)))
        if targets.form.softcap is not None:
            bent = rows_torch.softcap_gradient(products, targets.logit_scale, targets.form.softcap)
            grad.mul_(bent)
        here = self.columns[tokens].amax(1, keepdim=True) >= 0  # else column 0 stays as it is
        out.scatter_(1, columns, torch.where(here, grad.to(out.dtype), out.gather(1, columns)))
        return LogitsGrad(out)

    def grad_recomputed(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: ChunkTargets,
        terms: TokenTerms,
        upstream: Upstream,
        logits: Tensor,
        out: Tensor,
    ) -> LogitsGrad:
        write_logits(hidden, weight, logits)
        return self.grad_from_saved(logits, None, targets, terms, upstream, out)


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


class LabelLogProbs(torch.autograd.Function):
    """:class:`.TokenLogProbs`: log-probabilities ``[b, s, K]`` or ``[T, K]``, the others without the K.

    Collectives: those of :func:`.forward.forward`, with :meth:`_Gathering.logits_gemm`'s behind each chunk's
    first GEMM, then a MAX all-reduce of fp32 ``[T]`` (R > 1); those of :func:`.backward.backward`, or
    :func:`.zero_upstream.backward_of_nonzero`'s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [s, b, H] or [n, H]
        weight: Tensor,  # [V, H]
        columns: Tensor,  # int32 [T, K]
        inv_temperature: Tensor | None,  # [parts, n] fp32
        options: _Options,
    ) -> tuple[Tensor | None, ...]:
        context, spec = options.context, options.context.spec
        label_logits = torch.empty_like(columns, dtype=torch.float32)
        gathering = _Gathering(
            **vars(spec.logits),
            columns=columns,
            comm=spec.comm,
            label_logits=label_logits,
            row_max=torch.empty_like(label_logits[:, 0]),
        )
        positions = torch.arange(len(columns), device=columns.device).view(spec.comm.num_parts, -1)
        targets = Targets(positions, inv_temperature=inv_temperature)
        flat = hidden.reshape(-1, hidden.shape[-1])
        try:
            with autocast.off(hidden.device):
                made = forward(_with(context, gathering), flat, weight, targets)
        except BaseException:
            spec.comm.join(hidden.device)
            raise
        spec.comm.take_largest_(gathering.row_max)
        assert made.outputs.log_prob is not None
        log_probs = _log_probs(label_logits, made.outputs.log_prob.flatten(), gathering.row_max)
        if options.zero_unknown:
            log_probs.masked_fill_(label_logits == -torch.inf, 0.0)
        log_probs.masked_fill_(columns == EMPTY, -torch.inf)
        ctx.options = options
        ctx.set_materialize_grads(False)
        if any(spec.needs_grad):
            tensors: list[Tensor | None] = []
            ctx.structure = take_apart((made.saved, inv_temperature), tensors)
            ctx.save_for_backward(hidden, weight, columns, log_probs, *tensors)
        entropy, sum_p_squared = (
            None if of_tokens is None else in_labels_layout(of_tokens, options.in_batch).clone()
            for of_tokens in (made.outputs.entropy, made.outputs.sum_p_squared)
        )
        detached = None if "entropy" in spec.form.differentiable else entropy
        ctx.mark_non_differentiable(*(each for each in (detached, sum_p_squared) if each is not None))
        if options.in_batch is not None:
            b, s = options.in_batch
            log_probs = log_probs.view(s, b, log_probs.shape[1]).transpose(0, 1)
        return log_probs.clone(memory_format=torch.contiguous_format), entropy, sum_p_squared

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_log_probs, of_entropy, _ = grads
        wants_hidden, wants_weight, *others = ctx.needs_input_grad
        no_others = (None,) * len(others)
        if of_log_probs is None and of_entropy is None:
            return None, None, *no_others
        hidden, weight, columns, log_probs, *tensors = ctx.saved_tensors
        saved, inv_temperature = put_together(ctx.structure, iter(tensors))
        context, spec, b_s = ctx.options.context, ctx.options.context.spec, ctx.options.in_batch
        parts, device = spec.comm.num_parts, weight.device
        shares, size = None, log_probs.new_zeros(len(columns))
        if of_log_probs is not None:
            upstream = of_log_probs.float() if b_s is None else of_log_probs.float().transpose(0, 1)
            shares = upstream.reshape(columns.shape).masked_fill(columns == EMPTY, 0.0)
            size = shares.abs().sum(1)
            shares.div_(torch.where(size == 0, 1.0, size).unsqueeze(1))
        if of_entropy is not None:
            of_entropy = of_entropy.float() if b_s is None else of_entropy.float().t()
            of_entropy = of_entropy.reshape(parts, -1).contiguous()
        scattering = _Scattering(**vars(spec.logits), columns=columns, log_probs=log_probs, shares=shares)
        accumulators = OpenedAccumulators(context.open_grad_weight)
        context = _with(context._replace(open_grad_weight=accumulators), scattering)
        try:
            with autocast.off(device):
                make = backward_of_nonzero if spec.skip_zero_upstream else backward
                grad_hidden, grad_weight = make(
                    context,
                    hidden.reshape(-1, hidden.shape[-1]),
                    weight,
                    None,
                    inv_temperature,
                    saved,
                    Upstream(size.view(parts, -1), entropy=of_entropy),
                    NeedsGrad(wants_hidden, wants_weight),
                )
        except BaseException:
            accumulators.abandon()
            spec.comm.join(device)
            raise
        return None if grad_hidden is None else grad_hidden.view(hidden.shape), grad_weight, *no_others


def _with(context: Context, logits: _WithLabels) -> Context:
    return context._replace(spec=context.spec._replace(logits=logits))


def _log_probs(label_logits: Tensor, log_prob: Tensor, row_max: Tensor) -> Tensor:
    """Log-probabilities ``[T, K]`` from the head's ``log_prob`` ``[T]`` of the label with the largest logit:
    ``max s - lse`` for a token whose labels no shard has, and for each such label."""
    unknown = label_logits == -torch.inf
    largest = label_logits.amax(1)
    reference = torch.where(largest == -torch.inf, row_max, largest)
    above = torch.where(unknown, row_max.unsqueeze(1), label_logits).sub_(reference.unsqueeze(1))
    return above.add_(log_prob.unsqueeze(1)).masked_fill_(label_logits == LOWEST, -torch.inf)


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


def _refused(labels: Tensor, config: FusedCEConfig) -> ValueError | None:
    """What this backend cannot do."""
    if not 1 <= labels.shape[-1] <= MOST_LABELS:
        return ValueError(f"labels are {tuple(labels.shape)}; expected [.., K] with K of 1 to {MOST_LABELS}")
    if config.ignore_index is not None or config.skip_masked:
        return ValueError(
            "ignore_index and skip_masked are for one label a token; here -1 marks an empty entry: give the "
            "hidden states of the tokens that count alone"
        )
    if config.logits_backend == "scaled_exp":
        return ValueError(
            "logits_backend='scaled_exp' cannot serve several labels a token; use 'auto' or 'gemm_rows'"
        )
    return None


@uncompiled
def several_log_probs(call: Call) -> TokenLogProbs:
    """:func:`.rl.token_log_probs` of a call with ``labels`` ``[b, s, K]`` or ``[T, K]``."""
    call = call.completed()
    labels, zero_unknown = call.labels, call.zero_unknown
    wrong = call.caller_error or _refused(labels, call.config)
    call = call._replace(
        labels=labels.new_full(labels.shape[:-1], EMPTY),  # none: for checks and the plan
        labels_per_token=labels.shape[-1],
        config=_unfused(call.config),
        zero_unknown=False,
        caller_error=wrong,
    )
    with call.on_its_device():
        spec = spec_of(call)
        inv_temperature = inv_temperature_of(call.temperature, call.labels, spec.comm)
        b_s = tuple(call.labels.shape) if call.labels.dim() == 2 else None
        options = _Options(Context(spec, spec.chunks, call.open_grad_weight), zero_unknown, b_s)
        columns = _columns(labels, spec, call)
        return TokenLogProbs(
            *LabelLogProbs.apply(call.hidden, call.weight, columns, inv_temperature, options)
        )


def _columns(labels: Tensor, spec: CallSpec, call: Call) -> Tensor:
    """Columns of this shard, int32 ``[T, K]`` in the order of the tokens."""
    ids = (labels if labels.dim() == 2 else labels.transpose(0, 1)).reshape(-1, labels.shape[-1])
    columns = ids - spec.vocab_start
    here = (columns >= 0) & (columns < call.weight.shape[0])
    if call.config.true_vocab_size is not None:
        here &= ids < call.config.true_vocab_size
    return torch.where(here, columns, NOT_HERE).masked_fill_(ids == EMPTY, EMPTY).to(torch.int32)
