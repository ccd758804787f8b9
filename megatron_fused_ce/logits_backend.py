"""The two ways to compute a chunk's logits and their gradients, and the choice between them.

``gemm_rows``
    A cuBLAS GEMM writes the logits; row kernels (Triton, or plain PyTorch) read them for their
    statistics and write their gradients. Any device, any dtype.
``scaled_exp``
    The GEMM's own epilogue exponentiates and writes ``E = exp(logit - the row's shift)``, without a pass over
    the logits (``recompute``: nothing in the forward, ``grad_logits`` in the backward). Where gradients are
    no multiple of ``E`` it writes logits, and row kernels make the gradients. bf16 on Hopper and newer.

Both give ``grad_logits`` as a matrix ``[C, V]`` in the hidden states' dtype and a scale of its rows
(:class:`LogitsGrad`), for any upstream gradient per token.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce import row_ops, row_ops_torch, versions
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.records import (
    Merged,
    RowStatistics,
    SoftTargets,
    TileStatistics,
)
from megatron_fused_ce.loss_form import PLAIN, LossForm
from megatron_fused_ce.row_ops import TokenTerms
from megatron_fused_ce.token_outputs import Upstream


class ChunkInputs(NamedTuple):
    """Inputs of one chunk's logits GEMM and of the passes after it."""

    hidden: Tensor | None  # [C, H]; None where saved logits serve and grad_weight is not wanted
    weight: Tensor  # [V, H]
    labels: Tensor  # [C] int64, columns of this shard; anything else: not here
    logit_scale: float
    #: [S, H]: some rows of the whole weight, for LogitsBackend.logits_gemm
    sample: Tensor | None = None
    form: LossForm = PLAIN
    soft: SoftTargets | None = None  # in the labels' place
    #: whether this shard is the whole vocabulary
    alone: bool = False
    inv_temperature: Tensor | None = None  # [C] fp32, times the logits after a softcap


class Scores(NamedTuple):
    """Statistics of a chunk's rows, and the inputs of :meth:`LogitsBackend.finalize`."""

    stats: RowStatistics
    tiles: TileStatistics | None = None
    #: [C] fp32: what :meth:`LogitsBackend.finalize` gives, where it cost nothing
    row_scale: Tensor | None = None


class LogitsGrad(NamedTuple):
    """``grad_logits = (row_scale * upstream)[:, None] * matrix``; fp32 ``[C]``, both None for 1.

    They are the same on every rank of the group, so that ``grad_hidden`` may be summed over the ranks before
    its rows are scaled.
    """

    matrix: Tensor
    row_scale: Tensor | None = None
    upstream: Tensor | None = None


class LogitsBackend(Protocol):
    """One way from hidden states to statistics of the logits, and to their gradients."""

    name: str
    #: Whether :meth:`logits_gemm` needs a buffer ``[C, V]`` even where nothing is saved.
    needs_logits_buffer: bool

    @property
    def saves_logits(self) -> bool:
        """Whether it is :class:`ScaledExp` and saves logits instead of ``E``."""

    @property
    def reads_saved_in_place(self) -> bool:
        """Whether the saved matrix is ``E``, so that :meth:`grad_from_saved` leaves it as it is and needs no
        buffer."""

    @property
    def logits_dtype(self) -> torch.dtype | None:
        """dtype of the matrix that :meth:`logits_gemm` writes; None for the hidden states'."""

    @property
    def token_ops(self) -> ModuleType:
        """``merge_shards``, ``shard_addends`` and ``token_loss``: row_ops, or its kernels."""

    def logits_gemm(self, chunk: ChunkInputs, out: Tensor | None, with_argmax: bool) -> Callable[[], Scores]:
        """Launches the GEMM into ``out`` ``[C, V]`` and returns a closure that computes row statistics.

        Two steps, so that they can be timed apart.
        """

    def sample_rows(self, weight: Tensor, num_ranks: int, form: LossForm = PLAIN) -> Tensor | None:
        """This rank's part ``[S / num_ranks, H]`` of the chunks' ``sample``: valid rows of ``weight``.

        None where :meth:`logits_gemm` needs no sample.
        """

    def finalize(self, matrix: Tensor, chunk: ChunkInputs, scores: Scores, merged: Merged) -> Tensor | None:
        """Make ``matrix`` ``[C, V]``, in place, what :meth:`grad_from_saved` reads; its row scale ``[C]``."""

    def grad_from_saved(
        self,
        matrix: Tensor,
        row_scale: Tensor | None,
        chunk: ChunkInputs,
        terms: TokenTerms | None,  # None where there is a row scale
        upstream: Upstream,  # [C] fp32 each: upstream gradients times logit_scale
        out: Tensor | None,  # [C, V]; may be ``matrix``
    ) -> LogitsGrad:
        """Gradients of the logits from a matrix that was finalized."""

    def grad_recomputed(
        self, chunk: ChunkInputs, terms: TokenTerms, upstream: Upstream, logits: Tensor, out: Tensor
    ) -> LogitsGrad:
        """Gradients of the logits from the GEMM again, into ``out`` ``[C, V]``; ``logits``, of
        :attr:`logits_dtype`, may be the same buffer.
        """


@dataclass(frozen=True)
class GemmThenRows:
    """A plain GEMM, then row kernels over its logits."""

    rows: ModuleType  # kernels.row_kernels or row_ops_torch
    logits_dtype: torch.dtype | None = None

    name = "gemm_rows"
    saves_logits = False
    needs_logits_buffer = True
    reads_saved_in_place = False

    @property
    def token_ops(self) -> ModuleType:
        return row_ops if self.rows is row_ops_torch else _token_kernels()

    def logits_gemm(self, chunk: ChunkInputs, out: Tensor | None, with_argmax: bool) -> Callable[[], Scores]:
        assert chunk.hidden is not None and out is not None
        write_product(chunk.hidden, chunk.weight, out)

        def statistics() -> Scores:
            args = (chunk.labels, chunk.logit_scale, with_argmax, chunk.form, chunk.soft)
            return Scores(self.rows.row_statistics(out, *args, chunk.inv_temperature))

        return statistics

    def sample_rows(self, weight: Tensor, num_ranks: int, form: LossForm = PLAIN) -> None:
        return None

    def finalize(self, matrix: Tensor, chunk: ChunkInputs, scores: Scores, merged: Merged) -> None:
        return None

    def grad_from_saved(
        self,
        matrix: Tensor,
        row_scale: Tensor | None,
        chunk: ChunkInputs,
        terms: TokenTerms | None,
        upstream: Upstream,
        out: Tensor | None,
    ) -> LogitsGrad:
        return _row_gradients(self.rows, matrix, chunk, terms, upstream, out)

    def grad_recomputed(
        self, chunk: ChunkInputs, terms: TokenTerms, upstream: Upstream, logits: Tensor, out: Tensor
    ) -> LogitsGrad:
        assert chunk.hidden is not None
        write_product(chunk.hidden, chunk.weight, logits)
        return self.grad_from_saved(logits, None, chunk, terms, upstream, out)


def _row_gradients(
    rows: ModuleType,
    logits: Tensor,  # [C, V]
    chunk: ChunkInputs,
    terms: TokenTerms | None,
    upstream: Upstream,
    out: Tensor | None,  # [C, V]; may be ``logits``
) -> LogitsGrad:
    assert out is not None and terms is not None
    gradient = chunk.form.grad_coefficients(terms, upstream)
    scale, form, soft = chunk.logit_scale, chunk.form, chunk.soft
    rows.row_gradients(logits, chunk.labels, gradient, scale, out, form, soft, chunk.inv_temperature)
    return LogitsGrad(out)


def write_product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out = hidden @ weight.T``, ``out`` in their dtype or in fp32."""
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:  # torch has that for GPUs alone
        torch.mm(hidden.to(out.dtype), weight.t().to(out.dtype), out=out)


@dataclass(frozen=True)
class ScaledExp:
    """A GEMM that exponentiates in its epilogue.

    ``saves_logits``: where gradients are no multiple of ``E`` it writes logits, from whose rounded values its
    statistics are made, and row kernels make the gradients.
    """

    product: ModuleType  # kernels.scaled_exp or kernels.scaled_exp_hopper
    saves_logits: bool = False

    name = "scaled_exp"
    logits_dtype: torch.dtype | None = None  # the hidden states'
    needs_logits_buffer = False

    @property
    def reads_saved_in_place(self) -> bool:
        return not self.saves_logits

    @property
    def token_ops(self) -> ModuleType:
        return _token_kernels()

    def sample_rows(self, weight: Tensor, num_ranks: int, form: LossForm = PLAIN) -> Tensor:
        kernels = _scaled_exp_rows()
        rows: Tensor = kernels.sample_rows(weight, -(-kernels.SAMPLED_ROWS // num_ranks), form)
        return rows

    def logits_gemm(self, chunk: ChunkInputs, out: Tensor | None, with_argmax: bool) -> Callable[[], Scores]:
        tokens, weight, labels, logit_scale, sample, form, _, alone, inv_temperature = chunk
        assert sample is not None
        scaled_exp_rows = _scaled_exp_rows()
        num_columns = weight.shape[0]
        prologue = scaled_exp_rows.row_prologue(
            tokens, sample, labels, num_columns, logit_scale, form, inv_temperature
        )
        tiles = self.product.scaled_exp_gemm(
            tokens,
            weight,
            labels,
            prologue.row_shift2,
            prologue.table,
            logit_scale,
            out,
            with_argmax,
            form,
            self.saves_logits,
            inv_temperature,
        )

        def statistics() -> Scores:
            at_once = out if alone and form.is_plain and not self.saves_logits else None
            stats, row_scale = scaled_exp_rows.combine_tiles(
                prologue, tiles, labels, num_columns, form, alone, at_once, inv_temperature
            )
            return Scores(stats, tiles, row_scale)

        return statistics

    def finalize(self, matrix: Tensor, chunk: ChunkInputs, scores: Scores, merged: Merged) -> Tensor | None:
        if self.saves_logits:
            return None
        if scores.row_scale is not None:
            return scores.row_scale
        row_scale: Tensor = _scaled_exp_rows().finalize_rows(
            matrix,
            chunk.labels,
            scores.tiles,
            scores.stats,
            merged.row_shift,
            chunk.form.own_coefficients(merged.terms),
            chunk.form,
        )
        return row_scale

    def grad_from_saved(
        self,
        matrix: Tensor,
        row_scale: Tensor | None,
        chunk: ChunkInputs,
        terms: TokenTerms | None,
        upstream: Upstream,
        out: Tensor | None,
    ) -> LogitsGrad:
        if self.saves_logits:
            return _row_gradients(_row_kernels(), matrix, chunk, terms, upstream, out)
        assert row_scale is not None
        return LogitsGrad(matrix, row_scale, upstream.loss)

    def grad_recomputed(
        self, chunk: ChunkInputs, terms: TokenTerms, upstream: Upstream, logits: Tensor, out: Tensor
    ) -> LogitsGrad:
        tokens, weight, labels, logit_scale, _, form, *_ = chunk
        self.product.grad_logits_gemm(
            tokens,
            weight,
            labels,
            _scaled_exp_rows().tile_table(labels, weight.shape[0]),
            form.grad_coefficients(terms, upstream).in_base_2(),
            logit_scale,
            out,
            form,
            chunk.inv_temperature,
        )
        return LogitsGrad(out)


def first_rows(buffer: Tensor, num_rows: int) -> Tensor:
    return buffer if buffer.shape[0] == num_rows else buffer[:num_rows]


@cache
def _token_kernels() -> ModuleType:
    from megatron_fused_ce.kernels import token_kernels

    return token_kernels


@cache
def _row_kernels() -> ModuleType:
    from megatron_fused_ce.kernels import row_kernels

    return row_kernels


@cache
def _variants() -> Any:
    from megatron_fused_ce.kernels import gemm_variants

    return gemm_variants


@cache
def _scaled_exp_rows() -> Any:
    from megatron_fused_ce.kernels import scaled_exp_rows

    return scaled_exp_rows


def gemm_then_rows(
    device: torch.device, requested: str = "auto", logits_dtype: torch.dtype | None = None
) -> GemmThenRows:
    """The row pass with the Triton kernels on CUDA and plain PyTorch elsewhere, or as requested.

    Raises:
        ValueError: Triton's row kernels were asked for where there is no CUDA device.
        ImportError: there is no triton, or an old one; a torch whose GEMM writes no ``logits_dtype``.
    """
    if (
        logits_dtype is not None
        and device.type == "cuda"
        and "dtype_out" not in torch.ops.aten.mm.overloads()
    ):
        raise ImportError(
            f"logit_precision='fp32' without the scaled-exp GEMM needs torch 2.8 or newer, whose GEMM writes "
            f"fp32, and found {torch.__version__}: upgrade torch, or use 'auto'"
        )
    if requested == "auto":
        requested = "triton" if device.type == "cuda" else "torch"
    if requested == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"row_backend='triton' runs on CUDA devices, and these tensors are on {device.type}; use 'auto' "
            "or 'torch'"
        )
    if requested == "triton":
        versions.require("triton", _variants().triton_version())
        return GemmThenRows(_row_kernels(), logits_dtype)
    return GemmThenRows(row_ops_torch, logits_dtype)


class RequestedOutputs(NamedTuple):
    """What of a call, beside its config, decides which backend can serve."""

    outputs: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    soft: bool = False


LOSS_ONLY = RequestedOutputs()

#: In place of :func:`why_not_here` where the ranks of a group have settled that it does not serve.
NOT_ON_EVERY_RANK = "it cannot serve on every rank of the tensor-parallel group"


def choose(
    config: FusedCEConfig,
    tokens: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    requested: RequestedOutputs = LOSS_ONLY,
    why_not_here: str | None = None,
) -> tuple[LogitsBackend, str]:
    """The backend for these tensors, and why not ``scaled_exp`` (empty where it is).

    Args:
        why_not_here: what the ranks of a group settled together (see :func:`why_not_here`, empty for
            nothing), in place of what this rank finds by itself: gradients of the two backends cannot be
            summed over ranks, and plans differ.

    Raises:
        ValueError: ``scaled_exp`` was asked for by name and cannot serve.
    """
    reason = why_not_scaled_exp(config, tokens, weight, requested, why_not_here)
    if not reason:
        saves_logits = bool(_saved_as_logits(config, requested))
        return ScaledExp(_variants().gemm_for(tokens.device), saves_logits), ""
    if config.logits_backend == "scaled_exp":
        raise ValueError(
            f"logits_backend='scaled_exp' cannot serve here: {reason}; use 'auto' or 'gemm_rows'"
        )
    in_fp32 = config.logit_precision == "fp32" and tokens.dtype != torch.float32
    return gemm_then_rows(tokens.device, config.row_backend, torch.float32 if in_fp32 else None), reason


def why_not_scaled_exp(
    config: FusedCEConfig,
    tokens: Tensor,
    weight: Tensor,
    requested: RequestedOutputs = LOSS_ONLY,
    here: str | None = None,
) -> str:
    """Why the scaled-exp GEMM cannot run, or an empty string: the one list of reasons.

    ``here``: as :func:`choose` takes it. All else is the same on every rank of a group.
    """
    here = why_not_here(config, tokens, weight) if here is None else here
    if here:
        return here
    interpreted = tokens.device.type == "cpu"
    if not interpreted and tokens.dtype != torch.bfloat16:
        # fp16 has too little exponent for E; fp32 products would be TF32 or slow.
        return f"it takes bfloat16, not {tokens.dtype}"
    beyond = _beyond_its_epilogue(config, requested)
    if beyond:
        return f"its epilogue cannot make {beyond}"
    if config.logit_scale <= 0:
        return f"its row maximum needs a logit_scale above 0, this is {config.logit_scale}"
    if tokens.numel() == 0:
        return "there are no tokens"
    return ""


def why_not_here(config: FusedCEConfig, tokens: Tensor, weight: Tensor) -> str:
    """Why this rank's device, shard or request rules out the scaled-exp GEMM; empty if nothing does.

    Other ranks of a group may find something else: :func:`.vocab_parallel.compare` settles it for all. The
    memory of ``tokens`` is no reason: :func:`must_copy` copies them. Asked for by name, Triton's interpreter
    may serve on a CPU, in any dtype but bf16.
    """
    if config.logits_backend == "gemm_rows":
        return "gemm_rows was asked for"
    interpreted = (
        config.logits_backend == "scaled_exp"
        and tokens.device.type == "cpu"
        and os.environ.get("TRITON_INTERPRET") == "1"
        and tokens.dtype != torch.bfloat16  # whose products it gets wrong (triton 3.9)
    )
    if not tokens.is_cuda and not interpreted:
        return f"it runs on CUDA devices, not on {tokens.device.type}"
    missing: str = _variants().triton_lacks()
    if missing:
        return missing
    if not interpreted:
        capability = torch.cuda.get_device_capability(tokens.device)
        if capability < (9, 0):
            return f"its TMA loads need Hopper or newer, this is sm_{capability[0]}{capability[1]}"
    rows, columns = weight.shape
    for name, letter, length in (("hidden", "H", columns), ("logits", "V", rows)):
        if length * weight.element_size() % 16:
            return f"TMA needs rows of {name} of a multiple of 16 bytes, {letter} is {length}"
    if not _loads(weight):
        return "TMA needs rows of weight that are contiguous and begin at multiples of 16 bytes"
    compiles = tokens.dtype == torch.bfloat16 or interpreted  # else nothing is served
    if compiles and _variants().gemm_for(tokens.device) is None:
        return str(_variants().compiled(tokens.device).failure)
    return ""


def must_copy(logits: LogitsBackend, hidden: Tensor, weight: Tensor) -> tuple[bool, bool]:
    """Whether ``hidden`` ``[..., H]`` and ``weight`` ``[V, H]`` lie where ``logits`` cannot load them.

    Any activation may; a weight only where it has moved since its group settled on ``scaled_exp``, or is
    another one of the same shape. Another backend on one rank alone would be wrong.
    """
    if not isinstance(logits, ScaledExp):
        return False, False
    if not _loads(weight):
        warnings.warn(
            f"a weight {tuple(weight.shape)} is copied in every call: its rows are not contiguous or do not "
            "begin at multiples of 16 bytes, as they did on all ranks when the tensor-parallel group first "
            "called a head of this shape; align it, or name logits_backend='gemm_rows' on all ranks",
            stacklevel=2,
        )
    return not _loads(hidden.detach().reshape(-1, hidden.shape[-1])), not _loads(weight)


def _loads(matrix: Tensor) -> bool:
    """Whether TMA can load it as it lies in memory."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def _beyond_its_epilogue(config: FusedCEConfig, requested: RequestedOutputs) -> str:
    """Names of options that the scaled-exp epilogue cannot do, comma-separated; or empty."""
    names = [
        (requested.soft, "the loss of a teacher's targets"),
        (config.label_smoothing > 0, "label_smoothing"),
    ]
    saved_as_logits = _saved_as_logits(config, requested)
    for option in saved_as_logits:
        names.append((config.logit_softcap is not None, f"{option} beside a softcap"))
        names.append((config.logit_precision == "fp32", f"{option} of fp32 logits"))
    return ", ".join(name for applies, name in names if applies)


def _saved_as_logits(config: FusedCEConfig, requested: RequestedOutputs) -> list[str]:
    """Names of options whose gradient is no multiple of ``E``, so that logits are saved instead.

    lse, entropy, and log_prob beside a z_loss have their own upstream gradients. None for
    ``recompute``, which saves neither.
    """
    if config.strategy == "recompute":
        return []
    with_grad = requested.differentiable
    names = (
        ("lse" in with_grad, "lse with a gradient"),
        ("log_prob" in with_grad and config.z_loss > 0, "log_prob with a gradient beside z_loss"),
        ("entropy" in with_grad, "entropy with a gradient"),
    )
    return [name for applies, name in names if applies]


def scale_rows(
    x: Tensor,
    row_scale: Tensor,
    out: Tensor,
    upstream: Tensor | None = None,
    also: Tensor | None = None,
) -> None:
    """:func:`.scaled_exp_rows.scale_rows`, for a :class:`LogitsGrad`."""
    _scaled_exp_rows().scale_rows(x, row_scale, out, upstream, also)
