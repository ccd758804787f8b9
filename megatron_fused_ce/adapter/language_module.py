"""The two hook points in Megatron's language models, the same in every version and model class."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_fused_ce.adapter import (
    accuracy,
    arguments,
    phase_report,
    report,
    stock_path,
    token_weights,
)
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.switch import active_config, logs_accuracy
from megatron_fused_ce.config import FusedCEConfig

#: Models seen by the set-up below: their heads are fused, or stay with Megatron for a logged reason.
_seen: WeakSet[Any] = WeakSet()
_TAKES_LOGITS = "the loss of this call takes real logits"


def patch(module: ModuleType) -> None:
    """Patch ``LanguageModule``: its set-up adopts the output layer, its loss takes deferred logits."""
    language_module: Any = module.LanguageModule
    stock_setup = language_module.setup_embeddings_and_output_layer
    stock_loss = language_module.compute_language_model_loss

    @wraps(stock_setup)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        stock_setup(self)
        config = active_config()
        _seen.add(self)
        if config is not None and self.post_process and hasattr(self, "output_layer"):
            adopt_output_layer(self, config, logs_accuracy())

    @wraps(stock_loss)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if isinstance(logits, DeferredLogits):
            if not logits.gathered or self.output_layer.tp_group.size() == 1:
                return logits.loss(labels, token_weights.of_loss(self, labels))
            # Multi-token prediction in get_logprobs (since 0.19) gives logits of the whole vocabulary to a
            # loss for one rank's part. The result is Megatron's own.
            logits = logits.materialise()
        layer = getattr(self, "output_layer", None)
        adopted: FusedCEConfig | None = getattr(layer, "fused_ce_config", None)
        if adopted is not None:
            stock_path.refuse_options(adopted, _TAKES_LOGITS)
        elif layer is not None and self not in _seen and active_config() is not None:
            report.built_too_early(self)
        loss: Tensor = stock_loss(self, labels, logits)
        if layer is not None and getattr(layer, "fused_ce_log_accuracy", False):
            accuracy.remember(loss, None, _TAKES_LOGITS, layer.tp_group.rank())
        return loss

    setattr(compute_language_model_loss, stock_path.TAKES_DEFERRED, True)
    language_module.setup_embeddings_and_output_layer = setup_embeddings_and_output_layer
    language_module.compute_language_model_loss = compute_language_model_loss


def adopt_output_layer(model: Any, config: FusedCEConfig, log_accuracy: bool) -> None:
    """Defer the logits of this model's head, or log why not.

    Raises:
        ValueError: an option is on but the head stays with Megatron; the accuracy is on but the loss mask or
        the schedules' function is missing.
    """
    from megatron_fused_ce.adapter.output_layer import ColumnParallelLinear

    args = arguments.megatron_args()
    reason = stock_path.reason_at_build(model, args)
    if reason is not None:
        stock_path.refuse_options(config, reason)
        if log_accuracy:
            stock_path.refuse_accuracy(f"the head would stay on Megatron's own path: {reason}")
        report.left_to_megatron(model, reason)
        return
    takes_mask = token_weights.remember_calls(type(model))
    missing = accuracy.reason_at_build(takes_mask) if log_accuracy else None
    if missing is not None:
        stock_path.refuse_accuracy(missing)
    ColumnParallelLinear.adopt(
        model.output_layer,
        of_layer(config, model.output_layer),
        with_argmax=_counts_mtp_acceptance(model.config),
        log_accuracy=log_accuracy,
        timed=phase_report.times_heads(model.output_layer.tp_group.rank()),
        model=type(model).__name__,
    )
    report.adopted(model, args)


def of_layer(config: FusedCEConfig, layer: Any) -> FusedCEConfig:
    """The config with the precision of Megatron's ``--output-logit-dtype fp32``.

    Raises:
        ValueError: this package's flag names another precision.
    """
    if getattr(layer, "output_dtype", None) != torch.float32:
        return config
    if config.logit_precision == "activations":
        raise ValueError(
            "--output-logit-dtype fp32 and --fused-ce-logit-precision activations contradict each other: "
            "leave one of them out"
        )
    return replace(config, logit_precision="fp32")


def _counts_mtp_acceptance(config: Any) -> bool:
    """Whether Megatron will ask the heads of multi-token prediction for their argmax (since 0.19)."""
    if not getattr(config, "mtp_num_layers", None):
        return False
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")
