"""Launch Megatron-LM's own pretraining scripts with the flag off and on, and compare the logs.

On a CPU (gloo, fp32, tiny models; `megatron_fused_ce.scripts.lib.megatron_cpu` stands in for CUDA), the
named cases below, for every checkout given:

    python -m scripts.runs.pretrain --megatron ~/Megatron-LM-0.18 --megatron ~/Megatron-LM-0.19

On GPUs with Transformer Engine, the cases of GPU_CASES (four GPUs) and PAIR_CASES (two) below, or one case
whose arguments are yours, launched as users launch it:

    python -m scripts.runs.pretrain --megatron ~/Megatron-LM --device cuda --cases losses,vpp,cp2
    python -m scripts.runs.pretrain --megatron ~/Megatron-LM --device cuda --cases fsdp \\
        --variants unfused,native,auto,fsdp2,fsdp2-fused-ce,megatron-fsdp,megatron-fsdp-fused-ce
    python -m scripts.runs.pretrain --megatron ~/Megatron-LM --device cuda --nproc 4 \
        --case-name "TP 4, 128k" -- $(cat launch.args) --train-iters 50

Speed and reach: one model at sequence lengths, until a variant runs out of memory, which is a result there:

    python -m scripts.runs.pretrain --megatron ~/Megatron-LM --device cuda --nproc 1 --lengths 16384 131072
    python -m scripts.runs.pretrain --megatron ~/Megatron-LM --device cuda --nproc 2 --lengths 32768 \
        --model llama-3-8b-2-layers --recompute none --variants auto,native,unfused,te-lifted

Each variant is one launch of the unmodified script; ``unfused`` is what the others are compared
with, where AGAINST names no other variant. More variants:
``--variant 'c4096=--fused-chunked-ce --fused-ce-chunk-tokens 4096'``.

Writes results.json and results.md to --out. Every run's logs, command line and figures stay there too, and a
run whose inputs have not changed since is not repeated. Exit status: 0 all within bounds, 1 a bound broken or
a run failed, 2 a mistake in the arguments.

The bound on losses is relative: twice what Megatron's own native fused cross entropy differs from
its unfused one by, or 1e-6 (what the log's seven digits can tell apart), whichever is larger.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_fused_ce.adapter.arguments import FLAG
from megatron_fused_ce.command_line import (
    NO_LIMIT,
    Parser,
    UsageError,
    command,
    seconds,
    whole,
    writable_folder,
)
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.launches import (
    NO_FUSED_WGRAD,
    REFERENCE,
    STOCK,
    UNTIED,
    YARDSTICK,
    Case,
    Checkout,
    Run,
    named_flags,
)
from megatron_fused_ce.scripts.lib.logs import Figures
from megatron_fused_ce.scripts.lib.losses import (
    GRAD_NORM_RESOLUTION,
    LOSS_RESOLUTION,
    YARDSTICK_FACTOR,
    largest_relative_difference,
    loss_difference,
)
from megatron_fused_ce.scripts.runs import lengths

FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
MEGATRON_FSDP = (
    "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"
    " --data-parallel-sharding-strategy optim_grads_params"
)
OPTIONS = (
    f"{FLAG} --fused-ce-num-chunks 3 --deterministic-mode --fused-ce-z-loss 1e-4"
    " --fused-ce-logit-softcap 30 --fused-ce-ignore-index 7 --fused-ce-mask-padded-vocab"
)

VARIANTS = {
    REFERENCE: STOCK[REFERENCE],
    YARDSTICK: STOCK[YARDSTICK],
    "fused-ce": f"{FLAG} --fused-ce-num-chunks 3 --fused-ce-strategy recompute",
    "fused-ce-store": f"{FLAG} --fused-ce-num-chunks 3 --fused-ce-strategy store",
    "auto": FLAG,
    **{name: f"{FLAG} --fused-ce-strategy {name}" for name in ("store", "grad_in_forward", "recompute")},
    "te": STOCK["te"],
    "te-lifted": STOCK["te"],
    "many-connections": FLAG,
    "fsdp2": FSDP2,
    "fsdp2-fused-ce": f"{FSDP2} {FLAG} --fused-ce-num-chunks 3",
    "megatron-fsdp": MEGATRON_FSDP,
    "megatron-fsdp-fused-ce": f"{MEGATRON_FSDP} {FLAG} --fused-ce-num-chunks 3",
}
# What a variant is compared with, where that is not REFERENCE.
AGAINST: dict[str, str] = {}
# Variants that repeat what they are compared with: equal to the last digit.
REPEATS = set()
for _name, _flags in {
    "options-recompute": f"{OPTIONS} --fused-ce-strategy recompute",
    "options-store": f"{OPTIONS} --fused-ce-strategy store",
    "options-grad-in-forward": f"{OPTIONS} --fused-ce-strategy grad_in_forward",
    "options-smoothing": f"{OPTIONS} --fused-ce-label-smoothing 0.1",  # by another logits backend
    "options-skip": f"{OPTIONS} --fused-ce-skip-masked",
}.items():
    VARIANTS[_name] = VARIANTS[f"{_name}-again"] = _flags
    VARIANTS[f"{_name}-graph"] = f"{_flags} --cuda-graph-impl full_iteration"
    AGAINST |= {f"{_name}-again": _name, f"{_name}-graph": _name}
    REPEATS.add(f"{_name}-again")
AGAINST |= {f"options-{like}": "options-recompute" for like in ("store", "grad-in-forward", "skip")}
for _name in ("options-recompute", "options-smoothing"):
    AGAINST[_name] = _name  # nothing is like them
# What runs on a CPU without apex and Transformer Engine. Vocabulary 127 + eod, padded to 128·TP.
CPU_ONLY_ARGS = """
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --attention-backend unfused --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
"""
CPU_BASE_ARGS = f"""
    --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5
    --lr 1e-3 --lr-decay-style constant
    --mock-data --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --eval-iters 1 --eval-interval 3 --log-interval 1 --tensor-model-parallel-size 2
    {CPU_ONLY_ARGS}
"""
#: Begins the status of a longer sequence than one that a variant did not train.
NOT_TRIED = "not tried"
NOT_RUN = "not run: the time limit is over"
STACK_SPEC = "--spec megatron_fused_ce.scripts.lib.local_stack_spec stack_spec"


# --- what is run -----------------------------------------------------------------------------


def _stack_pattern(checkout: Checkout, num_mtp_layers: int, num_stages: int) -> str | None:
    """The flags that give the Mamba or Hybrid model two attention and two MLP layers.

    ``num_stages``: pipeline stages, virtual ones counted; 1, 2 or 4.
    """
    if checkout.version < (0, 18) and num_mtp_layers and num_stages > 1:
        return None  # its MTP gets no token ids on the last stage
    if checkout.version >= (0, 17):
        layers = {1: "*-*-", 2: "*-|*-", 4: "*|-|*|-"}[num_stages]
        return f"--hybrid-layer-pattern {layers + '/*-' * num_mtp_layers}"
    if num_mtp_layers or num_stages > 2:
        return None  # MambaModel has MTP and virtual stages from 0.17 on
    return "--hybrid-override-pattern *-*- --num-layers 4"


def cpu_case(checkout: Checkout, model: str, name: str) -> Case:
    """The case `name` of `model` ("gpt", "stack") as `checkout` spells it.

    Together the cases cover sequence parallelism on and off, tied and untied weights, gradient
    accumulation fusion on and off, several micro-batches per step, and evaluation.
    """
    num_mtp_layers = {"mtp": 1, "mtp2": 2, "pp2-mtp": 1}.get(name, 0)
    num_stages = {"pp2": 2, "pp2-mtp": 2, "vpp": 4}.get(name, 1)
    num_processes = 4 if name == "distopt" or num_stages > 1 else 2
    fused_wgrad = name in ("mtp", "distopt", "bf16", "pp2-mtp")
    extra = {
        "plain": f"--sequence-parallel {UNTIED}",
        "mtp": "--sequence-parallel",
        "mtp2": UNTIED,
        "distopt": f"--sequence-parallel {UNTIED} --use-distributed-optimizer"
        " --overlap-grad-reduce --overlap-param-gather",
        "pp2": "--pipeline-model-parallel-size 2",
        "pp2-mtp": f"--pipeline-model-parallel-size 2 --sequence-parallel {UNTIED}",
        "vpp": "--pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
        " --overlap-grad-reduce --overlap-param-gather",
        "bf16": "--bf16 --sequence-parallel",
        "fsdp": f"--tensor-model-parallel-size 1 {UNTIED} --no-gradient-reduce-div-fusion",
    }[name]
    if model == "gpt":
        script, layers = "pretrain_gpt.py", "--num-layers 2"
        if num_stages == 4:
            layers = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
        if num_mtp_layers:
            layers += f" --mtp-num-layers {num_mtp_layers}"
    else:
        script = f"pretrain_{checkout.stack_model}.py"
        pattern = _stack_pattern(checkout, num_mtp_layers, num_stages)
        if pattern is None:
            return Case(name, script, num_processes, None)
        layers = f"{pattern} {STACK_SPEC}"
    words = [CPU_BASE_ARGS, layers, extra, "" if fused_wgrad else NO_FUSED_WGRAD]
    return Case(name, script, num_processes, shlex.split(" ".join(words)), fused_wgrad)


CPU_CASES = {
    "plain": "TP 2, sequence parallelism, untied weights",
    "mtp": "MTP 1, TP 2, sequence parallelism, tied, gradient accumulation fusion",
    "mtp2": "MTP 2, TP 2, untied",
    "distopt": "distributed optimizer with both overlaps, TP 2 × DP 2, sequence parallelism, untied, "
    "gradient accumulation fusion",
    "pp2": "TP 2 × PP 2, tied",
    "pp2-mtp": "TP 2 × PP 2, MTP 1, sequence parallelism, untied, gradient accumulation fusion",
    "vpp": "TP 2 × PP 2 with two virtual stages each, sequence parallelism, tied, distributed optimizer "
    "with both overlaps",
    "bf16": "TP 2, sequence parallelism, tied, gradient accumulation fusion into fp32",
    "fsdp": "DP 2, untied: for the variants with FSDP in their names",
}
# Not fsdp: Megatron's DDP of the usual variants is in other cases. Not bf16: so small a model's native and
# unfused runs agree to the bit there, which leaves no yardstick for chunks that flip the rounding of a
# single gradient.
DEFAULT_CPU_CASES = ("plain", "mtp", "mtp2", "distopt", "pp2", "pp2-mtp", "vpp")

# Four GPUs, real Transformer Engine, and its cuts of a small model; the head is Llama-3's vocabulary.
GPU_BASE_ARGS = """
    --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
    --micro-batch-size 1 --global-batch-size 4 --train-iters 30 --lr 1e-4 --lr-decay-style constant
    --attention-dropout 0 --hidden-dropout 0
    --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 128255 --num-workers 0
    --eval-iters 0 --eval-interval 1000 --log-interval 1 --log-memory-interval 10 --bf16
    --no-create-attention-mask-in-dataloader --normalization RMSNorm --swiglu --disable-bias-linear
    --make-vocab-size-divisible-by 32 --transformer-impl transformer_engine --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""
_TP2 = "--tensor-model-parallel-size 2"
GPU_CASES = {
    "losses": (
        "TP 4, untied, 200 iterations",
        f"--tensor-model-parallel-size 4 --train-iters 200 --global-batch-size 2 {UNTIED}",
    ),
    "vpp": (
        "TP 2 × PP 2 with two virtual stages each, tied",
        f"{_TP2} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "cp2": ("TP 2 × CP 2, tied", f"{_TP2} --context-parallel-size 2"),
    "mtp": ("TP 2 × DP 2, MTP 1, untied", f"{_TP2} --mtp-num-layers 1 {UNTIED}"),
    "packed": (
        "TP 2 × DP 2, packed sequences (attention within documents), untied",
        f"{_TP2} --dataloader-inter-document-masking {UNTIED}",
    ),
    "pp2-mtp": (
        "TP 2 × PP 2, MTP 1, untied",
        f"{_TP2} --pipeline-model-parallel-size 2 --mtp-num-layers 1 {UNTIED}",
    ),
    "no-sp": ("TP 4 without sequence parallelism, untied", f"--tensor-model-parallel-size 4 {UNTIED}"),
    "graph": (
        "TP 4, the whole iteration in a CUDA graph, untied",
        f"--tensor-model-parallel-size 4 {UNTIED} --cuda-graph-impl full_iteration"
        " --no-check-for-nan-in-loss-and-grad --te-rng-tracker",
    ),
    "cp2-packed": (
        "TP 2 × CP 2, packed sequences, untied",
        f"{_TP2} --context-parallel-size 2 --dataloader-inter-document-masking {UNTIED}",
    ),
}
DEFAULT_GPU_CASES = ("losses", "vpp", "cp2", "mtp", "packed")

# Two GPUs and a smaller model whose vocabulary is padded, for what is compared to the digit and not timed.
PAIR_BASE_ARGS = """
    --num-layers 2 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
    --micro-batch-size 2 --train-iters 10 --lr 1e-4 --lr-decay-style constant
    --attention-dropout 0 --hidden-dropout 0
    --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 32100 --num-workers 0
    --eval-iters 0 --eval-interval 1000 --log-interval 1
    --no-create-attention-mask-in-dataloader --normalization RMSNorm --swiglu --disable-bias-linear
    --transformer-impl transformer_engine --untie-embeddings-and-output-weights
"""
_TP2_SP = (
    f"{_TP2} --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce"
    " --overlap-param-gather --global-batch-size 4"
)
PAIR_CASES = {
    # One micro-batch, its gradients reduced in bf16: FSDP2 knows no other way, and so all three do the same.
    "fsdp": ("DP 2, bf16 gradients", "--bf16 --grad-reduce-in-bf16 --global-batch-size 4"),
    "fsdp-fp32": ("DP 2, fp32, two micro-batches", f"--global-batch-size 8 {NO_FUSED_WGRAD}"),
    "fp16": (
        "TP 2, fp16, loss scale from 2^32 down",
        f"{_TP2_SP} --fp16 --initial-loss-scale 4294967296 --hysteresis 1 --train-iters 24",
    ),
    "options": (
        "TP 2, bf16, every option of the loss",
        f"{_TP2_SP} --bf16 --no-check-for-nan-in-loss-and-grad --te-rng-tracker --eod-mask-loss",
    ),
}


def gpu_case(name: str) -> Case:
    """The case `name` of the GPT model on four GPUs or two."""
    if name in PAIR_CASES:
        words = shlex.split(f"{PAIR_BASE_ARGS} {PAIR_CASES[name][1]}")
        return Case(name, "pretrain_gpt.py", 2, words, every_digit=True)
    words = shlex.split(f"{GPU_BASE_ARGS} {GPU_CASES[name][1]}")
    if name == "no-sp":
        words.remove("--sequence-parallel")
    return Case(name, "pretrain_gpt.py", 4, words)


MODELS = ("gpt", "stack")
SAME_NETWORK = (
    "The Mamba or Hybrid model (`*-*-`: attention, MLP, attention, MLP) is the same network as the "
    "GPT of two layers, in another class: where both draw the same random numbers, their rows "
    "agree to the digit.\n"
)


# --- comparison ------------------------------------------------------------------------------


@dataclass
class Row:
    version: str
    model: str
    case: str
    variant: str
    status: str
    T: int | None = None  # where the case is a sequence length
    against: str = REFERENCE  # what its differences are to
    loss_difference: float | None = None
    native_loss_difference: float | None = None
    grad_norm_difference: float | None = None
    native_grad_norm_difference: float | None = None
    heads_fused: int | None = None
    logits_materialised: int | None = None
    heads_stock: int | None = None
    last_lm_loss: float | None = None
    time_ms: float | None = None  # of an iteration, median after the warm-up
    spread: float | None = None
    ratio: float | None = None  # of the time to the reference's
    tokens_per_s: float | None = None  # where the case is a sequence length
    peak_mib: float | None = None  # Megatron's max allocated
    skipped: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def compare(run: Run, all_figures: dict[str, Figures], warmup: int, may_run_out: Sequence[str]) -> Row:
    """One variant's row; `all_figures` are the figures of this case's variants."""
    figures = all_figures[run.variant]
    row = Row(
        version=run.checkout.label,
        model=run.model,
        case=run.case.name,
        variant=run.variant,
        status=figures.status,
        T=run.case.num_tokens,
        against=AGAINST.get(run.variant, REFERENCE),
        skipped=figures.skipped,
        heads_fused=figures.heads_fused,
        logits_materialised=figures.logits_materialised,
        heads_stock=figures.heads_stock,
        peak_mib=figures.max_allocated_mb,
    )
    row.time_ms, row.spread = figures.time_ms(warmup)
    row.last_lm_loss = figures.losses.get("lm loss", [None])[-1]  # type: ignore[list-item]
    if row.T and row.time_ms:
        row.tokens_per_s = round(1e3 * row.T / row.time_ms, 1)
    if figures.status != "ok":
        allowed = figures.status == "out of memory" and (run.variant in may_run_out or row.T)
        if not allowed and not figures.status.startswith(NOT_TRIED):
            row.problems.append(f"{figures.status} {figures.error}".strip())
        return row

    stock, native = all_figures.get(REFERENCE), all_figures.get(YARDSTICK)
    if stock and native and stock.status == native.status == "ok" and run.variant != REFERENCE:
        row.native_loss_difference = loss_difference(native, stock)
        row.native_grad_norm_difference = largest_relative_difference(native.grad_norms, stock.grad_norms)
    reference = all_figures.get(row.against)
    other_ms = reference.time_ms(warmup)[0] if reference else None
    if row.time_ms and other_ms:
        row.ratio = round(row.time_ms / other_ms, 4)
    if reference and reference.status == "ok" and run.variant != row.against:
        row.loss_difference = loss_difference(figures, reference)
        row.grad_norm_difference = largest_relative_difference(figures.grad_norms, reference.grad_norms)
        if run.uses_plugin and figures.skipped != reference.skipped:
            skipped = f"iterations {figures.skipped} skipped"
            row.problems.append(f"{skipped}, by {row.against} {reference.skipped}")
    if row.T:
        row.problems += _not_trained(run, figures)
    if run.uses_plugin:
        row.problems += _broken_bounds(run, row)
    return row


def reason_to_skip(run: Run, rows: Sequence[Row]) -> str:
    """Why a longer sequence would tell nothing new, '' where it would."""
    this, length = (run.checkout.label, run.model, run.variant), run.case.num_tokens or 0
    for row in rows:
        of_this = (row.version, row.model, row.variant) == this
        if of_this and 0 < (row.T or 0) <= length and not row.status.startswith(("ok", NOT_TRIED, NOT_RUN)):
            return f"{NOT_TRIED}: {row.status} at {row.T} tokens"
    return ""


def _not_trained(run: Run, figures: Figures) -> list[str]:
    words = run.case.args or []
    wanted = int(words[len(words) - words[::-1].index("--train-iters")])
    problems = []
    if len(figures.iteration_times_ms) != wanted:
        problems.append(f"ended after {len(figures.iteration_times_ms)} of {wanted} iterations")
    if not all(map(math.isfinite, figures.losses.get("lm loss", []))):
        problems.append("a loss is not finite")
    return problems


def _broken_bounds(run: Run, row: Row) -> list[str]:
    problems = []
    repeats = run.variant in REPEATS
    if run.case.num_tokens:
        row = replace(row, loss_difference=None, grad_norm_difference=None)  # shown, not judged
    # Elsewhere the log has three decimals of it.
    has_norms = run.device == "cpu" or (run.case.every_digit and (run.case.is_fp32 or repeats))
    for what, ours, native, resolution in (
        ("loss", row.loss_difference, row.native_loss_difference, LOSS_RESOLUTION),
        (
            "grad norm",
            row.grad_norm_difference if has_norms else None,
            row.native_grad_norm_difference,
            GRAD_NORM_RESOLUTION,
        ),
    ):
        bound = 0.0 if repeats else max(YARDSTICK_FACTOR * (native or 0.0), resolution)
        if ours is not None and native is None and not (run.case.is_fp32 or repeats):
            problems.append(f"no {YARDSTICK} run to hold the {what} against")
        elif ours is not None and not ours <= bound:
            problems.append(f"{what} differs by {ours:.1e}, bound {bound:.1e}")
    if row.heads_fused is None:
        problems.append("the run printed no count of fused heads")
    elif not row.heads_fused:
        problems.append("no head was evaluated fused")
    if row.logits_materialised:
        problems.append(f"{row.logits_materialised} logits were materialised")
    return problems


# --- tables ----------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], device: str) -> str:
    """The table; on a CPU the variants with the flag, on GPUs all of them."""
    cell = tables.cell
    if device == "cpu":
        head = ["version", "model", "case", "variant", "compared with", "loss difference"]
        head += ["loss: native − unfused", "grad norm difference", "grad norm: native − unfused"]
    else:
        head = ["version", "case", "variant", "ms per iteration"]
        head += ["tokens/s"] * any(row.T for row in rows)
        head += ["max allocated MiB", "last lm loss", "compared with", "largest loss difference"]
    head += ["heads fused", "logits materialised", "within bounds"]
    lines = []
    for row in rows:
        verdict = "; ".join(row.problems) or (row.status if row.status != "ok" else "yes")
        compared = ["–" if row.loss_difference is None else row.against]
        compared += [cell(row.loss_difference, ".1e")]
        if device == "cpu":
            if row.variant in (REFERENCE, YARDSTICK) and not row.problems:
                continue
            cells = [row.version, row.model, row.case, row.variant, *compared]
            cells += [cell(row.native_loss_difference, ".1e"), cell(row.grad_norm_difference, ".1e")]
            cells += [cell(row.native_grad_norm_difference, ".1e")]
        else:
            cells = [row.version, row.case, row.variant, cell(row.time_ms, ".1f")]
            cells += [cell(row.tokens_per_s, ".0f")] * ("tokens/s" in head)
            cells += [cell(row.peak_mib, ".0f"), cell(row.last_lm_loss, ".6f"), *compared]
        lines.append([*cells, cell(row.heads_fused), cell(row.logits_materialised), verdict])
    return tables.markdown(head, lines, left=len(head)) + "\n"


def report(rows: Sequence[Row], device: str, source: dict[str, Any]) -> str:
    """The Markdown file: the table, and what it takes to read and repeat it."""
    where = "a CPU with gloo" if device == "cpu" else source["device"]
    versions = f"Python {source['python']}, torch {source['torch']}"
    differences = (
        "Differences are the largest relative ones over all logged iterations and, for losses, over "
        "every loss that Megatron logs (lm, each MTP depth, validation). The bound on a flag's loss "
        f"is {YARDSTICK_FACTOR:g}× that of native or {LOSS_RESOLUTION:g} (what the log's seven digits "
        "can tell apart), whichever is larger.\n"
    )
    legend = ""
    if device == "cpu":
        used = {row.case for row in rows}
        cases = "".join(f"- `{name}`: {text}\n" for name, text in CPU_CASES.items() if name in used)
        legend = (
            "\nCases, in fp32 (but for `bf16`), with two or four micro-batches per step and with "
            "evaluation:\n\n"
            f"{cases}\n{SAME_NETWORK}"
        )
    else:
        legend = _gpu_legend(dict.fromkeys(row.case for row in rows))
    return (
        "# Unmodified pretraining scripts, flag off and on\n\n"
        f"{_in_short(rows)}{longest(rows)}"
        f"By `scripts/runs/pretrain.py` at commit {source['commit']} on {where}, {versions}. "
        "The JSON file beside this one has every run's command line and figures.\n\n"
        f"{markdown(rows, device)}\n{differences}{legend}"
    )


def longest(rows: Sequence[Row]) -> str:
    """The most tokens that each variant trained, and what ended it; empty where no case is a length."""
    found = []
    for variant in dict.fromkeys(row.variant for row in rows if row.T):
        mine = sorted((row for row in rows if row.T and row.variant == variant), key=lambda row: row.T or 0)
        trained = max((row.T or 0 for row in mine if row.status == "ok" and not row.problems), default=0)
        ended = next((f" ({row.status} at {row.T})" for row in mine if (row.T or 0) > trained), "")
        found.append(f"{variant} {trained or 'none'}{ended}")
    return f"Longest that trains, in tokens: {', '.join(found)}.\n\n" if found else ""


def _in_short(rows: Sequence[Row]) -> str:
    """What the launches with the flag mean for a user, in one paragraph; empty where none was compared."""
    with_flag = [row for row in rows if row.variant not in (REFERENCE, YARDSTICK)]
    compared = [row for row in with_flag if row.loss_difference is not None and not row.T]
    if not compared:
        return ""
    within = sum(row.status == "ok" and not row.problems for row in compared)
    largest = max(row.loss_difference or 0.0 for row in compared)
    native = [row.native_loss_difference for row in compared if row.native_loss_difference is not None]
    beside = f", Megatron's native loss fusion {max(native):.1e}" if native else ""
    return (
        f"In short: {within} of {len(compared)} launches with the flag train as without it, within the "
        f"bounds below. The largest relative difference of a loss is {largest:.1e}{beside}.\n\n"
    )


def _gpu_legend(used: Iterable[str]) -> str:
    """The named cases among those used, described."""
    legend, used = "", list(used)
    for described, words in (
        (
            GPU_CASES,
            "four layers of H = 1024, V = 128256, 4096 tokens a sequence, bf16, Transformer Engine's layers, "
            "sequence parallelism, distributed optimizer with both overlaps, 30 iterations where not said "
            "otherwise",
        ),
        (
            PAIR_CASES,
            "two GPUs, two layers of H = 512, V = 32101 padded, 1024 tokens a sequence, Transformer Engine's "
            "layers, untied, 10 iterations (fp16: 24) of which every digit is known; TP 2 with sequence "
            "parallelism and the distributed optimizer",
        ),
    ):
        cases = "".join(f"- `{name}`: {described[name][0]}\n" for name in used if name in described)
        legend += f"\nCases: {words}:\n\n{cases}" if cases else ""
    if any(name.isdigit() for name in used):
        legend += "\nCases are sequence lengths at micro-batch 1; their losses are shown and not judged.\n"
    return legend


# --- command line ----------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser("python -m scripts.runs.pretrain", __doc__ or "")
    add = parser.add_argument
    add("--megatron", action="append", metavar="PATH", help="a Megatron-LM checkout; repeatable")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--models", default=",".join(MODELS), help="CPU: gpt, stack (Mamba or Hybrid), or both")
    add(
        "--cases",
        help=f"comma-separated, on a CPU of {', '.join(CPU_CASES)}; on four GPUs of "
        f"{', '.join(GPU_CASES)}; on two of {', '.join(PAIR_CASES)}",
    )
    add(
        "--lengths", type=whole(), nargs="+", metavar="T", help="instead of cases: sequence lengths, in order"
    )
    add("--model", type=str.lower, choices=lengths.MODELS, default="llama-3.2-1b", help="of --lengths")
    add("--recompute", choices=("full", "none"), default="full", help="of --lengths [full]")
    add(
        "--variants",
        help=f"comma-separated, of {', '.join(VARIANTS)} and those of --variant "
        f"[{REFERENCE},{YARDSTICK},fused-ce; of --lengths {lengths.DEFAULT_VARIANTS}]",
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more variant, run after those of --variants; repeatable",
    )
    add("--case-name", default="own arguments", help="with arguments of your own")
    add("--script", default="pretrain_gpt.py", help="with arguments of your own")
    add("--nproc", type=whole(most=4096), default=2, help="with arguments of your own or --lengths [2]")
    add(
        "--may-run-out-of-memory",
        action="append",
        default=[],
        metavar="VARIANT",
        help="running out of GPU memory is a result of this variant, not a failure; repeatable",
    )
    add("--warmup", type=whole(0), metavar="N", help="logged iterations left out of the time [1]")
    add("--timeout", type=seconds, default=900.0, metavar="S", help="of one run")
    add("--time-limit", type=seconds, default=NO_LIMIT, metavar="S", help="of all; cuts the last run")
    add("--out", type=Path, default=Path("build/pretrain"), help="folder of results and logs")
    add("--dry-run", action="store_true", help="print the launches")
    add(
        "script_args", nargs="*", metavar="-- ARGS", help="arguments of your own; with --lengths more of them"
    )
    return parser


def _chosen(text: str, known: Iterable[str], option: str) -> list[str]:
    names, known = [name for name in text.split(",") if name], list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: no {name!r}; there are {', '.join(known)}")
    return names


def _variants(options: argparse.Namespace) -> dict[str, str]:
    usual = lengths.DEFAULT_VARIANTS if options.lengths else f"{REFERENCE},{YARDSTICK},fused-ce"
    named = usual if options.variants is None else options.variants
    chosen = {name: VARIANTS[name] for name in _chosen(named, VARIANTS, "--variants")}
    chosen |= named_flags(options.variant)
    if not chosen:
        raise UsageError("no variant to run")
    return chosen


def plan(options: argparse.Namespace) -> list[list[Run]]:
    """The runs, one list per row group (checkout, model, case), the reference first."""
    if not options.megatron:
        raise UsageError("give at least one Megatron-LM checkout: --megatron PATH")
    checkouts = [Checkout.at(path) for path in options.megatron]
    if len({checkout.label for checkout in checkouts}) < len(checkouts):
        raise UsageError("checkouts need folders of different names: their names label the table")
    variants = _variants(options)
    cases: list[tuple[Checkout, str, Case]] = []
    for checkout in checkouts:
        if options.lengths:
            for num_tokens in options.lengths:
                case = lengths.case_of(options, checkout, num_tokens, CPU_ONLY_ARGS)
                cases.append((checkout, options.model, case))
            continue
        if options.script_args:
            if not (checkout.path / options.script).is_file():
                raise UsageError(f"--script: {checkout.label} has no {options.script}")
            case = Case(options.case_name, options.script, options.nproc, options.script_args)
            model = options.script.removeprefix("pretrain_").removesuffix(".py")
            cases.append((checkout, model, case))
            continue
        if options.device == "cuda":
            chosen = options.cases or ",".join(DEFAULT_GPU_CASES)
            for name in _chosen(chosen, {**GPU_CASES, **PAIR_CASES}, "--cases"):
                cases.append((checkout, "gpt", gpu_case(name)))
            continue
        for model in _chosen(options.models, MODELS, "--models"):
            chosen = options.cases or ",".join(DEFAULT_CPU_CASES)
            for name in _chosen(chosen, CPU_CASES, "--cases"):
                label = model if model == "gpt" else checkout.stack_model
                cases.append((checkout, label, cpu_case(checkout, model, name)))
    return [
        [
            Run(checkout, model, case, name, tuple(shlex.split(flags)), options.device, options.timeout)
            for name, flags in variants.items()
        ]
        for checkout, model, case in cases
    ]


@command("pretrain")
def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    groups = plan(options)
    if options.dry_run:
        for run in (run for group in groups for run in group if run.case.args is not None):
            print(f"# {run.title}\n{run.command}")
        return 0
    output = writable_folder(options.out.resolve())
    output.mkdir(parents=True, exist_ok=True)
    lock = open(output / "lock", "w")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"another comparison writes to {output}") from None

    rows: list[Row] = []
    records: list[dict[str, Any]] = []
    runs = [run for group in groups for run in group if run.case.args is not None]
    deadline = time.monotonic() + options.time_limit
    for group in groups:
        first = group[0]
        if first.case.args is None:
            status = f"{first.model} has it not in this version"
            rows.append(Row(first.checkout.label, first.model, first.case.name, "", status))
            continue
        all_figures: dict[str, Figures] = {}
        warmup = first.case.warmup if options.warmup is None else options.warmup
        for run in group:
            if reason := reason_to_skip(run, rows):
                all_figures[run.variant] = Figures(reason)
                print(f"{run.title}: {reason}", flush=True)
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                all_figures[run.variant] = Figures(NOT_RUN)
                print(f"{run.title}: not run", flush=True)
                continue
            timed = replace(run, timeout_s=min(left, run.timeout_s))
            figures, was_there = timed.execute(output)
            all_figures[run.variant] = figures
            came = "kept" if was_there else f"{figures.wall_s:.0f} s"
            line = f"{run.title}: {figures.status} ({came}) {figures.error}"
            print(line.rstrip(), flush=True)
        for run in group:
            row = compare(run, all_figures, warmup, options.may_run_out_of_memory)
            rows.append(row)
            record = {"shape": row.model if row.T else row.case, **asdict(row), "command": run.command}
            records.append({**record, "figures": asdict(all_figures[run.variant])})

    source = results.made_by(results.device_name(), ["scripts.runs.pretrain", *words])
    results.write(output / "results.json", records, source)
    results.write_whole(output / "results.md", report(rows, options.device, source))
    print(f"{longest(rows)}{markdown(rows, options.device)}")
    broken = [row for row in rows if row.problems]
    for row in broken:
        where = f"{row.version} {row.model} {row.case} {row.variant}"
        print(f"pretrain: {where}: {'; '.join(row.problems)}", file=sys.stderr)
    print(f"{len(runs)} runs, {len(broken)} broken; logs in {options.out}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
