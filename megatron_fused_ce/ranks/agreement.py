"""Compares the calls of a group's ranks, at the first call of each head, and remembers what they settled."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.ranks.collectives import _all_gather, collective_device, largest_over_ranks


def compare_numbers(per_token: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Raise on every rank if the numbers in a tensor differ between ranks. The host waits.

    Args:
        per_token: values by name. Tensors among them are compared; their shapes and dtypes must be equal on
            every rank already.

    Collectives: one MAX all-reduce of two fp64 a number (R > 1).

    Raises:
        RankDisagreement: names the tensors.
    """
    tensors = {name: value.flatten() for name, value in per_token.items() if isinstance(value, Tensor)}
    numbers = torch.cat([value.detach().double() for value in tensors.values()])
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


class Settled(NamedTuple):
    """The values that the ranks of a group agreed on for one head."""

    facts: dict[str, int]  # name of a number that depends on the rank -> the largest over all ranks
    shard_sizes: tuple[int, ...]  # vocabulary rows of each rank
    starts: tuple[int, ...] = ()  # first global id of each rank's rows, if the callers gave them


@dataclass
class GroupHistory:
    """Record of all calls over one group; the same on all its ranks, except ``specs``."""

    #: whether any call had shards of unequal sizes
    unequal: bool = False
    #: head -> the values that the ranks agreed on at the last call that they compared
    heads: dict[Hashable, Settled] = field(default_factory=dict)
    #: kind of call -> its :class:`.head.spec.Spec`
    specs: dict[Hashable, Any] = field(default_factory=dict)
    #: Heads that broke the promise of their token weights, and have other plans since. The key of a head must
    #: be equal on every rank.
    broken: set[Hashable] = field(default_factory=set)

    def compares(self, head: Hashable | None, every_call: bool) -> bool:
        """Whether the ranks must compare the arguments of this call; the same answer on every rank.

        They compare the first call of a group, whatever its shapes, so that all take part and the comparison
        itself cannot hang; then the first call of each head. Once they have seen shards of unequal sizes they
        compare every call: the shards of the next head may be cut differently, and a rank that has as many
        rows as before could not tell. They do not compare while a CUDA graph is captured; the next call
        outside does. With ``every_call``, which must be given on all ranks, they always compare.

        Args:
            head: key of the head, equal on every rank; None if this rank's weight is no matrix.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        if every_call or self.unequal or not self.heads:
            return True
        return head is not None and head not in self.heads

    def remember(self, head: Hashable | None, settled: Settled) -> None:
        """Remember what the ranks agreed on for a head, for all its later calls."""
        self.unequal = self.unequal or len(set(settled.shard_sizes)) > 1
        if self.heads.get(head) != settled:
            self.forget_specs()  # they were made with the old values
        self.heads[head] = settled

    def forget_specs(self) -> None:
        """Drop all specs; later calls make theirs anew."""
        with _keeping:
            self.specs.clear()

    def keep(self, key: Hashable, spec: Any, most: int) -> None:
        """Keep a spec; drop the oldest if there are ``most`` already."""
        with _keeping:
            while len(self.specs) >= most:
                del self.specs[next(iter(self.specs))]
            self.specs[key] = spec


_keeping = threading.Lock()
_histories: WeakKeyDictionary[dist.ProcessGroup, GroupHistory] = WeakKeyDictionary()
_without_group = GroupHistory()


def history_of(group: dist.ProcessGroup | None) -> GroupHistory:
    """The history of a group, found by the group object: names and ids of destroyed groups are reused.

    Raises:
        TypeError: ``group`` is no process group. Other ranks cannot be told without one.
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
    """Forget all calls so far; to be called on all ranks of a group, in tests and benchmarks."""
    for history in (*_histories.values(), _without_group):
        history.__init__()  # type: ignore[misc]


def check_true_vocab_size(true_vocab_size: int | None, num_rows: int) -> None:
    """Raise ValueError if ``true_vocab_size`` exceeds ``num_rows``, the rows of all shards together."""
    if (true_vocab_size or 0) > num_rows:
        raise ValueError(
            f"true_vocab_size is {true_vocab_size}, and the vocabulary has {num_rows} rows over all ranks; "
            "give the number of real tokens, without the padding"
        )


def compare(
    group: dist.ProcessGroup,
    same: dict[str, str],
    of_rank: dict[str, int],
    vocab_start: int | None,
    num_rows: int,
    true_vocab_size: int | None,
    error: Exception | None,
) -> Settled:
    """Compare a call over the ranks: raise on all of them, or return the values that they settled.

    Numbers in ``of_rank`` depend on a rank's machine and memory. They may differ, and change between calls,
    but plans and collectives depend on them: from now on all ranks use the largest.

    Collectives: one all-gather of a few int64; then, if a rank has an error, one of the messages, or if
    arguments differ, one of their texts. The host waits for each.

    Args:
        same: texts of all that must be equal on every rank, by name.
        of_rank: numbers that may differ; the largest must be safe for all ranks.
        vocab_start: first global id of this rank's rows, if the caller gave it; those of two ranks must not
            overlap.
        true_vocab_size: number of real tokens in the whole vocabulary, if the caller gave it.
        error: found by this rank's own checks. All other arguments are then ignored, except the names in
            ``of_rank``.

    Raises:
        RankDisagreement: names what differs, with each rank's value, or the rank whose input is bad.
        ValueError: ``true_vocab_size`` is larger than the vocabulary.
    """
    size = dist.get_world_size(group)
    digest = int.from_bytes(hashlib.blake2b(repr(same).encode(), digest_size=7).digest(), "big")
    start = -1 if vocab_start is None else vocab_start
    mine = [int(error is not None), digest, start, num_rows, *of_rank.values()]
    sent = torch.tensor(mine, dtype=torch.int64, device=collective_device(group))
    received = sent.new_empty(size * len(mine))
    _all_gather(received, sent, group=group)
    table = received.view(size, len(mine)).tolist()
    if dist.get_backend(group) == "fake":  # Megatron's --fake-process-group: nobody answers
        table, vocab_start = [mine] * size, None

    if any(row[0] for row in table):
        words: list[str | None] = [None] * size
        dist.all_gather_object(words, str(error) if error is not None else None, group=group)
        if error is not None:
            raise error
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(words) if text)
        raise RankDisagreement(f"bad input on another rank of the tensor-parallel group: {told}")
    _, digests, starts, sizes, *numbers = zip(*table, strict=True)
    if len(set(digests)) > 1:
        of_ranks: list[dict[str, str]] = [{} for _ in range(size)]
        dist.all_gather_object(of_ranks, same, group=group)
        for name in same:
            seen = [texts.get(name, "nothing") for texts in of_ranks]
            if len(set(seen)) > 1:
                raise RankDisagreement(
                    f"the ranks of the tensor-parallel group disagree on {name}: {'; '.join(seen)} (by rank)"
                    "; call the head with the same shapes and options on every rank"
                )
        raise RankDisagreement(
            "the ranks of the tensor-parallel group run different versions of this package"
        )
    check_true_vocab_size(true_vocab_size, sum(sizes))
    ranges = [(start, start + rows) for start, rows in zip(starts, sizes, strict=True)]
    if vocab_start is not None and any(left[1] > right[0] for left, right in pairwise(sorted(ranges))):
        raise RankDisagreement(
            f"the vocabulary shards overlap: [start, stop) by rank is {ranges}; "
            "vocab_start must be the first global id of this rank's rows"
        )
    facts = dict(zip(of_rank, map(max, numbers), strict=True))
    return Settled(facts, sizes, starts if vocab_start is not None else ())
