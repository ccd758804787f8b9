"""What the user is told, by one process: the first rank of its tensor- and data-parallel groups."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from torch import Tensor

from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.chunking import plan_chunks
from megatron_fused_ce.strategies import predicted_peak_bytes, resolve_strategy

PREFIX = "[fused-ce]"

_said: set[str] = set()
_tells_totals = False


def say(text: str) -> None:
    print(f"{PREFIX} {text}", file=sys.stdout, flush=True)


def _speaks(tp_rank: int) -> bool:
    """True in one process of the last pipeline stage."""
    from megatron.core import parallel_state

    if tp_rank != 0:
        return False
    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _say_once(tp_rank: int, text: str) -> None:
    if text not in _said and _speaks(tp_rank):
        _said.add(text)
        say(text)


def left_to_megatron(model: Any, reason: str) -> None:
    """The whole head stays on the stock path."""
    tp_group = getattr(model.output_layer, "tp_group", None)
    _say_once(
        tp_group.rank() if tp_group is not None else 0,
        f"the head of {type(model).__name__} stays on Megatron's own path: {reason}",
    )


def stock_path_once(layer: Any, reason: str) -> None:
    """Some calls of a fused head take the stock path."""
    _say_once(layer.tp_group.rank(), f"a call of the head takes Megatron's own path: {reason}")


def adopted(model: Any, megatron_args: Any) -> None:
    """A head is fused: say what to expect, where the launch's sizes are known already."""
    global _tells_totals
    layer = model.output_layer
    if not _tells_totals and _speaks(layer.tp_group.rank()):
        _tells_totals = True
        atexit.register(_say_totals)
    if all(hasattr(megatron_args, name) for name in ("seq_length", "micro_batch_size")):
        context_parallel = getattr(megatron_args, "context_parallel_size", 1) or 1
        tokens = megatron_args.seq_length * megatron_args.micro_batch_size // context_parallel
        # The weight's, not config.params_dtype: a YAML launch leaves that unset.
        weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
        _say_plan(layer, tokens, _itemsize(model.config, weight), fused_main_grad=None)


def evaluation_once(layer: Any, hidden: Tensor, weight: Tensor) -> None:
    """First evaluation of a head whose sizes were not known when it was built."""
    if getattr(layer, "_fused_ce_told", False):
        return
    num_parts = layer.tp_group.size() if layer.sequence_parallel else 1
    tokens = hidden.shape[0] * hidden.shape[1] * num_parts
    main_grad = getattr(weight, "main_grad", None)
    _say_plan(layer, tokens, hidden.element_size(), main_grad is not None)


def _say_plan(layer: Any, tokens: int, itemsize: int, fused_main_grad: bool | None) -> None:
    layer._fused_ce_told = True
    if not _speaks(layer.tp_group.rank()):
        return
    config = layer.fused_ce_config
    strategy = resolve_strategy(config.strategy)
    num_parts = layer.tp_group.size() if layer.sequence_parallel else 1
    chunks = plan_chunks(tokens // num_parts, num_parts, config)
    capacity = num_parts * max((chunk.num_tokens for chunk in chunks), default=0)
    # The fp32 sum of grad_weight: none where an fp32 main_grad takes the chunks in place.
    in_place = layer.gradient_accumulation_fusion and fused_main_grad is not False
    rows = layer.output_size_per_partition
    peak_bytes = predicted_peak_bytes(
        strategy,
        num_tokens=tokens,
        hidden_size=layer.input_size,
        num_rows=rows,
        itemsize=itemsize,
        chunk_capacity=capacity,
        num_parts=num_parts,
        sums_grad_weight=not in_place and itemsize < 4 and len(chunks) > 1,
    )
    asked = "" if config.strategy == strategy.name else f" ({config.strategy})"
    say(
        f"strategy {strategy.name}{asked}, {len(chunks)} chunks of {capacity} tokens "
        f"({tokens} tokens, {rows} of {layer.output_size} vocabulary rows on this rank), "
        f"predicted peak {peak_bytes} bytes ({peak_bytes / 2**20:.0f} MiB); full logits would be "
        f"{tokens * rows * itemsize / 2**20:.0f} MiB"
    )


def _itemsize(config: Any, weight: Tensor) -> int:
    """Bytes of a hidden state: Megatron turns an fp32 model into bf16 or fp16 after it is built."""
    return 2 if config.bf16 or config.fp16 else weight.element_size()


def _say_totals() -> None:
    seen = counters()
    say(
        f"heads evaluated fused: {seen.fused}, logits materialised: {seen.materialised}, "
        f"heads on the stock path: {seen.stock}"
    )
