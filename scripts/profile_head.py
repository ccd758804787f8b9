"""Where the time of one step of the head goes, kernel by kernel, beside its matrix products alone.

    python scripts/profile_head.py --shapes llama3-8b --tokens 8192
    python scripts/profile_head.py --shapes llama3-70b --tokens 8192 --strategies store eager --name profile
    torchrun --nproc-per-node 4 scripts/profile_head.py --sequence-parallel --shapes llama3-8b

Per variant (those of scripts/benchmark.py: NAME[:C][/PASS], roof, megatron-te ...): milliseconds a step of
every kernel, by kind; *busy* is the time in which some kernel runs, *idle* the rest between the first and
the last, *exposed* the time in which only collectives run. The roof's kernels stand beside, so that a
product of ours can be held against the one it replaces. Under torchrun the figures are rank 0's.

The profiler itself costs a little: compare kernels with kernels here, and steps in scripts/benchmark.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark_problem import DTYPES, SHAPES, Problem, World
from benchmark_report import result_path
from benchmark_roof import ROOFS, Roof
from benchmark_variants import megatron, ours

from megatron_fused_ce.testing.provenance import commit

ROOT = Path(__file__).resolve().parent.parent
#: First match counts.
KINDS = (
    ("collective", re.compile(r"nccl|gloo|c10d", re.I)),
    ("our product", re.compile(r"_product_kernel")),
    ("product", re.compile(r"nvjet|gemm|cutlass|xmma|splitKreduce|aten::(add)?mm", re.I)),
    ("our rows", re.compile(r"_(row|rows|tiles|terms|loss|scaled|statistics|gradients)\w*_kernel")),
    ("copy or fill", re.compile(r"memcpy|memset|aten::(copy_|fill_|zero_)", re.I)),
)


@dataclass(frozen=True)
class Span:
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class Profile:
    """One variant's step: milliseconds, averaged over the profiled steps."""

    variant: str
    busy_ms: float
    idle_ms: float
    exposed_ms: float
    by_kind: dict[str, float] = field(default_factory=dict)
    kernels: list[tuple[str, str, float, float]] = field(
        default_factory=list
    )  # kind, name, count, ms


def kind_of_kernel(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "elementwise")


def covered(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def summarise(variant: str, spans: Sequence[Span], steps: int) -> Profile:
    """Sums of one variant's kernels; spans of other streams may overlap."""
    if not spans:
        return Profile(variant, 0.0, 0.0, 0.0)
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    busy = covered(spans)
    computing = covered(span for span in spans if kind_of_kernel(span.name) != "collective")
    per_step = 1e-3 / steps
    sums: dict[str, list[float]] = {}
    for span in spans:
        entry = sums.setdefault(span.name, [0.0, 0.0])
        entry[0] += 1 / steps
        entry[1] += (span.end - span.start) * per_step
    kernels = [(kind_of_kernel(name), name, count, ms) for name, (count, ms) in sums.items()]
    kernels.sort(key=lambda kernel: -kernel[3])
    by_kind: dict[str, float] = {}
    for kind, _, _, ms in kernels:
        by_kind[kind] = by_kind.get(kind, 0.0) + ms
    return Profile(
        variant,
        busy * per_step,
        (whole - busy) * per_step,
        (busy - computing) * per_step,
        dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        kernels,
    )


def recorded(action: Callable[[], Any], steps: int, on_gpu: bool) -> list[Span]:
    """Kernels of ``steps`` runs of ``action``, after two that warm up; operators on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    def synchronise() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(2):
        action()
    synchronise()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as trace:
        for _ in range(steps):
            action()
        synchronise()
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or []
        if (_is_kernel(event) if on_gpu else _is_outermost_operator(event))
    ]


def _is_kernel(event: Any) -> bool:
    """On the device; annotations of operators appear there too."""
    annotations = ("aten::", "ProfilerStep", "Activity Buffer", "cuda", "_Fused", "autograd::")
    on_device = str(event.device_type).endswith("CUDA")
    return on_device and not event.name.startswith(annotations)


def _is_outermost_operator(event: Any) -> bool:
    """Of torch: one that another one calls would count twice."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return False
        parent = parent.cpu_parent
    return bool(event.name.startswith("aten::"))


def markdown(cell: str, profiles: Sequence[Profile], most: int) -> str:
    kinds = list(dict.fromkeys(kind for profile in profiles for kind in profile.by_kind))
    lines = [f"## {cell}", "", "Milliseconds a step:", ""]
    lines.append("| | busy | idle | exposed | " + " | ".join(kinds) + " |")
    lines.append("|---|" + "---:|" * (3 + len(kinds)))
    for profile in profiles:
        cells = [profile.busy_ms, profile.idle_ms, profile.exposed_ms]
        cells += [profile.by_kind.get(kind, 0.0) for kind in kinds]
        lines.append(f"| {profile.variant} | " + " | ".join(f"{ms:.3f}" for ms in cells) + " |")
    for profile in profiles:
        lines += [
            "",
            f"{profile.variant}:",
            "",
            "| kernel | kind | a step | ms |",
            "|---|---|---:|---:|",
        ]
        for kind, name, count, ms in profile.kernels[:most]:
            short = name.replace("|", "/")[:80]
            lines.append(f"| `{short}` | {kind} | {count:g} | {ms:.3f} |")
    return "\n".join(lines) + "\n"


def profiles_of(
    given: argparse.Namespace, world: World, shape: str, num_tokens: int
) -> list[Profile]:
    hidden_size, vocab = SHAPES[shape]
    problem = Problem(
        world,
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        vocab=vocab,
        dtype=DTYPES[given.dtype],
    )
    found = {variant.key: variant for variant in megatron(world)}
    profiles = []
    for name in given.strategies:
        if name in ROOFS:
            roof = Roof(problem, world)
            roof.resident = True
            roof.turn(name, 1, 0)  # builds the operands outside the trace
            step: Callable[[], Any] = partial(roof.turn, name, 0, 1)
            spans = recorded(step, given.steps, world.on_gpu)
            roof.release(for_good=True)
        else:
            variant = found[name] if name in found else ours(world, name)
            if variant.run is None:
                print(f"profile_head: {name}: {variant.why_not}", file=sys.stderr)
                continue
            step = partial(variant.run, problem, _nothing)
            spans = recorded(step, given.steps, world.on_gpu)
        profiles.append(summarise(name, spans, given.steps))
        problem.reset()
    return profiles


def _nothing() -> None:
    """No clock is needed."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["llama3-8b"], metavar="NAME")
    add("--tokens", nargs="+", type=int, default=[8192])
    add("--strategies", nargs="+", default=["roof", "store", "eager", "recompute"])
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--steps", type=int, default=3, help="profiled steps (default 3)")
    add("--most", type=int, default=12, help="kernels listed of each variant")
    add("--sequence-parallel", action="store_true")
    add("--name", help="write DATE-DEVICE-NAME.json and .md to --results-dir")
    add("--results-dir", type=Path, default=ROOT / "docs" / "benchmarks" / "results")
    given = parser.parse_args(words)
    if given.steps < 1 or min(given.tokens) < 1:
        parser.error("--steps and --tokens must be at least 1")
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = parse_arguments(words)
    world = World(given.sequence_parallel)
    try:
        device = torch.cuda.get_device_name() if world.on_gpu else "cpu"
        facts = {"commit": commit(), "device": device, "torch": torch.__version__, "tp": world.size}
        rows, pages = [], []
        for shape in given.shapes:
            for num_tokens in given.tokens:
                try:
                    profiles = profiles_of(given, world, shape, num_tokens)
                except ValueError as error:
                    print(f"profile_head: {error}", file=sys.stderr)
                    return 2
                cell = f"{shape}: T = {num_tokens}, TP {world.size}"
                pages.append(markdown(cell, profiles, given.most))
                rows += [
                    facts | {"shape": shape, "T": num_tokens, **asdict(profile)}
                    for profile in profiles
                ]
        if world.rank == 0:
            heading = ", ".join(f"{key} {value}" for key, value in facts.items())
            page = f"# Profile of the head\n\nBy `scripts/profile_head.py`: {heading}.\n\n"
            page += "\n".join(pages)
            print(page)
            if given.name:
                path = result_path(given.results_dir, device, given.name)
                path.write_text(json.dumps(rows, indent=1) + "\n")
                path.with_suffix(".md").write_text(page)
                print(f"written: {path}")
        return 0
    finally:
        world.close()


if __name__ == "__main__":
    sys.exit(main())
