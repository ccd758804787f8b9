"""All pairs: calls of the head in which every two values of two axes meet."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.losses import LOSS_OPTIONS
from tests.support.op import DTYPES

Axes = dict[str, tuple[Any, ...]]
#: What the scaled-exp GEMM's epilogue cannot make. Its fp32 is the interpreter's: bf16 on GPUs.
BEYOND_SCALED_EXP = [
    *(("option", name) for name, options in LOSS_OPTIONS.items() if "label_smoothing" in options),
    *(("dtype", other) for other in DTYPES[1:]),
]


def allowed(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    """Whether two values of two axes may meet."""
    beyond = BEYOND_SCALED_EXP
    return ("backend", "scaled_exp") not in (a, b) or (a not in beyond and b not in beyond)


def cases(axes: Axes) -> dict[str, dict[str, Any]]:
    """Calls in which all pairs that may meet do, by their values; the same for the same axes.

    Greedy: a row begins with the first pair that has not met yet; each further axis takes the value that
    meets most of the others for the first time.
    """
    values = [[(axis, value) for value in values] for axis, values in axes.items()]
    both = (pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two))
    left = dict.fromkeys(pair for pair in both if allowed(*pair))  # in order, unlike a set
    rows = []
    while left:
        row = dict(next(iter(left)))
        for axis in [name for name in axes if name not in row]:
            met = list(row.items())
            fits = [item for value in axes[axis] if all(allowed(item := (axis, value), of) for of in met)]
            new = [sum((item, of) in left or (of, item) in left for of in met) for item in fits]
            row[axis] = fits[new.index(max(new))][1]
        rows.append({axis: row[axis] for axis in axes})
        for pair in itertools.combinations(rows[-1].items(), 2):
            left.pop(pair, None)
    return {"-".join(str(value).removeprefix("torch.") for value in row.values()): row for row in rows}


def parametrize(axes: Axes) -> pytest.MarkDecorator:
    """A test by these calls: the axes are its parameters."""
    rows = [pytest.param(*row.values(), id=name) for name, row in cases(axes).items()]
    return pytest.mark.parametrize(tuple(axes), rows)
