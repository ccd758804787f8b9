"""`compare`: runs as Megatron writes them, the verdict, and what is said beside it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import random
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.head.autograd import linear_cross_entropy
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.scripts.lib import launches, results
from megatron_fused_ce.scripts.lib import logs as megatron_logs
from megatron_fused_ce.scripts.lib.logs import GRAD_NORM, Point, read_logs
from megatron_fused_ce.scripts.runs import compare as compare_loss
from megatron_fused_ce.scripts.runs.compare import Figure, Judge, compare
from tests import same_training
from tests.support.checkouts import FAKE_PRETRAIN
from tests.support.commands import run_here

ROOT = Path(__file__).resolve().parents[2]


# --- runs as Megatron writes them --------------------------------------------------------------


@dataclasses.dataclass
class Trained:
    """What a run really did, iteration by iteration; a loss of None is a skipped step."""

    losses: dict[int, float | None]
    norms: dict[int, float]

    def log(self, interval=1, begin=1, end=None, logs_first=True, stop_after=None):
        """As `training_log` of 0.16 and newer (``logs_first``) or of 0.15 prints it."""
        lines = ["[before the start of training step] datetime: 2026-01-01 00:00:00"]
        total, advanced, skipped = 0.0, 0, 0
        last = end or max(self.losses)
        stamp = "2026-01-01 00:00:00" + (".123456" if logs_first else "")
        for step in range(begin, (stop_after or last) + 1):
            loss = self.losses[step]
            if loss is None:
                skipped += 1
            else:
                total, advanced = total + loss, advanced + 1
            is_first = logs_first and step == begin
            if step % interval and not is_first:
                continue
            mean = total / max(1, advanced)
            text = f" [{stamp}] iteration {step:8d}/{last:8d} | consumed samples: {8 * step:12d} |"
            # Printed where it compares as at least 0 (newer) or above it: never nan.
            if mean > 0 or (logs_first and mean == 0):
                text += f" lm loss: {mean:.6E} |"
            text += f" loss scale: 1.0 | grad norm: {self.norms[step]:.3f} |"
            text += f" number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
            lines.append(text)
            if not is_first:
                total, advanced, skipped = 0.0, 0, 0
        return "\n".join(lines) + "\n"

    def tensorboard(self, begin=1, end=None, interval=1):
        """Writes a folder of events."""

        def write(folder):
            pytest.importorskip("tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(log_dir=str(folder))
            for step in self.losses:
                if begin <= step <= (end or step) and step % interval == 0:
                    writer.add_scalar("lm loss", self.losses[step], step)
                    writer.add_scalar("lm loss vs samples", self.losses[step], 8 * step)
                    writer.add_scalar("grad-norm", self.norms[step], step)
            file = Path(writer.file_writer.event_writer._file_name)
            writer.close()
            # Of two of one second the one with the larger number is read last, as a string.
            file.rename(folder / f"events.out.tfevents.{begin:04}")

        return write


def trained(num=40, seed=0, skipped=()):
    """Losses that move by a hundredth from one iteration to the next."""
    draw = random.Random(seed)
    losses = {step: 5.0 - 0.03 * step + 0.1 * draw.random() for step in range(1, num + 1)}
    norms = {step: 3.0 + draw.random() for step in losses}
    return Trained({s: None if s in skipped else loss for s, loss in losses.items()}, norms)


def apart(by, num=40):
    """Losses that are off by ``by(iteration)``."""
    run = trained(num)
    return Trained({step: loss * (1 + by(step)) for step, loss in run.losses.items()}, run.norms)


def changed(at, by=0.01):
    return apart(lambda step: by * (step == at))


def drifted(by, begin=0, num=100):
    """To the end; from ``begin`` on ever further, up to ``by``."""
    return apart(lambda step: by * max(0, step - begin) / (num - begin) if begin else by, num)


def spiked(begin, end):
    return apart(lambda step: 0.05 * (begin <= step < end), 100)


def noisy(drift, size=0.004):
    draw = random.Random(1)
    return apart(lambda step: draw.gauss(drift, size), 100)


def compared(folder, runs, options=""):
    """The command on these runs, each a log's text or a function that writes a folder; the third is noise."""
    paths = [folder / name for name in ("a", "b", "noise")[: len(runs)]]
    folder.mkdir(exist_ok=True)
    for run, path in zip(runs, paths, strict=True):
        if callable(run):
            run(path)
        else:
            path.write_text(run)
    noise = [f"--against-noise={path}" for path in paths[2:]]
    return run_here(compare_loss.main, *paths[:2], f"--out={folder / 'out'}", *noise, *options.split())


def rows(folder):
    """Of the whole curves, by name."""
    made = [row for row in results.rows(folder / "out" / "compare_loss.json") if ", all" in row["shape"]]
    return {row["shape"].partition(",")[0]: row for row in made if row["variant"] != "noise"}


def at_iteration(row):
    return int(row["shape"].partition("at iteration ")[2].partition(")")[0])


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(compare_loss.pictures, "pyplot", lambda: None)


EXACTLY = "--first-bound=0 --first=1000"


@pytest.mark.parametrize(
    ("one", "two", "logs_first"),
    [(1, 1, True), (1, 5, False), (5, 1, True), (5, 5, False), (10, 4, True), (None, 5, True)],
)
def test_means_over_the_same_iterations_are_compared(tmp_path, no_picture, one, two, logs_first):
    """Lines of any --log-interval, and TensorBoard (None), which has every iteration."""
    reference = trained().log(one, logs_first=logs_first) if one else trained().tensorboard()
    other, worse = (run.log(two, logs_first=logs_first) for run in (trained(), changed(33, 0.05)))
    for name, runs in (("there", (reference, other)), ("back", (other, reference))):
        assert compared(tmp_path / name, runs, EXACTLY).returncode == 0
        same = rows(tmp_path / name)
        assert set(same) == {"lm loss", GRAD_NORM} and same["lm loss"]["over_seeds"] == 0
        assert len(same["lm loss"]["curve"]) >= 40 // math.lcm(one or 1, two) - 2
    # A difference in one iteration is one of the mean that it is in.
    assert compared(tmp_path / "worse", (reference, worse), EXACTLY).returncode == 1
    assert at_iteration(rows(tmp_path / "worse")["lm loss"]) in (33, 34, 35, 36, 40)


RUN, LOST = trained(), trained(seed=7)
RESUMED = Trained(*({s: (old if s < 21 else new)[s] for s in new} for old, new in
                    ((LOST.losses, RUN.losses), (LOST.norms, RUN.norms))))  # fmt: skip
SKIPS, SICK = trained(skipped=(1, 2, 20)), Trained({**RUN.losses, 12: math.nan, 13: math.nan}, RUN.norms)
EVALUATION = " validation loss at iteration {} | lm loss value: 4.000000E+00 | lm loss PPL: 5E+01 |\n"
FP32, BF16 = (f"  params_dtype .......... torch.{name}\n" for name in ("float32", "bfloat16"))
EXACT = '[megatron_cpu] exact {{"iteration": 1, "grad norm": 2.5861, "lm loss": {}}}\n'
LINE = " iteration        1/ 5 | lm loss: 5.537932E+00 | grad norm: {} |\n"
LONG = trained(100).log()
#: What the runs are -> the runs, options, exit status, and what is said.
VERDICTS = {
    # starts
    "a log of two starts": (
        (RUN.log(), RUN.log(end=40, stop_after=20) + RUN.log(begin=21)), EXACTLY, 0, "!restarted"),
    "a restart from a checkpoint": (
        (RESUMED.log(stop_after=30), LOST.log(end=40, stop_after=37) + EVALUATION.format(35)
         + RUN.log(begin=21, stop_after=30)),
        EXACTLY, 0, "b was restarted at iteration 21: the last start counts"),
    "every line twice": (
        (RUN.log(), "".join(2 * line for line in RUN.log(5).splitlines(keepends=True))),
        EXACTLY, 0, "b has 9 lines twice: the last of each counts"),
    # skipped steps, nan
    "skips": ((SKIPS.log(), SKIPS.log()), EXACTLY, 0, "SAME"),
    "skips at the start, which have no loss": (
        (trained(skipped=(1, 2)).log(), RUN.log(begin=3)), EXACTLY, 0, "!compared are"),
    "other skips": (
        (SKIPS.log(), trained(skipped=(1, 2)).log()), "", 1, "b skipped other steps: 20"),
    "other skips in the noise too": (
        (SKIPS.log(), trained(skipped=(1, 2)).log(), trained(skipped=(1, 2, 25)).log()), "", 0, "SAME"),
    "nan in one": (
        (RUN.log(), SICK.log()), "", 1,
        "(largest at iteration 12) differs: +inf"),
    "nan in both": (
        (SICK.log(), SICK.log()), "", 0, "lm loss is nan in both runs on 2 lines, from 12 on"),
    "nan alone": (
        2 * (re.sub(r"lm loss: \S+", "lm loss: nan", RUN.log()),), "", 2, "no loss is finite in either"),
    # bounds
    "fp32": ((FP32 + RUN.log(), FP32 + changed(5, 1e-5).log()), "", 1, "bound 1.0e-06"),
    "fp32 and bf16": ((FP32 + RUN.log(), BF16 + changed(5, 1e-5).log()), "", 0, "SAME"),
    "an own bound": ((RUN.log(), changed(4).log()), "--first-bound=0.02", 0, "SAME"),
    "off by a little": (
        (RUN.log(), changed(4).log()), "", 1, "lm loss, first 10 differs: +1.0e-02, bound 5.0e-04"),
    "a late noise excuses no early jump": (
        (RUN.log(), changed(5, 1e-4).log(), changed(30, 0.2).log()), "", 1,
        "lm loss, first 10 differs: +1.0e-04, bound 1.0e-06"),
    "a nan in the noise": (
        (RUN.log(), changed(5).log(), Trained({**RUN.losses, 6: math.nan}, RUN.norms).log()), "", 1,
        "lm loss, first 10 differs: +1.0e-02"),
    # drift; a first bound of 1 is none
    "a drift": (
        (LONG, drifted(0.012).log()), "--first-bound=1", 1, "last 100 differs: +1.2e-02, bound 1.0e-02"),
    "apart from iteration 62 on": (
        (trained(150).log(), drifted(0.09, 62, 150).log()), "", 1, "lm loss, last 100 differs: +"),
    "a spike": ((LONG, spiked(40, 45).log()), "--first-bound=1", 0, "SAME"),
    "noise and a drift": ((LONG, noisy(0.015).log()), "--first-bound=1", 1, "last 100 differs: +1"),
    # what is compared
    "other ranges": (
        (RUN.log(stop_after=30), RUN.log(begin=11)), "", 0,
        "compared are iterations 13 to 30: a has 1 to 30, b has 11 to 40"),
    "a late start": (
        (RUN.log(), changed(21).log(begin=11)), "", 1, "lm loss, first 10 differs: +1.0e-02, bound 5.0e-04"),
    "lines too long for the first iterations": (
        2 * (RUN.log(20, logs_first=False),), "", 0, "--log-interval 1 would tell more"),
    "a loss of one alone": (
        (RUN.log(), RUN.log().replace(" lm loss:", " mtp_1 loss: 5.000000E+00 | lm loss:")), "", 1,
        "only b logs mtp_1 loss"),
    "digits that are": (
        (LINE.format("0.002"), LINE.format("0.004")), "--first-grad-norm-bound=0", 1, "grad norm, first 10"),
    "every digit of the CPU harness": (
        (EXACT.format(5.53793219) + LINE.format(2.586), EXACT.format(5.53793218) + LINE.format(2.586)),
        EXACTLY, 1, "lm loss, first 1000 differs: +1.8e-09"),
    # TensorBoard
    "every fifth iteration beside means": (
        (RUN.tensorboard(interval=5), RUN.log(5)), "", 2, "--tensorboard-log-interval 1"),
    "every fifth iteration of both": (
        (RUN.tensorboard(interval=5), changed(30).tensorboard(interval=5)), EXACTLY, 1, "+1.0e-02, bound 0"),
    "a restart in TensorBoard": (
        (RESUMED.tensorboard(end=30),
         lambda folder: [run(folder) for run in (LOST.tensorboard(end=37), RUN.tensorboard(21, 30))]),
        EXACTLY, 0, "b was restarted at iteration 21: the last start counts"),
    "a mean over a skipped step": (
        (RUN.tensorboard(), trained(skipped=(13,)).log(5)), EXACTLY, 0, "SAME"),
    "a gap in TensorBoard": (
        (RUN.log(10), Trained({s: RUN.losses[s] for s in RUN.losses if s != 14}, RUN.norms).tensorboard()),
        EXACTLY, 0, "SAME"),
    "nan in TensorBoard": (
        (RUN.tensorboard(), SICK.tensorboard()), "", 1, "(largest at iteration 12) differs: +inf"),
}  # fmt: skip


@pytest.mark.parametrize("what", VERDICTS)
def test_verdicts(tmp_path, no_picture, what):
    runs, options, status, said = VERDICTS[what]
    done = compared(tmp_path, runs, options)
    assert done.returncode == status, done.stdout + done.stderr
    printed = done.stdout + done.stderr
    assert (said.removeprefix("!") in printed) != said.startswith("!"), printed
    if status != 2:
        assert done.stdout.splitlines()[-1] == {0: "SAME", 1: "DIFFERENT", 3: "INCONCLUSIVE"}[status]


#: What the runs of three seeds, or fewer, are -> relative errors by name and seed, verdict, what is said.
#: "early": what the flag's losses are off by in iterations 3 to 40; "norm": its gradient norms, of 1.0.
SERIES = {
    "as far apart as others": ({"flag": (2e-3, -1e-3, 1e-3), "te": (-2e-3, 1e-3, 2e-3)}, "SAME", "!left out"),
    "to one side": ({"flag": (5e-3, 4e-3, 5e-3), "te": (-2e-3, 1e-3, 2e-3)}, "DIFFERENT", ""),
    "less than is printed": ({"flag": (2e-7, 2e-7, 0), "te": (0, 0, 0)}, "SAME", ""),
    "more than is printed": ({"flag": (1e-5, 1e-5, 0), "te": (0, 0, 0)}, "DIFFERENT", ""),
    "nan": ({"flag": (0, math.nan, 0), "te": (1e-3, 1e-3, 1e-3)}, "DIFFERENT", "nan"),
    "two seeds": ({"flag": (1e-4, 1e-4), "te": (1e-3, 1e-3)}, "INCONCLUSIVE", ""),
    "one ended early": (
        {"flag": (1e-4, 1e-4, 1e-4), "te": (1e-3, 1e-3, 1e-3), "late": (None,)}, "SAME",
        "left out: late-1 ends at iteration 120"),
    "this way and that": ({"flag": (5e-2, -5e-2, 0), "te": (-2e-3, 1e-3, 2e-3)}, "DIFFERENT", ""),
    "a loss of multi-token prediction": (
        {"flag": (0, 0, 0), "te": (1e-3, 1e-3, 1e-3), "mtp": (0.1, 0.1, 0.1)}, "DIFFERENT",
        "mtp_1 loss, last 100 differs"),
    "no loss of multi-token prediction": (
        {"flag": (0, 0, 0), "te": (1e-3, 1e-3, 1e-3), "mtp": (0, None, 0)}, "DIFFERENT",
        "only unfused-2 logs mtp_1 loss"),
    "off at first, and later no more than others": (
        {"flag": (1e-3, 1e-3, 1e-3), "te": (1e-3, 1e-3, 1e-3), "early": (1e-4, 1e-4, 1e-4)}, "DIFFERENT",
        "loss, first 10 differs"),
    "off at first by less than is printed": (
        {"flag": (0, 0, 0), "te": (1e-3, 1e-3, 1e-3), "early": (2e-7, -2e-7, 2e-7)}, "SAME", "!differs"),
    "gradient norms": (
        {"flag": (0, 0, 0), "te": (1e-3, 1e-3, 1e-3), "norm": (0.01, 0.01, 0.01)}, "DIFFERENT",
        "grad norm, first 10 differs"),
    "lines of twenty iterations": (
        {"flag": (0, 0, 0), "te": (1e-3, 1e-3, 1e-3), "interval": (20, 20, 20)}, "INCONCLUSIVE",
        "--log-interval 1 would tell more"),
    "all nan": (
        {"flag": (math.nan,) * 3, "te": (math.nan,) * 3}, "DIFFERENT", "at iteration 41) differs: +inf"),
    "an error on purpose": (
        {"flag": (1e-4, 1e-4, 1e-4), "te": (1e-3, 1e-3, 1e-3), "planted": (9e-3,)}, "SAME", "planted "),
}  # fmt: skip


@pytest.mark.parametrize("what", SERIES)
def test_pairs_by_seed(tmp_path, monkeypatch, what):
    """Whatever a seed does by itself, far more than what is looked for, is none of the difference."""
    if what not in ("a loss of multi-token prediction", "all nan"):
        monkeypatch.setattr(compare_loss.pictures, "pyplot", lambda: None)
    runs, verdict, said = SERIES[what]
    of_flag = {key: runs.get(key, (0, 0, 0)) for key in ("mtp", "early", "norm")}
    (interval, *_) = runs.get("interval", (1,))
    runs = {name: errors for name, errors in runs.items() if name not in (*of_flag, "interval")}
    for seed in (1, 2, 3):
        losses = trained(140, seed).losses
        for name, errors in ({"unfused": (0, 0, 0)} | runs).items():
            if seed <= len(errors):
                by = errors[seed - 1]
                mtp, early, norm = (of[seed - 1] if name == "flag" else 0 for of in of_flag.values())
                off = {step: (by or 0) if step > 40 else early if step > 2 else 0 for step in losses}
                kept = {step: loss * (1 + off[step]) for step, loss in losses.items()}
                run = Trained(kept, dict.fromkeys(kept, 1 + norm))
                (tmp_path / f"{name}-{seed}").mkdir()
                text = run.log(interval, end=140, stop_after=120 if by is None else None)
                if mtp is not None:
                    text = text.replace("| loss scale", f"| mtp_1 loss: {5 * (1 + mtp):.6E} | loss scale")
                (tmp_path / f"{name}-{seed}" / "out.log").write_text(text)
    words = [f"--paired={tmp_path}", "unfused", "flag", "--against-noise", "te", f"--out={tmp_path / 'out'}"]
    done = run_here(compare_loss.main, *words)
    assert done.returncode == compare_loss.STATUS[verdict] and verdict in done.stdout, done.stdout
    assert (said.removeprefix("!") in done.stdout) != said.startswith("!"), done.stdout
    made = results.read(tmp_path / "out" / "compare_loss.json")["rows"]
    found = {row["variant"]: row for row in made if row["shape"].startswith("lm loss, last 100, ")}
    assert found["flag"]["seeds"] == list(range(1, 1 + len(runs["te"])))
    last = [loss for step, loss in trained(140, 1).losses.items() if step > 40]
    assert float(found["flag"]["differences"][0]) == pytest.approx(
        math.inf if what == "all nan" else runs["flag"][0] * statistics.fmean(last), abs=3e-7, rel=1e-2
    )
    assert "planted" not in found or not found["planted"]["within"]


def differences(draw, num):
    """Of runs that are the same: 1e-4 at first, 500 times that from iteration 100 on, where they wander."""
    keep, wander, found = math.exp(-1 / 30), draw.gauss(0, 1), []
    for step in range(1, num + 1):
        wander = keep * wander + math.sqrt(1 - keep**2) * draw.gauss(0, 1)
        growth = 500 ** min(1, (step - 20) / 80) if step > 20 else 1
        found.append(1e-4 * growth * (wander if step > 20 else draw.gauss(0, 1)))
    return found


def same_runs(draw, num):
    """Three seeds by name: the reference, the one that is judged, and one other."""
    runs = {"unfused": [], "flag": [], "te": []}
    for of in [of for _ in range(3) for of in runs.values()]:
        off = (differences(draw, num) if of is not runs["unfused"] else [0.0] * num for _ in range(2))
        steps = zip(range(1, num + 1), *off, strict=True)
        both = {step: (7 + 4 * math.exp(-step / 100) + a, 1.5 * math.exp(b)) for step, a, b in steps}
        of.append(Trained(*({step: pair[i] for step, pair in both.items()} for i in (0, 1))))
    return runs


def test_runs_that_are_the_same_are_called_so():
    """At most 2 % of 200 sets."""
    draw, verdicts = random.Random(62), collections.Counter()
    for _ in range(200):
        runs = collections.defaultdict(dict)
        for name, seeds in same_runs(draw, 300).items():
            for seed, run in enumerate(seeds, 1):
                record = runs[name][seed] = read_logs(f"{name}-{seed}", [])
                record.curves["lm loss"] = [Point(i, round(x, 6), i, 1e-6) for i, x in run.losses.items()]
                record.curves[GRAD_NORM] = [Point(i, round(x, 3), i, 1e-3) for i, x in run.norms.items()]
        verdicts[compare(runs, Judge("unfused", "flag", ["te"], by_seed=True)).verdict] += 1
    assert verdicts["DIFFERENT"] <= 4 and verdicts.total() == verdicts["DIFFERENT"] + verdicts["SAME"]


def off(losses=lambda step, x: x, norms=lambda step, x: x):
    """A run that is the same but for these."""
    return lambda run: Trained(
        {s: losses(s, x) for s, x in run.losses.items()}, {s: norms(s, x) for s, x in run.norms.items()}
    ).log()


def said(text, loss):
    return text + EVALUATION.format(300).replace("4.000000E+00", f"{loss:.6E}")


#: What the flag's run of the second seed does -> its log, and what is said of it. All were SAME once.
WRONG = {
    "an infinite loss at one iteration": (off(lambda s, x: math.inf if s == 150 else x), "lm loss"),
    "nan for eleven": (off(lambda s, x: math.nan if 150 <= s <= 160 else x), "lm loss"),
    "gradient norms nan from 50 on": (off(norms=lambda s, x: x if s < 50 else math.nan), "grad norm"),
    "3 nats more over 100 to 200": (off(lambda s, x: x + 3 * (100 <= s <= 200)), "lm loss"),
    "1 more and 1 less in the last 100": (off(lambda s, x: x + (-1) ** s * (s > 200)), "lm loss"),
    "gradient norms three times as large": (off(norms=lambda s, x: 3 * x), "grad norm"),
    "gradient norms of 0": (off(norms=lambda s, x: x if s < 50 else 0.0), "grad norm"),
    "100 skipped steps": (off(lambda s, x: None if 100 <= s < 200 else x), "skipped steps"),
    "validation": (lambda run: said(run.log(), 9), "lm loss validation"),
    "no gradient norms": (lambda run: re.sub(r"grad norm: \S+ \|", "", run.log()), "grad norm"),
}


@pytest.mark.parametrize("what", [None, *WRONG])
def test_runs_that_differ(tmp_path, no_picture, what):
    for name, seeds in same_runs(random.Random(5), 300).items():
        for seed, run in enumerate(seeds, 1):
            is_wrong = what and (name, seed) == ("flag", 2)
            text = WRONG[what][0](run) if is_wrong else run.log()
            text = text if is_wrong and what == "validation" else said(text, 4)
            (tmp_path / f"{name}-{seed}.log").write_text(text)
    words = [f"--paired={tmp_path}", "unfused", "flag", "--against-noise", "te", f"--out={tmp_path / 'out'}"]
    done = run_here(compare_loss.main, *words)
    *lines, verdict = done.stdout.splitlines()
    assert verdict == ("DIFFERENT" if what else "SAME"), done.stdout
    assert not what or any(re.match(rf"{WRONG[what][1]}.* differs|only .* logs", line) for line in lines)
    looked_at = "looked at: lm loss, grad norm, lm loss validation, skipped steps; iterations 1 to 300"
    assert what or looked_at in done.stdout


def test_the_committed_runs_keep_their_verdicts():
    """By both windows, whose figures the result has, and by blocks, which were not judged then."""
    content = results.read(ROOT / results.RESULTS / "2026-11-26-h100-80gb-hbm3-paired.json")
    judge, rows = Judge("unfused", "flag", content["made_by"]["noise"], by_seed=True), content["rows"]
    for _, of in itertools.groupby(rows, key=lambda row: row["shape"]):
        of = list(of)
        values = {row["variant"]: dict(zip(row["seeds"], row["differences"], strict=True)) for row in of}
        over = statistics.fmean if "last" in of[0]["shape"] else compare_loss.root_mean_square
        figure = Figure("loss", "", values, over, judge.twice(0.0, values))
        assert figure.bound == pytest.approx(of[0]["bound"])
        assert {row["variant"]: figure.is_within(row["variant"]) for row in of} == {
            row["variant"]: row["within"] for row in of
        }
    ways = {row["variant"]: row["on_the_way"] for row in rows if "on_the_way" in row}
    first = {name: math.sqrt(statistics.fmean(x**2 for _, x in way[:5])) for name, way in ways.items()}
    sizes = [{name: {0: x} for name, x in first.items()}]
    sizes += [{name: {0: way[at][1]} for name, way in ways.items()} for at in range(5, len(ways["flag"]))]
    bounds = judge.of_blocks(sizes, 1e-5)
    outside = {
        name for of, bound in zip(sizes, bounds, strict=True) for name, x in of.items() if x[0] > bound
    }
    errors = ("noise-0.3", "noise-1", "labels", "no-grad-weight", "no-grad-hidden")
    assert outside == {f"planted-{error}" for error in errors}


@pytest.mark.parametrize("name", ["no-grad-weight", "no-grad-hidden", "labels", "noise-0.1"])
def test_what_is_planted(name):
    """64 positions of two sequences: the chunk in the middle is 8 of them."""
    make = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=make) for shape in ((64, 2, 8), (32, 8)))
    labels = torch.randint(32, (2, 64), generator=make)
    call = Call(hidden.requires_grad_(), weight.requires_grad_(), labels)

    def made(head):
        loss = head(call).loss
        return loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight))

    right = made(linear_cross_entropy)
    wrong = made(lambda call: same_training.PLANTS[name](linear_cross_entropy, call))
    differs = [(a - b).abs() > 1e-5 for a, b in zip(right, wrong, strict=True)]
    tokens = differs[1].any(-1)
    if name == "no-grad-hidden":
        assert not wrong[1][32:40].any() and tokens.any(1).nonzero().flatten().tolist() == list(range(32, 40))
    elif name == "no-grad-weight":
        chunk = call._replace(hidden=hidden[32:40], labels=labels[:, 32:40].contiguous())
        (lost,) = torch.autograd.grad(linear_cross_entropy(chunk).loss.sum(), weight)
        assert torch.allclose(right[2] - lost, wrong[2], atol=1e-5)
    elif name == "labels":
        assert differs[0].sum() == 2  # the first token of a hundred, and of the last 28
    else:
        relative = (wrong[2] / right[2] - 1).flatten()
        assert 0.08 < relative.std() < 0.12 and tokens.all()
    untouched = {"no-grad-weight": (0, 1), "no-grad-hidden": (0, 2), "labels": (), "noise-0.1": (0,)}[name]
    assert not any(differs[i].any() for i in untouched)


# --- lines of the versions -----------------------------------------------------------------------

#: 0.19 with a mixture of experts, whose losses stand there twice, behind torchrun's prefix; then evaluations.
LINES = """
  params_dtype .................................... torch.bfloat16
[default7]: [2026-11-21 05:15:50.746543] iteration        3/     500 | elapsed time per iteration (ms): \
374.2 | throughput per GPU (TFLOP/s/GPU): 300.1 | \
lm loss: 5.260322E+00 | mtp_1 loss: 5.116029E+00 | load_balancing_loss: 1.012345E+00 | \
load_balancing_loss: 1.01 | z_loss: 0.02 | loss scale: 1.0 | grad norm: 1.694 | num zeros: 0 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 |
 validation loss at iteration 3 | lm loss value: 5.257074E+00 | lm loss PPL: 1.91E+02 |
 validation-code loss at iteration 3 on validation set | lm loss value: 5.2E+00 | lm loss PPL: 1.9E+02 |
 validation loss at iteration 3 on test set | lm loss value: 5.1E+00 | lm loss PPL: 1E+02 |
"""
FIGURES = {"lm loss": 5.260322, "mtp_1 loss": 5.116029, "load_balancing_loss": 1.012345, "z_loss": 0.02}
FIGURES |= {
    "lm loss validation": 5.257074,
    "lm loss validation-code": 5.2,
    "lm loss test": 5.1,
    GRAD_NORM: 1.694,
}


def test_every_loss_of_a_log_is_compared(tmp_path, no_picture):
    compared(tmp_path, (LINES, LINES))
    found = rows(tmp_path)
    assert {name: row["curve"] for name, row in found.items()} == {k: [[3, v, v]] for k, v in FIGURES.items()}
    made = results.read(tmp_path / "out" / "compare_loss.json")["made_by"]
    assert made["runs"]["b"]["precision"] == "bfloat16"


def test_a_cut_line_has_no_wrong_figure():
    text = trained(3).log().rstrip("\n")
    whole, *cuts = (
        read_logs("run", [text[:end].splitlines()]) for end in range(len(text), text.rindex("\n"), -1)
    )
    values = {name: {p.value for p in curve} for name, curve in whole.curves.items()}
    for record in cuts:
        for name, curve in record.curves.items():
            assert {point.value for point in curve} <= values[name]


def test_the_test_set_in_tensorboard(tmp_path):
    """At a run's end Megatron writes both sets under one name, the validation set first."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(tmp_path))
    writer.add_text("params_dtype", "torch.float32")
    scalars = [("lm loss", 5.0), ("moe/load_balancing_loss_layer_0", 1.0), ("lm loss validation ppl", 90.0)]
    scalars += [("lm loss validation", loss) for loss in (4.5, 4.5, 4.25)]  # interval, end, test set
    for name, value in scalars:
        writer.add_scalar(name, value, 2)
    writer.close()
    record = megatron_logs.read_run(tmp_path, "run")
    found = {name: [point.value for point in curve] for name, curve in record.curves.items()}
    assert found == {"lm loss": [5.0], "lm loss validation": [4.5]}
    assert (record.precision, record.num_repeated) == ("float32", 0)


# --- bounds --------------------------------------------------------------------------------------


def committed_launches():
    """Figures by variant of each case of whole launches on H200s."""
    for file in sorted((ROOT / results.RESULTS).glob("*pretrain*.json")):
        of_pretrain = [row for row in results.rows(file) if "case" in row and row["status"] == "ok"]
        for case, rows in itertools.groupby(of_pretrain, key=lambda row: row["case"]):
            yield f"{file.stem} {case}", {row["variant"]: row["figures"] for row in rows}


def of_figures(figures, loss_factor=1.0, norm_factor=1.0):
    """A record with the digits that Megatron printed."""
    record = read_logs("run", [["  params_dtype ... torch.bfloat16"]])
    curves = {name: (values, loss_factor, 1e-6) for name, values in figures["losses"].items()}
    curves[GRAD_NORM] = figures["grad_norms"], norm_factor, 1e-3
    for name, (values, factor, unit) in curves.items():
        record.curves[name] = [Point(i, float(x) * factor, i, unit) for i, x in enumerate(values, 1)]
    return record


def pair(*runs):
    names = ["reference", "other", "noise"]
    records = {name: {0: run} for name, run in zip(names, runs, strict=False) if run}
    return compare(records, Judge("reference", "other", [name for name in records if name == "noise"]))


def test_bounds_on_the_committed_launches():
    """Each is the same training; a loss or a gradient norm that is off by little is not."""
    apart = collections.defaultdict[bool, float](float)
    cases = [(label, runs) for label, runs in committed_launches() if "unfused" in runs]
    assert len(cases) >= 6 and sum("native" in runs for _, runs in cases) >= 4
    for label, runs in cases:
        reference = of_figures(runs.pop("unfused"))
        native = of_figures(runs["native"]) if "native" in runs else None
        for name, figures in runs.items():
            for figure in pair(reference, of_figures(figures)).figures:
                if figure.part == "first 10":
                    is_loss = figure.curve != GRAD_NORM
                    apart[is_loss] = max(apart[is_loss], figure.over("other"))
            for noise in ([None, native] if native else [None]) if name != "native" else []:
                assert pair(reference, of_figures(figures), noise).verdict == "SAME", (label, name)
                # 2e-3 of ln 2 is 1.4e-3 of a bit; a forgotten factor of the head's gradient moves the norm by
                # far more than a twentieth.
                for wrong in (of_figures(figures, 1.002), of_figures(figures, 1.0, 1.05)):
                    assert pair(reference, wrong, noise).verdict == "DIFFERENT", (label, name)
    # The figures that stand beside the fixed bounds in the source, and in docs/tools.md.
    assert apart == pytest.approx({True: 3.0e-4, False: 4.8e-3}, rel=0.05)


# --- the command ---------------------------------------------------------------------------------


def test_the_files_that_it_writes(tmp_path, monkeypatch):
    """A line has a gap at nan, which looks like a missing iteration: the picture has a cross there."""
    pytest.importorskip("matplotlib")
    saved, save = [], compare_loss.pictures.save
    monkeypatch.setattr(
        compare_loss.pictures, "save", lambda figure, path: (saved.append(figure), save(figure, path))
    )
    done = compared(tmp_path, (RUN.log(), changed(22, 1e-4).log()))
    assert done.returncode == 0, done.stdout + done.stderr
    curve = rows(tmp_path)["lm loss"]
    assert (curve["variant"], curve["verdict"], at_iteration(curve)) == ("b", "SAME", 22)
    assert curve["over_seeds"] == pytest.approx(1e-4, rel=0.01)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"compare_loss.json", "compare_loss.png"}
    assert (tmp_path / "out" / "compare_loss.png").read_bytes().startswith(b"\x89PNG")
    compared(tmp_path, (RUN.log(), SICK.log()))
    marks = [line for line in saved[1].axes[0].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in marks] == [[12, 13]]
    assert any("nan or inf" in text.get_text() for text in saved[1].legends[0].get_texts())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["off.log"], "give two runs"),
        (["--paired", "runs", "a"], "with --paired give two names"),
        (["--paired", "runs", "a", "b", "--against-noise", "c"], "no run NAME-SEED of b, c is beside a"),
        (["--paired", "runs", "a", "b", "--against-noise", "c", "b"], "a run is given twice"),
        (["--paired", "runs", "a", "b", "--against-noise", "c", "c"], "a run is given twice"),
        (["off.log", "late.log", "--against-noise", "late.log"], "a run is given twice"),
        (["--paired", "last", "a", "b", "--against-noise", "c"], "no run NAME-SEED of b, c is beside a"),
        (["off.log", "nowhere.log"], "nowhere.log: no regular file or folder"),
        (["off.log", "empty.log"], "has no iteration with a loss"),
        (["off.log", "noise.bin"], "has no iteration with a loss"),
        (["off.log", "folder"], "has no *.log files, nor TensorBoard event files"),
        (["off.log", "above"], "event files are in"),
        (["off.log", "runs"], "holds logs of several runs"),  # would read as a restart: SAME
        (["off.log", "many"], "more than 20 files and folders"),
        (["off.log", "late.log"], "no loss over the same iterations (off.log 1 to 40, late.log 90"),
        (["off.log", "events.out.tfevents.1"], "install tensorboard"),
        (["--launch", "off.log", "--", "torchrun", "x.py"], "--launch makes the runs itself"),
        (["--launch"], "give the launch itself"),
        (["--launch", "--", "bash", "train.sh"], "give the launch itself"),
        (["--launch", "--", "torchrun", "nowhere.py"], "no training script nowhere.py"),
        (["--launch", "--", "torchrun", "x.py", "--save", "x"], "leave out --save"),
        (["--launch", "--", "torchrun", "x.py", "--tensorboard-dir=x"], "leave out --tensorboard-dir"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(megatron_logs, "MOST_ENTRIES", 20)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    files = {
        "off.log": RUN.log(),
        "late.log": trained(100).log(begin=90),
        "empty.log": "Megatron says hello\n",
    }
    files |= {"last/a-1.log": RUN.log(), "last/b-1.log": RUN.log(begin=40)}
    files |= {f"runs/{name}/out.log": trained(3).log() for name in "ab"}
    files |= {f"many/{number}.txt": "" for number in range(30)}
    files |= dict.fromkeys(
        ("folder/x", "above/run/events.out.tfevents.1", "events.out.tfevents.1", "x.py"), ""
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 8)
    here = {file.name for file in tmp_path.iterdir()}
    words = [str(tmp_path / word) if word in here else word for word in words]
    run = run_here(compare_loss.main, f"--out={tmp_path / 'out'}", *words)
    assert run.returncode == 2 and message in run.stderr, run.stdout + run.stderr
    assert len(run.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_starts_and_ranks_of_one_launch_are_one_run_and_one_run_is_none_of_two(tmp_path, no_picture):
    starts = [f"logs/none_{start}" for start in ("abc/attempt_0/0", "abc/attempt_1/1", "def/attempt_0/1")]
    for start in starts:
        (tmp_path / start).mkdir(parents=True)
        (tmp_path / start / "stdout.log").write_text(trained(3).log())
    done = run_here(
        compare_loss.main, tmp_path / "logs", tmp_path / "." / "logs", f"--out={tmp_path / 'out'}"
    )
    assert done.returncode == 0 and "is given twice: a run is compared with itself" in done.stdout
    assert [at for at, *_ in rows(tmp_path)["lm loss"]["curve"]] == [1, 2, 3]


# --- launches ------------------------------------------------------------------------------------


def launched(folder, *flags, options=(), before=(sys.executable,)):
    script = folder / "pretrain_fake.py"
    script.write_text(FAKE_PRETRAIN)
    words = ("--launch", *options, f"--out={folder / 'out'}", "--", *before, script)
    return run_here(compare_loss.main, *words, *flags, "--fused-ce-num-chunks", "3", "--bf16")


def test_two_launches_of_its_own(tmp_path, no_picture):
    run = launched(tmp_path, "--lr", "1e-3", options=["--noise"])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "flag off, native loss" in run.stdout
    assert re.findall(r"^launch (\w+): \d+ s, logs in ", run.stdout, re.MULTILINE) == ["off", "on", "noise"]
    records = [(tmp_path / "out" / name / launches.RECORD).read_text() for name in ("off", "on")]
    start, flags = f"{sys.executable} ", f"{tmp_path / 'pretrain_fake.py'} --lr 1e-3 --bf16"
    assert [json.loads(record)["command"] for record in records] == [
        f"{start}{flags}",
        f"{start}-m megatron_fused_ce.launch {flags} --fused-ce-num-chunks 3 --fused-chunked-ce",
    ]
    content = json.loads((tmp_path / "out" / "compare_loss.json").read_text())["made_by"]
    assert content["runs"]["flag on"]["heads"][0] == 12
    assert content["runs"]["flag off, native loss"]["iterations"] == [1, 12]
    # Again, into the same folder.
    for options in ((), ("--seeds", "1", "2", "3")):
        wrong = launched(tmp_path, "--wrong", options=options)
        assert wrong.returncode == 1 and "DIFFERENT" in wrong.stdout and not wrong.stderr
    record = json.loads((tmp_path / "out" / "on-2" / launches.RECORD).read_text())
    assert record["command"].endswith("--fused-chunked-ce --seed 2")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--break", "failed with status 1: RuntimeError: no kernel for this GPU"),
        ("--idle", "evaluated no head fused"),
        ("precious", "choose another --out"),
    ],
)
def test_launches_that_go_wrong(tmp_path, flag, message):
    precious = tmp_path / "out" / "off" / flag
    if not flag.startswith("--"):
        precious.mkdir(parents=True)
    run = launched(tmp_path, flag)
    assert run.returncode == 2 and message in run.stderr and len(run.stderr.splitlines()) == 1
    assert precious.exists() != flag.startswith("--"), "another's folder is left alone"


def test_a_launch_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "POLL_S", 0.1)
    told = []
    slow = "print(' iteration 3/ 9 | lm loss: 1.0 |', flush=True); import time; time.sleep(60)"
    with pytest.raises(UsageError, match="timed out after 2 s"):
        launches.launch([sys.executable, "-c", slow], tmp_path / "run", 2.0, told.append)
    assert told == ["iteration 3/9"]


RUNNERS = ("", "-m torch.distributed.run", "-m megatron_fused_ce.launch", "-m my.runner --fused-wgrad")


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_flag_and_nothing_else_differs(runner):
    before = f"torchrun --nproc-per-node 2 {runner}".strip()
    on_before = before if runner in RUNNERS[2:] else f"{before} -m megatron_fused_ce.launch"
    given = f"{before} {__file__} --bf16 --fused-ce-strategy grad_in_forward --fused-chunked-ce --lr 1e-3"
    command = launches.Command.of(given.split())
    assert command.off() == f"{before} {__file__} --bf16 --lr 1e-3".split()
    plugin = "--fused-ce-strategy grad_in_forward --fused-chunked-ce"
    assert command.on() == f"{on_before} {__file__} --bf16 --lr 1e-3 {plugin}".split()
    native = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
    assert command.other_stock() == [*command.off(), *native.split()]
    fused = launches.Command.of(f"{given} {native}".split())
    assert "--cross-entropy-loss-fusion" not in fused.other_stock()
