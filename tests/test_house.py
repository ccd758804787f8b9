"""The walls of the house: who may import what and what none may call, read from the source."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
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
    """Every module that ``file`` imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(file: Path) -> str:
    """Path from the root, a folder's name for rooms that are folders."""
    parts = file.relative_to(ROOT).parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if len(parts) > 2 else parts[1].removesuffix(".py")


def rooms_that_import(prefix: str) -> set[str]:
    return {
        room(file)
        for file in SOURCES
        if any(name == prefix or name.startswith(f"{prefix}.") for name in imports(file))
    }


def test_the_sources_were_found():
    assert {"op", "forward", "backward", "logits", "kernels", "adapter"} <= {room(f) for f in SOURCES}


def test_only_the_kernels_know_triton():
    assert rooms_that_import("triton") == {"kernels"}


def test_kernels_import_nothing_of_the_package():
    """Records and constants that both need are theirs (kernels/records.py); the package imports downwards."""
    files = [file for file in SOURCES if room(file) == "kernels"]
    ours = {n for file in files for n in imports(file) if n.startswith("megatron_fused_ce")}
    assert len(files) > 5 and ours
    assert {name for name in ours if not name.startswith("megatron_fused_ce.kernels.")} <= {
        "megatron_fused_ce.kernels"
    }


def test_only_the_adapter_knows_megatron():
    assert rooms_that_import("megatron") == {"adapter"}


def test_only_the_parallel_module_knows_collectives():
    """The op and its arguments name a process group; the calls live in one module."""
    assert rooms_that_import("torch.distributed") <= {"op", "rl", "call", "parallel", "topk"}
    calls = (
        node.func.attr
        for name in ("op", "rl", "call", "topk")
        for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "dist"
    )
    assert not list(calls)


def test_only_the_front_doors_read_command_lines():
    readers = {
        file.relative_to(ROOT).as_posix()
        for file in SOURCES
        if "argparse" in imports(file) or "sys.argv" in file.read_text()
    }
    assert readers == {
        "megatron_fused_ce/adapter/arguments.py",
        "megatron_fused_ce/adapter/training_arguments.py",
        "megatron_fused_ce/autoload.py",
        "megatron_fused_ce/command_line.py",
        "megatron_fused_ce/plan/command.py",
        "megatron_fused_ce/plan/megatron_arguments.py",
        "megatron_fused_ce/launch.py",
    }


def test_the_planner_knows_numbers_only():
    """It answers for GPUs that are not there, on machines without torch."""
    planner = imports(PACKAGE / "planner.py") | imports(PACKAGE / "head_bytes.py")
    ours = {name.split(".")[1] for name in planner if name.startswith("megatron_fused_ce.")}
    assert ours == {"chunking", "config", "head_bytes", "kernels"}  # of the last, numbers alone
    assert all(".kernels.sizes." in name for name in planner if ".kernels" in name)
    assert not imports(ROOT / "kernels" / "sizes.py")
    assert not {"planner", "head_bytes", "chunking", "config"} & rooms_that_import("torch")


def test_the_plan_knows_numbers_only():
    """So does a plan of a whole training."""
    room_of_it = [file for file in SOURCES if room(file) == "plan"]
    known = {name for file in room_of_it for name in imports(file)}
    ours = {name.split(".")[1] for name in known if name.startswith("megatron_fused_ce.")}
    assert len(room_of_it) > 5
    assert ours == {
        "plan",
        "command_line",
        "config",
        "head_bytes",
        "planner",
        "adapter",
    }  # of the last, its flags
    assert {name for name in known if ".adapter." in name} <= {
        f"megatron_fused_ce.adapter.arguments.{name}"
        for name in ("FLAG", "add_arguments", "config_from_args")
    }
    assert "plan" not in rooms_that_import("torch") | rooms_that_import("megatron")
    assert rooms_that_import("megatron_fused_ce.plan") == {"plan"}


#: The rooms of the head, from the lowest: each imports those before it alone.
FLOORS = (
    ("kernels", "config", "phases", "versions", "chunking", "host_copy", "autocast", "words"),
    ("loss", "head_bytes"),
    ("planner", "parallel"),
    ("masked_tokens", "validation"),
    ("logits", "promise", "scaling"),
    ("wgrad",),
    ("call",),
    ("overlap", "targets", "shards"),
    ("backward", "distillation", "several_labels"),
    ("forward",),
    ("autograd",),
    ("op",),
    ("topk",),
    ("rl",),
    ("adapter",),
)


def test_data_flows_one_way():
    """No import circle, no arrow upwards; within a floor none either, but within a room."""
    of_room = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    assert of_room.keys() <= {room(file) for file in SOURCES}
    for file in SOURCES:
        here = of_room.get(room(file))
        if here is None:
            continue
        for name in imports(file):
            there = name.removeprefix("megatron_fused_ce.").split(".")[0]
            if name.startswith("megatron_fused_ce.") and there in of_room and there != room(file):
                assert of_room[there] < here, f"{file.name} imports {name}"


def test_the_package_takes_nothing_from_scripts_and_scripts_nothing_from_tests():
    assert not rooms_that_import("megatron_fused_ce.scripts")
    for file in (ROOT / "scripts").rglob("*.py"):
        assert not [name for name in imports(file) if name.partition(".")[0] == "tests"], file


def test_the_truth_takes_nothing_from_its_subject():
    """Options and outputs by name alone; with a constant of the head it would loosen its own bound."""
    known = imports(ROOT / "scripts" / "lib" / "reference.py")
    assert {name for name in known if name.startswith("megatron_fused_ce")} == {
        "megatron_fused_ce.config.FusedCEConfig",
        "megatron_fused_ce.ops.results.TokenOutputs",
    }


def test_no_test_file_imports_another():
    """What two of them need is of tests/support."""
    for file in (ROOT / "tests").rglob("*.py"):
        assert not [name for name in imports(file) if re.match(r"tests\.(\w+\.)*test_", name)], file


def test_no_shell_script_runs_what_it_reads():
    for script in [*(ROOT / "scripts").rglob("*.sh"), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        found = re.search(r"^\s*eval\b|\b(curl|wget)\b", script.read_text(), re.MULTILINE)
        assert not found, script


@pytest.mark.rest
@pytest.mark.parametrize(
    "line",
    [
        "import pickle as p; p.load(f)",
        "from pickle import loads as read; read(b)",
        "import pickle\nclass Mine(pickle.Unpickler): pass",
        "import torch; torch.load(f)",
        "import numpy as np; np.load(f, allow_pickle=how)",
        "import subprocess; subprocess.run(c, shell=True)",
        "import os; os.system(c)",
        "x = eval(text)",
        "exec(text)",
        "import torch.distributed as d; d.all_gather_object(a, b)",
    ],
)
def test_lint_sees_what_runs_its_input(line):
    """No pickle, eval or shell: pyproject.toml's rules, as `make lint` applies them."""
    words = [sys.executable, "-m", "ruff", "check", "-q", "--output-format", "concise", "-"]
    done = subprocess.run(
        [*words, "--stdin-filename", "scripts/x.py"], cwd=ROOT, input=line, capture_output=True, text=True
    )
    if "No module named ruff" in done.stderr:
        pytest.skip("ruff is not installed")
    assert re.search(r" (TID251|S\d+) ", done.stdout), done.stdout + done.stderr


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

    for name in megatron_fused_ce.__all__:
        assert getattr(megatron_fused_ce, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        megatron_fused_ce.no_such_name  # noqa: B018
