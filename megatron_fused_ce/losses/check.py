"""Whether a term is what it says: its coefficients are its value's gradient, and a head can rely on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import NOT_HERE, ExtraStatistics, Merged
from megatron_fused_ce.losses.statistics import EMPTY, TokenStats
from megatron_fused_ce.losses.terms import Coefficient, Pull, Rows, Term, attributes_of

#: Classes of the rows that a term is tried on, and numbers of labels for one that gives ``at_labels``.
NUM_LABELS = {33: (1, 8), 20: (3,)}
#: Upstream gradients are up to so many powers of ten above and below 1.
DECADES = 6
#: Relative tolerances: in fp64, of slopes (differences of values over two steps), in fp32; then the step.
TOLERANCE, SLOPE_TOLERANCE, FP32_TOLERANCE, STEP = 1e-9, 1e-6, 1e-3, 1e-5


def check(
    term: Term, reference: Callable[[Tensor, Tensor], Tensor] | None = None, num_labels: int | None = None
) -> None:
    """Try a term on rows with a loss of 0 to 1e3 and a logsumexp of -100 to 100: random, flat and peaked
    ones, ties, logits of -inf, labels of no class; upstream gradients of 1e-6 to 1e6 and their negatives. One
    that gives ``at_labels`` also with several labels: one class twice, one of none, an empty entry.

    Compared are, token by token, the row gradient of :meth:`.Term.pull` with differences of
    :meth:`.Term.value` in fp64; a pull from what a backward has with one from what the forward had; pulls of
    upstream gradients, their sums and multiples (linear); all rows with the same rows in another order and
    cut at several places (chunks); fp32 with fp64, as far as the statistics have digits. Of a row whose value
    is inf no gradient is compared. CPU only; no collectives.

    Args:
        term: one that has a gradient.
        reference: the plain definition, ``(logits [C, V], labels [C]) -> [C]``, of a term that gives
            ``at_labels`` ``(logits, labels [C, K]) -> [C]``, or ``[K, C]`` where it is ``per_label``. Labels
            may be outside of 0 to V - 1, -1 for an empty entry. Without it the value itself is compared with
            nothing.
        num_labels: of a term that gives ``at_labels`` and takes so many labels alone, 2 or more; None: it is
            tried with 1, 3 and 8.

    Raises:
        AssertionError: with all that is wrong, and on which token.
        TypeError: no term, one that no head takes (:meth:`.Term.why_wrong`), or one without a gradient.
    """
    if not isinstance(term, Term):
        raise TypeError(f"check takes a term, got {term!r:.80}: give an instance, such as Margin(0.1)")
    if wrong := term.why_wrong() or ("" if term.gives else "has no gradient: its gives is empty"):
        raise TypeError(f"{term!r:.80} {wrong}")
    found: dict[str, str] = {}
    named: set[str] = set()
    for num_classes, counts in NUM_LABELS.items():
        s, labels = _rows(num_classes)
        if "at_labels" not in term.gives or num_labels:
            counts = (num_labels or 0,)
        for count in counts:
            with torch.no_grad():  # as in a head
                trial = _Trial(term, s, _several(labels, count, num_classes) if count else labels)
                for words, off in trial.wrong(reference, named):
                    if off.any():
                        found.setdefault(words, trial.where(off))
    for part in _parts(term):
        if type(part).gives is Term.gives and named < set(part.gives):
            found[f"{part!r:.60} does not say its gives: expected {tuple(sorted(named))}"] = ""
        if attributes_of(part) and not (is_dataclass(part) and type(part).__dataclass_params__.frozen):
            found[f"{part!r:.60} is not frozen: a head keeps what it has found out about a term"] = ""
    wrong = "\n".join(f"{words}{where}" for words, where in found.items())
    assert not wrong, f"{term!r:.80} is wrong\n{wrong}"


def _parts(term: Term) -> Iterator[Term]:
    """Terms that are no sum and no product."""
    for part in term.parts:
        yield from (part,) if part is term else _parts(part)


def _rows(num_classes: int) -> tuple[Tensor, Tensor]:
    """Logits ``[C, V]`` in fp64, and labels."""
    generator = torch.Generator().manual_seed(num_classes)
    wanted = [0.0, *torch.logspace(-8, 3, 35).tolist()]  # losses
    kinds = ("flat", "peaked", "tied", "-inf", "of no class", "of no class")
    count = len(wanted) + 2 * len(kinds)
    s = 3 * torch.randn(count, num_classes, dtype=torch.float64, generator=generator)
    labels = torch.randint(num_classes, (count,), generator=generator)
    for token, loss in enumerate(wanted):
        others = s[token].index_fill(0, labels[token], -torch.inf).logsumexp(0)
        odds = torch.tensor(loss).double().expm1().log()  # of the others, inf above 700
        s[token, labels[token]] = others - (odds if odds < 700 else loss)
    s[0, labels[0]] = 1e3
    for token, kind in enumerate(2 * kinds, len(wanted)):
        other = (labels[token] + 1) % num_classes
        if kind == "flat":
            s[token] = 0.0
        elif kind == "-inf":
            s[token, other] = -torch.inf
        elif kind == "of no class":
            labels[token] = -100 if token % 2 else num_classes
        else:
            s[token, other] = s[token].amax() + (30 if kind == "peaked" else 1)
            s[token, labels[token]] = s[token, other] if kind == "tied" else 0.0
    heights = torch.linspace(-100, 99, count, dtype=torch.float64)[torch.randperm(count, generator=generator)]
    return s + (heights - s.logsumexp(1)).unsqueeze(1), labels


def _several(labels: Tensor, count: int, num_classes: int) -> Tensor:
    """Labels ``[C, K]``: these, others, the last one as the second; some of no class, some empty."""
    place = 4 * torch.arange(count)
    place[-1] = place[min(1, max(count - 2, 0))]
    several = (labels.unsqueeze(1) + place) % num_classes
    several[:, 0] = labels
    if count > 1:
        several[len(labels) // 2 :: 5, count // 2], several[2::5, 1] = num_classes, EMPTY
    return several


#: What may be wrong, in words, and of which tokens: bool ``[..., C]``, or ``[]``.
Found = Iterator[tuple[str, Tensor]]


class _Trial:
    """A term on rows."""

    def __init__(self, term: Term, s: Tensor, labels: Tensor) -> None:
        self.term, self.s, self.labels, self.count = term, s, labels, len(labels)
        self.rows = _merged(term, s, labels)
        self.saved = _saved(term, self.rows)
        self.generator = torch.Generator().manual_seed(1)
        self.shape = labels.t().shape if term.per_label else labels.shape[:1]
        self.upstream, self.other = (self.random(*self.shape) for _ in range(2))
        self.upstream += 0.5 * self.upstream.sign()
        self.other[..., ::5] = 0.0

    def random(self, *shape: int) -> Tensor:
        """-1 to 1."""
        return 2 * torch.rand(shape, dtype=torch.float64, generator=self.generator) - 1

    def where(self, off: Tensor) -> str:
        """A token, in words."""
        if not off.dim():
            return ""
        token = int(off.reshape(-1, self.count).any(0).nonzero()[0])
        label, lse = self.labels[token].tolist(), float(self.s[token].logsumexp(0))
        return f" (on a token of loss {float(self.rows.loss[token]):.3g}, logsumexp {lse:.3g}, label {label})"

    def pull(self, upstream: Tensor | float, rows: Rows | None = None, of: Any = slice(None)) -> Tensor:
        """Its coefficients ``[4 + K, C]``, from what a backward has, or from other rows."""
        given = upstream.clone() if isinstance(upstream, Tensor) else upstream
        return _stack(self.term.pull(self.saved if rows is None else rows, given), self.labels[of])

    def wrong(self, reference: Callable[..., Tensor] | None, named: set[str]) -> Found:
        """``named`` gets the coefficients that its pulls have."""
        term, rows, saved = self.term, self.rows, self.saved
        before = [x.clone() for x in _read(rows, saved)]
        self.value = value = term.value(rows)
        if value.shape != self.shape:
            of_each = "label" if term.per_label else "token"
            words = f"its value is {tuple(value.shape)}; expected one for each {of_each}, {tuple(self.shape)}"
            yield words, torch.tensor(True)
            return
        self.counts = torch.isfinite(value).view(-1, self.count).all(0)
        yield "its value is NaN", value.isnan()
        if reference is not None:
            expected = reference(self.s, self.labels).to(value.dtype)
            yield "its value is not the reference's", _off(value, expected, SLOPE_TOLERANCE)
        given = self.upstream.clone()
        pull, ones = term.pull(saved, given), torch.ones(self.shape, dtype=value.dtype)
        if not isinstance(pull, Pull):
            kind = type(pull).__name__
            raise AssertionError(f"pull of {term!r:.80} returns {kind}; expected a losses.Pull")
        yield "its pull changes its upstream in place", (given != self.upstream).any()
        with torch.enable_grad():
            made = [pull, term.pull(saved, 1.0), term.pull(rows, ones)]
            of_call = [term.value(rows), *(x for each in made for x in each if isinstance(x, Tensor))]
        for each in made:
            named |= {name for name, of in each._asdict().items() if of is not None}
        beyond = " and ".join(sorted(named.difference(term.gives)))
        yield f"its pull has {beyond}, not among its gives, {term.gives}", torch.tensor(bool(beyond))
        words = "it requires a gradient, of a tensor that is no argument: it would get none"
        yield words, torch.tensor(any(x.requires_grad for x in of_call))
        yield from self.slopes(pull)
        yield from self.linear()
        yield "its value is another in another call", _off(term.value(rows), value)
        changed = [_off(*pair).any() for pair in zip(_read(rows, saved), before, strict=True)]
        yield "it changes the statistics in place, which others read", torch.stack(changed).any()
        yield from self.chunks()
        yield from self.in_fp32()

    def slopes(self, pull: Pull) -> Found:
        slope, tolerance = _slope(self.term, self.s, self.labels)
        weights = self.upstream.view(-1, self.count, 1)
        slope, tolerance = (weights * slope).sum(0), (weights.abs() * tolerance).sum(0).amax(1, True)
        tolerance += SLOPE_TOLERANCE * slope.abs().amax(1, True)
        made = _gradient(pull, self.s, self.saved, self.labels)
        off = (~((made - slope).abs() <= tolerance) & self.counts.unsqueeze(1)).t()
        classes = torch.arange(self.s.shape[1]).view(-1, 1, 1)
        is_label = (self.labels.view(self.count, -1) == classes).any(-1)
        for words, columns in (("labels' columns (at, at_labels)", is_label), ("other columns", ~is_label)):
            yield f"its pull is not the gradient of its value in {words}", off & columns
        if (bound := self.term.bound) is not None:
            of_one = self.term.pull(self.saved, torch.ones(self.shape, dtype=slope.dtype))
            large = _gradient(of_one, self.s, self.saved, self.labels).abs() > bound * (1 + TOLERANCE)
            yield f"an entry of its row gradient is larger than its bound, {bound}", large.t() & self.counts

    def linear(self) -> Found:
        upstream, other, right = self.upstream, self.other, self.pull(self.upstream)
        tens = 10.0 ** torch.linspace(-DECADES, DECADES, self.count, dtype=torch.float64)
        made = [
            (self.pull(upstream * far) / far, right)
            for far in (tens, tens.flip(0), tens.roll(self.count // 2))
        ]
        made.append((self.pull(upstream + 2 * other), right + 2 * self.pull(other)))
        for pair in made:
            yield "its pull is not linear in the upstream gradient", _off(*pair) & self.counts
        words = "its pull reads other statistics in a forward than in a backward"
        yield words, _off(self.pull(upstream, self.rows), right, SLOPE_TOLERANCE) & self.counts
        for number in (1.0, 0.5, 10.0**DECADES):
            words = f"its pull takes the number {number} for something else than {number} for each token"
            of_tensor = self.pull(torch.full_like(upstream, number))
            yield words, _off(self.pull(number), of_tensor, SLOPE_TOLERANCE) & self.counts

    def chunks(self) -> Found:
        """The same tokens in another order, cut at several places: all forwards, then all backwards."""
        count, right = self.count, self.pull(self.upstream)
        order = torch.randperm(count, generator=self.generator)
        back = order.argsort()
        for length in (count // 4, count // 3 + 1, count - 1, count):
            rows = [(of, _merged(self.term, self.s[of], self.labels[of])) for of in order.split(length)]
            values = torch.cat([self.term.value(each) for _, each in rows], -1)[..., back]
            pulls = [self.pull(self.upstream[..., of], _saved(self.term, each), of) for of, each in rows]
            of_pull = _off(torch.cat(pulls, -1)[:, back], right, SLOPE_TOLERANCE) & self.counts
            off = _off(values, self.value, SLOPE_TOLERANCE).view(-1, count).any(0) | of_pull.any(0)
            yield "a token's result depends on the other tokens", off

    def in_fp32(self) -> Found:
        """In fp32 as in fp64 of the same statistics, but for what one rounding of these makes of it: of sure
        tokens with one label relative to the result, of others to 1 where that is less."""
        sure = (self.rows.loss < 1e-2) & (self.labels.dim() == 1)
        low = self.in_dtype(self.rows, torch.float32)
        high = self.in_dtype(low, torch.float64)
        made_low = (self.term.value(low), *self.term.pull(_saved(self.term, low), 1.0))
        others = {str(x.dtype) for x in made_low if isinstance(x, Tensor)} - {"torch.float32"}
        yield f"it makes {' and '.join(others)} of fp32", torch.tensor(bool(others))
        for name, made in (("value", self.term.value), ("pull", self.from_forward)):
            ours, true = made(low).double(), made(high)
            moved = [(made(self.in_dtype(high, rounded=True)) - true).abs() for _ in range(6)]
            allowed = 8 * torch.stack(moved).amax(0) + FP32_TOLERANCE * true.abs().clamp(min=1e-35)
            allowed = torch.where(sure, allowed, allowed.clamp(min=1e-5))
            fits = (true.abs() <= torch.finfo(torch.float32).max) & self.counts
            yield f"in fp32 its {name} has lost its digits", ~((ours - true).abs() <= allowed) & fits

    def from_forward(self, rows: Rows) -> Tensor:
        return self.pull(1.0, _saved(self.term, rows))

    def in_dtype(self, rows: Rows, dtype: torch.dtype = torch.float64, rounded: bool = False) -> Rows:
        """Rows of a forward in another dtype; or rounded at random, as in fp32."""

        def of(x: Tensor) -> Tensor:
            return x * (1 + 2.0**-23 * self.random(*x.shape)) if rounded else x.to(dtype)

        merged = rows._merged
        assert merged is not None
        extra = ExtraStatistics.of(merged.extra.names, [of(x) for x in merged.extra.rows()])
        shifts = None if merged.label_shifts is None else of(merged.label_shifts)
        made = Merged(of(merged.loss), of(merged.stats), None, extra, shifts)
        return Rows(made, num_classes=rows.num_classes)


def _slope(term: Term, s: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the value ``[1 or K, C, V]`` by differences, and what they may be off; 0 in columns of
    -inf. A label of no class counts from the row's maximum, which is then a constant."""
    (count, width), known = s.shape, ((labels >= 0) & (labels < s.shape[1])).view(len(labels), -1).all(1)
    step = STEP * torch.eye(width, dtype=s.dtype).unsqueeze(1)  # [V, 1, V]
    of_all = labels.repeat(width, *[1] * (labels.dim() - 1))

    def value(moved: Tensor) -> Tensor:  # [1 or K, V, C]
        top = torch.where(known, moved.amax(-1), s.amax(1)).flatten()
        made = term.value(_merged(term, moved.flatten(0, 1), of_all, top))
        return made.view(-1, width, count)

    high, mid, low = value(s + step), value(s + 0 * step), value(s - step)
    bend = ((high - mid) - (mid - low)).abs()
    made = (high - low) / (2 * STEP), (bend + 1e-15 * mid.abs() + 1e-14) / STEP
    slope, tolerance = (torch.where(s.t() == -torch.inf, 0.0, x).transpose(1, 2) for x in made)
    return slope, tolerance


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
    loss = torch.where(known & (label > others), torch.log1p(others / label), total.log() - shift)
    extra = {
        "logit_sum": s.sum(1),
        "weighted": (e * shifted).masked_fill(is_label, 0.0).sum(1),
        "best": s.argmax(1).to(s.dtype),
    }
    stats = torch.stack((row_max, 1 / total, others / total, torch.where(known, shift, NOT_HERE)))
    needed = ExtraStatistics(**{name: extra[name] for name in term.needs})
    shifts = None if label_logits is None else label_logits - row_max
    return Rows(Merged(loss, stats, None, needed, shifts), num_classes=s.shape[1])


def _read(rows: Rows, saved: Rows) -> list[Tensor]:
    """All that a term may read."""
    of_saved = (saved.one_minus_p, saved.label_shift, saved.stats.row_max, saved.stats.inv_sum)
    of_rows = (rows.loss, rows.one_minus_p, rows.label_shift, rows.log_probs, saved.log_probs)
    of_rows += tuple(getattr(of, name) for of in (rows, saved) for name in ("lse", "log_sum"))
    return [*of_rows, *rows.extra.rows(), *of_saved]


def _saved(term: Term, rows: Rows) -> Rows:
    """What a backward has of them."""
    kept = ExtraStatistics(**{name: getattr(rows.extra, name) for name in term.kept})
    stats = TokenStats(*rows.stats[:4], kept, rows._shifts)
    return Rows(saved=stats, num_classes=rows.num_classes)


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
    t = s - rows.stats.row_max.unsqueeze(1)
    p = t.exp() * rows.stats.inv_sum.unsqueeze(1)
    classes = torch.arange(s.shape[1])
    each = labels.view(len(labels), -1).t()  # [K, C]
    made: Tensor = p * (alpha + eps * torch.where(p == 0, 0.0, t)) - delta
    for of_label, given in zip((at, *at_labels), (each[0], *each), strict=True):
        made = made + of_label * (p - (classes == given.unsqueeze(1)).to(s.dtype))
    return made


def _off(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Where they differ ``[..., C]``, relative to the larger: NaN from a number, inf from another."""
    same = (one == other) | (torch.isnan(one) & torch.isnan(other))
    return ~same & ~((one - other).abs() <= tolerance * (torch.maximum(one.abs(), other.abs()) + 1e-6))
