"""Compiles the row kernels for sm_90 with each option of the loss, and for sm_80 with all, without a GPU.

    python tests/kernels/compile_rows.py

The interpreter, which the other tests run them by, takes what the compiler may refuse. Prints one line a
variant. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import inspect
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_fused_ce.kernels import row_kernels

TYPES = {
    "logits_ptr": "*bf16",
    "out_ptr": "*bf16",
    "label_ptr": "*i64",
    "argmax_ptr": "*i64",
    "target_id_ptr": "*i64",
    "valid_columns_ptr": "*i64",
    "row_stride": "i32",
    "out_row_stride": "i32",
    "num_rows": "i32",
    "num_columns": "i32",
    "num_targets": "i32",
    "smoothing_stride": "i32",
    "logit_scale": "fp32",
    "softcap": "fp32",
}
KERNELS = {
    "statistics": (
        row_kernels._row_statistics_kernel,
        row_kernels.STATISTICS_BLOCK,
        row_kernels.STATISTICS_WARPS,
        ("WITH_ARGMAX", "WITH_SUM", "WEIGHTED", "TARGETS", "MASKED", "SOFTCAP", "TEMPERATURE", "SQUARES"),
    ),
    "gradients": (
        row_kernels._row_gradients_kernel,
        row_kernels.GRADIENT_BLOCK,
        row_kernels.GRADIENT_WARPS,
        ("WITH_ENTROPY", "WITH_SMOOTHING", "TARGETS", "MASKED", "SOFTCAP", "TEMPERATURE"),
    ),
}


def compiled(name: str, capability: int, on: tuple[str, ...]):
    kernel, block, warps, options = KERNELS[name]
    given = {option: option in on for option in options}
    given["TARGETS"] = 64 if "TARGETS" in on else 0
    constants = {"BLOCK": block, **given}
    names = kernel.arg_names
    types = {n: TYPES.get(n, "*fp32") for n in names}
    if "constexprs" in inspect.signature(ASTSource).parameters:
        types |= dict.fromkeys(constants, "constexpr")
        by_place = {(names.index(n),): value for n, value in constants.items()}
        source = ASTSource(kernel, signature=types, constexprs=by_place)
    else:  # before triton 3.3
        for name_of_constant in constants:
            del types[name_of_constant]
        source = ASTSource(kernel, signature=types, constants=constants)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def main() -> int:
    for name, (*_, options) in KERNELS.items():
        for on in ((), *((option,) for option in options), options):
            for capability in (80, 90) if on == options else (90,):
                kernel = compiled(name, capability, on)
                words = ", ".join(on) or "plain"
                print(f"{name}, {words}, sm_{capability}: {len(kernel.asm['ptx'])} bytes of PTX")
    return 0


if __name__ == "__main__":
    sys.exit(main())
