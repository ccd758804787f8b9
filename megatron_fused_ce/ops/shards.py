"""The ranks' shards of the vocabulary, for calls whose arguments are compared every time."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head.agree import compared
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.ranks.agreement import check_true_vocab_size
from megatron_fused_ce.ranks.collectives import VocabParallel


class Shards(NamedTuple):
    """First global ids and numbers of rows, by rank; the vocabulary is ``[first, end)``, without padding."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    end: int

    @staticmethod
    def agreed(call: Call, comm: VocabParallel, error: Exception | None, more: dict[str, int]) -> Shards:
        """Those of a call that the ranks compare; ``error`` and ``more``: see :func:`.agree.compared`.

        Collectives: those of :func:`.agree.compared`; the host waits.

        Raises:
            TypeError, ValueError: on every rank, where one is wrong or the ranks differ.
        """
        if comm.group is not None:
            settled = compared(call, comm, error, more=more)
            starts, sizes = settled.starts, settled.shard_sizes
        elif error is not None:
            raise error
        else:
            starts, sizes = (0,), (call.weight.shape[0],)
            check_true_vocab_size(call.config.true_vocab_size, sizes[0])
        # From here on every rank knows the same, and raises where one does.
        starts = starts or tuple(accumulate(sizes[:-1], initial=0))
        ranges = sorted((start, start + rows) for start, rows in zip(starts, sizes, strict=True))
        if any(left[1] != right[0] for left, right in pairwise(ranges)):
            raise ValueError(f"the vocabulary shards leave gaps: [start, stop) is {ranges}; expected none")
        end = ranges[-1][1] if call.config.true_vocab_size is None else call.config.true_vocab_size
        return Shards(starts, sizes, ranges[0][0], end)


#: Bytes of a chunk's logits, where ``config`` names no chunks and no budget.
CHUNK_BYTES = 1 << 30


def cut_of(
    config: FusedCEConfig, num_tokens: int, num_parts: int, token_bytes: int, multiple: int = 1
) -> Cut:
    """Chunks of whole rows of logits, for ``num_tokens`` of each of ``num_parts``: the same on every rank.

    Args:
        token_bytes: of one token in a chunk.
        multiple: of so many tokens are chunks that are cut by a budget and longer.
    """
    if config.num_chunks is not None:
        return Cut.into(num_tokens, config.num_chunks)
    tokens = (CHUNK_BYTES if config.memory_mb is None else config.memory_mb << 20) // token_bytes
    tokens = config.chunk_tokens or max(tokens - tokens % multiple, min(tokens, multiple), 1)
    return Cut.of_length(num_tokens, max(1, tokens // num_parts))
