"""The report: the start-up line, and what the first evaluation adds to it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import report, say, switch
from megatron_fused_ce.planner.choose import Plan, plan
from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.planner.memory import PlanInputs


class TpGroup:
    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def megatron_head(config=None, rank=0, **others):
    """What the start-up line reads of a model: its output layer, its config."""
    weight = torch.nn.Parameter(torch.zeros(1000, 16), requires_grad=others.pop("trained", True))
    layer = SimpleNamespace(
        tp_group=TpGroup(2, rank),
        sequence_parallel=True,
        gradient_accumulation_fusion=others.pop("gradient_accumulation_fusion", True),
        weight=weight,
        input_size=16,
        output_size=2000,
        output_size_per_partition=1000,
        # Under Triton's interpreter the scaled-exp GEMM would serve on a CPU.
        fused_ce_config=replace(
            config or FusedCEConfig(num_chunks=4, strategy="recompute"), logits_backend="gemm_rows"
        ),
    )
    settings = {"bf16": True, "fp16": False, "mtp_num_layers": None, **others}
    layer.config = SimpleNamespace(**settings)
    return SimpleNamespace(output_layer=layer, config=layer.config)


LAUNCH = SimpleNamespace(seq_length=64, micro_batch_size=2, context_parallel_size=1)


@pytest.fixture
def planned(monkeypatch):
    """Each plan that the report makes, with its inputs."""
    made = []

    def record(inputs):
        made.append((inputs, plan(inputs)))
        return made[-1][1]

    monkeypatch.setattr(report, "plan", record)
    return made


@pytest.fixture
def said(monkeypatch):
    """Lines of the report, by a process whose first rank speaks."""
    pytest.importorskip("megatron.core")
    lines = []
    monkeypatch.setattr(say, "line", lines.append)
    monkeypatch.setattr(report, "_tells_totals", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lines


def test_start_up_line(said):
    report.adopted(megatron_head(), LAUNCH)
    assert said == [
        "on: strategy recompute (asked for), 4 chunks of 32 tokens; about 0.1 MiB for the head; "
        "Megatron's loss would hold 0.7 MiB, its native fusion 1.2 MiB",
        "logits backend gemm_rows (asked for)",
    ]
    report.adopted(megatron_head(rank=1), LAUNCH)
    assert len(said) == 2, "the first rank tells"


def test_start_up_line_of_auto_says_why(said):
    head = megatron_head(FusedCEConfig(memory_mb=7, z_loss=1e-4, skip_masked=True))
    head.output_layer.fused_ce_config = replace(head.output_layer.fused_ce_config, logits_backend="auto")
    report.adopted(head, LAUNCH)
    assert said[0].startswith("on: strategy store (chosen by auto), 1 chunk of 128 tokens; about")
    assert said[1] == (
        "why: the fastest within the budget of 7 MiB; grad_in_forward is no faster; logits backend "
        "gemm_rows, not scaled_exp: it runs on CUDA devices, not on cpu; masked tokens are "
        "skipped, the sizes are for none; loss with z_loss"
    )
    assert len(said) == 2


#: Of head and launch: changes, and what the planner is then told.
FACTS = [
    ({}, {}, {"num_tokens": 128, "tp_size": 2, "num_parts": 2, "hidden_size": 16, "num_rows": 1000}),
    ({}, {}, {"token_weights_known": True, "wgrad_accumulator": "main_grad", "uses_in_flight": 1}),
    ({}, {"context_parallel_size": 4}, {"num_tokens": 32}),
    ({}, {"context_parallel_size": None}, {"num_tokens": 128}),
    ({}, {"accumulate_allreduce_grads_in_fp32": False}, {"wgrad_accumulator": "low_main_grad"}),
    ({"gradient_accumulation_fusion": False}, {}, {"wgrad_accumulator": "returned"}),
    ({"trained": False, "gradient_accumulation_fusion": False}, {}, {"wgrad_accumulator": "none"}),
    ({"mtp_num_layers": 2}, {}, {"uses_in_flight": 3}),
]


@pytest.mark.parametrize(("head", "launch", "facts"), FACTS)
def test_what_the_planner_is_told(said, planned, head, launch, facts):
    report.adopted(megatron_head(**head), SimpleNamespace(**{**vars(LAUNCH), **launch}))
    ((inputs, _),) = planned
    assert {name: getattr(inputs, name) for name in facts} == facts
    assert f"4 chunks of {inputs.num_tokens // 4} tokens" in said[0]


def test_start_up_line_expects_the_loss_mask(said):
    """pretrain_gpt.py's model is called with one: grad_in_forward is possible."""
    report.adopted(megatron_head(FusedCEConfig()), SimpleNamespace(seq_length=16384, micro_batch_size=2))
    assert said[0] == (
        "on: strategy grad_in_forward (chosen by auto), 8 chunks of 4096 tokens; about 18 MiB for the head; "
        "Megatron's loss would hold 188 MiB, its native fusion 312 MiB"
    )


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
        "heads evaluated fused: 0, logits materialised: 0, heads on the stock path: 0; not counted: the head "
        "of SimpleNamespace, on Megatron's own path",
    ]


def test_a_budget_that_a_named_strategy_cannot_meet_ends_the_launch(said):
    wide = megatron_head(FusedCEConfig(strategy="store", memory_mb=1))
    launch = SimpleNamespace(seq_length=4096, micro_batch_size=2)
    with pytest.raises(ValueError, match="--fused-ce-memory-mb"):
        report.adopted(wide, launch)


def evaluated(layer, ran, hidden=32):
    """A call of the head on ``[hidden, 2, 16]``, by the plan that the op followed."""
    report.evaluation_once(layer, torch.zeros(hidden, 2, 16, dtype=torch.bfloat16), ran, "")


def test_first_evaluation_tells_what_differs(said):
    """Plans that the op followed, against what the start-up line expected."""
    model = megatron_head(FusedCEConfig(memory_mb=7))
    layer = model.output_layer
    report.adopted(model, LAUNCH)
    expected = layer._fused_ce_expected
    asked = FusedCEConfig(strategy="recompute")
    by_name = replace(expected.inputs, config=asked)
    other = Plan(by_name, "recompute", expected.cut)
    evaluated(layer, other)
    assert len(said) == 4
    assert said[2].startswith("as it runs: strategy recompute (chosen by auto), 1 chunk of 128 tokens")
    assert said[3].startswith("why: asked for by name")
    # The main head comes after those of multi-token prediction; batches may differ in length.
    evaluated(layer, expected)
    evaluated(layer, replace(other, cut=Cut.into(64, 2)))
    assert len(said) == 4


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, 2),
        ({"cut": Cut.into(64, 2)}, 4),
        ({"cut": Cut.into(50, 1)}, 4),
        ({"stored_chunks": 0, "strategy": "grad_in_forward"}, 4),
    ],
)
def test_first_evaluation_repeats_nothing(said, change, lines):
    model = megatron_head(FusedCEConfig(memory_mb=7))
    report.adopted(model, LAUNCH)
    evaluated(model.output_layer, replace(model.output_layer._fused_ce_expected, **change))
    assert len(said) == lines


@pytest.mark.parametrize(("sequence_parallel", "stock"), [(True, "1.1 MiB"), (False, "0.6 MiB")])
def test_first_evaluation_tells_where_the_launch_could_not(said, sequence_parallel, stock):
    """No Megatron arguments: Bridge, NeMo, own scripts."""
    layer = megatron_head().output_layer
    layer.sequence_parallel = sequence_parallel
    ran = plan(PlanInputs(config=layer.fused_ce_config, num_tokens=200, hidden_size=16, num_rows=1000))
    for _ in range(2):
        evaluated(layer, ran, hidden=50)
    assert len(said) == 2 and "on: strategy recompute (asked for), 4 chunks of 50 tokens" in said[0]
    assert f"Megatron's loss would hold {stock}" in said[0]


@pytest.mark.parametrize(
    ("settings", "stock"),
    [
        ({"bf16": False}, "0.5 MiB, its native fusion 1.2 MiB"),
        ({"mtp_num_layers": 1}, "1.2 MiB, its native fusion 1.7 MiB"),
    ],
)
def test_what_megatrons_losses_would_hold(said, settings, stock):
    """fp32 logits are overwritten by their softmax; a use that waits for its backward keeps it."""
    report.adopted(megatron_head(**settings), LAUNCH)
    assert said[0].endswith(f"Megatron's loss would hold {stock}")
