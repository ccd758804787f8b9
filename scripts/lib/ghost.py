"""Collectives of R ranks on one GPU: kernels that hold SMs as NCCL's would, for as long.

    python -m scripts.bench --ghost megatron_fused_ce.scripts.lib.ghost:ghost --tp 8 --sequence-parallel
    GHOST_SMS=24 python -m scripts.bench ...     # SMs that a large one holds; default 16

A ghost runs where NCCL's kernel would: on the current stream, or for ``async_op`` on the group's own stream,
which first waits for the current one; two that are coalesced are one launch. It holds one SM a block with 512
threads and 48 KB, reads its input and writes its output through HBM once (the output is the input, repeated
or cut: nothing is reduced), and ends ``(a + (R - 1) * step) + bytes * (R - 1) / R / b`` after its last block
began: docs/scaling.md's constants, from a profile of four H200s. An all-reduce moves the bytes twice.

What it leaves out: NCCL's other traffic in HBM (its buffers, what peers read and write), and ranks that wait
for each other.
"""

# mypy: disable-error-code="override,assignment,call-arg"
from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: docs/scaling.md: seconds, seconds a step of the ring, bytes a second
LATENCY, STEP, RATE = 30e-6, 3.4e-6, 280e9
#: A block for so many bytes, up to GHOST_SMS blocks: an estimate; NCCL takes one channel for the smallest.
BYTES_A_BLOCK = 128 * 1024

SOURCE = r"""
struct Copy { const char* from; char* to; long long bytes; long long copies; };
struct Ghost { Copy of[2]; long long ns; };
// A unit is read once and written to every copy; four are in flight, or HBM's latency would set the pace.
template <typename T> __device__ void copy(const Copy& c) {
  const T* from = (const T*)c.from;
  T* to = (T*)c.to;
  long long units = c.bytes / sizeof(T), step = gridDim.x * 512LL;
  for (long long i = blockIdx.x * 512LL + threadIdx.x; i < units; i += 4 * step) {
    T of[4];
    for (int k = 0; k < 4; k++) if (i + k * step < units) of[k] = from[i + k * step];
    for (long long copy = 0; copy < c.copies; copy++)
      for (int k = 0; k < 4; k++) if (i + k * step < units) to[copy * units + i + k * step] = of[k];
  }
}
__device__ long long now() { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
extern "C" __global__ __launch_bounds__(512) void nccl_ghost(Ghost ghost) {
  __shared__ volatile char held[48 * 1024];
  long long start = now();
  if (ghost.ns < 0) held[threadIdx.x] = 1;
  for (int k = 0; k < 2; k++) ghost.of[k].bytes % 16 ? copy<int>(ghost.of[k]) : copy<int4>(ghost.of[k]);
  while (now() - start < ghost.ns) {}
}
"""


@lru_cache(maxsize=1)
def _kernel() -> tuple[Any, Any]:
    """cuLaunchKernel and the function: torch's own call takes longer on the host than NCCL does."""
    library = torch.cuda._utils._get_gpu_runtime_library()
    return library.cuLaunchKernel, torch.cuda._compile_kernel(SOURCE, "nccl_ghost").func


class Ended(dist.Work):
    """Waits, on the current stream, for a ghost on another."""

    def __init__(self, event: Any = None) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())


class Ghosts(dist.ProcessGroup):
    """Rank 0's view of a group whose other ranks are not there. On a CPU its collectives take no time."""

    supports_coalescing = True  # as a group's backend is asked for it

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._most = int(os.environ.get("GHOST_SMS", "16"))
        self._own: Any = None
        self._together: list[tuple[int, ...]] | None = None

    def getBackendName(self) -> str:
        return "ghost"

    def _get_backend(self, device: torch.device) -> Ghosts:
        return self

    def _run(self, source: Tensor, out: Tensor, copies: int, rounds: int, options: Any) -> Ended:
        """Copy ``source`` into ``out`` ``copies`` times; ``rounds`` passes over the ring."""
        sizes = source.numel() * source.element_size(), out.numel() * out.element_size()
        if not out.is_cuda:
            if copies and source.data_ptr() != out.data_ptr():
                parts = out.view(-1).view(torch.uint8).view(copies, -1)
                parts.copy_(source.reshape(-1).view(torch.uint8)[: parts.shape[1]])
            return Ended()
        part = sizes[1] // copies if copies else 0
        one = (source.data_ptr(), out.data_ptr(), part, copies, rounds * max(sizes))
        if self._together is not None:
            self._together.append(one)
            return Ended()
        if not getattr(options, "asyncOp", False):
            self._launch([one])
            return Ended()
        if self._own is None:
            self._own = torch.cuda.Stream()
        self._own.wait_stream(torch.cuda.current_stream())
        for tensor in (source, out):
            tensor.record_stream(self._own)
        with torch.cuda.stream(self._own):
            self._launch([one])
            return Ended(self._own.record_event())

    def _launch(self, ghosts: Sequence[tuple[int, ...]]) -> None:
        moved = sum(each[-1] for each in ghosts)
        steps = self.size() - 1
        time = LATENCY + steps * STEP + moved * steps / self.size() / RATE
        copies = [word for each in ghosts for word in each[:-1]] + [0] * 4 * (2 - len(ghosts))
        words = (ctypes.c_longlong * 9)(*copies, round(1e9 * time))
        blocks = max(1, min(self._most, moved // BYTES_A_BLOCK))
        launch, function = _kernel()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        if failed := launch(function, blocks, 1, 1, 512, 1, 1, 0, stream, pointers, None):
            raise RuntimeError(f"cuLaunchKernel: {failed}")

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Ended:
        together, self._together = self._together or [], None
        for at in range(0, len(together), 2):
            self._launch(together[at : at + 2])
        return Ended()

    def _allgather_base(self, out: Tensor, source: Tensor, options: Any = None) -> Ended:
        return self._run(source, out, self.size(), 1, options)

    def allgather(self, outs: Any, sources: Any, options: Any = None) -> Ended:
        for out in outs[0]:
            out.copy_(sources[0])
        return Ended()

    def _reduce_scatter_base(self, out: Tensor, source: Tensor, options: Any = None) -> Ended:
        return self._run(source, out, 1, 1, options)

    def allreduce(self, tensors: Any, options: Any = None) -> Ended:
        return self._run(tensors[0], tensors[0], 0, 2, options)

    def broadcast(self, tensors: Any, options: Any = None) -> Ended:
        return Ended()

    def barrier(self, opts: Any = None) -> Ended:
        return Ended()

    # torch 2.13's names
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


def _create(store: Any, rank: int, size: int, timeout: Any) -> Ghosts:
    return Ghosts(rank, size)


dist.Backend.register_backend("ghost", _create, devices=["cpu", "cuda"])
