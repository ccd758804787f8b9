"""``tanh`` and its slope for bent logits, inlined into the kernels that need them.

Two exponentials' worth of special functions an element (one ``exp``, one reciprocal).
:mod:`.exp_product_hopper` has its own, in Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh_and_grad(x):
    """``tanh(x)`` and ``1 - tanh(x)**2``, which would lose its digits if it were computed so.

    So would ``tanh`` of a small ``x`` as a difference of exponentials: there it is its series, to a relative
    error of 1e-8 at 1/4.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -t, t)
    x2 = x * x
    series = x2 * (2.0 / 15.0 + x2 * (-17.0 / 315.0 + x2 * (62.0 / 2835.0)))
    series = x + x * x2 * (series - 1.0 / 3.0)
    return tl.where(tl.abs(x) < 0.25, series, t), 4.0 * e / ((1.0 + e) * (1.0 + e))
