"""A module of a package that is not installed, with what a test puts into it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """The module, importable with its parent packages for as long as the test runs."""
    made = ModuleType(name)
    vars(made).update(members)
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, made)
    return made
