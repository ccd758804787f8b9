"""``tanh`` and its slope for bent logits, inlined into the kernels that need them.

Two exponentials' worth of special functions an element (one ``exp``, one reciprocal).
:mod:`.exp_product_hopper` has its own, in Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh_and_slope(x):
    """``tanh(x)`` and ``1 - tanh(x)**2``, which would lose its digits if it were computed so."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t), 4.0 * e / ((1.0 + e) * (1.0 + e))
