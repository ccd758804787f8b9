"""The two seams in Megatron's language models, the same in every version and model class."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_fused_ce.adapter import arguments, report, stock_path, token_weights
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.switch import active_config
from megatron_fused_ce.config import FusedCEConfig


def patch(module: ModuleType) -> None:
    """Patch ``LanguageModule``: its set-up adopts the output layer, its loss takes deferred logits."""
    language_module: Any = module.LanguageModule
    stock_setup = language_module.setup_embeddings_and_output_layer
    stock_loss = language_module.compute_language_model_loss

    @wraps(stock_setup)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        stock_setup(self)
        config = active_config()
        if config is not None and self.post_process and hasattr(self, "output_layer"):
            adopt_output_layer(self, config)

    @wraps(stock_loss)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if isinstance(logits, DeferredLogits):
            return logits.loss(labels, token_weights.of_loss(self, labels))
        layer = getattr(self, "output_layer", None)
        adopted: FusedCEConfig | None = getattr(layer, "fused_ce_config", None)
        if adopted is not None:
            stock_path.refuse_options(adopted, "the loss of this call takes real logits")
        loss: Tensor = stock_loss(self, labels, logits)
        return loss

    language_module.setup_embeddings_and_output_layer = setup_embeddings_and_output_layer
    language_module.compute_language_model_loss = compute_language_model_loss


def adopt_output_layer(model: Any, config: Any) -> None:
    """Defer the logits of this model's head, or say why not."""
    from megatron_fused_ce.adapter.output_layer import ColumnParallelLinear

    args = arguments.megatron_args()
    reason = stock_path.reason_at_build(model, args)
    if reason is not None:
        stock_path.refuse_options(config, reason)
        report.left_to_megatron(model, reason)
        return
    ColumnParallelLinear.adopt(
        model.output_layer, config, with_argmax=_counts_mtp_acceptance(model.config)
    )
    token_weights.remember_calls(type(model))
    report.adopted(model, args)


def _counts_mtp_acceptance(config: Any) -> bool:
    """Whether Megatron will ask the heads of multi-token prediction for their argmax (since 0.19)."""
    if not getattr(config, "mtp_num_layers", None):
        return False
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")
