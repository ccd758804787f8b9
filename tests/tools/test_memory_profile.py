"""`memory`: who asked for memory, bytes over time, pictures, launches; a GPU for one test alone."""

from __future__ import annotations

import gc
import glob
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import megatron.core
import pytest
import torch

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.scripts.lib import launches
from megatron_fused_ce.scripts.lib.launches import NO_FUSED_WGRAD, UNTIED
from megatron_fused_ce.scripts.runs import memory
from tests.megatron.launches import BASE_ARGS
from tests.support.commands import run_here
from tests.support.megatron import CORE_0_19

ROOT = Path(__file__).resolve().parents[2]
MIB, COLOURS = memory.MIB, memory.COLOURS
WEIGHTS, INPUTS, BUFFERS, OPTIMIZER, OTHER, NATIVE, EMBEDDING, LAYERS, HEAD = COLOURS


def frames(*words):
    """``file:function``, innermost first."""
    pairs = (word.rsplit(":", 1) for word in words)
    return [{"filename": f"/somewhere/{file}", "name": name, "line": 1} for file, name in pairs]


CORE, MODEL = "megatron/core", "megatron/core/models/gpt/gpt_model.py"
LINEAR = f"{CORE}/tensor_parallel/layers.py"
TRAIN = "megatron/training/training.py:train_step pretrain_gpt.py:<module>"
LAUNCH = "megatron_fused_ce/launch.py:run_script"
ADAPTER = f"megatron_fused_ce/adapter/x.py:f {LAUNCH}"
#: Category -> stacks that a CPU's launch below has not, and what stands around the head.
STACKS = f"""
{HEAD} | {LINEAR}:forward {CORE}/models/hybrid/hybrid_model.py:forward
{HEAD} | /tmp/inductor/ab.py:call {CORE}/fusions/fused_cross_entropy.py:forward
{HEAD} | transformer_engine/pytorch/triton/cross_entropy.py:cross_entropy_forward
{HEAD} | {CORE}/models/common/language_module/language_module.py:compute_language_model_loss
{HEAD} | {CORE}/transformer/multi_token_prediction.py:process_mtp_loss {MODEL}:_postprocess
{HEAD} | megatron_fused_ce/head/loop.py:f {ADAPTER} {MODEL}:_postprocess
{LAYERS} | {CORE}/transformer/mlp.py:forward {MODEL}:forward {ADAPTER}
{LAYERS} | transformer_engine/pytorch/module/linear.py:backward
{LAYERS} | {CORE}/transformer/multi_token_prediction.py:forward {MODEL}:forward
{LAYERS} | torch/autograd/graph.py:_engine_run_backward {CORE}/tensor_parallel/random.py:backward
{BUFFERS} | {CORE}/distributed/param_and_grad_buffer.py:__init__ x.py:get_model
{WEIGHTS} | {CORE}/transformer/mlp.py:__init__ megatron/training/training.py:get_model
{OTHER} | megatron_fused_ce/adapter/x.py:forward {TRAIN}
"""


def test_categories():
    for category, stack in (line.split(" | ") for line in STACKS.strip().splitlines()):
        assert memory.category_of(frames(*stack.split())) == category, stack


def test_every_rule_matches_a_function_that_exists():
    """Else a file that moves turns the picture grey, and nothing says so."""
    ours, *others = ROOT / "megatron_fused_ce", *(Path(p.__path__[0]) for p in (megatron.core, torch.optim))
    files = [file for folder in (ours, *others) for file in glob.iglob(f"{folder}/**/*.py", recursive=True)]
    for category, of_file, of in memory._RULES:
        named = [file for file in files if re.search(of_file, file)]
        functions = {name for file in named for name in re.findall(r"def (\w+)", Path(file).read_text())}
        on_gpus = of_file.startswith("transformer_engine")
        assert on_gpus or any(re.fullmatch(of, name) for name in functions), f"{category}: {of_file}"
    own = (Path(file).relative_to(ROOT).with_suffix("") for file in files if Path(file).is_relative_to(ours))
    not_heads = {file.parts[1] for file in own if memory.category_of(frames(f"{file}.py:f")) != HEAD}
    assert not_heads == {"adapter", "autoload", "autoload_start", "launch", "scripts"}


OURS, LAYER = "megatron_fused_ce/head/loop.py:forward", f"{CORE}/transformer/mlp.py:forward"
BACKWARD = f"{LINEAR}:backward torch/autograd/function.py:apply"
ELSEWHERE = {"address": 1, "requested_size": 999, "state": "active_allocated", "frames": []}


def traced(*steps, num_before=0, lost=0, freed="inactive", **options):
    """Of snapshots as torch's allocator writes them; a step is an allocation's (bytes, stack), or the number
    of the one that is freed. So many are before the step; of its events the first ``lost`` are missing."""
    blocks, trace, before = {}, [], []
    for number, step in enumerate(steps):
        if number == num_before:
            trace, before = [], [dict(block) for block in blocks.values()]
        if isinstance(step, int):
            blocks[step] |= {"state": freed, "time_us": 1000 * number}
            trace.append({**blocks[step], "action": "free_requested"})
            trace += [{**blocks[step], "action": "free_completed"}] * (freed == "inactive")
        else:
            size, stack = step
            entry = {"addr": number, "size": size, "time_us": 1000 * number}
            entry |= {"frames": frames(*stack.split())} if stack else {}  # as torch has it
            trace.append({**entry, "action": "alloc"})
            block = {"address": number, "requested_size": size, "state": "active_allocated"}
            blocks[number] = {**entry, **block, "size": -(-size // 512) * 512}
    trace += [{"action": "segment_alloc", "addr": 9, "size": 2 * MIB}, {"action": "oom", "size": 2 * MIB}]
    segments = [{"device": 0, "blocks": [*blocks.values()]}, {"device": 1, "blocks": [ELSEWHERE]}]
    after = {"segments": segments, "device_traces": [trace[lost:], []]}
    begin = {"segments": [{"device": 0, "blocks": before}]}
    return memory.timeline_of("step", begin, after, begin_us=2000, **options)


#: Autograd's own cast of a gradient has no Python frame, but the size of all logits, 640, while these live.
CASTS = (1280, ""), (2560, OURS), (1280, ""), 2, (2560, ""), 4, (1920, ""), 6, (1280, LAYER), 1, (2560, "")
#: Who made each allocation, and the bytes that events leave over, of these steps and what is known of them.
TRACES = {
    "a lost event": ([LAYERS], -300, [(300, LAYER), (50, LAYER)], {"lost": 1}),  # the ring buffer's oldest
    "waits for another stream": ([LAYERS], 0, [(300, LAYER), 0], {"freed": "active_awaiting_free"}),
    "one linear": ([HEAD, HEAD], 0, [(9, f"{LINEAR}:forward {MODEL}:_postprocess"), (20, BACKWARD)], {}),
    "in layers, too": ([LAYERS, LAYERS], 0, [(9, f"{LINEAR}:forward {LAYER}"), (20, BACKWARD)], {}),
    "native": ([NATIVE, HEAD, HEAD, HEAD, NATIVE, LAYERS, NATIVE], 0, CASTS, {"num_logits": 640}),
    "of no head": ([NATIVE, HEAD, NATIVE, NATIVE, NATIVE, LAYERS, NATIVE], 0, CASTS, {}),
}


@pytest.mark.parametrize("what", TRACES)
def test_traces(what):
    categories, left, steps, options = TRACES[what]
    timeline = traced(*steps, **options)
    assert [category for _, size, category in timeline.events if size > 0] == categories
    assert timeline.unaccounted_bytes == left


TOKENS, VOCABULARY = 512, 2048  # of a micro-batch
TRAINING = f"""{BASE_ARGS} --num-layers 2 {UNTIED} {NO_FUSED_WGRAD} --micro-batch-size 1 --global-batch-size 2
    --seq-length {TOKENS} --max-position-embeddings {TOKENS} --vocab-size {VOCABULARY - 1}"""
#: Stand for scripts/lib/runner.py: one that records a CPU's storages, and one that records nothing.
ON_CPU, NOTHING = (Path(__file__).with_name(name) for name in ("memory_on_cpu.py", "__init__.py"))


@pytest.fixture
def no_gpu_asked_for(monkeypatch):
    monkeypatch.setattr(memory.cli, "require_gpus", lambda otherwise: None)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")


def test_a_launch_is_made_off_and_on(no_gpu_asked_for, tmp_path, monkeypatch):
    """Megatron's own training loop over two ranks: each launch ends after its step, and the head is told from
    layers that use the same linear layer."""
    if not CORE_0_19.is_dir():
        pytest.skip(f"no {CORE_0_19.name} in the environment: run scripts/dev/setup_env.sh")
    monkeypatch.setattr(launches, "RUNNER", ON_CPU)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (CORE_0_19, ROOT))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / "tests" / "megatron" / "pretrain.py", *TRAINING.split(), "--fused-ce-num-chunks", "8"]
    done = run_here(memory.main, "--out", tmp_path, "--step", "2", "--", *command)
    assert done.returncode == 0, done.stderr
    off, on = memory.read(tmp_path / "memory_profile.json")
    assert (off.name, on.name) == ("flag off", "flag on") and off.facts["what"] == "pretrain.py, step 2"
    logits = 4 * TOKENS * VOCABULARY // 2  # fp32, of one of two ranks
    for timeline in (off, on):
        folder = tmp_path / timeline.name.replace(" ", "-")
        assert (folder / "snapshot.pickle").is_file()
        log = "".join(file.read_text() for file in folder.rglob("*.log"))
        assert "iteration        1/" in log and "iteration        2/" not in log
        assert timeline.unaccounted_bytes == 0 and timeline.facts["waits_for_kernels"]
        assert timeline.peak()[0] == timeline.allocator_peak_bytes
        phases = "forward backward forward backward optimizer"
        assert " ".join(what for _, what in timeline.marks) == phases
        assert all(timeline.peak(name)[0] > 0 for name in (LAYERS, EMBEDDING, OPTIMIZER, NATIVE))
        # No [T, V] of the head hides elsewhere: there is the script's own mask, made in two steps.
        assert timeline.peak(OTHER)[0] < 2 * TOKENS**2 + logits / 32
    assert logits <= off.peak(HEAD)[0] <= 2.5 * logits
    assert logits / 8 <= on.peak(HEAD)[0] <= 0.75 * logits
    assert off.peak(LAYERS)[0] == pytest.approx(on.peak(LAYERS)[0], rel=0.02)


def test_launches_without_a_profile(no_gpu_asked_for, tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "RUNNER", NOTHING)
    for launcher, said in (
        (sys.executable, "ended before step 3: raise --train-iters"),
        ("torchrun -m my.runner", "leave out -m my.runner"),
    ):
        done = run_here(memory.main, "--out", tmp_path / "out", "--", *launcher.split(), __file__)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out" / "memory_profile.json").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recording_on_a_gpu():
    gc.collect()  # else other tests' tensors may be freed in the step
    recording = memory.Recording()
    held = torch.ones(MIB // 4, device="cuda")
    recording.begin()
    peak = torch.cuda.memory_allocated()
    spike = held * 2
    peak = max(peak, torch.cuda.memory_allocated())
    del spike
    timeline, raw = recording.end("step", 0)
    assert timeline.unaccounted_bytes == 0 and raw["device_traces"]
    assert [size for _, size, _ in timeline.events] == [MIB, -MIB]
    assert timeline.allocator_peak_bytes == peak and 0 <= timeline.events[0][0] < 60_000_000


def test_draw_makes_table_and_picture_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures, save = [], memory.pictures.save
    monkeypatch.setattr(memory.pictures, "save", lambda *of: (figures.append(of[0]), save(*of)))
    before = (1000, f"{LINEAR}:__init__ x.py:get_model"), (70, "somewhere.py:f")
    steps = *before, (300, LAYER), (5000, OURS), (200, OURS), 3, (40, ""), 1, 2, 4
    facts = {"marks": [(0, "forward")], "facts": {"device": "x"}, "allocator_peak_bytes": 8 * MIB}
    off = replace(traced(*steps, num_before=2), name="flag off", **facts)
    halved = [(at, size // 2 if name == HEAD else size, name) for at, size, name in off.events]
    on = replace(off, name="flag on", base=off.base | {INPUTS: 5}, events=halved, unaccounted_bytes=-300)
    path = tmp_path / "in" / "x.json"
    memory.write([off, on], path, ["memory"])
    assert memory.read(path) == [off, on]
    for last, words in (',\n   "x"', "a category is not known"), ("", "IndexError"):
        (other := tmp_path / "other.json").write_text(path.read_text().replace(f',\n   "{HEAD}"', last, 1))
        with pytest.raises(UsageError, match=f"is no result of this command: .*{words}"):
            memory.read(other)
    done = run_here(memory.main, "--draw", path, "--out", tmp_path / "out")
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    lines = {"max_memory_allocated 8.0 8.0", "the second's peak is 0.0 MiB lower, 39% of it"}
    lines |= {"flag on: events of -300 bytes are missing in what is drawn"}
    assert lines <= {*printed}, done.stdout + done.stderr
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]
    assert (tmp_path / "out" / "memory_profile.png").read_bytes().startswith(b"\x89PNG")
    tops = [fill.get_paths()[0].get_extents().ymax for fill in figures[0].axes[0].collections]
    assert tops == sorted(tops) and tops[-1] == pytest.approx(off.peak()[0] / MIB)
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == [HEAD, LAYERS, WEIGHTS], "what can be found in the picture"
