"""Time and memory of the head against its matrix products, Megatron's paths and the peers, in one run.

    python -m scripts.bench --shapes llama-3-8b --tokens 8192 32768
    python -m scripts.bench --preset reach --peers --name reach --results-dir docs/benchmarks/results
    python -m scripts.bench --shape 4096 128256 --strategies store grad_in_forward:8192
    python -m scripts.bench --tp 4 --sequence-parallel --shapes llama-3-8b --tokens 32768 --lean
    python -m scripts.bench --tp 4 --preset tp-reach --peers --name tp4
    python -m scripts.bench --preset small --name small
    python -m scripts.bench --preset options --shapes gemma-2-2b --strategies store
    python -m scripts.bench --preset profile --shapes llama-3-8b --tokens 8192 --name profile
    python -m scripts.bench --render RESULT.json

Before anything is timed every variant is checked against fp64 on some of the tokens, and against a
blockwise fp32 reference at the timed size: a strategy of this package that is wrong ends the run with
exit code 1 and no figures. Then all variants run in turn, block after block, in an order that is
shuffled anew in each block (fixed seed), so that a drifting clock favours none.

--tp R runs on R ranks, which form one tensor-parallel group: under a torchrun of R, or by starting one.
Every rank holds V / R vocabulary rows. Times are the slowest rank's, peaks and errors the largest; the
roofs are the shard's, all ranks at once.

    roof      the three matrix products alone, by cuBLAS, on the true grad_logits of these operands
    roof-4    the same with the logits computed twice: the floor of recompute
    roof-raw  the last two products on raw logits: they cost more, the chip being limited by power
    store, grad_in_forward, recompute, auto
              this package; NAME[:C][/PASS][/MERGE] sets the tokens of a chunk, the logits backend
              (scaled_exp, gemm_rows) and how statistics are merged over the ranks (packed, all_reduce)
    megatron-*
              Megatron's output layer with its cross entropies and Transformer Engine's
    the rest  scripts/bench/peers.py, with --peers: over several ranks those that know vocabulary shards

--preset small measures all its cells three times, in blocks of their own, and gives the medians over the
runs: the step's and the host's time over those of Megatron's layer with Transformer Engine's loss.
--preset options times each option of the loss over the plain loss, --preset profile says where a step's time
goes and what of the collectives is exposed (scripts/bench/options.py and profile.py); --preset rl times
log-probabilities and entropy beside verl's kernel, and over the ids that sampling kept (scripts/bench/rl.py);
--preset distill times divergences from a teacher beside TRL, ModelOpt and Liger (scripts/bench/distill.py).

Every variant ends in the same place: an fp32 main_grad (--wgrad-accumulator returned: a gradient in the
weight's dtype). Out of memory, and a peer that fails, are rows. Exit code 1: a strategy of this package is
wrong; 2: arguments; 3: a foreign kernel broke the device, rows so far are written.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.command_line import UsageError, command, writable_file
from megatron_fused_ce.scripts.bench import cases, report
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.lib import gloo, results

if TYPE_CHECKING:
    from megatron_fused_ce.scripts.bench.problem import World
    from megatron_fused_ce.scripts.bench.variants import Variant


def variants_of(given: argparse.Namespace, world: World) -> list[Variant]:
    """Raises UsageError for a name that is not known, or is there twice."""
    from megatron_fused_ce.scripts.bench.variants import megatron, ours, peers

    found = [ours(world, text, given.memory_mb) for text in given.strategies]
    if given.megatron:
        found += megatron(world)
    if given.peers is not None:
        found += peers(world, given.peers or None)
    found = [v for v in found if not {v.name, v.key, v.name.split("/")[0]} & set(given.skip)]
    keys = [variant.key for variant in found]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"{key} is there twice")
    return found


def roofs_of(given: argparse.Namespace, variants: list[Variant]) -> tuple[str, ...]:
    if given.roofs is not None:
        return tuple(name for name in cases.ROOFS if name in given.roofs)
    four = any(variant.products == 4 and not variant.why_not for variant in variants)
    return tuple(name for name in cases.ROOFS if four or name != "roof-4")


def expected_seconds(cell: Cell, variants: list[Variant], given: argparse.Namespace, num_ranks: int) -> float:
    """A cell's time on GPUs of 600 TFLOP/s, within a factor of two; 4 s for a peer to compile."""
    one = 2.0 * cell.num_tokens * cell.hidden_size * cell.vocab / num_ranks / 6e14  # product

    def turns(step: float, warm: bool, times: int) -> float:
        steps: int = warm + max(1, math.ceil(given.sample_ms / 1e3 / step))
        blocks: int = given.blocks
        return step * steps * times * blocks

    roofs = one * sum(cases.ROOFS[name] for name in roofs_of(given, variants))
    seconds = 15.0 + turns(max(roofs, 1e-6), True, 2)
    for variant in variants:
        if not variant.why_not:
            peer = variant.family == "peer"
            step = one * variant.products * (1.5 if peer else 1)
            seconds += 3 * step + turns(step, 1e3 * step < cases.LONGEST_WARM_STEP_MS, 1) + 4 * peer
    return seconds


@command("bench")
def main(words: list[str]) -> int:
    started = time.monotonic()
    given = cases.parse_arguments(__doc__ or "", words)
    if given.render is not None:
        report.write_page(given.render, results.rows(given.render, report.KEYS))
        print(f"written: {given.render.with_suffix('.md')}")
        return 0
    given.path = None
    if given.out or given.name:
        given.path = writable_file(given.out or given.results_dir / "-")
    cases.require_device(given)
    cases.start_ranks(given.tp, given.device, words)
    import torch

    from megatron_fused_ce.scripts.bench.problem import World

    world = World(use_gpu=given.device == "cuda")
    device = torch.cuda.get_device_name() if world.on_gpu else "cpu"
    source = results.made_by(device, ["scripts.bench", *words])
    if given.name and not given.out:
        given.path = results.default_path(given.results_dir, device, given.name)
    try:
        if given.preset == "options":
            from megatron_fused_ce.scripts.bench import options

            return options.run(given, world, source)
        if given.preset == "profile":
            from megatron_fused_ce.scripts.bench import profile

            return profile.run(given, world, source)
        if given.preset in ("rl", "distill"):
            from megatron_fused_ce.scripts.bench import distill, rl, rows

            subject = rl.SUBJECT if given.preset == "rl" else distill.SUBJECT
            return rows.run(subject, given, world, source, started)
        return run(given, world, source, started)
    finally:
        world.close()


def run(given: argparse.Namespace, world: World, source: dict[str, Any], started: float) -> int:
    from megatron_fused_ce.scripts.bench.measure import (
        DeviceLost,
        Settings,
        WrongVariant,
        measure_cell,
        say,
    )
    from megatron_fused_ce.scripts.bench.problem import DTYPES

    variants = variants_of(given, world)
    limit = given.time_limit
    settings = Settings(
        dtype=DTYPES[given.dtype],
        upstream=given.upstream,
        wgrad_accumulator=given.wgrad_accumulator,
        check_tokens=given.check_tokens,
        blocks=given.blocks,
        sample_ms=given.sample_ms,
        seed=given.seed,
        roofs=roofs_of(given, variants),
        check_foreign=not given.lean,
        deadline=started + limit,
    )
    facts = {**source, "dtype": given.dtype, "tp": world.size, "sp": False}  # sp: the cell's
    path = given.path
    measured: dict[Cell, list[list[dict[str, Any]]]] = {}  # the rows of each run
    skipped: list[str] = []
    known: dict[Any, Any] = {}
    exit_code = 0

    def rows() -> list[dict[str, Any]]:
        return [row for runs in measured.values() for row in report.over_runs(runs)]

    for number, cell in product(range(given.runs), given.cells):
        settings = replace(settings, seed=given.seed + number)
        elapsed = time.monotonic() - started
        need = expected_seconds(cell, variants, given, world.size) if world.on_gpu else 0.0
        if world.slowest([elapsed + need])[0] > limit:
            say(world, f"{cell}: not started, {elapsed:.0f} of {limit:.0f} s are gone")
            if not number:
                skipped.append(str(cell))
            continue
        try:
            found = measure_cell(cell, variants, settings, world, facts, known)
        except WrongVariant as wrong:
            say(world, f"{cell}: {wrong}: nothing of this cell is printed")
            return 1
        except DeviceLost as lost:
            say(world, f"{cell}: the device is lost: {lost}; leave the variant out with --skip")
            exit_code = 3
            break
        measured.setdefault(cell, []).append(found)
        if world.rank == 0:
            print(f"## {report.title(found[0])}\n\n{report.table(found)}", flush=True)
            if path is not None:  # a run that is cut short keeps its cells
                report.write(path, rows(), source, skipped)
    if world.rank == 0 and measured and (path is not None or given.preset == "small"):
        print(report.summaries(rows()))
    if world.rank == 0 and measured and path is not None:
        report.write(path, rows(), source, skipped)
        print(f"written: {path} and {path.with_suffix('.md').name}")
    if not exit_code:
        world.slowest([0.0])  # nobody leaves before rank 0 has written
    return exit_code


if __name__ == "__main__":
    gloo.end(main())
