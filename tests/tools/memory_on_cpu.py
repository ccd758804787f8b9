"""scripts/lib/runner.py with a CPU's storages for the GPU's allocator, under megatron_cpu.

A storage is an allocation, made where an operator returned the first tensor on it and freed when PyTorch
frees it; its stack is Python's own. What an operator allocates and frees inside itself is not seen, nor is
what is older than the step.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from megatron_fused_ce.scripts.lib import live_storages, megatron_cpu, runner  # noqa: E402
from megatron_fused_ce.scripts.runs import memory  # noqa: E402


class StorageRecording(live_storages.LiveStorages):
    """`memory.Recording`, with trace and live blocks as `torch.cuda.memory._snapshot` gives them; an
    address is a storage's."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[int, str]] = []
        self._trace: list[dict[str, Any]] = []
        self._blocks: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        self._begin_us = time.time_ns() // 1000
        self.__enter__()

    def mark(self, what: str) -> None:
        self.marks.append((time.time_ns() // 1000 - self._begin_us, what))

    def end(self, name: str, num_logits: int) -> tuple[memory.Timeline, dict[str, Any]]:
        self.__exit__(None, None, None)
        timeline = memory.timeline_of(
            name, snapshot([], []), snapshot(self._blocks.values(), self._trace),
            begin_us=self._begin_us, num_logits=num_logits,
        )  # fmt: skip
        timeline.marks, timeline.allocator_peak_bytes = self.marks, self.peak_bytes
        return timeline, {}

    def _count(self, key: int, num_bytes: int) -> None:
        if self._counted_bytes.get(key) != num_bytes:  # new, or resized
            self._free(key)
            sizes = {"requested_size": num_bytes, "state": "active_allocated"}
            self._blocks[key] = {"address": key, **sizes, "frames": python_stack()}
            self._note("alloc", key)
        super()._count(key, num_bytes)

    def _forget(self, key: int, _: object) -> None:
        super()._forget(key, _)
        self._free(key)

    def _free(self, key: int) -> None:
        if key in self._blocks:
            self._note("free_requested", key)
            self._note("free_completed", key)
            del self._blocks[key]

    def _note(self, action: str, address: int) -> None:
        block = self._blocks[address]
        entry = {"action": action, "addr": address, "size": block["requested_size"]}
        self._trace.append(entry | {"time_us": time.time_ns() // 1000, "frames": block["frames"]})


def python_stack() -> list[dict[str, Any]]:
    """Innermost frame first, from the operator's caller on."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in (__file__, live_storages.__file__):
            found.append({"filename": code.co_filename, "name": code.co_name, "line": frame.f_lineno})
        frame = frame.f_back
    return found


def snapshot(blocks: Any, trace: list[dict[str, Any]]) -> dict[str, Any]:
    return {"segments": [{"device": 0, "blocks": list(blocks)}], "device_traces": [list(trace)]}


if __name__ == "__main__":
    memory.Recording = StorageRecording
    megatron_cpu.install()
    runner.main()
