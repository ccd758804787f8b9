"""What an option of the loss costs: its time over the plain loss's, and the curve of masked tokens.

    python scripts/benchmark_options.py                    # one GPU, Llama-3-8B's head, 8192 tokens
    python scripts/benchmark_options.py --shapes gemma-2-2b --strategies store --tokens 8192 32768

A step is forward, backward and fp32 ``main_grad`` on random operands. Each turn of an option stands between
two of the plain loss and is divided by their mean; a row is the median over blocks of shuffled order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmark_measure import block_order, turn
from benchmark_problem import SHAPES, Problem, World, shape_name
from benchmark_variants import Variant, backward
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, masked_tokens
from megatron_fused_ce.loss_form import TeacherTargets
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.phases import UNTIMED, PhaseTimes
from megatron_fused_ce.testing.provenance import commit

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
    timed: bool = False  # --fused-ce-report
    target: float = 1.02

    def fits(self, strategy: str) -> bool:
        return strategy != "grad_in_forward" or not self.differentiable


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
        Option("phases timed", {}, timed=True),
        Option("lse, log-probability", {}, ("lse", "log_prob")),
        Option("predicted ids", {}, ("predicted",)),
        Option("entropy", {}, ("entropy",)),
        Option("log-probability with gradient", {}, ("log_prob",), True),
        Option("entropy with gradient", {}, ("entropy",), True, target=1.15),
        Option(f"teacher's top {TEACHER_CLASSES}", {}, teacher=True),
        *(
            Option(f"{share:.0%} masked", {"skip_masked": True}, masked=share)
            for share in MASKED_SHARES
        ),
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
    config = FusedCEConfig(strategy=strategy, **option.config)
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

    phases = PhaseTimes() if option.timed else UNTIMED

    def run(problem: Problem, mark: Callable[[], None]) -> Tensor:
        problem.reset()
        mark()
        made = linear_cross_entropy(
            problem.hidden,
            problem.weight,
            labels,
            token_weights=weights,
            vocab_start=0,
            config=config,
            outputs=option.outputs,
            differentiable=option.differentiable,
            teacher=teacher,
            unmasked=unmasked,
            open_grad_weight=problem.open_grad_weight,
            phases=phases,
        ).outputs
        total = (made.loss * grad_loss).sum()
        if option.differentiable:
            for name in option.outputs:
                total = total + (getattr(made, name) * other).sum()
        one = torch.ones((), device=labels.device)
        return backward(total, one, problem, mark)

    return Variant(option.name, "ours", run, config=config)


def measure(
    given: argparse.Namespace, shape: str, num_tokens: int, world: World
) -> list[dict[str, Any]]:
    """Rows of one cell."""
    hidden_size, vocab = SHAPES[shape]
    problem = Problem(
        world, num_tokens=num_tokens, hidden_size=hidden_size, vocab=vocab, dtype=torch.bfloat16
    )
    rows = []
    for strategy in given.strategies:
        options = {o.name: o for o in options_of(vocab) if o.fits(strategy)}
        if given.options:
            options = {name: o for name, o in options.items() if name in (PLAIN, *given.options)}
        variants = {
            name: variant_of(option, strategy, problem, vocab) for name, option in options.items()
        }
        for variant in variants.values():
            turn(variant, problem, world, 1, 1)
        samples: dict[str, list[float]] = {name: [] for name in options}
        ratios: dict[str, list[float]] = {name: [] for name in options}
        # The clock drifts with the chip's temperature: each option stands between two turns of the plain.
        for order in block_order([name for name in options if name != PLAIN], given.blocks, 0):
            before = turn_ms(variants[PLAIN], problem, world, given.steps)
            for name in order:
                of_option = turn_ms(variants[name], problem, world, given.steps)
                after = turn_ms(variants[PLAIN], problem, world, given.steps)
                samples[name].append(of_option)
                samples[PLAIN].append(after)
                ratios[name].append(2 * of_option / (before + after))
                before = after
        for name, option in options.items():
            over = ratios[name] or [1.0]
            rows.append(
                {
                    "shape": shape, "tokens": num_tokens, "strategy": strategy, "option": name,
                    "ms": round(statistics.median(samples[name]), 3),
                    "over_plain": round(statistics.median(over), 4),
                    "spread": round(max(over) - min(over), 4),
                    "target": None if name == PLAIN or option.masked else option.target,
                    "masked": option.masked,
                }
            )  # fmt: skip
            print(table([rows[-1]]).splitlines()[-1], flush=True)
    return rows


def turn_ms(variant: Variant, problem: Problem, world: World, steps: int) -> float:
    return statistics.median(sum(span) for span in turn(variant, problem, world, 1, steps))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| shape | tokens | strategy | option | ms | over plain | target | spread of the ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        if row["masked"]:
            target = f"{1 - row['masked']:.2f} of the tokens"
        lines.append(
            f"| {row['shape']} | {row['tokens']} | {row['strategy']} | {row['option']} | "
            f"{row['ms']:.2f} | {row['over_plain']:.3f} | {target} | {row['spread']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", type=shape_name, default=["llama-3-8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=["store", "grad_in_forward", "recompute"],
        default=["store"],
    )
    parser.add_argument("--options", nargs="+", help="only these, beside the plain loss")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--out", type=Path, help="JSON to write, and its table beside it")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    given = parse_arguments(words)
    if not torch.cuda.is_available():
        print("benchmark_options: needs a GPU: run it on one, there is none here", file=sys.stderr)
        return 2
    known = [option.name for option in options_of(1000)]
    unknown = set(given.options or ()) - set(known)
    if unknown:
        print(
            f"benchmark_options: no option {', '.join(sorted(unknown))}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    world = World()
    rows = []
    for shape in given.shapes:
        for num_tokens in given.tokens:
            rows += measure(given, shape, num_tokens, world)
    world.close()
    if given.out:
        made_by = {
            "commit": commit(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "words": {name: value for name, value in vars(given).items() if name != "out"},
        }
        text = json.dumps({"made_by": made_by, "rows": rows}, indent=1) + "\n"
        given.out.write_text(text)
        head = f"# What an option costs\n\n{json.dumps(made_by)}\n\n"
        given.out.with_suffix(".md").write_text(head + table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
