"""The result of a plan for people (sentences and rich's tables) and for programs (a dictionary of bytes)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.plan.advice import Way
from megatron_fused_ce.plan.answer import LOSSES, Result, gib, sentences, tokens
from megatron_fused_ce.plan.setting import Setting
from megatron_fused_ce.plan.static import parameters, stages, static

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Columns that nothing printed exceeds.
WIDTH, TEXT_WIDTH = 100, 80
#: The moments of a step (peaks.MOMENTS), in short.
PLACES = {"head": "the loss", "layers": "a layer", "step": "the optimizer"}
#: The last version that takes Transformer Engine's loss (0.18.2's megatron/training/arguments.py refuses it).
LAST_WITH_TE = "0.18.0"
#: What a verdict is called in a table.
VERDICTS = {"fits": "yes", "tight": "tight", "does not fit": "no", "over budget": "refused"}


def as_dictionary(result: Result) -> dict[str, Any]:
    """Everything that the tables show, in bytes and tokens."""
    setting, advice = result.setting, result.advice
    return {
        "decision": result.decision,
        "doubts": result.doubts,
        "uncounted": result.judged.uncounted,
        "bounded": result.judged.bounded,
        "measured": result.measured,
        "sentences": {said.name: said.text for said in sentences(result, explain=True)},
        "parameters": parameters(setting),
        "tokens_of_a_micro_batch": setting.num_tokens,
        "padded_vocab_size": setting.padded_vocab_size,
        "vocab_rows_of_a_rank": setting.vocab_rows,
        "gpus": setting.parallel.gpus,
        "gpu": advice.gpu.name,
        "capacity": advice.gpu.capacity,
        "overhead": advice.gpu.overhead,
        "stages": [
            {
                "parameters": held.dense + held.experts,
                "weights": held.weights,
                "gradients": held.gradients,
                "optimizer": held.optimizer,
                "step": held.step,
            }
            for held in (static(setting, stage) for stage in stages(setting))
        ],
        "ways": {way.head.name: _way(way) for way in advice.ways},
        "baseline": advice.baseline.head.name,
        "recommended": _way(advice.recommended),
        "saved": advice.saved,
        "saved_of_peak": advice.saved / advice.baseline.peak,
        "notes": result.notes,
        "not_measured": setting.not_measured,
    }


def _way(way: Way) -> dict[str, Any]:
    return {
        "flags": way.head.flags,
        "plan": way.head.words,
        "head": way.head.peak,
        "peak": way.peak,
        "bound": way.estimate.bound.name,
        "verdict": way.verdict,
        "longest_sequence": way.longest,
        "moments": {
            moment.name: {"stage": moment.stage, "total": moment.total, **moment.parts}
            for moment in way.estimate.moments
        },
    }


def show(console: Console, result: Result, explain: bool) -> None:
    """Print the answer, the table of ways and what was not counted; with ``explain`` all the rest."""
    answer, *rest = lines(result, explain)
    console.print(answer, highlight=False, markup=False, soft_wrap=True)
    ways, *sums = _tables(result, explain)
    console.print()
    console.print(ways)
    for line in rest:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for table in sums:
        console.print()
        console.print(table)


def lines(result: Result, explain: bool = False) -> list[str]:
    """Everything that is said, wrapped: the answer as one item, with all its lines."""
    answer, *rest = [said.text for said in sentences(result, explain)]
    return [
        "\n".join(_wrapped(answer)),
        *(line for text in [*rest, *result.notes] for line in _wrapped(text)),
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, TEXT_WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )


def _tables(result: Result, explain: bool) -> Iterator[Table]:
    setting, advice = result.setting, result.advice
    yield _ways_table(result, explain)
    if explain and not result.doubts:
        yield _static_table(setting)
        yield _moments_table("Without the flag", advice.baseline)
        yield _moments_table("With the flag", advice.recommended)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def called(way: Way) -> str:
    """A way of computing the loss, for people."""
    return LOSSES.get(way.head.name, way.head.name) if way.head.stock else f"{FLAG}, {way.head.name}"


def _ways_table(result: Result, explain: bool) -> Table:
    """Every way of computing the loss; of the flag's strategies the chosen one, all with ``explain``.

    ``longest`` are tokens of a sequence. Without a verdict the head alone.
    """
    setting, advice = result.setting, result.advice
    columns = ("its memory", *(() if result.doubts else ("peak", "highest in", "fits", "longest")))
    table = _table("Ways of computing the loss, GiB a GPU", "", *columns)
    # Of 0.18 alone it is not known.
    refuse = [version > LAST_WITH_TE for version in result.versions]
    accept = [version < "0.18" or version == LAST_WITH_TE for version in result.versions]
    for way in advice.ways:
        asked = way.head.name == setting.training.fused_ce.strategy
        if not (explain or way.head.stock or asked):
            continue
        some = way.head.name == "te" and not (all(refuse) or all(accept))
        name = called(way) + (" (now)" if way is result.now else f" (to {LAST_WITH_TE})" if some else "")
        cells = [name, gib(way.head.peak)]
        if not result.doubts:
            fits = "refused" if way.head.name == "te" and all(refuse) else VERDICTS[way.verdict]
            cells += [gib(way.peak), PLACES[way.estimate.bound.name], fits, tokens(way.longest)]
        table.add_row(*cells)
    return table


def _static_table(setting: Setting) -> Table:
    """Table of each stage's weights, gradients and optimizer, with bytes a parameter."""
    training, parallel = setting.training, setting.parallel
    over = _over(parallel.shards if training.distributed_optimizer else 1)
    if setting.model.mixture and training.distributed_optimizer:
        over += f"; experts{_over(parallel.expert_shards) or ' whole'}"
    table = _table(
        "Held all the time, GiB a GPU (bytes a parameter)",
        "stage",
        "parameters",
        f"weights ({setting.itemsize})",
        f"gradients ({training.gradient_bytes})",
        f"optimizer ({training.state_bytes:g}{over})",
        "sum",
    )
    all_stages = [static(setting, stage) for stage in stages(setting)]
    for held, group in groupby(enumerate(all_stages), key=lambda pair: pair[1]):
        indices = [index for index, _ in group]
        name = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        cells = (held.weights, held.gradients, held.optimizer, held.total)
        count = f"{(held.dense + held.experts) / 1e9:.3f} billion"
        table.add_row(name, count, *map(gib, cells))
    return table


def _over(ranks: int) -> str:
    return f" / {ranks}" if ranks > 1 else ""


def _moments_table(title: str, way: Way) -> Table:
    """The sums: every part of every moment."""
    moments = [way.estimate.moment(name) for name in PLACES]
    table = _table(f"{title} ({way.head.name}): GiB a GPU while at work is", "", *PLACES.values())
    if any(moment.stage for moment in moments):
        table.add_row("pipeline stage", *(str(moment.stage) for moment in moments))
    for part in dict.fromkeys(part for moment in moments for part in moment.parts):
        sizes = [moment.parts.get(part) for moment in moments]
        if any(sizes):
            table.add_row(part, *(gib(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("sum", *(gib(moment.total) for moment in moments))
    return table
