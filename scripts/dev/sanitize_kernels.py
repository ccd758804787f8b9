"""Kernels that show what compute-sanitizer sees: a wrong one for each tool, and a right one.

    compute-sanitizer --tool memcheck python -m megatron_fused_ce.scripts.dev.sanitize_kernels memcheck

racecheck reports the right one too: one warp of a warp-specialised kernel hands numbers to others through
shared memory, in an order that mbarriers alone give. So a report on a kernel made like it says nothing.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

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
def _wrong_bounds_kernel(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads one element behind the end."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at <= numel, other=0.0)
    tl.store(out_ptr + at, x, mask=at < numel)


@triton.jit
def _wrong_race_kernel(out_ptr):  # type: ignore[no-untyped-def]
    """Each thread reads what a thread of another warp wrote into shared memory, without a barrier."""
    read = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b8 racy[512];
        .reg .u32 base, thread, mine, next;
        mov.u32 thread, %tid.x;
        mov.u32 base, racy;
        shl.b32 mine, thread, 2;
        add.u32 mine, mine, base;
        st.volatile.shared.u32 [mine], thread;
        add.u32 next, thread, 32;
        and.b32 next, next, 127;
        shl.b32 next, next, 2;
        add.u32 next, next, base;
        ld.volatile.shared.u32 $0, [next];
        }""",
        "=r,r",
        [tl.arange(0, 128)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr + tl.arange(0, 128), read)


if __name__ == "__main__":
    out = torch.full((128,), -1, dtype=torch.int32, device="cuda")
    if sys.argv[1] == "racecheck":
        _right_handover_kernel[(1,)](out, NUMBERS, num_warps=4)
        assert out[:NUMBERS].tolist() == list(range(NUMBERS)), "the hand-over is wrong"
        _wrong_race_kernel[(1,)](out, num_warps=4)
    else:
        x = torch.zeros(100, device="cuda")
        _wrong_bounds_kernel[(1,)](x, torch.zeros_like(x), 100, BLOCK=128, num_warps=4)
    torch.cuda.synchronize()
