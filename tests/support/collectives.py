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
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

NAMES = "all_reduce all_gather all_to_all reduce_scatter reduce broadcast gather scatter send recv barrier"


def collective_of(method: str) -> str:
    """What a method of ProcessGroup issues, however its version writes that; "" for anything else."""
    flat = "" if method.startswith("__") else method.replace("_", "")
    return next((name for name in NAMES.split() if flat.startswith(name.replace("_", ""))), "")


class Collective(NamedTuple):
    """One collective as all ranks of its group must issue it."""

    group: str
    name: str
    shapes: tuple[tuple[int, ...], ...]  # of its tensors, outputs before inputs
    dtype: str  # of the first
    op: str  # SUM, MAX, ...; empty where nothing is reduced


class Collectives(contextlib.ExitStack):
    """Context manager: notes every collective in ``calls``, and calls ``before`` ahead of each.

    Args:
        groups: names of the groups; one that is not named gets "other".
        before: called with the :class:`Collective` before it is issued, to disturb its timing.
    """

    def __init__(
        self, groups: Mapping[Any, str], before: Callable[[Collective], None] = lambda call: None
    ) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self._names = {group.group_name: name for group, name in groups.items()}
        self._before = before

    def __enter__(self) -> Collectives:
        for method in filter(collective_of, dir(dist.ProcessGroup)):
            watched = self._watching(collective_of(method), getattr(dist.ProcessGroup, method))
            self.enter_context(patch.object(dist.ProcessGroup, method, watched))
        return self

    def _watching(self, name: str, original: Any) -> Any:
        def watched(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            call = Collective(
                self._names.get(group.group_name, "other"),
                name,
                tuple(tuple(tensor.shape) for tensor in tensors),
                str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                next((leaf.reduceOp.op.name for leaf in leaves if hasattr(leaf, "reduceOp")), ""),
            )
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError(f"NCCL takes no tensor that is not contiguous: {call}")
            self._before(call)
            self.calls.append(call)
            return original(group, *args, **kwargs)

        return watched


def random_delays(
    seed: int, *, longest_s: float, share: float = 1.0, device: torch.device
) -> Callable[[Collective], None]:
    """Sleeps before some collectives, on the host and, on a GPU, on one of its streams.

    Args:
        seed: give every rank another one.
        longest_s: delays are uniform between 0 and this.
        share: of the collectives that are delayed.
        device: of a GPU the current stream (the collective's) or the default one (the products') is delayed
            as well, independently.
    """
    drawn = random.Random(seed)
    cycles_per_s = 1.7e9  # an H100 or H200 under load

    def delay(call: Collective) -> None:
        if drawn.random() < share:
            time.sleep(drawn.uniform(0.0, longest_s))
        if device.type == "cuda" and drawn.random() < share:
            stream = drawn.choice((torch.cuda.current_stream, torch.cuda.default_stream))
            with torch.cuda.stream(stream(device)):
                torch.cuda._sleep(int(drawn.uniform(0.0, longest_s) * cycles_per_s))  # type: ignore[attr-defined]

    return delay
