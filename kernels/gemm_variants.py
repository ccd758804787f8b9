"""Which variant of the scaled-exp GEMM runs with this device and triton. Imports triton only when called."""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

#: Versions of triton whose Gluon the Hopper variant was compiled with; it ran with the first and the last.
GLUON_VERSIONS = ((3, 6), (3, 9))


def triton_version() -> str:
    """The installed triton's version; raises ImportError, in one line, if there is none."""
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            f"the row kernels on a GPU need triton, which does not import ({error}): pip install triton"
        ) from None
    return str(triton.__version__)


@lru_cache(maxsize=1)
def triton_lacks() -> str:
    """Why no variant can compile with the installed triton; an empty string if one may."""
    try:
        import triton
        from triton.tools import tensor_descriptor  # noqa: F401
    except ImportError as missing:
        return f"triton is missing or has no tensor descriptors ({missing})"
    if not hasattr(triton.language, "make_tensor_descriptor"):
        return f"triton {triton.__version__} has no tensor descriptors"
    return ""


def gemm_for(device: torch.device) -> ModuleType | None:
    """The Hopper variant if it fits chip and triton and compiles, else the portable one, else None."""
    return compiled(device)[0]


@lru_cache(maxsize=8)
def compiled(device: torch.device) -> tuple[ModuleType | None, str]:
    """Compile this device's variants on a small chunk, once a process: the first that compiles, or why none
    does.

    A compiler's error then leads to the next variant and does not end the first training step.
    """
    failure = ""
    for gemm in _candidates(device):
        try:
            _try_out(gemm, device)
        except torch.OutOfMemoryError:
            raise  # says nothing about the variant
        except Exception as error:  # the compiler's, the assembler's, or a Gluon name that moved
            name = gemm.__name__.rpartition(".")[2]
            said = (str(error).strip() or "without a word").splitlines()[-1].strip()
            failure = f"{name} does not compile here ({type(error).__name__}: {said})"
        else:
            if failure:
                name = gemm.__name__.rpartition(".")[2]
                warnings.warn(f"{failure}; {name} serves", RuntimeWarning, stacklevel=2)
            return gemm, ""
    return None, failure


def _candidates(device: torch.device) -> tuple[ModuleType, ...]:
    """The variants for this chip and triton, the fastest first."""
    import triton

    from megatron_fused_ce.kernels import scaled_exp

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and GLUON_VERSIONS[0] <= version <= GLUON_VERSIONS[1]:
        try:
            from megatron_fused_ce.kernels import scaled_exp_hopper
        except (ImportError, AttributeError):  # Gluon is experimental: names move
            return (scaled_exp,)
        return scaled_exp_hopper, scaled_exp
    return (scaled_exp,)


def _try_out(gemm: Any, device: torch.device) -> None:
    """Run statistics and gradients of a small chunk; most steps then find these kernels in Triton's cache."""
    from megatron_fused_ce.kernels import scaled_exp_rows
    from megatron_fused_ce.kernels.records import GradEpilogue

    on_gpu = device.type == "cuda"
    size = 128 if on_gpu else 16  # a multiple of 16, by which triton specialises
    x = torch.zeros(size, size, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    labels = torch.zeros(size, dtype=torch.int64, device=device)
    out = torch.empty_like(x)
    prologue = scaled_exp_rows.row_prologue(x, x, labels, size, 1.0)
    per_row = prologue.row_shift2
    tiles = gemm.scaled_exp_gemm(x, x, labels, per_row, prologue.table, 1.0, out)
    scaled_exp_rows.combine_tiles(prologue, tiles, labels, size)
    table = scaled_exp_rows.tile_table(labels, size)
    gemm.grad_logits_gemm(x, x, labels, table, GradEpilogue(per_row, per_row, per_row), 1.0, out)
