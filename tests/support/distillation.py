"""A student beside its teacher over the whole vocabulary: problems, their definition, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce import DistillationOutputs, FusedCEConfig, fused_linear_distillation
from megatron_fused_ce.scripts.lib.reference import FLOOR

#: Divergences by name, with what a call takes for each.
KINDS: dict[str, dict[str, Any]] = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd"},
    "jsd 0.1": {"divergence": "jsd", "beta": 0.1},
    "jsd 0.9": {"divergence": "jsd", "beta": 0.9},
}
#: Error that is always allowed in fp32: of a loss, in nats, and of its own size, four roundings (one of 30
#: nats is 1e-6); of gradients, relative to them or to the terms in them that cancel (:func:`cancelling`).
NATS, OF_LOSS, OF_TERMS = 1e-6, 2.0**-22, 1e-6


@dataclass(frozen=True)
class DistillationProblem:
    """One problem over the whole vocabulary."""

    hidden: Tensor  # [s, b, H]
    weight: Tensor  # [V, H]
    teacher_hidden: Tensor  # [s, b, H_t]
    teacher_weight: Tensor  # [V_t, H_t]
    labels: Tensor  # [b, s]
    upstream: Tensor  # [b, s] fp32
    kind: str = "forward_kl"
    temperature: float = 1.0
    with_labels: bool = False
    label_weights: float | Tensor | None = None  # a number or [b, s]
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_logit_softcap: float | None = None
    true_vocab_size: int | None = None
    ignore_index: int | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.teacher_hidden, self.teacher_weight

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the op, beside the config."""
        return {
            **KINDS[self.kind],
            "temperature": self.temperature,
            "labels": self.labels if self.with_labels else None,
            "label_weights": self.label_weights,
            "teacher_logit_scale": self.teacher_logit_scale,
            "teacher_logit_softcap": self.teacher_logit_softcap,
        }

    def config(self, **others: Any) -> FusedCEConfig:
        names = "logit_scale", "logit_softcap", "true_vocab_size", "ignore_index"
        return FusedCEConfig(**{name: getattr(self, name) for name in names}, **others)


class DistillationResult(NamedTuple):
    """fp32 or wider, in the labels' shape, and the gradients."""

    outputs: DistillationOutputs
    grad_hidden: Tensor | None
    grad_weight: Tensor | None


def fused(problem: DistillationProblem, config: FusedCEConfig, **options: Any) -> DistillationResult:
    """The op on all of it, in one process; ``grad_in_forward`` is told what the upstream is 1.5 times of."""
    operands = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    if config.strategy == "grad_in_forward":
        options.setdefault("token_weights", problem.upstream / 1.5)
    options = {**problem.options, "entropy": "detached", "config": config, **options}
    made = fused_linear_distillation(*operands, *problem.operands[2:], **options)
    return _backward(problem, made, *operands)


def plain(problem: DistillationProblem, dtype: torch.dtype | None = None) -> DistillationResult:
    """The definition, by autograd: in ``dtype``, or as eager PyTorch has it, each side in its own dtype and
    all that follows the logits in fp32."""
    made, hidden, weight, _ = _plain(problem, dtype)
    return _backward(problem, made, hidden, weight)


def _backward(
    problem: DistillationProblem, made: DistillationOutputs, hidden: Tensor, weight: Tensor
) -> DistillationResult:
    made.loss.backward(problem.upstream.to(made.loss.dtype))
    return DistillationResult(in_outputs(made, Tensor.detach), hidden.grad, weight.grad)


def in_outputs(made: Any, change: Any) -> DistillationOutputs:
    return DistillationOutputs(*(None if each is None else change(each) for each in made))  # type: ignore[arg-type]


def cancelling(problem: DistillationProblem) -> list[tuple[Tensor, Tensor]]:
    """Gradients, in fp64, of the terms that cancel in those of the divergence: the teacher's ``p_t`` against
    the student's; and ``p_s`` times ``KL(p_s || m)``, which reverse_kl and jsd subtract from ``log p_s - log
    m``, as large for a class that the student is sure of.
    """
    found = []
    for term in range(1 if problem.kind == "forward_kl" else 2):
        _, hidden, weight, (z_s, z_t) = _plain(problem, torch.float64)
        log_s, log_t = z_s.detach().log_softmax(-1), z_t.log_softmax(-1)
        factors = log_t.exp()
        if term == 1:
            log_m = (
                log_t
                if problem.kind == "reverse_kl"
                else log_mixture(log_s, log_t, KINDS[problem.kind].get("beta", 0.5))
            )
            factors = log_s.exp() * expected(log_s, log_s - log_m).unsqueeze(-1)
        (factors * z_s).sum(-1).t().backward(problem.upstream.double())
        assert hidden.grad is not None and weight.grad is not None
        found.append((hidden.grad, weight.grad))
    return found


def _plain(
    problem: DistillationProblem, dtype: torch.dtype | None
) -> tuple[DistillationOutputs, Tensor, Tensor, tuple[Tensor, Tensor]]:
    hidden, weight, *of_teacher = (x.detach().to(dtype or x.dtype) for x in problem.operands)
    hidden.requires_grad_()
    weight.requires_grad_()
    t, labels = problem.temperature, problem.labels.t()

    def logits(hidden: Tensor, weight: Tensor, scale: float, cap: float | None) -> Tensor:
        z = hidden @ weight.t()
        z = scale * (z if dtype is not None else z.float())
        z = z if cap is None else cap * torch.tanh(z / cap)
        return z[..., : problem.true_vocab_size]

    at_1 = (
        logits(hidden, weight, problem.logit_scale, problem.logit_softcap),
        logits(*of_teacher, problem.teacher_logit_scale, problem.teacher_logit_softcap),
    )
    z_s, z_t = at_1[0] / t, at_1[1] / t
    log_s, log_t = z_s.log_softmax(-1), z_t.log_softmax(-1)
    loss = divergence = _divergence(log_s, log_t, **KINDS[problem.kind])
    index = problem.ignore_index
    ignored = labels == index if index is not None else torch.zeros_like(labels, dtype=torch.bool)
    cross_entropies: list[Tensor | None] = [None, None]
    if problem.with_labels:
        cross_entropies = [_cross_entropy(z, labels).masked_fill(ignored, 0.0) for z in at_1]
        if problem.label_weights is not None:
            weights = problem.label_weights
            loss = loss + (weights.t() if isinstance(weights, Tensor) else weights) * cross_entropies[0]
    counted = (x.masked_fill(ignored, 0.0) for x in (loss, divergence))
    made = in_outputs((*counted, *cross_entropies, -expected(log_s, log_s)), Tensor.t)
    return made, hidden, weight, (z_s, z_t)


def _divergence(log_s: Tensor, log_t: Tensor, divergence: str, beta: float = 0.5) -> Tensor:
    if divergence == "forward_kl":
        return expected(log_t, log_t - log_s)
    if divergence == "reverse_kl":
        return expected(log_s, log_s - log_t)
    log_m = log_mixture(log_s, log_t, beta)
    return beta * expected(log_t, log_t - log_m) + (1 - beta) * expected(log_s, log_s - log_m)


def log_mixture(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    of_student, of_teacher = (torch.tensor(x, dtype=log_s.dtype).log() for x in (1 - beta, beta))
    return torch.logaddexp(log_s + of_student, log_t + of_teacher)


def expected(log_p: Tensor, x: Tensor) -> Tensor:
    """``sum p x``, 0 where ``p`` is."""
    p = log_p.exp()
    return (p * x.masked_fill(p == 0, 0.0)).sum(-1)


def _cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    known = (labels >= 0) & (labels < z.shape[-1])
    picked = z.gather(-1, labels.where(known, 0).unsqueeze(-1)).squeeze(-1)
    return z.logsumexp(-1) - torch.where(known, picked, z.detach().amax(-1))


# --- the bounds --------------------------------------------------------------------------------


def assert_right(problem: DistillationProblem, made: DistillationResult) -> None:
    """Every part within the larger of twice eager PyTorch's error and the dtype's floor: of a loss the root
    of the mean square, in nats; of a gradient the norm."""
    exact, eager, terms = plain(problem, torch.float64), plain(problem), cancelling(problem)
    dtype, root = problem.hidden.dtype, problem.labels.numel() ** 0.5
    nats, of_terms = (NATS, OF_TERMS) if dtype == torch.float32 else (FLOOR[dtype], FLOOR[dtype])
    parts: dict[str, tuple[Any, ...]] = {}  # each made, exact, by eager, with its floor
    for name, *of in zip(DistillationOutputs._fields, made[0], exact[0], eager[0], strict=True):
        if of[0] is None:
            assert of[1] is None or name == "entropy", name
        else:
            parts[name] = *of, max(root * nats, OF_LOSS * float(of[1].norm()))  # type: ignore[union-attr]
    for at, name in enumerate(("grad_hidden", "grad_weight"), 1):
        if made[at] is not None:
            size = max(float(part.norm()) for part in (exact[at], *(term[at - 1] for term in terms)))
            parts[name] = made[at], exact[at], eager[at], of_terms * size
    for name, (value, true, yardstick, floor) in parts.items():
        assert value.shape == true.shape, f"{name} has shape {tuple(value.shape)}"
        error, of_eager = (float((x.double() - true).norm()) for x in (value, yardstick))
        assert error <= max(2 * of_eager, floor), f"{name}: error {error:.3e}, eager's {of_eager:.3e}"


# --- problems ----------------------------------------------------------------------------------

SURE, SURE_CLASSES = 0.999999, 4


def make_problem(
    values: str = "plain",
    *,
    s: int = 19,
    b: int = 3,
    sizes: tuple[int, int] = (24, 40),
    vocab: int = 331,
    padding: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    teacher_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **options: Any,
) -> DistillationProblem:
    """A problem of one of :data:`VALUES`, with a random upstream gradient per token, some of them 0.

    Args:
        sizes: ``H`` and ``H_t``; ``near`` takes ``H`` for both.
        padding: rows of large numbers behind the vocabulary, of student and teacher.
        options: fields of :class:`DistillationProblem`; ``label_weights="per token"`` has some of every sign.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size, of_teacher = sizes
    sides = [[normal(s, b, h), normal(vocab, h) / h**0.5] for h in (size, of_teacher)]
    classes = torch.randint(0, SURE_CLASSES, (2, s, b), generator=generator)
    places = torch.linspace(0, vocab - 1, SURE_CLASSES).long()  # over all shards
    if values == "near":
        sides[1] = [sides[0][0].clone(), sides[0][1] + 1e-3 * normal(vocab, size)]
    for side, (how, at) in zip(sides, VALUES[values], strict=True):
        if how == "sure":
            _make_sure(*side, classes[at], places, normal(side[0].shape[-1], SURE_CLASSES))
        elif how == "wide":
            side[1] *= 100  # logits spread over 300: most probabilities underflow in fp32
    upstream = normal(b, s)
    upstream.view(-1)[1::5] = 0.0
    labels = torch.randint(0, vocab, (b, s), generator=generator)
    labels[0] = places[classes[0, :, 0]]  # where a student may be sure
    if padding is not None:
        options["true_vocab_size"] = vocab
        for side, num_rows in zip(sides, padding, strict=True):
            side[1] = torch.cat((side[1], 30 * normal(num_rows, side[1].shape[1])))
    if options.get("label_weights") == "per token":
        options["label_weights"] = normal(b, s).to(device)
    if options.get("ignore_index") is not None:
        labels.view(-1)[::4] = options["ignore_index"]
    given = [x.to(device, dtype) for x in sides[0]]
    given += [x.to(device, teacher_dtype or dtype) for x in sides[1]]
    return replace(DistillationProblem(*given, labels.to(device), upstream.to(device)), **options)


#: Options of a call by name, for :func:`make_problem`.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "labels": {"with_labels": True},
    "a label weight": {"with_labels": True, "label_weights": 0.7},
    "label weights": {"with_labels": True, "label_weights": "per token", "ignore_index": -100},
    "scales": {"logit_scale": 0.5, "teacher_logit_scale": 1.5, "with_labels": True, "label_weights": 2.0},
    "softcaps": {
        **{"logit_softcap": 3.0, "teacher_logit_softcap": 2.0, "logit_scale": 2.0},
        **{"with_labels": True, "label_weights": 0.5},
    },
    "more padding": {"padding": (5, 21), "with_labels": True, "label_weights": 0.5},
    "less padding": {"padding": (13, 0)},
}


def _make_sure(hidden: Tensor, weight: Tensor, classes: Tensor, places: Tensor, directions: Tensor) -> None:
    """Of each token one of the classes in ``places`` at 0.999999, the others' logits of about 1/10: those
    classes have directions for themselves, and tokens differ in how far they go."""
    along = torch.linalg.qr(directions)[0].t()
    weight -= weight @ along.t() @ along
    weight[places] = along
    gap = float(torch.tensor(len(weight) * SURE / (1 - SURE)).log())
    sizes = gap * (1 + 0.2 * hidden[..., -1:].abs())
    hidden.mul_(0.1).add_(sizes * along[classes])


#: Of student and teacher: how their logits are, and which of two draws of classes they are sure of.
VALUES: dict[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "plain": (("", 0), ("", 0)),
    "near": (("", 0), ("", 0)),
    "sure student": (("sure", 0), ("", 0)),
    "sure teacher": (("", 0), ("sure", 0)),
    "both sure": (("sure", 0), ("sure", 0)),
    "sure of others": (("sure", 0), ("sure", 1)),
    "wide student": (("wide", 0), ("", 0)),
    "wide teacher": (("", 0), ("wide", 0)),
    "both wide": (("wide", 0), ("wide", 0)),
}


# --- confident sides: rows of given logits ------------------------------------------------------

#: Which class's logit is raised, of the student's largest, on each side; None: none.
CONFIDENT: dict[str, tuple[int | None, int | None]] = {
    "student": (0, None),
    "teacher": (None, 1),
    "one class": (0, 0),
    "two classes": (0, 1),
}
RAISED = 0, 8, 14, 20, 30, 60, 100
TEMPERATURES = 0.1, 1.0, 5.0


def confident(
    vocab: int,
    raised: float,
    sides: str,
    *,
    rows: int = 4,
    device: torch.device | str = "cpu",
    **options: Any,
) -> DistillationProblem:
    """Rows of logits, to the bit: one product of each is not 0, and ``grad_weight`` is their gradient."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, vocab, rows, generator=generator)
    classes = torch.stack((torch.arange(rows) * 7, vocab - 1 - torch.arange(rows) * 5))  # shards apart
    logits[:, classes, torch.arange(rows)] += 3.0
    for side, at in zip(logits, CONFIDENT[sides], strict=True):
        if at is not None:
            side[classes[at], torch.arange(rows)] += raised
    hidden = torch.eye(rows).view(rows, 1, rows).to(device)
    labels, ones = torch.zeros(1, rows, dtype=torch.int64), torch.ones(1, rows)
    student, teacher = logits.to(device)
    return DistillationProblem(
        hidden, student, hidden, teacher, labels.to(device), ones.to(device), **options
    )


def exact_rows(problem: DistillationProblem) -> Tensor:
    """The gradients of :func:`confident` rows ``[rows, V]`` in fp64, by formulas that lose nothing.

    Of the plain ones fp64 loses 2e-3 at 30, 1 at 40.
    """
    beta = KINDS[problem.kind].get("beta", 0.5)
    scales = problem.logit_scale, problem.teacher_logit_scale
    caps = problem.logit_softcap, problem.teacher_logit_softcap
    raw = [weight.t().double() for weight in (problem.weight, problem.teacher_weight)]
    slope = 1.0 if caps[0] is None else torch.cosh(raw[0] * scales[0] / caps[0]) ** -2
    s, t = (
        (scale * z if cap is None else cap * torch.tanh(scale * z / cap)) / problem.temperature
        for z, scale, cap in zip(raw, scales, caps, strict=True)
    )

    def log_p(z: Tensor) -> tuple[Tensor, Tensor]:
        largest, at = z.max(-1, keepdim=True)
        shifted = z - largest
        return shifted, shifted.exp().scatter(-1, at, 0.0).sum(-1, keepdim=True).log1p()

    (s_to, of_s), (t_to, of_t) = log_p(s), log_p(t)
    p_s, p_t = (s_to - of_s).exp(), (t_to - of_t).exp()
    if problem.kind == "forward_kl":
        r = (s_to - t_to) - (of_s - of_t)
        gradient = torch.where(r.abs() < 1, p_t * torch.expm1(r), p_s - p_t)
    else:
        at = s.argmax(-1, keepdim=True)
        pull = u = s_to - (t - t.gather(-1, at))
        if problem.kind != "reverse_kl":
            log_c = t_to.gather(-1, at) - of_t + of_s
            c = log_c.exp()
            near = torch.log1p(beta * c * torch.expm1(-u) / (1 - beta + beta * c))
            parts = (torch.tensor(x, dtype=u.dtype, device=u.device).log() for x in (1 - beta, beta))
            less, more = (part.expand_as(u) for part in parts)
            far = torch.logaddexp(less, more + log_c - u) - torch.logaddexp(less, more + log_c)
            pull = -torch.where(-u > 1, far, near)
        gradient = p_s * (pull - (p_s * pull).nan_to_num(0.0).sum(-1, keepdim=True))
        gradient = gradient.nan_to_num(0.0) * (1.0 if problem.kind == "reverse_kl" else 1 - beta)
    return gradient * slope * scales[0] / problem.temperature


def worst_row(made: Tensor, exact: Tensor) -> float:
    """The largest error of a row ``[rows, V]``, of its largest gradient, or of 1e-30."""
    return float(
        ((made.double() - exact).abs().amax(-1) / exact.abs().amax(-1).clamp(min=1e-30))
        .nan_to_num(torch.inf)
        .max()
    )
