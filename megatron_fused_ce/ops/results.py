"""TODO."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
    #: of a student beside its teacher: fp32, with a gradient where it is the loss
    divergence: Tensor | None = None
    teacher_log_prob: Tensor | None = None  # the teacher's of the label, at temperature 1


class TokenLogProbs(NamedTuple):
    """Log-probabilities of given tokens, fp32, in the labels' shape; None if not requested."""

    log_prob: Tensor
    entropy: Tensor | None = None
