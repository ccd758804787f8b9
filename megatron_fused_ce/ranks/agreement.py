"""Whether the ranks of a group were called alike: compared at a head's first call, and remembered."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.ranks.collectives import _all_gather, collective_device, largest_over_ranks


def compare_numbers(per_token: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where the numbers of a tensor differ between ranks. The host waits.

    Args:
        per_token: tensors by name, their shapes and dtypes the same on every rank; all else is left out.

    Collectives: one MAX all-reduce of two fp64 a number (R > 1), but none while a CUDA graph is captured.

    Raises:
        RankDisagreement: names the tensors.
    """
    tensors = {name: value.flatten() for name, value in per_token.items() if isinstance(value, Tensor)}
    numbers = torch.cat([value.detach().double() for value in tensors.values()])
    if group is None or (numbers.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    most, least = largest_over_ranks(torch.stack((numbers, -numbers)).nan_to_num(), group)
    parts = (most != -least).split([len(value) for value in tensors.values()])
    differ = [name for name, part in zip(tensors, parts, strict=True) if part.any()]
    if differ:
        raise RankDisagreement(
            f"the ranks of the tensor-parallel group disagree on the numbers in {', '.join(differ)}; give "
            "the head the same on every rank"
        )


class RankDisagreement(ValueError):
    """The ranks of the tensor-parallel group were called with inputs that do not fit each other."""


class Shard(NamedTuple):
    """A rank's rows of the vocabulary."""

    start: int | None  # the first one's global id, if the caller gave it
    num_rows: int


class Settled(NamedTuple):
    """The values that the ranks of a group agreed on for one head."""

    #: Name of a rank-dependent number -> the largest over all ranks.
    facts: dict[str, int]
    shard_sizes: tuple[int, ...]  # vocabulary rows of each rank
    starts: tuple[int, ...] = ()  # their first global ids, if the callers gave them


@dataclass
class GroupHistory:
    """Record of the head's calls over one group; the same on all its ranks, except ``specs``."""

    #: Whether the shards of any call were of unequal sizes.
    unequal: bool = False
    #: Head -> the values that its ranks agreed on at the last call that compared.
    heads: dict[Hashable, Settled] = field(default_factory=dict)
    #: Kind of call -> its :class:`.head.spec.Spec`.
    specs: dict[Hashable, Any] = field(default_factory=dict)
    #: Heads whose upstream gradient was not what its token weights promised. Their plans are others, so that
    #: a head must be the same value on every rank.
    broken: set[Hashable] = field(default_factory=set)

    def compares(self, head: Hashable | None, every_call: bool) -> bool:
        """Whether the ranks must compare this call's arguments; the same answer on every rank.

        They compare a group's first call, whatever its shapes, so that all take part and the check itself
        cannot hang; then each head's first call; and, once they have seen shards of unequal sizes, every
        call: the next head's shards may be cut differently, and a rank with as many rows as before could not
        tell. They never compare while a CUDA graph is captured, but at the next call outside. With
        ``every_call``, which must be given on all ranks, they always do.

        Args:
            head: values that identify the head and are the same on every rank (its shards have one size);
                None if this rank's weight does not fit its hidden states.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        if every_call or self.unequal or not self.heads:
            return True
        return head is not None and head not in self.heads

    def remember(self, head: Hashable | None, settled: Settled) -> None:
        """Remember what the ranks agreed on for a head; it holds for all its calls from now on."""
        self.unequal = self.unequal or len(set(settled.shard_sizes)) > 1
        if self.heads.get(head) != settled:
            self.forget_specs()  # they were made with the old values
        self.heads[head] = settled

    def forget_specs(self) -> None:
        with _keeping:
            self.specs.clear()

    def keep(self, key: Hashable, spec: Any, most: int) -> None:
        """Keep a spec, at the cost of the oldest one where there are ``most``."""
        with _keeping:
            while len(self.specs) >= most:
                del self.specs[next(iter(self.specs))]
            self.specs[key] = spec


_keeping = threading.Lock()


_histories: WeakKeyDictionary[dist.ProcessGroup, GroupHistory] = WeakKeyDictionary()


_without_group = GroupHistory()


def history_of(group: dist.ProcessGroup | None) -> GroupHistory:
    """The history of this group, by the group object: names and ids of destroyed groups are reused.

    Raises:
        TypeError: it is no group; on this rank alone, which has no group to tell.
    """
    if group is None:
        return _without_group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "tp_group must be a torch.distributed.ProcessGroup with this rank in it, or None, got "
            f"{group!r:.60}"
        )
    history = _histories.get(group)
    if history is None:
        history = _histories[group] = GroupHistory()
    return history


def forget() -> None:
    """Forget all calls so far. Call it on all ranks of a group."""
    for history in (*_histories.values(), _without_group):
        history.__init__()  # type: ignore[misc]


def check_true_vocab_size(true_vocab_size: int | None, num_rows: int) -> None:
    """Raise if ``true_vocab_size`` is more than the rows ``num_rows`` of all shards.

    Raises:
        ValueError: names both numbers.
    """
    if (true_vocab_size or 0) > num_rows:
        raise ValueError(
            f"true_vocab_size is {true_vocab_size}, and the vocabulary has {num_rows} rows over all ranks; "
            "give the number of real tokens, without the padding"
        )


def compare(
    group: dist.ProcessGroup,
    same: dict[str, str],
    of_rank: dict[str, int],
    shard: Shard,
    true_vocab_size: int | None,
    error: Exception | None,
) -> Settled:
    """Compare one call over the ranks: raise on all if one is bad or they differ, else return agreed values.

    Run for a head's call where :meth:`GroupHistory.compares` says so. Numbers that depend on a rank's machine
    and memory may differ between ranks, and later between calls, but plans and collectives depend on them:
    all ranks use the largest from then on.

    Collectives: one all-gather of a few int64; if a rank reports an error, one all-gather of its message, and
    if they differ one of what differs. The host waits for each.

    Args:
        same: what must be equal on every rank, in words.
        of_rank: numbers that may differ; the largest is right for all.
        shard: this rank's; the ranks' must not overlap.
        true_vocab_size: real tokens of the whole vocabulary, if the caller gave them.
        error: found by this rank's own checks; all else but the names in ``of_rank`` is then ignored.

    Raises:
        RankDisagreement: names what differs and each rank's value, or the rank whose input is bad.
        ValueError: ``true_vocab_size`` is larger than the vocabulary.
    """
    size = dist.get_world_size(group)
    digest = int.from_bytes(hashlib.blake2b(repr(same).encode(), digest_size=7).digest())
    start = -1 if shard.start is None else shard.start
    mine = [int(error is not None), digest, start, shard.num_rows, *of_rank.values()]
    sent = torch.tensor(mine, dtype=torch.int64, device=collective_device(group))
    received = sent.new_empty(size * len(mine))
    _all_gather(received, sent, group=group)
    table = received.view(size, len(mine)).tolist()

    if any(row[0] for row in table):
        _raise_everywhere(group, error)
    _, digests, starts, sizes, *numbers = zip(*table, strict=True)
    if len(set(digests)) > 1:
        _raise_difference(group, same)
    check_true_vocab_size(true_vocab_size, sum(sizes))
    ranges = [(start, start + rows) for start, rows in zip(starts, sizes, strict=True)]
    if shard.start is not None and any(left[1] > right[0] for left, right in pairwise(sorted(ranges))):
        raise RankDisagreement(
            f"the vocabulary shards overlap: [start, stop) by rank is {ranges}; "
            "vocab_start must be the first global id of this rank's rows"
        )
    facts = dict(zip(of_rank, map(max, numbers), strict=True))
    return Settled(facts, sizes, starts if shard.start is not None else ())


def _raise_difference(group: dist.ProcessGroup, same: dict[str, str]) -> NoReturn:
    """Raise on every rank, with what differs first. Collectives: one all-gather of all of it."""
    of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, same, group=group)
    for name in same:
        seen = [of_rank.get(name, "nothing") for of_rank in of_ranks]
        if len(set(seen)) > 1:
            raise RankDisagreement(
                f"the ranks of the tensor-parallel group disagree on {name}: {'; '.join(seen)} (by rank); "
                "call the head with the same shapes and options on every rank"
            )
    raise RankDisagreement("the ranks of the tensor-parallel group run different versions of this package")


def _raise_everywhere(group: dist.ProcessGroup, error: Exception | None) -> NoReturn:
    """Raise this rank's error, or the other ranks' messages. Collectives: one all-gather of the messages."""
    words: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(words, str(error) if error is not None else None, group=group)
    if error is not None:
        raise error
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(words) if text)
    raise RankDisagreement(f"bad input on another rank of the tensor-parallel group: {told}")
