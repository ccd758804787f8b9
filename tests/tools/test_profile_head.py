"""The sums of scripts/bench/profile.py, the traces it reads, and runs of it on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_fused_ce.scripts.bench import profile as profile_head
from megatron_fused_ce.scripts.bench.profile import Span, covered, summarise
from megatron_fused_ce.scripts.lib import results

ROOT = Path(__file__).resolve().parents[2]

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_exposed_is_what_no_compute_hides():
    assert covered([]) == 0
    spans = [
        Span(GATHER, 0, 100, "BFloat16"),  # before the first product
        Span("nvjet", 100, 1100),
        Span(GATHER, 200, 300, "Float"),  # one NCCL kernel, two things that it carries
        Span(SCATTER, 1050, 1250),  # 50 hidden, 150 exposed
        Span("_scale_rows_kernel", 1750, 1850),  # after 500 idle
    ]
    row = summarise([spans, []])
    exposed = {kind: 2 * own["exposed_ms"] for kind, own in row.pop("collectives").items()}
    assert exposed == pytest.approx({"all-gather": 0.1, "statistics": 0.0, "reduce-scatter": 0.15})
    ms = {"step_ms": 1.85, "gemm_ms": 1.0, "compute_ms": 1.1, "exposed_ms": 0.25, "idle_ms": 0.5}
    assert {name: 2 * value for name, value in row.items()} == pytest.approx(ms)


def test_kinds():
    """NCCL's kernel says what it does, its dtype what it carries."""
    kinds = {
        "reduce-scatter": [(SCATTER, "")],
        "all-gather": [(GATHER, "BFloat16"), (GATHER, "")],
        "all-reduce": [("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "BFloat16"), ("gloo:all_reduce", "")],
        "statistics": [(GATHER, "Float"), ("ncclDevKernel_AllReduce_Max_f32_TREE_LL", "")],
        "other collective": [("ncclDevKernel_SendRecv", "")],
        "GEMM": [("nvjet_sm90_tss_256x128_64x4_1x2_h_badd_coopA_NTT", ""), ("_grad_logits_kernel", "")],
        "other compute": [("_combine_tiles_kernel", ""), ("Memcpy DtoD (Device -> Device)", "")],
    }
    assert {k: {Span(name, 0, 1, dtype).kind for name, dtype in of} for k, of in kinds.items()} == {
        k: {k} for k in kinds
    }


@pytest.mark.parametrize("file", ["scaled_exp", "scaled_exp_hopper"])
def test_the_gemms_of_the_kernels_are_known_by_name(file):
    source = (ROOT / "kernels" / f"{file}.py").read_text()
    named = re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)
    assert named and {Span(name, 0, 1).kind for name in named} == {"GEMM"}


# --- traces ----------------------------------------------------------------------------------------


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **told) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": told}


def test_a_trace_of_a_gpu():
    """Kernels and copies alone, in the step in which they begin, with the dtype."""
    events = [
        event("user_annotation", profile_head.STEP, 100, 90),
        event("user_annotation", profile_head.STEP, 300, 90),
        event("gpu_user_annotation", profile_head.STEP, 105, 80, 7),
        event("gpu_user_annotation", "nccl:_allgather_base", 110, 20, 22),
        event("cpu_op", "aten::mm", 101, 3),
        event("kernel", "ncclDevKernel_AllReduce_Max_f64", 60, 5, 22, stream=22),  # the barrier's
        event("kernel", GATHER, 110, 20, 22, stream=22, dtype="BFloat16", grid=[16, 1, 1]),
        event("kernel", "nvjet", 130, 40, 7, stream=7, grid=[132, 1, 1]),
        event("gpu_memset", "Memset (Device)", 320, 1, 7, stream=7),
        {"ph": "i", "name": "marker", "ts": 120},
    ]
    first, second = profile_head.steps_of_trace(events, on_gpu=True)
    assert first == [Span(GATHER, 110, 130, "BFloat16"), Span("nvjet", 130, 170)]
    assert [span.name for span in second] == ["Memset (Device)"]


# --- runs ------------------------------------------------------------------------------------------


TINY = ["--preset", "profile", "--device", "cpu", "--shapes", "tiny", "--dtype", "float32", "--tokens", "64"]


def test_two_ranks(forks, tmp_path):
    words = ["-m", "scripts.bench", *TINY, "--sequence-parallel"]
    words += ["--strategies", "recompute", "--out", str(tmp_path / "out.json")]
    status, said = forks.launch(words, tmp_path, ranks=range(2), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    assert status == 0 and "megatron-te: needs a GPU" in said, said[-2000:]
    rows = results.rows(tmp_path / "out.json")
    names = [(variant, rank) for variant in ("roof-4", "recompute") for rank in (0, 1)]
    assert [(row["variant"], row["rank"]) for row in rows] == names
    for row in rows:
        assert row["tp"] == 2 and row["sp"] and row["step_ms"] > row["gemm_ms"] > 0
        # The roof has no collective.
        assert bool(row["collectives"].get("all-gather")) == (row["variant"] == "recompute")
        assert (row["exposed_ms"] > 0) == (row["variant"] == "recompute")
    assert (tmp_path / "out.md").read_text().count("Self CPU time total") == 2, "rank 0's tables"
    assert (tmp_path / "build/profile/tiny-64-sp-recompute-rank1.json").is_file()
