"""What ``plan`` says: every sentence is true where it stands, and gone in a neighbour case."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fused_ce.estimate import answer, command, report, search
from megatron_fused_ce.estimate.advice import DECISIONS, WORTH, recommended_way, stock_way
from megatron_fused_ce.estimate.answer import SENTENCES, gib, sentences
from megatron_fused_ce.estimate.command import plan_of, setting_of
from megatron_fused_ce.estimate.named_models import MODELS
from megatron_fused_ce.scripts.lib import results

ROOT = Path(__file__).resolve().parents[2]
SMALL = f"--from-launch {ROOT}/scripts/examples/llama3_8b.sh"
LARGE = f"--from-launch {ROOT}/scripts/examples/llama3_70b.sh"
LONG = "--model llama-3.2-1b --gpu h200-141gb --seq-length 131072 --recompute-granularity full"
HALF = LONG.replace("131072", "65536")
WHOLE = "--model qwen2.5-14b --gpus 8 --seq-length 8192"
DIVIDED = f"{WHOLE} --tp 4 --sequence-parallel"
ALONE = "--model llama-3-8b --seq-length 8192"
BUDGET = "--model llama-3-8b --gpus 8 --tp 4 --sequence-parallel --seq-length 32768 --fused-ce-memory-mb"
#: Weight gradients in bf16, which the flag sums in fp32, and few tokens.
SHORT = "--model llama-3-8b --gpus 8 --seq-length 1024 --grad-reduce-in-bf16 --cross-entropy-loss-fusion"
SHORT += " --cross-entropy-fusion-impl te --gpu-memory {}"
TINY = "--model llama-3.2-1b --seq-length 8192 --gpus 4096 --gpu-memory {}"
#: A log, which does not say its GPUs a node: in memory that does not hold it, with a peak, died.
LOG = "--from-log {log} --gpu h200-141gb"
#: Each sentence by its name: a plan that says it, and a neighbour that does not.
CASES = {
    "use": (SMALL, LARGE),
    "needed": (LONG, HALF),
    "leave out": (LARGE, SMALL),
    "does not fit": (WHOLE, DIVIDED),
    "tight": (LONG, HALF),
    "place": (SMALL, LARGE),
    "places": (LONG, SMALL),
    "place of no loss": (LARGE, SMALL),
    "little": (LARGE, SMALL),
    "more": (SHORT.format(60), SHORT.format(200)),
    "speed": (LARGE, f"{LARGE} --gpu a100-80gb"),
    "how": (SMALL, LARGE),
    "budget": (f"{BUDGET} 10", f"{BUDGET} 416"),
    "longest": (SMALL, WHOLE),
    "lever": (SMALL, WHOLE),
    "none here": (ALONE, f"{ALONE} --gpus 8"),
    "none": (TINY.format(2.1), TINY.format(4)),
    "fits both": (WHOLE, DIVIDED),
    "fits with": (ALONE, f"{ALONE} --gpus 8"),
    "fits without": (LONG, HALF),
    "tried": (WHOLE, DIVIDED),
    "ask node": (f"{LOG} --gpu-memory 20", f"{LOG} --gpu-memory 20 --gpus-per-node 8"),
    "measured": (LOG, f"{LOG} --micro-batch-size 2"),
    "measured before": (f"{LOG} --micro-batch-size 2", LOG),
    "died": (LOG, SMALL),
    "setting": (WHOLE, DIVIDED),
    "batch": (WHOLE, DIVIDED),
    "memory": (SMALL, f"{SMALL} --overhead 1"),
    "not measured": (f"{SMALL} --tp 8", SMALL),
}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """As Megatron prints it; tests/tools/test_megatron_log.py has the ways in which it reaches a file."""
    words = f"{MODELS['llama-3.2-1b'].arguments} --seq-length 4096 --bf16"
    values = vars(command._parser(own=False).parse_args(words.split())) | {"world_size": 1}
    block = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    peak = (
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 10.5 | max allocated: 500.0 | reserved: 9 |"
    )
    died = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    begin, end = f"{'-' * 24} arguments {'-' * 24}", f"{'-' * 20} end of arguments {'-' * 21}"
    path = tmp_path_factory.mktemp("logs") / "train.log"
    path.write_text("\n".join([begin, *block, end, peak, died, ""]))
    return path


@functools.cache
def planned(words: str) -> answer.Result:
    return plan_of(shlex.split(words))


def said(words: str, log: Path) -> dict[str, str]:
    return {one.name: one.text for one in sentences(planned(words.format(log=log)))}


def test_every_sentence_has_a_case():
    assert set(CASES) == set(SENTENCES)


@pytest.mark.parametrize("name", CASES)
def test_a_sentence_stands_where_it_is_true_alone(name, log):
    here, there = (said(words, log) for words in CASES[name])
    assert name in here
    assert here[name] not in there.values()
    if name not in ("setting", "batch", "memory"):
        assert name not in there


def test_no_other_sentence_exists(capsys, monkeypatch, log):
    """What is printed before the first table are the sentences that hold, the answer first, and the notes."""
    patterns = {name: re.sub(r"\\{.*?\\}", ".+", re.escape(text)) for name, text in SENTENCES.items()}
    for words in {case.format(log=log) for pair in CASES.values() for case in pair}:
        result = planned(words)
        monkeypatch.setattr(command, "plan_of", lambda again, result=result: result)
        names = [one.name for one in sentences(result)]
        assert names[0] in DECISIONS and not set(names[1:]) & set(DECISIONS), words
        for one in sentences(result):
            assert re.fullmatch(patterns[one.name], one.text), one
        assert command.main(shlex.split(words)) == 0
        printed = capsys.readouterr().out.partition("\nWays of computing")[0].split()
        assert printed == " ".join([*(one.text for one in sentences(result)), *result.notes]).split()


@pytest.mark.parametrize("words", [SMALL, LARGE, LONG, WHOLE, ALONE, f"{BUDGET} 416"])
@pytest.mark.parametrize("detail", ["", "--detail"])
def test_nothing_is_wider_than_a_terminal(words, detail, capsys):
    """And what is in a table is not cut off."""
    assert command.main([*shlex.split(words), *detail.split()]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= report.WIDTH
    assert "…" not in out


def test_the_answer_is_one_line():
    for words in (SMALL, LARGE, LONG, WHOLE):
        assert len(next(report.lines(plan_of(shlex.split(words))))) <= report.WIDTH
        first = next(iter(sentences(plan_of(shlex.split(words)))))
        assert len(first.text) <= report.WIDTH


@pytest.mark.parametrize(
    ("flag", "marked"), [("", "Megatron, unfused"), (" --fused-chunked-ce", "--fused-chunked-ce")]
)
def test_the_launchs_own_loss_is_marked(flag, marked, capsys):
    command.main(shlex.split(WHOLE + flag))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "(now)" in line)
    assert row.strip().startswith(marked)


def test_detail_has_the_sums(capsys):
    command.main(shlex.split(SMALL))
    short = capsys.readouterr().out
    command.main([*shlex.split(SMALL), "--detail"])
    long = capsys.readouterr().out
    for title in ("Held all the time", "Without the flag (unfused)", "With the flag (auto)"):
        assert title in long and title not in short
    for strategy in ("store", "grad_in_forward", "recompute"):
        assert f"--fused-chunked-ce, {strategy} " in long and f"--fused-chunked-ce, {strategy} " not in short


def test_the_flag_is_recommended_for_what_it_saves():
    """At the threshold: a hundredth of the GPU."""
    words = shlex.split("--model llama-3-8b --gpus 8 --tp 4 --sequence-parallel --seq-length 4096")
    saved = plan_of(words).advice.saved
    overhead = command.OVERHEAD_GIB
    for part, decision in ((0.999, "leave out"), (1.001, "use")):
        memory = saved / (WORTH * part) / answer.GIB + overhead
        advice = plan_of([*words, "--gpu-memory", str(memory)]).advice
        assert (advice.baseline.verdict, advice.decision) == ("fits", decision), part


def test_what_speed_is_told_was_measured():
    rows = results.rows(ROOT / results.RESULTS / "2026-11-21-h200-reach-llama3-8b.json")
    names = {"unfused": "megatron-unfused", "native": "megatron-native", "te": "megatron-te", "flag": "store"}
    for name, variant in names.items():
        at = [
            row
            for row in rows
            if row["variant"] == variant and (row["T"], row["H"], row["V"]) == answer.MEASURED_AT
        ]
        assert min(row["time_ms"] for row in at) == pytest.approx(answer.MEASURED_MS[name], abs=0.05)
    assert (ROOT / answer.MEASURED_IN).is_file()


# --- the longest sequence --------------------------------------------------------------------


def test_the_asked_sequence_may_be_the_longest():
    """Between two multiples of the step, with room for hardly a token more."""
    words = ["--model", "llama-3.2-1b", "--seq-length", "5000"]
    way = plan_of(words).advice.recommended
    memory = way.peak / answer.GIB + command.OVERHEAD_GIB + 0.01
    assert plan_of([*words, "--gpu-memory", str(memory)]).advice.recommended.longest == 5000


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 64), st.integers(16, 80), st.sampled_from(["llama-3.2-1b", "qwen3-0.6b", "gemma-2-2b"]))
def test_the_longest_sequence_does_not_depend_on_the_asked_one(kilos, memory, model):
    def longest(tokens: int) -> dict[str, int]:
        words = ["--model", model, "--seq-length", str(tokens), "--gpu-memory", str(memory)]
        return {way.head.name: way.longest for way in plan_of(words).advice.ways if way.verdict == "fits"}

    here, at_1024 = longest(1024 * kilos), longest(1024)
    for name, found in here.items():
        assert found >= 1024 * kilos
        # A longer sequence may fit where a shorter one does not; never less is said than was asked.
        assert found == at_1024[name] or found == 1024 * kilos


# --- the search ------------------------------------------------------------------------------

GPUS = "h100-80gb"
_SETTINGS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            ["llama-3.2-1b", "qwen3-0.6b", "llama-3-8b", "gemma-3-1b", "qwen3-30b-a3b", "moonlight-16b-a3b",
             "nemotron-h-8b", "glm-4.5-air"]
        ),
        "gpus": st.sampled_from([2, 4, 6, 8]),
        "length": st.sampled_from([1024, 4096, 8192, 32768, 131072]),
        "tensor": st.sampled_from([1, 1, 2, 4]),
        "recompute": st.sampled_from(["", "selective", "full"]),
        "sharding": st.sampled_from([True, True, False]),
        "loss": st.sampled_from(["", "--cross-entropy-loss-fusion"]),
        # Of the peak without the flag: what is usable, so that there is something to look for.
        "part": st.sampled_from([0.3, 0.5, 0.7, 0.85, 0.95, 1.2]),
        "batch": st.sampled_from([None, None, 8, 12]),
    }
)  # fmt: skip


def _words(drawn: dict) -> list[str]:
    """A launch's words, so that Megatron's defaults hold and not those of a named model."""
    words = f"{MODELS[drawn['model']].arguments} --seq-length {drawn['length']} --bf16 {drawn['loss']}"
    words += f" --tensor-model-parallel-size {drawn['tensor']} --sequence-parallel --attention-dropout 0"
    words += " --hidden-dropout 0 --no-create-attention-mask-in-dataloader"
    if drawn["recompute"]:
        words += f" --recompute-granularity {drawn['recompute']}"
    if drawn["sharding"]:
        words += " --use-distributed-optimizer"
    if drawn["batch"]:
        words += f" --global-batch-size {drawn['batch']}"
    launch = ["--from-launch", words, "--gpus", str(drawn["gpus"])]
    peak = plan_of(launch).advice.baseline.peak / answer.GIB
    return [*launch, "--gpu-memory", f"{drawn['part'] * peak + command.OVERHEAD_GIB:.3f}"]


def _cheaper(words: list[str], gpus: int, below: float) -> dict[str, search.Setting]:
    """Every setting of the docs' list that costs less than ``below``, by the flags that make it.

    Written apart from search.py, from what docs/plan.md says of the space.
    """
    asked, cost = setting_of(words), search.COSTS
    was, training = asked.parallel, asked.training
    powers = [1, 2, 4, 8]

    def steps(name: str, size: int, before: int) -> float:
        return cost[name] * abs(math.log2(size / before))

    recomputes = [("", 0)]
    if not training.recompute.full:
        modules = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        recomputes.append((modules, cost["full"]))
        names = ["moe" if asked.model.mixture else "", "mla_up_proj" if asked.model.latent else ""]
        mixed = asked.model.mixture and all(asked.model.mixture.layers)
        names.append("" if mixed else "mlp")
        kept = {*training.recompute.modules, *filter(None, names)}
        order = [name for name in search.RECOMPUTE_MODULES if name in kept]
        recomputes.append(
            (f"--recompute-granularity selective --recompute-modules {' '.join(order)}", cost["selective"])
        )
    optimizers = [("", 0)]
    if training.optimizer.sharding == "none":
        optimizers.append(("--use-distributed-optimizer", cost["optimizer"]))
    found = {}
    experts = powers if asked.model.mixture else [1]
    for tensor, pipeline, context, expert in itertools.product(powers, range(1, gpus + 1), powers, experts):
        if gpus % (tensor * pipeline * context) or pipeline > asked.model.num_layers:
            continue
        last = asked.model.num_layers - (pipeline - 1) * -(-asked.model.num_layers // pipeline)
        if last < 1:
            continue
        if context > 1 and asked.training.sequence % (2 * context):
            continue
        if (space := asked.model.state_space) and space.num_heads % (tensor * context):
            continue
        layout = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
        layout += f" --context-parallel-size {context} --expert-model-parallel-size {expert} --gpus {gpus}"
        if asked.model.num_layers % pipeline:
            layout += f" --decoder-last-pipeline-num-layers {last}"
        price = steps("tensor", tensor, was.tensor) + steps("pipeline", pipeline, was.pipeline)
        price += steps("context", context, was.context) + steps("expert", expert, was.expert)
        for (how, more), (optimizer, further) in itertools.product(recomputes, optimizers):
            flags = f"{layout} {how} {optimizer}"
            if price + more + further < below - 1e-9:
                with contextlib.suppress(ValueError):
                    found[flags] = setting_of([*words, *flags.split()])
    return found


@settings(max_examples=40, deadline=None)
@given(_SETTINGS)
def test_what_is_said_to_fit_fits_and_nothing_cheaper_does(drawn):
    try:
        words = _words(drawn)
    except ValueError:  # heads or a batch that these GPUs do not divide
        return
    _holds(words)


def _holds(words: list[str]) -> None:
    result = plan_of(words)
    advice = result.advice
    name = advice.baseline.head.name
    for found, make in (
        (result.fits_without, lambda one: stock_way(one, advice.gpu, name)),
        (result.fits_with, lambda one: recommended_way(one, advice.gpu)),
    ):
        if found is None:
            continue
        layout = found.layout
        again = plan_of([*words, *layout.flags.split(), "--gpus", str(found.gpus)])
        assert again.setting == layout.setting
        way = again.advice.recommended if make(again.setting).head.name == "auto" else again.advice.baseline
        assert (way.verdict, way.peak) == ("fits", found.way.peak)
        # Nothing cheaper on these GPUs, and nothing at all on fewer.
        for gpus in range(result.setting.parallel.gpus, min(found.gpus, search.NODE) + 1):
            below = layout.cost if gpus == found.gpus else math.inf
            for flags, setting in _cheaper(words, gpus, below).items():
                assert make(setting).verdict != "fits", (gpus, flags, layout)


@pytest.mark.parametrize("words", [WHOLE, ALONE, LONG, f"{ALONE} --gpus 4 --sharding none"])
def test_the_same_of_the_cases_above(words):
    _holds(shlex.split(words))


@settings(max_examples=40, deadline=None)
@given(_SETTINGS)
def test_the_flag_is_credited_with_what_it_does_alone(drawn):
    """Every two peaks of one sentence belong to plans that differ in the flag alone."""
    try:
        words = _words(drawn)
    except ValueError:
        return
    result = plan_of(words)
    texts = {one.name: one.text for one in sentences(result)}
    advice = result.advice
    before, after = gib(advice.baseline.peak), gib(advice.recommended.peak)
    first = texts[advice.decision]
    assert before in first and after in first
    # With exactly those flags the launch has that peak.
    again = plan_of([*words, *advice.recommended.head.flags.split()])
    assert again.advice.way("auto").peak == advice.recommended.peak
    assert again.advice.baseline.peak == advice.baseline.peak
    if "fits both" in texts:
        found = result.fits_with
        there = plan_of([*words, *found.layout.flags.split(), "--gpus", str(found.gpus)]).advice
        both = re.search(r"peak ([\d.]+) GiB without the flag, ([\d.]+) with it", texts["fits both"])
        assert both.groups() == (gib(there.baseline.peak), gib(there.recommended.peak))


def test_the_fewest_gpus():
    """Of 1 the next: 2; and up to a node every number, then whole nodes."""
    found = plan_of(shlex.split(ALONE))
    assert (found.fits_without.gpus, found.fits_with.gpus) == (2, 2)
    numbers = [*itertools.islice(found.search.numbers_of_gpus(), 10)]
    assert numbers == [2, 3, 4, 5, 6, 7, 8, 16, 24, 32]


def test_what_is_tight_does_not_fit():
    found = plan_of(shlex.split(LONG)).fits_without
    assert (found.gpus, found.way.verdict) == (2, "fits")


def test_what_no_flag_changes_stays():
    """An optimizer or recomputation that another option decides, and stages given by hand."""
    words = shlex.split(f"{ALONE} --gpus 8 --sharding none")
    found = plan_of(words).fits_without
    assert found.layout.setting.training.optimizer.sharding == "none"
    by_hand = plan_of(shlex.split(f"{ALONE} --gpus 8 --pp 2 --decoder-last-pipeline-num-layers 15"))
    assert all(one.setting.parallel.pipeline == 2 for one in by_hand.search.layouts(8))
    activations = plan_of(shlex.split(f"{ALONE} --gpus 8 --recompute-activations")).search
    assert not any(one.setting.training.recompute.full for one in activations.layouts(8))


def test_the_global_batch_divides():
    """12 sequences over 8 GPUs: not over 8 data-parallel ranks, but over 4 and 2."""
    words = shlex.split("--model llama-3.2-1b --gpus 8 --tp 2 --seq-length 8192 --global-batch-size 12")
    parallels = [one.setting.parallel for one in plan_of(words).search.layouts(8)]
    assert {one.data for one in parallels} == {1, 2, 4}


def test_a_node_bounds_tensor_parallelism():
    words = [*shlex.split(WHOLE), "--gpus-per-node"]
    sizes = [
        {one.setting.parallel.tensor for one in plan_of([*words, node]).search.layouts(8)}
        for node in ("2", "8")
    ]
    assert sizes == [{1, 2}, {1, 2, 4, 8}]


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--model qwen3-30b-a3b --tp 2 --gpus 2", True),  # experts need sequence parallelism with TP
        ("--model qwen3-30b-a3b --tp 2 --gpus 2 --sequence-parallel", False),
        ("--model llama-3-8b --cp 2 --gpus 2 --transformer-impl local", True),
        ("--model llama-3-8b --cp 2 --gpus 2", False),
        ("--model llama-3-8b --cp 2 --gpus 2 --seq-length 8194", True),  # two pieces a rank
        ("--model nemotron-h-8b --tp 8 --gpus 8 --sequence-parallel", False),
        ("--model nemotron-h-8b --tp 8 --cp 32 --gpus 256 --sequence-parallel", True),  # 128 heads
    ],
)
def test_what_megatron_refuses_is_not_proposed(words, refused):
    assert search.accepted(setting_of(["--seq-length", "8192", *words.split()])) == (not refused)
