"""Checks that this Megatron has the functions that the hook patches; an error of one line if not.

Without the flag (the hook may be installed all the same) such a Megatron runs unchanged. Imports neither
torch nor Megatron's modules; the version is read once something of megatron.core is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

from megatron_fused_ce.adapter import arguments
from megatron_fused_ce.adapter.forms import LANGUAGE_MODULE
from megatron_fused_ce.cli import versions

#: Module -> names in it that must be there.
HOOK_POINTS = {
    "megatron.training.arguments": ("add_megatron_arguments",),
    LANGUAGE_MODULE: (
        "LanguageModule.setup_embeddings_and_output_layer",
        "LanguageModule.compute_language_model_loss",
    ),
}


def core_version() -> str:
    """Version of megatron.core, which is imported or being imported."""
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError:
        return "of unknown version"
    return str(getattr(info, "__version__", "of unknown version"))


def why_unknown(module: ModuleType) -> str | None:
    """Why a module of Megatron's cannot be patched, in one line; else None."""
    if module.__name__.startswith("megatron.core."):
        reason = versions.too_old("megatron-core", core_version())
        torch = sys.modules.get("torch")
        if reason is None and torch is not None:
            reason = versions.too_old("torch", torch.__version__)
        if reason is not None:
            return reason
    for hook_point in HOOK_POINTS.get(module.__name__, ()):
        found: Any = module
        for name in hook_point.split("."):
            found = getattr(found, name, None)
        if found is None:
            return _other_layout(f"{module.__name__}.{hook_point}")
    return None


def check_language_module() -> None:
    """End a launch with the flag if Megatron keeps its models elsewhere, where nothing would be patched."""
    if "megatron.core" not in sys.modules or LANGUAGE_MODULE in sys.modules:
        return
    try:
        found = importlib.util.find_spec(LANGUAGE_MODULE)
    except ImportError:  # of a parent
        found = None
    if found is None:
        refuse(_other_layout(LANGUAGE_MODULE))


def refuse(reason: str) -> NoReturn:
    """Refuse: with a command line one line and status 2, with ``enable()`` an ImportError."""
    if not arguments.flag_given():
        raise ImportError(reason)
    print(f"megatron_fused_ce: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _other_layout(missing: str) -> str:
    oldest, newest = versions.OLDEST["megatron-core"], versions.NEWEST_MEGATRON
    return (
        f"this Megatron (megatron-core {core_version()}) has no {missing}: take one of "
        f"{versions.words(oldest)} to {versions.words(newest)}, or leave out --fused-chunked-ce"
    )
