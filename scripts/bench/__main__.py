"""Time and memory of the head against its matrix products, Megatron's paths and the peers, in one run.

    python -m scripts.bench --shapes llama-3-8b 4096x128256 --tokens 8192 32768
    torchrun --nproc-per-node 4 -m scripts.bench --preset tp --peers --name tp4
    python -m scripts.bench --preset trained --operands FILE --peers

Every row is checked against fp64 at the timed size: one of this package that is wrong ends the run with exit
code 1 and no figures. Then all rows have turns, block after block, in an order that is shuffled anew in each
(fixed seed), so that a drifting clock favours none. The ranks of a torchrun form one tensor-parallel group;
times are the slowest rank's, peaks and errors the largest.

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

Out of memory, and a peer that fails or is absent, are rows; one that breaks the device ends the run, with
the cells so far written: leave it out with --skip. Exit code 1: a row of this package is wrong; 2: arguments.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.cli.command_line import UsageError, command, require_gpus, writable_file
from megatron_fused_ce.scripts.bench import cases, report
from megatron_fused_ce.scripts.lib import gloo, results

if TYPE_CHECKING:
    from megatron_fused_ce.scripts.bench.problem import World


@command("bench")
def main(words: list[str]) -> int:
    started = time.monotonic()
    given = cases.parse_arguments(__doc__ or "", words)
    path = writable_file(given.out or results.RESULTS / "-") if given.out or given.name else None
    if given.device == "cuda":
        require_gpus(cases.world_size(), "--device cpu tries it without, slowly")
    import torch

    from megatron_fused_ce.scripts.bench.problem import World

    world = World(use_gpu=given.device == "cuda")
    device = torch.cuda.get_device_name() if world.on_gpu else "cpu"
    given.path = results.default_path(results.RESULTS, device, given.name) if path and not given.out else path
    try:
        return run(given, world, results.made_by(device, ["scripts.bench", *words]), started)
    finally:
        world.close()


def run(given: argparse.Namespace, world: World, source: dict[str, Any], started: float) -> int:
    from megatron_fused_ce.scripts.bench import commits, distill, loss, measure, rl

    others = {"options": loss.OPTIONS, "rl": rl.OP, "distill": distill.OP, "commits": commits.OP}
    op = others.get(given.preset, loss.OP)
    if world.size > 1 and not op.over_ranks:
        raise UsageError(f"--preset {given.preset} knows no tensor parallelism: start it without torchrun")
    done: list[list[results.Row]] = []
    for cell in given.cells:
        elapsed = world.slowest([time.monotonic() - started])[0]
        if elapsed > given.time_limit:
            measure.say(world, f"{cell}: not started, {elapsed:.0f} of {given.time_limit:.0f} s are gone")
            continue
        own = [
            case for case in op.cases_of(given, cell, world) if not case.name.startswith(tuple(given.skip))
        ]
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
            print(report.cell(done[-1]), flush=True)
            if given.path is not None:  # a run that is cut short keeps its cells
                report.write(given.path, done, source)
    if world.rank == 0 and done and given.path is not None:
        print(f"written: {given.path} and {given.path.with_suffix('.md').name}")
    world.slowest([0.0])  # nobody leaves before rank 0 has written
    return 0


if __name__ == "__main__":
    gloo.end(main())
