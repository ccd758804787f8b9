"""A table of losses with their plain definitions, and one comparison of a head with fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import (
    FusedCEConfig,
    fused_linear_loss,
    fused_linear_token_outputs,
    fused_linear_topk_distillation,
    losses,
)
from megatron_fused_ce.losses.outputs import OUTPUTS, differentiable_of
from megatron_fused_ce.losses.terms import Pull, Rows, Scaled, Sum, Term
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import (
    FLOOR,
    HeadInputs,
    HeadResult,
    logits_of,
    make_inputs,
    make_teacher,
    plain_distillation,
    plain_head,
    plain_outputs,
    relative_error,
)
from tests.support.op import Parts, shard_of, strategy_in_place, whole
from tests.support.ranks import Rank

#: Options of the loss beyond the plain one, for a vocabulary of 97 or more.
LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing": 0.1},
    "smoothing as PyTorch": {"label_smoothing": 0.1, "label_smoothing_form": "pytorch"},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"logit_softcap": 5.0},
    "ignored": {"ignore_index": -100},
    "masked padding": {"true_vocab_size": 53},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "logit_softcap": 30.0}
    | {"ignore_index": -1, "true_vocab_size": 45},
}


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


@dataclass(frozen=True)
class Unlikelihood(Term):
    """``-sum log(1 - p)`` of the labels behind the first one."""

    gives = ("at_labels",)

    def value(self, rows: Rows) -> Tensor:
        return -torch.log(-torch.expm1(rows.log_probs[1:])).sum(0)

    def pull(self, rows: Rows, upstream: Tensor | float) -> Pull:
        at = rows.log_probs.exp() / torch.expm1(rows.log_probs)
        at[0] = 0.0
        return Pull(at_labels=at * upstream)


class OddShapes(losses.Uniform):
    """Coefficients of one entry for all tokens, which kernels do not read."""

    def pull(self, rows: Rows, upstream: Tensor | float) -> Pull:
        if isinstance(upstream, Tensor):
            return super().pull(rows, upstream)
        one = torch.full((1,), upstream, dtype=torch.float32, device=rows.lse.device)
        return Pull(alpha=one, delta=(one / rows.num_classes).expand(rows.lse.shape))


#: The names of their parts.
GRADIENTS = ("grad_hidden", "grad_weight")
CE, ENTROPY = losses.CrossEntropy(), losses.Entropy()


def true_value(term: Term, z: Tensor, labels: Tensor) -> Tensor:
    """``[T]``, or ``[K, T]``, by the plain definition, in the dtype of the logits ``[T, V]``. ``labels``:
    ``[T]`` or ``[T, K]``."""
    several = labels.t() if labels.dim() == 2 else labels.unsqueeze(0)
    lse, in_vocab = z.logsumexp(-1), (several >= 0) & (several < z.shape[-1])
    of_label = z.gather(-1, several.where(in_vocab, 0).t()).t()
    # A label of no class counts from the row's maximum, which is then a constant.
    each = torch.where(in_vocab, of_label, z.detach().amax(-1)) - lse
    if labels.dim() == 2:
        each = each.masked_fill(several == -1, -torch.inf)
    loss, known, log_p = -each[0], in_vocab[0], z.log_softmax(-1)
    simple = {
        losses.CrossEntropy: lambda _: loss,
        losses.LogProb: lambda _: -loss,
        losses.LogProbs: lambda _: each,
        Unlikelihood: lambda _: -torch.log(-torch.expm1(each[1:])).sum(0),
        losses.Lse: lambda _: lse,
        losses.ZLoss: lambda of: of.weight * lse**2,
        losses.Uniform: lambda _: lse - z.mean(-1),
        losses.Entropy: lambda _: -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1),
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


@dataclass(frozen=True)
class Loss:
    """How a head is asked for a loss and for outputs beside it, and their plain definition."""

    options: dict[str, Any] = field(default_factory=dict)  # of FusedCEConfig
    beside: tuple[str, ...] = ()  # of fused_linear_token_outputs
    entries: int = 0  # of a teacher's targets, in the labels' place
    terms: dict[str, Term] | None = None  # of fused_linear_loss
    num_labels: int = 0  # of a token, of fused_linear_loss; 0 for one
    temperatures: bool = False  # one of each token: log-probability and entropy, of token_log_probs
    differentiable: bool = True  # what is beside the loss

    @property
    def with_gradient(self) -> list[str]:
        """Outputs that may have an upstream gradient."""
        if self.terms is not None:
            return [name for name, term in self.terms.items() if term.gives]
        if self.temperatures:
            return ["log_prob", "entropy"]
        return ["loss", *(differentiable_of(self.beside) if self.differentiable else ())]

    def ask(self, hidden: Tensor, weight: Tensor, inputs: HeadInputs, **call: Any) -> Parts:
        if self.terms is not None:
            return fused_linear_loss(hidden, weight, self.labels(inputs), self.terms, **call)
        if self.entries:
            targets = make_teacher(inputs, self.entries)
            return {"loss": fused_linear_topk_distillation(hidden, weight, *targets, **call)}
        if self.temperatures:
            call.setdefault("temperature", 1.0 if inputs.temperature is None else inputs.temperature)
            call["entropy"] = "differentiable"
            return token_log_probs(hidden, weight, inputs.labels, **call)._asdict()
        call["differentiable"] = self.differentiable
        made = fused_linear_token_outputs(hidden, weight, inputs.labels, self.beside, **call)
        assert {name for name in OUTPUTS if getattr(made, name) is not None} == set(self.beside)
        assert all(getattr(made, name).requires_grad == (name in self.with_gradient) for name in self.beside)
        return {name: getattr(made, name) for name in ("loss", *self.beside)}

    def labels(self, inputs: HeadInputs) -> Tensor:
        """``[b, s]`` or ``[b, s, K]``: others behind the first, one of them twice."""
        if not self.num_labels:
            return inputs.labels
        known = inputs.labels.abs() % (inputs.config.true_vocab_size or len(inputs.weight))
        others = [known * (7 + k) % len(inputs.weight) for k in range(2, self.num_labels)]
        return torch.stack((inputs.labels, *others, others[0]), -1)

    def plain(self, inputs: HeadInputs, upstreams: Parts, dtype: torch.dtype, roundings: Any = None) -> Parts:
        """Outputs ``[b, s]`` and both gradients, by autograd in ``dtype``; of terms without roundings."""
        if self.terms is not None:
            return self._plain_terms(inputs, upstreams, dtype)
        nothing = torch.zeros_like(inputs.grad_loss)
        inputs = replace(inputs, grad_loss=upstreams.get("loss", nothing))
        if self.entries:
            return plain_distillation(inputs, *make_teacher(inputs, self.entries), dtype, roundings)._asdict()
        made = {} if self.temperatures else plain_head(inputs, dtype, roundings)._asdict()
        if self.temperatures or self.beside:
            of_others = {name: of for name, of in upstreams.items() if name != "loss"} or {"lse": nothing}
            outputs, *grads = plain_outputs(inputs, of_others, dtype, roundings)
            beside = self.beside or ("log_prob", "entropy")
            made |= {name: getattr(outputs, name) for name in beside}
            for name, grad in zip(GRADIENTS, grads, strict=True):
                made[name] = made[name].double() + grad if name in made else grad
        return made

    def _plain_terms(self, inputs: HeadInputs, upstreams: Parts, dtype: torch.dtype) -> Parts:
        hidden, weight, z = logits_of(inputs, dtype)
        labels, made = self.labels(inputs).transpose(0, 1).flatten(0, 1), {}
        for name, term in self.terms.items():
            value = true_value(term, z.flatten(0, 1), labels)
            value = value.view(-1, *hidden.shape[:2]).permute(2, 1, 0)
            made[name] = value if term.per_label else value[..., 0]
            if inputs.config.ignore_index is not None and term.of_label:
                made[name] = made[name].masked_fill(inputs.labels == inputs.config.ignore_index, 0.0)
        given = [of.to(made[name].dtype) for name, of in upstreams.items()]
        grads = torch.autograd.grad([made[name] for name in upstreams], (hidden, weight), given)
        made = {name: value.detach() for name, value in made.items()}
        return made | dict(zip(GRADIENTS, grads, strict=True))


#: Every way to be asked for a loss.
TABLE: dict[str, Loss] = {
    "plain": Loss(),
    **{name: Loss(options) for name, options in LOSS_OPTIONS.items()},
    "every output": Loss(beside=tuple(OUTPUTS)),
    "every output, fixed": Loss(beside=tuple(OUTPUTS), differentiable=False),
    "entropy, softcap, fixed": Loss(LOSS_OPTIONS["softcap"], ("lse", "entropy"), differentiable=False),
    "temperatures": Loss({"logit_softcap": 5.0, "true_vocab_size": 53}, temperatures=True),
    "log_prob, softcap": Loss(LOSS_OPTIONS["softcap"], ("log_prob",)),
    "lse, padding": Loss(LOSS_OPTIONS["masked padding"], ("lse",)),
    "entropy, padding": Loss(LOSS_OPTIONS["masked padding"], ("entropy",)),
    "outputs, smoothing, z-loss": Loss(
        {"label_smoothing": 0.1, "z_loss": 1e-2}, ("log_prob", "lse", "entropy")
    ),
    "outputs, softcap": Loss(LOSS_OPTIONS["softcap"], ("lse", "entropy", "predicted")),
    "one entry": Loss(entries=1),
    "5 entries": Loss(entries=5),
    "64 entries, z-loss": Loss(LOSS_OPTIONS["z-loss"], entries=64),
    "3 entries, softcap": Loss(LOSS_OPTIONS["softcap"], entries=3),
    "5 entries, padding": Loss(LOSS_OPTIONS["masked padding"], entries=5),
    "terms: z-loss": Loss(terms={"loss": CE + losses.ZLoss(1e-2), "p": losses.LogProb(), "entropy": ENTROPY}),
    "terms: smoothing": Loss(terms={"loss": 0.9 * CE + 0.1 * losses.Uniform(), "best": losses.Predicted()}),
    "terms: entropy bonus": Loss(terms={"loss": CE - 0.1 * ENTROPY, "log_prob": -2.0 * CE}),
    "terms: all outputs": Loss(terms={"a": CE, "b": losses.LogProb(), "c": losses.Lse(), "d": ENTROPY}),
    "terms: odd shapes": Loss(terms={"loss": OddShapes()}),
    "terms: no label": Loss(terms={"lse": losses.Lse() + losses.ZLoss(1e-2)}),
    "terms: users' own": Loss(
        terms={"loss": Focal(2.0), "height": MeanSquare(), "both": Focal(1.5) + MeanSquare()}
    ),
    "terms: odd shapes, several labels": Loss(terms={"loss": OddShapes() + Unlikelihood()}, num_labels=4),
    "terms: several labels": Loss(
        terms={"loss": Focal(2.0) + 0.5 * Unlikelihood() + MeanSquare(), "each": losses.LogProbs()}
        | {"p": losses.LogProb(), "entropy": ENTROPY},
        num_labels=4,
    ),
    "terms: ignored": Loss(
        {"ignore_index": -100}, terms={"loss": Focal(2.0), "height": MeanSquare(), "p": losses.LogProb()}
    ),
    "terms: no label, ignored": Loss({"ignore_index": -100}, terms={"entropy": ENTROPY}),
}


def problem(
    kind: str,
    dtype: torch.dtype,
    device: torch.device | str,
    options: dict[str, Any] | None = None,
    **sizes: int,
) -> HeadInputs:
    """Inputs with these options, whose masked columns would win every softmax."""
    config = FusedCEConfig(**(options or {}))
    sizes = {"s": 23, "b": 3, "hidden_size": 48, "vocab": 331, **sizes}
    made = make_inputs(kind, **sizes, dtype=dtype, device=device, logit_scale=config.logit_scale)
    if config.true_vocab_size is not None:
        made.weight[config.true_vocab_size :] *= 50
    return replace(made, config=config)


# --- the comparison --------------------------------------------------------------------------

#: Draws of roundings: the first number, and more where the error is above what they allow.
DRAWS = (8, 64, 512)


def assert_within(
    made: Parts | HeadResult,
    exact: Parts | HeadResult,
    eager: Parts | HeadResult,
    dtype: torch.dtype,
    floors: dict[str, float] | None = None,
    drawn: Callable[[int], Parts] | None = None,
) -> float:
    """Every part within twice eager PyTorch's error or its floor, of the norm; gives the largest error over
    its bound.

    Args:
        floors: by name, where one is not the dtype's.
        drawn: the definition with its roundings moved at random, by a seed. Where a problem is so small that
            eager's error is luck, twice the largest error of some draws is allowed.
    """
    made, exact, eager = (of if isinstance(of, dict) else of._asdict() for of in (made, exact, eager))
    worst = 0.0
    for name, value in made.items():
        true = exact[name]
        assert value.shape == true.shape, f"{name} has shape {tuple(value.shape)}"
        error, of_eager = (relative_error(x, true) for x in (value, eager[name]))
        bound = max((floors or {}).get(name, FLOOR[dtype]), 2 * of_eager if of_eager < math.inf else 0.0)
        for seed in range(DRAWS[-1]) if drawn else ():
            if error <= bound and seed in (0, *DRAWS):
                break
            bound = max(bound, 2 * relative_error(drawn(seed)[name], true))
        if drawn and error > bound >= 1:  # zeros would pass: the roundings leave no digit
            assert value.isfinite().all()
            continue
        assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}, eager's {of_eager:.3e}"
        worst = max(worst, error / bound)
    return worst


def assert_close(result: HeadResult, inputs: HeadInputs) -> None:
    """`assert_within` of this problem."""
    dtype = inputs.hidden.dtype
    assert_within(result, plain_head(inputs, torch.float64), plain_head(inputs, dtype), dtype)


def compare(
    loss: Loss, inputs: HeadInputs, strategy: str, rank: Rank | None = None, sp: bool = False, **options: Any
) -> None:
    """One forward and its backwards, against fp64: of all outputs, of each alone, of all again."""
    hidden, weight, more = shard_of(rank, inputs, sp)
    dtype, device = hidden.dtype, hidden.device
    generator, largest = torch.Generator().manual_seed(5), inputs.grad_loss.abs().amax()
    upstreams = {}
    for name in loss.with_gradient:
        upstreams[name] = largest * torch.randn(inputs.labels.shape, generator=generator).to(device)
        if loss.terms is not None and loss.terms[name].per_label:
            of_labels = torch.linspace(-1, 1.5, loss.num_labels).to(device)
            upstreams[name] = upstreams[name].unsqueeze(-1) * of_labels
    every = list(upstreams)
    if strategy == "grad_in_forward":
        more["token_weights"] = upstreams[every[0]] / 1.5
    with strategy_in_place(strategy) as named:
        own = {"chunk_tokens": 20, "ignore_index": None, **loss.options, **options}
        inputs = replace(inputs, config=FusedCEConfig(named, **own))
        made = loss.ask(hidden, weight, inputs, config=inputs.config, **more)
    results = []
    for subset in [every, *([name] for name in every if len(every) > 1), every]:
        given = [made[name] for name in subset], (hidden, weight), [upstreams[name] for name in subset]
        grads = torch.autograd.grad(*given, retain_graph=True)
        results.append(whole(rank, sp, dict(zip(GRADIENTS, grads, strict=True))))
        of_subset = {name: upstreams[name] for name in subset}
        exact, eager = (loss.plain(inputs, of_subset, of) for of in (torch.float64, dtype))
        assert_within(results[-1], exact, eager, dtype)
    if strategy != "grad_in_forward":  # whose second backward makes them again
        assert all(torch.equal(results[0][name], results[-1][name]) for name in GRADIENTS)
    if inputs.config.true_vocab_size is not None:
        assert not results[0]["grad_weight"][inputs.config.true_vocab_size :].any()
    if inputs.config.ignore_index is not None and "loss" in made:
        assert not made["loss"][inputs.labels == inputs.config.ignore_index].any()
    assert {*made, *GRADIENTS} == {*exact}
    for name, value in whole(rank, sp, made).items():
        _assert_output(name, value, exact, eager, inputs)


def _assert_output(name: str, value: Tensor, exact: Parts, eager: Parts, inputs: HeadInputs) -> None:
    """Of the norm; of ``lse``, ``log_prob`` and ``entropy``, whose errors are all those of logits, also the
    largest, of the largest ``lse``."""
    true, dtype = exact[name], inputs.hidden.dtype
    if name in ("predicted", "correct"):
        return _assert_ranks(name, value, inputs)
    if name in ("log_prob", "lse", "entropy") and "lse" in exact:
        largest = max(1.0, float(exact["lse"].abs().max()))
        error, of_eager = (float((x.double() - true).abs().max()) for x in (value, eager[name]))
        assert error <= max(2 * of_eager, FLOOR[dtype] * largest), (name, error, of_eager)
    assert value.dtype == (torch.float32 if true.is_floating_point() else torch.int64)
    none = true.isinf()  # the log-probability of an empty entry
    assert torch.equal(value[none].double(), true[none])
    made, right, rough = ({name: of[~none]} for of in (value, true, eager[name]))
    assert_within(made, right, rough, dtype)


def _assert_ranks(name: str, value: Tensor, inputs: HeadInputs) -> None:
    """Which logit is the largest, where rounding cannot change that."""
    z = logits_of(inputs, torch.float64)[2].detach().transpose(0, 1)
    # Two logits rounded by half a unit each can change places; and fp32's own sums of products.
    below = z.amax(-1, keepdim=True) - z
    ties = below <= (torch.finfo(inputs.hidden.dtype).eps + 2e-6) * z.abs().amax(-1, keepdim=True)
    if name == "predicted":
        assert value.dtype == torch.int64 and ties.gather(-1, value.unsqueeze(-1)).all()
    else:
        known = (inputs.labels >= 0) & (inputs.labels < z.shape[-1])
        at_label = ties.gather(-1, inputs.labels.where(known, 0).unsqueeze(-1)).squeeze(-1) & known
        assert value.dtype == torch.bool and not value[~at_label].any()
        assert value[at_label & (ties.sum(-1) == 1)].all()
