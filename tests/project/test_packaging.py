"""What `pip install .` puts on a machine: sdist and wheel, built and installed without a network.

The wheel under test is the one built from the sdist. Everything is run in an environment of its own, from a
folder elsewhere, with torch and its like on the path behind it and this checkout nowhere.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import yaml

from megatron_fused_ce.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PACKED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "megatron_fused_ce", "kernels", "scripts")
#: Of scripts/ what a wheel has: the commands of users, and what they need.
SHIPPED = ("bench", "lib", "runs")
#: Of those what no command imports.
LEFT_OUT = {f"megatron_fused_ce/scripts/bench/{name}.py" for name in ("commits", "trained")}
#: What tells type checkers that the package has types, and what `plan` and the adapter read.
DATA = {
    f"megatron_fused_ce/{name}"
    for name in ("py.typed", "adapter/known_forms.tsv", "plan/arguments.tsv", "plan/models.tsv")
}
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def run(*words: object, env: dict[str, str] | None = None, cwd: Path | str = "/", ok: bool = True):
    """A process without this checkout on its path; raises with its last words where ``ok`` and it failed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd, env={**clean, **(env or {})}, capture_output=True, text=True,
    )  # fmt: skip
    assert not ok or done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done


def modules_of_the_tree() -> set[str]:
    """Their paths in the package; of scripts/ what is shipped."""
    files = [*(ROOT / "megatron_fused_ce").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
    files += [file for name in SHIPPED for file in (ROOT / "scripts" / name).glob("*.py")]
    names = (file.relative_to(ROOT).as_posix().removeprefix("megatron_fused_ce/") for file in files)
    return {f"megatron_fused_ce/{name}" for name in names} - LEFT_OUT


def build(hook: str, out: Path, tree: Path) -> Path:
    """What a hook of the build backend makes of a tree, in ``out``."""
    return out / run(sys.executable, "-c", BUILD, hook, out, cwd=tree).stdout.split()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what is packed, so that no build folder is left in the tree."""
    # Not by find_spec: asked for pip, setuptools' finder turns its own distutils off in this process.
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    if missing := sorted({"pip", "setuptools"} - installed):
        pytest.skip(f"not installed: {missing}")
    copy = tmp_path_factory.mktemp("source")
    run("cp", "-RP", *(ROOT / name for name in PACKED), copy)
    return copy


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    return build("build_sdist", tmp_path_factory.mktemp("sdist"), tree)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, out)
    return build("build_wheel", out, out / sdist.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel, and behind it this one's packages without what their .pth files add."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python, (packages,) = folder / "bin" / "python", folder.glob("lib/*/site-packages")
    below = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "below.pth").write_text("\n".join(below))
    absent = run(python, "-c", "import megatron_fused_ce", ok=False)
    assert "No module named 'megatron_fused_ce'" in absent.stderr, "another copy would be tested"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    return python


def test_the_image_holds_what_is_packed_and_the_workflows_run_targets():
    """No Docker runs here: its command is run from the wheel below. Tests run what is behind lint."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert sorted(copied) == sorted(PACKED)
    assert {"ARG BASE=nvcr.io/nvidia/pytorch:25.10-py3", "FROM ${BASE}"} < set(lines)
    assert lines[-1] == 'CMD ["python", "-m", "megatron_fused_ce", "selfcheck"]' and "selfcheck" in COMMANDS
    found = {}
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        (job,) = yaml.safe_load(file.read_text())["jobs"].values()
        found[file.stem] = [step["run"] for step in job["steps"] if "run" in step]
    assert found == {"tests": ["make test", "make test-rest"], "site": ["make docs"]}
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-2:] == found["tests"]
    for line in [*found["tests"], *found["site"]]:
        made = run(*line.split(), "-n", f"PY={sys.executable}", cwd=ROOT).stdout
        assert f"{sys.executable} -m {'sphinx' if 'docs' in line else 'pytest'}" in made


def test_sdist_and_wheel_hold_the_modules_and_nothing_else(sdist, wheel, tree, tmp_path):
    """In the sdist the link to kernels/ is a folder, and nothing of tests or results comes along. The wheel
    has all of its modules; one built from the tree, as by `pip install .`, is the same."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    others = {name for name in names if not name.startswith(("megatron_fused_ce/", "megatron_fused_ce.egg"))}
    assert others == {"setup.py", "pyproject.toml", "README.md", "LICENSE", "setup.cfg", "PKG-INFO"}
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert inside == modules_of_the_tree() | DATA  # a top-level kernels/ would shadow PyPI's
        for name in inside:
            assert archive.read(name) == (ROOT / name).read_bytes(), name
    built = build("build_wheel", tmp_path, tree)
    assert built.name == wheel.name and wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(wheel) as other:
        assert {i.filename: i.CRC for i in one.infolist()} == {i.filename: i.CRC for i in other.infolist()}


def test_the_metadata(wheel):
    import megatron_fused_ce

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    expected = {
        "Name": "megatron-fused-ce", "Version": megatron_fused_ce.__version__, "Requires-Python": ">=3.10",
        "Description-Content-Type": "text/markdown", "License-Expression": "Apache-2.0",
        "License-File": "LICENSE", "Author": "the megatron-fused-ce authors",
    }  # fmt: skip
    assert expected == {key: metadata[key] for key in expected}
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers and not any("License ::" in words for words in classifiers)
    # Any torch, and no triton: pip replaces neither of those that an environment has.
    assert [words for words in metadata.get_all("Requires-Dist") if "extra ==" not in words] == ["torch"]


def test_links_of_the_readme_are_absolute_where_there_is_an_address(tree, tmp_path):
    copy, address = tmp_path / "tree", "https://example.org/fused"
    shutil.copytree(tree, copy, symlinks=True)
    setup = (copy / "setup.py").read_text()
    (copy / "setup.py").write_text(setup.replace('ADDRESS = ""', f'ADDRESS = "{address}"', 1))
    (copy / "README.md").write_text(
        '![p](docs/p.svg) [d](docs/d.md#a) [b](#b) [w](https://w) <img src="docs/q.svg">'
    )
    text = (build("prepare_metadata_for_build_wheel", tmp_path, copy) / "METADATA").read_text()
    assert HeaderParser().parsestr(text).get_payload().strip() == (
        f"![p]({address}/raw/main/docs/p.svg) [d]({address}/blob/main/docs/d.md#a) [b](#b) [w](https://w) "
        f'<img src="{address}/raw/main/docs/q.svg">'
    )
    assert f"Project-URL: Source, {address}" in text


#: Imports each module, says where each was found, and runs the op by the kernels: Triton reads their source.
EVERY = """
import importlib, sys
for name in sys.argv[1:]: print(importlib.import_module(name).__file__)
print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('megatron_fused_ce')), sep='\\n')
import torch, megatron_fused_ce as m
from megatron_fused_ce.logits import gemm_rows
gemm_rows.by_triton = lambda device: True
hidden, weight, labels = torch.randn(37, 24), torch.randn(101, 24), torch.randint(0, 101, (37,))
loss = m.fused_linear_cross_entropy(hidden, weight, labels)
true = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
torch.testing.assert_close(loss, true)
"""


def test_every_module_imports_from_elsewhere_and_the_kernels_run(python, tmp_path):
    """The op without them is run by the sweep below, checked against fp64."""
    names = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in modules_of_the_tree()
        if not name.endswith("/__main__.py")
    }
    done = run(python, "-c", EVERY, *sorted(names), cwd=tmp_path, env={"TRITON_INTERPRET": "1"})
    files = {Path(line) for line in done.stdout.splitlines() if line != "None"}  # kernels/ has no __init__
    assert len(files) == len(names)
    assert all(python.parents[1] in file.parents for file in files)


#: Command, or module of the package -> words behind it, and words of what it prints.
USED = {
    "plan": ("--model llama-3-8b --gpus 8 --tp 4 --sequence-parallel --seq-length 32768", "Use it: "),
    "plan-head": ("--tokens 32768 --hidden 4096 --vocab 128256", "grad_in_forward"),
    "compare": ("off.log on.log --out compared", "\nSAME\n"),
    "memory": ("--draw profile.json --out drawn", "at the peak"),
    "sweep": (
        "--device cpu --tokens 16 --hidden 8 --vocab 64 --chunks 1 --blocks 1 --sample-ms 0"
        " --strategies store --out swept",
        "Recommended on this CPU:",
    ),
    "selfcheck": ("--device cpu --calls 6 --out right.json", "6 calls against fp64, 0 wrong"),
    "autoload": ("install", "{packages}"),
    # What selfcheck starts on a GPU; what docs/launch.md tells users to launch on a CPU; the launcher.
    "scripts.bench": (
        "--device cpu --dtype float32 --shapes tiny --tokens 64 --strategies store --out times.json",
        "times.json",
    ),
    "scripts.lib.megatron_cpu": (
        "script.py --distributed-backend",
        "['script.py', '--distributed-backend'] True",
    ),
    "launch": ("--help", "--fused-ce-memory-mb"),
}
LOG = (
    " [2026-01-01 00:00:00.0] iteration        1/       1 | lm loss: 5.537932E+00 | grad norm: 2.586 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def test_the_commands_run_from_elsewhere_on_a_cpu_without_triton(python, tmp_path):
    assert USED.keys() > COMMANDS.keys()
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "triton.py").write_text("raise ModuleNotFoundError(name='triton')")
    for name in ("off.log", "on.log"):
        (tmp_path / name).write_text(LOG)
    name = "2026-11-21-h200-memory-head-llama3-8b.json"
    shutil.copy(ROOT / "docs" / "benchmarks" / "results" / name, tmp_path / "profile.json")
    where = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path / "hidden")}}
    (tmp_path / "script.py").write_text("import sys, torch; print(sys.argv, torch.cuda.is_available())")
    assert "megatron_fused_ce.scripts.lib.megatron_cpu" in (ROOT / "docs" / "launch.md").read_text()
    program = python.with_name("megatron-fused-ce")
    for name, (words, said) in USED.items():
        start = (program, name) if name in COMMANDS else (python, "-m", f"megatron_fused_ce.{name}")
        assert said.format(packages=python.parents[1]) in run(*start, *words.split(), **where).stdout, name
    for file in ("compared/compare_loss.json", "swept/sweep.json", "swept/sweep.md"):
        assert (tmp_path / file).is_file()
    for words, said in (("memory -- torchrun pretrain_gpt.py", "needs a GPU"), ("paln", "")):
        refused = run(program, *words.split(), **where, ok=False)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and said in refused.stderr
    assert json.loads((tmp_path / "times.json").read_text())["rows"]
