"""How a head finds the loss mask that its model was called with: subclasses, odd masks, calls in calls.

Megatron's own models, multi-token prediction, runs in the backward: tests/parallel/test_grad_in_forward.py.
"""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch import nn

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import token_weights

SHAPE = (2, 5)
LABELS = torch.zeros(SHAPE, dtype=torch.int64)
MASK = torch.rand(SHAPE)
IDS = torch.ones(3)


class GPT(nn.Module):
    """Megatron's GPTModel as far as labels and masks travel; ``found`` is what its heads get."""

    def __init__(self, before_loss=lambda: None):
        super().__init__()
        self.before_loss = before_loss
        self.found = []
        config = FusedCEConfig(skip_masked=True)
        self.output_layer = types.SimpleNamespace(
            fused_ce_config=config, sequence_parallel=False, tp_group=None
        )

    def forward(self, input_ids, labels=None, *, loss_mask=None, runtime_gather_output=None):
        return self._postprocess(input_ids, labels=labels, loss_mask=loss_mask)

    def _postprocess(self, hidden, labels, loss_mask=None):
        self.before_loss()
        return self.compute_language_model_loss(labels)

    def compute_language_model_loss(self, labels):
        self.found.append(token_weights.of_loss(self, labels))


class Hybrid(GPT):
    """HybridModel: the loss is computed in ``forward`` itself."""

    def forward(self, input_ids, labels=None, loss_mask=None):
        self.compute_language_model_loss(labels)


class MaskByItself(GPT):
    """A user's subclass that makes the mask up."""

    def forward(self, input_ids, labels=None, *, loss_mask=None):
        return super().forward(input_ids, labels=labels, loss_mask=labels.ne(7).float())


class PassesOn(Hybrid):
    """A user's subclass whose signature names nothing."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


for _class in (GPT, Hybrid, MaskByItself, PassesOn):
    token_weights.remember_calls(_class)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert token_weights._calls.stack == []


def called(model, *given, **named):
    """What its head gets from a call."""
    model(IDS, *given, **{"labels": LABELS, **named} if not given else named)
    return model.found[-1]


def masked(mask):
    return called(GPT(), loss_mask=mask)


WITHOUT = "GPT was called without a loss_mask"
INTEGERS = torch.tensor([[1, 0, 1, 1, 0]] * 2)
#: What the head of a call gets: a mask, or why it has none.
CALLS = {
    "by place": (lambda: called(Hybrid(), LABELS, MASK), MASK),
    "passed on": (lambda: called(PassesOn(), loss_mask=MASK), MASK),
    "a copy": (lambda: called(copy.deepcopy(GPT()), loss_mask=MASK), MASK),
    "made by the model": (lambda: called(MaskByItself()), torch.ones(SHAPE)),
    "bfloat16": (lambda: masked(INTEGERS.bfloat16()), INTEGERS.bfloat16()),
    "bool": (lambda: masked(INTEGERS.bool()), INTEGERS.float()),
    "int64": (lambda: masked(INTEGERS), INTEGERS.float()),
    "trained": (lambda: masked(MASK.clone().requires_grad_()), MASK),
    "none": (lambda: called(GPT()), WITHOUT),
    "a list": (lambda: masked([[1.0] * 5] * 2), WITHOUT),
    "flat": (lambda: masked(torch.ones(10)), "the loss_mask is (10,) on cpu, the labels are (2, 5)"),
    "elsewhere": (lambda: masked(torch.ones(SHAPE, device="meta")), "on meta"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_head_of_a_call_gets(name):
    call, expected = CALLS[name]
    found = call()
    if isinstance(expected, str):
        assert found.values is None and expected in found.unknown
    else:
        assert torch.equal(found.values, expected) and found.values.dtype == expected.dtype
        assert not found.values.requires_grad
        assert found.unmasked().read()[0] == expected.count_nonzero()


@pytest.mark.parametrize("of_teacher", [{}, {"loss_mask": torch.rand(SHAPE)}], ids=["", "masked"])
def test_a_teacher_inside_the_student(of_teacher):
    """Each model finds its own mask or none, though both see the same labels; another one has none."""
    teacher, other, of_other = GPT(), GPT(), []

    def before_loss():
        called(teacher, **of_teacher)
        of_other.append(token_weights.of_loss(other, LABELS).values)

    found = called(GPT(before_loss), loss_mask=MASK)
    assert of_other == [None]
    assert torch.equal(found.values, MASK)
    right = of_teacher.get("loss_mask")
    assert teacher.found[0].values is right or torch.equal(teacher.found[0].values, right)


def test_an_exception_leaves_nothing_behind():
    def fail():
        raise KeyError("in forward")

    model = GPT(before_loss=fail)
    with pytest.raises(KeyError, match="in forward"):
        called(model, loss_mask=MASK)
    assert token_weights.of_loss(model, LABELS).values is None
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        called(model, no_such=1)


def test_which_calls_end_in_a_loss(monkeypatch):
    """Seen from the output layer: labels under inference mode, no sign of generation anywhere."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.output_layer = nn.Identity()

        def forward(self, ids, labels=None, inference_context=None, inference_params=None):
            return token_weights.why_no_loss(self.output_layer)

    token_weights.remember_calls(Model)
    model, other = Model(), Model()
    assert model(IDS, LABELS) == model(IDS) == ""
    for context in ("inference_context", "inference_params"):
        assert "an inference context" in model(IDS, LABELS, **{context: object()})
    with torch.inference_mode():
        assert model(IDS, LABELS) == ""
        assert "no labels" in model(IDS)
        # Another model's labels; a layer called outside of its model, as speculative decoding does.
        seen = []
        model.register_forward_pre_hook(lambda *a: seen.append(other(IDS)))
        assert model(IDS, LABELS) == "" and "no labels" in seen[0]
        assert "no labels" in token_weights.why_no_loss(model.output_layer)
    engine = types.SimpleNamespace(InferenceMode=types.SimpleNamespace(is_active=lambda: True))
    monkeypatch.setitem(sys.modules, "megatron.core.inference.utils", engine)
    assert "an inference engine" in model(IDS, LABELS)
