"""The terms of one call: its loss and its other outputs, and what the row kernels must make for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.records import GradCoefficients, Merged, RowOptions
from megatron_fused_ce.loss import TokenTerms, Upstream
from megatron_fused_ce.losses import Pull, Rows, Term
from megatron_fused_ce.losses.label import CrossEntropy, SoftTargets, Uniform, ZLoss
from megatron_fused_ce.losses.outputs import OUTPUTS, LogProb, LogProbs

CROSS_ENTROPY = CrossEntropy()
#: Of a divergence, whose backend makes the outputs itself.
MADE_ELSEWHERE = Term()


def loss_of(config: FusedCEConfig, soft: bool, num_classes: int | None) -> Term:
    """The loss that ``config`` describes; ``num_classes`` of the whole vocabulary, for label smoothing."""
    loss: Term = SoftTargets() if soft else CROSS_ENTROPY
    if config.label_smoothing:
        assert num_classes is not None
        sigma = config.label_smoothing
        if config.label_smoothing_form == "megatron":
            sigma *= num_classes / (num_classes - 1)
        loss = (1 - sigma) * loss + sigma * Uniform()
    return loss + ZLoss(config.z_loss) if config.z_loss else loss


@dataclass(frozen=True)
class LossForm(RowOptions):
    """Tensors in it are on the call's device, so the host never waits."""

    loss: Term = CROSS_ENTROPY
    #: requested outputs beside the loss
    beside: tuple[tuple[str, Term], ...] = ()
    #: the requested outputs that may get upstream gradients
    differentiable: tuple[str, ...] = ()
    #: classes of the whole vocabulary; 0 where no term asks
    num_classes: int = 0
    #: whether a token has several labels
    several: bool = False
    #: whether terms are a user's, whose values may be the statistics themselves
    copies: bool = False

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of all outputs."""
        return ("loss", *(name for name, _ in self.beside))

    @property
    def is_plain(self) -> bool:
        """Whether the loss is ``-log_prob`` of each label, so that one upstream gradient serves both."""
        return type(self.loss) is CrossEntropy and not self.several

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
        several: bool = False,
        **more: object,
    ) -> LossForm:
        """With these outputs beside ``loss``; ``more``: other fields.

        Args:
            terms: those of outputs that are not among :data:`.OUTPUTS`.
            zero_unknown: ``log_prob`` is 0 for a label outside the vocabulary; its gradient is the same.
            several: labels a token; ``log_prob`` is then that of each.
        """
        known = {**OUTPUTS, **(terms or {})}
        beside = {name: known.get(name, MADE_ELSEWHERE) for name in outputs}
        if beside.get("log_prob") is OUTPUTS["log_prob"]:
            beside["log_prob"] = (LogProbs if several else LogProb)(zero_unknown)
        more |= {"loss": loss, "beside": tuple(beside.items()), "several": several, "copies": bool(terms)}
        form = LossForm(**more)  # type: ignore[arg-type]
        return replace(
            form,
            with_logit_sum="logit_sum" in form.needs,
            with_weighted="weighted" in form.needs,
            with_squares="squares" in form.needs,
        )

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

    def from_column(self, start: int) -> LossForm:
        """The form for the columns of this shard from ``start`` on."""
        if self.valid_columns is None:
            return self
        return replace(self, valid_columns=(self.valid_columns - start).clamp_(min=0))

    def finish(self, merged: Merged, shares: Tensor | None = None) -> dict[str, Tensor]:
        """The loss in this form and the requested outputs, ``[C]``. ``shares``: of :class:`.LabelSet`."""
        rows = Rows(merged, None, self.num_classes, shares)
        made = {"loss": self.loss.value(rows)}
        for name, term in self.beside:
            made[name] = term.value(rows)
        return made

    def saved(self, merged: Merged) -> Tensor:
        """What a backward reads of them: the :class:`.TokenTerms`, fp32 ``[4, C]`` or more rows."""
        if not self.kept and not self.several:
            return merged.terms
        extra = [getattr(merged.extra, name).unsqueeze(0) for name in self.kept]
        of_several = () if merged.label_shifts is None else (merged.label_shifts,)
        return torch.cat((merged.terms, *extra, *of_several))

    def pull(
        self, terms: TokenTerms, upstream: Upstream, shares: Tensor | None = None
    ) -> tuple[Rows, Pull, Tensor]:
        """The sum of all terms' pulls, and a factor ``[C]`` of it. ``upstream``: of a chunk, times the factor
        of all gradients (the logit scale)."""
        rows = Rows(None, terms, self.num_classes, shares)
        if not upstream.beside:
            return rows, self.loss.pull(rows, 1.0), upstream.loss
        pull, terms_beside = Pull(), dict(self.beside)
        if upstream.of_loss:
            pull = self.loss.pull(rows, upstream.loss)
        for name, given in upstream.beside:
            pull = pull + terms_beside[name].pull(rows, given)
        return rows, pull, torch.ones_like(upstream.loss)

    def grad_coefficients(self, terms: TokenTerms, upstream: Upstream) -> GradCoefficients:
        """Coefficients of the gradient of the logits, fp32 ``[C]``; of :meth:`pull`."""
        rows, pull, factor = self.pull(terms, upstream)
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

    def bound_of(self, saved: Tensor, shares: Tensor | None = None) -> Tensor:
        """By how much gradients of a chunk may exceed their upstream gradients, fp32 ``[C]``.

        Args:
            saved: what :meth:`saved` gave.
        """
        rows = Rows(None, TokenTerms.of(saved, self.kept), self.num_classes, shares)
        largest = torch.ones_like(rows.terms.row_max)
        for term in self._unbounded:
            largest = largest.maximum(term.pull(rows, 1.0).bound * torch.ones_like(largest))
        return largest


PLAIN = LossForm()
