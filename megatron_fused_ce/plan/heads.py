"""Memory of the head with each way of computing the loss.

Megatron's own paths are given in bytes for each of the ``T*V`` logits, with bf16 or fp16 hidden states.
Source, for the largest of both passes: docs/benchmarks/results/2026-11-21-h200-reach-llama3-8b.json (one
rank) and 2026-11-21-h200-tp4-reach.json (four, with sequence parallelism); `make figures` derives
the figures from their peaks anew. The plugin's are :mod:`megatron_fused_ce.planner`'s own predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.plan.setting import Setting
from megatron_fused_ce.planner.choose import OverBudget, in_forward, plan
from megatron_fused_ce.planner.memory import MIB, STOCK_BYTES_WAITING, PlanInputs, stock_bytes_per_logit

#: cuBLAS's workspace on Hopper, one of Transformer Engine's own products and one of torch's for each
#: thread (forward, autograd): MiB of 2026-11-21-h200-longest-sequence.json, which has room for no other.
CUBLAS_WORKSPACE = 32 * MIB
#: Megatron's own cross entropies: bytes a logit of a use of the head (multi-token prediction) that waits for
#: its backward, and of the largest tensor.
STOCK_PATHS = {"unfused": (STOCK_BYTES_WAITING, 4), "native": (STOCK_BYTES_WAITING, 4), "te": (2, 2)}


@dataclass(frozen=True)
class HeadMemory:
    """Memory of one way of computing the loss on the rank with the head."""

    name: str
    stock: bool
    peak: int  # bytes, beside its input (the final norm's output) and the rest of the step
    workspaces: int  # torch's own of cuBLAS that its GEMMs leave allocated, part of the peak
    flags: str = ""  # to add to a launch; none of Megatron's own
    largest: int = 0  # tensor; 0 for the plugin's, whose buffers are cut out of each other's
    predicted: int = 0  # by the planner, which is compared with a budget; 0 for Megatron's own
    words: str = ""  # strategy and chunks of the plugin's
    over_budget: str = ""  # the launch's error if the strategy needs more than its --fused-ce-memory-mb
    missed_budget: int = 0  # MiB that even the smallest plan exceeds, which "auto" then takes


def stock_head(setting: Setting, name: str) -> HeadMemory:
    """One of :data:`STOCK_PATHS`: the larger of cross entropy and the output layer's backward behind it."""
    (waiting, largest), logits = STOCK_PATHS[name], setting.num_tokens * setting.vocab_rows
    row, parts = setting.num_tokens * setting.model.hidden_size, setting.parallel.sequence_parts
    # grad_hidden; with sequence parallelism also its reduced part.
    products = logits + row + (row // parts if parts > 1 else 0)
    if not setting.training.gradient_fusion:
        products += setting.vocab_rows * setting.model.hidden_size
    at_peak = stock_bytes_per_logit(name, setting.itemsize == 4) * logits
    held = setting.model.mtp_num_layers * waiting * logits + 2 * CUBLAS_WORKSPACE
    return HeadMemory(
        name,
        stock=True,
        peak=max(at_peak, setting.itemsize * products) + held,
        workspaces=2 * CUBLAS_WORKSPACE,
        largest=largest * logits,
    )


def plugin_head(
    setting: Setting,
    device: str,
    strategy: str,
    *,
    exp_serves: bool,
    memory_mb: int | None = None,
    token_weights_known: bool = True,
) -> HeadMemory:
    """One strategy, as a launch with these flags would plan it.

    Heads of multi-token prediction have no token weights, so they never run ``grad_in_forward``; the figure
    is that of the start-up line, which counts the main head's plan for each use. A strategy that does
    not fit the budget has the figures of its smallest plan, and the launch's error as ``over_budget``.
    """
    model, training, parallel = setting.model, setting.training, setting.parallel
    config = replace(training.fused_ce, strategy=strategy)
    if memory_mb is not None:
        config = replace(config, memory_mb=memory_mb)
    # As losses.label.loss_of says it of terms: a z-loss alone has no bound.
    runs, may = in_forward(config, training.dtype, None if config.z_loss else 1.0)
    # As logits.choose says it of tensors.
    exp = (
        exp_serves
        and config.logits_backend != "gemm_rows"
        and training.dtype == "bfloat16"
        and not (model.hidden_size % 8 or setting.vocab_rows % 8)
        and not config.label_smoothing
    )
    accumulator = "main_grad" if training.gradient_bytes == 4 else "low_main_grad"
    inputs = PlanInputs(
        config=runs,
        num_tokens=setting.num_tokens,
        hidden_size=model.hidden_size,
        num_rows=setting.vocab_rows,
        dtype=training.dtype,
        num_parts=parallel.sequence_parts,
        tp_size=parallel.tensor,
        wgrad_accumulator=accumulator if training.gradient_fusion else "returned",
        token_weights_known=token_weights_known and may,
        logits_backend="scaled_exp" if exp else "gemm_rows",
        device=device,
        uses_in_flight=1 + model.mtp_num_layers,
    )
    try:
        chosen, error = plan(inputs), ""
    except OverBudget as over:
        chosen, error = over.least, str(over)
    memory, budget = chosen.memory, 0 if error else config.memory_mb or 0
    # Where the peak is in the forward, the backward's thread has no workspace yet.
    unused = memory.workspace // 2 if chosen.strategy == "grad_in_forward" else 0
    grad_hidden = setting.itemsize * setting.num_tokens * model.hidden_size // parallel.sequence_parts
    return HeadMemory(
        strategy,
        stock=False,
        flags=_flags(config),
        peak=memory.total - unused + grad_hidden,
        workspaces=memory.workspace - unused,
        predicted=memory.total,
        words=f"{chosen.strategy}, {chosen.chunks_in_words}",
        over_budget=error,
        missed_budget=budget if memory.total > budget * MIB else 0,
    )


def _flags(config: FusedCEConfig) -> str:
    """Flags to add to a launch: every option that is not its default."""
    words = [FLAG]
    for option in fields(config):
        value, flag = getattr(config, option.name), f"--fused-ce-{option.name.replace('_', '-')}"
        if option.name == "true_vocab_size":
            words += ["--fused-ce-mask-padded-vocab"] * (value != option.default)
        elif value != option.default:
            shown = f"{value:g}" if isinstance(value, float) else value
            words.append(flag if isinstance(value, bool) else f"{flag} {shown}")
    return " ".join(words)
