"""What a plan says: which way of computing the loss fits, what the flag saves, and the sentences that hold.

Every line that ``plan`` prints outside its tables is one of :data:`SENTENCES`;
``tests/plan/test_sentences.py`` makes each of them true and, in a neighbour case, false.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.config import STRATEGY_CHOICES
from megatron_fused_ce.plan.closed_world import MENDS, UNKNOWN, Judged, TrainingLaunch
from megatron_fused_ce.plan.heads import STOCK_PATHS, HeadMemory, plugin_head, stock_head
from megatron_fused_ce.plan.peaks import Estimate, estimate, parameters
from megatron_fused_ce.plan.setting import Setting
from megatron_fused_ce.planner.memory import MIB

if TYPE_CHECKING:
    from rich.table import Table

#: A step that leaves less than this part of its largest tensor free is tight: torch's allocator may find no
#: block for it. Of two runs on an H200, one with 0.21 of it free ran out of memory in its second step,
#: one with 0.37 trained (2026-11-21-h200-longest-sequence.json, 2026-11-21-h200-tp4-pretrain-reach.json).
TIGHT = 0.3
#: Part of the peak from which on what the flag saves is worth its use.
WORTH = 0.05
#: Bytes that are none: what two figures in GiB do not show.
NOTHING = 2**30 // 200


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    device: str  # as torch names it
    capacity: int  # as torch counts it (total_memory), bytes
    exp_serves: bool  # "auto" takes the scaled-exp GEMM (compute capability 9.0)
    overhead: int  # bytes of driver, NCCL and kernels outside torch's allocator

    @property
    def usable(self) -> int:
        return self.capacity - self.overhead


@dataclass(frozen=True)
class Advice:
    """All ways of computing the loss, which one the launch uses without the flag, and the flags to add."""

    gpu: Gpu
    ways: tuple[Estimate, ...]
    baseline: Estimate
    recommended: Estimate  # the plugin with the recommended flags
    largest_head: int  # bytes of the flag's, with token weights that the forward knows or without

    def way(self, name: str) -> Estimate:
        return next(way for way in self.ways if way.head.name == name)

    @property
    def saved(self) -> int:
        """Bytes of the peak that the recommended flags save over the baseline."""
        return self.baseline.peak - self.recommended.peak

    @property
    def decision(self) -> str:
        """What to do with the flag: one of the first of :data:`SENTENCES`."""
        before, after = self.baseline.verdict == "fits", self.recommended.verdict == "fits"
        if not before:
            return "needed" if after else "does not fit"
        if not after or self.saved < NOTHING:
            return "leave out"
        return "use" if self.saved >= WORTH * self.baseline.peak else "either"


def advise(setting: Setting, gpu: Gpu, baseline: str = "unfused") -> Advice:
    """Compare all ways of computing the loss; ``baseline``: the path that the launch has without the flag.

    Recommended is the launch's own strategy, or ``auto`` with a budget if only a smaller head fits.

    Raises:
        ValueError: the strategy that the launch asks for does not fit the launch's budget.
    """

    def way(head: HeadMemory) -> Estimate:
        found = estimate(setting, head)
        return replace(found, verdict=verdict(found, gpu))

    ours = partial(plugin_head, setting, gpu.device, exp_serves=gpu.exp_serves)
    stock = {name: way(stock_head(setting, name)) for name in STOCK_PATHS}
    plugin = {strategy: way(ours(strategy)) for strategy in STRATEGY_CHOICES}
    asked = plugin[setting.training.fused_ce.strategy]
    if asked.head.over_budget:
        raise ValueError(asked.head.over_budget)
    # A head whose token weights are not known in the forward runs no grad_in_forward.
    other = ours(asked.head.name.replace("grad_in_forward", "auto"), token_weights_known=False)
    largest = max(asked.head.peak, other.peak)
    advice = Advice(gpu, (*stock.values(), *plugin.values()), stock[baseline], asked, largest)
    if asked.verdict != "does not fit" or asked.bound.name != "head":
        return advice
    # The budget that leaves the head's moment at what is usable; the smallest plan may need another.
    rest = asked.moment("head").total - asked.head.predicted
    smaller = ours("auto", memory_mb=max(1, (gpu.usable - rest) // MIB))
    if smaller.missed_budget:
        smaller = ours("auto", memory_mb=-(-smaller.predicted // MIB))
    fitting = way(smaller)
    return advice if fitting.verdict == "does not fit" else replace(advice, recommended=fitting)


def verdict(found: Estimate, gpu: Gpu) -> str:
    """Whether a step fits, by its sum and by :data:`TIGHT`."""
    if found.head.over_budget:
        return "over budget"
    free = gpu.usable - found.peak
    if free < 0:
        return "does not fit"
    return "tight" if found.bound.name == "head" and free < TIGHT * found.head.largest else "fits"


# --- in words ---------------------------------------------------------------------------------

GIB = 2**30
#: By name. GiB are of one GPU; "the flag" is the one that the first sentence names.
SENTENCES = {
    # The answer: one of these, first.
    "use": "Use it: peak {after} GiB a GPU with {flags}, {before} without: saves {saved} ({part}); {usable} "
    "usable.",
    "needed": "Use it: a GPU has {usable} GiB usable and needs {after} with {flags}, {before} without.",
    "either": "It fits either way; {flags} saves {saved} GiB ({part}): peak {after}, {before} without.",
    "leave out": "Leave it out: peak {before} GiB a GPU without {flags}, {after} with it; {usable} usable.",
    "does not fit": "Not enough memory: {before} GiB a GPU without {flags}, {after} with; {usable} usable.",
    "no verdict": "The head (last stage), if the loss is Megatron's own: {before} → {after} GiB a GPU. The "
    "whole: no verdict, {why}.",
    "no effect": "No effect: the head stays on Megatron's own path: {why}.",
    # Behind it, in short.
    "setting": "{model}: {billions} B parameters, {sequence} tokens a sequence, {dtype}, on {gpus} x "
    "{gpu}: {over}.",
    "vouched": "Vouched for (--ignore): {names}.",
    "vouch": "Not counted: {clauses}. --ignore {name}{each} plans as if it changed no memory.",
    "bounded": "Bounded: {name}: {clause}.",
    "tight": "{sum} GiB may still run out: {left} are left beside a largest tensor of {largest}, less than "
    "{part:.0%} of it; a run on an H200 with 21% ran out of memory, one with 37% trained.",
    "recompute": "{activations} GiB of {peak} are activations: --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 keeps one hidden state a layer.",
    "budget": "No plan takes {budget} MiB or less (--fused-ce-memory-mb): the launch takes the smallest, "
    "{least} MiB.",
    "measured": "Megatron measured {measured} GiB, the largest rank's, where {planned} are planned: all "
    "figures are moved by the difference.",
    "measured alone": "The run in the log peaked at {measured} GiB (Megatron's max allocated, the largest "
    "rank's).",
    # With --explain.
    "how": "The flag would run as {words}.",
    "batch": "{micro} sequences in a micro-batch; one rank's head: {tokens} tokens × {rows} of {vocab} "
    "vocabulary rows.",
}
#: Before the first sentence, where the log says so.
DIED = "The run ended out of memory. "
#: Megatron's own losses, for people. The last version whose pretrain_gpt.py takes Transformer Engine's is
#: 0.18.0 (0.18.2's training/arguments.py refuses it; ModelParallelConfig, which Megatron-Bridge's recipes
#: set, only warns).
LOSSES = {
    "unfused": "Megatron, unfused",
    "native": "Megatron, native fusion",
    "te": "Transformer Engine (to 0.18.0, or Bridge)",
}
#: Part of a measured peak by which a plan may be off, so that something is derived from it.
OFF = 0.05


class Said(NamedTuple):
    """One sentence, by its name in :data:`SENTENCES`."""

    name: str
    text: str


def say(name: str, /, **values: object) -> Said:
    return Said(name, SENTENCES[name].format(**values))


@dataclass(frozen=True)
class Result:
    """A plan's inputs and results."""

    name: str  # of the model or the launch's script, for a title
    setting: Setting
    advice: Advice
    notes: list[str]  # whole sentences about how the launch was read
    judged: Judged
    launch: TrainingLaunch
    most: Advice | None = None  # the same with the most that bounded arguments add
    alone: bool = (
        False  # the head is the launch's, and the rest of the setting stands in for what is not known
    )
    has_flag: bool = False  # whether the launch has the flag already

    @property
    def now(self) -> Estimate:
        """How the launch computes its loss as it is."""
        asked = self.setting.training.fused_ce.strategy
        return self.advice.way(asked) if self.has_flag else self.advice.baseline

    @property
    def planned(self) -> int:
        """Bytes of it, before anything measured moved them."""
        return self.now.peak - self.setting.beside

    @property
    def measured(self) -> int | None:
        """Bytes that the planned run was measured with."""
        return self.launch.measured_bytes if self.launch.as_logged else None

    @cached_property
    def doubts(self) -> list[str]:
        """Why there is no verdict, clause by clause; none where there is one."""
        launch, planned, found = self.launch, gib(self.planned), list(self.judged.uncounted.values())
        if len(found) > 1:  # a plan lists all below
            found = [f"{found[0]}, and {len(found) - 1} more below"]
        if self.measured and abs(self.planned / self.measured - 1) > OFF:
            found.insert(0, f"{gib(self.measured)} GiB were measured where {planned} are planned")
        elif launch.out_of_memory and launch.as_logged and self.now.verdict == "fits":
            found.insert(0, f"{planned} GiB are planned, which fit")
        if not found and self.most and self.most.decision != self.advice.decision:
            names = " and ".join(self.judged.bounded)
            found = [f"{names} may take it from {gib(self.now.peak)} to {gib(self.most.baseline.peak)} GiB"]
        return found

    @property
    def decision(self) -> str:
        if self.judged.no_effect:
            return "no effect"
        return "no verdict" if self.doubts else self.advice.decision


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def sentences(result: Result, explain: bool = False) -> list[Said]:
    """All that hold, the answer first."""
    return [_answer(result), *_behind_it(result, explain)]


def _answer(result: Result) -> Said:
    advice, decision = result.advice, result.decision
    before, after = advice.baseline, advice.recommended
    values = {"before": gib(before.peak), "after": gib(after.peak), "usable": gib(advice.gpu.usable)}
    values["saved"] = f"{float(values['before']) - float(values['after']):.2f}"  # of what is printed
    share = advice.saved / before.peak
    values["part"] = f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
    values["flags"] = after.head.flags if decision in ("use", "needed", "either") else FLAG
    if decision == "no effect":
        values["why"] = result.judged.no_effect
    elif decision == "no verdict":
        values |= {"before": gib(before.head.peak), "after": gib(advice.largest_head)}
        values["why"] = "; ".join(result.doubts)
    said = say(decision, **values)
    return Said(said.name, DIED + said.text) if result.launch.out_of_memory else said


def _behind_it(result: Result, explain: bool) -> Iterator[Said]:
    setting, advice, launch, parallel = result.setting, result.advice, result.launch, result.setting.parallel
    judged, after = result.judged, advice.recommended
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "EP": parallel.expert}
    sizes["DP"] = parallel.data
    over = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    if not result.alone:
        yield say(
            "setting",
            model=result.name,
            billions=f"{parameters(setting) / 1e9:.2f}",
            sequence=setting.training.sequence,
            dtype=setting.training.dtype,
            gpus=parallel.gpus,
            gpu=advice.gpu.name,
            over=over + (", sequence parallelism" if parallel.sequence else ""),
        )
    if judged.vouched:
        yield say("vouched", names=", ".join(judged.vouched))
    # A name that is misspelt is not to be vouched for.
    vouchable = [name for name, clause in judged.uncounted.items() if not MENDS.search(clause)]
    if vouchable and not judged.no_effect:
        clauses = [name if why == name + UNKNOWN else why for name, why in judged.uncounted.items()]
        each = ", and so for each of them," * (len(vouchable) > 1)
        yield say("vouch", name=vouchable[0].lstrip("-"), each=each, clauses="; ".join(clauses))
    for name, clause in judged.bounded.items():
        yield say("bounded", name=name, clause=clause)
    if result.measured and not result.doubts:
        yield say("measured", measured=gib(result.measured), planned=gib(result.planned))
    elif launch.measured_bytes and (judged.uncounted or not launch.as_logged):
        yield say("measured alone", measured=gib(launch.measured_bytes))
    if not (result.doubts or judged.no_effect):
        for way in (advice.baseline, after):
            if way.verdict == "tight":
                left, largest = gib(advice.gpu.usable - way.peak), gib(way.head.largest)
                yield say("tight", part=TIGHT, sum=gib(way.peak), left=left, largest=largest)
        activations = after.bound.parts.get("activations", 0)
        if after.verdict != "fits" and not setting.training.recompute.full and 2 * activations > after.peak:
            yield say("recompute", activations=gib(activations), peak=gib(after.peak))
    head = after.head
    if head.missed_budget:
        yield say("budget", budget=head.missed_budget, least=-(-head.predicted // MIB))
    if not explain:
        return
    if not judged.no_effect:
        yield say("how", words=head.words)
    yield say(
        "batch", micro=setting.training.micro_batch, tokens=setting.num_tokens, rows=setting.vocab_rows,
        vocab=setting.padded_vocab_size,
    )  # fmt: skip


# --- printed ----------------------------------------------------------------------------------

#: Columns that nothing printed exceeds.
WIDTH, TEXT_WIDTH = 100, 80
#: The moments of a step (:mod:`.peaks`), for people.
PLACES = {"head": "the loss", "layers": "a layer", "step": "the optimizer"}
#: What a verdict is called in a table.
VERDICTS = {"fits": "yes", "tight": "tight", "does not fit": "no", "over budget": "refused"}


def as_dictionary(result: Result) -> dict[str, Any]:
    """Everything that the tables show, in bytes and tokens; None for what stands in for an unknown model."""
    setting, advice, known = result.setting, result.advice, not result.alone
    return {
        "decision": result.decision,
        "doubts": result.doubts,
        "uncounted": result.judged.uncounted,
        "no_effect": result.judged.no_effect,
        "bounded": result.judged.bounded,
        "measured": result.measured,
        "sentences": dict(sentences(result, explain=True)),
        "parameters": parameters(setting) if known else None,
        "gpus": setting.parallel.gpus if known else None,
        "gpu": advice.gpu.name,
        "capacity": advice.gpu.capacity,
        "overhead": advice.gpu.overhead,
        "ways": {way.head.name: _way(way, known) for way in advice.ways},
        "baseline": advice.baseline.head.name,
        "recommended": _way(advice.recommended, known),
        "largest_head": advice.largest_head,
        "saved": advice.saved if known else None,
        "notes": result.notes,
    }


def _way(way: Estimate, known: bool) -> dict[str, Any]:
    head = {"flags": way.head.flags, "plan": way.head.words, "head": way.head.peak}
    whole = {
        "peak": way.peak,
        "bound": way.bound.name,
        "verdict": way.verdict,
        "moments": {
            moment.name: {"stage": moment.stage, "total": moment.total, **moment.parts}
            for moment in way.moments
        },
    }
    return head | whole if known else head


def show(result: Result, explain: bool) -> None:
    """Print the answer, the table of ways and what was not counted; with ``explain`` all the rest."""
    from rich.console import Console

    console = Console()
    console = Console(width=min(console.width, WIDTH) if console.is_terminal else WIDTH)
    ways, *moments = _tables(result, explain)
    answer, *rest = [said.text for said in sentences(result, explain)] + result.notes
    print(_wrapped(answer) + "\n", flush=True)
    console.print(ways)
    print(*map(_wrapped, rest), sep="\n", flush=True)
    for table in moments:
        console.print("", table, sep="\n")


def _wrapped(text: str) -> str:
    how = {"subsequent_indent": "    ", "break_on_hyphens": False, "break_long_words": False}
    return textwrap.fill(text, TEXT_WIDTH, **how)  # type: ignore[arg-type]


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(("", *columns)):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _tables(result: Result, explain: bool) -> Iterator[Table]:
    """Every way of computing the loss, without a verdict the head alone, of the flag's strategies the chosen
    one; with ``explain`` all of them, and the sums."""
    flag, verdict = not result.judged.no_effect, not (result.doubts or result.judged.no_effect)
    columns = ("its memory", *(() if result.doubts else ("peak", "highest in", "fits")))
    table = _table("Ways of computing the loss, GiB a GPU", *columns)
    for way in result.advice.ways:
        asked = way.head.name == result.setting.training.fused_ce.strategy
        if way.head.stock or (flag and (explain or asked)):
            name = LOSSES.get(way.head.name) or f"{FLAG}, {way.head.name}"
            cells = [name + " (now)" * (way is result.now), gib(way.head.peak)]
            cells += [gib(way.peak), PLACES[way.bound.name], VERDICTS[way.verdict]]
            table.add_row(*cells[: 1 + len(columns)])
    yield table
    if explain and verdict:
        yield _moments("Without the flag", result.advice.baseline)
        yield _moments("With the flag", result.advice.recommended)


def _moments(title: str, way: Estimate) -> Table:
    """The sums: every part of every moment."""
    moments = [way.moment(name) for name in PLACES]
    table = _table(f"{title} ({way.head.name}): GiB a GPU while at work is", *PLACES.values())
    if any(moment.stage for moment in moments):
        table.add_row("pipeline stage", *(str(moment.stage) for moment in moments))
    for part in dict.fromkeys(part for moment in moments for part in moment.parts):
        sizes = [moment.parts.get(part) for moment in moments]
        if any(sizes):
            table.add_row(part, *(gib(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("sum", *(gib(moment.total) for moment in moments))
    return table
