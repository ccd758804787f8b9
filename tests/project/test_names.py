"""Modules, functions and files that prose names exist: roles in docstrings, paths in documents."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megatron_fused_ce", "kernels", "scripts", "tests")
FILES = [
    file
    for folder in FOLDERS
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not any((ROOT / folder / name).is_symlink() for name in file.relative_to(ROOT / folder).parts[:1])
]
#: Files that give names of others away.
DOORS = ("__init__.py", "rl.py")


def module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] in ("megatron_fused_ce", "tests") else ("megatron_fused_ce", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def defined(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    """Names that a module, or a class, defines; also attributes of ``self``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield owner + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{owner}{node.name}.")
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    yield f"{owner}{node.name}.{part.attr}"
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            yield from (owner + part.id for part in ast.walk(target or node) if isinstance(part, ast.Name))


def imported(tree: ast.Module) -> dict[str, str]:
    """Name in this file -> what it is."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


TREES = {file: ast.parse(file.read_text()) for file in FILES}


def known_names(files: list[Path]) -> dict[str, set[str]]:
    """Every ending of the path of a module or of what it defines -> the paths that end so."""
    paths = {module(file) for file in files}
    for file in files:
        names = {*defined(TREES[file].body), *(imported(TREES[file]) if file.name in DOORS else ())}
        paths |= {f"{module(file)}.{name}" for name in names}
    endings = defaultdict(set)
    for path in paths:
        parts = path.split(".")
        for start in range(len(parts)):
            endings[".".join(parts[start:])].add(path)
    return endings


def test_roles_of_docstrings_name_what_exists():
    """``.name``: any ending of a path; ``name``: of the file itself, imported there, or public."""
    of_package = [file for file in FILES if file.relative_to(ROOT).parts[0] in FOLDERS[:2]]
    of_package_alone, of_all = known_names(of_package), known_names(FILES)
    modules, roles, lost = {module(file) for file in FILES}, 0, []
    for file, tree in TREES.items():
        endings = of_package_alone if file in of_package else of_all
        own, here = set(defined(tree.body)), imported(tree)
        for role, text in re.findall(r":(mod|func|class|meth|attr|data):`([^`]+)`", file.read_text()):
            name, roles = " ".join(text.split()), roles + 1
            first, _, rest = name.partition(".")
            if not first:
                found = endings[rest]
            elif first in here:
                found = endings[f"{here[first]}.{rest}".strip(".")]
            else:
                found = {path for path in own if f".{path}".endswith(f".{name}")}
                found |= endings[f"megatron_fused_ce.{name}"] | endings[name] & {name}
            if role == "mod":
                found = found & modules
            if not found and first != "torch":
                lost.append(f"{file.relative_to(ROOT)}: :{role}:`{name}`")
    assert roles > 200, "the pattern finds them"
    assert not lost, "\n".join(lost)


def test_files_that_documents_name_exist():
    """Those of a folder of this repository, or of the package."""
    rooms = {
        file.relative_to(ROOT / FOLDERS[0]).parts[0] for file in FILES if ROOT / FOLDERS[0] in file.parents
    }
    paths = {f"/{file.relative_to(ROOT).as_posix()}" for file in FILES}
    named = 0
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`([\w/]+\.py)", page.read_text()):
            if name.partition("/")[0] in {"megatron_fused_ce", "kernels", "tests"} | rooms:
                assert any(path.endswith(f"/{name}") for path in paths), f"{page.name}: {name}"
                named += 1
    assert named > 40, "the pattern finds them"
