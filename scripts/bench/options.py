"""What each option of the loss costs beside the plain loss, with every strategy."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.head import tokens
from megatron_fused_ce.losses.outputs import differentiable_of
from megatron_fused_ce.ops.labels import SeveralLabels
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.loss import Loss, config_of, loss_of, wide
from megatron_fused_ce.scripts.bench.problem import Case, Op, Outputs, World

PLAIN, TEACHER_CLASSES = "plain", 64
PADDING = 200  # columns of a padded vocabulary


class Option(NamedTuple):
    """What is asked for beside the plain loss."""

    config: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...] = ()
    differentiable: bool = False
    teacher: bool = False
    upstream: str = "grad_loss"


def options_of(vocab: int) -> dict[str, Option]:
    """Every option by its name."""
    skip, softcap = (("skip_masked", True),), ("logit_softcap", 30.0)
    return {
        PLAIN: Option(),
        "logit scale": Option((("logit_scale", 0.5),)),
        "ignore_index": Option((("ignore_index", -100),)),
        "z-loss": Option((("z_loss", 1e-4),)),
        "masked padding": Option((("true_vocab_size", vocab - PADDING),)),
        "softcap": Option((softcap,)),
        "softcap, rows": Option((softcap, ("logits_backend", "gemm_rows"))),
        "label smoothing": Option((("label_smoothing", 0.1),)),
        "logits rounded": Option((("logit_precision", "activations"),)),
        "accuracy": Option(outputs=("correct",)),
        "lse, log-probability": Option(outputs=("lse", "log_prob")),
        "predicted ids": Option(outputs=("predicted",)),
        "entropy": Option(outputs=("entropy",)),
        "log-probability with gradient": Option(outputs=("log_prob",), differentiable=True),
        "entropy with gradient": Option(outputs=("entropy",), differentiable=True),
        f"teacher's top {TEACHER_CLASSES}": Option(teacher=True),
        "half masked": Option(skip, upstream="half"),
        "nothing masked, skipping on": Option(skip, upstream="whole"),
    }


class WithOptions(Loss):
    def __init__(self, cell: Cell, *world_dtype: Any) -> None:
        super().__init__(cell, *world_dtype)
        T = self.num_tokens
        self.labels %= cell.vocab - PADDING
        # Not the loss's: that and the log-probability's would cancel, and zeros make products fast.
        self.other = self.uniform(T)
        self.teacher = self.ids(T, TEACHER_CLASSES), self.normal(T, TEACHER_CLASSES).log_softmax(-1)
        self.whole = self.token_weights.clamp(min=0.5)
        self.half = self.whole * (self.uniform(T) < 0.5)
        # What belongs to a step's input (the mask's count too) is made outside of it.
        masks = {"whole": self.whole, "half": self.half}
        self.masks = {name: (of, tokens.count(of.reshape(1, -1), None)) for name, of in masks.items()}

    def definition(self, kind: Option, hidden: Tensor, weight: Tensor, part: slice) -> Outputs:
        config = FusedCEConfig(**dict(kind.config))
        z, cap = wide(hidden @ weight.t()) * config.logit_scale, config.logit_softcap
        z = (z if cap is None else cap * torch.tanh(z / cap))[:, : config.true_vocab_size]
        smoothing = config.label_smoothing * z.shape[1] / (z.shape[1] - 1)
        loss = F.cross_entropy(z, self.labels[part], reduction="none", label_smoothing=smoothing)
        lse, log_p = z.logsumexp(-1), z.log_softmax(-1)
        if kind.teacher:
            ids, log_probs = (of[part] for of in self.teacher)
            loss = -(log_probs.to(z.dtype).exp() * log_p.gather(1, ids)).sum(-1)
        loss = loss + (config.z_loss or 0.0) * lse**2
        if kind.upstream == "half":
            loss = loss.masked_fill(self.half[part] == 0, 0.0)
        found = {"loss": loss, "lse": lse, "log_prob": log_p.gather(1, self.labels[part, None])[:, 0]}
        return found | ({"entropy": -(log_p.exp() * log_p).sum(-1)} if "entropy" in kind.outputs else {})


def _case(world: World, name: str, option: Option, strategy: str) -> Case:
    config, told = config_of(strategy, **dict(option.config)), dict[str, Any]()

    def run(problem: WithOptions) -> Outputs:
        more: dict[str, Any] = {"outputs": option.outputs}
        if option.differentiable:
            more["differentiable"] = differentiable_of(option.outputs)
        if option.teacher:
            labels = torch.full_like(problem.labels, -1)
            more |= {"other_targets": SeveralLabels(*problem.teacher), "labels": labels}
        if config.skip_masked:
            more["token_weights"], more["unmasked"] = problem.masks[option.upstream]
        return loss_of(world, config, told, problem, **more)

    grads = [("loss", option.upstream), *((name, "other") for name in option.outputs * option.differentiable)]
    over = f"{PLAIN}, {strategy}"
    return Case(f"{name}, {strategy}", run=run, kind=option, grads=tuple(grads), base=over)


def cases_of(given: argparse.Namespace, cell: Cell, world: World) -> list[Case]:
    return [
        _case(world, name, option, strategy)
        for strategy in given.strategies
        for name, option in options_of(cell.vocab).items()
        if not (strategy.startswith("grad_in_forward") and option.differentiable)
    ]


OP = Op(WithOptions, cases_of)
