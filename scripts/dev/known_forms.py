"""Write megatron_fused_ce/adapter/known_forms.tsv from Megatron's history, since 0.15.0, and from forks:

python -m scripts.dev.known_forms MEGATRON_GIT_DIR [CHECKOUT ...]

The table has been written with a checkout of miles' Megatron-LM.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_fused_ce.adapter import forms
from megatron_fused_ce.scripts.lib.results import git

OLDEST = "core_v0.15.0"
#: Of these branches every commit counts, and every tag of a release or of a candidate.
BRANCHES = r"main|dev|core_r0\.(1[5-9]|[2-9]\d)\.\d+|core_dev_r0\.\d+\.\d+"
TAGS = r"core_v0\.(1[5-9]|[2-9]\d)\.\d+(rc\d+)?"


def sources(folder: str, path: str) -> Iterator[str]:
    """Every text that a file had."""
    branches = git(folder, "branch", "--format=%(refname:short)").split()
    tags = [tag for tag in git(folder, "tag").split() if re.fullmatch(TAGS, tag)]
    refs = [*(branch for branch in branches if re.fullmatch(BRANCHES, branch)), *tags]
    log = git(folder, "log", "--raw", "-m", "--no-abbrev", "--format=", *refs, "--not", OLDEST, "--", path)
    blobs = {blob for line in log.splitlines() for blob in line.split()[2:4] if set(blob) != {"0"}}
    blobs.update(*(git(folder, "ls-tree", tag, path).split()[2:3] for tag in tags))
    for blob in sorted(blobs):
        yield git(folder, "cat-file", "blob", blob)


def write(folder: str, checkouts: list[str]) -> None:
    known: dict[str, dict[str, set[str]]] = {}
    for row in forms.LOOKED_AT:
        if row.defined_in.startswith("megatron."):
            of_class = f"{row.cls}." if row.cls else ""
            names = {of_class + name: set[str]() for name in row.names.split()}
            known[row.defined_in] = names | known.get(row.defined_in, {})
    for module, digests in known.items():
        path = f"{module.replace('.', '/')}.py"
        files = [Path(checkout, path) for checkout in checkouts]
        texts = {*sources(folder, path), *(file.read_text() for file in files if file.is_file())}
        for text in texts:
            for name, node in forms.definitions(ast.parse(text)):
                if name in digests:
                    digests[name].add(forms.digest(node))
    at = git(folder, "log", "-1", "--format=%h", "main").strip()
    what = "module; function that it defines; digests of its forms"
    lines = [f"# Megatron-LM 0.15.0 to main at {at}, and a fork: {what}"]
    for module, digests in sorted(known.items()):
        for name in sorted(filter(digests.get, digests)):  # not those that torch defines
            lines.append(f"{module}\t{name}\t{' '.join(sorted(digests[name]))}")
    forms.FILE.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2:])
