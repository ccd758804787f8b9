"""Losses as sums of terms: a table of them, their plain definitions, and one comparison with fp64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, fused_linear_loss, losses
from megatron_fused_ce.losses import Pull, Rows, Scaled, Sum, Term
from megatron_fused_ce.scripts.lib.reference import FLOOR, HeadInputs, relative_error


@dataclass(frozen=True)
class Focal(Term):
    """``(1 - p_y)**gamma * -log p_y``."""

    gamma: float
    gives = ("at",)

    def value(self, rows: Rows) -> Tensor:
        return rows.one_minus_p**self.gamma * rows.loss

    def pull(self, rows: Rows, upstream: Tensor | float) -> Pull:
        q = rows.one_minus_p
        slope = q**self.gamma + self.gamma * q ** (self.gamma - 1) * (1 - q) * rows.loss
        return Pull(at=slope * upstream)


@dataclass(frozen=True)
class MeanSquare(Term):
    """``(log sum exp s - mean s)**2``: a statistic that the backward reads, a delta for each token."""

    needs = ("logit_sum",)
    gives = ("alpha", "delta")
    of_label = False

    def _height(self, rows: Rows) -> Tensor:
        return rows.lse - rows.extra.logit_sum / rows.num_classes

    def value(self, rows: Rows) -> Tensor:
        return self._height(rows) ** 2

    def pull(self, rows: Rows, upstream: Tensor | float) -> Pull:
        slope = 2 * self._height(rows) * upstream
        return Pull(alpha=slope, delta=slope / rows.num_classes)


class OddShapes(losses.Uniform):
    """Coefficients of one entry for all tokens, which kernels do not read."""

    def pull(self, rows: Rows, upstream: Tensor | float) -> Pull:
        if isinstance(upstream, Tensor):
            return super().pull(rows, upstream)
        one = torch.full((1,), upstream, dtype=torch.float32, device=rows.lse.device)
        return Pull(alpha=one, delta=(one / rows.num_classes).expand(rows.lse.shape))


CE, ENTROPY = losses.CrossEntropy(), losses.Entropy()
#: Name -> outputs, the loss first.
LOSSES: dict[str, dict[str, Term]] = {
    "plain": {"loss": CE},
    "z-loss": {"loss": CE + losses.ZLoss(1e-2), "p": losses.LogProb(), "entropy": ENTROPY},
    "smoothing": {"loss": 0.9 * CE + 0.1 * losses.Uniform(), "best": losses.Predicted()},
    "entropy bonus": {"loss": CE - 0.1 * ENTROPY, "log_prob": -2.0 * CE},
    "all outputs": {
        "a": CE,
        "b": losses.LogProb(),
        "c": losses.Lse(),
        "d": ENTROPY,
        "e": losses.SumSquares(),
    },
    "odd shapes": {"loss": OddShapes()},
    "no label": {"lse": losses.Lse() + losses.ZLoss(1e-2)},
    "users' own": {"loss": Focal(2.0), "height": MeanSquare(), "both": Focal(1.5) + MeanSquare()},
}


def true_value(term: Term, z: Tensor, labels: Tensor) -> Tensor:
    """``[T]`` by the plain definition, in the dtype of the logits ``[T, V]``."""
    lse, known = z.logsumexp(-1), (labels >= 0) & (labels < z.shape[-1])
    of_label = z.gather(-1, labels.where(known, 0).unsqueeze(-1)).squeeze(-1)
    # A label of no class counts from the row's maximum, which is then a constant.
    loss = lse - torch.where(known, of_label, z.detach().amax(-1))
    log_p = z.log_softmax(-1)
    simple = {
        losses.CrossEntropy: lambda _: loss,
        losses.LogProb: lambda _: -loss,
        losses.Lse: lambda _: lse,
        losses.ZLoss: lambda of: of.weight * lse**2,
        losses.Uniform: lambda _: lse - z.mean(-1),
        losses.Entropy: lambda _: -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1),
        losses.SumSquares: lambda _: log_p.exp().square().sum(-1),
        losses.Predicted: lambda _: z.argmax(-1),
        OddShapes: lambda _: lse - z.mean(-1),
        Focal: lambda of: (-torch.expm1(-loss)).where(known, 1.0) ** of.gamma * loss,
        MeanSquare: lambda _: (lse - z.mean(-1)) ** 2,
    }
    if isinstance(term, Sum):
        return sum(true_value(each, z, labels) for each in term.terms)
    if isinstance(term, Scaled):
        return term.factor * true_value(term.term, z, labels)
    return simple[type(term)](term)


def _plain(inputs: HeadInputs, terms: dict[str, Term], upstreams: list[Tensor], dtype: torch.dtype) -> list:
    """The outputs ``[b, s]`` and, of each set of upstream gradients, both gradients."""
    hidden, weight = (x.to(dtype).requires_grad_() for x in (inputs.hidden, inputs.weight))
    z = (hidden @ weight.t()).to(torch.promote_types(dtype, torch.float32)).flatten(0, 1)
    labels = inputs.labels.t().flatten()
    values = {name: true_value(term, z, labels).view(hidden.shape[:2]).t() for name, term in terms.items()}
    grads = []
    for subset in _subsets(terms):
        of = [upstreams[list(terms).index(name)].to(values[name].dtype) for name in subset]
        grads.append(
            torch.autograd.grad([values[name] for name in subset], (hidden, weight), of, retain_graph=True)
        )
    return [*(value.detach() for value in values.values()), *itertools.chain(*grads)]


def _subsets(terms: dict[str, Term]) -> list[list[str]]:
    """All outputs with a gradient; the first; the others, where there are any."""
    every = [name for name, term in terms.items() if term.gives]
    return [subset for subset in (every, every[:1], every[1:]) if subset]


def compare(
    terms: dict[str, Term],
    inputs: HeadInputs,
    strategy: str,
    operands: tuple[Tensor, Tensor] | None = None,
    whole: Any = lambda grad_hidden, grad_weight: (grad_hidden, grad_weight),
    group: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """One forward, backwards for subsets of its outputs with random upstream gradients, against fp64.

    ``operands``, ``whole`` and ``group``: of a rank: its leaves, their gradients' whole, the op's arguments.
    """
    generator = torch.Generator().manual_seed(1)
    upstreams = [
        torch.randn(inputs.labels.shape, generator=generator).to(inputs.hidden.device) for _ in terms
    ]
    hidden, weight = operands or (x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
    config = FusedCEConfig(strategy=strategy, chunk_tokens=20, **options)
    weights = {"token_weights": upstreams[0] / 1.5} if strategy == "grad_in_forward" else {}
    made = fused_linear_loss(hidden, weight, inputs.labels, terms, config=config, **weights, **(group or {}))
    assert list(made) == list(terms)
    found = [value.detach() for value in made.values()]
    for subset in _subsets(terms):
        of = [upstreams[list(terms).index(name)] for name in subset]
        grads = torch.autograd.grad([made[name] for name in subset], (hidden, weight), of, retain_graph=True)
        found += whole(*grads)
    dtype = inputs.hidden.dtype
    exact, eager = (_plain(inputs, terms, upstreams, of) for of in (torch.float64, dtype))
    for value, true, plain in zip(found, exact, eager, strict=True):
        assert value.shape == true.shape
        assert relative_error(value, true) <= max(FLOOR[dtype], 2 * relative_error(plain, true))
