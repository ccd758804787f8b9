"""How far rounding may move the definition: what `reference.plain_head` and others take as ``roundings``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fused_ce.scripts.lib.reference import HeadInputs

#: Of fp32: half the distance from 1 to the next number.
UNIT_32 = 2.0**-24
#: Roundings to fp32 between a logit and its exponential, or between that and a result.
FP32_STEPS = 8

#: fp16 ends at 2**16. Gradients of logits stand at 2**8 there, and lower for weights above 2**4: a row of
#: them sums up to 2**3 times its upstream gradient, and half of the range is left. The head's own constants
#: are not read: one that lost digits would loosen its own bound.
FP16_GRADIENT_BITS = 8
FP16_LARGE_WEIGHT_BITS = 4
#: ``grad_hidden`` that waits for its upstream gradient stands at up to this power of two.
FP16_GRAD_HIDDEN_BITS = 4


class Roundings:
    """Moves numbers as far as rounding them could, up or down at random.

    What an evaluation in the operands' dtype may do to the definition, over ``shards`` (rows of each, in
    order) of the vocabulary: each logit rounded to the dtype after a sum of products in fp32; the gradient of
    each logit and each shard's part of ``grad_hidden`` rounded to it, and as a summand of the whole; the
    results; some steps in fp32 beside them (docs/math.md, Precision).
    """

    def __init__(self, inputs: HeadInputs, seed: int, shards: tuple[int, ...]) -> None:
        info = torch.finfo(inputs.hidden.dtype)
        self._generator = torch.Generator().manual_seed(seed)
        # By all of a rounding, or by any part of it: equal numbers then come to differ.
        self._to_the_end = seed % 2 == 0
        self._shards = shards
        # Half the distance from 1 to the next number, and between the numbers below the normal ones.
        self._unit, self._subnormal = info.eps / 2, info.smallest_normal * info.eps / 2
        # The same of a gradient of a logit, and of grad_hidden until it gets its size: grad_in_forward makes
        # it for upstream gradients of about 1, fp16 at a power of two times its size.
        upstream = float(inputs.grad_loss.abs().max() * abs(inputs.logit_scale))
        waits = inputs.config.strategy in ("grad_in_forward", "auto")
        self._gradient, self._waiting = self._subnormal, upstream * self._subnormal * waits
        if inputs.hidden.dtype == torch.float16:
            if 0 < upstream < math.inf:
                (_, of_upstream), (_, of_weight) = map(math.frexp, (upstream, inputs.weight.abs().max()))
                bits = of_upstream + max(0, of_weight - FP16_LARGE_WEIGHT_BITS) - FP16_GRADIENT_BITS
                self._gradient *= 2.0 ** min(100, max(-100, bits))
            self._waiting = self._waiting * 2.0**-FP16_GRAD_HIDDEN_BITS + self._gradient

    def of_loss(self, loss: Tensor, log_of_sum: float | Tensor) -> Tensor:
        """``log_of_sum``: how much of it is the logarithm of a sum of 1 or more, relative to the maximum."""
        return self._moved(loss, FP32_STEPS * UNIT_32, FP32_STEPS * UNIT_32 * log_of_sum)

    def of_gradient(self, gradient: Tensor, num_summands: int) -> Tensor:
        """Rounded twice: as it is summed (of so many products), and as it is scaled afterwards."""
        lost = (self._subnormal + self._waiting) * num_summands
        for _ in range(2):
            gradient = self._moved(gradient, self._unit, lost)
        return gradient

    def of_term(self, z: Tensor) -> Tensor:
        """``z`` where it enters a term of a loss: the gradients of the terms are rounded one by one."""
        return _with_gradient(z, lambda given: self._moved(given, FP32_STEPS * UNIT_32))

    def of_log(self, log_p: Tensor) -> Tensor:
        """Logarithms of probabilities, as numbers of fp32: what they weigh is not moved."""
        return log_p + (self._moved(log_p, FP32_STEPS * UNIT_32) - log_p).detach()

    def of_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """``hidden @ weight.T``."""
        return torch.cat([self._of_shard(hidden, rows) for rows in weight.split(self._shards)], -1)

    def _of_shard(self, hidden: Tensor, weight: Tensor) -> Tensor:
        once = self._unit + FP32_STEPS * UNIT_32
        products = hidden.detach().abs() @ weight.detach().abs().t()
        accumulated = products * (UNIT_32 * hidden.shape[-1] ** 0.5)
        z = _with_gradient(hidden, lambda given: self.of_gradient(given, len(weight))) @ weight.t()
        z = z + (self._moved(z, once, accumulated) - z).detach()
        return _with_gradient(z, lambda given: self._moved(given, once, self._gradient))

    def _moved(self, x: Tensor, relative: float, absolute: float | Tensor = 0.0) -> Tensor:
        drawn = torch.rand(x.shape, generator=self._generator).to(x) * 2 - 1
        drawn = drawn.sign() if self._to_the_end else drawn
        return x + drawn * (relative * x.abs() + absolute)


def _with_gradient(x: Tensor, moved: Callable[[Tensor], Tensor]) -> Tensor:
    """``x``, whose gradient goes through ``moved``."""
    x = x.view_as(x)
    x.register_hook(moved)
    return x
