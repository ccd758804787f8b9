"""Reads JSON under docs/benchmarks/results, which keeps the names of the day it was measured.

Until 2026-11-22 strategy ``grad_in_forward`` was called ``eager``, the logits backends ``exp`` and ``rows``,
``wgrad_accumulator`` was called ``end_point``, with ``grad`` for ``returned``, and shapes had other names
than :mod:`megatron_fused_ce.estimate.named_models`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_BACKENDS = {"exp": "scaled_exp", "rows": "gemm_rows"}
_SHAPES = {
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "llama3.2-1b": "llama-3.2-1b",
    "gemma2-2b": "gemma-2-2b",
    "gemma2-9b-like": "gemma-2-9b-like",
    "deepseek-v3-like": "deepseek-v3",
}


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
    if row.get("shape") in _SHAPES:
        row["shape"] = _SHAPES[row["shape"]]
    if isinstance(row.get("variant"), str):
        name, *ways = row["variant"].split("/")
        name = re.sub(r"^eager\b", "grad_in_forward", name)
        row["variant"] = "/".join([name, *(_BACKENDS.get(way, way) for way in ways)])
    if isinstance(row.get("command"), str):
        row["command"] = row["command"].replace("strategy eager", "strategy grad_in_forward")
    return row
