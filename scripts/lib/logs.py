"""What Megatron-LM writes about a run, read back: the lines of its log, and its TensorBoard folder.

`parse_logs` gives what a finished launch says of itself (`Figures`); `read_run` gives its curves, each
point with the iterations that it is a mean of (`Record`). Lines of core 0.15 to 0.19 and main are known:

 [2026-01-01 00:00:00.0] iteration        2/       5 | ... | lm loss: 5.537932E+00 | grad norm: 2.586 | ...
 validation loss at iteration 5 on validation set | lm loss value: 5.229743E+00 | lm loss PPL: ... |

Every column ends with a bar, so a line that was cut loses its last column and no digit is misread.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fused_ce.cli.command_line import UsageError

GRAD_NORM = "grad norm"
TAIL_BYTES = 65536
#: What torchrun itself prints, in the folder of every launch.
LAUNCHER_LOG = "torchrun.log"
#: Looked at below a run's folder: torchrun's logs of 1000 ranks are 4000 entries.
MOST_ENTRIES = 20_000


# --- lines -----------------------------------------------------------------------------------

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_IS_NUMBER = re.compile(_NUMBER)
_ITERATION = re.compile(r"(?:\[([\d .:-]+)\] )?iteration\s+(\d+)/\s*\d+ \|(.*)")
_EXACT = re.compile(r"\[megatron_cpu\] exact (\{.*\})")
_EVALUATION = re.compile(r"validation(\S*) loss at iteration (\d+)([^|]*)\|(.*)")
_MEMORY = re.compile(rf"max allocated: {_NUMBER}")
_COUNTERS = re.compile(
    r"\[fused-ce\] heads: (\d+) fused, (\d+) on the stock path; logits materialised: (\d+)"
)
_PRECISION = re.compile(r"^\s*params_dtype \.+ torch\.(\w+)")
_START = re.compile(r"\[before the start of training step\]")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory"
    r"|Triton Error \[CUDA\]: out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|assert)\w*: .*|.*: error: .*)$")


def _columns(text: str) -> dict[str, str]:
    """Name -> number as printed. Where a name occurs twice, the first has more digits."""
    found: dict[str, str] = {}
    for column in text.split("|")[:-1]:
        name, _, number = (part.strip() for part in column.rpartition(":"))
        if name and _IS_NUMBER.fullmatch(number):
            found.setdefault(name, number)
    return found


@dataclass(frozen=True)
class IterationLine:
    """What Megatron logs every ``--log-interval`` iterations."""

    number: int
    columns: dict[str, str]
    stamp: str  # its date and time, '' where it has none

    @staticmethod
    def of(line: str) -> IterationLine | None:
        match = _ITERATION.search(line)
        return match and IterationLine(int(match[2]), _columns(match[3]), match[1] or "")

    @property
    def losses(self) -> dict[str, str]:
        """``lm loss``, ``mtp_1 loss``, ``load_balancing_loss`` ..., as printed."""
        return {name: text for name, text in self.columns.items() if name.endswith("loss")}

    @property
    def num_skipped(self) -> int:
        return int(self.columns.get("number of skipped iterations", "0"))

    @property
    def is_whole(self) -> bool:
        """Whether the line's last column is there."""
        return "number of nan iterations" in self.columns


def exact_values(line: str) -> dict[str, float] | None:
    """What `megatron_fused_ce.scripts.lib.megatron_cpu` prints: ``iteration``, and values in every digit."""
    match = _EXACT.search(line)
    return match and dict(json.loads(match[1]))


def evaluation_values(line: str) -> tuple[int, str, dict[str, str]] | None:
    """(iteration, ``validation``, ``validation-NAME`` or ``test``, loss -> value as printed)."""
    match = _EVALUATION.search(line)
    if match is None:
        return None
    which = "test" if "test set" in match[3] else f"validation{match[1]}"
    values = {
        name.removesuffix(" value"): text
        for name, text in _columns(match[4]).items()
        if name.endswith(" value")
    }
    return int(match[2]), which, values


# --- a launch's figures ----------------------------------------------------------------------


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


def parse_logs(texts: Iterable[str]) -> Figures:
    """Figures from the logs of a run's ranks (each rank's output apart, so lines are whole)."""
    figures = Figures()
    exact: dict[int, dict[str, float]] = {}
    memory: list[float] = []
    for text in texts:
        for line in text.splitlines():
            if values := exact_values(line):
                exact[int(values.pop("iteration"))] = values
            elif iteration := IterationLine.of(line):
                _add_iteration(iteration, exact.get(iteration.number, {}), figures)
            elif evaluation := evaluation_values(line):
                if "lm loss" in evaluation[2]:
                    value = float(evaluation[2]["lm loss"])
                    figures.losses.setdefault("validation loss", []).append(value)
            elif match := _COUNTERS.search(line):
                counts = (int(number) for number in match.groups())
                figures.heads_fused, figures.heads_stock, figures.logits_materialised = counts
            elif match := _MEMORY.search(line):
                memory.append(float(match[1]))
            if match := _ERROR.match(line):
                figures.error = figures.error or match[1].strip()
            if _OUT_OF_MEMORY.search(line):
                figures.status = "out of memory"
    figures.max_allocated_mb = max(memory) if any(memory) else None
    return figures


def _add_iteration(line: IterationLine, exact: dict[str, float], figures: Figures) -> None:
    for name, text in line.losses.items():
        figures.losses.setdefault(name, []).append(exact.get(name, float(text)))
    if GRAD_NORM in line.columns:
        figures.grad_norms.append(exact.get(GRAD_NORM, float(line.columns[GRAD_NORM])))
    if line.num_skipped:
        figures.skipped.append(line.number)
    if time := line.columns.get("elapsed time per iteration (ms)"):
        figures.iteration_times_ms.append(float(time))


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
            found = re.findall(rb"iteration +(\d+)/ *(\d+) \|", log.read())
        if found:
            newest = "iteration {}/{}".format(*(number.decode() for number in found[-1]))
    return newest


# --- a run's curves --------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A figure that one line has: the mean over the iterations ``first`` to ``last``.

    ``first`` None: which iterations it covers depends on the version. From 0.16 on Megatron logs the
    first iteration and averages it into the second line too; before, it does neither.
    """

    last: int
    value: float
    first: int | None
    unit: float = 0.0  # of the last digit printed; 0: every digit is there


@dataclass
class Record:
    """What one run wrote about its training."""

    name: str
    kind: str  # "log" or "TensorBoard"
    curves: dict[str, list[Point]] = field(default_factory=dict)  # ``lm loss``, ``grad norm``, ...
    precision: str = ""  # of the parameters, as torch calls it; '' where the run does not say
    fine_stamps: bool = False  # microseconds in its lines: another version of Megatron
    skipped: dict[int, int] = field(default_factory=dict)  # line's iteration -> steps skipped
    restarts: list[int] = field(default_factory=list)  # first iteration of each later start
    num_repeated: int = 0  # lines of an iteration that had one already
    heads_fused: int | None = None
    logits_materialised: int | None = None

    @property
    def losses(self) -> list[str]:
        return [name for name in self.curves if name != GRAD_NORM]

    @property
    def training_losses(self) -> list[str]:
        return [name for name in self.losses if name.endswith("loss")]

    def iterations(self) -> tuple[int, int]:
        """First and last with a loss."""
        seen = [point.last for name in self.training_losses for point in self.curves[name]]
        return min(seen), max(seen)

    def add(self, name: str, point: Point) -> None:
        """The last of an iteration wins."""
        curve = self.curves.setdefault(name, [])
        while curve and curve[-1].last >= point.last:
            curve.pop()
        curve.append(point)

    def restart(self, iteration: int) -> None:
        """Forget what an earlier start wrote about ``iteration`` and later ones."""
        self.restarts.append(iteration)
        self.skipped = {last: num for last, num in self.skipped.items() if last < iteration}
        for name, curve in self.curves.items():
            self.curves[name] = [point for point in curve if point.last < iteration]


def unit_of(text: str) -> float:
    """Of a printed number's last digit: ``5.537932E+00`` -> 1e-6."""
    digits, _, exponent = text.lower().partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))


class _LogReader:
    """Puts a log's lines together to a `Record`."""

    def __init__(self, name: str) -> None:
        self.record = Record(name, "log")
        self._exact: dict[int, dict[str, float]] = {}
        self._lines: list[int] = []  # iterations logged since the last start
        self._last: int | None = None  # the last one logged

    def read(self, lines: Iterable[str]) -> bool:
        """One more log; whether it has lines of iterations."""
        record = self.record
        self._lines = []
        has_iterations = False
        for line in lines:
            if values := exact_values(line):
                self._exact[int(values.pop("iteration"))] = values
            elif iteration := IterationLine.of(line):
                self._iteration(iteration)
                has_iterations = True
            elif evaluation := evaluation_values(line):
                last, which, losses = evaluation
                for name, text in losses.items():
                    point = Point(last, float(text), last, unit_of(text))
                    record.add(f"{name} {which}", point)
            elif match := _COUNTERS.search(line):
                record.heads_fused, record.logits_materialised = int(match[1]), int(match[3])
            elif match := _PRECISION.match(line):
                record.precision = match[1]
            elif _START.search(line):
                self._lines = []
        return has_iterations

    def _iteration(self, line: IterationLine) -> None:
        record, last = self.record, line.number
        record.fine_stamps = "." in line.stamp
        if self._last is not None and last < self._last:
            record.restart(last)
            self._lines = []
        elif self._lines and last == self._last:
            record.num_repeated += 1
            self._lines.pop()
        self._last = last
        first = self._first(last)
        self._lines.append(last)
        known = record.training_losses
        losses = line.losses
        if line.num_skipped:
            # The mean is over the others. Where all were skipped, newer versions print a loss of 0.
            record.skipped[last] = line.num_skipped
            losses = {name: text for name, text in losses.items() if float(text) != 0.0}
            first = None
        elif line.is_whole:
            # Megatron prints no loss that is nan.
            losses = {**dict.fromkeys(known, "nan"), **losses}
        exact = self._exact.get(last, {})
        for name, text in losses.items():
            if name in exact:
                record.add(name, Point(last, exact[name], last))
            else:
                record.add(name, Point(last, float(text), first, unit_of(text)))
        if text := line.columns.get(GRAD_NORM, ""):  # of the last iteration alone
            point = Point(last, float(text), last, unit_of(text))
            if GRAD_NORM in exact:
                point = Point(last, exact[GRAD_NORM], last)
            record.add(GRAD_NORM, point)

    def _first(self, last: int) -> int | None:
        if last == 1:
            return 1
        return self._lines[-1] + 1 if len(self._lines) > 1 else None


def read_logs(name: str, texts: Iterable[Iterable[str]]) -> Record:
    """The curves of a run from its logs' lines: one log, or those of several starts or ranks in order."""
    reader = _LogReader(name)
    for lines in texts:
        reader.read(lines)
    return reader.record


_SCALAR = re.compile(r"grad-norm|.*loss|.*loss (validation\S*)")


def read_tensorboard(name: str, path: Path) -> Record:
    """The curves of a run from TensorBoard's event files in a folder, or from one of them.

    Raises UsageError where the package ``tensorboard`` is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UsageError(f"{path}: to read it install tensorboard ({error})") from None
    record = Record(name, "TensorBoard")
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    starts: set[int] = set()
    for tag in events.Tags()["scalars"]:
        if match := _SCALAR.fullmatch(tag):
            values = [(int(event.step), float(event.value)) for event in events.Scalars(tag)]
            curve, restarts, repeated = _last_of_each(values, keep_first=bool(match[1]))
            record.curves[GRAD_NORM if tag == "grad-norm" else tag] = curve
            starts |= set(restarts)
            record.num_repeated = max(record.num_repeated, repeated)
    record.restarts = sorted(starts)
    record.precision = _precision_of(events)
    return record


def _last_of_each(
    values: Sequence[tuple[int, float]], keep_first: bool
) -> tuple[list[Point], list[int], int]:
    """(curve, iterations of restarts, steps that occur twice in a row).

    ``keep_first``: at the end Megatron writes the test set's loss under the validation set's name.
    """
    curve: list[Point] = []
    restarts: list[int] = []
    repeated = 0
    for step, value in values:
        if curve and step == curve[-1].last:
            if keep_first:
                continue
            repeated += 1
        elif curve and step < curve[-1].last:
            restarts.append(step)
        while curve and curve[-1].last >= step:
            curve.pop()
        curve.append(Point(step, value, step))
    return curve, restarts, repeated


def _precision_of(events: Any) -> str:
    """From Megatron's arguments, which it writes as texts."""
    tag = "params_dtype/text_summary"
    if tag not in events.Tags()["tensors"]:
        return ""
    text: bytes = events.Tensors(tag)[-1].tensor_proto.string_val[0]
    return text.decode(errors="replace").removeprefix("torch.")


def _is_event_file(path: Path) -> bool:
    return "tfevents" in path.name


def _lines_of(file: Path) -> Iterator[str]:
    try:
        with open(file, errors="replace") as lines:
            yield from lines
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None


def _files_below(folder: Path) -> list[Path]:
    """Regular files, in order. Raises UsageError for a folder too large to be a run's."""
    found: list[Path] = []
    num_entries = 0
    for here, folders, names in os.walk(folder):
        folders.sort()
        num_entries += len(folders) + len(names)
        if num_entries > MOST_ENTRIES:
            raise UsageError(
                f"{folder} holds more than {MOST_ENTRIES} files and folders: give the folder of one run"
            )
        paths = (os.path.join(here, name) for name in sorted(names))
        found += [Path(path) for path in paths if os.path.isfile(path)]
    return found


def _launch_of(file: Path) -> Path:
    """The folder that a log's launch has to itself: torchrun's --log-dir, else the log's own."""
    parents = file.parents
    in_torchruns = len(parents) > 3 and parents[1].name.startswith("attempt_")
    return parents[3] if in_torchruns else parents[0]


def _read_folder(folder: Path, name: str) -> Record:
    """Of the logs below it, which must be one launch's, or the restarts of one."""
    files = _files_below(folder)
    if events := [file for file in files if _is_event_file(file)]:
        if any(file.parent == folder for file in events):
            return read_tensorboard(name, folder)
        if not any(file.suffix == ".log" for file in files):
            below = ", ".join(sorted({str(file.parent) for file in events})[:3])
            raise UsageError(f"{folder} has no *.log files; event files are in {below}")
    if not any(file.suffix == ".log" for file in files):
        raise UsageError(f"{folder} has neither TensorBoard event files nor *.log files")
    reader, launches = _LogReader(name), dict[Path, None]()
    for file in files:
        if file.suffix == ".log" and reader.read(_lines_of(file)):
            launches[_launch_of(file)] = None
    if len(launches) > 1:
        several = ", ".join(map(str, list(launches)[:3]))
        raise UsageError(f"{folder} holds logs of several runs ({several}): give one of them")
    return reader.record


def read_run(path: Path, name: str) -> Record:
    """The curves of the run at ``path``: a log, a folder of logs, or a TensorBoard folder.

    Raises UsageError, in one line, where nothing is there or no training loss is in it.
    """
    if not path.exists():
        raise UsageError(f"no file or folder {path}")
    if path.is_dir():
        record = _read_folder(path, name)
    elif not path.is_file():
        raise UsageError(f"{path} is neither a regular file nor a folder")
    elif _is_event_file(path):
        record = read_tensorboard(name, path)
    else:
        record = read_logs(name, [_lines_of(path)])
    if not any(record.curves.get(name) for name in record.training_losses):
        raise UsageError(
            f"{path} has no iteration with a loss: give the log of the last rank, which prints them "
            "every --log-interval iterations, or the folder of --tensorboard-dir"
        )
    return record
