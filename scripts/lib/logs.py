"""What Megatron-LM writes about a run, read back: the lines of its log, and its TensorBoard folder.

`read_run` gives a run's curves, each point with the iterations that it is a mean of (`Record`); `parse_logs`
gives what a finished launch says of itself (`Figures`). Lines of core 0.15 to 0.19 and main are known:

 [2026-01-01 00:00:00.0] iteration        2/       5 | ... | lm loss: 5.537932E+00 | grad norm: 2.586 | ...
 validation loss at iteration 5 on validation set | lm loss value: 5.229743E+00 | lm loss PPL: ... |

Every column ends with a bar, so a line that was cut loses its last column and no digit is misread.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megatron_fused_ce.cli.command_line import UsageError

GRAD_NORM = "grad norm"
TAIL_BYTES = 65536
LAUNCHER_LOG = "torchrun.log"  # what torchrun itself prints, in the folder of every launch
#: Looked at below a run's folder: torchrun's logs of 1000 ranks are 4000 entries.
MOST_ENTRIES = 20_000

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|(?i:nan|inf)))"
_COLUMN = re.compile(rf"([^|\s][^|]*?)\s*:\s*{_NUMBER}\s*\|")
_ITERATION = re.compile(r"(?:\[([\d .:-]+)\] )?iteration\s+(\d+)/\s*\d+ \|(.*)")
#: What `megatron_fused_ce.scripts.lib.megatron_cpu` prints: ``iteration``, and values in every digit.
_EXACT = re.compile(r"\[megatron_cpu\] exact (\{.*\})")
_EVALUATION = re.compile(r"validation(\S*) loss at iteration (\d+)([^|]*)\|(.*)")
_MEMORY = re.compile(rf"max allocated: {_NUMBER}")
_HEADS = re.compile(r"\[fused-ce\] heads: (\d+) fused, (\d+) on the stock path; logits materialised: (\d+)")
_PRECISION = re.compile(r"^\s*params_dtype \.+ torch\.(\w+)")
_OUT_OF_MEMORY = re.compile(
    r"(?i)OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory"
    r"|Triton Error \[CUDA\]: out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
)
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|assert)\w*: .*|.*: error: .*)$")
_SCALAR = re.compile(r"grad-norm|.*loss( validation\S*)?")  # TensorBoard's tags that are read


def _columns(text: str) -> dict[str, str]:
    """Name -> number as printed. Where a name occurs twice, the first has more digits."""
    found = _COLUMN.findall(text)
    return dict(found) | dict(reversed(found))


class Point(NamedTuple):
    """A figure that one line has: the mean over the iterations ``first`` to ``last``.

    ``first`` None: which iterations it covers depends on the version. From 0.16 on Megatron logs the
    first iteration and averages it into the second line too; before, it does neither.
    """

    last: int
    value: float
    first: int | None
    unit: float = 0.0  # of the last digit printed; 0: every digit is there

    @property
    def span(self) -> range:
        """Its iterations. Where they are not known, less than 0, so that it meets none but its like."""
        return range(self.first, self.last + 1) if self.first else range(-self.last, 1 - self.last)


def _printed(last: int, text: str, first: int | None) -> Point:
    """Its unit is that of the last digit: of ``5.537932E+00`` 1e-6."""
    digits, _, exponent = text.lower().partition("e")
    unit = float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))
    return Point(last, float(text), first, unit if digits[-1].isdigit() else 0.0)


@dataclass
class Figures:
    """What one run's logs say."""

    status: str = "ok"  # ok, failed, out of memory, timed out
    losses: dict[str, list[float]] = field(default_factory=dict)  # per name, per logged iteration
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)  # lines whose steps' loss scale overflowed
    iteration_times_ms: list[float] = field(default_factory=list)
    max_allocated_mb: float | None = None
    heads_fused: int | None = None
    logits_materialised: int | None = None
    heads_stock: int | None = None
    wall_s: float = 0.0
    gpu: dict[str, float] = field(default_factory=dict)  # medians of its clock, power and temperature
    error: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether heads were evaluated fused, and no logits materialised."""
        return bool(self.heads_fused) and not self.logits_materialised

    def time_ms(self, warmup: int) -> tuple[float, float] | tuple[None, None]:
        """An iteration's median after the first ``warmup``, and its spread: largest less smallest over it."""
        times = self.iteration_times_ms[warmup:]
        if not times:
            return None, None
        median = statistics.median(times)
        return round(median, 3), round((max(times) - min(times)) / median, 4)


@dataclass
class Record:
    """What one run wrote about its training."""

    name: str
    kind: str = "log"  # or "TensorBoard"
    curves: dict[str, list[Point]] = field(default_factory=dict)  # ``lm loss``, ``grad norm``, ...
    precision: str = ""  # of the parameters, as torch calls it; '' where the run does not say
    fine_stamps: bool = False  # microseconds in its lines: another version of Megatron
    skipped: dict[int, int] = field(default_factory=dict)  # line's iteration -> steps skipped
    restarts: list[int] = field(default_factory=list)  # first iteration of each later start
    figures: Figures = field(default_factory=Figures)  # what it says of the launch
    _exact: dict[int, dict[str, float]] = field(default_factory=dict)
    _lines: list[int] = field(default_factory=list)  # iterations logged since the last start
    _last: int = 0  # the last iteration logged

    @property
    def training_losses(self) -> list[str]:
        return [name for name in self.curves if name.endswith("loss")]

    def iterations(self) -> tuple[int, int]:
        """First and last with a loss."""
        seen = [point.last for name in self.training_losses for point in self.curves[name]]
        return min(seen), max(seen)

    @property
    def facts(self) -> dict[str, object]:
        """Of a result file."""
        heads = [getattr(self.figures, of) for of in ("heads_fused", "heads_stock", "logits_materialised")]
        own = {name: getattr(self, name) for name in ("kind", "precision", "skipped", "restarts")}
        return own | {"heads": heads, "iterations": self.iterations()}

    def add(self, name: str, point: Point) -> None:
        """The last of an iteration wins."""
        curve = self.curves.setdefault(name, [])
        while curve and curve[-1].last >= point.last:
            curve.pop()
        curve.append(point)

    def read(self, lines: Iterable[str]) -> bool:
        """One more log, of a later start or another rank; whether it has lines of iterations."""
        self._lines, has_iterations, made = [], False, self.figures
        for line in lines:
            if match := _EXACT.search(line):
                exact = json.loads(match[1])
                self._exact[int(exact.pop("iteration"))] = exact
            elif match := _ITERATION.search(line):
                self.fine_stamps = "." in (match[1] or "")
                self._iteration(int(match[2]), _columns(match[3]))
                has_iterations = True
            elif match := _EVALUATION.search(line):
                last = int(match[2])
                which = "test" if "test set" in match[3] else f"validation{match[1]}"
                for name, text in _columns(match[4]).items():
                    if name.endswith(" value"):
                        self.add(f"{name.removesuffix(' value')} {which}", _printed(last, text, last))
            elif match := _HEADS.search(line):
                made.heads_fused, made.heads_stock, made.logits_materialised = map(int, match.groups())
            elif match := _MEMORY.search(line):
                made.max_allocated_mb = max(made.max_allocated_mb or 0.0, float(match[1]))
            elif match := _PRECISION.match(line):
                self.precision = match[1]
            elif "[before the start of training step]" in line:
                self._lines = []
            if match := _ERROR.match(line):
                made.error = made.error or match[1].strip()
            if _OUT_OF_MEMORY.search(line):
                made.status = "out of memory"
        return has_iterations

    def read_file(self, file: Path) -> bool:
        try:
            with open(file, errors="replace") as lines:
                return self.read(lines)
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None

    def _iteration(self, last: int, columns: dict[str, str]) -> None:
        if last < self._last:  # forget what an earlier start wrote about this iteration and later ones
            self.restarts.append(last)
            self.skipped = {at: num for at, num in self.skipped.items() if at < last}
            self.curves = {name: [p for p in of if p.last < last] for name, of in self.curves.items()}
            self._lines = []
        elif self._lines and last == self._last:
            self._lines.pop()  # a line that stands there twice
        self._last = last
        first = 1 if last == 1 else self._lines[-1] + 1 if len(self._lines) > 1 else None
        self._lines.append(last)
        found = {name: text for name, text in columns.items() if name.endswith("loss") or name == GRAD_NORM}
        if num_skipped := int(columns.get("number of skipped iterations", "0")):
            # The mean is over the others. Where all were skipped, newer versions print a loss of 0.
            self.skipped[last], first = num_skipped, None
            found = {name: text for name, text in found.items() if name == GRAD_NORM or float(text) != 0.0}
        elif "number of nan iterations" in columns:  # the line's last column
            # Megatron prints no loss that is nan.
            found = dict.fromkeys(self.training_losses, "nan") | found
        exact = self._exact.get(last, {})
        for name, text in found.items():
            of_one = last if name == GRAD_NORM else first  # a norm is of the last iteration alone
            self.add(name, Point(last, exact[name], last) if name in exact else _printed(last, text, of_one))
        if time := columns.get("elapsed time per iteration (ms)"):
            self.figures.iteration_times_ms.append(float(time))


def parse_logs(texts: Iterable[str]) -> Figures:
    """Figures from the logs of a run's ranks (each rank's output apart, so lines are whole)."""
    run = Record("")
    for text in texts:
        run.read(text.split("\n"))
    losses = {name: [point.value for point in curve] for name, curve in run.curves.items()}
    run.figures.grad_norms = losses.pop(GRAD_NORM, [])
    run.figures.losses, run.figures.skipped = losses, [*run.skipped]
    return run.figures


def log_texts(folder: Path) -> list[str]:
    """The logs that a run left in its folder: each rank's own, then torchrun's."""
    files = [*sorted((folder / "logs").rglob("*.log")), folder / LAUNCHER_LOG]
    return [file.read_text(errors="replace") for file in files if file.is_file()]


def last_iteration(folder: Path) -> str:
    """``iteration i/n`` of the newest line of a launch under way, '' before the first."""
    newest = ""
    for file in folder.rglob("*.log"):
        with open(file, "rb") as log:
            log.seek(max(0, file.stat().st_size - TAIL_BYTES))
            found = re.findall(r"iteration +(\d+)/ *(\d+) \|", log.read().decode(errors="replace"))
        newest = "iteration {}/{}".format(*found[-1]) if found else newest
    return newest


def read_tensorboard(name: str, path: Path) -> Record:
    """The curves of a run from TensorBoard's event files in a folder, or from one of them.

    Raises UsageError where the package ``tensorboard`` is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UsageError(f"{path}: to read it install tensorboard ({error})") from None
    record, starts = Record(name, "TensorBoard"), set[int]()
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    for tag in filter(_SCALAR.fullmatch, events.Tags()["scalars"]):
        last = -1
        for event in events.Scalars(tag):
            step = int(event.step)
            if step == last and "loss validation" in tag:
                continue  # at the end Megatron writes the test set's loss under the validation set's name
            starts |= {step} if step < last else set()
            record.add(GRAD_NORM if tag == "grad-norm" else tag, Point(step, float(event.value), step))
            last = step
    record.restarts = sorted(starts)
    tag = "params_dtype/text_summary"  # Megatron writes its arguments as texts
    if tag in events.Tags()["tensors"]:
        text: bytes = events.Tensors(tag)[-1].tensor_proto.string_val[0]
        record.precision = text.decode(errors="replace").removeprefix("torch.")
    return record


def read_run(path: Path, name: str) -> Record:
    """The curves of the run at ``path``: a log, a TensorBoard folder, or a folder of one launch's logs.

    Raises UsageError, in one line, where nothing is there or no training loss is in it.
    """
    if not path.is_dir() and not path.is_file():
        raise UsageError(f"{path}: no regular file or folder")
    below = list(islice(path.rglob("*"), MOST_ENTRIES + 1)) if path.is_dir() else [path]
    if len(below) > MOST_ENTRIES:
        many = f"more than {MOST_ENTRIES} files and folders"
        raise UsageError(f"{path} holds {many}: give the folder of one run")
    files = [file for file in sorted(below) if file.is_file()]
    events = sorted({str(file.parent) for file in files if "tfevents" in file.name})
    is_events = str(path) in events or "tfevents" in path.name
    logs = [file for file in files if not is_events and (file.suffix == ".log" or file == path)]
    if not logs and not is_events:
        there = f"event files are in {', '.join(events[:3])}" if events else "nor TensorBoard event files"
        raise UsageError(f"{path} has no *.log files, {there}")
    record = read_tensorboard(name, path) if is_events else Record(name)
    # Restarts are of one launch. In torchrun's --log-dir, its folder, a rank's logs lie three folders down.
    rank = r"(^|/)[^/]+/attempt_[^/]*/[^/]+$"
    folders = dict.fromkeys(re.sub(rank, "", str(log.parent)) for log in logs if record.read_file(log))
    if len(folders) > 1:
        several = ", ".join([*folders][:3])
        raise UsageError(f"{path} holds logs of several runs ({several}): give one of them")
    if not any(record.curves[name] for name in record.training_losses):
        prints = "which prints them every --log-interval iterations, or the folder of --tensorboard-dir"
        raise UsageError(f"{path} has no iteration with a loss: give the log of the last rank, {prints}")
    return record
