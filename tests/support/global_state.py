"""What one test could leave to the next in a process that lives on: a canary over it.

The plugin's own hooks in Megatron are installed once and stay, as in a training run.

Caches may fill and modules may be imported. What was there before stays as it was.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch

#: Packages whose functions and classes tests patch, and nobody else changes.
PATCHED = ("megatron_fused_ce", "kernels", "megatron.core", "torch.distributed", "torch.cuda")
#: Where constants, in capitals, are compared too.
OURS = ("megatron_fused_ce", "kernels")
Constant = (bool, int, float, str, tuple, frozenset, type(None))
#: Hooks that the plugin puts into Megatron and leaves there.
PLUGINS = "the plugin's hook"
Code = (types.FunctionType, types.BuiltinFunctionType, type, property, classmethod, staticmethod)


def global_state() -> dict[str, Any]:
    """By name: settings and constants by value, functions and classes by identity."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "NaN in fresh memory": torch.utils.deterministic.fill_uninitialized_memory,
        "gradients enabled": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(),
        "threads of an operator": torch.get_num_threads(),
        "modes": torch.overrides._get_current_function_mode_stack()
        + torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
    }
    state |= {
        f"environment {name}": value
        for name, value in os.environ.items()
        if not name.startswith("NVTE_")  # Megatron's models set Transformer Engine's
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(PATCHED) and isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                state |= _entries(f"{module_name}.{name}", value, module_name)
    return state


def _entries(name: str, value: Any, module: str) -> dict[str, Any]:
    kind = type(value)  # isinstance would ask the value, which may warn
    if issubclass(kind, type) and value.__module__ == module:
        members = {
            f"{name}.{member}": _identity(function, module)
            for member, function in list(vars(value).items())
            if issubclass(type(function), Code)
        }
        return {name: id(value), **members}
    if issubclass(kind, Code):
        return {name: _identity(value, module)}
    is_ours = module.startswith(OURS) and name.rpartition(".")[2].isupper()
    if is_ours and issubclass(kind, Constant):
        return {name: value}
    return {}


def _identity(code: Any, module: str) -> int | str:
    of_code = getattr(code, "__globals__", None)  # of FunctionType itself, a descriptor
    made_in = of_code.get("__name__", "") if isinstance(of_code, dict) else ""
    is_hook = made_in.startswith("megatron_fused_ce") and not module.startswith(OURS)
    return PLUGINS if is_hook else id(code)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is gone, differs, or is a new environment variable; one line each."""
    gone = object()
    lines = [
        f"{name}: {value!r} became {after.get(name, 'nothing')!r}"
        for name, value in before.items()
        if after.get(name, gone) not in (value, PLUGINS)
    ]
    new = [name for name in after if name.startswith("environment ") and name not in before]
    return lines + [f"{name} is new" for name in new]
