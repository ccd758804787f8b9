"""Cuts the tokens into chunks: pure arithmetic, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_fused_ce.config import DEFAULT_CHUNK_TOKENS, FusedCEConfig


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, stop)`` of every rank's part.

    With sequence parallelism chunk ``c`` is the *same slice of every rank's part*: its gather and the
    reduce-scatter of its ``grad_hidden`` then land in Megatron's layout without a permutation.
    """

    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def plan_chunks(num_tokens: int, num_parts: int, config: FusedCEConfig) -> tuple[Chunk, ...]:
    """Cut ``num_tokens`` tokens of each of ``num_parts`` ranks into chunks.

    Args:
        num_tokens: tokens in this rank's part (``T / R`` with sequence parallelism, else ``T``).
        num_parts: ranks whose parts make up one chunk (``R`` with sequence parallelism, else 1).
        config: ``num_chunks`` equal chunks, or ``chunk_tokens`` tokens each with a ragged last one.

    Returns:
        The chunks in order; none for an empty batch, never an empty chunk.
    """
    if num_tokens == 0:
        return ()
    if config.num_chunks is not None:
        num_chunks = min(config.num_chunks, num_tokens)
        bounds = [num_tokens * i // num_chunks for i in range(num_chunks + 1)]
    else:
        chunk_tokens = config.chunk_tokens or DEFAULT_CHUNK_TOKENS
        step = max(1, chunk_tokens // num_parts)
        bounds = [*range(0, num_tokens, step), num_tokens]
    return tuple(Chunk(index, start, stop) for index, (start, stop) in enumerate(pairwise(bounds)))


def first_tokens(chunks: tuple[Chunk, ...], num_tokens: int) -> tuple[Chunk, ...]:
    """The leading chunks with the first ``num_tokens`` tokens of each part; the last one is shortened."""
    return tuple(
        replace(chunk, stop=min(chunk.stop, num_tokens)) for chunk in chunks if chunk.start < num_tokens
    )
