"""docs/support.md: which versions are asked for, and one line where others are found.

Fake Megatrons, a folder each, in processes without torch: what is refused is refused before any of the
adapter's own imports.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fused_ce.cli import versions
from megatron_fused_ce.logits import gemm_rows

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE_MODEL = "megatron/core/models/common/language_module/language_module.py"
CLASS = """
class LanguageModule:
    def setup_embeddings_and_output_layer(self): pass
    def compute_language_model_loss(self, labels, logits): pass
"""
ARGUMENTS = """
import argparse
def add_megatron_arguments(parser):
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args()
"""
SCRIPT = """
import sys
import megatron.core
if "enable" in sys.argv:
    import megatron_fused_ce
    megatron_fused_ce.enable()
from megatron.training.arguments import parse_args
try:
    import megatron.core.models.common.language_module.language_module
except ModuleNotFoundError:
    pass  # elsewhere in this Megatron
parse_args()
print("RAN")
"""
NEW = "has no megatron.core.models.common.language_module.language_module"
NEEDS = "megatron_fused_ce needs"

#: What differs from a Megatron that is known -> the words of the refusal.
UNKNOWN = {
    "older": ({"megatron/core/package_info.py": "__version__ = '0.14.1'"}, f"{NEEDS} megatron-core 0.15"),
    "no version": ({"megatron/core/package_info.py": None}, "found of unknown version"),
    "old torch": ({"torch.py": "__version__ = '2.5.1+cu124'"}, f"{NEEDS} torch 2.6 or newer and found 2.5.1"),
    "no loss": ({LANGUAGE_MODEL: CLASS.replace("compute_", "get_")}, f"{NEW}.LanguageModule.compute_"),
    "no class": ({LANGUAGE_MODEL: "class Models: pass"}, f"{NEW}.LanguageModule.setup_"),
    "moved": ({LANGUAGE_MODEL: None}, f"{NEW}: take one of 0.15 to 0.19"),
    "other parser": (
        {"megatron/training/arguments.py": ARGUMENTS.replace("megatron_arguments", "arguments")},
        "has no megatron.training.arguments.add_megatron_arguments",
    ),
}  # fmt: skip


def run(folder: Path, changed: dict[str, str | None], *words: str) -> subprocess.CompletedProcess[str]:
    files = {
        "torch.py": "__version__ = '2.6.0a0+nv25.01'",
        "megatron/core/__init__.py": "import torch",
        "megatron/core/package_info.py": "__version__ = '0.15.0rc7'",
        "megatron/training/arguments.py": ARGUMENTS,
        LANGUAGE_MODEL: CLASS,
        "pretrain.py": SCRIPT,
    }
    for name, text in {**files, **changed}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "megatron_fused_ce.launch", str(folder / "pretrain.py"), *words],
        cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_megatron_ends_the_launch_with_one_line(tmp_path, what):
    """With the flag; without it the launch runs as it is. enable() raises with the same words."""
    changed, words = UNKNOWN[what]
    done = run(tmp_path, changed, "--fused-chunked-ce")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("megatron_fused_ce: ") and words in done.stderr
    # But not with the other parser: its model is known and would be patched, which wants a real torch.
    if what != "other parser":
        plain = run(tmp_path, changed)
        assert (plain.returncode, plain.stdout) == (0, "RAN\n"), plain.stderr
    enabled = run(tmp_path, changed, "enable")
    last = enabled.stderr.splitlines()[-1]
    assert enabled.returncode == 1 and last.startswith("ImportError: ") and words in last


def test_a_known_one_is_patched(tmp_path):
    """So the fakes are refused for what differs; the patch itself wants a real torch."""
    done = run(tmp_path, {}, "--fused-chunked-ce")
    assert "ImportError: cannot import name 'Tensor' from 'torch'" in done.stderr


def test_an_old_torch_under_the_functions():
    code = """if True:
        import torch
        torch.__version__ = "2.5.1"
        import megatron_fused_ce as ours
        for name in ("fused_linear_cross_entropy", "fused_linear_topk", "output_processor", "rl"):
            try:
                getattr(ours, name)
            except ImportError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("megatron_fused_ce needs torch 2.6 or newer and found 2.5.1: upgrade") == 4, done


OLD_TRITON = SimpleNamespace(__version__="3.1.0")


@pytest.mark.parametrize(
    ("triton", "words"),
    [(OLD_TRITON, "^megatron_fused_ce needs triton 3.2 or newer and found"), (None, "pip install triton")],
)
def test_an_old_triton_under_the_row_kernels(monkeypatch, triton, words):
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(gemm_rows, "by_triton", lambda device: True)
    with pytest.raises(ImportError, match=words) as error:
        gemm_rows.gemm_then_rows(torch.device("cpu"))
    assert "\n" not in str(error.value)


def test_versions_as_they_are_written_and_on_the_page():
    for version, old in (("2.6.0a0+nv25.01", False), ("2.13.0+cpu", False), ("1.13", True), ("?", True)):
        assert (versions.too_old("torch", version) is not None) == old
    page = (ROOT / "docs" / "support.md").read_text()
    (python,) = re.findall(r'python_requires=">=([\d.]+)"', (ROOT / "setup.py").read_text())
    for name, oldest in {"Python": python, **versions.OLDEST}.items():
        assert f"| {name} | {oldest if name == 'Python' else versions.words(oldest)} |" in page
