"""What log-probabilities for RL cost: beside verl's kernel, of K ids a token, where tokens need nothing.

`python -m scripts.bench --preset rl`; checks and times: rows.py.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.rl import masked_token_log_probs, token_log_probs
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.peers import one_line, verl_linear_cross_entropy
from megatron_fused_ce.scripts.bench.problem import Problem
from megatron_fused_ce.scripts.bench.rows import Case, Mark, Outputs, Subject
from megatron_fused_ce.scripts.bench.variants import config_of

TEMPERATURE = 0.7
KEPT, LABELS = (16, 512), (64, 1024)
#: Of the upstream gradients that are not 0.
SHARES = (0.2, 1.0)
PRODUCT, VERL, FORWARD = "product", "verl", ", forward only"
#: Tokens of a block of the bare product: its logits are not kept.
PRODUCT_TOKENS = 8192


class Inputs:
    """What a problem of RL has beside its operands; random, nothing in it repeats."""

    def __init__(self, problem: Problem, vocab: int) -> None:
        T, device = problem.num_tokens, problem.labels.device
        generator = torch.Generator(device=device).manual_seed(5)
        self.temperatures = 0.5 + torch.rand(1, T, generator=generator, device=device)
        self.of_log_prob = torch.randn(T, generator=generator, device=device)
        self.of_entropy = 0.1 * torch.randn(T, generator=generator, device=device)
        self._order = torch.randperm(vocab, generator=generator, device=device)
        self._start = torch.randint(vocab, (T, 1), generator=generator, device=device)
        self._kept: dict[int, Tensor] = {}
        chance = torch.rand(T, generator=generator, device=device)
        self.active = chance < 0.5
        self.of_active = self.of_log_prob * self.active
        for share in SHARES:
            setattr(self, f"of_share_{share}", self.of_log_prob * (chance < share))
        for count in LABELS:
            weights = torch.randn(T, count, generator=generator, device=device)
            setattr(self, f"of_{count}_ids", weights)

    def kept(self, count: int) -> Tensor:
        """``[T, count]`` ids, different ones for a token."""
        if count not in self._kept:
            places = self._start + torch.arange(count, device=self._start.device)
            self._kept[count] = self._order[places % len(self._order)]
        return self._kept[count]


class Kind(NamedTuple):
    """What the definition has to know of a row."""

    per_token: bool = False  # its temperature
    kept: int = 0  # ids that sampling kept
    num_ids: int = 0  # whose log-probabilities are asked for; 0: the label's
    masked: bool = False  # tokens outside ``active`` give 0


PLAIN = Kind()


def plain(
    kind: Kind, hidden: Tensor, weight: Tensor, problem: Problem, inputs: Inputs, tokens: Tensor
) -> Outputs:
    z = hidden @ weight.t()
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z / (inputs.temperatures[0, tokens, None].to(z.dtype) if kind.per_token else TEMPERATURE)
    labels = problem.labels[tokens, None]
    if kind.kept:
        z, labels = z.gather(1, inputs.kept(kind.kept)[tokens]), torch.zeros_like(labels)
    if kind.num_ids:
        labels = inputs.kept(kind.num_ids)[tokens]
    log_p = z.log_softmax(-1)
    log_prob = log_p.gather(1, labels)
    if kind.masked:
        log_prob = log_prob.where(inputs.active[tokens, None], 0.0)
    if kind.num_ids:
        return {"log_prob": log_prob}
    return {"log_prob": log_prob[:, 0], "entropy": -(log_p.exp() * log_p).sum(-1)}


def _product(problem: Problem, inputs: Inputs, mark: Mark) -> None:
    T, V = problem.num_tokens, problem.num_rows
    size = min(T, PRODUCT_TOKENS)
    out = problem.hidden.new_empty(size, V)
    for start in range(0, T, size):
        part = problem.hidden[start : start + size]
        torch.mm(part, problem.weight.t(), out=out[: len(part)])
    mark()


def _ours(
    strategy: str,
    problem: Problem,
    inputs: Inputs,
    *,
    entropy: str = "none",
    kind: Kind = PLAIN,
    **of_config: Any,
) -> Outputs:
    labels = problem.labels
    options: dict[str, Any] = {"temperature": TEMPERATURE, "entropy": entropy}
    if kind.num_ids:
        labels = inputs.kept(kind.num_ids)
    if kind.masked:
        options["active_mask"] = inputs.active
    if kind.per_token:
        options["temperature"] = inputs.temperatures[0]
    made = token_log_probs(
        problem.hidden,
        problem.weight,
        labels,
        **options,
        config=config_of(strategy, **of_config),
    )
    found = {"log_prob": made.log_prob}
    return found if made.entropy is None else found | {"entropy": made.entropy}


def _masked(count: int, problem: Problem, inputs: Inputs) -> Outputs:
    kept = inputs.kept(count)
    made = masked_token_log_probs(
        problem.hidden.unsqueeze(1),
        problem.weight,
        kept[:, 0].unsqueeze(0),
        kept.flatten(),
        torch.arange(len(kept) + 1, device=kept.device) * count,
        temperature=TEMPERATURE,
        entropy="differentiable",
    )
    assert made.entropy is not None
    return {"log_prob": made.log_prob.flatten(), "entropy": made.entropy.flatten()}


def _verl(problem: Problem, inputs: Inputs) -> Outputs:
    function: Any = verl_linear_cross_entropy()
    found = function(problem.hidden, problem.weight, problem.labels, TEMPERATURE, "none", None)
    return dict(zip(("log_prob", "entropy"), found, strict=True))


def _without_verl() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    try:
        verl_linear_cross_entropy()
    except Exception as error:  # whatever a foreign library raises at import
        return one_line(error)
    return None


def cases_of(given: argparse.Namespace, cell: Cell) -> list[Case]:
    """Strategy ``auto`` within ``--memory-mb``."""
    why_not = _without_verl()
    one, both = (("log_prob", "of_log_prob"),), (("log_prob", "of_log_prob"), ("entropy", "of_entropy"))
    over = {"over_verl": VERL}

    def ours(name: str, strategy: str, grads: Any = one, kind: Kind = PLAIN, **more: Any) -> Case:
        compared = more.pop("over", over)
        if strategy == "auto":
            more["memory_mb"] = given.memory_mb
        made = partial(_ours, strategy, kind=kind, **more)
        return Case(name, made, kind, grads, over=compared)

    first = given.strategies[0]
    forward = {"over_verl": VERL + FORWARD}
    found = [
        Case(PRODUCT, is_ours=False, products=_product),
        Case(VERL, _verl, PLAIN, both, is_ours=False, why_not=why_not, over=over),
        Case(VERL + FORWARD, _verl, PLAIN, is_ours=False, why_not=why_not, over=forward),
        ours("entropy" + FORWARD, first, (), entropy="detached", over=forward),
    ]
    for name in given.strategies:
        found += [
            ours(f"log-probability, {name}", name),
            ours(f"entropy, {name}", name, entropy="detached"),
            ours(f"entropy with gradient, {name}", name, both, entropy="differentiable"),
        ]
    per_token = Kind(per_token=True)
    found.append(ours(f"temperature per token, {first}", first, both, per_token, entropy="differentiable"))
    whole = {"over_log_prob": f"log-probability, {first}"}
    for count, name in product((K for K in LABELS if cell.vocab >= K), given.strategies):
        grads, kind = (("log_prob", f"of_{count}_ids"),), Kind(num_ids=count)
        case = ours(f"{count} labels, {name}", name, grads, kind, over=over | whole)
        found.append(case)
    grads, kind = (("log_prob", "of_active"),), Kind(masked=True)
    found.append(ours(f"half of the tokens active, {first}", first, grads, kind, over=over | whole))
    for share in SHARES:
        grads = (("log_prob", f"of_share_{share}"),)
        name = f"upstream of {share:.0%} of the tokens, {first}"
        found.append(ours(name, first, grads, over=over | whole, skip_zero_upstream=True))
    for count in (K for K in KEPT if cell.vocab >= K):
        found.append(Case(f"{count} kept ids", partial(_masked, count), Kind(kept=count), both, over=over))
    return found


SUBJECT = Subject(
    "Log-probabilities for RL", PRODUCT, cases_of, lambda problem, cell: Inputs(problem, cell.vocab), plain
)
