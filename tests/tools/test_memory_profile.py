"""`memory`: who asked for memory, bytes over time, pictures, launches; no GPU needed."""

from __future__ import annotations

import glob
import os
import re
import sys
import types
from pathlib import Path

import megatron.core
import pytest
import torch

from megatron_fused_ce.scripts.lib import launches, results, runner
from megatron_fused_ce.scripts.runs import memory as memory_profile
from megatron_fused_ce.scripts.runs.memory import (
    BUFFERS,
    COLOURS,
    EMBEDDING,
    HEAD,
    INPUTS,
    LAYERS,
    MIB,
    NATIVE,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Timeline,
    category_of,
    read,
    timeline_of,
    write,
)
from tests.support.commands import run_here
from tests.support.megatron import CORE_0_19
from tests.support.storage_trace import snapshot

ROOT = Path(__file__).resolve().parents[2]


def frames(*words):
    """``file:function``, innermost first."""
    pairs = (word.rsplit(":", 1) for word in words)
    return [{"filename": f"/somewhere/{file}", "name": name, "line": 1} for file, name in pairs]


# --- who asked for it ----------------------------------------------------------------------------

CORE, MODEL = "megatron/core", "megatron/core/models/gpt/gpt_model.py"
LINEAR = f"{CORE}/tensor_parallel/layers.py"
TRAIN = "megatron/training/training.py:train_step pretrain_gpt.py:<module>"
LAUNCH = "megatron_fused_ce/launch.py:run_script"
#: Stacks that a CPU's launch below has not, and what stands around the head.
STACKS = [
    (HEAD, f"{LINEAR}:forward {MODEL}:_postprocess {MODEL}:forward"),
    (HEAD, f"{LINEAR}:forward {CORE}/models/hybrid/hybrid_model.py:forward"),
    (HEAD, f"/tmp/inductor/ab.py:call {CORE}/fusions/fused_cross_entropy.py:forward"),
    (HEAD, "transformer_engine/pytorch/triton/cross_entropy.py:cross_entropy_forward"),
    (HEAD, f"{CORE}/models/common/language_module/language_module.py:compute_language_model_loss"),
    (HEAD, f"{CORE}/transformer/multi_token_prediction.py:process_mtp_loss {MODEL}:_postprocess"),
    (
        HEAD,
        f"megatron_fused_ce/head/loop.py:f megatron_fused_ce/adapter/x.py:f {MODEL}:_postprocess {LAUNCH}",
    ),
    (LAYERS, f"{CORE}/transformer/mlp.py:forward {MODEL}:forward megatron_fused_ce/adapter/x.py:f {LAUNCH}"),
    (LAYERS, "transformer_engine/pytorch/module/linear.py:backward"),
    (LAYERS, f"{CORE}/transformer/multi_token_prediction.py:forward {MODEL}:forward"),
    (EMBEDDING, f"{MODEL}:_preprocess {MODEL}:forward"),
    (EMBEDDING, f"{LINEAR}:forward {CORE}/models/common/embeddings/language_model_embedding.py:forward"),
    (BUFFERS, f"{CORE}/distributed/param_and_grad_buffer.py:__init__ x.py:get_model"),
    (OPTIMIZER, f"{CORE}/optimizer/distrib_optimizer.py:step {TRAIN}"),
    (OPTIMIZER, f"torch/optim/adamw.py:step {TRAIN}"),
    # A layer that is built is a weight, whatever file it is in.
    (WEIGHTS, f"{CORE}/transformer/mlp.py:__init__ megatron/training/training.py:get_model"),
    # Recomputed and native.
    (LAYERS, f"torch/autograd/graph.py:_engine_run_backward {CORE}/tensor_parallel/random.py:backward"),
    *((NATIVE, stack) for stack in ("", f"torch/autograd/graph.py:_engine_run_backward {TRAIN}")),
    (OTHER, f"pretrain_gpt.py:loss_func {LAUNCH}"),
    (OTHER, f"megatron_fused_ce/adapter/token_weights.py:forward {TRAIN}"),
]


def test_categories():
    for category, stack in STACKS:
        assert category_of(frames(*stack.split())) == category, stack


def test_every_rule_matches_a_function_that_exists():
    """Else a file that moves turns the picture grey, and nothing says so."""
    folders = [
        ROOT / "megatron_fused_ce",
        *(Path(package.__path__[0]) for package in (megatron.core, torch.optim)),
    ]
    files = [file for folder in folders for file in glob.iglob(f"{folder}/**/*.py", recursive=True)]
    for category, file_pattern, function_pattern in memory_profile._RULES:
        if file_pattern.pattern.startswith("transformer_engine"):
            continue  # of GPUs alone
        named = [file for file in files if file_pattern.search(file)]
        functions = {name for file in named for name in re.findall(r"def (\w+)", Path(file).read_text())}
        assert any(map(function_pattern.fullmatch, functions)), f"{category}: {file_pattern.pattern}"
    ours = [Path(file).relative_to(folders[0]) for file in files if Path(file).is_relative_to(folders[0])]
    of_head = {file for file in ours if category_of(frames(f"megatron_fused_ce/{file}:f")) == HEAD}
    others = {file.with_suffix("").parts[0] for file in set(ours) - of_head}
    assert others == {"adapter", "autoload", "autoload_start", "launch", "scripts"}


# --- bytes over time -----------------------------------------------------------------------------


class Allocator:
    """Writes snapshots as torch's allocator does; sizes in bytes."""

    def __init__(self):
        self.trace, self.blocks, self.next = [], {}, 0

    def alloc(self, size, *stack, record=True):
        self.next += 1
        block = {"address": self.next, "size": -(-size // 512) * 512, "requested_size": size}
        self.blocks[self.next] = {**block, "state": "active_allocated", "frames": frames(*stack)}
        if record:
            self._note("alloc", self.next, size, stack)
        return self.next

    def free(self, address):
        size = self.blocks.pop(address)["requested_size"]
        self._note("free_requested", address, size, ())
        self._note("free_completed", address, size, ())
        block = {"address": address, "size": size, "requested_size": size}
        self.blocks[-address] = {**block, "state": "inactive", "frames": []}

    def _note(self, action, address, size, stack):
        entry = {"action": action, "addr": address, "size": size}
        entry |= {"frames": frames(*stack)} if stack else {}  # as torch has it
        self.trace.append(entry | {"time_us": 5000 + 1000 * len(self.trace)})

    def timeline(self, **options):
        return timeline_of("step", snapshot([], []), self.snapshot(), **options)

    def snapshot(self):
        return snapshot([dict(block) for block in self.blocks.values()], list(self.trace))


OURS, LAYER = "megatron_fused_ce/head/loop.py:forward", f"{CORE}/transformer/mlp.py:forward"


def a_step():
    allocator = Allocator()
    allocator.alloc(1000, f"{LINEAR}:__init__", "x.py:get_model", record=False)
    lost = allocator.alloc(70, "somewhere.py:f", record=False)
    before = allocator.snapshot()
    hidden = allocator.alloc(300, LAYER)
    logits = allocator.alloc(5000, OURS)
    allocator.trace.append({"action": "segment_alloc", "addr": 9, "size": 2 * MIB})
    allocator.trace.append({"action": "oom", "device_free": 9, "size": 2 * MIB})
    again = allocator.alloc(200, OURS)
    allocator.free(logits)
    allocator.alloc(40)  # lives on
    allocator.free(lost)
    allocator.free(hidden)
    allocator.free(again)
    return timeline_of("step", before, allocator.snapshot(), begin_us=5000)


def test_a_step():
    timeline = a_step()
    assert timeline.base == {WEIGHTS: 1000, OTHER: 70}
    assert timeline.peak() == (
        1000 + 70 + 300 + 5000 + 200,
        4000,
        dict.fromkeys(COLOURS, 0) | {WEIGHTS: 1000, OTHER: 70, LAYERS: 300, HEAD: 5200},
    )
    assert timeline.peak(HEAD)[0] == 5200 and timeline.peak(NATIVE)[:2] == (40, 7000)
    *_, (_, last) = timeline.states()
    assert {name: size for name, size in last.items() if size} == {WEIGHTS: 1000, NATIVE: 40}
    assert timeline.unaccounted_bytes == 0
    assert [size for _, size, _ in timeline.events] == [300, 5000, 200, -5000, 40, -70, -300, -200]


def test_lost_events_are_told():
    """The ring buffer overwrites the oldest."""
    allocator = Allocator()
    first = allocator.alloc(300, LAYER)
    allocator.alloc(50, LAYER)
    del allocator.trace[0]
    assert allocator.timeline().unaccounted_bytes == -300
    allocator.free(first)
    assert allocator.timeline().unaccounted_bytes == 0


def test_a_block_that_waits_for_another_stream_is_free():
    allocator = Allocator()
    address = allocator.alloc(300, LAYER)
    allocator.blocks[address]["state"] = "active_awaiting_free"
    allocator.trace.append({"action": "free_requested", "addr": address, "size": 300, "time_us": 1})
    timeline = allocator.timeline()
    *_, (_, last) = timeline.states()
    assert timeline.unaccounted_bytes == 0 and not any(last.values())


def test_other_devices_do_not_count():
    here, other = Allocator(), Allocator()
    here.alloc(10, LAYER)
    other.alloc(999, LAYER)
    blocks = enumerate([list(here.blocks.values()), list(other.blocks.values())])
    segments = [{"device": device, "blocks": of_device} for device, of_device in blocks]
    after = {"segments": segments, "device_traces": [here.trace, other.trace]}
    found = [timeline_of("step", snapshot([], []), after, device=device) for device in (0, 1)]
    assert [(one.peak()[0], one.unaccounted_bytes) for one in found] == [(10, 0), (999, 0)]


@pytest.mark.parametrize(("user", "category"), [(f"{MODEL}:_postprocess", HEAD), (LAYER, LAYERS)])
def test_megatrons_linear_layer_is_the_heads_unless_layers_use_it(user, category):
    allocator = Allocator()
    allocator.alloc(10, f"{LINEAR}:forward", user)
    allocator.alloc(20, f"{LINEAR}:backward", "torch/autograd/function.py:apply")
    assert allocator.timeline().events[1][1:] == (20, category)


def test_logits_of_native_operators_are_the_heads():
    """Autograd's own cast of the gradient has no Python frame, but the size of all logits."""
    allocator = Allocator()
    allocator.alloc(2 * 640)  # nothing of the head is there yet
    loss = allocator.alloc(4 * 640, OURS)
    for size in (2 * 640, 4 * 640, 3 * 640):
        allocator.free(allocator.alloc(size))
    allocator.alloc(2 * 640, LAYER)
    allocator.free(loss)
    allocator.alloc(4 * 640)  # of a layer's backward
    for num_logits, cast in ((640, HEAD), (0, NATIVE)):
        events = allocator.timeline(num_logits=num_logits).events
        found = [category for _, size, category in events if size > 0]
        assert found == [NATIVE, HEAD, cast, cast, NATIVE, LAYERS, NATIVE]


def test_columns_keep_spikes():
    timeline = Timeline("step", {WEIGHTS: 5})
    timeline.events = [(0, 10, LAYERS), (500, 100, HEAD), (501, -100, HEAD), (1000, -10, LAYERS)]
    width, columns = timeline.columns(10)
    assert width == 100 and len(columns) == 10
    assert [sum(column.values()) for column in columns] == [15] * 5 + [115] + [15] * 4
    assert max(sum(column.values()) for column in columns) == timeline.peak()[0]
    assert Timeline("empty").columns(3)[1] == [dict.fromkeys(COLOURS, 0)] * 3


# --- a launch, a head ---------------------------------------------------------------------------

TOKENS, VOCABULARY = 512, 2048  # of a micro-batch
TRAINING = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length {TOKENS}
    --max-position-embeddings {TOKENS} --tensor-model-parallel-size 2 --untie-embeddings-and-output-weights
    --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --lr-decay-style constant
    --mock-data --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --num-workers 0
    --eval-iters 0 --eval-interval 100 --log-interval 1 --distributed-backend gloo --transformer-impl local
    --use-cpu-initialization --attention-backend unfused --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --hidden-dropout 0 --attention-dropout 0
"""
#: Stand for scripts/lib/runner.py: one that records a CPU's storages, and one that records nothing.
ON_CPU, NOTHING = (Path(__file__).with_name(name) for name in ("memory_on_cpu.py", "__init__.py"))


@pytest.fixture
def no_gpu_asked_for(monkeypatch):
    monkeypatch.setattr(memory_profile.cli, "require_gpus", lambda **otherwise: None)
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
    command += [str(ROOT / "tests" / "megatron" / "pretrain.py"), *TRAINING.split()]
    words = ["--out", tmp_path, "--step", "2", "--", *command, "--fused-ce-num-chunks", "8"]
    done = run_here(memory_profile.main, *words)
    assert done.returncode == 0, done.stderr
    off, on = read(tmp_path / "memory_profile.json")
    assert (off.name, on.name) == ("flag off", "flag on") and off.facts["what"] == "pretrain.py, step 2"
    logits = 4 * TOKENS * VOCABULARY // 2  # fp32, of one of two ranks
    for timeline in (off, on):
        folder = tmp_path / timeline.name.replace(" ", "-")
        assert (folder / "snapshot.pickle").is_file()
        log = "".join(file.read_text() for file in folder.rglob("*.log"))
        assert "iteration        1/" in log and "iteration        2/" not in log
        assert timeline.unaccounted_bytes == 0 and timeline.facts["waits_for_kernels"]
        assert timeline.peak()[0] == timeline.allocator_peak_bytes
        phases = ["forward", "backward", "forward", "backward", "optimizer"]
        assert [what for _, what in timeline.marks] == phases
        assert all(timeline.peak(name)[0] > 0 for name in (LAYERS, EMBEDDING, OPTIMIZER, NATIVE))
        # No [T, V] of the head hides elsewhere: there is the script's own mask, made in two steps.
        assert timeline.peak(OTHER)[0] < 2 * TOKENS**2 + logits / 32
    assert logits <= off.peak(HEAD)[0] <= 2.5 * logits
    assert logits / 8 <= on.peak(HEAD)[0] <= 0.75 * logits
    assert off.peak(LAYERS)[0] == pytest.approx(on.peak(LAYERS)[0], rel=0.02)


def test_logits_of_a_rank():
    sizes = {"seq_length": 64, "micro_batch_size": 2, "context_parallel_size": 2}
    args = types.SimpleNamespace(**sizes, padded_vocab_size=1024, tensor_model_parallel_size=4)
    assert runner.num_logits(args) == 64 * 256


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a launch after --"),
        (["--draw", "nowhere.json"], "nowhere.json: No such file"),
        (["--", "bash", "train.sh"], "give the launch itself"),
        (["--", "torchrun", "-m", "my.runner", __file__], "leave out -m my.runner"),
        (["--", sys.executable, __file__], "ended before step 3: raise --train-iters"),
    ],
)
def test_bad_input_is_one_line_and_status_2(no_gpu_asked_for, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(launches, "RUNNER", NOTHING)
    done = run_here(memory_profile.main, "--out", tmp_path / "out", *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out" / "memory_profile.json").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recording_on_a_gpu():
    recording = memory_profile.Recording()
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


# --- files, pictures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("categories", "rows", "words"),
    [
        (["head"], [], "no timeline"),
        (["head"], [{"events": [[0, 1, 7]]}], "IndexError"),
        (["else"], [{}], "a category is not known"),
        (["head"], [{"base": {"else": 1}}], "a category is not known"),
        ([], [{}], "KeyError: 'categories'"),
    ],
)
def test_another_file_is_refused(tmp_path, categories, rows, words):
    more = {"categories": categories} if categories else {}
    named = [{"shape": "step", "variant": "x", "name": "x", **row} for row in rows]
    results.write(tmp_path / "x.json", named, results.made_by("", ["memory"], **more))
    done = run_here(memory_profile.main, "--draw", tmp_path / "x.json")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "is no result of this command" in done.stderr and words in done.stderr


def test_draw_makes_table_and_picture_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures, save = [], memory_profile.pictures.save
    monkeypatch.setattr(
        memory_profile.pictures, "save", lambda figure, path: (figures.append(figure), save(figure, path))
    )
    off, on = a_step(), a_step()
    off.name, on.name = "flag off", "flag on"
    off.marks, off.facts = [(0, "forward")], {"device": "x"}
    on.events = [(at, size // 2 if name == HEAD else size, name) for at, size, name in on.events]
    off.allocator_peak_bytes = on.allocator_peak_bytes = 8 * MIB
    on.base[INPUTS], on.unaccounted_bytes = 5, -300
    path = tmp_path / "in" / "x.json"
    path.parent.mkdir()
    write([off, on], path, ["memory"])
    assert read(path) == [off, on]
    done = run_here(memory_profile.main, "--draw", path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for row in ("max_memory_allocated 8.0 8.0", f"head {5200 / MIB:.1f} {2600 / MIB:.1f}"):
        assert row in [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "the second's peak is 0.0 MiB lower, 39% of it" in done.stdout
    assert "flag on: events of -300 bytes are missing" in done.stdout
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]
    assert (tmp_path / "out" / "memory_profile.png").read_bytes().startswith(b"\x89PNG")
    tops = [fill.get_paths()[0].get_extents().ymax for fill in figures[0].axes[0].collections]
    assert tops == sorted(tops) and tops[-1] == pytest.approx(off.peak()[0] / MIB)
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == [HEAD, LAYERS, WEIGHTS], "what can be found in the picture"
