"""The head's phases in a profile and for a recorder: their names, their order, and the same results."""

from __future__ import annotations

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.ranks.phases import PHASES, Recorder
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
def test_recorded_is_the_same(strategy, device):
    forward, backward = Recorder(device), Recorder(device)
    with forward:
        recorded = step(strategy, device, wait=backward.__enter__)
    for made, plain in zip(recorded, step(strategy, device), strict=True):
        assert torch.equal(made, plain)
    found = forward.seconds(), backward.seconds()
    assert tuple({name for name, _ in of_pass} for of_pass in found) == EXPECTED[strategy]
    assert all(seconds > 0 for of_pass in found for _, seconds in of_pass)
    assert [name for name, _ in found[0]].count("logits") == 3, "one for each chunk"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_profile_has_the_phases(strategy, device):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(strategy, device)
    names = {event.name.removeprefix("fused-ce ") for event in profile.events() if "fused-ce" in event.name}
    assert names == set.union(*EXPECTED[strategy]) <= PHASES.keys()


def test_nothing_is_recorded_where_nobody_does(device, monkeypatch):
    """Neither a range nor an event: each would take longer than the rest of a phase on the host."""
    monkeypatch.setattr(torch.profiler, "record_function", None)
    step("store", device)


def test_a_failed_phase_stops_nothing():
    recorder = Recorder(torch.device("cpu"))
    with pytest.raises(RuntimeError), recorder, recorder.timed("merge"):
        raise RuntimeError
    step("store", torch.device("cpu"))
    assert recorder.seconds() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_host_waits_for_nothing_on_a_gpu(strategy, device):
    # Made before, since their copies to the device wait.
    sizes = {"s": 2048, "b": 2, "hidden_size": 16, "vocab": 32768}
    inputs = make_inputs("odd-labels", **sizes, dtype=torch.bfloat16, device=device)
    step(strategy, device, inputs=inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Recorder(device):
            step(strategy, device, inputs=inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
