"""The options of one head, in one frozen dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass

STRATEGY_CHOICES = ("auto", "store", "recompute")
ROW_BACKEND_CHOICES = ("auto", "triton", "torch")

#: Tokens of a chunk when neither ``num_chunks`` nor ``chunk_tokens`` is given. Every chunk reads and
#: writes the fp32 ``grad_weight`` once, which costs about ``205 / C`` of the step: 5 % at 4096.
DEFAULT_CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class FusedCEConfig:
    """Options of :func:`megatron_fused_ce.fused_linear_cross_entropy`.

    Raises ``ValueError`` when a field does not fit, saying what to do.
    """

    #: ``store`` keeps the chunk logits until the backward (3 matrix products), ``recompute`` computes
    #: them again (4), ``auto`` chooses (today: ``recompute``).
    strategy: str = "auto"
    #: Cut the tokens into this many chunks of equal size (they differ by one token at most).
    num_chunks: int | None = None
    #: Or cut them into chunks of this many tokens, counted over the tensor-parallel group.
    chunk_tokens: int | None = None
    #: The logits are ``logit_scale * hidden @ weight.T`` (MuP, temperature).
    logit_scale: float = 1.0
    #: Compare shapes and options over the ranks on every call, not only on the first.
    debug_checks: bool = False
    #: Which row kernels run between the products: Triton on CUDA, plain PyTorch elsewhere by default.
    row_backend: str = "auto"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGY_CHOICES:
            raise ValueError(
                f"strategy is {self.strategy!r}; choose one of {', '.join(STRATEGY_CHOICES)}"
            )
        if self.row_backend not in ROW_BACKEND_CHOICES:
            raise ValueError(
                f"row_backend is {self.row_backend!r}; choose one of "
                f"{', '.join(ROW_BACKEND_CHOICES)}"
            )
        if self.num_chunks is not None and self.chunk_tokens is not None:
            raise ValueError(
                f"both num_chunks={self.num_chunks} and chunk_tokens={self.chunk_tokens} are given; "
                "give one of them"
            )
        for name in ("num_chunks", "chunk_tokens"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if not math.isfinite(self.logit_scale) or self.logit_scale == 0:
            raise ValueError(f"logit_scale must be finite and not 0, got {self.logit_scale}")
