"""A head's outputs for each token beside its loss, and their upstream gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

#: Outputs beside the loss that can carry a gradient.
DIFFERENTIABLE = ("log_prob", "lse", "entropy")

#: Names of :class:`TokenOutputs` beside the loss.
OUTPUT_CHOICES = (*DIFFERENTIABLE, "predicted", "correct", "sum_p_squared")


def differentiable_of(outputs: Sequence[str]) -> tuple[str, ...]:
    """The names among ``outputs`` that can carry a gradient."""
    return tuple(name for name in outputs if name in DIFFERENTIABLE)


class TokenOutputs(NamedTuple):
    """Results for each token, in the labels' shape; None if not requested.

    ``s`` are the logits of the loss (scaled, softcapped, without masked padding), ``p = softmax(s)``.
    """

    loss: Tensor  # fp32
    log_prob: Tensor | None = None  # fp32: log p_y; max s - lse for a label outside the vocabulary
    lse: Tensor | None = None  # fp32: log sum exp s
    entropy: Tensor | None = None  # fp32: -sum p log p
    predicted: Tensor | None = None  # int64: argmax s over all shards, lowest on a tie; -1 with NaN
    correct: Tensor | None = None  # bool: no logit is larger than the label's
    sum_p_squared: Tensor | None = None  # fp32: sum p**2

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenOutputs:
        """Apply a function to every result that is there."""
        return TokenOutputs(*[None if given is None else change(given) for given in self])  # type: ignore[arg-type]


class TokenLogProbs(NamedTuple):
    """Log-probabilities of given tokens, fp32, in the labels' shape; None if not requested."""

    log_prob: Tensor
    entropy: Tensor | None = None
    sum_p_squared: Tensor | None = None  # of all classes; without a gradient


class Upstream(NamedTuple):
    """Upstream gradients, fp32, for all tokens ``[parts, n]`` or for a chunk ``[C]``; None stands for 0."""

    loss: Tensor
    log_prob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    #: results of the forward that the gradient needs
    made_entropy: Tensor | None = None

    @property
    def gradients(self) -> list[Tensor]:
        return [given for given in self[:4] if given is not None]

    @property
    def beside_the_loss(self) -> bool:
        return any(given is not None for given in self[1:4])

    def map(self, change: Callable[[Tensor], Tensor]) -> Upstream:
        """Apply a function to the gradients and to the forward's results."""
        return Upstream(*[None if given is None else change(given) for given in self])  # type: ignore[arg-type]

    def scaled(self, scale: Tensor | float) -> Upstream:
        """The gradients times ``scale``; the forward's results unchanged."""
        kept = self.made_entropy
        return self.map(lambda given: given * scale)._replace(made_entropy=kept)
