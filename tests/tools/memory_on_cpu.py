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
    """Trace and live blocks as `torch.cuda.memory._snapshot` gives them; an address is a storage's."""

    def __init__(self) -> None:
        super().__init__()
        self._trace: list[dict[str, Any]] = []
        self._blocks: dict[int, dict[str, Any]] = {}

    def record(self, history: str | None, *how: object, **options: object) -> None:
        if history == "all":
            self.__enter__()
        elif history is None:
            self.__exit__(None, None, None)

    def _count(self, key: int, num_bytes: int) -> None:
        if key not in self._blocks:
            block = {"address": key, "requested_size": num_bytes, "state": "active_allocated"}
            self._blocks[key] = block | {"addr": key, "size": num_bytes, "frames": python_stack()}
            self._note("alloc", self._blocks[key])
        super()._count(key, num_bytes)

    def _forget(self, key: int, _: object) -> None:
        super()._forget(key, _)
        if block := self._blocks.pop(key, None):
            self._note("free_requested", block)

    def _note(self, action: str, block: dict[str, Any]) -> None:
        self._trace.append(block | {"action": action, "time_us": time.time_ns() // 1000})


def python_stack() -> list[dict[str, Any]]:
    """Innermost frame first, from the operator's caller on."""
    stack = ((frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe()))
    found = [{"filename": code.co_filename, "name": code.co_name, "line": line} for code, line in stack]
    return [frame for frame in found if frame["filename"] not in (__file__, live_storages.__file__)]


def snapshot(blocks: Any, trace: list[dict[str, Any]]) -> dict[str, Any]:
    return {"segments": [{"device": 0, "blocks": list(blocks)}], "device_traces": [list(trace)]}


if __name__ == "__main__":
    megatron_cpu.install()
    here = Allocator()
    torch.cuda.init, torch.cuda.max_memory_allocated = lambda: None, lambda: here.peak_bytes
    torch.cuda.memory._record_memory_history = here.record
    torch.cuda.memory._snapshot = lambda: snapshot(here._blocks.values(), here._trace)
    runner.main()
