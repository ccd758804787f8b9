"""What `pip install .` would put on a machine: built here, without a network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    for needed in ("pip", "setuptools"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "tree"
    # A copy, so that no build folder is left in the tree.
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "setup.py", "pyproject.toml", "README.md", "megatron_fused_ce", "kernels"],
        cwd=ROOT, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    if len(tracked) < 2:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--no-index", "-w", str(folder), str(source)),
        ],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_module(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"megatron_fused_ce/{file.relative_to(ROOT / 'megatron_fused_ce').as_posix()}"
        for file in (ROOT / "megatron_fused_ce").rglob("*.py")
    } | {f"megatron_fused_ce/kernels/{file.name}" for file in (ROOT / "kernels").glob("*.py")}
    assert len(expected) > 20
    assert expected <= inside
    assert not any(name.startswith("kernels/") for name in inside), "would shadow PyPI's kernels"


def test_wheel_runs_from_anywhere(wheel, tmp_path):
    code = (
        "import torch, megatron_fused_ce as m, megatron_fused_ce.kernels.row_kernels; "
        "h, w = torch.randn(3, 4), torch.randn(5, 4); "
        "print(m.__file__, m.fused_linear_cross_entropy(h, w, torch.zeros(3).long()).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ".whl" in done.stdout.split()[0] and "torch.Size([3])" in done.stdout
