"""`python -m scripts.bench` on a CPU: what it writes, what it refuses, what is a row and not a crash."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fused_ce import command_line
from megatron_fused_ce.scripts.bench import __main__ as benchmark
from megatron_fused_ce.scripts.bench import cases, measure, report
from megatron_fused_ce.scripts.bench import variants as benchmark_variants
from megatron_fused_ce.scripts.bench.problem import Problem, World, full_reference
from megatron_fused_ce.scripts.bench.roof import Roof
from megatron_fused_ce.scripts.bench.variants import Variant
from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.lib.reference import relative_error, truth

ROOT = Path(__file__).resolve().parents[2]

BRIEF = ["--device", "cpu", "--shapes", "tiny", "--tokens", "96", "--check-tokens", "48", "--blocks", "2"]
BRIEF += ["--sample-ms", "1", "--no-megatron", "--dtype", "float32"]


def bench(tmp_path, *words: str) -> tuple[int, list[dict]]:
    """Exit code and rows of one run; no rows where no file was written."""
    path = tmp_path / "out.json"
    code = benchmark.main([*BRIEF, *words, "--out", str(path)])
    return code, results.rows(path) if path.exists() else []


@pytest.fixture
def world():
    group = World()
    yield group
    group.close()


def foreign(name: str, run) -> Variant:
    return Variant(name, "peer", run=run)


def plain_run(problem, mark):
    """A right variant: linear, then cross entropy."""
    problem.reset()
    mark()
    logits = (problem.hidden @ problem.weight.t()).float()
    loss = torch.nn.functional.cross_entropy(logits, problem.labels, reduction="none")
    return benchmark_variants.backward(loss, problem.grad_loss, problem, mark)


def with_foreign(monkeypatch, *variants: Variant) -> None:
    """Have the run compare with these, in place of Megatron's paths."""
    monkeypatch.setattr(benchmark_variants, "megatron", lambda world: list(variants))
    monkeypatch.setitem(cases.PRESETS, "foreign", ([("tiny", 96)], {"megatron": True}))


def bench_foreign(tmp_path, monkeypatch, *variants: Variant) -> tuple[int, dict[str, dict]]:
    with_foreign(monkeypatch, *variants)
    path = tmp_path / "out.json"
    words = [word for word in BRIEF if word != "--no-megatron"]
    code = benchmark.main([*words, "--strategies", "recompute", "--out", str(path)])
    rows = results.rows(path) if path.exists() else []
    return code, {row["variant"]: row for row in rows}


# --- what it writes --------------------------------------------------------------------------------


def test_rows_begin_with_the_keys_and_the_roofs(tmp_path):
    code, rows = bench(tmp_path, "--strategies", "store", "recompute:32", "recompute:40")
    assert code == 0
    assert all(set(report.KEYS) | set(results.ROW) <= row.keys() for row in rows)
    assert all(row["host_ms"] > 0 for row in rows if row["family"] == "ours")
    names = [row["variant"] for row in rows]
    assert names[:3] == ["roof", "roof-4", "roof-raw"]
    assert names[3:] == ["store", "recompute", "recompute"]
    assert [row["chunk_tokens"] for row in rows[4:]] == [32, 40]
    times = {row["variant"]: row["time_ms"] for row in rows}
    for row in rows:
        assert row["T"] == 96 and row["H"] == 64 and row["V"] == 512 and row["tp"] == 1
        four = row["variant"] in ("recompute", "roof-4")
        assert row["roof_products"] == (4 if four else 3)
        assert row["roof_ms"] == times["roof-4" if four else "roof"] > 0
        assert row["ratio"] == pytest.approx(row["time_ms"] / row["roof_ms"], rel=0.02)
        assert (row["ratio_raw"] is None) == four
        if row["family"] == "ours":
            assert 0 < row["error"] < 2e-6
            assert row["forward_ms"] > 0 and row["backward_ms"] > 0
    assert rows[0]["ratio"] == 1.0 and rows[0]["error"] is None


def test_the_markdown_says_what_the_json_says(tmp_path):
    _, rows = bench(tmp_path, "--strategies", "store")
    text = (tmp_path / "out.md").read_text()
    assert rows[0]["commit"] in text and "tiny: T = 96, H = 64, V = 512, float32" in text
    told = f"| {rows[-1]['time_ms']:.2f} |"
    assert any(line.startswith("| store gemm_rows") and told in line for line in text.splitlines())


def test_render_reads_the_file_again(tmp_path, capsys):
    _, rows = bench(tmp_path, "--strategies", "store")
    rows[-1]["time_ms"] = 1234.5
    results.write(tmp_path / "out.json", rows, results.made_by("", ["bench"]))
    assert benchmark.main(["--render", str(tmp_path / "out.json")]) == 0
    assert "| 1234.50 |" in (tmp_path / "out.md").read_text()


def test_a_named_result_has_date_and_device(tmp_path):
    words = ["--strategies", "store", "--name", "quick", "--results-dir", str(tmp_path)]
    assert benchmark.main([*BRIEF, *words]) == 0
    names = sorted(path.name[10:] for path in tmp_path.iterdir())
    assert names == ["-cpu-quick.json", "-cpu-quick.md"]
    assert results.default_path(tmp_path, "NVIDIA H200", "x").name.endswith("-h200-x.json")


def test_every_cell_has_its_table(tmp_path):
    words = ["--shape", "32", "256", "--tokens", "64", "96", "--strategies", "recompute"]
    code, rows = bench(tmp_path, *words)
    assert code == 0
    cells = [(group[0]["shape"], group[0]["T"]) for group in report.cells(rows)]
    assert cells == [("tiny", 64), ("tiny", 96), ("32x256", 64), ("32x256", 96)]
    lines = (tmp_path / "out.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| recompute")]) == 4


@pytest.mark.parametrize("wgrad_accumulator", ["main_grad", "returned"])
@pytest.mark.parametrize("upstream", ["weights", "random"])
def test_wgrad_accumulators_and_upstream_gradients(tmp_path, wgrad_accumulator, upstream):
    words = ["--strategies", "store:32", "--wgrad-accumulator", wgrad_accumulator, "--upstream", upstream]
    code, rows = bench(tmp_path, *words)
    assert code == 0
    assert rows[-1]["wgrad_accumulator"] == wgrad_accumulator and rows[-1]["upstream"] == upstream


def test_two_ranks(forks, tmp_path):
    """Each cell with sequence parallelism and without; peers are rows."""
    words = [*BRIEF, "--strategies", "store:32", "recompute", "--out", str(tmp_path / "out.json")]
    words += ["--tp", "2", "--sequence-parallel", "both", "--peers"]
    words = ["-m", "scripts.bench", *words]
    status, told = forks.launch(words, ROOT, ranks=range(2), WORLD_SIZE="2")
    assert status == 0, told[-3000:]
    rows = results.rows(tmp_path / "out.json")
    assert all((row["tp"], row["V"]) == (2, 256) for row in rows)
    names = ["roof", "roof-4", "roof-raw", "store", "recompute"]
    names += ["liger-tp-loop", "verl-tp"]
    cells = [(sp, name) for sp in (True, False) for name in names]
    assert [(row["sp"], row["variant"]) for row in rows] == cells
    for row in rows:
        if row["family"] == "ours":
            assert row["error"] < 2e-6 and row["full_error"] < 2e-6 and row["ratio"] > 0
        elif row["family"] == "peer":
            assert row["error"] == "needs a CUDA device" and row["time_ms"] is None
    text = (tmp_path / "out.md").read_text()
    assert "TP 2 with sequence parallelism" in text and "float32, TP 2\n" in text


def test_tp_is_torchruns_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert benchmark.main(["--tp", "4", "--device", "cpu", "--shapes", "tiny"]) == 2
    assert "--tp 4 asks for 4 ranks, torchrun started 2" in capsys.readouterr().err


def test_tp_without_torchrun_becomes_one(monkeypatch, capsys):
    class Replaced(Exception):
        pass

    def execv(program, words):
        raise Replaced(program, words)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(Replaced) as replaced:
        benchmark.main(["--tp", "4", "--device", "cpu", "--shapes", "tiny", "--lean"])
    program, words = replaced.value.args
    assert program == words[0] == sys.executable
    assert words[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    assert words[5:8] == ["4", "-m", "megatron_fused_ce.scripts.bench"]
    assert words[8:] == ["--tp", "4", "--device", "cpu", "--shapes", "tiny", "--lean"]
    monkeypatch.setattr(command_line, "num_gpus", lambda: 2)
    assert benchmark.main(["--tp", "4", "--shapes", "tiny"]) == 2
    assert "needs 4 GPUs, here are 2" in capsys.readouterr().err


def test_a_time_limit_leaves_the_rest_out(tmp_path, capsys):
    code, rows = bench(tmp_path, "--strategies", "store", "--time-limit", "0.000001")
    assert code == 0 and rows == []
    assert "not started" in capsys.readouterr().err


# --- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["loss", "gradients", "at full size", "raises"])
def test_a_wrong_strategy_prints_nothing(tmp_path, monkeypatch, capsys, wrong):
    right = benchmark_variants.linear_cross_entropy

    def off(call):
        outputs = right(call)
        loss = outputs.loss
        if wrong == "loss":
            loss = loss + 1e-3
        elif wrong == "gradients":
            loss = loss.detach() + 1.001 * (loss - loss.detach())
        elif wrong == "at full size" and call.hidden.shape[0] > 48:
            loss = loss.index_fill(0, torch.tensor([70]), 0.0)
        elif wrong == "raises":
            raise RuntimeError("a bug")
        return outputs._replace(loss=loss)

    monkeypatch.setattr(benchmark_variants, "linear_cross_entropy", off)
    code, rows = bench(tmp_path, "--strategies", "store")
    assert code == 1 and rows == []
    printed = capsys.readouterr()
    assert printed.out == "" and "store" in printed.err


def test_a_broken_promise_of_grad_in_forward_prints_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure.promise, "counts", measure.promise.Counts())

    def flag(problem, mark):
        measure.promise.count(kept=False)
        return plain_run(problem, mark)

    variant = Variant("store", "ours", run=flag)
    monkeypatch.setattr(benchmark_variants, "ours", lambda *args: variant)
    code, rows = bench(tmp_path, "--strategies", "store")
    assert code == 1 and rows == []
    assert "token weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--strategies", "stroe"],
        ["--strategies", "store:x"],
        ["--strategies", "store/fast"],
        ["--strategies", "store/scaled_exp/gemm_rows"],
        ["--strategies", "store:"],
        ["--tp", "0"],
        ["--tp", "5", "--shapes", "tiny"],
        ["--blocks", "0"],
        ["--preset", "million", "--tokens", "8"],
        ["--shapes", "llama"],
    ],
)
def test_arguments_that_do_not_fit(words):
    with pytest.raises(SystemExit) as stop:
        cases.parse_arguments("", words)
    assert stop.value.code == 2


def test_merges():
    given = cases.parse_arguments("", ["--strategies", "store:16/all_reduce", "store:16/all_reduce"])
    assert given.strategies == ["store:16/all_reduce"]
    assert "recompute:16384" in cases.parse_arguments("", ["--preset", "tp-reach", "--tp", "4"]).strategies
    assert cases.parse_strategy("grad_in_forward:32/scaled_exp/packed") == (
        "grad_in_forward",
        32,
        "scaled_exp",
        "packed",
    )
    for wrong in ("store/packed/scaled_exp", "store/packed/packed", "store/scaled_exp/max"):
        with pytest.raises(ValueError, match="merges auto, packed, all_reduce"):
            cases.parse_strategy(wrong)
    variant = benchmark_variants.ours(None, "grad_in_forward:32/packed")
    assert variant.key == "grad_in_forward/packed:32" and variant.config.merge == "packed"
    variant = benchmark_variants.ours(None, "auto", 64)
    assert (variant.config.merge, variant.config.memory_mb) == ("auto", 64)


def test_presets_over_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    given = cases.parse_arguments("", ["--preset", "tp", "--tp", "4"])
    assert [(cell.hidden_size, cell.num_tokens, cell.sequence_parallel) for cell in given.cells] == [
        *((4096, 8192, True), (4096, 8192, False)),
        *((4096, 32768, True), (4096, 32768, False)),
        *((8192, 32768, True), (8192, 32768, False)),
    ]
    assert (given.blocks, given.check_tokens, given.roofs) == (3, 1024, ("roof", "roof-4"))
    words = ["--preset", "tp", "--tp", "4", "--tokens", "32768", "--shapes", "llama-3-8b"]
    [cell] = cases.parse_arguments("", [*words, "--sequence-parallel"]).cells
    assert cell.sequence_parallel and str(cell).endswith(" SP")
    given = cases.parse_arguments("", ["--preset", "tp-reach", "--blocks", "2"])
    assert len(given.cells) == 3 and not given.lean and given.blocks == 2
    assert given.strategies[:5] == ["store", "grad_in_forward", "recompute", "store:4096", "store:16384"]


def test_a_cell_over_ranks_is_expected_to_take_a_share(monkeypatch):
    given = cases.parse_arguments("", ["--shapes", "llama-3-8b", "--tokens", "32768"])
    variants = [Variant("store", "ours")]
    one, four = (benchmark.expected_seconds(given.cells[0], variants, given, ranks) for ranks in (1, 4))
    assert 15 < four < one and four - 15 < 0.6 * (one - 15)


SMALL = ["--preset", "small", "--device", "cpu", "--shape", "32", "256", "--tokens", "32", "64"]
SMALL += ["--runs", "2", "--blocks", "3", "--sample-ms", "1", "--dtype", "float32"]


def test_small_heads_over_runs(tmp_path, monkeypatch, capsys):
    """Medians over runs, the time and the host's time over those of Megatron's layer with TE's loss."""
    standard = Variant("megatron-te", "megatron", run=plain_run)
    with_foreign(monkeypatch, standard)
    path = tmp_path / "small.json"
    assert benchmark.main([*SMALL, "--out", str(path)]) == 0
    rows = results.rows(path, report.KEYS)
    names = ["roof", "auto", "store", "grad_in_forward", "megatron-te"]
    assert [(row["T"], row["variant"]) for row in rows] == [(T, n) for T in (32, 64) for n in names]
    for row in rows:
        assert len(row["runs_ms"]) == 2
        assert min(row["runs_ms"]) <= row["time_ms"] <= max(row["runs_ms"]) + 1e-4
        if row["family"] == "ours":
            assert row["host_ms"] > 0 and row["over_te"] > 0 and row["host_over_te"] > 0
    text = path.with_suffix(".md").read_text()
    printed = capsys.readouterr().out
    for shown in (text, printed):
        line = next(line for line in shown.splitlines() if line.startswith("| T=64 H=32 V=256"))
        assert f"| {rows[6]['over_te']:.3f} |" in line and f"{rows[6]['host_over_te']:.2f}" in line
        assert "medians over 2 runs" in shown


def test_small_heads_without_transformer_engine_say_so(tmp_path, capsys):
    assert benchmark.main([*SMALL[:-6], "--blocks", "1", "--runs", "1", "--sample-ms", "1"]) == 0
    printed = capsys.readouterr().out
    assert "megatron-te: not measured: needs a GPU." in printed
    assert "medians over 1 run." in printed


def test_medians_over_runs():
    def row(variant, time, host, family="ours", **more):
        keys = {"variant": variant, "family": family, "time_ms": time, "host_ms": host}
        return {**keys, "peak_mib": 1.0, "error": None} | more

    def run(own, te):
        return [row("auto", own, 1.0), row("megatron-te", te, 2.0, "megatron")]

    auto, te = report.over_runs([run(1.0, 2.0), run(3.0, 3.0), run(2.0, 1.0)])
    assert (auto["time_ms"], auto["over_te"], auto["host_over_te"]) == (2.0, 1.0, 0.5)
    assert auto["runs_ms"] == [1.0, 3.0, 2.0] and "over_te" not in te
    broken = [row("auto", None, None, error="out of memory"), *run(1.0, 2.0)[1:]]
    auto, te = report.over_runs([run(1.0, 2.0), broken])
    assert auto["error"] == "out of memory" and auto["time_ms"] is None and te["time_ms"] == 2.0


def test_small_heads_of_each_rank():
    given = cases.parse_arguments("", ["--preset", "small", "--tp", "2"])
    assert len(given.cells) == 18 and all(cell.sequence_parallel for cell in given.cells)
    assert {cell.vocab // 2 for cell in given.cells} == {16032, 32064, 64128}
    assert (given.runs, given.blocks) == (3, 15)
    given = cases.parse_arguments("", ["--preset", "small", "--tokens", "1024"])
    assert len(given.cells) == 6 and {cell.num_tokens for cell in given.cells} == {1024}


def test_presets_name_shapes_that_exist():
    for name in cases.PRESETS:
        assert cases.parse_arguments("", ["--preset", name]).cells
    million = cases.parse_arguments("", ["--preset", "million"])
    assert million.blocks == 1 and million.strategies == ["recompute:2048"]
    assert not million.megatron and million.cells[0].num_tokens == 2**20
    assert cases.parse_arguments("", ["--preset", "million", "--blocks", "3"]).blocks == 3


# --- what is a row ---------------------------------------------------------------------------------


def test_out_of_memory_is_a_row(tmp_path, monkeypatch):
    def too_big(problem, mark):
        if problem.num_tokens > 48:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 125 GiB")
        return plain_run(problem, mark)

    code, rows = bench_foreign(tmp_path, monkeypatch, foreign("big", too_big))
    assert code == 0
    assert rows["big"]["error"] == "out of memory" and rows["big"]["time_ms"] is None
    assert rows["recompute"]["time_ms"] > 0


def test_our_own_out_of_memory_is_a_row_too(tmp_path, monkeypatch):
    right = benchmark_variants.linear_cross_entropy

    def too_big(call):
        if call.hidden.shape[0] > 48:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(call)

    monkeypatch.setattr(benchmark_variants, "linear_cross_entropy", too_big)
    code, rows = bench(tmp_path, "--strategies", "store")
    assert code == 0
    assert rows[-1]["error"] == "out of memory" and rows[-1]["ratio"] is None
    assert rows[0]["time_ms"] > 0


def test_out_of_memory_while_timed(tmp_path, monkeypatch):
    calls = []

    def later(problem, mark):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return plain_run(problem, mark)

    _, rows = bench_foreign(tmp_path, monkeypatch, foreign("late", later))
    assert rows["late"]["error"] == "out of memory" and rows["late"]["time_ms"] is None


def test_a_failing_peer_is_a_row_with_one_line(tmp_path, monkeypatch):
    def fails(problem, mark):
        raise RuntimeError("no kernel for this\nand a long story")

    absent = Variant("absent", "peer", why_not="not installed")
    picky = replace(foreign("picky", plain_run), limits=lambda problem: "takes bfloat16 only")
    variants = (foreign("fails", fails), absent, picky)
    code, rows = bench_foreign(tmp_path, monkeypatch, *variants)
    assert code == 0
    assert rows["fails"]["error"] == "RuntimeError: no kernel for this and a long story"
    assert rows["absent"]["error"] == "not installed"
    assert rows["picky"]["error"] == "takes bfloat16 only"


def test_a_wrong_peer_is_a_row_without_times(tmp_path, monkeypatch):
    def wrong(problem, mark):
        return plain_run(problem, mark) * 1.5

    def nan_later(problem, mark):
        loss = plain_run(problem, mark)
        if problem.num_tokens > 48:
            problem.main_grad[3, 3] = float("nan")
        return loss

    code, rows = bench_foreign(tmp_path, monkeypatch, foreign("wrong", wrong), foreign("nan", nan_later))
    assert code == 0
    assert rows["wrong"]["error"].startswith("wrong result: error 5")
    assert rows["nan"]["error"] == "wrong result at T = 96: error inf"
    assert rows["wrong"]["time_ms"] is rows["nan"]["time_ms"] is None


def test_lean_checks_the_others_at_the_timed_size_alone(tmp_path, monkeypatch):
    seen = []

    def run(problem, mark):
        seen.append(problem.num_tokens)
        return plain_run(problem, mark)

    with_foreign(monkeypatch, foreign("right", run))
    words = [word for word in BRIEF if word != "--no-megatron"]
    path = tmp_path / "out.json"
    code = benchmark.main([*words, "--lean", "--strategies", "store", "--out", str(path)])
    rows = {row["variant"]: row for row in results.rows(path)}
    assert code == 0 and set(seen) == {96}
    assert 0 < rows["right"]["error"] == rows["right"]["full_error"] < 2e-6
    assert 0 < rows["store"]["error"] != rows["store"]["full_error"]
    assert "roof-raw" not in rows and rows["right"]["ratio_raw"] is None
    assert "to fp32 at the timed size" in path.with_suffix(".md").read_text()


def test_a_peer_of_one_upstream_is_checked_against_its_own_truth(tmp_path, monkeypatch):
    def summed(problem, mark):
        problem.reset()
        mark()
        logits = problem.hidden @ problem.weight.t()
        loss = torch.nn.functional.cross_entropy(logits, problem.labels, reduction="sum")
        return benchmark_variants.backward(loss, problem.one_upstream, problem, mark)

    right = replace(foreign("sum", summed), one_upstream=True)
    code, rows = bench_foreign(tmp_path, monkeypatch, right, foreign("per-token", summed))
    assert code == 0
    assert rows["sum"]["error"] < 2e-6 and rows["sum"]["upstream"] == "one scalar"
    assert isinstance(rows["per-token"]["error"], str)
    assert "one scalar for all tokens: sum" in (tmp_path / "out.md").read_text()


def test_a_lost_device_keeps_the_cells_before(tmp_path, monkeypatch, capsys):
    real = measure.measure_cell

    def lose(cell, *args):
        if cell.num_tokens == 96:
            raise measure.DeviceLost("an illegal memory access was encountered")
        return real(cell, *args)

    monkeypatch.setattr(measure, "measure_cell", lose)
    code, rows = bench(tmp_path, "--strategies", "store", "--tokens", "64", "96", "128")
    assert code == 3 and {row["T"] for row in rows} == {64}
    assert "--skip" in capsys.readouterr().err


# --- how it measures -------------------------------------------------------------------------------


def test_blocks_hold_everything_in_changing_order():
    names = ["roof", "roof", "store", "grad_in_forward", "recompute", "te"]
    blocks = measure.block_order(names, 6, seed=0)
    assert all(sorted(block) == sorted(names) for block in blocks)
    assert len({tuple(block) for block in blocks}) > 3
    assert blocks == measure.block_order(names, 6, seed=0) != measure.block_order(names, 6, seed=1)


def test_turns_follow_the_order(tmp_path, monkeypatch):
    seen = []
    order = [["a", "roof", "b", "roof"], ["b", "roof", "roof", "a"]]

    def of(name):
        def run(problem, mark):
            seen.append(name)
            return plain_run(problem, mark)

        return foreign(name, run)

    real = Roof.turn
    monkeypatch.setattr(Roof, "turn", lambda self, name, *rest: seen.append(name) or real(self, name, *rest))

    def known_order(names, blocks, seed):
        assert sorted(names) == ["a", "b", "roof", "roof"] and blocks == 2
        seen.clear()
        return order

    monkeypatch.setattr(measure, "block_order", known_order)
    with_foreign(monkeypatch, of("a"), of("b"))
    words = [word for word in BRIEF if word != "--no-megatron"]
    skip = ["--strategies", "store", "--skip", "store", "--roofs", "roof"]
    assert benchmark.main([*words, *skip]) == 0
    turns = [name for at, name in enumerate(seen) if at == 0 or seen[at - 1] != name]
    assert turns == ["a", "roof", "b", "roof", "b", "roof", "a"]


def known(world):
    """A problem, and its truth."""
    sizes = {"num_tokens": 40, "hidden_size": 16, "vocab": 64}
    problem = Problem(world, **sizes, dtype=torch.float32, keep_whole=True)
    return problem, truth(problem.whole)


def test_the_references_agree(world):
    problem, exact = known(world)
    found = full_reference(problem, samples=16)
    assert relative_error(found.loss, exact.loss[0]) < 1e-6
    assert relative_error(found.grad_hidden, exact.grad_hidden[found.tokens, 0]) < 1e-6
    assert relative_error(found.grad_weight, exact.grad_weight[found.rows]) < 1e-6
    assert found.tokens.numel() >= 16 and found.rows.numel() >= 16
    assert (problem.token_weights == 0).any() and problem.token_weights.max() > 1


def test_what_no_sample_sees_must_be_finite(world):
    problem = Problem(world, num_tokens=40, hidden_size=16, vocab=64, dtype=torch.float32)
    reference = full_reference(problem, samples=4)
    unseen = next(row for row in range(64) if row not in reference.rows)

    def poisoned(problem, mark):
        loss = plain_run(problem, mark)
        problem.main_grad[unseen, 5] = float("nan")
        return loss

    loss_error, error, finite = measure.full_errors(foreign("x", plain_run), problem, reference)
    assert finite and loss_error < 1e-6 and error < 1e-6
    _, error, finite = measure.full_errors(foreign("x", poisoned), problem, reference)
    assert not finite and error < 1e-6


def test_a_turn_runs_untimed_steps_first(world):
    problem = Problem(world, num_tokens=8, hidden_size=8, vocab=16, dtype=torch.float32)
    runs = []
    variant = foreign("x", lambda *args: runs.append(1) or plain_run(*args))
    spans = measure.turn(variant, problem, world, warm=2, steps=3)
    assert len(runs) == 5 and [len(step) for step in spans] == [2, 2, 2]
    assert problem.hidden.grad is None


def test_a_long_step_that_waited_for_the_driver_runs_again(world, monkeypatch):
    problem = Problem(world, num_tokens=8, hidden_size=8, vocab=16, dtype=torch.float32)
    runs = []
    variant = foreign("x", lambda *args: runs.append(1) or plain_run(*args))
    calls = iter([0, 2, 2, 2, 2, 2])  # before and after each step: the first one allocates
    monkeypatch.setattr(measure, "driver_calls", lambda world: next(calls))
    assert len(measure.turn(variant, problem, world, warm=0, steps=2)) == 2
    assert len(runs) == 3 and next(calls, None) is None


@pytest.mark.parametrize("slices", [1, 4])
def test_the_roof_runs_on_the_true_gradients(world, slices):
    """Its products are the gradients of the step, whole or in slices."""
    problem, exact = known(world)
    roof = Roof(problem, world)
    roof.num_slices = slices
    spans = roof.turn("roof", warm=1, steps=2)
    assert len(spans) == 2 and all(len(span) == 2 and min(span) > 0 for span in spans)
    # warm + steps: three times into the same fp32 wgrad accumulator
    assert relative_error(problem.grad_weight() / 3, exact.grad_weight) < 1e-6
    assert roof._grad_logits is None  # not resident: given back


def test_the_roof_is_planned_by_memory(world):
    def planned(free, beside):
        problem = Problem(world, num_tokens=64, hidden_size=8, vocab=32, dtype=torch.float32)
        roof = Roof(problem, world)
        gib = 2**30
        roof.plan(free + 5 * gib, beside + 5 * gib)
        return roof.resident, roof.num_slices

    need = 2 * 64 * 32 * 4 + 2 * 64 * 8 * 4
    assert planned(2 * need, need) == (True, 1)
    assert planned(2 * need, need - 1) == (False, 1)
    assert planned(need // 2, 0) == (False, 2)
    assert planned(need // 5, 0) == (False, 8)


def test_the_fp64_truth_takes_fewer_rows_where_memory_is_short(world, monkeypatch):
    cell = measure.Cell("x", 2048, 4096, 128256)
    monkeypatch.setattr(World, "free_bytes", lambda self: 140 * 2**30)
    assert measure.rows_for_truth(cell, 2048, world) == 128256
    monkeypatch.setattr(World, "free_bytes", lambda self: 16 * 2**30)
    rows = measure.rows_for_truth(cell, 2048, world)
    assert rows < 128256 and rows % 128 == 0 and 8 * rows * (4 * 4096 + 7 * 2048) < 13 * 2**30
