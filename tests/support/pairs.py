"""All pairs: calls of the head in which every two values of two axes meet."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from megatron_fused_ce.scripts.lib.reference import KINDS
from tests.support import distillation, op
from tests.support.losses import LOSS_OPTIONS

DTYPES = ("float32", "bfloat16", "float16")
STRATEGIES = (*op.STRATEGIES, "mixed")
#: Of :class:`.FusedCEConfig`, by name; sizes are those of the smaller vocabulary of tests/support/op.py.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    **LOSS_OPTIONS,
    "logit scale": {"logit_scale": 0.25},
    "logits rounded": {"logit_precision": "activations"},
    "logits in fp32": {"logit_precision": "fp32"},
}
#: What the scaled-exp GEMM's epilogue cannot make.
BEYOND_SCALED_EXP = tuple(name for name, options in OPTIONS.items() if "label_smoothing" in options)

#: What it makes, small enough for every size of tests/kernels/test_scaled_exp.py.
SCALED_EXP_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: LOSS_OPTIONS[name] for name in ("z-loss", "softcap", "masked padding")},
    "all": {name: value for name, value in LOSS_OPTIONS["all"].items() if name != "label_smoothing"},
}

LAYOUT = {
    "strategy": STRATEGIES,
    "backend": ("gemm_rows", "scaled_exp"),
    "sequence_parallel": (False, True),
    "merge": ("packed", "all_reduce"),
    "shards": ("equal", "unequal"),
    "skip_masked": (False, True),
    "chunk_tokens": (40, 20, 12),  # two chunks, four, six and more: a ring of buffers has room for three
}
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "2 ranks": {
        "option": tuple(OPTIONS),
        # Over one rank all of them: tests/op.
        "kind": ("plain", "odd-labels", "wide"),
        **LAYOUT,
        "dtype": DTYPES,
        "grad_weight": ("returned", "main_grad", "low main_grad", "frozen"),
        "vocab_start": ("given", "found"),
        "tokens": ("[s, b, H]", "[T, H]"),
    },
    # What only four ranks can break: rings of buffers, shards, merges and skipped tokens.
    "4 ranks": LAYOUT,
    "other results": {
        "asked": ("outputs", "distillation"),
        "strategy": STRATEGIES[:3],
        "sequence_parallel": (False, True),
        "merge": ("packed", "all_reduce"),
        "dtype": DTYPES[:2],
    },
    # Of tests/op and tests/kernels, in one process.
    "options by the scaled-exp GEMM": {
        "option": ("plain", *SCALED_EXP_OPTIONS),
        "kind": KINDS,
        "strategy": STRATEGIES[:3],
    },
    "divergence": {
        "values": tuple(distillation.VALUES),
        "kind": tuple(distillation.KINDS),
        "option": tuple(distillation.OPTIONS),
        "dtype": DTYPES,
        "teacher_dtype": ("the student's", "another"),
        "strategy": STRATEGIES,
        "temperature": (1.0, 0.5, 4.0),
        "num_chunks": (1, 4),
    },
    "divergence over ranks": {
        "values": ("plain", "near", "sure of others", "wide student"),
        "kind": tuple(distillation.KINDS)[:3],
        "option": ("plain", "label weights", "more padding", "less padding"),
        "strategy": STRATEGIES,
        "sequence_parallel": (False, True),
        "teacher_sequence_parallel": (False, True),
        "merge": ("packed", "all_reduce"),
        "shards": ("equal", "unequal"),
        "skips": ("nothing", "masked"),
        "chunk_tokens": (40, 12),
        "dtype": DTYPES,
    },
}


def allowed(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    """Whether two values of two axes may meet. The scaled-exp GEMM's fp32 is the interpreter's: on GPUs the
    case runs in bf16."""
    beyond = [("option", option) for option in BEYOND_SCALED_EXP] + [("dtype", other) for other in DTYPES[1:]]
    return ("backend", "scaled_exp") not in (a, b) or (a not in beyond and b not in beyond)


def generate(axes: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows in which all pairs that may meet do, the same for the same axes.

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
    return rows


@functools.cache
def cases(name: str) -> dict[str, dict[str, Any]]:
    """The calls of one of ``AXES``, by their values."""
    return {"-".join(map(str, row.values())): row for row in generate(AXES[name])}


def parametrize(name: str) -> pytest.MarkDecorator:
    """A test by the calls of ``name``: the axes are its parameters."""
    rows = [tuple(row.values()) for row in cases(name).values()]
    return pytest.mark.parametrize(tuple(AXES[name]), rows, ids=list(cases(name)))
