"""Steps of a head in other orders than one forward, one backward: on one rank or on a group's."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce.head import tokens
from megatron_fused_ce.losses.outputs import OUTPUTS
from tests.support.faulty import Filled, Step
from tests.support.losses import LOSS_OPTIONS, Loss
from tests.support.op import rows_by


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class MicroBatch(Step):
    """A micro-batch of its own of one weight; this rank's rows and tokens of both."""

    def __init__(self, strategy, seed, weight=None, *, rank=None, sp=False, **options):
        """``options``: of the config."""
        options = {"num_chunks": 3, **options}
        of_step = {"kind": "plain", "seed": seed, "weight": weight}
        super().__init__(torch.float32, strategy, "returned", options, rank, sp, **of_step)

    def backward(self, loss):
        """Gradients of hidden states and weight, returned."""
        return torch.autograd.grad(loss, (self.hidden, self.weight), self.grad_loss)

    def alone(self):
        """Both gradients of this micro-batch by itself."""
        return self.backward(self.forward())


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
    until = time.monotonic() + 20
    while tensors_alive() > alive and time.monotonic() < until:
        time.sleep(0.01)  # gloo's thread gives its own back when it gets to it
    assert tensors_alive() <= alive
    assert equal(head.alone(), expected)


def backwards_in_any_order(strategy, **where) -> None:
    """Three micro-batches under way at once, as in a pipeline: each backward is of its own forward."""
    heads = [MicroBatch(strategy, 0, **where)]
    heads += [MicroBatch(strategy, seed, heads[0].weight, **where) for seed in (1, 2)]
    expected = [head.alone() for head in heads]
    for order in itertools.permutations(range(3)):
        losses = [head.forward() for head in heads]
        for index in order:
            assert equal(heads[index].backward(losses[index]), expected[index]), order


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
    loss.backward(head.grad_loss)
    assert equal((head.hidden.grad, head.weight.grad), expected)


#: What a head may be asked for, and every option of that.
ASKED = {
    **{name: Loss(options) for name, options in LOSS_OPTIONS.items()},
    "plain": Loss(),
    "scaled": Loss({"logit_scale": 0.25}),
    "rounded": Loss({"logit_precision": "activations"}),
    "all-reduced": Loss({"merge": "all_reduce"}),
    "skipped": Loss({"skip_masked": True}),
    "row kernels": Loss(),
    "scaled-exp GEMM": Loss({"logits_backend": "scaled_exp"}),
    "outputs": Loss(beside=tuple(OUTPUTS)),
    "distillation": Loss(entries=4),
    "masked padding": Loss({"true_vocab_size": 33}),  # within these 40
    "all": Loss({**LOSS_OPTIONS["all"], "true_vocab_size": 37}),
}


def filled(asked: str, strategy: str, value: float, **where) -> list[torch.Tensor]:
    """Results and gradients of a step in which all fresh memory holds ``value``."""
    loss = replace(ASKED[asked], differentiable=strategy != "grad_in_forward")
    head = MicroBatch(strategy, 0, **where, **loss.options)
    if "skipped" in asked:
        head.grad_loss[:, 2:5] = 0.0
        head.options["token_weights"] = head.grad_loss * 2
    rows = rows_by("triton" if asked == "row kernels" else "auto")
    with Filled(value) as empties, patch.object(tokens, "ROUND_TO", 2), rows:
        results = list(loss.ask(head.hidden, head.weight, head.inputs, **head.options).values())
        asked_for = [result for result in results if result.requires_grad]
        torch.autograd.backward(asked_for, [head.grad_loss] * len(asked_for))
    assert empties.count > 5
    return [result.detach() for result in results] + [head.hidden.grad, head.weight.grad]


def nothing_is_read_before_it_is_written(asked: str, strategy: str, **where) -> None:
    """Fresh memory of NaN, of zeros, of large numbers: the same bits."""
    expected = filled(asked, strategy, 0.0, **where)
    for value in (torch.nan, -3e38):
        assert equal(filled(asked, strategy, value, **where), expected), value
    assert all(torch.isfinite(result).all() for result in expected)
