"""torch alone: collectives under way together in one gloo group. See scripts/lib/gloo.py.

    torchrun --standalone --nproc-per-node 2 -m tests.support.gloo_race [--worker-threads 1] [--seconds 40]

With one worker thread it ends well. With two, as torch makes them, it sooner or later dies of a corrupted
heap; eight get there faster.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron_fused_ce.scripts.lib import gloo

TOGETHER = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker-threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gloo.use_one_thread()
    if asked.worker_threads != 1:
        gloo.use_threads(asked.worker_threads)
    dist.init_process_group("gloo")
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._threads == asked.worker_threads
    size = dist.get_world_size()
    shards = [torch.randn(128) for _ in range(TOGETHER)]
    wholes = [torch.empty(128 * size) for _ in range(TOGETHER)]
    rounds, began, over = 0, time.monotonic(), torch.zeros(1)
    while not over:
        for _ in range(100):
            under_way = [gather(shard, whole) for shard, whole in zip(shards, wholes, strict=True)]
            for works in under_way:
                works.wait()
            rounds += 1
        over[0] = float(time.monotonic() - began > asked.seconds)
        dist.all_reduce(over)
    dist.destroy_process_group()
    print(f"{rounds * TOGETHER} all-gathers, {asked.worker_threads} worker threads", flush=True)
    gloo.leave()


def gather(shard: torch.Tensor, whole: torch.Tensor) -> Any:
    """Launched as a list of one: ALLGATHER_COALESCED is a name too long for a string to hold inside."""
    with _coalescing_manager(async_ops=True) as works:
        dist.all_gather_into_tensor(whole, shard)
    return works


if __name__ == "__main__":
    main()
