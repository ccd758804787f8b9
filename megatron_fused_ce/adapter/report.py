"""The lines on a head: why it stays with Megatron, its strategy and memory, how often it was evaluated."""

from __future__ import annotations

import atexit
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import say
from megatron_fused_ce.adapter.import_hook import core_version
from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.cli import versions
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head import promise
from megatron_fused_ce.head.spec import device_in_plans
from megatron_fused_ce.logits.choose import choose
from megatron_fused_ce.planner import memory
from megatron_fused_ce.planner.choose import WAITS_IN_WORDS, Plan, plan
from megatron_fused_ce.planner.memory import PlanInputs, size_in_words

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


def stock_path_once(layer: Any, reason: str) -> None:
    """Log, once, that some calls of a fused head take the stock path."""
    say.once(layer.tp_group, f"a call of the head takes Megatron's own path: {reason}")


def adopted(model: Any, megatron_args: Any, has_plan: bool = True) -> None:
    """Log a fused head's strategy and memory, if the launch's sizes are known already and decide them."""
    layer = model.output_layer
    version, newest = core_version(), versions.NEWEST_MEGATRON
    if versions.numbers(version) > newest:
        say.once(
            layer.tp_group,
            f"megatron-core {version} is newer than {versions.words(newest)}, the newest this was tried with",
        )
    _tell_totals(layer.tp_group)
    # The weight's, not config.params_dtype: a YAML launch leaves that unset.
    weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    dtype = _dtype(model.config, weight)
    trains_by_rl = bool(getattr(megatron_args, "perform_rl_step", False))
    if trains_by_rl:
        of_logits = str(getattr(layer, "output_dtype", None) or dtype).removeprefix("torch.")
        say.once(
            layer.tp_group,
            f"get_logprobs makes no logits; its log-probabilities are {of_logits} on every pipeline "
            "stage, as without the flag; generation stays on Megatron's own path",
        )
    if has_plan and all(hasattr(megatron_args, name) for name in ("seq_length", "micro_batch_size")):
        context_parallel = getattr(megatron_args, "context_parallel_size", 1) or 1
        tokens = megatron_args.seq_length * megatron_args.micro_batch_size // context_parallel
        # Stand-ins with the attributes that the choice of the logits backend reads.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        hidden = torch.empty(1, layer.input_size, dtype=dtype, device=device)
        rows = hidden.expand(layer.output_size_per_partition, -1)
        backend, why = choose(layer.fused_ce_config, hidden, rows)
        tp_size = layer.tp_group.size()
        inputs = PlanInputs(
            config=layer.fused_ce_config,
            num_tokens=tokens,
            hidden_size=layer.input_size,
            num_rows=layer.output_size_per_partition,
            dtype=str(hidden.dtype).removeprefix("torch."),
            num_parts=tp_size if layer.sequence_parallel else 1,
            tp_size=tp_size,
            wgrad_accumulator=_wgrad_accumulator_to_be(layer, weight, megatron_args),
            logits_backend=backend.name,
            device=device_in_plans(device),
            # As pretrain_gpt.py and train_rl.py call their models; the first evaluation corrects it.
            token_weights_known=not trains_by_rl,
            uses_in_flight=1 + (getattr(model.config, "mtp_num_layers", None) or 0),
        )
        layer._fused_ce_expected = plan(inputs)
        _say_plan(layer, layer._fused_ce_expected, _stock_words(layer, tokens, hidden.dtype), why)


def evaluation_once(layer: Any, hidden: Tensor, ran: Plan, why_not_exp: str) -> None:
    """Log what runs, once for each strategy of a head, unless it was logged when the model was built.

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
    expected: Plan | None = layer.__dict__.get("_fused_ce_expected")
    if expected is None or _what_runs(expected) != _what_runs(ran):
        num_parts = layer.tp_group.size() if layer.sequence_parallel else 1
        tokens = hidden.shape[0] * hidden.shape[1] * num_parts
        before = "on" if expected is None else "as it runs"
        _say_plan(layer, ran, _stock_words(layer, tokens, hidden.dtype), why_not_exp, before)


def divergence_once(layer: Any, kind: str, temperature: float, ran: Plan) -> None:
    """Log, once for each of these, how the divergence of student and teacher is computed."""
    say.once(
        layer.tp_group,
        f"distillation: {kind} at temperature {temperature:g} without the logits of student and teacher: "
        f"strategy {ran.strategy}, {ran.chunks_in_words}; about {size_in_words(ran.predicted_peak_bytes)}",
    )


def _wgrad_accumulator_to_be(layer: Any, weight: Tensor, megatron_args: Any) -> str:
    """The wgrad accumulator to expect, before Megatron's DDP has made ``main_grad``."""
    if not weight.requires_grad:
        return "none"
    if not layer.gradient_accumulation_fusion:
        return "returned"
    in_fp32 = getattr(megatron_args, "accumulate_allreduce_grads_in_fp32", True)
    return "main_grad" if in_fp32 else "low_main_grad"


def _say_plan(layer: Any, chosen: Plan, of_stock: str, why_not: str, before: str = "on") -> None:
    """Log one line on strategy and memory, and one on the reason and on differences from a plain head."""
    if not say.speaks(layer.tp_group):
        return
    config: FusedCEConfig = layer.fused_ce_config
    by = "chosen by auto" if config.strategy == "auto" else "asked for"
    say.line(
        f"{before}: strategy {chosen.strategy} ({by}), {chosen.chunks_in_words}; "
        f"about {size_in_words(chosen.predicted_peak_bytes)} for the head; {of_stock}"
    )
    notes = [chosen.why] if config.strategy == "auto" else []
    if chosen.waits_for_host and not notes:
        notes.append(WAITS_IN_WORDS)
    if config.logits_backend == "gemm_rows":
        notes.append("logits backend gemm_rows (asked for)")
    elif why_not:
        notes.append(f"logits backend gemm_rows, not scaled_exp: {why_not}")
    if config.skip_masked:
        notes.append("masked tokens are skipped, the sizes are for none")
    if config.loss_options:
        notes.append(f"loss with {config.loss_options}")
    if notes:
        say.line(f"why: {'; '.join(notes)}" if config.strategy == "auto" else "; ".join(notes))


def _stock_words(layer: Any, tokens: int, dtype: torch.dtype) -> str:
    """What Megatron's own losses would hold on this rank."""
    num_logits = tokens * layer.output_size_per_partition
    waiting = memory.STOCK_BYTES_WAITING * (getattr(layer.config, "mtp_num_layers", None) or 0)
    per_logit = dict(memory.STOCK_BYTES_PER_LOGIT)
    per_logit["unfused"] -= 2 * (dtype == torch.float32)
    unfused, native = (
        size_in_words(num_logits * (per_logit[name] + waiting)) for name in ("unfused", "native")
    )
    return f"Megatron's loss would hold {unfused}, its native fusion {native}"


def _what_runs(chosen: Plan) -> tuple[Any, ...]:
    return chosen.strategy, chosen.count, chosen.capacity, chosen.stored_chunks


def _dtype(config: Any, weight: Tensor) -> torch.dtype:
    """The hidden states' dtype: Megatron turns an fp32 model into bf16 or fp16 after it is built."""
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else weight.dtype


def _tell_totals(tp_group: Any) -> None:
    global _tells_totals
    if not _tells_totals and say.speaks(tp_group):
        _tells_totals = True
        atexit.register(_say_totals)


def _say_totals() -> None:
    seen, remade = counters(), promise.counts.remade
    say.line(
        f"heads evaluated fused: {seen.fused}, logits materialised: {seen.materialised}, "
        f"heads on the stock path: {seen.stock}"
        + (f", gradients of grad_in_forward made again: {remade}" if remade else "")
        + (f"; not counted: the head of {', '.join(sorted(_left))}, on Megatron's own path" if _left else "")
    )
