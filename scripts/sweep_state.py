"""What a sweep has measured so far, on disk after every cell: an interrupted one goes on from there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from atomic import write_whole
from compare_pretrain import PACKAGE, REPOSITORY
from megatron_logs import UsageError
from sweep_rows import OK, OUT_OF_MEMORY


def source_digest() -> str:
    """Of the package and its kernels as they are, committed or not."""
    digest = hashlib.sha256()
    for file in sorted([*PACKAGE.rglob("*.py"), *(REPOSITORY / "kernels").rglob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class State:
    """The records of one setting's cells, in a file of its own: another setting has another file.

    ``facts`` fix every figure (sizes, device, versions, sources); ``cells`` is key -> record, ``reference``
    what the ratios in them are over: the name of its cell, and kind -> its time in the last run. With
    ``writes`` False (other ranks than the first) the file is read only.
    """

    def __init__(
        self, out: Path, facts: dict[str, Any], *, fresh: bool = False, writes: bool = True
    ) -> None:
        text = json.dumps(facts, sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.path = out / f"state-{self.digest}.json"
        self.facts = facts
        self.cells: dict[str, dict[str, Any]] = {}
        self.reference: dict[str, Any] = {}
        self._out = out
        self._writes = writes
        if not fresh and self.path.is_file():
            content = _read(self.path)
            self.cells, self.reference = content["cells"], content["reference"]

    def has(self, key: str) -> bool:
        """Whether a cell needs no further run: one that failed may do better."""
        return self.cells.get(key, {}).get("status") in (OK, OUT_OF_MEMORY)

    def add(self, key: str, record: dict[str, Any]) -> None:
        """On disk when it returns."""
        self.cells[key] = record
        if not self._writes:
            return
        content = {"facts": self.facts, "reference": self.reference, "cells": self.cells}
        self._out.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (json.dumps(content, indent=1) + "\n").encode())

    def said(self, keys: list[str]) -> str:
        """One line about what is there of ``keys``, and of what other settings; '' for nothing."""
        there = sum(map(self.has, keys))
        if there:
            return f"{self.path.name}: {there} of {len(keys)} cells are there; --fresh starts over"
        others = [path for path in sorted(self._out.glob("state-*.json")) if path != self.path]
        if not others:
            return ""
        newest = max(others, key=lambda path: path.stat().st_mtime)
        facts = _read(newest)["facts"]
        names = [name for name in self.facts if self.facts[name] != facts.get(name)]
        differ = ", ".join(names) or "nothing here"
        return (
            f"{newest.name} is of other settings ({differ}) and is not used; this sweep starts anew"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not {"facts", "reference", "cells"} <= content.keys():
            raise ValueError("parts of it are missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no state of a sweep ({error}): remove it") from None
    return dict(content)
