"""What ``plan`` says: every sentence is true where it stands, and gone in a neighbour case."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest

from megatron_fused_ce.plan import answer, command
from megatron_fused_ce.plan.answer import SENTENCES, WORTH, sentences
from megatron_fused_ce.plan.command import plan_of
from megatron_fused_ce.plan.named_models import MODELS

ROOT = Path(__file__).resolve().parents[2]
EITHER = f"--from-launch {ROOT}/scripts/examples/llama3_8b.sh"
LONG = "--model llama-3.2-1b --gpu h200 --seq-length 131072 --recompute-granularity full"
HALF = LONG.replace("131072", "65536")
GEMMA = "--model gemma-3-27b --gpus 64 --tp 4 --seq-length 8192"
WHOLE = "--model qwen2.5-14b --gpus 8 --seq-length 8192"
DIVIDED = f"{WHOLE} --tp 4 --sequence-parallel"
BUDGET = "--model llama-3-8b --gpus 8 --tp 4 --sequence-parallel --seq-length 32768 --fused-ce-memory-mb"
#: The step is the peak, with weight gradients in bf16.
STEP = "--model llama-3-8b --gpus 2 --seq-length 512 --gpu-memory 400 --grad-reduce-in-bf16"
LAUNCH = f"--from-launch '{MODELS['llama-3.2-1b'].arguments} --seq-length 4096 --bf16 {{}}' --gpus 4"
FP8 = LAUNCH.format("--fp8-format hybrid")
#: Logs: as planned, and out of memory.
LOG = "--from-log {log} --gpu h200"
DIED = "--from-log {died} --gpu h200"
#: Each sentence by its name: a plan that says it, and a neighbour that does not.
CASES = {
    "use": (HALF, EITHER),
    "needed": (LONG, HALF),
    "either": (EITHER, HALF),
    "leave out": (STEP, DIVIDED),
    "does not fit": (WHOLE, DIVIDED),
    "no verdict": (FP8, LAUNCH.format("")),
    "no effect": (LAUNCH.format("--logits-load-dir x"), FP8),
    "vouch": (FP8, f"{FP8} --ignore fp8-format"),
    "vouched": (f"{FP8} --ignore fp8-format", FP8),
    "bounded": (LAUNCH.format("--load x"), LAUNCH.format("--load x --use-distributed-optimizer")),
    "tight": (LONG, HALF),
    "recompute": (GEMMA, f"{GEMMA} --recompute-granularity full"),
    "budget": (f"{BUDGET} 10", f"{BUDGET} 416"),
    "measured": (LOG, f"{LOG} --micro-batch-size 2"),
    "measured alone": ("--from-log {fp8} --gpu h200", "--from-log {fp8} --gpu h200 --ignore fp8-format"),
    "how": (EITHER, LONG),
    "setting": (WHOLE, DIVIDED),
    "batch": (WHOLE, DIVIDED),
}  # fmt: skip


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Path]:
    """As Megatron prints them; tests/plan/test_megatron_log.py has the ways in which one reaches a file."""
    words = f"{MODELS['llama-3.2-1b'].arguments} --seq-length 4096 --bf16"
    planned = plan_of(["--from-launch", words, "--gpus", "1"]).planned / 2**20
    values = vars(command._parser(own=False).parse_args(words.split())) | {"world_size": 1}
    block = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    begin, end = f"{'-' * 24} arguments {'-' * 24}", f"{'-' * 20} end of arguments {'-' * 21}"
    behind = {
        "log": f"memory (MB) | allocated: 10.5 | max allocated: {1.03 * planned:.1f} | reserved: 9 |",
        "died": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    }
    folder = tmp_path_factory.mktemp("logs")
    for name, line in behind.items():
        (folder / name).write_text("\n".join([begin, *block, end, line, ""]))
    fp8 = f"  fp8 {'.' * 45} hybrid"
    (folder / "fp8").write_text("\n".join([begin, *block, fp8, end, behind["log"], ""]))
    return {name: folder / name for name in (*behind, "fp8")}


@functools.cache
def planned(words: str) -> answer.Result:
    return plan_of(shlex.split(words))


def said(words: str, logs: dict[str, Path]) -> dict[str, str]:
    return {one.name: one.text for one in sentences(planned(words.format(**logs)), explain=True)}


def test_every_sentence_has_a_case():
    assert set(CASES) == set(SENTENCES)


@pytest.mark.parametrize("name", CASES)
def test_a_sentence_stands_where_it_is_true_alone(name, logs):
    here, there = (said(words, logs) for words in CASES[name])
    assert name in here
    assert here[name] not in there.values()
    if name not in ("setting", "batch", "how"):  # always said
        assert name not in there


def test_no_other_sentence_exists(capsys, monkeypatch, logs):
    """What is printed outside the tables are the sentences that hold, the answer first, and the notes."""
    patterns = {name: re.sub(r"\\{.*?\\}", ".+", re.escape(text)) for name, text in SENTENCES.items()}
    decisions = set(list(SENTENCES)[: list(SENTENCES).index("setting")])
    for words in {case.format(**logs) for pair in CASES.values() for case in pair}:
        result = planned(words)
        monkeypatch.setattr(command, "plan_of", lambda again, result=result: result)
        names = [one.name for one in sentences(result, explain=True)]
        assert names[0] in decisions and not set(names[1:]) & decisions, words
        for one in sentences(result, explain=True):
            assert re.fullmatch(patterns[one.name], one.text), one
        assert command.main(shlex.split(words)) == (3 if names[0] == "no verdict" else 0)
        out = capsys.readouterr().out
        printed = out.partition("\nWays of computing")[0] + out.rpartition("\n         ")[2]
        texts = [*(one.text for one in sentences(result)), *result.notes]
        assert printed.split() == " ".join(texts).split()
        assert len(out.splitlines()) <= 24, "one screen"


@pytest.mark.parametrize("words", [EITHER, LONG, WHOLE, f"{BUDGET} 416", CASES["no verdict"][0]])
@pytest.mark.parametrize("explain", ["", "--explain"])
def test_nothing_is_wider_than_a_terminal(words, explain, capsys):
    """And what is in a table is not cut off."""
    assert command.main([*shlex.split(words), *explain.split()]) in (0, 3)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= answer.WIDTH
    assert "…" not in out
    sums = "GiB a GPU while at work is" in out
    assert sums == (bool(explain) and "no verdict" not in out)
    assert ("--fused-chunked-ce, recompute " in out) == bool(explain)


def test_the_flag_is_recommended_for_what_it_saves():
    """At the threshold: a twentieth of the peak. A smaller model has the same head and a smaller peak."""
    parts = {}
    for layers in range(1, 33):
        words = f"--model llama-3-8b --num-layers {layers} --gpus 8 --seq-length 4096 --gpu h200"
        advice = planned(words).advice
        part = advice.saved / advice.baseline.peak
        assert advice.decision == ("use" if part >= WORTH else "either")
        parts[advice.decision] = part
    assert parts["use"] > WORTH > parts["either"]


def test_what_is_not_known_takes_the_verdict_alone(logs):
    """The table then has the heads. A run that died where more is planned than there is, is not doubted;
    test_megatron_log.py has one that died where it is planned to fit."""
    result, counted = map(planned, CASES["no verdict"])
    assert [way.head for way in result.advice.ways] == [way.head for way in counted.advice.ways]
    died = planned(f"{DIED.format(**logs)} --micro-batch-size 64")
    assert sentences(died)[0].text.startswith("The run ended out of memory. ") and not died.doubts


def test_both_ends_of_what_is_bounded_agree_or_there_is_no_verdict():
    """One GPU between the even spread's peak and that of twice the tokens."""
    words = "--from-launch '{} --seq-length 32768 --bf16 --ep 8 --use-distributed-optimizer' --gpus 8"
    words = words.format(MODELS["qwen3-30b-a3b"].arguments)
    result = planned(words)
    assert set(result.judged.bounded) == {"experts"}
    low, high = result.advice.baseline.peak, result.most.baseline.peak
    assert high > 1.01 * low
    for memory, doubted in ((low / 2, False), ((low + high) / 2, True), (2 * high, False)):
        gib = memory / answer.GIB + command.OVERHEAD_GIB
        assert bool(planned(f"{words} --gpu-memory {gib}").doubts) == doubted


def test_a_measured_peak_moves_every_sum(logs):
    result = planned(LOG.format(**logs))
    plain = plan_of(
        shlex.split(f"--from-launch '{MODELS['llama-3.2-1b'].arguments} --seq-length 4096 --bf16'")
    )
    assert result.now.peak == pytest.approx(result.measured, abs=1)
    moved = result.measured - plain.now.peak
    assert [way.peak for way in result.advice.ways] == [way.peak + moved for way in plain.advice.ways]
