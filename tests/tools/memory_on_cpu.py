"""scripts/lib/runner.py with a CPU's storages for the GPU's allocator, under megatron_cpu.

A storage is an allocation, made where an operator returned the first tensor on it and freed when PyTorch
frees it; its stack is Python's own. What an operator allocates and frees inside itself is not seen, nor is
what is older than the step.
"""

import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from megatron_fused_ce.scripts.lib import live_storages, megatron_cpu, runner  # noqa: E402


class Allocator(live_storages.LiveStorages):
    """Trace and live bytes as `torch.cuda.memory._snapshot` gives them; an address is a storage's."""

    def __init__(self) -> None:
        super().__init__()
        self._trace: list[dict[str, Any]] = []

    def record(self, history: str | None, *how: object, **options: object) -> None:
        if history == "all":
            self.__enter__()
        elif history is None:
            self.__exit__(None, None, None)

    def snapshot(self) -> dict[str, Any]:
        """All that lives is one block, of which its bytes count alone."""
        block = {"address": 0, "requested_size": self.live_bytes, "state": "active_allocated"}
        return {"segments": [{"device": 0, "blocks": [block]}], "device_traces": [[*self._trace]]}

    def _count(self, key: int, num_bytes: int) -> None:
        if key not in self._counted_bytes:
            stack = ((frame.f_code, line) for frame, line in traceback.walk_stack(None))
            frames = [{"filename": of.co_filename, "name": of.co_name, "line": line} for of, line in stack]
            self._note("alloc", key, size=num_bytes, frames=frames)
        super()._count(key, num_bytes)

    def _forget(self, key: int, _: object) -> None:
        if key in self._counted_bytes:
            self._note("free_requested", key)
        super()._forget(key, _)

    def _note(self, action: str, key: int, **more: object) -> None:
        self._trace.append({"action": action, "addr": key, "time_us": time.time_ns() // 1000, **more})


if __name__ == "__main__":
    megatron_cpu.install()
    here = Allocator()
    torch.cuda.init, torch.cuda.max_memory_allocated = lambda: None, lambda: here.peak_bytes
    torch.cuda.memory._record_memory_history = here.record
    torch.cuda.memory._snapshot = here.snapshot
    runner.main()
