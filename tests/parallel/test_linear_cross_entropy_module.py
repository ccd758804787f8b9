"""The output layer of Megatron's dev branch: a subclass with a loss on request.

A class with its contract here; Megatron's own was run with docs/rl.md's frameworks.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support import megatron
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, VOCAB, Model, build, have_groups, of_core
from tests.support.ranks import Rank, on_ranks

#: The module as a fork has it, in a form that nobody knows.
SOURCE = """
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class LinearCrossEntropyModule(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False,
                    labels=None, reduction="none", ignore_index=-100):
            if output_cross_entropy_loss:
                raise NotImplementedError("a Blackwell GPU's kernel")
            weight = self.weight if weight is None else weight
            return super().forward(input_, weight, runtime_gather_output)

    class GPTModel(gpt_model.GPTModel):
        def _postprocess(self, hidden_states, labels, loss_mask=None, **unused):
            return self.output_layer(
                input_=hidden_states, weight=None, runtime_gather_output=None,
                output_cross_entropy_loss=True, labels=labels,
            )
"""


@contextlib.contextmanager
def a_forks_module(folder: Path, rank: Rank) -> Iterator[Any]:
    """The module in the place of Megatron's."""
    from megatron_fused_ce.adapter import forms

    file = folder / f"linear_cross_entropy{rank.rank}.py"
    file.write_text(textwrap.dedent(SOURCE))
    spec = importlib.util.spec_from_file_location(forms.LINEAR, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with patch.dict(sys.modules, {forms.LINEAR: module}):
        yield module


def adopted(model: Any, layer: type, trusts: bool = True) -> Any:
    import megatron_fused_ce
    from megatron_fused_ce.adapter import forms, language_module

    functions = dict(forms.definitions(ast.parse(textwrap.dedent(SOURCE))))
    digest = forms.digest(functions["LinearCrossEntropyModule.forward"])
    model.output_layer.__class__ = layer
    config = megatron_fused_ce.FusedCEConfig(num_chunks=2)
    megatron_fused_ce.enable(config, trust=[digest] if trusts else [])
    try:
        language_module.adopt_output_layer(model, config)
    finally:
        megatron_fused_ce.disable()
    return model


def step(model: Any, rank: Rank, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients, of labels that count."""
    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE).to(rank.device) * 3 % VOCAB
    losses = model(ids, *megatron.positions_and_mask(rank), labels=labels)
    (losses * (labels >= 0)).sum().backward()
    return losses.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@on_ranks(of_core(2, NEWEST))
@pytest.mark.parametrize("as_loss", [False, True], ids=["logits", "loss"])
def test_is_adopted(rank: Rank, as_loss, tmp_path):
    have_groups(rank.size)
    labels = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE).to(rank.device) * 7 % VOCAB
    if as_loss:
        labels[:, :3] = -100
    right, right_gradients = step(build(Model(), rank), rank, labels)
    with a_forks_module(tmp_path, rank) as module:
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
    # The loss of an unknown caller is its own.
    hidden = torch.ones(SEQUENCE // rank.size, BATCH, layer.input_size, device=rank.device)
    with pytest.raises(NotImplementedError, match="a Blackwell GPU's kernel"):
        layer(hidden, output_cross_entropy_loss=True, labels=labels)
    assert isinstance(layer(hidden)[0], torch.Tensor)


@on_ranks(of_core(1, NEWEST))
def test_a_form_that_nobody_knows_is_left_alone(rank: Rank, tmp_path):
    """The log names its digest; another class that does as much has none."""
    import megatron_fused_ce

    have_groups(1)
    with a_forks_module(tmp_path, rank) as module, megatron.counted() as seen:
        layer = module.LinearCrossEntropyModule
        other = type("Other", (layer,), {"forward": lambda *given, **named: layer.forward(*given, **named)})
        for kind, trusts in ((layer, False), (other, True)):
            model = adopted(build(Model(), rank), kind, trusts)
            assert type(model.output_layer) is kind
            with pytest.raises(ValueError, match="its output layer is "):
                megatron_fused_ce.output_processor(
                    hidden_states=None, output_layer=model.output_layer, output_weight=None, labels=None
                )
    assert "LinearCrossEntropyModule.forward (" in seen.said and "digest " in seen.said
    assert ".Other, whose " in seen.said
