"""The terms of one call: its loss and its other outputs, and what the row kernels must make for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.records import GradCoefficients, Merged, RowOptions
from megatron_fused_ce.loss import TokenOutputs, TokenTerms, Upstream
from megatron_fused_ce.losses import Rows, Term
from megatron_fused_ce.losses.label import CrossEntropy, SoftTargets, Uniform, ZLoss
from megatron_fused_ce.losses.outputs import OUTPUTS, LogProb

CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class LossForm(RowOptions):
    """Tensors in it are on the call's device, so the host never waits."""

    loss: Term = CROSS_ENTROPY
    #: requested outputs beside the loss
    beside: tuple[tuple[str, Term], ...] = ()
    #: the requested outputs that may get upstream gradients
    differentiable: tuple[str, ...] = ()

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of those beside the loss."""
        return tuple(name for name, _ in self.beside)

    @property
    def is_plain(self) -> bool:
        """Whether the loss is ``-log_prob`` of each label, so that one upstream gradient serves both."""
        return self.loss is CROSS_ENTROPY

    @staticmethod
    def of_outputs(
        outputs: Sequence[str] = (), zero_unknown: bool = False, loss: Term = CROSS_ENTROPY, **more: Any
    ) -> LossForm:
        """With these outputs beside ``loss``; ``more``: other fields.

        Args:
            zero_unknown: ``log_prob`` is 0 for a label outside the vocabulary; its gradient is the same.
        """
        # Those of a teacher beside the student are made by the logits backend itself.
        beside = {name: OUTPUTS.get(name, Term()) for name in outputs}
        if zero_unknown and "log_prob" in beside:
            beside["log_prob"] = LogProb(zero_unknown=True)
        needs = {name for term in (loss, *beside.values()) for name in term.needs}
        return LossForm(
            loss=loss,
            beside=tuple(beside.items()),
            with_logit_sum="logit_sum" in needs,
            with_weighted="weighted" in needs,
            with_squares="squares" in needs,
            **more,
        )

    @staticmethod
    def of(
        config: FusedCEConfig,
        num_rows: int,
        vocab_size: int | None,
        vocab_start: int,
        device: torch.device,
        saves_logits: bool = False,
        soft: bool = False,
        **requested: Any,
    ) -> LossForm:
        """The form that ``config`` describes, for this rank's ``num_rows`` columns from ``vocab_start``.

        Args:
            vocab_size: valid classes over all ranks; needed with label smoothing.
            saves_logits: the backend's; its statistics must be those of the rounded logits that it saves.
            soft: whether there are soft targets instead of labels.
            requested: see :meth:`of_outputs`.
        """
        valid_columns = None
        if config.true_vocab_size is not None:
            real_columns = min(max(config.true_vocab_size - vocab_start, 0), num_rows)
            valid_columns = torch.full((1,), real_columns, dtype=torch.int64, device=device)
        loss: Term = SoftTargets() if soft else CROSS_ENTROPY
        if config.label_smoothing:
            assert vocab_size is not None
            # Not in torch's default dtype, which others may set.
            fp32 = partial(torch.full, (), dtype=torch.float32, device=device)
            num_classes, sigma = fp32(float(vocab_size)), fp32(config.label_smoothing)
            if config.label_smoothing_form == "megatron":
                sigma = sigma * num_classes / (num_classes - 1)
            loss = (1 - sigma) * loss + Uniform.of(sigma, num_classes)
        if config.z_loss:
            loss = loss + ZLoss(config.z_loss)
        return LossForm.of_outputs(
            loss=loss,
            softcap=config.logit_softcap,
            valid_columns=valid_columns,
            rounded=config.logit_precision == "activations" or saves_logits,
            **requested,
        )

    def from_column(self, start: int) -> LossForm:
        """The form for the columns of this shard from ``start`` on."""
        if self.valid_columns is None:
            return self
        return replace(self, valid_columns=(self.valid_columns - start).clamp_(min=0))

    def finish(self, merged: Merged) -> TokenOutputs:
        """The loss in this form and the requested outputs, fp32 ``[C]``."""
        rows = Rows(merged)
        return TokenOutputs(self.loss.value(rows), **{name: term.value(rows) for name, term in self.beside})

    def grad_coefficients(self, terms: TokenTerms, upstream: Upstream) -> GradCoefficients:
        """Coefficients of the gradient of the logits, fp32 ``[C]``.

        Args:
            upstream: upstream gradients of a chunk, times the factor of all gradients (the logit scale).
        """
        rows = Rows(saved=terms)
        if upstream.is_of_loss_alone:
            return self.loss.pull(rows, 1.0).coefficients(rows, upstream.loss)
        pull = self.loss.pull(rows, upstream.loss)
        for name, term in self.beside:
            given = getattr(upstream, name, None)
            if given is not None:
                pull = pull + term.pull(rows, given)
        return pull.coefficients(rows, torch.ones_like(upstream.loss))

    def own_coefficients(self, merged_terms: Tensor) -> Tensor:
        """``row_max, scale, neg_label_grad`` for an upstream gradient of 1: fp32 ``[3, C]`` or more rows.

        Not with label smoothing, which subtracts a constant on every column beside them.
        """
        if self.is_plain:
            return merged_terms
        made = self.grad_coefficients(TokenTerms.of(merged_terms), Upstream(merged_terms[0]))
        return torch.stack(made[:3])

    def largest_factor(self, of_chunks: Sequence[Tensor | None]) -> Tensor | None:
        """By how much gradients may exceed their upstream gradients, fp32 []; None: by nothing.

        Args:
            of_chunks: their saved :class:`.TokenTerms`, as one tensor each.
        """
        if self.is_plain:
            return None
        bounds = [self.loss.bound(Rows(saved=TokenTerms.of(of))) for of in of_chunks if of is not None]
        largest = [bound.amax() for bound in bounds if bound is not None]
        return 1 + torch.stack(largest).amax() if largest else None


PLAIN = LossForm()
