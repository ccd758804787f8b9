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


#: Calls that run, or unpickle into running, what a file or a string says.
RUNS_ITS_INPUT = {
    *(
        "builtins.eval",
        "builtins.exec",
        "builtins.compile",
        "os.system",
        "os.popen",
        "code.interact",
    ),
    *("subprocess.getoutput", "subprocess.getstatusoutput"),
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "marshal.load",
        "marshal.loads",
        "shelve.open",
    ),
    *(
        "torch.load",
        "torch.package.PackageImporter",
        "torch.hub.load",
        "torch.utils.model_zoo.load_url",
    ),
    *("dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "joblib.load"),
    *("pandas.read_pickle", "numpy.lib.format.read_array", "jsonpickle.decode"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
}
#: Harmless unless this argument is given otherwise.
HARMLESS_WITH = {"shell": False, "allow_pickle": False, "weights_only": True}
#: Collectives that pickle: their input comes from the ranks of the same job.
PICKLES_FROM_RANKS = {
    f"torch.distributed.{name}"
    for name in (
        *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
        *("send_object_list", "recv_object_list"),
    )
}
#: File, call: why it may.
ALLOWED = {
    (
        "tests/megatron/test_adapter.py",
        "pickle.loads",
    ): "what the same line pickled: an adopted layer can be",
    ("megatron_fused_ce/vocab_parallel.py", "torch.distributed.all_gather_object"): (
        "an error's words, from the ranks of one launch, where options are compared over them"
    ),
    (
        "scripts/bench/problem.py",
        "torch.distributed.all_gather_object",
    ): "words of its own ranks",
    ("scripts/bench/profile.py", "torch.distributed.all_gather_object"): "times of its own ranks",
    ("scripts/dev/soak.py", "torch.distributed.all_gather_object"): "figures of its own ranks",
}


def calls(source: str) -> set[str]:
    """Every call of :data:`RUNS_ITS_INPUT` and its like, by its full name whatever it was imported as."""
    tree = ast.parse(source)
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, *rest = ast.unparse(node).split(".")
            name = ".".join([known.get(first, first), *rest])
            name = f"builtins.{name}" if f"builtins.{name}" in RUNS_ITS_INPUT else name
            found |= {name} & (RUNS_ITS_INPUT | PICKLES_FROM_RANKS)
        elif isinstance(node, ast.keyword) and node.arg in HARMLESS_WITH:
            is_harmless = (
                isinstance(node.value, ast.Constant) and node.value.value is HARMLESS_WITH[node.arg]
            )
            found |= set() if is_harmless else {f"{node.arg}={ast.unparse(node.value)}"}
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
    assert {"op", "strategies", "kernels", "adapter", "testing"} <= {room(f) for f in SOURCES}


def test_only_the_kernels_know_triton():
    assert rooms_that_import("triton") == {"kernels"}


def test_only_the_adapter_knows_megatron():
    assert rooms_that_import("megatron") <= {"adapter", "testing"}


def test_only_the_vocab_parallel_module_knows_collectives():
    """The op names a process group in its signature; the calls live in one module."""
    assert rooms_that_import("torch.distributed") <= {"op", "vocab_parallel", "testing"}
    calls = (
        node.func.attr
        for node in ast.walk(ast.parse((PACKAGE / "op.py").read_text()))
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
        if room(file) != "testing"
        and ("argparse" in imports(file) or "sys.argv" in file.read_text())
    }
    assert readers == {
        "megatron_fused_ce/adapter/arguments.py",
        "megatron_fused_ce/adapter/training_arguments.py",
        "megatron_fused_ce/autoload.py",
        "megatron_fused_ce/command_line.py",
        "megatron_fused_ce/estimate/command.py",
        "megatron_fused_ce/estimate/megatron_arguments.py",
        "megatron_fused_ce/launch.py",
        "megatron_fused_ce/planner.py",
    }


def test_the_planner_knows_numbers_only():
    """It answers for GPUs that are not there, on machines without torch."""
    planner = imports(PACKAGE / "planner.py")
    ours = {name.split(".")[1] for name in planner if name.startswith("megatron_fused_ce.")}
    assert ours == {"chunking", "config"}
    assert not {"planner", "chunking", "config"} & rooms_that_import("torch")


def test_the_estimate_knows_numbers_only():
    """So does a plan of a whole training."""
    room_of_it = [file for file in SOURCES if room(file) == "estimate"]
    known = {name for file in room_of_it for name in imports(file)}
    ours = {name.split(".")[1] for name in known if name.startswith("megatron_fused_ce.")}
    assert len(room_of_it) > 5
    assert ours == {
        "estimate",
        "command_line",
        "config",
        "planner",
        "adapter",
    }  # of the last, its flags
    assert {name for name in known if ".adapter." in name} <= {
        f"megatron_fused_ce.adapter.arguments.{name}"
        for name in ("FLAG", "add_arguments", "config_from_args")
    }
    assert "estimate" not in rooms_that_import("torch") | rooms_that_import("megatron")
    assert rooms_that_import("megatron_fused_ce.estimate") == {"estimate"}


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("kernels", "strategies"),
        ("row_ops", "strategies"),
        ("vocab_parallel", "strategies"),
        ("vocab_parallel", "pipeline"),
        ("logits_backend", "pipeline"),
        ("grad_weight", "pipeline"),
        ("kernels", "pipeline"),
        ("pipeline", "strategies"),
        ("pipeline", "op"),
        ("grad_weight", "strategies"),
        ("chunking", "strategies"),
        ("chunking", "planner"),
        ("config", "planner"),
        ("strategies", "op"),
        ("op", "adapter"),
    ],
)
def test_data_flows_one_way(low, high):
    assert low not in rooms_that_import(f"megatron_fused_ce.{high}")


def test_the_head_does_not_use_the_toolbox():
    assert rooms_that_import("megatron_fused_ce.testing") <= {"testing"}


def test_the_truth_takes_nothing_from_its_subject():
    """Options and outputs by name alone; with a constant of the head it would loosen its own bound."""
    known = imports(PACKAGE / "testing" / "reference.py")
    assert {name for name in known if name.startswith("megatron_fused_ce")} == {
        "megatron_fused_ce.config.FusedCEConfig",
        "megatron_fused_ce.token_outputs.TokenOutputs",
    }


@pytest.mark.rest
def test_nothing_runs_what_a_file_says():
    """No pickle, eval or shell: of results, logs, snapshots and launch scripts that others wrote."""
    every_file = [
        file
        for folder in ("megatron_fused_ce", "kernels", "scripts", "docs", "tests")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if file != Path(__file__)
    ]
    assert len(every_file) > 100
    found = {
        (file.relative_to(ROOT).as_posix(), call)
        for file in [*every_file, ROOT / "setup.py"]
        for call in calls(file.read_text())
        # Tests' ranks have no others.
        if not (call in PICKLES_FROM_RANKS and file.is_relative_to(ROOT / "tests"))
    }
    assert found == set(ALLOWED)
    for script in [*(ROOT / "scripts").rglob("*.sh"), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        assert not re.search(r"^\s*eval\b|\b(curl|wget)\b", script.read_text(), re.MULTILINE), (
            script
        )


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("import pickle as p; p.load(f)", "pickle.load"),
        ("from pickle import loads as read; read(b)", "pickle.loads"),
        ("import pickle\nclass Mine(pickle.Unpickler): pass", "pickle.Unpickler"),
        ("import torch; torch.load(f)", "torch.load"),
        ("import torch; torch.load(f, weights_only=False)", "weights_only=False"),
        ("import numpy as np; np.load(f, allow_pickle=how)", "allow_pickle=how"),
        ("import subprocess; subprocess.run(c, shell=True)", "shell=True"),
        ("import os; os.system(c)", "os.system"),
        ("x = eval(text)", "builtins.eval"),
        ("run = exec", "builtins.exec"),
        (
            "import torch.distributed as d; d.all_gather_object(a, b)",
            "torch.distributed.all_gather_object",
        ),
    ],
)
def test_each_such_call_is_seen(line, call):
    assert call in calls(line)
    assert not calls(
        "import re, json, torch; re.compile(p); json.loads(t); model.eval(); a.load(f)"
    )
    assert not calls(
        "import numpy as np, subprocess; np.load(f, allow_pickle=False); run(c, shell=False)"
    )


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
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


def test_every_export_exists():
    import megatron_fused_ce

    for name in megatron_fused_ce.__all__:
        assert getattr(megatron_fused_ce, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        megatron_fused_ce.no_such_name  # noqa: B018
