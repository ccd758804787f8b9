"""Patches Megatron's modules right after they are imported, without importing any of them.

Independent of the order on ``sys.path`` and of when Megatron is imported: a module that is there already is
patched at once, any other when its import ends. Patched are the argument parser (the flags), the language
module (the hook points in the model), the schedules (deferred weight gradients), ``rl_utils`` and
``Float16Module`` (log-probabilities without logits), and ModelOpt's plugin for Megatron (distillation).

A Megatron or torch that is too old, and a Megatron without a patched function, end a launch with the flag in
one line. Without the flag it runs unchanged.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any

from megatron_fused_ce.adapter import arguments, forms
from megatron_fused_ce.cli import versions

_ARGUMENTS = "megatron.training.arguments"
#: Module of Megatron or ModelOpt -> (module of this package, function in it) that patches it.
TARGETS = {
    _ARGUMENTS: ("megatron_fused_ce.adapter.arguments", "patch"),
    forms.LANGUAGE_MODULE: ("megatron_fused_ce.adapter.language_module", "patch"),
    "megatron.core.pipeline_parallel.schedules": ("megatron_fused_ce.adapter.deferred_wgrad", "patch"),
    "megatron.rl.rl_utils": ("megatron_fused_ce.adapter.rl_logprobs", "patch"),
    "megatron.core.transformer.module": ("megatron_fused_ce.adapter.rl_logprobs", "patch_upcast"),
    "modelopt.torch.distill.plugins.megatron": ("megatron_fused_ce.adapter.modelopt", "patch"),
}
#: Module -> names in it that must be there.
HOOK_POINTS = {
    _ARGUMENTS: ("add_megatron_arguments",),
    forms.LANGUAGE_MODULE: (
        "LanguageModule.setup_embeddings_and_output_layer",
        "LanguageModule.compute_language_model_loss",
    ),
}

_MARK = "__fused_ce_patched__"
_asked_for: Callable[[], bool] = arguments.flag_given


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
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _patch(module)


def replace_everywhere(module: ModuleType, name: str, own: Callable[..., Any]) -> None:
    """Let the module's function be ``own``, also where it was imported by name before."""
    found = getattr(module, name)
    other: Any
    for other in (module, *sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is found:
            setattr(other, name, own)


def core_version() -> str:
    """Version of megatron.core, which is imported or being imported."""
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError:
        return "of unknown version"
    return str(getattr(info, "__version__", "of unknown version"))


def _patch(module: ModuleType) -> None:
    if getattr(module, _MARK, False):
        return
    reason = _why_not_patched(module)
    if reason:
        if not _asked_for():
            return
        if not arguments.flag_given():  # enable()
            raise ImportError(reason)
        print(f"megatron_fused_ce: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(2)
    setattr(module, _MARK, True)
    module_name, function_name = TARGETS[module.__name__]
    patch: Callable[[ModuleType], None] = getattr(importlib.import_module(module_name), function_name)
    patch(module)


def _why_not_patched(module: ModuleType) -> str:
    """Why this package does not fit a module of Megatron's, in one line; empty if it does."""
    if module.__name__.startswith("megatron.core."):
        torch = sys.modules.get("torch")
        too_old = versions.too_old("megatron-core", core_version()) or (
            torch and versions.too_old("torch", torch.__version__)
        )
        if too_old:
            return too_old
    points = HOOK_POINTS.get(module.__name__, ())
    missing = [f"{module.__name__}.{point}" for point in points if not _has(module, point)]
    if module.__name__ == _ARGUMENTS and not _may_be_imported(forms.LANGUAGE_MODULE):
        missing.append(forms.LANGUAGE_MODULE)
    if not missing:
        return ""
    oldest, newest = versions.OLDEST["megatron-core"], versions.NEWEST_MEGATRON
    return (
        f"this Megatron (megatron-core {core_version()}) has no {missing[0]}: take one of "
        f"{versions.words(oldest)} to {versions.words(newest)}, or leave out --fused-chunked-ce"
    )


def _has(module: ModuleType, path: str) -> bool:
    try:
        return attrgetter(path)(module) is not None
    except AttributeError:
        return False


def _may_be_imported(name: str) -> bool:
    """Whether Megatron's core, if it is imported, has this module: one that never comes is never patched."""
    if "megatron.core" not in sys.modules or name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a parent
        return False


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a target module with the other finders and adds the patch after its execution."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
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

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        vars(module).pop(_MARK, None)  # from before a reload, which has undone the patch
        _patch(module)

    def __getattr__(self, name: str) -> object:
        # inspect, linecache and pickling ask the loader for sources.
        return getattr(self._loader, name)
