"""The head's phases in a profile: their names, where they stand, and the same results."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.ranks.phases import PHASES
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.op import STRATEGIES

FORWARD, BACKWARD = ("logits", "statistics", "merge"), ("grad-logits", "grad-hidden", "grad-weight", "reduce")
#: Where each strategy spends its time on one rank.
EXPECTED = {
    "store": (set(FORWARD), set(BACKWARD)),
    "recompute": (set(FORWARD), set(BACKWARD)),
    "grad_in_forward": ({*FORWARD, *BACKWARD}, {"grad-hidden", "grad-weight"}),
}


def step(strategy, device, wait=lambda: None, inputs=None):
    """Loss and gradients of one call; ``wait`` is called between forward and backward."""
    if inputs is None:
        sizes = {"s": 12, "b": 2, "hidden_size": 16, "vocab": 40}
        inputs = make_inputs("odd-labels", **sizes, dtype=torch.float32, device=device)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    config = FusedCEConfig(strategy=strategy, num_chunks=3)
    weights = inputs.grad_loss if strategy == "grad_in_forward" else None
    made = linear_cross_entropy(Call(hidden, weight, inputs.labels, token_weights=weights, config=config))
    wait()
    made.loss.backward(inputs.grad_loss)
    return made.loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_profile_has_the_phases_and_the_same_results(strategy, device):
    passes = [torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) for _ in range(2)]

    def begin_backward():
        passes[0].stop()
        passes[1].start()

    passes[0].start()
    profiled = step(strategy, device, wait=begin_backward)
    passes[1].stop()
    for made, plain in zip(profiled, step(strategy, device), strict=True):
        assert torch.equal(made, plain)
    forward, backward = (
        [event.name.removeprefix("fused-ce ") for event in one.events() if "fused-ce" in event.name]
        for one in passes
    )
    assert (set(forward), set(backward)) == EXPECTED[strategy]
    assert {*forward, *backward} <= PHASES.keys()
    assert forward.count("logits") == 3, "one for each chunk"


def test_nothing_is_recorded_where_nobody_does(device, monkeypatch):
    """A range would take longer than the rest of a phase on the host."""
    monkeypatch.setattr(torch.profiler, "record_function", None)
    step("store", device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_host_waits_for_nothing_on_a_gpu(strategy, device):
    # Made before, since their copies to the device wait.
    sizes = {"s": 2048, "b": 2, "hidden_size": 16, "vocab": 32768}
    inputs = make_inputs("odd-labels", **sizes, dtype=torch.bfloat16, device=device)
    step(strategy, device, inputs=inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(strategy, device, inputs=inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
