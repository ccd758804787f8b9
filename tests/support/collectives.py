"""Watch, and disturb, the collectives that this process issues.

    with Collectives({tp_group: "tp", dp_group: "dp"}) as issued:
        step()
    print(issued.calls)  # [Collective(group='tp', name='all_gather', ...), ...] in the order of issue

Process groups are watched at their own methods, below `torch.distributed`'s functions: whatever calls
them, by whatever name it was imported, is seen, in the backward's thread too.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

NAMES = (
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "reduce", "broadcast"),
    *("gather", "scatter", "send", "recv", "barrier"),
)


def collective_of(method: str) -> str:
    """What a method of ProcessGroup issues, however its version writes that; "" for anything else."""
    flat = "" if method.startswith("__") else method.replace("_", "")
    return next((name for name in NAMES if flat.startswith(name.replace("_", ""))), "")


class Collective(NamedTuple):
    """One collective as all ranks of its group must issue it."""

    group: str
    name: str
    shapes: tuple[tuple[int, ...], ...]  # of its tensors, outputs before inputs
    dtype: str  # of the first
    op: str  # SUM, MAX, ...; empty where nothing is reduced


class Collectives:
    """Context manager: notes every collective, and calls ``before`` ahead of each.

    Args:
        groups: names of the groups; one that is not named gets "other".
        before: called with the :class:`Collective` before it is issued, to disturb its timing.
        keep: whether to keep the calls; a long run keeps what it needs in ``before``.
    """

    def __init__(
        self,
        groups: Mapping[dist.ProcessGroup, str],
        before: Callable[[Collective], None] = lambda call: None,
        keep: bool = True,
    ) -> None:
        self._keep = keep
        self.calls: list[Collective] = []
        self._names = {group.group_name: name for group, name in groups.items()}
        self._before = before
        self._inside = threading.local()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Collectives:
        for method in filter(collective_of, dir(dist.ProcessGroup)):
            watched = self._watching(collective_of(method), getattr(dist.ProcessGroup, method))
            self._patches.enter_context(patch.object(dist.ProcessGroup, method, watched))
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    def _watching(self, name: str, original: Any) -> Any:
        def watched(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "a_call", False):  # one method may be written by another
                return original(group, *args, **kwargs)
            self._inside.a_call = True
            try:
                arguments = (*args, *kwargs.values())
                tensors = list(_tensors(arguments))
                call = Collective(
                    self._names.get(group.group_name, "other"),
                    name,
                    tuple(tuple(tensor.shape) for tensor in tensors),
                    str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                    next((_op_name(x.reduceOp) for x in arguments if hasattr(x, "reduceOp")), ""),
                )
                self._before(call)
                self.calls += [call] * self._keep
                return original(group, *args, **kwargs)
            finally:
                self._inside.a_call = False

        return watched


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _op_name(op: Any) -> str:
    """SUM of ``ReduceOp.SUM`` and of the object that wraps it in the options."""
    names = ("SUM", "MAX", "MIN", "PRODUCT", "AVG")
    return next((name for name in names if op == getattr(dist.ReduceOp, name)), str(op))


class RandomDelays:
    """Sleeps before some collectives, on the host and, with ``device``, on one of its streams.

    Args:
        seed: give every rank another one.
        longest_s: delays are uniform between 0 and this.
        share: of the collectives that are delayed.
        device: a CUDA device; its current stream (the collective's) or its default one (the products')
            is delayed as well, independently.
    """

    #: Clock of an H100 or H200 under load, for sleeps that are counted in its cycles.
    CYCLES_PER_S = 1.7e9

    def __init__(
        self, seed: int, *, longest_s: float, share: float = 1.0, device: torch.device | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._share = share
        self._device = device if device is not None and device.type == "cuda" else None

    def __call__(self, call: Collective) -> None:
        if self._random.random() < self._share:
            time.sleep(self._random.uniform(0.0, self._longest_s))
        if self._device is not None and self._random.random() < self._share:
            seconds = self._random.uniform(0.0, self._longest_s)
            streams = (torch.cuda.current_stream, torch.cuda.default_stream)
            with torch.cuda.stream(self._random.choice(streams)(self._device)):
                torch.cuda._sleep(int(seconds * self.CYCLES_PER_S))  # type: ignore[attr-defined]
