"""Which heads and calls stay with Megatron's own output layer: the one place that decides.

Asked once when a model is built (:func:`reason_at_build`) and at every call of its head
(:func:`reason_at_call`). Both return the reason in words, those of launch arguments from :mod:`.reasons`, or
an empty string for a head that is fused. A reason is logged once; nothing falls back silently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch

from megatron_fused_ce.adapter import caller, forms, switch, token_weights
from megatron_fused_ce.adapter.forms import name_of
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.ranks.collectives import same_on_all_ranks
from megatron_fused_ce.reasons import BY_ARGUMENT, STOPS

#: Attributes of Megatron's output layer that this package reads.
LAYER_ATTRIBUTES = (
    *("weight", "bias", "gather_output", "is_expert", "disable_grad_reduce", "sequence_parallel"),
    *("tp_group", "input_size", "output_size", "output_size_per_partition"),
    "gradient_accumulation_fusion",
)
#: Arguments of a launch whose readers take the logits, and those of them whose reader is ModelOpt.
_READERS = (
    *("config_logger_dir", "logits_save_dir", "logits_load_dir"),
    *("save_activations_interval", "save_dgrads_interval"),
)
_OF_MODELOPT = ("export_kd_teacher_load", "modelopt_enabled")
#: The reason of a head that waits for :mod:`.modelopt`, which joins it with its teacher's or says why not.
OF_DISTILLATION = BY_ARGUMENT["export_kd_teacher_load"]

#: ModelOpt's forward hooks that keep an output layer's result for its distillation, and their module.
_CAPTURES = ("student_output_capture_fwd_hook", "teacher_output_capture_fwd_hook")
_OF_CAPTURES = "modelopt.torch.distill.distillation_model"
_FSDP2 = ("torch.distributed.fsdp.", "torch.distributed._composable.")


# --- when a model is built -------------------------------------------------------------------------


def reason_at_build(model: Any, megatron_args: Any, joined: bool = False) -> str:
    """Why this model's head stays on the stock path, or an empty string.

    Args:
        joined: ModelOpt has joined it with its teacher or student, in a way that is known.

    Collectives: one all-reduce over the head's group, whose ranks decide alike.
    """
    held = forms.Held(forms.kind_of(model.config), switch.trusted())
    reason = _reason_at_build(model, megatron_args, joined) or held.why_unknown
    return of_all_ranks(reason, held, getattr(model.output_layer, "tp_group", None))


def _reason_at_build(model: Any, megatron_args: Any, joined: bool) -> str:
    name, loss = type(model).__name__, model.compute_language_model_loss
    if not any(cls.__name__ in caller.MODELS for cls in type(model).__mro__):
        return f"{name} is not one of {', '.join(caller.MODELS)}"
    if not caller.takes_deferred(loss):
        return (
            f"{name} has a loss of its own ({forms.where(loss)}), which may need real logits: remove it to "
            "have Megatron's loss fused"
        )
    layer, config = model.output_layer, model.config
    unknown = _why_unknown_layer(layer, config) or _why_not_served(layer, config)
    if unknown:
        return unknown
    if layer.gather_output:
        return "its output layer gathers the logits (parallel_output=False)"
    return _of_arguments(_READERS if joined else _READERS + _OF_MODELOPT, config, megatron_args)


def reason_for_log_probs(model: Any) -> str:
    """Why ``model`` (perhaps wrapped) must compute logits for log-probabilities; empty if it need not."""
    # Megatron's own tests pass a module whose __init__ never ran: it has no parameters to ask.
    if hasattr(model, "_parameters") and any(map(is_fsdp, model.parameters())):
        return (
            "get_logprobs asks for log-probabilities after the model's call, and FSDP frees weights at its "
            "end and hooks the tensors that it returns"
        )
    return ""


def of_all_ranks(reason: str, held: forms.Held, group: Any) -> str:
    """``reason``, or one where other ranks of the group have another one, or other code.

    Collectives: one all-reduce over ``group``, whose ranks decide alike.
    """
    if same_on_all_ranks(f"{not reason} {held.digests}", group):
        return reason
    return reason or "it is not the same code on all ranks of its tensor-parallel group"


def _of_arguments(names: tuple[str, ...], *owners: Any) -> str:
    """The reason of the first of these arguments that one of the owners has set."""
    given = (name for name in names if any(getattr(owner, name, None) for owner in owners))
    return next((BY_ARGUMENT[name] for name in given), "")


def _why_unknown_layer(layer: Any, config: Any, known: bool = False) -> str:
    """Why nothing is known of what this layer makes of hidden states and weight; empty if it is known.

    Args:
        known: its forward must have a known form, which :class:`.forms.Held` asks of an adopted one.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    kind = type(layer)
    name = f"its output layer is {kind.__module__}.{kind.__name__}"
    fp8 = _of_arguments(("fp8_output_proj",), config)
    if not isinstance(layer, ColumnParallelLinear):
        return fp8 or f"{name}, not Megatron's ColumnParallelLinear"
    parametrized = why_parametrized(layer)
    if parametrized:
        return parametrized
    # Megatron's dev branch has a layer whose forward gives a loss on request.
    is_plain = kind.forward is ColumnParallelLinear.forward or forms.is_own(
        kind.forward, forms.LINEAR, "LinearCrossEntropyModule.forward", known
    )
    if not is_plain or kind.__call__ is not torch.nn.Module.__call__:
        more = f"{name}, whose {name_of(kind.forward)} may do more than Megatron's ColumnParallelLinear"
        return fp8 or more
    missing = ", ".join(attribute for attribute in LAYER_ATTRIBUTES if not hasattr(layer, attribute))
    return missing and f"its output layer has no {missing}, as in no Megatron that was tried"


def why_parametrized(layer: Any) -> str:
    """Why the layer's weight must be read as often as Megatron's layer reads it, or an empty string.

    To be asked before anything reads it: a spectral norm takes a step of its power iteration at each read.
    """
    if "parametrizations" not in layer._modules:
        return ""
    return "a parametrization of its output layer changes with every read of the weight, or may"


def _why_not_served(layer: Any, config: Any) -> str:
    """Why no head of this package stands in for the layer, whatever is asked of it; empty if one may."""
    changed = _why_not_served_now(layer)
    if changed:
        return changed
    output_dtype = getattr(layer, "output_dtype", None)
    if output_dtype not in (None, config.params_dtype, torch.float32):
        return BY_ARGUMENT["logit_dtype"].format(output_dtype)
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return BY_ARGUMENT["tensor_parallel_num_weight_shards"]
    return ""


def _why_not_served_now(layer: Any) -> str:
    """Why the layer, as it is now, does more than multiply: its attributes may change after the build."""
    sums = layer.tp_group.size() > 1 and not layer.sequence_parallel and not layer.disable_grad_reduce
    if layer.bias is not None:
        return "its output layer has a bias"
    if layer.is_expert or getattr(layer, "explicit_expert_comm", False):
        return "it is an expert layer"
    if layer.disable_grad_reduce or getattr(layer, "allreduce_dgrad", sums) != sums:
        return "its output layer does not reduce grad_hidden (LoRA)"
    return _of_arguments(("batch_invariant_mode",), getattr(layer, "config", None))


# --- at a call of its head -------------------------------------------------------------------------


def reason_at_call(layer: Any, hidden: Any, weight: Any, gathers: bool, frame: FrameType | None) -> str:
    """Why this call of a head that is otherwise fused takes the stock path; empty if it does not.

    Args:
        weight: the call's, None for the layer's own.
        gathers: the logits of the whole vocabulary are asked for.
        frame: of the code that calls the layer; None within torch.compile.
    """
    reason = why_parametrized(layer)
    if reason:
        return reason
    if frame is None:
        return "it is called within torch.compile"
    weight = layer.weight if weight is None else weight
    return (
        _why_taken(layer, weight, gathers, frame)
        or _why_other_inputs(layer, hidden, weight)
        or _why_not_served_now(layer)
        or _why_replaced(layer, caller.model_of(frame).config)
        or _why_hooked(layer)
        or _why_trained_by_a_hook(layer, hidden, weight)
        or _of_arguments(("config_logger_dir",), getattr(layer, "config", None))
    )


def _why_taken(layer: Any, weight: Any, gathers: bool, frame: FrameType) -> str:
    """Why the caller, or the model's, may do something else with the logits than a loss; empty if not."""
    reason = (
        token_weights.why_no_loss(layer)
        or (caller.why_caller_needs_logits() if gathers else "")
        or caller.why_unknown(frame)
    )
    if reason or not caller.returns_logits(frame):
        return reason
    if not gathers and not stays_deferred(weight):
        return "the model was called without labels, and returns its logits"
    for kind, hook in _hooks(frame.f_locals["self"]):
        if kind == "backward" and not _is_sharding_hook(hook):
            return f"a {kind} hook of the model ({name_of(hook)}) may change the gradient of its logits"
    return ""


def stays_deferred(weight: Any) -> bool:
    """Whether logits of this rank's part stay deferred when the model returns them."""
    return switch.returns_deferred_logits() and not is_fsdp(weight)


def is_fsdp(parameter: Any) -> bool:
    """Whether FSDP2 or Megatron-FSDP shards a parameter, which they free when the model's call ends."""
    return any(hasattr(parameter, of) for of in ("placements", "__fsdp_param__", "_mfsdp_parameter_group"))


def _why_other_inputs(layer: Any, hidden: Any, weight: Any) -> str:
    """Why hidden states and weight are not those that the layer was built for; empty if they are."""
    if layer.sequence_parallel != layer.fused_ce_sequence_parallel:
        return "inference turned sequence parallelism off for this call"
    if captures_of(layer) and is_fsdp(weight):
        return "ModelOpt asks for the divergence after the model's call, and FSDP frees weights at its end"
    if hidden.dim() != 3:
        return f"the hidden states have {hidden.dim()} dimensions, not [s, b, h]"
    if hidden.dtype == torch.float64:
        return "the hidden states are float64"
    rows = layer.output_size_per_partition
    if len(weight) != rows and not is_fsdp(weight):
        return f"its weight has {len(weight)} rows, and its layer was built for {rows}"
    return ""


#: How torch calls a module, which some tools replace: its own functions, None for those replaced before this
#: package was imported.
_CALLS = {
    name: call
    if type(call := getattr(torch.nn.Module, name)) is FunctionType
    and call.__globals__ is vars(torch.nn.modules.module)
    else None
    for name in ("__call__", "_call_impl", "_wrapped_call_impl")
}


def _why_replaced(layer: Any, config: Any) -> str:
    """Why a call of the layer, or its loss, may do something else than when the model was built; or empty.

    Args:
        config: the model's.
    """
    product, forward = layer._forward_impl, layer.stock_forward
    if type(product) is not MethodType or product.__func__ is not forms.of_layer("_forward_impl"):
        return f"{name_of(product)} stands in the place of one of Megatron's functions"
    if not forms.is_megatrons(forward):
        return f"{name_of(forward)} stands in the place of one of Megatron's functions"
    held: forms.Held = layer.fused_ce_held
    if held.of != forms.kind_of(config):
        return "its config names another loss than when the model was built"
    changed = held.why_unknown or held.changed()
    if changed:
        return changed
    kind, of_instance = type(layer), vars(layer)
    for name, call in _CALLS.items():
        found = getattr(layer.stock_call, "__func__", layer) if name == "__call__" else getattr(kind, name)
        if name in of_instance or found is not call:
            return f"{name_of(of_instance.get(name, found))} calls the output layer in torch's place"
    if hasattr(kind, "_get_fsdp_state"):
        made_dtype = layer._get_fsdp_state()._mp_policy.output_dtype
        if made_dtype not in (None, torch.float32):
            return f"FSDP casts what the output layer returns to {made_dtype}"
    return ""


def _why_hooked(layer: Any) -> str:
    known = captures_of(layer)
    for kind, hook in _hooks(layer):
        if not _is_sharding_hook(hook) and hook not in known:
            return f"a {kind} hook ({name_of(hook)}) may read or change the logits or their gradient"
    return ""


def _why_trained_by_a_hook(layer: Any, hidden: Any, weight: Any) -> str:
    """Why real logits of this call may have a gradient that hidden states and weight lack; empty if not.

    Adapters, pruning and ``weight_norm`` bring what they train in by a pre-hook, which runs after this look.
    """
    if not torch.is_grad_enabled() or hidden.requires_grad or weight.requires_grad:
        return ""
    own, of_all = getattr(layer, "_forward_pre_hooks", {}), torch.nn.modules.module._global_forward_pre_hooks
    for hook in (*own.values(), *of_all.values()):
        if not (forms.is_megatrons(hook) or _is_sharding_hook(hook)):
            return f"nothing but a forward pre-hook ({name_of(hook)}) may have something to train"
    return ""


def _hooks(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield a module's own hooks and torch's global ones, each with its kind."""
    for name in ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        kind = name.split("_")[1]
        for owner, attribute in ((module, name), (torch.nn.modules.module, f"_global{name}")):
            yield from ((kind, hook) for hook in getattr(owner, attribute, {}).values())


def captures_of(layer: Any) -> list[Any]:
    """ModelOpt's hooks on a layer that is joined with its student's or teacher's (:mod:`.modelopt`)."""
    if not getattr(layer, "fused_ce_joined", False):
        return []
    module = sys.modules.get(_OF_CAPTURES)
    known = [getattr(module, name, None) for name in _CAPTURES]
    return [hook for hook in layer._forward_hooks.values() if hook in known]


def _is_sharding_hook(hook: Any) -> bool:
    """Whether a hook is FSDP2's or Megatron-FSDP's: it gathers or frees parameters, and reads no logits."""
    module = getattr(hook, "__module__", None) or getattr(getattr(hook, "func", None), "__module__", "")
    return str(module).startswith(_FSDP2) or (str(module).startswith("megatron") and "fsdp" in str(module))


# --- refused instead -------------------------------------------------------------------------------


def refuse_options(config: FusedCEConfig, reason: str) -> None:
    """Raise if ``config`` has options of the loss, which Megatron's own loss, or ModelOpt's, would leave out.

    Raises:
        ValueError: names the options, and why the loss is not this package's.
    """
    if config.loss_options:
        raise ValueError(STOPS.format(config.loss_options, reason))


def refuse_log_probs(config: FusedCEConfig) -> None:
    """Raise if ``config`` makes the loss other than the label's negative log-probability.

    Raises:
        ValueError: names the options.
    """
    if config.loss_options:
        raise ValueError(
            f"{config.loss_options}: the caller's log-probabilities are those of the plain softmax that "
            "tokens are sampled from, and the head's loss would be another. Leave these options out"
        )


def refuse_processor(layer: Any, adopted: bool) -> None:
    """Raise if the results of this layer cannot be had from hidden states and weight alone.

    Args:
        adopted: it is this package's, so that its class is known.

    Raises:
        ValueError: with the reason.
    """
    config = getattr(layer, "config", None)
    reason = why_parametrized(layer) or ("" if adopted else _why_unknown_layer(layer, config, known=True))
    if not reason and not adopted and "forward" in vars(layer):
        reason = f"its forward is {name_of(layer.forward)}, which may change the logits"
    reason = reason or _why_not_served(layer, config) or _why_hooked(layer)
    if reason:
        raise ValueError(
            f"output_processor cannot serve this head: {reason}. Call the model without it, or leave out "
            "what stands in its way"
        )
