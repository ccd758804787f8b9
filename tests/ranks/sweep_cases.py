"""What scripts/sweep_chunks.py says of several ranks: a cell that fails on one is a row on all."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import sweep_measure
from benchmark_variants import Variant, of_config
from sweep_state import State

from tests.ranks.bench_cases import world_of
from tests.ranks.runner import Rank

SETTINGS = sweep_measure.HeadSettings(
    num_tokens=32,
    hidden_size=8,
    vocab=64,
    dtype=torch.float32,
    wgrad_accumulator="main_grad",
    blocks=1,
    sample_ms=0.0,
)


def out_of_memory_on_the_last_rank(rank: Rank) -> None:
    """Behind a step's collectives: every rank's record says it, and all go on together."""

    def broken(world, name, config):
        variant = of_config(world, name, config)

        def run(problem, mark):
            loss = variant.run(problem, mark)
            if name == "store x 2" and rank.rank == rank.size - 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

        return Variant(name, "ours", run=run, config=config)

    world = world_of(rank, sequence_parallel=True)
    cells = sweep_measure.cells_of(["store"], [1, 2])
    sweep_measure.of_config = broken
    try:
        with tempfile.TemporaryDirectory() as folder:
            state = State(Path(folder), SETTINGS.facts(world), writes=rank.rank == 0)
            sweep_measure.measure(SETTINGS, cells, world, state, lambda cell: None)
            assert len(list(Path(folder).iterdir())) == (rank.rank == 0)
    finally:
        sweep_measure.of_config = of_config
    statuses = {key: record["status"] for key, record in state.cells.items()}
    assert statuses.pop("training store x 2") == "out of memory"
    assert len(statuses) == 5 and set(statuses.values()) == {"ok"}
    everywhere: list[object] = [None] * rank.size
    dist.all_gather_object(everywhere, state.cells)
    assert everywhere[0] == everywhere[-1], "figures are the slowest rank's, the same on each"


CASES = {"out of memory on the last rank": out_of_memory_on_the_last_rank}
