"""What is asked of the output layer in the place of its logits: losses, log-probabilities, a divergence.

A request runs as the layer's forward, inside ``nn.Module.__call__``, on the hidden states
and the weight that the layer's hooks have gathered. What it returns goes through the hooks as logits and bias
do. FSDP's put views in the place of tensors, so only what the call returns is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_fused_ce.adapter import report, say, stock_path
from megatron_fused_ce.adapter.main_grad import open_grad_weight_for
from megatron_fused_ce.adapter.token_weights import TokenWeights
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.distillation.teacher import Distillation
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.head.promise import Head
from megatron_fused_ce.losses.outputs import OF_SHARD
from megatron_fused_ce.ops.log_probs import unrounded

#: What the output layer returns for a request, in the place of logits and bias: a result, and what was made
#: beside it.
Answer = tuple[Tensor, Any]


class MaxAndIndices(NamedTuple):
    """Each token's largest logit in this rank's part, and its column, named as in ``Tensor.max(dim)``."""

    values: Tensor  # [s, b], contiguous: Megatron gathers them, and NCCL takes nothing else
    indices: Tensor


#: What :meth:`.LayerCall.ask` takes: one of the public functions below, whose first arguments are layer,
#: hidden states ``[s, b, H]``, weight and config.
Request = Callable[..., Answer]


def losses(
    layer: Any, hidden: Tensor, weight: Tensor, config: FusedCEConfig, labels: Tensor, weights: TokenWeights
) -> Answer:
    """Losses ``[b, s]`` of labels ``[b, s]``; beside them :class:`MaxAndIndices`, where Megatron counts a
    head's right guesses."""
    call = _call(layer, hidden, weight, config, labels, weights)
    out = linear_cross_entropy(call._replace(with_argmax=layer.fused_ce_with_argmax and layer.training))
    report.evaluation_once(layer, hidden, out.plan, out.why_not_scaled_exp)
    of_shard = [out.outputs[name].t().contiguous() for name in OF_SHARD if name in out.outputs]
    return out.loss, MaxAndIndices(*of_shard) if of_shard else None


def log_probs(
    layer: Any,
    hidden: Tensor,
    weight: Tensor,
    config: FusedCEConfig,
    labels: Tensor,  # [b, s]
    entropy: str,  # none, detached or differentiable
    active: Tensor | None,  # bool [b, s], the tokens that need them; None for all
) -> Answer:
    """Log-probabilities of labels, fp32 ``[b, s]``; beside them the entropy, or None.

    Raises:
        ValueError: the head has options that make another loss than the plain one.
    """
    stock_path.refuse_log_probs(layer.fused_ce_config)
    unknown = TokenWeights(None, "the caller of log-probabilities weighs each token as it likes")
    differentiable = entropy == "differentiable"
    config = unrounded(config) if differentiable else config
    call = _call(layer, hidden, weight, config, labels, unknown)._replace(
        outputs=("entropy",) if entropy != "none" else (),
        differentiable=("entropy",) if differentiable else (),
    )
    if active is not None:
        call = _cut(call, active.float())
    out = linear_cross_entropy(call)
    report.evaluation_once(layer, hidden, out.plan, out.why_not_scaled_exp)
    return out.loss.neg(), out.outputs.get("entropy")


def zeros(
    layer: Any, hidden: Tensor, weight: Tensor, config: FusedCEConfig, shape: tuple[int, int]
) -> Answer:
    """Losses of label 0, of ``shape`` ``(b, s)``, that get no upstream gradient but 0 or NaN.

    They are computed without a gradient. Added to them are the zeros of a head without active tokens, whose
    backward runs no GEMM and gives zeros, or NaN for NaN.
    """
    labels = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
    call = _call(layer, hidden, weight, replace(config, strategy="recompute"), labels, TokenWeights(None))
    with torch.no_grad():
        made = linear_cross_entropy(call).loss
    return made + linear_cross_entropy(_cut(call, torch.zeros_like(made))).loss, None


def teacher(layer: Any, hidden: Tensor, weight: Tensor, config: FusedCEConfig, divergence: str) -> Answer:
    """A teacher's hidden states; beside them what a student's :func:`divergences` take of it."""
    return hidden, Distillation(
        hidden.detach(),
        weight.detach(),
        label_weights=None,
        divergence=divergence,
        beta=0.5,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
        sequence_parallel=layer.sequence_parallel,
        with_labels=False,
    )


def divergences(
    layer: Any,
    hidden: Tensor,
    weight: Tensor,
    config: FusedCEConfig,
    shape: tuple[int, int],  # (b, s)
    of_teacher: Distillation,
    temperature: float,
    weights: TokenWeights,
) -> Answer:
    """Divergences ``[b, s]`` from a teacher, whole on every rank."""
    no_labels = torch.full(shape, -1, dtype=torch.int64, device=hidden.device)
    call = _call(layer, hidden, weight, config, no_labels, weights)._replace(
        other_targets=of_teacher, temperature=temperature, head=_head_of(layer, "distillation by ")
    )
    out = linear_cross_entropy(call)
    report.divergence_once(layer, of_teacher.divergence, temperature, out.plan)
    return out.loss, None


def _call(
    layer: Any, hidden: Tensor, weight: Tensor, config: FusedCEConfig, labels: Tensor, weights: TokenWeights
) -> Call:
    """The head's call, with all that follows from the layer and the token weights.

    Without the weights ``grad_in_forward`` is strategy ``auto``.
    """
    if config.strategy == "grad_in_forward" and weights.values is None:
        if torch.is_grad_enabled():
            say.once(
                layer.tp_group,
                "strategy auto instead of grad_in_forward for a head whose token weights are not known in "
                f"the forward: {weights.unknown}",
            )
        config = replace(config, strategy="auto")
    return Call(
        hidden,
        weight,
        labels,
        config=config,
        tp_group=layer.tp_group,
        sequence_parallel=layer.sequence_parallel,
        token_weights=weights.values,
        vocab_start=layer.tp_group.rank() * layer.output_size_per_partition,
        unmasked=weights.unmasked(),
        open_grad_weight=open_grad_weight_for(weight, layer.gradient_accumulation_fusion),
        uses_in_flight=1 + (getattr(layer.config, "mtp_num_layers", None) or 0),
        head=_head_of(layer),
    )


def _cut(call: Call, active: Tensor) -> Call:
    """``call`` for those tokens alone whose weight in ``active`` ``[b, s]`` is not 0."""
    config = replace(call.config, skip_masked=True)
    return call._replace(token_weights=active, config=config)


#: Of every layer that was evaluated, by its losses; not an attribute, which a copy of the layer would share.
_heads: WeakKeyDictionary[Any, dict[str, Head]] = WeakKeyDictionary()


def _head_of(layer: Any, loss: str = "") -> Head:
    """The record by which calls of one layer and one loss belong together."""
    heads = _heads.setdefault(layer, {})
    if loss not in heads:
        tell = partial(say.in_each_replica, layer.tp_group)  # not the layer, which would keep it alive
        heads[loss] = Head(f"{loss}the head of {layer.fused_ce_model}", say=tell)
    return heads[loss]
