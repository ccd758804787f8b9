"""Documents with parts that `make figures` writes, each between two comments of its own.

Not includes of MyST's: GitHub shows the same pages, and knows none.
"""

from __future__ import annotations

from pathlib import Path

from megatron_fused_ce.cli.command_line import UsageError, read_text
from megatron_fused_ce.scripts.lib.results import write_whole


def markers(name: str) -> tuple[str, str]:
    """The comments around a part."""
    return f"<!-- make figures, {name}: begin -->", f"<!-- make figures, {name}: end -->"


def with_part(document: str, name: str, text: str) -> str:
    """The document with ``text`` in the place of what stands between the markers of ``name``.

    Raises:
        UsageError: where they do not stand there once each, in order.
    """
    begin, end = markers(name)
    if document.count(begin) != 1 or document.count(end) != 1:
        raise UsageError(f"needs one line {begin!r} and one {end!r} after it")
    before, rest = document.split(begin)
    if end not in rest:
        raise UsageError(f"has {end!r} before {begin!r}")
    return f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}"


def stale(path: Path, parts: dict[str, str]) -> list[str]:
    """Names of the parts that are out of date. Raises UsageError as `rewrite`."""
    try:
        document = read_text(path)
        return [name for name, text in parts.items() if with_part(document, name, text) != document]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def rewrite(path: Path, parts: dict[str, str]) -> None:
    """Put every part, by name, into the document at ``path``: all of them or none.

    Raises:
        UsageError: naming the file, where it cannot be read or has not the markers.
    """
    stale(path, parts)
    document = read_text(path)
    for name, text in parts.items():
        document = with_part(document, name, text)
    write_whole(path, document)
