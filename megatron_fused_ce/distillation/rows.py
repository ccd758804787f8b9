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
from megatron_fused_ce.distillation.statistics import PairStats, Scales, put_label_logits, stats_of, tops
from megatron_fused_ce.kernels.records import (
    NO_EXTRA,
    LabelTerm,
    Merged,
    RowStatistics,
    Side,
)
from megatron_fused_ce.logits import (
    LogitsBackend,
    LogitsGrad,
    OrderedTargets,
    SavedChunk,
    Scores,
    Targets,
    rows_torch,
)
from megatron_fused_ce.logits.gemm_rows import gemm_then_rows
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.losses.statistics import TokenStats, Upstream
from megatron_fused_ce.losses.terms import Rows
from megatron_fused_ce.planner.chunks import Chunk
from megatron_fused_ce.ranks.collectives import DONE, Work
from megatron_fused_ce.ranks.phases import phase

#: fp16 gradients are saved times a power of two that brings their bound (:meth:`Divergence._row_scale`) to
#: ``2**FP16_BITS`` at most, so that small probabilities do not underflow.
FP16_BITS = 8
#: What ``grad_in_forward`` takes a row of reverse_kl's gradient to reach, whose KL it does not know yet.
BOUND_AHEAD = 64.0


class Teacher(NamedTuple):
    """The teacher in the order of the student's tokens."""

    #: [n, H_t]: of this rank's part, gathered chunk by chunk; or [parts, n, H_t]: of all tokens. Of a chunk
    #: [C / R, H_t] or [C, H_t]
    hidden: Tensor
    weight: Tensor  # [V', H_t]
    label_weights: Tensor | None  # [parts, n] fp32, of a chunk [C]

    def kept(self, kept: Any, part: int) -> Teacher:
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

    def saved(self, remakes: bool) -> Teacher | None:
        """None where the gradients of all logits are saved.

        Else with a copy of its hidden states, as of labels: they may lie in a buffer that another rank fills
        again before the backward, of which autograd does not know.
        """
        return self._replace(hidden=self.hidden.clone()) if remakes else None

    def masked(self, upstream: Upstream) -> Upstream:
        return upstream


def _teacher(targets: Targets) -> Teacher:
    assert isinstance(targets.others, Teacher)
    return targets.others


@dataclass(frozen=True, kw_only=True)
class Divergence(LogitsBackend):
    """:class:`.LogitsBackend` of a student beside its teacher."""

    #: of each side; their statistics are merged here, side by side
    student: LogitsBackend
    teacher: LogitsBackend
    statistics: ModuleType  # kernels.row_kernels or rows_torch
    rows: ModuleType  # kernels.divergence or rows_torch of this folder
    kind: str
    beta: float
    temperature: float
    with_labels: bool

    settles_at_once = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.student.name

    def start_sample(
        self, weight: Tensor, others: OrderedTargets | None
    ) -> tuple[tuple[Any, Any], list[Work]]:
        """Those of both sides."""
        assert isinstance(others, Teacher)
        of_student, of_teacher = (replace(side, comm=self.comm) for side in (self.student, self.teacher))
        sample, sent = of_student.start_sample(weight, None)
        of_its, sent_beside = of_teacher.start_sample(others.weight, None)
        return (sample, of_its), sent + sent_beside

    def _start_teacher(self, targets: Targets) -> tuple[Tensor, Work]:
        """The teacher's hidden states ``[C, H_t]``, to be waited for.

        Collectives: starts one all-gather of them, where the ranks hold their own parts.
        """
        part = _teacher(targets).hidden
        assert self.comm is not None
        return (part, DONE) if len(part) == len(targets.labels) else self.comm.gathered(part)

    def logits_gemm(
        self, hidden: Tensor, weight: Tensor, targets: Targets, sample: Any, out: Tensor | None
    ) -> Scores:
        """Logits of both sides, and their statistics side by side: ``[4, 2 * C]``, or ``4 * C`` columns with
        labels at another temperature, whose cross-entropies are at temperature 1.

        Collectives: those of :meth:`_start_teacher`, under the student's GEMM.
        """
        assert out is not None
        (teacher_hidden, gathered), teacher = self._start_teacher(targets), _teacher(targets)
        of_labels = Targets(targets.labels)
        sides = [self._side(self.student, hidden, weight, of_labels, sample[0], self._in_precision(out))]
        gathered.wait()
        its = teacher_hidden, teacher.weight
        sides.append(self._side(self.teacher, *its, of_labels, sample[1], self._teacher_buffer(*its)))
        every = [stats for _, stats in sides]
        if self._labels_apart:
            with phase("statistics"):
                every += [
                    self._at_temperature_1(logits, side, of_labels)
                    for (logits, _), side in zip(sides, (self.student, self.teacher), strict=True)
                ]
        with phase("statistics"):
            extra = tops(sides, self._scales, len(every) - len(sides))
        shard = torch.cat([stats.shard for stats in every], dim=1)
        return Scores(RowStatistics(shard, extra=extra), beside=(sides[0][0], sides[1][0]))

    @property
    def _scales(self) -> Scales:
        """Scale and softcap of each side's logits."""
        return tuple((side.logit_scale, side.outputs.softcap) for side in (self.student, self.teacher))

    def _side(
        self, side: LogitsBackend, hidden: Tensor, weight: Tensor, targets: Targets, sample: Any, out: Tensor
    ) -> tuple[Tensor, RowStatistics]:
        stats = side.logits_gemm(hidden, weight, targets, sample, out).stats
        if self.with_labels and self.saves_logits:
            put_label_logits(out, targets, side.logit_scale, stats)
        return out, stats

    def _at_temperature_1(self, logits: Tensor, side: LogitsBackend, targets: Targets) -> RowStatistics:
        t, cap = self.temperature, side.outputs.softcap
        cap = None if cap is None else cap * t
        form = replace(side.outputs, with_weighted=False, with_rest=False, softcap=cap)
        return self.statistics.row_statistics(  # type: ignore[no-any-return]
            logits, targets.labels, side.logit_scale * t, False, form
        )

    def _in_precision(self, out: Tensor) -> Tensor:
        """A buffer of the same size in the dtype of the logits."""
        dtype = self.student.logits_dtype
        return out if dtype in (None, out.dtype) else torch.empty_like(out, dtype=dtype)

    def _teacher_buffer(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden.new_empty((len(hidden), len(weight)), dtype=self.teacher.logits_dtype)

    @property
    def _labels_apart(self) -> bool:
        return self.with_labels and self.temperature != 1

    def settle(
        self, scores: Scores, targets: Targets, merged: Merged, matrix: Tensor | None, needs_grad: bool
    ) -> tuple[Merged, dict[str, Tensor]]:
        """A chunk after its exchanges, with the gradient in ``matrix``: :meth:`.PairStats.stacked` in
        ``merged``, and its outputs, of the divergence this shard's part.

        Collectives: one SUM all-reduce ``[C]`` for reverse_kl and jsd, where a gradient is needed.
        """
        assert self.comm is not None
        num_tokens = len(targets.labels)
        loss, stats = merged.loss.view(-1, num_tokens), merged.stats.view(4, -1, num_tokens)
        label = stats[:, 2 if self._labels_apart else 0] if self.with_labels else None
        of_token = stats_of(merged.extra, stats[0], num_tokens, label, self._scales)
        sums = None
        student, teacher = self._sides(scores.beside, of_token)
        with phase("statistics"):
            if matrix is None or self.kind != "forward_kl":
                sums, mean = self.rows.divergence_sums(
                    student, teacher, self.kind, self.beta, self.outputs.valid_columns
                ).unbind(0)
                if needs_grad and self.kind != "forward_kl":
                    mean = self.comm.over_shards_(mean.contiguous())
                    of_token = of_token._replace(mean=mean)
            of_token = of_token._replace(row_scale=self._row_scale(teacher, of_token, targets))
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
            outputs["entropy"] = OUTPUTS["entropy"].value(Rows(Merged(loss[0], stats[:, 0], None, extra)))
        return merged._replace(stats=of_token.stacked()), outputs

    def whole(self, made: dict[str, Tensor], others: OrderedTargets | None) -> dict[str, Tensor]:
        """Collectives: one SUM all-reduce of all tokens' divergences."""
        assert isinstance(others, Teacher) and self.comm is not None
        # Of no tokens there is what was asked for alone.
        divergence = self.comm.over_shards_(made.get("divergence", made["loss"]).contiguous())
        loss = divergence.clone()
        if others.label_weights is not None and "log_prob" in made:
            loss = loss - others.label_weights.reshape(loss.shape) * made["log_prob"].reshape(loss.shape)
        return {**made, "loss": loss, "divergence": divergence}

    def _sides(self, logits: tuple[Tensor, ...], stats: PairStats) -> tuple[Side, Side]:
        beside = None if self.kind == "forward_kl" else stats.beside
        of_student, of_teacher = self._scales
        teacher = logits[1], stats.teacher_top, stats.teacher_log_sum, *of_teacher
        return (
            Side(logits[0], stats.top, stats.log_sum, *of_student),
            Side(*teacher, log_ratio=stats.log_ratio, beside=beside),
        )

    def _gradient(
        self,
        student: Side,
        teacher: Side,
        stats: PairStats,
        targets: Targets,
        out: Tensor,
        with_sums: bool,
    ) -> Tensor | None:
        label, weights = None, _teacher(targets).label_weights
        if weights is not None:
            assert stats.label is not None
            at_1 = TokenStats.of(stats.label)
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
            self.outputs.valid_columns,
            stats.mean,
            out,
            label,
            None if self.saves_e else stats.row_scale.reciprocal(),
            with_sums,
        )

    def _row_scale(self, teacher: Side, stats: PairStats, targets: Targets) -> Tensor:
        """``[C]``: 1; for fp16 the inverse of the powers of two times which gradients are saved.

        Each entry of a row is at most 1, or ``KL + 1 / e`` for reverse_kl (docs/math.md), and of the label's
        term ``label_weights * temperature * (1 - p_y)``; the sum of all is at most twice that.
        """
        if self.saves_e:
            return torch.ones_like(stats.top)
        bound, weights = torch.ones_like(stats.top), _teacher(targets).label_weights
        if self.kind == "reverse_kl":
            at_top = _natural(stats.beside, teacher) - _natural(stats.teacher_top, teacher)
            kl = stats.mean - stats.log_ratio - at_top
            bound = bound + torch.where(kl > 0, kl, 0.0)
        if weights is not None and stats.label is not None:
            of_label = TokenStats.of(stats.label).one_minus_p_label
            bound = bound + weights.abs() * self.temperature * of_label
        _, exponent = torch.frexp(bound)
        return torch.ldexp(torch.ones_like(bound), exponent.clamp(max=64) - FP16_BITS)

    def bound_of(self, saved: SavedChunk, targets: Targets, given: set[str]) -> Tensor:
        row_scale = saved.row_scale
        if row_scale is None:
            assert saved.stats is not None
            row_scale = PairStats.of(saved.stats).row_scale
        return row_scale * 2.0**FP16_BITS

    def bound_ahead(self, others: OrderedTargets | None) -> Tensor | float:
        assert isinstance(others, Teacher)
        bound = BOUND_AHEAD if self.kind == "reverse_kl" else 1.0
        weights = others.label_weights
        return bound if weights is None else bound + weights.abs() * self.temperature

    def finalize(self, matrix: Tensor, targets: Targets, scores: Scores, merged: Merged) -> Tensor:
        """The gradient is there (:meth:`settle`); 1, or the inverse of fp16's factors."""
        return PairStats.of(merged.stats).row_scale.contiguous()

    def grad_from_saved(
        self, saved: SavedChunk, targets: Targets, upstream: Upstream, out: Tensor | None
    ) -> LogitsGrad:
        assert saved.matrix is not None and saved.row_scale is not None
        if self.saves_e:
            return LogitsGrad(saved.matrix, saved.row_scale, upstream.loss)
        assert out is not None
        self.scale_rows(saved.matrix, saved.row_scale, out, upstream.loss)
        return LogitsGrad(out)

    def grad_recomputed(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        stats: Tensor,
        upstream: Upstream,
        logits: Tensor,
        out: Tensor,
    ) -> LogitsGrad:
        """Collectives: those of :meth:`_start_teacher`, under the student's GEMM."""
        teacher_hidden, gathered = self._start_teacher(targets)
        student_out, teacher_weight = self._in_precision(logits), _teacher(targets).weight
        # The forward's to the bit: one unit in the last place of the bf16 logit of a class that a side is
        # sure of would be an error of 1/8 in a gradient of 0.
        self.student.write_logits(hidden, weight, student_out)
        gathered.wait()
        teacher_out = self._teacher_buffer(teacher_hidden, teacher_weight)
        self.teacher.write_logits(teacher_hidden, teacher_weight, teacher_out)
        of_token = PairStats.of(stats)
        both = student_out, teacher_out
        student, teacher = self._sides(both, of_token)
        self._gradient(student, teacher, of_token, targets, out, False)
        made = SavedChunk(None, out, of_token.row_scale, None)
        return self.grad_from_saved(made, targets, upstream, out)

    def scale_rows(self, x: Tensor, row_scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
        if x.is_cuda:
            from megatron_fused_ce.kernels import scaled_exp_rows

            scaled_exp_rows.scale_rows(x, row_scale, out, factor)
            return
        scale = row_scale if factor is None else row_scale * factor
        torch.mul(x.float(), scale.view(-1, 1) if scale.dim() else scale, out=out)


def _natural(logit: Tensor, side: Side) -> Tensor:
    s = logit * side.scale
    return s if side.softcap is None else side.softcap * torch.tanh(s / side.softcap)


def divergence_rows(device: torch.device) -> tuple[ModuleType, ModuleType]:
    """Row passes of a divergence and of statistics: as :func:`.gemm_then_rows` has the second."""
    statistics = gemm_then_rows(device).rows
    if statistics is rows_torch:
        return divergence_torch, statistics
    from megatron_fused_ce.kernels import divergence

    return divergence, statistics
