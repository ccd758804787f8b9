"""Text of a value, by which the ranks of a group tell whether they were given the same."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any


def parts_of(value: Any) -> list[Any] | None:
    """What a value is made of: entries, fields, arguments; of a function its defaults and closure, not its
    code nor the globals that it reads. None for a value without parts."""
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return [value.__defaults__, value.__kwdefaults__, *(cell.cell_contents for cell in cells)]
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return [getattr(value, "__func__", None), value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=in_words)
    if is_dataclass(value):
        return [getattr(value, each.name) for each in fields(value)]
    return None


def in_words(value: Any, within: tuple[Any, ...] = ()) -> str:
    """What is compared of a value over ranks: the text of each of its parts, and the names of functions.

    Raises:
        TypeError: a part has no text but its address.
    """
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, ModuleType) or any(value is outer for outer in within):
        return f"{value.__name__}"
    parts, name = parts_of(value), "" if type(value) is tuple else type(value).__qualname__
    if parts is None:
        words = repr(value)
        if " at 0x" in words:
            raise TypeError(
                f"{words:.80} is told from others by its address alone, which ranks cannot compare: give its "
                "class a __repr__, or use a function, numbers or text"
            )
        return words
    if isinstance(value, FunctionType):
        name, within = f"{value.__module__}.{value.__qualname__}", (*within, value)
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        name = value.__qualname__
    return f"{name}({', '.join(in_words(part, within) for part in parts)})"
