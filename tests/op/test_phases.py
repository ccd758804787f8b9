"""What a head says of its phases: the same results, every byte, and where Megatron logs them."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter import phase_report, report
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.phases import PASSES, PHASES, UNTIMED, PhaseTimes, Tally
from megatron_fused_ce.scripts.lib.reference import make_inputs
from tests.support.op import STRATEGIES

S, B, H, V, CHUNKS = 12, 2, 16, 40, 3


def step(strategy, phases, backward=True):
    """Loss and gradients of one call."""
    inputs = make_inputs("odd-labels", s=S, b=B, hidden_size=H, vocab=V, dtype=torch.float32)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    with torch.set_grad_enabled(backward):
        made = linear_cross_entropy(
            hidden,
            weight,
            inputs.labels,
            token_weights=inputs.grad_loss if strategy == "grad_in_forward" else None,
            config=FusedCEConfig(strategy=strategy, num_chunks=CHUNKS),
            phases=phases,
        )
    if backward:
        made.loss.backward(inputs.grad_loss)
    return made.loss.detach(), hidden.grad, weight.grad


#: Where each strategy spends its time on one rank.
EXPECTED = {
    "recompute": {
        *("forward", "forward-logits", "forward-statistics", "forward-merge"),
        *("backward", "backward-grad-logits", "backward-grad-hidden", "backward-grad-weight"),
        "backward-reduce",
    },
    "grad_in_forward": {
        *(
            "forward",
            "forward-logits",
            "forward-statistics",
            "forward-merge",
            "forward-grad-logits",
        ),
        *("forward-grad-hidden", "forward-reduce", "forward-grad-weight"),
        *("backward", "backward-grad-hidden", "backward-grad-weight"),
    },
}
EXPECTED["store"] = EXPECTED["recompute"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_timed_is_the_same(strategy):
    times = PhaseTimes()
    for made, plain in zip(step(strategy, times), step(strategy, UNTIMED), strict=True):
        assert torch.equal(made, plain)
    tallies = times.read()
    assert set(tallies) == EXPECTED[strategy]
    for of_pass in ("forward", "backward"):
        phases = [tallies[name].seconds for name in tallies if name.startswith(f"{of_pass}-")]
        assert all(seconds > 0 for seconds in phases)
        assert sum(phases) < tallies[of_pass].seconds
    assert all(tally.moved_bytes == 0 for tally in tallies.values()), "one rank sends nothing"


def test_what_waits_for_the_backward():
    """A label and four floats a token, and with ``store`` the logits, with ``grad_in_forward`` gradients."""
    waiting = {}
    for strategy in STRATEGIES:
        times = PhaseTimes()
        step(strategy, times)
        waiting[strategy] = times.read()["forward"].saved_bytes
    tokens, fp32 = S * B, 4
    assert waiting["recompute"] == tokens * (8 + 4 * fp32)
    assert waiting["store"] == waiting["recompute"] + tokens * V * fp32
    gradients = tokens * H * fp32 + V * H * fp32 + tokens * fp32
    assert waiting["grad_in_forward"] == waiting["recompute"] + gradients


def test_evaluations_keep_apart():
    times = PhaseTimes()
    step("store", times, backward=False)
    assert set(times.read()) == {
        *("evaluation", "evaluation-logits", "evaluation-statistics", "evaluation-merge")
    }


def test_a_failed_pass_leaves_no_time_and_stops_nothing():
    times = PhaseTimes()
    with pytest.raises(RuntimeError), times.of_pass("forward", torch.device("cpu")):
        with times("logits"):
            pass
        with times("merge"):
            raise RuntimeError
    assert set(times.read()) == {"forward-logits", "forward"}
    assert times.read()["forward"].seconds == 0
    step("store", times)
    assert set(times.read()) == EXPECTED["store"]


def test_reset_begins_anew():
    times = PhaseTimes()
    step("store", times)
    once = times.read()["forward-logits"].seconds
    step("store", times)
    assert times.read()["forward-logits"].seconds > once
    times.reset("forward-logits")
    assert "forward-logits" not in times.read()
    assert "forward-merge" in times.read()


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def large_step(strategy, phases):
    """On a GPU, of logits that weigh more than all else."""
    s, hidden_size, vocab = 4096, 512, 32768
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.randn(s, 1, hidden_size, **options)
    weight = torch.randn(vocab, hidden_size, **options)
    labels = torch.randint(vocab, (1, s), device="cuda")
    weights = torch.rand(1, s, device="cuda")

    def run():
        made = linear_cross_entropy(
            hidden,
            weight,
            labels,
            token_weights=weights,
            vocab_start=0,
            config=FusedCEConfig(strategy=strategy, num_chunks=4),
            phases=phases,
        )
        made.loss.backward(weights)

    return run, s * vocab * 2


@on_gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_host_waits_for_nothing_on_a_gpu(strategy):
    times = PhaseTimes()
    run, logits_bytes = large_step(strategy, times)
    run()  # compiles
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tallies = times.read()
    assert set(tallies) == EXPECTED[strategy]
    for of_pass in ("forward", "backward"):
        phases = [tallies[name].seconds for name in tallies if name.startswith(f"{of_pass}-")]
        assert 0 < sum(phases) <= tallies[of_pass].seconds
    held = tallies["forward"].held_bytes
    assert held >= tallies["forward"].saved_bytes
    assert (held >= logits_bytes) == (strategy == "store")
    assert torch.cuda.memory_allocated() == before, "a recorder holds no memory of the device"


@on_gpu
def test_captured_passes_are_counted_not_timed():
    times = PhaseTimes()
    run, _ = large_step("store", times)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    before = times.read()["forward"].seconds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    torch.cuda.synchronize()
    assert times.captured == 2
    assert times.read()["forward"].seconds == before


# --- in Megatron's trainer -------------------------------------------------------------------


class Timers:
    """Megatron's, as far as ``training_log`` goes: names to times, over one rank."""

    def __init__(self):
        self._timers, self._log_levels = {}, {}
        self.logged, self.written = [], []

    def _seconds(self, names, reset):
        assert len(set(names)) == len(names)
        found = {name: self._timers[name].elapsed(reset=reset) for name in names if name in self._timers}
        return {name: seconds for name, seconds in found.items() if seconds > 0}

    def log(self, names, rank=None, normalizer=1.0, reset=True, barrier=False):
        self.logged.append(self._seconds(names, reset))

    def write(self, names, writer, iteration, normalizer=1.0, reset=True, barrier=False):
        self.written.append((iteration, self._seconds(names, reset)))


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, iteration):
        self.scalars[name, iteration] = value


@pytest.fixture
def trainer(monkeypatch):
    """A module with a ``training_log`` that logs every second iteration, patched."""
    module = types.ModuleType("training")
    module.timers, module.writer, module.to_tensorboard = Timers(), Writer(), False

    def training_log(loss_dict, iteration, is_first_iteration=False):
        if iteration % 2 == 0 or is_first_iteration:
            names = ["forward-backward"]
            if module.to_tensorboard:
                module.timers.write(names, module.writer, iteration, normalizer=2, reset=False)
            module.timers.log(names, normalizer=2, reset=not is_first_iteration)
        return "memory reported"

    module.training_log = training_log
    module.get_timers = lambda: module.timers
    module.get_tensorboard_writer = lambda: module.writer
    phase_report.patch(module)
    phase_report.recorder.cache_clear()
    monkeypatch.setattr(phase_report, "reports_phases", lambda: True)
    module.told = []
    monkeypatch.setattr(report, "say_of_phases", module.told.append)
    yield module
    phase_report.recorder.cache_clear()


def test_joins_the_training_log(trainer):
    for iteration in (1, 2):
        step("store", phase_report.recorder())
        assert trainer.training_log({}, iteration=iteration) == "memory reported"
    expected = {f"fused-ce-{name}" for name in EXPECTED["store"]}
    (logged,) = trainer.timers.logged
    assert set(logged) == expected
    ((iteration, written),) = trainer.timers.written
    assert iteration == 2
    assert written == logged, "written before they are reset"
    (told,) = trainer.told
    found = re.fullmatch(
        r"iteration 2, of one: forward (\S+) ms \(logits \S+, statistics \S+, merge \S+\), "
        r"kept for the backward (\S+) MiB; backward (\S+) ms \(.*grad-weight \S+\)",
        told,
    )
    assert float(found[1]) == pytest.approx(logged["fused-ce-forward"] * 1e3 / 2, abs=0.01)
    tokens = S * B
    waiting = {("fused-ce-forward-waiting-bytes", 2): tokens * (8 + 4 * (4 + V))}
    assert trainer.writer.scalars == waiting
    # Two iterations later the times are of those two.
    step("store", phase_report.recorder())
    trainer.training_log({}, 3)
    trainer.training_log({}, 4)
    assert trainer.timers.logged[1]["fused-ce-forward"] < logged["fused-ce-forward"] * 10
    assert len(trainer.told) == 2


def test_with_timers_in_tensorboard_they_are_written_once(trainer):
    trainer.to_tensorboard = True
    step("store", phase_report.recorder())
    trainer.training_log({}, 2)
    assert [iteration for iteration, _ in trainer.timers.written] == [2]


def test_the_first_iteration_resets_nothing(trainer):
    step("store", phase_report.recorder())
    trainer.training_log({}, 1, is_first_iteration=True)
    step("store", phase_report.recorder())
    trainer.training_log({}, 2)
    first, second = trainer.timers.logged
    assert second["fused-ce-forward"] > first["fused-ce-forward"]
    assert trainer.told[1].startswith("iteration 2, of one: ")


def test_evaluations_are_logged_with_megatrons(trainer):
    trainer.training_log({}, 1)  # before it nothing of the head stands in the timers' way
    step("store", phase_report.recorder(), backward=False)
    trainer.timers.log(["evaluate"])
    assert "fused-ce-evaluation-logits" in trainer.timers.logged[-1]
    assert trainer.told[-1].startswith("evaluation, of all its steps: evaluation ")
    trainer.timers.log(["load-checkpoint"])
    assert trainer.timers.logged[-1] == {}


def test_names_do_not_depend_on_the_rank(trainer):
    """A stage without a head has the same names, no times, and says nothing."""
    names = []
    trainer.timers.log = lambda given, **options: names.extend(given)
    trainer.training_log({}, 2)
    assert names == ["forward-backward", *phase_report.names_of(("forward", "backward"))]
    assert len(names) == 1 + 2 * (1 + len(PHASES))
    assert trainer.told == []


def test_off_leaves_the_timers_alone(trainer, monkeypatch):
    monkeypatch.setattr(phase_report, "reports_phases", lambda: False)
    trainer.training_log({}, 2)
    assert trainer.timers._timers == {}
    assert trainer.timers.logged == [{}]
    assert trainer.timers.written == []


def test_captured_passes_are_told():
    times = PhaseTimes()
    times.captured = 3
    assert "3 passes were captured" in phase_report.Reporting.words(times, PASSES, 1)


def test_trainers_without_the_seam_are_left_alone():
    module = types.ModuleType("training")
    phase_report.patch(module)
    assert not hasattr(module, "training_log")


def test_words_of_a_pass():
    tallies = {
        "backward": Tally(seconds=0.5, moved_bytes=2**21, held_bytes=2**30),
        "backward-reduce": Tally(seconds=0.25, moved_bytes=2**21),
    }
    assert phase_report.in_words(tallies, "backward", 2) == (
        "backward 250.00 ms (reduce 125.00), most held above its inputs 1024.0 MiB, "
        "sent to other ranks 1.0 MiB"
    )


def launch(monkeypatch, **moved):
    """A trainer's module with ``training_log`` and what Megatron has not moved, patched."""
    module = types.ModuleType("training")
    module.training_log = lambda loss_dict, iteration: iteration
    module.get_timers, module.get_tensorboard_writer = Timers, Writer
    for name, value in moved.items():
        delattr(module, name) if value is None else setattr(module, name, value)
    phase_report.patch(module)
    told = []
    monkeypatch.setattr(report, "say_of_phases", told.append)
    return module, told


class WithoutTimers:
    def log(self, names): ...

    def write(self, names, writer, iteration): ...


@pytest.mark.parametrize("moved", [{"get_timers": None}, {"get_timers": WithoutTimers}], ids=str)
def test_a_report_not_asked_for_needs_no_timers(monkeypatch, moved):
    monkeypatch.setattr(phase_report, "reports_phases", lambda: False)
    module, told = launch(monkeypatch, **moved)
    assert [module.training_log({}, 1), module.training_log({}, 2)] == [1, 2]
    assert told == []


@pytest.mark.parametrize(
    ("moved", "name"),
    [
        ({"get_timers": None}, "get_timers"),
        ({"get_tensorboard_writer": None}, "get_tensorboard_writer"),
        ({"get_timers": WithoutTimers}, "_timers"),
    ],
    ids=str,
)
def test_a_report_that_cannot_be_had_is_one_line(monkeypatch, moved, name):
    monkeypatch.setattr(phase_report, "reports_phases", lambda: True)
    module, told = launch(monkeypatch, **moved)
    assert [module.training_log({}, 1), module.training_log({}, 2)] == [1, 2]
    (line,) = told
    assert name in line and "no report" in line


def test_a_trainer_without_a_training_log_is_told_to_who_asked(monkeypatch):
    """When a head is built, since nothing of this package runs in that trainer."""
    trainer = types.ModuleType("training")
    monkeypatch.setitem(sys.modules, phase_report.TRAINER, trainer)
    told = []
    monkeypatch.setattr(report, "say_once", lambda tp_rank, text: told.append(text))
    for asked in (False, True):
        monkeypatch.setattr(phase_report, "reports_phases", lambda asked=asked: asked)
        assert phase_report.times_heads(0) is asked
        assert len(told) == asked
    trainer.training_log = None
    phase_report.times_heads(0)
    assert told == [phase_report.no_report("training_log")]
