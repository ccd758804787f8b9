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

    #: of a log, its path
    script: str
    arguments: tuple[str, ...]
    #: processes over all nodes; None if the launcher's arguments do not say
    gpus: int | None
    #: sentences about what was read
    notes: tuple[str, ...] = ()
    #: of a log: the largest peak that Megatron says it measured, and whether the run died of memory
    measured_bytes: int | None = None
    out_of_memory: bool = False


def of_string(text: str, count_gpus: bool = True) -> Launch:
    """Arguments in one string, with or without the command before them.

    Args:
        count_gpus: whether the launcher's number of ranks matters.

    Raises:
        ValueError: a quotation has no end, or the number of ranks is no number.
    """
    words = shlex.split(text)
    place = _script(words)
    if place is None:
        return Launch("", tuple(words), None)
    return _launch(words, place, count_gpus)


def of_script(
    text: str,
    given: Mapping[str, str],
    read: Collection[str],
    folder: Path | None = None,
    count_gpus: bool = True,
) -> Launch:
    """The launch that a script makes.

    Args:
        given: values of variables, which come before the script's own.
        read: names of the arguments that are needed; only their values must be known.
        folder: the script's folder, for scripts that it sources.
        count_gpus: whether the launcher's number of ranks matters.

    Raises:
        ValueError: no training is launched, or several, or with a variable that has no value.
    """
    found = []
    for words in commands(text, given, folder):
        place = _script(words)
        if place is not None and any(_may_be(word, read) for word in words[place + 1 :]):
            found.append((words, place))
    if not found:
        raise ValueError("no command launches a .py script with Megatron's arguments")
    if len(found) > 1:
        scripts = ", ".join(words[place] for words, place in found)
        raise ValueError(f"several commands launch a training ({scripts}): leave one")
    words, place = found[0]
    missing = _missing(words[place + 1 :], read)
    ranks = _missing(words[:place], (*_PROCESSES, *_NODES)) if count_gpus else []
    if unset := list(dict.fromkeys([*ranks, *missing])):
        several = " --set ".join(f"{name.removesuffix('[@]')}=VALUE" for name in unset)
        or_gpus = ", or --gpus" if ranks else ""
        raise ValueError(f"no value is known for {', '.join(unset)}: give --set {several}{or_gpus}")
    return _launch(words, place, count_gpus)


def _script(words: Sequence[str]) -> int | None:
    """Index of the first Python script."""
    texts = [word.word if isinstance(word, Unknown) else word for word in words]
    return next((index for index, text in enumerate(texts) if text.endswith(".py")), None)


def _may_be(word: str, read: Collection[str]) -> bool:
    return isinstance(word, Unknown) or word.partition("=")[0] in read


def _launch(words: Sequence[str], place: int, count_gpus: bool) -> Launch:
    gpus = _gpus(words[:place]) if count_gpus else None
    return Launch(words[place], tuple(words[place + 1 :]), gpus)


def _gpus(launcher: Sequence[str]) -> int | None:
    """Processes times nodes, each 1 by default as in ``torchrun``; None where neither is given."""
    gpus = None
    for names in (_PROCESSES, _NODES):
        value = _value_of(names, launcher)
        if value is None:
            continue
        if not value.isdigit():
            raise ValueError(f"{names[0]} {value} is no number of ranks: give --gpus")
        gpus = (gpus or 1) * int(value)
    return gpus


def _value_of(names: Sequence[str], words: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def _missing(words: Sequence[str], read: Collection[str]) -> list[str]:
    """Variables without a value, except those of arguments that are not needed."""
    missing = []
    for before, word in zip(("", *words), words, strict=False):
        if not isinstance(word, Unknown):
            continue
        name, equals, _ = word.word.partition("=")
        option = name if equals else before
        if option.startswith("--") and option not in read and not (_LIST.fullmatch(word) and not equals):
            continue
        missing.append(str(word))
    return list(dict.fromkeys(missing))
