"""Triton's interpreter in half of its time, with a check of overflows that it makes and does not use.

At every call of a kernel or a device function it replaces the functions of ``triton.language`` by its own,
and sorts all names of five modules and classes to find them. Whenever it needs a data type it writes a
table of all. It computes by ten operations whether a sum, difference or product of integers overflows, and
drops the answer unless it is debugged. Here names and types are looked up once, and an overflow raises.
Another Triton's interpreter stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
from triton.language.core import is_builtin
from triton.runtime import interpreter

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    """Names of the functions of ``triton.language`` in it, before any of them is replaced."""
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        if is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


def _no_overflow(one: Any, other: Any, operation: Any) -> None:
    kind = one.type.scalar
    if kind.int_bitwidth < 64:
        wide = EXACT[operation.__name__](*(of.handle.data.astype(np.int64) for of in (one, other)))
        fits = (wide >= kind.get_int_min_value()) & (wide <= kind.get_int_max_value())
        assert fits.all(), f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


def _np_dtype_by_name(stock: Any) -> Any:
    by_name: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.is_ptr():
            return stock(dtype)
        if scalar.name not in by_name:
            by_name[scalar.name] = stock(scalar)
        return by_name[scalar.name]

    return np_dtype


if list(inspect.signature(interpreter._patch_builtin).parameters) == ["pkg", "builder", "scope"]:
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _np_dtype_by_name(interpreter._get_np_dtype)
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = _no_overflow
