"""Tables in Markdown, as the pages and the terminal show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """A table; the first ``left`` columns are text, the others align to the right. None: an empty cell."""

    def line(cells: Iterable[Any]) -> str:
        words = ("" if cell is None else str(cell).replace("|", "/") for cell in cells)
        return "| " + " | ".join(words) + " |"

    ruler = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join([line(head), ruler, *map(line, rows)])


def cell(value: Any, form: str = "", missing: str = "–") -> str:
    """A value as ``format`` writes it, ``missing`` for None."""
    return missing if value is None else format(value, form)
