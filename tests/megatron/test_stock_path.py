"""Which heads stay with Megatron: the reasons that tests/parallel/test_seams.py has not, one at a time."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import arguments, caller, forms, say, stock_path


def in_megatron(function):
    """The function, as if Megatron's core had it."""
    return types.FunctionType(function.__code__, {"__name__": "megatron.core.models"}, argdefs=None)


class GPTModel:
    """A head of Megatron's on one rank, adopted or not, and a loss that takes deferred logits."""

    def __init__(self, adopted=False):
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        from megatron_fused_ce.adapter import output_layer

        initialization = {"use_cpu_initialization": True, "perform_initialization": False}
        self.config = ModelParallelConfig(params_dtype=torch.bfloat16, **initialization)
        layer = ColumnParallelLinear(4, 6, config=self.config, init_method=None, bias=False)
        layer.tp_group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.output_layer = layer
        if adopted:
            held = forms.Held("", frozenset())
            output_layer.ColumnParallelLinear.adopt(layer, FusedCEConfig(), False, "GPTModel", held)

    def compute_language_model_loss(self, labels, logits): ...

    def _postprocess(self, *given, labels=None, **named):
        return self.output_layer(*given, **named)


GPTModel._postprocess = in_megatron(GPTModel._postprocess)
GPTModel._postprocess.__kwdefaults__ = {"labels": None}


@pytest.fixture(autouse=True, scope="module")
def learnt():
    """Megatron is imported where a test runs: it takes seconds."""
    pytest.importorskip("megatron.core")
    importlib.import_module("megatron.core.models.common.language_module.language_module")
    caller.learn_loss(GPTModel.compute_language_model_loss)
    caller.learn(GPTModel)


# --- when a model is built -------------------------------------------------------------------------

WITHOUT = object()
INVARIANT = types.SimpleNamespace(batch_invariant_mode=True)
LOGGED = types.SimpleNamespace(config_logger_dir="folder")
#: Where, which attribute has which value, and words of the reason; none where the value is as by default.
AT_BUILD = [
    # Megatron moves an attribute: a reason in words, no AttributeError.
    *(("layer", name, WITHOUT, name) for name in stock_path.LAYER_ATTRIBUTES),
    ("layer", "bias", torch.nn.Parameter(torch.zeros(1)), "has a bias"),
    ("layer", "gather_output", True, "parallel_output=False"),
    ("layer", "is_expert", True, "expert layer"),
    ("layer", "disable_grad_reduce", True, "LoRA"),
    ("layer", "gtp_remat_size", 2, "gtp_remat"),
    ("layer", "gtp_remat_size", 1, ""),
    ("layer", "output_dtype", torch.float16, "--output-logit-dtype"),
    *(("layer", "output_dtype", dtype, "") for dtype in (torch.bfloat16, torch.float32, None)),
    # Its mode replaces aten's products and softmax by ones whose sums do not depend on the batch.
    ("layer", "config", INVARIANT, "--batch-invariant-mode replaces the products"),
    ("config", "config_logger_dir", "folder", "config logger"),
    ("config", "config_logger_dir", "", ""),
    ("arguments", "logits_save_dir", "folder", "--logits-save-dir"),
    ("arguments", "logits_load_dir", "folder", "--logits-load-dir"),
    ("arguments", "save_activations_interval", 10, "--save-activations-interval"),
    ("arguments", "save_dgrads_interval", 10, "--save-dgrads-interval"),
    ("arguments", "modelopt_enabled", True, "ModelOpt"),
    ("arguments", "export_kd_teacher_load", "folder", "--export-kd-teacher-load"),
]


@pytest.mark.parametrize(("where", "name", "value", "words"), AT_BUILD)
def test_each_reason_at_build(where, name, value, words):
    model, launch = GPTModel(), types.SimpleNamespace()
    assert stock_path.reason_at_build(model, launch) == ""
    owner = {"layer": model.output_layer, "config": model.config, "arguments": launch}[where]
    if value is WITHOUT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
    reason = stock_path.reason_at_build(model, launch)
    assert words in reason and bool(words) == bool(reason)
    # ModelOpt's own are no reason once it has joined two heads.
    by_modelopt = name in ("modelopt_enabled", "export_kd_teacher_load")
    assert stock_path.reason_at_build(model, launch, joined=True) == ("" if by_modelopt else reason)
    if reason:
        with pytest.raises(ValueError, match="z_loss"):
            stock_path.refuse_options(FusedCEConfig(z_loss=1e-4), reason)


def test_an_adopted_layer_can_be_copied_and_pickled():
    layer = GPTModel(adopted=True).output_layer
    layer.tp_group = None  # the stand-in, and what Megatron's own layer cannot pickle
    layer._load_state_dict_pre_hooks.clear()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is type(layer) and copied.fused_ce_config == layer.fused_ce_config
        assert copied.fused_ce_held.of == copied.fused_ce_held.changed() == ""


def test_a_parametrized_weight_stays_unread():
    """A spectral norm takes a step at each read, and Megatron's layer makes so many."""
    model = GPTModel()
    model.output_layer.weight = torch.nn.Parameter(torch.randn(6, 4))
    torch.nn.utils.parametrizations.spectral_norm(model.output_layer)
    (norm,) = model.output_layer.parametrizations.weight
    before = norm._u.clone()
    assert "a parametrization of its output layer" in stock_path.reason_at_build(model, None)
    with pytest.raises(ValueError, match="a parametrization of its output layer"):
        stock_path.refuse_processor(model.output_layer, adopted=False)
    assert torch.equal(norm._u, before)


def test_a_head_that_waits_for_modelopt_is_not_said_to_stay(monkeypatch):
    """The line names the one that follows; an option of the loss ends the launch."""
    from megatron_fused_ce.adapter import language_module

    launch = types.SimpleNamespace(export_kd_teacher_load="folder", modelopt_enabled=True)
    lines = []
    monkeypatch.setattr(arguments, "megatron_args", lambda: launch)
    monkeypatch.setattr(say, "line", lines.append)
    monkeypatch.setattr(say, "_said", set())
    language_module.adopt_output_layer(GPTModel(), FusedCEConfig(), False)
    (line,) = lines
    assert line.startswith("the head of GPTModel waits for ModelOpt") and "a line 'distillation:'" in line
    options = FusedCEConfig(z_loss=1e-4, true_vocab_size=5)
    for reader in ("export_kd_teacher_load", "logits_save_dir", "config_logger_dir"):  # as plan says
        launch = types.SimpleNamespace(**{reader: "folder"}, modelopt_enabled=reader.startswith("export"))
        said = r"^z_loss, true_vocab_size: Megatron's own .*(distillation|logits)"
        with pytest.raises(ValueError, match=said):
            language_module.adopt_output_layer(GPTModel(), options, False)


# --- at a call -------------------------------------------------------------------------------------


def hook(*arguments):
    """A forward hook of somebody's."""


def sharding_hook(*arguments):
    """One of Megatron-FSDP's."""


sharding_hook.__module__ = "megatron.core.distributed.fsdp.src"


def capture(*arguments):
    """ModelOpt's, which keeps a teacher's logits."""


DISTILLATION = types.SimpleNamespace(teacher_output_capture_fwd_hook=capture)
SHARDED = torch.zeros(6, 4)
SHARDED.placements = ()
JOINED = {"fused_ce_joined": True}
#: Of a call: changes, and words of the reason; none where the head is evaluated.
AT_CALL = [
    ({}, ""),
    ({"hooks": [sharding_hook]}, ""),
    ({"hooks": [sharding_hook, hook]}, "test_stock_path.hook"),
    ({"hooks": [capture]}, "may read or change the logits"),
    ({"hooks": [capture], **JOINED}, ""),
    ({"hooks": [capture, hook], **JOINED}, "may read or change the logits"),
    ({"weight": SHARDED}, ""),
    ({"weight": SHARDED, "hooks": [capture], **JOINED}, "FSDP frees weights"),
    ({"sequence_parallel": True}, "sequence parallelism off"),
    ({"hidden": (2, 4)}, "2 dimensions"),
    ({"config": LOGGED}, "config logger"),
    ({"config": INVARIANT}, "--batch-invariant-mode replaces"),
]


@pytest.mark.parametrize(("change", "words"), AT_CALL)
def test_each_reason_at_a_call(change, words, monkeypatch):
    """As the head's call sees it from Megatron's model code."""
    monkeypatch.setitem(sys.modules, "modelopt.torch.distill.distillation_model", DISTILLATION)
    of_call = {"hooks": [], "hidden": (2, 1, 4), "weight": torch.zeros(6, 4), **change}
    hooks, hidden, weight = (of_call.pop(name) for name in ("hooks", "hidden", "weight"))
    model = GPTModel(adopted=True)
    layer = model.output_layer
    for each in hooks:
        layer.register_forward_hook(each)
    for name, value in of_call.items():
        setattr(layer, name, value)
    model.output_layer = lambda: stock_path.reason_at_call(
        layer, torch.zeros(hidden), weight, False, sys._getframe(1)
    )
    reason = model._postprocess(labels=True)
    assert words in reason and bool(words) == bool(reason)


def not_megatrons(*given): ...


def test_the_heads_of_multi_token_prediction(monkeypatch):
    """Their function is given the loss and the scale that it will use."""

    def process_mtp_loss(output_layer, compute_language_model_loss, scale_logits_fn=None):
        return output_layer()

    module, name = caller.MTP
    own = in_megatron(process_mtp_loss)
    own.__defaults__ = (None,)
    monkeypatch.setattr(importlib.import_module(module), name, own, raising=False)
    caller.learn(GPTModel)

    def head():
        inputs = torch.zeros(2, 1, 4), torch.zeros(6, 4)
        layer = GPTModel(adopted=True).output_layer
        return stock_path.reason_at_call(layer, *inputs, False, sys._getframe(1))

    loss = GPTModel().compute_language_model_loss
    assert own(head, loss) == ""
    assert own(head, loss, in_megatron(not_megatrons)) == ""
    assert "scaled by" in own(head, loss, not_megatrons)
    assert "the loss of this call is" in own(head, not_megatrons)


def test_what_log_probs_alone_refuse(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelopt.torch.distill.distillation_model", DISTILLATION)
    layer = GPTModel().output_layer
    layer.register_forward_hook(capture)  # no head is joined
    with pytest.raises(ValueError, match="may read or change the logits"):
        stock_path.refuse_processor(layer, adopted=False)
    stock_path.refuse_log_probs(FusedCEConfig(logit_scale=0.5, skip_masked=True))
    for options in ({"label_smoothing": 0.1}, {"logit_softcap": 30.0}, {"ignore_index": -100}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: the caller's log-probabilities"):
            stock_path.refuse_log_probs(FusedCEConfig(**options))
    assert stock_path.reason_for_log_probs(torch.nn.Linear.__new__(torch.nn.Linear)) == ""


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gathered_logits_have_the_dtype_of_megatrons(dtype):
    """That of --output-logit-dtype, and the whole vocabulary's shape."""
    model = GPTModel(adopted=True)
    layer = model.output_layer
    layer.sequence_parallel = layer.fused_ce_sequence_parallel = True
    layer.tp_group = types.SimpleNamespace(size=lambda: 2)
    layer.output_size, layer.output_dtype = 12, dtype
    hidden = torch.zeros(3, 1, 4, dtype=torch.bfloat16)
    with caller.returned_to_caller():
        logits, _ = model._postprocess(hidden, runtime_gather_output=True)
    assert (logits.shape, logits.dtype) == ((6, 1, 12), dtype or torch.bfloat16)
    assert model._postprocess(hidden, labels=True)[0].shape == (6, 1, 6)
