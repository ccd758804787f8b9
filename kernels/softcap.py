"""``tanh`` and its gradient for softcapped logits, inlined into the kernels that need them.

One ``exp`` and one reciprocal an element.
:mod:`.scaled_exp_hopper` has its own, in Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh_and_grad(x):
    """``tanh(x)`` and its gradient ``1 - tanh(x)**2``, both to fp32's relative precision.

    The gradient is ``4e / (1 + e)**2`` with ``e = exp(-2 * abs(x))``, since ``1 - tanh(x)**2`` cancels for a
    large ``x``. Below 1/4, where a difference of exponentials cancels, ``tanh`` is its series, to a relative
    error of 1e-8.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -t, t)
    x2 = x * x
    series = x2 * (2.0 / 15.0 + x2 * (-17.0 / 315.0 + x2 * (62.0 / 2835.0)))
    series = x + x * x2 * (series - 1.0 / 3.0)
    return tl.where(tl.abs(x) < 0.25, series, t), 4.0 * e / ((1.0 + e) * (1.0 + e))
