"""Shared by the adapters to RL frameworks: a check of the private function that each replaces."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from megatron_fused_ce.config import FusedCEConfig


def function_of(
    module: ModuleType | type, name: str, expected: Sequence[str], others: bool, way_out: str
) -> Callable[..., Any]:
    """The function of a module or class, after a check of its parameters.

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


def replace_everywhere(module: ModuleType, name: str, own: Callable[..., Any]) -> None:
    """Let the module's function be ``own``, also where it was imported by name before."""
    found = getattr(module, name)
    other: Any
    for other in (module, *sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is found:
            setattr(other, name, own)


def entropy_of(wanted: bool, with_grad: bool) -> str:
    """The head's word for a framework's two."""
    return "none" if not wanted else "differentiable" if with_grad else "detached"


def serve(
    module: str, name: str, own: Callable[..., Any], config: FusedCEConfig | None, way_out: str
) -> None:
    """Let the module's function be ``own``, which has the same parameters and, last, ``config``.

    Raises:
        ImportError: there is no such module.
        RuntimeError: as :func:`function_of`.
    """
    theirs = import_module(module)
    expected = list(inspect.signature(own).parameters)[:-1]
    found = function_of(theirs, name, expected, False, way_out)

    @functools.wraps(found)
    def served(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, "config": config})

    setattr(theirs, name, served)
