"""Cuts the tokens into chunks: pure arithmetic, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, stop)`` of every rank's part.

    With sequence parallelism chunk ``c`` is the *same slice of every rank's part*: its gather and the
    reduce-scatter of its ``grad_hidden`` then land in Megatron's layout without a permutation.
    """

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """One way to cut a part, the tokens of one rank, into chunks. No chunk is empty."""

    num_tokens: int
    count: int  # of chunks; 0 for an empty part
    longest: int  # tokens of the longest chunk
    equal: bool  # whether lengths differ by one token at most; else only the last chunk is shorter

    @classmethod
    def into(cls, num_tokens: int, num_chunks: int) -> Cut:
        """``num_chunks`` chunks, or as many as there are tokens."""
        count = min(num_chunks, num_tokens)
        return cls(num_tokens, count, -(-num_tokens // max(1, count)), True)

    @classmethod
    def of_length(cls, num_tokens: int, length: int) -> Cut:
        return cls(num_tokens, -(-num_tokens // length), min(length, num_tokens), False)

    def tokens_of(self, first: int) -> int:
        """Tokens of the ``first`` chunks together."""
        if self.equal:
            return self.num_tokens * first // max(1, self.count)
        return min(self.num_tokens, self.longest * first)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        bounds = pairwise(self.tokens_of(first) for first in range(self.count + 1))
        return tuple(Chunk(index, start, stop) for index, (start, stop) in enumerate(bounds))
