"""Which heads stay with Megatron, one reason at a time, without building a model."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import arguments, caller, forms, language_module, say, stock_path, switch

LAYER = {
    **dict.fromkeys(stock_path.LAYER_ATTRIBUTES, 1),
    **{"bias": None, "gather_output": False, "is_expert": False, "disable_grad_reduce": False},
    "weight": None,
    "tp_group": types.SimpleNamespace(size=lambda: 1),
    "sequence_parallel": False,
}


class GPTModel:
    """A head, and a loss that takes deferred logits."""

    def __init__(self, without: str = "", **config):
        self.output_layer = megatrons_layer().__new__(megatrons_layer())
        torch.nn.Module.__init__(self.output_layer)
        for name, value in LAYER.items():
            if name != without:
                setattr(self.output_layer, name, value)
        self.config = types.SimpleNamespace(params_dtype=torch.bfloat16, **config)

    def compute_language_model_loss(self, labels, logits): ...

    def _postprocess(self, *given, labels=None, **named):
        return self.output_layer(*given, **named)


def in_megatron(function):
    """The function, as if Megatron's core had it."""
    return types.FunctionType(function.__code__, {"__name__": "megatron.core.models"}, argdefs=None)


@pytest.fixture(autouse=True, scope="module")
def learnt():
    """Megatron is imported where a test runs: it takes seconds."""
    pytest.importorskip("megatron.core")
    importlib.import_module("megatron.core.models.common.language_module.language_module")
    caller.learn_loss(GPTModel.compute_language_model_loss)
    caller.learn(GPTModel)


def megatrons_layer():
    return importlib.import_module("megatron.core.tensor_parallel.layers").ColumnParallelLinear


def of_layer() -> dict[str, object]:
    """What a call of a layer looks at, as Megatron has it."""
    return {
        **{name: value for name, value in LAYER.items() if name != "weight"},
        "_forward_impl": types.MethodType(megatrons_layer()._forward_impl, object()),
        **{"output_size_per_partition": 6, "stock_forward": megatrons_layer().forward},
        "stock_call": types.MethodType(torch.nn.Module.__call__, object()),
    }


class Layer(types.SimpleNamespace):
    _call_impl = torch.nn.Module._call_impl
    _wrapped_call_impl = torch.nn.Module._wrapped_call_impl
    _modules: dict[str, object] = {}  # noqa: RUF012
    fused_ce_held = property(lambda _: forms.Held("", frozenset()))


GPTModel._postprocess = in_megatron(GPTModel._postprocess)
GPTModel._postprocess.__kwdefaults__ = {"labels": None}


def test_batch_invariance_is_megatrons():
    """Its mode replaces aten's products and softmax by ones whose sums do not depend on the batch."""
    model, reasons = GPTModel(), []
    for mode in (None, False, True):
        given = {} if mode is None else {"batch_invariant_mode": mode}
        model.output_layer.config = types.SimpleNamespace(**given)
        reasons.append(stock_path.reason_at_build(model, None))
    assert reasons[:2] == ["", ""] and reasons[2].startswith("--batch-invariant-mode replaces the products")
    with pytest.raises(ValueError, match=r"z_loss.*batch-invariant-mode"):
        stock_path.refuse_options(FusedCEConfig(z_loss=1e-4), reasons[2])


@pytest.mark.parametrize("name", list(LAYER))
def test_a_layer_laid_out_otherwise_stays(name):
    """Megatron moves an attribute: a reason in words, no AttributeError."""
    reason = stock_path.reason_at_build(GPTModel(without=name), None)
    assert name in reason


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


def at_build(where, name, value, joined=False):
    """The reason of a head that has one attribute set otherwise."""
    model, arguments = GPTModel(), types.SimpleNamespace()
    owner = {"layer": model.output_layer, "config": model.config, "arguments": arguments}[where]
    assert stock_path.reason_at_build(model, arguments) == ""
    setattr(owner, name, value)
    return stock_path.reason_at_build(model, arguments, joined)


#: Where, which attribute has which value, and words of the reason; none where the value is as by default.
AT_BUILD = [
    ("layer", "bias", torch.zeros(1), "has a bias"),
    ("layer", "gather_output", True, "parallel_output=False"),
    ("layer", "is_expert", True, "expert layer"),
    ("layer", "disable_grad_reduce", True, "LoRA"),
    ("layer", "gtp_remat_size", 2, "gtp_remat"),
    ("layer", "gtp_remat_size", 1, ""),
    ("layer", "output_dtype", torch.float16, "--output-logit-dtype"),
    *(("layer", "output_dtype", dtype, "") for dtype in (torch.bfloat16, torch.float32, None)),
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
    reason = at_build(where, name, value)
    assert words in reason and bool(words) == bool(reason)


@pytest.mark.parametrize("name", ["modelopt_enabled", "export_kd_teacher_load"])
def test_modelopt_is_no_reason_once_it_has_joined_two_heads(name):
    assert at_build("arguments", name, "folder", joined=True) == ""
    assert at_build("arguments", "logits_save_dir", "folder", joined=True)


def test_a_head_that_waits_for_modelopt_is_not_said_to_stay(monkeypatch):
    """The line names the one that follows; an option of the loss ends the launch."""
    launch = types.SimpleNamespace(export_kd_teacher_load="folder", modelopt_enabled=True)
    lines = []
    monkeypatch.setattr(arguments, "megatron_args", lambda: launch)
    monkeypatch.setattr(say, "line", lines.append)
    monkeypatch.setattr(say, "_said", set())
    model = GPTModel()
    model.output_layer.tp_group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    language_module.adopt_output_layer(model, FusedCEConfig(), False)
    (line,) = lines
    assert line.startswith("the head of GPTModel waits for ModelOpt") and "a line 'distillation:'" in line
    options = FusedCEConfig(z_loss=1e-4, true_vocab_size=5)
    with pytest.raises(ValueError, match=r"^z_loss, true_vocab_size: Megatron's own .*distillation"):
        language_module.adopt_output_layer(model, options, False)
    for reader in ("logits_save_dir", "config_logger_dir"):  # as plan says (tests/plan/test_command.py)
        launch = types.SimpleNamespace(**{reader: "folder"})
        with pytest.raises(ValueError, match=r"^z_loss, true_vocab_size: Megatron's own .*logits"):
            language_module.adopt_output_layer(model, options, False)


def test_fp32_logits_are_the_heads_own_matter():
    """Megatron's --output-logit-dtype fp32 is served, and contradicts a flag of ours."""

    def of(config, dtype):
        return language_module.of_layer(config, types.SimpleNamespace(output_dtype=dtype))

    rounded = FusedCEConfig(logit_precision="activations")
    expected = FusedCEConfig("store", logit_precision="fp32")
    assert of(FusedCEConfig("store"), torch.float32) == expected
    words = r"--output-logit-dtype fp32 .logit_dtype. and --fused-ce-logit-precision"
    with pytest.raises(ValueError, match=words):
        of(rounded, torch.float32)
    assert of(rounded, torch.bfloat16) is of(rounded, None) is rounded


def hook(*arguments):
    """A forward hook of somebody's."""


def sharding_hook(*arguments):
    """One of Megatron-FSDP's."""


sharding_hook.__module__ = "megatron.core.distributed.fsdp.src"


def at_call(hooks=(), hidden=(2, 1, 4), gather_output=False, labels=True, weight=None, **layer):
    """As the head's call sees it from Megatron's model code."""
    model = GPTModel()
    weight = torch.zeros(6, 4) if weight is None else weight
    layer = {"sequence_parallel": True, "fused_ce_sequence_parallel": True, **layer}
    layer = Layer(_forward_hooks=dict(enumerate(hooks)), **{**of_layer(), **layer})
    model.output_layer = lambda: stock_path.reason_at_call(
        layer, torch.zeros(hidden), weight, gather_output, sys._getframe(1)
    )
    return model._postprocess(labels=labels or None)


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
    layer = Layer(_forward_hooks={}, fused_ce_sequence_parallel=False, **of_layer())

    def head():
        inputs = torch.zeros(2, 1, 4), torch.zeros(6, 4)
        return stock_path.reason_at_call(layer, *inputs, False, sys._getframe(1))

    loss = GPTModel().compute_language_model_loss
    assert own(head, loss) == ""
    assert own(head, loss, in_megatron(not_megatrons)) == ""
    assert "scaled by" in own(head, loss, not_megatrons)
    assert "the loss of this call is" in own(head, not_megatrons)


#: Of a call: changes, and words of the reason; none where the head is evaluated.
AT_CALL = [
    ({}, ""),
    ({"labels": False}, "called without labels"),
    ({"hooks": [sharding_hook]}, ""),
    ({"hooks": [sharding_hook, hook]}, "test_stock_path.hook"),
    ({"sequence_parallel": False, "fused_ce_sequence_parallel": False}, ""),
    ({"sequence_parallel": False}, "sequence parallelism off"),
    ({"gather_output": True}, "runtime_gather_output"),
    ({"hidden": (2, 4)}, "2 dimensions"),
    ({"bias": torch.zeros(5)}, "a bias"),
    ({"_forward_impl": not_megatrons}, "test_stock_path.not_megatrons stands in the place"),
    ({"config": types.SimpleNamespace(config_logger_dir="folder")}, "config logger"),
    ({"config": types.SimpleNamespace(batch_invariant_mode=True)}, "--batch-invariant-mode replaces"),
]


@pytest.mark.parametrize(("change", "words"), AT_CALL)
def test_each_reason_at_a_call(change, words):
    """Those of the caller, of its loss and of its scale: tests/parallel/test_seams.py."""
    reason = at_call(**change)
    assert words in reason and bool(words) == bool(reason)


def test_calls_without_a_loss(monkeypatch):
    with torch.inference_mode():
        assert at_call() == "inference mode, and no labels in the model's call"
    monkeypatch.setattr(switch, "returns_deferred_logits", lambda: True)
    assert at_call(labels=False) == ""


def test_gathered_logits_are_deferred_for_their_log_probs_alone():
    """FSDP's models return real ones: weights are gone, and hooks lost, after the model's call."""
    model = torch.nn.Linear(2, 2)
    with caller.returned_to_caller(stock_path.reason_for_log_probs(model)):
        assert at_call(gather_output=True) == ""
    assert "runtime_gather_output" in at_call(gather_output=True)
    for mark in ("placements", "__fsdp_param__"):
        model = torch.nn.Linear(2, 2)
        setattr(model.bias, mark, True)
        with caller.returned_to_caller(stock_path.reason_for_log_probs(model)):
            assert "FSDP frees weights" in at_call(gather_output=True)
    assert stock_path.reason_for_log_probs(torch.nn.Linear.__new__(torch.nn.Linear)) == ""
    stock_path.refuse_log_probs(FusedCEConfig(logit_scale=0.5, skip_masked=True))
    for options in ({"label_smoothing": 0.1}, {"logit_softcap": 30.0}, {"ignore_index": -100}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: the caller's log-probabilities"):
            stock_path.refuse_log_probs(FusedCEConfig(**options))


def test_gathered_logits_look_as_megatrons():
    """The whole vocabulary, in the dtype that --output-logit-dtype asks for."""
    from megatron_fused_ce.adapter import output_layer

    model = GPTModel()
    layer = model.output_layer
    layer.__class__ = output_layer.ColumnParallelLinear
    layer.sequence_parallel = layer.fused_ce_sequence_parallel = True
    layer.fused_ce_config, layer.fused_ce_held = FusedCEConfig(), forms.Held("", frozenset())
    layer.weight = torch.nn.Parameter(torch.zeros(5, 4))
    layer.tp_group = types.SimpleNamespace(size=lambda: 2)
    layer.output_size, layer.output_size_per_partition = 10, 5
    hidden = torch.zeros(3, 1, 4, dtype=torch.bfloat16)
    for dtype in (torch.float32, None):
        layer.output_dtype = dtype
        with caller.returned_to_caller():
            logits, _ = model._postprocess(hidden, runtime_gather_output=True)
        assert (logits.shape, logits.dtype) == ((6, 1, 10), dtype or torch.bfloat16)
        assert model._postprocess(hidden, labels=True)[0].shape == (6, 1, 5)


def test_modelopts_hooks_are_known_on_joined_heads_alone(monkeypatch):
    def capture(*arguments): ...

    distillation = types.SimpleNamespace(teacher_output_capture_fwd_hook=capture)
    monkeypatch.setitem(sys.modules, "modelopt.torch.distill.distillation_model", distillation)
    assert "may read or change the logits" in at_call(hooks=(capture,))
    assert at_call(hooks=(capture,), fused_ce_joined=True) == ""
    assert "may read or change the logits" in at_call(hooks=(capture, hook), fused_ce_joined=True)
    sharded = torch.zeros(6, 4)
    sharded.placements = ()
    assert at_call(weight=sharded) == ""
    assert at_call(weight=sharded, fused_ce_joined=True) == ""
    assert "FSDP frees weights" in at_call(hooks=(capture,), weight=sharded, fused_ce_joined=True)
