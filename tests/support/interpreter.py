"""Triton's interpreter in a third of its time, with a check of overflows that it makes and does not use.

At every call of a kernel or a device function it replaces the functions of ``triton.language`` by its own,
and sorts all names of five modules and classes to find them. Each result's shape becomes objects and a name
anew, and two equal shapes are compared by such objects. It computes by ten operations whether a sum,
difference or product of integers overflows, and drops the answer unless it is debugged. Here names and shapes
are worked out once, a device function takes what its kernel replaced, and an overflow raises. Another
Triton's interpreter stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import is_builtin
from triton.language.semantic import TritonSemantic
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


#: By shape and element's name, what a block's type works out; by shape, what a tensor does.
_OF_BLOCKS: dict[Any, tuple[Any, ...]] = {}
_OF_TENSORS: dict[Any, tuple[Any, ...]] = {}
_new_block = tl.block_type.__init__
_new_tensor = tl.tensor.__init__
_new_shapes = TritonSemantic.broadcast_impl_value


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    key = (element_ty.name, *shape)
    if key not in _OF_BLOCKS:
        _new_block(self, element_ty, shape)
        _OF_BLOCKS[key] = self.shape, self.numel, self.name
    self.shape, self.numel, self.name = _OF_BLOCKS[key]


def _tensor(self: Any, handle: Any, type: Any) -> None:
    key = (*type.shape.values,) if type.is_block() else ()
    if key not in _OF_TENSORS:
        _new_tensor(self, handle, type)
        _OF_TENSORS[key] = self.shape, self.numel
    self.shape, self.numel = _OF_TENSORS[key]
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _broadcast(self: Any, one: Any, other: Any) -> Any:
    blocks = one.type.is_block() and other.type.is_block()
    if blocks and one.type.shape.values == other.type.shape.values:
        return one, other
    return _new_shapes(self, one, other)


@functools.cache
def _languages(function: Any) -> tuple[Any, ...]:
    """The modules that a device function knows ``triton.language`` by: its own is the one within it."""
    return tuple(module for module in (tl, tl.core) if module in function.__globals__.values())


def _device_function(self: Any, *arguments: Any, **options: Any) -> Any:
    """Its kernel, or the first such call, has replaced the functions already."""
    if any(is_builtin(language.load) for language in _languages(self.fn)):
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_known = list(inspect.signature(interpreter._patch_builtin).parameters) == ["pkg", "builder", "scope"]
if _known and os.environ.get("TRITON_INTERPRET") == "1":
    interpreter._patch_builtin = _patch_builtin
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = _no_overflow
    interpreter.InterpretedFunction.__call__ = _device_function
    tl.block_type.__init__ = _block_type
    tl.tensor.__init__ = _tensor
    TritonSemantic.broadcast_impl_value = _broadcast
