"""The benchmark over two ranks: references, errors, times, peers."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.scripts.bench import measure, peers
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.problem import Problem, World, full_reference
from megatron_fused_ce.scripts.bench.report import KEYS
from megatron_fused_ce.scripts.bench.roof import Roof
from megatron_fused_ce.scripts.bench.variants import Variant, backward, of_config
from megatron_fused_ce.scripts.bench.variants import peers as peer_variants
from megatron_fused_ce.scripts.lib.reference import relative_error, truth
from tests.support.ranks import Rank, on_ranks

TOKENS, HIDDEN, VOCAB = 48, 16, 64


def world_of(rank: Rank, sequence_parallel: bool) -> World:
    """A `World` in the group of the test's ranks."""
    world = World.__new__(World)
    world.rank, world.size, world.group = rank.rank, rank.size, rank.group
    world.device, world.on_gpu = rank.device, rank.device.type == "cuda"
    world.sequence_parallel, world.has_megatron = sequence_parallel, False
    return world


def problem_of(world: World) -> Problem:
    return Problem(
        world, num_tokens=TOKENS, hidden_size=HIDDEN, vocab=VOCAB, dtype=torch.float32, keep_whole=True
    )


class LocalLoss(torch.autograd.Function):
    """``[T]`` of this rank's shard, as verl and Liger give it; ``grad_hidden`` is this shard's share."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, start: int) -> Tensor:
        logits = hidden @ weight.t()
        local = labels - start
        here = (local >= 0) & (local < weight.shape[0])
        columns = local.where(here, 0)
        total = logits.exp().sum(-1)
        label = logits.gather(1, columns[:, None])[:, 0].where(here, 0.0)
        both = torch.stack([total, label])
        dist.all_reduce(both)
        ctx.save_for_backward(hidden, weight, logits, both[0], columns, here)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, logits, total, columns, here = ctx.saved_tensors
        grad_logits = logits.exp() / total[:, None]
        grad_logits.scatter_add_(1, columns[:, None], -here.float()[:, None])
        grad_logits *= grad[:, None]
        return grad_logits @ weight, grad_logits.t() @ hidden, None, None


class Reduced(torch.autograd.Function):
    """Liger's share: the sum over the ranks, everywhere."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


@contextmanager
def fake_libraries() -> Iterator[None]:
    """Modules with the functions of Liger and verl that peers.py calls, in their contracts."""

    def start(weight: Tensor, group: Any) -> int:
        return dist.get_rank(group) * weight.shape[0]

    def verl(hidden, weight, labels, temperature, reduction, group):  # type: ignore[no-untyped-def]
        assert (temperature, reduction) == (1.0, "none")
        logprobs = -LocalLoss.apply(hidden, weight, labels, start(weight, group))
        return logprobs, torch.zeros_like(logprobs)

    def liger(hidden, weight, labels, temperature, ignored, entropy, group):  # type: ignore[no-untyped-def]
        assert (temperature, ignored, entropy) == (1.0, -100, False)
        return LocalLoss.apply(Reduced.apply(hidden), weight, labels, start(weight, group))

    contents = {
        "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": verl},
        "liger_kernel.ops.fused_linear_scaled_cross_entropy": {
            "_apply_tp_fallback": liger,
            "LigerFusedLinearScaledCrossEntropyTPFunction": types.SimpleNamespace(apply=None),
        },
    }
    before = dict(sys.modules)
    for name, functions in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(functions)
        sys.modules[name] = module
    table = peers._table
    peers._table = lambda: [peers.replace(entry, needs_cuda=False) for entry in table()]
    try:
        yield
    finally:
        peers._table = table
        for name in contents:
            sys.modules.pop(name)
            if name in before:
                sys.modules[name] = before[name]


@on_ranks(2)
def test_peers_compute_the_definition(rank: Rank):
    """With sequence parallelism and without: loss, this rank's grad_hidden and its rows' grad_weight."""
    names = ["liger-tp-loop", "verl-tp"]
    with fake_libraries():
        world = world_of(rank, sequence_parallel=False)
        variants = {v.name: v for v in peer_variants(world, names)}
        assert sorted(variants) == names and not any(v.why_not for v in variants.values())
        for world.sequence_parallel in (False, True):
            problem = problem_of(world)
            exact = truth(problem.whole)
            rows = slice(problem.vocab_start, problem.vocab_start + problem.num_rows)
            for name, variant in variants.items():
                problem.zero_wgrad_accumulator()
                loss = variant.run(problem, measure.nothing)
                where = f"{name}, {world.sequence_parallel}"
                assert relative_error(loss, exact.loss[0]) < 1e-6, where
                want = exact.grad_hidden[problem.tokens, 0]
                assert problem.grad_hidden().shape == want.shape, where
                assert relative_error(problem.grad_hidden(), want) < 1e-6, where
                assert relative_error(problem.grad_weight(), exact.grad_weight[rows]) < 1e-6, where
                problem.reset()


def right_run(problem: Problem, mark: Any) -> Tensor:
    problem.reset()
    hidden = problem.world.gather_tokens(problem.hidden.detach()).requires_grad_()
    mark()
    loss = LocalLoss.apply(hidden, problem.weight, problem.labels, problem.vocab_start)
    loss = backward(loss, problem.grad_loss, problem, mark)
    grad = problem.world.sum_(hidden.grad.clone() if hidden.grad is not None else hidden)
    problem.hidden.grad = grad[problem.tokens].clone()
    return loss


@on_ranks(2)
def test_a_wrong_shard_is_seen_by_every_rank(rank: Rank):
    """One rank forgets the labels on its own shard: the error is every rank's, the right one's none's."""

    def forgetful(problem: Problem, mark: Any) -> Tensor:
        labels = problem.labels
        if rank.rank == rank.size - 1:
            problem.labels = labels.where(labels < problem.vocab_start, -1)
        loss = right_run(problem, mark)
        problem.labels = labels
        return loss

    for sequence_parallel in (False, True):
        world = world_of(rank, sequence_parallel)
        problem = problem_of(world)
        owners = problem.labels // problem.num_rows
        assert set(owners.tolist()) == set(range(rank.size))  # every shard has labels
        check = measure.SmallCheck(problem, {False: exact_of(problem)}, 0.0, 0.0, VOCAB)
        reference = full_reference(problem, samples=24)
        errors = {}
        for name, run in (("right", right_run), ("forgetful", forgetful)):
            variant = Variant(name, "peer", run=run)
            small, reason = measure._errors(variant, check, world)
            assert reason is None
            full = measure.full_errors(variant, problem, reference)[:2]
            errors[name] = (small, tuple(world.slowest(list(full))))
            problem.reset()
        assert max(max(pair) for pair in errors["right"]) < 1e-6, errors
        assert min(min(pair) for pair in errors["forgetful"]) > 1e-2, errors
        said: list[Any] = [None] * rank.size
        dist.all_gather_object(said, errors)
        assert all(other == errors for other in said)


def exact_of(problem: Problem) -> Any:
    exact = truth(problem.whole)
    return measure._part(problem, exact)


@on_ranks(2)
def test_times_are_the_slowest_ranks(rank: Rank):
    """One rank sleeps: every rank's row has its time, the roof's too."""

    def uneven(problem: Problem, mark: Any) -> Tensor:
        mark()
        time.sleep(0.02 if rank.rank == rank.size - 1 else 0.0)
        mark()
        mark()
        return problem.grad_loss

    world = world_of(rank, sequence_parallel=True)
    problem = problem_of(world)
    outcomes = {"x": measure.Outcome(Variant("x", "peer", run=uneven))}
    outcomes["x"].peak_mib = float(rank.rank)
    measure.measure_peak(outcomes["x"], problem, world)
    roofs = {"roof": measure.Outcome(Variant("roof", "roof"))}
    settings = measure.Settings(blocks=2, sample_ms=1.0, roofs=("roof",))
    measure.measure_times(outcomes, roofs, Roof(problem, world), problem, settings, world)
    for sample in outcomes["x"].samples:
        assert sample[0] >= 20 and sample[-1] >= 20, sample
    said: list[Any] = [None] * rank.size
    dist.all_gather_object(said, (outcomes["x"].samples, roofs["roof"].samples))
    assert all(other == said[0] for other in said)


@on_ranks(2)
def test_out_of_memory_on_the_last_rank(rank: Rank):
    """Behind a step's collectives: every rank's row says it, and all go on together."""

    def broken(name, config):
        variant = of_config(world, name, config)

        def run(problem, mark):
            loss = variant.run(problem, mark)
            if name == "broken" and rank.rank == rank.size - 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

        return replace(variant, run=run)

    world = world_of(rank, sequence_parallel=True)
    variants = [broken(name, FusedCEConfig(num_chunks=2)) for name in ("right", "broken")]
    settings = measure.Settings(dtype=torch.float32, blocks=1, sample_ms=0.0, roofs=())
    facts = dict.fromkeys(KEYS)
    cell = Cell("head", 32, 8, 64, True)
    rows = measure.measure_cell(cell, variants, settings, world, facts, {})
    assert [row["error"] for row in rows][1] == "out of memory"
    assert rows[0]["time_ms"] > 0 and rows[1]["time_ms"] is None
    everywhere: list[object] = [None] * rank.size
    dist.all_gather_object(everywhere, rows)
    assert everywhere[0] == everywhere[-1], "figures are the slowest rank's, the same on each"
