"""Text of a value, by which the ranks of a group tell whether they were given the same."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any


def in_words(value: Any, within: tuple[Any, ...] = ()) -> str:
    """What is compared of a value over ranks: the text of each of its parts.

    Of a function module, name, defaults and closure, of a partial the arguments, too. Not a function's code,
    nor the globals that it reads: ranks run one program.

    Raises:
        TypeError: a part has no text but its address.
    """
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, ModuleType) or any(value is outer for outer in within):
        return f"{value.__name__}"
    name = "" if type(value) is tuple else type(value).__qualname__
    parts: list[Any]
    if isinstance(value, FunctionType):
        name, within = f"{value.__module__}.{value.__qualname__}", (*within, value)
        cells = value.__closure__ or ()
        parts = [value.__defaults__, value.__kwdefaults__, *(cell.cell_contents for cell in cells)]
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        name, parts = value.__qualname__, [getattr(value, "__func__", None), value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, (tuple, list)):
        parts = list(value)
    elif isinstance(value, (set, frozenset)):
        parts = sorted(value, key=in_words)
    elif is_dataclass(value):
        parts = [getattr(value, each.name) for each in fields(value)]
    else:
        words = repr(value)
        if " at 0x" in words:
            raise TypeError(
                f"{words:.80} is told from others by its address alone, which ranks cannot compare: give its "
                "class a __repr__, or use a function, numbers or text"
            )
        return words
    return f"{name}({', '.join(in_words(part, within) for part in parts)})"
