"""What log-probabilities for RL cost: beside verl's kernel, of K ids a token, where tokens need nothing."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.loss import config_of, wide
from megatron_fused_ce.scripts.bench.op import PEER, Case, Op, bare, why_not
from megatron_fused_ce.scripts.bench.peers import PEERS
from megatron_fused_ce.scripts.bench.problem import Outputs, Problem, World

TEMPERATURE = 0.7
LABELS = (64, 1024)
PRODUCT, GEMMS, VERL, FORWARD = "product", "three GEMMs", "verl", ", forward only"


class Kind(NamedTuple):
    """What the definition has to know of a row."""

    per_token: bool = False  # its temperature
    num_ids: int = 0  # whose log-probabilities are asked for; 0: the label's
    masked: bool = False  # tokens outside ``active`` give 0


PLAIN = Kind()


class Rl(Problem):
    """Beside the operands temperatures, ids and upstream gradients; random, nothing in it repeats."""

    def __init__(self, cell: Cell, world: World, **options: Any) -> None:
        super().__init__(cell, world, **options)
        T, vocab, device = self.num_tokens, cell.vocab, world.device
        self.temperatures = 0.5 + self.uniform(1, T)
        self.of_log_prob, self.of_entropy = self.normal(T), 0.1 * self.normal(T)
        self._order = torch.randperm(vocab, generator=self._generator, device=device)
        self._start = self.ids(T, 1)
        self._ids: dict[int, Tensor] = {}
        self.active = self.uniform(T) < 0.5
        self.of_active = self.of_log_prob * self.active
        for count in LABELS:
            setattr(self, f"of_{count}_ids", self.normal(T, count))

    def ids_of(self, count: int) -> Tensor:
        """``[T, count]`` ids, different ones for a token."""
        if count not in self._ids:
            places = self._start + torch.arange(count, device=self._start.device)
            self._ids[count] = self._order[places % len(self._order)]
        return self._ids[count]

    def grad_logits(self, part: slice) -> Tensor:
        """Of log-probabilities alone, for the bare products."""
        z = wide(self.all_hidden[part] @ self.weight.t()) / TEMPERATURE
        p = z.softmax(-1).div_(-TEMPERATURE)
        p.scatter_add_(1, self.labels[part, None], torch.full_like(p[:, :1], 1 / TEMPERATURE))
        return p * self.of_log_prob[part, None]

    def definition(self, kind: Kind, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        z = wide(hidden @ weight.t())
        z = z / (self.temperatures[0, part, None].to(z.dtype) if kind.per_token else TEMPERATURE)
        labels = self.ids_of(kind.num_ids)[part] if kind.num_ids else self.labels[part, None]
        log_p = z.log_softmax(-1)
        log_prob = log_p.gather(1, labels)
        if kind.masked:
            log_prob = log_prob.where(self.active[part, None], 0.0)
        if kind.num_ids:
            return {"log_prob": log_prob}
        return {"log_prob": log_prob[:, 0], "entropy": -(log_p.exp() * log_p).sum(-1)}


def _ours(strategy: str, kind: Kind, options: dict[str, Any], problem: Rl) -> Outputs:
    of_config = {name: value for name, value in options.items() if name != "entropy"}
    made = token_log_probs(
        problem.hidden,
        problem.weight,
        problem.ids_of(kind.num_ids) if kind.num_ids else problem.labels,
        temperature=problem.temperatures[0] if kind.per_token else TEMPERATURE,
        entropy=options.get("entropy", "none"),
        active_mask=problem.active if kind.masked else None,
        config=config_of(strategy, **of_config),
    )
    return {name: value for name, value in made._asdict().items() if value is not None}


def _verl(problem: Rl) -> Outputs:
    function: Any = import_module(PEERS["verl-tp"].module).linear_cross_entropy
    found = function(problem.hidden, problem.weight, problem.labels, TEMPERATURE, "none", None)
    return dict(zip(("log_prob", "entropy"), found, strict=True))


#: Upstream gradients by what a row gives.
NONE, ONE = (), (("log_prob", "of_log_prob"),)
BOTH = (*ONE, ("entropy", "of_entropy"))
WITH, WITHOUT = {"entropy": "differentiable"}, {"entropy": "detached"}


def rows_of(vocab: int) -> list[tuple[str, Kind, Any, dict[str, Any]]]:
    """``(name, kind, upstream gradients, options)``; {}: of every strategy, {0}: of the first alone."""

    def of(upstream: str) -> Any:
        return (("log_prob", upstream),)

    return [
        (f"entropy{FORWARD}", PLAIN, NONE, WITHOUT),
        ("log-probability, {}", PLAIN, ONE, {}),
        ("entropy, {}", PLAIN, ONE, WITHOUT),
        ("entropy with gradient, {}", PLAIN, BOTH, WITH),
        ("temperature per token, {0}", Kind(per_token=True), BOTH, WITH),
        *((f"{K} labels, {{}}", Kind(num_ids=K), of(f"of_{K}_ids"), {}) for K in LABELS if vocab >= K),
        ("half of the tokens active, {0}", Kind(masked=True), of("of_active"), {}),
    ]


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    """Strategy ``auto`` within ``--memory-mb``."""
    no_verl = why_not(PEERS["verl-tp"].find) if world.on_gpu else "needs a CUDA device"
    first = given.strategies[0]

    def case(name: str, run: Any, kind: Kind, grads: Any, **more: Any) -> Case:
        over = {"over_verl": VERL + FORWARD * (not grads)}
        if kind.num_ids or kind.masked:
            over["over_log_prob"] = f"log-probability, {first}"
        base = GEMMS if grads else PRODUCT
        return Case(name, run=run, kind=kind, grads=grads, base=base, over=over, **more)

    of_verl: dict[str, Any] = {"family": PEER, "why_not": no_verl}
    found = [case(VERL + FORWARD * (not g), _verl, PLAIN, g, **of_verl) for g in (BOTH, NONE)]
    for name, kind, grads, options in rows_of(cell.vocab):
        for strategy in given.strategies if "{}" in name else [first]:
            budget = {"memory_mb": given.memory_mb} if strategy == "auto" else {}
            run = partial(_ours, strategy, kind, options | budget)
            found.append(case(name.format(strategy), run, kind, grads))
    return found


BASES = bare(PRODUCT, 1, backward=False), bare(GEMMS, 3)
OP = Op(Rl, cases_of, BASES, wgrad_accumulator="returned")
