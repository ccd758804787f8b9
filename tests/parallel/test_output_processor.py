"""output_processor in Megatron's models against the log-softmax of their logits, flag on and off."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.scripts.lib.live_storages import LogitStorages
from tests.support import megatron
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, VOCAB, Model, build, flag, have_groups, of_core
from tests.support.ranks import Rank, on_ranks

BOUND = 2e-7
CORES = [of_core(2, NEWEST), of_core(1, NEWEST, pytest.mark.rest)]
MODELS = {
    "tied sp": Model(tied=True, sequence_parallel=True),
    "mup fused wgrad": Model(mup=True, fused_wgrad=True),
    "bf16 sp": Model(dtype=torch.bfloat16, sequence_parallel=True),
}


def turned(on: bool, **options: Any) -> Any:
    """The flag on, or what is counted without it."""
    return flag(**options) if on else megatron.counted()


class Step:
    """Results and gradients of one step of a model under Megatron's DDP."""

    def __init__(self, model: Model, rank: Rank, entropy: str, by_processor: bool, config: Any) -> None:
        from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

        from megatron_fused_ce import output_processor

        built = build(model, rank)
        training = megatron.Training(rank, megatron.as_called(model, built))
        training.zero_grad()
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator).to(rank.device)
        temperature = torch.rand(BATCH, SEQUENCE, generator=generator).to(rank.device) + 0.5
        upstream = torch.randn(2, BATCH, SEQUENCE, generator=generator).to(rank.device)
        active = torch.rand(BATCH, SEQUENCE, generator=generator).to(rank.device) < 0.7
        upstream = upstream.masked_fill(~active, 0.0)
        labels, where = ids.roll(-1, 1), megatron.positions_and_mask(rank)
        with LogitStorages(vocab_rows=VOCAB // rank.size, hidden_size=megatron.HIDDEN) as self.storages:
            if by_processor:
                context = {"temperature": temperature, "entropy": entropy, "config": config}
                context["active_mask"] = active
                self.log_prob, self.entropy = training.ddp(
                    ids, *where, labels=labels,
                    output_processor=output_processor, output_processor_context=context,
                )  # fmt: skip
            else:
                logits = training.ddp(ids, *where, labels=None)
                z = gather_from_tensor_model_parallel_region(logits).float() / temperature[..., None]
                log_p = z.log_softmax(-1)
                self.log_prob = log_p.gather(-1, labels[..., None])[..., 0].masked_fill(~active, 0.0)
                self.entropy = -(log_p.exp() * log_p).sum(-1).masked_fill(~active, 0.0)
            total = (self.log_prob * upstream[0]).sum()
            if entropy == "differentiable":
                total = total + (self.entropy * upstream[1]).sum()
            total.backward()
        training.ddp.finish_grad_sync()
        self.gradients = {name: parameter.main_grad for name, parameter in built.named_parameters()}


@on_ranks(*CORES)
@pytest.mark.parametrize(("entropy", "on"), [("detached", False), ("differentiable", True)])
@pytest.mark.parametrize("name", MODELS)
def test_against_logits(rank: Rank, name, on, entropy):
    model = MODELS[name]
    have_groups(rank.size)
    half = model.dtype == torch.bfloat16
    options = {"strategy": "recompute", "num_chunks": 6, "logit_precision": "activations" if half else "auto"}
    right = Step(model, rank, entropy, False, None)
    with patch.object(tokens, "ROUND_TO", 1), turned(on, **options) as seen:
        got = Step(model, rank, entropy, True, None if on else FusedCEConfig(**options))
    assert seen.counts == (1, 0, 0)
    for made, expected in ((got.log_prob, right.log_prob), (got.entropy, right.entropy)):
        assert made.dtype == torch.float32 and made.shape == (BATCH, SEQUENCE)
        difference = (made.detach().double() - expected.detach().double()).norm()
        assert difference <= (1e-2 if half else BOUND) * expected.detach().double().norm()
    assert got.entropy.requires_grad == (entropy == "differentiable")
    megatron.assert_same_gradients(got.gradients, right.gradients, half)
    everything = 4 * BATCH * SEQUENCE * VOCAB // rank.size
    assert right.storages.peak_bytes >= everything
    if entropy == "detached":
        assert 0 < got.storages.peak_bytes <= everything * 4 / 6


@on_ranks(*CORES)
def test_several_labels_a_token(rank: Rank):
    """`[b, s, K]` as the model's labels: values and main_grad of as many calls with one each."""
    from megatron_fused_ce import output_processor

    have_groups(rank.size)
    built = build(Model(fused_wgrad=True, sequence_parallel=True), rank)
    training = megatron.Training(rank, built)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator).to(rank.device)
    upstream = torch.randn(BATCH, SEQUENCE, 2, generator=generator).to(rank.device)
    labels = torch.stack((ids.roll(-1, 1), ids.roll(-2, 1)), -1)
    results = []
    for together in (True, False):
        training.zero_grad()
        made = []
        for given in [labels] if together else labels.unbind(-1):
            log_prob, *_ = training.ddp(
                ids, *megatron.positions_and_mask(rank), labels=given, output_processor=output_processor
            )
            made.append(log_prob.view(BATCH, SEQUENCE, -1))
        (torch.cat(made, -1) * upstream).sum().backward()
        training.ddp.finish_grad_sync()
        gradients = [parameter.main_grad.clone() for parameter in built.parameters()]
        results.append([torch.cat(made, -1).detach(), *gradients])
    for one, other in zip(*results, strict=True):
        assert other.norm() > 0 and (one - other).norm() <= megatron.GRADIENT_BOUND * other.norm()


@on_ranks(of_core(1, NEWEST))
@pytest.mark.parametrize("on", [False, True], ids=["", "flag"])
def test_the_weight_is_read_inside_the_layers_call(rank: Rank, on):
    """DDP and FSDP gather it in a hook before the layer's forward; afterwards the layer is as it was."""
    import megatron_fused_ce

    have_groups(1)
    with turned(on):
        built = build(Model(), rank)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device=rank.device)
    given = {"labels": ids, "output_processor": megatron_fused_ce.output_processor}
    call = functools.partial(built, ids, *megatron.positions_and_mask(rank), **given)
    right = call()
    weight, layer = built.output_layer.weight, built.output_layer
    gathered, before = weight.detach().clone(), dict(vars(layer))
    weight.data.fill_(torch.nan)

    def gather(module: Any, inputs: Any) -> None:
        weight.data.copy_(gathered)

    hook = layer.register_forward_pre_hook(gather)
    assert torch.equal(call().log_prob, right.log_prob)
    hook.remove()
    assert vars(layer).keys() == before.keys()


BIAS = torch.nn.Parameter(torch.zeros(VOCAB))
REFUSED = {
    "a bias": (lambda layer: setattr(layer, "bias", BIAS), "layer has a bias"),
    "a hook": (lambda layer: layer.register_forward_hook(print), "a forward hook .builtins.print. may read"),
    "a forward": (lambda layer: setattr(layer, "forward", print), "its forward is builtins.print"),
    "a class": (
        lambda layer: setattr(layer, "__class__", type("Head", (type(layer),), {"forward": print})),
        "output layer is .*Head",
    ),
}


@on_ranks(of_core(1, NEWEST))
@pytest.mark.parametrize("what", REFUSED)
def test_a_head_that_may_do_more_is_refused(rank: Rank, what):
    import megatron_fused_ce

    have_groups(1)
    built = build(Model(), rank)
    change, words = REFUSED[what]
    change(built.output_layer)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device=rank.device)
    processor = {"output_processor": megatron_fused_ce.output_processor}
    with pytest.raises(ValueError, match=f"output_processor cannot serve this head: .*({words})"):
        built(ids, *megatron.positions_and_mask(rank), labels=ids, **processor)


@on_ranks(of_core(1, megatron.INSTALLED))
def test_what_it_is_given_is_checked(rank: Rank):
    import megatron_fused_ce

    have_groups(1)
    megatron.needs_core(0, 16)
    layer = build(Model(), rank).output_layer
    given = {"hidden_states": torch.ones(4, 1, megatron.HIDDEN), "output_layer": layer, "output_weight": None}
    given |= {"labels": torch.zeros(1, 4, dtype=torch.int64)}
    given = {name: x.to(rank.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(TypeError, match="output_processor_context has chunk; expected some of temperature"):
        megatron_fused_ce.output_processor(**given, context={"chunk": 4})
    with pytest.raises(ValueError, match="expected a product with one number"):
        megatron_fused_ce.output_processor(**given, scale_logits=torch.tanh)
    made = megatron_fused_ce.output_processor(**given, scale_logits=lambda logits: logits * 0.5)
    expected = (0.5 * given["hidden_states"] @ layer.weight.T).log_softmax(-1)[..., 0].T
    torch.testing.assert_close(made.log_prob, expected)
    layer.output_dtype = torch.float16
    with pytest.raises(ValueError, match=r"asks for .*float16 logits"):
        megatron_fused_ce.output_processor(**given)
    layer.output_dtype = torch.float32
    with pytest.raises(ValueError, match=r"logit_precision. contradict each other"):
        activations = {"config": FusedCEConfig(logit_precision="activations")}
        megatron_fused_ce.output_processor(**given, context=activations)
    mask = torch.tensor([[0.0, 2.0, 0.0, 1.0]], device=rank.device)
    with pytest.raises(ValueError, match="'loss_mask' and the model's call had no loss_mask"):
        megatron_fused_ce.output_processor(**given, context={"active_mask": "loss_mask"})
    for context in ({}, {"active_mask": "loss_mask"}):
        made = megatron_fused_ce.output_processor(**given, loss_mask=mask, context=context)
        assert torch.equal(made.log_prob != 0, mask != 0) == ("active_mask" in context)
