"""Folders with Megatron-LM: those that MEGATRON_LM_PATH names."""

from __future__ import annotations

import os

import pytest

PATHS = [path for path in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if path]
NONE = pytest.mark.skip(reason="needs a Megatron-LM checkout: set MEGATRON_LM_PATH to its folder")
#: A test of ``checkout``, a real one. Without one the skip says how to give it.
on_checkouts = pytest.mark.parametrize("checkout", PATHS or [pytest.param("", marks=NONE)])
