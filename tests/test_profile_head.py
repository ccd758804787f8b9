"""The sums of scripts/profile_head.py, and one run of it on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from profile_head import Span, covered, kind_of_kernel, summarise  # noqa: E402


def test_overlapping_spans_are_covered_once():
    spans = [Span("a", 0, 10), Span("b", 5, 8), Span("c", 9, 12), Span("d", 20, 21)]
    assert covered(spans) == 13
    assert covered(reversed(spans)) == 13
    assert covered([]) == 0


def test_busy_idle_and_exposed():
    """A collective under a product is hidden, beside it exposed; gaps are idle."""
    spans = [
        Span("nvjet_sm90", 0, 1000),
        Span("ncclDevKernel_AllReduce", 500, 1500),  # 500 hidden, 500 exposed
        Span("_scale_rows_kernel", 2000, 2100),  # after 500 idle
    ]
    profile = summarise("store", spans * 1, steps=1)
    assert profile.busy_ms == pytest.approx(1.6)
    assert profile.idle_ms == pytest.approx(0.5)
    assert profile.exposed_ms == pytest.approx(0.5)
    assert profile.by_kind == pytest.approx({"product": 1.0, "collective": 1.0, "our rows": 0.1})
    assert [kernel[1] for kernel in profile.kernels][-1] == "_scale_rows_kernel"


def test_steps_are_averaged():
    spans = [Span("nvjet", 10 * i, 10 * i + 4) for i in range(4)]
    profile = summarise("roof", spans, steps=2)
    assert profile.kernels == [("product", "nvjet", 2.0, pytest.approx(0.008))]
    assert profile.busy_ms == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16", "collective"),
        ("_product_kernel", "our product"),
        ("_gradient_product_kernel", "our product"),
        ("nvjet_sm90_tss_256x128_64x4_1x2_h_badd_coopA_NTT", "product"),
        ("_combine_tiles_kernel", "our rows"),
        ("_row_statistics_kernel", "our rows"),
        ("_token_loss_kernel", "our rows"),
        ("_add_scaled_kernel", "our rows"),
        ("Memcpy DtoD (Device -> Device)", "copy or fill"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "elementwise"),
    ],
)
def test_kinds(name, kind):
    assert kind_of_kernel(name) == kind


def test_a_run_on_a_cpu(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "profile_head.py"), "--shapes", "tiny"]
    command += ["--tokens", "64", "--dtype", "float32", "--steps", "2"]
    command += ["--name", "profile", "--results-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    [written] = tmp_path.glob("*.json")
    rows = {row["variant"]: row for row in json.loads(written.read_text())}
    assert list(rows) == ["roof", "store", "eager", "recompute"]
    products = {name: row["by_kind"]["product"] for name, row in rows.items()}
    assert all(ms > 0 for ms in products.values())
    count = sum(kernel[2] for kernel in rows["roof"]["kernels"] if kernel[0] == "product")
    assert count == 3  # the roof is three products a step


def test_an_unknown_strategy_is_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "profile_head.py"), "--shapes", "tiny"]
    command += ["--tokens", "8", "--dtype", "float32", "--strategies", "fastest"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("profile_head: no strategy 'fastest'")
