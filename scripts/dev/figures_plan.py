"""The plan held against what was measured: the tables of docs/plan.md, and what README.md has of the plan.

Measured are the launches and heads of docs/benchmarks/results, on H200s: each launch's own command line is
read and planned, and the peaks are compared.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fused_ce.config import STRATEGY_CHOICES, FusedCEConfig
from megatron_fused_ce.plan import command
from megatron_fused_ce.plan.answer import GIB, Gpu
from megatron_fused_ce.plan.heads import CUBLAS_WORKSPACE, HeadMemory, plugin_head, stock_head
from megatron_fused_ce.plan.named_models import MODELS
from megatron_fused_ce.plan.peaks import estimate
from megatron_fused_ce.plan.setting import DecoderSizes, Parallel, Setting, StepSettings
from megatron_fused_ce.planner.choose import Plan, plan
from megatron_fused_ce.planner.memory import MIB, PlanInputs
from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.lib.results import REPOSITORY
from megatron_fused_ce.scripts.lib.tables import markdown as table

RESULTS = REPOSITORY / results.RESULTS
DAY = "2026-11-21-h200-"
README, PAGE = REPOSITORY / "README.md", REPOSITORY / "docs" / "plan.md"

#: Of the peak of a whole step and of a head alone. A graph's pool of its own is not counted.
STEP_BOUND, HEAD_BOUND = 0.015, 0.035
EXCEPTIONS = {"graph": 0.04}
#: Files of launches, in the order of the table.
LAUNCHES = (
    *("longest-sequence", "tp4-pretrain-steps", "tp4-pretrain-long", "tp4-pretrain-reach"),
    *("tp4-pretrain-losses", "tp4-pretrain-modes-1", "tp4-pretrain-modes-2"),
    *("pretrain-te-tp4-sp", "pretrain-te-tp2-dp2-sp", "pretrain-te-tp2-sp-no-wgrad-fusion"),
    *("pretrain-local-tp2", "tp4-pretrain-graph"),
)
#: Commits whose plugin chose and held otherwise than the planner of today: their launches with the flag
#: say nothing of it.
BEFORE_THE_PLANNER = ("a263d4d", "fd49028", "896fa5c")
#: Files of heads alone.
HEADS = ("reach-llama3-8b", "reach-others", "tp4-reach", "tp4-reach-llama3-70b", "tp2-32768")
#: What the plan calls a variant of the results.
STOCK = {
    "unfused": "unfused",
    "native": "native",
    "te-lifted": "te",
    "megatron-unfused": "unfused",
    "megatron-native": "native",
    "megatron-te": "te",
}


@dataclass(frozen=True)
class Compared:
    """One figure beside the plan's."""

    what: str
    variant: str
    #: MiB; None where the launch ran out of memory
    measured: float | None
    planned: float
    bound: str = ""

    @property
    def off(self) -> float:
        return self.planned / self.measured - 1 if self.measured else 0.0


def h200() -> Gpu:
    """The GPU that all of it was measured on."""
    device, capacity, hopper = command.GPUS["h200-141gb"]
    overhead = round(command.OVERHEAD_GIB * GIB)
    return Gpu("h200-141gb", device, round(capacity * GIB), hopper, overhead)


# --- whole steps -----------------------------------------------------------------------------


def launches() -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, row) of every launch that trained or ran out of memory."""
    for name in LAUNCHES:
        for row in results.rows(RESULTS / f"{DAY}{name}.json"):
            if row["variant"] in STOCK or not row["commit"].startswith(BEFORE_THE_PLANNER):
                yield name, row


def head_of(setting: Setting, variant: str) -> HeadMemory:
    """The way of computing the loss that a variant of the results had."""
    if variant in STOCK:
        return stock_head(setting, STOCK[variant])
    return plugin_head(setting, h200().device, variant, exp_serves=True)


def setting_of_launch(row: dict[str, Any]) -> Setting:
    return command.setting_of(["--from-launch", row["command"]])


def steps() -> list[Compared]:
    """Each launch's command line, planned."""
    rows = []
    for name, row in launches():
        setting = setting_of_launch(row)
        found = estimate(setting, head_of(setting, row["variant"]))
        measured = row["peak_mib"] if row["status"] == "ok" else None
        what = f"[{row['shape']}]({DAY}{name}.json), {setting.num_tokens}"
        rows.append(Compared(what, row["variant"], measured, found.peak / MIB, found.bound.name))
    return rows


# --- heads alone -----------------------------------------------------------------------------


def head_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, row) of Megatron's own paths and of the strategies, in an fp32 ``main_grad``."""
    for name in HEADS:
        for row in results.rows(RESULTS / f"{DAY}{name}.json"):
            ours = row["variant"] in STRATEGY_CHOICES and row["chunk_tokens"]
            if row["peak_mib"] and (row["variant"] in STOCK or ours):
                yield name, row


def alone() -> list[Compared]:
    """Each head's predicted peak, less what the benchmark does not count.

    That is ``grad_hidden``, and of Megatron's paths the workspace of autograd's thread, which has run no
    product yet when the loss is at its peak.
    """
    rows = []
    for name, row in head_rows():
        setting = _head_alone(row)
        found = head_of(setting, row["variant"])
        if row["variant"] in STOCK:
            grad_hidden = setting.itemsize * row["T"] * row["H"] // setting.parallel.sequence_parts
            planned = found.peak - grad_hidden - CUBLAS_WORKSPACE
        else:
            asked = FusedCEConfig(strategy=row["variant"], chunk_tokens=int(row["chunk_tokens"]))
            ranks = {"tp_size": row["tp"], "num_parts": row["tp"] if row["sp"] else 1}
            inputs = PlanInputs(row["T"], row["H"], row["V"], device=h200().device, config=asked, **ranks)
            planned = chunk_by_chunk(inputs).predicted_peak_bytes
        sp = ", SP" if row["sp"] else ""
        what = f"{name}: {row['shape']}, {row['T']}, TP {row['tp']}{sp}"
        rows.append(Compared(what, row["variant"], row["peak_mib"], planned / MIB))
    return rows


def chunk_by_chunk(inputs: PlanInputs) -> Plan:
    """The plan with grad_weight made chunk by chunk, as every commit did before 22 November 2026."""
    return replace(plan(inputs), wgrad_at_once=False)


def _head_alone(row: dict[str, Any]) -> Setting:
    tp = row["tp"]
    least = {"num_layers": 1, "head_dim": 1, "ffn_hidden_size": tp}
    least |= {"num_attention_heads": tp, "num_query_groups": tp}
    model = DecoderSizes(hidden_size=row["H"], vocab_size=row["V"] * tp, **least)
    parallel = Parallel(gpus=tp, tensor=tp, sequence=row["sp"])
    setting = Setting(model, parallel, StepSettings(sequence=row["T"]), vocab_divisor=1)
    chunks = replace(setting.training.fused_ce, chunk_tokens=row["chunk_tokens"])
    return replace(setting, training=replace(setting.training, fused_ce=chunks))


# --- the page --------------------------------------------------------------------------------

FULL = "--recompute-granularity full"
EXAMPLE = f"--model llama-3.2-1b --gpu h200-141gb --seq-length 131072 {FULL}"


def _percent(off: float) -> str:
    text = f"{off:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def off_table() -> str:
    """Of each loss, how many launches and heads were measured and how far off they are planned."""
    rows = []
    for what, found in (("launches", steps()), ("heads alone", alone())):
        off: dict[str, list[float]] = {}
        for one in found:
            if one.measured is not None:
                variant = STOCK.get(one.variant, one.variant).replace("auto", "the flag")
                off.setdefault(variant, []).append(one.off)
        rows += [
            [f"{len(values)} {what}, {name}", _percent(min(values)), _percent(max(values))]
            for name, values in off.items()
        ]
    return table(["measured, by the loss", "least (planned − measured) / measured", "most"], rows)


def printed(words: str) -> str:
    """What the command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command.main(shlex.split(words))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    typed = textwrap.wrap(f"$ python -m megatron_fused_ce plan {words}", 78, break_on_hyphens=False)
    return "\n".join(["```", " \\\n    ".join(typed), *lines, "```"])


#: Lengths of the page's table: more than 8192 tokens with what else is usual there.
LENGTHS = {8192: "", 32768: "", 131072: FULL}
ON_8, SMALL, LARGE = "--gpus 8 --sequence-parallel --tp", "llama3_8b.sh", "llama3_70b.sh"
EXAMPLES, OF_EXAMPLE = "../scripts/examples", f"--from-launch {REPOSITORY}/scripts/examples"
#: Label, and the words of a plan but for its length.
HELP = (
    ("Llama-3.2-1B ¹, one H200", f"--model llama-3.2-1b --gpu h200-141gb {FULL}"),
    ("Qwen3-4B, TP 2", f"--model qwen3-4b {ON_8} 2"),
    (f"[Llama-3-8B, TP 2]({EXAMPLES}/{SMALL})", f"{OF_EXAMPLE}/{SMALL}"),
    ("Llama-3-8B, TP 4", f"--model llama-3-8b {ON_8} 4"),
    ("Llama-2-13B, TP 4, V = 32000", f"--model llama-2-13b {ON_8} 4"),
    ("OLMo-2-13B, TP 4, V = 100352", f"--model olmo-2-13b {ON_8} 4"),
    (f"[Llama-3-70B, TP 8, PP 4]({EXAMPLES}/{LARGE}), 64 GPUs", f"{OF_EXAMPLE}/{LARGE}"),
)
TE_LOSS = " --cross-entropy-loss-fusion --cross-entropy-fusion-impl te"


def help_table() -> str:
    """Of each training and length the predicted peaks."""
    rows = []
    for label, words in HELP:
        for tokens, more in LENGTHS.items():
            peaks = _peaks(f"{words} --seq-length {tokens} {more}")
            mark = "\N{NO-BREAK SPACE}¹" if more else ""
            rows.append([label, f"{tokens}{mark}", *peaks])
            label = ""
    head = ["you train", "tokens", "unfused", "`te`", "the flag"]
    return table(head, rows) + "\n\n¹ with full recomputation\n"


def _peaks(words: str) -> list[str]:
    """GiB unfused, with Transformer Engine's loss, with the flag; where a way does not fit, in brackets."""
    unfused, te = (command.plan_of(shlex.split(words + loss)).advice for loss in ("", TE_LOSS))
    ways = unfused.baseline, te.baseline, unfused.recommended
    return [f"{w.peak / GIB:.1f}" if w.verdict == "fits" else f"({w.peak / GIB:.1f})" for w in ways]


#: What README's readers train, and a plan of it; then what was measured, with its page.
TRAININGS = (
    ("Llama-3.2-1B, 131072 tokens", f"--model llama-3.2-1b --gpu h200 --seq-length 131072 {FULL}"),
    ("Qwen3-8B, TP 1, 32768 tokens", f"--model qwen3-8b --gpus 8 --seq-length 32768 {FULL}"),
    ("GPT-OSS-20B, EP 8, 16384 tokens", f"--model gpt-oss-20b --gpus 8 --ep 8 --seq-length 16384 {FULL}"),
    ("Llama-3-8B, TP 4, 8192 tokens", f"--model llama-3-8b {ON_8} 4 --seq-length 8192"),
    ("Llama-3-70B, TP 8", f"--model llama-3-70b --pp 4 {ON_8} 8 --gpus 64 --seq-length 8192"),
)
MEASURED = (
    "| [RL](docs/rl/index.md) | yes | log-probabilities in "
    "[0.52](docs/benchmarks/results/2026-11-26-h100-80gb-hbm3-rl-peers.md) of verl's time; "
    "2.1 GiB, verl's 0.25 |",
    "| [distillation](docs/distillation.md) | yes | "
    "[2.95 GiB](docs/benchmarks/results/2026-11-26-h100-80gb-hbm3-distill-peers.md), "
    "compiled ModelOpt's 4.86 |",
    "| [small heads](docs/performance.md#small-heads) | no | "
    "up to [1.24](docs/benchmarks/2026-11-23.md) of Transformer Engine's time |",
)
#: Least share of the peak that is saved -> the word for it.
WORDS = {0.1: "yes", 0.01: "some", -1.0: "no"}


def trainings() -> str:
    """README's table: of each training whether the flag helps, and one number; then a plan's first words."""
    rows = []
    for label, words in TRAININGS:
        advice = command.plan_of(shlex.split(words)).advice
        saved = 1 - advice.recommended.peak / advice.baseline.peak
        word = next(word for least, word in WORDS.items() if saved >= least)
        rows.append(f"| {label} | {word} | {f'−{saved:.0%}' if saved >= 0.005 else 'nothing'} |")
    plan_of_one, _ = printed("--model llama-3.2-1b --seq-length 32768").split("\n\n", 1)
    asked = "\nAsk about your launch ([by log or script](docs/plan.md); here 80 GB, no recomputation):\n"
    head = ["| you train | help? | by how much |", "|---|---|---|"]
    return "\n".join([*head, *rows, *MEASURED, asked, plan_of_one, "```", ""])


def model_list() -> str:
    """Every name that ``--model`` knows, by the maker whose sizes they are."""
    rows: dict[str, list[str]] = {}
    for name, model in MODELS.items():
        rows.setdefault(model.source.partition("/")[0], []).append(f"`{name}`")
    return "; ".join(f"{maker}: {', '.join(names)}" for maker, names in rows.items()) + ".\n"


#: Page -> its parts, by the name in their comments, and what makes each.
PAGES = {
    README: {"help": trainings},
    PAGE: {
        "plans": help_table,
        "example": lambda: printed(EXAMPLE),
        "off": off_table,
        "models": model_list,
    },
}


def outside(found: Sequence[Compared], bound: float) -> list[str]:
    """Lines that name what is further off than ``bound``, or than its exception's."""
    return [
        f"{one.what} {one.variant}: measured {one.measured:.0f} MiB, planned {one.planned:.0f}"
        for one in found
        if one.measured is not None
        and abs(one.off) > EXCEPTIONS.get(one.what.removeprefix("[").partition("]")[0], bound)
    ]
