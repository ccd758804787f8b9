"""Whether a term is what it says: its coefficients are its value's gradient, and a head can rely on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import NOT_HERE, ExtraStatistics, Merged
from megatron_fused_ce.losses.statistics import EMPTY, TokenTerms
from megatron_fused_ce.losses.terms import Coefficient, Pull, Rows, Term

#: Tokens and classes of the rows that a term is tried on.
NUM_TOKENS, NUM_CLASSES = 12, 33
#: Of numbers in fp64, relative to 1 or to the largest of them; and of differences of values over two steps.
TOLERANCE, SLOPE_TOLERANCE, STEP = 1e-9, 1e-6, 1e-5


def check(
    term: Term,
    reference: Callable[[Tensor, Tensor], Tensor] | None = None,
    num_labels: int | None = None,
) -> None:
    """Try a term on rows in fp64: random, flat and peaked ones, ties, logits of -inf, labels of no class; one
    that gives ``at_labels`` also with several labels: one class twice, one of none, an empty entry.

    Compared are the row gradient of :meth:`.Term.pull` with differences of :meth:`.Term.value`, a pull from
    what a backward has with one from what the forward had, the sum of two pulls with that of their sum
    (linear in the upstream gradient), and rows alone with rows together (chunks). Of a row whose value
    is not finite no gradient is compared. CPU only; no collectives.

    Args:
        term: one that has a gradient.
        reference: the plain definition, ``(logits [C, V], labels [C]) -> [C]``, of a term that gives
            ``at_labels`` ``(logits, labels [C, K]) -> [C]``, or ``[K, C]`` where it is ``per_label``. Labels
            may be outside of 0 to V - 1, -1 for an empty entry. Without it the value itself is compared with
            nothing.
        num_labels: of a term that gives ``at_labels`` and takes so many labels alone, 2 or more; None: it is
            tried with 1 and with 4.

    Raises:
        AssertionError: with all that is wrong, and on which rows.
        TypeError: a term that no head takes (:meth:`.Term.why_wrong`), or without a gradient.
    """
    if wrong := term.why_wrong() or ("" if term.gives else "has no gradient: its gives is empty"):
        raise TypeError(f"{term!r:.80} {wrong}")
    rows_of = list(_rows())
    if "at_labels" in term.gives:
        of_one = [(name, s, labels.unsqueeze(1)) for name, s, labels in rows_of]
        rows_of = (of_one if num_labels is None else []) + _rows_of_several(num_labels or 4)
    found: dict[str, list[str]] = {}
    for name, *rows in rows_of:
        for words in _wrong_of(term, reference, *rows):
            found.setdefault(words, []).append(name)
    wrong = "\n".join(f"{words} (on {', '.join(names)})" for words, names in found.items())
    assert not wrong, f"{term!r:.80} is wrong\n{wrong}"


def _rows_of_several(num_labels: int) -> list[tuple[str, Tensor, Tensor]]:
    _, s, first = next(_rows())
    places = 4 * torch.arange(num_labels)
    places[-1] = places[min(1, num_labels - 2)]  # the last is the second again, of two the first
    labels = (first.unsqueeze(1) + places) % NUM_CLASSES
    is_label = torch.nn.functional.one_hot(labels, NUM_CLASSES).double()
    odd = labels.clone()
    odd[1::3, num_labels // 2], odd[2::3, 1] = NUM_CLASSES, EMPTY
    return [
        ("several labels, one twice", s, labels),
        ("several labels, one sure", s + 12 * is_label[:, num_labels // 2], labels),
        ("several labels, the repeated one sure", s + 12 * is_label[:, -1], labels),
        ("several labels, one of -inf", s.masked_fill(is_label[:, num_labels // 2] > 0, -torch.inf), labels),
        ("several labels, of no class or empty", s, odd),
    ]


def _rows() -> Iterator[tuple[str, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_TOKENS, NUM_CLASSES, dtype=torch.float64, generator=generator) * 3
    labels = torch.randint(NUM_CLASSES, (NUM_TOKENS,), generator=generator)
    at_label = torch.nn.functional.one_hot(labels, NUM_CLASSES).double()
    yield "random rows", logits, labels
    yield "flat rows", torch.zeros_like(logits), labels
    yield "a label that is sure", logits + 30 * at_label, labels
    yield "another class that is sure", logits + 30 * at_label.roll(1, 1), labels
    tied = logits.amax(1, keepdim=True) + 1
    yield (
        "a tie of the label with another",
        torch.where(at_label + at_label.roll(1, 1) > 0, tied, logits),
        labels,
    )
    yield "a label that is all", logits + 1000 * at_label, labels
    yield "logits at several heights", logits + torch.linspace(-9, 9, NUM_TOKENS).unsqueeze(1), labels
    yield "logits of -inf", logits.masked_fill(at_label.roll(2, 1) > 0, -torch.inf), labels
    yield "a label of no class", logits, torch.where(labels % 2 == 0, -100, labels)


def _wrong_of(
    term: Term, reference: Callable[..., Tensor] | None, s: Tensor, labels: Tensor
) -> Iterator[str]:
    rows = _merged(term, s, labels)
    value = term.value(rows)
    shape = labels.t().shape if term.per_label else labels.shape[:1]
    if value.shape != shape:
        of_each = "label" if term.per_label else "token"
        yield f"its value is {tuple(value.shape)}; expected one for each {of_each}, {tuple(shape)}"
        return
    finite = torch.isfinite(value)
    counts = finite.view(-1, len(labels)).all(0)
    if reference is not None:
        expected = reference(s, labels)
        if not torch.equal(finite, torch.isfinite(expected)) or _differ(value[finite], expected[finite]):
            yield "its value is not the reference's"
    upstream = torch.linspace(-2.0, 3.0, value.numel(), dtype=s.dtype).view(shape)
    saved = _saved(term, rows)
    before = [x.clone() for x in _read(rows, saved)]
    pull = _pull(term, saved, upstream)
    of_backward = _stack(pull, labels)
    beyond = {name for name, given in pull._asdict().items() if given is not None}.difference(term.gives)
    if beyond:
        yield f"its pull has {' and '.join(sorted(beyond))}, not among its gives, {term.gives}"
    slope = (upstream.view(-1, len(labels), 1) * _slope(term, s, labels)).sum(0)
    made = _gradient(pull, s, saved, labels)[counts]
    if _differ(made, slope[counts], SLOPE_TOLERANCE):
        is_label = (labels.view(len(labels), -1, 1) == torch.arange(s.shape[1])).any(1)[counts]
        where = [
            words
            for words, of in (("labels' columns (at, at_labels)", is_label), ("other columns", ~is_label))
            if of.any() and _differ(made[of], slope[counts][of], SLOPE_TOLERANCE)
        ]
        yield f"its pull is not the gradient of its value in {' and '.join(where)}"
    if term.bound is not None:
        of_one = _gradient(_pull(term, saved, torch.ones_like(value)), s, saved, labels)
        if (of_one[counts].abs() > term.bound + TOLERANCE).any():
            yield f"an entry of its row gradient is larger than its bound, {term.bound}"

    def differ(one: Tensor, other: Tensor) -> bool:
        return _differ(one[..., counts], other[..., counts])

    if differ(_stack(_pull(term, rows, upstream), labels), of_backward):
        yield "its pull reads other statistics in a forward than in a backward"
    other = upstream.flip(-1).exp()
    together = _stack(_pull(term, saved, upstream + 2 * other), labels)
    if differ(together, of_backward + 2 * _stack(_pull(term, saved, other), labels)):
        yield "its pull is not linear in the upstream gradient"
    for number in (1.0, 0.5):
        if differ(
            _stack(term.pull(saved, number), labels), _stack(_pull(term, saved, 0 * other + number), labels)
        ):
            yield f"its pull takes the number {number} for something else than {number} for each token"
    value = term.value(rows)
    if any(_differ(one, other) for one, other in zip(_read(rows, saved), before, strict=True)):
        yield "it changes the statistics in place, which others read"
    alone = _merged(term, s[:1], labels[:1])
    pull_alone = _stack(_pull(term, _saved(term, alone), upstream[..., :1]), labels[:1])
    if _differ(term.value(alone), value[..., :1]) or _differ(pull_alone, of_backward[:, :1]):
        yield "a token's result depends on the other tokens"


def _slope(term: Term, s: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the value ``[1 or K, C, V]`` by differences; 0 in columns of -inf. A label of no class
    counts from the row's maximum, which is then a constant."""
    known = ((labels >= 0) & (labels < s.shape[1])).view(len(labels), -1).all(1)
    columns = []
    for column in range(s.shape[1]):
        step = torch.zeros_like(s)
        step[:, column] = STEP
        high, low = (
            term.value(_merged(term, moved, labels, torch.where(known, moved.amax(1), s.amax(1))))
            for moved in (s + step, s - step)
        )
        columns.append(torch.where(s[:, column] == -torch.inf, 0.0, (high - low) / (2 * STEP)))
    return torch.stack(columns, -1).view(-1, *s.shape)


def _merged(term: Term, s: Tensor, labels: Tensor, row_max: Tensor | None = None) -> Rows:
    """The statistics of rows, from their maximum or another number near it."""
    label_logits, all_labels = None, labels
    if labels.dim() == 2:
        here = (labels >= 0) & (labels < s.shape[1])
        label_logits = s.gather(1, labels * here).masked_fill_(~here, -torch.inf)
        labels = labels.gather(1, label_logits.argmax(1, keepdim=True)).squeeze(1)
        label_logits = label_logits.masked_fill_(~here & (all_labels != EMPTY), NOT_HERE).t()
    known = (labels >= 0) & (labels < s.shape[1])
    is_label = torch.zeros_like(s, dtype=torch.bool)
    is_label[known, labels[known]] = True
    row_max = s.amax(1) if row_max is None else row_max
    shifted = torch.where(s == -torch.inf, 0.0, s - row_max.unsqueeze(1))
    e = torch.where(s == -torch.inf, 0.0, shifted.exp())
    others = e.masked_fill(is_label, 0.0).sum(1)
    label = torch.where(known, (e * is_label).sum(1), 1.0)
    shift = (shifted * is_label).sum(1)
    total = others + label * known
    loss = torch.where(known, torch.log1p(others / label), total.log())
    extra = {
        "logit_sum": s.sum(1),
        "weighted": (e * shifted).masked_fill(is_label, 0.0).sum(1),
        "best": s.argmax(1).to(s.dtype),
    }
    terms = torch.stack((row_max, 1 / total, others / total, torch.where(known, shift, NOT_HERE)))
    needed = ExtraStatistics(**{name: extra[name] for name in term.needs})
    shifts = None if label_logits is None else label_logits - row_max
    return Rows(Merged(loss, terms, None, needed, shifts), num_classes=s.shape[1])


def _read(rows: Rows, saved: Rows) -> list[Tensor]:
    """All that a term may read."""
    of_saved = (saved.one_minus_p, saved.label_shift, saved.terms.row_max, saved.terms.inv_sum)
    of_rows = (rows.loss, rows.one_minus_p, rows.label_shift, rows.log_probs, saved.log_probs)
    return [*of_rows, *rows.extra.rows(), *of_saved]


def _saved(term: Term, rows: Rows) -> Rows:
    """What a backward has of them."""
    kept = ExtraStatistics(**{name: getattr(rows.extra, name) for name in term.kept})
    terms = TokenTerms(*rows.terms[:4], kept, rows._shifts)
    return Rows(saved=terms, num_classes=rows.num_classes)


def _pull(term: Term, rows: Rows, upstream: Tensor) -> Pull:
    made = term.pull(rows, upstream)
    if not isinstance(made, Pull):
        raise AssertionError(f"pull of {term!r:.80} returns {type(made).__name__}; expected a losses.Pull")
    return made


def _stack(pull: Pull, labels: Tensor) -> Tensor:
    """Its coefficients ``[4 + K, C]``."""

    def rows(given: Coefficient | None, count: int = 1) -> Tensor:
        zeros = torch.zeros(count, len(labels), dtype=torch.float64)
        return zeros if given is None else zeros + given

    of_labels = rows(pull.at_labels, labels[0].numel())
    empty = labels.view(len(labels), -1).t() == EMPTY
    of_labels = of_labels if labels.dim() == 1 else of_labels.masked_fill(empty, 0.0)
    return torch.cat([*map(rows, pull[:4]), of_labels])


def _gradient(pull: Pull, s: Tensor, rows: Rows, labels: Tensor) -> Tensor:
    """The row gradient ``[C, V]`` that :mod:`.losses` defines."""
    at, alpha, eps, delta, *at_labels = _stack(pull, labels).unsqueeze(-1)
    t = s - rows.terms.row_max.unsqueeze(1)
    p = t.exp() * rows.terms.inv_sum.unsqueeze(1)
    classes = torch.arange(s.shape[1])
    each = labels.view(len(labels), -1).t()  # [K, C]
    made: Tensor = p * (alpha + eps * torch.where(p == 0, 0.0, t)) - delta
    for of_label, given in zip((at, *at_labels), (each[0], *each), strict=True):
        made = made + of_label * (p - (classes == given.unsqueeze(1)).to(s.dtype))
    return made


def _differ(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    both = torch.isnan(one) & torch.isnan(other)
    off = torch.where(both | (one == other), 0.0, (one - other).abs())
    largest = torch.nan_to_num(other, posinf=0.0, neginf=0.0).abs().max() if other.numel() else 0.0
    return bool((~(off <= tolerance * max(1.0, float(largest)))).any())
