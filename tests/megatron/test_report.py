"""The report: one line when a model is built, one when its head has first run, one at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import report, say, switch
from megatron_fused_ce.planner.choose import plan
from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.planner.memory import PlanInputs, size_in_words

RECOMPUTE = FusedCEConfig(num_chunks=4, strategy="recompute", logits_backend="gemm_rows")


def megatron_head(config=RECOMPUTE, rank=0, **others):
    """What the report reads of a model: its output layer, its config."""
    settings = SimpleNamespace(**{"bf16": True, "fp16": False, "mtp_num_layers": None, **others})
    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    layer = SimpleNamespace(
        tp_group=group, sequence_parallel=True, weight=torch.zeros(1000, 16), output_size_per_partition=1000,
        fused_ce_config=config, config=settings,
    )  # fmt: skip
    return SimpleNamespace(output_layer=layer, config=settings)


@pytest.fixture
def said(monkeypatch):
    """Lines of the report, by a process whose first rank speaks."""
    pytest.importorskip("megatron.core")
    lines = []
    monkeypatch.setattr(say, "line", lines.append)
    monkeypatch.setattr(say, "_said", set())
    monkeypatch.setattr(report, "_tells_totals", True)
    return lines


LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({}, "recompute"),
        ({"config": FusedCEConfig()}, "auto"),
        (LINEAR, "recompute; --cross-entropy-fusion-impl linear has no effect on it"),
        ({"rank": 1}, ""),
    ],
)
def test_when_a_model_is_built(said, settings, strategy):
    report.adopted(megatron_head(**settings), SimpleNamespace())
    assert said == ([f"on: the head of SimpleNamespace, strategy {strategy}"] if strategy else [])


def ran(config=RECOMPUTE, layer=None, hidden=32, dtype=torch.bfloat16, changes=(), **settings):
    """A call of the head on ``[hidden, 2, 16]`` of each of two ranks, by its plan or another one."""
    layer = layer or megatron_head(config, **settings).output_layer
    inputs = PlanInputs(
        config=config, num_tokens=4 * hidden, hidden_size=16, num_rows=1000, num_parts=2, tp_size=2
    )
    followed = replace(plan(inputs), **dict(changes))
    report.evaluation_once(layer, torch.zeros(hidden, 2, 16, dtype=dtype), followed, "no reason")
    return layer, followed


ASKED_FOR = "logits backend gemm_rows (asked for)"
SKIPS = replace(RECOMPUTE, strategy="auto", num_chunks=None, z_loss=1e-4, skip_masked=True)


@pytest.mark.parametrize(
    ("given", "what", "unfused", "native", "notes"),
    [
        ({}, "recompute, 4 chunks of 32 tokens", "0.7", "1.2", ASKED_FOR),
        (
            {"config": SKIPS},
            *("store, 1 chunk of 128 tokens", "0.7", "1.2"),
            f"AUTO; {ASKED_FOR}; masked tokens are skipped, the sizes are for none; loss with z_loss",
        ),
        (
            {"config": replace(RECOMPUTE, logits_backend="auto"), "hidden": 50},
            *("recompute, 4 chunks of 50 tokens", "1.1", "1.9"),
            "logits backend gemm_rows, not scaled_exp: no reason",
        ),
        # fp32 logits are overwritten by their softmax; a use that waits for its backward keeps it.
        ({"dtype": torch.float32}, "recompute, 4 chunks of 32 tokens", "0.5", "1.2", ASKED_FOR),
        ({"mtp_num_layers": 1}, "recompute, 4 chunks of 32 tokens", "1.2", "1.7", ASKED_FOR),
    ],
)
def test_when_a_head_has_run(said, given, what, unfused, native, notes):
    _, followed = ran(**given)
    head = f"the head takes about {size_in_words(followed.predicted_peak_bytes)}"
    stock = f"Megatron's unfused loss {unfused} MiB, its native one {native} MiB"
    assert said == [f"runs: {what}; {head}, {stock}; {notes.replace('AUTO', followed.why)}"]


def test_once_for_each_strategy_of_a_head(said):
    """The main head comes after those of multi-token prediction; batches may differ in length."""
    layer, _ = ran()
    ran(layer=layer, changes={"cut": Cut.into(64, 2)})
    assert len(said) == 1
    ran(layer=layer, changes={"strategy": "store", "stored_chunks": 4})
    assert len(said) == 2 and said[1].startswith("runs: store")


def test_a_head_left_to_megatron_is_told_of_at_the_end_too(said, monkeypatch):
    """Nothing counts its calls: zeros alone would not say where it ran."""
    at_end = []
    monkeypatch.setattr(report, "_tells_totals", False)
    monkeypatch.setattr(report, "_left", set())
    monkeypatch.setattr(report, "counters", switch.Counters)
    monkeypatch.setattr(report.promise.counts, "remade", 0)
    monkeypatch.setattr(report.atexit, "register", at_end.append)
    for _ in range(2):
        report.left_to_megatron(megatron_head(rank=0), "a test")
    report.left_to_megatron(megatron_head(rank=1), "a test")
    (tell,) = at_end
    tell()
    assert said == [
        "the head of SimpleNamespace stays on Megatron's own path: a test. --fused-chunked-ce has no effect "
        "on this head",
        "heads: 0 fused, 0 on the stock path; logits materialised: 0; not counted: the head of "
        "SimpleNamespace, on Megatron's own path",
    ]


def test_lines_fit_80_columns(capsys):
    say.line("a word and --an-argument-with-hyphens " * 5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and all(len(line) <= 80 and line.startswith(say.PREFIX) for line in lines)


def test_the_pages_show_these_lines(monkeypatch, capsys):
    """Llama-3-8B's head at TP 4, 32768 tokens, as it runs on an H100."""
    monkeypatch.setattr(say, "_said", set())
    monkeypatch.setattr(say, "speaks", lambda group: True)
    monkeypatch.setattr(report, "_tells_totals", True)
    layer = megatron_head(FusedCEConfig()).output_layer
    layer.tp_group, layer.output_size_per_partition = SimpleNamespace(size=lambda: 4), 32064
    model = type("GPTModel", (), {"output_layer": layer, "config": layer.config})()
    report.adopted(model, SimpleNamespace())
    of_launch = {"num_parts": 4, "tp_size": 4, "device": "H100", "logits_backend": "scaled_exp"}
    weights = {"token_weights_known": True, "wgrad_accumulator": "main_grad"}
    inputs = PlanInputs(32768, 4096, 32064, **of_launch, **weights)
    hidden = torch.empty(8192, 1, 4096, dtype=torch.bfloat16, device="meta")
    report.evaluation_once(layer, hidden, plan(inputs), "")
    said = capsys.readouterr().out
    root = Path(__file__).parents[2]
    assert f"```\n{said}```" in (root / "docs" / "options.md").read_text()
    start = "".join(said.splitlines(keepends=True)[:3])
    assert f"```\n{start}[fused-ce]   ...\n```" in (root / "README.md").read_text()
