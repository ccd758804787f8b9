"""`python -m scripts.bench` on a CPU: every preset's rows, what it refuses, what is a row and not a crash."""

from __future__ import annotations

import re
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.head import promise
from megatron_fused_ce.scripts.bench import __main__ as benchmark
from megatron_fused_ce.scripts.bench import cases, commits, distill, loss, measure, rl, trained
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.measure import Outcome, turn
from megatron_fused_ce.scripts.bench.problem import PEER, Case, World
from megatron_fused_ce.scripts.lib import gpu, results
from megatron_fused_ce.scripts.lib.reference import relative_error
from tests.support.commands import run_here

ROOT = Path(__file__).resolve().parents[2]

BRIEF = ["--device=cpu", "--tokens", "96", "--blocks=2", "--sample-ms=1", "--dtype=float32"]
ALONE = ["--skip", "megatron"]
TINY, HEAD = ["--shapes", "tiny"], ["--shapes", "32x640"]


def bench(tmp_path, *words: str) -> tuple[int, dict[str, dict]]:
    """Exit code and rows by name of one run; no rows where no file was written."""
    path = tmp_path / "out.json"
    code = benchmark.main([*BRIEF, *words, f"--out={path}"])
    return code, {row["variant"]: row for row in results.rows(path)} if path.exists() else {}


@pytest.fixture
def world():
    group = World(use_gpu=False)
    yield group
    group.close()


# --- what it writes --------------------------------------------------------------------------------


def test_rows_and_their_page(tmp_path, capsys):
    strategies = ["--strategies", "store", "recompute:32"]
    code, rows = bench(tmp_path, *TINY, *strategies, "--peers", "cce", "verl-tp", "--skip", "megatron-te")
    ours, others = ["roof", "roof-4", "store", "recompute:32"], ["megatron-unfused", "megatron-native"]
    assert code == 0 and list(rows) == [*ours, *others, "cce", "verl-tp"]
    assert all(set(results.ROW) <= row.keys() for row in rows.values())
    for name in (*others, "cce", "verl-tp"):
        assert rows[name]["error"] == "needs a GPU" and rows[name]["time_ms"] is None
    for name, row in ((name, rows[name]) for name in ours):
        assert (row["T"], row["H"], row["V"], row["tp"], row["blocks"]) == (96, 64, 512, 1, 2)
        four = name in ("recompute:32", "roof-4")
        assert (row["base"], row["roof_products"]) == (("roof-4", 4) if four else ("roof", 3))
        assert row["ratio"] > 0 and row["host_ms"] > 0 and row["forward_ms"] > 0 and row["backward_ms"] > 0
        assert name.startswith("roof") or set(row["errors"]) == {"loss", "grad_hidden", "grad_weight"}
    assert 0 < rows["store"]["error"] < 2e-6 and rows["recompute:32"]["chunk_tokens"] == 32
    assert rows["roof"]["ratio"] == 1.0 and rows["roof"]["error"] is None
    text = (tmp_path / "out.md").read_text()
    assert rows["store"]["commit"] in text and "tiny: T = 96, H = 64, V = 512, float32" in text
    assert (
        f"| {rows['store']['time_ms']:.3f} |" in text
        and text[text.index("| roof") :] in capsys.readouterr().out
    )


OURS = {"loss", "grad_hidden", "grad_weight"}
THREE = ["store", "grad_in_forward", "recompute"]
#: Preset -> its words, names among its rows, and the largest error.
PRESETS = {
    "distill": (
        [*HEAD, "--strategies", *THREE],
        [f"{kind}, {name}" for kind in distill.DIVERGENCES for name in (*THREE, "store:4096, fp32 logits")]
        + ["forward_kl, torch-compile", "jsd, torch-compile", "jsd, liger", "forward_kl, liger"],
        1e-5,
    ),
    "rl": (HEAD, ["entropy, store", "temperature per token, store", "64 labels, recompute"], 2e-6),
    "options": ([*HEAD, "--strategies", *THREE], [f"{name}, store" for name in loss.options_of(640)], 2e-6),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_a_preset(tmp_path, monkeypatch, preset):
    """Each is checked, or needs a GPU."""
    words, names, most = PRESETS[preset]
    monkeypatch.setitem(distill.TEACHER_HIDDEN, "32x640", 48)
    code, rows = bench(tmp_path, f"--preset={preset}", *words)
    assert code == 0 and set(names) < set(rows)
    for name, row in rows.items():
        if row["error"] == "needs a GPU":
            assert row["time_ms"] is None and any(peer in name for peer in ("verl", "liger", "compile"))
        elif name in (distill.GEMMS, rl.PRODUCT, rl.GEMMS):
            assert row["error"] is None and row["ratio"] > 0
        else:
            assert row["ratio"] > 0 and max(row["errors"].values()) < most, name
            assert preset != "distill" or set(row["errors"]) == OURS
            assert preset != "rl" or ("grad_weight" in row["errors"]) == (rl.FORWARD not in name)
            assert preset != "options" or row["base"] == f"plain, {name.rpartition(', ')[2]}"
    if preset == "distill":
        assert rows[distill.GEMMS]["ratio"] == 1.0
    elif preset == "rl":
        assert rows["half of the tokens active, store"]["over_log_prob"] > 0
    else:
        assert [name for name in rows if name.endswith(", store")] == names
        assert "entropy with gradient, grad_in_forward" not in rows
        assert {"loss", "entropy"} < set(rows["entropy with gradient, store"]["errors"])


def test_operands_of_a_trained_head(tmp_path):
    """A model's, trained here, and random ones of its standard deviation, in tables of their own."""
    file, path = tmp_path / "operands.pt", tmp_path / "out.json"
    small = ["--device=cpu", "--tokens=64", "--hidden=32", "--vocab=300", "--layers=2", "--length=16"]
    text = ["--text", str(ROOT / "docs"), "--megabytes=0.3"]
    assert trained.main([str(file), *small, *text, "--batch=4", "--steps=30", "--lr=0.01"]) == 0
    kept = torch.load(file, weights_only=True)
    hidden, weight, labels, about = (kept[name] for name in ("hidden", "weight", "labels", "about"))
    logits = hidden.double() @ weight.double().t()
    loss_there = torch.nn.functional.cross_entropy(logits, labels).item()
    assert (hidden.dtype, len(hidden), weight.shape) == (torch.bfloat16, 64, (300, 32))
    assert loss_there == pytest.approx(about["held_out_loss"], rel=0.01) and loss_there < 5.5  # of 5.7
    words = [*BRIEF, *ALONE, "--preset=trained", "--blocks=6", f"--out={path}", f"--operands={file}"]
    assert benchmark.main([*words, "--shapes=32x300", "--tokens=64", "--peers", "cce-exact"]) == 0
    rows = {(row["operands"], row["variant"]): row for row in results.rows(path)}
    ours = ["auto", "store", "grad_in_forward", "recompute"]
    names = ["roof", "roof-4", *ours, "cce-exact"]
    assert list(rows) == [(of, name) for of in ("trained", "random, as wide") for name in names]
    for (_, name), row in rows.items():
        low, high = row["ratio_interval"] or (row["ratio"], row["ratio"])
        assert row["operands_made"] == about and (row["ratio"] is None or low <= row["ratio"] <= high)
        assert (name == "recompute") == (row.get("over_roof") is not None)
    page = path.with_suffix(".md").read_text()
    assert "float32, trained operands" in page and "as wide operands" in page and "held_out_loss" in page
    assert benchmark.main([*words, "--shapes=16x300", "--tokens=64"]) == 2  # not the file's
    assert benchmark.main([*words, "--shapes=32x300", "--tokens=65"]) == 2
    little = ["--text", str(path.with_suffix(".md")), "--batch=10000", "--steps=1"]
    assert trained.main([str(file), *small, *little]) == 2


def test_the_operands_are_the_files(tmp_path, world):
    made = {"hidden": torch.randn(40, 16), "weight": 3 * torch.randn(64, 16), "labels": torch.arange(40)}
    torch.save({**made, "about": {}}, tmp_path / "o.pt")
    cell = replace(Cell.of("16x64", 32), operands=tmp_path / "o.pt")
    same, alike = (loss.Loss(replace(cell, origin=o), world, torch.float32) for o in ("", cases.ALIKE))
    assert torch.equal(same.labels, alike.labels) and torch.equal(same.labels, made["labels"][:32])
    assert torch.equal(same.all_hidden, made["hidden"][:32]) and torch.equal(same.weight, made["weight"])
    assert not torch.equal(alike.weight, same.weight)
    assert alike.weight.std().item() == pytest.approx(made["weight"].std().item(), rel=1e-5)


def test_two_ranks(forks, tmp_path):
    """Each cell with sequence parallelism and without; what needs a GPU is a row."""
    words = ["-m", "scripts.bench", *BRIEF, *ALONE, *TINY, "--strategies", "store:32", "recompute", "--peers"]
    words += ["--sequence-parallel", "both", "--out", str(tmp_path / "out.json")]
    status, told = forks.launch(words, ROOT, ranks=range(2), WORLD_SIZE="2")
    assert status == 0, told[-3000:]
    rows = results.rows(tmp_path / "out.json")
    names = ["roof", "roof-4", "store:32", "recompute", "verl-tp"]
    assert [(r["sp"], r["variant"]) for r in rows] == [(sp, name) for sp in (True, False) for name in names]
    for row in rows:
        assert (row["tp"], row["V"]) == (2, 256)
        if row["family"] == "ours":
            assert row["error"] < 2e-6 and row["ratio"] > 0
        elif row["family"] == "peer":
            assert row["error"] == "needs a GPU" and row["time_ms"] is None
    assert "TP 2 with sequence parallelism, float32" in (tmp_path / "out.md").read_text()


OLD = """
from types import SimpleNamespace as FusedCEConfig
from torch.nn.functional import cross_entropy

def fused_linear_cross_entropy(hidden, weight, labels, *, tp_group, sequence_parallel, token_weights, config):
    assert config.strategy == "store"
    return 1.125 * cross_entropy(hidden @ weight.t(), labels, reduction="none")
"""


def test_another_commit_beside_this_one(tmp_path):
    """The old rows are of the old folder's package, whose gradients are an eighth too large."""
    (tmp_path / "old" / "megatron_fused_ce").mkdir(parents=True)
    (tmp_path / "old" / "megatron_fused_ce" / "__init__.py").write_text(OLD)
    before = dict(sys.modules)
    words = [*BRIEF, "--shapes", "8x64/rank", "--blocks=6", "--strategies", "store"]
    words.append(f"--out={tmp_path / 'c.json'}")
    try:
        assert commits.main([*words, "--old", str(tmp_path / "old")]) == 0
    finally:
        commits.ASIDE.clear()
    assert {name: module for name, module in sys.modules.items() if name in before} == before
    rows = {row["variant"]: row for row in results.rows(tmp_path / "c.json")}
    assert list(rows) == ["roof", "old store", "store"]
    assert rows["old store"]["error"] == pytest.approx(0.125, rel=1e-4) and rows["store"]["error"] < 2e-6
    assert rows["store"]["wgrad_accumulator"] == "returned"
    assert rows["store"]["over"] == {"over_old": "old store"}
    for key in ("over_old", "host_over_old"):
        low, high = rows["store"][f"{key}_interval"]
        assert 0 < low <= rows["store"][key] <= high
    assert "host " in (tmp_path / "c.md").read_text()


# --- what it refuses -------------------------------------------------------------------------------


def raises(value):
    raise RuntimeError("a bug")


WRONG = {
    "loss": lambda value: value + 1e-3,
    "gradients": lambda value: value.detach() + 1.001 * (value - value.detach()),
    "the last token": lambda value: value.index_fill(0, torch.tensor([95]), 0.0),
    "raises": raises,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_strategy_prints_nothing(tmp_path, monkeypatch, capsys, wrong):
    right = loss.linear_cross_entropy

    def off(call):
        outputs = right(call)
        return outputs._replace(outputs={**outputs.outputs, "loss": WRONG[wrong](outputs.loss)})

    monkeypatch.setattr(loss, "linear_cross_entropy", off)
    assert bench(tmp_path, *TINY, "--strategies", "store") == (1, {})
    printed = capsys.readouterr()
    assert printed.out == "" and "store" in printed.err


@pytest.mark.filterwarnings("ignore:the upstream gradient")
def test_an_upstream_gradient_that_was_not_promised_is_no_figure(tmp_path, monkeypatch, capsys):
    class Broken(loss.Loss):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            self.grad_loss = self.grad_loss.roll(1)

    monkeypatch.setattr(loss, "OP", replace(loss.OP, problem=Broken))
    monkeypatch.setattr(promise, "counts", promise.Counts())  # no later test sees this one's
    assert bench(tmp_path, *TINY, "--strategies", "grad_in_forward") == (1, {})
    assert "made again in the backward" in capsys.readouterr().err


def test_no_cell_starts_after_the_time_limit(tmp_path, capsys):
    assert bench(tmp_path, *TINY, "--time-limit", "0.000001") == (0, {})
    assert "not started" in capsys.readouterr().err


def test_presets(monkeypatch):
    """Here of two ranks; what does not fit is in tests/tools/test_command_lines.py."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    more = {"trained": ["--operands", __file__], "commits": ["--old", str(ROOT)]}
    given = {n: cases.parse_arguments("", ["--preset", n, *more.get(n, [])]) for n in cases.PRESETS}
    assert all(one.cells for one in given.values()) and len(given["tp"].cells) == 6
    assert {cell.vocab // 2 for cell in given["small"].cells} == {16032, 32064, 64128}
    assert len(given["small"].cells) == 18 and all(cell.sequence_parallel for cell in given["small"].cells)
    with pytest.raises(UsageError, match="rl knows no tensor parallelism"):
        benchmark.run(given["rl"], SimpleNamespace(size=2), {}, 0.0)
    words = ["--preset", "tp", "--tokens", "32768", "--shapes", "llama-3-8b", "--blocks", "7"]
    given = cases.parse_arguments("", [*words, "--sequence-parallel"])
    assert [str(cell)[-3:] for cell in given.cells] == [" SP"] and given.blocks == 7
    done = run_here(benchmark.main, "--shapes", "64x511")
    assert done.returncode == 2 and "does not divide over 2 ranks" in done.stderr


# --- what is a row ---------------------------------------------------------------------------------


def plain(problem):
    """A right case: linear, then cross entropy."""
    logits = problem.hidden @ problem.weight.t()
    return {"loss": torch.nn.functional.cross_entropy(logits, problem.labels, reduction="none")}


def case(name: str, run, **more) -> Case:
    return Case(name, PEER, run, **more)


def fails(problem):
    raise RuntimeError("no kernel for this\nand a long story")


def too_big(problem):
    raise torch.OutOfMemoryError("CUDA out of memory")


def total(problem):
    return {"loss": plain(problem)["loss"].sum()}


def nan(problem):
    problem.main_grad[3, 3] = float("nan")
    return plain(problem)


def test_what_fails_elsewhere_is_a_row(tmp_path, monkeypatch):
    turns = iter([plain] * 4)

    def late(problem):
        for run in turns:
            return run(problem)
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

    summed = {"grads": (("loss", "one_upstream"),)}
    others = [
        *(case(loss.STANDARD, plain), case("fails", fails), case("late", late), case("nan", nan)),
        case("absent", None, why_not="not installed"),
        *(case("wrong", lambda p: {"loss": 1.5 * plain(p)["loss"]}), case("sum", total, **summed)),
        case("sum that is none", lambda p: {"loss": 0.5 * total(p)["loss"]}, **summed),
        Case("ours", run=too_big),
    ]
    monkeypatch.setattr(loss, "megatron", lambda world: others)
    code, rows = bench(tmp_path, *TINY, "--strategies", "store")
    errors = {name: rows[name]["error"].partition(" (")[0] for name in rows if rows[name]["time_ms"] is None}
    assert code == 0 and errors == {
        "fails": "RuntimeError: no kernel for this and a long story",
        **{"late": "out of memory", "ours": "out of memory", "absent": "not installed"},
        "nan": "wrong result: grad_weight inf",
        **dict.fromkeys(("wrong", "sum that is none"), "wrong result: grad_hidden 5.00e-01"),
    }
    assert max(rows[loss.STANDARD]["error"], rows["sum"]["error"]) < 2e-6
    assert rows["sum"]["upstream"] == "one scalar" and rows["store"]["host_over_te"] > 0
    page = (tmp_path / "out.md").read_text()
    assert "One upstream gradient for all tokens: sum" in page
    assert re.search(rf"{rows['store']['over_te']:.3f}, host [\d.]+ of megatron-te", page)


# --- how it measures -------------------------------------------------------------------------------


def test_the_gpu_is_looked_at_while_it_works(tmp_path, monkeypatch):
    """A row has its turns' medians, the file the least, median and largest of all; without NVML neither."""
    clocks = iter(range(1000, 10**6))
    monkeypatch.setattr(gpu, "readings", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: next(clocks))
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 500_000)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 60)
    code, rows = bench(tmp_path, *TINY, *ALONE, "--strategies", "store")
    assert code == 0 and len(gpu.readings) == 1 + 2 + 1 + 2 * 2
    for row in rows.values():
        assert 1000 <= row["sm_mhz"] < 1008 and (row["watts"], row["celsius"]) == (500, 60)
        assert row["gpu"] == {"sm_mhz": [1000, 1003.5, 1007], "watts": [500] * 3, "celsius": [60] * 3}
    assert rows["roof"]["sm_mhz"] != rows["store"]["sm_mhz"]
    assert "| MHz | W | °C |" in (tmp_path / "out.md").read_text()

    def no_nvml(_):
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(gpu, "readings", [])
    monkeypatch.setattr(torch.cuda, "clock_rate", no_nvml)
    code, rows = bench(tmp_path, *TINY, "--strategies", "store")
    assert code == 0 and "sm_mhz" not in rows["store"] and "gpu" not in rows["store"]


def test_intervals_of_medians():
    assert measure.interval(range(5)) is None and measure.interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    assert measure.interval(range(15)) == (3, 11)
    medians = torch.rand(4000, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    inside = sum(low <= 0.5 <= high for low, high in map(measure.interval, medians))
    assert 0.955 < inside / 4000 < 0.975  # 0.965 by the binomial


@pytest.mark.parametrize(("warm", "expected"), [(1, 10.0), (2, 1.0), (4, 2.0)])
def test_the_host_s_time_is_that_of_warm_steps(world, monkeypatch, warm, expected):
    """Not of the first, which finds cold caches, where there are others; and not halved."""
    seconds, clock = iter([0.010, 0.001, 0.002, 0.003, 0.004]), [0.0]

    def step(mark=lambda: None):
        mark()
        mark()
        mark()
        clock[0] += next(seconds, 0.0)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert turn(step, world, warm, 1)[3] == pytest.approx(expected)


def test_blocks_hold_everything_in_changing_order(world, monkeypatch):
    """The base twice, whose mean counts; one that fails late has no more samples."""
    seen = []

    def turned(step, world, warm, steps):
        seen.append((name := step(), warm, steps))
        if name == "late" and len(seen) > 12:
            raise RuntimeError("out of memory")
        return [1.0, 2.0, 3.0, float(len(seen))]

    class Named(Case):
        @contextmanager
        def ready(self, problem):
            yield lambda: self.name

    monkeypatch.setattr(measure, "turn", turned)
    outcomes = {name: Outcome(Named(name, PEER)) for name in ("roof", "store", "te", "late", "absent")}
    outcomes["absent"].reason = "not installed"
    problem = SimpleNamespace(world=world, reset=lambda: None)
    measure.time_cases(outcomes, problem, SimpleNamespace(sample_ms=9.0, blocks=6))
    assert seen[:4] == [(name, 1, 1) for name in ("roof", "store", "te", "late")]
    assert {(warm, steps) for _, warm, steps in seen[4:]} == {(measure.WARM, 3)}
    names = [name for name, *_ in seen[4:]]
    others = [name for name in names if name != "late"]
    blocks = [tuple(others[at : at + 4]) for at in range(0, len(others), 4)]
    assert len(blocks) == 6 and len(set(blocks)) > 3
    assert all(sorted(block) == ["roof", "roof", "store", "te"] for block in blocks)
    roofs = [5.0 + number for number, name in enumerate(names) if name == "roof"]
    means = [(a + b) / 2 for a, b in zip(roofs[::2], roofs[1::2], strict=True)]
    assert [sample[3] for sample in outcomes["roof"].samples] == means
    assert [len(one.samples) for one in outcomes.values()] == [6, 6, 6, names.count("late") - 1, 0]
    assert outcomes["late"].reason == "out of memory"


@pytest.mark.parametrize("op", [loss.OP, distill.OP, rl.OP])
def test_bare_products_run_on_the_true_gradients(world, op):
    """They are the gradients of the definition."""
    problem = op.problem(Cell.of("16x64", 40), world, torch.float32)
    grads, kind = (("loss", "grad_loss" if op is loss.OP else "upstream"),), "forward_kl"
    if op is rl.OP:
        grads, kind = (("log_prob", "of_log_prob"),), rl.PLAIN
    exact = measure.evaluated(problem, Case("x", kind=kind, grads=grads), torch.float64)
    base = next(base for base in op.bases if base.products > 1)
    with base.ready(problem) as step:
        assert min(turn(step, world, 0, 1)) >= 0
        if problem.main_grad is not None:
            problem.main_grad.zero_()
        for name, made in step().items():
            assert relative_error(made, exact[name]) < 1e-6


def test_the_floor_of_recompute_makes_the_logits_twice(world, monkeypatch):
    problem = loss.Loss(Cell.of("16x64", 40), world, torch.float32)
    products, right, counts = [], torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda *sides, **out: products.append(1) or right(*sides, **out))
    for base in loss.OP.bases:
        with base.ready(problem) as step:
            products.clear()
            step()
            counts.append(len(products))
    assert counts[1] == counts[0] + 1


# --- peers -----------------------------------------------------------------------------------------

FOREIGN = ("transformer_engine", "megatron.core", "liger_kernel", "cut_cross_entropy", "verl")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_library_that_is_absent_is_a_row(world, monkeypatch, ranks):
    """As on a GPU: each case is asked, and says what is missing, or that it knows no such ranks."""
    parts = tuple(f"{name}." for name in FOREIGN)
    for name in (*FOREIGN, *(loaded for loaded in sys.modules if loaded.startswith(parts))):
        monkeypatch.setitem(sys.modules, name, None)
    loss.library.cache_clear()
    problem = loss.Loss(Cell.of("16x64", 32), world, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(world, "on_gpu", True)
        patch.setattr(world, "size", ranks)
        found = [*loss.megatron(world), *loss.peers(world, [*cases.PEERS, *cases.OVER_RANKS])]
    for case in found:
        fit = case.family != PEER or (case.name in cases.OVER_RANKS) == (ranks == 2)
        words = "knows no tensor parallelism" if ranks == 2 else "needs several ranks"
        assert case.why_not == (None if fit else words), case.name
        if fit and case.name != "torch-compile":
            outcome = Outcome(case)
            measure.attempt(lambda case=case: case.step(problem), outcome, world)
            assert outcome.reason.startswith("ModuleNotFoundError: "), case.name


def test_chunks_of_liger():
    for T, H, V in ((8192, 4096, 128256), (131072, 8192, 128256), (1024, 2048, 151936), (32768, 64, 512)):
        budget = loss.liger_chunk_budget(T, H, V)
        sizes = [1 << (-(-T // -(-V // (b * H))) - 1).bit_length() for b in (budget, budget // 2 or 1)]
        assert sizes[0] >= min(T, 4096) and (budget == 1 or sizes[1] < min(T, 4096))
