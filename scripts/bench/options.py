"""What an option of the loss costs: its time over the plain loss's, and the curve of masked tokens.

`python -m scripts.bench --preset options`. A step is forward, backward and fp32 ``main_grad`` on random
operands. Each turn of an option stands between two of the plain loss and is divided by their mean.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce import masked_tokens
from megatron_fused_ce.call import Call
from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.loss import TeacherTargets, differentiable_of
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.measure import ratios_beside, turn
from megatron_fused_ce.scripts.bench.problem import DTYPES, Problem, World
from megatron_fused_ce.scripts.bench.variants import Variant, backward, config_of
from megatron_fused_ce.scripts.lib import results, tables
from megatron_fused_ce.scripts.lib.results import Row

PLAIN = "plain"
TEACHER_CLASSES = 64
MASKED_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Option:
    """One row: what is asked for beside the plain loss."""

    name: str
    config: dict[str, Any]
    outputs: tuple[str, ...] = ()
    differentiable: bool = False
    teacher: bool = False
    masked: float = 0.0
    target: float = 1.02

    def fits(self, strategy: str) -> bool:
        return not strategy.startswith("grad_in_forward") or not self.differentiable


def options_of(vocab: int) -> list[Option]:
    """Every option, the padding masked as if the vocabulary had been padded by 200 columns."""
    true_size = vocab - 200
    return [
        Option(PLAIN, {}),
        Option("logit scale", {"logit_scale": 0.5}),
        Option("ignore_index", {"ignore_index": -100}),
        Option("z-loss", {"z_loss": 1e-4}),
        Option("masked padding", {"true_vocab_size": true_size}),
        Option("softcap", {"logit_softcap": 30.0}),
        Option("softcap, rows", {"logit_softcap": 30.0, "logits_backend": "gemm_rows"}),
        Option("label smoothing", {"label_smoothing": 0.1}),
        Option("logits rounded", {"logit_precision": "activations"}),
        Option("accuracy", {}, ("correct",)),
        Option("lse, log-probability", {}, ("lse", "log_prob")),
        Option("predicted ids", {}, ("predicted",)),
        Option("entropy", {}, ("entropy",)),
        Option("log-probability with gradient", {}, ("log_prob",), True),
        Option("entropy with gradient", {}, ("entropy",), True, target=1.15),
        Option(f"teacher's top {TEACHER_CLASSES}", {}, teacher=True),
        *(Option(f"{share:.0%} masked", {"skip_masked": True}, masked=share) for share in MASKED_SHARES),
        Option("nothing masked, skipping on", {"skip_masked": True}),
    ]


def teacher_of(problem: Problem, vocab: int) -> TeacherTargets:
    generator = torch.Generator(device=problem.labels.device).manual_seed(3)
    shape = (problem.num_tokens, TEACHER_CLASSES)
    ids = torch.randint(vocab, shape, generator=generator, device=problem.labels.device)
    log_probs = torch.randn(shape, generator=generator, device=problem.labels.device)
    return TeacherTargets(ids, log_probs.log_softmax(-1))


def variant_of(option: Option, strategy: str, problem: Problem, vocab: int) -> Variant:
    """A step with the option. What belongs to a step's input (the mask's count too) is made outside of it."""
    config = config_of(strategy, **option.config)
    assert problem.token_weights is not None
    weights, grad_loss = problem.token_weights, problem.grad_loss
    if option.masked:
        generator = torch.Generator(device=weights.device).manual_seed(4)
        mask = torch.rand(weights.shape, generator=generator, device=weights.device) < option.masked
        weights, grad_loss = weights.masked_fill(mask, 0.0), grad_loss.masked_fill(mask, 0.0)
    unmasked = None
    if config.skip_masked:
        if not option.masked:
            weights, grad_loss = weights.clamp(min=0.5), problem.scalar * weights.clamp(min=0.5)
        unmasked = masked_tokens.count(weights.reshape(1, -1), None)
    # Not the loss's: that and the log-probability's would cancel, and zeros make products fast.
    other = torch.rand_like(grad_loss)
    teacher = teacher_of(problem, vocab) if option.teacher else None
    labels = problem.labels if teacher is None else torch.full_like(problem.labels, -1)

    def run(problem: Problem, mark: Callable[[], None]) -> Tensor:
        problem.reset()
        mark()
        made = linear_cross_entropy(
            Call(
                problem.hidden,
                problem.weight,
                labels,
                token_weights=weights,
                vocab_start=0,
                config=config,
                outputs=option.outputs,
                differentiable=differentiable_of(option.outputs) if option.differentiable else (),
                teacher=teacher,
                unmasked=unmasked,
                open_grad_weight=problem.open_grad_weight,
            )
        ).outputs
        total = (made.loss * grad_loss).sum()
        if option.differentiable:
            for name in option.outputs:
                total = total + (getattr(made, name) * other).sum()
        one = torch.ones((), device=labels.device)
        return backward(total, one, problem, mark)

    return Variant(option.name, "ours", run, config=config)


def measure(
    given: argparse.Namespace, cell: Cell, strategy: str, world: World, problem: Problem
) -> list[Row]:
    """Rows of one cell and strategy: the plain loss, then the options."""
    options = [o for o in options_of(cell.vocab) if o.fits(strategy)]
    if given.options:
        options = [o for o in options if o.name in (PLAIN, *given.options)]

    def watch(option: Option) -> Callable[[], float]:
        variant = variant_of(option, strategy, problem, cell.vocab)
        turn(variant, problem, world, 1, 1)  # compiles
        return lambda: statistics.median(sum(span) for span in turn(variant, problem, world, 1, given.steps))

    plain = watch(options[0])
    rows = []
    for option in options:
        own = plain if option.name == PLAIN else watch(option)
        ratios, plain_ms = ratios_beside(own, plain, given.blocks)
        ratio = statistics.median(ratios)
        rows.append(
            {
                "shape": cell.shape,
                "tokens": cell.num_tokens,
                "strategy": strategy,
                "variant": option.name,
                "time_ms": round(ratio * statistics.median(plain_ms), 3),
                "ratio": round(ratio, 4),
                "spread": round(max(ratios) - min(ratios), 4),
                "target": None if option.name == PLAIN or option.masked else option.target,
                "masked": option.masked,
            }
        )
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def table(rows: list[Row]) -> str:
    head = ["shape", "tokens", "strategy", "option", "ms", "over plain", "target", "spread of the ratio"]
    lines = []
    for row in rows:
        target = tables.cell(row["target"], ".2f", "")
        if row["masked"]:
            target = f"{1 - row['masked']:.2f} of the tokens"
        names = [row[key] for key in ("shape", "tokens", "strategy", "variant")]
        times = (f"{row['time_ms']:.2f}", f"{row['ratio']:.3f}", target, f"{row['spread']:.3f}")
        lines.append([*names, *times])
    return tables.markdown(head, lines, left=len(head)) + "\n"


def run(given: argparse.Namespace, world: World, source: Row) -> int:
    """`--preset options`: what the command line asks for, on one rank."""
    known = [option.name for option in options_of(1000)]
    if unknown := set(given.options or ()) - set(known):
        raise UsageError(f"no option {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if world.size > 1:
        raise UsageError("--preset options knows no tensor parallelism: leave out --tp")
    rows: list[Row] = []
    for cell in given.cells:
        problem = Problem.of(cell, world, dtype=DTYPES[given.dtype])
        for strategy in given.strategies:
            rows += measure(given, cell, strategy, world, problem)
    if given.path:
        results.write(given.path, rows, source)
        head = f"# What an option costs\n\n{source['device']}, commit {source['commit']}.\n\n"
        results.write_whole(given.path.with_suffix(".md"), head + table(rows))
        print(f"written: {given.path}")
    return 0
