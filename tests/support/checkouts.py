"""Folders with Megatron-LM: those that MEGATRON_LM_PATH names, and stand-ins of a few files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKE_PRETRAIN = Path(__file__).with_name("fake_pretrain.py").read_text()
CHECKOUTS = [path for path in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if path]


def on_checkouts(test: Callable[..., Any]) -> Any:
    """A test of ``checkout``, a real one. Without one the skip says how to give it."""
    reason = "needs a Megatron-LM checkout: set MEGATRON_LM_PATH to its folder"
    return pytest.mark.skipif(not CHECKOUTS, reason=reason)(
        pytest.mark.parametrize("checkout", CHECKOUTS)(test)
    )


def stand_in(folder: Path, script: str = "") -> Path:
    """What passes for a checkout, with ``script`` as its pretrain_gpt.py."""
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    (folder / "pretrain_gpt.py").write_text(script)
    return folder
