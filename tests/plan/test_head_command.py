"""plan-head's command line and its file of chunk lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.plan import head_command
from megatron_fused_ce.planner.choose import plan
from megatron_fused_ce.planner.memory import PlanInputs

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
LINE = "--tokens 32768 --hidden 4096 --vocab 128256 --device H200"


def test_command_line(capsys):
    line = f"{LINE} --tp 4 --sequence-parallel --dtype bf16 --memory-mb 1000 --no-token-weights"
    assert head_command.main(line.split()) == 0
    budget = FusedCEConfig(memory_mb=1000)
    chosen = plan(PlanInputs(32768, 4096, 32064, tp_size=4, num_parts=4, config=budget, device="H200"))
    said = capsys.readouterr().out
    assert said.startswith(f"{chosen.strategy}, {chosen.chunks_in_words}: {chosen.why}\n")
    assert f"{chosen.predicted_peak_bytes / MIB:.1f} MiB" in said
    assert f"hidden states         {chosen.memory.hidden_states / MIB:10.1f} MiB" in said
    table = said.split("time\n")[1].split("\n\n")[0]
    rows = {line[2:].split()[0]: line for line in table.splitlines()}
    assert list(rows)[:4] == ["store", "grad_in_forward", "mixed", "recompute"]
    assert [name for name, row in rows.items() if row.startswith("*")] == [chosen.strategy]
    assert rows["store"].endswith("over the budget")
    assert rows["grad_in_forward"].endswith("needs token weights")
    assert not rows["recompute"].endswith("over the budget")


def test_documented_examples(capsys):
    """docs/memory.md shows what the tool prints: refresh it when the table of devices changes."""
    text = (ROOT / "docs" / "memory.md").read_text()
    examples = text.split("```\n$ python -m megatron_fused_ce plan-head ")[1:]
    assert len(examples) == 2
    for example in examples:
        command, shown = example.split("```")[0].split("\n", 1)
        head_command.main(command.split())
        assert shown == capsys.readouterr().out


def test_a_teacher_beside_the_head(capsys):
    """As the op plans a divergence by the scaled-exp GEMM, which saves gradients of logits."""
    assert head_command.main(f"{LINE} --teacher-hidden 8192 --memory-mb 5000".split()) == 0
    beside = {"second_hidden_size": 8192, "second_itemsize": 2, "saves_logits": True}
    facts = {"config": FusedCEConfig(memory_mb=5000), "device": "H200", "token_weights_known": True}
    chosen = plan(PlanInputs(32768, 4096, 128256, **beside, **facts))
    said = capsys.readouterr().out
    assert said.startswith(f"{chosen.strategy}, {chosen.chunks_in_words}: ")
    assert f"  second product        {chosen.memory.second_product / MIB:10.1f} MiB" in said
    assert f"{chosen.relative_time:6.3f}" in said
    assert "over four bare GEMMs (two of logits, two of gradients; recompute takes six)" in said


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
