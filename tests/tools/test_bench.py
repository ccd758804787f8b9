"""`python -m scripts.bench` on a CPU: rows of each preset, and what keeps a wrong figure from being one."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from megatron_fused_ce.scripts.bench import __main__ as benchmark
from megatron_fused_ce.scripts.bench import cases, commits, distill, loss, measure, rl, trained
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.problem import PEER, Case, World
from megatron_fused_ce.scripts.lib import gpu, results
from megatron_fused_ce.scripts.lib.reference import relative_error

BRIEF = ["--device=cpu", "--tokens", "96", "--blocks=2", "--sample-ms=1", "--dtype=float32"]
TINY = ["--shapes", "tiny"]


def bench(tmp_path, *words: str) -> tuple[int, dict[str, dict]]:
    """Exit code and rows by name of one run; no rows where no file was written."""
    path = tmp_path / "out.json"
    code = benchmark.main([*BRIEF, *words, f"--out={path}"])
    return code, {row["variant"]: row for row in results.rows(path)} if path.exists() else {}


def plain(problem):
    """A right case: linear, then cross entropy."""
    logits = problem.hidden @ problem.weight.t()
    return {"loss": torch.nn.functional.cross_entropy(logits, problem.labels, reduction="none")}


def fails(problem):
    raise RuntimeError("no kernel for this\nand a long story")


def late(problem):
    problem.turns = getattr(problem, "turns", 0) + 1
    if problem.turns > 4:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    return plain(problem)


def nan(problem):
    problem.main_grad[3, 3] = float("nan")
    return plain(problem)


#: Others' rows -> what they run, and why they have no time.
OTHERS = {
    loss.STANDARD: (plain, None),
    "sum": (lambda problem: {"loss": plain(problem)["loss"].sum()}, None),
    "fails": (fails, "RuntimeError: no kernel for this and a long story"),
    "late": (late, "out of memory"),
    "nan": (nan, "wrong result: grad_weight inf"),
    "wrong": (lambda problem: {"loss": 1.5 * plain(problem)["loss"]}, "wrong result: grad_hidden 5.00e-01"),
    "cce": (None, "needs a GPU"),
    "verl-tp": (None, "needs a GPU"),
}


def test_rows_and_their_page(tmp_path, monkeypatch, capsys):
    """Beside a GPU that tells of itself: a row has its turns' medians, the file the span of all."""
    clocks = iter(range(1000, 10**6))
    monkeypatch.setattr(gpu, "readings", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: next(clocks))
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 500_000)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 60)
    others = [Case(name, PEER, run) for name, (run, _) in OTHERS.items() if run]
    others[1] = replace(others[1], grads=(("loss", "one_upstream"),))
    monkeypatch.setattr(loss, "megatron", lambda world: others)
    words = ["--strategies", "store", "recompute:32", "--peers", "cce", "verl-tp", "cce-exact"]
    code, rows = bench(tmp_path, *TINY, *words, "--skip", "cce-exact")
    assert code == 0 and list(rows) == ["roof", "roof-4", "store", "recompute:32", *OTHERS]
    for name, row in rows.items():
        assert row["gpu"]["watts"] == [500] * 3 and row["gpu"]["sm_mhz"][0] == 1000
        if why_not := OTHERS.get(name, (plain, None))[1]:
            assert row["error"].partition(" (")[0] == why_not and row["time_ms"] is None
            continue
        assert (row["T"], row["H"], row["V"], row["tp"], row["blocks"]) == (96, 64, 512, 1, 2)
        base = ("roof-4", 4) if name in ("recompute:32", "roof-4") else ("roof", 3)
        assert (row["base"], row["roof_products"]) == base
        assert min(row[key] for key in ("ratio", "host_ms", "forward_ms", "backward_ms")) > 0
        assert 1000 <= row["sm_mhz"] < next(clocks) and (row["watts"], row["celsius"]) == (500, 60)
        assert row["error"] is None if row["family"] == "base" else 0 < row["error"] < 2e-6
    assert rows["recompute:32"]["chunk_tokens"] == 32 and rows["roof"]["ratio"] == 1.0
    text, store = (tmp_path / "out.md").read_text(), rows["store"]
    for words in (store["commit"], "tiny: T = 96, H = 64, V = 512, float32", f"| {store['time_ms']:.3f} |"):
        assert words in text
    assert "| MHz | W | °C |" in text and "One upstream gradient for all tokens: sum" in text
    assert re.search(rf"{store['over_te']:.3f}, host [\d.]+ of megatron-te", text)
    assert text[text.index("| roof") :] in capsys.readouterr().out


THREE, FP32 = ["store", "grad_in_forward", "recompute"], "store:4096, fp32 logits"
#: Preset -> names among its rows, and the largest error.
PRESETS = {
    "distill": ([f"{kind}, {name}" for kind in distill.DIVERGENCES for name in (*THREE, FP32)], 1e-5),
    "rl": (["entropy, store", "temperature per token, store", "64 labels, recompute"], 2e-6),
    "options": ([f"{name}, store" for name in loss.options_of(640)], 2e-6),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_a_preset(tmp_path, monkeypatch, preset):
    """Each is checked, or needs a GPU."""
    names, most = PRESETS[preset]
    words = ["--shapes=32x640", *(["--strategies", *THREE] if preset != "rl" else [])]
    monkeypatch.setitem(distill.TEACHER_HIDDEN, "32x640", 48)
    code, rows = bench(tmp_path, f"--preset={preset}", *words)
    assert code == 0 and set(names) < set(rows)
    for name, row in rows.items():
        if row["error"] == "needs a GPU":
            assert row["time_ms"] is None and any(peer in name for peer in ("verl", "liger", "compile"))
        elif row["family"] == "base":
            assert row["error"] is None and row["ratio"] == 1.0
        else:
            assert row["ratio"] > 0 and max(row["errors"].values()) < most, name
            assert ("grad_weight" in row["errors"]) == (rl.FORWARD not in name)
            assert preset != "options" or row["base"] == f"plain, {name.rpartition(', ')[2]}"
    if preset == "options":
        assert "entropy with gradient, grad_in_forward" not in rows
        assert {"loss", "entropy"} < set(rows["entropy with gradient, store"]["errors"])


def test_operands_of_a_trained_head(tmp_path):
    """A model's, trained here, and random ones of its standard deviation, in tables of their own."""
    file = tmp_path / "operands.pt"
    small = ["--device=cpu", "--tokens=64", "--hidden=32", "--vocab=300", "--layers=2", "--length=16"]
    text = [f"--text={results.REPOSITORY}/docs", "--megabytes=0.3", "--batch=4", "--steps=30", "--lr=0.01"]
    assert trained.main([str(file), *small, *text]) == 0
    kept = torch.load(file, weights_only=True)
    hidden, weight, labels, about = (kept[name] for name in ("hidden", "weight", "labels", "about"))
    there = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().t(), labels).item()
    assert there == pytest.approx(about["held_out_loss"], rel=0.01) and there < 5.5  # of 5.7
    cell = replace(Cell.of("32x300", 48), operands=file, origin=cases.ALIKE)
    with closing(World(on_gpu=False)) as world:
        alike = loss.Loss(cell, world, torch.bfloat16)
    assert torch.equal(alike.labels, labels[:48]) and not torch.equal(alike.weight, weight)
    assert alike.weight.std().item() == pytest.approx(weight.std().item(), rel=1e-2)
    words = ["--preset=trained", f"--operands={file}", "--skip", "megatron", "--shapes=32x300:64"]
    assert bench(tmp_path, *words)[0] == 0
    rows = [(r["operands"], r["variant"], r["operands_made"]) for r in results.rows(tmp_path / "out.json")]
    names = ["roof", "roof-4", "auto", *THREE]
    assert rows == [(of, name, about) for of in (cases.TRAINED, cases.ALIKE) for name in names]


OLD = """
from types import SimpleNamespace as FusedCEConfig
from torch.nn.functional import cross_entropy

def fused_linear_cross_entropy(hidden, weight, labels, **more):
    return 1.125 * cross_entropy(hidden @ weight.t(), labels, reduction="none")
"""


def test_another_commit_beside_this_one(tmp_path, monkeypatch):
    """The old rows are of the old folder's package, whose gradients are an eighth too large."""
    old = tmp_path / "old" / "megatron_fused_ce" / "__init__.py"
    old.parent.mkdir(parents=True)
    old.write_text(OLD)
    words = ["--preset=commits", "--shapes", "8x64/rank", "--blocks=6", "--strategies", "store"]
    monkeypatch.setattr(commits, "ASIDE", {})
    code, rows = bench(tmp_path, *words, f"--old={tmp_path / 'old'}")
    assert code == 0 and list(rows) == ["roof", "old store", "store"]
    assert rows["old store"]["error"] == pytest.approx(0.125, rel=1e-4) and rows["store"]["error"] < 2e-6
    for key in ("over_old", "host_over_old"):
        low, high = rows["store"][f"{key}_interval"]
        assert 0 < low <= rows["store"][key] <= high


#: A strategy and options -> what is made of its calls' losses, the exit code, and words of why.
NO_FIGURE = {
    "store": (lambda v: v.detach() + 1.001 * (v - v.detach()), 1, "grad_hidden 1.00e-03"),
    "recompute": (fails, 1, "recompute failed: RuntimeError: no kernel for this"),
    "grad_in_forward": (lambda v: v * v.detach(), 1, "made again in the backward, against its"),
    "auto --time-limit 0.000001": (fails, 0, "not started"),
}


@pytest.mark.filterwarnings("ignore:the upstream gradient")
@pytest.mark.parametrize("words", NO_FIGURE)
def test_no_figure_no_print(tmp_path, monkeypatch, capsys, words):
    right, (wrong, code, why) = loss.linear_cross_entropy, NO_FIGURE[words]

    def wrongly(call):
        made = right(call)
        return made._replace(outputs={**made.outputs, "loss": wrong(made.loss)})

    monkeypatch.setattr(loss, "linear_cross_entropy", wrongly)
    assert bench(tmp_path, *TINY, "--strategies", *words.split()) == (code, {})
    printed = capsys.readouterr()
    assert printed.out == "" and why in printed.err


def test_every_preset_has_cells():
    more = {"trained": ["--operands", __file__], "commits": ["--old", str(results.REPOSITORY)]}
    for name in cases.PRESETS:
        assert cases.parse_arguments("", ["--preset", name, *more.get(name, [])]).cells, name


@pytest.mark.parametrize("op", [loss.OP, distill.OP, rl.OP])
def test_bare_products_run_on_the_true_gradients(monkeypatch, op):
    """As many as a base says; they are the gradients of the definition."""
    with closing(World(on_gpu=False)) as world:
        problem = op.problem(Cell.of("16x64", 40), world, torch.float32)
    grads, kind = (("loss", "grad_loss" if op is loss.OP else "upstream"),), "forward_kl"
    if op is rl.OP:
        grads, kind = (("log_prob", "of_log_prob"),), rl.PLAIN
    exact = measure.evaluated(problem, Case("x", kind=kind, grads=grads), torch.float64)
    products, right = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *sides, **out: products.append(1) or right(*sides, **out))
    for base in op.bases:
        with base.ready(problem) as step:
            products.clear()
            if problem.main_grad is not None:  # its product is another function's
                problem.main_grad.zero_()
                products.append(1)
            made = step()
        assert len(products) == base.products
        for name in made if base.products > 1 else ():
            assert relative_error(made[name], exact[name]) < 1e-6
