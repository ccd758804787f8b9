"""Log lines for the user, each written by one process: the first rank of a head's data- and tensor-parallel
groups, in the last pipeline stage."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

PREFIX = "[fused-ce]"

_said: set[str] = set()


def line(text: str) -> None:
    """Print ``text`` broken at 80 columns; the prefix is on every line."""
    width = 80 - len(PREFIX) - 1
    lines = textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print("\n".join(f"{PREFIX} {part}" for part in lines), flush=True)


def speaks(tp_group: Any) -> bool:
    """Whether this process writes the lines about a head of this group; None for a head without one."""
    from megatron.core import parallel_state

    if not _is_first(tp_group):
        return False
    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def once(tp_group: Any, text: str) -> None:
    """Write a line that has not been written before."""
    if text not in _said and speaks(tp_group):
        _said.add(text)
        line(text)


def in_each_replica(tp_group: Any, text: str) -> None:
    """Write a line in one process of each data-parallel replica, since it may apply to one of them alone."""
    if _is_first(tp_group):
        line(text if speaks(tp_group) else f"rank {torch.distributed.get_rank()}: {text}")


def _is_first(tp_group: Any) -> bool:
    return tp_group is None or tp_group.rank() == 0
