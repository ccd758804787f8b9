"""The Megatron arguments of a launch: a shell script's, or a string's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fused_ce.estimate.shell_words import Unknown, commands

_PROCESSES = ("--nproc-per-node", "--nproc_per_node")
_NODES = ("--nnodes",)
#: Names that hold several arguments rather than one's value.
_LIST = re.compile(r".*\[[@*]\]|.*(?:ARGS|OPTIONS|OPTS|FLAGS|PARAMS).*|[@*]", re.IGNORECASE)


@dataclass(frozen=True)
class Launch:
    """One training's arguments."""

    script: str
    arguments: tuple[str, ...]
    #: processes over all nodes; None where the launcher's words do not say
    gpus: int | None


def of_string(text: str) -> Launch:
    """Arguments in one string, with or without the command before them.

    Raises:
        ValueError: a quotation has no end.
    """
    words = shlex.split(text)
    place = _script(words)
    if place is None:
        return Launch("", tuple(words), None)
    return _launch(words, place)


def of_script(
    text: str, given: Mapping[str, str], read: Collection[str], folder: Path | None = None
) -> Launch:
    """The launch that a script makes.

    Args:
        given: values of variables, which come before the script's own.
        read: names of the arguments that matter; only such a one's value must be known.
        folder: where the script is, for scripts that it sources.

    Raises:
        ValueError: no training is launched, or several, or with a variable that has no value.
    """
    found = []
    for words in commands(text, given, folder):
        place = _script(words)
        if place is not None and any(_may_be(word, read) for word in words[place + 1 :]):
            found.append(_launch(words, place))
    if not found:
        raise ValueError("no command launches a .py script with Megatron's arguments")
    if len(found) > 1:
        scripts = ", ".join(launch.script for launch in found)
        raise ValueError(f"several commands launch a training ({scripts}): leave one")
    if missing := _missing(found[0].arguments, read):
        several = " --set ".join(f"{name.removesuffix('[@]')}=VALUE" for name in missing)
        raise ValueError(f"no value is known for {', '.join(missing)}: give --set {several}")
    return found[0]


def _script(words: Sequence[str]) -> int | None:
    """Where the first Python script stands."""
    texts = [word.word if isinstance(word, Unknown) else word for word in words]
    return next((index for index, text in enumerate(texts) if text.endswith(".py")), None)


def _may_be(word: str, read: Collection[str]) -> bool:
    return isinstance(word, Unknown) or word.partition("=")[0] in read


def _launch(words: Sequence[str], place: int) -> Launch:
    processes = _value_of(_PROCESSES, words[:place])
    nodes = _value_of(_NODES, words[:place]) or "1"
    known = processes is not None and processes.isdigit() and nodes.isdigit()
    gpus = int(processes) * int(nodes) if known and processes else None
    return Launch(words[place], tuple(words[place + 1 :]), gpus)


def _value_of(names: Sequence[str], words: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def _missing(words: Sequence[str], read: Collection[str]) -> list[str]:
    """Names without a value, but for the value of an argument that does not matter."""
    missing = []
    for before, word in zip(("", *words), words, strict=False):
        unread = before.startswith("--") and before not in read and not _LIST.fullmatch(word)
        if isinstance(word, Unknown) and not unread:
            missing.append(str(word))
    return list(dict.fromkeys(missing))
