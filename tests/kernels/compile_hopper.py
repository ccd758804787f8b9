"""Compiles the Hopper form of the scaled-exp GEMM for sm_90, without a GPU.

    python tests/kernels/compile_hopper.py [2]

Of all its variants, or the first two. Prints one line a variant: shared memory and, from ptxas, spills. Not
under TRITON_INTERPRET.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_fused_ce.kernels import scaled_exp_hopper as hopper
from tests.kernels.compile_triton import SHARED_MEMORY, resources, type_of

#: The kernel's constants that are on, in lower case; "gradients" for its other mode.
VARIANTS = (
    "write",
    "write with_argmax weighted masked softcap",
    "weighted",
    "gradients write",
    "gradients write rounded",
    "gradients write entropy masked rounded temperature",
    "gradients write masked softcap rounded temperature",
    "with_argmax weighted rounded",
    "write logits with_argmax weighted masked rounded",
    "write logits weighted masked rounded temperature",
    "write softcap temperature",
    "write weighted masked softcap rounded temperature",
)
FLAGS = (
    *("WRITE", "LOGITS", "WITH_ARGMAX", "WEIGHTED"),
    *("ENTROPY", "MASKED", "SOFTCAP", "ROUNDED", "TEMPERATURE"),
)
#: With all of these: up to five registers of row vectors, outside of the products' loop.
SPILLED = {
    ("with_argmax", "weighted", "rounded"): 4,
    ("logits", "weighted", "rounded"): 12,
    ("logits", "weighted", "rounded", "temperature"): 20,
}


def descriptor(rows: int, columns: int) -> str:
    layout = hopper.descriptor_layout(rows, columns)
    return f"tensordesc<bf16[{rows},{columns}],{layout!r}>"


def compiled(variant: str):
    write = "write" in variant
    half, block_n, block_k = (int(x) for x in (hopper.HALF_M, hopper.BLOCK_N, hopper.BLOCK_K))
    half *= hopper.CLUSTER
    types = {
        "tokens_desc": descriptor(half, block_k),
        "weight_desc": descriptor(block_n, block_k),
        "out_desc": descriptor(half, block_n // 2) if write else descriptor(half, block_k),
        "tile_argmax_ptr": "*i32" if "with_argmax" in variant else "*fp32",
    }
    constants = {flag: flag.lower() in variant.split() for flag in FLAGS}
    constants |= {"GROUP_M": 16, "MODE": int("gradients" in variant)}
    names = hopper._gemm_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, type_of(name)) for name in names}
    source = GluonASTSource(
        hopper._gemm_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True, "num_ctas": hopper.CLUSTER}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> int:
    for variant in VARIANTS[: int(sys.argv[1]) if sys.argv[1:] else None]:
        kernel = compiled(variant)
        shared, asm = kernel.metadata.shared, kernel.asm["ptx"]
        _, spilled = resources(asm, 90)
        print(f"{variant}: {shared} bytes of shared memory, {spilled} bytes spilled")
        allowed = max((SPILLED[name] for name in SPILLED if set(name) <= set(variant.split())), default=0)
        # One atomic for the first tile and one for the next.
        as_written = "wgmma.mma_async" in asm and asm.count("atom.global.gpu.relaxed.add") == 2
        if spilled > allowed or shared > SHARED_MEMORY[90] or not as_written:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
