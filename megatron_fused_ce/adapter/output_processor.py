"""Log-probabilities from a Megatron model's hidden states, by Megatron's own contract: nothing is patched.

    from megatron_fused_ce import output_processor

    log_prob, entropy = model(
        tokens, positions, mask, labels=labels,
        output_processor=output_processor,
        output_processor_context={"temperature": 0.7, "entropy": "detached"},
    )

``GPTModel.forward`` and ``build_schedule_plan`` take both arguments since 0.18.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import stock_path
from megatron_fused_ce.adapter.language_module import of_layer
from megatron_fused_ce.adapter.main_grad import open_grad_weight_for
from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.ops.log_probs import LogProbOptions, TokenLogProbs, log_probs_of_head


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    context: LogProbOptions | None = None,
    loss_mask: Tensor | None = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **unused: Any,
) -> TokenLogProbs:
    """Log-probability and entropy of each token, in the place of the model's logits or loss.

    With the flag and without. Evaluated inside the output layer's ``nn.Module.__call__``, whose hooks gather
    what DDP or FSDP has sharded. The gradient of the weight goes to ``main_grad`` where the layer's own does.

    Args:
        hidden_states: ``[s, b, H]``, with sequence parallelism this rank's part ``[s / R, b, H]``.
        output_layer: the model's; its group and its sequence parallelism hold.
        output_weight: of tied embeddings; None for the layer's own.
        labels: ``[b, s]``, or ``[b, s, K]`` for several a token, those of the model's call: the tokens,
            shifted by the caller.
        context: ``output_processor_context``, keywords of :func:`.rl.token_log_probs`. Without a ``config``
            it is the flag's, where the head has one; options that change the loss alone do not count, and
            ``skip_masked`` and ``grad_in_forward`` are the loss's (``active_mask`` is in the labels' shape).
            ``active_mask="loss_mask"`` takes the model's, which is not read without: it may be meant for the
            heads of multi-token prediction alone. With the model's ``logit_dtype=torch.float32`` logits are
            not rounded.
        loss_mask: ``[b, s]`` of the model's call.
        scale_logits: the model's; its factor (MuP) comes before softcap and temperature.
        unused: what else Megatron passes.

    Returns:
        fp32 ``[b, s]``, log-probabilities in the labels' shape; None for what was not asked for.
        ``Float16Module`` makes a plain tuple of it, in the same order.

    Raises:
        TypeError: ``context`` has other keywords.
        ValueError: the layer may do more than multiply (another class, a bias, a hook), in words;
            ``scale_logits`` does more than multiply by a number; ``config`` and ``logit_dtype`` name two
            precisions; ``loss_mask`` is asked for and missing; as :func:`.rl.token_log_probs`.

    Collectives: those of :func:`.rl.token_log_probs`, and the hooks'.
    """
    from megatron_fused_ce.adapter import output_layer as adopted

    options: dict[str, Any] = {**(context or {})}
    unknown = options.keys() - LogProbOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"output_processor_context has {', '.join(sorted(unknown))}; expected some of "
            f"{', '.join(LogProbOptions.__annotations__)}"
        )
    mask: Any = options.get("active_mask")
    if isinstance(mask, str):
        if mask != "loss_mask" or loss_mask is None:
            raise ValueError(
                f"active_mask is {mask!r} and the model's call had {'a' if loss_mask is not None else 'no'} "
                'loss_mask; expected a bool tensor, or "loss_mask" in a call with one'
            )
        options["active_mask"] = loss_mask != 0
    is_adopted = isinstance(output_layer, adopted.ColumnParallelLinear)
    stock_path.refuse_processor(output_layer, is_adopted)
    config = options.get("config") or FusedCEConfig()
    if is_adopted:
        if options.get("config") is None:
            flag = output_layer.fused_ce_config
            strategy = "auto" if flag.strategy == "grad_in_forward" else flag.strategy
            config = replace(flag, strategy=strategy, skip_masked=False)
        softcap, reason = adopted.softcap_around(output_layer, config)
        if reason:
            raise ValueError(f"output_processor cannot serve this head: {reason}")
        config = replace(config, logit_softcap=softcap) if softcap else config
    config = of_layer(config, output_layer)
    factor = _factor_of(scale_logits)
    if factor != 1.0:
        config = replace(config, logit_scale=config.logit_scale * factor)
    options["config"] = config

    def evaluate(input_: Tensor, weight: Tensor | None = None, **_: Any) -> TokenLogProbs:
        used = output_layer.weight if weight is None else weight
        return log_probs_of_head(
            input_,
            used,
            labels,
            **options,
            tp_group=output_layer.tp_group,
            sequence_parallel=output_layer.sequence_parallel,
            vocab_start=output_layer.tp_group.rank() * output_layer.output_size_per_partition,
            open_grad_weight=open_grad_weight_for(used, output_layer.gradient_accumulation_fusion),
        )

    of_instance = vars(output_layer)
    before = {name: of_instance[name] for name in ("forward",) if name in of_instance}
    of_instance["forward"] = evaluate
    try:
        made = torch.nn.Module.__call__(output_layer, hidden_states, weight=output_weight)
    finally:
        del of_instance["forward"]
        of_instance.update(before)
    counters().fused += 1
    return TokenLogProbs(*made)  # not forward's: a hook of FSDP's may have replaced tensors by views


def _factor_of(scale_logits: Callable[[Tensor], Tensor] | None) -> float:
    if scale_logits is None:
        return 1.0
    logits = torch.tensor([1.0, -2.0, 8.0], dtype=torch.float64)
    scaled = scale_logits(logits.clone())
    if not torch.equal(scaled, logits * scaled[0]):
        raise ValueError(
            f"scale_logits makes {scaled.tolist()} of the logits {logits.tolist()}; expected a product with "
            "one number: call the model without output_processor"
        )
    return float(scaled[0])
