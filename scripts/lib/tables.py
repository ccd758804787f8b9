"""Tables: in Markdown for the pages, by rich for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


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


def terminal(title: str, head: Sequence[str]) -> Table:
    """An empty table for rich to print: the first column is text, the others align to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table
