"""The front page holds: it is short, its commands exist and its snippet runs as printed."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fused_ce.adapter.arguments import add_arguments

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_the_front_page_is_short_and_opens_with_a_picture():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("![") for line in lines[:15])
    assert "```diff" in lines[:40], "how to turn it on is on the first screen"


def test_the_snippet_runs_as_printed(tmp_path):
    (snippet,) = blocks("python")
    check = (
        "\nassert loss.shape == (2, 64) and loss.dtype == torch.float32"
        "\nlogits = torch.nn.functional.linear(hidden, weight).detach()"
        "\ntrue = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction='none')"
        "\ntorch.testing.assert_close(loss.detach(), true, rtol=1e-5, atol=1e-5)"
        "\nassert not loss[:, -1].any() and not hidden.grad[-1].any() and hidden.grad[:-1].all()"
    )
    done = subprocess.run(
        [sys.executable, "-c", snippet + check],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_flags_exist():
    known = {
        option
        for action in add_arguments(argparse.ArgumentParser())._actions
        for option in action.option_strings
    }
    # Megatron's own, which the page shows around ours.
    known |= {"--tensor-model-parallel-size", "--sequence-parallel", "--deterministic-mode"}
    known |= {"--from-log", "--gpu", "--from-launch", "--nproc-per-node", "--logits-save-dir"}
    assert set(re.findall(r"--[a-z][a-z-]+", README)) <= known


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", README))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_files_that_commands_name_exist():
    for path in re.findall(r"\b((?:scripts|tests)/[\w/.]+)", README):
        assert (ROOT / path).exists(), path
    assert (ROOT / "tests" / "parallel").is_dir()


def test_eager_has_only_pytorchs_meaning():
    parser = add_arguments(argparse.ArgumentParser())
    for text in (README, parser.format_help()):
        assert re.findall(r"\beager\b(?! PyTorch)", text) == []
