"""Time and memory of the head against its matrix products, Megatron's paths and the peers, in one run.

    python -m scripts.bench --shapes llama-3-8b --tokens 8192 32768
    python -m scripts.bench --preset reach --peers --name reach
    python -m scripts.bench --shapes 4096x128256 --strategies store grad_in_forward:8192
    torchrun --nproc-per-node 4 -m scripts.bench --preset tp --peers --name tp4
    python -m scripts.bench --preset trained --operands FILE --peers
    python -m scripts.bench --preset options --shapes gemma-2-2b --options softcap entropy

Before anything is timed every row is checked against fp64 at the timed size: one of this package that is
wrong ends the run with exit code 1 and no figures. Then all rows have turns, block after block, in an order
that is shuffled anew in each block (fixed seed), so that a drifting clock favours none; a row's ratio to its
base is the median of the blocks' own (scripts/bench/measure.py).

The ranks of a torchrun form one tensor-parallel group; each of R holds V / R vocabulary rows. Times are the
slowest rank's, peaks and errors the largest; the roofs are the shard's, all ranks at once.

    roof      the three matrix products alone, by cuBLAS, on the true grad_logits of these operands
    roof-4    the same with the logits computed twice: the floor of recompute
    store, grad_in_forward, recompute, auto
              this package; NAME[:C][/PASS][/MERGE] sets the tokens of a chunk, the logits backend
              (scaled_exp, gemm_rows) and how statistics are merged over the ranks (packed, all_reduce);
              NAME/unweighted: the op is not given the token weights, as where a user names none
    megatron-*
              Megatron's output layer with its cross entropies and Transformer Engine's
    the rest  scripts/bench/peers.py, with --peers: over several ranks those that know vocabulary shards

--preset small gives the step's and the host's time over those of Megatron's layer with Transformer Engine's
loss; options the time of each option of the loss over the plain loss; profile where a step's time goes and
what of the collectives is exposed (scripts/bench/profile.py); trained, with --operands, a head that learned
real text (scripts/bench/trained.py) and random operands of its standard deviation; rl log-probabilities and
entropy beside verl's kernel, and over the ids that sampling kept; distill divergences from a teacher beside
TRL, ModelOpt, Liger.

Every row of a loss ends in the same place: an fp32 main_grad; those of rl and distill in a gradient of the
weight's dtype. Out of memory, and a peer that fails, are rows; one that breaks the device ends the run, with
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
    given.path = None
    if given.out or given.name:
        given.path = writable_file(given.out or results.RESULTS / "-")
    if given.device == "cuda":
        require_gpus(cases.world_size(), "--device cpu tries it without, slowly")
    import torch

    from megatron_fused_ce.scripts.bench.problem import World

    world = World(use_gpu=given.device == "cuda")
    device = torch.cuda.get_device_name() if world.on_gpu else "cpu"
    source = results.made_by(device, ["scripts.bench", *words])
    if given.name and not given.out:
        given.path = results.default_path(results.RESULTS, device, given.name)
    try:
        return run(given, world, source, started)
    finally:
        world.close()


def run(given: argparse.Namespace, world: World, source: dict[str, Any], started: float) -> int:
    from megatron_fused_ce.scripts.bench import distill, loss, measure, profile, rl

    op = {"options": loss.OPTIONS, "rl": rl.OP, "distill": distill.OP}.get(given.preset, loss.OP)
    if world.size > 1 and not op.over_ranks:
        raise UsageError(f"--preset {given.preset} knows no tensor parallelism: start it without torchrun")
    rows_of = profile.measure if given.preset == "profile" else measure.measure
    facts = {**source, "dtype": given.dtype, "tp": world.size}
    rows: list[results.Row] = []
    for cell, cases_of_it in zip(given.cells, op.chosen(given, given.cells, world), strict=True):
        elapsed = time.monotonic() - started
        if world.slowest([elapsed])[0] > given.time_limit:
            measure.say(world, f"{cell}: not started, {elapsed:.0f} of {given.time_limit:.0f} s are gone")
            continue
        try:
            found = rows_of(op, cell, cases_of_it, given, world, facts)
        except measure.WrongResult as wrong:
            measure.say(world, f"{cell}: {wrong}: nothing of this cell is printed")
            return 1
        rows += found
        measure.give_back(world)
        if world.rank == 0:
            print(f"## {report.title(found[0])}\n\n{report.table(found)}", flush=True)
            if given.path is not None:  # a run that is cut short keeps its cells
                report.write(given.path, rows, source)
    if world.rank == 0 and rows and given.path is not None:
        print(f"written: {given.path} and {given.path.with_suffix('.md').name}")
    world.slowest([0.0])  # nobody leaves before rank 0 has written
    return 0


if __name__ == "__main__":
    gloo.end(main())
