"""Logits of a student and of its teacher: from their statistics to the divergence and its gradient.

Two GEMMs a chunk, each with the statistics of its rows by one of the other backends. All statistics of both
sides are merged over the ranks' shards in one exchange, side by side, as if the chunk had more tokens. Then::

    forward_kl      one row pass: the gradient, and with it the divergence            (read 2, write 1)
    reverse_kl,     a row pass for the mean that the gradient subtracts, merged over
    jsd             the ranks; then the pass above                                    (read 2 more)

The gradient, for an upstream gradient of 1, takes the place of the student's logits, in the hidden states'
dtype, and its rows get their factors later, as those of ``E`` do. The teacher's logits live until then.

A divergence is summed in terms that are all 0 or more (:mod:`.kernels.divergence`), shard by shard, and added
up over the ranks once, for all tokens, after the last chunk. No statistic is subtracted from another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.distillation import rows_torch as divergence_torch
from megatron_fused_ce.head.tokens import Kept
from megatron_fused_ce.kernels.records import (
    NO_EXTRA,
    NOT_HERE,
    ExtraStatistics,
    LabelTerm,
    Merged,
    RowStatistics,
    Side,
)
from megatron_fused_ce.logits import (
    ChunkTargets,
    LogitsBackend,
    LogitsGrad,
    OrderedTargets,
    Scores,
    rows_torch,
)
from megatron_fused_ce.logits.gemm_rows import gemm_then_rows, write_logits
from megatron_fused_ce.losses.form import LossForm
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.losses.statistics import TokenTerms, Upstream
from megatron_fused_ce.losses.terms import Rows
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import DONE, BothWorks, VocabParallel, Work
from megatron_fused_ce.ranks.phases import phase

#: fp16 gradients are saved times a power of two that brings their bound (:meth:`Divergence._row_scale`) to
#: ``2**FP16_BITS`` at most, so that small probabilities do not underflow.
FP16_BITS = 8
#: What ``grad_in_forward`` takes a row of reverse_kl's gradient to reach, whose KL it does not know yet.
BOUND_AHEAD = 64.0
#: So many nats below the teacher's largest logit one of -inf is taken to be: exp(-88) is next to nothing.
FAR = 88.0


class Teacher(NamedTuple):
    """The teacher in the order of the student's tokens."""

    #: [n, H_t]: of this rank's part, gathered chunk by chunk; or [parts, n, H_t]: of all tokens. Of a chunk
    #: [C / R, H_t] or [C, H_t]
    hidden: Tensor
    weight: Tensor  # [V', H_t]
    label_weights: Tensor | None  # [parts, n] fp32, of a chunk [C]

    def kept(self, kept: Kept, part: int) -> Teacher:
        hidden, weights = self.hidden, self.label_weights
        if hidden.dim() == 2:
            hidden = kept.take(hidden, part)
        else:
            hidden = torch.stack([kept.take(of_part, at) for at, of_part in enumerate(hidden)])
        return self._replace(
            hidden=hidden, label_weights=None if weights is None else kept.of_tokens(weights)
        )

    def of_chunk(self, chunk: Chunk, split: Callable[[Tensor], Tensor]) -> Teacher:
        hidden = self.hidden[..., chunk.start : chunk.stop, :].reshape(-1, self.hidden.shape[-1])
        weights = None if self.label_weights is None else split(self.label_weights)
        return self._replace(hidden=hidden, label_weights=weights)

    def saved(self, remakes_logits: bool) -> Teacher | None:
        """None where the gradients of all logits are saved.

        Else with a copy of its hidden states, as of labels: they may lie in a buffer that another rank fills
        again before the backward, of which autograd does not know.
        """
        return self._replace(hidden=self.hidden.clone()) if remakes_logits else None

    def masked(self, upstream: Upstream) -> Upstream:
        return upstream


def _teacher(targets: ChunkTargets) -> Teacher:
    assert isinstance(targets.others, Teacher)
    return targets.others


def _start_teacher(targets: ChunkTargets) -> tuple[Tensor, Work]:
    """The teacher's hidden states ``[C, H_t]``, to be waited for.

    Collectives: starts one all-gather of them, where the ranks hold their own parts.
    """
    part, comm = _teacher(targets).hidden, targets.comm
    here = comm is None or len(part) == len(targets.labels)
    return (part, DONE) if here else comm.gathered(part)  # type: ignore[union-attr]


class _Terms(NamedTuple):
    """What the gradient needs of a token, fp32 ``[C]`` each."""

    top: Tensor  # records.Side of the student, and the next
    log_sum: Tensor
    teacher_top: Tensor  # of the teacher, and the next three
    teacher_log_sum: Tensor
    log_ratio: Tensor
    beside: Tensor
    mean: Tensor  # what reverse_kl and jsd subtract, over the whole vocabulary
    row_scale: Tensor  # of the saved gradient: the inverse of fp16's factor
    label: Tensor | None = None  # [4, C]: TokenTerms of the student at temperature 1

    def stacked(self) -> Tensor:
        rows = torch.stack(self[:8])
        return rows if self.label is None else torch.cat((rows, self.label))

    @staticmethod
    def of(stacked: Tensor) -> _Terms:
        return _Terms(*stacked[:8].unbind(0))._replace(label=stacked[8:] if len(stacked) > 8 else None)


@dataclass(frozen=True)
class Divergence:
    """:class:`.LogitsBackend` of a student beside its teacher."""

    base: LogitsBackend  # of both sides
    statistics: ModuleType  # kernels.row_kernels or rows_torch
    rows: ModuleType  # kernels.divergence or divergence_torch
    kind: str
    beta: float
    temperature: float
    #: divided by the temperature
    teacher_scale: float
    teacher_softcap: float | None
    with_labels: bool
    #: not in fp16, whose range is too small for rows without their factors
    saves_e: bool

    needs_logits_buffer = True
    settles_at_once = True
    logits_dtype: torch.dtype | None = None  # of the gradient: the hidden states'

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def saves_logits(self) -> bool:
        return self.base.saves_logits

    @property
    def token_ops(self) -> ModuleType:
        return self.base.token_ops

    def start_sample(
        self, weight: Tensor, others: OrderedTargets | None, comm: VocabParallel, form: LossForm
    ) -> tuple[tuple[Any, Any], Work]:
        """Those of both sides."""
        assert isinstance(others, Teacher)
        sample, sent = self.base.start_sample(weight, None, comm, form)
        of_teacher, sent_beside = self.base.start_sample(others.weight, None, comm, form)
        return (sample, of_teacher), BothWorks(sent, sent_beside)

    def logits_gemm(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: ChunkTargets,
        sample: Any,
        out: Tensor | None,
        with_argmax: bool,
    ) -> Scores:
        """Logits of both sides, and their statistics side by side: ``[4, 2 * C]``, or ``4 * C`` columns with
        labels at another temperature, whose cross-entropies are at temperature 1.

        Collectives: those of :func:`_start_teacher`, under the student's GEMM.
        """
        assert out is not None
        (teacher_hidden, gathered), teacher = _start_teacher(targets), _teacher(targets)
        targets = targets._replace(others=None, comm=None, form=replace(targets.form, with_rest=True))
        of_teacher, (of_student, sample_of_teacher) = self._of_teacher(targets), sample
        sides = [self._side(hidden, weight, targets, of_student, self._in_precision(out))]
        gathered.wait()
        teacher_out = self._teacher_buffer(teacher_hidden, teacher.weight)
        sides.append(self._side(teacher_hidden, teacher.weight, of_teacher, sample_of_teacher, teacher_out))
        every = [stats for _, stats in sides]
        if self._labels_apart:
            with phase("statistics"):
                every += [
                    self._at_temperature_1(logits, of_side)
                    for (logits, _), of_side in zip(sides, (targets, of_teacher), strict=True)
                ]
        with phase("statistics"):
            of_tops = self._tops(sides, targets)
            extra = ExtraStatistics(*(None if of[0] is None else _filled(of, every) for of in of_tops))
        shard = torch.cat([stats.shard for stats in every], dim=1)
        return Scores(RowStatistics(shard, extra=extra), beside=(sides[0][0], sides[1][0]))

    def _tops(
        self, sides: list[tuple[Tensor, RowStatistics]], targets: ChunkTargets
    ) -> zip[tuple[Tensor | None, ...]]:
        """:class:`.ExtraStatistics` of the student and of the teacher, fp32 ``[C]`` each."""
        found = []
        columns = sides[0][1].argmax
        scales = (targets.logit_scale, targets.form.softcap), (self.teacher_scale, self.teacher_softcap)
        for (logits, stats), (scale, softcap) in zip(sides, scales, strict=True):
            assert columns is not None and stats.argmax is not None and stats.extra.rest is not None
            top = _at(logits, stats.argmax)
            # row_max has the rounding of a product.
            lost = top.double() * scale - stats.row_max
            peak = torch.ones_like(lost)
            if softcap is None:
                peak = torch.where(lost.isfinite(), lost.exp(), 1.0)
            rest = stats.extra.rest * peak
            high = rest.float()
            found.append(
                stats.extra._replace(
                    rest=high,
                    rest_low=(rest - high).float(),
                    peak=peak.float(),
                    top=top,
                    beside=_at(sides[1][0], columns),
                )
            )
        return zip(*found, strict=True)

    def _side(
        self, hidden: Tensor, weight: Tensor, targets: ChunkTargets, sample: Any, out: Tensor
    ) -> tuple[Tensor, RowStatistics]:
        stats = self.base.logits_gemm(hidden, weight, targets, sample, out, False).stats
        if self.with_labels and self.saves_logits:
            _put_label_logits(out, targets, stats)
        return out, stats

    def _logits_again(self, hidden: Tensor, weight: Tensor, targets: ChunkTargets, out: Tensor) -> None:
        """The forward's to the bit, by its GEMM: one unit in the last place of the bf16 logit of a class that
        a side is sure of would be an error of 1/8 in a gradient of 0."""
        if not self.saves_logits:
            return write_logits(hidden, weight, out)
        from megatron_fused_ce.logits.scaled_exp import ScaledExp

        assert isinstance(self.base, ScaledExp)
        return self.base.write_logits(hidden, weight, targets, out)

    def _at_temperature_1(self, logits: Tensor, targets: ChunkTargets) -> RowStatistics:
        t, form = self.temperature, targets.form
        form = replace(
            form,
            with_weighted=False,
            with_rest=False,
            softcap=None if form.softcap is None else form.softcap * t,
        )
        return self.statistics.row_statistics(  # type: ignore[no-any-return]
            logits, targets.labels, targets.logit_scale * t, False, form
        )

    def _in_precision(self, out: Tensor) -> Tensor:
        """A buffer of the same size in the dtype of the logits."""
        dtype = self.base.logits_dtype
        return out if dtype in (None, out.dtype) else torch.empty_like(out, dtype=dtype)

    def _teacher_buffer(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """``[C, V']`` for its logits."""
        dtype = self.base.logits_dtype or hidden.dtype
        return hidden.new_empty(len(hidden), len(weight), dtype=dtype)

    def _of_teacher(self, targets: ChunkTargets) -> ChunkTargets:
        form = replace(targets.form, softcap=self.teacher_softcap)
        return ChunkTargets(targets.labels, self.teacher_scale, form)

    @property
    def _labels_apart(self) -> bool:
        return self.with_labels and self.temperature != 1

    def settle(
        self, scores: Scores, targets: ChunkTargets, merged: Merged, matrix: Tensor | None, needs_grad: bool
    ) -> tuple[Merged, dict[str, Tensor]]:
        """A chunk after its exchanges, with the gradient in ``matrix``: its terms (:meth:`_Terms.stacked`) in
        ``merged``, and its outputs, of the divergence this shard's part.

        Collectives: one SUM all-reduce ``[C]`` for reverse_kl and jsd, where a gradient is needed.
        """
        assert targets.comm is not None
        num_tokens = len(targets.labels)
        loss, terms = merged.loss.view(-1, num_tokens), merged.terms.view(4, -1, num_tokens)
        label = terms[:, 2 if self._labels_apart else 0] if self.with_labels else None
        of_token = self._terms(merged.extra, terms[0], targets, label)
        sums = None
        student, teacher = self._sides(scores.beside, targets, of_token)
        with phase("statistics"):
            if matrix is None or self.kind != "forward_kl":
                sums, mean = self.rows.divergence_sums(
                    student, teacher, self.kind, self.beta, targets.form.valid_columns
                ).unbind(0)
                if needs_grad and self.kind != "forward_kl":
                    mean = targets.comm.sum_over_shards(mean.contiguous())
                    of_token = of_token._replace(mean=mean)
            of_token = of_token._replace(row_scale=self._row_scale(student, teacher, of_token, targets))
        if matrix is not None:
            with phase("grad-logits"):
                made = self._gradient(student, teacher, of_token, targets, matrix, sums is None)
            sums = made if sums is None else sums
        assert sums is not None
        outputs = {"loss": sums, "divergence": sums}
        if self.with_labels:
            at = 2 if self._labels_apart else 0
            outputs |= {"log_prob": -loss[at], "teacher_log_prob": -loss[at + 1]}
        if merged.extra.weighted is not None:
            extra = NO_EXTRA._replace(weighted=merged.extra.weighted.view(-1, num_tokens)[0])
            outputs["entropy"] = OUTPUTS["entropy"].value(Rows(Merged(loss[0], terms[:, 0], None, extra)))
        return merged._replace(terms=of_token.stacked()), outputs

    def whole(
        self, outputs: dict[str, Tensor], others: OrderedTargets | None, comm: VocabParallel
    ) -> dict[str, Tensor]:
        """Collectives: one SUM all-reduce of all tokens' divergences."""
        assert isinstance(others, Teacher)
        # Of no tokens there is what was asked for alone.
        divergence = comm.sum_over_shards(outputs.get("divergence", outputs["loss"]).contiguous())
        loss = divergence.clone()
        if others.label_weights is not None and "log_prob" in outputs:
            loss = loss - others.label_weights.view(loss.shape) * outputs["log_prob"].view(loss.shape)
        return {**outputs, "loss": loss, "divergence": divergence}

    def _terms(
        self,
        extra: ExtraStatistics,  # merged, of both sides
        row_max: Tensor,  # [k, C]: of both sides first
        targets: ChunkTargets,
        label: Tensor | None,
    ) -> _Terms:
        assert extra.rest is not None and extra.peak is not None
        assert extra.top is not None and extra.beside is not None
        num_tokens = len(targets.labels)
        rest, owners, top, beside = (
            of.view(-1, num_tokens)[:2] for of in (extra.rest, extra.peak, extra.top, extra.beside)
        )
        # The largest may lie on several shards: any of their columns serves, where its p is 1/2 at most.
        top, beside = top / owners, beside[0] / owners[0]
        scales = (targets.logit_scale, targets.form.softcap), (self.teacher_scale, self.teacher_softcap)
        log_sums = []
        for at, (scale, softcap) in enumerate(scales):
            peak: Tensor | float = 1.0
            if softcap is None:
                peak = (top[at].double() * scale - row_max[at]).exp()
            log_sum = torch.log1p(rest[at] / peak + (owners[at] - 1))
            log_sums.append(log_sum + 0.0 * row_max[at])  # NaN for an infinite logit
        # A class that the teacher excludes: another constant serves as well.
        if self.teacher_softcap is None:
            beside = torch.where(beside.isinf(), top[1] - FAR / self.teacher_scale, beside)
        of_student, of_teacher = log_sums
        ratio, unknown = (of_student - of_teacher).float(), torch.zeros_like(of_student, dtype=torch.float32)
        of_student, of_teacher = of_student.float(), of_teacher.float()
        return _Terms(
            top[0].float(),
            of_student,
            top[1].float(),
            of_teacher,
            ratio,
            beside.float(),
            unknown,
            unknown,
            label,
        )

    def _sides(self, logits: tuple[Tensor, ...], targets: ChunkTargets, terms: _Terms) -> tuple[Side, Side]:
        beside = None if self.kind == "forward_kl" else terms.beside
        cap, teacher_cap = targets.form.softcap, self.teacher_softcap
        return (
            Side(logits[0], terms.top, terms.log_sum, targets.logit_scale, cap),
            Side(
                logits[1],
                terms.teacher_top,
                terms.teacher_log_sum,
                self.teacher_scale,
                teacher_cap,
                terms.log_ratio,
                beside,
            ),
        )

    def _gradient(
        self,
        student: Side,
        teacher: Side,
        terms: _Terms,
        targets: ChunkTargets,
        out: Tensor,
        with_sums: bool,
    ) -> Tensor | None:
        label, weights = None, _teacher(targets).label_weights
        if weights is not None:
            assert terms.label is not None
            at_1 = TokenTerms.of(terms.label)
            label = LabelTerm(
                targets.labels,
                weights * self.temperature,
                at_1.inv_sum.contiguous(),
                at_1.one_minus_p_label.contiguous(),
                self.temperature,
            )
        return self.rows.divergence_gradients(  # type: ignore[no-any-return]
            student,
            teacher,
            self.kind,
            self.beta,
            targets.form.valid_columns,
            terms.mean,
            out,
            label,
            None if self.saves_e else terms.row_scale.reciprocal(),
            with_sums,
        )

    def _row_scale(self, student: Side, teacher: Side, terms: _Terms, targets: ChunkTargets) -> Tensor:
        """``[C]``: 1; for fp16 the inverse of the powers of two times which gradients are saved.

        Each entry of a row is at most 1, or ``KL + 1 / e`` for reverse_kl (docs/math.md), and of the label's
        term ``label_weights * temperature * (1 - p_y)``; the sum of all is at most twice that.
        """
        if self.saves_e:
            return torch.ones_like(terms.top)
        bound, weights = torch.ones_like(terms.top), _teacher(targets).label_weights
        if self.kind == "reverse_kl":
            at_top = _natural(terms.beside, teacher) - _natural(terms.teacher_top, teacher)
            kl = terms.mean - terms.log_ratio - at_top
            bound = bound + torch.where(kl > 0, kl, 0.0)
        if weights is not None and terms.label is not None:
            of_label = TokenTerms.of(terms.label).one_minus_p_label
            bound = bound + weights.abs() * self.temperature * of_label
        _, exponent = torch.frexp(bound)
        return torch.ldexp(torch.ones_like(bound), exponent.clamp(max=64) - FP16_BITS)

    def bound_of(self, terms: Tensor | None, row_scale: Tensor | None, targets: ChunkTargets) -> Tensor:
        if row_scale is None:
            assert terms is not None
            row_scale = _Terms.of(terms).row_scale
        return row_scale * 2.0**FP16_BITS

    def bound_ahead(self, others: OrderedTargets | None) -> Tensor | float:
        assert isinstance(others, Teacher)
        bound = BOUND_AHEAD if self.kind == "reverse_kl" else 1.0
        weights = others.label_weights
        return bound if weights is None else bound + weights.abs() * self.temperature

    def finalize(self, matrix: Tensor, targets: ChunkTargets, scores: Scores, merged: Merged) -> Tensor:
        """The gradient is there (:meth:`settle`); 1, or the inverse of fp16's factors."""
        return _Terms.of(merged.terms).row_scale.contiguous()

    def grad_from_saved(
        self,
        matrix: Tensor,
        row_scale: Tensor | None,
        targets: ChunkTargets,
        terms: TokenTerms | None,
        upstream: Upstream,
        out: Tensor | None,
    ) -> LogitsGrad:
        assert row_scale is not None
        if self.saves_e:
            return LogitsGrad(matrix, row_scale, upstream.loss)
        assert out is not None
        self.scale_rows(matrix, row_scale, out, upstream.loss)
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
        """Collectives: those of :func:`_start_teacher`, under the student's GEMM."""
        assert terms.all_rows is not None
        teacher_hidden, gathered = _start_teacher(targets)
        student_out, teacher_weight = self._in_precision(logits), _teacher(targets).weight
        self._logits_again(hidden, weight, targets, student_out)
        gathered.wait()
        teacher_out = self._teacher_buffer(teacher_hidden, teacher_weight)
        self._logits_again(teacher_hidden, teacher_weight, self._of_teacher(targets), teacher_out)
        of_token = _Terms.of(terms.all_rows)
        both = student_out, teacher_out
        student, teacher = self._sides(both, targets, of_token)
        self._gradient(student, teacher, of_token, targets, out, False)
        return self.grad_from_saved(out, of_token.row_scale, targets, None, upstream, out)

    def scale_rows(self, x: Tensor, row_scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
        if x.is_cuda:
            from megatron_fused_ce.kernels import scaled_exp_rows

            scaled_exp_rows.scale_rows(x, row_scale, out, factor)
            return
        scale = row_scale if factor is None else row_scale * factor
        torch.mul(x.float(), scale.view(-1, 1) if scale.dim() else scale, out=out)


def _put_label_logits(logits: Tensor, targets: ChunkTargets, stats: RowStatistics) -> None:
    """Write the labels' logits into their columns, where the scaled-exp GEMM leaves -inf."""
    _, _, _, of_label = stats.shard
    columns = targets.labels.clamp(0, logits.shape[1] - 1).unsqueeze(-1)
    raw = torch.where(
        of_label == NOT_HERE, logits.gather(-1, columns).squeeze(-1), of_label / targets.logit_scale
    )
    logits.scatter_(-1, columns, raw.unsqueeze(-1).to(logits.dtype))


def _at(logits: Tensor, columns: Tensor) -> Tensor:
    """fp32 ``[C]``: one column of each row."""
    columns = columns.clamp(max=logits.shape[1] - 1)  # a teacher may have less padding
    return logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).float()


def _natural(logit: Tensor, side: Side) -> Tensor:
    s = logit * side.scale
    return s if side.softcap is None else side.softcap * torch.tanh(s / side.softcap)


def _filled(parts: tuple[Tensor | None, ...], every: list[RowStatistics]) -> Tensor:
    """fp32 ``[k * C]``, one after the other, and zeros for those that have none."""
    missing = [torch.zeros_like(every[0].row_max)] * (len(every) - len(parts))
    return torch.cat([part for part in (*parts, *missing) if part is not None])


def divergence_rows(device: torch.device) -> tuple[ModuleType, ModuleType]:
    """Row passes of a divergence and of statistics: as :func:`.gemm_then_rows` has the second."""
    statistics = gemm_then_rows(device).rows
    if statistics is rows_torch:
        return divergence_torch, statistics
    from megatron_fused_ce.kernels import divergence

    return divergence, statistics
