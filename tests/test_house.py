"""The walls of the house: who may import what and what none may call, read from the source."""

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
PACKAGE = ROOT / "megatron_fused_ce"
SOURCES = sorted(
    file
    for folder in (PACKAGE, ROOT / "kernels")
    for file in folder.rglob("*.py")
    if not {"kernels", "scripts"} & set(file.relative_to(folder).parts)  # links to the top level
)


@functools.cache
def imports(file: Path) -> set[str]:
    """Every module that ``file`` imports, at any depth of its code, for the type checker too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module(file: Path) -> str:
    """The name under which it is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("megatron_fused_ce", *parts) if parts[0] == "kernels" else parts
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
    parts = module(file).split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def rooms_that_import(prefix: str) -> set[str]:
    return {
        room(file) for file in SOURCES if any(f"{name}.".startswith(f"{prefix}.") for name in imports(file))
    }


#: The rooms, from the top floor down. A file imports of its own room, and of the floors below it.
FLOORS = (
    ("__main__", "autoload", "autoload_start", "launch"),
    ("__init__", "rl"),
    ("plan",),
    ("adapter",),
    ("distillation",),
    ("ops",),
    ("head",),
    ("logits",),
    ("ranks",),
    ("losses",),
    ("planner",),
    ("cli", "config", "kernels", "reasons"),
)


def test_every_file_has_a_room_and_imports_downwards():
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    assert floor_of.keys() == {room(file) for file in SOURCES}
    upwards = [
        f"{module(file)} imports {module(other)}"
        for file in SOURCES
        for other in imported_files(file)
        if room(file) != room(other) and floor_of[room(other)] <= floor_of[room(file)]
    ]
    assert not upwards


def test_no_circle_of_files():
    """Within a room either; an import inside of a function, or for the type checker, makes one, too."""
    try:
        graphlib.TopologicalSorter({file: imported_files(file) for file in SOURCES}).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(map(module, error.args[1]))) from None


def test_rooms_are_small():
    """About a dozen files in each, but adapter and plan; a page that a reader can hold."""
    assert len({room(file) for file in SOURCES} - {"kernels"}) <= 18  # which is a link
    modules = Counter(room(file) for file in SOURCES if file.name != "__init__.py")
    assert {name for name, count in modules.items() if count > 14} <= {"adapter", "plan"}
    lines = {module(file): file.read_text().count("\n") for file in SOURCES if room(file) != "kernels"}
    assert not {name: count for name, count in lines.items() if count > 450}


@pytest.mark.parametrize(("library", "rooms"), [("triton", {"kernels"}), ("megatron", {"adapter"})])
def test_one_room_alone_knows_it(library, rooms):
    assert rooms_that_import(library) == rooms


def test_kernels_import_nothing_of_the_package():
    """Records and constants that both need are theirs (kernels/records.py); the package imports downwards."""
    found = {name for name in imports_of("kernels") if name.startswith("megatron_fused_ce")}
    others = {name for name in found if not name.startswith("megatron_fused_ce.kernels.")}
    assert found and others <= {"megatron_fused_ce.kernels"}


def test_only_the_ranks_call_collectives():
    """Elsewhere a process group is named, and handed down."""
    assert {"ranks", "ops", "head"} <= rooms_that_import("torch.distributed")
    for file in SOURCES:
        if room(file) != "ranks":
            assert names_of_distributed(file) <= {"ProcessGroup", "get_rank"}, file


def names_of_distributed(file: Path) -> set[str]:
    """What ``file`` takes from ``torch.distributed``."""
    found = {name.split(".")[2] for name in imports(file) if name.startswith("torch.distributed.")}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed"):
            found.add(node.attr)
    return found


def test_the_head_knows_no_divergence():
    """A divergence is a kind of targets and of logits, which it brings with it: its room alone knows it."""
    knowing = rooms_that_import("megatron_fused_ce.distillation")
    assert knowing <= {"__init__", "rl", "adapter", "distillation"}
    for file in SOURCES:
        if room(file) in ("head", "logits", "ranks", "losses", "planner"):
            assert not re.search(r"diverg|distill|forward_kl|reverse_kl|jsd", file.read_text(), re.I), file


def test_only_the_front_doors_read_command_lines():
    readers = {
        module(file).removeprefix("megatron_fused_ce.")
        for file in SOURCES
        if "argparse" in imports(file) or "sys.argv" in file.read_text()
    }
    doors = {"adapter.arguments", "autoload", "autoload_start", "cli.command_line", "launch"}
    assert readers == doors | {"plan.command", "plan.megatron_arguments"}


def test_the_planner_knows_numbers_only():
    """It answers for GPUs that are not there, on machines without torch."""
    assert ours(imports_of("planner")) == {"planner", "config", "kernels"}
    assert all(".kernels.sizes." in name for name in imports_of("planner") if ".kernels" in name)
    assert not imports(ROOT / "kernels" / "sizes.py")
    assert not {"planner", "config"} & rooms_that_import("torch")


def test_the_plan_knows_numbers_only():
    """So does a plan of a whole training; of the adapter it knows the flags."""
    assert ours(imports_of("plan")) == {"plan", "adapter", "cli", "config", "planner", "reasons"}
    flags = {
        f"megatron_fused_ce.adapter.arguments.{x}" for x in ("FLAG", "add_arguments", "config_from_args")
    }
    assert {name for name in imports_of("plan") if ".adapter." in name} <= flags
    assert "plan" not in rooms_that_import("torch") | rooms_that_import("megatron")
    assert rooms_that_import("megatron_fused_ce.plan") == {"plan"}


def imports_of(name: str) -> set[str]:
    """All that a room imports."""
    return {imported for file in SOURCES if room(file) == name for imported in imports(file)}


def ours(names: set[str]) -> set[str]:
    """The rooms among them."""
    return {name.split(".")[1] for name in names if name.startswith("megatron_fused_ce.")}


def test_the_package_takes_nothing_from_scripts_and_scripts_nothing_from_tests():
    assert not rooms_that_import("megatron_fused_ce.scripts")
    for file in (ROOT / "scripts").rglob("*.py"):
        assert not [name for name in imports(file) if name.partition(".")[0] == "tests"], file


def test_the_truth_takes_nothing_from_its_subject():
    """Options and outputs by name alone; with a constant of the head it would loosen its own bound."""
    known = imports(ROOT / "scripts" / "lib" / "reference.py")
    known |= imports(ROOT / "tests" / "support" / "roundings.py")
    known -= {"megatron_fused_ce.scripts.lib.reference.HeadInputs"}
    assert {name for name in known if name.startswith("megatron_fused_ce")} == {
        "megatron_fused_ce.config.FusedCEConfig",
        "megatron_fused_ce.ops.cross_entropy.TokenOutputs",
    }


def test_no_test_file_imports_another():
    """What two of them need is of tests/support."""
    for file in (ROOT / "tests").rglob("*.py"):
        assert not [name for name in imports(file) if re.match(r"tests\.(\w+\.)*test_", name)], file


def test_no_shell_script_runs_what_it_reads():
    for script in [*(ROOT / "scripts").rglob("*.sh"), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        found = re.search(r"^\s*eval\b|\b(curl|wget)\b", script.read_text(), re.MULTILINE)
        assert not found, script


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
    words = [sys.executable, "-m", "ruff", "check", "-q", "--output-format", "concise", "-"]
    done = subprocess.run(
        [*words, "--stdin-filename", "scripts/x.py"], cwd=ROOT, input=RUNS_ITS_INPUT,
        capture_output=True, text=True,
    )  # fmt: skip
    if "No module named ruff" in done.stderr:
        pytest.skip("ruff is not installed")
    found = {int(number) for number in re.findall(r":(\d+):\d+: (?:TID251|S\d+) ", done.stdout)}
    assert found == set(range(1, 11)), done.stdout + done.stderr


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_installing_the_hook_imports_neither_torch_nor_megatron():
    """Python's start-up (autoload) runs it in every process with the flag."""
    code = (
        "import sys; from megatron_fused_ce.adapter import import_hook; import_hook.install(); "
        "print([name for name in ('torch', 'triton', 'megatron') if name in sys.modules])"
    )
    assert python(code).strip() == "[]"


def test_the_op_works_without_megatron():
    code = (
        "import sys; sys.modules['megatron'] = None; import torch, megatron_fused_ce as m; "
        "h = torch.randn(3, 2, 4); w = torch.randn(5, 4); y = torch.zeros(2, 3, dtype=torch.long); "
        "print(m.fused_linear_cross_entropy(h, w, y).shape)"
    )
    assert python(code).strip() == "torch.Size([2, 3])"


def test_the_row_path_imports_with_the_oldest_triton():
    """triton 3.2 has no tensor descriptors, which the scaled-exp GEMM alone needs."""
    kernels = sorted(file.stem for file in (ROOT / "kernels").glob("*.py"))
    of_rows = [name for name in kernels if name not in ("scaled_exp", "scaled_exp_hopper")]
    code = (
        "import os, sys, importlib; sys.modules['triton.tools.tensor_descriptor'] = None; "
        "os.environ.pop('TRITON_INTERPRET', None); "  # newer interpreters import them
        f"[importlib.import_module('megatron_fused_ce.kernels.' + name) for name in {of_rows}]"
    )
    assert {"scaled_exp_rows", "row_kernels", "token_kernels"} <= set(of_rows)
    python(code)


def test_every_export_exists():
    import megatron_fused_ce

    assert set(megatron_fused_ce.__all__) <= set(dir(megatron_fused_ce))
    for name in megatron_fused_ce.__all__:
        assert getattr(megatron_fused_ce, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        megatron_fused_ce.no_such_name  # noqa: B018
