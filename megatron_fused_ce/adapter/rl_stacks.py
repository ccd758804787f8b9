"""What the adapters to RL stacks share: a look at the private function that each replaces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def function_of(
    module: ModuleType, name: str, expected: Sequence[str], others: bool, way_out: str
) -> Callable[..., Any]:
    """The module's function, after a look at its parameters.

    Args:
        expected: their names, in order; where it may take ``others`` too, in any.
        way_out: what to do where they are not these.

    Raises:
        RuntimeError: it is not there, or takes other parameters.
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
