"""How a chunk's logits are made and used: the two ways, and the one place that chooses.

``gemm_rows``
    A cuBLAS product writes the logits; row kernels (Triton, or plain PyTorch) read them for their
    statistics and write their gradients. Any device, any dtype.
``exp``
    The product's own epilogue exponentiates: no pass over the logits at all (docs/design.md). bf16 on
    Hopper and newer.

Both keep the same promise: ``grad_logits = factor[:, None] * operand`` (``factor`` None for 1), with
``operand`` ``[C, V]`` in the hidden states' dtype, for an upstream gradient per token.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fused_ce import row_ops, row_ops_torch
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.loss_form import PLAIN, LossForm, SoftTargets
from megatron_fused_ce.row_ops import LOG2_E, Merged, RowStatistics, TileStatistics, TokenTerms
from megatron_fused_ce.token_outputs import Upstream


class ChunkInputs(NamedTuple):
    """What one chunk's product takes."""

    tokens: Tensor | None  # [C, H]; None where kept logits serve and grad_weight is not wanted
    weight: Tensor  # [V, H]
    labels: Tensor  # [C] int64, columns of this shard; anything else: not here
    logit_scale: float
    sample: Tensor | None = (
        None  # [S, H]: some rows of the whole weight, for LogitsBackend.multiply
    )
    form: LossForm = PLAIN
    targets: SoftTargets | None = None  # in the labels' place


class Scores(NamedTuple):
    """A chunk after its product: row statistics, and what sealing it needs."""

    stats: RowStatistics
    tiles: TileStatistics | None = None


class Operand(NamedTuple):
    """``grad_logits = factor[:, None] * matrix``; ``factor`` fp32 ``[C]``, None for 1.

    A factor is the same on every rank of the group, so that ``grad_hidden`` may be summed over the
    ranks before it is multiplied by it.
    """

    matrix: Tensor
    factor: Tensor | None


class LogitsBackend(Protocol):
    """One way through a chunk's logits."""

    name: str
    #: Whether :meth:`multiply` needs room ``[C, V]`` even where nothing is kept.
    scores_in_memory: bool
    #: Whether :meth:`operand_of_kept` leaves what was kept as it is and needs no room.
    reads_kept: bool

    @property
    def num_sampled(self) -> int:
        """Rows of the whole weight that :meth:`multiply` wants as the chunk's ``sample``; 0 for none."""

    @property
    def token_ops(self) -> ModuleType:
        """``merge_shards``, ``shard_terms`` and ``token_loss``: row_ops, or its kernels."""

    def multiply(
        self, chunk: ChunkInputs, out: Tensor | None, with_argmax: bool
    ) -> Callable[[], Scores]:
        """The product; what is kept goes to ``out`` ``[C, V]``. Called, the result makes the row
        statistics: what is to run beside the next product is started in between.
        """

    def sample_rows(self, weight: Tensor, num_sampled: int, form: LossForm = PLAIN) -> Tensor:
        """``[num_sampled, H]`` of the rows of ``weight`` that take part."""

    def seal(
        self, kept: Tensor, chunk: ChunkInputs, scores: Scores, merged: Merged
    ) -> Tensor | None:
        """Make ``kept`` ready to wait for the backward; what to hand to :meth:`operand_of_kept`."""

    def operand_of_kept(
        self,
        kept: Tensor,
        seal: Tensor | None,
        chunk: ChunkInputs,
        terms: TokenTerms,
        upstream: Upstream,  # [C] fp32 each: upstream gradients times logit_scale
        out: Tensor | None,  # [C, V]; may be ``kept``
    ) -> Operand:
        """Gradients of the logits from what was kept."""

    def operand_again(
        self, chunk: ChunkInputs, terms: TokenTerms, upstream: Upstream, out: Tensor
    ) -> Operand:
        """Gradients of the logits from the product again, into ``out`` ``[C, V]``."""


@dataclass(frozen=True)
class GemmThenRows:
    """A plain product, then passes over its logits."""

    rows: ModuleType  # kernels.row_kernels or row_ops_torch

    name = "gemm_rows"
    scores_in_memory = True
    reads_kept = False
    num_sampled = 0

    @property
    def token_ops(self) -> ModuleType:
        return row_ops if self.rows is row_ops_torch else _token_kernels()

    def multiply(
        self, chunk: ChunkInputs, out: Tensor | None, with_argmax: bool
    ) -> Callable[[], Scores]:
        assert chunk.tokens is not None and out is not None
        torch.mm(chunk.tokens, chunk.weight.t(), out=out)

        def statistics() -> Scores:
            args = (chunk.labels, chunk.logit_scale, with_argmax, chunk.form, chunk.targets)
            return Scores(self.rows.row_statistics(out, *args))

        return statistics

    def sample_rows(self, weight: Tensor, num_sampled: int, form: LossForm = PLAIN) -> Tensor:
        return weight[:0]

    def seal(self, kept: Tensor, chunk: ChunkInputs, scores: Scores, merged: Merged) -> None:
        return None

    def operand_of_kept(
        self,
        kept: Tensor,
        seal: Tensor | None,
        chunk: ChunkInputs,
        terms: TokenTerms,
        upstream: Upstream,
        out: Tensor | None,
    ) -> Operand:
        assert out is not None
        gradient = chunk.form.gradient_terms(terms, upstream)
        scale, form, targets = chunk.logit_scale, chunk.form, chunk.targets
        self.rows.row_gradients(kept, chunk.labels, gradient, scale, out, form, targets)
        return Operand(out, None)

    def operand_again(
        self, chunk: ChunkInputs, terms: TokenTerms, upstream: Upstream, out: Tensor
    ) -> Operand:
        assert chunk.tokens is not None
        torch.mm(chunk.tokens, chunk.weight.t(), out=out)
        return self.operand_of_kept(out, None, chunk, terms, upstream, out)


@dataclass(frozen=True)
class ScaledExp:
    """A product that exponentiates in its epilogue."""

    product: ModuleType  # kernels.exp_product or kernels.exp_product_hopper

    name = "scaled_exp"
    scores_in_memory = False
    reads_kept = True

    @property
    def num_sampled(self) -> int:
        return int(_exp_rows().SAMPLED_ROWS)

    @property
    def token_ops(self) -> ModuleType:
        return _token_kernels()

    def sample_rows(self, weight: Tensor, num_sampled: int, form: LossForm = PLAIN) -> Tensor:
        rows: Tensor = _exp_rows().sample_rows(weight, num_sampled, form)
        return rows

    def multiply(
        self, chunk: ChunkInputs, out: Tensor | None, with_argmax: bool
    ) -> Callable[[], Scores]:
        tokens, weight, labels, logit_scale, sample, form, _ = chunk
        assert sample is not None
        exp_rows = _exp_rows()
        num_columns = weight.shape[0]
        prologue = exp_rows.row_prologue(tokens, sample, labels, num_columns, logit_scale, form)
        tiles = self.product.exp_product(
            tokens,
            weight,
            labels,
            prologue.reference2,
            *prologue.tiles,
            logit_scale,
            out,
            with_argmax,
            form,
        )

        def statistics() -> Scores:
            stats = exp_rows.combine_tiles(prologue, tiles, labels, num_columns, form)
            return Scores(stats, tiles)

        return statistics

    def seal(self, kept: Tensor, chunk: ChunkInputs, scores: Scores, merged: Merged) -> Tensor:
        tiles, stats = scores.tiles, scores.stats
        unit: Tensor = _exp_rows().seal_rows(kept, chunk.labels, tiles, stats, merged, chunk.form)
        return unit

    def operand_of_kept(
        self,
        kept: Tensor,
        seal: Tensor | None,
        chunk: ChunkInputs,
        terms: TokenTerms,
        upstream: Upstream,
        out: Tensor | None,
    ) -> Operand:
        assert seal is not None
        return Operand(kept, seal * upstream.loss)

    def operand_again(
        self, chunk: ChunkInputs, terms: TokenTerms, upstream: Upstream, out: Tensor
    ) -> Operand:
        tokens, weight, labels, logit_scale, _, form, _ = chunk
        gradient = form.gradient_terms(terms, upstream)
        self.product.gradient_product(
            tokens,
            weight,
            labels,
            *_exp_rows().tile_table(labels, weight.shape[0]),
            gradient.row_max * LOG2_E,
            gradient.factor * gradient.scale,
            -gradient.factor * gradient.deficit,
            logit_scale,
            out,
            form,
        )
        return Operand(out, None)


def _token_kernels() -> ModuleType:
    from megatron_fused_ce.kernels import token_kernels

    return token_kernels


def _forms() -> Any:
    from megatron_fused_ce.kernels import forms

    return forms


def _exp_rows() -> Any:
    from megatron_fused_ce.kernels import exp_rows

    return exp_rows


def row_pass(device: torch.device, requested: str = "auto") -> GemmThenRows:
    """The row pass with the Triton kernels on CUDA and plain PyTorch elsewhere, or as requested.

    Raises:
        ImportError: there is no triton, or an old one.
    """
    if requested == "auto":
        requested = "triton" if device.type == "cuda" else "torch"
    if requested == "triton":
        _forms().require_triton()
        from megatron_fused_ce.kernels import row_kernels

        return GemmThenRows(row_kernels)
    return GemmThenRows(row_ops_torch)


class Asked(NamedTuple):
    """What of a call, beside its config, decides which pass can serve."""

    outputs: tuple[str, ...] = ()
    differentiable: bool = False
    soft: bool = False


#: The loss alone.
NOTHING_BESIDE = Asked()

#: In place of :func:`why_not_here` where the ranks of a group have settled that it does not serve.
NOT_ON_EVERY_RANK = "it cannot serve on every rank of the tensor-parallel group"


def choose(
    config: FusedCEConfig,
    tokens: Tensor,  # [T, H]
    weight: Tensor,  # [V, H]
    asked: Asked = NOTHING_BESIDE,
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
    reason = why_not_exp(config, tokens, weight, asked, why_not_here)
    if not reason:
        return ScaledExp(_forms().product_for(tokens.device)), ""
    if config.logits_backend == "scaled_exp":
        raise ValueError(
            f"logits_backend='scaled_exp' cannot serve here: {reason}; use 'auto' or 'gemm_rows'"
        )
    return row_pass(tokens.device, config.row_backend), reason


def why_not_exp(
    config: FusedCEConfig,
    tokens: Tensor,
    weight: Tensor,
    asked: Asked = NOTHING_BESIDE,
    here: str | None = None,
) -> str:
    """What keeps the scaled-exp GEMM from serving, or an empty string: the one list.

    ``here``: as :func:`choose` takes it. All else is the same on every rank of a group.
    """
    here = why_not_here(config, tokens, weight) if here is None else here
    if here:
        return here
    interpreted = tokens.device.type == "cpu"
    if not interpreted and tokens.dtype != torch.bfloat16:
        # fp16 has too little exponent for E; fp32 products would be TF32 or slow.
        return f"it takes bfloat16, not {tokens.dtype}"
    beyond = _beyond_its_epilogue(config, asked)
    if beyond:
        return f"its epilogue cannot make {beyond}"
    if config.logit_scale <= 0:
        return f"its row maximum needs a logit_scale above 0, this is {config.logit_scale}"
    if tokens.shape[0] == 0:
        return "there are no tokens"
    return ""


def why_not_here(config: FusedCEConfig, tokens: Tensor, weight: Tensor) -> str:
    """What of the request, this rank's device and its shard keeps the scaled-exp GEMM from serving, or empty.

    Other ranks of a group may find something else: :func:`.vocab_parallel.agree` settles it for all. The
    memory of ``tokens`` is no reason: :func:`loadable` copies them. Asked for by name, Triton's interpreter
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
    missing: str = _forms().triton_lacks()
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
    if compiles and _forms().product_for(tokens.device) is None:
        return str(_forms().compiled(tokens.device).failure)
    return ""


def loadable(logits: LogitsBackend, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``tokens`` ``[T, H]`` and ``weight`` ``[V, H]``, copied where ``logits`` cannot load them as they lie.

    Any activation may lie badly; a weight only where it has moved since its group settled on
    ``scaled_exp``, or is another one of the same shape. Another backend on one rank alone would be wrong.
    """
    if not isinstance(logits, ScaledExp):
        return tokens, weight
    if not _loads(tokens):
        tokens = tokens.clone(memory_format=torch.contiguous_format)
    if not _loads(weight):
        warnings.warn(
            f"a weight {tuple(weight.shape)} is copied in every call: its rows are not contiguous or do not "
            "begin at multiples of 16 bytes, as they did on all ranks when the tensor-parallel group first "
            "called a head of this shape; align it, or name logits_backend='gemm_rows' on all ranks",
            stacklevel=2,
        )
        weight = weight.clone(memory_format=torch.contiguous_format)
    return tokens, weight


def _loads(matrix: Tensor) -> bool:
    """Whether TMA can load it as it lies in memory."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def _beyond_its_epilogue(config: FusedCEConfig, asked: Asked) -> str:
    """For people; or empty."""
    # -share is no multiple of E, and further outputs' gradients are none when the loss's is 0.
    names = (
        (bool(config.label_smoothing), "label_smoothing"),
        (config.logit_precision == "activations", "logits rounded to the activations' dtype"),
        (asked.differentiable, "outputs with gradients"),
        ("entropy" in asked.outputs, "entropy"),
        (asked.soft, "the loss of a teacher's targets"),
    )
    return ", ".join(name for applies, name in names if applies)


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """``out = factor[:, None] * x``: ``[C, H]`` and fp32 ``[C]``, for an operand's factor."""
    scaled: Tensor = _exp_rows().scale_rows(x, factor, out)
    return scaled
