"""Snapshots in torch's format of what runs on a CPU: a recording of storages, for tests.

`StorageRecording` has the interface of `memory_snapshots.Recording`. A storage is an allocation, made where
an operator returned the first tensor on it and freed when PyTorch frees it; its stack is Python's own. What
an operator allocates and frees inside itself is not seen, nor is what is older than the step.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fused_ce.scripts.runs import snapshots as memory_snapshots
from megatron_fused_ce.scripts.runs.snapshots import now_us


class StorageRecording(TorchDispatchMode):
    """Trace and live blocks as `torch.cuda.memory._snapshot` gives them; addresses are running numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[int, str]] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self._trace: list[dict[str, Any]] = []
        self._blocks: dict[int, dict[str, Any]] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def begin(self) -> None:
        self._begin_us = now_us()
        self.__enter__()

    def mark(self, what: str) -> None:
        self.marks.append((now_us() - self._begin_us, what))

    def end(self, name: str, num_logits: int) -> tuple[memory_snapshots.Timeline, dict[str, Any]]:
        self.__exit__(None, None, None)
        timeline = memory_snapshots.timeline_of(
            name, snapshot([], []), snapshot(self._blocks.values(), self._trace),
            begin_us=self._begin_us, num_logits=num_logits,
        )  # fmt: skip
        timeline.marks, timeline.allocator_peak_bytes = self.marks, self.peak_bytes
        return timeline, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._allocate(storage)
        return result

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        address = len(self._trace)
        block = {
            "address": address,
            "requested_size": storage.nbytes(),
            "state": "active_allocated",
            "frames": python_stack(),
        }
        self._blocks[address] = block
        self._known[storage._cdata] = weakref.ref(storage, partial(self._free, storage._cdata, address))
        self._note("alloc", address)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int, address: int, _: object) -> None:
        self._known.pop(key, None)
        self._note("free_requested", address)
        self._note("free_completed", address)
        self.live_bytes -= self._blocks.pop(address)["requested_size"]

    def _note(self, action: str, address: int) -> None:
        block = self._blocks[address]
        entry = {"action": action, "addr": address, "size": block["requested_size"]}
        self._trace.append(entry | {"time_us": now_us(), "frames": block["frames"]})


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def python_stack() -> list[dict[str, Any]]:
    """Innermost frame first, from the operator's caller on."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            found.append({"filename": code.co_filename, "name": code.co_name, "line": frame.f_lineno})
        frame = frame.f_back
    return found


def snapshot(blocks: Any, trace: list[dict[str, Any]]) -> dict[str, Any]:
    return {"segments": [{"device": 0, "blocks": list(blocks)}], "device_traces": [trace]}
