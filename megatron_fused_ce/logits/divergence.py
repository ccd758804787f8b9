"""Logits of a student and of its teacher: from their statistics to the divergence and its gradient.

Two GEMMs a chunk, each with the statistics of its rows by one of the other backends. All statistics of both
sides are merged over the ranks' shards in one exchange, side by side, as if the chunk had more tokens. Then::

    forward_kl      one row pass: the gradient, and with it the divergence            (read 2, write 1)
    reverse_kl,     a row pass for KL(p_s || m), merged over the ranks; then the pass
    jsd             above, whose gradient needs it                                    (read 2 more)

The gradient, for an upstream gradient of 1, takes the place of the student's logits, in the hidden states'
dtype, and its rows get their factors later, as those of ``E`` do. The teacher's logits live until then.

A divergence is summed in terms that are all 0 or more (:mod:`.kernels.divergence`), shard by shard, and added
up over the ranks once, for all tokens, after the last chunk. No statistic is subtracted from another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import NO_EXTRA, NOT_HERE, LabelTerm, Merged, RowStatistics, Side
from megatron_fused_ce.logits import (
    ChunkTargets,
    LogitsBackend,
    LogitsGrad,
    Scores,
    divergence_torch,
    rows_torch,
)
from megatron_fused_ce.logits.gemm_rows import gemm_then_rows, write_logits
from megatron_fused_ce.loss import PLAIN, LossForm, TokenOutputs, TokenTerms, Upstream
from megatron_fused_ce.parallel import VocabParallel
from megatron_fused_ce.phases import phase

#: fp16 gradients are saved so many times larger, as powers of two, so that small probabilities do not
#: underflow. Those of reverse_kl have no bound.
FP16_BITS = {"forward_kl": 8, "jsd": 8, "reverse_kl": 5}


class _Settled(NamedTuple):
    """A chunk after its exchanges."""

    merged: Merged  # its terms: those of _Terms
    outputs: TokenOutputs  # fp32 [C]; the divergence: this shard's part


class _Terms(NamedTuple):
    """What the gradient needs of a token, fp32 ``[C]`` each."""

    student: Tensor  # [4, C]: TokenTerms at the temperature
    teacher: Tensor  # [4, C]
    kl_student: Tensor  # [C]: KL(p_s || m) over the whole vocabulary
    label: Tensor | None  # [4, C]: TokenTerms of the student at temperature 1

    def stacked(self) -> Tensor:
        parts = self.student, self.teacher, self.kl_student.unsqueeze(0)
        return torch.cat(parts if self.label is None else (*parts, self.label))

    @staticmethod
    def of(stacked: Tensor) -> _Terms:
        label = stacked[9:13] if stacked.shape[0] > 9 else None
        return _Terms(stacked[:4], stacked[4:8], stacked[8], label)


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

    def sample_rows(self, weight: Tensor, num_ranks: int, form: LossForm = PLAIN) -> Tensor | None:
        return self.base.sample_rows(weight, num_ranks, form)

    def logits_gemm(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: ChunkTargets,
        sample: Tensor | None,
        out: Tensor | None,
        with_argmax: bool,
    ) -> Scores:
        """Logits of both sides, and their statistics side by side: ``[4, 2 * C]``, or ``4 * C`` columns with
        labels at another temperature, whose cross-entropies are at temperature 1.

        Collectives: those of :meth:`.TeacherChunk.start`, under the student's GEMM.
        """
        assert targets.teacher is not None and out is not None
        teacher_hidden, gathered = targets.teacher.start()
        of_teacher = self._of_teacher(targets)
        given = (hidden, weight, targets._replace(teacher=None), sample, self._in_precision(out))
        sides = [self._side(*given)]
        gathered.wait()
        teacher_weight = targets.teacher.weight
        teacher_out = self._teacher_buffer(teacher_hidden, teacher_weight)
        sides.append(
            self._side(teacher_hidden, teacher_weight, of_teacher, targets.teacher.sample, teacher_out)
        )
        every = [stats for _, stats in sides]
        if self._labels_apart:
            with phase("statistics"):
                every += [
                    self._at_temperature_1(logits, of_side)
                    for (logits, _), of_side in zip(sides, (targets, of_teacher), strict=True)
                ]
        weighted = [stats.extra.weighted for stats in every]
        extra = NO_EXTRA
        if weighted[0] is not None:
            at_1 = [torch.zeros_like(weighted[0]) if part is None else part for part in weighted]
            extra = NO_EXTRA._replace(weighted=torch.cat(at_1))
        shard = torch.cat([stats.shard for stats in every], dim=1)
        return Scores(RowStatistics(shard, extra=extra), sides=(sides[0][0], sides[1][0]))

    def _side(
        self, hidden: Tensor, weight: Tensor, targets: ChunkTargets, sample: Tensor | None, out: Tensor
    ) -> tuple[Tensor, RowStatistics]:
        stats = self.base.logits_gemm(hidden, weight, targets, sample, out, False).stats
        if self.with_labels and self.saves_logits:
            _put_label_logits(out, targets, stats)
        return out, stats

    def _at_temperature_1(self, logits: Tensor, targets: ChunkTargets) -> RowStatistics:
        t, form = self.temperature, targets.form
        form = replace(form, with_weighted=False, softcap=None if form.softcap is None else form.softcap * t)
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
        self,
        scores: Scores,
        targets: ChunkTargets,
        merged: Merged,
        matrix: Tensor | None,  # [C, V]: for the gradient, where it is made now
        comm: VocabParallel,
        needs_grad: bool,
    ) -> _Settled:
        """The divergence of a chunk, and its gradient.

        Collectives: one SUM all-reduce ``[C]`` for reverse_kl and jsd, where a gradient is needed.
        """
        assert scores.sides is not None and targets.teacher is not None
        num_tokens = len(targets.labels)
        loss, terms = merged.loss.view(-1, num_tokens), merged.terms.view(4, -1, num_tokens)
        kl_student, sums = torch.zeros_like(loss[0]), None
        student, teacher = self._sides(scores.sides, targets, terms[:, 0], terms[:, 1])
        valid_columns = targets.form.valid_columns
        with phase("statistics"):
            if matrix is None or self.kind != "forward_kl":
                sums, kl_student = self.rows.divergence_sums(
                    student, teacher, self.kind, self.beta, valid_columns
                ).unbind(0)
                if needs_grad and self.kind != "forward_kl":
                    kl_student = comm.sum_over_shards(kl_student.contiguous())
        label = terms[:, 2] if self._labels_apart else None
        of_token = _Terms(terms[:, 0], terms[:, 1], kl_student, label)
        if matrix is not None:
            with phase("grad-logits"):
                made = self._gradient(student, teacher, of_token, targets, matrix, sums is None)
            sums = made if sums is None else sums
        assert sums is not None
        entropy = log_prob = teacher_log_prob = None
        if self.with_labels:
            at = 2 if self._labels_apart else 0
            log_prob, teacher_log_prob = -loss[at], -loss[at + 1]
        if merged.extra.weighted is not None:
            extra = NO_EXTRA._replace(weighted=merged.extra.weighted.view(-1, num_tokens)[0])
            entropy = _ENTROPY.finish(Merged(loss[0], terms[:, 0], None, extra)).entropy
        outputs = TokenOutputs(
            sums,
            log_prob=log_prob,
            entropy=entropy,
            divergence=sums,
            teacher_log_prob=teacher_log_prob,
        )
        return _Settled(merged._replace(terms=of_token.stacked()), outputs)

    def whole(self, outputs: TokenOutputs, label_weights: Tensor | None, comm: VocabParallel) -> TokenOutputs:
        """The outputs of all tokens ``[parts, n]``. Collectives: one SUM all-reduce of them."""
        assert outputs.divergence is not None
        divergence = comm.sum_over_shards(outputs.divergence.contiguous())
        loss = divergence.clone()
        if label_weights is not None and outputs.log_prob is not None:
            loss = loss - label_weights.view(loss.shape) * outputs.log_prob.view(loss.shape)
        return outputs._replace(loss=loss, divergence=divergence)

    def _sides(
        self, logits: tuple[Tensor, Tensor], targets: ChunkTargets, student: Tensor, teacher: Tensor
    ) -> tuple[Side, Side]:
        return (
            Side(logits[0], student[0], -student[1].log(), targets.logit_scale, targets.form.softcap),
            Side(logits[1], teacher[0], -teacher[1].log(), self.teacher_scale, self.teacher_softcap),
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
        assert targets.teacher is not None
        label, weights = None, targets.teacher.label_weights
        if weights is not None:
            at_1 = TokenTerms.of(terms.student if terms.label is None else terms.label)
            label = LabelTerm(
                targets.labels,
                weights * self.temperature,
                at_1.row_max.contiguous(),
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
            terms.kl_student,
            out,
            label,
            self._fp16_factor(targets),
            with_sums,
        )

    def _fp16_factor(self, targets: ChunkTargets) -> Tensor | None:
        """``[C]``: powers of two times which fp16 gradients are saved; None for 1."""
        if self.saves_e:
            return None
        assert targets.teacher is not None
        weights, largest = targets.teacher.label_weights, _ones(targets)
        if weights is not None:
            largest = largest + weights.abs() * self.temperature
        _, exponent = torch.frexp(largest)
        return torch.ldexp(torch.ones_like(largest), FP16_BITS[self.kind] - exponent)

    def finalize(self, matrix: Tensor, targets: ChunkTargets, scores: Scores, merged: Merged) -> Tensor:
        """The gradient is there (:meth:`settle`); 1, or the inverse of fp16's factors."""
        return self._row_scale(targets)

    def _row_scale(self, targets: ChunkTargets) -> Tensor:
        factor = self._fp16_factor(targets)
        return _ones(targets) if factor is None else factor.reciprocal()

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
        """Collectives: those of :meth:`.TeacherChunk.start`, under the student's GEMM."""
        assert targets.teacher is not None and terms.of_divergence is not None
        teacher_hidden, gathered = targets.teacher.start()
        student_out, teacher_weight = self._in_precision(logits), targets.teacher.weight
        write_logits(hidden, weight, student_out)
        gathered.wait()
        teacher_out = self._teacher_buffer(teacher_hidden, teacher_weight)
        write_logits(teacher_hidden, teacher_weight, teacher_out)
        of_token = _Terms.of(terms.of_divergence)
        both = student_out, teacher_out
        student, teacher = self._sides(both, targets, of_token.student, of_token.teacher)
        self._gradient(student, teacher, of_token, targets, out, False)
        return self.grad_from_saved(out, self._row_scale(targets), targets, None, upstream, out)

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


def _ones(targets: ChunkTargets) -> Tensor:
    """fp32 ``[C]``."""
    return torch.ones(len(targets.labels), dtype=torch.float32, device=targets.labels.device)


_ENTROPY = LossForm(with_weighted=True, outputs=("entropy",))


def divergence_rows(device: torch.device, requested: str) -> tuple[ModuleType, ModuleType]:
    """Row passes of a divergence and of statistics: as :func:`.gemm_then_rows` has the second."""
    statistics = gemm_then_rows(device, requested).rows
    if statistics is rows_torch:
        return divergence_torch, statistics
    from megatron_fused_ce.kernels import divergence

    return divergence, statistics
