"""Which optimizers a guard stops: those of the model that holds its head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_fused_ce.grad_guard import (
    WITHOUT_MODEL,
    Guard,
    UpstreamMismatch,
    raise_if_mismatch,
    stepping,
)


@pytest.fixture
def models():
    """Actor and critic, and a guard for each."""
    actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    guards = Guard("the head of the actor", [actor]), Guard("the head of the critic", [critic])
    yield actor, critic, *guards
    for guard in (*guards, WITHOUT_MODEL):
        guard.clear()


def sgd(parameters) -> torch.optim.Optimizer:
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=0.1)


def copies_of(model: nn.Module) -> list[torch.Tensor]:
    """As an optimizer for bf16 parameters makes them in fp32."""
    return [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]


def mismatch(guard: Guard) -> None:
    guard.record_mismatch(torch.tensor(True))


def test_its_own_optimizer_stops_and_another_models_does_not(models):
    actor, critic, _, of_critic = models
    mismatch(of_critic)
    sgd(actor.parameters()).step()
    with pytest.raises(UpstreamMismatch, match="the per-token loss of the head of the critic is not"):
        sgd(critic.parameters()).step()
    sgd(critic.parameters()).step()


def test_an_optimizer_of_a_part_stops(models):
    """Its head's gradient went through every layer below."""
    _, critic, _, of_critic = models
    mismatch(of_critic)
    with pytest.raises(UpstreamMismatch):
        sgd([critic.bias]).step()


def test_an_optimizer_of_both_models_stops_for_either(models):
    actor, critic, *guards = models
    for guard in guards:
        mismatch(guard)
        with pytest.raises(UpstreamMismatch, match=guard.heads):
            sgd([*actor.parameters(), *critic.parameters()]).step()


@pytest.mark.parametrize("of_nothing", [False, True])
def test_parameters_that_nobody_knows_stop(models, of_nothing):
    """Copies of the critic's, say, or an optimizer without any parameter yet."""
    actor, critic, _, of_critic = models
    mismatch(of_critic)
    optimizer = sgd(copies_of(critic))
    if of_nothing:
        optimizer.param_groups[0]["params"].clear()
    with pytest.raises(UpstreamMismatch):
        optimizer.step()
    mismatch(of_critic)
    with pytest.raises(UpstreamMismatch):
        sgd([*actor.parameters(), *copies_of(critic)]).step()


def test_an_optimizer_around_says_whose_the_copies_are(models):
    actor, critic, _, of_critic = models
    elsewhere = nn.Linear(2, 2)
    mismatch(of_critic)
    for model in (actor, elsewhere):
        with stepping(lambda model=model: list(model.parameters())):
            sgd(copies_of(model)).step()
    with stepping(lambda: list(critic.parameters())), pytest.raises(UpstreamMismatch):
        sgd(copies_of(critic)).step()
    mismatch(of_critic)
    with stepping(lambda: None), pytest.raises(UpstreamMismatch):
        sgd(copies_of(actor)).step()


def test_a_head_without_a_model_stops_every_optimizer(models):
    actor, *_ = models
    mismatch(WITHOUT_MODEL)
    with pytest.raises(UpstreamMismatch, match="a head without a model"):
        sgd(actor.parameters()).step()
    sgd(actor.parameters()).step()


def test_check_without_an_optimizer_raises_for_any_model(models):
    *_, of_critic = models
    mismatch(of_critic)
    with pytest.raises(UpstreamMismatch):
        raise_if_mismatch()
    raise_if_mismatch()


def test_a_captured_step_asserts_its_own_models_flag(models, monkeypatch):
    """As if this CPU were a GPU that captures: an assertion here is checked at once."""
    actor, critic, _, of_critic = models
    mismatch(of_critic)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    flag_on = Guard.flag_on
    monkeypatch.setattr(Guard, "flag_on", lambda guard, _: flag_on(guard, torch.device("cpu")))
    raise_if_mismatch(list(actor.parameters()))
    with stepping(lambda: list(actor.parameters())):
        raise_if_mismatch(copies_of(actor))
    for stepped in (list(critic.parameters()), copies_of(actor), None):
        with pytest.raises(RuntimeError, match="not a scalar times the token weights"):
            raise_if_mismatch(stepped)


def test_a_guard_ends_with_its_model():
    """Nothing global holds it: a model built anew for each trial leaves none behind."""
    import gc

    from megatron_fused_ce import grad_guard

    gc.collect()
    before = len(grad_guard._guards)
    mismatch(Guard("a head", [nn.Linear(2, 2)]))
    gc.collect()
    assert len(grad_guard._guards) == before
    raise_if_mismatch()
