"""The lines on a head: why it stays with Megatron, its strategy and memory, how often it was evaluated."""

from __future__ import annotations

import atexit
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import forms, say
from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head import promise
from megatron_fused_ce.planner import memory
from megatron_fused_ce.planner.choose import WAITS_IN_WORDS, Plan
from megatron_fused_ce.planner.memory import size_in_words

_tells_totals = False
#: Classes of models whose whole head stays with Megatron, where nothing counts its calls.
_left: set[str] = set()


def left_to_megatron(model: Any, reason: str) -> None:
    """Log that the whole head stays on the stock path, at the end of the run too."""
    _left.add(type(model).__name__)
    _say_of_head(
        model, f"stays on Megatron's own path: {reason}. --fused-chunked-ce has no effect on this head"
    )
    _tell_totals(_group(model))


def waits_for_modelopt(model: Any) -> None:
    """Log that ModelOpt's set-up of a distillation decides on the head (:mod:`.modelopt`)."""
    _say_of_head(
        model,
        "waits for ModelOpt (--export-kd-teacher-load): a line 'distillation:' says how it is computed; "
        "without one it stays on Megatron's own path",
    )


def _say_of_head(model: Any, what: str) -> None:
    say.once(_group(model), f"the head of {type(model).__name__} {what}")


def _group(model: Any) -> Any:
    return getattr(model.output_layer, "tp_group", None)


def adopted(model: Any, megatron_args: Any) -> None:
    """Log that a head is fused, by which strategy, and what of the launch has no effect on it."""
    layer, config = model.output_layer, model.config
    strategy = layer.fused_ce_config.strategy
    words = f"on: the head of {type(model).__name__}, strategy {strategy}"
    if impl := forms.kind_of(config):
        words += f"; --cross-entropy-fusion-impl {impl} has no effect on it"
    say.once(layer.tp_group, words)
    _tell_totals(layer.tp_group)
    if getattr(megatron_args, "perform_rl_step", False):
        # Megatron turns an fp32 model into bf16 or fp16 after it is built. Else the weight's dtype, not
        # config.params_dtype: a YAML launch leaves that unset.
        weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
        made = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else weight.dtype
        of_logits = str(getattr(layer, "output_dtype", None) or made).removeprefix("torch.")
        say.once(
            layer.tp_group,
            f"get_logprobs makes no logits; its log-probabilities are {of_logits} on every pipeline "
            "stage, as without the flag; generation stays on Megatron's own path",
        )


def evaluation_once(layer: Any, hidden: Tensor, ran: Plan, why_not_exp: str) -> None:
    """Log what runs, what it takes and what Megatron's losses would take, once for each strategy of a head.

    Heads of multi-token prediction share a layer with the main one and may run another strategy.

    Args:
        hidden: this rank's part of the hidden states, ``[s, b, H]``.
        ran: the plan that the op followed.
        why_not_exp: why the op's logits backend is not ``scaled_exp``; empty if it is.
    """
    told: set[str] = layer.__dict__.setdefault("_fused_ce_told", set())
    if ran.strategy in told:
        return
    told.add(ran.strategy)
    config: FusedCEConfig = layer.fused_ce_config
    tokens = hidden.shape[0] * hidden.shape[1] * (layer.tp_group.size() if layer.sequence_parallel else 1)
    by_auto = config.strategy == "auto"
    num_logits = tokens * layer.output_size_per_partition
    waiting = memory.STOCK_BYTES_WAITING * (getattr(layer.config, "mtp_num_layers", None) or 0)
    in_fp32 = hidden.dtype == torch.float32
    unfused, native = (
        size_in_words(num_logits * (memory.stock_bytes_per_logit(loss, in_fp32) + waiting))
        for loss in ("unfused", "native")
    )
    words = (
        f"runs: {ran.strategy}, {ran.chunks_in_words}; the head takes about "
        f"{size_in_words(ran.predicted_peak_bytes)}, Megatron's unfused loss {unfused}, its native one "
        f"{native}"
    )
    notes = [ran.why if by_auto else "", WAITS_IN_WORDS if ran.waits_for_host and not by_auto else ""]
    if config.logits_backend == "gemm_rows":
        notes.append("logits backend gemm_rows (asked for)")
    elif why_not_exp:
        notes.append(f"logits backend gemm_rows, not scaled_exp: {why_not_exp}")
    if config.skip_masked:
        notes.append("masked tokens are skipped, the sizes are for none")
    if config.loss_options:
        notes.append(f"loss with {config.loss_options}")
    say.once(layer.tp_group, "; ".join([words, *filter(None, notes)]))


def divergence_once(layer: Any, kind: str, temperature: float, ran: Plan) -> None:
    """Log, once for each of these, how the divergence of student and teacher is computed."""
    say.once(
        layer.tp_group,
        f"distillation: {kind} at temperature {temperature:g} without the logits of student and teacher: "
        f"strategy {ran.strategy}, {ran.chunks_in_words}; about {size_in_words(ran.predicted_peak_bytes)}",
    )


def _tell_totals(tp_group: Any) -> None:
    global _tells_totals
    if not _tells_totals and say.speaks(tp_group):
        _tells_totals = True
        atexit.register(_say_totals)


def _say_totals() -> None:
    seen, remade = counters(), promise.counts.remade
    say.line(
        f"heads: {seen.fused} fused, {seen.stock} on the stock path; logits materialised: {seen.materialised}"
        + (f", gradients of grad_in_forward made again: {remade}" if remade else "")
        + (f"; not counted: the head of {', '.join(sorted(_left))}, on Megatron's own path" if _left else "")
    )
