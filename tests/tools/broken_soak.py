"""The soak with one thing broken, under torchrun: ``-m tests.tools.broken_soak FAULT OPTIONS...``."""

from __future__ import annotations

import sys
import time

import torch

from megatron_fused_ce.scripts.lib import gloo
from tests import soak

RIGHT = soak.run
leaked = []


def drift(made, step):
    """One bit of one rank's loss, of a call that was there before."""
    if soak.RANK == 1 and step > 7:
        made["loss"].view(torch.int32)[0, 0] ^= 1


def wrong(made, step):
    """A loss that is wrong from the start on both ranks: 3 % too large."""
    made["loss"].mul_(1.03)


def hang(made, step):
    """One rank stops in the middle of the run."""
    if soak.RANK == 1 and step == 7:
        time.sleep(3600)


def leak(made, step):
    """Ten tensors a step that nobody frees."""
    leaked.extend(torch.empty(1) for _ in range(10))


def run(*args, **options):
    run.steps = getattr(run, "steps", 0) + 1
    made = RIGHT(*args, **options)
    FAULT(made, run.steps)
    return made


if __name__ == "__main__":
    FAULT = globals()[sys.argv.pop(1)]
    soak.run = run
    gloo.leave(soak.main())
