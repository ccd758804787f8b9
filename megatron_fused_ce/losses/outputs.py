"""What a call computes for each token: the loss and the outputs beside it, each a sum of terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.kernels.records import GradCoefficients, Merged, RowOptions
from megatron_fused_ce.losses.label import CROSS_ENTROPY, CrossEntropy
from megatron_fused_ce.losses.statistics import TokenStats, Upstream
from megatron_fused_ce.losses.terms import Coefficient, Pull, Rows, Term


@dataclass(frozen=True)
class LogProb(Term):
    """``log p_y``; of a label outside the vocabulary ``m - lse``, or 0 with the same gradient."""

    zero_unknown: bool = False
    gives = ("at",)

    def value(self, rows: Rows) -> Tensor:
        log_prob = -rows.loss
        return torch.where(rows.known, log_prob, 0.0) if self.zero_unknown else log_prob

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at=-upstream)


@dataclass(frozen=True)
class LogProbs(Term):
    """``log p`` of each of several labels, as :class:`LogProb` of one; -inf of an empty entry."""

    zero_unknown: bool = False
    gives = ("at_labels",)
    per_label = True

    def value(self, rows: Rows) -> Tensor:
        return torch.where(rows.known_labels, rows.log_probs, 0.0) if self.zero_unknown else rows.log_probs

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(at_labels=torch.zeros_like(rows.log_probs) - upstream)


@dataclass(frozen=True)
class Lse(Term):
    """``log sum exp s``."""

    gives = ("alpha",)
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        return rows.lse

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=upstream)


@dataclass(frozen=True)
class Entropy(Term):
    """``-sum p log p``."""

    needs = ("weighted",)
    gives = ("alpha", "eps")
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        return rows.log_sum - rows.mean_shift

    def pull(self, rows: Rows, upstream: Coefficient) -> Pull:
        return Pull(alpha=rows.mean_shift * upstream, eps=-upstream)


@dataclass(frozen=True)
class Predicted(Term):
    """The class with the largest logit, the lowest on a tie; -1 with NaN. int64, without a gradient."""

    needs = ("best",)
    gives = ()
    dtype = torch.int64
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        best = rows.extra.best
        assert best is not None
        # On a GPU a row's maximum drops a NaN; its loss keeps it.
        found = torch.isfinite(best) & (rows.loss == rows.loss)
        return torch.where(found, best, -1.0).long()


@dataclass(frozen=True)
class Correct(Term):
    """bool: no logit is larger than the label's. Without a gradient."""

    gives = ()
    dtype = torch.bool
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        return (rows.label_shift == 0) & (rows.loss == rows.loss)


@dataclass(frozen=True)
class ShardMax(Term):
    """The largest logit of this rank's shard, without a gradient."""

    needs = ("argmax",)
    gives = ()
    of_label = False

    def value(self, rows: Rows) -> Tensor:
        assert rows.shard is not None
        return rows.shard.row_max


@dataclass(frozen=True)
class ShardArgmax(ShardMax):
    """Its column in this shard, int64."""

    dtype = torch.int64

    def value(self, rows: Rows) -> Tensor:
        assert rows.shard is not None and rows.shard.argmax is not None
        return rows.shard.argmax


@dataclass(frozen=True)
class MadeElsewhere(Term):
    """A loss or an output that the logits backend makes itself, as it does the bounds of fp16."""

    gives = ("at",)
    bound = 1.0


MADE_ELSEWHERE = MadeElsewhere()
#: Names of outputs of this rank's shard, for the adapter, which takes them in this order.
OF_SHARD = {"shard_max": ShardMax(), "shard_argmax": ShardArgmax()}
#: Outputs that may be asked for by name. The scale of fp16 has room for their gradients (head/fp16.py);
#: :attr:`Outputs.unbounded` leaves them out.
OUTPUTS: dict[str, Term] = {
    "log_prob": LogProb(),
    "lse": Lse(),
    "entropy": Entropy(),
    "predicted": Predicted(),
    "correct": Correct(),
}


def differentiable_of(outputs: Sequence[str]) -> tuple[str, ...]:
    """The names among ``outputs`` that can carry a gradient."""
    return tuple(name for name in outputs if name in OUTPUTS and OUTPUTS[name].gives)


@dataclass(frozen=True)
class Outputs(RowOptions):
    """The terms of one call by their names, ``loss`` first, and what the row kernels must make for them.

    Its tensors are on the call's device, so that the host never waits.
    """

    terms: tuple[tuple[str, Term], ...] = (("loss", CROSS_ENTROPY),)
    #: names beside the loss that may get upstream gradients
    differentiable: tuple[str, ...] = ()
    #: names beside the loss whose upstream gradient is added to the loss's, which they equal
    equal_to_loss: tuple[str, ...] = ()
    #: classes of the whole vocabulary; 0 where no term asks
    num_classes: int = 0
    #: K, of several labels a token; 0 for one
    num_labels: int = 0
    #: whether a row's largest logit is to be found in this shard
    with_argmax: bool = False
    #: whether terms are a user's, whose values may be the statistics themselves
    copies: bool = False

    @staticmethod
    def of(
        loss: Term = CROSS_ENTROPY,
        names: Sequence[str] = (),
        terms: Mapping[str, Term] | None = None,
        zero_unknown: bool = False,
        num_labels: int = 0,
        **more: Any,
    ) -> Outputs:
        """The loss and these outputs beside it.

        Args:
            names: of outputs; those that are neither in ``terms`` nor in :data:`OUTPUTS` the logits backend
                makes itself.
            terms: outputs of the caller's own.
            zero_unknown: ``log_prob`` is 0 for a label outside the vocabulary; its gradient is the same.
            num_labels: K, of several labels a token; ``log_prob`` is then that of each.
            more: other fields.
        """
        known = {**OUTPUTS, **OF_SHARD, **(terms or {})}
        by_name = {"loss": loss, **{name: known.get(name, MADE_ELSEWHERE) for name in names}}
        if by_name.get("log_prob") is OUTPUTS["log_prob"]:
            by_name["log_prob"] = (LogProbs if num_labels else LogProb)(zero_unknown)
        needs = {name for term in by_name.values() for name in term.needs}
        options: dict[str, Any] = {f"with_{name}": True for name in needs.difference(("best", "argmax"))}
        options |= {"with_argmax": not needs.isdisjoint(("best", "argmax")), "copies": bool(terms)}
        return Outputs(terms=tuple(by_name.items()), num_labels=num_labels, **options, **more)

    @cached_property
    def by_name(self) -> dict[str, Term]:
        return dict(self.terms)

    @property
    def loss(self) -> Term:
        return self.terms[0][1]

    @property
    def is_plain(self) -> bool:
        """Whether the loss is ``-log_prob`` of each label, so that one upstream gradient serves both."""
        return type(self.loss) is CrossEntropy and not self.num_labels

    @cached_property
    def needs(self) -> frozenset[str]:
        return frozenset(name for _, term in self.terms for name in term.needs)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Extra statistics that the backward reads."""
        with_grad = [term for name, term in self.terms if name in ("loss", *self.differentiable)]
        return tuple(dict.fromkeys(name for term in with_grad for name in term.kept))

    def values(self, rows: Rows) -> dict[str, Tensor]:
        """The outputs of a forward's rows, ``[C]`` or ``[K, C]``."""
        return {name: term.value(rows) for name, term in self.terms}

    def saved(self, merged: Merged) -> Tensor:
        """What a backward reads of the rows: the :class:`.TokenStats`, fp32 ``[4, C]`` or more rows."""
        if not self.kept and not self.num_labels:
            return merged.stats
        extra = [getattr(merged.extra, name).unsqueeze(0) for name in self.kept]
        of_several = () if merged.label_shifts is None else (merged.label_shifts,)
        return torch.cat((merged.stats, *extra, *of_several))

    def rows_of(self, saved: Tensor, shares: Tensor | None = None) -> Rows:
        """The rows of a backward, from what :meth:`saved` gave."""
        return Rows(None, TokenStats.of(saved, self.kept), self.num_classes, shares)

    def pull(self, rows: Rows, upstream: Upstream) -> tuple[Pull, Tensor]:
        """The sum of all terms' pulls, and what multiplies it, ``[C]``: the upstream gradient of a loss that
        is alone, else 1. ``upstream``: a chunk's, times the logit scale."""
        if not upstream.beside:
            return self.loss.pull(rows, 1.0), upstream.loss
        pull = self.loss.pull_own(rows, upstream.loss) if upstream.of_loss else Pull()
        for name, given in upstream.beside:
            pull = pull + self.by_name[name].pull_own(rows, given)
        return pull, torch.ones_like(upstream.loss)

    def grad_coefficients(self, saved: Tensor, upstream: Upstream) -> GradCoefficients:
        """Coefficients of the gradient of the logits, fp32 ``[C]``, of what :meth:`saved` gave."""
        rows = self.rows_of(saved)
        pull, factor = self.pull(rows, upstream)
        return pull.coefficients(rows, factor)

    def own_coefficients(self, merged: Merged) -> Tensor:
        """``row_max, scale, neg_label_grad`` for an upstream gradient of 1: fp32 ``[3, C]`` or more rows.

        Where the loss gives ``at`` and ``alpha`` alone.
        """
        if self.is_plain:
            return merged.stats
        rows = Rows(merged, num_classes=self.num_classes)
        made = self.loss.pull(rows, 1.0).coefficients(rows, merged.stats[0])  # the factor is not among the 3
        return torch.stack(made[:3])

    @cached_property
    def unbounded(self) -> dict[str, Term]:
        """Differentiable terms whose gradient may exceed its upstream gradient."""
        beside = {name: self.by_name[name] for name in self.differentiable if name not in OUTPUTS}
        # Of LogProbs the upstream's size is that of all K.
        wide = {name: term for name, term in beside.items() if type(term) is not LogProbs}
        return wide if type(self.loss) is CrossEntropy else {"loss": self.loss} | wide

    def bound_of(self, rows: Rows, given: set[str]) -> Tensor:
        """By how much gradients of a chunk may exceed their upstream gradients, fp32 ``[C]``.

        Args:
            given: the names of the outputs that have one.
        """
        largest = torch.ones_like(rows.stats.row_max)
        for term in (term for name, term in self.unbounded.items() if name in given):
            largest = largest.maximum(term.pull(rows, 1.0).bound * torch.ones_like(largest))
        return largest


PLAIN = Outputs()
