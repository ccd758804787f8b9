"""What the loss of a token is beside the plain cross-entropy, as arithmetic on ``[C]`` floats.

With ``s = softcap(logit_scale * hidden @ weight.T)`` over the ``K`` columns that take part::

    softcap(z) = cap * tanh(z / cap)                                    (none: z)
    loss       = (1 - sigma) * (lse - s_y) + sigma * (lse - mean s) + z_loss * lse**2
    d loss / d s_j = (1 + 2 * z_loss * lse) * p_j - sigma / K - (1 - sigma) * [j = y]
    d loss / d z_j = d loss / d s_j * (1 - (s_j / cap)**2)

``sigma`` is the label smoothing, times ``K / (K - 1)`` in Megatron's form. For a label outside the
vocabulary the row maximum stands for ``s_y``, as it does without options. See docs/math.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.row_ops import Merged, TokenTerms

if TYPE_CHECKING:
    from megatron_fused_ce.vocab_parallel import VocabParallel


class GradientTerms(NamedTuple):
    """What the gradient of a token's logits needs, fp32 ``[C]``.

    ``d loss / d s_j = exp(s_j - row_max) * scale - share``, and ``-deficit`` at the label. Without options
    they are the :class:`TokenTerms` themselves.
    """

    row_max: Tensor
    scale: Tensor
    deficit: Tensor


@dataclass(frozen=True)
class LossForm:
    """The options of one call. Tensors are on the call's device, so the host never waits."""

    z_loss: float = 0.0
    #: ``cap``; None for none
    softcap: float | None = None
    sigma: Tensor | None = None  # fp32 [], None without smoothing
    num_classes: Tensor | None = None  # fp32 [], K; with smoothing
    share: Tensor | None = None  # fp32 [], sigma / K; with smoothing
    #: int64 [1]: columns of this shard that take part, None for all
    num_columns: Tensor | None = None

    @staticmethod
    def of(
        config: FusedCEConfig,
        comm: VocabParallel,
        num_rows: int,
        first_id: int | Tensor,
        device: torch.device,
    ) -> LossForm:
        """The form that ``config`` asks for, for this rank's ``num_rows`` columns from ``first_id``.

        Collectives: with label smoothing and no ``true_vocab_size`` one all-reduce of a float (R > 1).
        """
        sigma = num_classes = share = num_columns = None
        if config.true_vocab_size is not None:
            inside = config.true_vocab_size - first_id
            if not isinstance(inside, Tensor):
                inside = torch.full((), inside, dtype=torch.int64, device=device)
            num_columns = inside.clamp(0, num_rows).reshape(1)
        if config.label_smoothing:
            if config.true_vocab_size is None:
                num_classes = comm.vocab_size(num_rows, device)
            else:
                num_classes = torch.full((), float(config.true_vocab_size), device=device)
            sigma = torch.full((), config.label_smoothing, device=device)
            if config.label_smoothing_form == "megatron":
                sigma = sigma * num_classes / (num_classes - 1)
            share = sigma / num_classes
        return LossForm(config.z_loss, config.logit_softcap, sigma, num_classes, share, num_columns)

    def finish(self, merged: Merged) -> Merged:
        """``merged`` with the loss in this form."""
        if self.sigma is None and not self.z_loss:
            return merged
        loss, terms = merged.loss, TokenTerms(*merged.terms)
        lse = terms.row_max - terms.inv_sum.log()
        if self.sigma is not None:
            assert merged.logit_sum is not None and self.num_classes is not None
            mean = merged.logit_sum / self.num_classes
            loss = (1 - self.sigma) * loss + self.sigma * (lse - mean)
        if self.z_loss:
            loss = loss + self.z_loss * lse * lse
        return merged._replace(loss=loss)

    def gradient_terms(self, terms: TokenTerms) -> GradientTerms:
        """``deficit`` from ``miss`` and not from ``1 - p``: nothing cancels for a confident token."""
        row_max, scale, deficit = terms.row_max, terms.inv_sum, terms.miss
        if self.z_loss:
            more = 2 * self.z_loss * (row_max - terms.inv_sum.log())
            scale = scale * (1 + more)
            deficit = deficit - more * (1 - terms.miss)
        if self.sigma is not None and self.share is not None:
            deficit = deficit - (self.sigma - self.share)
        return GradientTerms(row_max, scale, deficit)


PLAIN = LossForm()
