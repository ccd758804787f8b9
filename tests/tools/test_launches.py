"""Tools that launch Megatron-LM, here a script that logs as it does: what is launched, judged, kept."""

from __future__ import annotations

import re
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_fused_ce.scripts.lib import gpu, launches
from megatron_fused_ce.scripts.runs import compare, pretrain, sweep

ENDS = "--bf16 --log-interval 1 --eval-iters 0 --exit-interval 5"


@pytest.fixture
def launched(ran, fake_checkout, monkeypatch):
    """`ran` of a tool's name, its options and what stands behind the --."""
    monkeypatch.setenv("FUSED_CE_COMMIT", "0" * 40)  # one that somebody makes meanwhile keeps no launch
    through = ["--device", "cpu", "--strategies", "recompute", "--iterations", "5", "--warmup", "2"]
    script = sys.executable, fake_checkout / "pretrain_gpt.py"
    tools = {
        "sweep": (sweep.main, [*through, "--through-megatron", fake_checkout], ["--bf16"]),
        "pretrain": (pretrain.main, ["--megatron", fake_checkout], []),
        "compare": (compare.main, ["--launch"], [*script, "--fused-ce-num-chunks", "3", "--bf16"]),
    }

    def run(tool, options, words=""):
        main, own, more = tools[tool]
        return ran(main, *own, *options.split(), "--", *more, *words.split())

    return run


def test_sweep(launched):
    """A later call keeps what ran."""
    words = "--cross-entropy-loss-fusion --fused-ce-num-chunks 7 --fused-ce-merge packed"
    done, made_by, rows, made = launched("sweep", "--chunks 1 4", words)
    names = ["auto", "unfused", "native", "recompute x 1", "recompute x 4"]
    assert done.returncode == 0
    assert re.findall(r"^(.+): ok \(\d+ s\)$", done.stdout, re.MULTILINE) == list(rows) == names
    assert [r["peak_mib"] for r in rows.values()] == [500.0, 900.0, 900.0, 500.0, 500.0]
    # Without the first two iterations, which take longer.
    assert [r["time_ms"] for r in rows.values()] == pytest.approx([10, 10, 10, 12, 12])
    assert made_by["recommended"]["flags"] == "--fused-chunked-ce"
    fused = [f"{ENDS} {rows[name]['flags']} --fused-ce-merge packed" for name in names]
    assert made[1:3] == [ENDS, f"{ENDS} --cross-entropy-loss-fusion --cross-entropy-fusion-impl native"]
    assert [made[0], *made[3:]] == [fused[0], *fused[3:]] and len(set(fused)) == 4
    assert rows["native"]["error"] == pytest.approx(1e-6 / 4.5, rel=0.05) and not rows["unfused"]["error"]
    done, _, more, made = launched("sweep", "--chunks 1 4 16", words)
    assert done.returncode == 0 and done.stdout.count("(kept; --fresh launches again)") == 5
    assert [line.split()[-3] for line in made] == ["16"] and list(more.values())[:5] == list(rows.values())
    assert len(launched("sweep", "--fresh --chunks 4", words)[-1]) == 4


def test_pretrain(launched, fake_checkout, monkeypatch):
    """Out of memory is a result, and ends a variant's lengths. A second call launches nothing. An idle GPU's
    clock is not read."""
    monkeypatch.setattr(launches, "POLL_S", 0.01)
    monkeypatch.setattr(gpu, "readings", [])
    readings = {"utilization": (3, 90), "clock_rate": (345, 1500), "power_draw": 2 * (500_000,)}
    for name, values in (readings | {"temperature": (60, 60)}).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, values=values: values[device])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words, names = "--device=cuda --nproc=4 --model=llama-3-8b:2", ("unfused", "auto", "te-lifted")
    words += f" --lengths 131072 16384 262144 --variants={','.join(names)}"
    _, made_by, rows, _ = launched("pretrain", words, "--most-tokens 100000")
    assert [*rows] == [(name, length) for length in (131072, 16384, 262144) for name in names]
    lost = ["out of memory", "ok", "not tried: out of memory at 131072 tokens"]
    assert [row["status"] for row in rows.values() if row["variant"] == "auto"] == lost
    off, on, lifted = (rows[name, 16384] for name in names)
    assert (off["peak_mib"], on["peak_mib"]) == (900.0, 500.0)
    assert on["tokens_per_s"] == pytest.approx(16384e3 / on["time_ms"], abs=0.1)
    assert (off["sm_mhz"], off["watts"], made_by["gpu"]["celsius"]) == (1500, 500, [60, 60, 60])
    assert on["loss_difference"] == 0 and str(fake_checkout) not in on["command"]
    long, short = (rows["auto", length]["command"].split() for length in (131072, 16384))
    assert long[:5] == ["torchrun", "--nproc-per-node", "4", "-m", "megatron_fused_ce.launch"]
    # 128256 is not a multiple of 128 * 4, which Megatron would pad to.
    given = {"--seq-length": "131072", "--train-iters": "4", "--num-layers": "2"}
    given |= {"--tensor-model-parallel-size": "4", "--make-vocab-size-divisible-by": "32"}
    assert given.items() <= dict(pairwise(long)).items() and dict(pairwise(short))["--train-iters"] == "20"
    assert {"--bf16", "--sequence-parallel", launches.UNTIED, "--most-tokens"} <= set(long)
    assert "4 scripts/lib/runner.py --te-loss MEGATRON_LM/pretrain_gpt.py " in lifted["command"]
    assert lifted["command"].endswith("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    done, *_, made = launched("pretrain", words, "--most-tokens 100000")
    assert done.stdout.count("(kept)") == 4 and not made, done.stdout + done.stderr


def test_compare(launched):
    done, made_by, *_ = launched("compare", "--noise", "--lr 1e-3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^launch (\w+): \d+ s, logs in ", done.stdout, re.MULTILINE) == ["off", "on", "noise"]
    assert made_by["runs"]["on"]["heads"][0] == 12 and made_by["runs"]["noise"]["iterations"] == [1, 12]
    # Again, into the same folder.
    done, *_, made = launched("compare", "--seeds 1 2 3", "--wrong")
    assert done.returncode == 1 and "DIFFERENT" in done.stdout and not done.stderr
    assert made[4].endswith("--fused-chunked-ce --seed 2")


#: Tool, its options, what the launches get: exit status, what is said.
WRONG = """
sweep --chunks 2 -- --full: 0, recompute x 2: out of memory (
sweep --chunks 2 -- --break: 1, recompute x 2: failed: RuntimeError: no kernel for this GPU (
sweep --chunks 2 -- --wrong: 1, losses differ from unfused's by 2.2e-02
sweep --chunks 2 -- --idle: 1, recompute x 2: the head was not fused (
sweep --chunks 2 -- --seq-length 9 --most-tokens 8: 2, nothing of this package ran to its end
sweep --chunks 2 -- --refused: 2, unrecognized arguments: --refused
pretrain -- --right: 0, | yes |
pretrain -- --wrong: 1, loss differs by 2.2e-02, bound 1.0e-06 |
pretrain -- --wrong --native-nan: 1, loss differs by 2.2e-02, bound 1.0e-06 |
pretrain -- --wrong --native-wrong: 0, | yes |
pretrain -- --norm: 1, | grad norm differs by 1.0e-03, bound 1.0e-05 |
pretrain -- --nan: 1, | a loss is not finite; loss differs
pretrain -- --short: 1, | ended after 4 of 5 iterations
pretrain -- --idle: 1, | heads fused: None, materialised: None |
pretrain -- --stored: 1, | heads fused: 5, materialised: 1 |
pretrain -- --full: 0, | out of memory |
pretrain -- --break: 1, | failed RuntimeError: no kernel for this GPU |
compare -- --break: 2, failed with status 1: RuntimeError: no kernel for this GPU
compare -- --idle: 2, evaluated no head fused
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_launches_that_go_wrong(launched, row):
    """Twice native's difference is the bound; a native run that broke is none. What failed is tried again."""
    line, came = row.split(": ", 1)
    own, words = line.split("-- ", 1)
    tool, _, options = own.partition(" ")
    options += " --nproc=1 --variants=unfused,native,recompute" * (tool == "pretrain")
    done, _, rows, _ = launched(tool, options, words)
    status, said = came.split(", ", 1)
    printed = done.stderr if status == "2" else done.stdout
    assert done.returncode == int(status) and said in printed, done.stdout + done.stderr
    assert status != "2" or len(done.stderr.splitlines()) == 1
    assert not any(r.get("on_front") for r in rows.values() if r.get("status", "ok") != "ok")
    if tool != "compare":
        assert len(launched(tool, options, words)[-1]) == (words in ("--break", "--refused"))


#: torchrun gives each rank a session of its own: killing the launcher's group spares them.
RANK = """'trap "" TERM; echo " iteration $$/ 9 | lm loss: 1.0 |"; exec sleep 99'"""


def test_a_launch_that_does_not_end(tmp_path, monkeypatch):
    """Its ranks are ended with it."""
    monkeypatch.setattr(launches, "POLL_S", 0.1)
    told, started = [], launches.start(["bash", "-c", f"setsid bash -c {RANK} & wait"], tmp_path / "run")
    assert started.finish(3.0, told.append).status == "timed out after 3 s" and len(told) == 1
    rank = Path(f"/proc/{re.findall('[0-9]+', told[0])[0]}/stat")
    until = time.monotonic() + 15
    while rank.exists() and " Z " not in rank.read_text():
        assert time.monotonic() < until, "the rank outlived its launch"


#: What stands before a script -> what does with the flag.
RUNNERS = {before: f"{before} -m megatron_fused_ce.launch" for before in ("", "-m torch.distributed.run")}
RUNNERS |= {before: before for before in ("-m megatron_fused_ce.launch", "-m my.runner --fused-wgrad")}


@pytest.mark.parametrize("before", RUNNERS)
def test_the_flag_and_nothing_else_differs(before):
    plugin, native = "--fused-ce-strategy grad_in_forward --fused-chunked-ce", launches.STOCK["native"]
    words = f"torchrun {before} {__file__} --bf16 {plugin} --lr 1e-3"
    command = launches.Command.of(words.split())
    assert command.off() == words.replace(plugin, "").split()
    assert command.on() == f"torchrun {RUNNERS[before]} {__file__} --bf16 --lr 1e-3 {plugin}".split()
    assert command.other_stock() == [*command.off(), *native.split()]
    assert native not in " ".join(launches.Command.of(f"{words} {native}".split()).other_stock())
