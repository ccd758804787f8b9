"""All pairs: calls of the head in which every two values of two axes meet."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.losses import LOSS_OPTIONS
from tests.support.op import DTYPES, STRATEGIES

Axes = dict[str, tuple[Any, ...]]
#: Of :class:`.FusedCEConfig`, by name; sizes are those of the smaller vocabulary of tests/support/op.py.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    **LOSS_OPTIONS,
    "logit scale": {"logit_scale": 0.25},
    "logits rounded": {"logit_precision": "activations"},
    "logits in fp32": {"logit_precision": "fp32"},
}
#: What only four ranks can break: rings of buffers, shards, merges and skipped tokens.
LAYOUT = {
    "strategy": (*STRATEGIES, "mixed"),
    "backend": ("gemm_rows", "scaled_exp"),
    "sequence_parallel": (False, True),
    "merge": ("packed", "all_reduce"),
    "shards": ("equal", "unequal"),
    "skip_masked": (False, True),
    "chunk_tokens": (40, 20, 12),  # two chunks, four, six and more: a ring of buffers has room for three
}
#: Of the head over two ranks.
AXES = {
    "option": tuple(OPTIONS),
    # Over one rank all of them: tests/op.
    "kind": ("plain", "odd-labels", "wide"),
    **LAYOUT,
    "dtype": DTYPES,
    "grad_weight": ("returned", "main_grad", "low main_grad", "frozen"),
    "vocab_start": ("given", "found"),
    "tokens": ("[s, b, H]", "[T, H]"),
}
#: What the scaled-exp GEMM's epilogue cannot make. Its fp32 is the interpreter's: bf16 on GPUs.
BEYOND_SCALED_EXP = {
    *(("option", name) for name, options in OPTIONS.items() if "label_smoothing" in options),
    *(("dtype", other) for other in DTYPES[1:]),
}


def allowed(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    """Whether two values of two axes may meet."""
    return ("backend", "scaled_exp") not in (a, b) or BEYOND_SCALED_EXP.isdisjoint((a, b))


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
