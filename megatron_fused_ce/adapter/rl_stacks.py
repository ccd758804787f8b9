"""Shared by the adapters to RL frameworks: a check of the private function that each replaces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def function_of(
    module: ModuleType, name: str, expected: Sequence[str], others: bool, way_out: str
) -> Callable[..., Any]:
    """The module's function, after a check of its parameters.

    Args:
        expected: names of the parameters, in order; with ``others`` in any order, and more may follow.
        way_out: advice for the error.

    Raises:
        RuntimeError: the function is missing or takes other parameters.
    """
    found: Callable[..., Any] | None = getattr(module, name, None)
    parameters = [] if found is None else list(inspect.signature(found).parameters)
    fits = set(expected) <= set(parameters) if others else parameters == list(expected)
    if found is None or not fits:
        raise RuntimeError(
            f"{module.__name__}.{name} takes {parameters or 'nothing: it is not there'}; expected "
            f"{list(expected)}: {way_out}"
        )
    return found
