"""What goes wrong in a step: afterwards no wrong number is left, and the next step is right to the bit."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, op, upstream_guard
from megatron_fused_ce.grad_weight import InPlaceGradWeight
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.strategies import KeepOrRecompute
from megatron_fused_ce.testing.reference import make_inputs
from megatron_fused_ce.upstream_guard import AbandonedGradient
from tests.ranks.faulty import OutOfMemoryAt, Step, out_of_memory_at
from tests.ranks.runner import case_names, run_cases
from tests.test_op import STRATEGIES


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture
def mixed(monkeypatch):
    """``auto`` stores the first of two chunks."""
    monkeypatch.setattr(op, "strategy_of", lambda *plan: KeepOrRecompute("mixed", 1))


CASES = {
    **{
        f"{strategy}, fp32 main_grad": (torch.bfloat16, strategy, "fp32")
        for strategy in (*STRATEGIES, "auto")
    },
    "eager, bf16 main_grad": (torch.bfloat16, "eager", "low"),
    "store, bf16 main_grad": (torch.bfloat16, "store", "low"),
    "store, fp16": (torch.float16, "store", "fp32"),
    "recompute, returned": (torch.float32, "recompute", "returned"),
    "store, options": (torch.float32, "store", "fp32", {"label_smoothing": 0.1, "z_loss": 1e-3}),
}


@pytest.mark.parametrize("case", CASES)
def test_out_of_memory_anywhere(case, request):
    """In every operator of a step, one after the other, with an earlier micro-batch's gradients there."""
    dtype, strategy, *others = CASES[case]
    if strategy == "auto":
        request.getfixturevalue("mixed")
    step = Step(dtype, strategy, *others)
    step.run()
    earlier = step.gradients()
    with OutOfMemoryAt() as counted:
        step.run()
    right = step.gradients()
    alive = tensors_alive()

    outcomes = Counter(
        out_of_memory_at(step, at, earlier, right) for at in range(1, counted.count + 1)
    )
    # Nothing is added in a forward.
    assert outcomes["untouched"] > counted.count / 4
    assert (outcomes["refused"] > 0) == (step.main_grad is not None), outcomes
    assert outcomes["whole"] < 8
    assert tensors_alive() <= alive + 4, "tensors of failed steps are still alive"


def test_an_optimizer_step_after_a_failed_backward():
    """Refused before it changes a parameter, as long as nobody has zeroed what was left."""
    step = Step(torch.float32, "store", "fp32")
    step.weight.grad = step.main_grad  # as an optimizer of torch's own would see it
    optimizer = torch.optim.SGD([step.weight, step.hidden], lr=1.0)
    before = step.weight.detach().clone()
    with OutOfMemoryAt() as counted:
        step.run()
    step.main_grad.zero_()
    with pytest.raises(torch.OutOfMemoryError), OutOfMemoryAt(counted.count - 3):
        step.run()
    for _ in range(2):
        with pytest.raises(AbandonedGradient):
            optimizer.step()
    assert torch.equal(step.weight, before)
    step.main_grad.zero_()
    step.run()
    optimizer.step()
    assert torch.isfinite(step.weight).all() and not torch.equal(step.weight, before)


def test_a_buffer_that_is_gone_stops_nothing():
    """A model that was thrown away after its backward failed."""
    upstream_guard.refuse(torch.zeros(3, 2))
    gc.collect()
    upstream_guard.check()


@pytest.mark.parametrize("name", case_names("tests.ranks.fault_cases"))
def test_out_of_memory_on_all_ranks(name):
    run_cases("tests.ranks.fault_cases", 2).check(name)


# --- steps in other orders -------------------------------------------------------------------


class Head:
    """A micro-batch of its own of one weight."""

    def __init__(self, strategy, seed, weight=None):
        inputs = make_inputs(
            "plain", s=8, b=2, hidden_size=12, vocab=40, dtype=torch.float32, seed=seed
        )
        self.hidden = inputs.hidden.requires_grad_()
        self.weight = inputs.weight.requires_grad_() if weight is None else weight
        self.labels, self.upstream = inputs.labels, inputs.grad_loss
        self.config = FusedCEConfig(strategy=strategy, num_chunks=3)

    def forward(self, hidden=None):
        return fused_linear_cross_entropy(
            self.hidden if hidden is None else hidden,
            self.weight,
            self.labels,
            token_weights=self.upstream,
            config=self.config,
        )

    def alone(self):
        """Both gradients of this micro-batch by itself."""
        return torch.autograd.grad(self.forward(), (self.hidden, self.weight), self.upstream)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forwards_without_backward(strategy):
    """They leave nothing: the same losses, the same gradients, no tensor alive."""
    head = Head(strategy, 0)
    expected = head.alone()
    first = head.forward().detach()
    alive = tensors_alive()
    for _ in range(5):
        assert torch.equal(head.forward(), first)
    assert tensors_alive() == alive
    assert all(map(torch.equal, head.alone(), expected))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backwards_in_any_order(strategy, order):
    """Three micro-batches under way at once, as in a pipeline: each backward is of its own forward."""
    heads = [Head(strategy, 0)]
    heads += [Head(strategy, seed, heads[0].weight) for seed in (1, 2)]
    expected = [head.alone() for head in heads]
    losses = [head.forward() for head in heads]
    for index in order:
        head = heads[index]
        made = torch.autograd.grad(losses[index], (head.hidden, head.weight), head.upstream)
        assert all(map(torch.equal, made, expected[index]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_is_the_sum(strategy):
    """Into one main_grad, bitwise the sum in the order of the backwards where each adds once."""
    heads = [Head(strategy, 0)]
    heads += [Head(strategy, seed, heads[0].weight) for seed in (1, 2)]
    main_grad = torch.zeros_like(heads[0].weight)
    for head in heads:
        made = linear_cross_entropy(
            head.hidden,
            head.weight,
            head.labels,
            token_weights=head.upstream,
            config=head.config,
            open_grad_weight=lambda weight, n, scaled: InPlaceGradWeight(
                main_grad, n, scaled, lambda: None
            ),
        )
        made.loss.backward(head.upstream)
    summed = sum(head.alone()[1] for head in heads)
    torch.testing.assert_close(main_grad, summed, rtol=2e-6, atol=2e-6)
    assert heads[0].weight.grad is None


def test_two_models_in_one_process():
    """Other strategies, other shapes, their steps between each other's."""
    one, other = Head("eager", 0), Head("store", 1)
    alone = one.alone(), other.alone()
    losses = one.forward(), other.forward()
    made = [
        torch.autograd.grad(loss, (head.hidden, head.weight), head.upstream)
        for loss, head in zip(losses, (one, other), strict=True)
    ]
    for ours, expected in zip(made, alone, strict=True):
        assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("inner", [True, False], ids=["reentrant inside", "not reentrant inside"])
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nested_checkpoints(strategy, outer, inner):
    """The forward runs again, twice for a nested one; without gradients in reentrant ones at first."""
    head = Head(strategy, 0)

    def stack(hidden):
        return head.forward(hidden * 0.5)

    plain = stack(head.hidden)
    expected = torch.autograd.grad(plain, (head.hidden, head.weight), head.upstream)
    again = partial(checkpoint, stack, use_reentrant=inner)
    loss = checkpoint(again, head.hidden, use_reentrant=outer)
    assert torch.equal(loss, plain)
    loss.backward(head.upstream)
    assert torch.equal(head.hidden.grad, expected[0])
    assert torch.equal(head.weight.grad, expected[1])
