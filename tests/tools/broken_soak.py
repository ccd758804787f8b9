"""The soak with one thing broken, under torchrun: ``-m tests.tools.broken_soak FAULT OPTIONS...``."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from megatron_fused_ce.scripts.dev import soak

RIGHT = soak.train_step
FAULTY_STEP = 7
leaked = []


def steps_so_far() -> int:
    steps_so_far.count = getattr(steps_so_far, "count", 0) + 1
    return steps_so_far.count


def drift(entry, layout, plans):
    """One bit of one rank's loss, in a problem that was there before."""
    results = RIGHT(entry, layout, plans)
    if soak.RANK == 1 and steps_so_far() >= FAULTY_STEP and entry.first is not None:
        results[0].view(torch.int32)[0, 0] ^= 1
    return results


def wrong(entry, layout, plans):
    """A gradient that is wrong from the start: 3 % too large on one rank."""
    results = RIGHT(entry, layout, plans)
    if soak.RANK == 1:
        results[-2].mul_(1.03)
    return results


def hang(entry, layout, plans):
    """One rank stops in the middle of the run."""
    if soak.RANK == 1 and steps_so_far() == FAULTY_STEP:
        time.sleep(3600)
    return RIGHT(entry, layout, plans)


def order(entry, layout, plans):
    """One rank issues the second communicator's first sum before the tensor-parallel group's."""
    if steps_so_far() == FAULTY_STEP:
        sums = [lambda: dist.all_reduce(torch.ones(3), group=layout.tp)]
        sums.append(lambda: dist.all_reduce(torch.ones(5), group=layout.beside, async_op=True))
        under_way = [launch() for launch in (sums if soak.RANK else reversed(sums))]
        [work.wait() for work in under_way if work is not None]
    return RIGHT(entry, layout, plans)


def leak(entry, layout, plans):
    """Ten tensors a step that nobody frees."""
    leaked.extend(torch.empty(1) for _ in range(10))
    return RIGHT(entry, layout, plans)


if __name__ == "__main__":
    soak.train_step = globals()[sys.argv.pop(1)]
    code = soak.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
