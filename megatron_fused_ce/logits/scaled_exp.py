"""A GEMM that exponentiates in its epilogue, on Hopper and newer."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatron_fused_ce.kernels import row_kernels, scaled_exp_rows, token_kernels
from megatron_fused_ce.kernels.records import (
    HEADROOM,
    LOG2_E,
    NOT_HERE,
    Merged,
    RowStatistics,
    TileStatistics,
)
from megatron_fused_ce.kernels.sizes import SAMPLED_ROWS
from megatron_fused_ce.logits import LogitsBackend, LogitsGrad, OrderedTargets, SavedChunk, Scores, Targets
from megatron_fused_ce.logits.gemm_rows import row_gradients
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.ranks.collectives import Work
from megatron_fused_ce.ranks.phases import phase


@dataclass(frozen=True, kw_only=True)
class ScaledExp(LogitsBackend):
    """:class:`.LogitsBackend` by the scaled-exp GEMM.

    ``saves_logits``: where gradients are no multiple of ``E`` it writes logits, from whose rounded values its
    statistics are made, and row kernels make the gradients.
    """

    gemm: ModuleType  # kernels.scaled_exp or kernels.scaled_exp_hopper
    token_ops: ModuleType = token_kernels

    name = "scaled_exp"
    needs_logits_buffer = False

    def start_sample(self, weight: Tensor, others: OrderedTargets | None) -> tuple[Tensor, list[Work]]:
        """Valid rows ``[S, H]`` of the whole weight, as many of each rank."""
        assert self.comm is not None
        count = -(-SAMPLED_ROWS // self.comm.size)
        sample, sent = self.comm.gathered(scaled_exp_rows.sample_rows(weight, count, self.outputs))
        return sample, [sent]

    def logits_gemm(
        self, hidden: Tensor, weight: Tensor, targets: Targets, sample: Tensor, out: Tensor | None
    ) -> Scores:
        labels, inv_temperature, _ = targets
        logit_scale, form, num_columns = self.logit_scale, self.outputs, weight.shape[0]
        alone = self.comm is not None and self.comm.size == 1
        with phase("logits"):
            prologue = scaled_exp_rows.row_prologue(
                hidden, sample, labels, num_columns, logit_scale, form, inv_temperature
            )
            tiles = self.gemm.scaled_exp_gemm(
                hidden,
                weight,
                labels,
                prologue.row_shift2,
                prologue.table,
                logit_scale,
                out,
                form.with_argmax,
                form,
                self.saves_logits,
                inv_temperature,
            )
        with phase("statistics"):
            # Of a plain loss over one shard the same launch finalizes E.
            finalizes = alone and form.is_plain and not self.saves_logits
            stats, row_scale = scaled_exp_rows.combine_tiles(
                prologue, tiles, labels, num_columns, form, alone, out if finalizes else None, inv_temperature
            )
            if form.with_rest:
                assert out is not None
                stats = self._with_rest(stats, tiles, prologue.row_shift2, out, labels)
        return Scores(stats, tiles, row_scale)

    def write_logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        nowhere = torch.full(hidden.shape[:1], -1, dtype=torch.int64, device=hidden.device)
        no_shift = torch.zeros_like(nowhere, dtype=torch.float32)
        table = scaled_exp_rows.tile_table(nowhere, weight.shape[0])
        form, scale = self.outputs, self.logit_scale
        self.gemm.scaled_exp_gemm(hidden, weight, nowhere, no_shift, table, scale, out, False, form, True)

    def finalize(self, matrix: Tensor, targets: Targets, scores: Scores, merged: Merged) -> Tensor | None:
        if self.saves_logits:
            return None
        if scores.row_scale is not None:
            return scores.row_scale
        assert scores.tiles is not None
        with phase("statistics"):
            return scaled_exp_rows.finalize_rows(
                matrix,
                targets.labels,
                scores.tiles,
                scores.stats,
                merged.row_shift,
                self.outputs.own_coefficients(merged),
                self.outputs,
            )

    def grad_from_saved(
        self, saved: SavedChunk, targets: Targets, upstream: Upstream, out: Tensor | None
    ) -> LogitsGrad:
        if self.saves_logits:
            return row_gradients(row_kernels, self, saved, targets, upstream, out)
        assert saved.matrix is not None and saved.row_scale is not None
        return LogitsGrad(saved.matrix, saved.row_scale, upstream.loss)

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
        self.gemm.grad_logits_gemm(
            hidden,
            weight,
            targets.labels,
            scaled_exp_rows.tile_table(targets.labels, weight.shape[0]),
            self.outputs.grad_coefficients(stats, upstream).in_base_2(),
            self.logit_scale,
            out,
            self.outputs,
            targets.inv_temperature,
        )
        return LogitsGrad(out)

    def scale_rows(self, x: Tensor, row_scale: Tensor, out: Tensor, factor: Tensor | None = None) -> None:
        scaled_exp_rows.scale_rows(x, row_scale, out, factor)

    def _with_rest(
        self,
        stats: RowStatistics,
        tiles: TileStatistics,
        row_shift2: Tensor,  # [C] fp32, base 2
        logits: Tensor,  # [C, V], without a softcap
        labels: Tensor,
    ) -> RowStatistics:
        """With ``rest`` and the column of the largest logit: the one tile of a row that has it is read again.

        Bytes: 8 for each tile and ``2 * tile_columns`` for each row, 37 MB for C = 8192, V = 128256 beside
        the 2.1 GB of the logits.
        """
        best = tiles.tile_max.argmax(0, keepdim=True)  # [1, C]; tiles are without the label
        shift2 = torch.where(tiles.tile_max > HEADROOM, tiles.tile_max, 0.0).add_(row_shift2)
        moved = shift2.sub_(stats.row_max * LOG2_E).clamp_(max=126.0).exp2_().mul_(tiles.tile_sum)
        others = moved.scatter_(0, best, 0.0).sum(0)
        columns = best.t() * tiles.tile_columns + torch.arange(tiles.tile_columns, device=logits.device)
        valid = self.outputs.valid_columns
        label = labels.unsqueeze(-1)
        inside = (columns < (logits.shape[1] if valid is None else valid)) & (columns != label)
        z = logits.gather(-1, columns.clamp_(max=logits.shape[1] - 1)).float()
        z = z.mul_(self.logit_scale).masked_fill_(~inside, -torch.inf)
        largest, at = z.max(-1, keepdim=True)
        label_logit = stats.shard[3].unsqueeze(-1)
        here = label_logit != NOT_HERE
        of_label = here & (label_logit >= largest)
        argmax = torch.where(of_label, label, columns.gather(-1, at)).squeeze(-1)
        row_max = stats.row_max.unsqueeze(-1)
        e = z.sub_(row_max).exp_()
        beside = torch.where(of_label, e.gather(-1, at), torch.exp(label_logit - row_max))
        e.scatter_(-1, at, beside.masked_fill_(~here, 0.0))  # the label's in the place of the largest
        return stats._replace(argmax=argmax, extra=stats.extra._replace(rest=(others + e.sum(-1)).double()))
