"""The output layer of Megatron's dev branch: a subclass with a loss on request.

A class with its contract here; Megatron's own was run with docs/rl's frameworks.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support import megatron
from tests.support.megatron import BATCH, NEWEST, SEQUENCE, VOCAB, Model, build, have_groups, of_core
from tests.support.ranks import Rank, on_ranks

#: The module as a fork has it, in a form that nobody knows.
SOURCE = textwrap.dedent("""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class LinearCrossEntropyModule(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False,
                    labels=None, reduction="none", ignore_index=-100):
            if output_cross_entropy_loss:
                raise NotImplementedError("a Blackwell GPU's kernel")
            weight = self.weight if weight is None else weight
            return super().forward(input_, weight, runtime_gather_output)

    class Other(LinearCrossEntropyModule):
        def forward(self, *given, **named):
            return super().forward(*given, **named)

    class GPTModel(gpt_model.GPTModel):
        def _postprocess(self, hidden_states, labels, loss_mask=None, **unused):
            return self.output_layer(
                input_=hidden_states, weight=None, runtime_gather_output=None,
                output_cross_entropy_loss=True, labels=labels,
            )
""")


def adopted(folder: Path, rank: Rank, trusts=True, layer="LinearCrossEntropyModule", as_loss=False) -> Any:
    """A model with a layer of the fork's, whose module is in the place of Megatron's."""
    import megatron_fused_ce
    from megatron_fused_ce.adapter import forms, language_module

    file = folder / f"linear_cross_entropy{rank.rank}.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(forms.LINEAR, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[forms.LINEAR] = module
    digest = forms.digest(dict(forms.definitions(ast.parse(SOURCE)))["LinearCrossEntropyModule.forward"])
    model = build(Model(), rank)
    model.output_layer.__class__ = getattr(module, layer)
    if as_loss:
        model.__class__ = module.GPTModel
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
    from megatron_fused_ce.adapter import forms

    have_groups(rank.size)
    labels = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE).to(rank.device) * 7 % VOCAB
    if as_loss:
        labels[:, :3] = -100
    stock = build(Model(), rank)
    right, right_gradients = step(stock, rank, labels)
    with patch.dict(sys.modules), megatron.counted() as seen:
        model = adopted(tmp_path, rank, as_loss=as_loss)
        layer, module = model.output_layer, sys.modules[forms.LINEAR]
        losses, gradients = step(model, rank, labels)
        # The loss of an unknown caller is its own.
        hidden = torch.ones(SEQUENCE, BATCH, layer.input_size, device=rank.device)
        with pytest.raises(NotImplementedError, match="a Blackwell GPU's kernel"):
            layer(hidden, output_cross_entropy_loss=True, labels=labels)
    assert seen.counts[:2] == (1, 0)
    counts = labels >= 0
    assert (losses - right)[counts].norm() <= megatron.LOSS_BOUND * right[counts].norm()
    assert as_loss is bool(counts.logical_not().any()) and not losses[~counts].any()
    megatron.assert_same_gradients(gradients, right_gradients)
    # Megatron-FSDP knows the layer by the name of its class, others by isinstance.
    assert type(layer).__name__ == "LinearCrossEntropyModule" and type(copy.copy(layer)) is type(layer)
    assert isinstance(layer, module.LinearCrossEntropyModule)
    assert list(model.state_dict()) == list(stock.state_dict())


@on_ranks(of_core(1, NEWEST))
@pytest.mark.parametrize(
    ("trusts", "layer", "words"),
    [(False, "LinearCrossEntropyModule", ".forward ("), (True, "Other", ".Other, whose ")],
)
def test_a_form_that_nobody_knows_is_left_alone(rank: Rank, trusts, layer, words, tmp_path):
    """The log names its digest; another class that does as much has none."""
    import megatron_fused_ce

    have_groups(1)
    with patch.dict(sys.modules), megatron.counted() as seen:
        of_model = adopted(tmp_path, rank, trusts, layer).output_layer
        assert type(of_model) is getattr(sys.modules[type(of_model).__module__], layer)
        given = {"hidden_states": None, "output_weight": None, "labels": None}
        with pytest.raises(ValueError, match="its output layer is "):
            megatron_fused_ce.output_processor(output_layer=of_model, **given)
    assert words in seen.said and (trusts or "digest " in seen.said)
