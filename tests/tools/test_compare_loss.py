"""`compare`: runs as Megatron writes them -> exit status, and what is said beside it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import operator
import random
import re
import statistics
from functools import partial
from pathlib import Path

import pytest

from megatron_fused_ce.scripts.lib import losses, results
from megatron_fused_ce.scripts.lib.logs import GRAD_NORM, Point, Record
from megatron_fused_ce.scripts.runs import compare as compare_loss
from megatron_fused_ce.scripts.runs.compare import Comparison, root_mean_square


@dataclasses.dataclass
class Trained:
    """What a run really did, iteration by iteration; a loss of None is a skipped step."""

    losses: dict[int, float | None]
    norms: dict[int, float]

    def but(self, losses=None, norms=None):
        """Changed by functions of an iteration and its value."""
        both = zip((self.losses, self.norms), (losses, norms), strict=True)
        return Trained(*({s: change(s, x) if change else x for s, x in of.items()} for of, change in both))

    def log(self, interval=1, begin=1, end=None, logs_first=True):
        """As `training_log` of 0.16 and newer (``logs_first``) or of 0.15 prints it."""
        since, lines = [], ["[before the start of training step] datetime: 2026-01-01 00:00:00"]
        stamp = "2026-01-01 00:00:00" + (".123456" if logs_first else "")
        for step in range(begin, (end or len(self.losses)) + 1):
            since.append(self.losses[step])
            is_first = logs_first and step == begin
            if step % interval and not is_first:
                continue
            mean = statistics.fmean([loss for loss in since if loss is not None] or [0.0])
            text = f" [{stamp}] iteration {step:8d}/{len(self.losses):8d} | consumed samples: {8 * step} |"
            # Printed where it compares as at least 0 (newer) or above it: never nan.
            if mean > 0 or (logs_first and mean == 0):
                text += f" lm loss: {mean:.6E} |"
            text += f" loss scale: 1.0 | grad norm: {self.norms[step]:.3f} |"
            text += f" number of skipped iterations: {since.count(None):3d} | number of nan iterations:   0 |"
            lines.append(text)
            since = since if is_first else []
        return "\n".join(lines) + "\n"

    def tensorboard(self, folder, begin=1, end=None, interval=1):
        """Writes events into it."""
        pytest.importorskip("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log_dir=str(folder))
        writer.add_text("params_dtype", "torch.float32")
        for step in (s for s in self.losses if begin <= s <= (end or s) and s % interval == 0):
            for tag in ("lm loss", "moe/load_balancing_loss_layer_0", "lm loss validation ppl"):
                writer.add_scalar(tag, self.losses[step], step)
            writer.add_scalar("grad-norm", self.norms[step], step)
        # At a run's end Megatron writes the test set's loss under the validation set's name.
        for loss in (4.0, 4.0, 5.0):
            writer.add_scalar("lm loss validation", loss, 35)
        file = Path(writer.file_writer.event_writer._file_name)
        writer.close()
        # Of two of one second the one with the larger number is read last, as a string.
        file.rename(folder / f"events.out.tfevents.{begin:04}")


def trained(num=40, seed=0):
    """Losses that move by a hundredth from one iteration to the next."""
    draw, steps = random.Random(seed), range(1, num + 1)
    exact = {step: 5.0 - 0.03 * step + 0.1 * draw.random() for step in steps}
    return Trained(exact, {step: 3.0 + draw.random() for step in steps})


def changed(at, by=0.01):
    return RUN.but(lambda step, x: x * (1 + by * (step == at)))


def skipping(*steps, of=None):
    return (of or RUN).but(lambda step, x: None if step in steps else x)


def evaluated(at, loss, name="", on=""):
    """A line of it, by name and set as newer versions have it."""
    return f" validation{name} loss at iteration {at}{on} | lm loss value: {loss:.6E} | lm loss PPL: 5E+1 |\n"


EXACTLY = "--first-bound=0 --first=1000"
RUN, LOST, LONG = trained(), trained(seed=7), trained(150)
RESUMED = LOST.but(*(lambda s, x, of=of: x if s < 21 else of[s] for of in (RUN.losses, RUN.norms)))
SICK = RUN.but(lambda s, x: math.nan if s in (12, 13) else x)
EARLY_NAN = RUN.but(lambda s, x: math.nan if s == 6 else x).log()
NORMS_OFF = RUN.but(norms=lambda s, x: 1.01 * x).log()
OURS, OFF, SKIPS, FEWER_SKIPS = (r.log() for r in (RUN, changed(4), skipping(1, 2, 20), skipping(1, 2)))
FP32, BF16 = (f"  params_dtype .......... torch.{name}\n" for name in ("float32", "bfloat16"))
TALL = " iteration       41/ 50 | lm loss: 1.537932E+01 |"
LINE = " iteration        1/ 5 | lm loss: 5.537932E+00 | grad norm: {} |\n"

#: 0.19 with a mixture of experts, whose losses stand there twice, behind torchrun's prefix; then evaluations.
EXPERTS = "mtp_1 loss: 5.1 | load_balancing_loss: 1.012345E+00 | load_balancing_loss: 1.01 | z_loss: 0.02"
MANY_LOSSES = f"[default7]: [2026-11-21 05:15:50.746543]{LINE.format(f'1.694 | {EXPERTS}')}"
MANY_LOSSES += evaluated(3, 5.3) + evaluated(3, 5.2, "-code", " on validation set")
MANY_LOSSES += evaluated(3, 5.1, on=" on test set")


def of_torchrun(folder):
    """A folder of logs as torchrun's restarts and ranks have it."""
    for start in ("abc/attempt_0/0", "abc/attempt_1/1", "def/attempt_0/1"):
        (folder / f"none_{start}").mkdir(parents=True)
        (folder / f"none_{start}/stdout.log").write_text(OURS)


#: What the runs are -> exit status, what is said ("!": not said), the runs, and options.
VERDICTS = {
    # means over the same iterations, of lines of any --log-interval; an error in one is one of its mean
    "one and five": (1, "+2.0e-03, bound 0", OURS, changed(30).log(5), EXACTLY),
    "fives of 0.15": (0, "11 to 40, on 6 lines", *2 * [RUN.log(5, begin=11, logs_first=False)], EXACTLY),
    "twenties, too long": (0, "--log-interval 1 would tell more", *2 * [RUN.log(20, logs_first=False)]),
    "fives of two versions": (0, "11 to 40, on 6 lines", RUN.log(5), RUN.log(5, logs_first=False), EXACTLY),
    # starts
    "a log of two starts": (0, "!restarted", OURS, RUN.log(end=20) + RUN.log(begin=21), EXACTLY),
    "a restart from a checkpoint": (
        0, "b was restarted at iteration 21: the last start counts", RESUMED.log() + evaluated(35, 5),
        skipping(25, of=LOST).log(end=37) + evaluated(35, 4) + RUN.log(begin=21, end=30), EXACTLY),
    "starts and ranks of one launch": (0, "iterations 1 to 40, on 40 lines", of_torchrun, OURS, EXACTLY),
    "every line twice": (0, "on 8 lines", OURS, re.sub("(.*\n)", r"\1\1", RUN.log(5)), EXACTLY),
    "a cut line": (0, "SAME", OURS + TALL, OURS + TALL[:-3], EXACTLY),
    # skipped steps, nan
    "skips at the start, which have no loss": (
        0, "!skipped steps, lines differs", FEWER_SKIPS, RUN.log(begin=3), EXACTLY),
    "other skips": (1, "skipped steps, lines differs: +1.0e+00", SKIPS, FEWER_SKIPS),
    "other skips in the noise too": (0, "SAME", SKIPS, FEWER_SKIPS, skipping(1, 2, 25).log()),
    "nan in one": (1, "(largest at iteration 12) differs: +inf", OURS, SICK.log()),
    "nan in both": (0, "lm loss is nan in both runs on 2 lines, from 12 on", SICK.log(), SICK.log()),
    "inf beside nan": (1, "grad norm, first 10 differs: +inf", LINE.format("inf"), LINE.format("nan")),
    "nan beside a loss that is none": (
        2, "no loss is finite", *2 * [re.sub(r"lm loss: \S+", "lm loss: nan | z_loss: 1.0", OURS)]),
    # bounds; a first bound of 1 is none
    "fp32 and bf16": (0, "SAME", FP32 + OURS, BF16 + changed(5, 1e-5).log()),
    "a late noise excuses no early jump": (
        1, "lm loss, first 10 differs: +1.0e-04, bound 1.0e-06", OURS, changed(5, 1e-4).log(),
        changed(30, 0.2).log()),
    "an early noise excuses one": (0, "SAME", OURS, OFF, changed(6).log()),
    "a nan in the noise": (1, "lm loss, first 10 differs: +1.0e-02, bound 1.0e-06", OURS, OFF, EARLY_NAN),
    "a noise of none narrows no norm's bound": (0, "SAME", OURS, NORMS_OFF, OURS),
    "no first lines in the noise": (
        0, "lm loss, first 10: a fixed bound, since not all runs have such lines", OURS, OURS, RUN.log(20)),
    "a drift": (
        1, "last 100 differs: +1.2e-02, bound 1.0e-02", LONG.log(),
        LONG.but(lambda s, x: x * (1 + 0.012 * (s > 50))).log()),
    "to and fro": (0, "SAME", LONG.log(), LONG.but(lambda s, x: x * (1 + 0.03 * (-1) ** s * (s > 50))).log()),
    "a validation": (
        1, "validation, first 10 differs: +2.5e-03, bound 5.0e-04", RUN.log(begin=9) + evaluated(9, 4),
        OURS + evaluated(9, 4.01)),
    "validations of other iterations": (
        0, "b: not compared, no iteration in common: lm loss validation",
        *(OURS + evaluated(at, 4) for at in (20, 30))),
    # what is compared
    "a loss of one alone": (
        1, "only b logs mtp_1 loss", OURS, OURS.replace(" lm loss:", " mtp_1 loss: 5.000000E+00 | lm loss:")),
    "digits that are": (
        1, "grad norm, first 10", LINE.format("0.002"), LINE.format("0.004"), "--first-grad-norm-bound=0"),
    "a digit": (0, "SAME", LINE.format("1.0"), LINE.format("1.1"), "--first-grad-norm-bound=0"),
    "every loss of a log, and the digits of its first": (
        1, "z_loss, grad norm, lm loss validation, lm loss validation-code, lm loss test, skipped steps; ",
        MANY_LOSSES, MANY_LOSSES.replace("1.012345", "1.022345")),
    # TensorBoard
    "every fifth iteration beside means": (
        2, "--tensorboard-log-interval 1", partial(RUN.tensorboard, interval=5), RUN.log(5)),
    "a picture": (
        0, "lm loss, grad norm, lm loss validation; ", RUN.tensorboard, changed(22, 1e-4).tensorboard,
        SICK.log()),
    "a restart in TensorBoard": (
        0, "b was restarted at iteration 21: the last start counts", RESUMED.tensorboard,
        lambda folder: [LOST.tensorboard(folder, end=37), RUN.tensorboard(folder, 21, 30)], EXACTLY),
    "a mean over a skipped step": (0, "SAME", RUN.tensorboard, skipping(13).log(5), EXACTLY),
    "its validation set, and fp32": (
        1, "!validation, all (largest", FP32 + OURS + evaluated(35, 4), changed(5, 1e-5).tensorboard),
}  # fmt: skip


@pytest.mark.parametrize("what", VERDICTS)
def test_verdicts(ran, tmp_path, what):
    """Of two runs, each a log's text or a function that writes a folder; a third is noise."""
    status, words, *runs = VERDICTS[what]
    options = runs.pop().split() if str(runs[-1]).startswith("--") else []
    paths = [tmp_path / name for name in ("a", "b", "noise")[: len(runs)]]
    for run, path in zip(runs, paths, strict=True):
        run(path) if callable(run) else path.write_text(run)
    noise = [f"--against-noise={path}" for path in paths[2:]]
    done, *_ = ran(compare_loss.main, *paths[:2], *noise, *options)
    printed = done.stdout + done.stderr
    assert done.returncode == status and (words.strip("!") in printed) != words.startswith("!"), printed
    if status != 2:
        assert done.stdout.splitlines()[-1] == {0: "SAME", 1: "DIFFERENT"}[status]
    assert (tmp_path / "out" / "compare_loss.png").is_file() == ("picture" in what)


def differences(draw, num):
    """Of runs that are the same: 1e-4 at first, 500 times that from iteration 100 on, where they wander."""
    keep, wander, found = math.exp(-1 / 30), draw.gauss(0, 1), []
    for step in range(1, num + 1):
        wander = keep * wander + math.sqrt(1 - keep**2) * draw.gauss(0, 1)
        growth = 500 ** min(1, (step - 20) / 80) if step > 20 else 1
        found.append(1e-4 * growth * (wander if step > 20 else draw.gauss(0, 1)))
    return found


def same_runs(draw, num=300):
    """Three seeds by name: the reference, the one that is judged, and one other."""
    runs, exact = {}, [7 + 4 * math.exp(-step / 100) for step in range(1, num + 1)]
    for seed, name in itertools.product((1, 2, 3), ("unfused", "flag", "te")):
        off, of_norms = (differences(draw, num) if name != "unfused" else [0.0] * num for _ in range(2))
        made = map(operator.add, exact, off), (1.5 * math.exp(x) for x in of_norms)
        runs[name, seed] = Trained(*(dict(enumerate(values, 1)) for values in made))
    return runs


RUNS = same_runs(random.Random(5))


def test_runs_that_are_the_same_are_called_so():
    """At most 2 % of 200 sets."""
    draw, verdicts = random.Random(62), collections.Counter()
    for _ in range(200):
        runs = collections.defaultdict(dict)
        for (name, seed), run in same_runs(draw).items():
            found = {"lm loss": [Point(i, round(x, 6), i, 1e-6) for i, x in run.losses.items()]}
            found[GRAD_NORM] = [Point(i, round(x, 3), i, 1e-3) for i, x in run.norms.items()]
            runs[name][seed] = Record(f"{name}-{seed}", curves=found)
        verdicts[Comparison("unfused", "flag", ["te"], by_seed=True).of(runs).verdict] += 1
    assert verdicts["DIFFERENT"] <= 4 and verdicts.total() == verdicts["DIFFERENT"] + verdicts["SAME"]


def log_of(name, seed, losses=None, norms=None, words=("", ""), validation=4, **how):
    """As it is but for these; ``words``: a pattern, and what stands in its place."""
    log = RUNS[name, seed].but(losses, norms).log(**how)
    return re.sub(*words, log) + evaluated(300, validation)


NAMES = "unfused", "te", "flag"
NO_NORMS = r"grad norm: \S+ \|", ""
MTP, NO_NOISE = {"words": ("loss scale", "mtp_1 loss: 5.0 | loss scale")}, {"te": {"name": "unfused"}}
#: Runs that are the same but for this -> what is said, changes by name or by name and seed, the verdict.
SEEDS = {
    # Once all of these ten were SAME.
    "infinite at one iteration": ("lm loss, all", {"flag-2": lambda s, x: math.inf if s == 150 else x}),
    "nan for eleven": ("lm loss, all", {"flag-2": lambda s, x: math.nan if s // 11 == 20 else x}),
    "norms nan from 50 on": ("grad norm, all", {"flag-2": {"norms": lambda s, x: x if s < 50 else math.nan}}),
    "3 nats more": ("lm loss, iterations 101 to 200", {"flag-2": lambda s, x: x + 3 * (100 <= s <= 200)}),
    "1 more and 1 less": ("lm loss, iterations 201", {"flag-2": lambda s, x: x + (-1) ** s * (s > 200)}),
    "norms three times": ("grad norm, iterations 201 to 300", {"flag-2": {"norms": lambda s, x: 3 * x}}),
    "norms of 0": ("grad norm, all", {"flag-2": {"norms": lambda s, x: x * (s < 50)}}),
    "100 skipped steps": ("skipped steps, lines", {"flag-2": lambda s, x: None if 100 <= s < 200 else x}),
    "validation": ("lm loss validation, all", {"flag-2": {"validation": 9}}),
    "no norms": ("only unfused-2.log logs grad norm", {"flag-2": {"words": NO_NORMS}}),
    # By which rule.
    "to one side": ("lm loss, last 100", {"flag": lambda s, x: x + 0.12}),
    "this way and that": ("lm loss, last 100", {"flag-2": lambda s, x: x - 1, "flag-1": lambda s, x: x + 1}),
    "off at first": ("lm loss, first 10", {"flag": lambda s, x: x + 1e-3 * (s <= 10)}),
    "norms at first": ("grad norm, first 10", {"flag": {"norms": lambda s, x: x * (1 + 0.01 * (s <= 10))}}),
    "more than is printed": (
        "lm loss, last 100", NO_NOISE | {"flag": {"name": "unfused", "losses": lambda s, x: x + 1e-4}}),
    "multi-token prediction": (
        "mtp_1 loss, last 100",
        {"unfused": MTP, "te": MTP, "flag": {"words": ("loss scale", "mtp_1 loss: 5.5 | loss scale")}}),
    # What is the same, or missing.
    "nothing but a router's loss": (
        "looked at: lm loss, grad norm, lm loss validation, skipped steps; iterations 1 to 300, on 300 lines",
        {name: {"words": ("loss scale", f"z_loss: 5.{at} | loss scale")} for at, name in enumerate(NAMES)},
        "SAME"),
    "less than is printed": (
        "; seeds 1, 2, 3", NO_NOISE | {"flag": {"name": "unfused", "losses": lambda s, x: x + 2e-7}}, "SAME"),
    "two seeds": ("left out: flag-3.log ends at iteration 120", {"flag-3": {"end": 120}}, "INCONCLUSIVE"),
    "two of one seed": ("left out: flag-1.log, one more of its name and seed", {"flag-01": {}}, "SAME"),
    "an empty log": (
        "te-4.log has no iteration with a loss", {"te-4": {"seed": 1, "words": ("(?s).+", "")}}, "SAME"),
    "lines of twenty iterations": (
        "--log-interval 1 would tell more", {name: {"interval": 20} for name in NAMES}, "INCONCLUSIVE"),
    "lines of five in the noise": ("lm loss, first 10: not judged", {"te": {"interval": 5}}, "INCONCLUSIVE"),
    "an error on purpose, in a picture": (
        "  planted ", {"planted-1": {"name": "te", "losses": lambda s, x: x + 1, "words": NO_NORMS}}, "SAME"),
}  # fmt: skip


@pytest.mark.parametrize("what", SEEDS)
def test_pairs_by_seed(ran, tmp_path, what):
    """Whatever a seed does by itself, far more than what is looked for, is none of the difference."""
    words, changes, verdict = (*SEEDS[what], "DIFFERENT")[:3]
    for run in {f"{name}-{seed}" for name, seed in RUNS} | {run for run in changes if "-" in run}:
        name, _, seed = run.partition("-")
        how = changes.get(run, changes.get(name, {}))
        how = {"name": name, "seed": int(seed), **({"losses": how} if callable(how) else how)}
        (tmp_path / f"{run}.log").write_text(log_of(**how))
    names = f"--paired={tmp_path}", "unfused", "flag", "--against-noise", "te"
    done, made_by, *_ = ran(compare_loss.main, *names)
    assert done.returncode == compare_loss.STATUS[verdict], done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == verdict and words in done.stdout, done.stdout
    assert not any(re.search(r"iterations \d", note) for note in made_by["notes"]), "of a block"
    assert (tmp_path / "out" / "compare_loss.png").is_file() == ("picture" in what)
    if verdict == "DIFFERENT":
        assert any(problem.startswith(words) for problem in made_by["problems"])
    rows = results.rows(tmp_path / "out" / "compare_loss.json")
    last = {row["variant"]: row for row in rows if row["shape"].startswith("lm loss, last 100, ")}
    assert last["flag"]["seeds"] == [1, 2, 3][: 2 if what == "two seeds" else 3]
    if what == "an error on purpose, in a picture":
        assert not last["planted"]["within"] and 0.8 < last["planted"]["over_seeds"] < 1.2


def test_the_committed_runs_keep_their_verdicts():
    """By both windows, whose figures the result has, and by blocks, which were not judged then."""
    content = results.read(results.REPOSITORY / results.RESULTS / "2026-11-26-h100-80gb-hbm3-paired.json")
    noise, ways, outside = content["made_by"]["noise"], {}, set()
    judge = Comparison("unfused", "flag", noise, by_seed=True)
    for shape, of in itertools.groupby(content["rows"], key=lambda row: row["shape"]):
        of = {row["variant"]: row for row in of}
        ways |= {name: row["on_the_way"] for name, row in of.items() if "on_the_way" in row}
        values = {name: dict(enumerate(row["differences"])) for name, row in of.items()}
        over = statistics.fmean if "last" in shape else root_mean_square
        judge.runs, bound = values, judge.bound(losses.YARDSTICK_FACTOR, 0.0, math.nan, values)
        judge.add("loss", shape, values, over, bound)
        assert bound == pytest.approx(of["flag"]["bound"])
        judged = {row["variant"]: row["within"] for row in judge.rows["loss", shape]}
        assert judged == {name: row["within"] for name, row in of.items()}
    blocks = [{name: {0: root_mean_square(x for _, x in way[:5])} for name, way in ways.items()}]
    blocks += [{name: {0: way[at][1]} for name, way in ways.items()} for at in range(5, len(ways["flag"]))]
    for at, block in enumerate(blocks):
        bound = judge.bound(compare_loss.IN_BLOCK, 1e-5, math.nan, *blocks[: at + 2])
        outside |= {name for name, size in block.items() if size[0] > bound}
    errors = ("noise-0.3", "noise-1", "labels", "no-grad-weight", "no-grad-hidden")
    assert outside == {f"planted-{error}" for error in errors}
