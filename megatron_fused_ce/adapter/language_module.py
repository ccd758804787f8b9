"""The two hook points in Megatron's language models, the same in every version and model class."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import (
    arguments,
    caller,
    deferred_wgrad,
    forms,
    report,
    stock_path,
    token_weights,
)
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.switch import active_config, trusted
from megatron_fused_ce.config import FusedCEConfig

#: The attribute of a model seen by the set-up below: the head's config, or None where it stays with Megatron.
#: The model's own, since its output layer may be wrapped or replaced later; a copy of the model has it, too.
ADOPTED = "fused_ce_adopted"


def patch(module: ModuleType) -> None:
    """Patch ``LanguageModule``: its set-up adopts the output layer, its loss takes deferred logits.

    A loss that a user has put there stays as it is, and the heads with Megatron.
    """
    language_module: Any = module.LanguageModule
    stock_setup = language_module.setup_embeddings_and_output_layer
    stock_loss = language_module.compute_language_model_loss

    @wraps(stock_setup)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        stock_setup(self)
        config = active_config()
        if getattr(self, ADOPTED, None) is not None:
            return  # called again, as Megatron-Bridge does
        setattr(self, ADOPTED, None)
        if config is not None and self.post_process and hasattr(self, "output_layer"):
            adopt_output_layer(self, config)

    @wraps(stock_loss)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if isinstance(logits, DeferredLogits):
            if not logits.is_real and (not logits.call.gathered or self.output_layer.tp_group.size() == 1):
                return logits.loss(labels, token_weights.of_loss(self, labels))
            # Multi-token prediction in get_logprobs (since 0.19) gives logits of the whole vocabulary to a
            # loss for one rank's part. The result is Megatron's own.
            logits = logits.materialise()
        adopted: FusedCEConfig | None = getattr(self, ADOPTED, None)
        if adopted is not None:
            stock_path.refuse_options(adopted, "the loss of this call takes real logits")
        elif hasattr(self, "output_layer") and not hasattr(self, ADOPTED):
            config = active_config()
            if config is not None:
                stock_path.refuse_options(config, "the model was built before the flag was on")
                early = "it was built before megatron_fused_ce.enable(): call that before the model is built"
                report.left_to_megatron(self, early)
        loss: Tensor = stock_loss(self, labels, logits)
        return loss

    language_module.setup_embeddings_and_output_layer = setup_embeddings_and_output_layer
    if not forms.is_defined_in(module, stock_loss):
        return
    caller.learn_loss(compute_language_model_loss)
    language_module.compute_language_model_loss = compute_language_model_loss


def adopt_output_layer(model: Any, config: FusedCEConfig, joined: bool = False) -> None:
    """Defer the logits of this model's head, or log why not.

    Args:
        joined: see :func:`.stock_path.reason_at_build`.

    Raises:
        ValueError: an option is on but the head stays with Megatron.
    """
    from megatron_fused_ce.adapter.output_layer import ColumnParallelLinear

    args = arguments.megatron_args()
    reason = stock_path.reason_at_build(model, args, joined)
    if reason:
        stock_path.refuse_options(config, reason)
        if reason == stock_path.OF_DISTILLATION:
            report.waits_for_modelopt(model)
        else:
            report.left_to_megatron(model, reason)
        return
    kind = getattr(model, "original_cls", type(model))  # under ModelOpt's own
    token_weights.remember_calls(kind)
    caller.learn(kind)
    deferred_wgrad.turn_off(model.output_layer)
    ColumnParallelLinear.adopt(
        model.output_layer,
        of_layer(config, model.output_layer),
        with_argmax=_counts_mtp_acceptance(model.config),
        model=kind.__name__,
        held=forms.Held(forms.kind_of(model.config), trusted()),
    )
    setattr(model, ADOPTED, config)
    report.adopted(model, args)


def of_layer(config: FusedCEConfig, layer: Any) -> FusedCEConfig:
    """The config with the precision of Megatron's ``--output-logit-dtype fp32`` (``logit_dtype``).

    Raises:
        ValueError: it names another precision.
    """
    if getattr(layer, "output_dtype", None) != torch.float32:
        return config
    if config.logit_precision == "activations":
        raise ValueError(
            "--output-logit-dtype fp32 (logit_dtype) and --fused-ce-logit-precision activations "
            "(logit_precision) contradict each other: leave one of them out"
        )
    return replace(config, logit_precision="fp32")


def _counts_mtp_acceptance(config: Any) -> bool:
    """Whether Megatron will ask the heads of multi-token prediction for their argmax (since 0.19)."""
    if not getattr(config, "mtp_num_layers", None):
        return False
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")
