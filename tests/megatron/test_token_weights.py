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

B, S = 2, 5


def labels() -> torch.Tensor:
    return torch.zeros(B, S, dtype=torch.int64)


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


@pytest.mark.parametrize(
    ("of", "call"),
    [
        (GPT, lambda model, mask: model(torch.ones(3), labels=labels(), loss_mask=mask)),
        (Hybrid, lambda model, mask: model(torch.ones(3), labels=labels(), loss_mask=mask)),
        (Hybrid, lambda model, mask: model(torch.ones(3), labels(), mask)),
        # Combined 1F1B never calls ``forward``.
        (GPT, lambda model, mask: model._postprocess(torch.ones(1), labels=labels(), loss_mask=mask)),
    ],
)
def test_the_mask_is_found(of, call):
    """Of each micro-batch in flight its own."""
    model, masks = of(), [torch.rand(B, S) for _ in range(3)]
    for mask in masks:
        call(model, mask)
    for found, mask in zip(model.found, masks, strict=True):
        assert found.values.data_ptr() == mask.data_ptr() and found.values.shape == (B, S)


def test_a_subclass_that_makes_its_mask():
    model = MaskByItself()
    model(torch.ones(3), labels=labels())
    assert torch.equal(model.found[0].values, torch.ones(B, S))


def test_only_the_main_loss_gets_it():
    model, mask = GPT(mtp=2), torch.rand(B, S)
    model(torch.ones(3), labels=labels(), loss_mask=mask)
    assert [found.values is None for found in model.found] == [True, True, False]
    assert "multi-token prediction" in model.found[0].unknown
    assert torch.equal(model.found[2].values, mask)  # not the rolled one


@pytest.mark.parametrize(
    ("model", "mask", "reason"),
    [
        (GPT(), None, "GPT was called without a loss_mask"),
        (OldMamba(), None, "OldMamba was called without a loss_mask"),
        (GPT(), torch.ones(B * S), r"the loss_mask is (10,) on cpu, the labels are (2, 5)"),
        (GPT(), torch.ones(B, S, device="meta"), "on meta"),
        (GPT(), [[1.0] * S] * B, "without a loss_mask"),
    ],
)
def test_unknown(model, mask, reason):
    model(torch.ones(3), labels=labels(), **({} if mask is None else {"loss_mask": mask}))
    assert model.found[0].values is None
    assert reason in model.found[0].unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_dtypes_of_masks(dtype):
    model, mask = GPT(), torch.tensor([[1, 0, 1, 1, 0]] * B).to(dtype)
    model(torch.ones(3), labels=labels(), loss_mask=mask)
    assert model.found[0].values.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert torch.equal(model.found[0].values.bool(), mask.bool())


def test_no_gradient_flows_into_the_mask():
    model, mask = GPT(), torch.rand(B, S, requires_grad=True)
    model(torch.ones(3), labels=labels(), loss_mask=mask)
    assert not model.found[0].values.requires_grad


@pytest.mark.parametrize("inner", [GPT, OldMamba])
@pytest.mark.parametrize("of_teacher", [None, torch.rand(B, S)])
def test_a_teacher_inside_the_student(inner, of_teacher):
    """Each model finds its own mask or none, though both see the same labels."""
    shared, of_student, teacher = labels(), torch.rand(B, S), inner()
    given = {} if of_teacher is None or inner is OldMamba else {"loss_mask": of_teacher}
    student = GPT(before_loss=lambda: teacher(torch.ones(3), labels=shared, **given))
    student(torch.ones(3), labels=shared, loss_mask=of_student)
    assert teacher.found[0].values is given.get("loss_mask") or torch.equal(
        teacher.found[0].values, of_teacher
    )
    assert torch.equal(student.found[0].values, of_student)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_run_again_in_the_backward(reentrant):
    """Activation checkpointing around the model: the second run is on autograd's thread."""
    model, mask = GPT(), torch.rand(B, S)
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(lambda x: model(x, labels=labels(), loss_mask=mask), x, use_reentrant=reentrant)
    model(torch.ones(3), labels=labels())  # another call between
    out.backward()
    assert [found.values is None for found in model.found] == [False, True, False]


def test_an_exception_leaves_nothing_behind():
    def fail():
        raise KeyError("in forward")

    model, mask = GPT(before_loss=fail), torch.rand(B, S)
    shared = labels()
    with pytest.raises(KeyError, match="in forward"):
        model(torch.ones(3), labels=shared, loss_mask=mask)
    assert token_weights.of_loss(model, shared).values is None


def test_a_wrong_call_raises_what_it_did():
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        GPT()(torch.ones(3), labels=labels(), no_such=1)


def test_wrapped_once_and_still_itself():
    entry = GPT.forward
    token_weights.remember_calls(GPT)
    assert GPT.forward is entry
    assert entry.__name__ == "forward"
    assert not hasattr(PassesOn.forward, "__fused_ce_entry__")  # shows no labels
    model, mask = copy.deepcopy(GPT()), torch.rand(B, S)
    model(torch.ones(3), labels=labels(), loss_mask=mask)
    assert torch.equal(model.found[0].values, mask)


def test_which_calls_end_in_a_loss(monkeypatch):
    """Seen from the output layer: labels under inference mode, no sign of generation anywhere."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.output_layer = nn.Identity()

        def forward(self, ids, labels=None, inference_context=None, inference_params=None):
            return token_weights.why_no_loss(self.output_layer)

    token_weights.remember_calls(Model)
    model, ids = Model(), torch.ones(3)
    assert model(ids, labels()) == model(ids) == ""
    for context in ("inference_context", "inference_params"):
        assert "an inference context" in model(ids, labels(), **{context: object()})
    with torch.inference_mode():
        assert model(ids, labels()) == ""
        assert "no labels" in model(ids)
        # Another model's labels; a layer called outside of its model, as speculative decoding does.
        other = Model()
        model.register_forward_pre_hook(lambda *a: seen.append(other(ids)))
        seen = []
        assert model(ids, labels()) == "" and "no labels" in seen[0]
        assert "no labels" in token_weights.why_no_loss(model.output_layer)
    engine = types.SimpleNamespace(InferenceMode=types.SimpleNamespace(is_active=lambda: True))
    monkeypatch.setitem(sys.modules, "megatron.core.inference.utils", engine)
    assert "an inference engine" in model(ids, labels())
