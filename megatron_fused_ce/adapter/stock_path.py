"""The list of heads and calls that stay with Megatron's own output layer, with the reasons.

Checked once when a model is built (:func:`reason_at_build`) and on every call of its head
(:func:`reason_at_call`). A reason is logged once, by one rank; nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch

from megatron_fused_ce.adapter import consumer, deferred_logits, token_weights
from megatron_fused_ce.adapter.consumer import MODELS, name_of
from megatron_fused_ce.config import FusedCEConfig

#: Attributes of Megatron's output layer that this package reads.
LAYER_ATTRIBUTES = (
    *("weight", "bias", "gather_output", "is_expert", "disable_grad_reduce", "sequence_parallel"),
    *("tp_group", "input_size", "output_size", "output_size_per_partition"),
    "gradient_accumulation_fusion",
)


#: Megatron's arguments by which it hooks every module in some iterations.
SAVED_BY_HOOKS = ("save_activations_interval", "save_dgrads_interval")
_FSDP2 = ("torch.distributed.fsdp.", "torch.distributed._composable.")


def reason_at_build(model: Any, megatron_args: Any) -> str | None:
    """Why this model's head stays on the stock path, or None."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if not any(cls.__name__ in MODELS for cls in type(model).__mro__):
        return f"{type(model).__name__} is not one of {', '.join(MODELS)}"
    loss = model.compute_language_model_loss
    if not consumer.takes_deferred(loss):
        return f"{type(model).__name__} has a loss of its own ({name_of(loss)}), which may need real logits"
    layer, config = model.output_layer, model.config
    if type(layer) is not ColumnParallelLinear:
        return (
            f"its output layer is {type(layer).__module__}.{type(layer).__name__}, "
            "not Megatron's ColumnParallelLinear"
        )
    missing = [name for name in LAYER_ATTRIBUTES if not hasattr(layer, name)]
    if missing:
        return f"its output layer has no {', '.join(missing)}, as in no Megatron that was tried"
    output_dtype = getattr(layer, "output_dtype", None)
    checks = (
        (layer.bias is not None, "its output layer has a bias"),
        (layer.gather_output, "its output layer gathers the logits (parallel_output=False)"),
        (layer.is_expert, "its output layer is an expert layer"),
        (layer.disable_grad_reduce, "its output layer does not reduce grad_hidden (LoRA)"),
        (getattr(layer, "gtp_remat_size", 1) > 1, "its weight is sharded by gtp_remat"),
        (
            getattr(config, "defer_embedding_wgrad_compute", False),
            "--defer-embedding-wgrad-compute keeps the gradient of the logits",
        ),
        (
            getattr(config, "batch_invariant_mode", False),
            "--batch-invariant-mode replaces the products and the softmax by kernels whose sums do not "
            "depend on the batch",
        ),
        (
            output_dtype not in (None, config.params_dtype, torch.float32),
            f"--output-logit-dtype asks for {output_dtype} logits",
        ),
        (_config_logger_on(config), "the config logger writes the logits to disk"),
        (
            bool(getattr(megatron_args, "logits_save_dir", None)),
            "--logits-save-dir reads the logits",
        ),
        (
            bool(getattr(megatron_args, "logits_load_dir", None)),
            "--logits-load-dir (distillation) reads the logits",
        ),
        (
            any(getattr(megatron_args, name, None) is not None for name in SAVED_BY_HOOKS),
            "--save-activations-interval or --save-dgrads-interval saves the logits or their gradient",
        ),
        (
            bool(getattr(megatron_args, "modelopt_enabled", False)),
            "ModelOpt reads the logits",
        ),
        (
            bool(getattr(megatron_args, "export_kd_teacher_load", None)),
            "distillation (--export-kd-teacher-load) reads the logits",
        ),
    )
    return next((reason for applies, reason in checks if applies), None)


def refuse_options(config: FusedCEConfig, reason: str) -> None:
    """Raise if ``config`` has options of the loss, which Megatron's own loss would leave out.

    Raises:
        ValueError: names the options, and why the loss is Megatron's own.
    """
    if config.loss_options:
        raise ValueError(
            f"{config.loss_options}: Megatron's own loss knows nothing of it, and the head would stay "
            f"on that: {reason}. Leave these options out, or what keeps the head from being fused"
        )


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


def reason_for_log_probs(model: Any) -> str:
    """Why ``model`` (perhaps wrapped) must compute logits for log-probabilities; empty if it need not."""
    # Megatron's own tests pass a module whose __init__ never ran: it has no parameters to ask.
    if hasattr(model, "_parameters") and any(map(deferred_logits.is_fsdp, model.parameters())):
        return (
            "get_logprobs asks for log-probabilities after the model's call, and FSDP frees weights at its "
            "end and hooks the tensors that it returns"
        )
    return ""


def refuse_accuracy(reason: str) -> NoReturn:
    """Raises ``ValueError``: the accuracy is on, but this model's head cannot count it."""
    raise ValueError(
        f"--fused-ce-log-accuracy (log_accuracy) takes what the fused head counts: {reason}. Leave it out, "
        "or what stands in its way"
    )


def reason_at_call(
    layer: Any, hidden: Any, gather_output: bool, caller: FrameType, stays_with_caller: bool
) -> str | None:
    """Why this call of a head that is otherwise fused takes the stock path, or None.

    Args:
        caller: the frame that calls the layer.
        stays_with_caller: whether logits that the model returns may stay deferred.
    """
    no_loss = token_weights.why_no_loss(layer)
    if no_loss:
        return no_loss
    if gather_output and deferred_logits.why_caller_needs_logits():
        return deferred_logits.why_caller_needs_logits()
    unknown = consumer.why_unknown(caller)
    if unknown:
        return unknown
    if consumer.returns_logits(caller):
        if not stays_with_caller:
            return "the model was called without labels, and returns its logits"
        for kind, hook in _hooks(caller.f_locals["self"]):
            if kind == "backward" and not _is_sharding_hook(hook):
                return f"a {kind} hook of the model ({name_of(hook)}) may change the gradient of its logits"
    if layer.sequence_parallel != layer.fused_ce_sequence_parallel:
        return "inference turned sequence parallelism off for this call"
    if hidden.dim() != 3:
        return f"the hidden states have {hidden.dim()} dimensions, not [s, b, h]"
    if layer.bias is not None:
        return "it was given a bias"
    for function in _replaceable(layer):
        if not consumer.is_megatrons(function):
            return f"{name_of(function)} stands in the place of one of Megatron's functions"
    for kind, hook in _hooks(layer):
        if not _is_sharding_hook(hook):
            return f"a {kind} hook ({name_of(hook)}) may read or change the logits or their gradient"
    if _config_logger_on(getattr(layer, "config", None)):
        return "the config logger writes the logits to disk"
    return None


def _config_logger_on(config: Any) -> bool:
    return bool(getattr(config, "config_logger_dir", ""))


def _replaceable(layer: Any) -> Iterator[Any]:
    """What would compute the logits and the loss without the flag, where somebody may have replaced it."""
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module import language_module

    yield tensor_parallel.ColumnParallelLinear.forward
    yield layer._forward_impl
    config: Any = getattr(layer, "config", None)
    if not getattr(config, "cross_entropy_loss_fusion", False):
        yield tensor_parallel.vocab_parallel_cross_entropy
    elif config.cross_entropy_fusion_impl == "native":
        yield language_module.fused_vocab_parallel_cross_entropy


def _hooks(module: Any) -> Iterator[tuple[str, Any]]:
    """The module's own and those of all modules, each with its kind."""
    for name in ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        kind = name.split("_")[1]
        for owner, attribute in ((module, name), (torch.nn.modules.module, f"_global{name}")):
            yield from ((kind, hook) for hook in getattr(owner, attribute, {}).values())


def _is_sharding_hook(hook: Any) -> bool:
    """Hooks of FSDP2 and Megatron-FSDP gather and free parameters; they read no logits."""
    module = getattr(hook, "__module__", None) or getattr(getattr(hook, "func", None), "__module__", "")
    return str(module).startswith(_FSDP2) or (str(module).startswith("megatron") and "fsdp" in str(module))
