"""Compiles the kernels in Triton's language for chips that are not here, without a GPU.

    python tests/kernels/compile_triton.py 100 120                  all kernels, for these chips
    python tests/kernels/compile_triton.py 90 statistics gradients  these

The interpreter, which the other tests run them by, takes what the compiler may refuse. Prints one line a
variant: registers and spilled bytes a thread, from ptxas, and shared memory a thread block; for the GEMMs
also their tensor core instructions and whether they load by TMA. Fails where a variant spills or does not fit
its chip, but for what :data:`DOES_NOT_FIT` names. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_fused_ce.kernels import (
    divergence,
    records,
    row_kernels,
    scaled_exp,
    scaled_exp_rows,
    sizes,
    token_kernels,
    upstream_kernels,
)

#: Shared memory that a thread block can have, in bytes, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {
    capability: kib * 1024
    for capability, kib in {80: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}.items()
}
#: The GEMMs' three slots of 48 KiB. By name ``scaled_exp`` is an error there.
DOES_NOT_FIT = {("scaled_exp", 120), ("grad_logits", 120)}
#: Bytes a thread of the GEMMs' epilogues, which have 128 logits in registers; with triton 3.6 and 3.9.
MOST_SPILLED = {"plain": 1024, "all options": 6144}
#: Kernels of the scaled-exp path alone, which loads by TMA: not for older chips.
OF_SCALED_EXP = ("scaled_exp", "grad_logits", "row_prologue", "combine_tiles", "finalize_rows", "tile_table")
TMA_SINCE = 90

#: Types of the kernels' arguments, by name; of all others see :func:`type_of`.
TYPES = {
    "*i64": "label_ptr argmax_ptr valid_columns_ptr found_ptr unless_ptr",
    "*fp64": "rest_ptr",
    "*i32": "table_ptr tile_argmax_ptr",
    "*bf16": "logits_ptr tokens_ptr sample_ptr e_ptr x_ptr student_ptr teacher_ptr",
    "fp32": "logit_scale scale2 softcap student_scale student_softcap teacher_scale teacher_softcap"
    " factor rtol atol beta student_share temperature",
}
BY_NAME = {name: kind for kind, names in TYPES.items() for name in names.split()}


def type_of(name: str) -> str:
    return BY_NAME.get(name, "*fp32" if name.endswith("_ptr") else "i32")


class Kernel(NamedTuple):
    """A kernel, how it is launched, and its options, all of which can be on together."""

    launch: Any  # launch.Launch
    constants: dict[str, int]
    options: tuple[str, ...] = ()
    types: dict[str, str] = {}  # noqa: RUF012 (never written to)
    is_gemm: bool = False


def _gemm(kernel: Any, *options: str) -> Kernel:
    tiling = scaled_exp.TILING
    m, n, k = tiling.block_m, tiling.block_n, tiling.block_k
    blocks = {"tokens_desc": (m, k), "weight_desc": (n, k), "out_desc": (m, n)}
    return Kernel(
        kernel[tiling],
        {"NUM_PROGRAMS": 132, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": tiling.group_m},
        options,
        {name: f"tensordesc<bf16[{rows},{columns}]>" for name, (rows, columns) in blocks.items()},
        is_gemm=True,
    )


ROWS = {
    "statistics": Kernel(
        row_kernels._row_statistics,
        {"BLOCK": row_kernels.STATISTICS_BLOCK},
        ("WITH_ARGMAX", "WITH_SUM", "WEIGHTED", "MASKED", "SOFTCAP", "TEMPERATURE", "REST"),
    ),
    "gradients": Kernel(
        row_kernels._row_gradients,
        {"BLOCK": row_kernels.GRADIENT_BLOCK},
        ("WITH_ENTROPY", "WITH_SMOOTHING", "MASKED", "SOFTCAP", "TEMPERATURE"),
        {"out_ptr": "*bf16"},
    ),
}
_SIDES = ("MASKED", "STUDENT_SOFTCAP", "TEACHER_SOFTCAP")
DIVERGENCES = {
    f"divergence_{name}, {kind}, {dtype}": Kernel(
        launch,
        {"BLOCK": block if dtype == "bf16" else divergence.FP32_BLOCK, "KIND": number},
        (*_SIDES, *options),
        dict.fromkeys(("student_ptr", "teacher_ptr", "out_ptr"), f"*{dtype}"),
    )
    for number, kind in enumerate(records.DIVERGENCES)
    for dtype in ("bf16", "fp32")
    for name, launch, block, *options in (
        ("sums", divergence._divergence_sums, divergence.SUMS_BLOCK),
        (
            *("gradients", divergence._divergence_gradients, divergence.GRADIENT_BLOCK),
            *("FACTOR", "WITH_SUMS", "LABEL"),
        ),
    )
}
_TABLE = {"HALF_TILE": sizes.HALF_TILE_ROWS, "TILE": sizes.TILE_COLUMNS, "BLOCK_TILES": 256}
KERNELS = (
    ROWS
    | DIVERGENCES
    | {
        "scaled_exp": _gemm(
            scaled_exp._scaled_exp,
            *("WRITE", "WITH_ARGMAX", "WEIGHTED", "MASKED", "SOFTCAP", "ROUNDED", "TEMPERATURE"),
        ),
        "grad_logits": _gemm(
            scaled_exp._grad_logits, "ENTROPY", "MASKED", "SOFTCAP", "ROUNDED", "TEMPERATURE"
        ),
        "row_prologue": Kernel(
            scaled_exp_rows._row_prologue,
            {**_TABLE, "SAMPLED": sizes.SAMPLED_ROWS, "BLOCK_K": 128},
            ("SOFTCAP", "TEMPERATURE"),
        ),
        "combine_tiles": Kernel(
            scaled_exp_rows._combine_tiles,
            {"BLOCK_ROWS": scaled_exp_rows.BLOCK_ROWS, "BLOCK_TILES": 64, "TILE": sizes.TILE_COLUMNS},
            ("WITH_ARGMAX", "WEIGHTED", "SOFTCAP", "ALONE", "FINALIZE", "TEMPERATURE"),
        ),
        "finalize_rows": Kernel(
            scaled_exp_rows._finalize_rows,
            {"BLOCK_ROWS": scaled_exp_rows.BLOCK_ROWS, "TILE": sizes.TILE_COLUMNS},
            ("SOFTCAP", "ALONE"),
        ),
        "tile_table": Kernel(scaled_exp_rows._tile_table, _TABLE),
        "scale_rows": Kernel(
            scaled_exp_rows._scale_rows, {"BLOCK": 2048}, ("WITH_UPSTREAM",), {"out_ptr": "*bf16"}
        ),
        "add_scaled": Kernel(scaled_exp_rows._add_scaled, {"BLOCK": 4096}),
        "scaled_copy": Kernel(scaled_exp_rows._scaled_copy, {"BLOCK": 4096}, types={"x_ptr": "*fp32"}),
        "shard_addends": Kernel(token_kernels._shard_addends, {"BLOCK": token_kernels.BLOCK}),
        "token_loss": Kernel(token_kernels._token_loss, {"BLOCK": token_kernels.BLOCK}),
        "merge_shards": Kernel(token_kernels._merge_shards, {"BLOCK": token_kernels.BLOCK}),
        "scaled_weights": Kernel(upstream_kernels._scaled_weights, {"BLOCK": upstream_kernels.BLOCK}),
        "fit_scalar": Kernel(upstream_kernels._fit_scalar, {"BLOCK": upstream_kernels.BLOCK}),
    }
)


def compiled(kernel: Kernel, capability: int, on: tuple[str, ...]) -> Any:
    """``kernel`` with the options ``on``."""
    constants = {**kernel.constants, **{option: option in on for option in kernel.options}}
    function = kernel.launch.kernel
    names = function.arg_names
    types = {name: kernel.types.get(name, type_of(name)) for name in names}
    if "constexprs" in inspect.signature(ASTSource).parameters:
        types |= dict.fromkeys(constants, "constexpr")
        by_place = {(names.index(n),): value for n, value in constants.items()}
        # As most launches have them: addresses and strides are multiples of 16.
        multiples = [n for n in names if types[n] == "i32" or types[n].startswith("*")]
        attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in multiples}
        source = ASTSource(function, signature=types, constexprs=by_place, attrs=attrs)
    else:  # before triton 3.3
        for name_of_constant in constants:
            del types[name_of_constant]
        source = ASTSource(function, signature=types, constants=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.launch.options)


def resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as ptxas counts them."""
    # The newer of the two that triton brings: it takes any version of PTX that triton writes.
    ptxas = Path(nvidia.__file__).parent / "bin" / "ptxas-blackwell"
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [ptxas, "-v", f"-arch={arch}", "-o", Path(folder) / "kernel.cubin", source],
            capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill stores", done.stderr)
    return max(map(int, registers)), sum(map(int, spilled))


def instructions(ptx: str) -> str:
    """Those of a GEMM's tensor cores and loads."""
    products = "tcgen05.mma", "wgmma.mma_async", "mma.sync"
    loads = "cp.async.bulk.tensor", "cp.async.cg", "ld.global.v"
    found = [next((name for name in names if name in ptx), "none") for names in (products, loads)]
    return " and ".join(found)


def main() -> int:
    capabilities = [int(word) for word in sys.argv[1:] if word.isdigit()]
    named = [word for word in sys.argv[1:] if not word.isdigit()] or list(KERNELS)
    wrong = False
    for capability, name in itertools.product(capabilities, named):
        kernel, limit = KERNELS[name], SHARED_MEMORY[capability]
        if name in OF_SCALED_EXP and capability < TMA_SINCE:
            continue
        # Plain, but that the GEMM writes what it makes; with all options.
        plain = tuple(option for option in kernel.options if option == "WRITE")
        for which, on in {"plain": plain, "all options": kernel.options}.items():
            if which != "plain" and not on:
                continue
            made = compiled(kernel, capability, on)
            ptx, shared = made.asm["ptx"], made.metadata.shared
            registers, spilled = resources(ptx, capability)
            words = f"sm_{capability} {name}, {which}: {registers} registers, {spilled} bytes spilled, "
            words += f"{shared} bytes of shared memory"
            if kernel.is_gemm:
                words += f", {instructions(ptx)}"
            fits = shared <= limit and spilled <= (MOST_SPILLED[which] if kernel.is_gemm else 0)
            right = fits != ((name, capability) in DOES_NOT_FIT)
            wrong = wrong or not right
            print(words if right else f"WRONG {words}: of {limit}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
