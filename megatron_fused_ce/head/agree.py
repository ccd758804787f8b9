"""Compares the arguments of a call over the ranks of its group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.head.call import Call, OtherTargets
from megatron_fused_ce.losses.words import in_words
from megatron_fused_ce.ranks.agreement import Settled, compare, compare_numbers
from megatron_fused_ce.ranks.collectives import VocabParallel

#: Fields of a call that must be equal on every rank, beside config and terms. Tensors are equal if shape,
#: dtype and requires_grad are. Each rank has its own rows of the weight, vocab_start, head and accumulator.
AGREED = (
    *("hidden", "labels", "token_weights", "temperature", "sequence_parallel", "outputs", "differentiable"),
    *("zero_unknown", "reduce_grad_hidden", "with_argmax", "uses_in_flight", "may_store"),
)


def must_agree(call: Call) -> dict[str, str]:
    """Text of every value that must be equal on all ranks, by the name that an error gives it.

    Raises:
        TypeError: a value cannot be compared. Also raised over one rank, before anybody tries two.
    """
    requires_grad = call.hidden.requires_grad or call.weight.requires_grad
    grad_mode = "on" if torch.is_grad_enabled() else "off"
    words = {"grad mode": grad_mode if requires_grad else "no operand requires a gradient"}
    words |= {name: _described(getattr(call, name)) for name in AGREED}
    words["labels or teacher"] = _described(call.other_targets)
    words["terms"] = ", ".join(f"{name} {term.in_words()}" for name, term in call.terms)
    words["weight"] = _described(call.weight[:0])  # shards may differ in rows
    words["vocab_start given"] = str(call.vocab_start is not None)
    return words | {name: in_words(value) for name, value in vars(call.config).items()}


def _described(value: Any) -> str:
    """Text of an argument; for tensors dtype, shape and requires_grad."""
    if isinstance(value, OtherTargets):
        return ", ".join(f"{name} {_described(given)}" for name, given in value.arguments.items())
    if not isinstance(value, Tensor):
        return in_words(value)
    grad = ", requires grad" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{grad}"


def compared(
    call: Call,
    comm: VocabParallel,
    error: Exception | None,
    of_rank: dict[str, int] | None = None,
    more: dict[str, int] | None = None,
) -> Settled:
    """Compare a call over the ranks of its group; return what they settled.

    Args:
        error: what this rank found wrong with its arguments; raised on every rank.
        of_rank: as for :func:`.agreement.compare`.
        more: numbers that must be equal on every rank, beside the call's own arguments.

    Collectives and errors: those of :func:`.agreement.compare`; then, with ``config.debug_checks``, those of
    :func:`.agreement.compare_numbers` for every tensor with a number per token.
    """
    assert comm.group is not None
    same: dict[str, str] = {}
    start, num_rows, vocab_size = None, 0, call.config.true_vocab_size
    if error is None:
        start, num_rows = call.vocab_start, call.weight.shape[0]
        same = must_agree(call) | {name: str(value) for name, value in (more or {}).items()}
    settled = compare(comm.group, same, of_rank or {}, start, num_rows, vocab_size, error)
    if call.config.debug_checks:
        others = call.other_targets
        per_token = {name: getattr(call, name) for name in ("labels", "token_weights", "temperature")}
        compare_numbers(per_token | {name: others.arguments[name] for name in others.per_token}, comm.group)
    return settled
