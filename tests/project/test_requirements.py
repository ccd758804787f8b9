"""Dependencies: each pinned, with its reason, and used; nothing imported that is not listed."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
FOLDERS = ("megatron_fused_ce", "kernels", "scripts", "tests", "docs")

#: Where the distribution's name is not the module's.
MODULES = {
    **{
        "megatron-core": "megatron",
        "nvidia-modelopt": "modelopt",
        "pyyaml": "yaml",
        "myst-parser": "myst_parser",
    },
    **{"tree-sitter": "tree_sitter", "tree-sitter-bash": "tree_sitter_bash"},
}
#: Named by a command or a setting, not imported here.
TOOLS = {
    "pytest-xdist": "Makefile",
    "ruff": "Makefile",
    "mypy": "Makefile",
    "myst-parser": "docs/conf.py",
    "furo": "docs/conf.py",
    "pybind11": "scripts/lib/megatron_cpu.py",
}
#: Imported by Megatron's own code, which does not say so to pip.
MEGATRONS = {"pydantic", "pyyaml", "six", "einops", "psutil"}
#: Imported by ModelOpt's.
MODELOPTS = {"omegaconf", "pulp", "regex", "scipy"}
#: Imported where they happen to be, left out where not; or brought by what is listed.
NOT_LISTED = {
    "apex": "gradient accumulation fusion, looked up at run time",
    "fused_weight_gradient_mlp_cuda": "apex's extension",
    "transformer_engine": "looked up at run time",
    "typing_extensions": "torch's own",
    "packaging": "Megatron's and pytest's own",
    "docutils": "Sphinx's own",
}


def lines_of(file: Path) -> list[tuple[str, str]]:
    """(requirement, its reason): beside it, or in the comment above its block."""
    found, block = [], ""
    above_is_requirement = False
    for line in file.read_text().splitlines():
        requirement, _, beside = (part.strip() for part in line.partition("#"))
        if not line.strip():
            block = ""
        elif not requirement:
            block = beside if above_is_requirement else f"{block} {beside}"
        else:
            found.append((requirement, beside or block.strip()))
        above_is_requirement = bool(requirement)
    return found


REQUIREMENTS = [(file.name, *line) for file in FILES for line in lines_of(file)]
NAMES = {re.split(r"[=<>!~;\s\[]", line)[0].lower() for _, line, _ in REQUIREMENTS}


def imported(folders: tuple[str, ...] = FOLDERS) -> dict[str, str]:
    """Third-party module -> a file that imports it."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    scripts = {file.stem for file in (ROOT / "scripts").rglob("*.py")}
    local = scripts | {"tests", "megatron_fused_ce", "kernels"}
    found: dict[str, str] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in (name.partition(".")[0] for name in names):
                if name not in local and name not in sys.stdlib_module_names:
                    found.setdefault(name, file.relative_to(ROOT).as_posix())
    return found


def test_the_files_were_read():
    assert {file.name for file in FILES} == {"dev.txt", "modelopt.txt", "torch.txt"}
    assert {"torch", "megatron-core", "triton", "ruff", "furo"} <= NAMES


@pytest.mark.parametrize(("file", "line", "reason"), REQUIREMENTS, ids=lambda words: str(words)[:40])
def test_each_line_is_pinned_and_says_why(file, line, reason):
    assert re.fullmatch(r"[\w-]+==[\d.]+(; .+)?", line), f"{file}: {line} is not pinned"
    assert len(reason.split()) >= 3, f"{file}: no reason beside or above {line}"


def test_each_is_used():
    ours = imported()
    for name in NAMES - MEGATRONS - MODELOPTS:
        if name in TOOLS:
            assert re.search(rf"\b{MODULES.get(name, name)}\b", (ROOT / TOOLS[name]).read_text()), name
        else:
            assert MODULES.get(name, name) in ours, f"{name} is listed and nothing imports it"
    assert MEGATRONS | MODELOPTS <= NAMES and set(TOOLS) <= NAMES


def test_nothing_is_imported_that_is_not_listed():
    listed = {MODULES.get(name, name) for name in NAMES} | set(NOT_LISTED)
    unlisted = {name: file for name, file in imported().items() if name not in listed}
    assert not unlisted


def test_the_package_itself_needs_little():
    """What `pip install .` brings, the extra `plan`, what it finds at run time, and Megatron."""
    runtime = {"torch", "triton", "rich", "matplotlib", "tree_sitter", "tree_sitter_bash", "megatron"}
    assert set(imported(("megatron_fused_ce", "kernels"))) <= runtime | set(NOT_LISTED)


def test_setup_says_why():
    """Each dependency of the wheel has a comment above it."""
    lines = (ROOT / "setup.py").read_text().splitlines()
    asked = [number for number, line in enumerate(lines) if re.match(r'\s+"[\w-]+(>=.*)?"|\s+"plan":', line)]
    wanted = [n for n in asked if ">=" in lines[n]]
    assert len(wanted) == 4
    for number in wanted:
        assert lines[number - 1].strip().startswith("#"), lines[number]
