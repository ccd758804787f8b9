"""Compiles the Hopper form of the scaled-exp GEMM for sm_90, without a GPU.

    python tests/kernels/compile_hopper.py [--some | --others]

``--some``: of the variants the plain one and the last, ``--others``: those between. Prints one line
a variant: shared memory and, from ptxas, spills. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_fused_ce.kernels import exp_product_hopper as hopper

#: What a thread block of sm_90 can have.
SHARED_MEMORY = 227 * 1024


FLAGS = (
    "WRITE",
    "LOGITS",
    "WITH_ARGMAX",
    "WEIGHTED",
    "WITH_SUM",
    "ENTROPY",
    "SMOOTHING",
    "MASKED",
    "SOFTCAP",
)
#: The mode, and the flags that are on.
VARIANTS = (
    (0, "WRITE"),
    (0, "WEIGHTED"),
    (0, "WRITE", "WITH_ARGMAX"),
    (1, "WRITE"),
    (0, "WRITE", "WEIGHTED", "MASKED"),
    (1, "WRITE", "MASKED"),
    (0, "WRITE", "SOFTCAP"),
    (0, "WRITE", "WITH_ARGMAX", "WEIGHTED", "MASKED", "SOFTCAP"),
    (0, "WRITE", "LOGITS", "WEIGHTED", "WITH_SUM", "MASKED"),
    (0, "WRITE", "LOGITS", "WITH_ARGMAX", "WEIGHTED", "WITH_SUM", "MASKED"),
    (1, "WRITE", "ENTROPY", "SMOOTHING", "MASKED"),
    (1, "WRITE", "MASKED", "SOFTCAP"),
)
#: With these flags: a few registers of row vectors, outside of the products' loop.
SPILLED = {("WITH_ARGMAX", "SOFTCAP"): 64}


def spilled_bytes(ptx: str) -> int:
    """What ptxas reports for sm_90a."""
    # The newer of the two that triton brings: it takes any version of PTX that triton writes.
    ptxas = Path(nvidia.__file__).parent / "bin" / "ptxas-blackwell"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [ptxas, "-v", "-arch=sm_90a", "-o", Path(folder) / "kernel.cubin", source],
            capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stderr))


def descriptor(rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows},{columns}],{layout!r}>"


def compiled(mode: int, *flags: str):
    half, block_n, block_k = (int(x) for x in (hopper.HALF_M, hopper.BLOCK_N, hopper.BLOCK_K))
    types = {
        "tokens_desc": descriptor(half, block_k),
        "weight_desc": descriptor(block_n, block_k),
        "out_desc": descriptor(half, block_n // 2) if "WRITE" in flags else descriptor(half, block_k),
        "label_ptr": "*i64",
        "table_ptr": "*i32",
        "tile_argmax_ptr": "*i32",
        "valid_columns_ptr": "*i64",
        "num_rows": "i32",
        "num_columns": "i32",
        "hidden_size": "i32",
        "logit_scale": "fp32",
        "scale2": "fp32",
        "softcap": "fp32",
    }
    constants = {"GROUP_M": 16, "MODE": mode} | {flag: flag in flags for flag in FLAGS}
    names = hopper._product_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    source = GluonASTSource(
        hopper._product_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": 4, "maxnreg": 168}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> int:
    some = VARIANTS[:: len(VARIANTS) - 1]
    variants = {"--some": some, "--others": VARIANTS[1:-1]}.get(sys.argv[-1], VARIANTS)
    for mode, *flags in variants:
        kernel = compiled(mode, *flags)
        shared = kernel.metadata.shared
        spilled = spilled_bytes(kernel.asm["ptx"])
        print(
            f"mode {mode} {' '.join(flags)}: {shared} bytes of shared memory, {spilled} bytes spilled",
            flush=True,
        )
        allowed = [most for with_these, most in SPILLED.items() if set(with_these) <= set(flags)]
        if spilled > max(allowed, default=0):
            return 1
        if shared > SHARED_MEMORY:
            return 1
        # One atomic for the first tile and one for the next.
        asm = kernel.asm["ptx"]
        if "wgmma.mma_async" not in asm or asm.count("atom.global.gpu.relaxed.add") != 2:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
