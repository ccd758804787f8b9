"""How a head finds the loss mask that its model was called with, on models shaped like Megatron's."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fused_ce.adapter import token_weights

SHAPE = (2, 5)
LABELS = torch.zeros(SHAPE, dtype=torch.int64)
MASK = torch.rand(SHAPE)
IDS = torch.ones(3)


class GPT(nn.Module):
    """Megatron's GPTModel as far as labels and masks travel; ``found`` is what its heads get."""

    def __init__(self, mtp=0, before_loss=lambda: None):
        super().__init__()
        self.mtp, self.before_loss = mtp, before_loss
        self.found = []

    def forward(self, input_ids, labels=None, *, loss_mask=None, runtime_gather_output=None):
        return self._postprocess(hidden=input_ids**2, labels=labels, loss_mask=loss_mask)

    def _postprocess(self, hidden, labels, loss_mask=None):
        rolled = labels.clone()
        for _ in range(self.mtp):
            rolled, loss_mask = rolled.roll(-1), loss_mask.roll(-1)
            self.compute_language_model_loss(rolled)
        self.before_loss()
        return (hidden.sum() * self.compute_language_model_loss(labels)) ** 2

    def compute_language_model_loss(self, labels):
        self.found.append(token_weights.of_loss(self, labels))
        return 1.0


class Hybrid(GPT):
    """HybridModel: the loss is computed in ``forward`` itself."""

    def forward(self, input_ids, labels=None, loss_mask=None):
        return input_ids.sum() * self.compute_language_model_loss(labels)


class MaskByItself(GPT):
    """A user's subclass that makes the mask up."""

    def forward(self, input_ids, labels=None, *, loss_mask=None):
        return super().forward(input_ids, labels=labels, loss_mask=labels.ne(7).float())


class OldMamba(GPT):
    """MambaModel before 0.17: no mask anywhere."""

    def forward(self, input_ids, labels=None):
        return input_ids.sum() * self.compute_language_model_loss(labels)


class PassesOn(Hybrid):
    """A user's subclass whose signature names nothing."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


for _class in (GPT, Hybrid, MaskByItself, OldMamba, PassesOn):
    token_weights.remember_calls(_class)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert token_weights._calls.stack == []


def called(model, *given, **named):
    """What each of its heads gets from a call."""
    model.found.clear()
    model(IDS, *given, **{"labels": LABELS, **named} if not given else named)
    return model.found


def masked(mask, **of_model):
    return called(GPT(**of_model), loss_mask=mask)


WITHOUT = "was called without a loss_mask"
OF_MTP = "multi-token prediction"
INTEGERS = torch.tensor([[1, 0, 1, 1, 0]] * 2)
#: What the heads of a call get: a mask, or why they have none.
CALLS = {
    "GPT": (lambda: masked(MASK), [MASK]),
    "Hybrid": (lambda: called(Hybrid(), loss_mask=MASK), [MASK]),
    "by place": (lambda: called(Hybrid(), LABELS, MASK), [MASK]),
    "passed on": (lambda: called(PassesOn(), loss_mask=MASK), [MASK]),
    "a copy": (lambda: called(copy.deepcopy(GPT()), loss_mask=MASK), [MASK]),
    "made by the model": (lambda: called(MaskByItself()), [torch.ones(SHAPE)]),
    "multi-token prediction": (lambda: masked(MASK, mtp=2), [OF_MTP, OF_MTP, MASK]),  # not the rolled ones
    **{str(of): (lambda of=of: masked(INTEGERS.to(of)), [INTEGERS.to(of)])
       for of in (torch.float32, torch.bfloat16, torch.float64)},
    **{str(of): (lambda of=of: masked(INTEGERS.to(of)), [INTEGERS.float()])
       for of in (torch.bool, torch.int64)},
    "trained": (lambda: masked(MASK.clone().requires_grad_()), [MASK]),
    "none": (lambda: called(GPT()), [f"GPT {WITHOUT}"]),
    "none to give": (lambda: called(OldMamba()), [f"OldMamba {WITHOUT}"]),
    "a list": (lambda: masked([[1.0] * 5] * 2), [WITHOUT]),
    "flat": (lambda: masked(torch.ones(10)), ["the loss_mask is (10,) on cpu, the labels are (2, 5)"]),
    "elsewhere": (lambda: masked(torch.ones(SHAPE, device="meta")), ["on meta"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_the_heads_of_a_call_get(name):
    call, expected = CALLS[name]
    for found, right in zip(call(), expected, strict=True):
        if isinstance(right, str):
            assert found.values is None and right in found.unknown
        else:
            assert torch.equal(found.values, right) and found.values.dtype == right.dtype
            assert not found.values.requires_grad


def test_combined_1f1b_never_calls_forward():
    model = GPT()
    model._postprocess(IDS, labels=LABELS, loss_mask=MASK)
    assert model.found[0].values.data_ptr() == MASK.data_ptr()


@pytest.mark.parametrize("of_teacher", [{}, {"loss_mask": torch.rand(SHAPE)}], ids=["", "masked"])
def test_a_teacher_inside_the_student(of_teacher):
    """Each model finds its own mask or none, though both see the same labels."""
    teacher = GPT()
    (found,) = masked(MASK, before_loss=lambda: called(teacher, **of_teacher))
    assert torch.equal(found.values, MASK)
    right = of_teacher.get("loss_mask")
    assert teacher.found[0].values is right or torch.equal(teacher.found[0].values, right)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_run_again_in_the_backward(reentrant):
    """Activation checkpointing around the model: the second run is on autograd's thread."""
    model, x = GPT(), torch.ones(3, requires_grad=True)
    out = checkpoint(lambda x: model(x, labels=LABELS, loss_mask=MASK), x, use_reentrant=reentrant)
    model(IDS, labels=LABELS)  # another call between
    out.backward()
    assert [found.values is None for found in model.found] == [False, True, False]


def test_an_exception_leaves_nothing_behind():
    def fail():
        raise KeyError("in forward")

    model = GPT(before_loss=fail)
    with pytest.raises(KeyError, match="in forward"):
        called(model, loss_mask=MASK)
    assert token_weights.of_loss(model, LABELS).values is None
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        called(model, no_such=1)


def test_wrapped_once_and_still_itself():
    entry = GPT.forward
    token_weights.remember_calls(GPT)
    assert GPT.forward is entry and entry.__name__ == "forward"
    assert not hasattr(PassesOn.forward, "__fused_ce_entry__")  # shows no labels


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
