"""The walk of a tensor through the package: the functions that get its memory, in the order of calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import megatron_fused_ce

PACKAGE = Path(megatron_fused_ce.__file__).resolve().parent


class Walk:
    """Notes each call of a function of the package with the tensor among its arguments.

    Also inside of tuples, lists, dictionaries and objects of the package, ``self`` among them. In all threads
    that start meanwhile, and in this one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage().data_ptr()
        self.steps: list[tuple[str, str]] = []  # file and function

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(PACKAGE):
            return
        if any(self._is_in(value, 4) for value in frame.f_locals.values()):
            function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
            self.steps.append((file.relative_to(PACKAGE).as_posix(), function))

    def _is_in(self, value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor):
            return value.untyped_storage().data_ptr() == self._storage
        if depth == 0:
            return False
        if isinstance(value, tuple | list):
            return any(self._is_in(item, depth - 1) for item in value)
        if isinstance(value, dict):
            return any(self._is_in(item, depth - 1) for item in value.values())
        if type(value).__module__.startswith("megatron_fused_ce"):
            return self._is_in(getattr(value, "__dict__", {}), depth)
        return False

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.steps))

    @property
    def functions(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys(self.steps))

    @property
    def returns(self) -> list[str]:
        """Each time that the walk comes back to a file which it had left."""
        seen: set[str] = set()
        found, last = [], ""
        for file, _ in self.steps:
            if file != last and file in seen:
                found.append(file)
            seen.add(file)
            last = file
        return found
