"""Time and memory of the head against its matrix products, Megatron's paths and the peers, in one run.

    python -m scripts.bench --shapes llama-3-8b 4096x128256 --tokens 8192 32768 --peers
    torchrun --nproc-per-node 4 -m scripts.bench --preset tp --peers --name tp4

Every row is checked against fp64 at the timed size: one of this package that is wrong ends the run with no
figures. Then all rows have turns, block after block, in an order that is shuffled anew in each (fixed seed).
The ranks of a torchrun form one tensor-parallel group.

    roof      the three matrix products alone, by cuBLAS, on the true grad_logits of these operands
    roof-4    the same with the logits computed twice: the floor of recompute
    store, grad_in_forward, recompute, auto
              this package; NAME[:C][/BACKEND][/MERGE] sets the tokens of a chunk, the logits backend
              (scaled_exp, gemm_rows) and how statistics are merged over the ranks (packed, all_reduce)
    megatron-*
              Megatron's output layer with its cross entropies and Transformer Engine's
    the rest  peers, with --peers

Presets: reach, moe (heads of mixtures of experts) and tp time the loss at large sizes, small the host's share
too; trained a head that learned real text (scripts.bench.trained), and random operands as wide; options each
option of the loss; rl log-probabilities and entropy; distill divergences from a teacher; commits another
checkout beside this one.

Out of memory, and a peer that fails or is absent, are rows; one that breaks the device ends the run: leave it
out with --skip. Exit code 1: a row of this package is wrong; 2: arguments.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.cli.command_line import command, require_gpus, writable_file
from megatron_fused_ce.scripts.bench import cases
from megatron_fused_ce.scripts.lib import gloo, results, tables

if TYPE_CHECKING:
    from megatron_fused_ce.scripts.bench.problem import World

ERRORS = ("loss", "grad_hidden", "grad_weight")
#: Heading, key and format of each column; those of which no row has a value are left out.
COLUMNS = (
    *(("chosen", "plan", ""), ("backend", "logits_backend", ""), ("C", "chunk_tokens", "")),
    *(("forward", "forward_ms", ".3f"), ("backward", "backward_ms", ".3f"), ("both, ms", "time_ms", ".3f")),
    *(("spread", "spread", ".1%"), ("over its base", "ratio", ".3f"), ("95 %", "ratio_interval", ".3f")),
    *(("base", "base", ""), ("over", "over", ".3f"), ("host, ms", "host_ms", ".2f")),
    *(("TFLOP/s", "tflops", ".0f"), ("peak, MiB", "peak_mib", ".1f"), ("error", "error", ".1e")),
    *((f"of {name}", name, ".1e") for name in ERRORS),
    *(("MHz", "sm_mhz", ".0f"), ("W", "watts", ".0f"), ("°C", "celsius", ".0f")),
)
ABOUT = (
    "Medians over interleaved blocks; spread is (slowest - fastest block) / median; ratios are medians of "
    "the blocks' own, with a 95 % interval. Times are the slowest rank's, peaks (above inputs and outputs) "
    "and errors the largest of any. More: docs/benchmarks, *How it is measured*."
)


def _value(row: results.Row, key: str, form: str) -> str:
    value = row["errors"].get(key) if key in ERRORS else row.get(key)
    if value is None or (key == "base" and row["ratio"] is None):
        return ""
    if key == "over":
        return "; ".join(
            f"{_value(row, name, form)} ({_value(row, f'{name}_interval', form)}), host "
            f"{_value(row, f'host_{name}', form)} ({_value(row, f'host_{name}_interval', form)}) of {other}"
            for name, other in value.items()
            if row[name] is not None
        ).replace(" ()", "")
    if isinstance(value, list | tuple):
        return " to ".join(format(end, form) for end in value)
    return format(value, form) if isinstance(value, float | int) else str(value)


def page_of(rows: Sequence[results.Row]) -> str:
    """Its heading, what its rows share, their table."""
    row = rows[0]
    words = [f"{key} = {row[key]}" for key in ("T", "H", "V")]
    words += [f"TP {row['tp']}{' with sequence parallelism' if row['sp'] else ''}"] if row["tp"] > 1 else []
    words += [row["dtype"], *([f"{row['operands']} operands"] if row.get("operands") else [])]
    note = f"{max(row['blocks'] for row in rows)} blocks; `grad_weight` ends in {row['wgrad_accumulator']}."
    if alone := [row["variant"] for row in rows if row["upstream"] == "one scalar"]:
        note += f" One upstream gradient for all tokens: {', '.join(alone)}."
    for key, of in (("eager_errors", "Plain PyTorch's errors"), ("operands_made", "The trained operands")):
        if told := row.get(key):
            note += f" {of}: {', '.join(f'{name} {value:.6g}' for name, value in told.items())}."
    columns = [[head, *(_value(row, key, form) for row in rows)] for head, key, form in COLUMNS]
    columns = [["", *(row["variant"] for row in rows)], *(of for of in columns if any(of[1:]))]
    head, *lines = zip(*columns, strict=True)
    return "\n\n".join([f"## {row['shape']}: {', '.join(words)}", note, tables.markdown(head, lines)]) + "\n"


def write(path: Path, cells: Sequence[Sequence[results.Row]], source: results.Row) -> None:
    """The result file, and the page beside it."""
    rows = [{k: v for k, v in row.items() if k not in source or source[k] != v} for of in cells for row in of]
    results.write(path, rows, source)
    words = "{device}, torch {torch}, triton {triton}, commit {commit}.".format(**source)
    results.write_whole(path.with_suffix(".md"), "\n\n".join([words, ABOUT, *map(page_of, cells)]))


@command("bench")
def main(words: list[str]) -> int:
    started = time.monotonic()
    given = cases.parse_arguments(__doc__ or "", words)
    path = writable_file(given.out or results.RESULTS / "-") if given.out or given.name else None
    if given.device == "cuda":
        require_gpus("--device cpu tries it without, slowly", cases.world_size())
    import torch

    from megatron_fused_ce.scripts.bench.problem import World

    world = World(given.device == "cuda")
    device = torch.cuda.get_device_name() if world.on_gpu else "cpu"
    given.path = results.default_path(results.RESULTS, device, given.name) if path and not given.out else path
    try:
        return run(given, world, results.made_by(device, ["scripts.bench", *words]), started)
    finally:
        world.close()


def run(given: argparse.Namespace, world: World, source: dict[str, Any], started: float) -> int:
    from megatron_fused_ce.scripts.bench import distill, loss, measure, rl

    op = {"options": loss.OPTIONS, "rl": rl.OP, "distill": distill.OP}.get(given.preset, loss.OP)
    if given.preset == "commits":  # of a clone: a wheel does not have it
        from megatron_fused_ce.scripts.bench import commits

        op = commits.OP
    done: list[list[results.Row]] = []
    for cell in given.cells:
        elapsed = world.slowest([time.monotonic() - started])[0]
        if elapsed > given.time_limit:
            measure.say(world, f"{cell}: not started, {elapsed:.0f} of {given.time_limit:.0f} s are gone")
            continue
        skip = tuple(given.skip)
        own = [case for case in op.cases_of(given, cell, world) if not case.name.startswith(skip)]
        try:
            facts = {**source, "dtype": given.dtype, "tp": world.size}
            done.append(measure.measure(op, cell, own, given, world, facts))
        except measure.WrongResult as wrong:
            measure.say(world, f"{cell}: {wrong}: nothing of this cell is printed")
            return 1
        except RuntimeError as error:
            if not measure.is_out_of_memory(error):
                raise
            measure.say(world, f"{cell}: its operands, or their check in fp64, do not fit the memory")
            continue
        finally:
            measure.give_back(world)
        if world.rank == 0:
            print(page_of(done[-1]), flush=True)
            if given.path is not None:  # a run that is cut short keeps its cells
                write(given.path, done, source)
    if world.rank == 0 and done and given.path is not None:
        print(f"written: {given.path} and {given.path.with_suffix('.md').name}")
    world.slowest([0.0])  # nobody leaves before rank 0 has written
    return 0


if __name__ == "__main__":
    gloo.end(main())
