"""The walls of the house, read from the source: who may import what, what none may call, names in prose."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = "megatron_fused_ce"


def files_of(*folders: str, ending: str = ".py") -> list[Path]:
    """Python files, each once: the package's links to the top level left out."""
    found = (file for folder in folders for file in sorted((ROOT / folder).rglob(f"*{ending}")))
    return [file for file in found if not any(parent.is_symlink() for parent in file.parents)]


SOURCES = files_of(OURS, "kernels")


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


@functools.cache
def imports(file: Path) -> set[str]:
    """Every module that ``file`` imports, at any depth of its code, for the type checker too."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module(file: Path) -> str:
    """The name under which it is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] in (OURS, "tests") else (OURS, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(file): file for file in SOURCES}


def imported_files(file: Path) -> set[Path]:
    """Files of the package that hold what ``file`` imports."""
    found = set()
    for name in imports(file):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found |= {MODULES[name]} if name else set()
    return found - {file}


def room(file: Path) -> str:
    """Its folder in the package; of a file at the package's top its own name."""
    return f"{module(file)}.__init__".split(".")[1]


def within(name: str, *prefixes: str) -> str:
    """The first of these modules, or names in them, that this is or is a part of; "" for none."""
    return next((prefix for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")), "")


#: The rooms, from the top floor down. A file imports of its own room, and of the floors below it.
FLOORS = (
    ("__main__", "autoload", "autoload_start", "launch"),
    ("__init__", "rl"),
    *((name,) for name in ("plan", "adapter", "distillation", "ops", "head", "logits", "ranks", "losses")),
    ("planner",),
    ("cli", "config", "kernels", "reasons"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
#: What is imported, and which rooms may do so: all of these, but where a line says otherwise.
KNOWN_TO = {
    "triton": {"kernels"},
    "megatron": {"adapter"},
    "torch": FLOOR_OF.keys() - {"__main__", "autoload", "autoload_start", "cli", "config", "launch", "plan",
                                "planner", "reasons"},
    # Numbers only: they answer for GPUs that are not there, on machines without torch.
    f"{OURS}.plan": {"plan"},
    # A kind of targets and of logits, which it brings with it.
    f"{OURS}.distillation": {"__init__", "rl", "adapter", "distillation"},
    f"{OURS}.scripts": set(),
}  # fmt: skip
#: A room, and all that it takes of the package: of the kernels their sizes, of the adapter the flags.
TAKES = {
    "planner": {"planner", "config", "kernels.sizes"},
    "plan": {"plan", "cli", "config", "planner", "reasons"}
    | {f"adapter.arguments.{name}" for name in ("FLAG", "add_arguments", "config_from_args")},
}


def test_rooms_import_downwards_and_know_what_they_may():
    assert FLOOR_OF.keys() == {room(file) for file in SOURCES}
    for file in SOURCES:
        for other in imported_files(file):
            upwards = room(file) != room(other) and FLOOR_OF[room(other)] <= FLOOR_OF[room(file)]
            assert not upwards, f"{module(file)} imports {module(other)}"
    for name, rooms in KNOWN_TO.items():
        knowing = {room(file) for file in SOURCES if any(within(each, name) for each in imports(file))}
        assert knowing <= rooms and bool(knowing) == bool(rooms), name
    for name, taken in TAKES.items():
        of_room = set().union(*(imports(file) for file in SOURCES if room(file) == name))
        ours = {each.partition(".")[2] for each in of_room if within(each, OURS)}
        assert {within(each, *taken) or each for each in ours} == taken, name
    assert not imports(ROOT / "kernels" / "sizes.py")


def test_no_circle_of_files():
    """Within a room either; an import inside of a function, or for the type checker, makes one, too."""
    graphlib.TopologicalSorter({file: imported_files(file) for file in SOURCES}).prepare()


def test_rooms_are_small_and_nothing_grows():
    """About a dozen files in each, but adapter and plan; a page that a reader can hold. No folder has more
    lines of Python and shell than tests/budget.txt says, where numbers only fall."""
    assert len(FLOOR_OF.keys() - {"kernels"}) <= 18  # which is a link
    modules = Counter(room(file) for file in SOURCES if file.name != "__init__.py")
    assert {name for name, count in modules.items() if count > 14} <= {"adapter", "plan"}
    lines = {module(file): file.read_text().count("\n") for file in SOURCES if room(file) != "kernels"}
    assert not {name: count for name, count in lines.items() if count > 450}
    for row in (ROOT / "tests" / "budget.txt").read_text().splitlines():
        most, folder = row.split()
        files = files_of(folder) + files_of(folder, ending=".sh")
        assert sum(len(file.read_text().splitlines()) for file in files) <= int(most), folder


def test_what_one_room_alone_may_do():
    """Call collectives (elsewhere a process group is named, and handed down); say the word of a divergence;
    read a command line."""
    readers = set()
    for file in SOURCES:
        text = file.read_text()
        taken = {each.split(".")[2] for each in imports(file) if ".distributed." in each}
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed"):
                taken.add(node.attr)
        assert room(file) == "ranks" or taken <= {"ProcessGroup", "get_rank"}, file
        if room(file) in ("head", "logits", "ranks", "losses", "planner"):
            assert not re.search(r"diverg|distill|forward_kl|reverse_kl|jsd", text, re.I), file
        if "argparse" in imports(file) or "sys.argv" in text:
            readers.add(module(file).removeprefix(f"{OURS}."))
    doors = {"adapter.arguments", "autoload", "autoload_start", "cli.command_line", "launch"}
    assert readers == doors | {"plan.command", "plan.megatron_arguments"}


def test_scripts_and_tests_around_the_package():
    """No script imports tests, no test file another: what two of them need is of tests/support. The truth
    takes options and outputs by name alone; with a constant of the head it would loosen its own bound."""
    for file in files_of("scripts", "tests"):
        wrong = r"tests\b" if "scripts" in file.parts else r"tests\.(\w+\.)*test_"
        assert not [name for name in imports(file) if re.match(wrong, name)], file
    known = imports(ROOT / "scripts/lib/reference.py") | imports(ROOT / "tests/support/roundings.py")
    allowed = "config.FusedCEConfig", "ops.cross_entropy.TokenOutputs", "scripts.lib.reference.HeadInputs"
    assert {name for name in known if within(name, OURS)} == {f"{OURS}.{name}" for name in allowed}


# --- what runs its input ---------------------------------------------------------------------------


def test_no_shell_script_runs_what_it_reads():
    for script in [*files_of("scripts", ending=".sh"), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        assert not re.search(r"^\s*eval\b|\b(curl|wget)\b", script.read_text(), re.MULTILINE), script


RUNS_ITS_INPUT = """\
import pickle as p; p.load(f)
from pickle import loads as read; read(b)
import pickle; Mine = type("Mine", (pickle.Unpickler,), {})
import torch; torch.load(f)
import numpy as np; np.load(f, allow_pickle=how)
import subprocess; subprocess.run(c, shell=True)
import os; os.system(c)
x = eval(text)
exec(text)
import torch.distributed as d; d.all_gather_object(a, b)
"""


@pytest.mark.rest
def test_lint_sees_what_runs_its_input():
    """No pickle, eval or shell: pyproject.toml's rules, as `make lint` applies them."""
    words = ("ruff", "check", "-q", "--output-format", "concise", "-", "--stdin-filename", "scripts/x.py")
    done = python("-m", *words, given=RUNS_ITS_INPUT)
    if "No module named ruff" in done.stderr:
        pytest.skip("ruff is not installed")
    found = {int(number) for number in re.findall(r":(\d+):\d+: (?:TID251|S\d+) ", done.stdout)}
    assert found == set(range(1, 11)), done.stdout + done.stderr


# --- what is imported where ------------------------------------------------------------------------


def python(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True)


#: triton 3.2 has no tensor descriptors, which the scaled-exp GEMM alone needs; newer interpreters do.
OLD = [
    file.stem for file in (ROOT / "kernels").glob("*.py") if not re.match("scaled_exp(_hopper)?$", file.stem)
]
#: What holds in a process of its own: its code, and what that prints.
IN_A_PROCESS = {
    # Python's start-up (autoload) runs it in every process with the flag.
    "installing the hook imports neither torch nor Megatron": (
        "import sys; from megatron_fused_ce.adapter import import_hook; import_hook.install(); "
        "print([name for name in ('torch', 'triton', 'megatron') if name in sys.modules])",
        "[]",
    ),
    "the op works without Megatron, and every export exists": (
        "import sys; sys.modules['megatron'] = None; import torch, megatron_fused_ce as m; "
        "h = torch.randn(3, 2, 4); w = torch.randn(5, 4); y = torch.zeros(2, 3, dtype=torch.long); "
        "print(m.fused_linear_cross_entropy(h, w, y).shape, hasattr(m, 'no_such_name'),"
        " all(getattr(m, name) and name in dir(m) for name in m.__all__))",
        "torch.Size([2, 3]) False True",
    ),
    "the row path imports with the oldest Triton": (
        "import os, sys, importlib; sys.modules['triton.tools.tensor_descriptor'] = None; "
        "os.environ.pop('TRITON_INTERPRET', None); "
        f"[importlib.import_module('megatron_fused_ce.kernels.' + name) for name in {OLD}]",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_A_PROCESS)
def test_in_a_process_of_its_own(what):
    code, printed = IN_A_PROCESS[what]
    done = python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


# --- names in prose --------------------------------------------------------------------------------


def defined(file: Path) -> set[str]:
    """Names that a file defines, sets or imports, and those of its path."""
    found = set(module(file).split("."))
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            found.add(node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            found.add(getattr(node, "id", getattr(node, "attr", "")))
    return found


@pytest.mark.rest
def test_names_in_prose_are_of_what_exists():
    """Roles of docstrings, each word of a path (what the package names is its own); files that pages name, of
    a folder of this repository or of the package."""
    files = files_of(OURS, "kernels", "scripts", "tests")
    in_package = set().union(*map(defined, SOURCES))
    in_all = in_package.union(*map(defined, files))
    roles, named, lost = 0, 0, []
    for file in files:
        for text in re.findall(r":(?:mod|func|class|meth|attr|data):`([^`]+)`", file.read_text()):
            words, roles = "".join(text.split()).lstrip(".").split("."), roles + 1
            if words[0] != "torch" and not set(words) <= (in_package if file in SOURCES else in_all):
                lost.append(f"{file.relative_to(ROOT)}: {text}")
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`([\w/]+\.py)", page.read_text()):
            if name.partition("/")[0] in {OURS, "tests"} | FLOOR_OF.keys():
                named += 1
                if not any(f"/{file.relative_to(ROOT)}".endswith(f"/{name}") for file in files):
                    lost.append(f"{page.name}: {name}")
    assert roles > 200 and named > 40, "the patterns find them"
    assert not lost, "\n".join(lost)
