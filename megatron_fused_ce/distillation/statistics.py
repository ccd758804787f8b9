"""Statistics of a student's logits and its teacher's, and what a divergence and its gradient need of them.

Sums of ``exp(s - max)`` are kept without their largest term and in fp64, so that a side's log-sum has its own
digits where it is near 0. No statistic is subtracted from another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import NOT_HERE, ExtraStatistics, RowStatistics
from megatron_fused_ce.logits import Targets

#: So many nats below the teacher's largest logit one of -inf is taken to be: exp(-88) is next to nothing.
FAR = 88.0
#: Scale and softcap of the logits of student and teacher.
Scales = tuple[tuple[float, float | None], ...]


class PairStats(NamedTuple):
    """What the gradient needs of a token, fp32 ``[C]`` each."""

    top: Tensor  # records.Side of the student, and the next
    log_sum: Tensor
    teacher_top: Tensor  # of the teacher, and the next three
    teacher_log_sum: Tensor
    log_ratio: Tensor
    beside: Tensor
    mean: Tensor  # what reverse_kl and jsd subtract, over the whole vocabulary
    row_scale: Tensor  # of the saved gradient: the inverse of fp16's factor
    label: Tensor | None = None  # [4, C]: TokenStats of the student at temperature 1

    def stacked(self) -> Tensor:
        rows = torch.stack(self[:8])
        return rows if self.label is None else torch.cat((rows, self.label))

    @staticmethod
    def of(stacked: Tensor) -> PairStats:
        return PairStats(*stacked[:8].unbind(0))._replace(label=stacked[8:] if len(stacked) > 8 else None)


def tops(
    sides: list[tuple[Tensor, RowStatistics]],  # logits and statistics of student and teacher
    scales: Scales,
    num_beside: int,
) -> ExtraStatistics:
    """Of the student, of the teacher, and zeros for ``num_beside`` more; fp32 ``[k * C]``, side by side."""
    found = []
    columns = sides[0][1].argmax
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
    zeros = [torch.zeros_like(sides[0][1].row_max)] * num_beside if num_beside else []
    parts = zip(*found, strict=True)
    return ExtraStatistics(*(None if of[0] is None else torch.cat([*of, *zeros]) for of in parts))


def stats_of(
    extra: ExtraStatistics,  # merged, of both sides
    row_max: Tensor,  # [k, C]: of both sides first
    num_tokens: int,
    label: Tensor | None,
    scales: Scales,
) -> PairStats:
    assert extra.rest is not None and extra.peak is not None
    assert extra.top is not None and extra.beside is not None
    rest, owners, top, beside = (
        of.view(-1, num_tokens)[:2] for of in (extra.rest, extra.peak, extra.top, extra.beside)
    )
    # The largest may lie on several shards: any of their columns serves, where its p is 1/2 at most.
    top, beside = top / owners, beside[0] / owners[0]
    log_sums = []
    for at, (scale, softcap) in enumerate(scales):
        peak: Tensor | float = 1.0
        if softcap is None:
            peak = (top[at].double() * scale - row_max[at]).exp()
        log_sum = torch.log1p(rest[at] / peak + (owners[at] - 1))
        log_sums.append(log_sum + 0.0 * row_max[at])  # NaN for an infinite logit
    # A class that the teacher excludes: another constant serves as well.
    teacher_scale, teacher_softcap = scales[1]
    if teacher_softcap is None:
        beside = torch.where(beside.isinf(), top[1] - FAR / teacher_scale, beside)
    of_student, of_teacher = log_sums
    ratio, unknown = (of_student - of_teacher).float(), torch.zeros_like(of_student, dtype=torch.float32)
    of_student, of_teacher = of_student.float(), of_teacher.float()
    return PairStats(
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


def put_label_logits(logits: Tensor, targets: Targets, logit_scale: float, stats: RowStatistics) -> None:
    """Write the labels' logits into their columns, where the scaled-exp GEMM leaves -inf."""
    _, _, _, of_label = stats.shard
    columns = targets.labels.clamp(0, logits.shape[1] - 1).unsqueeze(-1)
    raw = torch.where(of_label == NOT_HERE, logits.gather(-1, columns).squeeze(-1), of_label / logit_scale)
    logits.scatter_(-1, columns, raw.unsqueeze(-1).to(logits.dtype))


def _at(logits: Tensor, columns: Tensor) -> Tensor:
    """fp32 ``[C]``: one column of each row."""
    columns = columns.clamp(max=logits.shape[1] - 1)  # a teacher may have less padding
    return logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).float()
