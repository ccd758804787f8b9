"""The shards of all ranks, for calls that the ranks compare every time."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_fused_ce.head.agree import compared
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.ranks.agreement import check_true_vocab_size
from megatron_fused_ce.ranks.collectives import VocabParallel


class Shards(NamedTuple):
    """The shards of the vocabulary, by rank."""

    starts: tuple[int, ...]  # their first global ids
    sizes: tuple[int, ...]  # their numbers of rows
    first: int  # first id of the vocabulary
    end: int  # behind its last id, without padding

    @staticmethod
    def agreed(call: Call, comm: VocabParallel, error: Exception | None, more: dict[str, int]) -> Shards:
        """Compare a call over the ranks, and return their shards.

        Arguments and collectives are those of :func:`.agree.compared`; the host waits.

        Raises:
            TypeError, ValueError: on every rank, if an argument is wrong or the ranks differ.
        """
        if comm.group is not None:
            settled = compared(call, comm, error, more=more)
            starts, sizes = settled.starts, settled.shard_sizes
        elif error is not None:
            raise error
        else:
            starts, sizes = (0,), (call.weight.shape[0],)
            check_true_vocab_size(call.config.true_vocab_size, sizes[0])
        # From here on all ranks know the same numbers, so that all raise or none does.
        starts = starts or tuple(accumulate(sizes[:-1], initial=0))
        ranges = sorted((start, start + rows) for start, rows in zip(starts, sizes, strict=True))
        if any(left[1] != right[0] for left, right in pairwise(ranges)):
            raise ValueError(f"the vocabulary shards leave gaps: [start, stop) is {ranges}; expected none")
        end = ranges[-1][1] if call.config.true_vocab_size is None else call.config.true_vocab_size
        return Shards(starts, sizes, ranges[0][0], end)
