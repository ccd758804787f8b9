"""Checks in the backward whether an upstream gradient is the one that ``grad_in_forward`` was promised.

The forward makes gradients for token weights ``w``, and the backward multiplies them by one number ``c``.
That is right only if the upstream gradient is ``g = c * w``, token by token. On the device
:func:`fit_scalar` finds ``c``, and whether that holds; the host reads the answer (:class:`Verdict`). If it
does not hold, nothing has been added anywhere yet: the backward drops these gradients and makes them again,
as ``recompute`` does. A broken promise costs time, never a gradient.

The host waits for one number, and the device then waits for the host's next launches. That is nothing beside
the GEMMs of a large head, and half the time of a small one (``planner.SMALLEST_FLOP_TO_WAIT``). The wait
cannot be left out: ``grad_hidden`` goes on from this backward, and a wrong one could not be called back.
Kernels that read the flag themselves would have to be launched in every backward, with buffers for a second
pass and, over several ranks, its collectives.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fused_ce.head.host_copy import HostCopy
from megatron_fused_ce.ranks.collectives import largest_over_ranks

#: Largest relative difference of one token's ``g`` from ``c * w``. A multiplication in fp32 rounds by 2**-24.
#: Megatron's loss has one per token (scalars cancel in ``c``); another loss has perhaps eight, in another
#: order than its weights, which makes 2**-21, and ``c``, a mean of such ratios, has as much again. Tokens are
#: compared one by one, not in norm, so that one wrong token in a million is seen.
RTOL = 2.0**-20

#: Largest absolute difference: gradients below fp32's smallest normal number may have been flushed to zero.
ATOL = 2.0**-126

#: Results of :func:`fit_scalar`. If ranks differ, the largest counts for all.
KEPT, NOT_FINITE, BROKEN = 0, 1, 2

#: Messages of assertions inside a CUDA graph; torch takes at most 254 characters there.
_ASSERTION = (
    "fused-ce grad_in_forward: the upstream gradient is not a scalar times the token weights, and a graph "
    "cannot make other gradients: use --fused-ce-strategy store or recompute, or give the loss's weights"
)
_ASSERTION_OF_SKIPPED = (
    "fused-ce: a token of weight 0 (skip_masked) or outside active_mask was left out and has an upstream "
    "gradient; leave --fused-ce-skip-masked (skip_masked) out, or give that token a weight"
)


@dataclass
class Counts:
    """Number of backwards of ``grad_in_forward`` in this process."""

    kept: int = 0  # they used the gradients made in the forward
    remade: int = 0  # they made them again


counts = Counts()


def count(kept: bool) -> None:
    """Count a backward; any thread may call this."""
    with _counting:
        counts.kept += kept
        counts.remade += not kept


_counting = threading.Lock()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Head:
    """One head: an output layer whose calls share plans and promises, or all callers that name none."""

    #: its name in messages
    name: str
    #: identifies it; never reused, unlike id(); the same on all ranks that make their heads in one order
    number: int = field(default_factory=lambda: next(_numbers))
    #: function that tells the user a message
    say: Callable[[str], None] = warnings.warn


#: The head of calls that name none.
UNNAMED = Head("a head")


class HeadOfGroup(NamedTuple):
    """A head and the sizes of its weight: a key that is the same on every rank of its group."""

    head: Head
    shard_sizes: tuple[int, ...]  # rows of its weight, by rank
    hidden_size: int

    def tell_broken(self) -> None:
        """Tell the user that its promise was broken."""
        size = f"{sum(self.shard_sizes)} rows of {self.hidden_size}"
        self.head.say(
            f"the upstream gradient of the per-token loss of {self.head.name} ({size}) is not a scalar times "
            "the token weights that grad_in_forward was given (in Megatron: the loss_mask of the model's "
            "call). Its gradients were made again and are right; that took twice the GEMMs of a step. From "
            "now on this head recomputes: four GEMMs instead of three, beside a teacher six instead of four. "
            "To save the first detour: --fused-ce-strategy recompute or store (FusedCEConfig(strategy=...)), "
            "or give the weights that the loss uses"
        )


@torch.no_grad()
def fit_scalar(grad_loss: Tensor, token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Find the scalar ``c`` in ``grad_loss = c * token_weights``, and whether it fits every token.

    ::

        c = sum(g * w) / sum(w * w)              # 0 where all weights are 0, which needs g = 0
        fits = all(|g - c * w| <= RTOL * |c * w| + ATOL)

    in fp64, where products of fp32 numbers are exact. Runs no collective; the host does not wait.

    Args:
        grad_loss: upstream gradient of the per-token loss, any shape, float.
        token_weights: the same shape, any float dtype, any values (not only 0 and 1).

    Returns:
        ``c``, fp32 [], and int64 []: :data:`KEPT` if it fits. :data:`NOT_FINITE` if an upstream gradient is
        inf or NaN, or ``c`` is so in fp32 (``c`` is then NaN). Else, also if a weight is inf or NaN,
        :data:`BROKEN`. Upstream gradients below 2**-126, which fp32 rounds coarsely or to 0, always fit.
    """
    if grad_loss.is_cuda and grad_loss.dtype == token_weights.dtype == torch.float32:
        from megatron_fused_ce.kernels import upstream_kernels

        return upstream_kernels.fit_scalar(grad_loss.contiguous(), token_weights.contiguous(), RTOL, ATOL)
    g, w = grad_loss.double(), token_weights.double()
    norm = (w * w).sum()
    c = torch.where(norm > 0, (g * w).sum() / norm, 0.0)
    expected = c * w
    # `<=` and not `>`: a NaN among the weights must not pass.
    fits = ((g - expected).abs() <= RTOL * expected.abs() + ATOL).all()
    finite = torch.isfinite(g).all() & torch.isfinite(c.float())
    found = torch.where(finite, torch.where(fits, KEPT, BROKEN), NOT_FINITE)
    found = torch.where(torch.isfinite(norm), found, BROKEN)
    return torch.where(finite, c, torch.nan).float(), found


def _over_ranks(words: Tensor, scale: Tensor | None, group: Any) -> Tensor:
    """The largest of each word over the ranks. The first is :data:`BROKEN` if the ranks' scalars differ."""
    if group is None or scale is None:
        return largest_over_ranks(words, group)
    # nan_to_num loses no NaN: the first word is then NOT_FINITE.
    both = torch.stack((scale, -scale)).double().nan_to_num()
    largest = largest_over_ranks(torch.cat((words.double(), both)), group)
    most, least = largest[-2], -largest[-1]
    differ = most - least > RTOL * torch.maximum(most.abs(), least.abs())
    words = largest[:-2].to(torch.int64)
    words[0] = torch.maximum(words[0], BROKEN * differ)
    return words


class Verdict:
    """The answer of the device about an upstream gradient, which the host reads in the backward.

    The worst answer of any rank counts for all, so that all ranks do the same. A promise is also broken if
    the ranks' scalars differ: ``grad_hidden`` was summed over the ranks in the forward, and no scalar is
    right for the sum.

    Collectives, at construction: one MAX all-reduce of a few numbers (R > 1).

    While a CUDA graph is captured the host cannot wait, and no collective runs. The graph then asserts on the
    device that the promise was kept; an upstream gradient that is not finite leaves NaN.
    """

    def __init__(
        self,
        upstream: Tensor,  # [parts, n] fp32: upstream gradient of the loss
        token_weights: Tensor | None,  # for which gradients were made in the forward; None if none were
        lost: Tensor | None,  # int64 [2]: from Kept.count_lost
        group: Any,  # the tensor-parallel group, or None
    ) -> None:
        #: fp32 []: what the gradients made in the forward are to be multiplied by
        self.scale: Tensor | None = None
        if token_weights is None:
            found = torch.zeros((), dtype=torch.int64, device=upstream.device)
        else:
            self.scale, found = fit_scalar(upstream, token_weights)
        words = found.reshape(1) if lost is None else torch.cat((found.reshape(1), lost))
        self._copy: HostCopy | None = None
        self._words = [KEPT, 0, 0]
        if words.is_cuda and torch.cuda.is_current_stream_capturing():
            torch._assert_async(words[0] != BROKEN, _ASSERTION)  # type: ignore[call-overload]
            if lost is not None:
                torch._assert_async(words[1] == 0, _ASSERTION_OF_SKIPPED)  # type: ignore[call-overload]
            words = torch.zeros_like(words)
        else:
            words = _over_ranks(words, self.scale, group)
            self._copy = HostCopy(words)
        #: int64 [1], on the device: 0 if the gradients made in the forward may be used
        self.flag = words[:1]

    def read(self) -> list[int]:
        """:data:`KEPT`, :data:`NOT_FINITE` or :data:`BROKEN`; then how many skipped tokens have an upstream
        gradient that is finite and not 0, and how many one that is inf or NaN. The host waits."""
        if self._copy is not None:
            words = self._copy.read()
            self._words[: len(words)], self._copy = words, None
        return self._words

    @property
    def kept(self) -> bool:
        """Whether the promise was kept. The host waits."""
        return self.read()[0] == KEPT
