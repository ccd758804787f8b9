"""Documents with parts that a script writes, each between two comments of its own."""

from __future__ import annotations

from pathlib import Path


def markers(name: str) -> tuple[str, str]:
    """The comments around a part: ``name`` says which script writes it, and which of its parts it is."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def with_part(document: str, name: str, text: str) -> str:
    """The document with ``text`` in the place of what stands between the markers of ``name``.

    Raises:
        ValueError: where they do not stand there once each, in order.
    """
    begin, end = markers(name)
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"needs one line {begin!r} and one {end!r} after it")
    before, rest = document.split(begin)
    if end not in rest:
        raise ValueError(f"has {end!r} before {begin!r}")
    return f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}"


def rewrite(path: Path, parts: dict[str, str]) -> None:
    """Put every part, by name, into the document at ``path``: all of them or none.

    Raises:
        ValueError: naming the file, where it cannot be read or has not the markers.
    """
    try:
        document = path.read_text()
        for name, text in parts.items():
            document = with_part(document, name, text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(document)
    partial.replace(path)
