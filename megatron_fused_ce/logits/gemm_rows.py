"""A plain GEMM, then row kernels over its logits: on any device, in any dtype."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatron_fused_ce.cli import versions
from megatron_fused_ce.logits import LogitsBackend, LogitsGrad, SavedChunk, Scores, Targets, rows_torch
from megatron_fused_ce.losses import statistics
from megatron_fused_ce.losses.statistics import Upstream
from megatron_fused_ce.ranks.phases import phase


def write_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out = hidden @ weight.T``, ``out`` in their dtype or in fp32."""
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:  # torch has that for GPUs alone
        torch.mm(hidden.to(out.dtype), weight.t().to(out.dtype), out=out)


@dataclass(frozen=True, kw_only=True)
class GemmThenRows(LogitsBackend):
    """:class:`.LogitsBackend` by a plain GEMM."""

    rows: ModuleType  # kernels.row_kernels or rows_torch

    name = "gemm_rows"
    write_logits = staticmethod(write_logits)

    def logits_gemm(
        self, hidden: Tensor, weight: Tensor, targets: Targets, sample: None, out: Tensor | None
    ) -> Scores:
        """Collectives: those of :meth:`label_of`, behind the GEMM."""
        assert out is not None
        with phase("logits"):
            write_logits(hidden, weight, out)
        with phase("statistics"):
            label, beside = self.label_of(out, targets)
            scale, form = self.logit_scale, self.outputs
            stats = self.rows.row_statistics(
                out, label, scale, form.with_argmax, form, targets.inv_temperature
            )
            return Scores(stats, beside=beside)

    def label_of(self, logits: Tensor, targets: Targets) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The label ``[C]`` that the statistics leave out of their sums, and what is merged beside them."""
        return targets.labels, ()

    def grad_from_saved(
        self, saved: SavedChunk, targets: Targets, upstream: Upstream, out: Tensor | None
    ) -> LogitsGrad:
        return row_gradients(self.rows, self, saved, targets, upstream, out)

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
        write_logits(hidden, weight, logits)
        return self.grad_from_saved(SavedChunk(None, logits, None, stats), targets, upstream, out)


def row_gradients(
    rows: ModuleType,  # kernels.row_kernels or rows_torch
    of: LogitsBackend,
    saved: SavedChunk,  # its logits
    targets: Targets,
    upstream: Upstream,
    out: Tensor | None,  # [C, V]; may be the logits
) -> LogitsGrad:
    """Gradients of the logits by the row kernels."""
    assert out is not None and saved.stats is not None
    coefficients = of.outputs.grad_coefficients(saved.stats, upstream)
    rows.row_gradients(
        saved.matrix, targets.labels, coefficients, of.logit_scale, out, of.outputs, targets.inv_temperature
    )
    return LogitsGrad(out)


def by_triton(device: torch.device) -> bool:
    """Whether Triton's kernels make the row passes there, not plain PyTorch."""
    return device.type == "cuda"


def gemm_then_rows(device: torch.device, logits_dtype: torch.dtype | None = None) -> GemmThenRows:
    """The row pass of :func:`by_triton`.

    Raises:
        ImportError: there is no triton, or an old one; a torch whose GEMM writes no ``logits_dtype``.
    """
    if (
        logits_dtype is not None
        and device.type == "cuda"
        and "dtype_out" not in torch.ops.aten.mm.overloads()
    ):
        raise ImportError(
            f"logit_precision='fp32' without the scaled-exp GEMM needs torch 2.8 or newer, whose GEMM writes "
            f"fp32, and found {torch.__version__}: upgrade torch, or use 'activations'"
        )
    if not by_triton(device):
        return GemmThenRows(rows=rows_torch, token_ops=statistics, logits_dtype=logits_dtype)
    from megatron_fused_ce.kernels import gemm_variants

    versions.require("triton", gemm_variants.triton_version())
    from megatron_fused_ce.kernels import row_kernels, token_kernels

    return GemmThenRows(rows=row_kernels, token_ops=token_kernels, logits_dtype=logits_dtype)
