"""Deferred weight gradients: time of the backwards, of the drain, and memory, over a step's micro-batches.

    python -m scripts.bench.later --shape 4096x8192x32064 --micro-batches 22

A shape is TxHxV, V of this rank. Each micro-batch runs its forward and then its backward, as on the last
stage of a 1F1B pipeline; then what waits is drained. Three ways, interleaved: ``grad_weight`` at once;
deferred with the logits kept; deferred with the logits made again. Milliseconds per micro-batch, medians; the
drain beside its bare product into the fp32 main_grad. Memory is above what exists before the step.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.call import Call
from megatron_fused_ce.command_line import Parser, command, require_gpus, whole, writable_file
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.bench.commits import shape_of
from megatron_fused_ce.scripts.lib import gpu, results, tables
from megatron_fused_ce.wgrad import GradWeight, InPlaceGradWeight, Later, accumulate_

#: Way -> the memory budget in MiB: what is kept by it; None: nothing waits.
WAYS = {"at once": None, "deferred, logits kept": 1 << 20, "deferred, logits again": 4096}


class Step:
    """One step of a head ``[T, H] x [V, H]`` over micro-batches with inputs of their own."""

    def __init__(self, shape: tuple[int, ...], micro_batches: int) -> None:
        num_tokens, hidden_size, vocab = shape
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.hidden = torch.randn(micro_batches, num_tokens, hidden_size, **options)
        self.weight = (torch.randn(vocab, hidden_size, **options) * hidden_size**-0.5).requires_grad_()
        self.labels = torch.randint(vocab, (micro_batches, num_tokens), device="cuda")
        self.upstream = torch.rand(num_tokens, device="cuda") / num_tokens
        self.main_grad = torch.zeros(vocab, hidden_size, device="cuda")
        self.products = torch.randn(num_tokens, vocab, **options)

    def open_grad_weight(self, weight: Tensor, num_gemms: int, scaled: bool) -> GradWeight:
        return InPlaceGradWeight(self.main_grad, scaled, lambda: None)

    open_grad_weight.kind = "main_grad"  # type: ignore[attr-defined]

    def run(self, budget: int | None) -> tuple[float, float, bool]:
        """Milliseconds of the micro-batches and of the drain, and whether logits were kept."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        later, count = (None if budget is None else Later(0)), len(self.hidden)
        config, keeps = FusedCEConfig("store", memory_mb=budget), False
        events[0].record()
        for hidden, labels in zip(self.hidden, self.labels, strict=True):
            hidden = hidden.detach().requires_grad_()
            more: dict[str, Any] = {
                "open_grad_weight": self.open_grad_weight,
                "later": later,
                "uses_later": count,
            }
            head = linear_cross_entropy(Call(hidden, self.weight, labels, config=config, **more))
            head.loss.backward(self.upstream)
            hidden.grad = None  # of a leaf, which what waits would keep alive
            keeps = head.plan.keeps_logits
        events[1].record()
        if later is not None:
            later.drain()
        events[2].record()
        events[1].synchronize()
        gpu.look()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2]), keeps

    def bare(self) -> float:
        """Milliseconds of the drain's products alone."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for hidden in self.hidden:
            accumulate_(self.main_grad, self.products, hidden)
        events[1].record()
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1]))


@command("bench.later")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.bench.later", __doc__ or "")
    parser.add_argument("--shape", type=shape_of, default=(4096, 8192, 32064), help="TxHxV")
    parser.add_argument("--micro-batches", type=whole(most=4096), default=22)
    parser.add_argument("--blocks", type=whole(most=1000), default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(words)
    path = given.json and writable_file(given.json)
    require_gpus(1)
    step, count = Step(given.shape, given.micro_batches), given.micro_batches
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    peaks, bare, sums = {}, [], {}
    for block in range(given.blocks + 1):  # the first one compiles
        for way, budget in WAYS.items():
            step.main_grad.zero_()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            *made, keeps = step.run(budget)
            assert keeps == (budget != 4096) or budget is None, f"{way}: the budget chose otherwise"
            peaks[way] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if block:
                times[way].append((made[0] / count, made[1] / count))
            sums[way] = step.main_grad.clone()
        bare.append(step.bare() / count)
    shape = "x".join(map(str, given.shape))
    once, product, rows = sums["at once"], statistics.median(bare[1:]), []
    for way, of_blocks in times.items():
        backward, drain = map(statistics.median, zip(*of_blocks, strict=True))
        ratio = [sum(one) / sum(base) for one, base in zip(of_blocks, times["at once"], strict=True)]
        apart = float((sums[way] - once).norm() / once.norm())
        rows.append(
            {"shape": shape, "variant": way, "time_ms": backward, "drain_ms": drain, "product_ms": product}
            | {"ratio": statistics.median(ratio), "spread": max(ratio) - min(ratio), "peak_mib": peaks[way]}
            | {"micro_batches": count, "gradient_apart": apart}
        )
    keys = ("variant", "time_ms", "drain_ms", "product_ms", "ratio", "spread", "peak_mib", "gradient_apart")
    print(f"{shape}, {count} micro-batches, {torch.cuda.get_device_name()}\n")
    print(
        tables.markdown(
            keys, [[row["variant"], *(format(row[key], ".4g") for key in keys[1:])] for row in rows]
        )
    )
    if path:
        results.write(
            path, rows, results.made_by(torch.cuda.get_device_name(), ["scripts.bench.later", *words])
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
