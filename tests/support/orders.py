"""Steps of a head in other orders than one forward, one backward: on one rank or on a group's."""

from __future__ import annotations

import gc
import itertools
import time
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_cross_entropy,
    fused_linear_token_outputs,
    fused_linear_topk_distillation,
)
from megatron_fused_ce.head import tokens
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.grad_weight import InPlaceGradWeight
from megatron_fused_ce.scripts.lib.reference import LOSS_OPTIONS, make_inputs, make_teacher
from tests.support.faulty import Filled
from tests.support.op import rows_by

SIZES = {"s": 8, "b": 2, "hidden_size": 12, "vocab": 40}


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def end_with_alive(number: int) -> bool:
    """Whether no more tensors than that stay alive: gloo's thread gives its own back when it gets to it."""
    until = time.monotonic() + 20
    while tensors_alive() > number and time.monotonic() < until:
        time.sleep(0.01)
    return tensors_alive() <= number


class MicroBatch:
    """A micro-batch of its own of one weight; this rank's rows and tokens of both."""

    def __init__(self, strategy, seed, weight=None, *, rank=None, sp=False, **options):
        """``rank``: a :class:`.rank_process.Rank`; None for the whole. ``options``: of the config."""
        device = "cpu" if rank is None else rank.device
        inputs = make_inputs("plain", **SIZES, dtype=torch.float32, seed=seed, device=device)
        at, size = (0, 1) if rank is None else (rank.rank, rank.size)
        hidden = inputs.hidden.chunk(size)[at] if sp else inputs.hidden
        self.inputs = inputs
        self.hidden = hidden.clone().requires_grad_()
        if weight is None:
            weight = inputs.weight.chunk(size)[at].clone().requires_grad_()
        self.weight = weight
        self.labels, self.upstream = inputs.labels, inputs.grad_loss
        self.options: dict[str, Any] = {
            "tp_group": None if rank is None else rank.group,
            "sequence_parallel": sp,
            "token_weights": self.upstream,
            "config": FusedCEConfig(strategy=strategy, num_chunks=3, **options),
        }

    def forward(self, hidden=None):
        hidden = self.hidden if hidden is None else hidden
        return fused_linear_cross_entropy(hidden, self.weight, self.labels, **self.options)

    def backward(self, loss):
        """Gradients of hidden states and weight, returned."""
        return torch.autograd.grad(loss, (self.hidden, self.weight), self.upstream)

    def alone(self):
        """Both gradients of this micro-batch by itself."""
        return self.backward(self.forward())


def micro_batches(strategy, **where):
    """Three of one weight."""
    first = MicroBatch(strategy, 0, **where)
    return [first, *(MicroBatch(strategy, seed, first.weight, **where) for seed in (1, 2))]


def equal(ones, others) -> bool:
    return all(map(torch.equal, ones, others))


def forwards_without_backward(strategy, **where) -> None:
    """They leave nothing: the same losses, the same gradients, no tensor alive."""
    head = MicroBatch(strategy, 0, **where)
    expected = head.alone()
    first = head.forward().detach()
    time.sleep(0.05)  # what the collectives of the first held
    alive = tensors_alive()
    for _ in range(5):
        assert torch.equal(head.forward(), first)
    assert end_with_alive(alive)
    assert equal(head.alone(), expected)


def backwards_in_any_order(strategy, **where) -> None:
    """Three micro-batches under way at once, as in a pipeline: each backward is of its own forward."""
    heads = micro_batches(strategy, **where)
    expected = [head.alone() for head in heads]
    for order in itertools.permutations(range(3)):
        losses = [head.forward() for head in heads]
        for index in order:
            assert equal(heads[index].backward(losses[index]), expected[index]), order


def forwards_between_backwards(strategy, **where) -> None:
    """One forward, one backward in turn, always one micro-batch ahead; one of them is never asked for."""
    heads = micro_batches(strategy, **where)
    expected = [head.alone() for head in heads]
    waiting = heads[0].forward()
    for done, started in ((0, 1), (1, 2), (2, 0)):
        heads[started].forward()
        following = heads[started].forward()
        assert equal(heads[done].backward(waiting), expected[done])
        waiting = following


def accumulation_is_the_sum(strategy, **where) -> None:
    """Into one main_grad, the sum of what each micro-batch gives alone."""
    heads = micro_batches(strategy, **where)
    main_grad = torch.zeros_like(heads[0].weight)
    for head in heads:
        made = linear_cross_entropy(
            Call(
                head.hidden,
                head.weight,
                head.labels,
                **head.options,
                open_grad_weight=lambda weight, n, scaled: InPlaceGradWeight(main_grad, scaled, lambda: None),
            )
        )
        made.loss.backward(head.upstream)
    summed = sum(head.alone()[1] for head in heads)
    torch.testing.assert_close(main_grad, summed, rtol=2e-6, atol=2e-6)
    assert heads[0].weight.grad is None


def two_models(**where) -> None:
    """Other strategies, other shapes, their steps between each other's."""
    one, other = MicroBatch("grad_in_forward", 0, **where), MicroBatch("store", 1, **where)
    alone = one.alone(), other.alone()
    losses = one.forward(), other.forward()
    for head, loss, expected in zip((one, other), losses, alone, strict=True):
        assert equal(head.backward(loss), expected)


def nested_checkpoints(strategy, outer: bool, inner: bool, **where) -> None:
    """The forward runs again, twice for a nested one; without gradients in reentrant ones at first."""
    head = MicroBatch(strategy, 0, **where)

    def stack(hidden):
        return head.forward(hidden * 0.5)

    plain = stack(head.hidden)
    expected = head.backward(plain)
    again = partial(checkpoint, stack, use_reentrant=inner)
    loss = checkpoint(again, head.hidden, use_reentrant=outer)
    assert torch.equal(loss, plain)
    loss.backward(head.upstream)
    assert equal((head.hidden.grad, head.weight.grad), expected)


#: What a head may be asked for beside its loss, and every option of that.
ASKED = {
    "plain": {},
    **LOSS_OPTIONS,
    "scaled": {"logit_scale": 0.25},
    "rounded": {"logit_precision": "activations"},
    "all-reduced": {"merge": "all_reduce"},
    "skipped": {"skip_masked": True},
    "row kernels": {},
    "scaled-exp GEMM": {"logits_backend": "scaled_exp"},
    "argmax": {},
    "outputs": {},
    "distillation": {},
}
ASKED["masked padding"] = {"true_vocab_size": 33}  # within these 40
ASKED["all"] = {**ASKED["all"], "true_vocab_size": 37}


def filled(asked: str, strategy: str, value: float, **where) -> list[torch.Tensor]:
    """Results and gradients of a step in which all fresh memory holds ``value``."""
    head = MicroBatch(strategy, 0, **where, **ASKED[asked])
    if "skipped" in asked:
        head.upstream[:, 2:5] = 0.0
    given = (head.hidden, head.weight)
    rows = rows_by("triton" if asked == "row kernels" else "auto")
    with Filled(value) as empties, patch.object(tokens, "ROUND_TO", 2), rows:
        if asked == "argmax":
            made = linear_cross_entropy(Call(*given, head.labels, **head.options, with_argmax=True))
            results = [made.outputs[name] for name in ("loss", "shard_max", "shard_argmax")]
        elif asked == "outputs":
            names = ("log_prob", "lse", "entropy", "predicted", "correct")
            made = fused_linear_token_outputs(
                *given, head.labels, names, **head.options, differentiable=strategy != "grad_in_forward"
            )
            results = [made_one for made_one in made if made_one is not None]
        elif asked == "distillation":
            teacher = make_teacher(head.inputs, 4)
            results = [fused_linear_topk_distillation(*given, *teacher, **head.options)]
        else:
            results = [head.forward()]
        asked_for = [result for result in results if result.requires_grad]
        torch.autograd.backward(asked_for, [head.upstream] * len(asked_for))
    assert empties.count > 5
    return [result.detach() for result in results] + [head.hidden.grad, head.weight.grad]


def nothing_is_read_before_it_is_written(asked: str, strategy: str, **where) -> None:
    """Fresh memory of NaN, of zeros, of large numbers: the same bits."""
    expected = filled(asked, strategy, 0.0, **where)
    for value in (torch.nan, -3e38):
        assert equal(filled(asked, strategy, value, **where), expected), value
    assert all(torch.isfinite(result).all() for result in expected)
