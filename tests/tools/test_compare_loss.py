"""scripts/runs/compare.py and what it reads: lines of Megatron's versions, averages, restarts, bounds."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import random
import statistics
import sys
from pathlib import Path

import pytest

from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.scripts.lib import launches, losses, results
from megatron_fused_ce.scripts.lib import logs as megatron_logs
from megatron_fused_ce.scripts.lib.logs import GRAD_NORM, Point, read_logs, read_run, unit_of
from megatron_fused_ce.scripts.runs import compare as compare_loss
from megatron_fused_ce.scripts.runs.compare import Judge, compare, paired
from tests.support.checkouts import FAKE_PRETRAIN, on_checkouts
from tests.support.commands import run_here

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "docs" / "benchmarks" / "results"


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

    def tensorboard(self, folder, begin=1, end=None, interval=1):
        pytest.importorskip("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log_dir=str(folder))
        for step in range(begin, (end or max(self.losses)) + 1):
            if step % interval == 0:
                writer.add_scalar("lm loss", self.losses[step], step)
                writer.add_scalar("lm loss vs samples", self.losses[step], 8 * step)
                writer.add_scalar("grad-norm", self.norms[step], step)
        writer.close()


def trained(num=40, seed=0, skipped=()):
    """Losses that move by a hundredth from one iteration to the next."""
    draw = random.Random(seed)
    losses = {step: 5.0 - 0.03 * step + 0.1 * draw.random() for step in range(1, num + 1)}
    norms = {step: 3.0 + draw.random() for step in losses}
    return Trained({s: None if s in skipped else loss for s, loss in losses.items()}, norms)


def changed(run, at, by=0.01):
    return Trained({s: loss * (1 + by * (s == at)) for s, loss in run.losses.items()}, run.norms)


def of_log(*texts, name="run"):
    return read_logs(name, [text.splitlines() for text in texts])


def verdict(a, b, noise=None, **judge):
    return compare(a, b, noise, Judge(**judge))


# --- averages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("logs_first", [True, False], ids=["0.16 and newer", "0.15"])
@pytest.mark.parametrize("intervals", [(1, 1), (1, 5), (5, 1), (5, 5), (10, 4)])
def test_lines_of_any_interval_average_the_same_iterations(intervals, logs_first):
    run = trained()
    a, b = (of_log(run.log(interval, logs_first=logs_first)) for interval in intervals)
    found = verdict(a, b, first_bound=0.0, bound=0.0)
    assert found.verdict == "SAME" and found.curves[0].difference == 0
    # A difference in one iteration is one of the mean that it is in.
    worse = of_log(changed(run, 33, 0.05).log(intervals[1], logs_first=logs_first))
    found = verdict(a, worse, bound=1e-3)
    assert found.verdict == "DIFFERENT" and found.curves[0].where in (33, 34, 35, 36, 40)


@pytest.mark.parametrize("logs_first", [True, False], ids=["0.16 and newer", "0.15"])
@pytest.mark.parametrize("interval", [1, 5])
def test_a_log_beside_tensorboard(tmp_path, interval, logs_first):
    run = trained()
    run.tensorboard(tmp_path)
    tensorboard = read_run(tmp_path, "tensorboard")
    log = of_log(run.log(interval, logs_first=logs_first))
    for a, b in ((tensorboard, log), (log, tensorboard)):
        found = verdict(a, b, first_bound=0.0, bound=0.0)
        assert found.verdict == "SAME", found.problems
        assert {curve.name for curve in found.curves} == {"lm loss", GRAD_NORM}
        assert len(found.curves[0].pairs) >= 40 // interval - 2
    found = verdict(tensorboard, of_log(changed(run, 33).log(interval, logs_first=logs_first)))
    assert found.curves[0].difference == pytest.approx(0.01 / interval, rel=0.05)


def test_tensorboard_of_every_fifth_iteration_beside_a_log_of_averages(tmp_path):
    run = trained()
    run.tensorboard(tmp_path, interval=5)
    with pytest.raises(UsageError, match="--tensorboard-log-interval 1"):
        verdict(read_run(tmp_path, "tensorboard"), of_log(run.log(5)))


def test_both_in_tensorboard(tmp_path):
    run = trained()
    run.tensorboard(tmp_path / "a", interval=5)
    changed(run, 30).tensorboard(tmp_path / "b", interval=5)
    found = verdict(read_run(tmp_path / "a", "a"), read_run(tmp_path / "b", "b"), bound=1e-3)
    assert [pair.iteration for pair in found.curves[0].pairs] == list(range(5, 41, 5))
    assert found.problems == ["lm loss differs at iteration 30: 1.0e-02, bound 1.0e-03"]


def test_pairs_of_rows_with_gaps():
    a = [Point(last, float(last), last) for last in (1, 2, 3, 5, 6, 7, 8)]  # no 4
    b = [Point(2, 1.5, 1), Point(4, 3.5, 3), Point(6, 5.5, 5), Point(8, 7.5, 7), Point(9, 1.0, 9)]
    pairs = paired(a, b, alike=True)
    assert [(p.iteration, p.reference, p.other) for p in pairs] == [
        (2, 1.5, 1.5),
        (6, 5.5, 5.5),
        (8, 7.5, 7.5),
    ]
    assert pairs == [
        dataclasses.replace(p, reference=p.other, other=p.reference) for p in paired(b, a, alike=True)
    ]


def test_lines_of_which_nobody_knows_the_average_meet_only_their_like():
    unknown = [Point(2, 5.0, None)]
    assert len(paired(unknown, unknown, alike=True)) == 1
    assert paired(unknown, unknown, alike=False) == []
    assert paired(unknown, [Point(2, 5.0, 2)], alike=True) == []
    # The second line of 0.15 is iteration 2, of newer versions the mean of 1 and 2.
    run = trained()
    found = verdict(of_log(run.log(logs_first=False)), of_log(run.log(logs_first=True)))
    assert found.verdict == "SAME" and found.curves[0].pairs[1].iteration == 3


# --- starts, skips, nan ------------------------------------------------------------------------


def test_a_run_in_two_starts_that_follow_each_other():
    """The second start's first line is averaged into its second too."""
    run = trained()
    whole = of_log(run.log())
    for parts in (
        [run.log(end=40, stop_after=20), run.log(begin=21)],
        [run.log(end=40, stop_after=20) + run.log(begin=21)],
    ):
        found = verdict(whole, of_log(*parts), first_bound=0.0, bound=0.0)
        assert found.verdict == "SAME", found.problems
        assert not found.other.restarts and len(found.curves[0].pairs) >= 38


EVALUATION = " validation loss at iteration {} | lm loss value: 4.000000E+00 | lm loss PPL: 5E+01 |\n"


@pytest.mark.parametrize("kind", ["log", "tensorboard"])
def test_a_restart_from_a_checkpoint_counts_from_there_on(tmp_path, kind):
    """What the first start wrote beyond the checkpoint is no part of the run, nor is its longer tail."""
    run, lost = trained(), trained(seed=7)
    if kind == "log":
        first = lost.log(end=40, stop_after=37) + EVALUATION.format(20) + EVALUATION.format(35)
        restarted = of_log(first + run.log(begin=21, stop_after=30))
        assert [point.last for point in restarted.curves["lm loss validation"]] == [20]
    else:
        lost.tensorboard(tmp_path, end=37)
        run.tensorboard(tmp_path, begin=21, end=30)
        restarted = read_run(tmp_path, "run")
    assert restarted.restarts == [21] and restarted.iterations() == (1, 30)
    for point in restarted.curves["lm loss"]:
        if point.first == point.last:
            wanted = (lost if point.last < 21 else run).losses[point.last]
            assert point.value == pytest.approx(wanted, abs=1e-6)
    notes = verdict(restarted, restarted).notes
    assert notes[0] == "run was restarted at iteration 21: the last start counts"


def test_a_log_in_which_every_line_is_twice():
    run = trained()
    lines = run.log(5).splitlines()
    twice = read_logs("twice", [[line for line in lines for _ in range(2)]])
    found = verdict(of_log(run.log()), twice, first_bound=0.0, bound=0.0)
    assert found.verdict == "SAME" and not twice.restarts
    assert "twice has 9 lines twice: the last of each counts" in found.notes


def test_skipped_steps_have_no_loss():
    run = trained(skipped=(1, 2, 20))
    for logs_first in (True, False):
        record = of_log(run.log(logs_first=logs_first))
        steps = [point.last for point in record.curves["lm loss"]]
        assert not {1, 20} & set(steps) and 0.0 not in [p.value for p in record.curves["lm loss"]]
        assert verdict(record, record).verdict == "SAME"
    # 0.16 and newer print the first iteration and count it into the second line as well.
    assert of_log(run.log()).skipped == {1: 1, 2: 2, 20: 1}
    other = trained(skipped=(1, 2))
    found = verdict(of_log(run.log()), of_log(other.log()))
    assert found.problems == ["skipped steps differ at iteration 20"]
    # Two runs that are the same may skip differently as well.
    noise = of_log(trained(skipped=(1, 2, 25)).log())
    assert verdict(of_log(run.log()), of_log(other.log()), noise).verdict == "SAME"


def test_a_mean_over_skipped_steps_is_none_over_its_iterations(tmp_path):
    run = trained(skipped=(13,))
    full = trained()
    full.tensorboard(tmp_path)
    found = verdict(read_run(tmp_path, "full"), of_log(run.log(5)))
    assert 15 not in [pair.iteration for pair in found.curves[0].pairs]
    assert found.verdict == "SAME"


def test_nan_that_is_not_printed():
    """Megatron prints no loss that is nan: the line is there, the loss is not."""
    run = trained()
    sick = Trained({**run.losses, 12: math.nan, 13: math.nan}, run.norms)
    log = of_log(sick.log())
    at = {point.last: point.value for point in log.curves["lm loss"]}
    assert math.isnan(at[12]) and math.isnan(at[13]) and math.isfinite(at[14])
    found = verdict(of_log(run.log()), log)
    assert found.problems == ["lm loss differs at iteration 12: in one run alone it is not finite"]
    both = verdict(log, log)
    assert both.verdict == "SAME"
    assert both.notes == ["lm loss is nan in both runs on 2 lines, from 12 on"]
    rows = results.finite(compare_loss.rows_of(found))
    json.dumps([rows, compare_loss.facts_of(found, Judge())], allow_nan=False)
    for curve in log.curves.values():
        curve[:] = [dataclasses.replace(point, value=math.nan) for point in curve]
    with pytest.raises(UsageError, match="no loss is finite in both"):
        verdict(log, log)


def test_nan_in_tensorboard(tmp_path):
    run = trained()
    run.tensorboard(tmp_path / "a")
    Trained({**run.losses, 12: math.nan}, run.norms).tensorboard(tmp_path / "b")
    found = verdict(read_run(tmp_path / "a", "a"), read_run(tmp_path / "b", "b"))
    assert [problem.split(":")[0] for problem in found.problems] == ["lm loss differs at iteration 12"]


# --- lines of the versions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (  # 0.15
            " [2026-11-21 04:56:54] iteration        3/       5 | consumed samples:           24 | "
            "elapsed time per iteration (ms): 397.2 | learning rate: 1.000000E-03 | global batch "
            "size:     8 | lm loss: 5.117203E+00 | mtp_1 loss: 5.116029E+00 | loss scale: 1.0 | "
            "grad norm: 1.543 | number of skipped iterations:   0 | number of nan iterations:   0 |",
            {"lm loss": 5.117203, "mtp_1 loss": 5.116029, GRAD_NORM: 1.543},
        ),
        (  # 0.19, mixture of experts: its losses stand there twice
            "[default7]: [2026-11-21 05:15:50.746543] iteration        3/     500 | consumed samples: "
            "24 | elapsed time per iteration (ms): 374.2 | throughput per GPU (TFLOP/s/GPU): 300.1 | "
            "learning rate: 1.000000E-03 | global batch size:     8 | lm loss: 5.260322E+00 | "
            "load_balancing_loss: 1.012345E+00 | load_balancing_loss: 1.01 | z_loss: 0.02 | loss "
            "scale: 1.0 | grad norm: 1.694 | num zeros: 0 | params norm: 24.010 | number of skipped "
            "iterations:   0 | number of nan iterations:   0 |",
            {"lm loss": 5.260322, "load_balancing_loss": 1.012345, "z_loss": 0.02, GRAD_NORM: 1.694},
        ),
        (
            " validation loss at iteration 3 | lm loss value: 5.257074E+00 | lm loss PPL: 1.91E+02 | ",
            {"lm loss validation": 5.257074},
        ),
        (
            " validation-code loss at iteration 3 on validation set | lm loss value: 5.2E+00 | "
            "lm loss PPL: 1.9E+02 | ",
            {"lm loss validation-code": 5.2},
        ),
        (
            " validation loss at iteration 3 on test set | lm loss value: 5.1E+00 | lm loss PPL: 1E+02 |",
            {"lm loss test": 5.1},
        ),
        ("  params_dtype .................................... torch.bfloat16", {}),
        ("[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 |", {}),
    ],
)
def test_lines(line, wanted):
    record = of_log(line)
    assert {name: [(p.last, p.value) for p in curve] for name, curve in record.curves.items()} == {
        name: [(3, value)] for name, value in wanted.items()
    }
    assert record.precision == ("bfloat16" if "bfloat16" in line else "")


def test_printed_digits():
    assert unit_of("5.537932E+00") == pytest.approx(1e-6)
    assert unit_of("5.537932E-02") == pytest.approx(1e-8)
    assert unit_of("2.586") == pytest.approx(1e-3)
    assert unit_of("12") == 1.0
    a, b = ([Point(1, value, 1, 0.001)] for value in (0.002, 0.003))
    assert paired(a, b, alike=True)[0].difference == 0
    c = [Point(1, 0.004, 1, 0.001)]
    assert paired(a, c, alike=True)[0].difference == pytest.approx(1.0)
    assert paired(a, c, alike=True, atol=0.0021)[0].difference == 0


def test_a_cut_line_has_no_wrong_figure():
    text = trained(3).log().rstrip("\n")
    whole = of_log(text)
    values = {name: {p.value for p in curve} for name, curve in whole.curves.items()}
    last_line = text.rindex("\n")
    for cut in range(last_line, len(text)):
        record = of_log(text[:cut])
        for name, curve in record.curves.items():
            assert {point.value for point in curve} <= values[name], text[last_line:cut]


def test_exact_figures_of_the_cpu_harness():
    exact = '[megatron_cpu] exact {"iteration": 3, "grad norm": 2.58612345, "lm loss": 5.53793219}\n'
    line = " iteration        3/ 5 | lm loss: 5.537932E+00 | grad norm: 2.586 |\n"
    record = of_log(exact + line)
    assert record.curves["lm loss"] == [Point(3, 5.53793219, 3)]
    assert record.curves[GRAD_NORM] == [Point(3, 2.58612345, 3)]


def test_the_test_set_in_tensorboard(tmp_path):
    """At a run's end Megatron writes both sets under one name, the validation set first."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(tmp_path))
    writer.add_text("params_dtype", "torch.float32")
    for step in (1, 2):
        writer.add_scalar("lm loss", 5.0, step)
        writer.add_scalar("moe/load_balancing_loss_layer_0", 1.0, step)
    for value in (4.5, 4.5, 4.25):  # at the interval, at the end, the test set
        writer.add_scalar("lm loss validation", value, 2)
        writer.add_scalar("lm loss validation ppl", math.exp(value), 2)
    writer.close()
    record = read_run(tmp_path, "run")
    assert set(record.curves) == {"lm loss", "lm loss validation"}
    assert [point.value for point in record.curves["lm loss validation"]] == [4.5]
    assert (record.precision, record.num_repeated) == ("float32", 0)


# --- bounds --------------------------------------------------------------------------------------


def committed_launches():
    """Figures of whole launches on H200s: (id, unfused, native or None, one with the flag)."""
    for file in sorted(RESULTS.glob("*pretrain*.json")):
        of_pretrain = [row for row in results.rows(file) if "case" in row]
        by_case = itertools.groupby(of_pretrain, key=lambda row: row["case"])
        for case, rows in by_case:
            figures = {row["variant"]: row["figures"] for row in rows if row["status"] == "ok"}
            for name in sorted(set(figures) - {"unfused", "native"}):
                if "unfused" in figures:
                    label = f"{file.stem.removeprefix('2026-11-21-')} {case} {name}"
                    yield label, figures["unfused"], figures.get("native"), figures[name]


LAUNCHES = list(committed_launches())


def of_figures(figures, name, loss_factor=1.0, norm_factor=1.0):
    """A record with the digits that Megatron printed."""
    record = read_logs(name, [[]])
    record.precision = "bfloat16"
    for loss, values in figures["losses"].items():
        record.curves[loss] = [
            Point(i, float(value) * loss_factor, i, 1e-6) for i, value in enumerate(values, 1)
        ]
    record.curves[GRAD_NORM] = [
        Point(i, float(value) * norm_factor, i, 1e-3) for i, value in enumerate(figures["grad_norms"], 1)
    ]
    return record


def test_the_committed_launches_are_there():
    assert len(LAUNCHES) >= 10 and sum(native is not None for _, _, native, _ in LAUNCHES) >= 6


@pytest.mark.parametrize(("label", "unfused", "native", "flag"), LAUNCHES, ids=[x[0] for x in LAUNCHES])
def test_bounds_on_the_committed_launches(label, unfused, native, flag):
    """Each is the same training; a loss or a gradient norm that is off by little is not."""
    reference = of_figures(unfused, "unfused")
    noises = [None] if native is None else [None, of_figures(native, "native")]
    for noise in noises:
        found = verdict(reference, of_figures(flag, "flag"), noise)
        assert found.verdict == "SAME", found.problems
        # 2e-3 of ln 2 is 1.4e-3 of a bit; a forgotten factor of the head's gradient moves the norm by far
        # more than a twentieth.
        for wrong in ({"loss_factor": 1.002}, {"norm_factor": 1.05}):
            assert verdict(reference, of_figures(flag, "flag", **wrong), noise).verdict == "DIFFERENT"


def test_what_the_bounds_are_from():
    """The figures that stand beside the fixed bounds in the source, from the same launches."""
    first: dict[bool, list[float]] = {True: [], False: []}
    whole: dict[bool, list[float]] = {True: [], False: []}
    for _, unfused, native, flag in LAUNCHES:
        for figures in filter(None, (native, flag)):
            found = verdict(of_figures(unfused, "unfused"), of_figures(figures, "other"))
            for curve in found.curves:
                first[curve.name != GRAD_NORM].append(curve.first_difference)
                whole[curve.name != GRAD_NORM].append(curve.difference)
    assert max(first[True]) == pytest.approx(3.0e-4, rel=0.05)
    assert max(first[False]) == pytest.approx(4.8e-3, rel=0.05)
    assert max(whole[True]) == pytest.approx(6.0e-2, rel=0.05)
    assert max(whole[False]) == pytest.approx(1.8e-1, rel=0.05)


def test_fp32_is_held_to_what_can_be_told_apart():
    run = trained()
    a, b = of_log(run.log()), of_log(changed(run, 5, 1e-5).log())
    assert verdict(a, b).verdict == "SAME"
    for record in (a, b):
        record.precision = "float32"
    assert verdict(a, b).verdict == "DIFFERENT"
    b.precision = "bfloat16"
    assert verdict(a, b).verdict == "SAME"


# --- drift ---------------------------------------------------------------------------------------


def noise_of(rng, count, least=-4.5, most=-2.0):
    """Differences of two runs that rounding drives apart, by up to 1 %: they grow, hang together, or jump."""
    size, hang = 10 ** rng.uniform(least, most), rng.choice([0, 0.2, 0.7, 0.9])
    jumps, grows = rng.choice([False, True]), rng.choice([0.25, 1, 4])
    value, found = 0.0, []
    for i in range(count):
        # Student's t of 3: every hundredth is beyond five times the usual.
        one = rng.gauss(0, 1)
        one /= math.sqrt(rng.gammavariate(1.5, 2)) if jumps else 1
        value = hang * value + math.sqrt(1 - hang**2) * one
        found.append(value * size * ((i + 1) / count) ** grows)
    return found


def drift_of(rng, count, kind):
    """To the end, over 100 iterations or more; its mean over the last 100 is 1 to 2 %, or 2 %."""
    begin = rng.randrange(count - 99)
    size = rng.choice([-1, 1]) * 0.01 * (2 if "twice" in kind else rng.uniform(1, 2))
    shape = [max(0.0, i + 1 - begin) if "slope" in kind else float(i >= begin) for i in range(count)]
    return [size * x / statistics.fmean(shape[-100:]) for x in shape]


KINDS = {
    "the same": "SAME", "noise": "SAME", "a late start": "SAME", "a spike": "SAME",
    "a drift": "DIFFERENT", "a slope": "DIFFERENT",
    "a drift, twice": "DIFFERENT", "a slope, twice": "DIFFERENT",
    "much noise": "SAME", "much noise, a drift": "DIFFERENT",
}  # fmt: skip


def made_up(rng, kind):
    """(first iteration, last, mean relative difference) of each line that both log, --log-interval apart."""
    count, interval = rng.randrange(100, 900), rng.choice([1, 1, 5, 10])
    apart = [0.0] * count if kind == "the same" else noise_of(rng, count)
    if "much" in kind:
        apart = noise_of(rng, count, -2, -1.4)  # 1 to 4 %
    if KINDS[kind] == "DIFFERENT":
        apart = [x + y for x, y in zip(apart, drift_of(rng, count, kind), strict=True)]
    if kind == "a spike":
        begin, length = rng.randrange(count - 5), rng.randrange(1, 6)
        apart[begin : begin + length] = [0.05] * length
    start = rng.randrange(count // 2) if kind == "a late start" else 0
    lines = range(start, count - interval + 1, interval)
    return [(i + 1, i + interval, statistics.fmean(apart[i : i + interval])) for i in lines]


def test_verdicts_on_made_up_pairs():
    """3,000 of them; the bounds, which see what is large at once, are off."""
    outcomes = {kind: collections.Counter() for kind in KINDS}
    for seed in range(35_000_000, 35_003_000):
        kind = list(KINDS)[seed % len(KINDS)]
        reference, other = (read_logs(name, [[]]) for name in ("reference", "other"))
        reference.precision = other.precision = "bfloat16"
        reference.curves["lm loss"], other.curves["lm loss"] = [], []
        for first, last, difference in made_up(random.Random(seed), kind):
            loss = 3.0 + 8.0 * math.exp(-last / 40)
            reference.curves["lm loss"].append(Point(last, loss, first, 1e-6))
            other.curves["lm loss"].append(Point(last, loss * (1 + difference), first, 1e-6))
        outcomes[kind][verdict(reference, other, first_bound=1.0, bound=1.0).verdict] += 1
    for kind, found in outcomes.items():
        wrong = {"SAME": "DIFFERENT", "DIFFERENT": "SAME"}[KINDS[kind]]
        assert found[wrong] <= 0.02 * found.total(), outcomes
        if "twice" in kind or kind in ("the same", "noise", "a late start"):
            assert found["INCONCLUSIVE"] <= 0.1 * found.total(), outcomes


def parting(run, iteration, by_loss, by_norm):
    """``run`` from ``iteration`` on ever further away, up to these ratios less 1 at its end."""
    parted = dataclasses.replace(run, name="parted", curves=dict(run.curves))
    for name, by in (("lm loss", by_loss), (GRAD_NORM, by_norm)):
        end = run.curves[name][-1].last
        parted.curves[name] = [
            dataclasses.replace(p, value=p.value * (1 + by * max(0, p.last - iteration) / (end - iteration)))
            for p in run.curves[name]
        ]
    return parted


@pytest.mark.parametrize("with_noise", [False, True])
def test_runs_that_part_slowly(with_noise):
    """200 iterations that part at the 62nd, 9 % in the loss and 45 % in the gradient norm at their end: no
    fixed bound is passed anywhere."""
    unfused, native, flag = next((u, n, f) for label, u, n, f in LAUNCHES if "losses" in label)
    stock, noise = of_figures(unfused, "off"), of_figures(native, "native") if with_noise else None
    assert verdict(stock, of_figures(flag, "on"), noise).verdict == "SAME"
    found = verdict(stock, parting(stock, 62, 0.09, 0.45), noise)
    assert found.verdict == "DIFFERENT"
    assert any("lm loss drifts: +5.8%" in problem for problem in found.problems)
    assert with_noise or len(found.problems) == 1


def test_what_noise_hides_is_inconclusive():
    """And so it is said, with exit status 3."""
    rng = random.Random(1)
    differences = [(i, rng.gauss(0.004, 0.05)) for i in range(1, 101)]
    (window,) = losses.windows(differences)
    assert window.verdict() == "INCONCLUSIVE" and window.verdict(allowed=0.05) == "SAME"
    assert losses.windows(differences[:4]) == []


def test_noise_bounds_first_and_all_apart():
    """A late jump of the noise excuses no early one."""
    run = trained()
    a, noise = of_log(run.log()), of_log(changed(run, 30, 0.2).log(), name="noise")
    assert verdict(a, of_log(changed(run, 31, 0.35).log()), noise).problems == []
    assert verdict(a, of_log(changed(run, 31, 0.45).log()), noise).verdict == "DIFFERENT"
    early = verdict(a, of_log(changed(run, 5, 1e-4).log()), noise)
    assert early.problems == ["lm loss differs by iteration 10: 1.0e-04, bound 1.0e-06"]
    assert verdict(a, of_log(changed(run, 5, 1e-4).log()), noise, first_bound=1e-3).problems == []


def test_a_shorter_noise_judges_what_it_covers():
    run = trained()
    noise = of_log(changed(run, 5, 1e-4).log(stop_after=20), name="noise")
    found = verdict(of_log(run.log()), of_log(changed(run, 30, 0.5).log()), noise)
    assert found.verdict == "SAME"
    assert "lm loss is judged until iteration 20, where noise ends" in found.notes
    broken = of_log(Trained({**run.losses, 12: math.nan}, run.norms).log(), name="noise")
    assert verdict(of_log(run.log()), of_log(changed(run, 30, 0.01).log()), broken).problems


def test_other_ranges_are_compared_where_both_are():
    run = trained()
    found = verdict(of_log(run.log(stop_after=30)), of_log(run.log(begin=11)))
    assert found.verdict == "SAME"
    assert found.notes == ["compared are iterations 11 to 30: run has 1 to 30, run has 11 to 40"]
    late = verdict(of_log(run.log()), of_log(changed(run, 21, 0.01).log(begin=11)))
    assert late.problems == ["lm loss differs by iteration 22: 1.0e-02, bound 5.0e-04"]


def test_lines_too_long_for_the_first_iterations():
    run = trained()
    found = verdict(of_log(run.log(20)), of_log(run.log(20)), first=1)
    assert any("--log-interval 1" in note for note in verdict(
        of_log(run.log(20, logs_first=False)), of_log(run.log(20, logs_first=False))
    ).notes)  # fmt: skip
    assert found.curves[0].first_difference == 0  # newer versions log the first iteration


def test_a_loss_that_one_alone_logs():
    run = trained()
    with_mtp = run.log().replace(" lm loss:", " mtp_1 loss: 5.000000E+00 | lm loss:")
    found = verdict(of_log(run.log()), of_log(with_mtp, name="mtp"))
    assert found.problems == ["only mtp logs mtp_1 loss"]


# --- the command ---------------------------------------------------------------------------------


def run_script(*words):
    return run_here(compare_loss.main, *words)


@pytest.fixture
def logs(tmp_path):
    run = trained()
    for name, content in (("off", run), ("on", changed(run, 22, 1e-4)), ("bad", changed(run, 4))):
        (tmp_path / f"{name}.log").write_text(content.log())
    return tmp_path


def test_same_and_different(logs):
    pytest.importorskip("matplotlib")
    out = logs / "out"
    same = run_script(logs / "off.log", logs / "on.log", f"--out={out}")
    assert same.returncode == 0 and same.stdout.splitlines()[-1] == "SAME", same.stdout + same.stderr
    (curve, *_) = results.rows(out / "compare_loss.json")
    assert (curve["verdict"], curve["variant"], curve["at_iteration"]) == ("SAME", "lm loss", 22)
    assert curve["difference"] == pytest.approx(1e-4, rel=0.01)
    assert (out / "compare_loss.png").read_bytes().startswith(b"\x89PNG")
    different = run_script(logs / "off.log", logs / "bad.log", f"--out={out}")
    assert different.returncode == 1 and different.stdout.splitlines()[-1] == "DIFFERENT"
    assert "lm loss differs by iteration 10: 1.0e-02, bound 5.0e-04" in different.stdout
    assert results.rows(out / "compare_loss.json")[0]["verdict"] == "DIFFERENT"
    assert sorted(file.name for file in out.iterdir()) == ["compare_loss.json", "compare_loss.png"]
    words = (logs / "off.log", logs / "bad.log", f"--out={out}", "--first-bound=0.02")
    assert run_script(*words).returncode == 0
    noisy = run_script(*words[:3], f"--against-noise={logs / 'bad.log'}")
    assert noisy.returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["off.log"], "give two runs"),
        (["off.log", "nowhere.log"], "no file or folder"),
        (["off.log", "empty.log"], "has no iteration with a loss"),
        (["off.log", "noise.bin"], "has no iteration with a loss"),
        (["off.log", "folder"], "neither TensorBoard event files nor *.log files"),
        (["off.log", "above"], "event files are in"),
        (["off.log", "late.log"], "no loss over the same iterations (off.log 1 to 40, late.log 90"),
        (["off.log", "on.log", "--first=0"], "argument --first: expected a whole number from 1"),
        (["--launch", "off.log", "--", "torchrun", "x.py"], "--launch makes the runs itself"),
        (["--launch"], "give the launch itself"),
        (["--launch", "--", "bash", "train.sh"], "give the launch itself"),
        (["--launch", "--", "torchrun", "nowhere.py"], "no training script nowhere.py"),
    ],
)
def test_bad_input_is_one_line_and_status_2(logs, words, message):
    (logs / "empty.log").write_text("Megatron says hello\n")
    (logs / "noise.bin").write_bytes(bytes(range(256)) * 8)
    (logs / "folder").mkdir()
    (logs / "above" / "run").mkdir(parents=True)
    (logs / "above" / "run" / "events.out.tfevents.1").touch()
    (logs / "late.log").write_text(trained(100).log(begin=90))
    names = {file.name for file in logs.iterdir()}
    words = [str(logs / word) if word in names else word for word in words]
    cut = words.index("--") if "--" in words else len(words)
    run = run_script(*words[:cut], f"--out={logs / 'out'}", *words[cut:])
    assert run.returncode == 2 and message in run.stderr, run.stdout + run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (logs / "out").exists()


def test_tensorboard_that_is_not_installed(logs, monkeypatch, capsys):
    (logs / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    assert compare_loss.main([str(logs / "off.log"), str(logs / "events.out.tfevents.1")]) == 2
    assert "install tensorboard" in capsys.readouterr().err


def test_names_are_the_ends_that_differ():
    paths = [Path("/runs/a/off/log.txt"), Path("/runs/b/off/log.txt")]
    assert compare_loss._names_of(paths) == ["a/off/log.txt", "b/off/log.txt"]
    assert len(set(compare_loss._names_of(paths[:1] * 2))) == 2


# --- launches ------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "pretrain_fake.py"
    script.write_text(FAKE_PRETRAIN)
    return script


def launched(fake, tmp_path, *flags, options=()):
    words = ("--launch", *options, f"--out={tmp_path / 'out'}", "--", sys.executable, fake)
    return run_script(*words, *flags, "--fused-ce-num-chunks", "3", "--bf16")


def test_two_launches_of_its_own(fake, tmp_path):
    run = launched(fake, tmp_path, "--lr", "1e-3", options=["--noise"])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the noise run, flag off, native loss, against flag off" in run.stdout
    records = [(tmp_path / "out" / name / launches.RECORD).read_text() for name in ("off", "on")]
    commands = [json.loads(record)["command"] for record in records]
    start, flags = f"{sys.executable} ", "--lr 1e-3 --bf16"
    assert commands == [
        f"{start}{fake} {flags}",
        f"{start}-m megatron_fused_ce.launch {fake} {flags} --fused-ce-num-chunks 3 --fused-chunked-ce",
    ]
    content = json.loads((tmp_path / "out" / "compare_loss.json").read_text())["made_by"]
    assert content["other"]["heads_fused"] == 12 and content["noise"]["last_iteration"] == 12
    assert launched(fake, tmp_path).returncode == 0  # again, into the same folder


@pytest.mark.parametrize(
    ("flag", "status", "message"),
    [
        ("--wrong", 1, "lm loss differs"),
        ("--break", 2, "failed with status 1: RuntimeError: no kernel for this GPU"),
        ("--idle", 2, "evaluated no head fused"),
    ],
)
def test_launches_that_go_wrong(fake, tmp_path, flag, status, message):
    run = launched(fake, tmp_path, flag)
    assert run.returncode == status
    assert message in (run.stderr if status == 2 else run.stdout)
    assert len(run.stderr.splitlines()) == (status == 2)


def test_a_folder_of_something_else_is_left_alone(fake, tmp_path):
    precious = tmp_path / "out" / "off" / "checkpoint"
    precious.mkdir(parents=True)
    run = launched(fake, tmp_path)
    assert run.returncode == 2 and "choose another --out" in run.stderr
    assert precious.exists()


def test_a_launch_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "POLL_S", 0.1)
    told = []
    slow = "print(' iteration 3/ 9 | lm loss: 1.0 |', flush=True); import time; time.sleep(60)"
    with pytest.raises(UsageError, match="timed out after 2 s"):
        launches.launch([sys.executable, "-c", slow], tmp_path / "run", 2.0, told.append)
    assert told == ["iteration 3/9"]


@pytest.mark.parametrize(
    ("before", "on_before"),
    [
        ("torchrun --nproc-per-node 2", "torchrun --nproc-per-node 2 -m megatron_fused_ce.launch"),
        (
            "python -m torch.distributed.run --nproc-per-node 2",
            "python -m torch.distributed.run --nproc-per-node 2 -m megatron_fused_ce.launch",
        ),
        ("torchrun -m megatron_fused_ce.launch", "torchrun -m megatron_fused_ce.launch"),
        (
            "torchrun -m megatron_fused_ce.scripts.lib.megatron_cpu --fused-wgrad",
            "torchrun -m megatron_fused_ce.scripts.lib.megatron_cpu --fused-wgrad",
        ),
    ],
)
def test_the_flag_and_nothing_else_differs(fake, before, on_before):
    given = f"{before} {fake} --bf16 --fused-ce-strategy grad_in_forward --fused-chunked-ce --lr 1e-3"
    command = launches.Command.of(given.split())
    assert command.off() == f"{before} {fake} --bf16 --lr 1e-3".split()
    plugin = "--fused-ce-strategy grad_in_forward --fused-chunked-ce"
    assert command.on() == f"{on_before} {fake} --bf16 --lr 1e-3 {plugin}".split()
    native = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
    assert command.other_stock() == [*command.off(), *native.split()]
    fused = launches.Command.of(f"{given} {native}".split())
    assert "--cross-entropy-loss-fusion" not in fused.other_stock()


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir=x"])
def test_launches_that_would_write_to_one_place(fake, flag):
    with pytest.raises(UsageError, match=f"leave out {flag.split('=')[0]}"):
        launches.Command.of(["torchrun", str(fake), flag, "there"])


@on_checkouts
@pytest.mark.parametrize("extra", ["", "--fused-ce-z-loss 1e-5"], ids=["same", "another loss"])
def test_two_launches_of_pretrain_gpt(checkout, tmp_path, monkeypatch, extra):
    from tests.support.cpu_case import cpu_case

    case = cpu_case("mtp")
    words = ["--launch", f"--out={tmp_path}", "--", sys.executable, "-m", "torch.distributed.run"]
    words += ["--standalone", "--nproc-per-node", "2", "-m"]
    words += ["megatron_fused_ce.scripts.lib.megatron_cpu", "--fused-wgrad", f"{checkout}/pretrain_gpt.py"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    run = run_script(*words, *case.args, *extra.split())
    assert run.returncode == bool(extra), run.stdout + run.stderr
    content = results.read(tmp_path / "compare_loss.json")
    names, source = {row["variant"] for row in content["rows"]}, content["made_by"]
    assert names == {"lm loss", "mtp_1 loss", GRAD_NORM, "lm loss validation", "lm loss test"}
    assert source["other"]["heads_fused"] == 64 and source["reference"]["precision"] == "float32"


# --- folders that are no run ------------------------------------------------------------------


def test_logs_of_several_runs_are_not_merged(tmp_path):
    """Two runs below one folder would read as a restart of each other: SAME, whatever they are."""
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "out.log").write_text(trained(3).log())
    with pytest.raises(UsageError, match="holds logs of several runs"):
        read_run(tmp_path / "runs", "x")
    assert read_run(tmp_path / "runs" / "a", "x").curves


def test_starts_and_ranks_of_one_launch_are_one_run(tmp_path):
    for start in ("none_abc/attempt_0/0", "none_abc/attempt_1/1", "none_def/attempt_0/1"):
        (tmp_path / "logs" / start).mkdir(parents=True)
        (tmp_path / "logs" / start / "stdout.log").write_text(trained(3).log())
    assert read_run(tmp_path, "x").iterations() == (1, 3)


def test_a_folder_of_everything_is_not_walked(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_logs, "MOST_ENTRIES", 20)
    for number in range(30):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(UsageError, match="more than 20 files and folders"):
        read_run(tmp_path, "x")


def test_one_run_given_twice_is_said(tmp_path):
    (tmp_path / "a.log").write_text(trained(3).log())
    done = run_script(tmp_path / "a.log", tmp_path / "." / "a.log", f"--out={tmp_path / 'out'}")
    assert done.returncode == 0 and "is given twice: a run is compared with itself" in done.stdout


def test_the_picture_marks_what_is_not_finite(tmp_path, monkeypatch):
    """A line has a gap there, which looks like a missing iteration."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(compare_loss.pictures, "save", lambda figure, path: figures.append(figure))
    runs = [of_log(trained(6).log(), name=name) for name in "ab"]
    curve = runs[1].curves["lm loss"]
    curve[3] = dataclasses.replace(curve[3], value=math.nan)
    assert compare_loss.draw(compare(*runs, None), tmp_path / "x.png")
    marks = [line for line in figures[0].axes[0].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in marks] == [[4]]
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert any("nan or inf" in label for label in labels)
