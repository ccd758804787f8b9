"""Patches Megatron's modules right after they are imported, without importing any of them.

Independent of the order on ``sys.path`` and of when Megatron is imported: a module that is there
already is patched at once, any other when its import ends. Patched are the argument parser (the flags), the
language module (the hook points in the model), the schedules (deferred weight gradients), ``rl_utils`` and
``Float16Module`` (log-probabilities without logits), and ModelOpt's plugin for Megatron (distillation).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from megatron_fused_ce.adapter import forms, layout

#: Module of Megatron or ModelOpt -> (module of this package, function in it) that patches it.
TARGETS = {
    "megatron.training.arguments": ("megatron_fused_ce.adapter.training_arguments", "patch"),
    forms.LANGUAGE_MODULE: ("megatron_fused_ce.adapter.language_module", "patch"),
    "megatron.core.pipeline_parallel.schedules": ("megatron_fused_ce.adapter.deferred_wgrad", "patch"),
    "megatron.rl.rl_utils": ("megatron_fused_ce.adapter.rl_logprobs", "patch"),
    "megatron.core.transformer.module": ("megatron_fused_ce.adapter.rl_logprobs", "patch_upcast"),
    "modelopt.torch.distill.plugins.megatron": ("megatron_fused_ce.adapter.modelopt", "patch"),
}

_MARK = "__fused_ce_patched__"


def replace_everywhere(module: ModuleType, name: str, own: Callable[..., Any]) -> None:
    """Let the module's function be ``own``, also where it was imported by name before."""
    found = getattr(module, name)
    other: Any
    for other in (module, *sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is found:
            setattr(other, name, own)


def install(asked_for: Callable[[], bool] | None = None) -> None:
    """Patch imported modules and watch for the others. A second call changes ``asked_for`` only.

    Args:
        asked_for: whether the fused head is turned on; None: the command line decides.

    Raises:
        ImportError: the fused head is turned on, and Megatron or torch is too old or lacks a patched function
        (SystemExit with status 2 if the command line turned it on). Importing such a module raises the same.
    """
    global _asked_for
    if asked_for is not None:
        _asked_for = asked_for
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in TARGETS:
        module = sys.modules.get(name)
        if module is not None and not _is_initializing(module):
            _patch(module)


def _on_command_line() -> bool:
    from megatron_fused_ce.adapter import arguments

    return arguments.flag_given()


_asked_for: Callable[[], bool] = _on_command_line


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _patch(module: ModuleType) -> None:
    if getattr(module, _MARK, False):
        return
    reason = layout.why_unknown(module)
    if reason is not None:
        if _asked_for():
            layout.refuse(reason)
        return
    setattr(module, _MARK, True)
    module_name, function_name = TARGETS[module.__name__]
    patch: Callable[[ModuleType], None] = getattr(importlib.import_module(module_name), function_name)
    patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a target module with the other finders and adds the patch after its execution."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in TARGETS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


class _PatchingLoader(importlib.abc.Loader):
    """Wraps a loader and applies the patch after it has executed the module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        vars(module).pop(_MARK, None)  # from before a reload, which has undone the patch
        _patch(module)

    def __getattr__(self, name: str) -> object:
        # inspect, linecache and pickling ask the loader for sources.
        return getattr(self._loader, name)
