"""``--fused-ce-report``: the head's phases in Megatron's timers, training log and TensorBoard.

Megatron's timers wait for the device whenever they start and stop. The head's are events on the stream
(:class:`.PhaseTimes`), read when the trainer logs and waits for the device anyway.

``training_log`` of all versions ends with ``timers.write`` (``--log-timers-to-tensorboard``) and
``timers.log``, an evaluation with ``timers.log(['evaluate'])``. All ranks call them, with names that must be
the same everywhere: the head's are added by what the launch asks for alone, on pipeline stages without a head
too, where their times are 0 and Megatron leaves them out.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any

from megatron_fused_ce.adapter import report
from megatron_fused_ce.adapter.switch import reports_phases
from megatron_fused_ce.phases import PASSES, PHASES, PhaseTimes, Tally

PREFIX = "fused-ce-"
TRAINING = ("forward", "backward")
EVALUATION = ("evaluation",)
TRAINER = "megatron.training.training"
HOOK_POINT = "training_log"


@lru_cache(maxsize=1)
def recorder() -> PhaseTimes:
    """The recorder of all heads of this process."""
    return PhaseTimes()


def patch(module: ModuleType) -> None:
    """Wrap ``training_log`` of ``megatron.training.training``, which is looked up there at each call."""
    stock = getattr(module, HOOK_POINT, None)
    if stock is None:
        return  # times_heads reports it if the report is on
    signature = inspect.signature(stock)

    @wraps(stock)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        reporting = _reporting_of(module) if reports_phases() else None
        if reporting is None:
            return stock(*args, **kwargs)
        iteration = signature.bind(*args, **kwargs).arguments.get("iteration", 0)
        with reporting.of_iteration(int(iteration), module.get_tensorboard_writer()):
            return stock(*args, **kwargs)

    setattr(module, HOOK_POINT, training_log)


def missing(module: Any) -> str:
    """Names in the trainer's module that the report needs and does not find; empty if all are there."""
    names = [
        name for name in (HOOK_POINT, "get_timers", "get_tensorboard_writer") if not hasattr(module, name)
    ]
    if not names:
        timers = module.get_timers()
        of_timers = ("log", "write", "_timers", "_log_levels")
        names = [f"timers.{name}" for name in of_timers if not hasattr(timers, name)]
    return ", ".join(names)


def no_report(lacking: str) -> str:
    return f"no report of the head's phases: this Megatron's trainer has no {lacking}"


def times_heads(tp_rank: int) -> bool:
    """Whether a head built now is timed; logs a line if the imported trainer cannot report it."""
    if not reports_phases():
        return False
    trainer = sys.modules.get(TRAINER)
    if trainer is not None and not hasattr(trainer, HOOK_POINT):
        report.say_once(tp_rank, no_report(HOOK_POINT))
    return True


def _reporting_of(module: Any) -> Reporting | None:
    """The reporting of the trainer's timers; None, and a log line, if Megatron keeps them otherwise."""
    lacking = missing(module)
    if lacking:
        if not hasattr(module, "__fused_ce_no_report__"):
            module.__fused_ce_no_report__ = True
            report.say_of_phases(no_report(lacking))
        return None
    timers = module.get_timers()
    if not hasattr(timers, "fused_ce_reporting"):
        timers.fused_ce_reporting = Reporting(timers)
    reporting: Reporting = timers.fused_ce_reporting
    return reporting


def names_of(passes: Sequence[str]) -> list[str]:
    """Names of the timers of these passes and of their phases."""
    phases = ["", *(f"-{phase}" for phase in PHASES)]
    return [f"{PREFIX}{of_pass}{phase}" for of_pass in passes for phase in phases]


class PhaseTimer:
    """The interface that Megatron's ``Timers`` need of a timer."""

    def __init__(self, times: PhaseTimes, name: str) -> None:
        self._times = times
        self._name = name

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset. ``Timers`` has passed its barrier before."""
        seconds = self.active_time()
        if reset:
            self._times.reset(self._name)
        return seconds

    def active_time(self) -> float:
        return self._times.read().get(self._name, Tally()).seconds


class Reporting:
    """Stands before ``log`` and ``write`` of one ``Timers`` object."""

    def __init__(self, timers: Any) -> None:
        self._times = recorder()
        self._stock_log, self._stock_write = timers.log, timers.write
        self._iteration: int | None = None  # inside training_log
        self._writer: Any = None
        self._iterations = 0  # since the last reset
        self._written = False
        for name in names_of(PASSES):
            # The only way to add a timer that does not wait for the device.
            timers._timers[name] = PhaseTimer(self._times, name.removeprefix(PREFIX))
            timers._log_levels[name] = 0
        timers.log, timers.write = self.log, self.write

    @contextmanager
    def of_iteration(self, iteration: int, writer: Any) -> Iterator[None]:
        """The call of ``training_log`` that follows each iteration, of which some log."""
        self._iteration, self._writer = iteration, writer
        self._iterations += 1
        self._written = False
        try:
            yield
        finally:
            self._iteration = self._writer = None

    def write(self, names: list[str], writer: Any, *args: Any, **kwargs: Any) -> None:
        """Megatron's ``write`` with the head's timers."""
        if self._iteration is not None:
            self._written = True
            names = names + names_of(TRAINING)
        self._stock_write(names, writer, *args, **kwargs)

    def log(self, names: list[str], *args: Any, **kwargs: Any) -> None:
        """Megatron's ``log`` with the head's timers; before it, TensorBoard's bytes and the line of this
        rank.

        Collectives, on every rank: Megatron's all-gather of the added times; the same once more where they go
        to TensorBoard without ``--log-timers-to-tensorboard``.
        """
        if self._iteration is not None:
            self._say(f"iteration {self._iteration}, of one", TRAINING, self._iterations)
            if not self._written:
                self._stock_write(
                    names_of(TRAINING),
                    self._writer,
                    self._iteration,
                    normalizer=self._iterations,
                    reset=False,
                )
            self._write_bytes()
            names = names + names_of(TRAINING)
            if kwargs.get("reset", True):
                self._iterations = 0
        elif names == ["evaluate"]:
            self._say("evaluation, of all its steps", EVALUATION, 1)
            names = names + names_of(EVALUATION)
        self._stock_log(names, *args, **kwargs)

    def _say(self, when: str, passes: Sequence[str], iterations: int) -> None:
        told = self.words(self._times, passes, iterations)
        if told:
            report.say_of_phases(f"{when}: {told}")

    @staticmethod
    def words(times: PhaseTimes, passes: Sequence[str], iterations: int) -> str:
        """The line for these passes; empty if nothing was timed."""
        tallies = times.read()
        told = [in_words(tallies, of_pass, iterations) for of_pass in passes if of_pass in tallies]
        if times.captured:
            told.append(f"{times.captured} passes were captured in CUDA graphs, whose replays are not timed")
        return "; ".join(told)

    def _write_bytes(self) -> None:
        """Write bytes to TensorBoard, on the rank with the writer; per iteration if they add up."""
        if self._writer is None:
            return
        for name, tally in self._times.read().items():
            of_passes = {
                "held": tally.held_bytes,
                "moved": tally.moved_bytes / self._iterations,
                "waiting": tally.saved_bytes,
            }
            for kind, value in of_passes.items():
                if value and name.split("-")[0] in TRAINING:
                    self._writer.add_scalar(f"{PREFIX}{name}-{kind}-bytes", value, self._iteration)


def in_words(tallies: dict[str, Tally], of_pass: str, iterations: int) -> str:
    """A pass in words: its time, its phases' times, its bytes."""
    whole = tallies[of_pass]
    phases = [
        f"{phase} {tallies[f'{of_pass}-{phase}'].seconds * 1e3 / iterations:.2f}"
        for phase in PHASES
        if f"{of_pass}-{phase}" in tallies
    ]
    held = {
        "most held above its inputs": whole.held_bytes,
        "kept for the backward": whole.saved_bytes,
        "sent to other ranks": whole.moved_bytes / iterations,
    }
    told = [f"{what} {value / 2**20:.1f} MiB" for what, value in held.items() if value]
    return ", ".join([f"{of_pass} {whole.seconds * 1e3 / iterations:.2f} ms ({', '.join(phases)})", *told])
