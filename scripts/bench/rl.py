"""What log-probabilities for RL cost: beside verl's kernel, of K ids a token, where tokens need nothing."""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.loss import config_of, needs_gpu, verl, wide
from megatron_fused_ce.scripts.bench.problem import PEER, Case, Op, Outputs, Problem, World, bare

TEMPERATURE = 0.7
PRODUCT, GEMMS, FORWARD = "product", "three GEMMs", ", forward only"
#: Kinds of rows; a number: of so many ids a token.
PLAIN, PER_TOKEN, ACTIVE, LABELS = "plain", "temperature per token", "half of the tokens active", (64, 1024)


class Rl(Problem):
    """Beside the operands temperatures, ids and upstream gradients; random, nothing in it repeats."""

    wgrad_accumulator = "returned"

    def __init__(self, cell: Cell, *world_dtype: Any) -> None:
        super().__init__(cell, *world_dtype)
        T, vocab, device = self.num_tokens, cell.vocab, self.world.device
        self.temperatures = 0.5 + self.uniform(1, T)
        self.of_log_prob, self.of_entropy = self.normal(T), 0.1 * self.normal(T)
        self.active = self.uniform(T) < 0.5
        self.of_active = self.of_log_prob * self.active
        order, start = torch.randperm(vocab, generator=self.generator, device=device), self.ids(T, 1)
        self.ids_of: dict[Any, Tensor] = {}  # K: [T, K], different ones for a token
        for K in filter(vocab.__ge__, LABELS):
            self.ids_of[K] = order[(start + torch.arange(K, device=device)) % vocab]
            setattr(self, f"of_{K}_ids", self.normal(T, K))

    def grad_logits(self, part: slice) -> Tensor:
        """Of log-probabilities alone, for the bare products."""
        p = (wide(self.all_hidden[part] @ self.weight.t()) / TEMPERATURE).softmax(-1).div_(-TEMPERATURE)
        p.scatter_add_(1, self.labels[part, None], torch.full_like(p[:, :1], 1 / TEMPERATURE))
        return p * self.of_log_prob[part, None]

    def definition(self, kind: Any, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        z = wide(hidden @ weight.t())
        z = z / (self.temperatures[0, part, None].to(z.dtype) if kind == PER_TOKEN else TEMPERATURE)
        log_p = z.log_softmax(-1)
        if kind in self.ids_of:
            return {"log_prob": log_p.gather(1, self.ids_of[kind][part])}
        log_prob = log_p.gather(1, self.labels[part, None])[:, 0]
        if kind == ACTIVE:
            return {"log_prob": log_prob.where(self.active[part], 0.0)}
        return {"log_prob": log_prob, "entropy": -(log_p.exp() * log_p).sum(-1)}


def _ours(strategy: str, kind: Any, entropy: str, problem: Rl) -> Outputs:
    made = token_log_probs(
        *(problem.hidden, problem.weight, problem.ids_of.get(kind, problem.labels)),
        temperature=problem.temperatures[0] if kind == PER_TOKEN else TEMPERATURE,
        entropy=entropy,
        active_mask=problem.active if kind == ACTIVE else None,
        config=config_of(strategy),
    )
    return {name: value for name, value in made._asdict().items() if value is not None}


def _verl(problem: Rl) -> Outputs:
    return dict(zip(("log_prob", "entropy"), verl(problem.hidden, problem, TEMPERATURE), strict=True))


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    def row(name: str, kind: Any, run: Any, *of: str, **more: Any) -> None:
        """``of``: the upstream gradients of log-probabilities and entropy."""
        over = {"over_verl": "verl" + FORWARD * (not of)}
        if kind != PLAIN:
            over["over_log_prob"] = f"log-probability, {given.strategies[0]}"
        grads, base = tuple(zip(("log_prob", "entropy"), of, strict=False)), GEMMS if of else PRODUCT
        found.append(Case(name, run=run, kind=kind, grads=grads, base=base, over=over, **more))

    found, both = list[Case](), ("of_log_prob", "of_entropy")
    of_verl: dict[str, Any] = {"family": PEER, "why_not": needs_gpu(world)}
    if "verl-tp" in given.peers:
        row("verl", PLAIN, _verl, *both, **of_verl)
        row(f"verl{FORWARD}", PLAIN, _verl, **of_verl)
    rows: list[tuple[str, Any, str, tuple[str, ...]]] = [  # name, kind, entropy, upstream gradients
        (f"entropy{FORWARD}", PLAIN, "detached", ()),
        ("log-probability", PLAIN, "none", both[:1]),
        ("entropy", PLAIN, "detached", both[:1]),
        ("entropy with gradient", PLAIN, "differentiable", both),
        (PER_TOKEN, PER_TOKEN, "differentiable", both),
        (ACTIVE, ACTIVE, "none", ("of_active",)),
        *((f"{K} labels", K, "none", (f"of_{K}_ids",)) for K in LABELS if cell.vocab >= K),
    ]
    for strategy, (name, kind, entropy, of) in product(given.strategies, rows):
        row(f"{name}, {strategy}", kind, partial(_ours, strategy, kind, entropy), *of)
    return found


OP = Op(Rl, cases_of, (bare(PRODUCT, 1), bare(GEMMS, 3)))
