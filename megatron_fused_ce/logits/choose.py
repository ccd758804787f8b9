"""Which backend makes the logits of a call, and why not the scaled-exp GEMM."""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels import gemm_variants
from megatron_fused_ce.logits import LogitsBackend
from megatron_fused_ce.logits.gemm_rows import gemm_then_rows
from megatron_fused_ce.losses.label import CROSS_ENTROPY, CrossEntropy, loss_of
from megatron_fused_ce.losses.terms import Term


class Requested(NamedTuple):
    """What affects the choice of backend beside shapes, dtypes and options."""

    loss: Term = CROSS_ENTROPY
    #: names of outputs beside it
    differentiable: tuple[str, ...] = ()
    #: of outputs that are a user's, by their names
    terms: tuple[tuple[str, Term], ...] = ()
    #: see :class:`.call.OtherTargets`, also for the next
    beyond_scaled_exp: str = ""
    saves_logits_for: str = ""


#: Compute capability of the GPUs on which ``scaled_exp`` was run and timed: H100 and H200.
MEASURED = (9, 0)

#: In place of :func:`why_not_here` where the ranks of a group have settled that it does not serve.
NOT_ON_EVERY_RANK = "it cannot serve on every rank of the tensor-parallel group"


def choose(
    config: FusedCEConfig,
    tokens: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    requested: Requested | None = None,
    why_not: str | None = None,
) -> tuple[LogitsBackend, str]:
    """The backend for these tensors, and why not ``scaled_exp`` (empty where it is).

    Args:
        requested: None for the loss that ``config`` describes.
        why_not: what the ranks of a group settled together, in place of what :func:`why_not_here` finds on
            this rank: gradients of the two backends cannot be summed over ranks, and plans differ.

    Raises:
        ValueError: ``scaled_exp`` was asked for by name and cannot serve.
    """
    requested = requested or Requested(loss_of(config))
    reason = why_not_here(config, tokens, weight) if why_not is None else why_not
    reason = reason or _why_not_served(config, tokens, requested)
    if not reason:
        from megatron_fused_ce.logits.scaled_exp import ScaledExp

        saves_logits = bool(_saved_as_logits(config, requested))
        gemm = gemm_variants.gemm_for(tokens.device)
        assert gemm is not None
        return ScaledExp(gemm=gemm, saves_logits=saves_logits, saves_e=not saves_logits), ""
    if config.logits_backend == "scaled_exp":
        raise ValueError(
            f"logits_backend='scaled_exp' cannot serve here: {reason}; use 'auto' or 'gemm_rows'"
        )
    # Of both dtypes.
    rounds = tokens.dtype != torch.float32 or bool(requested.saves_logits_for)
    in_fp32 = config.logit_precision == "fp32" and rounds
    return gemm_then_rows(tokens.device, torch.float32 if in_fp32 else None), reason


def _why_not_served(config: FusedCEConfig, tokens: Tensor, requested: Requested) -> str:
    """Why the scaled-exp GEMM cannot serve a request, the same on every rank of a group; or empty."""
    if tokens.device.type != "cpu" and tokens.dtype != torch.bfloat16:
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

    Other ranks of a group may find something else: :func:`.agreement.compare` settles it for all. The
    memory of ``tokens`` is no reason: :func:`must_copy` copies them. ``auto`` takes it on :data:`MEASURED`
    GPUs alone, a name on any that can run it; asked for by name, Triton's interpreter may serve on a CPU, in
    any dtype but bf16.
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
    missing = gemm_variants.triton_lacks()
    if missing:
        return missing
    if not interpreted:
        capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(tokens.device)
        sm = f"sm_{capability[0]}{capability[1]}"
        if capability < (9, 0):
            return f"its TMA loads need Hopper or newer, this is {sm}"
        if config.logits_backend == "auto" and capability != MEASURED:
            return (
                f"it was never run on {sm}; FusedCEConfig(logits_backend='scaled_exp') tries it: please "
                "report ms per step and losses with and without that, the GPU and triton's version"
            )
    rows, columns = weight.shape
    for name, letter, length in (("hidden", "H", columns), ("logits", "V", rows)):
        if length * weight.element_size() % 16:
            return f"TMA needs rows of {name} of a multiple of 16 bytes, {letter} is {length}"
    if not _loads(weight):
        return "TMA needs rows of weight that are contiguous and begin at multiples of 16 bytes"
    compiles = tokens.dtype == torch.bfloat16 or interpreted  # else nothing is served
    if compiles and gemm_variants.gemm_for(tokens.device) is None:
        return gemm_variants.compiled(tokens.device)[1]
    return ""


def must_copy(logits: LogitsBackend, hidden: Tensor, weight: Tensor) -> tuple[bool, bool]:
    """Whether ``hidden`` ``[..., H]`` and ``weight`` ``[V, H]`` lie where ``logits`` cannot load them.

    Any activation may; a weight only where it has moved since its group settled on ``scaled_exp``, or is
    another one of the same shape. Another backend on one rank alone would be wrong.
    """
    if logits.name != "scaled_exp":
        return False, False
    if not _loads(weight):
        warnings.warn(
            f"a weight {tuple(weight.shape)} is copied in every call: its rows are not contiguous or do not "
            "begin at multiples of 16 bytes, as they did on all ranks when the tensor-parallel group first "
            "called a head of this shape; align it, or name logits_backend='gemm_rows' on all ranks",
            stacklevel=2,
        )
    return not _loads(hidden.detach().reshape(-1, hidden.shape[-1])), not _loads(weight)


def copied(copies: tuple[bool, ...], *matrices: Tensor) -> list[Tensor]:
    """These matrices, contiguous copies of them where ``copies`` says so."""
    pairs = zip(matrices, copies, strict=True)
    return [x.clone(memory_format=torch.contiguous_format) if copy else x for x, copy in pairs]


def _loads(matrix: Tensor) -> bool:
    """Whether TMA can load it as it lies in memory."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def _beyond_its_epilogue(config: FusedCEConfig, requested: Requested) -> str:
    """What the scaled-exp epilogue cannot make, comma-separated; or empty."""
    terms = dict(requested.terms) | {"loss": requested.loss}
    own = [_names(term) for term in terms.values() if "delta" in term.gives]
    names = [
        (bool(requested.beyond_scaled_exp), requested.beyond_scaled_exp),
        (bool(own), f"the delta of {' and '.join(own)}"),
    ]
    saved_as_logits = _saved_as_logits(config, requested)
    for option in saved_as_logits:
        names.append((config.logit_softcap is not None, f"{option} beside a softcap"))
        names.append((config.logit_precision == "fp32", f"{option} of fp32 logits"))
    return ", ".join(name for applies, name in names if applies)


def _names(term: Term) -> str:
    return type(term).__name__ if term.parts[0] is term else " + ".join(map(_names, term.parts))


def _saved_as_logits(config: FusedCEConfig, requested: Requested) -> list[str]:
    """Names of options whose gradient is no multiple of ``E``, so that logits are saved instead.

    Outputs beside the loss have their own upstream gradients, but for the log_prob of a plain loss. None for
    ``recompute``, which saves neither.
    """
    if requested.saves_logits_for:
        return [requested.saves_logits_for]
    if config.strategy == "recompute":
        return []
    loss = requested.loss
    names = [f"{name} with a gradient" for name in requested.differentiable if name != "log_prob"]
    if "log_prob" in requested.differentiable:
        names += [] if type(loss) is CrossEntropy else [f"log_prob with a gradient beside {_names(loss)}"]
    return names + ([] if {"at", "alpha"}.issuperset(loss.gives) else ["the eps of loss"])
