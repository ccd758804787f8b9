"""The terms of one call: its loss and its other outputs, and what the row kernels must make for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.records import GradCoefficients, Merged, RowOptions
from megatron_fused_ce.losses.label import CROSS_ENTROPY, CrossEntropy
from megatron_fused_ce.losses.outputs import OUTPUTS, LogProb, LogProbs
from megatron_fused_ce.losses.statistics import TokenTerms, Upstream
from megatron_fused_ce.losses.terms import Pull, Rows, Term


class MadeElsewhere(Term):
    """A loss or an output that the logits backend makes itself, as it does the bounds of fp16."""

    gives = ("at",)
    bound = 1.0


MADE_ELSEWHERE = MadeElsewhere()


@dataclass(frozen=True)
class LossForm(RowOptions):
    """Tensors in it are on the call's device, so the host never waits."""

    loss: Term = CROSS_ENTROPY
    #: requested outputs beside the loss
    beside: tuple[tuple[str, Term], ...] = ()
    #: the requested outputs that may get upstream gradients
    differentiable: tuple[str, ...] = ()
    #: those that are the loss, so that their upstream gradient is its
    equal_to_loss: tuple[str, ...] = ()
    #: classes of the whole vocabulary; 0 where no term asks
    num_classes: int = 0
    #: K, of several labels a token; 0 for one
    num_labels: int = 0
    #: whether terms are a user's, whose values may be the statistics themselves
    copies: bool = False

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of all outputs."""
        return ("loss", *(name for name, _ in self.beside))

    @property
    def is_plain(self) -> bool:
        """Whether the loss is ``-log_prob`` of each label, so that one upstream gradient serves both."""
        return type(self.loss) is CrossEntropy and not self.num_labels

    @cached_property
    def needs(self) -> frozenset[str]:
        return frozenset(name for term in (self.loss, *dict(self.beside).values()) for name in term.needs)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Extra statistics that the backward reads."""
        with_grad = [term for name, term in self.beside if name in self.differentiable]
        return tuple(dict.fromkeys(name for term in (self.loss, *with_grad) for name in term.kept))

    @cached_property
    def of_label(self) -> frozenset[str]:
        """Outputs that are 0 for an ignored label."""
        return frozenset(name for name, term in (("loss", self.loss), *self.beside) if term.of_label)

    @cached_property
    def per_label(self) -> frozenset[str]:
        """Outputs with a number for each of several labels."""
        return frozenset(name for name, term in self.beside if term.per_label)

    @staticmethod
    def of(
        loss: Term = CROSS_ENTROPY,
        outputs: Sequence[str] = (),
        terms: Mapping[str, Term] | None = None,
        zero_unknown: bool = False,
        num_labels: int = 0,
        **more: object,
    ) -> LossForm:
        """With these outputs beside ``loss``; ``more``: other fields.

        Args:
            terms: those of outputs that are not among :data:`.OUTPUTS`.
            zero_unknown: ``log_prob`` is 0 for a label outside the vocabulary; its gradient is the same.
            num_labels: several labels a token; ``log_prob`` is then that of each.
        """
        known = {**OUTPUTS, **(terms or {})}
        beside = {name: known.get(name, MADE_ELSEWHERE) for name in outputs}
        if beside.get("log_prob") is OUTPUTS["log_prob"]:
            beside["log_prob"] = (LogProbs if num_labels else LogProb)(zero_unknown)
        more |= {"loss": loss, "beside": tuple(beside.items()), "num_labels": num_labels}
        form = LossForm(copies=bool(terms), **more)  # type: ignore[arg-type]
        options: dict[str, Any] = {f"with_{name}": True for name in form.needs if name != "best"}
        return replace(form, **options)

    @staticmethod
    def of_shard(
        config: FusedCEConfig,
        num_rows: int,
        vocab_start: int,
        device: torch.device,
        saves_logits: bool = False,
        **terms: object,
    ) -> LossForm:
        """The form of this rank's ``num_rows`` columns from ``vocab_start``.

        Args:
            saves_logits: the backend's; its statistics must be those of the rounded logits that it saves.
            terms: see :meth:`of`.
        """
        valid_columns = None
        if config.true_vocab_size is not None:
            real_columns = min(max(config.true_vocab_size - vocab_start, 0), num_rows)
            valid_columns = torch.full((1,), real_columns, dtype=torch.int64, device=device)
        return LossForm.of(
            softcap=config.logit_softcap,
            valid_columns=valid_columns,
            rounded=config.logit_precision == "activations" or saves_logits,
            **terms,  # type: ignore[arg-type]
        )

    def finish(self, rows: Rows) -> dict[str, Tensor]:
        """The loss in this form and the requested outputs, ``[C]`` or ``[K, C]``, of a forward's rows."""
        made = {"loss": self.loss.value(rows)}
        for name, term in self.beside:
            made[name] = term.value(rows)
        return made

    def saved(self, merged: Merged) -> Tensor:
        """What a backward reads of them: the :class:`.TokenTerms`, fp32 ``[4, C]`` or more rows."""
        if not self.kept and not self.num_labels:
            return merged.terms
        extra = [getattr(merged.extra, name).unsqueeze(0) for name in self.kept]
        of_several = () if merged.label_shifts is None else (merged.label_shifts,)
        return torch.cat((merged.terms, *extra, *of_several))

    def rows_saved(self, saved: Tensor, shares: Tensor | None = None) -> Rows:
        """The rows of a backward, from what :meth:`saved` gave."""
        return Rows(None, TokenTerms.of(saved, self.kept), self.num_classes, shares)

    def pull(self, rows: Rows, upstream: Upstream) -> tuple[Pull, Tensor]:
        """The sum of all terms' pulls, and a factor ``[C]`` of it. ``upstream``: of a chunk, times the factor
        of all gradients (the logit scale)."""
        if not upstream.beside:
            return self.loss.pull(rows, 1.0), upstream.loss
        pull, terms_beside = Pull(), dict(self.beside)
        if upstream.of_loss:
            pull = self.loss.pull(rows, upstream.loss)
        for name, given in upstream.beside:
            pull = pull + terms_beside[name].pull(rows, given)
        return pull, torch.ones_like(upstream.loss)

    def grad_coefficients(self, terms: TokenTerms, upstream: Upstream) -> GradCoefficients:
        """Coefficients of the gradient of the logits, fp32 ``[C]``; of :meth:`pull`."""
        rows = Rows(None, terms, self.num_classes)
        pull, factor = self.pull(rows, upstream)
        return pull.coefficients(rows, factor)

    def own_coefficients(self, merged: Merged) -> Tensor:
        """``row_max, scale, neg_label_grad`` for an upstream gradient of 1: fp32 ``[3, C]`` or more rows.

        Where the loss gives ``at`` and ``alpha`` alone.
        """
        if self.is_plain:
            return merged.terms
        rows = Rows(merged, num_classes=self.num_classes)
        made = self.loss.pull(rows, 1.0).coefficients(rows, merged.terms[0])
        return torch.stack(made[:3])

    @cached_property
    def _unbounded(self) -> list[Term]:
        given = [
            term
            for name, term in self.beside
            # Of LogProbs the upstream's size is that of all K.
            if name in self.differentiable and name not in OUTPUTS and type(term) is not LogProbs
        ]
        return given if type(self.loss) is CrossEntropy else [self.loss, *given]

    @property
    def is_bounded(self) -> bool:
        """Whether no gradient exceeds its upstream gradient."""
        return not self._unbounded

    def bound_of(self, rows: Rows) -> Tensor:
        """By how much gradients of a chunk may exceed their upstream gradients, fp32 ``[C]``."""
        largest = torch.ones_like(rows.terms.row_max)
        for term in self._unbounded:
            largest = largest.maximum(term.pull(rows, 1.0).bound * torch.ones_like(largest))
        return largest


PLAIN = LossForm()
