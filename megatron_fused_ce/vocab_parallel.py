"""Everything that crosses ranks: the only module that calls a collective.

All of it goes over the tensor-parallel group, in the same order on every rank, whatever the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.row_ops import RowStatistics


class Pending(Protocol):
    """A collective under way; ``wait`` before its result is read or its input is overwritten."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None:
        """Nothing was started."""


DONE: Pending = _Done()

# torch 2.13 renamed these and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class VocabParallel:
    """The tensor-parallel group as one head sees it.

    ``num_parts`` ranks hold different tokens of a chunk: ``R`` with sequence parallelism, else 1.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    sequence_parallel: bool

    @staticmethod
    def of(group: dist.ProcessGroup | None, sequence_parallel: bool) -> VocabParallel:
        """Describe ``group``; ``None`` or a group of one rank runs no collective at all."""
        size = 1 if group is None else dist.get_world_size(group)
        if size == 1:
            return VocabParallel(None, 1, 0, False)
        return VocabParallel(group, size, dist.get_rank(group), sequence_parallel)

    @property
    def num_parts(self) -> int:
        return self.size if self.sequence_parallel else 1

    def vocab_start(self, num_rows: int, device: torch.device) -> int | Tensor:
        """First global id of this rank's shard, for shards of any sizes.

        Collectives: one all-gather of an int64 per rank. The sizes stay on the device, so the host
        never waits; a head with equal shards can pass ``rank * V`` instead and skip it.
        """
        if self.size == 1:
            return 0
        mine = torch.full((1,), num_rows, dtype=torch.int64, device=device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=device)
        _all_gather(sizes, mine, group=self.group)
        return sizes[: self.rank].sum()

    def gather_hidden(self, part: Tensor) -> Tensor:
        """The chunk's hidden states ``[C, H]`` from this rank's ``[n, H]``, rank after rank.

        Collectives: one all-gather with sequence parallelism, else none (and no copy).
        """
        if not self.sequence_parallel:
            return part
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        _all_gather(whole, part.contiguous(), group=self.group)
        return whole

    def reduce_grad_hidden(self, partial: Tensor, out: Tensor) -> Pending:
        """Sum ``partial`` ``[C, H]`` over the ranks into this rank's ``out`` ``[n, H]``.

        Collectives, asynchronous: one reduce-scatter with sequence parallelism, else one all-reduce
        (``partial`` is then ``out`` itself), in the dtype of the hidden states.
        """
        if self.size == 1:
            return DONE
        if self.sequence_parallel:
            work = _reduce_scatter(out, partial, group=self.group, async_op=True)
        else:
            work = dist.all_reduce(partial, group=self.group, async_op=True)
        return cast(Pending, work)

    def merge(
        self,
        stats: RowStatistics,
        labels: Tensor,  # [C] int64, columns of this shard; anything else: not here
        num_columns: int,
        token_ops: ModuleType,  # row_ops or kernels.token_kernels
    ) -> tuple[Tensor, Tensor]:
        """Loss ``[C]`` and terms ``[3, C]`` (row_ops.TokenTerms) over the whole vocabulary.

        Collectives, in this order: MAX all-reduce of the row maximum ``[C]``, SUM all-reduce of
        (others, label, label logit) ``[3, C]``, both fp32. NaN in any shard gives NaN on all: a MAX
        may drop it, the sums do not.
        """
        global_max = stats.row_max
        if self.size > 1:
            global_max = global_max.clone()
            dist.all_reduce(global_max, op=dist.ReduceOp.MAX, group=self.group)
        terms: Tensor = token_ops.shard_terms(stats, global_max, labels, num_columns)
        if self.size > 1:
            dist.all_reduce(terms, group=self.group)
        merged: tuple[Tensor, Tensor] = token_ops.token_loss(terms, global_max)
        return merged


class RankDisagreement(ValueError):
    """The ranks of the tensor-parallel group were called with inputs that do not fit each other."""


_calls_by_group: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

#: Of each group: rows of this rank's shard -> rows of the largest shard beside it.
_largest_shards: WeakKeyDictionary[dist.ProcessGroup, dict[int, int]] = WeakKeyDictionary()


def largest_shard(group: dist.ProcessGroup | None, num_rows: int) -> int:
    """Rows of the group's largest shard, as far as :func:`agree` has compared them; else ``num_rows``.

    Plans are made from it, so that ranks with unequal shards cut their tokens alike.
    """
    if group is None:
        return num_rows
    return _largest_shards.get(group, {}).get(num_rows, num_rows)


def agree(
    group: dist.ProcessGroup | None,
    facts: dict[str, int],
    vocab_range: tuple[int, int] | None,
    num_rows: int,
    error: Exception | None,
    every_call: bool,
) -> None:
    """Raise on every rank when one rank's input is bad or the ranks' ``facts`` differ.

    Compared on the first call over ``group``, by counting calls: every rank then takes part, whatever
    its shapes are, so the check itself cannot hang. Skipped while a CUDA graph is captured (the next
    call outside checks instead). With ``every_call`` every call checks; give it on all ranks.

    Collectives, on checked calls only: one all-gather of a few int64; if a rank reports an error, one
    all-gather of its words. The host waits for both.

    Args:
        group: the tensor-parallel group, or None.
        facts: what must be equal on every rank, as whole numbers.
        vocab_range: ``(vocab_start, V)`` where the caller named it, else None: named ranges must not
            overlap.
        num_rows: of this rank's shard, remembered for :func:`largest_shard`.
        error: what this rank's own checks found; raised here when nobody else waits for it.
        every_call: compare on this call too.

    Raises:
        RankDisagreement: naming the field and each rank's value, or the rank whose input is bad.
    """
    size = 1 if group is None else dist.get_world_size(group)
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    first = group is not None and group not in _calls_by_group
    if group is None or size == 1 or capturing or not (first or every_call):
        if error is not None:
            raise error
        return
    _calls_by_group[group] = _calls_by_group.get(group, 0) + 1

    start, rows = vocab_range if vocab_range is not None else (-1, -1)
    # A rank with bad input has no facts to compare: it sends zeros and its error.
    values = list(facts.values()) if error is None else [0] * len(facts)
    mine = [int(error is not None), start, rows, num_rows, *values]
    device = _collective_device(group)
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    received = torch.empty(size * len(mine), dtype=torch.int64, device=device)
    _all_gather(received, sent, group=group)
    table = received.view(size, len(mine)).tolist()

    if any(row[0] for row in table):
        words: list[str | None] = [None] * size
        dist.all_gather_object(words, str(error) if error is not None else None, group=group)
        if error is not None:
            raise error
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(words) if text)
        raise RankDisagreement(f"bad input on another rank of the tensor-parallel group: {told}")
    for column, name in enumerate(facts, start=4):
        seen = [row[column] for row in table]
        if len(set(seen)) > 1:
            raise RankDisagreement(
                f"the ranks of the tensor-parallel group disagree on {name}: {seen} (by rank); "
                "call the head with the same shapes and options on every rank"
            )
    _largest_shards.setdefault(group, {})[num_rows] = max(row[3] for row in table)
    ranges = [(row[1], row[1] + row[2]) for row in table]
    for left, right in pairwise(sorted(ranges)):
        if vocab_range is not None and left[1] > right[0]:
            raise RankDisagreement(
                f"the vocabulary shards overlap: [start, stop) by rank is {ranges}; "
                "vocab_start must be the first global id of this rank's rows"
            )


def _collective_device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
