"""What a head can say of each token beside its loss, and the upstream gradients that come back for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

#: Outputs beside the loss that can carry a gradient.
DIFFERENTIABLE = ("log_prob", "lse", "entropy")

#: Names of :class:`TokenOutputs` beside the loss.
OUTPUT_CHOICES = (*DIFFERENTIABLE, "predicted", "correct")


def differentiable_of(outputs: Sequence[str]) -> tuple[str, ...]:
    """Those that can carry a gradient."""
    return tuple(name for name in outputs if name in DIFFERENTIABLE)


class TokenOutputs(NamedTuple):
    """Of each token, in the labels' shape; None for what was not asked for.

    With ``s`` the logits that the loss is made of (scaled, bent, without masked padding) and
    ``p = softmax(s)``:
    """

    loss: Tensor  # fp32
    log_prob: Tensor | None = None  # fp32: log p_y; max s - lse for a label outside the vocabulary
    lse: Tensor | None = None  # fp32: log sum exp s
    entropy: Tensor | None = None  # fp32: -sum p log p
    predicted: Tensor | None = None  # int64: argmax s over all shards, lowest on a tie; -1 with NaN
    correct: Tensor | None = None  # bool: no logit is larger than the label's

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenOutputs:
        """The same of what is there."""
        return TokenOutputs(*[None if given is None else change(given) for given in self])  # type: ignore[arg-type]


class Upstream(NamedTuple):
    """Upstream gradients, fp32, of all tokens ``[parts, n]`` or of a chunk's ``[C]``; None for 0."""

    loss: Tensor
    log_prob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    #: what the forward gave, where there is a gradient for it
    made_entropy: Tensor | None = None

    @property
    def gradients(self) -> list[Tensor]:
        return [given for given in self[:4] if given is not None]

    @property
    def beside_the_loss(self) -> bool:
        return any(given is not None for given in self[1:4])

    def map(self, change: Callable[[Tensor], Tensor]) -> Upstream:
        """Of the gradients and of what the forward gave."""
        return Upstream(*[None if given is None else change(given) for given in self])  # type: ignore[arg-type]

    def scaled(self, scale: Tensor | float) -> Upstream:
        """The gradients, times ``scale``."""
        kept = self.made_entropy
        return self.map(lambda given: given * scale)._replace(made_entropy=kept)
