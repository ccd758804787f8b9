"""Runs cases on every rank and collects one verdict per case, so that a failure cannot hang a run.

A module of cases has ``CASES``: a dict of name -> function of a :class:`Rank`. Each case ends with an
exchange of verdicts; the case failed if any rank raised. A rank that raises inside a case leaves the
others in a collective: they end by the group's time-out, and the rest is reported as not run. Verdicts
travel over a group of their own, so that none is taken for what the others still wait for.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fused_ce.testing import gloo

ROOT = Path(__file__).resolve().parents[2]
CASE_TIMEOUT_S = 60

#: One thread a rank; Megatron's jitted functions run as they are written; a rank that dies says where.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONFAULTHANDLER": "1"}


@dataclass(frozen=True)
class Rank:
    """One rank's view: all ranks form one tensor-parallel group."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device


class Verdicts(dict[str, str]):
    """Case name -> empty when it passed, else what each failing rank said."""

    def check(self, name: str) -> None:
        assert self[name] == "", self[name]


@cache
def run_cases(
    module: str, num_ranks: int, path: tuple[str, ...] = (), timeout_s: int = 600
) -> Verdicts:
    """Run every case of ``module`` on ``num_ranks`` ranks (gloo, or NCCL where the GPUs suffice).

    ``path`` comes first on the ranks' PYTHONPATH: another megatron-core, for instance.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), "-m", "tests.ranks.runner", module),
    ]
    folders = (*path, str(ROOT), os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    verdicts = Verdicts()
    for line in done.stdout.splitlines():
        if line.startswith("VERDICT "):
            name, words = json.loads(line.removeprefix("VERDICT "))
            verdicts[name] = words
    # What a failing or dying rank says comes long before torchrun's own words on it.
    failed = re.search(r"rank \d+: Traceback|Fatal Python error", done.stderr)
    tail = done.stdout[-1500:]
    tail += done.stderr[max(failed.start() - 500, 0) :][:5000] if failed else ""
    tail += done.stderr[-3000:]
    for name in case_names(module):
        verdicts.setdefault(name, f"no verdict; the run ended with {done.returncode}: {tail}")
    return verdicts


def case_names(module: str) -> list[str]:
    return list(importlib.import_module(module).CASES)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= size
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what asks whether there is a GPU finds none
    import tests.conftest  # noqa: F401  sets the environment for Triton and cuBLAS

    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    gloo.use_one_thread()
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", timeout=datetime.timedelta(seconds=CASE_TIMEOUT_S)
    )
    verdicts = dist.new_group(
        backend="gloo", timeout=datetime.timedelta(seconds=4 * CASE_TIMEOUT_S)
    )
    torch.use_deterministic_algorithms(True)
    module = importlib.import_module(sys.argv[1])
    getattr(module, "prepare", lambda device: None)(device)
    gc.freeze()  # some cases collect often, and what was imported need not be looked at each time
    skip = getattr(module, "skip", lambda name: False)
    for name, case in module.CASES.items():
        if skip(name):
            continue
        words = ""
        try:
            case(Rank(dist.group.WORLD, rank, size, device))
        except Exception:
            words = f"rank {rank}: {traceback.format_exc()}"
            print(words, file=sys.stderr, flush=True)  # in case the others cannot be told
        said: list[str] = [""] * size
        dist.all_gather_object(said, words, group=verdicts)
        if rank == 0:
            print("VERDICT " + json.dumps([name, "\n".join(filter(None, said))]), flush=True)
    dist.destroy_process_group()
    gloo.leave()


if __name__ == "__main__":
    main()
