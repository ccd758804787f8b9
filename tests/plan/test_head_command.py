"""plan-head's command line and its file of chunk lengths."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.plan import head_command
from megatron_fused_ce.planner.choose import plan
from megatron_fused_ce.planner.memory import MIB, PlanInputs

ROOT = Path(__file__).resolve().parents[2]
LINE = "--tokens 32768 --hidden 4096 --vocab 128256 --device H200"


@pytest.mark.parametrize(
    ("words", "inputs", "said"),
    [
        (
            "--tp 4 --sequence-parallel --dtype bf16 --memory-mb 1000 --no-token-weights",
            PlanInputs(32768, 4096, 32064, tp_size=4, num_parts=4, config=FusedCEConfig(memory_mb=1000)),
            r"\n  grad_in_forward .* needs token weights\n",
        ),
        # As the op plans a divergence by the scaled-exp GEMM, which saves gradients of logits.
        (
            "--teacher-hidden 8192 --memory-mb 5000",
            PlanInputs(32768, 4096, 128256, second_hidden_size=8192, second_itemsize=2, saves_logits=True,
                       token_weights_known=True, config=FusedCEConfig(memory_mb=5000)),
            r" over four bare GEMMs \(two of logits, two of gradients; recompute takes six\)",
        ),
    ],
)  # fmt: skip
def test_command_line(words, inputs, said, capsys):
    """What is planned of it. How it is shown: test_documented_examples."""
    assert head_command.main(f"{LINE} {words}".split()) == 0
    chosen, out = plan(replace(inputs, device="H200")), capsys.readouterr().out
    assert out.startswith(f"{chosen.strategy}, {chosen.chunks_in_words}: {chosen.why}\n")
    for name, size in chosen.memory._asdict().items():
        assert not size or f"  {name.replace('_', ' '):21} {size / MIB:10.1f} MiB\n" in out
    assert f"{chosen.predicted_peak_bytes / MIB:9.1f} {chosen.relative_time:6.3f}" in out
    assert re.search(said, out)


def test_documented_examples(capsys):
    """docs/memory.md shows what the tool prints: refresh it when the table of devices changes."""
    text = (ROOT / "docs" / "memory.md").read_text()
    examples = text.split("```\n$ python -m megatron_fused_ce plan-head ")[1:]
    assert len(examples) == 2
    for example in examples:
        command, shown = example.split("```")[0].split("\n", 1)
        head_command.main(command.split())
        assert shown == capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--tokens"),
        (f"{LINE} --memory-mb x", "expected a whole number from 1"),
        (f"{LINE} --memory-mb 0", "expected a whole number from 1"),
        (f"{LINE} --teacher-hidden 0", "expected a whole number from 1"),
        (f"{LINE} --tp 0", "expected a whole number from 1"),
        (f"{LINE} --strategy fast", "invalid choice"),
        (f"{LINE} --strategy store --memory-mb 9", "memory_mb (--fused-ce-memory-mb)"),
        (f"{LINE} --num-chunks 2 --chunk-tokens 3", "give one of them"),
    ],
)
def test_command_line_bad_input_is_one_line_and_status_2(line, words, capsys):
    assert head_command.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err and len(said.err.splitlines()) == 1
