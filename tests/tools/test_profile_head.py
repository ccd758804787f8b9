"""The sums of scripts/bench/profile.py, the traces it reads, and runs of it on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_fused_ce.scripts.bench import __main__ as bench
from megatron_fused_ce.scripts.bench import profile as profile_head
from megatron_fused_ce.scripts.bench.profile import Span, contention, covered, kind_of, summarise, union
from megatron_fused_ce.scripts.lib import results

ROOT = Path(__file__).resolve().parents[2]

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_overlapping_spans_are_covered_once():
    spans = [Span("a", 0, 10), Span("b", 5, 8), Span("c", 9, 12), Span("d", 20, 21)]
    assert covered(spans) == 13
    assert covered(reversed(spans)) == 13
    assert covered([]) == 0
    assert union(spans) == [(0, 12), (20, 21)]


def test_compute_idle_and_exposed():
    """A collective under a product is hidden, beside it exposed; gaps are idle."""
    spans = [
        Span("nvjet_sm90", 0, 1000),
        Span("ncclDevKernel_AllReduce_Sum_bf16", 500, 1500),  # 500 hidden, 500 exposed
        Span("_scale_rows_kernel", 2000, 2100),  # after 500 idle
    ]
    profile = summarise("store", [spans])
    assert profile.step_ms == pytest.approx(2.1)
    assert profile.compute_ms == pytest.approx(1.1)
    assert profile.collectives_ms == pytest.approx(1.0)
    assert profile.exposed_ms == pytest.approx(0.5)
    assert profile.idle_ms == pytest.approx(0.5)
    assert profile.by_kind == pytest.approx({"product": 1.0, "all-reduce": 1.0, "our rows": 0.1})
    assert profile.exposed_by_kind == pytest.approx({"all-reduce": 0.5})
    assert [kernel[1] for kernel in profile.kernels][-1] == "_scale_rows_kernel"


def test_exposed_of_each_collective():
    spans = [
        Span(GATHER, 0, 100, dtype="BFloat16"),  # before the first product
        Span("nvjet", 100, 1100),
        Span(GATHER, 200, 300, dtype="Float"),
        Span(SCATTER, 1050, 1250),
    ]
    profile = summarise("grad_in_forward", [spans])
    assert profile.exposed_by_kind == pytest.approx(
        {"all-gather": 0.1, "statistics": 0.0, "reduce-scatter": 0.15}
    )
    assert profile.exposed_ms == pytest.approx(0.25)
    # One NCCL kernel, two things that it carries.
    assert {kernel[0] for kernel in profile.kernels if "AllGather" in kernel[1]} == {
        "all-gather",
        "statistics",
    }


def test_a_roof_begins_after_its_gather():
    spans = [Span("Memset", 0, 1), Span(GATHER, 2, 50), Span("nvjet", 51, 90)]
    assert profile_head.after_collectives(spans) == spans[2:]
    assert profile_head.after_collectives(spans[2:]) == spans[2:]


def test_steps_are_averaged():
    spans = [Span("nvjet", 10 * i, 10 * i + 4) for i in range(4)]
    profile = summarise("roof", [spans[:2], spans[2:]])
    assert profile.kernels == [("product", "nvjet", 2.0, pytest.approx(0.008))]
    assert profile.compute_ms == pytest.approx(0.008)
    # What lies between steps belongs to none of them.
    assert (profile.step_ms, profile.idle_ms) == pytest.approx((0.014, 0.006))
    assert profile.timeline == [("product", 0, 0.0, 4.0), ("product", 0, 10.0, 4.0)]


def test_contention_is_of_one_kernel_with_and_without_a_collective():
    steps = [
        [
            Span("nvjet", 0, 100, grid="[132]"),
            Span("nvjet", 200, 310, grid="[132]"),  # 110 of 110 beside
            Span("nvjet", 400, 500, grid="[132]"),  # 20 of 100: neither
            Span("nvjet", 600, 900, grid="[66]"),  # another size
            Span("_product_kernel", 1000, 1300),  # only ever beside
            Span(SCATTER, 190, 320),
            Span(SCATTER, 480, 520),
            Span(SCATTER, 990, 1300),
        ]
    ]
    rows, lost = contention(steps)
    assert rows == [("nvjet", 1, pytest.approx(0.1), 1, pytest.approx(0.11))]
    assert lost == pytest.approx(10)
    assert summarise("grad_in_forward", steps * 2).contention_ms == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        (SCATTER, "", "reduce-scatter"),
        (GATHER, "BFloat16", "all-gather"),
        (GATHER, "Float", "statistics"),
        (GATHER, "", "all-gather"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "BFloat16", "all-reduce"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "", "statistics"),
        ("ncclDevKernel_AllReduce_Max_f32_TREE_LL", "", "statistics"),
        ("ncclDevKernel_SendRecv", "", "other collective"),
        ("gloo:all_reduce", "", "all-reduce"),
        ("_product_kernel", "", "our product"),
        ("_gradient_product_kernel", "", "our product"),
        ("nvjet_sm90_tss_256x128_64x4_1x2_h_badd_coopA_NTT", "", "product"),
        ("_combine_tiles_kernel", "", "our rows"),
        ("_row_statistics_kernel", "", "our rows"),
        ("_token_loss_kernel", "", "our rows"),
        ("_add_scaled_kernel", "", "our rows"),
        ("Memcpy DtoD (Device -> Device)", "", "copy or fill"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "", "elementwise"),
    ],
)
def test_kinds(name, dtype, kind):
    assert kind_of(name, dtype) == kind
    assert kind in profile_head.COLOURS


# --- traces ----------------------------------------------------------------------------------------


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **told) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": told}


def test_a_trace_of_a_gpu():
    """Kernels and copies alone, in the step in which they begin, with stream, grid and dtype."""
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
    assert first == [
        Span(GATHER, 110, 130, 22, "[16, 1, 1]", "BFloat16"),
        Span("nvjet", 130, 170, 7, "[132, 1, 1]"),
    ]
    assert [span.name for span in second] == ["Memset (Device)"]


def test_a_trace_of_a_cpu():
    """The outermost operators of each thread; the call of a collective is none."""
    events = [
        event("user_annotation", profile_head.STEP, 0, 100),
        event("cpu_op", "_FusedBackward", 0, 90),
        event("cpu_op", "aten::matmul", 1, 10),
        event("cpu_op", "aten::mm", 2, 8),
        event("cpu_op", "c10d::allreduce_", 20, 5),
        event("cpu_op", "aten::copy_", 21, 2),
        event("user_annotation", "gloo:all_reduce", 22, 30, 2),
        event("cpu_op", "aten::view", 23, 2, 2),
        event("cpu_op", "aten::exp", 60, 2),
    ]
    [spans] = profile_head.steps_of_trace(events, on_gpu=False)
    assert [span.name for span in spans] == ["aten::matmul", "gloo:all_reduce", "aten::exp"]


# --- what is written -------------------------------------------------------------------------------


def row_of(variant: str, rank: int = 0, num_spans: int = 3, tp: int = 2) -> dict:
    spans = [Span("nvjet", 10 * i, 10 * i + 9) for i in range(num_spans)] + [Span(SCATTER, 5, 25)]
    facts = {"commit": "abc", "device": "NVIDIA H200", "torch": "2", "tp": tp, "sp": True}
    profile = profile_head.asdict(summarise(variant, [spans], rank))
    return facts | {"shape": "tiny", "T": 64, **profile}


def test_a_long_file_loses_timelines_from_the_end():
    rows = [row_of("roof", num_spans=100), row_of("grad_in_forward", num_spans=1000)]
    rows += [row_of("grad_in_forward", rank=1), row_of("store", num_spans=9000)]
    written = profile_head.without_long_timelines(rows)
    assert len(json.dumps([row["timeline"] for row in written])) < profile_head.MOST_CHARS
    kept = {(row["variant"], row["rank"]): bool(row["timeline"]) for row in written}
    assert kept == {
        ("roof", 0): False,
        ("grad_in_forward", 0): True,
        ("grad_in_forward", 1): False,
        ("store", 0): False,
    }
    assert all(row["timeline"] for row in rows)  # the caller's, still to be drawn


def test_the_page_says_what_of_which_collective_is_exposed():
    row = row_of("grad_in_forward", num_spans=2) | {"kernels": []}  # products until 19, the scatter until 25
    page = profile_head.markdown([row, row | {"variant": "roof", "exposed_by_kind": {}}], 5, {})
    lines = page.splitlines()
    assert "| grad_in_forward, rank 0 | 0.020 | 0.007 |" in lines  # 1 us between products, 6 after them
    assert sum(line.startswith("| roof, rank 0 |") for line in lines) == 1


def test_render_draws_the_page_and_the_picture_again(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    rows = [row_of("grad_in_forward"), row_of("grad_in_forward", rank=1)]
    results.write(path, rows, results.made_by("", ["bench"]))
    before = path.read_text()
    assert bench.main(["--render", str(path)]) == 0
    assert path.read_text() == before
    page = (tmp_path / "result.md").read_text()
    assert "![Rank 0's last step](result-tiny-64.png)" in page and "| grad_in_forward, rank 1 |" in page
    assert (tmp_path / "result-tiny-64.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_spans_in_two_lanes(tmp_path, monkeypatch):
    Axes = pytest.importorskip("matplotlib.axes").Axes
    bars = []
    monkeypatch.setattr(
        Axes, "broken_barh", lambda self, spans, lane, **rest: bars.append((lane[0], rest, spans))
    )
    assert profile_head.draw("x", [row_of("grad_in_forward")], tmp_path / "x.png")
    lanes = {rest["fc"]: (lane, spans) for lane, rest, spans in bars}
    product, scatter = (profile_head.COLOURS[kind] for kind in ("product", "reduce-scatter"))
    assert lanes[scatter] == (-1, [pytest.approx((0.005, 0.02))])
    assert lanes[product][0] == 0 and len(lanes[product][1]) == 3
    assert not profile_head.draw("x", [row_of("grad_in_forward", rank=1)], tmp_path / "y.png")


# --- runs ------------------------------------------------------------------------------------------


TINY = ["--preset", "profile", "--device", "cpu", "--shapes", "tiny", "--dtype", "float32", "--tokens", "64"]


def test_a_run_on_a_cpu(tmp_path, capsys):
    words = [*TINY, "--steps", "2", "--name", "profile", "--results-dir", str(tmp_path)]
    assert bench.main(words) == 0
    [written] = tmp_path.glob("*.json")
    rows = {row["variant"]: row for row in json.loads(written.read_text())["rows"]}
    assert list(rows) == ["roof", "store", "grad_in_forward", "recompute"]
    assert "megatron-te: needs a GPU" in capsys.readouterr().err
    products = {name: row["by_kind"]["product"] for name, row in rows.items()}
    assert all(ms > 0 for ms in products.values())
    assert all(row["collectives_ms"] == 0 and row["step_ms"] > 0 for row in rows.values())
    count = sum(kernel[2] for kernel in rows["roof"]["kernels"] if kernel[0] == "product")
    assert count == 3  # the roof is three products a step


def test_two_ranks(forks, tmp_path):
    words = [
        "-m",
        "scripts.bench",
        *TINY,
        "--tp",
        "2",
        "--sequence-parallel",
        "--strategies",
        "roof",
        "recompute",
    ]
    words += ["--name", "overlap", "--results-dir", str(tmp_path)]
    status, said = forks.launch(words, tmp_path, ranks=range(2), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    assert status == 0, said[-2000:]
    [written] = tmp_path.glob("*.json")
    rows = results.rows(written)
    assert {(row["variant"], row["rank"]) for row in rows} >= {("roof", 0), ("recompute", 0)}
    assert all(row["tp"] == 2 and row["sp"] for row in rows)
    for row in rows:
        if row["variant"] == "roof":  # its hidden states are gathered before
            assert row["collectives_ms"] == 0
        else:
            assert row["collectives_ms"] > 0 and row["by_kind"]["all-gather"] > 0
        if row["rank"] == 0:
            kinds = {kind for kind, *_ in row["timeline"]}
            assert "product" in kinds
            assert bool(kinds & set(profile_head.COLLECTIVES)) == (row["variant"] != "roof")
    assert len({row["rank"] for row in rows}) <= 2
    drawn = (tmp_path / f"{written.stem}-tiny-64.png").exists()
    assert drawn or "no matplotlib" in said


def test_an_unknown_strategy_is_one_line(capsys):
    assert bench.main([*TINY, "--strategies", "fastest"]) == 2
    assert capsys.readouterr().err.startswith("bench: no strategy 'fastest'")


@pytest.mark.parametrize("words", [["--tokens", "63", "--tp", "2"], ["--steps", "0"], ["--tp", "0"]])
def test_arguments_that_do_not_fit(words):
    assert bench.main(["--preset", "profile", "--shapes", "tiny", *words]) == 2


def test_the_axis_reaches_the_end_of_the_longest_step(tmp_path, monkeypatch):
    """The panels share it: what is drawn after the first must not be cut off."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(profile_head.pictures, "save", lambda figure, *more, **how: figures.append(figure))
    rows = [row_of("store", num_spans=3), row_of("recompute", num_spans=9)]
    assert profile_head.draw("x", rows, tmp_path / "x.png")
    ends = [axes.get_xlim() for axes in figures[0].axes]
    assert ends == [(0, pytest.approx(1.01 * 0.089))] * 2
