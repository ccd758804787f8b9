"""Write megatron_fused_ce/adapter/known_forms.py from Megatron's history, since 0.15.0:

python -m scripts.dev.known_forms MEGATRON_GIT_DIR
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_fused_ce.adapter import forms

OLDEST = "core_v0.15.0"
#: Of these branches every commit counts, and every tag of a release or of a candidate.
BRANCHES = r"main|dev|core_r0\.(1[5-9]|[2-9]\d)\.\d+|core_dev_r0\.\d+\.\d+"
TAGS = r"core_v0\.(1[5-9]|[2-9]\d)\.\d+(rc\d+)?"
OUT = Path(forms.__file__).with_name("known_forms.py")


def git(folder: str, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", folder, *args], check=True, capture_output=True, text=True, errors="replace"
    ).stdout


def functions(source: str, names: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every definition of these names, within ``if`` and ``try`` too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                if prefix + child.name in names:
                    yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.If, ast.Try)):
                yield from walk(child, prefix)

    yield from walk(ast.parse(source), "")


def releases(folder: str, tag: str) -> set[str]:
    """Versions of a release's tag: its own, and what package_info says there, which may be another."""
    if "rc" in tag:
        return set()
    info = git(folder, "show", f"{tag}:megatron/core/package_info.py")
    said = (re.search(rf"^{part} = (\d+)", info, re.M) for part in ("MAJOR", "MINOR", "PATCH"))
    return {tag.removeprefix("core_v"), ".".join(found[1] for found in said if found)}


def as_numbers(version: str) -> list[int]:
    """For the order of versions; one that is not released is the last."""
    return [int(part) for part in version.split(".")] if version else [10**6]


def first(versions: Iterable[str]) -> str:
    return min(versions, key=as_numbers, default="")


def sources(
    folder: str, path: str, refs: list[str], of_tag: dict[str, set[str]]
) -> Iterator[tuple[str, str]]:
    """Every text that a file had, with the first release that has it."""
    log = git(
        folder, "log", "--raw", "-m", "--no-abbrev", "--format=", *refs, *of_tag, "--not", OLDEST, "--", path
    )
    blobs: dict[str, set[str]] = {
        blob: set() for line in log.splitlines() for blob in line.split()[2:4] if set(blob) != {"0"}
    }
    for tag, versions in of_tag.items():
        found = git(folder, "ls-tree", tag, path).split()
        if found:
            blobs.setdefault(found[2], set()).update(versions)
    for blob, versions in blobs.items():
        yield git(folder, "cat-file", "blob", blob), first(versions)


def literal(words: Iterable[str]) -> list[str]:
    return [f'        "{line} "' for line in textwrap.wrap(" ".join(words), 90)]


def write(folder: str) -> None:
    branches = git(folder, "branch", "--format=%(refname:short)").split()
    branches = [branch for branch in branches if re.fullmatch(BRANCHES, branch)]
    tags = [tag for tag in git(folder, "tag").split() if re.fullmatch(TAGS, tag)]
    of_tag = {tag: releases(folder, tag) for tag in tags}
    known: dict[str, dict[str, dict[str, str]]] = {}
    names: dict[str, dict[str, str]] = {"loss": {}, "log_softmax": {}}
    for module, looked_at in forms.LOOKED_AT.items():
        for source, since in sources(folder, f"{module.replace('.', '/')}.py", branches, of_tag):
            for name, node in functions(source, looked_at):
                key = f"{module}:{name}"
                seen = known.setdefault(module, {}).setdefault(name, {})
                made = forms.digest(node)
                seen[made] = first((since, seen.get(made, "")))
                if not forms.is_of_layer(key):
                    pool = names[forms.pool_of(key)]
                    for read in forms.read_names(node):
                        pool[read] = first((since, pool.get(read, "")))
    versions = sorted({version for found in of_tag.values() for version in found}, key=as_numbers)
    at = git(folder, "log", "-1", "--format=%h", "main").strip()
    lines = [
        '"""Forms of the functions that the head stands in for: written by scripts/dev/known_forms.py',
        f'from Megatron-LM\'s history, 0.15.0 to main at {at}; not by hand."""',
        "# fmt: off",
        "",
        "#: Versions that are released.",
        f'RELEASES = "{" ".join(versions)}"',
        "#: Function -> digest -> the first release with this form, empty where none has it.",
        "FORMS = {",
    ]
    for module in sorted(known):
        lines.append(f'    "{module}": {{')
        for name in sorted(known[module]):
            lines.append(f'        "{name}": {{')
            of_name = known[module][name].items()
            for made, since in sorted(of_name, key=lambda item: (as_numbers(item[1]), item[0])):
                lines.append(f'            "{made}": "{since}",')
            lines.append("        },")
        lines.append("    },")
    lines += [
        "}",
        "#: What functions of a loss read, and that of log-probabilities, by first release.",
        "NAMES = {",
    ]
    for of, begun in names.items():
        lines.append(f'    "{of}": {{')
        for release in sorted(set(begun.values()), key=as_numbers):
            lines.append(f'        "{release}":')
            lines += literal(sorted(name for name in begun if begun[name] == release))
            lines[-1] += ","
        lines.append("    },")
    OUT.write_text("\n".join([*lines, "}", ""]))


if __name__ == "__main__":
    write(sys.argv[1])
