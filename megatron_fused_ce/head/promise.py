"""Whether an upstream gradient is the one that a forward was promised.

``grad_in_forward`` makes its gradients in the forward, for token weights ``w`` known there, and its backward
multiplies them by one number ``c``. That is right only if the upstream gradient is ``g = c * w``, token by
token. :func:`fit_scalar` finds ``c`` and whether that holds, on the device; the host reads the answer in the
backward (:class:`Verdict`). Where it does not hold, nothing has been added anywhere yet: the backward drops
these gradients and makes them again as ``recompute`` does. So a wrong promise costs time, never a gradient.

The host waits for one number, and the device then waits for what the host launches next: nothing beside the
GEMMs of a large head, half of those of a small one (``planner.SMALLEST_FLOP_TO_WAIT``). It cannot be left
out. The upstream gradient is made in the backward, and ``grad_hidden`` goes on from there: a wrong one could
not be called back. Kernels that read the flag themselves would have to be launched in every backward, with
buffers for a second pass and, over several ranks, its collectives.
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

#: Largest relative difference of one token's ``g`` from ``c * w``. A multiplication in fp32 rounds by 2**-24;
#: Megatron's loss has one per token (scalars cancel in ``c``), another loss perhaps eight, in another order
#: than its weights': 2**-21, and ``c``, a mean of such ratios, as much again. Compared token by token, not in
#: norm, so that one wrong token in a million is seen.
RTOL = 2.0**-20

#: Gradients below fp32's smallest normal number may have been flushed to zero on their way.
ATOL = 2.0**-126

#: What :func:`fit_scalar` finds. Of several ranks the largest counts for all.
KEPT, NOT_FINITE, BROKEN = 0, 1, 2

#: Message of a CUDA graph's assertion; torch takes at most 254 characters there.
_ASSERTION = (
    "fused-ce grad_in_forward: the upstream gradient is not a scalar times the token weights, and a graph "
    "cannot make other gradients: use --fused-ce-strategy store or recompute, or give the loss's weights"
)


@dataclass
class Counts:
    """Backwards of ``grad_in_forward`` in this process."""

    #: that handed over the gradients made in the forward
    kept: int = 0
    #: that made them again
    remade: int = 0


counts = Counts()


def count(kept: bool) -> None:
    """Count a backward, in any thread."""
    with _counting:
        counts.kept += kept
        counts.remade += not kept


_counting = threading.Lock()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Head:
    """One head: the calls of one output layer, or of all callers that name none."""

    #: for messages
    name: str
    #: unlike id(), never reused; the same on every rank that makes its heads in the same order
    number: int = field(default_factory=lambda: next(_numbers))
    #: tells the user
    say: Callable[[str], None] = warnings.warn


#: The head of calls that name none.
UNNAMED = Head("a head")


class HeadOfGroup(NamedTuple):
    """A head with the shards of its weight, which are the same on every rank of its group."""

    head: Head
    shard_sizes: tuple[int, ...]  # rows of its weight, by rank
    hidden_size: int


#: The same of ``skip_masked``.
_ASSERTION_OF_SKIPPED = (
    "fused-ce: a token of weight 0 (skip_masked) or outside active_mask was left out and has an upstream "
    "gradient; leave --fused-ce-skip-masked (skip_masked) out, or give that token a weight"
)


def broken_promise(of_group: HeadOfGroup) -> str:
    """What a user is told about a broken promise, once."""
    head, shard_sizes, hidden_size = of_group
    size = f"{sum(shard_sizes)} rows of {hidden_size}"
    return (
        f"the upstream gradient of the per-token loss of {head.name} ({size}) is not a scalar times the "
        "token weights that grad_in_forward was given (in Megatron: the loss_mask of the model's call). Its "
        "gradients were made again and are right; that took twice the GEMMs of a step. From now on this head "
        "recomputes: four GEMMs instead of three, beside a teacher six instead of four. To save the first "
        "detour: --fused-ce-strategy recompute or store (FusedCEConfig(strategy=...)), or give the weights "
        "that the loss uses"
    )


@torch.no_grad()
def fit_scalar(grad_loss: Tensor, token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Fit the scalar ``c`` of ``grad_loss = c * token_weights``, and tell whether it fits.

    ::

        c = sum(g * w) / sum(w * w)              # 0 where all weights are 0, which needs g = 0
        fits = all(|g - c * w| <= RTOL * |c * w| + ATOL)

    in fp64, whose products of fp32 numbers are exact. Runs no collective; the host does not wait.

    Args:
        grad_loss: upstream gradient of the per-token loss, any shape, float.
        token_weights: the same shape, any float dtype, any values (not only 0 and 1).

    Returns:
        ``c``: fp32 []. What was found: int64 [], :data:`KEPT`; :data:`NOT_FINITE` where an upstream gradient
        is inf or NaN, or ``c`` is in fp32 (it is then NaN); else :data:`BROKEN`, and so are weights that are
        inf or NaN. Upstream gradients below 2**-126, which fp32 rounds coarsely or to 0, count as fitting.

    Raises:
        ValueError: the shapes differ.
    """
    if grad_loss.shape != token_weights.shape:
        raise ValueError(
            f"grad_loss has shape {tuple(grad_loss.shape)} and token_weights "
            f"{tuple(token_weights.shape)}; expected one weight for each token's gradient"
        )
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


def _of_all_ranks(words: Tensor, scale: Tensor | None, group: Any) -> Tensor:
    """The largest of each word; the first is :data:`BROKEN` where the ranks' scalars differ."""
    if group is None or scale is None:
        return largest_over_ranks(words, group)
    # A NaN is not lost: the first word tells of it.
    both = torch.stack((scale, -scale)).double().nan_to_num()
    largest = largest_over_ranks(torch.cat((words.double(), both)), group)
    most, least = largest[-2], -largest[-1]
    differ = most - least > RTOL * torch.maximum(most.abs(), least.abs())
    words = largest[:-2].to(torch.int64)
    words[0] = torch.maximum(words[0], BROKEN * differ)
    return words


class Verdict:
    """What the device found about an upstream gradient, for the host to read in the backward.

    The worst that a rank found counts for all ranks, so that all of them go one way. It is also broken where
    their scalars differ: ``grad_hidden`` was summed over the ranks in the forward, and no scalar is right for
    the sum.

    Collectives, when it is made: one MAX all-reduce of a few numbers (R > 1).

    While a CUDA graph is captured the host cannot wait, and there is no collective: the graph asserts on the
    device that all is well, and leaves NaN where an upstream gradient is not finite.
    """

    def __init__(
        self,
        found: Tensor,  # int64 []: of fit_scalar
        scale: Tensor | None,  # fp32 []: the same; None where no gradients were made
        skipped: Tensor | None,  # int64 [2]: of Kept.count_lost
        group: Any,  # the tensor-parallel group, or None
    ) -> None:
        words = found.reshape(1) if skipped is None else torch.cat((found.reshape(1), skipped))
        self._copy: HostCopy | None = None
        self._words = [KEPT, 0, 0]
        if words.is_cuda and torch.cuda.is_current_stream_capturing():
            torch._assert_async(words[0] != BROKEN, _ASSERTION)  # type: ignore[call-overload]
            if skipped is not None:
                torch._assert_async(words[1] == 0, _ASSERTION_OF_SKIPPED)  # type: ignore[call-overload]
            words = torch.zeros_like(words)
        else:
            words = _of_all_ranks(words, scale, group)
            self._copy = HostCopy(words)
        #: int64 [1], on the device: not 0 where gradients made in the forward must not be used
        self.flag = words[:1]

    def _read(self) -> list[int]:
        if self._copy is not None:
            words = self._copy.read()
            self._words[: len(words)], self._copy = words, None
        return self._words

    @property
    def kept(self) -> bool:
        """Whether the promise was kept. The host waits."""
        return self._read()[0] == KEPT

    @property
    def broken(self) -> bool:
        """Whether it was broken, by finite numbers. The host waits."""
        return self._read()[0] == BROKEN

    @property
    def num_lost(self) -> int:
        """Number of skipped tokens whose upstream gradient is finite and not 0. The host waits."""
        return self._read()[1]

    @property
    def lost_not_finite(self) -> bool:
        """Whether a skipped token's upstream gradient is inf or NaN. The host waits."""
        return self._read()[2] > 0


def verdict_of(
    upstream: Tensor,  # [parts, n] fp32, of the loss
    token_weights: Tensor | None,  # those that gradients were made for; None where none were made
    lost: Tensor | None,  # int64 [2]: of Kept.count_lost
    group: Any,
) -> tuple[Tensor | None, Verdict]:
    """The scalar for gradients made in the forward, and what the host must know of the upstream gradient.

    Collectives: those of :class:`Verdict`.
    """
    if token_weights is None:
        return None, Verdict(torch.zeros((), dtype=torch.int64, device=upstream.device), None, lost, group)
    scale, found = fit_scalar(upstream, token_weights)
    return scale, Verdict(found, scale, lost, group)
