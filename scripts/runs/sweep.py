"""How many chunks? Time against peak memory over chunk counts and strategies, and the flags to use.

    python -m megatron_fused_ce sweep --tokens 8192 --hidden 4096 --vocab 128256
    torchrun --nproc-per-node 4 scripts/sweep_chunks.py --sequence-parallel
    python -m megatron_fused_ce sweep --through-megatron MEGATRON_LM --nproc 8 -- --num-layers 32 ...

The head alone, a training step, runs on this machine's GPUs or CPU, measured as `scripts.bench` does: checked
against fp64 before anything is timed, then in interleaved blocks. With --through-megatron each cell is a
short launch of the real pretraining script with the arguments after --, and so are Megatron's own losses;
losses are compared with unfused's (bound: twice native's difference, or 5e-4, fp32 1e-6). Launches that an
earlier call with the same arguments and sources left in --out are kept.

Times are the slowest rank's, peaks the largest of any rank: of the head above its inputs, grad_hidden and
the wgrad accumulator, of a launch the whole model's. Out of memory is a row. Recommended is the smallest
peak among those within --tolerance of the fastest.

Writes sweep.json and sweep.md to --out. Exit code 1: a wrong result or a launch that failed; 2: arguments
that do not fit.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.cli import command_line as cli
from megatron_fused_ce.cli.command_line import UsageError
from megatron_fused_ce.config import STRATEGY_CHOICES
from megatron_fused_ce.scripts.bench.cases import Cell, world_size
from megatron_fused_ce.scripts.lib import launches, losses, results, tables
from megatron_fused_ce.scripts.lib.launches import REFERENCE, YARDSTICK, Case, Checkout, Run
from megatron_fused_ce.scripts.lib.logs import Figures

OK, OUT_OF_MEMORY, AUTO, STOCK = "ok", "out of memory", "auto", (REFERENCE, YARDSTICK)
STRATEGIES = [name for name in STRATEGY_CHOICES if name != AUTO]
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Launches take a minute or so each: fewer of them.
CHUNKS, LAUNCHED_CHUNKS = [1, 2, 4, 8, 16, 32], [1, 4, 16]
#: Two peaks that are this close are the same to a user.
SAME_PEAK = 1.01
LESS = "use fewer tokens, more --chunks or more ranks"
ON_A_CPU = (
    "Not so on a GPU: `auto` weighs strategies and chunks by the times of GPUs, where other kernels run, and "
    "GEMMs are far faster beside memory than here. Sweep there."
)
#: Flags of the user's that the sweep sets itself, and those of losses that stock launches do not have.
SWEPT = (FLAG, *(f"--fused-ce-{name}" for name in ("strategy", "num-chunks", "chunk-tokens", "memory-mb")))
OTHER = "label-smoothing label-smoothing-form z-loss logit-softcap ignore-index mask-padded-vocab"
OTHER_LOSS = {f"--fused-ce-{name}" for name in OTHER.split()}


@dataclass(frozen=True)
class Row:
    """One thing to measure, and what became of it."""

    strategy: str  # of this package, or one of STOCK
    num_chunks: int | None = None  # None: the planner's, or none
    plan: str = ""  # what served, where it is known: "store, 2 chunks of 4096 tokens"
    status: str = ""  # OK, OUT_OF_MEMORY, or what went wrong in one line
    time_ms: float | None = None
    ratio: float | None = None  # over the reference's time
    spread: float | None = None  # of the time, largest less smallest over the median
    peak_mib: float | None = None  # None: not known, as Megatron's on a CPU
    error: float | None = None  # relative: a head's larger one to fp64, or of losses to the stock launch's
    flags: str = ""
    on_front: bool = False
    recommended: bool = False

    @staticmethod
    def of(strategy: str, num_chunks: int | None = None) -> Row:
        words = [] if strategy in STOCK else [FLAG]
        words += [] if strategy in (AUTO, *STOCK) else ["--fused-ce-strategy", strategy]
        words += [] if num_chunks is None else ["--fused-ce-num-chunks", str(num_chunks)]
        return Row(strategy, num_chunks, flags=" ".join(words))

    @property
    def name(self) -> str:
        return self.strategy if self.num_chunks is None else f"{self.strategy} x {self.num_chunks}"

    @property
    def is_ours(self) -> bool:
        return self.status == OK and self.strategy not in STOCK


# --- the choice ------------------------------------------------------------------------------------


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices, in order, of the points that no other is as good as in both numbers and better in one."""
    front, best = list[int](), (math.inf, math.inf)
    for i in sorted(range(len(points)), key=points.__getitem__):
        if points[i][1] < best[1] or points[i] == best:
            front.append(i)
            best = points[i]
    return sorted(front)


def recommend(rows: Sequence[Row], tolerance: float) -> tuple[Row, str]:
    """The row with the smallest peak among those within ``tolerance`` of the fastest, and why.

    `auto` comes first among peaks within `SAME_PEAK`, then the fastest; so without peaks. One of ours ran.
    """
    ours = {row: row.ratio for row in rows if row.is_ours and row.ratio is not None}
    fastest = min(ours, key=ours.__getitem__)
    near = [row for row in ours if ours[row] <= ours[fastest] * (1 + tolerance)]
    peaks = [row.peak_mib for row in near if row.peak_mib is not None]
    near = [row for row in near if not peaks or (row.peak_mib or math.inf) <= min(peaks) * SAME_PEAK]
    best = min(near, key=lambda row: (row.strategy != AUTO, ours[row]))
    within = f"within {100 * tolerance:g} % of the fastest"
    if peaks:
        least = "the smallest peak" if best.peak_mib == min(peaks) else "to 1 % the smallest peak"
        why = f"It has {least}, {best.peak_mib:.1f} MiB, of those {within}"
    else:
        why = f"Peaks are unknown here; it is {within if best is not fastest else 'the fastest'}"
    if best is not fastest:
        why += f" ({fastest.name}) and takes {ours[best] / ours[fastest] - 1:.1%} more time"
    why = f"{why}. {_beside_auto(best, next((row for row in rows if row.strategy == AUTO), None))}"
    spread = statistics.median([row.spread for row in ours if row.spread is not None] or [0.0])
    if spread > tolerance:
        why += (
            f" Times of one row differ by {spread:.1%} among themselves (the median row), which is more than "
            f"{100 * tolerance:g} %: measure longer, or with nothing else running."
        )
    return best, why


def _beside_auto(best: Row, auto: Row | None) -> str:
    """What the defaults would cost."""
    if best is auto:
        return f"It is what {FLAG} does by itself: leave the defaults alone."
    if auto is None or auto.ratio is None or best.ratio is None:
        return f"The defaults: {auto.status}." if auto else ""
    said = f"The defaults{f' ({auto.plan})' * bool(auto.plan)} take {auto.ratio / best.ratio:.3f} of its time"
    if auto.peak_mib is not None and best.peak_mib is not None:
        said += f" and {auto.peak_mib - best.peak_mib:+.1f} MiB"
    return f"{said}."


@dataclass(frozen=True)
class SweepResult:
    rows: list[Row]
    facts: dict[str, Any]

    @staticmethod
    def of(rows: Sequence[Row], facts: dict[str, Any], tolerance: float) -> SweepResult:
        """Ratios, to `auto` or where it does not fit the last, the Pareto front, the recommended row.

        Raises UsageError where nothing of ours ran.
        """
        ran = [row for row in rows if row.is_ours and row.time_ms]
        if not ran:
            raise UsageError(f"nothing of this package ran to its end: {LESS}")
        reference = ran[0] if ran[0].strategy == AUTO else ran[-1]
        below = reference.time_ms or math.inf
        rows = [replace(row, ratio=row.time_ms and row.time_ms / below) for row in rows]
        known = [row for row in rows if row.status == OK and row.ratio and row.peak_mib]
        front = {known[i] for i in pareto_front([(row.ratio or 0.0, row.peak_mib or 0.0) for row in known])}
        best, why = recommend(rows, tolerance)
        rows = [replace(row, on_front=row in front, recommended=row is best) for row in rows]
        facts = facts | {"reference": reference.name, "tolerance": tolerance}
        return SweepResult(rows, facts | {"recommended": {"flags": best.flags, "why": why}})

    @property
    def on_cpu(self) -> bool:
        return "CPU" in self.facts["device"]

    @property
    def about(self) -> str:
        facts = self.facts
        if facts["what"] != "head":
            return f"{facts['script']} of {facts['megatron']}, {facts['nproc']} ranks"
        sizes = f"T = {facts['T']}, H = {facts['H']}, V = {facts['V']} rows a rank, {facts['dtype']}"
        return f"{sizes}, TP {facts['tp']}{', sequence parallel' if facts['sp'] else ''}"


# --- the head alone --------------------------------------------------------------------------------


def of_head(given: argparse.Namespace, rows: list[Row], source: results.Row) -> SweepResult:
    import torch

    from megatron_fused_ce import FusedCEConfig
    from megatron_fused_ce.scripts.bench import loss, measure
    from megatron_fused_ce.scripts.bench.problem import World

    world = World(given.device == "cuda", given.sequence_parallel)
    on_cpu = f"{source['device']}, {torch.get_num_threads()} threads"
    facts = {"what": "head", "dtype": given.dtype, "tp": world.size, "blocks": given.blocks}
    facts["sample_ms"] = given.sample_ms
    facts["device"] = torch.cuda.get_device_name() if world.on_gpu else on_cpu
    configs = {row.name: FusedCEConfig(strategy=row.strategy, num_chunks=row.num_chunks) for row in rows}
    cases = [loss.of_config(world, name, config) for name, config in configs.items()]
    shape = Cell("head", given.tokens, given.hidden, given.vocab, world.sequence_parallel)
    try:
        measured = measure.measure(replace(loss.OP, bases=()), shape, cases, given, world, source | facts)
    except RuntimeError as error:
        if isinstance(error, measure.WrongResult) or not measure.is_out_of_memory(error):
            raise
        raise UsageError(f"the operands alone do not fit {given.device}'s memory: {LESS}") from None
    finally:
        world.close()
    found = []
    for row, of in zip(rows, measured, strict=True):
        came = {name: of[name] for name in ("time_ms", "spread", "peak_mib")}
        if size := of.get("chunk_tokens"):
            num = math.ceil(given.tokens / size)
            came["plan"] = f"{of['plan']}, {num} chunk{'s' * (num > 1)} of {size} tokens"
        ran = of["time_ms"] is not None
        came |= {"status": OK, "error": of["error"]} if ran else {"status": str(of["error"])}
        found.append(replace(row, **came))
    facts |= {name: measured[0][name] for name in ("T", "H", "V", "sp")}
    return SweepResult.of(found, source | facts, given.tolerance / 100)


# --- launches of Megatron-LM -----------------------------------------------------------------------


def of_launches(given: argparse.Namespace, rows: list[Row], source: results.Row) -> SweepResult:
    """Logs in OUT/launches. Raises UsageError where arguments do not fit, or the first launch fails."""
    checkout, folder = Checkout.at(given.through_megatron), given.out.resolve() / "launches"
    auto, *others = rows
    stock, plugin = launches.split_plugin_words(given.words)
    args = _without(stock, "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl")
    ends = ["--log-interval", "1", "--eval-iters", "0", "--exit-interval", str(given.iterations)]
    case = Case("sweep", given.script, given.nproc, args + ends)
    found, logged = list[Row](), dict[str, Figures]()
    for row in (auto, *map(Row.of, STOCK), *others):
        is_stock = row.strategy in STOCK
        flags = shlex.split(launches.STOCK[row.strategy] if is_stock else row.flags)
        flags += [] if is_stock else _without(plugin, *SWEPT)
        name = row.name.replace(" ", "")
        run = Run(checkout, "gpt", case, name, tuple(flags), given.device, given.timeout)
        figures, was_there = run.execute(folder, given.fresh)
        time_ms, spread = figures.time_ms(given.warmup)
        status = figures.status
        if status == OK and time_ms is None:
            status = f"ended after {len(figures.iteration_times_ms)} iterations"
        elif status == OK and not is_stock and not figures.is_fused:
            status = "the head was not fused"
        elif status not in (OK, OUT_OF_MEMORY):
            status = f"{status}: {figures.error}".removesuffix(": ")
        if not found and status not in (OK, OUT_OF_MEMORY):
            raise UsageError(f"the launch with {row.flags}: {status}; its logs are in {folder}")
        came = "kept; --fresh launches again" if was_there else f"{figures.wall_s:.0f} s"
        print(f"{row.name}: {status} ({came})", flush=True)
        if status == OK:
            logged[row.name] = figures
            row = replace(row, time_ms=time_ms, spread=spread, peak_mib=figures.max_allocated_mb)
        found.append(replace(row, status=status))
    bound = losses.FIRST_BOUNDS[0][{"--bf16", "--fp16"}.isdisjoint(case.args)]
    if {*STOCK} <= logged.keys():
        noise = losses.loss_difference(logged[YARDSTICK], logged[REFERENCE])
        bound = max(bound, losses.YARDSTICK_FACTOR * noise)
    beside = next((name for name in (*STOCK, *logged) if name in logged), "")
    for at, row in enumerate(found):
        if row.name in logged and row.name != beside:
            error, status = losses.loss_difference(logged[row.name], logged[beside]), OK
            if row.is_ours and not error <= bound:
                status = f"losses differ from {beside}'s by {error:.1e}"
            found[at] = replace(row, error=error, status=status)
    facts = {"what": "pretrain", "megatron": checkout.label, "loss_bound": bound, "args": shlex.join(args)}
    facts |= {name: getattr(given, name) for name in ("script", "nproc", "iterations", "warmup")}
    facts["plugin_args"] = shlex.join(_without(plugin, *SWEPT))
    return SweepResult.of(found, source | facts, given.tolerance / 100)


def _without(words: Sequence[str], *names: str) -> list[str]:
    """Without these options and their values."""
    kept, keeps = list[str](), True
    for word in words:
        keeps = word.partition("=")[0] not in names if word.startswith("--") else keeps
        kept += [word] if keeps else []
    return kept


def check_launches(given: argparse.Namespace) -> None:
    """Raises UsageError where the checkout or the arguments do not fit."""
    checkout = Checkout.at(given.through_megatron)
    if not (checkout.path / given.script).is_file():
        raise UsageError(f"--script: {checkout.label} has no {given.script}")
    if not (given.words and given.words[0].startswith("--")):
        alone = "the arguments of the training script alone, from its first --option on"
        raise UsageError(f"after -- give {alone}")
    launches.refuse_shared_folders(given.words)
    for option in given.words:
        if option.partition("=")[0] in OTHER_LOSS:
            raise UsageError(f"leave out {option}: the stock launches have no such loss to compare with")


# --- the report ------------------------------------------------------------------------------------


def markdown(result: SweepResult) -> str:
    facts, launched = result.facts, result.facts["what"] == "pretrain"
    over, recommended = facts["reference"], facts["recommended"]
    versions = f"torch {facts['torch']}, triton {facts['triton']}"
    lines = [f"{result.about}; {facts['device']}, {versions}, commit {facts['commit']}.", ""]
    legend = [f"Over {over}: the time over that of `{over}`."]
    if launched:
        lines += [f"    {facts['args']} {facts['plugin_args']}".rstrip(), ""]
        legend += ["Peaks are Megatron's max allocated; on a CPU it has none."]
        legend += [f"Errors: of any loss, relative to stock; bound {facts['loss_bound']:.1e}."]
    else:
        by = "live storages" if result.on_cpu else "the allocator"
        legend += [f"Peaks are above inputs, `grad_hidden` and the wgrad accumulator, by {by}."]
        legend += ["Errors: the larger gradient's, norm-relative to fp64."]
    lines += [" ".join([*legend, "Front: nothing else is as good in both time and peak."]), ""]
    table = []
    for row in result.rows:
        ok = row.status == OK
        table.append([
            row.strategy, row.num_chunks, *([] if launched else [row.plan]),
            tables.cell(row.time_ms, ".2f", "") if ok else row.status, tables.cell(row.ratio, ".3f", ""),
            tables.cell(row.spread, ".3f", ""), tables.cell(row.peak_mib, ".2f", "unknown" if ok else ""),
            tables.cell(row.error, ".1e", ""),
            ", ".join(["yes"] * row.on_front + ["recommended"] * row.recommended),
        ])  # fmt: skip
    head = ["strategy", "chunks", *([] if launched else ["what ran"]), "ms", f"over {over}"]
    lines += [tables.markdown([*head, "spread", "peak, MiB", "error", "front"], table), ""]
    words = [
        f"Recommended{' on this CPU' * result.on_cpu}:",
        f"    {recommended['flags']}",
        recommended["why"],
    ]
    words += [ON_A_CPU] * result.on_cpu
    return "\n".join([*lines, "\n\n".join(words)]) + "\n"


def write(result: SweepResult, out: Path) -> None:
    rows = [{"shape": result.about, "variant": row.name, **asdict(row)} for row in result.rows]
    results.write(out / "sweep.json", rows, result.facts)
    results.write_whole(out / "sweep.md", markdown(result))


# --- the command -----------------------------------------------------------------------------------


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Raises UsageError where arguments do not fit each other, SystemExit where one does not by itself."""
    parser = cli.Parser("python -m megatron_fused_ce sweep", __doc__ or "")
    add, whole, number = parser.add_argument, cli.whole, cli.number
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--chunks", type=whole(), nargs="+", metavar="N", help="[1 2 4 8 16 32; of launches 1 4 16]")
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="[all]")
    slower = "recommend the smallest peak among those that take so much longer than the fastest [1]"
    add("--tolerance", type=number(), default=1.0, metavar="PERCENT", help=slower)
    add("--out", type=Path, default=Path("build/sweep"))
    add = parser.add_argument_group("the head alone, on one process or under torchrun").add_argument
    add("--tokens", type=whole(), help="T [2048 on a CPU, 8192 on a GPU]")
    add("--hidden", type=whole(), help="H [96, 4096]")
    add("--vocab", type=whole(), help="vocabulary over all ranks [16384, 128256]")
    add("--dtype", choices=list(SHORT_DTYPES), help="[fp32, bf16]")
    add("--sequence-parallel", action="store_true", help="each rank holds its part of the tokens")
    add("--blocks", type=whole(), default=3, metavar="N", help="turns of each cell [3]")
    add("--sample-ms", type=number(), default=100.0, metavar="MS", help="a turn's least length [100]")
    add = parser.add_argument_group("launches of Megatron-LM, arguments after --").add_argument
    add("--through-megatron", metavar="CHECKOUT", help="a Megatron-LM checkout")
    add("--script", default="pretrain_gpt.py", help="[pretrain_gpt.py]")
    add("--nproc", type=whole(most=4096), metavar="N", help="processes of a launch [every GPU; 1 on a CPU]")
    add("--iterations", type=whole(), default=10, metavar="N", help="of a launch [10]")
    add("--warmup", type=whole(0), default=3, metavar="N", help="of them not timed [3]")
    add("--timeout", type=cli.seconds, default=900.0, metavar="S", help="of a launch [900]")
    add("--fresh", action="store_true", help="launch again what an earlier call left")
    own, after = launches.split_command(words)
    given, here, size = parser.parse_args(own), cli.num_gpus(), world_size()
    given.words, through = after, given.through_megatron is not None
    given.chunks = sorted(set(given.chunks or (LAUNCHED_CHUNKS if through else CHUNKS)))
    needed = given.nproc or 1 if through else size
    if given.device == "auto":
        given.device = "cuda" if here >= needed else "cpu"
    on_gpu, parts = given.device == "cuda", size if given.sequence_parallel else 1
    for name, sizes in {"tokens": (2048, 8192), "hidden": (96, 4096), "vocab": (16384, 128256)}.items():
        setattr(given, name, getattr(given, name) or sizes[on_gpu])
    given.dtype = SHORT_DTYPES[given.dtype or ("bf16" if on_gpu else "fp32")]
    given.nproc, most = given.nproc or (here if on_gpu else 1), given.tokens // parts
    for wrong, message in (
        (on_gpu and here < needed, f"expected {needed} GPUs, found {here}: use --device cpu or fewer ranks"),
        (through and size > 1, "--through-megatron starts its ranks itself: give --nproc, without torchrun"),
        (through and given.warmup >= given.iterations,
         f"expected fewer --warmup than --iterations, got {given.warmup}"),
        (after and not through, "arguments after -- are those of --through-megatron CHECKOUT"),
        (not through and given.vocab % size,
         f"expected --vocab to divide by {size} ranks, got {given.vocab}"),
        (given.tokens % parts, f"expected --tokens to divide by {parts} ranks, got {given.tokens}"),
        (not through and given.chunks[-1] > most,
         f"expected --chunks from 1 to {most}, got {given.chunks[-1]}"),
    ):  # fmt: skip
        if wrong:
            raise UsageError(message)
    if through:
        check_launches(given)
    return given


@cli.command("sweep")
def main(words: list[str]) -> int:
    is_first, given = os.environ.get("RANK", "0") == "0", parse_arguments(words)
    if is_first:
        cli.writable_folder(given.out)
    through = given.through_megatron is not None
    device = results.device_name() if through and given.device == "cuda" else ""
    source = results.made_by(device, ["sweep", *words])
    # `auto` first: what the defaults do.
    rows = [Row.of(AUTO)]
    rows += [Row.of(name, n) for name in dict.fromkeys(given.strategies) for n in given.chunks]
    try:
        result = (of_launches if through else of_head)(given, rows, source)
    except RuntimeError as error:
        if type(error).__name__ != "WrongResult":
            raise
        if is_first:
            print(f"sweep: {error}", file=sys.stderr)
        return 1
    if is_first:
        write(result, given.out)
        print(f"{markdown(result)}\nwritten to {given.out}: sweep.json, sweep.md")
    return int(any(row.status not in (OK, OUT_OF_MEMORY) for row in result.rows))
