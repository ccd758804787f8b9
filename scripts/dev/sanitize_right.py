"""Right kernels that do what a tool does not follow: where it reports these too, it does not see the order.

``racecheck``: one warp of a warp-specialised kernel hands numbers to others through shared memory, in an
order that mbarriers alone give. ``initcheck``: a kernel reads a product that cuBLAS wrote.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from megatron_fused_ce.kernels.sizes import SAMPLED_ROWS

NUMBERS = 64
SLOTS = gl.constexpr(2)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _plus(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _give(numbers, full, empty, count):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in range(count):
        slot = i % SLOTS
        mbarrier.wait(empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        numbers.index(slot).store(gl.full([1], i, gl.int32, layout))
        _barrier()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _take(out_ptr, numbers, full, empty, count):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(count):
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        got = gl.reduce(numbers.index(slot).load(layout), 0, _plus)
        gl.store(out_ptr + i, got)
        _barrier()
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _right_handover_kernel(out_ptr, count):  # type: ignore[no-untyped-def]
    one_each: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], one_each)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_take, (out_ptr, numbers, full, empty, count)), (_give, (numbers, full, empty, count))], [1], [24]
    )


@triton.jit
def _right_reader_kernel(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numel, other=0.0)
    tl.store(out_ptr + at, x, mask=at < numel)


def run(tool: str, device: torch.device) -> list[str]:
    """Run what stands beside findings of this tool; the kernels that gave a wrong result."""
    if tool == "racecheck":
        out = torch.full((NUMBERS,), -1, dtype=torch.int32, device=device)
        _right_handover_kernel[(1,)](out, NUMBERS, num_warps=4)
        return [] if out.tolist() == list(range(NUMBERS)) else ["_right_handover_kernel"]
    if tool == "initcheck":
        weight = torch.randn(SAMPLED_ROWS, 256, device=device, dtype=torch.bfloat16)
        for rows in (37, 64, 129, 200, 321):
            tokens = torch.randn(rows, 256, device=device, dtype=torch.bfloat16)
            made = torch.mm(tokens, weight.t())
            copy = torch.zeros_like(made)
            _right_reader_kernel[(triton.cdiv(made.numel(), 256),)](made, copy, made.numel(), BLOCK=256)
            # The copy is looked at, not the product, which torch's kernels would read as well.
            expected = tokens.float() @ weight.float().t()
            if float((copy.float() - expected).norm()) > 1e-2 * float(expected.norm()):
                return ["_right_reader_kernel"]
    return []
