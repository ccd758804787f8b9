"""scripts/runs/pretrain.py: what it launches and judges, what ends a launch; the logs that it reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megatron_fused_ce.scripts.lib import gpu, launches, results
from megatron_fused_ce.scripts.runs import pretrain
from tests.support.commands import run_here


def pretrained(checkout, *words, more=()):
    """What the tool says, and its rows."""
    out = checkout.parent / "out"
    done = run_here(pretrain.main, f"--megatron={checkout}", f"--out={out}", *words, "--", *more)
    return done, results.rows(out / "results.json")


def test_launches_in_their_order(fake_checkout):
    words = ("--device=cuda", "--nproc=4", "--variants=auto,te-lifted", "--lengths", "131072", "16384")
    _, rows = pretrained(fake_checkout, *words, "--model=llama-3-8b:2", more=["--last"])
    found = [(row["T"], row["variant"]) for row in rows]
    assert found == [(length, name) for length in (131072, 16384) for name in ("auto", "te-lifted")]
    long, lifted, short, _ = (row["command"].split() for row in rows)
    assert long[:5] == ["torchrun", "--nproc-per-node", "4", "-m", "megatron_fused_ce.launch"]
    # 128256 is not a multiple of 128 * 4, which Megatron would pad to.
    given = {"--seq-length": "131072", "--train-iters": "4", "--num-layers": "2"}
    given |= {"--tensor-model-parallel-size": "4", "--make-vocab-size-divisible-by": "32"}
    assert given.items() <= dict(pairwise(long)).items() and dict(pairwise(short))["--train-iters"] == "20"
    assert {"--bf16", "--sequence-parallel", launches.UNTIED, "--last"} <= set(long)
    assert "4 scripts/lib/runner.py --te-loss MEGATRON_LM/pretrain_gpt.py " in rows[1]["command"]
    assert lifted[-3:] == ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]


def test_from_command_line_to_files(fake_checkout, monkeypatch):
    """Out of memory is a result, and ends a variant's lengths. A second call launches nothing. An idle GPU's
    clock is not read."""
    monkeypatch.setattr(launches, "POLL_S", 0.01)
    monkeypatch.setattr(gpu, "readings", [])
    readings = {"utilization": (3, 90), "clock_rate": (345, 1500), "power_draw": 2 * (500_000,)}
    for name, values in (readings | {"temperature": (60, 60)}).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, values=values: values[device])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = ("--device=cuda", "--nproc=1", "--model=tiny", "--lengths", "128", "64", "256")
    words += ("--variants=unfused,auto",)
    more = ("--most-tokens", "100", "--train-iters", "8")
    done, rows = pretrained(fake_checkout, *words, more=more)
    assert done.returncode == 0, done.stdout + done.stderr
    lost = ["out of memory", "ok", "not tried: out of memory at 128 tokens"]
    assert [row["status"] for row in rows if row["variant"] == "unfused"] == lost
    _, _, off, on, *_ = rows
    assert (off["T"], off["peak_mib"], on["peak_mib"], on["problems"]) == (64, 900.0, 500.0, [])
    assert on["tokens_per_s"] == pytest.approx(64e3 / on["time_ms"], abs=0.1) and on["loss_difference"] == 0
    assert (off["sm_mhz"], off["watts"], off["gpu"]["celsius"]) == (1500, 500, [60, 60, 60])
    assert str(fake_checkout) not in off["command"]
    (fake_checkout / "pretrain_gpt.py").write_text("raise SystemExit('launched again')")
    again, _ = pretrained(fake_checkout, *words, more=more)
    assert again.returncode == 0 and again.stdout.count("(kept)") == 4, again.stdout + again.stderr


#: What goes wrong -> what is said of it.
PROBLEMS = {
    "right": None,
    "wrong": "loss differs by 2.2e-02, bound 1.0e-06",
    "norm": "grad norm differs by 1.0e-03, bound 1.0e-05",
    "nan": "a loss is not finite",
    "short": "ended after 4 of 5 iterations",
    "idle": "heads fused: None, materialised: None",
    "stored": "heads fused: 5, materialised: 1",
    "break": "failed RuntimeError: no kernel for this GPU",
}


@pytest.mark.parametrize("native", ["", "--native-nan", "--native-wrong"])
def test_what_does_not_count_as_training(fake_checkout, monkeypatch, native):
    """Twice native's difference is the bound; a native run that broke is none."""
    for name in PROBLEMS:
        words = f"--fused-chunked-ce --fused-ce-num-chunks 4 --{name}"
        monkeypatch.setitem(pretrain.MORE_VARIANTS, name, words)
    monkeypatch.setitem(pretrain.VARIANTS, "native", f"{launches.STOCK['native']} {native}")
    done, rows = pretrained(fake_checkout, "--nproc=1", f"--variants=unfused,native,{','.join(PROBLEMS)}")
    found = {row["variant"]: row["problems"] for row in rows}
    assert done.returncode == 1
    for name, problem in (PROBLEMS | ({"wrong": None} if native == "--native-wrong" else {})).items():
        assert found[name][:1] == ([problem] if problem else []), name
        assert not problem or problem in done.stdout
