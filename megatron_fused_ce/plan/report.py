"""The result of a plan for people (sentences and rich's tables) and for programs (a dictionary of bytes)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.plan.answer import LOSSES, Result, gib, sentences
from megatron_fused_ce.plan.peaks import Estimate, parameters

if TYPE_CHECKING:
    from rich.table import Table

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
