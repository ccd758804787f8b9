"""`sweep` on a CPU: what it measures, keeps, chooses and refuses; launches of Megatron-LM."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch

from megatron_fused_ce.scripts.bench import loss
from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.runs.sweep import OUT_OF_MEMORY, Row, main, pareto_front, recommend

BRIEF = ["--device", "cpu", "--tokens", "32", "--hidden", "8", "--vocab", "64", "--chunks", "1", "4"]
BRIEF += ["--strategies", "store", "recompute", "--blocks", "1", "--sample-ms", "0"]
KEYS = ["auto", "store x 1", "store x 4", "recompute x 1", "recompute x 4"]


def row(strategy, num_chunks, ratio, peak, status="ok") -> Row:
    return replace(Row.of(strategy, num_chunks), status=status, ratio=ratio, peak_mib=peak)


def test_pareto_front_against_brute_force():
    generator = random.Random(0)
    for _ in range(300):
        # Few values: many ties and equal points.
        points = [(generator.randrange(4), generator.randrange(4)) for _ in range(generator.randrange(9))]
        best = [not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points) for x, y in points]
        assert pareto_front(points) == [i for i, is_best in enumerate(best) if is_best], points


#: What is chosen at 1 % -> the rows, and what is said of it.
CHOICES = {
    # The smallest peak of those within the tolerance.
    "store x 2": ([row("auto", None, 1.05, 4.0), row("store", 1, 1.0, 9.0), row("store", 2, 1.009, 6.0),
                   row("store", 4, 1.02, 3.0)],
                  ["6.0 MiB", "within 1 % of the fastest (store x 1)", "0.9% more time", "-2.0 MiB"]),
    # The defaults are left alone where they serve: a peak that is 0.5 % larger, but not 2 %.
    "auto": ([row("auto", None, 1.005, 100.5), row("store", 2, 1.0, 100.0), row("recompute", 1, 1.4, 20.0)],
             ["leave the defaults alone"]),
    # Neither stock nor what failed or was wrong, however fast.
    "recompute x 4": ([row("unfused", None, 0.5, 1.0), row("store", 1, 0.6, 1.0, status="failed: no"),
                       row("auto", None, None, None, status=OUT_OF_MEMORY),
                       row("recompute", 4, 1.0, 9.0)], ["out of memory"]),
    # Without peaks time decides.
    "store x 1": ([row("auto", None, 1.0, None), row("store", 1, 0.9, None), row("store", 2, 0.95, None)],
                  ["Peaks are unknown", "the fastest"]),
}  # fmt: skip


@pytest.mark.parametrize("chosen", CHOICES)
def test_choices(chosen):
    rows, said = CHOICES[chosen]
    best, why = recommend(rows, 0.01)
    assert best.name == chosen and all(words in why for words in said), why


def test_what_a_sweep_writes(tmp_path, ran):
    done, made_by, rows, _ = ran(main, *BRIEF)
    assert done.returncode == 0 and list(rows) == KEYS and rows["auto"]["ratio"] == 1.0
    assert all(r["status"] == "ok" and r["time_ms"] > 0 for r in rows.values())
    # `store` keeps all logits (fp32) besides; a chunk takes what is at work.
    peaks = {key: r["peak_mib"] for key, r in rows.items()}
    logits = 32 * 64 * 4 / 2**20
    assert peaks["store x 4"] - peaks["recompute x 4"] == pytest.approx(logits, rel=0.1)
    assert logits <= peaks["recompute x 1"] <= 3 * logits
    assert peaks["recompute x 4"] == pytest.approx(peaks["recompute x 1"] / 4, rel=0.3)
    front = pareto_front([(r["ratio"], r["peak_mib"]) for r in rows.values()])
    assert [at for at, r in enumerate(rows.values()) if r["on_front"]] == front
    (best,) = [r for r in rows.values() if r["recommended"]]
    assert made_by["recommended"]["flags"] == best["flags"]
    assert f"    {best['flags']}\n" in (text := (tmp_path / "out" / "sweep.md").read_text())
    checked = re.findall(r"(\S.*): checked in [\d.]+ s", done.stderr.replace("benchmark: ", ""))
    assert text in done.stdout and checked == KEYS


def no_room(*sizes, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def test_out_of_memory_is_a_row(ran, monkeypatch):
    """Ratios are over `auto`, or the last, which needs least."""
    right, wrong = loss.of_config, {"auto": {"run": no_room}}
    monkeypatch.setattr(loss, "of_config", lambda *of: replace(right(*of), **wrong.get(of[1], {})))
    done, made_by, rows, _ = ran(main, *BRIEF)
    assert done.returncode == 0 and made_by["reference"] == "recompute x 4"
    assert [key for key, r in rows.items() if r["status"] != "ok"] == ["auto"]
    assert rows["recompute x 4"]["ratio"] == 1.0
    lost = rows["auto"]
    assert (lost["status"], lost["time_ms"], lost["on_front"]) == (OUT_OF_MEMORY, None, False)
    assert done.stdout.count("| out of memory |") == 1


def test_what_cannot_be_swept_is_one_line(ran, monkeypatch):
    right, too_large = loss.loss_of, replace(loss.OP, problem=no_room)
    for name, wrong, status, words in (
        ("loss_of", lambda *given: {"loss": 1.01 * right(*given)["loss"]}, 1, "auto is wrong"),
        ("OP", too_large, 2, "operands alone do not fit"),
    ):
        monkeypatch.setattr(loss, name, wrong)
        done, made_by, *_ = ran(main, *BRIEF)
        assert done.returncode == status and not made_by and words in done.stderr.splitlines()[-1], done


def test_two_ranks_with_sequence_parallelism(forks, tmp_path):
    """gloo: one table, the shard's sizes."""
    words = results.SCRIPTS / "sweep_chunks.py", *BRIEF, "--sequence-parallel", "--out", tmp_path
    status, out = forks(2, tmp_path, *words)
    assert status == 0, out[-3000:]
    made_by, rows = (results.read(tmp_path / "sweep.json")[name] for name in ("made_by", "rows"))
    assert [r["variant"] for r in rows] == KEYS and all(r["status"] == "ok" for r in rows)
    assert made_by["tp"] == 2 and made_by["sp"] and made_by["V"] == 32
    assert out.count("Recommended on this CPU:") == out.count("Not so on a GPU") == 1
