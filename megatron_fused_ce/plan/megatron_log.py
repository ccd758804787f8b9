"""A Megatron log: the arguments that its run printed, its vocabulary, and the peak that it measured.

Megatron 0.15 to main prints all arguments, checked and derived, once the launch is valid, one a line:
two spaces, the destination, dots up to column 50 (none behind a longer name), and ``str()`` of the value.
What a launcher writes before a line (``[rank0]:``, ``0: ``, a date) and lines of other ranks in between do
not matter; the vocabulary's size comes later, from the tokenizer.
"""

from __future__ import annotations

import ast
import re
from argparse import Action
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_fused_ce.plan.closed_world import TrainingLaunch, arguments

_BEGIN = "------------------------ arguments ------------------------"
_END = "-------------------- end of arguments ---------------------"
_ARGUMENT = re.compile(r"  (\w+) (\.*) ?(.*)$")
_VOCABULARY = re.compile(r"> padded vocab \(size: (\d+)\)")
_PEAK = re.compile(r"memory \(MB\) \| allocated: [\d.]+ \| max allocated: ([\d.]+) \|")
#: Only a launch by --yaml-cfg prints it.
_YAML = "language_model"
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


@dataclass
class _Run:
    """One block of arguments, and what its run printed after it."""

    begins: int
    values: dict[str, str] = field(default_factory=dict)  # as printed, by destination
    whole: bool = False
    vocab_size: str | None = None
    peak_mib: float = 0
    out_of_memory: bool = False


def of_log(text: str, actions: Sequence[Action]) -> TrainingLaunch:
    """The launch that wrote a log; of several in one file, the last that printed all its arguments.

    Args:
        actions: the arguments that are needed, with Megatron's destinations.

    Raises:
        ValueError: the log has no block of arguments, or none that is whole.
    """
    runs, known = _runs(text), arguments()
    # A log may lack the plugin's, this plan's, those of some versions, and one that Megatron deletes.
    always = [name for name in known if "." not in known[name].defaults and name != "recompute_activations"]
    needed = [*(action.dest for action in actions if action.dest in always), "world_size"]
    whole = [run for run in runs if run.whole and {*needed} <= run.values.keys() and _YAML not in run.values]
    if not whole:
        raise ValueError(_why_none(runs, needed))
    run, notes = whole[-1], []
    if len(runs) > 1:
        which = "the last" if run is runs[-1] else "the last that is whole"
        notes = [f"The log has {len(runs)} blocks of arguments: the one from line {run.begins}, {which}."]
    values = dict(run.values)
    # Where no tokenizer spoke: a mock tokenizer's size, to which Megatron before 0.18 adds a token.
    size = run.vocab_size or values["vocab_size"]
    mock = values.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in values
    if mock and not run.vocab_size and size.isdigit():
        size = str(int(size) + 1)
    values["vocab_size"] = values.get("padded_vocab_size", "None") if size == "None" and not mock else size
    if values.get("group_query_attention") != "True":
        values["num_query_groups"] = "None"  # printed, and without effect
    return TrainingLaunch(
        tuple(word for action in actions for word in _words(action, values)),
        int(values["world_size"]),
        notes=tuple(notes),
        measured_bytes=round(run.peak_mib * 2**20) or None,
        out_of_memory=run.out_of_memory,
        logged=values,
    )


def _runs(text: str) -> list[_Run]:
    runs: list[_Run] = []
    inside = False
    for row, line in enumerate(text.splitlines(), 1):
        if line.rstrip().endswith(_BEGIN):
            runs.append(_Run(row))
            inside = True
        elif not runs:
            continue
        elif inside and _END in line:
            inside, runs[-1].whole = False, True
        elif inside and (match := _ARGUMENT.search(line.rstrip())):
            name, dots, value = match.groups()
            if len(dots) == max(0, 48 - len(name)):
                runs[-1].values[name] = value
        elif match := _VOCABULARY.search(line):
            runs[-1].vocab_size = match[1]
        elif match := _PEAK.search(line):
            runs[-1].peak_mib = max(runs[-1].peak_mib, float(match[1]))
        elif _OUT_OF_MEMORY.search(line):
            runs[-1].out_of_memory = True
    return runs


def _why_none(runs: Sequence[_Run], needed: Sequence[str]) -> str:
    if not runs:
        return f'no line "{_BEGIN}": it is in the output of rank 0, at the start of the run'
    run = runs[-1]
    if _YAML in run.values:
        return "a launch by --yaml-cfg, whose log has other names, is not read: give Megatron's arguments"
    lost = ", ".join([name for name in needed if name not in run.values][:3]) or "no end"
    return f"the block of arguments from line {run.begins} has lost lines ({lost}): give a log with all of it"


def _words(action: Action, values: Mapping[str, str]) -> list[str]:
    """The words that give an argument's printed value on a command line."""
    names = (action.dest, *(name.strip("-").replace("-", "_") for name in action.option_strings))
    value = next((values[name] for name in names if name in values), "None")
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag] if value == str(action.const) else []
    if value == "None":
        return []
    if action.nargs == "*":
        return [flag, *map(str, ast.literal_eval(value))]
    plain = value.removeprefix("torch.").removeprefix("AttnBackend.")
    return [flag, _DTYPES.get(plain, plain) if "dtype" in action.dest else plain]
