"""Reads JSON under docs/benchmarks/results, which keeps the names of the day it was measured.

Until 2026-11-22 strategy ``grad_in_forward`` was called ``eager``, the logits backends ``exp`` and ``rows``,
and ``wgrad_accumulator`` was called ``end_point``, with ``grad`` for ``returned``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_BACKENDS = {"exp": "scaled_exp", "rows": "gemm_rows"}


def load(path: Path) -> Any:
    """The file's content with today's names.

    Raises:
        OSError, ValueError: as ``open`` and ``json.loads`` do.
    """
    return json.loads(path.read_text(), object_hook=_with_current_names)


def _with_current_names(row: dict[str, Any]) -> dict[str, Any]:
    if "logit_pass" in row:
        served = row.pop("logit_pass")
        row["logits_backend"] = _BACKENDS.get(served, served)
    if "end_point" in row:
        kind = row.pop("end_point")
        row["wgrad_accumulator"] = "returned" if kind == "grad" else kind
    if isinstance(row.get("variant"), str):
        name, *ways = row["variant"].split("/")
        name = re.sub(r"^eager\b", "grad_in_forward", name)
        row["variant"] = "/".join([name, *(_BACKENDS.get(way, way) for way in ways)])
    if isinstance(row.get("command"), str):
        row["command"] = row["command"].replace("strategy eager", "strategy grad_in_forward")
    return row
