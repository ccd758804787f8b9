"""scripts/runs/sweep.py on a CPU: what it measures, keeps, chooses and refuses; launches of Megatron-LM."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter.arguments import config_from_argv
from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.scripts.bench import loss
from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.runs import sweep as sweep_chunks
from megatron_fused_ce.scripts.runs import sweep_launches as sweep_megatron
from megatron_fused_ce.scripts.runs import sweep_report
from megatron_fused_ce.scripts.runs.sweep_rows import (
    OUT_OF_MEMORY,
    Cell,
    Row,
    cells_on_front,
    pareto_front,
    recommend,
)
from tests.support.checkouts import FAKE_PRETRAIN, on_checkouts, stand_in
from tests.support.commands import launches_without_torch
from tests.support.cpu_case import cpu_case

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = ROOT / "scripts" / "sweep_chunks.py"
BRIEF = ["--device", "cpu", "--tokens", "32", "--hidden", "8", "--vocab", "64", "--chunks", "1", "4"]
BRIEF += ["--strategies", "store", "recompute", "--blocks", "1", "--sample-ms", "0"]
KEYS = ["auto", "store x 1", "store x 4", "recompute x 1", "recompute x 4"]


@pytest.fixture(autouse=True)
def one_commit():
    """A commit that somebody makes meanwhile would make another sweep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_CE_COMMIT", "0" * 40)
        yield


def sweep(out: Path, *words: str) -> tuple[int, dict]:
    """Exit code and what was written, in this process."""
    code = sweep_chunks.main([*BRIEF, "--out", str(out), *words])
    file = out / "sweep.json"
    return code, json.loads(file.read_text()) if file.exists() else {}


def said(capsys) -> str:
    """The one line of the sweep itself; a step that is slow may be told of beside it."""
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if not line.startswith("benchmark: ")]
    return line


def rows_by_key(result: dict) -> dict[str, dict]:
    return {r["variant"]: r for r in result["rows"]}


def row(strategy, num_chunks, ratio, peak, status="ok", spread=0.0) -> Row:
    cell = Cell(strategy, num_chunks)
    time_ms = None if ratio is None else 10 * ratio
    return Row(*cell, "", status, time_ms, ratio, spread, peak, None, cell.flags)


# --- the front, the choice -----------------------------------------------------------------------


def test_pareto_front_against_brute_force():
    generator = random.Random(0)
    for _ in range(300):
        size = generator.randrange(0, 9)
        # Few values: many ties and equal points.
        points = [(float(generator.randrange(4)), float(generator.randrange(4))) for _ in range(size)]

        def dominated(one, points=points):
            return any(a <= one[0] and b <= one[1] and (a, b) != one for a, b in points)

        expected = [i for i, point in enumerate(points) if not dominated(point)]
        assert pareto_front(points) == expected, points


def test_the_front_is_of_rows_that_ran_and_were_right():
    rows = [
        row("store", 1, 1.0, 8.0),
        row("store", 2, 1.1, 9.0),
        row("recompute", 4, 1.3, 2.0),
        row("recompute", 8, 0.5, 1.0, status="losses differ from unfused's by 1.0e-01"),
        row("grad_in_forward", 1, None, None, status=OUT_OF_MEMORY),
        row("grad_in_forward", 2, 0.9, None),
    ]
    assert {cell.name for cell in cells_on_front(rows)} == {"store x 1", "recompute x 4"}


def test_the_smallest_peak_within_the_tolerance():
    rows = [
        row("auto", None, 1.05, 4.0),
        row("store", 1, 1.0, 9.0),
        row("store", 2, 1.009, 6.0),
        row("store", 4, 1.02, 3.0),
    ]
    best = recommend(rows, 0.01)
    assert best.flags == "--fused-chunked-ce --fused-ce-strategy store --fused-ce-num-chunks 2"
    assert "6.0 MiB" in best.why and "within 1 % of the fastest (store x 1)" in best.why
    assert "0.9% more time" in best.why and "2.0 MiB less" in best.why
    assert recommend(rows, 0.03).row.cell.name == "store x 4"
    assert recommend(rows, 0.0).row.cell.name == "store x 1"


def test_the_defaults_are_left_alone_where_they_serve():
    """Not for a peak that is 2 % larger; for one that is 0.5 % larger."""
    others = [row("store", 2, 1.0, 100.0), row("recompute", 1, 1.4, 20.0)]
    best = recommend([row("auto", None, 1.005, 100.5), *others], 0.01)
    assert best.flags == "--fused-chunked-ce" and "leave the defaults alone" in best.why
    assert recommend([row("auto", None, 1.005, 102.0), *others], 0.01).row.strategy == "store"
    assert recommend([row("auto", None, 1.1, 1.0), *others], 0.01).row.strategy == "store"


def test_stock_and_what_failed_are_never_recommended():
    rows = [
        row("unfused", None, 0.5, 1.0),
        row("store", 1, 0.6, 1.0, status="failed: RuntimeError: no"),
        row("auto", None, 1.0, 9.0),
    ]
    assert recommend(rows, 0.01).row.strategy == "auto"
    assert recommend(rows[:2], 0.01) is None


def test_without_peaks_time_decides():
    rows = [row("auto", None, 1.0, None), row("store", 1, 0.9, None), row("store", 2, 0.95, None)]
    best = recommend(rows, 0.01)
    assert best.row.cell.name == "store x 1" and "unknown" in best.why and "fastest" in best.why
    assert recommend(rows, 0.2).row.strategy == "auto"


def test_scatter_above_the_tolerance_is_said():
    rows = [row("auto", None, 1.0, 1.0, spread=0.0), row("store", 1, 1.2, 1.0, spread=0.08)]
    assert "differ by 4.0%" in recommend(rows, 0.01).why
    assert "differ" not in recommend(rows, 0.05).why


@pytest.mark.parametrize("strategy", ["store", "grad_in_forward", "recompute", "auto"])
@pytest.mark.parametrize("num_chunks", [None, 4])
def test_the_flags_ask_for_what_was_measured(strategy, num_chunks):
    asked = config_from_argv(shlex.split(Cell(strategy, num_chunks).flags))
    assert asked == FusedCEConfig(strategy=strategy, num_chunks=num_chunks)


# --- the head ------------------------------------------------------------------------------------


def test_what_a_sweep_writes(tmp_path, capsys):
    code, result = sweep(tmp_path)
    assert code == 0
    rows = rows_by_key(result)
    assert list(rows) == KEYS
    assert all(r["status"] == "ok" and r["time_ms"] > 0 for r in rows.values())
    # `store` keeps all logits (fp32) besides; a chunk takes what is at work.
    peaks = {key: r["peak_mib"] for key, r in rows.items()}
    logits = 32 * 64 * 4 / 2**20
    for num in (1, 4):
        kept = peaks[f"store x {num}"] - peaks[f"recompute x {num}"]
        assert kept == pytest.approx(logits, rel=0.1)
    assert logits <= peaks["recompute x 1"] <= 3 * logits
    assert peaks["recompute x 4"] == pytest.approx(peaks["recompute x 1"] / 4, rel=0.3)
    points = [(r["ratio"], r["peak_mib"]) for r in rows.values()]
    own = [(r["ratio"], r["peak_mib"]) for r in rows.values() if r["on_front"]]
    assert sorted(own) == sorted(points[i] for i in pareto_front(points))
    (best,) = [r for r in rows.values() if r["recommended"]]
    assert result["made_by"]["recommended"]["flags"] == best["flags"]
    assert rows["auto"]["ratio"] == 1.0
    for r in rows.values():
        assert r["ratio"] == r["time_ms"] / rows["auto"]["time_ms"]

    text = (tmp_path / "sweep.md").read_text()
    assert f"    {best['flags']}\n" in text and text in capsys.readouterr().out
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def out_of_memory_for(monkeypatch, *names: str) -> None:
    """Training steps of these cells raise what torch's allocator raises."""

    right = loss.of_config

    def broken(world, name, config):
        def run(problem):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

        case = right(world, name, config)
        return replace(case, run=run) if name in names else case

    monkeypatch.setattr(loss, "of_config", broken)


def test_out_of_memory_is_a_row(tmp_path, monkeypatch):
    out_of_memory_for(monkeypatch, "store x 1")
    code, result = sweep(tmp_path)
    assert code == 0
    rows = rows_by_key(result)
    lost = rows.pop("store x 1")
    assert lost["status"] == OUT_OF_MEMORY and lost["time_ms"] is None and not lost["on_front"]
    assert all(r["status"] == "ok" for r in rows.values())
    assert "| store | 1 |  | out of memory |" in (tmp_path / "sweep.md").read_text().replace(
        "store, 1 chunk of 32 tokens", ""
    )


def test_without_room_for_auto_another_is_the_reference(tmp_path, monkeypatch):
    """The last that ran, which needs least."""
    out_of_memory_for(monkeypatch, "auto", "store x 1")
    _, result = sweep(tmp_path)
    rows = rows_by_key(result)
    assert result["made_by"]["reference"] == "recompute x 4"
    assert rows["recompute x 4"]["ratio"] == 1.0 and rows["auto"]["status"] == OUT_OF_MEMORY


def test_a_device_that_is_too_small_is_one_line(tmp_path, monkeypatch, capsys):
    out_of_memory_for(monkeypatch, *KEYS)
    assert sweep(tmp_path)[0] == 2
    assert "nothing of this package ran to its end: use fewer tokens" in said(capsys)

    def no_room(*sizes, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loss, "OP", replace(loss.OP, problem=no_room))
    assert sweep(tmp_path)[0] == 2
    assert "the operands alone do not fit" in said(capsys)


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch, capsys):
    right = loss.loss_of
    monkeypatch.setattr(loss, "loss_of", lambda *given: {"loss": 1.01 * right(*given)["loss"]})
    assert sweep(tmp_path) == (1, {})
    assert "auto is wrong" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda"], "expected 1 GPUs, found 0: use --device cpu"),
        (["--chunks", "0"], "argument --chunks: expected a whole number from 1"),
        (["--chunks", "4", "33"], "expected --chunks from 1 to 32, got 33"),
        (["--tokens", "0"], "argument --tokens: expected a whole number from 1"),
        (["--blocks", "0"], "argument --blocks: expected a whole number from 1"),
        (["--strategies", "fast"], "invalid choice: 'fast'"),
        (["--", "--num-layers", "2"], "arguments after -- are those of --through-megatron"),
        (["--through-megatron", "nowhere", "--", "--bf16"], "no Megatron-LM checkout at nowhere"),
        (["--through-megatron", "x", "--warmup", "10"], "expected fewer --warmup than --iterations"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, words, message):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    try:
        code = sweep_chunks.main([*BRIEF, "--out", str(tmp_path / "out"), *words])
    except SystemExit as leave:
        code = leave.code
    err = capsys.readouterr().err
    assert code == 2 and message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_two_ranks_with_sequence_parallelism(forks, tmp_path):
    """gloo: one table, the shard's sizes."""
    words = [SCRIPT, *BRIEF, "--sequence-parallel", "--out", tmp_path / "out"]
    status, out = forks.launch(words, tmp_path, ranks=range(2), WORLD_SIZE="2")
    assert status == 0, out[-3000:]
    result = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert list(rows_by_key(result)) == KEYS
    assert all(r["status"] == "ok" for r in result["rows"])
    assert result["made_by"]["tp"] == 2 and result["made_by"]["sp"] and result["made_by"]["V"] == 32
    assert out.count("Recommended on this CPU:") == out.count("Not so on a GPU") == 1


def drawn(rows, tmp_path, monkeypatch):
    """The figure of a head's rows."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(sweep_report.pictures, "save", lambda figure, path: figures.append(figure))
    facts = {"what": "head", "T": 8, "H": 8, "V": 8, "dtype": "float32", "tp": 1, "sp": False}
    result = sweep_report.Result.of(rows, facts | {"device": "x86_64 CPU"}, "auto", 0.01)
    assert sweep_report.draw(result, tmp_path / "sweep.png")
    return figures[0]


def point(strategy, num_chunks, ms, peak):
    return Row(strategy, num_chunks, "", "ok", ms, ms / 70, 0.0, peak, None, "")


@pytest.mark.parametrize("peaks", [[32 + 32 / n for n in (1, 2, 4)], [4096, 1024, 256]])
def test_the_axis_has_ticks_that_can_be_read(tmp_path, monkeypatch, peaks):
    """Peaks of 34 to 64 MiB had one power of two between them."""
    rows = [point("recompute", n, 23 + n / 5, peak) for n, peak in zip((1, 2, 4), peaks, strict=True)]
    (axes,) = drawn(rows, tmp_path, monkeypatch).axes
    low, high = axes.get_ylim()
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    inside = [text for text, at in zip(labels, axes.get_yticks(), strict=True) if low <= at <= high]
    assert len([text for text in inside if text]) >= 3, inside


def test_labels_cover_neither_each_other_nor_points(tmp_path, monkeypatch):
    """`store` in 8 chunks stood under a point of grad_in_forward, 1 and 2 over each other."""
    rows = [point("store", n, ms, 2100.0) for n, ms in ((1, 72.5), (2, 72.6), (8, 84.1))]
    rows += [point("grad_in_forward", n, ms, 2200.0) for n, ms in ((8, 86.4), (16, 110.0))]
    rows += [point("recompute", n, 95 + n, 2000 / n) for n in (1, 16)]
    figure = drawn(rows, tmp_path, monkeypatch)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent().shrunk(0.8, 0.8) for text in figure.axes[0].texts]
    assert len(boxes) == len(rows)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    at = figure.axes[0].transData.transform([(row.time_ms, row.peak_mib) for row in rows])
    assert not any(box.contains(x, y) for box in boxes for x, y in at)


def test_the_star_of_auto_lies_below_the_row_that_it_chose(tmp_path, monkeypatch):
    """It covered that point."""
    figure = drawn(
        [point("auto", None, 72.5, 2100.0), point("store", 1, 72.5, 2100.0)], tmp_path, monkeypatch
    )
    star, dot = (
        next(line for line in figure.axes[0].lines if line.get_label() == name) for name in ("auto", "store")
    )
    assert star.get_zorder() < dot.get_zorder() and star.get_markersize() > 2 * dot.get_markersize()


def test_a_picture_that_is_left_out_is_said(tmp_path, monkeypatch):
    rows = [row("auto", None, 1.0, None)]
    facts = {"what": "pretrain", "script": "pretrain_gpt.py", "megatron": "M", "nproc": 2, "device": "CPU"}
    facts |= dict.fromkeys({*results.MADE_BY} - facts.keys(), "x")
    facts |= {"args": "", "plugin_args": "", "loss_bound": 1.0}
    result = sweep_report.Result.of(rows, facts, "auto", 0.01)
    monkeypatch.setattr(sweep_report.pictures, "pyplot", lambda: None)
    written = sweep_report.write(result, tmp_path)
    assert written == ["sweep.json", "sweep.md", "no picture (matplotlib is not installed)"]


def test_lines_of_equal_times_do_not_hide_each_other(tmp_path, monkeypatch):
    rows = [point(name, None, 50.0, None) for name in ("auto", "unfused", "native")]
    rows += [point("store", n, 50.0 + n / 100, None) for n in (1, 4)]
    axes = drawn(rows, tmp_path, monkeypatch).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    counted = lines["store"]
    patterns = [lines[name]._dash_pattern for name in ("auto", "unfused", "native")]
    assert len({offset for offset, _ in patterns}) == 3
    assert all(lines[name].get_zorder() > counted.get_zorder() for name in ("auto", "unfused", "native"))


def test_a_picture_without_peaks(tmp_path):
    rows = [
        row("auto", None, 1.0, None),
        row("unfused", None, 1.3, None),
        *(row("store", num, 1 + num / 10, None) for num in (1, 2)),
    ]
    facts = {"what": "pretrain", "script": "pretrain_gpt.py", "megatron": "M", "nproc": 2}
    result = sweep_report.Result.of(rows, facts | {"device": "x86_64 CPU"}, "auto", 0.01)
    assert sweep_report.draw(result, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


# --- launches ------------------------------------------------------------------------------------

LAUNCH_KEYS = ["auto", "unfused", "native", "recompute x 1", "recompute x 4"]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Where a Megatron-LM would be: a script that logs as Megatron does."""
    monkeypatch.setenv("LAUNCHES", str(tmp_path / "launches.txt"))
    with launches_without_torch():
        yield stand_in(tmp_path / "fake-megatron", FAKE_PRETRAIN)


def launched(fake: Path, *words: str, options=(), device="cpu") -> tuple[int, dict]:
    out = fake.parent / "out"
    given = ["--through-megatron", str(fake), "--device", device, "--out", str(out)]
    given += ["--strategies", "recompute", "--chunks", "1", "4", "--iterations", "5", "--warmup", "2"]
    code = sweep_chunks.main([*given, *options, "--", "--bf16", *words])
    file = out / "sweep.json"
    return code, json.loads(file.read_text()) if file.exists() else {}


def launches_so_far(fake: Path) -> list[str]:
    return (fake.parent / "launches.txt").read_text().splitlines()


def test_launches(fake):
    code, result = launched(fake, "--cross-entropy-loss-fusion", "--fused-ce-num-chunks", "7")
    assert code == 0
    rows = rows_by_key(result)
    assert list(rows) == LAUNCH_KEYS
    assert [r["peak_mib"] for r in rows.values()] == [500.0, 900.0, 900.0, 500.0, 500.0]
    # Without the first two iterations, which take longer.
    assert [r["time_ms"] for r in rows.values()] == pytest.approx([10, 10, 10, 12, 12])
    assert result["made_by"]["recommended"]["flags"] == "--fused-chunked-ce"
    auto, unfused, native, one, four = launches_so_far(fake)
    ends = "--bf16 --log-interval 1 --eval-iters 0 --exit-interval 5"
    assert (unfused, auto) == (ends, f"{ends} --fused-chunked-ce")
    assert native == f"{ends} --cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
    assert four == f"{ends} {rows['recompute x 4']['flags']}" and one != four
    assert rows["native"]["error"] == pytest.approx(1e-6 / 4.5, rel=0.05)
    assert rows["unfused"]["error"] is None


@pytest.mark.parametrize(
    ("word", "status", "code"),
    [
        ("--full", OUT_OF_MEMORY, 0),
        ("--break", "failed: RuntimeError: no kernel for this GPU", 1),
        ("--wrong", "losses differ from unfused's by 2.2e-02", 1),
        ("--idle", "the head was not fused", 1),
    ],
)
def test_a_launch_that_goes_wrong_is_a_row(fake, word, status, code):
    came, result = launched(fake, word)
    rows = rows_by_key(result)
    assert came == code
    bad = rows.pop("recompute x 4")
    assert bad["status"] == status and not bad["on_front"]
    assert all(r["status"] == "ok" for r in rows.values())


def test_a_later_call_keeps_what_ran(fake, capsys):
    launched(fake)
    assert len(launches_so_far(fake)) == 5
    _, first = launched(fake)
    assert len(launches_so_far(fake)) == 5, "everything was there"
    assert capsys.readouterr().out.count("(kept; --fresh launches again)") == 5
    code, more = launched(fake, options=["--chunks", "1", "4", "16"])
    assert code == 0 and launches_so_far(fake)[5:][0].endswith("--fused-ce-num-chunks 16")
    assert more["rows"][:5] == first["rows"]
    launched(fake, options=["--fresh"])
    assert len(launches_so_far(fake)) == 11


def test_a_launch_that_failed_is_tried_again(fake):
    launched(fake, "--break")
    assert len(launches_so_far(fake)) == 5
    script = fake / "pretrain_gpt.py"
    script.write_text(script.read_text().replace('raise RuntimeError("no kernel', '("'))
    assert launched(fake, "--break")[0] == 0
    assert len(launches_so_far(fake)) == 6


def test_arguments_that_megatron_refuses_end_the_sweep(fake, capsys):
    assert launched(fake, "--refused") == (2, {})
    err = capsys.readouterr().err
    assert "error: unrecognized arguments: --refused" in err and len(err.splitlines()) == 1
    assert len(launches_so_far(fake)) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "x"], "leave out --save: all launches would write to the same place"),
        (["--fused-ce-z-loss", "1e-4"], "leave out --fused-ce-z-loss: the stock launches have no"),
        (["--fused-ce-z-loss=1e-4"], "leave out --fused-ce-z-loss"),
    ],
)
def test_arguments_that_do_not_fit_a_sweep(fake, capsys, words, message):
    assert launched(fake, *words) == (2, {})
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not (fake.parent / "launches.txt").exists()


def test_words_that_are_no_arguments(fake):
    settings = {"script": "pretrain_gpt.py", "nproc": 1, "device": "cpu"}
    settings |= {"iterations": 5, "warmup": 2, "timeout_s": 9.0}
    for words in ([], ["torchrun", "pretrain_gpt.py", "--bf16"]):
        with pytest.raises(UsageError, match="from its first --option on"):
            sweep_megatron.Launches.of(str(fake), words, **settings)
    with pytest.raises(UsageError, match="has no pretrain_t5"):
        sweep_megatron.Launches.of(str(fake), ["--bf16"], **settings | {"script": "pretrain_t5.py"})
    kept = sweep_megatron.Launches.of(
        str(fake), ["--bf16", "--fused-ce-merge", "packed", "--fused-chunked-ce"], **settings
    )
    assert kept.args == ("--bf16",) and kept.plugin_args == ("--fused-ce-merge", "packed")
    flagged = kept.run_of(Cell("store", 2)).command
    assert flagged.endswith("--fused-ce-num-chunks 2 --fused-ce-merge packed")
    assert "--fused" not in kept.run_of(Cell("unfused")).command.split("pretrain_gpt.py")[1]


@on_checkouts
def test_through_a_real_megatron(checkout, tmp_path):
    """TP 2 with sequence parallelism, gloo: losses agree with the stock launch's, peaks are unknown."""
    args = cpu_case("plain").args
    words = ["--through-megatron", checkout, "--device", "cpu", "--nproc", "2", "--out", str(tmp_path)]
    words += ["--strategies", "store", "--chunks", "3", "--iterations", "3", "--warmup", "1"]
    assert sweep_chunks.main([*words, "--", *args]) == 0
    result = json.loads((tmp_path / "sweep.json").read_text())
    rows = rows_by_key(result)
    assert list(rows) == ["auto", "unfused", "native", "store x 3"]
    assert all(r["time_ms"] > 0 and r["peak_mib"] is None for r in rows.values())
    assert rows["store x 3"]["error"] <= result["made_by"]["loss_bound"]
    assert "unknown" in (tmp_path / "sweep.md").read_text()
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
