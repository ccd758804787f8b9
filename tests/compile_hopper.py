"""Compiles the Hopper form of the exponentiating product for sm_90, without a GPU.

    python tests/compile_hopper.py

Prints one line a variant: shared memory and, from ptxas, spills. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_fused_ce.kernels import exp_product_hopper as hopper

#: What a thread block of sm_90 can have.
SHARED_MEMORY = 227 * 1024


def descriptor(rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows},{columns}],{layout!r}>"


def compiled(mode: int, write: bool, with_argmax: bool):
    half, block_n, block_k = (int(x) for x in (hopper.HALF_M, hopper.BLOCK_N, hopper.BLOCK_K))
    types = {
        "tokens_desc": descriptor(half, block_k),
        "weight_desc": descriptor(block_n, block_k),
        "out_desc": descriptor(half, block_n // 2) if write else descriptor(half, block_k),
        "label_ptr": "*i64",
        "label_tiles_ptr": "*i32",
        "next_tile_ptr": "*i32",
        "tile_argmax_ptr": "*i32",
        "num_rows": "i32",
        "num_columns": "i32",
        "hidden_size": "i32",
        "logit_scale": "fp32",
        "scale2": "fp32",
    }
    constants = dict(GROUP_M=16, MODE=mode, WRITE=write, WITH_ARGMAX=with_argmax)
    names = hopper._product_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names
    }
    source = GluonASTSource(
        hopper._product_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": 4, "maxnreg": 168}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> int:
    for mode, write, with_argmax in (
        (0, True, False),
        (0, False, False),
        (0, True, True),
        (1, True, False),
    ):
        kernel = compiled(mode, write, with_argmax)
        shared = kernel.metadata.shared
        print(f"mode {mode} write {write} argmax {with_argmax}: {shared} bytes of shared memory")
        if shared > SHARED_MEMORY:
            return 1
        # One atomic for the first tile and one for the next.
        asm = kernel.asm["ptx"]
        if "wgmma.mma_async" not in asm or asm.count("atom.global.gpu.relaxed.add") != 2:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
