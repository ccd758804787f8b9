"""Which form of the scaled-exp GEMM a device and a triton can run. Imports triton when asked."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch

from megatron_fused_ce import versions

#: Versions of triton whose Gluon the Hopper form was compiled with; it ran with 3.6.
GLUON_VERSIONS = ((3, 6), (3, 9))


@lru_cache(maxsize=1)
def require_triton() -> None:
    """Raises ImportError, in one line, where the row kernels have no triton that they run with."""
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            f"the row kernels on a GPU need triton, which does not import ({error}): pip install triton"
        ) from None
    versions.require("triton", triton.__version__)


@lru_cache(maxsize=1)
def triton_lacks() -> str:
    """What keeps every form from compiling, or an empty string."""
    try:
        import triton
        from triton.tools import tensor_descriptor  # noqa: F401
    except ImportError as missing:
        return f"triton is missing or has no tensor descriptors ({missing})"
    if not hasattr(triton.language, "make_tensor_descriptor"):
        return f"triton {triton.__version__} has no tensor descriptors"
    return ""


@lru_cache(maxsize=8)
def product_for(device: torch.device) -> ModuleType:
    """The Hopper form where both chip and triton fit it, else the portable one."""
    import triton

    from megatron_fused_ce.kernels import exp_product

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and GLUON_VERSIONS[0] <= version <= GLUON_VERSIONS[1]:
        try:
            from megatron_fused_ce.kernels import exp_product_hopper
        except (ImportError, AttributeError):  # Gluon is experimental: names move
            return exp_product
        return exp_product_hopper
    return exp_product
