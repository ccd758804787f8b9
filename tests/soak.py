"""Thousands of random calls of the head over ranks: the same bits, no hang, no leak.

    torchrun --nproc-per-node 4 -m tests.soak --steps 5000 --time-limit 80

A pool of calls, which the properties' strategy draws (tests/support/problems.py), is visited again and again,
each time in another order, each call by tensor-parallel groups of its size. Beside each an all-reduce on a
second communicator is under way. Before some collectives every rank sleeps, each another time; on GPUs their
streams do too.

A call's first result is held against fp64, within the properties' bound; every later one must repeat its
bits. After each visit of the pool one call is replaced by a new one. Stops with status 1, and says why, at

    drift   a result outside its bound, or other bits than the first time
    leak    bytes or tensors that outlive their step and grow
    hang    a rank without progress for --hang-timeout seconds: where it stands, and its stacks

0: all steps done, or the time limit reached. 2: arguments that do not fit.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import resource
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import torch
import torch.distributed as dist

from megatron_fused_ce.cli.command_line import NO_LIMIT, Parser, command, seconds, whole
from megatron_fused_ce.scripts.lib import gloo, results
from tests.support.collectives import Collective, Collectives, random_delays
from tests.support.op import Parts, joined, same_bits
from tests.support.problems import DrawnProblem, check, problems, run

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
#: What may be allocated late without being a leak: workspaces and caches of libraries.
SLACK = {"device MiB": 4.0, "host MiB": 24.0, "tensors": 40.0}
#: Share of the run after which no call is new, and memory is looked at: libraries keep what they made for a
#: shape (2.4 MiB a call on a CPU, kernels' code on a GPU).
QUIET_AFTER = 0.6


def draw(number: int, seed: int, device: torch.device) -> list[DrawnProblem]:
    """Calls over shards whose number divides the ranks; on a GPU larger, in few sizes to compile for."""
    drawn: list[DrawnProblem] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(problems(max_shards=WORLD).filter(lambda made: WORLD % len(made.shards) == 0))
    def collect(problem: DrawnProblem) -> None:
        if device.type == "cuda":
            large = {"s": 8 * problem.s, "shards": tuple(8 * rows for rows in problem.shards)}
            hidden_size = 128 * (1 + problem.hidden_size % 3)
            problem = replace(problem, **large, hidden_size=hidden_size, log2_hidden=0, log2_weight=0)
        drawn.append(problem)

    collect()
    return drawn


def leak_in(history: list[float], slack: float) -> bool:
    """Growth that the smallest of the last four still shows over the largest of the second quarter."""
    return len(history) >= 12 and min(history[-4:]) - max(history[2 : len(history) // 2]) > slack


def memory(device: torch.device) -> dict[str, float]:
    """MiB of the host, and on the device, or tensors where they can be counted."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return {"host MiB": resident / 2**20, "device MiB": torch.cuda.memory_allocated() / 2**20}
    gc.collect()
    alive = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return {"host MiB": resident / 2**20, "tensors": float(alive)}


class Soak:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        # The verdicts' own group: it must work where the others hang.
        self.control = dist.new_group(backend="gloo")
        self.beside = dist.new_group()
        # This rank's, by size.
        self.groups = {n: dist.new_subgroups(n)[0] for n in range(2, WORLD + 1) if WORLD % n == 0}
        self.order = random.Random(options.seed)  # the same on every rank
        self.pool = draw(options.pool, options.seed, device)
        self.first: dict[DrawnProblem, Parts] = {}  # this rank's results
        self.steps = self.calls = self.num_problems = 0
        self.worst, self.failure, self.where, self.progress = 0.0, "", "", time.monotonic()

    def before(self, call: Collective) -> None:
        self.calls += 1
        self.where, self.progress = f"before collective {self.calls}, {call}", time.monotonic()
        self.delays(call)

    def watch(self) -> None:
        """Ends this process, and torchrun with it the others, when nothing has moved for a while."""
        limit = self.options.hang_timeout
        while time.monotonic() - self.progress < limit:
            time.sleep(min(1.0, limit / 4))
        words = f"rank {RANK}: hang: no progress for {limit:.0f} s in step {self.steps}, {self.where}"
        print(f"soak: {words}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr)
        os._exit(1)

    def step(self, problem: DrawnProblem) -> None:
        self.steps, self.progress, self.where = self.steps + 1, time.monotonic(), str(problem)
        size = len(problem.shards)
        summed = torch.full((4096,), float(1 + RANK), device=self.device)
        under_way = dist.all_reduce(summed, group=self.beside, async_op=True)
        inputs, group = problem.inputs(self.device), self.groups[size]
        made = run(problem, inputs=inputs, rank=RANK % size, group=group)
        under_way.wait()
        made["beside"] = summed
        if problem not in self.first:
            self.first[problem], self.num_problems = made, self.num_problems + 1
            wrong = self.against_fp64(problem, made)
        else:
            same = all(same_bits(made[name], self.first[problem][name]) for name in made)
            wrong = "" if same else "other bits than the first time"
        self.failure = self.failure or (wrong and f"drift: {wrong}: {problem}")

    def against_fp64(self, problem: DrawnProblem, made: Parts) -> str:
        """What is wrong with the first results of this rank's group, said by its first rank."""
        parts: list[Any] = [None] * WORLD
        sent = {name: x.cpu() for name, x in made.items() if name != "beside"}
        dist.all_gather_object(parts, sent, group=self.control)
        size = len(problem.shards)
        try:
            assert bool((made["beside"] == WORLD * (WORLD + 1) / 2).all()), "the sum beside is wrong"
            whole = joined(parts[RANK - RANK % size :][:size], problem.sequence_parallel)
            if RANK % size == 0:
                self.worst = max(self.worst, check(problem, whole))
        except AssertionError as error:
            return str(error)
        return ""

    def run(self) -> str:
        """Visits of the pool until all is done, or until a rank has a failure, which all return."""
        threading.Thread(target=self.watch, daemon=True).start()
        seed = self.options.seed * WORLD + RANK
        self.delays = random_delays(seed, longest_s=4e-3, share=0.01, device=self.device)
        names = {group: f"tp {size}" for size, group in self.groups.items()}
        history: dict[str, list[float]] = {}
        began, done, failures = time.monotonic(), 0.0, [""]
        while done < 1 and not any(failures):
            with Collectives(names, before=self.before):
                for problem in self.order.sample(self.pool, len(self.pool)):
                    self.step(problem)
            if done <= QUIET_AFTER:
                at = self.order.randrange(len(self.pool))
                self.first.pop(self.pool[at], None)
                (self.pool[at],) = draw(1, self.order.randrange(2**31), self.device)
            for name, value in memory(self.device).items() if done > QUIET_AFTER else ():
                history.setdefault(name, []).append(value)
                if leak_in(history[name], SLACK[name]):
                    self.failure = self.failure or f"leak: {name} after each visit: {history[name]}"
            done = max(self.steps / self.options.steps, (time.monotonic() - began) / self.options.time_limit)
            told: list[Any] = [None] * WORLD
            mine = self.failure and f"rank {RANK}: {self.failure}"
            dist.all_gather_object(told, (mine, done), self.control)
            failures, (done, *_) = zip(*told, strict=True)  # rank 0 says what is done
        return next(filter(None, failures), "")


@command("soak")
def main(words: list[str]) -> int:
    parser = Parser("python -m tests.soak", __doc__ or "")
    add = parser.add_argument
    add("--steps", type=whole(), default=2000)
    add("--seed", type=whole(0), default=1)
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="S")
    add("--pool", type=whole(most=10**6), default=24, metavar="N", help="calls at a time [24]")
    add("--hang-timeout", type=seconds, default=60.0, metavar="S", help="[60]")
    add("--json", type=Path, help="write what was done here")
    options = parser.parse_args(words)
    if WORLD < 2:
        parser.error("start it over 2 ranks or more: torchrun --nproc-per-node 4 -m tests.soak")
    device = torch.device("cuda" if torch.cuda.device_count() >= WORLD else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    gloo.use_one_thread()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    soak, began = Soak(options, device), time.monotonic()
    why = soak.run()
    if RANK == 0:
        done = {"steps": soak.steps, "problems": soak.num_problems, "collectives": soak.calls}
        done |= {"worst_error_over_bound": round(soak.worst, 2), "seconds": round(time.monotonic() - began)}
        print(f"soak: {why or 'no drift, hang or leak'}: {done}", flush=True)
        if options.json:
            row = {"shape": f"{WORLD} ranks", "variant": "soak", "failure": why or None, **done}
            gpu = torch.cuda.get_device_name() if device.type == "cuda" else ""
            results.write(options.json, [row], results.made_by(gpu, ["tests.soak", *words]))
    # The first rank to end ends the others: not before all is said.
    dist.barrier(group=soak.control)
    return int(bool(why))


if __name__ == "__main__":
    # A normal exit would wait for collectives that a failure left under way.
    gloo.leave(main())
