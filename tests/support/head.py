"""A head over a tensor-parallel group: this rank's part of a problem, and the whole result again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce.planner import choose
from megatron_fused_ce.ranks import agreement, collectives
from megatron_fused_ce.scripts.lib.reference import HeadInputs, make_inputs
from tests.support.ranks import Rank

SIZES = {"s": 24, "b": 3, "hidden_size": 32, "vocab": 97}

#: Rows of the ranks' shards. Those of the scaled-exp GEMM take memory in multiples of 16 bytes.
SHARDS = {
    ("equal", 100): {1: (100,), 2: (50, 50), 4: (25, 25, 25, 25)},
    ("unequal", 97): {1: (97,), 2: (64, 33), 4: (1, 50, 13, 33)},
    ("equal", 512): {1: (512,), 2: (256, 256), 4: (128, 128, 128, 128)},
    ("unequal", 512): {1: (512,), 2: (384, 128), 4: (8, 264, 40, 200)},
    ("unequal", 12800): {2: (6656, 6144)},
}


def rows_of(rank: Rank, kind: str, vocab: int) -> slice:
    """This rank's rows of the vocabulary; ``kind``: equal or unequal shards."""
    sizes = SHARDS[kind, vocab][rank.size]
    start = sum(sizes[: rank.rank])
    return slice(start, start + sizes[rank.rank])


def tokens_of(rank: Rank, s: int, sequence_parallel: bool) -> slice:
    """This rank's positions of a sequence."""
    if not sequence_parallel:
        return slice(0, s)
    return slice(rank.rank * s // rank.size, (rank.rank + 1) * s // rank.size)


def scaled_exp_dtype(rank: Rank) -> torch.dtype:
    """What the scaled-exp GEMM runs in: bf16 on GPUs, fp32 by Triton's interpreter."""
    return torch.bfloat16 if rank.device.type == "cuda" else torch.float32


def plain_inputs(rank: Rank, **sizes: int) -> HeadInputs:
    return make_inputs("plain", **{**SIZES, **sizes}, dtype=torch.float32, device=rank.device)


def shard_of(
    rank: Rank, inputs: HeadInputs, sequence_parallel: bool, shards: str = "unequal"
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Leaves, this rank's tokens ``[s', b, H]`` and rows ``[V', H]``, and the group's arguments."""
    weight = inputs.weight[rows_of(rank, shards, inputs.weight.shape[0])]
    hidden = inputs.hidden[tokens_of(rank, inputs.hidden.shape[0], sequence_parallel)]
    group = {"tp_group": rank.group, "sequence_parallel": sequence_parallel}
    return hidden.clone().requires_grad_(), weight.clone().requires_grad_(), group


@contextlib.contextmanager
def fresh_group(rank: Rank) -> Iterator[dist.ProcessGroup]:
    """A group that has had no call."""
    group = dist.new_group(list(range(rank.size)))
    yield group
    dist.destroy_process_group(group)


def same_on_all_ranks(rank: Rank, *values: Tensor | None) -> None:
    """In bits, as NaN too is equal to itself; compared by one digest, in one collective."""
    seen = hashlib.sha256()
    for value in values:
        if value is not None:
            seen.update(f"{value.dtype} {tuple(value.shape)}".encode())
            seen.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    mine = torch.tensor(list(seen.digest()), dtype=torch.uint8, device=rank.device)
    digests = [torch.zeros_like(mine) for _ in range(rank.size)]
    dist.all_gather(digests, mine)
    assert all(torch.equal(mine, digest) for digest in digests), "the ranks' values differ"


def whole(rank: Rank, sp: bool, grad_hidden: Tensor, grad_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of all tokens and rows, on every rank.

    Without sequence parallelism every rank has the first, the same to the bit.
    """
    if not sp:
        same_on_all_ranks(rank, grad_hidden)
    parts: list[Any] = [None] * rank.size
    dist.all_gather_object(parts, (grad_hidden.cpu(), grad_weight.detach().cpu()))
    of_tokens, of_rows = (torch.cat(each).to(rank.device) for each in zip(*parts, strict=True))
    return of_tokens if sp else grad_hidden, of_rows


@contextlib.contextmanager
def strategy_in_place(strategy: str, stored_chunks: int = 1) -> Iterator[str]:
    """The name to give a config. ``mixed`` is otherwise the planner's choice, for budgets of whole MiB: every
    plan stores the first chunks and recomputes the others."""
    if strategy != "mixed":
        yield strategy
        return
    plan, changes = choose.plan, {"strategy": "mixed", "stored_chunks": stored_chunks, "wgrad_at_once": False}
    agreement.forget()
    try:
        with patch.object(choose, "plan", lambda inputs: replace(plan(inputs), **changes)):
            yield "store"
    finally:
        agreement.forget()


@contextlib.contextmanager
def collectives_run(at: str) -> Iterator[None]:
    """At their ``start`` or their ``wait``, no sooner, each alone, also those that NCCL launches as one."""

    def start(collective: Any, *tensors: Tensor, beside: bool = True, **options: Any) -> Any:
        once = functools.cache(functools.partial(collective, *tensors, **options))
        if at == "start":
            once()
        return SimpleNamespace(wait=once)

    alone = patch.object(collectives.VocabParallel, "coalesced", lambda *_: contextlib.nullcontext())
    with patch.object(collectives, "_start", start), alone:
        yield
