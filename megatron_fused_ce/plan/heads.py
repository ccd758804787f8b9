"""Memory of the head with each way of computing the loss.

Megatron's own paths are given in bytes for each of the ``T*V`` logits, with bf16 or fp16 hidden states.
Source, for the largest of both passes: docs/benchmarks/results/2026-11-21-h200-reach-llama3-8b.json (one
rank) and 2026-11-21-h200-tp4-reach.json (four, with sequence parallelism); `make figures` derives
the figures from their peaks anew. The plugin's are :mod:`megatron_fused_ce.planner`'s own predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.plan.setting import Setting
from megatron_fused_ce.plan.static import CUBLAS_WORKSPACE
from megatron_fused_ce.planner.choose import OverBudget, Plan, plan
from megatron_fused_ce.planner.memory import MIB, STOCK_BYTES_PER_LOGIT, STOCK_BYTES_WAITING, PlanInputs


class StockPath(NamedTuple):
    """One of Megatron's own cross entropies behind its output layer: bytes a logit."""

    #: alive at the peak
    at_peak: float
    #: of a use of the head (multi-token prediction) until its backward
    waiting: float
    #: of the largest tensor
    largest: float


#: unfused: the fp32 softmax (4), and logits or their gradient in bf16 (2); native: fp32 softmax and its
#: gradient, the gradient in bf16 (4 + 4 + 2); te: logits and their gradient in bf16 (2 + 2).
STOCK_PATHS = {
    "unfused": StockPath(STOCK_BYTES_PER_LOGIT["unfused"], STOCK_BYTES_WAITING, largest=4),
    "native": StockPath(STOCK_BYTES_PER_LOGIT["native"], STOCK_BYTES_WAITING, largest=4),
    "te": StockPath(4, waiting=2, largest=2),
}


@dataclass(frozen=True)
class HeadMemory:
    """Memory of one way of computing the loss on the rank with the head."""

    name: str
    #: flags to add to a launch; none of Megatron's own
    flags: str
    stock: bool
    #: bytes at its peak, beside its input (the final norm's output) and the rest of the step
    peak: int
    #: torch's own cuBLAS workspaces that its GEMMs leave allocated, part of ``peak``
    workspaces: int
    #: its largest tensor; 0 for the plugin's, whose buffers are cut out of each other's
    largest: int = 0
    #: the planner's prediction, which is compared with a budget; 0 for Megatron's own
    predicted: int = 0
    #: strategy and chunks of the plugin's
    words: str = ""
    #: the launch's error if the strategy needs more than its --fused-ce-memory-mb
    over_budget: str = ""
    #: MiB of a --fused-ce-memory-mb that even the smallest plan exceeds, which ``auto`` then takes; else 0
    missed_budget: int = 0


def stock_head(setting: Setting, name: str) -> HeadMemory:
    """One of :data:`STOCK_PATHS`: the larger of cross entropy and the output layer's backward behind it."""
    path, logits = STOCK_PATHS[name], setting.num_tokens * setting.vocab_rows
    row = setting.itemsize * setting.num_tokens * setting.model.hidden_size
    loss = path.at_peak * logits
    parts = setting.parallel.sequence_parts
    # grad_hidden; with sequence parallelism also its reduced part.
    products = setting.itemsize * logits + row + (row // parts if parts > 1 else 0)
    if not setting.training.gradient_fusion:
        products += setting.itemsize * setting.vocab_rows * setting.model.hidden_size
    waiting = setting.model.mtp_num_layers * path.waiting * logits
    workspaces = 2 * CUBLAS_WORKSPACE
    return HeadMemory(
        name,
        "",
        stock=True,
        peak=round(max(loss, products) + waiting) + workspaces,
        workspaces=workspaces,
        largest=round(path.largest * logits),
    )


def plugin_head(
    setting: Setting, device: str, strategy: str, *, exp_serves: bool, memory_mb: int | None = None
) -> HeadMemory:
    """One strategy, as a launch with these flags would plan it.

    Heads of multi-token prediction have no token weights, so they never run ``grad_in_forward``; the figure
    is that of the start-up line, which counts the main head's plan for each use. A strategy that does
    not fit the budget has the figures of its smallest plan, and the launch's error as ``over_budget``.
    """
    config = replace(setting.training.fused_ce, strategy=strategy)
    if memory_mb is not None:
        config = replace(config, memory_mb=memory_mb)
    # As logits.choose.why_not_scaled_exp says it of tensors.
    exp = (
        exp_serves
        and config.logits_backend != "gemm_rows"
        and setting.training.dtype == "bfloat16"
        and not (setting.model.hidden_size % 8 or setting.vocab_rows % 8)
        and not (config.label_smoothing and (config.logit_softcap or config.logit_precision == "activations"))
    )
    inputs = PlanInputs(
        config=config,
        num_tokens=setting.num_tokens,
        hidden_size=setting.model.hidden_size,
        num_rows=setting.vocab_rows,
        dtype=setting.training.dtype,
        num_parts=setting.parallel.sequence_parts,
        tp_size=setting.parallel.tensor,
        wgrad_accumulator=_wgrad_accumulator(setting),
        token_weights_known=True,
        logits_backend="scaled_exp" if exp else "gemm_rows",
        device=device,
        uses_in_flight=1 + setting.model.mtp_num_layers,
    )
    try:
        head = _as_head(setting, plan(inputs), _flags(config), strategy)
        budget = config.memory_mb
        return replace(head, missed_budget=budget) if budget and head.predicted > budget * MIB else head
    except OverBudget as error:
        head = _as_head(setting, error.least, _flags(config), strategy)
        return replace(head, over_budget=str(error))


def _wgrad_accumulator(setting: Setting) -> str:
    if not setting.training.gradient_fusion:
        return "returned"
    return "main_grad" if setting.training.gradient_bytes == 4 else "low_main_grad"


def _flags(config: FusedCEConfig) -> str:
    """Flags to add to a launch: every option that is not its default."""
    words = [FLAG]
    for option in fields(config):
        value, name = getattr(config, option.name), option.name.replace("_", "-")
        if value == option.default:
            continue
        if option.name == "true_vocab_size":
            words.append("--fused-ce-mask-padded-vocab")
        elif isinstance(value, bool):
            words.append(f"--fused-ce-{name}")
        else:
            words.append(
                f"--fused-ce-{name} {value:g}" if isinstance(value, float) else f"--fused-ce-{name} {value}"
            )
    return " ".join(words)


def _as_head(setting: Setting, chosen: Plan, flags: str, name: str) -> HeadMemory:
    """With ``grad_hidden``, and without the second workspace where the peak is in the forward."""
    memory, grad_in_forward = chosen.memory, chosen.strategy == "grad_in_forward"
    unused = memory.workspace // 2 if grad_in_forward else 0
    grad_hidden = setting.itemsize * setting.num_tokens * setting.model.hidden_size
    grad_hidden //= setting.parallel.sequence_parts
    return HeadMemory(
        name,
        flags,
        stock=False,
        peak=memory.total - unused + grad_hidden,
        workspaces=memory.workspace - unused,
        predicted=memory.total,
        words=f"{chosen.strategy}, {chosen.chunks_in_words}",
    )
