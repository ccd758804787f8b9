"""scripts/runs/memory.py: who asked for memory, bytes over time, pictures, launches; no GPU needed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_fused_ce.scripts.lib import launches, results, runner
from megatron_fused_ce.scripts.lib.runner import StepWatch
from megatron_fused_ce.scripts.runs import memory as memory_profile
from megatron_fused_ce.scripts.runs import snapshots as memory_snapshots
from megatron_fused_ce.scripts.runs.snapshots import (
    BUFFERS,
    CATEGORIES,
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
from tests.support.checkouts import on_checkouts
from tests.support.storage_trace import StorageRecording, snapshot

ROOT = Path(__file__).resolve().parents[2]

TRAIN = ("megatron/training/training.py:train_step", "pretrain_gpt.py:<module>")


def frames(*words):
    """``file:function``, innermost first."""
    pairs = (word.rsplit(":", 1) for word in words)
    return [{"filename": f"/somewhere/{file}", "name": name, "line": 1} for file, name in pairs]


# --- who asked for it ----------------------------------------------------------------------------

CORE, MODEL = "megatron/core", "megatron/core/models/gpt/gpt_model.py"
LINEAR = f"{CORE}/tensor_parallel/layers.py"


@pytest.mark.parametrize(
    ("stack", "category"),
    [
        # Off: the output layer, each loss.
        ([f"{LINEAR}:forward", f"{MODEL}:_postprocess", f"{MODEL}:forward"], HEAD),
        ([f"{LINEAR}:forward", "megatron/core/models/hybrid/hybrid_model.py:forward"], HEAD),
        ([f"{CORE}/tensor_parallel/cross_entropy.py:forward"], HEAD),
        (["/tmp/inductor/ab.py:call", f"{CORE}/fusions/fused_cross_entropy.py:forward"], HEAD),
        (["transformer_engine/pytorch/triton/cross_entropy.py:cross_entropy_forward"], HEAD),
        ([f"{CORE}/models/common/language_module/language_module.py:compute_language_model_loss"], HEAD),
        (
            [
                f"{LINEAR}:forward",
                f"{CORE}/transformer/multi_token_prediction.py:process_mtp_loss",
                f"{MODEL}:_postprocess",
            ],
            HEAD,
        ),
        # On: the op, below the adapter and the launcher.
        (
            [
                "megatron_fused_ce/strategies.py:forward",
                "megatron_fused_ce/op.py:linear_cross_entropy",
                "megatron_fused_ce/adapter/output_layer.py:fused_loss",
                f"{MODEL}:_postprocess",
                "megatron_fused_ce/launch.py:run_script",
            ],
            HEAD,
        ),
        (["megatron_fused_ce/kernels/row_kernels.py:row_statistics"], HEAD),
        # What surrounds it, with the launcher at the stack's end.
        (
            [
                f"{LINEAR}:forward",
                f"{CORE}/transformer/mlp.py:forward",
                f"{CORE}/transformer/transformer_block.py:forward",
                f"{MODEL}:forward",
                "megatron_fused_ce/adapter/token_weights.py:forward",
                "megatron_fused_ce/launch.py:run_script",
            ],
            LAYERS,
        ),
        (["transformer_engine/pytorch/module/linear.py:backward"], LAYERS),
        ([f"{CORE}/transformer/multi_token_prediction.py:forward", f"{MODEL}:forward"], LAYERS),
        ([f"{CORE}/models/common/embeddings/rope_utils.py:apply", f"{MODEL}:_preprocess"], EMBEDDING),
        ([f"{MODEL}:_preprocess", f"{MODEL}:forward"], EMBEDDING),
        (
            [f"{LINEAR}:forward", f"{CORE}/models/common/embeddings/language_model_embedding.py:forward"],
            EMBEDDING,
        ),
        ([f"{CORE}/distributed/param_and_grad_buffer.py:__init__", "x.py:get_model"], BUFFERS),
        ([f"{CORE}/optimizer/distrib_optimizer.py:step", *TRAIN], OPTIMIZER),
        (["torch/optim/adamw.py:step", *TRAIN], OPTIMIZER),
        # A layer that is built is a weight, whatever file it is in.
        ([f"{CORE}/transformer/mlp.py:__init__", "megatron/training/training.py:get_model"], WEIGHTS),
        ([f"{LINEAR}:__init__", "pretrain_gpt.py:model_provider"], WEIGHTS),
        (["scripts/bench/problem.py:__init__", "scripts/runs/memory.py:of_head"], INPUTS),
        # Recomputed and native.
        ([f"{LINEAR}:backward", f"{CORE}/tensor_parallel/random.py:backward"], LAYERS),
        ([], NATIVE),
        ([f"{CORE}/pipeline_parallel/schedules.py:custom_backward", *TRAIN], NATIVE),
        (["torch/autograd/graph.py:_engine_run_backward", *TRAIN], NATIVE),
        (
            ["torch/autograd/graph.py:_engine_run_backward", f"{CORE}/tensor_parallel/random.py:backward"],
            LAYERS,
        ),
        (["pretrain_gpt.py:loss_func", *TRAIN], OTHER),
        (["pretrain_gpt.py:loss_func", "megatron_fused_ce/launch.py:run_script"], OTHER),
        (["megatron_fused_ce/adapter/token_weights.py:forward", *TRAIN], OTHER),
    ],
)  # fmt: skip
def test_categories(stack, category):
    assert category_of(frames(*stack)) == category


# --- bytes over time -----------------------------------------------------------------------------


class Allocator:
    """Writes snapshots as torch's allocator does; sizes in bytes."""

    def __init__(self):
        self.trace, self.blocks, self.next = [], {}, 0

    def alloc(self, size, *stack, record=True):
        self.next += 1
        self.blocks[self.next] = {
            "address": self.next,
            "size": -(-size // 512) * 512,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames(*stack),
        }
        if record:
            self._note("alloc", self.next, size, stack)
        return self.next

    def free(self, address):
        size = self.blocks.pop(address)["requested_size"]
        self._note("free_requested", address, size, ())
        self._note("free_completed", address, size, ())
        self.blocks[-address] = {
            "address": address,
            "size": size,
            "requested_size": size,
            "state": "inactive",
            "frames": [],
        }

    def _note(self, action, address, size, stack):
        entry = {"action": action, "addr": address, "size": size}
        entry |= {"frames": frames(*stack)} if stack else {}  # as torch has it
        self.trace.append(entry | {"time_us": 5000 + 1000 * len(self.trace)})

    def snapshot(self):
        return snapshot([dict(block) for block in self.blocks.values()], list(self.trace))


OURS, LAYER = "megatron_fused_ce/op.py:forward", f"{CORE}/transformer/mlp.py:forward"


def a_step():
    allocator = Allocator()
    weight = allocator.alloc(1000, f"{LINEAR}:__init__", "x.py:get_model", record=False)
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
    return timeline_of("step", before, allocator.snapshot(), begin_us=5000), weight


def test_a_step():
    timeline, _ = a_step()
    assert timeline.base == {WEIGHTS: 1000, OTHER: 70}
    assert timeline.peak() == (
        1000 + 70 + 300 + 5000 + 200,
        4000,
        dict.fromkeys(CATEGORIES, 0) | {WEIGHTS: 1000, OTHER: 70, LAYERS: 300, HEAD: 5200},
    )
    assert timeline.peak(HEAD)[0] == 5200 and timeline.peak(NATIVE)[:2] == (40, 7000)
    *_, (_, last) = timeline.states()
    assert {name: size for name, size in last.items() if size} == {WEIGHTS: 1000, NATIVE: 40}
    assert timeline.unaccounted_bytes == 0
    assert [size for _, size, _ in timeline.events] == [300, 5000, 200, -5000, 40, -70, -300, -200]


def test_lost_events_are_told():
    """The ring buffer overwrites the oldest."""
    allocator = Allocator()
    before = allocator.snapshot()
    first = allocator.alloc(300, LAYER)
    allocator.alloc(50, LAYER)
    del allocator.trace[0]
    timeline = timeline_of("step", before, allocator.snapshot())
    assert timeline.unaccounted_bytes == -300
    allocator.free(first)
    assert timeline_of("step", before, allocator.snapshot()).unaccounted_bytes == 0
    allocator.trace = [e for e in allocator.trace if e["action"] == "alloc"]
    allocator.free(2)
    assert timeline_of("step", before, allocator.snapshot()).events[-1][1] == -50


def test_blocks_that_wait_for_another_stream_are_free():
    allocator = Allocator()
    address = allocator.alloc(300, LAYER)
    allocator.blocks[address]["state"] = "active_awaiting_free"
    allocator.trace.append({"action": "free_requested", "addr": address, "size": 300, "frames": []})
    timeline = timeline_of("step", snapshot([], []), allocator.snapshot())
    assert timeline.unaccounted_bytes == 0
    *_, (_, last) = timeline.states()
    assert not any(last.values())


def test_megatrons_linear_layer_is_the_heads_unless_layers_use_it():
    for in_layers, category in ((False, HEAD), (True, LAYERS)):
        allocator = Allocator()
        allocator.alloc(10, f"{LINEAR}:forward", LAYER if in_layers else f"{MODEL}:_postprocess")
        allocator.alloc(20, f"{LINEAR}:backward", "torch/autograd/function.py:apply")
        timeline = timeline_of("step", snapshot([], []), allocator.snapshot())
        assert timeline.events[1][1:] == (20, category)


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
    timeline = timeline_of("step", snapshot([], []), allocator.snapshot(), num_logits=640)
    allocations = [category for _, size, category in timeline.events if size > 0]
    assert allocations == [NATIVE, HEAD, HEAD, HEAD, NATIVE, LAYERS, NATIVE]
    nobody = timeline_of("step", snapshot([], []), allocator.snapshot())
    assert [category for _, size, category in nobody.events if size > 0].count(HEAD) == 1


def test_other_devices_do_not_count():
    allocator = Allocator()
    allocator.alloc(10, LAYER)
    here = allocator.snapshot()
    other = Allocator()
    other.alloc(999, LAYER)
    after = {
        "segments": [*here["segments"], {"device": 1, "blocks": list(other.blocks.values())}],
        "device_traces": [allocator.trace, other.trace],
    }
    first = timeline_of("step", snapshot([], []), after)
    second = timeline_of("step", snapshot([], []), after, device=1)
    assert (first.peak()[0], second.peak()[0]) == (10, 999)
    assert first.unaccounted_bytes == second.unaccounted_bytes == 0


def test_columns_keep_spikes():
    timeline = Timeline("step", {WEIGHTS: 5})
    timeline.events = [(0, 10, LAYERS), (500, 100, HEAD), (501, -100, HEAD), (1000, -10, LAYERS)]
    width, columns = timeline.columns(10)
    assert width == 100 and len(columns) == 10
    assert [sum(column.values()) for column in columns] == [15] * 5 + [115] + [15] * 4
    assert max(sum(column.values()) for column in columns) == timeline.peak()[0]
    assert Timeline("empty").columns(3)[1] == [dict.fromkeys(CATEGORIES, 0)] * 3


# --- real stacks ---------------------------------------------------------------------------------


def head_step(recording, make_loss, num_logits):
    recording.begin()
    loss = make_loss()
    recording.mark("backward")
    loss.sum().backward()
    del loss
    return recording.end("head", num_logits)[0]


@pytest.mark.parametrize("strategy", ["store", "recompute"])
def test_the_op_on_a_cpu(strategy):
    from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy

    T, H, V = 128, 16, 512
    hidden = torch.randn(T, 1, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    labels = torch.randint(V, (1, T))
    config = FusedCEConfig(strategy=strategy, num_chunks=4)
    recording = StorageRecording()
    timeline = head_step(
        recording, lambda: fused_linear_cross_entropy(hidden, weight, labels, config=config), T * V
    )
    assert timeline.unaccounted_bytes == 0 and timeline.marks[0][1] == "backward"
    assert timeline.peak()[0] == recording.peak_bytes > T * V
    size, _, at_peak = timeline.peak()
    assert at_peak[HEAD] > 0.9 * size
    kept = 4 * T * V if strategy == "store" else 0
    assert kept <= timeline.peak(HEAD)[0] <= kept + 2 * T * V + 8 * V * H + 300 * T


@on_checkouts
def test_a_step_of_pretrain_gpt_on_a_cpu(checkout, tmp_path):
    """The launch ends after the step; the head is told from layers that use the same linear layer."""
    from tests.support.cpu_case import cpu_case

    T, V = 512, 2048
    case = cpu_case("plain")
    sizes = "--seq-length 256 --max-position-embeddings 256 --vocab-size 2047 --global-batch-size 2"
    timelines = {}
    for name, flag in (("off", ""), ("on", "--fused-chunked-ce --fused-ce-num-chunks 8")):
        (tmp_path / name).mkdir()
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", "2", "-m", "megatron_fused_ce.scripts.lib.megatron_cpu"]
        words += [
            str(ROOT / "tests" / "tools" / "memory_on_cpu.py"),
            "--memory",
            str(tmp_path / name),
            "2",
            "-1",
        ]
        words += [f"{checkout}/pretrain_gpt.py", *case.args, *sizes.split(), *flag.split()]
        settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            words, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **settings}
        )
        assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
        assert "iteration        2/" not in run.stdout
        (timelines[name],) = read(tmp_path / name / "memory.json")
        assert (tmp_path / name / "snapshot.pickle").is_file()
    off, on = timelines["off"], timelines["on"]
    logits = 4 * T * V // 2  # fp32, of one of two ranks
    for timeline in (off, on):
        assert timeline.unaccounted_bytes == 0
        assert timeline.peak()[0] == timeline.allocator_peak_bytes
        assert [what for _, what in timeline.marks] == ["forward", "backward", "optimizer"]
        assert all(timeline.peak(name)[0] > 0 for name in (LAYERS, EMBEDDING, OPTIMIZER, NATIVE))
        # No [T, V] of the head hides elsewhere. Attention's scores are [2, 2, 256, 256].
        assert timeline.peak(OTHER)[0] < logits / 4
    assert logits <= off.peak(HEAD)[0] <= 2.5 * logits
    assert logits / 8 <= on.peak(HEAD)[0] <= 0.75 * logits
    assert off.peak(LAYERS)[0] == pytest.approx(on.peak(LAYERS)[0], rel=0.02)


# --- files, pictures -----------------------------------------------------------------------------


def test_the_file_keeps_everything(tmp_path):
    timeline, _ = a_step()
    timeline.marks, timeline.facts = [(0, "forward")], {"device": "x"}
    write([timeline], tmp_path / "x.json", ["memory"])
    (again,) = read(tmp_path / "x.json")
    assert again == timeline
    (row,) = results.rows(tmp_path / "x.json")
    assert row["commit"] and row["peak_mib"] == timeline.peak()[0] / 2**20


@pytest.mark.parametrize(
    ("categories", "rows", "words"),
    [
        ("head", [], "no timeline"),
        ("head", [{"name": "x", "events": 1, "marks": []}], "TypeError"),
        ("head", [{"name": "x", "events": [[0, 1, 7]]}], "IndexError"),
        ("else", [{"name": "x"}], "a category is not known"),
        ("head", [{"name": "x", "base": {"else": 1}}], "a category is not known"),
        (None, [{"name": "x"}], "KeyError: 'categories'"),
    ],
)
def test_another_file(tmp_path, capsys, categories, rows, words):
    path = tmp_path / "x.json"
    more = {"categories": [categories]} if categories else {}
    named = [{"shape": "step", "variant": "x", **row} for row in rows]
    results.write(path, named, results.made_by("", ["memory"], **more))
    assert memory_profile.main(["--draw", str(path)]) == 2
    error = capsys.readouterr().err
    assert "is no result of this command" in error and words in error and len(error.splitlines()) == 1


def two_timelines():
    off, on = (a_step()[0] for _ in range(2))
    off.name, on.name = "flag off", "flag on"
    on.events = [(at, size // 2 if name == HEAD else size, name) for at, size, name in on.events]
    off.allocator_peak_bytes = on.allocator_peak_bytes = 8 * MIB
    return [off, on]


def test_the_table():
    columns = [list(column.cells) for column in memory_profile.table(two_timelines()).columns]
    rows = {name.strip(): sizes for name, *sizes in zip(*columns, strict=True)}
    assert rows["max_memory_allocated"] == ["8.0", "8.0"]
    assert rows["head"] == [f"{5200 / MIB:.1f}", f"{2600 / MIB:.1f}"]
    assert list(memory_profile.notes(two_timelines())) == ["the second's peak is 0.0 MiB lower, 40% of it"]
    broken = two_timelines()
    broken[1].unaccounted_bytes = -300
    assert "flag on: events of -300 bytes are missing" in list(memory_profile.notes(broken))[-1]


def test_draw_makes_the_picture_again(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory_profile.json"
    write(two_timelines(), path, ["memory"])
    assert memory_profile.main(["--draw", str(path)]) == 0
    assert (tmp_path / "memory_profile.png").read_bytes().startswith(b"\x89PNG")
    assert "flag on" in capsys.readouterr().out
    assert set(memory_profile.COLOURS) == set(CATEGORIES)


def test_the_picture_stacks_the_categories(tmp_path, monkeypatch):
    """The top of the head, which is drawn last, is the sum; each has its colour."""
    Axes = pytest.importorskip("matplotlib.axes").Axes
    drawn = []
    monkeypatch.setattr(
        Axes,
        "fill_between",
        lambda self, x, low, high, **rest: drawn.append((rest["color"], max(high), low, high)),
    )
    timeline = a_step()[0]
    assert memory_profile.draw([timeline], tmp_path / "x.png")
    colours = [colour for colour, *_ in drawn]
    used = [WEIGHTS, OTHER, NATIVE, LAYERS, HEAD]
    assert colours == [memory_profile.COLOURS[name] for name in used]
    assert drawn[-1][1] == pytest.approx(timeline.peak()[0] / MIB)
    assert all(below[3] == above[2] for below, above in itertools.pairwise(drawn))


def test_the_legend_has_what_can_be_seen(tmp_path, monkeypatch):
    """It listed categories of a few KiB under gigabytes."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(memory_profile.pictures, "save", lambda figure, path: figures.append(figure))
    base = {WEIGHTS: 512, OTHER: 100 * MIB}
    timeline = dataclasses.replace(a_step()[0], base=base, events=[(1, 50 * MIB, HEAD), (2, 4096, LAYERS)])
    assert memory_profile.draw([timeline], tmp_path / "x.png")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [HEAD, OTHER]


# --- launches ------------------------------------------------------------------------------------


class FakeRecording:
    def __init__(self):
        self.said, self.marks = [], []

    def begin(self):
        self.said.append("begin")

    def mark(self, what):
        self.marks.append((len(self.marks), what))

    def end(self, name, num_logits):
        self.said.append(("end", num_logits))
        return Timeline(name, marks=self.marks), {"a": "snapshot"}


@pytest.mark.parametrize("recording", [FakeRecording(), None])
def test_one_step_is_recorded_and_the_launch_ends(tmp_path, monkeypatch, recording):
    args = types.SimpleNamespace(
        seq_length=64,
        micro_batch_size=2,
        context_parallel_size=2,
        padded_vocab_size=1024,
        tensor_model_parallel_size=4,
    )
    calls = []
    schedules = types.SimpleNamespace(
        forward_step=lambda: calls.append("forward"), backward_step=lambda: calls.append("backward")
    )

    def train_step(number):
        for _ in range(2):  # micro-batches
            schedules.forward_step()
            schedules.backward_step()
        return number

    training = types.SimpleNamespace(train_step=train_step, get_args=lambda: args)
    barriers = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda: barriers.append(1))
    StepWatch(recording, 3, tmp_path).install(training, schedules)
    assert [training.train_step(number) for number in (1, 2)] == [1, 2]
    assert not barriers and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        training.train_step(3)
    assert stop.value.code == 0 and barriers == [1] and len(calls) == 12
    if recording is None:
        assert not list(tmp_path.iterdir())
        return
    assert recording.said == ["begin", ("end", 64 * 256)]
    assert {file.name for file in tmp_path.iterdir()} == {"memory.json", "snapshot.pickle"}
    (timeline,) = read(tmp_path / "memory.json")
    phases = [what for _, what in timeline.marks]
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]


FAKE_LAUNCH = """
import json, os, sys
from pathlib import Path
flag = "--fused-chunked-ce" in sys.argv
if flag:
    print("[fused-ce] heads evaluated fused: 3, logits materialised: 0, heads on the stock path: 0")
runner, option, folder, step, rank = sys.argv[1:6]
if "--short" not in sys.argv:
    size = 10 if flag else 1000
    row = dict.fromkeys(ROW) | {"shape": "step", "variant": "step", "name": "",
           "events": [[5, size, 8], [9, -size, 8]]}
    source = dict.fromkeys(MADE_BY) | {"commit": "x", "device": "x", "categories": CATEGORIES}
    Path(folder, "memory.json").write_text(json.dumps({"schema": 1, "made_by": source, "rows": [row]}))
Path(folder, "said").write_text(json.dumps([sys.argv[1:], os.environ.get("CUDA_LAUNCH_BLOCKING")]))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A stand-in for torchrun, and a training script that is never run."""
    launcher = tmp_path / "torchrun"
    text = FAKE_LAUNCH.replace("CATEGORIES", repr(list(CATEGORIES)))
    text = text.replace("ROW", repr(results.ROW)).replace("MADE_BY", repr(results.MADE_BY))
    launcher.write_text(f"#!{sys.executable}\n{text}")
    launcher.chmod(0o755)
    (tmp_path / "pretrain.py").touch()
    monkeypatch.setattr(memory_profile, "require_gpus", lambda **otherwise: None)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    return [str(launcher), str(tmp_path / "pretrain.py"), "--bf16"]


def test_a_launch_is_made_off_and_on(fake, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--out", str(out), "--step", "4", "--", *fake, "--fused-ce-num-chunks", "3"]
    assert memory_profile.main(words) == 0
    through = [str(launches.RUNNER), "--memory"]
    for name, flags in (("flag-off", []), ("flag-on", ["--fused-ce-num-chunks", "3", "--fused-chunked-ce"])):
        said, blocking = json.loads((out / name / "said").read_text())
        assert said == [*through, str(out / name), "4", "-1", *fake[1:], *flags]
        assert blocking == "1"
    off, on = read(out / "memory_profile.json")
    assert (off.name, on.name) == ("flag off", "flag on")
    assert (off.peak(HEAD)[0], on.peak(HEAD)[0]) == (1000, 10)
    assert "99% of it" in capsys.readouterr().out
    assert off.facts["what"] == "pretrain.py, step 4"


def test_the_head_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(memory_profile, "require_gpus", lambda **otherwise: None)
    monkeypatch.setattr(memory_profile, "Recording", StorageRecording)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    words = ["--shape", "tiny", "--tokens", "64", "--out", str(tmp_path), "--variants"]
    assert memory_profile.main([*words, "store", "recompute:16"]) == 0
    store, recompute = read(tmp_path / "memory_profile.json")
    assert (store.name, recompute.name) == ("store", "recompute:16")
    assert store.facts["what"] == "head of tiny, T = 64"
    for timeline in (store, recompute):
        assert timeline.unaccounted_bytes == 0
        assert [what for _, what in timeline.marks] == ["forward", "backward", "end"]
        assert not {name for *_, name in timeline.events} & {LAYERS, EMBEDDING, OPTIMIZER}
    assert store.peak(HEAD)[0] > recompute.peak(HEAD)[0] > 16 * 512 * 2
    files = {"memory_profile.json", "memory_profile.png", "store.pickle", "recompute-16.pickle"}
    assert {file.name for file in tmp_path.iterdir()} == files
    for name, message in (("fastest", "no strategy 'fastest'"), ("megatron-te", "needs a GPU")):
        capsys.readouterr()
        assert memory_profile.main([*words, name]) == 2
        assert message in capsys.readouterr().err
    assert memory_profile.main(["--shape", "huge", "--out", str(tmp_path)]) == 2
    assert "no model 'huge'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a launch after --"),
        (["--shape", "llama-3-8b", "--", "torchrun", "x.py"], "not both"),
        (["--draw", "nowhere.json"], "nowhere.json: No such file"),
        (["--step", "0", "--shape", "tiny"], "expected a whole number from 1"),
        (["--", "bash", "train.sh"], "give the launch itself"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(memory_profile, "require_gpus", lambda **otherwise: None)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert memory_profile.main(["--out", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_launches_that_end_early(fake, tmp_path, capsys):
    words = ["--out", str(tmp_path / "out"), "--", *fake, "--short"]
    assert memory_profile.main(words) == 2
    assert "ended before step 3: raise --train-iters" in capsys.readouterr().err
    assert not (tmp_path / "out" / "memory_profile.json").exists()


def test_another_module_cannot_run_the_script(fake, tmp_path, capsys):
    words = ["--out", str(tmp_path / "out"), "--", fake[0], "-m", "my.runner", *fake[1:]]
    assert memory_profile.main(words) == 2
    assert "leave out -m my.runner" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(tmp_path):
    words = [sys.executable, "-m", "megatron_fused_ce", "memory", "--shape", "llama-3-8b"]
    run = subprocess.run([*words, "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert run.returncode == 2 and "needs a GPU" in run.stderr
    assert len(run.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_the_runner_says_how_it_is_used():
    run = subprocess.run([sys.executable, runner.__file__, "x"], capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith("usage: runner.py OPTION")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recording_on_a_gpu():
    recording = memory_snapshots.Recording()
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


def test_draw_writes_to_out(tmp_path):
    """It wrote beside the file, whatever --out said."""
    pytest.importorskip("matplotlib")
    source = ROOT / "docs" / "benchmarks" / "results" / "2026-11-21-h200-memory-head-llama3-8b.json"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.json").write_text(source.read_text())
    assert (
        memory_profile.main(["--draw", str(tmp_path / "in" / "x.json"), "--out", str(tmp_path / "out")]) == 0
    )
    assert [file.name for file in (tmp_path / "in").iterdir()] == ["x.json"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["memory_profile.png"]
