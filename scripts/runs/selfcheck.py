"""Is the head right on this machine, and how fast? Two minutes on a GPU type we have not tried.

A hundred random calls (strategies, dtypes, chunks, options of the loss, outputs, several labels, a teacher's
likeliest classes, skipped tokens; peaked and high logits) against fp64. Each may be off by twice what plain
PyTorch is off by at the same dtype, or by twice the dtype's rounding. Then, on a GPU, the time of each
strategy over three bare GEMMs, beside Megatron's losses and Transformer Engine's where these are installed.

Prints a table and writes it, with the chip and the versions, to a file: please attach it to an issue. Exit
status: 0 all right, 1 something is wrong, 2 a mistake in the arguments, or torch or triton is missing or
too old.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli import versions
from megatron_fused_ce.cli.command_line import Parser, command, whole, writable_file
from megatron_fused_ce.scripts.lib import results

#: fp32 sums go over a few thousand products.
ROUNDING = {"torch.float32": 2e-6, "torch.bfloat16": 2**-8, "torch.float16": 2**-11}
FACTOR = 2
#: The least free memory of a GPU, GiB -> the head that is timed there, of 8192 tokens.
TIMED = {40: "llama-3-8b", 12: "qwen3-1.7b", 0: "2048x32064"}


def wrong_calls(num_calls: int, device: Any) -> list[str]:
    """The calls that are wrong or failed, in words."""
    import torch

    from megatron_fused_ce.scripts.runs import random_calls as calls

    wrong: list[str] = []
    for seed, kind in zip(range(num_calls), itertools.cycle(calls.KINDS)):
        inputs, options, weights = calls.drawn(seed, device, kind)
        dtype = inputs.hidden.dtype
        words = f"call {seed}, {kind}, {dtype}, {options}"
        try:
            made = calls.call(kind, inputs, options, weights)
        except Exception as error:  # of whatever this machine cannot do
            wrong.append(f"{words}: {type(error).__name__}: {error}")
            continue
        true, eager = (calls.exact(kind, inputs, options, of) for of in (torch.float64, dtype))
        both = calls.errors(made, true), calls.errors(eager, true)
        for name, ours, bound in zip(calls.NAMES, *both, strict=True):
            if not ours <= FACTOR * max(bound, ROUNDING[str(dtype)]):
                wrong.append(f"{words}: {name} is off by {ours:.1e}, plain PyTorch by {bound:.1e}")
    return wrong


def timed(path: Path) -> str:
    """Measure the head of this GPU's size, with a result at ``path``; why not, or empty."""
    import torch

    free = torch.cuda.mem_get_info()[0] / 2**30
    shape = next(name for least, name in TIMED.items() if free >= least)
    words = ["--shapes", shape, "--tokens", "8192", "--strategies", "auto", "store", "grad_in_forward"]
    words += ["recompute", "--blocks", "3", "--time-limit", "90", "--out", str(path)]
    # In a process of its own: the calls above have broken promises.
    bench = subprocess.run([sys.executable, "-m", "megatron_fused_ce.scripts.bench", *words])
    return "" if bench.returncode == 0 else "the benchmark ended with an error"


@command("selfcheck")
def main(words: list[str]) -> int:
    parser = Parser("python -m megatron_fused_ce selfcheck", __doc__ or "")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    add("--calls", type=whole(most=10**6), default=100, help="random calls against fp64 (default 100)")
    add("--no-times", action="store_true", help="check the results alone")
    add("--out", type=Path, default=Path("selfcheck.json"), help="[%(default)s]")
    given = parser.parse_args(words)
    path = writable_file(given.out)
    import torch

    on_gpu = given.device == "cuda" or (given.device is None and torch.cuda.is_available())
    if on_gpu and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: --device cpu checks the arithmetic alone")
    try:
        versions.require("torch", torch.__version__)
        if on_gpu:
            from megatron_fused_ce.kernels import gemm_variants

            versions.require("triton", gemm_variants.triton_version())
    except ImportError as error:
        parser.error(str(error))
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else ""
    facts = results.made_by(name, ["megatron_fused_ce", "selfcheck", *words])
    facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability())) if on_gpu else ""
    for key, value in facts.items():
        if value:
            print(f"{key:20} {value}")
    warnings.filterwarnings("ignore", ".*(upstream gradient|promise)")
    wrong = wrong_calls(given.calls, device)
    print(f"{given.calls} calls against fp64, {len(wrong)} wrong", *wrong[:20], sep="\n")
    why_no_times = "asked for" if given.no_times else "" if on_gpu else "no GPU"
    times, rows = path.with_name(f"{path.stem}-times.json"), []
    if why_no_times := why_no_times or timed(times):
        print(f"not timed: {why_no_times}")
    else:
        rows = json.loads(times.read_text())["rows"]
        os.remove(times)
        times.with_suffix(".md").unlink(missing_ok=True)
    found = {**facts, "calls": given.calls, "wrong": wrong, "not_timed": why_no_times, "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {path}")
    return int(bool(wrong) or why_no_times.startswith("the benchmark"))
