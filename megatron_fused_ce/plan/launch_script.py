"""The Megatron arguments of a launch: a shell script's, or a string's."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fused_ce.plan.closed_world import TrainingLaunch
from megatron_fused_ce.plan.shell_words import SHELLS, readable, unknown, unknowns

if TYPE_CHECKING:
    from megatron_fused_ce.plan.shell_script import Command

#: Commands that add words of their own.
_ADDS_WORDS = ("xargs", "parallel")
#: Names that hold several arguments rather than one's value.
_LIST = re.compile(r".*\[@\]|.*(?:ARGS|OPTIONS|OPTS|FLAGS|PARAMS).*|[@*]", re.IGNORECASE)
_NAME = re.compile(r"\w+|@")
_NODES = ("-N", "--nodes")
#: What is not known, a variable or a text, and the argument that needs it.
_Missing = tuple[str, str]
#: Of each program that starts ranks: ways to count them, each a product of options, with what is the case
#: where one is not given (None: only the machine knows).
_Ways = Sequence[Mapping[tuple[str, ...], int | None]]
_TORCHRUN: _Ways = [{("--nproc-per-node", "--nproc_per_node"): 1, ("--nnodes",): 1}]
_MPIRUN: _Ways = [{("-np", "-n", "--np", "-c"): None}]
_LAUNCHERS: dict[str, _Ways] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "deepspeed": [{("--num_gpus",): None, ("--num_nodes",): 1}],
    "accelerate": [{("--num_processes", "--num-processes"): None}],
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "srun": [{("-n", "--ntasks"): None}, {_NODES: None, ("--ntasks-per-node",): 1}],
}
#: Modules that run the program behind them as it is.
_RUNS_ANOTHER = {*_LAUNCHERS, "megatron_fused_ce.launch", "cProfile", "profile", "trace", "pdb", "coverage"}
#: Options of accelerate by which it shards the model itself.
_SHARDS = ("--use_deepspeed", "--use_fsdp", "--config_file")
#: What Slurm sets from its options.
_SLURM = {
    "SLURM_NNODES": _NODES,
    "SLURM_JOB_NUM_NODES": _NODES,
    "SLURM_NTASKS": ("-n", "--ntasks"),
    "SLURM_NTASKS_PER_NODE": ("--ntasks-per-node",),
    "SLURM_GPUS_PER_NODE": ("--gpus-per-node",),
}


def of_string(text: str, known: Collection[str], count_gpus: bool) -> TrainingLaunch:
    """Arguments in one string, with or without the command before them.

    Args:
        known, count_gpus: as of :func:`of_script`.

    Raises:
        ValueError: a quotation has no end, or the number of ranks is no number.
    """
    words = shlex.split(text)
    if any(word.rpartition("/")[2] in SHELLS for word in words):
        return of_script(text, {}, known, count_gpus=count_gpus)  # a script in quotes
    place = _script(words)
    if place is None:
        return TrainingLaunch(tuple(words), None, "since no launcher is named")
    return _launch(words, place, [], count_gpus)


def of_script(
    text: str,
    given: Mapping[str, str],
    known: Collection[str],
    answered: Collection[str] = (),
    folder: Path | None = None,
    count_gpus: bool = True,
    words: Sequence[str] = (),
) -> TrainingLaunch:
    """The launch that a script makes.

    Args:
        given: values of variables, which come before the script's own.
        known: names of the arguments that are needed; only their values must be known.
        answered: those that are given otherwise.
        folder: the script's folder, for scripts that it sources or starts.
        count_gpus: whether the launcher's number of ranks matters.
        words: the script's own arguments.

    Raises:
        ImportError: the parser of bash is not installed.
        ValueError: no training is launched, or several, or with a variable that has no value.
    """
    from megatron_fused_ce.plan.shell_script import Reader

    lines = re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE)
    slurm = [word for line in lines for word in shlex.split(line, comments=True)]
    by_slurm = {name: value for name, options in _SLURM.items() if (value := _value_of(options, slurm))}

    def follow(given: Mapping[str, str]) -> tuple[Reader, Command, int, list[_Missing], list[_Missing]]:
        """What the script does, its launch, and what is not known of its number of ranks and of the rest."""
        reader = Reader(given, folder, by_slurm)
        reader.values |= {"@": list(words)} if words else {}
        reader.read(text)
        if strange := set(given) - reader.names:
            there = ", ".join(sorted(reader.names)) or "none"
            names = ", ".join(sorted(strange))
            raise ValueError(f"--set {names}: the script has no such variable; there are {there}")
        launch, place = _the_launch(reader.found, known)
        name, options = _launcher(launch.words[:place])
        ranks = [option for way in _LAUNCHERS.get(name, ()) for names in way for option in names]
        of_launcher = _missing(options, ranks) if count_gpus else []
        others = _missing(launch.words[place + 1 :], set(known) - set(answered))
        return reader, launch, place, of_launcher, others

    reader, command, place, of_launcher, others = follow(given)
    _ask([*of_launcher, *others], bool(of_launcher))
    notes = [
        f"{mark} may give arguments, which are not counted."
        for mark in unknowns(" ".join(command.words[place:]))
        if "--" in mark
    ]
    if decide := reader.defaults:
        # Those that would be asked for if the script had no default.
        with contextlib.suppress(ValueError):
            *_, of_launcher, others = follow({**{name: unknown(name) for name in decide}, **given})
            asked = [mark for mark, _ in (*of_launcher, *others)]
            decide = {name: decide[name] for name in decide if name in asked}
    if told := ", ".join(f"{name}={value}" for name, value in decide.items()):
        notes.append(f"Defaults taken from the script: {told}; --set NAME=VALUE gives another.")
    # Values on the plan's command line stand for those that only the launch knows.
    dropped: set[int] = set()
    for index, word in list(enumerate(command.words))[place + 1 :]:
        option, equals, _ = word.partition("=")
        if unknowns(word) and (option if equals else command.words[index - 1]) in answered:
            dropped |= {index, index if equals else index - 1}
    left = [readable(word) for index, word in enumerate(command.words) if index not in dropped]
    launch = _launch(left, place, slurm, count_gpus)
    texts = {name: readable(value) for name, value in command.values.items() if isinstance(value, str)}
    return replace(launch, notes=(*reader.notes, *notes), environment={**texts, **launch.environment})


def _the_launch(found: Sequence[Command], known: Collection[str]) -> tuple[Command, int]:
    """The only command that starts a training, and the place of the Python script in it."""
    launches = {}
    for command in found:
        place = _script(command.words)
        names = [word.partition("=")[0] for word in command.words[place or 0 :]]
        if place is not None and any(name in known or unknowns(name) for name in names):
            launches[tuple(command.words)] = command, place
    if not launches:
        others = [readable(word) for command in found for word in command.words if word.endswith(".sh")][:1]
        started = "".join(f"{other}, which it starts, in quotes with its words, or " for other in others)
        raise ValueError(
            f"no command launches a .py script with Megatron's arguments: give {started}the arguments in "
            "quotes, or the log of a run by --from-log"
        )
    if len(launches) > 1:
        scripts = ", ".join(readable(command.words[place]) for command, place in launches.values())
        why = next((command.why for command, _ in launches.values() if command.why), "")
        decides = f", or give --set {why}=VALUE, which decides" if why else ""
        raise ValueError(f"several commands launch a training ({scripts}): leave one{decides}")
    return launches.popitem()[1]


def _missing(words: Sequence[str], needed: Collection[str]) -> list[_Missing]:
    """What is not known of arguments that are needed."""
    missing = []
    for before, word in zip(("", *words), words, strict=False):
        name, equals, _ = word.partition("=")
        option = name if equals else before if before.startswith("-") else ""
        for mark in unknowns(word):
            several = word == unknown(mark) and mark[0] != "<" and (not option or _LIST.fullmatch(mark))
            if option in needed or several or (word.startswith("--") and mark in unknowns(name)):
                missing.append((mark, option if option in needed else ""))
    return missing


def _ask(missing: Sequence[_Missing], or_gpus: bool) -> None:
    """``ValueError`` that names what is missing."""
    besides = ", or --gpus" if or_gpus else ""
    names = dict.fromkeys(name.removesuffix("[@]") for name, _ in missing)
    if settable := list(filter(_NAME.fullmatch, names)):
        several = [f"--set {name}=VALUE" for name in settable if not name.isdigit()]
        several += ["'SCRIPT WORD ...', the words behind it"] * any(map(str.isdigit, settable))
        raise ValueError(f"no value is known for {', '.join(settable)}: give {' '.join(several)}{besides}")
    for text, option in missing:
        where = f"{option} is {text}" if option else f"the arguments have {text}"
        instead = option or "its arguments in quotes"
        raise ValueError(f"{where}, which only the launch knows: give {instead}{besides}")


def _script(words: Sequence[str]) -> int | None:
    """Index of the first Python script, or module that -m names and that runs no other program."""
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    pairs = enumerate(pairwise(words), 1)
    modules = [index for index, (flag, name) in pairs if flag == "-m" and name not in _RUNS_ANOTHER]
    return min([*scripts, *modules], default=None)


def _launch(words: Sequence[str], place: int, slurm: Sequence[str], count_gpus: bool) -> TrainingLaunch:
    before = words[:place]
    gpus, why = _gpus(before, slurm) if count_gpus else (None, "")
    wrappers = [word for word in before if word.endswith(".sh") or word in _SHARDS]
    program = f"-m {words[place]}" if before[-1:] == ["-m"] else words[place]
    assigned = [word.partition("=") for word in before]
    return TrainingLaunch(
        tuple(words[place + 1 :]),
        gpus,
        why,
        program=[*wrappers, program][0],
        environment={name: value for name, equals, value in assigned if equals},
        doubts={name: f"what {name} adds is not known" for name in _ADDS_WORDS if name in before},
    )


def _launcher(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The last of the programs that start ranks, and its options; without one, '' and all words."""
    names = [word.rpartition("/")[2] for word in words]
    place = max((index for index, name in enumerate(names) if name in _LAUNCHERS), default=-1)
    return names[place] if place >= 0 else "", words[place + 1 :]


def _gpus(words: Sequence[str], slurm: Sequence[str]) -> tuple[int | None, str]:
    """Ranks that the launcher starts; or None, and why."""
    name, options = _launcher(words)
    if not name:
        return None, "since no launcher is named"
    options = [*options, *(slurm if name == "srun" else [])]
    for way in _LAUNCHERS[name]:
        counts = [(names[0], _value_of(names, options) or otherwise) for names, otherwise in way.items()]
        ranks = 1
        for option, count in counts:
            if count is not None and not str(count).isdigit():
                raise ValueError(f"{option} {count} is no number of ranks: give --gpus")
            ranks *= int(count or 0)
        if ranks:
            return ranks, ""
    return None, f"since {name} is not told how many ranks to start"


def _value_of(names: Sequence[str], words: Sequence[str]) -> str | None:
    for word, behind in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else behind
        if name[:2] in names and name[2:].isdigit():
            return name[2:]  # -N4
    return None
