"""Losses as sums of terms, public names. The algebra: :mod:`.terms`; a term of your own: docs/losses.md."""

from megatron_fused_ce.losses.check import check
from megatron_fused_ce.losses.label import CrossEntropy, Uniform, ZLoss
from megatron_fused_ce.losses.outputs import Correct, Entropy, LogProb, LogProbs, Lse, Predicted
from megatron_fused_ce.losses.terms import Pull, Rows, Term

__all__ = [
    "Correct",
    "CrossEntropy",
    "Entropy",
    "LogProb",
    "LogProbs",
    "Lse",
    "Predicted",
    "Pull",
    "Rows",
    "Term",
    "Uniform",
    "ZLoss",
    "check",
]
