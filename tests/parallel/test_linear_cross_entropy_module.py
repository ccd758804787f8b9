"""The output layer of Megatron's dev branch, and of forks of it: a subclass with a loss on request.

Classes with its contract here; Megatron's own was run with docs/rl.md's frameworks.
"""

from __future__ import annotations

import copy
import textwrap
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import megatron
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, VOCAB, Model, build, have_groups, of_core
from tests.support.ranks import Rank, on_ranks

#: As a module of Megatron's; ``{before}`` and ``{after}`` its super().forward are where forks differ.
SOURCE = """
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class LinearCrossEntropyModule(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False,
                    labels=None, reduction="none", ignore_index=-100):
            {before}
            if output_cross_entropy_loss:
                raise NotImplementedError("a Blackwell GPU's kernel")
            made = super().forward(input_, weight, runtime_gather_output)
            {after}
            return made

    class GPTModel(gpt_model.GPTModel):
        def _postprocess(self, hidden_states, labels, loss_mask=None, **unused):
            return self.output_layer(
                input_=hidden_states, weight=None, runtime_gather_output=None,
                output_cross_entropy_loss=True, labels=labels,
            )
"""


def of_source(before: str = "", after: str = "") -> Any:
    module = ModuleType("megatron.core.a_test")
    exec(  # noqa: S102
        textwrap.dedent(SOURCE).format(before=before or "pass", after=after or "pass"), vars(module)
    )
    return module


def adopted(model: Any, layer: type) -> Any:
    import megatron_fused_ce
    from megatron_fused_ce.adapter import import_hook, language_module

    import_hook.install()
    model.output_layer.__class__ = layer
    config = megatron_fused_ce.FusedCEConfig(num_chunks=2)
    language_module.adopt_output_layer(model, config)
    return model


def step(model: Any, rank: Rank, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients, of labels that count."""
    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE).to(rank.device) * 3 % VOCAB
    losses = model(ids, *megatron.positions_and_mask(rank), labels=labels)
    (losses * (labels >= 0)).sum().backward()
    return losses.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@on_ranks(of_core(2, NEWEST))
@pytest.mark.parametrize("as_loss", [False, True], ids=["logits", "loss"])
@pytest.mark.parametrize("before", ["", "weight = self.weight if weight is None else weight"])
def test_is_adopted(rank: Rank, before, as_loss):
    have_groups(rank.size)
    labels = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE).to(rank.device) * 7 % VOCAB
    if as_loss:
        labels[:, :3] = -100
    right, right_gradients = step(build(Model(), rank), rank, labels)
    module = of_source(before)
    model = build(Model(), rank)
    if as_loss:
        model.__class__ = module.GPTModel
    keys = list(model.state_dict())
    adopted(model, module.LinearCrossEntropyModule)
    with megatron.counted() as seen:
        losses, gradients = step(model, rank, labels)
    assert seen.counts == (1, 0, 0)
    counts = labels >= 0
    assert (losses - right)[counts].norm() <= megatron.LOSS_BOUND * right[counts].norm()
    assert as_loss is bool(counts.logical_not().any()) and not losses[~counts].any()
    for parameter, expected in right_gradients.items():
        assert (gradients[parameter] - expected).norm() <= megatron.GRADIENT_BOUND * expected.norm() > 0
    # Megatron-FSDP knows the layer by the name of its class, others by isinstance.
    layer = model.output_layer
    assert type(layer).__name__ == "LinearCrossEntropyModule" and list(model.state_dict()) == keys
    assert isinstance(layer, module.LinearCrossEntropyModule)
    assert type(copy.copy(layer)) is type(layer)


@on_ranks(of_core(1, NEWEST))
def test_the_loss_of_an_unknown_caller_is_its_own(rank: Rank):
    have_groups(1)
    layer = adopted(build(Model(), rank), of_source().LinearCrossEntropyModule).output_layer
    hidden = torch.ones(SEQUENCE, BATCH, layer.input_size, device=rank.device)
    labels = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device=rank.device)
    with pytest.raises(NotImplementedError, match="a Blackwell GPU's kernel"):
        layer(hidden, output_cross_entropy_loss=True, labels=labels)
    logits, bias = layer(hidden)
    assert isinstance(logits, torch.Tensor) and bias is None


@on_ranks(of_core(1, NEWEST))
@pytest.mark.parametrize(
    "fork",
    [
        {"after": "made = made[0] * 2, None"},
        {"after": "made[0].mul_(2)"},
        {"before": "input_ = input_ * 2"},
        {"before": "runtime_gather_output = True"},
    ],
    ids=str,
)
def test_a_fork_that_does_more_is_left_alone(rank: Rank, fork):
    import megatron_fused_ce

    have_groups(1)
    layer = of_source(**fork).LinearCrossEntropyModule
    model = adopted(build(Model(), rank), layer)
    assert type(model.output_layer) is layer
    with pytest.raises(ValueError, match=r"its output layer is megatron\.core\.a_test"):
        megatron_fused_ce.output_processor(
            hidden_states=None, output_layer=model.output_layer, output_weight=None, labels=None
        )
