"""The loss of a token with its options and other outputs, as arithmetic on ``[C]`` floats.

With ``s = softcap(logit_scale * hidden @ weight.T)`` over the ``K`` valid columns::

    softcap(z) = cap * tanh(z / cap)                                    (none: z)
    loss       = (1 - sigma) * (lse - s_y) + sigma * (lse - mean s) + z_loss * lse**2
    d loss / d s_j = (1 + 2 * z_loss * lse) * p_j - sigma / K - (1 - sigma) * [j = y]
    d loss / d z_j = d loss / d s_j * (1 - (s_j / cap)**2)

``sigma`` is the label smoothing, times ``K / (K - 1)`` in Megatron's form. For a label outside the
vocabulary the row maximum stands for ``s_y``, as it does without options. With soft targets ``q`` of mass ``Q
= sum q`` instead of a label::

    loss       = Q * lse - sum q_i s_i + z_loss * lse**2
    d loss / d s_j = (Q + 2 * z_loss * lse) * p_j - q_j

and of the outputs beside the loss, with ``h = lse - sum p s`` the entropy::

    d log p_y / d s_j = [j = y] - p_j      d lse / d s_j = p_j      d h / d s_j = -p_j * (log p_j + h)

See docs/math.md.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.records import (
    NOT_HERE,
    GradCoefficients,
    Merged,
    RowOptions,
    SoftTargets,
)
from megatron_fused_ce.row_ops import TokenTerms
from megatron_fused_ce.token_outputs import TokenOutputs, Upstream


class TeacherTargets(NamedTuple):
    """The ``k`` likeliest classes of each token by a teacher: ``[b, s, k]`` or ``[T, k]``."""

    ids: Tensor  # int64 or int32, global ids; entries outside the vocabulary are ignored
    log_probs: Tensor  # float

    @property
    def kind(self) -> Hashable:
        """Shapes and dtypes: everything that their checks depend on."""
        return tuple((part.shape, part.dtype, part.device) for part in self)


#: Elements of one temporary of :func:`merge_duplicates`.
DUPLICATE_ELEMENTS = 1 << 22


def merge_duplicates(ids: Tensor, log_probs: Tensor) -> SoftTargets:
    """Add up the shares ``[k, T]`` of entries with one id, at its first entry; drop the other entries.

    Dropped and negative ids become -1.
    """
    k, num_tokens = ids.shape
    probs = torch.where(ids >= 0, log_probs.exp(), 0.0)
    once, total = torch.full_like(ids, -1), torch.zeros_like(probs)
    earlier = torch.ones(k, k, dtype=torch.bool, device=ids.device).tril(-1).unsqueeze(-1)
    step = max(1, DUPLICATE_ELEMENTS // (k * k))
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        same = ids[:, None, part] == ids[None, :, part]
        first = ~(same & earlier).any(dim=1) & (ids[:, part] >= 0)
        once[:, part] = torch.where(first, ids[:, part], -1)
        total[:, part] = torch.where(first, (same * probs[None, :, part]).sum(dim=1), 0.0)
    return SoftTargets(once, total)


@dataclass(frozen=True)
class LossForm(RowOptions):
    """The options of one call. Tensors are on the call's device, so the host never waits."""

    z_loss: float = 0.0
    sigma: Tensor | None = None  # fp32 [] sigma; None without smoothing
    num_classes: Tensor | None = None  # fp32 [], K; with smoothing
    smoothing_per_class: Tensor | None = None  # fp32 [], sigma / K; with smoothing
    #: requested outputs beside the loss, from token_outputs.OUTPUT_CHOICES
    outputs: tuple[str, ...] = ()
    #: the requested outputs that may get upstream gradients
    differentiable: tuple[str, ...] = ()
    #: whether there are soft targets instead of labels
    soft: bool = False
    #: whether ``log_prob`` is 0 for a label outside the vocabulary; its gradient is the same
    zero_unknown: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the loss is ``-log_prob`` of each label, so that one upstream gradient serves both."""
        return self.sigma is None and not self.z_loss and not self.soft

    @staticmethod
    def of(
        config: FusedCEConfig,
        num_rows: int,
        vocab_size: int | None,
        vocab_start: int,
        device: torch.device,
        outputs: tuple[str, ...] = (),
        saves_logits: bool = False,
        **requested: Any,
    ) -> LossForm:
        """The form that ``config`` describes, for this rank's ``num_rows`` columns from ``vocab_start``.

        Args:
            vocab_size: valid classes over all ranks; needed with label smoothing.
            saves_logits: the backend's; its statistics must be those of the rounded logits that it saves.
            requested: the fields that are not in the config.
        """
        sigma = num_classes = smoothing_per_class = valid_columns = None
        if config.true_vocab_size is not None:
            real_columns = min(max(config.true_vocab_size - vocab_start, 0), num_rows)
            valid_columns = torch.full((1,), real_columns, dtype=torch.int64, device=device)
        if config.label_smoothing:
            assert vocab_size is not None
            # Not in torch's default dtype, which others may set.
            fp32 = partial(torch.full, (), dtype=torch.float32, device=device)
            num_classes, sigma = fp32(float(vocab_size)), fp32(config.label_smoothing)
            if config.label_smoothing_form == "megatron":
                sigma = sigma * num_classes / (num_classes - 1)
            smoothing_per_class = sigma / num_classes
        return LossForm(
            softcap=config.logit_softcap,
            valid_columns=valid_columns,
            with_logit_sum=sigma is not None,
            with_weighted="entropy" in outputs,
            with_squares="sum_p_squared" in outputs,
            rounded=config.logit_precision == "activations" or saves_logits,
            z_loss=config.z_loss,
            sigma=sigma,
            num_classes=num_classes,
            smoothing_per_class=smoothing_per_class,
            outputs=outputs,
            **requested,
        )

    def from_column(self, start: int) -> LossForm:
        """The form for the columns of this shard from ``start`` on."""
        if self.valid_columns is None:
            return self
        return replace(self, valid_columns=(self.valid_columns - start).clamp_(min=0))

    def finish(self, merged: Merged) -> TokenOutputs:
        """The loss in this form and the requested outputs, fp32 ``[C]``."""
        if self.is_plain and not self.outputs:
            return TokenOutputs(merged.loss)
        terms, extra = TokenTerms.of(merged.terms), merged.extra
        assert terms.label_shift is not None
        known = terms.label_shift != NOT_HERE
        # lse - max. For a confident token it is computed from the loss, which has more digits there; for a
        # large loss from the sum, which then has more.
        from_loss = merged.loss + torch.where(known, terms.label_shift, 0.0)
        log_sum = torch.where(terms.label_shift > -1, from_loss, -terms.inv_sum.log())
        lse = terms.row_max + log_sum
        loss = merged.loss
        if self.soft:
            assert extra.target_mass is not None and extra.target_sum is not None
            loss = extra.target_mass * log_sum - extra.target_sum
        if self.sigma is not None:
            assert extra.logit_sum is not None and self.num_classes is not None
            mean = extra.logit_sum / self.num_classes
            loss = (1 - self.sigma) * loss + self.sigma * (lse - mean)
        if self.z_loss:
            loss = loss + self.z_loss * lse * lse
        entropy = predicted = sum_p_squared = None
        if extra.weighted is not None:
            own = torch.exp(terms.label_shift) * terms.label_shift
            own = torch.where(known & (own < 0), own, 0.0)  # the limit of exp(t) * t for t -> -inf is 0
            entropy = log_sum - (extra.weighted + own) * terms.inv_sum
        if extra.squares is not None:
            own = torch.where(known, torch.exp(terms.label_shift), 0.0)
            sum_p_squared = (extra.squares + own.square()) * terms.inv_sum.square()
        if extra.best is not None:
            # On a GPU a row's maximum drops a NaN; its loss keeps it.
            found = torch.isfinite(extra.best) & (merged.loss == merged.loss)
            predicted = torch.where(found, extra.best, -1.0).long()
        wanted = self.outputs
        log_prob = -merged.loss if "log_prob" in wanted else None
        if log_prob is not None and self.zero_unknown:
            log_prob = torch.where(known, log_prob, 0.0)
        return TokenOutputs(
            loss,
            log_prob=log_prob,
            lse=lse if "lse" in wanted else None,
            entropy=entropy,
            predicted=predicted,
            correct=(terms.label_shift == 0) & (merged.loss == merged.loss) if "correct" in wanted else None,
            sum_p_squared=sum_p_squared,
        )

    def grad_coefficients(self, terms: TokenTerms, upstream: Upstream) -> GradCoefficients:
        """Coefficients of the gradient of the logits, fp32 ``[C]``.

        ``neg_label_grad`` comes from ``one_minus_p_label``, not from ``1 - p``, so nothing cancels for a
        confident token.

        Args:
            upstream: upstream gradients of a chunk, times the factor of all gradients (the logit scale).
        """
        scale, neg_label_grad = self._scale_and_label_grad(terms)
        plain = GradCoefficients(
            terms.row_max,
            scale,
            neg_label_grad,
            upstream.loss,
            smoothing_per_class=self.smoothing_per_class,
        )
        return self._with_outputs(plain, terms, upstream) if upstream.beside_the_loss else plain

    def own_coefficients(self, merged_terms: Tensor) -> Tensor:
        """``row_max, scale, neg_label_grad`` for an upstream gradient of 1: fp32 ``[3, C]`` or more rows.

        Not with label smoothing, which subtracts a constant on every column beside them.
        """
        if self.is_plain:
            return merged_terms
        terms = TokenTerms.of(merged_terms)
        scale, neg_label_grad = self._scale_and_label_grad(terms)
        return torch.stack((terms.row_max, scale, neg_label_grad))

    def _scale_and_label_grad(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        scale, neg_label_grad = terms.inv_sum, terms.one_minus_p_label
        if terms.mass is not None:
            scale = scale * terms.mass
        if self.z_loss:
            more = 2 * self.z_loss * (terms.row_max - terms.inv_sum.log())
            scale = scale + terms.inv_sum * more
            neg_label_grad = neg_label_grad - more * (1 - terms.one_minus_p_label)
        if self.sigma is not None and self.smoothing_per_class is not None:
            neg_label_grad = neg_label_grad - (self.sigma - self.smoothing_per_class)
        return scale, neg_label_grad

    @staticmethod
    def _with_outputs(plain: GradCoefficients, terms: TokenTerms, upstream: Upstream) -> GradCoefficients:
        """``plain`` times its upstream gradient, plus the gradients of the other outputs."""
        loss, log_prob, lse, entropy, made_entropy = upstream
        scale, neg_label_grad = plain.scale * loss, plain.neg_label_grad * loss
        assert terms.label_shift is not None
        p_label = torch.exp(terms.label_shift) * terms.inv_sum
        entropy_scale = None
        if log_prob is not None:
            scale, neg_label_grad = (
                scale - terms.inv_sum * log_prob,
                neg_label_grad - terms.one_minus_p_label * log_prob,
            )
        if lse is not None:
            scale, neg_label_grad = scale + terms.inv_sum * lse, neg_label_grad - p_label * lse
        if entropy is not None and made_entropy is not None:
            log_inv = terms.inv_sum.log()
            entropy_scale = -terms.inv_sum * entropy
            scale = scale + entropy_scale * (log_inv + made_entropy)
            pull = p_label * (terms.label_shift + log_inv + made_entropy)
            neg_label_grad = neg_label_grad + entropy * torch.where(p_label > 0, pull, 0.0)
        smoothing_per_class = None if plain.smoothing_per_class is None else plain.smoothing_per_class * loss
        return GradCoefficients(
            plain.row_max,
            scale,
            neg_label_grad,
            torch.ones_like(loss),
            entropy_scale,
            smoothing_per_class,
        )


PLAIN = LossForm()
