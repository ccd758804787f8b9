"""Documents with parts that `make figures` writes, each between two comments of its own.

Not includes of MyST's: GitHub shows the same pages, and knows none.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_fused_ce.cli.command_line import UsageError, read_text
from megatron_fused_ce.scripts.lib.results import write_whole


def rewrite(path: Path, parts: dict[str, str], write: bool = True) -> list[str]:
    """Put every part, by name, between its comments in the document: all of them or none.

    Returns the names of those that were out of date. Raises UsageError where the document cannot be read or
    has not both comments of a part, once each and in order.
    """
    document, stale = read_text(path), list[str]()
    for name, text in parts.items():
        marks = [f"<!-- make figures, {name}: {word} -->" for word in ("begin", "end")]
        either = "|".join(map(re.escape, marks))
        if re.findall(either, document) != marks:
            raise UsageError(f"{path}: needs one line {marks[0]!r} and one {marks[1]!r} after it")
        before, old, after = re.split(either, document)
        if old != f"\n\n{text}\n":
            stale.append(name)
            document = f"{before}{marks[0]}\n\n{text}\n{marks[1]}{after}"
    if write and stale:
        write_whole(path, document)
    return stale
