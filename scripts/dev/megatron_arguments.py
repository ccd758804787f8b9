"""Every argument of Megatron's parsers, in ``megatron_fused_ce/plan/arguments.tsv``.

    python -m megatron_fused_ce.scripts.dev.megatron_arguments CHECKOUT...

writes names and defaults anew from checkouts of Megatron-LM, one a version, oldest first. Classes are kept
by hand in the file (``plan/closed_world.py`` says what each means): the script leaves them, gives a new
argument none (``-``), and keeps what only a log prints. Beside ``none`` it names files that read it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from megatron_fused_ce.plan.closed_world import FILE
from megatron_fused_ce.scripts.dev.megatron_records import version
from megatron_fused_ce.scripts.lib.results import REPOSITORY

PARSERS = """
import argparse, json, re, sys
sys.path.insert(0, sys.argv[1])
sys.modules.setdefault("regex", re)
from megatron_fused_ce.scripts.lib import megatron_cpu
megatron_cpu.install(fused_wgrad=False)
from megatron.post_training.arguments import add_modelopt_args
from megatron.training.arguments import add_megatron_arguments
parser = add_modelopt_args(add_megatron_arguments(argparse.ArgumentParser(conflict_handler="resolve")))
found = [[a.dest, a.option_strings, type(a).__name__, a.nargs, str(a.default)] for a in parser._actions]
print("found", json.dumps(found))
"""
KINDS = {"_StoreTrueAction": "T", "_StoreFalseAction": "F", "BooleanOptionalAction": "B"}
#: As many files are named that read an argument.
MOST_READERS = 2


def parsers(checkout: Path) -> list[list[Any]]:
    """Destination, options, kind of action, nargs and default of each argument of Megatron's parser."""
    words = [sys.executable, "-c", PARSERS, str(checkout)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    found: list[list[Any]] = json.loads(line.removeprefix("found "))
    return [row for row in found if row[0] != "help"]


def readers(checkout: Path) -> dict[str, list[str]]:
    """Files of Megatron in which each name stands as an attribute or a string, but for its parsers."""
    found = defaultdict(list)
    for file in sorted([*checkout.glob("megatron/**/*.py"), *checkout.glob("*.py")]):
        if "arguments" not in file.name:
            name = str(file.relative_to(checkout)).removeprefix("megatron/")
            for word in set(re.findall(r"""[.'"](\w+)\b""", file.read_text(errors="replace"))):
                found[word].append(name)
    return found


def _joined(values: list[str]) -> str:
    """One default a version; ``"`` for the one before it, and none where the rest is the same."""
    while len(values) > 1 and values[-1] == values[-2]:
        values = values[:-1]
    return ";".join('"' if i and value == values[i - 1] else value for i, value in enumerate(values))


def main(checkouts: list[str]) -> int:
    options: dict[str, dict[str, dict[str, None]]] = {}
    defaults: dict[str, list[str]] = {}
    read: dict[str, list[str]] = {}
    versions = [version(Path(checkout)) for checkout in checkouts]
    for place, checkout in enumerate(map(Path, checkouts)):
        read |= readers(checkout)
        for name, strings, action, nargs, default in parsers(checkout):
            kind = KINDS.get(action, "*" if nargs in ("+", "*") else "v")
            options.setdefault(name, {}).setdefault(kind, {}).update(dict.fromkeys(strings))
            each = defaults.setdefault(name, ["."] * len(checkouts))
            each[place] = default if each[place] == "." else each[place]  # argparse takes the first
    head, *old = FILE.read_text().splitlines() if FILE.exists() else [""]
    kept = {line.split("\t")[0]: [*line.split("\t"), ""][:5] for line in old}
    rows = {name: row for name, row in kept.items() if not row[1]}
    for name, kinds in options.items():
        plain = f"--{name.replace('_', '-')}"
        called = "|".join(
            kind + "".join(f" {flag}" for flag in flags if list(kinds.values()) != [{plain: None}])
            for kind, flags in kinds.items()
        )
        *_, which, why = kept.get(name, ["-", ""])
        if which == "none" and not why:
            files = read.get(name, ["no file"])
            why = " ".join(files[:MOST_READERS]) + (" ..." if len(files) > MOST_READERS else "")
        rows[name] = [name, called, _joined(defaults[name]), which, why]
    head = f"# {' '.join(versions)}: argument; kind and options; default of each version; class; why, values"
    FILE.write_text("\n".join([head, *("\t".join(rows[name]).rstrip() for name in sorted(rows))]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
