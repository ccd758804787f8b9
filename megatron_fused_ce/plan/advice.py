"""Conclusions of a plan: which way of computing the loss fits, and what the flag saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megatron_fused_ce.config import STRATEGY_CHOICES
from megatron_fused_ce.plan.heads import STOCK_PATHS, HeadMemory, plugin_head, stock_head
from megatron_fused_ce.plan.peaks import Estimate, estimate
from megatron_fused_ce.plan.setting import Setting
from megatron_fused_ce.planner.memory import MIB

#: A step that leaves less than this part of its largest tensor free is tight: torch's allocator may find no
#: block for it. Of two runs on an H200, one with 0.21 of it free ran out of memory in its second step,
#: one with 0.37 trained (2026-11-21-h200-longest-sequence.json, 2026-11-21-h200-tp4-pretrain-reach.json).
TIGHT = 0.3
#: Part of the peak from which on what the flag saves is worth its use.
WORTH = 0.05
#: Bytes that are none: what two figures in GiB do not show.
NOTHING = 2**30 // 200


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    device: str  # as torch names it
    capacity: int  # as torch counts it (total_memory), bytes
    exp_serves: bool  # "auto" takes the scaled-exp GEMM (compute capability 9.0)
    overhead: int  # bytes of driver, NCCL and kernels outside torch's allocator

    @property
    def usable(self) -> int:
        return self.capacity - self.overhead


#: What to do with the flag: use it; use it, since nothing fits without it; as you like; leave it out; neither
#: helps.
DECISIONS = ("use", "needed", "either", "leave out", "does not fit")


@dataclass(frozen=True)
class Advice:
    """All ways of computing the loss, which one the launch uses without the flag, and the flags to add."""

    gpu: Gpu
    ways: tuple[Estimate, ...]
    baseline: Estimate
    recommended: Estimate  # the plugin with the recommended flags
    largest_head: int  # bytes of the flag's, with token weights that the forward knows or without

    def way(self, name: str) -> Estimate:
        return next(way for way in self.ways if way.head.name == name)

    @property
    def saved(self) -> int:
        """Bytes of the peak that the recommended flags save over the baseline."""
        return self.baseline.peak - self.recommended.peak

    @property
    def decision(self) -> str:
        """One of :data:`DECISIONS`."""
        before, after = self.baseline.verdict == "fits", self.recommended.verdict == "fits"
        if not before:
            return "needed" if after else "does not fit"
        if not after or self.saved < NOTHING:
            return "leave out"
        return "use" if self.saved >= WORTH * self.baseline.peak else "either"


def advise(setting: Setting, gpu: Gpu, baseline: str = "unfused") -> Advice:
    """Compare all ways of computing the loss; ``baseline``: the path that the launch has without the flag.

    Recommended is the launch's own strategy, or ``auto`` with a budget if only a smaller head fits.

    Raises:
        ValueError: the strategy that the launch asks for does not fit the launch's budget.
    """

    def way(head: HeadMemory) -> Estimate:
        found = estimate(setting, head)
        return replace(found, verdict=verdict(found, gpu))

    ours = partial(plugin_head, setting, gpu.device, exp_serves=gpu.exp_serves)
    stock = {name: way(stock_head(setting, name)) for name in STOCK_PATHS}
    plugin = {strategy: way(ours(strategy)) for strategy in STRATEGY_CHOICES}
    asked = plugin[setting.training.fused_ce.strategy]
    if asked.head.over_budget:
        raise ValueError(asked.head.over_budget)
    # A head whose token weights are not known in the forward runs no grad_in_forward.
    other = ours(asked.head.name.replace("grad_in_forward", "auto"), token_weights_known=False)
    largest = max(asked.head.peak, other.peak)
    advice = Advice(gpu, (*stock.values(), *plugin.values()), stock[baseline], asked, largest)
    if asked.verdict != "does not fit" or asked.bound.name != "head":
        return advice
    # The budget that leaves the head's moment at what is usable; the smallest plan may need another.
    rest = asked.moment("head").total - asked.head.predicted
    smaller = ours("auto", memory_mb=max(1, (gpu.usable - rest) // MIB))
    if smaller.missed_budget:
        smaller = ours("auto", memory_mb=-(-smaller.predicted // MIB))
    fitting = way(smaller)
    return advice if fitting.verdict == "does not fit" else replace(advice, recommended=fitting)


def verdict(found: Estimate, gpu: Gpu) -> str:
    """Whether a step fits, by its sum and by :data:`TIGHT`."""
    if found.head.over_budget:
        return "over budget"
    free = gpu.usable - found.peak
    if free < 0:
        return "does not fit"
    return "tight" if found.bound.name == "head" and free < TIGHT * found.head.largest else "fits"
