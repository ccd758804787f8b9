"""What the benchmark compares: this package's strategies, Megatron's own paths, the peers.

Every variant runs one forward and one backward on a `Problem` and ends in the same wgrad accumulator: ours
add there themselves, Megatron's layer too where apex's kernel is installed (gradient accumulation
fusion), the others return a gradient in the weight's dtype that is then added, as Megatron's DDP does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, planner
from megatron_fused_ce.call import Call
from megatron_fused_ce.logits import choose
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.bench.cases import parse_strategy
from megatron_fused_ce.scripts.bench.peers import one_line, te_cross_entropy
from megatron_fused_ce.scripts.bench.problem import MIB, Problem, Run, World
from megatron_fused_ce.wgrad import kind_of


@dataclass(frozen=True)
class Variant:
    """One row of the result. ``why_not`` says in one line why there is nothing to run."""

    name: str
    family: str  # "ours", "megatron", "peer"
    run: Run | None = None
    products: int = 3  # matrix products of one step: which roof it is measured against
    chunk_tokens: int | None = None
    config: FusedCEConfig | None = None  # ours only
    one_upstream: bool = False  # takes one upstream gradient for all tokens, returns a summed loss
    why_not: str | None = None
    limits: Callable[[Problem], str | None] | None = None  # why it refuses a problem

    @property
    def key(self) -> str:
        return f"{self.name}:{self.chunk_tokens}" if self.chunk_tokens else self.name


def backward(loss: Tensor, upstream: Tensor, problem: Problem, mark: Callable[[], None]) -> Tensor:
    """The second half of every step."""
    mark()
    loss.backward(upstream)  # type: ignore[no-untyped-call]
    problem.finish_backward()
    mark()
    return loss.detach()


def ours(world: World, text: str, memory_mb: int | None = None) -> Variant:
    """This package with a strategy ``NAME[:C][/PASS][/MERGE]``, ``auto`` within ``memory_mb``."""
    asked = parse_strategy(text)
    budget = {"memory_mb": memory_mb} if asked.name == "auto" else {}
    return of_config(world, asked.name + asked.ways, config_of(text, **budget))


def config_of(text: str, **options: Any) -> FusedCEConfig:
    """Of ``NAME[:C][/PASS][/MERGE]``; ``options`` come first."""
    asked = parse_strategy(text)
    own = {"strategy": asked.name, "chunk_tokens": asked.chunk_tokens}
    own |= {"logits_backend": asked.logits_backend or "auto", "merge": asked.merge or "auto"}
    return FusedCEConfig(**{**own, **options})


def of_config(world: World, name: str, config: FusedCEConfig) -> Variant:
    """A training step of this package with these options."""

    def run(problem: Problem, mark: Callable[[], None]) -> Tensor:
        problem.reset()
        mark()
        return backward(loss_of(problem, world, config), problem.grad_loss, problem, mark)

    return Variant(
        name=name,
        family="ours",
        run=run,
        products=4 if config.strategy == "recompute" else 3,
        chunk_tokens=config.chunk_tokens,
        config=config,
    )


def loss_of(problem: Problem, world: World, config: FusedCEConfig) -> Tensor:
    """``[T]`` fp32 of this package; with gradients where they are on."""
    loss: Tensor = linear_cross_entropy(
        Call(
            problem.hidden,
            problem.weight,
            problem.labels,
            tp_group=world.group if world.size > 1 else None,
            sequence_parallel=world.sequence_parallel,
            token_weights=problem.token_weights if config.strategy in ("auto", "grad_in_forward") else None,
            vocab_start=problem.vocab_start,
            config=config,
            open_grad_weight=problem.open_grad_weight,
        )
    ).loss
    return loss


@dataclass(frozen=True)
class Chosen:
    """What the package makes of a variant of ours on a problem."""

    strategy: str
    chunk_tokens: int
    logits_backend: str
    predicted_peak_mib: float


def chosen(variant: Variant, problem: Problem, world: World) -> Chosen:
    """As `linear_cross_entropy` chooses: logits backend, strategy and chunks of this call."""
    config = variant.config
    assert config is not None
    num_rows, hidden_size = problem.weight.shape
    logits, _ = choose.choose(config, problem.hidden, problem.weight)
    plan = planner.plan(
        planner.PlanInputs.of(
            config,
            num_tokens=problem.num_tokens,
            hidden_size=hidden_size,
            num_rows=num_rows,
            dtype=str(problem.dtype).removeprefix("torch."),
            num_parts=world.parts,
            tp_size=world.size,
            wgrad_accumulator=kind_of(problem.open_grad_weight),
            token_weights_known=problem.token_weights is not None,
            logits_backend=logits.name,
            saves_logits=logits.saves_logits,
            device=torch.cuda.get_device_name() if world.on_gpu else "cpu",
        )
    )
    return Chosen(plan.strategy, plan.capacity, logits.name, round(plan.predicted_peak_bytes / MIB, 1))


def megatron(world: World) -> list[Variant]:
    """Megatron's output layer with each of its cross entropies, and with Transformer Engine's."""
    names = ("unfused", "native", "te", "te-overwrite")
    if not (world.has_megatron and world.on_gpu):
        reason = "Megatron-LM is not installed" if world.on_gpu else "needs a GPU"
        return [Variant(f"megatron-{name}", "megatron", why_not=reason) for name in names]
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import (
        linear_with_grad_accumulation_and_async_allreduce as linear,
    )

    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401

        has_apex = True
    except ImportError:
        has_apex = False
    group = world.group
    # Static shapes, as in training: without this the second T of a run would get dynamic kernels.
    dynamo: Any = import_module("torch._dynamo")
    dynamo.config.automatic_dynamic_shapes = False
    dynamo.config.recompile_limit = max(64, dynamo.config.recompile_limit)

    # (logits [T, 1, V], labels [T, 1]) -> loss [T, 1]
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "unfused": vocab_parallel_cross_entropy,
        "native": lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, group),
    }
    why_not = {}
    for name in ("te", "te-overwrite"):
        try:
            losses[name] = te_cross_entropy(name == "te-overwrite", group)
        except Exception as error:  # a broken install raises more than ImportError
            why_not[name] = one_line(error)

    def variant(name: str) -> Variant:
        if name not in losses:
            return Variant(f"megatron-{name}", "megatron", why_not=why_not[name])
        loss_of = losses[name]

        def run(problem: Problem, mark: Callable[[], None]) -> Tensor:
            problem.reset()
            weight: Any = problem.weight
            # Without grad_added_to_main_grad Megatron returns None for the weight, as ours does here:
            # the dummy that DDP waits for would cost both the same.
            fused = has_apex and problem.main_grad is not None
            if fused:
                weight.main_grad = problem.main_grad
            labels = problem.labels.unsqueeze(1)
            mark()
            logits = linear(
                problem.hidden.unsqueeze(1),
                weight,
                None,
                gradient_accumulation_fusion=fused,
                allreduce_dgrad=world.size > 1 and not world.sequence_parallel,
                sequence_parallel=world.sequence_parallel,
                tp_group=group,
            )
            loss = loss_of(logits, labels).view(-1)
            del logits
            return backward(loss, problem.grad_loss, problem, mark)

        return Variant(f"megatron-{name}", "megatron", run=run)

    return [variant(name) for name in names]


def peers(world: World, names: list[str] | None) -> list[Variant]:
    """The peers of scripts/bench/peers.py that are named, or every one that can run on so many ranks."""
    from megatron_fused_ce.scripts.bench import peers as table

    parallel = None
    if world.size > 1:
        parallel = table.Parallel(world.group, world.rank, world.size)
    chosen = table.available(world.device, names, parallel)
    if names is None:
        chosen = [peer for peer in chosen if peer.tensor_parallel == (parallel is not None)]

    def variant(peer: table.Peer) -> Variant:
        def run(problem: Problem, mark: Callable[[], None]) -> Tensor:
            problem.reset()
            if parallel is not None:
                parallel.sequence_parallel = world.sequence_parallel
            mark()
            loss = peer.forward(problem.hidden, problem.weight, problem.labels)
            upstream = problem.one_upstream if peer.scalar_only else problem.grad_loss
            return backward(loss, upstream, problem, mark)

        def limits(problem: Problem) -> str | None:
            T, V, H = problem.num_tokens, *problem.weight.shape
            return peer.refusal(T, H, V, problem.dtype)

        why_not = world.first_word(peer.why_not)  # a library that one rank lacks
        return Variant(
            peer.name,
            "peer",
            run=None if why_not else run,
            products=peer.gemms,
            one_upstream=peer.scalar_only,
            why_not=why_not,
            limits=limits,
        )

    return [variant(peer) for peer in chosen]
