"""A student beside its teacher over the whole vocabulary: problems, their definition, and its bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, fused_linear_distillation
from megatron_fused_ce.scripts.lib.reference import FLOOR, HeadInputs, logits_of, make_inputs
from tests.support.losses import CE, GRADIENTS, assert_within, true_value
from tests.support.op import Parts

#: Divergences by name, with what a call takes for each.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"divergence": name} for name in ("forward_kl", "reverse_kl", "jsd")},
    **{f"jsd {beta}": {"divergence": "jsd", "beta": beta} for beta in (0.1, 0.9)},
}
#: Terms that cancel in gradients, see :func:`plain`.
CANCELLING = ("of the teacher", "of the student")
#: Error that is always allowed in fp32: of a loss, in nats, and of its own size, four roundings (one of 30
#: nats is 1e-6); of gradients, relative to them or to the terms in them that cancel (:data:`CANCELLING`).
NATS, OF_LOSS, OF_TERMS = 1e-6, 2.0**-22, 1e-6


@dataclass(frozen=True, kw_only=True)
class DistillationProblem(HeadInputs):
    """A student beside its teacher."""

    teacher: tuple[Tensor, Tensor]  # hidden [s, b, H_t], weight [V_t, H_t]
    options: dict[str, Any]  # of fused_linear_distillation, beside the config

    def ask(self, hidden: Tensor, weight: Tensor, *teacher: Tensor, **call: Any) -> Parts:
        """Outputs by name; ``teacher``: where it is not the problem's."""
        call = {**self.options, "entropy": "detached", "config": self.config, **call}
        made = fused_linear_distillation(hidden, weight, *(teacher or self.teacher), **call)
        return {name: value for name, value in made._asdict().items() if value is not None}


def beside(
    teacher: tuple[Tensor, Tensor], *student: Tensor, kind: str = "forward_kl", **options: Any
) -> DistillationProblem:
    """A problem; ``student``: the fields of :class:`.HeadInputs`; ``options``: of the config and the op."""
    names = [of.name for of in fields(FusedCEConfig) if of.name in options]
    config = FusedCEConfig(**{"ignore_index": None, **{name: options.pop(name) for name in names}})
    options = {**KINDS[kind], **options}
    return DistillationProblem(*student, config.logit_scale, config, teacher=teacher, options=options)


def plain(problem: DistillationProblem, dtype: torch.dtype | None = None, of: str = "loss") -> Parts:
    """The definition, and the gradients of one of its outputs by autograd: in ``dtype``, or as eager PyTorch
    has it, each side in its own dtype and all that follows the logits in fp32.

    Outputs of :data:`CANCELLING` have the gradients of terms that cancel in those of the divergence: the
    teacher's ``p_t`` against the student's; and ``p_s`` times ``KL(p_s || m)``, which reverse_kl and jsd
    subtract from ``log p_s - log m``, as large for a class that the student is sure of.
    """
    options, labels, t = problem.options, problem.labels.t(), problem.options.get("temperature", 1.0)
    scale, cap = options.get("teacher_logit_scale", 1.0), options.get("teacher_logit_softcap")
    of_teacher = replace(problem.config, logit_softcap=cap)
    teacher = HeadInputs(*problem.teacher, problem.labels, problem.grad_loss, scale, of_teacher)
    (hidden, weight, z_s), (_, _, z_t) = (
        logits_of(side, dtype or side.hidden.dtype) for side in (problem, teacher)
    )
    z_t = z_t.detach()
    log_s, log_t = (z_s / t).log_softmax(-1), (z_t / t).log_softmax(-1)
    beta = {"forward_kl": 1.0, "reverse_kl": 0.0}.get(options["divergence"], options.get("beta", 0.5))
    log_m = log_s if beta == 1 else log_t if beta == 0 else log_mixture(log_s, log_t, beta)
    of_student = expected(log_s, log_s - log_m)
    divergence = loss = beta * expected(log_t, log_t - log_m) + (1 - beta) * of_student
    ignored = torch.zeros_like(labels, dtype=torch.bool)
    if problem.config.ignore_index is not None:
        ignored = labels == problem.config.ignore_index
    values = {"entropy": -expected(log_s, log_s)}
    if options.get("labels") is not None:
        student, teachers = (
            true_value(CE, z.flatten(0, 1), labels.flatten()).view_as(labels).masked_fill(ignored, 0.0)
            for z in (z_s, z_t)
        )
        values |= {"cross_entropy": student, "teacher_cross_entropy": teachers}
        weights = options.get("label_weights")
        if weights is not None:
            loss = loss + (weights.t() if isinstance(weights, Tensor) else weights) * student
    values |= {"loss": loss.masked_fill(ignored, 0.0), "divergence": divergence.masked_fill(ignored, 0.0)}
    cancelling = log_t.exp(), log_s.exp() * of_student.unsqueeze(-1)
    values |= {name: (p.detach() * z_s).sum(-1) / t for name, p in zip(CANCELLING, cancelling, strict=True)}
    grads = torch.autograd.grad(values[of], (hidden, weight), problem.grad_loss.t().to(z_s.dtype))
    return {name: of.detach().t() for name, of in values.items()} | dict(zip(GRADIENTS, grads, strict=True))


def log_mixture(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    of_student, of_teacher = (torch.tensor(x, dtype=log_s.dtype).log() for x in (1 - beta, beta))
    return torch.logaddexp(log_s + of_student, log_t + of_teacher)


def expected(log_p: Tensor, x: Tensor) -> Tensor:
    """``sum p x``, 0 where ``p`` is."""
    p = log_p.exp()
    return (p * x.masked_fill(p == 0, 0.0)).sum(-1)


def assert_right(problem: DistillationProblem, made: Parts) -> None:
    """Every part within the larger of twice eager PyTorch's error and the dtype's floor: of a loss the root
    of the mean square, in nats; of a gradient the norm."""
    exact, eager = plain(problem, torch.float64), plain(problem)
    terms = [exact, *(plain(problem, torch.float64, of) for of in CANCELLING)]
    dtype, root = problem.hidden.dtype, problem.labels.numel() ** 0.5
    nats, of_terms = (NATS, OF_TERMS) if dtype == torch.float32 else (FLOOR[dtype], FLOOR[dtype])
    floors = {}
    for name in made:
        size = float(exact[name].norm())
        floor = max(root * nats, OF_LOSS * size)
        if name in GRADIENTS:
            floor = of_terms * max(float(term[name].norm()) for term in terms)
        floors[name] = floor / (size or 1.0)
    assert ("cross_entropy" in made) == ("cross_entropy" in exact)
    assert_within(made, exact, eager, dtype, floors)


# --- problems ----------------------------------------------------------------------------------

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


SURE_CLASSES = 4


def make_problem(
    values: str = "plain",
    *,
    s: int = 19,
    b: int = 3,
    sizes: tuple[int, int] = (24, 40),
    vocab: int = 331,
    padding: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
    teacher_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> DistillationProblem:
    """A problem with a random upstream gradient per token, some of them 0.

    Args:
        values: ``plain``; ``near``, of sides alike; ``sure`` of a class or ``wide``, of logits of 300:
            which side, or ``both``. Sure ``of others``: each of another class.
        sizes: ``H`` and ``H_t``; ``near`` takes ``H`` for both.
        padding: rows of large numbers behind the vocabulary, of student and teacher.
        options: of :func:`beside`; ``with_labels``, ``label_weights="per token"`` have some of every sign.
    """
    generator = torch.Generator().manual_seed(2)
    normal, sides = partial(torch.randn, generator=generator), []
    classes = torch.randint(0, SURE_CLASSES, (2, s, b), generator=generator)
    places = torch.linspace(0, vocab - 1, SURE_CLASSES).long()  # over all shards
    for seed, (side, h) in enumerate(zip(("student", "teacher"), sizes, strict=True)):
        how = values if any(word in values for word in (side, "both", "others")) else "plain"
        kind = "wide" if "wide" in how else "plain"
        made = make_inputs(kind, s=s, b=b, hidden_size=h, vocab=vocab, dtype=torch.float32, seed=seed)
        if "sure" in how:
            draw = classes[seed * ("others" in how)]
            _make_sure(made.hidden, made.weight, draw, places, normal(h, SURE_CLASSES))
        sides.append([made.hidden, made.weight])
    if values == "near":
        sides[1] = [sides[0][0], sides[0][1] + 1e-3 * normal(vocab, sizes[0])]
    if any(padding):
        options["true_vocab_size"] = vocab
    for side, rows, of in zip(sides, padding, (dtype, teacher_dtype or dtype), strict=True):
        side[1] = torch.cat((side[1], 30 * normal(rows, side[1].shape[1])))
        side[:] = (x.to(device, of) for x in side)
    labels, upstream = made.labels.to(device), made.grad_loss.to(device)
    upstream.view(-1)[1::5] = 0.0
    labels[0] = places[classes[0, :, 0]]  # where a student may be sure
    if options.get("ignore_index") is not None:
        labels.view(-1)[::4] = options["ignore_index"]
    if options.pop("with_labels", False):
        options["labels"] = labels
    if options.get("label_weights") == "per token":
        options["label_weights"] = normal(b, s).to(device)
    return beside(sides[1], *sides[0], labels, upstream, **options)


def _make_sure(hidden: Tensor, weight: Tensor, classes: Tensor, places: Tensor, directions: Tensor) -> None:
    """Of each token one of the classes in ``places`` at 0.999999, the others' logits of about 1/10: those
    classes have directions for themselves, and tokens differ in how far they go."""
    along = torch.linalg.qr(directions)[0].t()
    weight -= weight @ along.t() @ along
    weight[places] = along
    sizes = math.log(1e6 * len(weight)) * (1 + 0.2 * hidden[..., -1:].abs())
    hidden.mul_(0.1).add_(sizes * along[classes])


# --- confident sides: rows of given logits ------------------------------------------------------

#: Which class's logit is raised, of the student's largest, on each side; None: none.
CONFIDENT: dict[str, tuple[int | None, int | None]] = {
    "student": (0, None),
    "teacher": (None, 1),
    "one class": (0, 0),
    "two classes": (0, 1),
}


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
    return of_logits(*logits.to(device), **options)


def of_logits(student: Tensor, teacher: Tensor, **options: Any) -> DistillationProblem:
    """Of each side ``[V, rows]``, and upstream gradients of 1."""
    rows = student.shape[1]
    hidden = torch.eye(rows, device=student.device).view(rows, 1, rows)
    ones = torch.ones(1, rows, device=student.device)
    return beside((hidden, teacher), hidden, student, ones.long() - 1, ones, **options)


def exact_rows(problem: DistillationProblem) -> Tensor:
    """The gradients of :func:`confident` rows ``[rows, V]`` in fp64.

    Of the largest class's the plain ones lose 2e-3 at 30, and all at 40: before the softcap a row sums up to
    0, so that it is what the others leave.
    """
    cap, slope = problem.config.logit_softcap, torch.tensor(problem.logit_scale)
    z = problem.weight.double() * problem.logit_scale
    if cap is not None:
        z, slope = cap * torch.tanh(z / cap), slope * torch.cosh(z / cap) ** -2
    of_z = replace(problem, weight=z, logit_scale=1.0, config=replace(problem.config, logit_softcap=None))
    made, top = plain(of_z, torch.float64)["grad_weight"], z.argmax(0, keepdim=True)
    made = made.scatter(0, top, 0.0)
    return (slope * made.scatter(0, top, -made.sum(0, keepdim=True))).t()


def worst_row(made: Tensor, exact: Tensor) -> float:
    """The largest error of a row ``[rows, V]``, of its largest gradient, or of 1e-30."""
    error, largest = ((x.double().abs().amax(-1)) for x in (made - exact, exact))
    return float((error / largest.clamp(min=1e-30)).nan_to_num(torch.inf).max())
