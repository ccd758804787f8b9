"""`sweep` on a CPU: what it measures, keeps, chooses and refuses; launches of Megatron-LM."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fused_ce.scripts.bench import loss
from megatron_fused_ce.scripts.runs import sweep as sweep_chunks
from megatron_fused_ce.scripts.runs.sweep import OUT_OF_MEMORY, Row, pareto_front, recommend
from tests.support.commands import run_here

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sweep_chunks.py"
BRIEF = ["--device", "cpu", "--tokens", "32", "--hidden", "8", "--vocab", "64", "--chunks", "1", "4"]
BRIEF += ["--strategies", "store", "recompute", "--blocks", "1", "--sample-ms", "0"]
KEYS = ["auto", "store x 1", "store x 4", "recompute x 1", "recompute x 4"]


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    """A commit that somebody makes meanwhile would make another sweep."""
    monkeypatch.setenv("FUSED_CE_COMMIT", "0" * 40)


def sweep(out: Path, *words: object) -> tuple[int, dict, dict[str, dict], str]:
    """Status; what was written, without its rows; those by name; and what was said of it."""
    done = run_here(sweep_chunks.main, "--out", out, *words)
    return done.returncode, *written(out), done.stdout + done.stderr


def written(out: Path) -> tuple[dict, dict[str, dict]]:
    result = json.loads((out / "sweep.json").read_text()) if (out / "sweep.json").exists() else {}
    return result.get("made_by", {}), {row["variant"]: row for row in result.get("rows", [])}


def row(strategy, num_chunks, ratio, peak, status="ok", spread=0.0) -> Row:
    time_ms = None if ratio is None else 10 * ratio
    made = {"status": status, "time_ms": time_ms, "ratio": ratio, "spread": spread, "peak_mib": peak}
    return replace(Row.of(strategy, num_chunks), **made)


# --- the front, the choice -----------------------------------------------------------------------


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


# --- the head ------------------------------------------------------------------------------------


def test_what_a_sweep_writes(tmp_path):
    code, made_by, rows, said = sweep(tmp_path, *BRIEF)
    assert code == 0 and list(rows) == KEYS and rows["auto"]["ratio"] == 1.0
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
    assert f"    {best['flags']}\n" in (text := (tmp_path / "sweep.md").read_text()) and text in said
    assert re.findall(r"(\S.*): checked in [\d.]+ s", said.replace("benchmark: ", "")) == KEYS


def no_room(*sizes, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def without_room(lost, right=loss.of_config):
    def of_config(world, name, config):
        case = right(world, name, config)
        return replace(case, run=no_room) if name in lost else case

    return of_config


def test_out_of_memory_is_a_row(tmp_path, monkeypatch):
    """Ratios are over `auto`, or the last, which needs least."""
    monkeypatch.setattr(loss, "of_config", without_room({"auto"}))
    code, made_by, rows, said = sweep(tmp_path, *BRIEF)
    assert code == 0 and made_by["reference"] == "recompute x 4" and rows["recompute x 4"]["ratio"] == 1.0
    assert [key for key, r in rows.items() if r["status"] != "ok"] == ["auto"]
    lost = rows["auto"]
    assert (lost["status"], lost["time_ms"], lost["on_front"]) == (OUT_OF_MEMORY, None, False)
    assert said.count("| out of memory |") == 1


def wrong_loss(*given, right=loss.loss_of):
    return {"loss": 1.01 * right(*given)["loss"]}


WRONG = {
    "auto is wrong": ("loss_of", wrong_loss, 1),
    "nothing of this package ran to its end": ("of_config", without_room(KEYS), 2),
    "operands alone do not fit": ("OP", replace(loss.OP, problem=no_room), 2),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_swept_is_one_line(tmp_path, monkeypatch, words):
    name, wrong, status = WRONG[words]
    monkeypatch.setattr(loss, name, wrong)
    code, made_by, _, said = sweep(tmp_path, *BRIEF)
    assert code == status and not made_by and words in said.splitlines()[-1], said


def test_two_ranks_with_sequence_parallelism(forks, tmp_path):
    """gloo: one table, the shard's sizes."""
    words = [SCRIPT, *BRIEF, "--sequence-parallel", "--out", tmp_path]
    status, out = forks.launch(words, tmp_path, ranks=range(2), WORLD_SIZE="2")
    assert status == 0, out[-3000:]
    made_by, rows = written(tmp_path)
    assert list(rows) == KEYS and all(r["status"] == "ok" for r in rows.values())
    assert made_by["tp"] == 2 and made_by["sp"] and made_by["V"] == 32
    assert out.count("Recommended on this CPU:") == out.count("Not so on a GPU") == 1


# --- launches ------------------------------------------------------------------------------------

ENDS = "--bf16 --log-interval 1 --eval-iters 0 --exit-interval 5"


def launched(checkout: Path, *words: str, options=()) -> tuple[int, dict, dict[str, dict], str, list[str]]:
    """`sweep`'s, and the words of the launches that it made."""
    (log := checkout.parent / "launches.txt").write_text("")
    given = ["--through-megatron", checkout, "--device", "cpu", "--strategies", "recompute"]
    given += ["--iterations", "5", "--warmup", "2", *options, "--", "--bf16", *words]
    return *sweep(checkout.parent / "out", *given), log.read_text().splitlines()


def test_launches(fake_checkout):
    """A later call keeps what ran."""
    words = ["--cross-entropy-loss-fusion", "--fused-ce-num-chunks", "7", "--fused-ce-merge", "packed"]
    code, made_by, rows, said, made = launched(fake_checkout, *words, options=["--chunks", "1", "4"])
    names = ["auto", "unfused", "native", "recompute x 1", "recompute x 4"]
    assert code == 0 and re.findall(r"^(.+): ok \(\d+ s\)$", said, re.MULTILINE) == list(rows) == names
    assert [r["peak_mib"] for r in rows.values()] == [500.0, 900.0, 900.0, 500.0, 500.0]
    # Without the first two iterations, which take longer.
    assert [r["time_ms"] for r in rows.values()] == pytest.approx([10, 10, 10, 12, 12])
    assert made_by["recommended"]["flags"] == "--fused-chunked-ce"
    fused = [f"{ENDS} {rows[name]['flags']} --fused-ce-merge packed" for name in names]
    assert made[1:3] == [ENDS, f"{ENDS} --cross-entropy-loss-fusion --cross-entropy-fusion-impl native"]
    assert [made[0], *made[3:]] == [fused[0], *fused[3:]] and len(set(fused)) == 4
    assert rows["native"]["error"] == pytest.approx(1e-6 / 4.5, rel=0.05) and not rows["unfused"]["error"]
    code, _, more, said, made = launched(fake_checkout, *words, options=["--chunks", "1", "4", "16"])
    assert code == 0 and said.count("(kept; --fresh launches again)") == 5
    assert [line.split()[-3] for line in made] == ["16"] and list(more.values())[:5] == list(rows.values())
    assert len(launched(fake_checkout, *words, options=["--fresh", "--chunks", "4"])[-1]) == 4


def test_a_launch_that_goes_wrong_is_a_row_and_tried_again(fake_checkout):
    """But the first, which says that Megatron refuses the arguments."""
    words = ["--full=4", "--break=8", "--wrong=16", "--idle=32"]
    code, _, rows, *_ = launched(fake_checkout, *words, options=["--chunks", "2", "4", "8", "16", "32"])
    assert code == 1 and {name: r["status"] for name, r in rows.items() if r["status"] != "ok"} == {
        "recompute x 4": OUT_OF_MEMORY,
        "recompute x 8": "failed: RuntimeError: no kernel for this GPU",
        "recompute x 16": "losses differ from unfused's by 2.2e-02",
        "recompute x 32": "the head was not fused",
    }
    assert not any(r["on_front"] for r in rows.values() if r["status"] != "ok")
    script = fake_checkout / "pretrain_gpt.py"
    script.write_text(script.read_text().replace('raise RuntimeError("no kernel', '("'))
    code, _, _, _, made = launched(fake_checkout, *words, options=["--chunks", "2", "4", "8"])
    assert code == 0 and len(made) == 1
    code, _, _, said, made = launched(fake_checkout, "--refused")
    assert code == 2 and "unrecognized arguments: --refused" in said.splitlines()[-1] and len(made) == 1
